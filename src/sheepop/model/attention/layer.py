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
from sheepop.model.options import Heads
from sheepop.model.positions import Angles, rotate_by_triton, rotated
from sheepop.model.probe import Probe

KeysValues = tuple[Tensor, Tensor]
"""The keys (B, K, S, C), rotated, and the values of a layer that other layers use too."""


def _head_norm(config: ModelConfig, count: int, width: int) -> nn.Module | None:
    if config.qk_norm is None:
        return None
    if config.qk_norm == "own_head":
        return HeadNorms(config, count, width)
    return build_norm(config, width * (count if config.qk_norm == "width" else 1))


class Attention(nn.Module):
    """Multi-head attention with grouped key-value heads, (B, T, D) to (B, T, D).

    A sequence attends to itself, or to the states of an encoder. A layer may have no keys and values of its own, and
    use those of the layer `layer`.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        heads, source = config.heads(layer), config.kv_source(layer)
        assert source is not None
        self.layer, self.has_keys, self.gives_keys = source, source == layer, config.gives_keys(layer)
        self.head_dim, self.value_dim = heads.key_width, heads.value_width
        self.keys_as_values = layer in (config.keys_as_values or ())
        self.scale, self.soft_cap = config.score_scale, config.attention_soft_cap
        self.dropout = config.dropout
        self._add_projections(config, heads)
        result, bias = config.num_heads * self.value_dim, bool(config.attention_bias)
        self.o_proj = nn.Linear(result, config.d_model, bias=bool(config.attention_output_bias))
        self.gate_proj = nn.Linear(config.d_model, result, bias=bias) if config.attention_output_gate else None
        self.convolutions = None
        if config.short_convolution is not None:
            parts = ((name, getattr(self, f"{name}_proj").out_features) for name in "qkv")
            self.convolutions = nn.ModuleDict(
                {name: ShortConvolution(config.short_convolution, channels) for name, channels in parts}
            )
        self.norms_heads = config.qk_norm != "width"
        self.q_norm = _head_norm(config, config.num_heads, self.head_dim)
        self.k_norm = _head_norm(config, heads.kv_heads, self.head_dim) if self.has_keys else None
        normed = config.value_norm and self.has_keys
        self.v_norm = nn.RMSNorm(self.value_dim, config.norm_eps, elementwise_affine=False) if normed else None
        self.sinks = nn.Parameter(torch.zeros(config.num_heads)) if config.attention_sinks else None
        self._packed: PackedProjections | None = None
        self.q = Probe()
        if self.has_keys:
            self.k, self.v = Probe(), Probe()
        self.rotated_q, self.rotated_k = Probe(), Probe()
        self.scores, self.weights, self.head_outputs = Probe(), Probe(), Probe()

    def _add_projections(self, config: ModelConfig, heads: Heads) -> None:
        bias, width = bool(config.attention_bias), config.d_model
        self.q_proj = nn.Linear(width, config.num_heads * heads.key_width, bias=bias)
        self.k_proj = nn.Linear(width, heads.kv_heads * heads.key_width, bias=bias) if self.has_keys else None
        own = self.has_keys and not self.keys_as_values
        self.v_proj = nn.Linear(width, heads.kv_heads * heads.value_width, bias=bias) if own else None

    @property
    def stream_layers(self) -> tuple[nn.Linear, ...]:
        """The layers that read the residual stream of the queries."""
        return tuple(layer for layer in (self.q_proj, self.k_proj, self.v_proj) if layer is not None)

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
        shared: KeysValues | None = None,
    ) -> Tensor | tuple[Tensor, KeysValues]:
        """Attends from the T positions of `x_BTD` to themselves and to the cached positions, or to `memory_BSD`.

        Only convolutions use `document_ids` (B, T); `attending` already has the mask of attention. `shared` are the
        keys and values of a layer that has none of its own. A layer that gives its own to others returns them too.
        """
        if memory_BSD is not None:
            q_BHTC = rotated(self._queries(self.q_proj(x_BTD)), rotary)
            k_BKSC, v_BKSC = self._memory(memory_BSD, cache)
            k_BKSC = rotated(k_BKSC, rotary)
        elif shared is not None:
            q_BHTC, (k_BKSC, v_BKSC) = rotated(self._queries(self.q_proj(x_BTD)), rotary), shared
        else:
            q_BHTC, k_BKSC, v_BKSC = self._queries_keys_values(x_BTD, document_ids, cache, rotary)
        q_BHTC, k_BKSC = self.rotated_q(q_BHTC), self.rotated_k(k_BKSC)
        if cache is None or memory_BSD is not None:
            out_BHTC = attending.attend(q_BHTC, k_BKSC, v_BKSC, self._score())
        else:  # the keys and values of another layer are stored there again
            out_BHTC = cache.attend(self.layer, attending, q_BHTC, k_BKSC, v_BKSC, self._score())
        out_BTD = self._output(x_BTD, out_BHTC)
        return (out_BTD, (k_BKSC, v_BKSC)) if self.gives_keys else out_BTD

    def _output(self, x_BTD: Tensor, out_BHTC: Tensor) -> Tensor:
        if self.gate_proj is not None:
            out_BHTC = out_BHTC * self._heads(self.gate_proj(x_BTD), None, self.value_dim).sigmoid()
        return self.o_proj(self.head_outputs(out_BHTC).transpose(1, 2).flatten(2))

    def _queries_keys_values(
        self, x_BTD: Tensor, document_ids: Tensor | None, cache: Cache | None, rotary: Angles | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries and keys, both rotated, and values."""
        q_BTE, k_BTE, *own = self._projections(x_BTD)
        v_BTE = own[0] if own else k_BTE
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
        return q_BHTC, k_BKSC, self.v(self._heads(v_BTE, self.v_norm, self.value_dim))

    def _score(self) -> Score:
        dropout = self.dropout if self.training else 0.0
        return Score(self.scale, self.soft_cap, self.sinks, dropout, (self.scores, self.weights))

    def _memory(self, memory_BSD: Tensor, cache: Cache | None) -> tuple[Tensor, Tensor]:
        def project() -> tuple[Tensor, Tensor]:
            assert self.k_proj is not None and self.v_proj is not None
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
        return k_BKSC, self.v(self._heads(v_BSE, self.v_norm, self.value_dim))

    def _heads(self, x_BTE: Tensor, norm: nn.Module | None, width: int) -> Tensor:
        """Splits a projection into heads (B, heads, T, width), and normalises it before or after the split."""
        dtype = x_BTE.dtype
        of_heads = self.norms_heads or norm is self.v_norm
        if norm is not None and not of_heads:
            x_BTE = norm(x_BTE).to(dtype)
        x_BTHC = x_BTE.view(*x_BTE.shape[:-1], -1, width)
        return (norm(x_BTHC).to(dtype) if norm is not None and of_heads else x_BTHC).transpose(1, 2)
