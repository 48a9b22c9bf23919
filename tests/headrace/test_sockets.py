"""Facts about addresses and ports."""

import socket
import sys

import pytest

from headrace.sockets import CannotListen, claim_port, http_url, is_loopback, listen, reserve


def test_a_port_in_use_is_refused_with_its_number() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CannotListen, match=f"port {port} on 127.0.0.1 cannot be used"):
            claim_port("127.0.0.1", port)
    assert claim_port("127.0.0.1", port) == port


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere ports are not kept")
def test_a_kept_port_goes_to_its_server_alone_before_and_between_its_lives() -> None:
    """A process's port went to somebody's outgoing connection before it was up."""
    port = claim_port("127.0.0.1", 0)
    with reserve("127.0.0.1", port):
        for _ in range(2):
            with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
                stranger.bind(("127.0.0.1", port))
            with listen("127.0.0.1", port) as server:
                assert server.getsockname()[1] == port
                with pytest.raises(CannotListen):
                    listen("127.0.0.1", port)


@pytest.mark.parametrize(("host", "port"), [("203.0.113.1", 0), ("127.0.0.1", 70000), ("a b", 1)])
def test_an_address_of_no_machine_is_refused(host: str, port: int) -> None:
    with pytest.raises(CannotListen):
        listen(host, port)


def test_listeners_send_small_writes_at_once() -> None:
    with listen("127.0.0.1", 0) as listener:
        assert listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_loopback_is_what_only_this_machine_reaches() -> None:
    assert all(map(is_loopback, ["127.0.0.1", "127.8.8.8", "::1", "localhost"]))
    assert not any(map(is_loopback, ["0.0.0.0", "::", "10.0.0.1", "example.org"]))


def test_a_url_brackets_ipv6() -> None:
    assert (http_url("::1", 80), http_url("h", 1)) == ("http://[::1]:80", "http://h:1")
