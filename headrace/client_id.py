"""A client's own `x-request-id`. Rule: it is logged beside ours and used for nothing else, so that
whoever has the one finds the other; clients choose it, and it may be the same each time.
"""

import logging
from collections.abc import Iterable
from typing import Final

log = logging.getLogger(__name__)

CHARACTERS_MAX: Final = 128
_VISIBLE: Final = bytes(byte if 0x21 <= byte <= 0x7E else ord("?") for byte in range(256))


def log_client_id(headers: Iterable[tuple[bytes, bytes]], request: str) -> None:
    """Log what a POST's client calls the request that we call `request`, if it calls it anything.

    At most `CHARACTERS_MAX` characters of it, a `?` for each that is not visible ASCII.
    """
    for name, value in headers:
        if name == b"x-request-id" and value:
            shown = value[:CHARACTERS_MAX].translate(_VISIBLE).decode("ascii")
            log.info("%s has its client's own x-request-id %s", request, shown)
            return
