"""Facts about the limit of open files."""

import subprocess
import sys
from pathlib import Path

import pytest

from headrace.addresses import Addresses, Place
from headrace.commands import Commands
from headrace.connection_settings import ConnectionSettings
from headrace.crowd import CONNECTIONS_MAX, Bounds
from headrace.datadir import DataDir
from headrace.files import SPARE, fitting
from headrace.up_settings import UpSettings


@pytest.mark.parametrize(
    ("wanted", "files_max", "held"),
    [
        (20_000, 1_048_576, 20_000),
        (20_000, 20_000 + SPARE, 20_000),
        (20_000, 20_000, 20_000 - SPARE),
        (20_000, 1024, 1024 - SPARE),
        (20_000, 256, 128),
        (20_000, 1, 1),
        (100, 256, 100),
    ],
)
def test_so_many_connections_are_held_as_files_are_left_for(
    wanted: int, files_max: int, held: int
) -> None:
    bounds = Bounds(connections_max=wanted, per_address_max=7)
    assert fitting(bounds, files_max=files_max) == Bounds(held, 7)


PROGRAM = """
import resource, sys
from headrace.crowd import Bounds
from headrace.files import held
from headrace.lifecycle import log_to_stdout
soft, hard, wanted, chosen = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
log_to_stdout("test")
print(held(Bounds(connections_max=wanted, chosen=bool(chosen))).connections_max)
print(resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def held_by_a_process(*numbers: int) -> list[str]:
    command = [sys.executable, "-c", PROGRAM, *(str(int(each)) for each in numbers)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout.splitlines()


def test_the_limit_is_raised_to_the_hard_one_without_a_word() -> None:
    assert held_by_a_process(256, 2048, 1000, True) == ["1000", "(2048, 2048)"]


def test_a_bound_that_the_hard_limit_cannot_hold_is_lowered_and_warned_of() -> None:
    warning, count, limits = held_by_a_process(256, 2048, 20_000, True)
    assert (count, limits) == (str(2048 - SPARE), "(2048, 2048)")
    assert "WARNING" in warning
    for part in ("20000", "2048", "--connections-max", "ulimit -n"):
        assert part in warning


def test_a_bound_that_nobody_chose_is_lowered_without_a_warning() -> None:
    line, count, _ = held_by_a_process(256, 2048, 20_000, False)
    assert count == str(2048 - SPARE)
    assert "INFO" in line
    assert "20000 connections cannot be held" in line


def test_a_bound_is_chosen_where_an_operator_names_it_even_as_it_is() -> None:
    assert ConnectionSettings().bounds == Bounds(CONNECTIONS_MAX, 0, chosen=False)
    named = ConnectionSettings(connections_max=CONNECTIONS_MAX)
    assert named.bounds == Bounds(CONNECTIONS_MAX, 0, chosen=True)


@pytest.mark.parametrize(("named", "told"), [(None, False), (CONNECTIONS_MAX, True)])
def test_up_names_to_its_front_only_a_bound_that_it_was_given(
    tmp_path: Path, named: int | None, told: bool
) -> None:
    place = Place(port=1, url="http://127.0.0.1:1")
    commands = Commands(UpSettings(connections_max=named), DataDir(tmp_path), None, "nats://x")
    [gateway] = commands.fronts(Addresses((place,)))
    assert ("--connections-max" in gateway.argv(2)) is told
