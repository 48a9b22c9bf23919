"""How long a request may take, and how that is said. Rule: the same bounds, whatever carries it."""

import math
import re
import time
from typing import Final

from headrace.topology import DEADLINE_S_MAX
from schemas.errors import InvalidRequest

DEADLINE_S: Final = 600.0
_DECIMAL: Final = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")


def is_timeout(seconds: float) -> bool:
    """Tell whether a request may ask for so much time: above 0, at most `DEADLINE_S_MAX`."""
    return 0 < seconds <= DEADLINE_S_MAX


def timeout_s_of(text: str | None, *, default_s: float | None = None) -> float:
    """Return the seconds that `x-request-timeout` asks for, in decimal notation; without it
    `default_s`, else 600. Raises InvalidRequest.
    """
    if text is None:
        return default_s or DEADLINE_S
    if not _DECIMAL.fullmatch(text) or not is_timeout(float(text)):
        raise bad_timeout("x-request-timeout")
    return float(text)


def bad_timeout(name: str) -> InvalidRequest:
    """Return what is answered where `name` is no such time."""
    return InvalidRequest(f"'{name}' is seconds, above 0, at most {DEADLINE_S_MAX}.", param=name)


def time_to_live(deadline_s: float) -> dict[str, str]:
    """Return the header that takes a request out of the queue at its deadline, or within a second
    after it: the broker counts in whole seconds, the worker and the streamer exactly."""
    return {"Nats-TTL": str(max(1, math.ceil(deadline_s - time.time())))}
