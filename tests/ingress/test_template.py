"""What chat templates expect of messages, told by their sources as vLLM's server tells it."""

import jinja2
import pytest

from ingress.template import ChatTemplate, ChatTemplates

LOOP = "{% for m in messages %}"
PARTS = [
    LOOP + "{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}",
    LOOP + "{% for p in m['content'] %}{{ p.text }}{% endfor %}{% endfor %}",
    LOOP
    + "{% for p in m.content | selectattr('type', 'equalto', 'text') %}{% endfor %}{% endfor %}",
    LOOP + "{% set content = m.content %}{% for p in content %}{% endfor %}{% endfor %}",
    "{% set rest = messages[1:] %}{% for m in rest %}"
    "{% for p in m.content %}{% endfor %}{% endfor %}",
    "{% macro show(c) %}{% for p in c %}{{ p.text }}{% endfor %}{% endmacro %}"
    + LOOP
    + "{{ show(m.content) }}{% endfor %}",
    "{% macro show(c) %}{% for p in c %}{{ p.text }}{% endfor %}{% endmacro %}"
    + LOOP
    + "{{ show(c=m.content) }}{% endfor %}",
]
STRINGS = [
    LOOP + "{{ m.content }}{% endfor %}",
    LOOP + "{{ m['content'] | trim }}{% for c in m.tool_calls %}{{ c }}{% endfor %}{% endfor %}",
    "{% macro show(content) %}{% for p in content %}{{ p }}{% endfor %}{% endmacro %}"
    + LOOP
    + "{{ show(tools) }}{{ m.content }}{% endfor %}",
    "{% for a, b in tools %}{% endfor %}" + LOOP + "{{ m.content[0] }}{% endfor %}",
]


@pytest.mark.parametrize("source", PARTS)
def test_a_template_that_loops_over_content_wants_parts(source: str) -> None:
    assert ChatTemplate(source).wants_parts


@pytest.mark.parametrize("source", STRINGS)
def test_another_wants_one_string(source: str) -> None:
    assert not ChatTemplate(source).wants_parts


def test_developers_are_known_where_they_are_named() -> None:
    assert ChatTemplate("{{ m.role == 'developer' }}").knows_developers
    assert ChatTemplate('{{ m.role == "developer" }}').knows_developers
    assert not ChatTemplate("{# developer #}{{ m.role }}").knows_developers


def test_a_template_of_chats_with_tools_serves_these_alone() -> None:
    named = {"default": "plain", "tool_use": "tools", "rag": "documents"}
    templates = ChatTemplates([{"name": n, "template": t} for n, t in named.items()])
    plain, tools = templates.of(tools=False), templates.of(tools=True)
    assert plain is not None
    assert tools is not None
    assert (plain.render({}), tools.render({})) == ("plain", "tools")
    alone = ChatTemplates("one")
    assert alone.of(tools=True) is alone.of(tools=False) is not None


def test_a_model_may_have_none() -> None:
    assert ChatTemplates(None).of(tools=False) is None
    rag = ChatTemplates([{"name": "rag", "template": "documents"}])
    assert rag.of(tools=True) is None


def test_what_training_marks_is_rendered() -> None:
    source = "a {% generation %}{{ b }}{% endgeneration %} c"
    assert ChatTemplate(source).render({"b": "b"}) == "a b c"


def test_what_is_no_template_says_so() -> None:
    with pytest.raises(jinja2.TemplateSyntaxError):
        ChatTemplate("{% for %}")


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ("tojson", '{"b": "é", "a": 1}'),
        ("tojson(ensure_ascii=True)", '{"b": "\\u00e9", "a": 1}'),
        ("tojson(separators=(',', ':'), sort_keys=True)", '{"a":1,"b":"é"}'),
        ("tojson(indent=1)", '{\n "b": "é",\n "a": 1\n}'),
        ("tojson(False, 1)", '{\n "b": "é",\n "a": 1\n}'),
    ],
)
def test_json_is_written_as_a_template_asks(call: str, text: str) -> None:
    assert ChatTemplate("{{ it | " + call + " }}").render({"it": {"b": "é", "a": 1}}) == text
