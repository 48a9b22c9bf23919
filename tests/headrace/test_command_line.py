"""Help and errors of the command line: whole sentences, and no other library's words."""

from collections.abc import Iterator

import pytest
import typer
from typer.testing import CliRunner

from headrace import cli

GROUPS = ([], ["topology"], ["tenants"], ["keys"], ["deadletters"])


def summaries(args: list[str]) -> Iterator[str]:
    """Yield the lines of a group's help that stand for its commands, at 80 columns."""
    result = CliRunner().invoke(cli.main, [*args, "--help"], terminal_width=80)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    yield from lines[lines.index("Commands:") + 1 :]


@pytest.mark.parametrize("group", GROUPS, ids=" ".join)
def test_no_summary_of_a_command_is_cut_at_80_columns(group: list[str]) -> None:
    found = list(summaries(group))
    assert found
    assert [line for line in found if line.endswith("...") or len(line) > 80] == []


def test_every_group_of_commands_is_looked_at() -> None:
    root = typer.main.get_group(cli.main)
    groups = {name for name, each in root.commands.items() if hasattr(each, "commands")}
    assert groups == {group[0] for group in GROUPS if group}


@pytest.mark.parametrize(
    "args",
    [("backlog", "--by"), ("up", "--queue-order"), ("up", "--engine")],
    ids=" ".join,
)
def test_a_choice_that_is_none_is_told_with_the_choices_alone(args: tuple[str, ...]) -> None:
    result = CliRunner().invoke(cli.main, [*args, "nope"])
    assert result.exit_code == 2
    assert ": 'nope' is not one of '" in result.stderr
    assert "Value error" not in result.stderr
