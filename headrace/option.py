"""How an option is declared. Rule: its name is a flag, a variable `HEADRACE_*` and a key of
headrace.toml at once, and each is known to every node, so that all may share one file."""

from typing import Any, Final

import typer

KNOWN: Final[set[str]] = set()
"""The keys of headrace.toml."""


def option(flag: str, help_: str, **more: Any) -> Any:
    """Return what typer is told of a flag; `more` is for `typer.Option`."""
    name = flag.replace("-", "_")
    KNOWN.add(name)
    return typer.Option(f"--{flag}", envvar=f"HEADRACE_{name.upper()}", help=help_, **more)
