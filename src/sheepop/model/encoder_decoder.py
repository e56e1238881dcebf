"""The original transformer: an encoder reads a source, a decoder writes a target (Vaswani et al. 2017).

Shapes: B batch, S source positions, T target positions, D d_model, V vocab.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from sheepop.model.attention.choose import prepare_attention
from sheepop.model.attention.kernel import Attending
from sheepop.model.block import Block, BlockInputs, BlockOutputs
from sheepop.model.cache import Cache
from sheepop.model.config import ModelConfig
from sheepop.model.norms import build_norm
from sheepop.model.options import Architecture
from sheepop.model.probe import Probe
from sheepop.model.transformer import Outputs, Transformer


@dataclass(frozen=True)
class Memory:
    """The output of the encoder: states (B, S, D), and `mask` (B, S), False at padding (None without padding)."""

    states: Tensor
    mask: Tensor | None = None

    def rows(self, chosen: Tensor) -> Memory:
        """Returns the rows with the indices `chosen` (B',), in this order."""
        return Memory(self.states[chosen], None if self.mask is None else self.mask[chosen])


class EncoderDecoder(Transformer):
    """A language model of target sequences given source sequences, which share one embedding and position encoding.

    The decoder is the inherited transformer, with a third sublayer in each block that attends to the encoder's states.
    Cross-attention uses no rotary angles and no ALiBi, because positions in two different sequences have no distance.
    """

    architecture: ClassVar[Architecture] = "encoder_decoder"

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        assert config.num_encoder_layers is not None
        self.encoder_blocks = nn.ModuleList(Block(config, layer) for layer in range(config.num_encoder_layers))
        self.encoder_norm = build_norm(config) if config.final_norm else None
        self.source_embedded, self.source_positioned, self.memory = Probe(), Probe(), Probe()

    @property
    def layers(self) -> tuple[Block, ...]:
        """All blocks, in execution order: the encoder's, then the decoder's."""
        return (*(cast(Block, block) for block in self.encoder_blocks), *super().layers)

    def encode(self, source_ids: Tensor, source_mask: Tensor | None = None) -> Memory:
        """Maps source ids (B, S) to the states that the decoder attends to.

        `source_mask` (B, S) is False at padding, which follows the tokens of a row; a row has at least one token.
        Raises `ValueError` for a source longer than `max_seq_len`, or an argument of the wrong shape or dtype.
        """
        if source_ids.ndim != 2:
            raise ValueError(f"source_ids must be (B, S), got shape {tuple(source_ids.shape)}")
        if source_mask is not None and source_mask.shape != source_ids.shape:
            raise ValueError(
                f"source_mask has shape {tuple(source_mask.shape)}, source_ids {tuple(source_ids.shape)}; "
                "both are (B, S)"
            )
        if source_mask is not None and source_mask.dtype != torch.bool:
            raise ValueError(f"source_mask has dtype {source_mask.dtype}; it must be boolean, True at tokens")
        length = source_ids.shape[1]
        if length > self.config.max_seq_len:
            raise ValueError(f"a source of {length} positions does not fit max_seq_len = {self.config.max_seq_len}")
        x_BSD = self.embed(source_ids, None, (self.source_embedded, self.source_positioned))
        inputs = self._encoder_inputs(length, source_mask)
        for block in self.encoder_blocks:
            x_BSD = block(x_BSD, inputs).stream
        return Memory(self.finish_encoder(x_BSD), source_mask)

    def _encoder_inputs(self, length: int, source_mask: Tensor | None) -> BlockInputs:
        kind = self.attention_kind(causal=False)
        return BlockInputs(prepare_attention(kind, kind.sight(length, key_mask=source_mask)), self.angles(None, length))

    def finish_encoder(self, x_BSD: Tensor) -> Tensor:
        """Returns the states that the decoder attends to, from the residual stream after the last encoder block."""
        return self.memory(x_BSD if self.encoder_norm is None else self.encoder_norm(x_BSD))

    def run_encoder_block(self, layer: int, x_BSD: Tensor) -> Tensor:
        """Runs one encoder block, as `run_block` does for the decoder; rows have no padding."""
        found = self.encoder_blocks[layer](x_BSD, self._encoder_inputs(x_BSD.shape[1], None))
        return cast(BlockOutputs, found).stream

    def run_target_block(self, layer: int, x_BTD: Tensor, memory: Memory) -> Tensor:
        """Runs one decoder block, which attends to `memory`; its states have one row, or one for each row of x."""
        states = memory.states.expand(len(x_BTD), -1, -1)
        return self.run_block(layer, x_BTD, None, states, self._looking_at(memory, x_BTD.shape[1]))

    def _looking_at(self, memory: Memory, num_targets: int) -> Attending:
        """Prepares the cross-attention kernel; it has no ALiBi slopes, since the two sequences have no distances."""
        kind = replace(self.attention_kind(causal=False), slopes=None)
        return prepare_attention(kind, kind.sight(num_targets, memory.states.shape[1], key_mask=memory.mask))

    def run(
        self,
        input_ids: Tensor,
        *,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
        cache: Cache | None = None,
        source_ids: Tensor | None = None,
        source_mask: Tensor | None = None,
        memory: Memory | None = None,
    ) -> Outputs:
        """Maps target ids (B, T) to normalised hidden states (B, T, D), the input of `lm_head`.

        The source is either `source_ids` (B, S) with `source_mask`, the arguments of `encode`, or `memory`, the result
        of `encode`. With a `cache` the targets continue the cached ones; the memory must be the same in all passes,
        since only the first one projects it to keys and values. Raises `ValueError` like `Transformer.run`, if the
        source is missing or given twice, and for `document_ids`.
        """
        if (source_ids is None) == (memory is None):
            raise ValueError("an encoder-decoder needs either source_ids or the memory that encode returned")
        if document_ids is not None:
            raise ValueError("an encoder-decoder takes one target per row; document_ids are for a decoder")
        if memory is None:
            assert source_ids is not None
            memory = self.encode(source_ids, source_mask)
        if memory.states.shape[0] != input_ids.shape[0]:
            raise ValueError(f"there are {input_ids.shape[0]} targets, but {memory.states.shape[0]} sources")
        looking = self._looking_at(memory, input_ids.shape[1])
        return self._decode(input_ids, positions, None, cache, memory.states, looking)

    def forward(  # type: ignore[override]  # a network of two sequences
        self,
        source_ids: Tensor,
        target_ids: Tensor,
        source_mask: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        logits_to_keep: int | None = None,
    ) -> Tensor:
        """Maps source ids (B, S) and target ids (B, T) to logits (B, T, V) of the token after each target position.

        Padding after a target needs no mask, since no token before it attends to it. `positions` are the target's.
        """
        hidden_BTD = self.hidden_states(target_ids, positions=positions, source_ids=source_ids, source_mask=source_mask)
        return self.read_out(hidden_BTD, logits_to_keep)
