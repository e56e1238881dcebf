"""A trace gives access to every tensor of one forward pass over a prompt.

It stores the token ids and the residual stream between the blocks, (L + 1, T, D). The tensors inside the blocks are
kept from the pass if they are few. Otherwise a block is recomputed on demand from the residual stream before it, so a
long prompt needs only the memory of one block. Attention is computed step by step, so the weights in the trace are
those that produced the residual stream. An encoder-decoder has two such streams, one of the source and one of the
target.

Shapes: T tokens, S source tokens, D d_model, H heads, K kv heads, C head_dim, F d_ff, V vocab, L layers. There is no
batch dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor

from sheepop.generate.request import Prompt
from sheepop.interpret.predictions import Predictions
from sheepop.interpret.tokens import Token, TokenReader, read_traced
from sheepop.model import EncoderDecoder, Memory, Transformer
from sheepop.model.attention.layer import Attention
from sheepop.model.block import Block
from sheepop.model.probe import named_probes, watch
from sheepop.model.transformer import Passing
from sheepop.tokenizer import Tokenizer

# The most logits of a pass in memory at a time; readings of them take several copies in float64.
_LOGITS = 2**21
# The tensors inside all blocks, or else inside the last requested one, stay in memory up to this many bytes.
_KEPT_BYTES = 2**28
Keep = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Stream:
    """The residual stream of one text before each block and after the last: `residuals` (L + 1, T, D).

    `path` is the name of the stack: ``blocks``, or ``encoder_blocks`` for an encoder, in which every token attends to
    all others because it is not `causal`. `embedded` (T, D) are the vectors of the tokens without positions.
    `run_block` runs a block, given its number, on a stream (B, T, D) and what the blocks get beside it: `passing`.
    """

    path: str
    blocks: tuple[Block, ...]
    token_ids: list[int]
    embedded: Tensor
    residuals: Tensor
    run_block: Callable[[int, Tensor, Passing], Tensor]
    causal: bool
    passing: Passing

    @property
    def num_tokens(self) -> int:
        """The number of tokens, T."""
        return len(self.token_ids)

    def paths(self) -> Iterator[tuple[str, Block]]:
        """The blocks in order, with their names in the network, such as ``blocks.0``."""
        return ((f"{self.path}.{layer}", block) for layer, block in enumerate(self.blocks))

    def run_from(self, first: int, x_BTD: Tensor) -> Tensor:
        """Runs the blocks from number `first` on on another stream (B, T, D) before them."""
        passing = self.passing.of_rows(len(x_BTD))
        for layer in range(first, len(self.blocks)):
            x_BTD = self.run_block(layer, x_BTD, passing)
        return x_BTD


def attentions_of(block: Block) -> list[tuple[str, Attention]]:
    """The attention layers of a block, if it has any, with their names, in the order in which they run."""
    layers = [("attention", block.attention), ("cross_attention", block.cross_attention)]
    return [(name, layer) for name, layer in layers if layer is not None]


class Trace:
    """One pass over a prompt. ``trace["blocks.0.attention.weights"]`` is the tensor at the probe of that name.

    The logits follow from the stream `target`, to which `blocks` (L), `token_ids` (T, with those that begin every
    text), `embedded` (T, D) and `residuals` (L + 1, T, D) belong. With an encoder, `source` is its stream, and `memory`
    are its states (S, D) after the last norm. `streams` has both in the order of their computation.
    """

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer,
        prompt: Prompt,
        target: Stream,
        source: Stream | None = None,
        memory_SD: Tensor | None = None,
    ) -> None:
        self.model, self.tokenizer, self.prompt = model, tokenizer, prompt
        self.target, self.source, self.memory, self.config = target, source, memory_SD, model.config
        self.streams = [target] if source is None else [source, target]
        self.blocks, self.embedded, self.residuals = target.blocks, target.embedded, target.residuals
        self.token_ids, self.num_layers, self.num_tokens = prompt.token_ids, len(target.blocks), target.num_tokens
        self._reader = TokenReader(tokenizer)
        self._kept: Mapping[str, Tensor] = {}

    @classmethod
    @torch.no_grad()
    def of(
        cls,
        model: Transformer,
        tokenizer: Tokenizer,
        prompt: str | Sequence[int],
        target: str | Sequence[int] | None = None,
    ) -> Trace:
        """Traces a pass over `prompt`, a text or token ids; raises `UsageError` if it is empty or too long.

        An encoder-decoder reads the prompt as its source, and `target` after the token that begins every target.
        """
        read = read_traced(model, tokenizer, prompt, target)
        if any(module.training for module in model.modules()):
            model = model.sharing_copy().eval()
        given = {
            f"blocks.{layer}.attention.{name}" for layer in model.kv_sources.values() for name in ("rotated_k", "v")
        }
        is_short = len(model.layers) * _block_size(model, read) * model.dtype.itemsize <= _KEPT_BYTES
        names = [
            name
            for name in named_probes(model)
            if _is_kept(name) or name in given or (is_short and _block_of(name) is not None)
        ]
        kept: dict[str, Tensor] = {}
        inputs = {} if read.source_ids is None else {"source_ids": torch.tensor([read.source_ids], device=model.device)}
        with watch(model, {name: _keeper(kept, name, None) for name in names} | {_ALL_WEIGHTS: _look}):
            model.hidden_states(torch.tensor([read.token_ids], device=model.device), **inputs)

        def stream(path: str, prefix: str, ids: list[int], run: Callable[[int, Tensor, Passing], Tensor]) -> Stream:
            blocks = tuple(cast(Block, block) for block in model.get_submodule(path).children())
            outputs = [f"{path}.{layer}.output" for layer in range(len(blocks))]
            residuals = torch.stack([kept[name] for name in (f"{prefix}positioned", *outputs)])
            passing = model.passing(torch.tensor([ids], device=model.device), residuals[:1])
            for layer in model.kv_sources.values():
                keys, values = (kept[f"{path}.{layer}.attention.{name}"][None] for name in ("rotated_k", "v"))
                passing.keys_values[layer] = keys, values
            return Stream(path, blocks, ids, kept[f"{prefix}embedded"], residuals, run, not prefix, passing)

        if isinstance(model, EncoderDecoder):
            pair, memory, source_ids = model, Memory(kept["memory"][None]), cast("list[int]", read.source_ids)
            own = stream("blocks", "", read.token_ids, lambda layer, x, _: pair.run_target_block(layer, x, memory))
            source = stream(
                "encoder_blocks", "source_", source_ids, lambda layer, x, _: pair.run_encoder_block(layer, x)
            )
            trace = cls(model, tokenizer, read, own, source, memory.states[0])
        else:
            network = model
            own = stream("blocks", "", read.token_ids, lambda layer, x, given: network.run_block(layer, x, given))
            trace = cls(model, tokenizer, read, own)
        if is_short:
            trace._kept = kept
        return trace

    @cached_property
    def tokens(self) -> list[Token]:
        """The tokens of the target's stream with their bytes."""
        if self.prompt.source_ids is None:
            return self._reader.tokens(self.token_ids, self.prompt.text)
        return self._reader.tokens(self.token_ids, self.tokenizer.decode(self.token_ids[1:]))

    @cached_property
    def source_tokens(self) -> list[Token]:
        """The tokens of the source; none without an encoder."""
        return self._reader.tokens(self.prompt.source_ids or [], self.prompt.text)

    def text_of(self, token_id: int) -> str:
        """The readable form of a token: its text, its name, or its bytes if they are no valid UTF-8."""
        return self._reader.text_of(token_id)

    @cached_property
    def names(self) -> list[str]:
        """The names of all tensors in the trace, in the order of their computation."""
        return sorted(named_probes(self.model), key=_order)

    def __getitem__(self, name: str) -> Tensor:
        """The tensor at a probe, such as ``blocks.3.attention.scores``; raises `KeyError` for an unknown name."""
        if name not in self.names:
            raise KeyError(f"no probe is named {name!r}; trace.names lists all of them")
        block = _block_of(name)
        if block is None:
            return self._outside(name)
        if name not in self._kept:
            self.forget()
            if self.block_bytes > _KEPT_BYTES:
                return self.collect([name])[name]
            self._kept = self.collect([f"{block}.*"])
        return self._kept[name]

    @property
    def block_bytes(self) -> int:
        """An estimate of the bytes of all tensors inside the largest block."""
        return _block_size(self.model, self.prompt) * self.residuals.element_size()

    def forget(self) -> None:
        """Frees the tensors inside blocks; a new request recomputes them."""
        self._kept = {}

    @torch.no_grad()
    def collect(self, patterns: Iterable[str], keep: Keep | Mapping[str, Keep] | None = None) -> dict[str, Tensor]:
        """The tensors at all matching probes of blocks; each block is computed at most once.

        `keep`, one function for all probes or one per pattern, reduces each tensor before it is stored, so that large
        tensors need not stay in memory. Raises `KeyError` for a pattern that matches nothing.
        """
        found: dict[str, Tensor] = {}
        wanted: dict[str, dict[str, Keep | None]] = {}
        for pattern in patterns:
            cut = keep.get(pattern) if isinstance(keep, Mapping) else keep
            matching = [pattern] if pattern in self.names else [n for n in self.names if fnmatchcase(n, pattern)]
            blocks = [(name, _block_of(name)) for name in matching]
            names = [(name, block) for name, block in blocks if block is not None]
            if not names:
                raise KeyError(f"no probe of a block matches {pattern!r}; trace.names lists all of them")
            for name, block in names:
                if name in self._kept:
                    found[name] = _part(self._kept[name], cut)
                else:
                    wanted.setdefault(block, {})[name] = cut
        places = [
            (stream, layer, path, block.attention is not None)
            for stream in self.streams
            for layer, (path, block) in enumerate(stream.paths())
            if path in wanted
        ]
        steps = {f"{path}.attention.weights": _look for _, _, path, attends in places if attends}
        observers = {name: _keeper(found, name, cut) for _, _, path, _ in places for name, cut in wanted[path].items()}
        with watch(self.model, steps), watch(self.model, observers):
            for stream, layer, _, _ in places:
                stream.run_block(layer, stream.residuals[layer][None], stream.passing)
        return found

    @torch.no_grad()
    def _outside(self, name: str) -> Tensor:
        if name == "memory":
            assert self.memory is not None
            return self.memory
        if name in ("final", "logits"):
            return self.final if name == "final" else self.model.read_out(self.final[None])[0]
        stream = self.source if name.startswith("source_") else self.target
        assert stream is not None
        return stream.embedded if name.endswith("embedded") else stream.residuals[0]

    def run(self, input_ids: Tensor, model: Transformer | None = None, **options: Any) -> Tensor:
        """The logits of an untraced pass over target ids (B, T), by this model or another."""
        model = model or self.model
        if self.prompt.source_ids is None:
            return cast(Tensor, model(input_ids, **options))
        source_ids = torch.tensor([self.prompt.source_ids], device=model.device).expand(len(input_ids), -1)
        return cast(Tensor, model(source_ids, input_ids, **options))

    @cached_property
    def final(self) -> Tensor:
        """The states (T, D) after the final norm, which the output projection reads."""
        with torch.no_grad():
            return self.model.finish(self.residuals[-1][None])[0]

    @torch.no_grad()
    def states(self, input_ids: Tensor, model: Transformer | None = None) -> Tensor:
        """The states (T, D) after the final norm in an untraced pass over target ids (1, T); see `run`."""
        sources = self.prompt.source_ids
        inputs = {} if sources is None else {"source_ids": torch.tensor([sources], device=input_ids.device)}
        return (model or self.model).hidden_states(input_ids, **inputs)[0]

    @torch.no_grad()
    def logits_of(self, final_TD: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yields slices of positions with their logits (t, V), given states after the final norm."""
        step = max(1, _LOGITS // self.config.vocabulary)
        for start in range(0, len(final_TD), step):
            places = slice(start, min(start + step, len(final_TD)))
            yield places, self.model.read_out(final_TD[None, places])[0]

    def log_probabilities(
        self, residual_TD: Tensor | None = None, positions: slice = slice(None)
    ) -> Iterator[tuple[slice, Tensor]]:
        """Yields slices of the `positions` with their log-probabilities (t, V), in float32 or a finer type.

        They follow from the last residual stream, or from another as if it were the last (the logit lens).
        """
        with torch.no_grad():
            final = self.final if residual_TD is None else self.model.finish(residual_TD[None])[0]
        for places, logits in self.logits_of(final[positions]):
            yield places, logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))

    @cached_property
    def predictions(self) -> Predictions:
        """The predictions of the next token at every position, each computed when it is first read."""
        return Predictions(self.token_ids, lambda positions: self.log_probabilities(positions=positions))

    def angles(self, path: str) -> Tensor:
        """The angles (T, R/2) in radians by which the attention layer at `path` rotates queries and keys.

        A path is ``blocks.0.attention``; angles are between -pi and pi. Raises `KeyError` if nothing is rotated there.
        """
        for stream in self.streams:
            for layer, (block, _) in enumerate(stream.paths()):
                if path == f"{block}.attention":
                    window, rotates = (self.model.kinds[layer] or (None, False)) if stream.causal else (None, True)
                    if rotates and (turned := self.model.angles(window, stream.num_tokens)) is not None:
                        return torch.atan2(turned[1], turned[0])
        raise KeyError(f"no attention layer at {path!r} turns its queries and keys")

    @torch.no_grad()
    def unmasked_scores(self, path: str) -> Tensor:
        """The scores (H, T, T) of the attention layer at `path`, such as ``blocks.0.attention``, before mask and bias.

        They are scaled and capped. Raises `KeyError` if no attention layer has that path.
        """
        q_HTC, k_KTC = (self[f"{path}.rotated_{name}"] for name in "qk")
        attention = cast(Attention, self.model.get_submodule(path))
        scale = q_HTC.shape[-1] ** -0.5 if attention.scale is None else attention.scale
        scores = scale * q_HTC @ k_KTC.repeat_interleave(len(q_HTC) // len(k_KTC), 0).transpose(-2, -1)
        return scores if attention.soft_cap is None else attention.soft_cap * (scores / attention.soft_cap).tanh()

    @torch.no_grad()
    def logits_behind(self, position: int) -> Tensor:
        """The logits (V,) of the token after `position`; raises `IndexError` for a position out of range."""
        return self.model.read_out(self.final[None, [range(self.num_tokens)[position]]])[0, 0]


# The order of the probes of a block; the probes of experts are below ``feed_forward``.
_ATTENTION = (
    "q_latent", "kv_latent", "q", "k", "v", "rotated_q", "rotated_k", "scores", "weights", "head_outputs",
)  # fmt: skip
_STAGES = (
    "attention_input", *(f"attention.{name}" for name in _ATTENTION), "mixer", "attention_output", "middle",
    "cross_attention_input", *(f"cross_attention.{name}" for name in _ATTENTION), "cross_attention_output",
    "upper_middle", "feed_forward_input", "feed_forward", "feed_forward_output",
    "upper_feed_forward", "layer_input", "layer_input_output", "output",
)  # fmt: skip
_PASS = (
    "source_embedded", "source_positioned", "encoder_blocks", "memory",
    "embedded", "positioned", "blocks", "final", "logits",
)  # fmt: skip
_ALL_WEIGHTS = "*attention.weights"


def _order(name: str) -> tuple[int, int, int]:
    """The position of a probe in a pass, as a key for sorting."""
    if _block_of(name) is None:
        return _PASS.index(name), 0, 0
    stack, layer, inside = name.split(".", 2)
    stage = next(number for number, stage in enumerate(_STAGES) if inside == stage or inside.startswith(f"{stage}."))
    return _PASS.index(stack), int(layer), stage


def _block_of(name: str) -> str | None:
    """The path of the block of a probe, such as ``blocks.0``; None outside blocks."""
    path, _, inside = name.rpartition(".")
    return ".".join(path.split(".")[:2]) if inside and path else None


def _is_kept(name: str) -> bool:
    """Whether a trace stores the tensor at this probe: the input of the first block, and the output of each."""
    block = _block_of(name)
    return name == f"{block}.output" or (block is None and name not in ("final", "logits"))


def _look(value: Tensor) -> None:
    """Does nothing; a watched probe alone makes attention compute step by step."""


def _block_size(model: Transformer, prompt: Prompt) -> int:
    """An estimate of how many numbers all tensors inside the largest block have."""
    config, targets, sources = model.config, len(prompt.token_ids), len(prompt.source_ids or ())
    length = max(targets, sources)
    scores = 2 * config.num_heads * length * (length + min(sources, targets))
    widths = 8 * config.d_model + 4 * max(config.layer_d_ff or (config.ffn_size,))
    widths += 6 * config.num_heads * config.widest_heads.key_width
    return scores + length * widths


def _part(whole: Tensor, cut: Keep | None) -> Tensor:
    """What `cut` keeps, without the memory of the rest."""
    part = whole if cut is None else cut(whole)
    return part.clone() if part.untyped_storage().nbytes() > part.nbytes else part


def _keeper(found: dict[str, Tensor], name: str, cut: Keep | None) -> Callable[[Tensor], None]:
    # Experts get the tokens of all rows in one sequence; everything else has a batch dimension.
    is_flat = any(part in name for part in (".router.", ".experts.")) or name.endswith(".order")

    def keep(value: Tensor) -> None:
        found[name] = _part(value if is_flat else value[0], cut)

    return keep
