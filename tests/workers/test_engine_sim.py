import asyncio
import math
import subprocess
import sys
from collections.abc import Sequence

import pytest

from schemas.wire import HexPiece, Piece, SimHook, ToolCall
from tests.workers.simulated import (
    IDLE,
    PROMPT,
    TOKENIZER,
    Heard,
    once,
    turns,
    with_engine,
    work,
)
from workers.engine import (
    Engine,
    EngineDied,
    EngineFailed,
    EngineRefused,
    Finish,
    Work,
)
from workers.engine_sim import SimulatedEngine


def test_the_card_names_a_simulated_model() -> None:
    async def scene() -> None:
        engine: Engine = SimulatedEngine(name="m", engine_args={"max_model_len": 100})
        card = await engine.start()
        assert (card.name, card.max_model_len, card.simulated, card.files) == ("m", 100, True, {})
        assert engine.slots == 1024
        await engine.stop()

    asyncio.run(scene())


def test_text_is_the_same_in_any_engine_and_decodes_from_its_tokens() -> None:
    heard, finish = once(work())
    again, _ = once(work(), max_num_seqs=1, block_size=4, enable_prefix_caching=False)
    assert heard.pieces == again.pieces
    assert heard.text() == TOKENIZER.decode([piece.tokens[0] for piece in heard.pieces])
    assert finish.reasons == ("stop",)
    assert 16 <= len(heard.pieces) == finish.usage.completion_tokens <= 128
    assert heard.calls == len(heard.pieces)


def test_a_seed_makes_another_text() -> None:
    texts = {once(work(seed=seed))[0].text() for seed in (None, 0, 1, -(2**63), 2**63 - 1)}
    assert len(texts) == 4


@pytest.mark.parametrize("tokens", [1, 7, 64, 65, 300])
def test_max_tokens_ends_it_with_length(tokens: int) -> None:
    heard, finish = once(work(max_tokens=tokens, ignore_eos=True))
    assert len(heard.pieces) == finish.usage.completion_tokens == tokens
    assert finish.reasons == ("length",)


def test_the_context_ends_it_with_length() -> None:
    heard, finish = once(work(ignore_eos=True), max_model_len=50)
    assert (len(heard.pieces), finish.reasons) == (10, ("length",))


def test_choices_differ_and_usage_counts_them_all() -> None:
    heard, finish = once(work(n=3, max_tokens=12))
    assert len({heard.text(choice) for choice in range(3)}) == 3
    assert finish.reasons == ("length",) * 3
    assert finish.usage.completion_tokens == 36
    assert finish.usage.prompt_tokens == 40


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        (work(prompt=[]), "empty"),
        (work(prompt=[5] * 100), "100 tokens"),
        (work(prompt=[5, 2048]), "0 to 2047"),
        (work(max_tokens=0), "max_tokens"),
        (work(n=0), "n must"),
        (work(logprobs=-1), "logprobs"),
        (work(sim=SimHook(hang_at=-1)), "hang_at"),
    ],
)
def test_what_cannot_be_served_is_refused(asked: Work, named: str) -> None:
    with pytest.raises(EngineRefused, match=named):
        once(asked, max_model_len=100)


def test_whole_blocks_of_a_known_prompt_are_cached_but_never_all_of_it() -> None:
    async def scene(engine: SimulatedEngine) -> list[int]:
        asks = [
            work(prompt=PROMPT),
            work(prompt=PROMPT),
            work(prompt=PROMPT[:32]),
            work(prompt=PROMPT, cache_salt="t"),
        ]
        return [(await engine.generate(ask, Heard())).usage.cached_tokens for ask in asks]

    assert with_engine(scene) == [0, 32, 16, 0]
    assert with_engine(scene, enable_prefix_caching=False) == [0, 0, 0, 0]


def test_logprobs_are_finite_and_the_chosen_token_is_the_likeliest() -> None:
    heard, _ = once(work(logprobs=3, max_tokens=16))
    for piece in heard.pieces:
        assert piece.logprobs is not None
        (chosen,) = piece.logprobs
        assert chosen.text == piece.text
        assert [token.logprob for token in chosen.top] == sorted(
            (token.logprob for token in chosen.top), reverse=True
        )
        assert len({token.text for token in chosen.top}) == 3
        assert math.isfinite(chosen.logprob)
    assert once(work(logprobs=0))[0].pieces[0].logprobs[0].top == ()  # type: ignore[index]
    assert once(work())[0].pieces[0].logprobs is None


def test_a_hook_sets_log_probabilities() -> None:
    hook = SimHook(pieces=("a", "b", "c"), logprobs=(-1.5, "-inf"))
    heard, _ = once(work(sim=hook, logprobs=2))
    values = [piece.logprobs[0].logprob for piece in heard.pieces if piece.logprobs]
    assert values[:2] == [-1.5, -math.inf]
    assert math.isfinite(values[2])


def test_pieces_are_tokens_and_end_with_stop_even_at_max_tokens() -> None:
    hook = SimHook(pieces=("a\n\n", " self", ""))
    heard, finish = once(work(sim=hook, max_tokens=3))
    assert [piece.text for piece in heard.pieces] == ["a\n\n", " self", ""]
    assert TOKENIZER.decode([heard.pieces[1].tokens[0]]) == " self"
    assert (finish.reasons, finish.usage.completion_tokens) == (("stop",), 3)
    heard, finish = once(work(sim=hook, max_tokens=2))
    assert (heard.text(), finish.reasons) == ("a\n\n self", ("length",))
    _, finish = once(work(sim=SimHook(pieces=("a",), finish_reason="content_filter")))
    assert finish.reasons == ("content_filter",)


def test_no_pieces_are_an_empty_answer() -> None:
    heard, finish = once(work(sim=SimHook(pieces=())))
    assert heard.pieces == []
    assert (finish.reasons, finish.usage.completion_tokens) == (("stop",), 0)


def test_an_emoji_in_two_byte_pieces_is_nothing_and_then_the_emoji() -> None:
    hook = SimHook(pieces=(HexPiece("f09f"), HexPiece("9982"), "!", HexPiece("f09f")))
    heard, _ = once(work(sim=hook))
    assert [piece.text for piece in heard.pieces] == ["", "🙂", "!", "\ufffd"]


def test_a_stop_string_over_two_tokens_is_not_sent_and_a_near_miss_is() -> None:
    hook = SimHook(pieces=("one <", "/b> two <", "/s", "> three"))
    heard, finish = once(work(sim=hook, stop=("</s>",)))
    assert [piece.text for piece in heard.pieces] == ["one ", "</b> two ", "", ""]
    assert (finish.reasons, finish.usage.completion_tokens) == (("stop",), 4)
    heard, finish = once(work(sim=SimHook(pieces=("a", "<", "/s")), stop=("</s>",)))
    assert [piece.text for piece in heard.pieces] == ["a", "", "</s"]


def test_a_stop_string_ends_a_story() -> None:
    whole, _ = once(work())
    stop = whole.pieces[5].text[-2:] + whole.pieces[6].text[:2]
    heard, finish = once(work(stop=(stop,)))
    assert heard.text() == whole.text().split(stop)[0]
    assert finish.reasons == ("stop",)


def test_two_tool_calls_arrive_in_pieces_with_id_and_name_once() -> None:
    calls = (ToolCall("f", ('{"a"', ": 1}")), ToolCall("g", ("{}",)))
    hook = SimHook(pieces=("hm", HexPiece("f0")), tool_calls=calls)
    heard, finish = once(work(sim=hook))
    assert [piece.text for piece in heard.pieces] == ["hm", "\ufffd", "", "", ""]
    deltas = [piece.delta["tool_calls"][0] for piece in heard.pieces if piece.delta]
    first, _, third = deltas
    assert [delta["index"] for delta in deltas] == [0, 0, 1]
    assert first["type"] == "function"
    assert first["function"] == {"name": "f", "arguments": '{"a"'}
    assert deltas[1] == {"index": 0, "function": {"arguments": ": 1}"}}
    assert first["id"].startswith("call_")
    assert first["id"] != third["id"]
    assert (finish.reasons, finish.usage.completion_tokens) == (("tool_calls",), 5)
    assert once(work(sim=hook))[0].pieces == heard.pieces


def test_fail_at_fails_that_request_alone_after_the_tokens_before() -> None:
    async def scene(engine: SimulatedEngine) -> None:
        failing, healthy = Heard(), Heard()
        failure, finish = await asyncio.gather(
            engine.generate(work(request="f", sim=SimHook(fail_at=5)), failing),
            engine.generate(work(request="h", max_tokens=9), healthy),
            return_exceptions=True,
        )
        assert isinstance(failure, EngineFailed)
        assert str(failure) == "simulated failure at token 5"
        assert len(failing.pieces) == 5
        assert isinstance(finish, Finish)
        assert len(healthy.pieces) == 9
        assert engine.load() == IDLE
        assert engine.ledger()["f"] == {"starts": 1, "aborts": 0, "tokens": 5}

    with_engine(scene)


def test_a_hanging_request_holds_its_slot_until_it_is_cancelled() -> None:
    async def scene(engine: SimulatedEngine) -> None:
        hanging, other = Heard(), Heard()
        hung = asyncio.create_task(engine.generate(work(sim=SimHook(hang_at=1)), hanging))
        await hanging.any.wait()
        waiting = asyncio.create_task(engine.generate(work(request="o", max_tokens=4), other))
        await turns(20)
        assert (len(hanging.pieces), other.pieces) == (1, [])
        assert engine.load()[:2] == (1, 1)
        hung.cancel()
        await asyncio.wait([hung])
        assert (await waiting).usage.completion_tokens == 4
        assert engine.ledger()["r"] == {"starts": 1, "aborts": 1, "tokens": 1}

    with_engine(scene, max_num_seqs=1)


@pytest.mark.parametrize("hook", [None, SimHook(itl_ms=1), SimHook(ttft_ms=30_000)])
def test_cancelling_frees_slot_and_blocks_at_once(hook: SimHook | None) -> None:
    async def scene(engine: SimulatedEngine) -> None:
        heard = Heard()
        asked = work(sim=hook, max_tokens=30_000, ignore_eos=True)
        task = asyncio.create_task(engine.generate(asked, heard))
        await turns(20)
        assert engine.load().running == 1
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        assert engine.load() == IDLE
        assert engine.ledger()["r"]["aborts"] == 1

    with_engine(scene)


def test_a_failing_emit_fails_its_own_request_only() -> None:
    async def broken(pieces: Sequence[Piece]) -> None:
        raise ConnectionError("gone")

    async def scene(engine: SimulatedEngine) -> None:
        heard = Heard()
        failure, finish = await asyncio.gather(
            engine.generate(work(request="b", ignore_eos=True), broken),
            engine.generate(work(), heard),
            return_exceptions=True,
        )
        assert isinstance(failure, ConnectionError)
        assert isinstance(finish, Finish)
        assert len(heard.pieces) == finish.usage.completion_tokens
        assert engine.ledger()["b"]["aborts"] == 1

    with_engine(scene)


def test_a_slow_emit_holds_nobody_else_up_and_gets_all_that_came_meanwhile() -> None:
    async def scene(engine: SimulatedEngine) -> None:
        fast_done = asyncio.Event()
        slow, fast = Heard(), Heard()

        async def emit(pieces: Sequence[Piece]) -> None:
            await fast_done.wait()
            await slow(pieces)

        task = asyncio.create_task(engine.generate(work(request="s", max_tokens=10), emit))
        await engine.generate(work(max_tokens=100, ignore_eos=True), fast)
        fast_done.set()
        assert (await task).usage.completion_tokens == 10
        assert (len(slow.pieces), slow.calls) == (10, 2)

    with_engine(scene)


def test_an_engine_without_delay_lets_others_run_between_steps() -> None:
    async def scene(engine: SimulatedEngine) -> None:
        task = asyncio.create_task(engine.generate(work(max_tokens=500, ignore_eos=True), Heard()))
        turns = 0
        while not task.done():
            turns += 1
            await asyncio.sleep(0)
        assert turns >= 500

    with_engine(scene)


def test_paced_requests_take_the_time_they_were_given() -> None:
    async def scene(engine: SimulatedEngine) -> float:
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        hook = SimHook(ttft_ms=30, itl_ms=5)
        await asyncio.gather(
            *(engine.generate(work(sim=hook, max_tokens=11), Heard()) for _ in range(500))
        )
        return loop.time() - start_s

    assert 0.079 <= with_engine(scene) < 500 * 0.08 / 2  # at once, not one after another


def test_many_requests_in_little_memory_all_come_through() -> None:
    async def scene(engine: SimulatedEngine) -> None:
        async def one(number: int) -> None:
            heard = Heard()
            hook = SimHook(itl_ms=0.1) if number % 3 == 0 else None
            asked = work(request=str(number), prompt=[number + 5] * 30, sim=hook, n=1 + number % 2)
            finish = await engine.generate(asked, heard)
            assert len(heard.pieces) == finish.usage.completion_tokens

        await asyncio.gather(*(one(number) for number in range(60)))
        assert engine.preemptions
        assert engine.load() == IDLE

    with_engine(scene, num_gpu_blocks_override=40, max_num_seqs=16, max_num_batched_tokens=32)


def test_stopping_ends_what_runs_and_what_comes() -> None:
    async def scene(engine: SimulatedEngine) -> None:
        task = asyncio.create_task(engine.generate(work(sim=SimHook(hang_at=0)), Heard()))
        await turns(20)
        assert engine.load().running == 1
        await engine.stop()
        with pytest.raises(EngineDied):
            await task
        with pytest.raises(EngineDied):
            await engine.generate(work(), Heard())
        assert engine.load() == IDLE

    with_engine(scene)


def test_a_fault_in_the_machine_ends_every_request(monkeypatch: pytest.MonkeyPatch) -> None:
    fault = ZeroDivisionError("a bug")

    def advance(now_s: float) -> float | None:
        raise fault

    async def scene(engine: SimulatedEngine) -> None:
        task = asyncio.create_task(engine.generate(work(sim=SimHook(hang_at=0)), Heard()))
        await turns(20)
        monkeypatch.setattr(engine._batch, "advance", advance)
        ends = await asyncio.gather(task, engine.generate(work(), Heard()), return_exceptions=True)
        for end in ends:
            assert isinstance(end, EngineDied)
            assert end.__cause__ is fault

    with_engine(scene)


def test_exit_at_ends_the_process_with_status_70() -> None:
    script = """
import asyncio
from schemas.wire import Sampling, SimHook
from workers.engine import Work
from workers.engine_sim import SimulatedEngine

async def main():
    engine = SimulatedEngine()
    await engine.start()
    async def emit(pieces):
        print(len(pieces), flush=True)
    work = Work("r", [5], Sampling(max_tokens=9), sim=SimHook(exit_at=2))
    await engine.generate(work, emit)

asyncio.run(main())
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert (ended.returncode, ended.stdout.split()) == (70, [b"1", b"1"])
