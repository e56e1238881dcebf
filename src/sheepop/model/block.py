"""One transformer block: attention or another mixer, and a feed-forward network, each on a residual branch."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from sheepop.model.attention.kernel import Attending
from sheepop.model.attention.latent import LatentAttention
from sheepop.model.attention.layer import Attention
from sheepop.model.cache import Cache
from sheepop.model.config import ModelConfig
from sheepop.model.experts import MixtureOfExperts, Routing
from sheepop.model.feedforward import FeedForward
from sheepop.model.mixers import GatedConvolution, GatedDeltaNet
from sheepop.model.norms import build_norm
from sheepop.model.probe import Probe


@dataclass(frozen=True)
class BlockInputs:
    """The inputs that all layers of one kind share, apart from the residual stream.

    `attending` is the attention kernel, prepared for this pass; None for layers without attention. `memory` (B, S, D)
    are the encoder's states, and `memory_attending` is the kernel that attends to them. `document_ids` (B, T) number
    the documents that share a row.
    """

    attending: Attending | None
    rotary: tuple[Tensor, Tensor] | None = None
    memory: Tensor | None = None
    memory_attending: Attending | None = None
    document_ids: Tensor | None = None


class Block(nn.Module):
    """The sublayers f of the residual stream x, (B, T, D) to (B, T, D): attention, cross-attention, feed-forward.

    A layer may have a `mixer` (`sheepop.model.mixers`) in the place of attention, whose norms and probes it has.
    `config.norm_position` places the norms: before a sublayer, ``x + f(norm(x))``, after it,
    ``x + output_norm(f(x))``, both, or after the sum, ``norm(x + f(x))``. Parallel branches both read the same x, with
    a `shared_norm` the same norm(x). `residual_scale` multiplies what each branch adds.
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
        if self.shared_norm:
            self.feed_forward_norm = None
        self.feed_forward: FeedForward | MixtureOfExperts
        if config.experts is not None and config.has_experts(layer):
            self.feed_forward = MixtureOfExperts(config, config.experts)
        else:
            self.feed_forward = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)
        self.attention_input, self.attention_output = Probe(), Probe()
        self.feed_forward_input, self.feed_forward_output = Probe(), Probe()
        self.output = Probe()
        if not self.parallel:
            self.middle = Probe()

    def forward(self, x_BTD: Tensor, inputs: BlockInputs, cache: Cache | None = None) -> tuple[Tensor, Routing | None]:
        """Returns the residual stream after all sublayers, and the routing if the block has experts."""
        normed_BTD = self.attention_input(self._before(x_BTD, self.attention_norm))
        attended_BTD = self.attention_output(
            self._behind(self._mixed(normed_BTD, inputs, cache), self.attention_output_norm)
        )
        if self.parallel:
            found_BTD, routing = self._feed_forward(normed_BTD if self.shared_norm else x_BTD)
            return self.output(x_BTD + attended_BTD + found_BTD), routing
        x_BTD = self.middle(self._sum(x_BTD, attended_BTD, self.attention_norm))
        if self.cross_attention is not None:
            assert inputs.memory is not None and inputs.memory_attending is not None
            normed_BTD = self.cross_attention_input(self._before(x_BTD, self.cross_attention_norm))
            found_BTD = self.cross_attention(normed_BTD, inputs.memory_attending, None, cache, inputs.memory)
            found_BTD = self.cross_attention_output(self._behind(found_BTD, self.cross_attention_output_norm))
            x_BTD = self.upper_middle(self._sum(x_BTD, found_BTD, self.cross_attention_norm))
        found_BTD, routing = self._feed_forward(x_BTD)
        return self.output(self._sum(x_BTD, found_BTD, self.feed_forward_norm)), routing

    @property
    def watched(self) -> bool:
        """Whether the scores or weights of its attention are observed."""
        return any(part is not None and part.watched for part in (self.attention, self.cross_attention))

    def _mixed(self, x_BTD: Tensor, inputs: BlockInputs, cache: Cache | None) -> Tensor:
        if self.attention is None:
            assert self.mixer is not None
            return self.mixer(x_BTD, inputs.document_ids, cache)
        assert inputs.attending is not None
        return self.attention(x_BTD, inputs.attending, inputs.rotary, cache, document_ids=inputs.document_ids)

    def _feed_forward(self, x_BTD: Tensor) -> tuple[Tensor, Routing | None]:
        normed_BTD = self.feed_forward_input(self._before(x_BTD, self.feed_forward_norm))
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
