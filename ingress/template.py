"""A model's chat templates: how they are compiled, and what they expect of messages.

The environment is the one that Hugging Face's templates are written for. What a template expects is
told by its source, by the rules of vLLM's server (`vllm/renderers/hf.py`). Pure.
"""

import datetime
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeGuard

import jinja2
import jinja2.ext
import jinja2.parser
import jinja2.sandbox
from jinja2 import nodes

_WITH_TOOLS: Final = "tool_use"
"""The name of a template that serves chats with tools, among several."""


class ChatTemplate:
    """One template. Raises what Jinja raises where the source is none."""

    def __init__(self, source: str) -> None:
        environment = _environment()
        tree = environment.parse(source)
        self._template = environment.from_string(source)
        self.wants_parts = any(True for _ in _content_loops(tree))
        """Whether content is a list of parts to it, and not one string."""
        self.knows_developers = '"developer"' in source or "'developer'" in source
        """Whether it renders turns of the role `developer`."""

    def render(self, known: Mapping[str, Any]) -> str:
        """Return the text. Raises anything: a template is a program, and not ours."""
        return self._template.render(known)


class ChatTemplates:
    """The templates of a model, of which one serves a chat."""

    def __init__(self, source: str | Sequence[Mapping[str, str]] | None) -> None:
        """`source` is one template, or several by name, as tokenizer_config.json has them."""
        self._default = self._with_tools = None
        if isinstance(source, str):
            self._default = self._with_tools = ChatTemplate(source)
        elif source is not None:
            named = {each["name"]: each["template"] for each in source}
            if "default" in named:
                self._default = self._with_tools = ChatTemplate(named["default"])
            if _WITH_TOOLS in named:
                self._with_tools = ChatTemplate(named[_WITH_TOOLS])

    def of(self, *, tools: bool) -> ChatTemplate | None:
        """Return the template for a chat with or without tools; None where there is none."""
        return self._with_tools if tools else self._default


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}`, by which training finds answers: it renders what it holds."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Node:
        """Read the tag."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _GenerationTag],
    )
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _now
    environment.filters["tojson"] = _to_json
    return environment


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.datetime.now(datetime.UTC).strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


# Whether a template loops over content. Names are looked for, not scopes, as vLLM does.


def _content_loops(tree: nodes.Template) -> Iterator[nodes.For]:
    """Yield the loops over the content of messages, also where a macro is given it."""
    messages = _message_names(tree)
    in_macros: set[nodes.For] = set()
    for macro in tree.find_all(nodes.Macro):
        given = _content_parameters(tree, macro, messages)
        for loop in macro.find_all(nodes.For):
            in_macros.add(loop)
            if isinstance(loop.iter, nodes.Name) and loop.iter.name in given:
                yield loop
    for loop in tree.find_all(nodes.For):
        by_name = loop not in in_macros and _stands_for_name(loop.iter, "content")
        if by_name or any(_stands_for(loop.iter, name, "content") for name in messages):
            yield loop


def _message_names(tree: nodes.Template) -> set[str]:
    """Return the names that loops over the messages give to each."""
    lists = ["messages"]
    for name in lists:  # it grows meanwhile
        for assignment in tree.find_all(nodes.Assign):
            target = assignment.target
            if (
                isinstance(target, nodes.Name)
                and target.name not in lists
                and _stands_for(assignment.node, name)
            ):
                lists.append(target.name)
    return {
        loop.target.name
        for loop in tree.find_all(nodes.For)
        if isinstance(loop.target, nodes.Name)
        and any(_stands_for(loop.iter, name) for name in lists)
    }


def _content_parameters(tree: nodes.Template, macro: nodes.Macro, messages: set[str]) -> set[str]:
    """Return the macro's parameters that some call gives a message's content."""
    names = [parameter.name for parameter in macro.args]
    found: set[str] = set()
    for call in tree.find_all(nodes.Call):
        if not _stands_for_name(call.node, macro.name):
            continue
        by_place = zip(names, call.args, strict=False)
        by_name = [(given.key, given.value) for given in call.kwargs]
        found |= {
            name
            for name, value in (*by_place, *by_name)
            if name in names and any(_stands_for(value, each, "content") for each in messages)
        }
    return found


def _stands_for(node: nodes.Node | None, name: str, member: str | None = None) -> bool:
    """Whether an expression is a variable (or a member of it), filtered, tested or sliced."""
    while isinstance(node, nodes.Filter | nodes.Test) or _is_slice(node):
        node = node.node
    if member is None:
        return _stands_for_name(node, name)
    match node:
        case nodes.Getattr(node=of, attr=found):
            return found == member and _stands_for_name(of, name)
        case nodes.Getitem(node=of, arg=nodes.Const(value=found)):
            return bool(found == member) and _stands_for_name(of, name)
    return False


def _is_slice(node: nodes.Node | None) -> TypeGuard[nodes.Getitem]:
    return isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)


def _stands_for_name(node: nodes.Node | None, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name
