"""The plain reference of every device operation, in torch: what kernels are compared with, and what tests run on a CPU.

Written to be read. It waits for the device and loops over rows; nothing fast goes through it.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from headrace.core.plan import RowStatus
from headrace.runner.cuda.device_slots import DeviceSlots, StepInputs
from headrace.runner.cuda.expert_space import ExpertSpace
from headrace.runner.cuda.fp8_weights import LARGEST, LEAST
from headrace.runner.cuda.kernels import plain_experts, plain_rules
from headrace.runner.cuda.layout import Layout
from headrace.runner.cuda.odd_space import RuledRows, ScoredRows
from headrace.runner.cuda.parted_ops import PartedOps
from headrace.runner.cuda.products import library_product, plain_scaled_product
from headrace.runner.cuda.squares import Squares
from headrace.runner.torch import luck
from headrace.runner.torch.sampler_ranks import block_maxima, first_best, padded, padded_size
from headrace.runner.torch.sampler_urn import Filters, Urn


class ReferenceOps(PartedOps):
    tile_rows = 16
    spread = 0
    fresh_rows = 8
    fresh_tokens = 128

    @property
    def name(self) -> str:
        return "reference"

    @property
    def row_exact(self) -> bool:
        return False

    def compiling(self, work: Callable[[], object]) -> AbstractContextManager[None]:
        return nullcontext()

    def begin(self, packet: Tensor, layout: Layout, slots: DeviceSlots, inputs: StepInputs, block_size: int) -> None:
        part = {name: packet[at : at + size].long() for name, (at, size) in layout.sections.items()}
        at, count = layout.changes_at, int(packet[0])
        pairs = packet[at : at + 2 * count].view(count, 2)
        slots.words[pairs[:, 0].long()] = pairs[:, 1]
        live = part["slots"] >= 0
        slots.lengths[part["slots"][live]] = part["ends"][live].int()
        if layout.tokens:
            owners, positions, ids = part["owners"], part["positions"], part["ids"]
        else:
            owners, positions = torch.arange(layout.rows, device=packet.device), part["ends"] - 1
            ids = torch.full_like(owners, -1)
        of = torch.where(owners >= 0, part["slots"][owners.clamp(min=0)], -1)
        safe = of.clamp(min=0)
        blocks = slots.tables[safe, positions // block_size].long()
        tokens = len(of)
        inputs.ids[:tokens] = torch.where(of < 0, 0, torch.where(ids >= 0, ids, slots.last[safe].long())).int()
        inputs.positions[:tokens] = torch.where(of < 0, 0, positions).int()
        inputs.cells[:tokens] = torch.where(of < 0, -1, blocks * block_size + positions % block_size)

    def product(self, rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        library_product(rows, weight, bias, out)

    def scaled_product(self, rows: Tensor, weight: Tensor, unit: Tensor, scale: Tensor, out: Tensor) -> None:
        plain_scaled_product(rows, weight, unit, scale, out)

    def quantise(self, rows: Tensor, out: Tensor, out_factors: Tensor) -> None:
        _put(rows.float(), out, out_factors)

    def rescale(self, rows: Tensor, row_factors: Tensor, bias: Tensor) -> None:
        rows.copy_(_wide(rows, row_factors) + bias.float())

    def rms_norm(
        self, rows: Tensor, weight: Tensor, eps: float, out: Tensor, *, out_factors: Tensor | None = None
    ) -> None:
        _put(_norm(rows.float(), weight, eps), out, out_factors)

    def add_rms_norm(
        self,
        rows: Tensor,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        out: Tensor,
        *,
        row_factors: Tensor | None = None,
        out_factors: Tensor | None = None,
    ) -> None:
        residual.copy_(residual.float() + _wide(rows, row_factors))
        self.rms_norm(residual, weight, eps, out, out_factors=out_factors)

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
        *,
        row_factors: Tensor | None = None,
        in_place: bool = False,
    ) -> None:
        tokens, heads, dim = queries.shape
        kv_heads = keys.shape[1]
        parts = _wide(qkv, row_factors).view(tokens, heads + 2 * kv_heads, dim)
        q, k, v = parts[:, :heads], parts[:, heads:-kv_heads], parts[:, -kv_heads:]
        if q_norm is not None and k_norm is not None:
            q, k = _norm(q, q_norm, eps), _norm(k, k_norm, eps)
        cos, sin = (table[positions.long()].unsqueeze(1) for table in (cosines, sines))
        k = _turn(k, cos, sin)
        queries.copy_(_turn(q, cos, sin))
        live = cells >= 0
        block, offset = cells[live] // keys.shape[2], cells[live] % keys.shape[2]
        keys[block, :, offset] = k[live].to(keys.dtype)
        values[block, :, offset] = v[live].to(values.dtype)
        if in_place:
            qkv.view(parts.shape)[:, heads:] = torch.cat((k, v), 1)

    def silu_mul(
        self, gate_up: Tensor, out: Tensor, *, row_factors: Tensor | None = None, out_factors: Tensor | None = None
    ) -> None:
        gate, up = _wide(gate_up, row_factors).chunk(2, -1)
        _put(torch.nn.functional.silu(gate) * up, out, out_factors)

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
        *,
        normed: bool,
    ) -> None:
        out.copy_(plain_experts.experts(rows, cells, router, gate_up, down, num_chosen, normed=normed))

    def scratch(self, rows: int, context: int, *, last: bool = False) -> None:
        return None

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
        scratch: object,
    ) -> None:
        # A step of few tokens has fewer rows than slots are named.
        for row, slot in enumerate(slots[: len(out)].tolist()):
            if slot < 0:
                out[row] = 0
                continue
            length = int(lengths[slot])
            seen, held = (_context(cells, tables[slot], length) for cells in (keys, values))
            out[row] = _attend(queries[row : row + 1], seen, held, scale)[0]

    def turns(self, rows: int) -> bool:
        return True

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
        scratch: object,
        *,
        row_factors: Tensor | None = None,
    ) -> None:
        safe, size = slots.long().clamp(min=0), keys.shape[2]
        positions = torch.where(slots >= 0, lengths[safe] - 1, 0).long()
        cells = torch.where(slots >= 0, tables[safe, positions // size].long() * size + positions % size, -1)
        queries = torch.empty_like(out)
        turned = (qkv, positions, cells, cosines, sines, q_norm, k_norm, eps, queries, keys, values)
        self.rotary_write(*turned, row_factors=row_factors)
        self.decode_attention(out, queries, keys, values, tables, slots, lengths, scale, scratch)

    def row_product(
        self,
        row: Tensor,
        weight: Tensor,
        out: Tensor,
        *,
        norm: Tensor | None = None,
        eps: float = 0.0,
        bias: Tensor | None = None,
        adds: bool = False,
        gated: bool = False,
        scale: Tensor | None = None,
    ) -> None:
        found = (row if norm is None else _norm(row.float(), norm, eps)).float() @ weight.float().t()
        found = found if scale is None else found * scale
        if gated:
            self.silu_mul(found, out)
            return
        for part in (bias, out if adds else None):
            found = found if part is None else found + part.float()
        out.copy_(found)

    def fuses(self, rows: int) -> bool:
        return rows > 1

    def start_rows(
        self, ids: Tensor, embeddings: Tensor, norm: Tensor, residual: Tensor, scaled: Tensor, squares: Squares
    ) -> None:
        residual.copy_(embeddings[ids.long()])
        _leave(residual, norm, scaled, squares)

    def normed_product(
        self, scaled: Tensor, squares: Squares, weight: Tensor, bias: Tensor | None, eps: float, out: Tensor
    ) -> None:
        found = _scale(scaled, squares, eps) @ weight.float().t()
        out.copy_(found if bias is None else found + bias.float())

    def gated_product(self, scaled: Tensor, squares: Squares, weight: Tensor, eps: float, out: Tensor) -> None:
        self.silu_mul(_scale(scaled, squares, eps) @ weight.float().t(), out)

    def added_product(
        self,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual: Tensor,
        norm: Tensor,
        scaled: Tensor,
        squares: Squares,
    ) -> None:
        found = rows.float() @ weight.float().t()
        residual.copy_(residual.float() + (found if bias is None else found + bias.float()))
        _leave(residual, norm, scaled, squares)

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
    ) -> None:
        bounds, before = offsets.tolist(), prior.tolist()
        rows = slots.tolist()
        for chunk, tile, *_ in tiles.tolist():
            if chunk < 0:
                continue
            low = bounds[chunk] + tile * self.tile_rows
            high = min(low + self.tile_rows, bounds[chunk + 1])
            length = before[chunk] + high - bounds[chunk]
            seen, held = (_context(cells, tables[rows[chunk]], length) for cells in (keys, values))
            out[low:high] = _attend(queries[low:high], seen, held, scale)

    def fresh_attention(
        self, out: Tensor, queries: Tensor, qkv: Tensor, offsets: Tensor, tiles: Tensor, scale: float
    ) -> None:
        bounds, (tokens, heads, dim) = offsets.tolist(), queries.shape
        keys, values = qkv.view(tokens, -1, dim)[:, heads:].transpose(0, 1).chunk(2)
        for chunk, tile, *_ in tiles.tolist():
            if chunk < 0:
                continue
            begin, low = bounds[chunk], bounds[chunk] + tile * self.fresh_rows
            high = min(low + self.fresh_rows, bounds[chunk + 1])
            out[low:high] = _attend(queries[low:high], keys[:, begin:high], values[:, begin:high], scale)

    def sample(self, logits: Tensor, slots: Tensor, state: DeviceSlots, tokens: Tensor, statuses: Tensor) -> None:
        wide = padded(logits.float())
        maxima = block_maxima(wide)
        sound = maxima.amax(-1).isfinite()
        chosen = first_best(wide, maxima)
        of = slots.long().clamp(min=0)
        temperature = state.temperature[of].double()
        drawn = ((temperature > 0) & sound & (slots >= 0)).nonzero().squeeze(-1)
        if len(drawn):
            of, temperature = of[drawn], temperature[drawn]
            width = padded_size(logits.shape[1])
            depth = state.min_p[of].double().log() * temperature
            top_k = torch.where(state.top_k[of] > 0, state.top_k[of], width).double()
            filters = Filters(torch.stack((1 / temperature, depth, top_k, state.top_p[of].double()), 1))
            bits = luck.bits(state.seeds[of], state.lengths[of].long())
            chosen[drawn] = Urn(width, logits.device).draw(wide, maxima, drawn, filters, bits)
        live = slots >= 0
        state.last[slots[live].long()] = torch.where(sound, chosen, 0)[live].int()
        tokens.copy_(torch.where(sound & live, chosen, -1))
        statuses.copy_(torch.where(sound | ~live, RowStatus.OK, RowStatus.NOT_FINITE))

    def sample_ruled(
        self, logits: Tensor, rows: RuledRows, state: DeviceSlots, tokens: Tensor, statuses: Tensor
    ) -> None:
        rules, places = rows.rules, rows.places.tolist()
        for row, place in enumerate(places):
            if place >= 0:
                rows.logits[row] = plain_rules.ruled(logits[place], rules, row)
        chosen, verdicts = torch.empty_like(rows.slots), torch.empty_like(rows.slots, dtype=torch.uint8)
        self.sample(rows.logits, rows.slots, state, chosen, verdicts)
        verdicts[(rows.slots >= 0) & rows.logits.amax(-1).isneginf()] = RowStatus.MASK
        for row, place in enumerate(places):
            if place < 0 or statuses[place] != RowStatus.OK:
                continue
            tokens[place], statuses[place] = chosen[row], verdicts[row]
            line, token = int(rules.count_lines[row]), int(chosen[row])
            if line >= 0 and token >= 0:
                rules.counts[line, token] += 1

    def score(self, logits: Tensor, rows: ScoredRows, tokens: Tensor) -> None:
        for row, place in enumerate(rows.places.tolist()):
            if place >= 0:
                token, count = max(0, int(tokens[place])), int(rows.alternatives[row])
                found = plain_rules.scores(logits[place], token, count, rows.top_ids.shape[1])
                rows.logprobs[row], rows.top_ids[row], rows.top_logprobs[row] = found


def _leave(residual: Tensor, norm: Tensor, scaled: Tensor, squares: Squares) -> None:
    scaled.copy_(residual.float() * norm.float())
    squares.sums[0, : len(residual)] = residual.float().square().sum(-1)
    squares.parts = 1


def _scale(scaled: Tensor, squares: Squares, eps: float) -> Tensor:
    summed = squares.sums[: squares.parts, : len(scaled)].sum(0)
    return scaled.float() * (summed / scaled.shape[1] + eps).rsqrt()[:, None]


def _wide(rows: Tensor, row_factors: Tensor | None) -> Tensor:
    return rows.float() if row_factors is None else rows.float() * row_factors[:, None]


def _put(found: Tensor, out: Tensor, out_factors: Tensor | None) -> None:
    if out_factors is not None:
        most = found.abs().amax(-1).clamp(min=LEAST)
        found = found * (LARGEST / most)[:, None]
        out_factors.copy_(most / LARGEST)
    out.copy_(found)


def _norm(heads: Tensor, weight: Tensor, eps: float) -> Tensor:
    return heads * (heads.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.float()


def _turn(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    first, second = heads.chunk(2, -1)
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), -1)


def _context(cells: Tensor, table: Tensor, length: int) -> Tensor:
    """The first positions of a sequence: [kv heads, length, dim]."""
    blocks = table[: -(-length // cells.shape[2])].long()
    return cells[blocks].transpose(0, 1).reshape(cells.shape[1], -1, cells.shape[3])[:, :length]


def _attend(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """The last queries [t, heads, dim] of a sequence over its keys and values [kv heads, length, dim], each over those up
    to its own."""
    count, length, group = len(queries), keys.shape[1], queries.shape[1] // keys.shape[0]
    k, v = (cells.float().repeat_interleave(group, 0) for cells in (keys, values))
    weights = torch.einsum("thd,hpd->htp", queries.float(), k) * scale
    own = torch.arange(length - count, length, device=queries.device)
    later = torch.arange(length, device=queries.device) > own[:, None]
    return torch.einsum("htp,hpd->thd", weights.masked_fill(later, -torch.inf).softmax(-1), v).to(queries.dtype)
