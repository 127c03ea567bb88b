"""How a step's packet is divided: how many rows, tokens, tiles and samples it has room for, and where each begins.

A layout is also what a graph is captured for. Pure arithmetic over counts.
"""

from functools import lru_cache

from msgspec import Struct

from headrace.runner.cuda.buckets import bucket_for, chunk_bucket, row_buckets, token_buckets

# Word 0 is the number of changed words.
HEADER = 4
# Rounds of parts that tiles may be cut into.
MOST_ROUNDS = 3
# Sections begin at 16 bytes: kernels are compiled once for that, and again for every other case.
_ALIGNED = 4


class Layout(Struct, frozen=True):
    """How many entries each section has, padding included. Rows are decode rows, then chunks. A step of decode rows alone
    has no tokens, tiles or samples sections: its rows are its tokens, and all of them sample. `whole`: somebody asks for
    the last states of all tokens, and not only of those that sample. `fresh` are tiles of chunks that begin their sequences,
    `tiles` those of the others, or of all where none are `fresh`."""

    rows: int
    decodes: int
    tokens: int = 0
    tiles: int = 0
    samples: int = 0
    whole: bool = False
    fresh: int = 0

    @property
    def chunks(self) -> int:
        return self.rows - self.decodes

    @property
    def num_tokens(self) -> int:
        return self.tokens or self.rows

    @property
    def num_samples(self) -> int:
        return self.samples if self.tokens else self.rows

    @property
    def sections(self) -> dict[str, tuple[int, int]]:
        """First word and number of words of each section, by name; what is changed comes last."""
        return _sections(self)

    @property
    def changes_at(self) -> int:
        return _sections(self)["changes"][0]


@lru_cache(maxsize=1024)
def _sections(layout: Layout) -> dict[str, tuple[int, int]]:
    sizes = (
        ("slots", layout.rows),
        ("ends", layout.rows),
        ("ids", layout.tokens),
        ("positions", layout.tokens),
        ("owners", layout.tokens),
        ("offsets", layout.chunks + 1 if layout.tokens else 0),
        ("prior", layout.chunks),
        ("tiles", 4 * layout.tiles),
        ("fresh", 4 * layout.fresh),
        ("places", layout.samples),
        ("sampled", layout.samples),
        ("changes", 0),
    )
    found, at = {}, HEADER
    for name, size in sizes:
        found[name] = (at, size)
        at += -(-size // _ALIGNED) * _ALIGNED
    return found


class LayoutChoice(Struct, frozen=True):
    """The layouts that steps of an engine run in. Tiles of a step that are few are cut into parts; `spread` of them are
    computed at once. In steps of `fresh_tokens` and more, chunks that begin have tiles of `fresh_rows`, which stay whole."""

    slots: int
    max_tokens: int
    tile_rows: int
    spread: int = 0
    fresh_rows: int = 0
    fresh_tokens: int = 0

    def decode(self, rows: int) -> Layout:
        """The smallest for so many rows, each fed by the device."""
        bucket = bucket_for(max(1, rows), row_buckets(self.slots))
        return Layout(bucket, bucket)

    def mixed(self, decodes: int, chunks: int, tokens: int, *, fresh: bool = False) -> Layout:
        """For any step. Where chunks are more than a bucket has room for, the next one may have it. `fresh`: all of them
        begin their sequences."""
        for bucket in token_buckets(self.max_tokens, shared=decodes > 0):
            if bucket >= tokens and chunk_bucket(bucket, self.slots) >= chunks:
                is_fresh = fresh and not decodes and self._has_fresh(bucket)
                return self._fresh(bucket) if is_fresh else self._mixed(bucket, decodes > 0)
        # Every row of the largest bucket may be a chunk of a token or two.
        return self._layout(self.max_tokens, self.slots, self.slots)

    def all(self) -> list[Layout]:
        """Those that are captured before the first request, largest first."""
        mixed = [
            self._mixed(size, decoding)
            for decoding in (True, False)
            for size in token_buckets(self.max_tokens, shared=decoding)
        ]
        mixed += [self._fresh(size) for size in token_buckets(self.max_tokens, shared=False) if self._has_fresh(size)]
        mixed.sort(key=lambda layout: layout.tokens, reverse=True)
        return mixed + [Layout(size, size) for size in reversed(row_buckets(self.slots))]

    def _mixed(self, tokens: int, decoding: bool) -> Layout:
        """Rows of padding cost a decode row nothing but a look: one size serves every number of them. Each is a token."""
        return self._layout(tokens, min(self.slots, tokens) if decoding else 0, chunk_bucket(tokens, self.slots))

    def _has_fresh(self, tokens: int) -> bool:
        return self.fresh_rows > 0 and tokens >= self.fresh_tokens

    def _fresh(self, tokens: int) -> Layout:
        chunks = chunk_bucket(tokens, self.slots)
        return Layout(chunks, 0, tokens, samples=min(self.slots, chunks), fresh=self._fresh_tiles(tokens, chunks))

    def _fresh_tiles(self, tokens: int, chunks: int) -> int:
        return -(-tokens // self.fresh_rows) + chunks if self._has_fresh(tokens) else 0

    def _layout(self, tokens: int, decodes: int, chunks: int) -> Layout:
        tiles = -(-tokens // self.tile_rows) + chunks + MOST_ROUNDS * self.spread
        samples, fresh = min(self.slots, decodes + chunks), self._fresh_tiles(tokens, chunks)
        return Layout(decodes + chunks, decodes, tokens, tiles, samples, fresh=fresh)
