"""The harness as its users run it: a short run of real processes."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
RUN_S_MAX = 380
STREAMS = 12


def test_nothing_is_lost_or_repeated_while_everything_is_killed_frozen_and_cut_off(
    tmp_path: Path,
) -> None:
    run = subprocess.run(
        [
            *(sys.executable, "-m", "chaos", "--seconds", "20", "--seed", "7"),
            *("--streams", str(STREAMS), "--faults-per-minute", "40"),
            *("--keep", str(tmp_path), "--json"),
        ],
        capture_output=True,
        text=True,
        timeout=RUN_S_MAX,
        cwd=ROOT,
    )
    report = tmp_path / "report.txt"
    assert run.returncode == 0, report.read_text() if report.exists() else run.stderr
    figures = json.loads(run.stdout)
    assert figures["holds"]
    assert figures["faults_total"] > 3
    assert figures["requests"] >= STREAMS
    assert figures["tokens"] > 0
    assert figures["lost"] == figures["repeated"] == figures["unanswered"] == 0
