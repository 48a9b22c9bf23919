"""`python -m bench [--only ROW]`: measure, print the table, exit 1 where a budget is exceeded."""

import sys
from typing import Annotated

import typer

from bench import report
from bench.load import LoadFailed
from bench.rows import ROWS, Line
from bench.system import ROOT, NotStarted


def main(
    only: Annotated[
        list[str] | None, typer.Option(help=f"Row to measure: {', '.join(ROWS)}.")
    ] = None,
) -> None:
    """Measure the budget's rows, each beside a bare ASGI server that sends the same bytes."""
    for name in only or ():
        if name not in ROWS:
            raise typer.BadParameter(f"{name!r} is no row; there are {', '.join(ROWS)}")
    lines: list[Line] = []
    print(report.heading(), flush=True)
    try:
        for name in only or ROWS:
            for line in ROWS[name]():
                lines.append(line)
                print(report.line_text(line), flush=True)
    except (NotStarted, LoadFailed) as error:
        sys.exit(f"bench: {error}")
    print(f"written to {report.write(lines, ROOT / 'bench' / 'results').relative_to(ROOT)}")
    if any(line.over for line in lines):
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
