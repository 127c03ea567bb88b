"""What a step asks of the device: the Protocol that kernels and their plain reference meet.

Every call writes its outputs wholly, allocates nothing that outlives it and does not wait for the device, so that it
can be part of a graph. Free memory may hold NaN. A row or token of slot -1 is padding. Arguments go by their places, so
that a function of other names for them is an operation too.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from headrace.runner.cuda.device_slots import DeviceSlots, StepInputs
from headrace.runner.cuda.expert_space import ExpertSpace
from headrace.runner.cuda.layout import Layout
from headrace.runner.cuda.odd_space import RuledRows, ScoredRows
from headrace.runner.cuda.squares import Squares


class Turn(NamedTuple):
    """What a layer's `qkv` is turned by, and where it goes: as `Ops.rotary_write` has it."""

    positions: Tensor
    cells: Tensor
    cosines: Tensor
    sines: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    eps: float
    queries: Tensor
    keys: Tensor
    values: Tensor


class Ops(Protocol):
    # Tokens of a chunk that one tile of `prefill_attention` computes.
    tile_rows: int
    # How many parts of tiles it computes at once; 0: tiles stay whole.
    spread: int
    # Tokens of a chunk that one tile of `fresh_attention` computes; 0: there is no such operation.
    fresh_rows: int
    # Of a step, at least, to go through it.
    fresh_tokens: int

    @property
    def name(self) -> str:
        """For the numerics fingerprint."""

    @property
    def row_exact(self) -> bool:
        """Whether a row's bits depend on its own sequence alone. Whoever adds a way around one of these operations, for
        some numbers of rows, must leave it where this is asked for."""

    def compiling(self, work: Callable[[], object], /) -> AbstractContextManager[None]:
        """Inside, where nothing of it is launched, what `work` launches is compiled; at the end all of it is. `work` may be
        called before, and its operations then do nothing."""

    def begin(self, packet: Tensor, layout: Layout, slots: DeviceSlots, inputs: StepInputs, block_size: int, /) -> None:
        """Write the packet's changes, then every row's length, then every token's id, position and cell."""

    def product(self, rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, /) -> None:
        """`out` [rows, height] = `rows` [rows, width] times `weight` [height, width], plus `bias` [height]."""

    def scaled_product(self, rows: Tensor, weight: Tensor, unit: Tensor, scale: Tensor, out: Tensor, /) -> None:
        """`out` [rows, height] = `rows` [rows, width] times `weight` [height, width], both in eight bits, times `scale` [1].
        `unit` is a one. Rows are a multiple of 16."""

    def quantise(self, rows: Tensor, out: Tensor, out_factors: Tensor, /) -> None:
        """`out` in eight bits, times `out_factors` [rows], is `rows`. Wherever an operation has `row_factors`, its rows are
        first multiplied with them; where it has `out_factors`, its `out` is in eight bits and has these factors."""

    def rescale(self, rows: Tensor, row_factors: Tensor, bias: Tensor, /) -> None:
        """`rows` become themselves times their factor, plus `bias`."""

    def rms_norm(
        self, rows: Tensor, weight: Tensor, eps: float, out: Tensor, /, *, out_factors: Tensor | None = None
    ) -> None: ...

    def add_rms_norm(
        self,
        rows: Tensor,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        out: Tensor,
        /,
        *,
        row_factors: Tensor | None = None,
        out_factors: Tensor | None = None,
    ) -> None:
        """`residual` += rows, then out = RMSNorm(residual)."""

    def rotary_write(
        self,
        qkv: Tensor,
        positions: Tensor,
        cells: Tensor,
        cosines: Tensor,
        sines: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        /,
        *,
        row_factors: Tensor | None = None,
        in_place: bool = False,
    ) -> None:
        """Norm (where given) and turn queries [t, heads, dim] and keys; write keys and values into their cells, and
        `in_place` also to where in `qkv` they came from."""

    def silu_mul(
        self,
        gate_up: Tensor,
        out: Tensor,
        /,
        *,
        row_factors: Tensor | None = None,
        out_factors: Tensor | None = None,
    ) -> None:
        """With both factors or with none."""

    def turn_rows(
        self, rows: Tensor, weight: Tensor, bias: Tensor | None, qkv: Tensor, turn: Turn, /, *, in_place: bool
    ) -> None:
        """`product`, then `rotary_write`. Queries need not be left in `qkv`, but keys and values are, turned or not."""

    def gate_rows(self, rows: Tensor, weight: Tensor, room: Tensor, out: Tensor, /) -> None:
        """`product`, then `silu_mul`; `room` for what lies between may be left as it was."""

    def sum_rows(
        self,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        room: Tensor,
        residual: Tensor,
        norm: Tensor,
        eps: float,
        out: Tensor,
        /,
    ) -> None:
        """`product`, then `add_rms_norm`; `room` likewise."""

    def experts(
        self,
        rows: Tensor,
        cells: Tensor,
        router: Tensor,
        gate_up: Tensor,
        down: Tensor,
        num_chosen: int,
        out: Tensor,
        space: ExpertSpace,
        /,
        *,
        normed: bool,
    ) -> None:
        """Each row of `rows`, `out` [rows, width] by `num_chosen` of its experts: `router` [experts, width], `gate_up`
        [experts, 2 inner, width], `down` [experts, width, inner]. Rows of cell -1 are padding and become zeros, rows that
        are not finite NaN."""

    def scratch(self, rows: int, context: int, *, last: bool = False) -> Any:
        """Memory that attention of so many single tokens needs, made once per bucket; none has more positions than
        `context`. `last`: they are the last of chunks, of a step of nothing else, and most may be padding."""

    def decode_attention(
        self,
        out: Tensor,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        tables: Tensor,
        slots: Tensor,
        lengths: Tensor,
        scale: float,
        scratch: Any,
        /,
    ) -> None:
        """A query [rows, heads, dim] each over the first `lengths[slot]` positions of its slot."""

    def turns(self, rows: int) -> bool:
        """Whether so many single tokens go through `turned_attention`, or through the two operations that it joins."""

    def turned_attention(
        self,
        out: Tensor,
        qkv: Tensor,
        cosines: Tensor,
        sines: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        keys: Tensor,
        values: Tensor,
        tables: Tensor,
        slots: Tensor,
        lengths: Tensor,
        scale: float,
        scratch: Any,
        /,
        *,
        row_factors: Tensor | None = None,
    ) -> None:
        """`rotary_write` and `decode_attention` of rows that are one token each, the last of its slot."""

    def row_product(
        self,
        row: Tensor,
        weight: Tensor,
        out: Tensor,
        /,
        *,
        norm: Tensor | None = None,
        eps: float = 0.0,
        bias: Tensor | None = None,
        adds: bool = False,
        gated: bool = False,
        scale: Tensor | None = None,
    ) -> None:
        """One row [1, width] after its norm times `weight` [height, width], plus bias, plus what `out` held (`adds`); or
        the gate (`gated`), whose weight has the gates' lines first and then as many others. `scale` [1] is that of a
        weight in eight bits."""

    def fuses(self, rows: int) -> bool:
        """Whether so many tokens go through the four operations that follow, or through products, norms and gates
        apart. `scaled` is what a norm is made of: rows times its weights; `squares`, which come with it, give the factor
        that is still to come."""

    def start_rows(
        self, ids: Tensor, embeddings: Tensor, norm: Tensor, residual: Tensor, scaled: Tensor, squares: Squares, /
    ) -> None:
        """`residual` becomes the lines of `embeddings`; `scaled` and `squares` are left for the norm `norm` of it."""

    def normed_product(
        self, scaled: Tensor, squares: Squares, weight: Tensor, bias: Tensor | None, eps: float, out: Tensor, /
    ) -> None:
        """`product` of the norm that `scaled` and `squares` are for."""

    def gated_product(self, scaled: Tensor, squares: Squares, weight: Tensor, eps: float, out: Tensor, /) -> None:
        """The same through `silu_mul`."""

    def added_product(
        self,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual: Tensor,
        norm: Tensor,
        scaled: Tensor,
        squares: Squares,
        /,
    ) -> None:
        """`residual` += `product` of `rows`; then `scaled` and `squares` are left for the norm `norm` of it."""

    def prefill_attention(
        self,
        out: Tensor,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        tables: Tensor,
        slots: Tensor,
        offsets: Tensor,
        prior: Tensor,
        tiles: Tensor,
        scale: float,
        /,
    ) -> None:
        """Chunks of several sequences, each token over all positions up to its own. Chunk c's tokens are `offsets[c]` to
        `offsets[c + 1]`; other tokens of `out` are left alone."""

    def fresh_attention(
        self, out: Tensor, queries: Tensor, qkv: Tensor, offsets: Tensor, tiles: Tensor, scale: float, /
    ) -> None:
        """The same of the chunks that `tiles` name, which begin their sequences, from what `rotary_write` left in place."""

    def sample(self, logits: Tensor, slots: Tensor, state: DeviceSlots, tokens: Tensor, statuses: Tensor, /) -> None:
        """A token (int32, -1 for padding and failed rows) and a status (uint8) for each row, by its slot's settings; the
        token's place is the slot's length. Tokens become their slots' `state.last` too."""

    def sample_ruled(
        self, logits: Tensor, rows: RuledRows, state: DeviceSlots, tokens: Tensor, statuses: Tensor, /
    ) -> None:
        """What `sample` chose for these rows is chosen again, from their logits under their rules: likewise, and a row for
        which these leave nothing has status MASK. A row that had failed keeps its status. Tokens are counted where their
        row has a line for it. `rows.logits` is room for it."""

    def score(self, logits: Tensor, rows: ScoredRows, tokens: Tensor, /) -> None:
        """Log-probabilities of the tokens at the rows' places and of the likeliest ids, as the model gave them. Those of
        failed rows are any."""
