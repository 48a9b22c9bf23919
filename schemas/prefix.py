"""Which partition a prompt belongs to. Rule: equal prefixes meet, and nothing else decides.

The key is SHA-256 over model, adapter, tenant (unless tenants share their caches) or session, and
the first `PREFIX_TOKENS` token ids of the rendered prompt, so neither the JSON's key order nor
"parts against string" can move a prompt to another worker.
"""

import hashlib
from array import array
from collections.abc import Sequence
from typing import Final

PREFIX_TOKENS: Final = 128


def prefix_key(
    *,
    model: str,
    adapter: str | None,
    tenant: str | None,
    session: str | None,
    tokens: Sequence[int],
) -> bytes:
    """Return the 32-byte key of a prompt; a named session keys it instead of its tokens.

    `tenant` is None where tenants may share prefixes.
    """
    digest = hashlib.sha256()
    for part in (model, adapter, tenant, session):
        # A length before each part: ("ab", "c") and ("a", "bc") differ, None and "" too.
        raw = b"" if part is None else b"\x01" + part.encode()
        digest.update(len(raw).to_bytes(4, "big") + raw)
    if session is None:
        digest.update(array("I", tokens[:PREFIX_TOKENS]).tobytes())
    return digest.digest()


def partition_of(key: bytes, *, partitions: int) -> int:
    """Return the partition, 0 to `partitions` - 1, of a prefix key."""
    return int.from_bytes(key[:8], "big") % partitions
