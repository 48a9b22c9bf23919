"""A command line without boxes and colours: an error is a line that can be read in a log.

Rule: what is wrong with a value is said in our words or typer's, never in those of the library
that typer checks values with.
"""

from typing import Any, Final

import typer
from typer.core import TyperCommand

_FOREIGN: Final = "Value error, "
"""What pydantic puts before the message of a choice that is none."""


class _Command(TyperCommand):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            error.message = error.message.removeprefix(_FOREIGN)
            raise


class CommandLine(typer.Typer):
    """Commands, or groups of them."""

    def __init__(self, **more: Any) -> None:
        super().__init__(
            add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None, **more
        )

    def command(self, name: str | None = None, **more: Any) -> Any:
        """Return what takes the function that a command runs."""
        return super().command(name, cls=_Command, **more)
