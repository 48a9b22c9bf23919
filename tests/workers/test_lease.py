"""When a lease may have lapsed: another worker may have been given the request."""

from workers.lease import SURE_S, Lease

SOON_S = 0.9 * SURE_S


def test_a_lease_that_is_renewed_in_time_stays_sure() -> None:
    lease = Lease("ack", 100.0)
    now_s = 100.0
    for _ in range(10):
        now_s += SOON_S
        assert not lease.lapsed(now_s=now_s)
        lease.renewed(sent_s=now_s, heard_s=now_s)


def test_a_lease_that_nothing_renews_lapses() -> None:
    lease = Lease("ack", 100.0)
    assert not lease.lapsed(now_s=100.0 + SOON_S)
    assert lease.lapsed(now_s=100.1 + SURE_S)


def test_a_lease_that_was_renewed_too_late_is_in_doubt_for_good() -> None:
    lease = Lease("ack", 100.0)
    late_s = 100.1 + SURE_S
    lease.renewed(sent_s=late_s, heard_s=late_s)
    assert lease.lapsed(now_s=late_s)
    lease.renewed(sent_s=late_s + 1, heard_s=late_s + 1)
    assert lease.lapsed(now_s=late_s + 1)


def test_a_renewal_counts_from_when_it_was_sent_not_from_when_it_was_confirmed() -> None:
    lease = Lease("ack", 100.0)
    lease.renewed(sent_s=100.1, heard_s=100.0 + SOON_S)
    assert lease.lapsed(now_s=100.2 + SURE_S)


def test_a_renewal_that_may_have_come_too_late_is_no_proof() -> None:
    lease = Lease("ack", 100.0)
    lease.renewed(sent_s=100.0 + SOON_S, heard_s=100.1 + SURE_S)
    assert lease.lapsed(now_s=100.1 + SURE_S)
