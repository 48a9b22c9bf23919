from typing import Any

import pytest

from schemas.wire import Sampling, SimHook
from workers.engine import Work
from workers.sim.batch import Batch, Generation
from workers.sim.ledger import Entry
from workers.sim.options import size_of, time_model_of
from workers.sim.script import script_of
from workers.sim.vocabulary import vocabulary


def batch_of(sim: dict[str, Any] | None = None, **engine_args: Any) -> Batch:
    return Batch(size_of(engine_args), time_model_of(sim or {}), vocabulary())


def add(
    batch: Batch, *, tokens: int = 10, prompt: int = 20, first: int = 5, **hook: Any
) -> Generation:
    sim = SimHook(**hook) if hook else None
    sampling = Sampling(max_tokens=tokens, ignore_eos=True)
    work = Work("r", range(first, first + prompt), sampling, sim=sim)
    return batch.add(work, None if sim is None else script_of(sim), Entry())


def made(generation: Generation) -> int:
    return len(generation.pieces)


def test_all_running_requests_advance_in_the_same_step() -> None:
    batch = batch_of({"step_us": 10_000})
    one = add(batch)
    assert batch.advance(1.0) == pytest.approx(1.01)
    two = add(batch, first=50)
    assert batch.advance(1.005) == pytest.approx(1.01)
    assert (made(one), made(two)) == (0, 0)
    assert batch.advance(1.01) == pytest.approx(1.02)
    assert (made(one), made(two)) == (1, 0)
    assert batch.advance(1.02) == pytest.approx(1.03)
    assert (made(one), made(two)) == (2, 1)
    assert batch.news == [one, two]


def test_a_step_costs_by_prompt_tokens_and_decoding_sequences() -> None:
    batch = batch_of({"step_us": 1000, "prefill_us_per_token": 100, "decode_us_per_seq": 2000})
    add(batch, prompt=20)
    assert batch.advance(0.0) == pytest.approx(0.003)
    add(batch, prompt=30, first=500)
    assert batch.advance(0.003) == pytest.approx(0.003 + 0.001 + 0.003 + 0.002)


def test_a_late_caller_does_not_slow_the_steps_down() -> None:
    batch = batch_of({"step_us": 10_000})
    generation = add(batch, tokens=100)
    now_s = 0.0
    for _ in range(51):
        again_s = batch.advance(now_s)
        assert again_s is not None
        now_s = again_s + 0.001
    assert made(generation) == 50
    assert again_s == pytest.approx(0.51)


def test_a_paced_request_keeps_its_own_clock_without_drift() -> None:
    batch = batch_of({"step_us": 1_000_000})
    add(batch)
    batch.advance(0.0)
    paced = add(batch, first=50, ttft_ms=500, itl_ms=20)
    assert batch.advance(0.1) == pytest.approx(0.6)
    assert batch.advance(0.6009) == pytest.approx(0.62)
    assert batch.advance(0.6209) == pytest.approx(0.64)
    assert made(paced) == 2
    # After a pause of the caller, one token each time until it has caught up.
    assert batch.advance(0.7) == pytest.approx(0.66)
    assert batch.advance(0.7) == pytest.approx(0.68)


def test_nothing_to_do_is_no_time_to_come_again() -> None:
    batch = batch_of()
    assert batch.advance(0.0) is None
    generation = add(batch, tokens=1)
    assert batch.advance(1.0) == 1.0
    assert generation.done
    assert batch.advance(1.0) is None
    add(batch, hang_at=0)
    assert batch.advance(2.0) == 2.0
    assert batch.advance(2.0) is None
    assert batch.running == 1


def test_aborting_frees_slot_and_blocks_at_once_in_every_state() -> None:
    batch = batch_of({"step_us": 1000}, max_num_seqs=3)
    hooks: list[dict[str, Any]] = [{}, {"itl_ms": 20}, {"hang_at": 0}, {}]
    generations = [add(batch, first=50 * index, **hook) for index, hook in enumerate(hooks)]
    batch.advance(0.0)
    batch.advance(0.001)
    batch.advance(0.002)
    assert (batch.running, batch.waiting) == (3, 1)
    for generation in reversed(generations):
        batch.abort(generation)
    assert (batch.running, batch.waiting, batch.kv_used) == (0, 0, 0.0)
    assert batch.advance(5.0) is None


def test_preempted_requests_say_the_same_as_others() -> None:
    def said(batch: Batch, **hook: Any) -> list[list[int]]:
        generations = [add(batch, tokens=60, first=50 * i, **hook) for i in range(6)]
        now_s: float | None = 0.0
        while now_s is not None:
            now_s = batch.advance(now_s)
        assert batch.kv_used == 0.0
        return [[piece.tokens[0] for piece in each.pieces] for each in generations]

    roomy, tight, paced = (
        batch_of(),
        batch_of(num_gpu_blocks_override=12),
        batch_of(num_gpu_blocks_override=12),
    )
    expected = said(roomy)
    assert [len(tokens) for tokens in expected] == [60] * 6
    assert said(tight) == expected
    assert said(paced, itl_ms=10) == expected
    assert not roomy.preemptions
    assert tight.preemptions
    assert paced.preemptions


def test_timers_of_aborted_requests_do_not_pile_up() -> None:
    batch = batch_of()
    for _ in range(1000):
        generation = add(batch, ttft_ms=60_000)
        batch.advance(0.0)
        batch.abort(generation)
    assert len(batch._timers) < 100
