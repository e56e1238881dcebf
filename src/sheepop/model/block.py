"""One transformer block: attention or another mixer, and a feed-forward network, each on a residual branch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from sheepop.model.attention.kernel import Attending
from sheepop.model.attention.latent import LatentAttention
from sheepop.model.attention.layer import Attention, KeysValues
from sheepop.model.cache import Cache
from sheepop.model.config import ModelConfig
from sheepop.model.experts import MixtureOfExperts, Routing
from sheepop.model.feedforward import FeedForward
from sheepop.model.fused import uses_triton
from sheepop.model.layer_inputs import LayerInputBranch
from sheepop.model.mixers import GatedConvolution, GatedDeltaNet
from sheepop.model.norms import add_and_normalise, build_norm
from sheepop.model.probe import Probe, someone_watches


@dataclass(frozen=True)
class BlockInputs:
    """The inputs of a layer apart from the residual stream; all layers of one kind share the first five.

    `attending` is the attention kernel, prepared for this pass; None for layers without attention. `memory` (B, S, D)
    are the encoder's states, and `memory_attending` is the kernel that attends to them. `document_ids` (B, T) number
    the documents that share a row. `vectors` (B, T, P) are those of `LayerInputs` for this layer, and `shared` the keys
    and values of another layer, if this one has none of its own.
    """

    attending: Attending | None
    rotary: tuple[Tensor, Tensor] | None = None
    memory: Tensor | None = None
    memory_attending: Attending | None = None
    document_ids: Tensor | None = None
    vectors: Tensor | None = None
    shared: KeysValues | None = None


class BlockOutputs(NamedTuple):
    """The residual stream (B, T, D) after a block, its routing if it has experts, and the keys and values it shares."""

    stream: Tensor
    routing: Routing | None = None
    keys_values: KeysValues | None = None


class Block(nn.Module):
    """The sublayers f of the residual stream x, (B, T, D) to (B, T, D): attention, cross-attention, feed-forward.

    A layer may have a `mixer` (`sheepop.model.mixers`) in the place of attention, whose norms and probes it has.
    `config.norm_position` places the norms: before a sublayer, ``x + f(norm(x))``, after it,
    ``x + output_norm(f(x))``, both, or after the sum, ``norm(x + f(x))``. Parallel branches both read the same x, with
    a `shared_norm` the same norm(x). `residual_scale` multiplies what each branch adds. A third branch may read vectors
    of the layer (`LayerInputBranch`), and a learned `factor` multiply the stream at the end.
    """

    def __init__(self, config: ModelConfig, layer: int, *, cross_attention: bool = False) -> None:
        super().__init__()
        self.position, self.parallel = config.norm_position, config.parallel_residual
        self.shared_norm, self.residual_scale = config.shared_norm, config.residual_scale
        self.attention_norm, self.attention_output_norm = self._norms(config)
        self.mixer = _mixer(config, layer)
        kind = Attention if config.latent_attention is None else LatentAttention
        self.attention = kind(config, layer) if self.mixer is None else None
        if cross_attention:
            self.cross_attention_norm, self.cross_attention_output_norm = self._norms(config)
            self.cross_attention_input, self.cross_attention_output = Probe(), Probe()
            self.upper_middle = Probe()
        self.cross_attention = Attention(config, layer) if cross_attention else None
        self.feed_forward_norm, self.feed_forward_output_norm = self._norms(config)
        experts = config.experts if config.has_experts(layer) else None
        if self.shared_norm or (experts is not None and experts.own_norms):
            self.feed_forward_norm = None
        self.feed_forward: FeedForward | MixtureOfExperts
        if experts is not None:
            self.feed_forward = MixtureOfExperts(config, experts)
        else:
            self.feed_forward = FeedForward(config, config.ffn_width(layer))
        self.layer_input = None if config.layer_inputs is None else LayerInputBranch(config, config.layer_inputs)
        self.factor = nn.Parameter(torch.ones(1)) if config.layer_factor else None
        self.dropout = nn.Dropout(config.dropout)
        self.attention_input, self.attention_output = Probe(), Probe()
        self.feed_forward_input, self.feed_forward_output = Probe(), Probe()
        self.output = Probe()
        if not self.parallel:
            self.middle = Probe()
        if self.layer_input is not None:
            self.upper_feed_forward, self.layer_input_output = Probe(), Probe()

    def forward(self, x_BTD: Tensor, inputs: BlockInputs, cache: Cache | None = None) -> BlockOutputs:
        """Returns the residual stream after all sublayers, and what else the block has for the network."""
        normed_BTD = self.attention_input(self._before(x_BTD, self.attention_norm))
        mixed_BTD, keys_values = self._mixed(normed_BTD, inputs, cache)
        if self.parallel:
            attended_BTD = self.attention_output(self._behind(mixed_BTD, self.attention_output_norm))
            found_BTD, routing = self._feed_forward(self._normed(normed_BTD if self.shared_norm else x_BTD))
            return BlockOutputs(self._end(x_BTD + attended_BTD + found_BTD, inputs), routing, keys_values)
        x_BTD, normed_BTD = self._joined(x_BTD, mixed_BTD)
        if self.cross_attention is not None:
            assert inputs.memory is not None and inputs.memory_attending is not None
            normed_BTD = self.cross_attention_input(self._before(x_BTD, self.cross_attention_norm))
            found_BTD = self.cross_attention(normed_BTD, inputs.memory_attending, None, cache, inputs.memory)
            assert isinstance(found_BTD, Tensor)
            found_BTD = self.cross_attention_output(self._behind(found_BTD, self.cross_attention_output_norm))
            x_BTD = self.upper_middle(self._sum(x_BTD, found_BTD, self.cross_attention_norm))
            normed_BTD = self._normed(x_BTD)
        found_BTD, routing = self._feed_forward(normed_BTD)
        x_BTD = self._sum(x_BTD, found_BTD, self.feed_forward_norm)
        return BlockOutputs(self._end(x_BTD, inputs), routing, keys_values)

    @property
    def watched(self) -> bool:
        """Whether the scores or weights of its attention are observed."""
        return any(part is not None and part.watched for part in (self.attention, self.cross_attention))

    def _mixed(self, x_BTD: Tensor, inputs: BlockInputs, cache: Cache | None) -> tuple[Tensor, KeysValues | None]:
        if self.attention is None:
            assert self.mixer is not None
            return self.mixer(x_BTD, inputs.document_ids, cache), None
        assert inputs.attending is not None
        found = self.attention(
            x_BTD, inputs.attending, inputs.rotary, cache, document_ids=inputs.document_ids, shared=inputs.shared
        )
        return found if isinstance(found, tuple) else (found, None)

    def _end(self, x_BTD: Tensor, inputs: BlockInputs) -> Tensor:
        if self.layer_input is not None:
            assert inputs.vectors is not None
            x_BTD = self.upper_feed_forward(x_BTD)
            found_BTD = self.layer_input(x_BTD, inputs.vectors)
            x_BTD = x_BTD + self.layer_input_output(self._behind(found_BTD, None))
        return self.output(x_BTD if self.factor is None else x_BTD * self.factor.to(x_BTD.dtype))

    def _joined(self, x_BTD: Tensor, mixed_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the stream after attention and the input of the feed-forward network; on a GPU from one kernel."""
        is_plain = self.residual_scale == 1.0 and self.position != "post" and self.cross_attention is None
        norm, is_evaluated = self.feed_forward_norm, not self.training and uses_triton(x_BTD)
        if norm is not None and is_plain and is_evaluated and not someone_watches():
            found = add_and_normalise(x_BTD, mixed_BTD, norm, self.attention_output_norm)
            if found is not None:
                return found
        attended_BTD = self.attention_output(self._behind(mixed_BTD, self.attention_output_norm))
        x_BTD = self.middle(self._sum(x_BTD, attended_BTD, self.attention_norm))
        return x_BTD, x_BTD if self.cross_attention is not None else self._normed(x_BTD)

    def _normed(self, x_BTD: Tensor) -> Tensor:
        return self.feed_forward_input(self._before(x_BTD, self.feed_forward_norm))

    def _feed_forward(self, normed_BTD: Tensor) -> tuple[Tensor, Routing | None]:
        found = self.feed_forward(normed_BTD)
        found_BTD, routing = found if isinstance(found, tuple) else (found, None)
        return self.feed_forward_output(self._behind(found_BTD, self.feed_forward_output_norm)), routing

    def _norms(self, config: ModelConfig) -> tuple[nn.Module | None, nn.Module | None]:
        """Returns the norm before a sublayer (or after the sum), and the norm of its output."""
        return (
            None if self.position == "output" else build_norm(config),
            build_norm(config) if self.position in ("sandwich", "output") else None,
        )

    def _before(self, x_BTD: Tensor, norm: nn.Module | None) -> Tensor:
        return x_BTD if norm is None or self.position == "post" else norm(x_BTD)

    def _behind(self, x_BTD: Tensor, output_norm: nn.Module | None) -> Tensor:
        x_BTD = self.dropout(x_BTD if output_norm is None else output_norm(x_BTD))
        return x_BTD if self.residual_scale == 1.0 else x_BTD * self.residual_scale

    def _sum(self, x_BTD: Tensor, found_BTD: Tensor, norm: nn.Module | None) -> Tensor:
        x_BTD = x_BTD + found_BTD
        return norm(x_BTD) if norm is not None and self.position == "post" else x_BTD


def _mixer(config: ModelConfig, layer: int) -> GatedConvolution | GatedDeltaNet | None:
    """Returns what `layer` has instead of attention; None is attention."""
    mixer = config.mixer(layer)
    if mixer == "gated_convolution" and config.gated_convolution is not None:
        return GatedConvolution(config, config.gated_convolution, layer)
    if mixer == "gated_delta_net" and config.gated_delta_net is not None:
        return GatedDeltaNet(config, config.gated_delta_net, layer)
    return None
