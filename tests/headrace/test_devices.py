"""Facts about which worker gets which GPUs or cores."""

from headrace.devices import ranks, share


def shares(
    workers: int,
    *,
    per_worker: int = 1,
    gpus: str = "",
    cores: int = 0,
    environ: dict[str, str] | None = None,
) -> list[dict[str, str]]:
    return [
        share(
            index,
            workers=workers,
            per_worker=per_worker,
            gpus=list(gpus),
            cores=range(cores),
            environ=environ or {},
        )
        for index in range(workers)
    ]


def test_an_engine_spreads_over_the_product_of_its_parallel_sizes() -> None:
    assert ranks({}) == 1
    assert ranks({"tensor_parallel_size": 4, "pipeline-parallel-size": 2, "dtype": "auto"}) == 8


def test_each_worker_gets_gpus_of_its_own() -> None:
    assert shares(2, per_worker=2, gpus="0123") == [
        {"CUDA_VISIBLE_DEVICES": "0,1"},
        {"CUDA_VISIBLE_DEVICES": "2,3"},
    ]


def test_one_worker_and_too_few_gpus_leave_the_environment_alone() -> None:
    assert shares(1, gpus="0123", cores=8) == [{}]
    assert shares(2, per_worker=2, gpus="012") == [{}, {}]


def test_without_gpus_each_worker_gets_cores_of_its_own() -> None:
    assert shares(2, cores=4) == [
        {"VLLM_CPU_OMP_THREADS_BIND": "0,2", "OMP_NUM_THREADS": "2"},
        {"VLLM_CPU_OMP_THREADS_BIND": "1,3", "OMP_NUM_THREADS": "2"},
    ]
    assert shares(2, per_worker=2, cores=4)[1]["VLLM_CPU_OMP_THREADS_BIND"] == "1|3"


def test_more_workers_than_cores_share_them_in_turn() -> None:
    bound = [found["VLLM_CPU_OMP_THREADS_BIND"] for found in shares(3, cores=2)]
    assert bound == ["0", "1", "0"]


def test_cores_that_the_user_has_bound_stay() -> None:
    assert shares(2, cores=4, environ={"VLLM_CPU_OMP_THREADS_BIND": "0"}) == [{}, {}]
