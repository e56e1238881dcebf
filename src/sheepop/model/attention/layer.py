"""The attention layer: softmax(scale Q K^T + M) V W_O, as self-attention or cross-attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sheepop.model.attention.convolution import ShortConvolution
from sheepop.model.attention.kernel import Attending, Score
from sheepop.model.attention.projections import PackedProjections
from sheepop.model.cache import Cache
from sheepop.model.config import ModelConfig
from sheepop.model.fused import uses_triton
from sheepop.model.norms import HeadNorms, build_norm, scaling_of
from sheepop.model.positions import Angles, rotate_by_triton, rotated
from sheepop.model.probe import Probe


def _query_key_norms(config: ModelConfig) -> tuple[nn.Module | None, nn.Module | None]:
    counts = (config.num_heads, config.kv_heads)
    if config.qk_norm is None:
        return None, None
    if config.qk_norm == "own_head":
        return HeadNorms(config, counts[0]), HeadNorms(config, counts[1])
    widths = (config.head_size * (count if config.qk_norm == "width" else 1) for count in counts)
    return build_norm(config, next(widths)), build_norm(config, next(widths))


class Attention(nn.Module):
    """Multi-head attention with grouped key-value heads, (B, T, D) to (B, T, D).

    A sequence attends to itself, or to the states of an encoder.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim, self.value_dim = config.head_size, config.value_size
        self.scale, self.soft_cap = config.score_scale, config.attention_soft_cap
        self.dropout = config.dropout
        self._add_projections(config)
        result, bias = config.num_heads * config.value_size, bool(config.attention_bias)
        self.o_proj = nn.Linear(result, config.d_model, bias=bool(config.attention_output_bias))
        self.gate_proj = nn.Linear(config.d_model, result, bias=bias) if config.attention_output_gate else None
        self.convolutions = None
        if config.short_convolution is not None:
            parts = ((name, getattr(self, f"{name}_proj").out_features) for name in "qkv")
            self.convolutions = nn.ModuleDict(
                {name: ShortConvolution(config.short_convolution, channels) for name, channels in parts}
            )
        self.norms_heads = config.qk_norm != "width"
        self.q_norm, self.k_norm = _query_key_norms(config)
        self.sinks = nn.Parameter(torch.zeros(config.num_heads)) if config.attention_sinks else None
        self._packed: PackedProjections | None = None
        self.q, self.k, self.v = Probe(), Probe(), Probe()
        self.rotated_q, self.rotated_k = Probe(), Probe()
        self.scores, self.weights, self.head_outputs = Probe(), Probe(), Probe()

    def _add_projections(self, config: ModelConfig) -> None:
        bias, width = bool(config.attention_bias), config.d_model
        self.q_proj = nn.Linear(width, config.num_heads * config.head_size, bias=bias)
        self.k_proj = nn.Linear(width, config.kv_heads * config.head_size, bias=bias)
        self.v_proj = nn.Linear(width, config.kv_heads * config.value_size, bias=bias)

    @property
    def stream_layers(self) -> tuple[nn.Linear, ...]:
        """The layers that read the residual stream of the queries."""
        return self.q_proj, self.k_proj, self.v_proj

    @property
    def watched(self) -> bool:
        """Whether scores or weights are observed, which only stepwise attention computes."""
        return bool(self.scores.observers or self.weights.observers)

    def forward(
        self,
        x_BTD: Tensor,
        attending: Attending,
        rotary: Angles | None = None,
        cache: Cache | None = None,
        memory_BSD: Tensor | None = None,
        document_ids: Tensor | None = None,
    ) -> Tensor:
        """Attends from the T positions of `x_BTD` to themselves and to the cached positions, or to `memory_BSD`.

        Only convolutions use `document_ids` (B, T); `attending` already has the mask of attention.
        """
        if memory_BSD is not None:
            q_BHTC = rotated(self._queries(self.q_proj(x_BTD)), rotary)
            k_BKSC, v_BKSC = self._memory(memory_BSD, cache)
            k_BKSC = rotated(k_BKSC, rotary)
        else:
            q_BHTC, k_BKSC, v_BKSC = self._queries_keys_values(x_BTD, document_ids, cache, rotary)
        q_BHTC, k_BKSC = self.rotated_q(q_BHTC), self.rotated_k(k_BKSC)
        if cache is None or memory_BSD is not None:
            out_BHTC = attending.attend(q_BHTC, k_BKSC, v_BKSC, self._score())
        else:
            out_BHTC = cache.attend(self.layer, attending, q_BHTC, k_BKSC, v_BKSC, self._score())
        return self._output(x_BTD, out_BHTC)

    def _output(self, x_BTD: Tensor, out_BHTC: Tensor) -> Tensor:
        if self.gate_proj is not None:
            out_BHTC = out_BHTC * self._heads(self.gate_proj(x_BTD), None, self.value_dim).sigmoid()
        return self.o_proj(self.head_outputs(out_BHTC).transpose(1, 2).flatten(2))

    def _queries_keys_values(
        self, x_BTD: Tensor, document_ids: Tensor | None, cache: Cache | None, rotary: Angles | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries and keys, both rotated, and values."""
        q_BTE, k_BTE, v_BTE = self._projections(x_BTD)
        q_BTE, k_BTE, v_BTE = self._convolved(q_BTE, k_BTE, v_BTE, document_ids, cache)
        scalings = scaling_of(self.q_norm), scaling_of(self.k_norm)
        watched = self.q.observers or self.k.observers
        if rotary is None or None in scalings or not self.norms_heads or watched or not uses_triton(q_BTE):
            k_BKSC, v_BKSC = self._keys_and_values(k_BTE, v_BTE)
            return rotated(self._queries(q_BTE), rotary), rotated(k_BKSC, rotary), v_BKSC
        q_BHTC, k_BKSC = (
            rotate_by_triton(self._heads(x_BTE, None, self.head_dim), *rotary, scaling)
            for x_BTE, scaling in zip((q_BTE, k_BTE), scalings, strict=True)
        )
        return q_BHTC, k_BKSC, self.v(self._heads(v_BTE, None, self.value_dim))

    def _score(self) -> Score:
        dropout = self.dropout if self.training else 0.0
        return Score(self.scale, self.soft_cap, self.sinks, dropout, (self.scores, self.weights))

    def _memory(self, memory_BSD: Tensor, cache: Cache | None) -> tuple[Tensor, Tensor]:
        def project() -> tuple[Tensor, Tensor]:
            return self._keys_and_values(self.k_proj(memory_BSD), self.v_proj(memory_BSD))

        return project() if cache is None else cache.memory(self.layer, project)

    def _projections(self, x_BTD: Tensor) -> tuple[Tensor, ...]:
        """Returns the results of `stream_layers`."""
        layers = self.stream_layers
        if self._packed is not None and self._packed.holds(layers):
            return self._packed.product(x_BTD)
        return tuple(layer(x_BTD) for layer in layers)

    def _convolved(
        self, q_BTE: Tensor, k_BTE: Tensor, v_BTE: Tensor, document_ids: Tensor | None, cache: Cache | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        if self.convolutions is None:
            return q_BTE, k_BTE, v_BTE
        parts = zip(self.convolutions.items(), (q_BTE, k_BTE, v_BTE), strict=True)
        # Without a cache no layer number, or each layer would be compiled separately.
        where = "" if cache is None else f" of layer {self.layer}"
        q_BTE, k_BTE, v_BTE = (
            convolve(x_BTE, document_ids, cache, f"{name}{where}") for (name, convolve), x_BTE in parts
        )
        return q_BTE, k_BTE, v_BTE

    def pack_projections(self) -> None:
        """Packs the weights of `stream_layers` in one block of memory, so that one product computes them all.

        They remain separate parameters, with new memory. If they are separated later, by a move to another device or by
        replacing parameters or layers, there are several products again.
        """
        self._packed = PackedProjections.of(self.stream_layers)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Attention:
        self._packed = None
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the packed memory, since a copy may place its parameters elsewhere."""
        return {**self.__dict__, "_packed": None}

    def _queries(self, q_BTE: Tensor) -> Tensor:
        return self.q(self._heads(q_BTE, self.q_norm, self.head_dim))

    def _keys_and_values(self, k_BSE: Tensor, v_BSE: Tensor) -> tuple[Tensor, Tensor]:
        k_BKSC = self.k(self._heads(k_BSE, self.k_norm, self.head_dim))
        return k_BKSC, self.v(self._heads(v_BSE, None, self.value_dim))

    def _heads(self, x_BTE: Tensor, norm: nn.Module | None, width: int) -> Tensor:
        """Splits a projection into heads (B, heads, T, width), and normalises it before or after the split."""
        dtype = x_BTE.dtype
        if norm is not None and not self.norms_heads:
            x_BTE = norm(x_BTE).to(dtype)
        x_BTHC = x_BTE.view(*x_BTE.shape[:-1], -1, width)
        return (norm(x_BTHC).to(dtype) if norm is not None and self.norms_heads else x_BTHC).transpose(1, 2)
