"""Pages of input items."""

from typing import Any

import pytest

from ingress.stored_routes import page_of
from schemas.errors import InvalidRequest

ITEMS: list[dict[str, Any]] = [{"id": f"{number}"} for number in range(25)]


def ids(**query: str) -> list[str]:
    return [item["id"] for item in page_of(ITEMS, query)["data"]]


def test_the_latest_items_come_first() -> None:
    assert ids() == [f"{number}" for number in range(24, 4, -1)]
    assert ids(order="asc", limit="3") == ["0", "1", "2"]


def test_a_page_says_what_it_holds_and_whether_there_is_more() -> None:
    page = page_of(ITEMS, {"order": "asc", "limit": "24"})
    assert page["object"] == "list"
    assert (page["first_id"], page["last_id"], page["has_more"]) == ("0", "23", True)
    assert page_of(ITEMS, {"limit": "25"})["has_more"] is False


def test_pages_follow_each_other_to_the_end() -> None:
    seen: list[str] = []
    while page := ids(limit="7", order="asc", **({"after": seen[-1]} if seen else {})):
        seen += page
    assert seen == [item["id"] for item in ITEMS]


def test_nothing_is_a_page_too() -> None:
    page = page_of([], {})
    assert page == {
        "object": "list",
        "data": [],
        "first_id": None,
        "last_id": None,
        "has_more": False,
    }


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"limit": "0"}, "limit"),
        ({"limit": "101"}, "limit"),
        ({"limit": "-1"}, "limit"),
        ({"limit": "x"}, "limit"),
        ({"limit": "9" * 5000}, "limit"),
        ({"order": "up"}, "order"),
        ({"after": "unknown"}, "after"),
    ],
)
def test_a_bad_question_names_its_member(query: dict[str, str], param: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        page_of(ITEMS, query)
    assert refusal.value.param == param
