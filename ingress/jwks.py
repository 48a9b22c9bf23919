"""Where the keys that sign tokens come from: a file or a URL, read again as they rotate.

A file is looked at each second. A URL is asked every five minutes, and when a token names a key
that is not in the set: then at most every ten seconds, so that junk costs nobody a request. Keys
stay in use until another set has been read.
"""

import asyncio
import logging
import time
import urllib.request
from collections.abc import Callable
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Any, Final

from headrace.tenant_settings import JwtSettings
from ingress.jwt import BadKeys, Verifier, read_jwks

log = logging.getLogger(__name__)

FILE_S: Final = 1.0
URL_S: Final = 300.0
RETRY_S: Final = 10.0
TIMEOUT_S: Final = 5.0
BYTES_MAX: Final = 1024 * 1024


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """The keys are where the operator said, and nowhere that another server says."""

    def redirect_request(self, *_: Any) -> None:
        return None


class KeySet:
    """Keeps a verifier's keys current. `refresh` it once, and run `follow` as a task."""

    def __init__(
        self, settings: JwtSettings, verifier: Verifier, *, clock: Callable[[], float]
    ) -> None:
        self._settings = settings
        self._verifier = verifier
        self._clock = clock
        self._read_at_s = float("-inf")
        self._data = b""
        self._reading = asyncio.Lock()

    async def refresh(self, *, after_s: float = RETRY_S) -> bool:
        """Read the keys unless that was done a moment ago; return whether they are others now."""
        before = self._data
        async with self._reading:
            if self._clock() - self._read_at_s < after_s:
                return self._data != before  # who was faster has read for all that wait
            self._read_at_s = self._clock()
            try:
                data = await asyncio.to_thread(self._fetch)
                if data == self._data:
                    return False
                keys = read_jwks(data, self._settings.used)
            except (OSError, ValueError, HTTPException, BadKeys) as error:
                log.warning("the keys that sign tokens cannot be read: %s", error)
                return False
            self._data = data
            self._verifier.use(keys)
            log.info("tokens are verified with %d keys", len(keys))
            return True

    async def follow(self) -> None:
        """Read them again and again; for ever."""
        every_s = FILE_S if self._settings.jwks_file else URL_S
        while True:
            # The first one may have failed: a provider that is away is asked again soon.
            await asyncio.sleep(every_s if self._data else min(every_s, RETRY_S))
            await self.refresh(after_s=0.0)

    def _fetch(self) -> bytes:
        if self._settings.jwks_file is not None:
            return Path(self._settings.jwks_file).read_bytes()
        url = self._settings.jwks_url or ""
        opener = urllib.request.build_opener(_NoRedirects)
        with opener.open(url, timeout=TIMEOUT_S) as answer:  # https, or loopback: as configured
            return _whole(answer)


def _whole(answer: HTTPResponse) -> bytes:
    """Return the body. Raises BadKeys, and TimeoutError: the socket's own bounds each piece only,
    and clients with tokens of unknown keys wait meanwhile."""
    give_up_s = time.monotonic() + TIMEOUT_S
    data = b""
    while piece := answer.read1(BYTES_MAX):
        data += piece
        if len(data) > BYTES_MAX:
            raise BadKeys(f"the set is over {BYTES_MAX} bytes")
        if time.monotonic() > give_up_s:
            raise TimeoutError("the set has no end")
    return data
