"""Prefix hashes of KV blocks. Owns the chain rule; knows neither pool nor tokeniser.

A block's hash covers everything its KV depends on: the chain's root (tenant salt, version, adapter,
KV dtype, image hashes) and every id up to its end. Equal hash, equal KV.
"""

from collections.abc import Sequence
from hashlib import sha256

import numpy as np


def chain_root(
    *, salt: bytes, version: str, adapter: str = "", kv_dtype: str = "", images: Sequence[bytes] = ()
) -> bytes:
    """The parent of a sequence's first block. `salt` is the server's, per tenant."""
    digest = sha256()
    for part in (salt, version.encode(), adapter.encode(), kv_dtype.encode(), *images):
        digest.update(len(part).to_bytes(4, "little"))
        digest.update(part)
    return digest.digest()


def chain_blocks(root: bytes, ids: Sequence[int], block_size: int) -> tuple[bytes, ...]:
    """Hashes of every full block of `ids`, which follow what hashed to `root`; a partial tail has none."""
    data = np.asarray(ids, dtype=np.int32).tobytes()
    width = 4 * block_size
    hashes: list[bytes] = []
    parent = root
    for start in range(0, len(data) - width + 1, width):
        parent = sha256(parent + data[start : start + width]).digest()
        hashes.append(parent)
    return tuple(hashes)
