"""The decoder-only transformer: embedding, positions, blocks, final norm, output projection.

Shapes: B batch, T query positions, S key positions, D d_model, H heads, K kv heads, C head_dim, F d_ff, V vocab.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple, Self, cast

import torch
from torch import Tensor, nn

from sheepop.model.attention.choose import prepare_attention
from sheepop.model.attention.kernel import Attending, AttentionKind
from sheepop.model.attention.layer import KeysValues
from sheepop.model.attention.sight import number_documents
from sheepop.model.block import Block, BlockInputs, BlockOutputs
from sheepop.model.cache import Cache
from sheepop.model.config import ModelConfig
from sheepop.model.experts import MixtureOfExperts, Routing
from sheepop.model.head import OutputHead
from sheepop.model.layer_inputs import LayerInputs
from sheepop.model.ngrams import NgramEmbedding
from sheepop.model.norms import build_norm
from sheepop.model.options import Architecture
from sheepop.model.positions import AddedPositions, RotaryPositions, alibi_slopes
from sheepop.model.probe import Probe, someone_watches


class Outputs(NamedTuple):
    """The results of a forward pass: normalised hidden states (B, T, D), and the routing of each layer with experts."""

    hidden_states: Tensor
    routings: tuple[Routing, ...]


@dataclass
class Passing:
    """What the blocks of one pass get in addition to the stream: `vectors` (B, T, L, P) of `LayerInputs`, and the keys
    and values that earlier blocks gave, by layer.
    """

    vectors: Tensor | None = None
    keys_values: dict[int, KeysValues] = field(default_factory=dict)

    def of_rows(self, count: int) -> Passing:
        """Returns those of a single row for `count` rows."""
        vectors = None if self.vectors is None else self.vectors.expand(count, -1, -1, -1)
        given = self.keys_values.items()
        return Passing(
            vectors, {at: (k.expand(count, -1, -1, -1), v.expand(count, -1, -1, -1)) for at, (k, v) in given}
        )


class Transformer(nn.Module):
    """A causal language model on one device, whose weights `sheepop.model.initialization` sets."""

    architecture: ClassVar[Architecture] = "decoder"
    slopes: Tensor | None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if config.architecture != self.architecture:
            raise ValueError(f"{type(self).__name__} cannot be {config.architecture}; use sheepop.model.blank_model")
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.d_model)
        # Sinusoids have amplitude 1, and must not drown the embeddings (Vaswani et al. 2017, 3.4).
        self.embedding_scale = float(config.embedding_scale or 1.0)
        self.ngrams = None if config.ngrams is None else NgramEmbedding(config.ngrams, config.d_model)
        self.embedding_norm = build_norm(config) if config.embedding_norm else None
        encoding = config.position_encoding
        self.added_positions = AddedPositions(config) if encoding in ("sinusoidal", "learned") else None
        self.rotary_positions = RotaryPositions(config) if encoding == "rope" else None
        self.layer_inputs = None if config.layer_inputs is None else LayerInputs(config, config.layer_inputs)
        apart = config.sliding_position_base is not None or config.sliding_head_dim is not None
        self.sliding_rotary_positions = RotaryPositions(config, sliding=True) if apart else None
        self.register_buffer(
            "slopes", alibi_slopes(config.num_heads) if encoding == "alibi" else None, persistent=False
        )
        self.dropout = nn.Dropout(config.dropout)
        crosses = config.architecture == "encoder_decoder"
        self.blocks = nn.ModuleList(Block(config, layer, cross_attention=crosses) for layer in range(config.num_layers))
        self.final_norm = build_norm(config) if config.final_norm else None
        self.lm_head = OutputHead(config.d_model, config.vocabulary, config.logit_soft_cap, bias=config.head_bias)
        # Layers of one kind share their inputs: the number of keys that a query sees, and whether positions rotate it;
        # None for layers without attention.
        self.kinds = tuple(
            (config.window(layer), config.rotates(layer)) if config.mixer(layer) is None else None
            for layer in range(config.num_layers)
        )
        # The layers without keys and values of their own, and those that give them theirs.
        shared = range(config.num_layers - config.shared_kv_layers, config.num_layers)
        self.kv_sources = {layer: source for layer in shared if (source := config.kv_source(layer)) is not None}
        self.compiled = False
        # Of keys and values in a cache; None is `dtype`.
        self.cache_dtype: torch.dtype | None = None
        # Returns the stream after all blocks, given them, the stream before, their inputs and the cache; None if it
        # cannot compute this pass, which then runs block by block.
        self.run_together: Callable[..., Tensor | None] | None = None
        self.embedded, self.positioned, self.final, self.logits = Probe(), Probe(), Probe(), Probe()
        self.tie()

    def tie(self) -> None:
        """Makes the output projection and the embedding share one parameter, if `tie_weights` is set."""
        if self.config.tie_weights:
            self.lm_head.weight = self.embedding.weight

    def sharing_copy(self, replaced: Mapping[nn.Parameter, nn.Parameter] | None = None) -> Self:
        """Returns a copy with its own modules that shares all parameters and buffers except those in `replaced`.

        The mode (training or evaluation), compiled code and hooks of the copy do not affect the original.
        """
        shared: dict[int, object] = {id(tensor): tensor for tensor in (*self.parameters(), *self.buffers())}
        # A deep copy does not copy objects that its memo already lists.
        return copy.deepcopy(self, shared | {id(tensor): found for tensor, found in (replaced or {}).items()})

    def compile_blocks(self, *, with_attention: bool = True) -> None:
        """Compiles the blocks one by one, which share one compilation that is quicker than that of the whole network.

        Set `with_attention` to False for use with a cache: attention passes it the layer's number, so that each layer
        would be compiled separately.
        """
        self.compiled = with_attention
        for block in self.layers:
            if not with_attention:
                mixer = block.attention or block.mixer
                assert mixer is not None
                forward: Any = torch.compiler.disable(mixer.forward)  # type: ignore[no-untyped-call]
                mixer.forward = forward  # type: ignore[method-assign]
            block.compile()

    def pack_projections(self) -> None:
        """Computes queries, keys and values of each layer by one product; see `Attention.pack_projections`."""
        for block in self.layers:
            if block.attention is not None:
                block.attention.pack_projections()

    @property
    def layers(self) -> tuple[Block, ...]:
        """All blocks, in execution order."""
        return tuple(cast(Block, block) for block in self.blocks)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer with attention; None is all keys."""
        return tuple(kind[0] for kind in self.kinds if kind is not None)

    @property
    def mixtures(self) -> dict[int, MixtureOfExperts]:
        """The mixtures of experts, by layer index."""
        layers = {layer: block.feed_forward for layer, block in enumerate(self.blocks)}
        return {layer: module for layer, module in layers.items() if isinstance(module, MixtureOfExperts)}

    @property
    def exact_parameters(self) -> list[nn.Parameter]:
        """The parameters that stay in float32 when steps compute in half precision.

        Rounding a router would change its choices, and casting a table would convert rows that no batch reads.
        """
        tables = [] if self.ngrams is None else [self.ngrams.table]
        routers = [weight for mixture in self.mixtures.values() for weight in mixture.router.parameters()]
        gates = [mixture.shared_gate for mixture in self.mixtures.values() if mixture.shared_gate is not None]
        return [*routers, *gates, *tables]

    def hidden_states(self, input_ids: Tensor, **inputs: Any) -> Tensor:
        """Returns the hidden states (B, T, D) of `run` with the same arguments."""
        return self.run(input_ids, **inputs).hidden_states

    def run(
        self,
        input_ids: Tensor,
        *,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Outputs:
        """Maps token ids (B, T) to normalised hidden states (B, T, D), the input of `lm_head`, and expert routings.

        `positions` (B, T) or (1, T), each below `max_seq_len`, default to 0, 1, 2, ..., or continue after the tokens in
        `cache`. `document_ids` (B, T) restrict attention to runs of equal ids. Raises `ValueError` for a sequence
        longer than `max_seq_len`, or an argument of the wrong shape.
        """
        return self._decode(input_ids, positions, document_ids, cache)

    def _decode(
        self,
        input_ids: Tensor,
        positions: Tensor | None,
        document_ids: Tensor | None,
        cache: Cache | None,
        memory: Tensor | None = None,
        memory_attending: Attending | None = None,
    ) -> Outputs:
        """Does the work of `run`; `memory` and `memory_attending` are those of `BlockInputs`."""
        if input_ids.ndim != 2:
            raise ValueError(f"input_ids must be (B, T), got shape {tuple(input_ids.shape)}")
        rows, num_tokens = input_ids.shape
        if positions is not None and tuple(positions.shape) not in ((rows, num_tokens), (1, num_tokens)):
            raise ValueError(f"positions have shape {tuple(positions.shape)}, input_ids {(rows, num_tokens)}")
        if document_ids is not None and document_ids.shape != input_ids.shape:
            raise ValueError(f"document_ids have shape {tuple(document_ids.shape)}, input_ids {(rows, num_tokens)}")
        if cache is not None and document_ids is not None and not cache.has_documents:
            raise ValueError("document_ids are for packed training batches; a cache holds one document per row")
        behind, end = (None, num_tokens) if cache is None else cache.begin(rows, num_tokens)
        if num_tokens > self.config.max_seq_len or (positions is None and end > self.config.max_seq_len):
            raise ValueError(f"{end} positions do not fit max_seq_len = {self.config.max_seq_len}")
        positions = behind if positions is None else positions
        documents = document_ids if document_ids is None or cache is not None else number_documents(document_ids)
        x_BTD = self.enter(input_ids, positions, documents, cache)
        attending = {}
        for window in set(self.windows):
            if cache is None:
                kind = self.attention_kind(window)
                attending[window] = prepare_attention(kind, kind.sight(num_tokens, document_ids=document_ids))
            else:
                attending[window] = cache.prepare(window, partial(self.attention_kind, window, cached=True))
        inputs: dict[tuple[int | None, bool] | None, BlockInputs] = {None: BlockInputs(None, document_ids=documents)}
        for window, rotates in {kind for kind in self.kinds if kind is not None}:
            rotary = self.angles(window, num_tokens, positions) if rotates else None
            inputs[window, rotates] = BlockInputs(attending[window], rotary, memory, memory_attending, documents)
        routings: list[Routing] = []
        passing = self.passing(input_ids, x_BTD)
        of_layers = [inputs[kind] for kind in self.kinds]
        if self.run_together is not None:
            found_BTD = self.run_together(self.layers, x_BTD, of_layers, cache)
            if found_BTD is not None:
                return Outputs(self.finish(found_BTD), ())
        for layer, of_layer in enumerate(of_layers):
            x_BTD, routing, _ = self._pass(layer, x_BTD, of_layer, passing, cache)
            if routing is not None:
                routings.append(routing)
        return Outputs(self.finish(x_BTD), tuple(routings))

    def enter(
        self, input_ids: Tensor, positions: Tensor | None, documents: Tensor | None, cache: Cache | None
    ) -> Tensor:
        """Returns the residual stream (B, T, D) before the first block; `documents` (B, T) are numbered from 0."""
        ngrams_BTD = None if self.ngrams is None else self.ngrams(input_ids, documents, cache)
        return self.embed(input_ids, positions, ngrams_BTD=ngrams_BTD)

    def passing(self, input_ids: Tensor, x_BTD: Tensor) -> Passing:
        """Returns what blocks get in addition to the stream (B, T, D), which has not passed any of them yet."""
        return Passing(None if self.layer_inputs is None else self.layer_inputs(input_ids, x_BTD))

    def _pass(
        self, layer: int, x_BTD: Tensor, inputs: BlockInputs, passing: Passing, cache: Cache | None = None
    ) -> BlockOutputs:
        source = self.kv_sources.get(layer)
        if passing.vectors is not None or source is not None:
            vectors = None if passing.vectors is None else passing.vectors[:, :, layer]
            shared = None if source is None else passing.keys_values[source]
            inputs = replace(inputs, vectors=vectors, shared=shared)
        found: BlockOutputs = self.blocks[layer](x_BTD, inputs, cache)
        if found.keys_values is not None:
            passing.keys_values[layer] = found.keys_values
        return found

    def run_block(
        self,
        layer: int,
        x_BTD: Tensor,
        passing: Passing | None = None,
        memory: Tensor | None = None,
        memory_attending: Attending | None = None,
    ) -> Tensor:
        """Runs one block on the residual stream (B, T, D); each row is a whole sequence that begins at position 0.

        `memory` and `memory_attending` are those of `BlockInputs`; what the block gives to others is put in `passing`.
        """
        attending, angles, num_tokens = None, None, x_BTD.shape[1]
        if (seen := self.kinds[layer]) is not None:
            kind = self.attention_kind(seen[0])
            attending = prepare_attention(kind, kind.sight(num_tokens))
            angles = self.angles(seen[0], num_tokens, None) if seen[1] else None
        inputs = BlockInputs(attending, angles, memory, memory_attending)
        return self._pass(layer, x_BTD, inputs, passing or Passing()).stream

    def embed(
        self,
        input_ids: Tensor,
        positions: Tensor | None,
        probes: tuple[Probe, Probe] | None = None,
        ngrams_BTD: Tensor | None = None,
    ) -> Tensor:
        """Maps token ids (B, T) to the residual stream (B, T, D) before the first block.

        Adds `ngrams_BTD` to the token vectors. The two `probes` see the stream before and after positions are added;
        None means `embedded` and `positioned`.
        """
        embedded, positioned = probes or (self.embedded, self.positioned)
        x_BTD = self.embedding(input_ids)
        if self.embedding_scale != 1.0:
            x_BTD = x_BTD * self.embedding_scale
        if ngrams_BTD is not None:
            x_BTD = x_BTD + ngrams_BTD.to(x_BTD.dtype)
        if self.embedding_norm is not None:
            x_BTD = self.embedding_norm(x_BTD)
        x_BTD = embedded(x_BTD)
        if self.added_positions is not None:
            x_BTD = self.added_positions(x_BTD, positions)
        x_BTD = positioned(x_BTD)
        return self.dropout(x_BTD) if self.training else x_BTD

    def angles(
        self, window: int | None, num_tokens: int, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor] | None:
        """Returns cosines and sines of the rotary angles of layers with this window; None without rotary positions."""
        sliding = self.sliding_rotary_positions if window is not None else None
        rotary = self.rotary_positions if sliding is None else sliding
        return None if rotary is None else rotary(num_tokens, positions)

    @property
    def dtype(self) -> torch.dtype:
        """The data type of the blocks' weights, in which they compute unless autocast is on."""
        return next(weight.dtype for weight in self.blocks.parameters() if weight.dtype.is_floating_point)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.embedding.weight.device

    def attention_kind(self, window: int | None = None, *, causal: bool = True, cached: bool = False) -> AttentionKind:
        """Returns what attention in layers with this window may see and what it needs from its kernel."""
        config, device = self.config, self.device
        latent, heads = config.latent_attention, config.heads_of(sliding=window is not None)
        expanded = heads.key_width + heads.value_width
        autocast = device.type != "meta" and torch.is_autocast_enabled(device.type)  # the meta device has no autocast
        return AttentionKind(
            window=window,
            slopes=self.slopes,
            causal=causal,
            head_dim=heads.key_width,
            value_dim=heads.value_width,
            dropout=config.dropout if self.training else 0.0,
            soft_cap=config.attention_soft_cap is not None,
            sinks=config.attention_sinks,
            backend=config.attention_backend,
            watched=someone_watches() and any(block.watched for block in self.layers),
            compiled=self.compiled,
            cached=cached,
            latents=None if latent is None else (latent.kv_rank, expanded - latent.rope_head_dim),
            device=device,
            dtype=torch.get_autocast_dtype(device.type) if autocast else self.dtype,
        )

    def finish(self, x_BTD: Tensor) -> Tensor:
        """Applies the final norm and the factor of the logits; with muP, that includes one over the width multiplier.

        Yang et al. 2022, table 8.
        """
        if self.final_norm is not None:
            x_BTD = self.final_norm(x_BTD)
        if self.config.output_scale != 1.0:
            x_BTD = x_BTD * self.config.output_scale
        return self.final(x_BTD)

    def forward(
        self,
        input_ids: Tensor,
        *,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
        cache: Cache | None = None,
        logits_to_keep: int | None = None,
    ) -> Tensor:
        """Maps token ids (B, T) to logits (B, T, V), or to those of the last `logits_to_keep` positions."""
        hidden_BTD = self.hidden_states(input_ids, positions=positions, document_ids=document_ids, cache=cache)
        return self.read_out(hidden_BTD, logits_to_keep)

    def read_out(self, hidden_BTD: Tensor, logits_to_keep: int | None = None) -> Tensor:
        """Maps hidden states (B, T, D) to logits (B, T, V), or to those of the last `logits_to_keep` positions."""
        if logits_to_keep is not None:
            if logits_to_keep < 1:
                raise ValueError(f"logits_to_keep must be at least 1, got {logits_to_keep}")
            hidden_BTD = hidden_BTD[:, -logits_to_keep:]
        return self.logits(self.lm_head(hidden_BTD))
