"""The page of the API: whole, and of nothing from elsewhere."""

from html.parser import HTMLParser

from ingress.reference import page_of
from schemas.openapi import OPERATIONS, document

DOCUMENT = document()


class Page(HTMLParser):
    """Gathers a page's tags, links, ids and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.links: set[str] = set()
        self.ids: set[str] = set()
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links |= {value or "" for name, value in attrs if name in ("href", "src")}
        self.ids |= {value or "" for name, value in attrs if name == "id"}

    def handle_data(self, data: str) -> None:
        self.words += data


def test_the_page_names_every_operation_and_every_type() -> None:
    page = Page(page_of(DOCUMENT))
    for each in OPERATIONS:
        assert f"{each.method.upper()} {each.path}" in page.words
    assert page.ids == set(DOCUMENT["components"]["schemas"])


def test_the_page_has_no_script_and_nothing_from_elsewhere() -> None:
    page = Page(page_of(DOCUMENT))
    assert not page.tags & {"script", "link", "img", "iframe"}
    assert page.links - {"openapi.json"} <= {f"#{name}" for name in page.ids}


def test_what_is_described_is_text_not_markup() -> None:
    schemas = {"T": {"description": "<b>&</b>", "properties": {"<i>": {"enum": ["<u>"]}}}}
    described = {
        "info": {"title": "<s>", "description": ""},
        "paths": {},
        "components": {"schemas": schemas},
    }
    page = Page(page_of(described))
    assert not page.tags & {"b", "i", "u", "s"}
    assert "<b>&</b>" in page.words
