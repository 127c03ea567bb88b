"""The decoder whose matrices have eight bits: products of rows in eight bits, each with a factor of its own.

Whatever makes a row of a product's input leaves it in eight bits, and whatever reads a product's output multiplies it with
the input's factor, so that only attention's output costs a launch more. A single row is not quantised: it reads every
matrix once, and half the bytes are all there is to gain. Knows neither plans nor sampling.
"""

import torch
from torch import Tensor

from headrace.runner.cuda.decoder import Decoder, StepViews
from headrace.runner.cuda.device_slots import DeviceSlots, StepInputs
from headrace.runner.cuda.fp8_space import EightSpace, padded_rows
from headrace.runner.cuda.weights import LayerScales, LayerWeights


class Fp8Decoder(Decoder):
    def forward(self, step: StepViews, slots: DeviceSlots, inputs: StepInputs) -> Tensor:
        """As its elder's; the last states are not in eight bits."""
        space, ops, eps, tokens = self._space, self._ops, self._shape.rms_eps, step.layout.num_tokens
        residual, normed, update = space.residual[:tokens], space.normed[:tokens], space.update[:tokens]
        torch.index_select(self._weights.embeddings, 0, inputs.ids[:tokens], out=residual)
        layers, eights = self._weights.layers, self._eights
        if self._is_alone(step):
            for index, layer in enumerate(layers):
                self._pass_one(index, layer, step, slots)
            return residual
        rows, left, came = eights.normed[:tokens], eights.norm_factors[:tokens], eights.factors[:tokens]
        ops.rms_norm(residual, layers[0].input_norm, eps, rows, out_factors=left)
        for index, layer in enumerate(layers):
            factors = self._attend_in_eights(index, layer, step, slots, inputs)
            ops.add_rms_norm(update, residual, layer.post_norm, eps, rows, row_factors=factors, out_factors=left)
            self._feed_in_eights(layer, tokens)
            if index + 1 < len(layers):
                weight = layers[index + 1].input_norm
                ops.add_rms_norm(update, residual, weight, eps, rows, row_factors=came, out_factors=left)
        ops.add_rms_norm(update, residual, self._weights.norm, eps, normed, row_factors=came)
        return normed

    def _attend_in_eights(
        self, index: int, layer: LayerWeights, step: StepViews, slots: DeviceSlots, inputs: StepInputs
    ) -> Tensor | None:
        """Writes the update; returns the factors that its rows still need."""
        space, eights, ops, tokens = self._space, self._eights, self._ops, step.layout.num_tokens
        scales, factors = _scales(layer), eights.factors[:tokens]
        self._multiply(eights.normed, layer.qkv, scales.qkv, space.qkv, tokens)
        came = self._biased(space.qkv[:tokens], eights.norm_factors[:tokens], layer.qkv_bias)
        self._look(index, layer, step, slots, inputs, came)
        ops.quantise(space.attended[:tokens].view(tokens, -1), eights.attended[:tokens], factors)
        self._multiply(eights.attended, layer.out, scales.out, space.update, tokens)
        return self._biased(space.update[:tokens], factors, layer.out_bias)

    def _feed_in_eights(self, layer: LayerWeights, tokens: int) -> None:
        space, eights, scales = self._space, self._eights, _scales(layer)
        self._multiply(eights.normed, layer.gate_up, scales.gate_up, space.gate_up, tokens)
        self._ops.silu_mul(
            space.gate_up[:tokens],
            eights.inner[:tokens],
            row_factors=eights.norm_factors[:tokens],
            out_factors=eights.factors[:tokens],
        )
        self._multiply(eights.inner, layer.down, scales.down, space.update, tokens)

    def _pass_one(self, index: int, layer: LayerWeights, step: StepViews, slots: DeviceSlots) -> None:
        space, ops, eps, scales = self._space, self._ops, self._shape.rms_eps, _scales(layer)
        residual, inner = space.residual[:1], space.inner[:1]
        bias, attended = layer.qkv_bias, space.attended[:1].view(1, -1)
        ops.row_product(residual, layer.qkv, space.qkv[:1], norm=layer.input_norm, eps=eps, bias=bias, scale=scales.qkv)
        self._attend_rows(index, layer, step, slots)
        ops.row_product(attended, layer.out, residual, bias=layer.out_bias, adds=True, scale=scales.out)
        ops.row_product(residual, layer.gate_up, inner, norm=layer.post_norm, eps=eps, gated=True, scale=scales.gate_up)
        ops.row_product(inner, layer.down, residual, adds=True, scale=scales.down)

    def _multiply(self, rows: Tensor, weight: Tensor, scale: Tensor, out: Tensor, tokens: int) -> None:
        count = padded_rows(tokens)
        self._ops.scaled_product(rows[:count], weight, self._eights.unit, scale, out[:count])

    def _biased(self, rows: Tensor, factors: Tensor, bias: Tensor | None) -> Tensor | None:
        """A bias is added to rows that have had their factors."""
        if bias is None:
            return factors
        self._ops.rescale(rows, factors, bias)
        return None

    @property
    def _eights(self) -> EightSpace:
        assert self._space.eights is not None
        return self._space.eights


def _scales(layer: LayerWeights) -> LayerScales:
    assert layer.scales is not None
    return layer.scales
