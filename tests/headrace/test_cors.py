"""Which pages may read the answers."""

import pytest

from headrace.cors import Cors

ORIGIN = "https://a.example"
PAGE = (b"origin", ORIGIN.encode())
ASKS = (b"access-control-request-method", b"POST")
NAMES = (b"access-control-request-headers", b"authorization,content-type")


def test_without_an_origin_nothing_is_added() -> None:
    assert Cors({"*"}, keyless=False).headers([(b"host", b"x")]) == {}


@pytest.mark.parametrize("origins", [{ORIGIN}, {"*"}, {"https://b.example", ORIGIN}])
def test_a_configured_origin_may_read(origins: set[str]) -> None:
    headers = Cors(origins, keyless=False).headers([PAGE])
    assert headers["access-control-allow-origin"] == ORIGIN
    assert headers["vary"] == "origin"
    exposed = headers["access-control-expose-headers"].split(", ")
    assert {"x-request-id", "retry-after", "x-ratelimit-remaining-tokens"} <= {*exposed}
    assert "access-control-allow-credentials" not in headers


@pytest.mark.parametrize("origins", [set(), {"https://b.example"}, {"https://a.example:444"}])
def test_another_origin_may_not(origins: set[str]) -> None:
    cors = Cors(origins, keyless=False)
    assert cors.headers([PAGE]) == {}
    assert cors.preflight([PAGE, ASKS]) is None


@pytest.mark.parametrize(
    ("origin", "may"),
    [
        ("http://127.0.0.1:3000", True),
        ("http://localhost", True),
        ("http://[::1]:8080", True),
        ("null", False),
        (ORIGIN, False),
        ("http://localhost.evil.example", False),
    ],
)
def test_without_keys_this_machines_pages_may_and_no_others(origin: str, may: bool) -> None:
    headers = Cors({"*"}, keyless=True).headers([(b"origin", origin.encode())])
    assert bool(headers) is may


def test_a_preflight_is_answered_with_what_it_asks_for() -> None:
    answer = Cors({ORIGIN}, keyless=False).preflight([PAGE, ASKS, NAMES])
    assert answer is not None
    assert answer["access-control-allow-headers"] == "authorization,content-type"
    assert answer["access-control-allow-methods"] == "GET, POST, DELETE"


def test_an_options_request_that_asks_for_no_method_is_no_preflight() -> None:
    assert Cors({ORIGIN}, keyless=False).preflight([PAGE]) is None
