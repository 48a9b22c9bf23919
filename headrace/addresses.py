"""Where the tiers of `headrace up` serve clients: their ports, and the URLs that clients are told.

Rule: ports are chosen once, so a process that is brought back is found where it was.
"""

import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from string import Formatter
from typing import Final

from headrace.sockets import PORT_MAX, CannotListen, claim_port, http_url, is_loopback, reserve
from headrace.up_settings import UpSettings

_WILDCARDS: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - what users write
_FIELDS: Final = frozenset({"port", "number"})
_TRIES: Final = 200


class Refused(Exception):
    """The system cannot be started as asked."""


@dataclass(frozen=True, slots=True)
class Place:
    """The port that a process serves clients on, and the URL by which they reach it."""

    port: int
    url: str


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where the doors (a gateway, or ingress) and the streamers serve; each in order."""

    doors: tuple[Place, ...]
    streamers: tuple[Place, ...] = ()

    @property
    def endpoints(self) -> tuple[str, ...]:
        """The base URLs that clients send their requests to."""
        return tuple(place.url for place in self.doors)

    @property
    def websockets(self) -> tuple[str, ...]:
        """The URLs at which WebSockets are served."""
        return tuple(_websocket(place.url) for place in self.streamers or self.doors)


def check(wanted: UpSettings) -> None:
    """Raise Refused for addresses that would be unsafe, or of no use to clients."""
    if not is_loopback(wanted.host) and not wanted.has_keys:
        raise Refused(
            f"serving {wanted.host} without keys would open the models to everybody who reaches"
            " it: set HEADRACE_API_KEY, or [[keys]] in headrace.toml, or serve 127.0.0.1"
        )
    if not wanted.split:
        if any(each is not None for each in (wanted.ingress, wanted.streamers, wanted.public_url)):
            raise Refused("--ingress, --streamers and --public-url are for --split: without it"
                          " there is one gateway, which is both")  # fmt: skip
        return
    if wanted.public_url is not None:
        _check_template(wanted.public_url, several=wanted.streamers_wanted > 1)
    elif wanted.host in _WILDCARDS:
        raise Refused(
            f"clients are sent to the streamers, and {wanted.host} is no address to send them to:"
            " say --public-url, such as 'http://llm.example:{port}'"
        )


def choose(wanted: UpSettings) -> Addresses:
    """Choose ports: the first door has the one that was asked for, the others what follows free.

    Raises CannotListen.
    """
    ports = [claim_port(wanted.host, wanted.port)]
    if not wanted.split:
        return Addresses(_doors(wanted, ports))
    for _ in range(wanted.ingress_wanted + wanted.streamers_wanted - 1):
        ports.append(_next_port(wanted.host, ports))
    own = ports[wanted.ingress_wanted :]
    streamers = (_streamer(wanted, number, port) for number, port in enumerate(own, start=1))
    return Addresses(_doors(wanted, ports[: wanted.ingress_wanted]), tuple(streamers))


def keep(host: str, addresses: Addresses) -> list[socket.socket]:
    """Keep the ports for their processes as long as the sockets are held. Raises CannotListen."""
    if sys.platform != "linux":  # elsewhere the processes themselves could not listen then
        return []
    return [reserve(host, place.port) for place in (*addresses.doors, *addresses.streamers)]


def _doors(wanted: UpSettings, ports: Sequence[int]) -> tuple[Place, ...]:
    host = _WILDCARDS.get(wanted.host, wanted.host)
    return tuple(Place(port, http_url(host, port)) for port in ports)


def _streamer(wanted: UpSettings, number: int, port: int) -> Place:
    if wanted.public_url is None:
        return Place(port, http_url(wanted.host, port))
    return Place(port, wanted.public_url.format(port=port, number=number).rstrip("/"))


def _next_port(host: str, taken: Sequence[int]) -> int:
    for port in range(taken[-1] + 1, min(taken[-1] + _TRIES, PORT_MAX) + 1):
        try:
            return claim_port(host, port)
        except CannotListen:
            continue
    raise CannotListen(f"no port after {taken[-1]} on {host} is free")


def _check_template(template: str, *, several: bool) -> None:
    try:
        fields = {name for _, name, _, _ in Formatter().parse(template) if name is not None}
        template.format(port=1, number=1)
    except (ValueError, KeyError, IndexError, AttributeError):
        fields = {"?"}
    if not fields <= _FIELDS or not template.startswith(("http://", "https://")):
        raise Refused(
            f"--public-url {template!r} is a URL, in which {{port}} and {{number}} stand for a"
            " streamer's own"
        )
    if several and not fields:
        raise Refused(
            "each streamer needs a URL of its own: --public-url must hold {port} or {number}"
        )


def _websocket(url: str) -> str:
    return "ws" + url.removeprefix("http") + "/v1/chat/completions"
