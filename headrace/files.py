"""How many files a process may open, a connection being one. Rule: a bound on connections that the
limit of files does not hold is lowered and said, as a warning where an operator chose it, since an
accept that fails answers nobody."""

import logging
import resource
import sys
from dataclasses import replace
from typing import Final

from headrace.crowd import Bounds

log = logging.getLogger(__name__)

SPARE: Final = 512
"""Files beside the clients': the broker's connections, logs, tokenizers, the admin port's clients,
and those who are being turned away."""


def raise_limit() -> int:
    """Raise the process's limit of open files to what it may be at most; return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError) as error:  # a kernel may allow less than its hard limit
            log.warning("the limit of %d open files cannot be raised: %s", soft, error)
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def fitting(bounds: Bounds, *, files_max: int) -> Bounds:
    """Return the bounds that so many files can hold; half of few are spare."""
    room = files_max - min(SPARE, files_max // 2)
    return replace(bounds, connections_max=max(1, min(bounds.connections_max, room)))


def held(bounds: Bounds) -> Bounds:
    """Make room for connections, and return the bounds that there is room for."""
    files_max = raise_limit()
    found = fitting(bounds, files_max=files_max)
    if found != bounds:
        # Of a bound that nobody named it is no fault that it is lower here.
        log.log(
            logging.WARNING if bounds.chosen else logging.INFO,
            "%d connections cannot be held: this process may open %d files, so %d are taken; raise"
            " the limit (ulimit -n, LimitNOFILE) or set a lower --connections-max",
            *(bounds.connections_max, files_max, found.connections_max),
        )
    return found
