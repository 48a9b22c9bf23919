"""Listening sockets, and whether a port can be had."""

import ipaddress
import socket
from typing import Final
from urllib.parse import urlsplit

BACKLOG: Final = 2048
PORT_MAX: Final = 65535


class CannotListen(Exception):
    """The address cannot be served on."""


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 takes a free one. Raises CannotListen."""
    if not 0 <= port <= PORT_MAX:  # getaddrinfo would wrap it round
        raise CannotListen(f"{port} is no port")
    try:
        [(family, kind, protocol, _, address), *_] = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise CannotListen(f"{host}:{port} is no address to serve on: {error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Accepted connections inherit it; without it delayed ACKs cost 40 ms on a first token.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise CannotListen(f"port {port} on {host} cannot be used: {error.strerror}") from error
    listener.setblocking(False)
    return listener


def claim_port(host: str, port: int) -> int:
    """Return `port` if it is free at this moment, and a free one for 0. Raises CannotListen."""
    with listen(host, port) as listener:
        claimed: int = listener.getsockname()[1]
        return claimed


def reserve(host: str, port: int) -> socket.socket:
    """Return a socket that keeps a port for a server yet to come, until it is closed.

    It is bound and does not listen. On Linux a server can then listen there all the same, and again
    after a restart, but the kernel gives the port to nobody else, least of all to an outgoing
    connection. Raises CannotListen.
    """
    [(family, kind, protocol, _, address), *_] = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    keeper = socket.socket(family, kind, protocol)
    try:
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        keeper.bind(address)
    except OSError as error:
        keeper.close()
        raise CannotListen(f"port {port} on {host} cannot be used: {error.strerror}") from error
    return keeper


def is_loopback(host: str) -> bool:
    """Tell whether only this machine can reach `host`."""
    if host == "localhost" or host.endswith(".localhost"):  # RFC 6761
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_local_origin(origin: str) -> bool:
    """Tell whether a URL names this machine."""
    try:
        host = urlsplit(origin).hostname
    except ValueError:
        return False
    return host is not None and is_loopback(host)


def is_unspecified(host: str) -> bool:
    """Tell whether `host` stands for every address of this machine, and so names none."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def http_url(host: str, port: int) -> str:
    """Return the URL of an address, without a path."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
