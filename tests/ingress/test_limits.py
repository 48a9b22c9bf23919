"""Buckets and open requests: never above the limit, nothing leaks, settling twice is harmless."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from ingress import limits
from ingress.limits import Account, Exceeded, Limits, Standing
from schemas.tenant import Policy

NOW_S = 1000.0
LATER_S = NOW_S + 600.0


def reserve(
    account: Account,
    rules: Limits,
    name: str = "r",
    *,
    tokens: int = 10,
    now_s: float = NOW_S,
    expires_s: float = LATER_S,
) -> Exceeded | None:
    limits.advance(account, rules, now_s=now_s)
    return limits.reserve(account, rules, request=name, tokens=tokens, expires_s=expires_s)


def test_a_policy_without_rates_limits_nothing() -> None:
    assert Limits.of(Policy(max_input_tokens=5)).none
    assert not Limits.of(Policy(concurrent_requests=0)).none


def test_five_of_fifty_fit_in_each_dimension() -> None:
    for rules in (
        Limits(requests_per_minute=5),
        Limits(requests_per_minute=600, burst=5),
        Limits(tokens_per_minute=50),
        Limits(concurrent_requests=5),
    ):
        account = Account()
        outcomes = [reserve(account, rules, f"r{n}") for n in range(50)]
        assert [outcome is None for outcome in outcomes] == [True] * 5 + [False] * 45


def test_what_is_refused_in_one_dimension_takes_from_none() -> None:
    rules = Limits(requests_per_minute=100, tokens_per_minute=5, concurrent_requests=9)
    account = Account()
    before = msgspec.msgpack.encode(account)
    for n in range(100):
        refusal = limits.reserve(account, rules, request=f"r{n}", tokens=10, expires_s=LATER_S)
        assert refusal == Exceeded("tokens", None)
    assert msgspec.msgpack.encode(account) == before


def test_a_refusal_says_when_the_request_will_fit() -> None:
    rules = Limits(requests_per_minute=6)
    account = Account()
    assert [reserve(account, rules, f"r{n}") for n in range(6)] == [None] * 6
    refusal = reserve(account, rules, "next")
    assert refusal == Exceeded("requests", 10.0)
    assert reserve(account, rules, "next", now_s=NOW_S + 9.9) is not None
    assert reserve(account, rules, "next", now_s=NOW_S + 10.0) is None


def test_a_request_that_can_never_fit_is_told_so() -> None:
    assert reserve(Account(), Limits(tokens_per_minute=5), tokens=6) == Exceeded("tokens", None)
    assert reserve(Account(), Limits(requests_per_minute=0)) == Exceeded("requests", None)
    assert reserve(Account(), Limits(concurrent_requests=0)) == Exceeded("concurrent", None)


def test_a_trickle_below_the_limit_is_never_refused() -> None:
    rules = Limits(requests_per_minute=60, tokens_per_minute=600, burst=1)
    account = Account()
    for second in range(600):
        assert reserve(account, rules, f"r{second}", tokens=10, now_s=NOW_S + second) is None
        limits.settle(account, request=f"r{second}", tokens=10)


def test_the_unused_part_comes_back_and_a_second_settlement_changes_nothing() -> None:
    rules = Limits(tokens_per_minute=100)
    account = Account()
    reserve(account, rules, tokens=100)
    assert limits.settle(account, request="r", tokens=30)
    after = msgspec.msgpack.encode(account)
    assert limits.standing_of_tokens(account, rules) == Standing(100, 70, 18.0)
    assert not limits.settle(account, request="r", tokens=0)
    assert msgspec.msgpack.encode(account) == after


def test_a_request_that_never_ran_gives_all_back() -> None:
    rules = Limits(requests_per_minute=1, tokens_per_minute=10, concurrent_requests=1)
    account = Account()
    assert reserve(account, rules) is None
    limits.settle(account, request="r", tokens=None)
    assert account == Account(updated_s=NOW_S)


def test_more_than_was_reserved_is_never_charged() -> None:
    rules = Limits(tokens_per_minute=100)
    account = Account()
    reserve(account, rules, tokens=10)
    limits.settle(account, request="r", tokens=5000)
    assert account.tokens_used == 10


def test_the_same_request_is_charged_once() -> None:
    rules = Limits(requests_per_minute=5, tokens_per_minute=50)
    account = Account()
    assert [reserve(account, rules, "same") for _ in range(9)] == [None] * 9
    assert (account.requests_used, account.tokens_used) == (1, 10)


def test_an_open_request_of_a_dead_node_is_forgotten_once_it_has_expired() -> None:
    rules = Limits(concurrent_requests=1)
    account = Account()
    reserve(account, rules, "lost", expires_s=NOW_S + 5)
    assert not limits.forget_expired(account, now_s=NOW_S + 4.9)
    assert reserve(account, rules, "next") == Exceeded("concurrent", 1.0)
    assert limits.forget_expired(account, now_s=NOW_S + 5)
    assert reserve(account, rules, "next") is None


def test_a_clock_that_goes_back_gives_nothing_away() -> None:
    rules = Limits(requests_per_minute=1)
    account = Account()
    reserve(account, rules, "a")
    assert reserve(account, rules, "b", now_s=NOW_S - 3600) is not None
    assert reserve(account, rules, "b", now_s=NOW_S) is not None


def test_who_is_given_a_lower_limit_waits_for_no_more_than_that_limits_minute() -> None:
    account = Account()
    before = Limits(requests_per_minute=1000, tokens_per_minute=1_000_000)
    for n in range(500):
        assert reserve(account, before, f"r{n}", tokens=1000) is None
    after = Limits(requests_per_minute=10, tokens_per_minute=1000)
    assert reserve(account, after, "next") == Exceeded("requests", 6.0)
    assert limits.standing_of_tokens(account, after) == Standing(1000, 0, 60.0)
    assert reserve(account, after, "next", now_s=NOW_S + 6) is None
    assert limits.settle(account, request="r0", tokens=1000)
    assert account.requests_used == 10


def test_a_bucket_without_limit_has_no_standing() -> None:
    assert limits.standing_of_requests(Account(), Limits(concurrent_requests=1)) is None


steps = st.lists(
    st.tuples(
        st.sampled_from(["reserve", "settle", "never ran", "expire"]),
        st.integers(0, 7),  # which request
        st.integers(0, 60),  # its tokens
        st.floats(0, 40),  # seconds that pass before
    ),
    max_size=80,
)


@given(steps)
def test_no_order_of_events_goes_over_a_limit_or_leaks(
    events: list[tuple[str, int, int, float]],
) -> None:
    rules = Limits(requests_per_minute=4, tokens_per_minute=100, concurrent_requests=3)
    account, now_s = Account(), NOW_S
    for kind, number, tokens, passed_s in events:
        now_s += passed_s
        name = f"r{number}"
        match kind:
            case "reserve":
                reserve(account, rules, name, tokens=tokens, now_s=now_s, expires_s=now_s + 30)
            case "settle":
                limits.settle(account, request=name, tokens=tokens // 2)
            case "never ran":
                limits.settle(account, request=name, tokens=None)
            case "expire":
                limits.forget_expired(account, now_s=now_s)
        assert 0 <= account.requests_used <= 4 + 1e-6
        assert 0 <= account.tokens_used <= 100 + 1e-6
        assert len(account.open) <= 3
    limits.forget_expired(account, now_s=now_s + 60)
    limits.advance(account, rules, now_s=now_s + 60)
    assert account == Account(updated_s=now_s + 60)
