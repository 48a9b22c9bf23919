"""`python -m chaos`: break everything for a while, and check that no token was lost or repeated."""

import logging
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import msgspec
import typer
import uvloop

from chaos import report
from chaos.run import Options, Run, perform
from chaos.system import NotStarted


def main(
    seconds: Annotated[float, typer.Option(min=1.0, help="How long things go wrong.")] = 60.0,
    seed: Annotated[int, typer.Option(help="Of faults and requests alike.")] = 1,
    faults_per_minute: Annotated[float, typer.Option(min=0.1)] = 15.0,
    streams: Annotated[int, typer.Option(min=1, help="Requests that are open at once.")] = 60,
    split: Annotated[
        bool, typer.Option("--split", help="Two ingress and two streamers, no gateways.")
    ] = False,
    recovery_s_max: Annotated[
        float, typer.Option(help="The longest p99 of waits for a token after a worker's kill -9.")
    ] = 5.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    keep: Annotated[
        Path | None, typer.Option(help="Keep data and logs here, also when all holds.")
    ] = None,
) -> None:
    """Kill, freeze, restart and disconnect a whole system at random while clients check it.

    Two gateways, three workers and nats-server suffer. Exits with 0 only when every token came
    once, every request was answered, and nothing is left over; else the logs are kept.
    """
    logging.basicConfig(level=logging.WARNING if as_json else logging.INFO, format="%(message)s")
    logging.getLogger("headrace").setLevel(logging.ERROR)  # our own connection breaks too
    folder = Path(tempfile.mkdtemp(prefix="headrace-chaos-")) if keep is None else keep
    folder.mkdir(parents=True, exist_ok=True)
    began_s = time.monotonic()
    options = Options(seconds, seed, faults_per_minute, streams, split, recovery_s_max)
    try:
        run = uvloop.run(perform(options, folder.resolve()))
    except NotStarted as error:
        sys.exit(f"chaos: {error}\nlogs are kept in {folder}")
    held = _tell(run, folder, as_json=as_json)
    if not as_json:
        print(f"took {time.monotonic() - began_s:.1f} s, seed {seed}")
    if not held:
        sys.exit(f"chaos: logs are kept in {folder}")
    if keep is None:
        shutil.rmtree(folder)


def _tell(run: Run, folder: Path, *, as_json: bool) -> bool:
    """Print what a run was; return whether all that must hold does."""
    if as_json:
        print(msgspec.json.encode(report.summary(run)).decode())
    else:
        print(report.text(run))
    report.write_failures(run, folder)
    return report.holds(run)


if __name__ == "__main__":
    typer.run(main)
