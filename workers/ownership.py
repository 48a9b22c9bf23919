"""Which partitions a worker owns: rendezvous hashing, so a join or a loss moves only its share.

Workers that disagree for a moment do no harm: both pull at the owner's priority.
"""

import hashlib
from collections.abc import Iterable, Mapping

from schemas.model import WorkerEntry


def rivals(peers: Mapping[str, WorkerEntry], *, model: str) -> list[str]:
    """Return the workers among which a model's partitions are shared: who drains owns none."""
    return [name for name, peer in peers.items() if peer.model == model and not peer.draining]


def owned(worker: str, workers: Iterable[str], *, partitions: int) -> frozenset[int]:
    """Return the partitions for which `worker` scores highest among `workers` and itself."""
    rivals = {*workers, worker}
    return frozenset(
        partition
        for partition in range(partitions)
        if max(rivals, key=lambda name: _score(name, partition)) == worker
    )


def _score(worker: str, partition: int) -> bytes:
    return hashlib.blake2b(f"{partition}/{worker}".encode(), digest_size=8).digest()
