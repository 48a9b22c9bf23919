import pytest

from workers.sim.options import BadOption, size_of, time_model_of


def test_sizes_are_the_documented_ones_unless_given() -> None:
    size = size_of({})
    assert (size.slots, size.step_tokens, size.model_len) == (1024, 8192, 32768)
    assert (size.block_size, size.blocks, size.prefix_caching) == (16, 65536, True)
    assert size_of({"block_size": 32}).blocks == 32768
    assert size_of({"max_num_seqs": 4, "enable_prefix_caching": False}).slots == 4


def test_the_context_is_no_longer_than_the_kv_cache() -> None:
    assert size_of({"num_gpu_blocks_override": 10}).model_len == 160
    with pytest.raises(BadOption, match="max_model_len 200 is more than the 160 tokens"):
        size_of({"num_gpu_blocks_override": 10, "max_model_len": 200})


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_seqs": "many"}, "max_num_seqs"),
        ({"block_size": 1.5}, "block_size"),
    ],
)
def test_a_wrong_engine_argument_is_named(raw: dict[str, object], named: str) -> None:
    with pytest.raises(BadOption, match=named):
        size_of(raw)


@pytest.mark.parametrize(
    ("raw", "named"),
    [({"speed": 2}, "speed"), ({"step_us": -1}, "step_us"), ({"startup_s": "1"}, "startup_s")],
)
def test_a_wrong_time_option_is_named(raw: dict[str, object], named: str) -> None:
    with pytest.raises(BadOption, match=named):
        time_model_of(raw)


def test_time_is_free_unless_asked_for() -> None:
    assert time_model_of({}).instant
    model = time_model_of({"step_us": 5, "decode_us_per_seq": 2, "prefill_us_per_token": 0.5})
    assert model.step_s(prefill_tokens=10, decoding=3) == pytest.approx(16e-6)
