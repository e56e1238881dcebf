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
from sheepop.model.block import Block, BlockInputs
from sheepop.model.cache import Cache
from sheepop.model.config import Architecture, ModelConfig
from sheepop.model.norms import build_norm
from sheepop.model.probe import Probe
from sheepop.model.transformer import Outputs, Transformer


@dataclass(frozen=True)
class Memory:
    """What an encoder made of sources: states (B, S, D), and `mask` (B, S), False at padding, None without any."""

    states: Tensor
    mask: Tensor | None = None

    def rows(self, chosen: Tensor) -> Memory:
        """The rows whose indices are `chosen` (B',), in this order."""
        return Memory(self.states[chosen], None if self.mask is None else self.mask[chosen])


class EncoderDecoder(Transformer):
    """A language model of targets given their sources. Both are read with one embedding and one kind of positions.

    The decoder is the transformer that it inherits, with a third sublayer in each block that attends to the encoder's
    states. Attention across the two sequences knows no positions beyond those in the states: places of one have no
    distance to places of the other, so rotary angles and ALiBi are for attention within a sequence.
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
        """All blocks, in the order in which they run: the encoder's, then the decoder's."""
        return (*(cast(Block, block) for block in self.encoder_blocks), *super().layers)

    def encode(self, source_ids: Tensor, source_mask: Tensor | None = None) -> Memory:
        """Source ids (B, S) to the states that the decoder looks at.

        `source_mask` (B, S) is False at padding, which stands behind the tokens of a row; a row has at least one
        token. Raises `ValueError` for a source longer than `max_seq_len`, or an argument of another shape or kind.
        """
        if source_ids.ndim != 2:
            raise ValueError(f"source_ids must be (B, S), got shape {tuple(source_ids.shape)}")
        if source_mask is not None and source_mask.shape != source_ids.shape:
            raise ValueError(
                f"source_mask has shape {tuple(source_mask.shape)}, source_ids {tuple(source_ids.shape)}; "
                "both are (B, S)"
            )
        if source_mask is not None and source_mask.dtype != torch.bool:
            raise ValueError(f"source_mask has the dtype {source_mask.dtype}; make it boolean, True where a token is")
        length = source_ids.shape[1]
        if length > self.config.max_seq_len:
            raise ValueError(f"a source of {length} positions does not fit max_seq_len = {self.config.max_seq_len}")
        x_BSD = self.embed(source_ids, None, (self.source_embedded, self.source_positioned))
        inputs = self._encoder_inputs(length, source_mask)
        for block in self.encoder_blocks:
            x_BSD, _ = block(x_BSD, inputs)
        return Memory(self.finish_encoder(x_BSD), source_mask)

    def _encoder_inputs(self, length: int, source_mask: Tensor | None) -> BlockInputs:
        kind = self.attention_kind(causal=False)
        return BlockInputs(prepare_attention(kind, kind.sight(length, key_mask=source_mask)), self.angles(None, length))

    def finish_encoder(self, x_BSD: Tensor) -> Tensor:
        """The states that the decoder looks at, from the residual stream behind the encoder's last block."""
        return self.memory(x_BSD if self.encoder_norm is None else self.encoder_norm(x_BSD))

    def run_encoder_block(self, layer: int, x_BSD: Tensor) -> Tensor:
        """As `run_block`, of the encoder; rows have no padding."""
        found_BSD, _ = self.encoder_blocks[layer](x_BSD, self._encoder_inputs(x_BSD.shape[1], None))
        return cast(Tensor, found_BSD)

    def run_target_block(self, layer: int, x_BTD: Tensor, memory: Memory) -> Tensor:
        """As `run_block`, of the decoder, which looks at `memory`: one for all rows, or one for each."""
        states = memory.states.expand(len(x_BTD), -1, -1)
        return self.run_block(layer, x_BTD, states, self._looking_at(memory, x_BTD.shape[1]))

    def _looking_at(self, memory: Memory, num_targets: int) -> Attending:
        """The kernel of attention to `memory`; places of one sequence have no distance to places of the other."""
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
        """Target ids (B, T) to normalised hidden states (B, T, D), ready for `lm_head`.

        Their source is given as `source_ids` (B, S) with `source_mask`, as `encode` takes them, or as the `memory` that
        `encode` gave. With a `cache` the targets go on where it ends, and the memory is projected to keys and values
        in the first pass only, so it must be the same in all of them. Raises `ValueError` as `Transformer` does, for a
        source that is missing or given twice, and for documents in a row.
        """
        if (source_ids is None) == (memory is None):
            raise ValueError("an encoder-decoder needs source_ids or the memory that encode made of them, not both")
        if document_ids is not None:
            raise ValueError("an encoder-decoder reads one target per row; document_ids are for a decoder")
        if memory is None:
            assert source_ids is not None
            memory = self.encode(source_ids, source_mask)
        if memory.states.shape[0] != input_ids.shape[0]:
            raise ValueError(f"{input_ids.shape[0]} targets, but {memory.states.shape[0]} sources")
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
        """Source ids (B, S) and target ids (B, T) to logits (B, T, V) of the token after each target position.

        Padding behind a target needs no mask: nothing before it sees it. `positions` are those of the target.
        """
        hidden_BTD = self.hidden_states(target_ids, positions=positions, source_ids=source_ids, source_mask=source_mask)
        return self.read_out(hidden_BTD, logits_to_keep)
