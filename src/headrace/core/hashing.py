"""Prefix hashes of KV blocks, and of sequences. Owns the chain rule; knows neither pool nor tokeniser.

A block's hash covers everything its KV depends on: the chain's root (tenant salt, version, adapter,
KV dtype, image hashes) and every id up to its end. Equal hash, equal KV.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b, sha256

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
    # Most prompts are short: of a few ids this is made in less time than numpy's.
    data = array("i", ids).tobytes()
    width = 4 * block_size
    hashes: list[bytes] = []
    parent = root
    for start in range(0, len(data) - width + 1, width):
        parent = sha256(parent + data[start : start + width]).digest()
        hashes.append(parent)
    return tuple(hashes)


def sequence_digest(prompt_ids: Sequence[int], seed: int, choice: int, ids: Sequence[int]) -> bytes:
    """Of a sequence up to and with these ids. Where it is equal, what follows is the same reply's."""
    digest = blake2b(f"{seed} {choice} {len(prompt_ids)}".encode(), digest_size=16)
    digest.update(np.asarray(prompt_ids, dtype="<i4").tobytes())
    digest.update(np.asarray(ids, dtype="<i4").tobytes())
    return digest.digest()
