"""What the ledger finds in a stream."""

from chaos.faults import Fault, Kind
from chaos.ledger import Happened, Tally, percentile, recoveries, totals, was_given_up
from chaos.orders import CHAT, Expected, Manner, Order, expected_of

PIECES = [b"a ", b"b ", b"c ", b"d "]


def _tally(manner: Manner = Manner.READ, expected: Expected | None = None) -> Tally:
    order = Order("0.0", manner, CHAT, {}, None, None, stop_after=0)
    tally = Tally(order, expected or expected_of(PIECES), now_s=100.0)
    tally.accepted("req_1", now_s=100.0)
    return tally


def _hear(tally: Tally, *events: tuple[int, str], at_s: float = 100.0) -> None:
    for seq, text in events:
        tally.token(seq, text, now_s=at_s)


def test_a_stream_whose_every_token_came_once_has_no_fault() -> None:
    tally = _tally()
    _hear(tally, (0, "a "), (1, "b "), (2, "c "), (3, "d "))
    tally.usage(4)
    tally.end(now_s=101.0)
    assert not tally.failed
    assert tally.tokens == 4


def test_a_hole_is_counted_as_lost_tokens() -> None:
    tally = _tally()
    _hear(tally, (0, "a "), (3, "d "))
    tally.end(now_s=101.0)
    assert (tally.lost, tally.repeated, tally.wrong) == (2, 0, 0)
    assert tally.failed


def test_an_end_before_the_last_token_is_a_loss() -> None:
    tally = _tally()
    _hear(tally, (0, "a "), (1, "b "))
    tally.end(now_s=101.0)
    assert tally.lost == 2


def test_a_token_that_came_before_is_a_repeat_whatever_it_says() -> None:
    tally = _tally()
    _hear(tally, (0, "a "), (1, "b "), (1, "b "), (0, "x"), (2, "c "), (3, "d "))
    tally.end(now_s=101.0)
    assert (tally.lost, tally.repeated, tally.wrong) == (0, 2, 0)
    assert tally.failed


def test_another_text_is_wrong_and_so_is_one_beyond_the_end() -> None:
    tally = _tally()
    _hear(tally, (0, "a "), (1, "B "), (2, "c "), (3, "d "), (4, "e "))
    tally.end(now_s=101.0)
    assert (tally.lost, tally.repeated, tally.wrong) == (0, 0, 2)


def test_another_count_in_the_usage_is_wrong() -> None:
    tally = _tally()
    _hear(tally, (0, "a "), (1, "b "), (2, "c "), (3, "d "))
    tally.usage(5)
    tally.end(now_s=101.0)
    assert tally.failed


def test_who_left_or_cancelled_misses_nothing() -> None:
    left, cancelled = _tally(Manner.LEAVE), _tally(Manner.CANCEL)
    left.left = cancelled.cancelled = True
    for tally in (left, cancelled):
        _hear(tally, (0, "a "))
        tally.end(now_s=101.0)
        assert not tally.failed


def test_a_request_without_an_end_and_one_with_an_error_have_failed() -> None:
    open_, refused = _tally(), _tally()
    refused.end(now_s=101.0, error="worker_lost: gone")
    assert open_.failed
    assert refused.failed
    found = totals([open_, refused])
    assert (found.unanswered, found.errors) == (1, 1)


def test_a_request_that_is_asked_again_begins_anew() -> None:
    tally = _tally()
    _hear(tally, (0, "a "), (1, "b "))
    tally.accepted("req_2", now_s=100.0)
    _hear(tally, (0, "a "), (1, "b "), (2, "c "), (3, "d "))
    tally.end(now_s=101.0)
    assert not tally.failed
    assert tally.tokens == 4


def test_two_requests_for_one_key_are_a_fault_and_one_that_is_attached_to_is_not() -> None:
    order = Order("0.0", Manner.READ, CHAT, {}, None, None, stop_after=0, key="k")
    attached, twice = (Tally(order, expected_of(PIECES), now_s=100.0) for _ in range(2))
    for tally, again in ((attached, "req_1"), (twice, "req_2")):
        tally.accepted("req_1", now_s=100.0)
        tally.accepted(again, now_s=100.0)
        _hear(tally, (0, "a "), (1, "b "), (2, "c "), (3, "d "))
        tally.end(now_s=101.0)
    assert not attached.failed
    assert twice.failed


def test_a_whole_answer_is_compared_as_one_text() -> None:
    right, wrong = _tally(Manner.WHOLE), _tally(Manner.WHOLE)
    right.whole("a b c d ", now_s=101.0)
    wrong.whole("a b c c ", now_s=101.0)
    for tally in (right, wrong):
        tally.end(now_s=101.0)
    assert not right.failed
    assert wrong.failed


def test_half_a_character_makes_no_event_and_its_other_half_the_whole_one() -> None:
    whole = "🙂".encode()
    expected = expected_of([b"a", b"b" + whole[:2], whole[2:], b"c"])
    assert expected.events == ((0, "a"), (1, "b"), (2, "🙂"), (3, "c"))
    assert expected_of([whole[:1], whole[1:]]).events == ((1, "🙂"),)
    assert expected.tokens == 4


def _happened(kind: Kind, target: str, began_s: float, mended_s: float) -> Happened:
    return Happened(Fault(began_s, kind, target, mended_s - began_s), began_s, mended_s)


def test_a_wait_over_a_workers_death_is_a_recovery_from_it() -> None:
    tally = _tally()
    _hear(tally, (0, "a "), at_s=100.0)
    _hear(tally, (1, "b "), at_s=103.5)
    kill = _happened(Kind.KILL, "worker-1", 100.5, 102.0)
    [found] = recoveries([kill], [tally])
    assert (found.worker, found.request, found.took_s, found.alone) == (
        "worker-1",
        "req_1",
        3.0,
        True,
    )


def test_a_recovery_during_another_fault_is_not_alone() -> None:
    tally = _tally()
    _hear(tally, (0, "a "), at_s=100.0)
    _hear(tally, (1, "b "), at_s=103.5)
    kill = _happened(Kind.KILL, "worker-1", 100.5, 102.0)
    others = [
        _happened(Kind.FREEZE, "nats", 99.0, 100.6),
        _happened(Kind.CUT, "gateway-1", 103.0, 104.0),
    ]
    for other in others:
        [found] = recoveries([kill, other], [tally])
        assert not found.alone
    before = _happened(Kind.FREEZE, "nats", 99.0, 100.4)
    assert recoveries([kill, before], [tally])[0].alone


def test_a_steady_stream_and_a_wait_at_another_time_are_no_recoveries() -> None:
    tally = _tally()
    _hear(tally, (0, "a "), at_s=100.4)
    _hear(tally, (1, "b "), at_s=100.8)
    _hear(tally, (2, "c "), at_s=105.0)
    kill = _happened(Kind.KILL, "worker-1", 100.5, 102.0)
    freeze = _happened(Kind.FREEZE, "worker-1", 101.0, 104.0)
    assert recoveries([kill, freeze], [tally]) == []


def test_a_dead_letter_needs_three_deaths_while_its_client_waited() -> None:
    tally = _tally()
    tally.end(now_s=120.0, error="worker_lost: The request was given up.")
    kills = [_happened(Kind.KILL, f"worker-{n}", 100.0 + n, 102.0 + n) for n in (1, 2, 3)]
    assert was_given_up(tally, kills)
    assert not was_given_up(tally, kills[1:])
    late = _happened(Kind.KILL, "worker-1", 121.0, 122.0)
    freeze = _happened(Kind.FREEZE, "worker-1", 105.0, 106.0)
    gateway = _happened(Kind.KILL, "gateway-1", 105.0, 106.0)
    assert not was_given_up(tally, [*kills[1:], late, freeze, gateway])
    other = _tally()
    other.end(now_s=120.0, error="engine_error: no")
    assert not was_given_up(other, kills)


def test_percentiles_are_of_what_there_is() -> None:
    assert percentile([], 0.5) is None
    assert percentile([3.0], 0.99) == 3.0
    assert percentile([float(n) for n in range(100)], 0.99) == 99.0
    assert percentile([4.0, 1.0, 3.0, 2.0], 0.5) == 3.0
