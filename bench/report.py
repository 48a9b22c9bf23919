"""The table that is printed, and the same as JSON."""

import json
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

import psutil

from bench.rows import Line

_FORM: Final = "{:<12} {:<42} {:>10} {:>10} {:>6} {:>8}  {:<5} {}"


def heading() -> str:
    """Return the table's head."""
    return _FORM.format(
        "row", "what", "measured", "reference", "ratio", "budget", "", "unit, note"
    ).rstrip()


def line_text(line: Line) -> str:
    """Return one line of the table."""
    ratio = f"{line.measured / line.reference:.1f}" if line.reference else ""
    verdict = "" if line.budget is None else ("OVER" if line.over else "ok")
    return _FORM.format(
        line.row,
        line.what,
        f"{line.measured:.1f}",
        "" if line.reference is None else f"{line.reference:.1f}",
        ratio,
        "" if line.budget is None else f"{line.budget:g}",
        verdict,
        f"{line.unit} {line.note}".rstrip(),
    ).rstrip()


def write(lines: Sequence[Line], folder: Path) -> Path:
    """Write the lines as JSON into `folder`; return the file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / time.strftime("%Y%m%dT%H%M%SZ.json", time.gmtime())
    document = {
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "load_average": psutil.getloadavg(),
        "lines": [asdict(line) | {"over": line.over} for line in lines],
    }
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    return path
