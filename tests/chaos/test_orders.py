"""What clients ask: the same for the same seed, and every manner among it."""

from itertools import islice

import msgspec

from chaos.orders import Manner, Order, orders, stories
from schemas.openai import parse_chat, parse_completion


def _some(seed: int, client: int, count: int = 400) -> list[Order]:
    return list(islice(orders(seed, client), count))


def test_a_seed_asks_the_same_again() -> None:
    assert _some(1, 0) == _some(1, 0)
    assert _some(1, 0) != _some(2, 0)
    assert _some(1, 0) != _some(1, 1)
    assert stories(1) == stories(1)


def test_every_manner_and_both_kinds_of_answers_are_asked_for() -> None:
    found = _some(3, 0)
    assert {order.manner for order in found} == set(Manner)
    assert any(order.story is None for order in found)
    assert any(order.expected is None for order in found)


def test_every_order_is_a_request_that_the_api_takes() -> None:
    for order in [*_some(3, 0), *stories(3)]:
        parse = parse_chat if "messages" in order.body else parse_completion
        ask = parse(msgspec.json.encode(order.body))
        assert bool(ask.stream) is (order.manner is not Manner.WHOLE)


def test_no_two_scripted_orders_have_one_text() -> None:
    texts = [order.expected.text for n in range(3) for order in _some(3, n) if order.expected]
    assert len(set(texts)) == len(texts)
