"""Facts about how many connections there may be."""

import pytest

from headrace.crowd import Bounds, Crowd
from schemas.errors import ConnectionsFull, TooManyConnections


def test_beyond_the_bound_nobody_comes_in_until_one_leaves() -> None:
    crowd = Crowd(Bounds(connections_max=2))
    assert crowd.enter("a", "10.0.0.1") is None
    assert crowd.enter("b", "10.0.0.2") is None
    refusal = crowd.enter("c", "10.0.0.3")
    assert isinstance(refusal, ConnectionsFull)
    assert (refusal.status, refusal.retry_after_s) == (503, 1)
    crowd.leave("a")
    assert crowd.enter("c", "10.0.0.3") is None
    assert crowd.connections == 2
    assert crowd.refused == {"all": 1, "address": 0}


def test_an_address_has_so_many_and_others_are_not_kept_out() -> None:
    crowd = Crowd(Bounds(per_address_max=2))
    assert crowd.enter("a", "10.0.0.1") is None
    assert crowd.enter("b", "10.0.0.1") is None
    refusal = crowd.enter("c", "10.0.0.1")
    assert isinstance(refusal, TooManyConnections)
    assert (refusal.status, refusal.retry_after_s) == (429, 1)
    assert crowd.enter("d", "10.0.0.2") is None
    crowd.leave("b")
    assert crowd.enter("e", "10.0.0.1") is None
    assert crowd.refused == {"all": 0, "address": 1}


def test_by_default_one_address_may_have_all_and_none_is_counted() -> None:
    crowd = Crowd(Bounds(connections_max=1000))
    assert [crowd.enter(n, "10.0.0.1") for n in range(1000)] == [None] * 1000
    assert crowd.addresses == 0


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("2001:db8::1", "2001:db8::ffff:0:0:1"),
        ("fe80::1%eth0", "fe80::2%eth1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
    ],
)
def test_addresses_that_one_client_has_are_one(first: str, second: str) -> None:
    crowd = Crowd(Bounds(per_address_max=1))
    assert crowd.enter("a", first) is None
    assert crowd.enter("b", second) is not None


def test_another_network_and_what_has_no_address_are_others() -> None:
    crowd = Crowd(Bounds(per_address_max=1))
    hosts = ["2001:db8::1", "2001:db8:0:1::1", "10.0.0.1", None, None, "/run/socket", "/run/socket"]
    assert [crowd.enter(n, host) for n, host in enumerate(hosts)] == [None] * len(hosts)


def test_leaving_twice_counts_once_and_nothing_is_kept_of_who_left() -> None:
    crowd = Crowd(Bounds(per_address_max=5))
    for n in range(5):
        crowd.enter(n, "10.0.0.1")
    crowd.leave("nobody")
    for n in (*range(5), *range(5)):
        crowd.leave(n)
    assert (crowd.connections, crowd.addresses) == (0, 0)
