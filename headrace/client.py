"""nats-py's client, mended for `headrace/bus.py`. Rule: it never gives up and keeps nothing unsent.

nats-py closes for good when the server names an error, does not reconnect before it has sent all
that was to be sent, and sends after a reconnect what was published before. These are its private
methods; its version is pinned.
"""

import asyncio
import logging
import ssl
from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import ParseResult, urlsplit

import nats.errors
from nats.aio.client import Client, Srv
from nats.aio.transport import TcpTransport

from headrace.messages import BusSettings

log = logging.getLogger(__name__)

RECONNECT_WAIT_S: Final = 0.1


class _Transport(TcpTransport):
    """A connection that is cut when it is closed.

    nats-py waits until all is sent that was to be sent, which to a machine that is gone takes as
    long as TCP tries: a quarter of an hour, in which it does not reconnect.
    """

    async def connect(self, uri: ParseResult, buffer_size: int, connect_timeout: int) -> None:
        self.close()  # one that was tried in vain would be left to the garbage collector
        await super().connect(uri, buffer_size, connect_timeout)

    def close(self) -> None:
        if self._io_writer is not None:
            self._io_writer.transport.abort()

    def __bool__(self) -> bool:
        return True  # else nats-py puts one of its own in its place


class PatientClient(Client):
    """nats-py's client without its ways to give up or to keep what was published."""

    def __init__(self) -> None:
        super().__init__()
        self._transport = _Transport()  # type: ignore[no-untyped-call]

    async def _process_err(self, err_msg: str) -> None:
        if "permissions violation" in err_msg:
            log.warning("the broker says: %s", err_msg)
            return
        log.debug("the broker says: %s", err_msg)
        await self._process_op_err(nats.errors.Error(err_msg))

    async def _connect_to_server(self, s: Srv) -> None:
        # Those of the connection before: two readers would read one stream.
        for task in (self._reading_task, self._ping_interval_task, self._flusher_task):
            if task is not None:
                task.cancel()
        self.forget_unsent()
        await super()._connect_to_server(s)

    async def _attempt_reconnect(self) -> None:
        while True:
            try:
                return await super()._attempt_reconnect()
            except Exception as error:  # nats-py foresees some kinds only, and its task would end
                log.warning("reconnecting failed, is tried again: %r", error)
            await asyncio.sleep(RECONNECT_WAIT_S)

    def forget_unsent(self) -> None:
        """Drop what was not sent: those who published it have been told that it failed."""
        self._pending = []
        self._pending_data_size = 0


def access(settings: BusSettings) -> dict[str, Any]:
    """Return nats-py's options for these servers and the right to use them. Raises OSError for
    a file that cannot be read, ValueError for what is no URL and where none is named: nats-py
    would look for a server for ever, without a pause."""
    urls = [url.strip() for url in settings.url.split(",") if url.strip()]
    if not urls:
        raise ValueError("no URL of it is named")
    options: dict[str, Any] = {"servers": urls, **login(urls)}
    if settings.creds:
        options["user_credentials"] = settings.creds
    if settings.ca:
        options["tls"] = ssl.create_default_context(cafile=settings.ca)
    return options


def login(urls: Sequence[str]) -> dict[str, str]:
    """Return the user and password that the URLs name: servers that a cluster tells of itself have
    neither in their URLs."""
    named = {(url.username, url.password) for url in map(urlsplit, urls) if url.username}
    if len(named) != 1:
        return {}
    [(user, password)] = named
    if user is None or password is None:
        return {"token": user or ""}
    return {"user": user, "password": password}
