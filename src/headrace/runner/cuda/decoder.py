"""The Llama-family decoder over paged memory on a device: what `Ops` is asked for, in order.

Owns the memory a step computes in, taken once: a step allocates nothing, so that it can be a graph. Knows neither
plans nor sampling.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headrace.runner.cuda.device_slots import DeviceSlots, StepInputs
from headrace.runner.cuda.expert_space import ExpertSpace
from headrace.runner.cuda.fp8_space import EightSpace, padded_rows
from headrace.runner.cuda.kv_pool import KvPool
from headrace.runner.cuda.layout import Layout
from headrace.runner.cuda.ops import Ops, Turn
from headrace.runner.cuda.squares import Squares
from headrace.runner.cuda.weights import LayerWeights, Weights
from headrace.weights.rope import rope_frequencies
from headrace.weights.shape import ModelShape

# Tokens of a step to one that samples, at least, for the others to leave before the last layer's end.
_FEW = 4


@dataclass(slots=True, frozen=True)
class StepViews:
    """The sections of a packet on the device that the forward pass reads."""

    layout: Layout
    decode_slots: Tensor
    chunk_slots: Tensor
    offsets: Tensor
    prior: Tensor
    tiles: Tensor
    fresh: Tensor
    places: Tensor
    sampled: Tensor
    scratch: Any
    # Of the samples.
    last_scratch: Any

    @classmethod
    def of(cls, packet: Tensor, layout: Layout, scratch: Any, last_scratch: Any) -> "StepViews":
        part = {name: packet[at : at + size] for name, (at, size) in layout.sections.items()}
        slots = part["slots"]
        return cls(
            layout,
            slots[: layout.decodes],
            slots[layout.decodes :],
            part["offsets"],
            part["prior"],
            part["tiles"].view(-1, 4),
            part["fresh"].view(-1, 4),
            part["places"],
            part["sampled"] if layout.tokens else slots,
            scratch,
            last_scratch,
        )


class Workspace:
    """Activations of the largest step and logits of the most rows that may sample. What products of rows in eight bits give
    has room for rows of padding."""

    def __init__(
        self,
        shape: ModelShape,
        max_tokens: int,
        max_samples: int,
        device: torch.device,
        dtype: torch.dtype,
        *,
        fp8: bool = False,
    ) -> None:
        def make(*dims: int) -> Tensor:
            return torch.zeros(dims, device=device, dtype=dtype)

        hidden, heads = shape.hidden_size, shape.num_heads
        given = padded_rows(max_tokens) if fp8 else max_tokens
        self.residual = make(max_tokens, hidden)
        self.normed = make(max_tokens, hidden)
        self.update = make(given, hidden)
        self.qkv = make(given, (heads + 2 * shape.num_kv_heads) * shape.head_dim)
        self.queries = make(max_tokens, heads, shape.head_dim)
        self.attended = make(max_tokens, heads, shape.head_dim)
        dense = shape.intermediate_size if shape.num_dense_layers else 0
        self.gate_up = make(given, 2 * dense)
        self.inner = make(max_tokens, dense)
        self.lasts = make(max_samples, hidden)
        self.last_queries = make(max_samples, heads, shape.head_dim)
        self.logits = make(max_samples, shape.vocab_size)
        self.squares = Squares.make(hidden, max_tokens, device)
        self.eights = EightSpace.make(shape, max_tokens, device) if fp8 else None
        self.experts: ExpertSpace | None = None
        if shape.experts is not None:
            self.experts = ExpertSpace.make(shape.experts, hidden, max_tokens, device, dtype)

    @property
    def size_bytes(self) -> int:
        tensors = (value for value in vars(self).values() if isinstance(value, Tensor))
        size = sum(tensor.numel() * tensor.element_size() for tensor in (*tensors, self.squares.sums))
        size += 0 if self.eights is None else self.eights.size_bytes
        return size if self.experts is None else size + self.experts.size_bytes


class Decoder:
    def __init__(
        self,
        shape: ModelShape,
        weights: Weights,
        pool: KvPool,
        ops: Ops,
        workspace: Workspace,
        context_len: int,
    ) -> None:
        self._shape = shape
        self._weights = weights
        self._pool = pool
        self._ops = ops
        self._space = workspace
        self._scale = shape.head_dim**-0.5
        device = weights.embeddings.device
        # In float64, then rounded: at position 100,000 float32 angles are off by hundredths.
        angles = torch.arange(context_len + 1, dtype=torch.float64)[:, None] * torch.from_numpy(
            rope_frequencies(shape)
        ).to(torch.float64)
        self._cosines = angles.cos().float().to(device)
        self._sines = angles.sin().float().to(device)

    def forward(self, step: StepViews, slots: DeviceSlots, inputs: StepInputs) -> Tensor:
        """Writes the keys and values of all tokens; returns their last states [t, hidden], or those of the rows that sample
        where the step is not whole. The last norm is behind them, unless one row is alone: it is part of `logits` then."""
        space, ops, eps, tokens = self._space, self._ops, self._shape.rms_eps, step.layout.num_tokens
        residual, normed, update = space.residual[:tokens], space.normed[:tokens], space.update[:tokens]
        layers = self._weights.layers
        norms = [layer.input_norm for layer in layers[1:]] + [self._weights.norm]
        fused = space.experts is None and ops.fuses(tokens)
        if fused or self._is_alone(step):
            ids, first = inputs.ids[:tokens], layers[0].input_norm
            ops.start_rows(ids, self._weights.embeddings, first, residual, normed, space.squares)
        if self._is_alone(step):
            for index, layer in enumerate(layers):
                self._pass_one(index, layer, step, slots)
            return residual
        if fused:
            for index, layer in enumerate(layers):
                self._pass_few(index, layer, norms[index], step, slots, inputs)
            ops.rms_norm(residual, self._weights.norm, eps, normed)
            return normed
        torch.index_select(self._weights.embeddings, 0, inputs.ids[:tokens], out=residual)
        ops.rms_norm(residual, layers[0].input_norm, eps, normed)
        is_whole = self._is_whole(step)
        attended = space.attended[:tokens].view(tokens, -1)
        for index, layer in enumerate(layers if is_whole else layers[:-1]):
            self._attend(index, layer, step, slots, inputs)
            ops.sum_rows(attended, layer.out, layer.out_bias, update, residual, layer.post_norm, eps, normed)
            self._feed(layer, inputs, residual, norms[index])
        return normed if is_whole else self._finish(step, slots, inputs)

    def kept(self, layout: Layout) -> Tensor:
        """Of each token of the last step, what the last layer kept of it, turned or not. All layers have a part in it."""
        return self._space.qkv[: layout.num_tokens, self._shape.num_heads * self._shape.head_dim :]

    def logits(self, step: StepViews, states: Tensor) -> Tensor:
        """Of the rows that sample: [samples, vocabulary]."""
        count = step.layout.num_samples
        logits = self._space.logits[:count]
        if self._is_alone(step):
            self._ops.row_product(states, self._weights.head, logits, norm=self._weights.norm, eps=self._shape.rms_eps)
            return logits
        if step.layout.tokens and self._is_whole(step):
            states = torch.index_select(states, 0, step.places, out=self._space.lasts[:count])
        self._ops.product(states, self._weights.head, None, logits)
        return logits

    def logits_of(self, normed: Tensor) -> Tensor:
        """New logits of any states, for the scores of prompts."""
        logits = normed.new_empty(len(normed), len(self._weights.head))
        self._ops.product(normed, self._weights.head, None, logits)
        return logits

    def _is_alone(self, step: StepViews) -> bool:
        """Whether the step is one decode row, which has products of its own."""
        is_one = step.layout.tokens == 0 and step.layout.rows == 1
        return is_one and not self._ops.row_exact and self._space.experts is None

    def _is_whole(self, step: StepViews) -> bool:
        """Whether all tokens go through the last layer to its end, or those alone that sample, where they are few."""
        layout, ops, space = step.layout, self._ops, self._space
        is_plain = space.experts is None and space.eights is None and not ops.row_exact
        are_few = layout.num_tokens >= _FEW * layout.num_samples and not ops.fuses(layout.num_tokens)
        return layout.whole or not (is_plain and are_few)

    def _finish(self, step: StepViews, slots: DeviceSlots, inputs: StepInputs) -> Tensor:
        """The last layer: keys and values of all tokens, and everything else of those that sample, each of which is its
        sequence's last."""
        space, ops, eps, layer = self._space, self._ops, self._shape.rms_eps, self._weights.layers[-1]
        tokens, count, index = step.layout.num_tokens, step.layout.num_samples, len(self._weights.layers) - 1
        update, normed, attended = space.update[:count], space.normed[:count], space.attended[:count]
        self._turn_product(index, layer, step, inputs)
        residual = torch.index_select(space.residual[:tokens], 0, step.places, out=space.lasts[:count])
        queries = torch.index_select(space.queries[:tokens], 0, step.places, out=space.last_queries[:count])
        cells = (self._pool.keys[index], self._pool.values[index])
        context = (slots.tables, step.sampled, slots.lengths)
        ops.decode_attention(attended, queries, *cells, *context, self._scale, step.last_scratch)
        ops.sum_rows(
            attended.view(count, -1), layer.out, layer.out_bias, update, residual, layer.post_norm, eps, normed
        )
        self._feed(layer, inputs, residual, self._weights.norm)
        return normed

    def _attend(self, index: int, layer: LayerWeights, step: StepViews, slots: DeviceSlots, inputs: StepInputs) -> None:
        """From `normed` to `attended`."""
        space, tokens = self._space, step.layout.num_tokens
        if self._has_rows_alone(step):
            self._ops.product(space.normed[:tokens], layer.qkv, layer.qkv_bias, space.qkv[:tokens])
            self._attend_rows(index, layer, step, slots)
        else:
            self._turn_product(index, layer, step, inputs)
            self._attend_turned(index, step, slots)

    def _look(
        self,
        index: int,
        layer: LayerWeights,
        step: StepViews,
        slots: DeviceSlots,
        inputs: StepInputs,
        row_factors: Tensor | None = None,
    ) -> None:
        """Attention alone: from `qkv`, times its rows' factors where they have some, to `attended`."""
        if self._has_rows_alone(step):
            self._attend_rows(index, layer, step, slots, row_factors)
        else:
            space, tokens = self._space, step.layout.num_tokens
            turn = self._turn(index, layer, step, inputs)
            self._ops.rotary_write(space.qkv[:tokens], *turn, row_factors=row_factors, in_place=step.layout.fresh > 0)
            self._attend_turned(index, step, slots)

    def _has_rows_alone(self, step: StepViews) -> bool:
        """Whether all its rows are single tokens that one operation turns and attends."""
        return not step.layout.tokens and self._ops.turns(step.layout.num_tokens)

    def _attend_rows(
        self,
        index: int,
        layer: LayerWeights,
        step: StepViews,
        slots: DeviceSlots,
        row_factors: Tensor | None = None,
    ) -> None:
        """Every row is one token, its sequence's last."""
        space, tokens = self._space, step.layout.num_tokens
        self._ops.turned_attention(
            space.attended[:tokens],
            space.qkv[:tokens],
            self._cosines,
            self._sines,
            layer.q_norm,
            layer.k_norm,
            self._shape.rms_eps,
            self._pool.keys[index],
            self._pool.values[index],
            slots.tables,
            step.decode_slots,
            slots.lengths,
            self._scale,
            step.scratch,
            row_factors=row_factors,
        )

    def _attend_turned(self, index: int, step: StepViews, slots: DeviceSlots) -> None:
        """Of queries that are turned, over cells that are written."""
        space, ops, tokens, decodes = self._space, self._ops, step.layout.num_tokens, step.layout.decodes
        keys, values = self._pool.keys[index], self._pool.values[index]
        queries, attended = space.queries[:tokens], space.attended[:tokens]
        if decodes:
            ops.decode_attention(
                attended[:decodes],
                queries[:decodes],
                keys,
                values,
                slots.tables,
                step.decode_slots,
                slots.lengths,
                self._scale,
                step.scratch,
            )
        if step.layout.fresh:
            ops.fresh_attention(attended, queries, space.qkv[:tokens], step.offsets, step.fresh, self._scale)
        if step.layout.tiles:
            ops.prefill_attention(
                attended,
                queries,
                keys,
                values,
                slots.tables,
                step.chunk_slots,
                step.offsets,
                step.prior,
                step.tiles,
                self._scale,
            )

    def _turn_product(self, index: int, layer: LayerWeights, step: StepViews, inputs: StepInputs) -> None:
        """From `normed` to `queries`, cells and `qkv`, where chunks that begin find their keys and values."""
        space, tokens = self._space, step.layout.num_tokens
        product = (space.normed[:tokens], layer.qkv, layer.qkv_bias, space.qkv[:tokens])
        self._ops.turn_rows(*product, self._turn(index, layer, step, inputs), in_place=step.layout.fresh > 0)

    def _turn(self, index: int, layer: LayerWeights, step: StepViews, inputs: StepInputs) -> Turn:
        space, tokens = self._space, step.layout.num_tokens
        return Turn(
            inputs.positions[:tokens],
            inputs.cells[:tokens],
            self._cosines,
            self._sines,
            layer.q_norm,
            layer.k_norm,
            self._shape.rms_eps,
            space.queries[:tokens],
            self._pool.keys[index],
            self._pool.values[index],
        )

    def _pass_one(self, index: int, layer: LayerWeights, step: StepViews, slots: DeviceSlots) -> None:
        """A layer of a step of one row: as few launches as there are products, and attention."""
        space, ops, eps = self._space, self._ops, self._shape.rms_eps
        residual, inner = space.residual[:1], space.inner[:1]
        ops.row_product(residual, layer.qkv, space.qkv[:1], norm=layer.input_norm, eps=eps, bias=layer.qkv_bias)
        self._attend_rows(index, layer, step, slots)
        ops.row_product(space.attended[:1].view(1, -1), layer.out, residual, bias=layer.out_bias, adds=True)
        ops.row_product(residual, layer.gate_up, inner, norm=layer.post_norm, eps=eps, gated=True)
        ops.row_product(inner, layer.down, residual, adds=True)

    def _pass_few(
        self, index: int, layer: LayerWeights, norm: Tensor, step: StepViews, slots: DeviceSlots, inputs: StepInputs
    ) -> None:
        """A layer of a step of few tokens: norms, gates and sums are parts of the products, and `normed` holds what their
        factors scale. `norm` is the norm after this layer."""
        space, ops, eps, tokens = self._space, self._ops, self._shape.rms_eps, step.layout.num_tokens
        residual, scaled, inner = space.residual[:tokens], space.normed[:tokens], space.inner[:tokens]
        squares, attended = space.squares, space.attended[:tokens].view(tokens, -1)
        ops.normed_product(scaled, squares, layer.qkv, layer.qkv_bias, eps, space.qkv[:tokens])
        self._look(index, layer, step, slots, inputs)
        ops.added_product(attended, layer.out, layer.out_bias, residual, layer.post_norm, scaled, squares)
        ops.gated_product(scaled, squares, layer.gate_up, eps, inner)
        ops.added_product(inner, layer.down, None, residual, norm, scaled, squares)

    def _feed(self, layer: LayerWeights, inputs: StepInputs, residual: Tensor, norm: Tensor) -> None:
        """To `residual`, from its norm in `normed`, where `norm` of the sum is left."""
        space, ops, eps, tokens = self._space, self._ops, self._shape.rms_eps, len(residual)
        normed, update = space.normed[:tokens], space.update[:tokens]
        if layer.router is not None:
            self._ask_experts(layer, layer.router, tokens, inputs)
            ops.add_rms_norm(update, residual, norm, eps, normed)
            return
        ops.gate_rows(normed, layer.gate_up, space.gate_up[:tokens], space.inner[:tokens])
        ops.sum_rows(space.inner[:tokens], layer.down, None, update, residual, norm, eps, normed)

    def _ask_experts(self, layer: LayerWeights, router: Tensor, tokens: int, inputs: StepInputs) -> None:
        space, shape = self._space, self._shape.experts
        assert shape is not None and space.experts is not None
        self._ops.experts(
            space.normed[:tokens],
            inputs.cells[:tokens],
            router,
            layer.gate_up,
            layer.down,
            shape.num_chosen,
            space.update[:tokens],
            space.experts,
            normed=shape.normed,
        )
