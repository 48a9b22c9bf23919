"""The plan of a run: what goes wrong, and when."""

from itertools import pairwise

from chaos.faults import REST_S, WEIGHTS, Fault, Tier, plan

TARGETS: dict[str, Tier] = {
    "nats": "nats",
    "gateway-1": "front",
    "gateway-2": "front",
    "worker-1": "worker",
    "worker-2": "worker",
    "worker-3": "worker",
}


def _plan(*, seed: int = 7, seconds: float = 600, per_minute: float = 15) -> tuple[Fault, ...]:
    return plan(seed=seed, seconds=seconds, per_minute=per_minute, targets=TARGETS)


def test_a_seed_makes_the_same_plan_again_and_another_seed_another() -> None:
    assert _plan(seed=1) == _plan(seed=1)
    assert _plan(seed=1) != _plan(seed=2)


def test_ten_minutes_hold_over_a_hundred_faults_of_every_kind_for_every_tier() -> None:
    faults = _plan()
    assert len(faults) > 100
    seen = {(TARGETS[fault.target], fault.kind) for fault in faults}
    assert seen == {(tier, kind) for tier, kinds in WEIGHTS.items() for kind in kinds}


def test_all_is_mended_before_the_end() -> None:
    for seed in range(50):
        for fault in _plan(seed=seed, seconds=30):
            assert 0 < fault.at_s <= fault.end_s <= 30


def test_a_target_suffers_one_fault_at_a_time_and_then_rests() -> None:
    for name in TARGETS:
        own = [fault for fault in _plan(per_minute=60) if fault.target == name]
        assert len(own) > 1
        for former, latter in pairwise(own):
            assert latter.at_s >= former.end_s + REST_S


def test_sometimes_two_targets_suffer_at_the_same_moment() -> None:
    moments = [fault.at_s for fault in _plan()]
    assert len(set(moments)) < len(moments)
