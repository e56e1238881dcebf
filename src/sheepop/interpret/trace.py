"""A trace: every number of one pass over a prompt, kept where it is small and computed again where it is not.

What is kept are the token ids and the residual stream between the blocks, (L + 1, T, D). The inside of a block is
computed again from the residual stream before it when somebody asks, so a long prompt needs no more memory than one
block. Attention is computed step by step, so the weights that are shown are those that made the residual stream.

Shapes: T tokens, D d_model, H heads, K kv heads, C head_dim, F d_ff, V vocab, L layers. There is no batch dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from sheepop.core.errors import UsageError
from sheepop.core.facts import visible
from sheepop.generate.prompt import Prompt, read_prompt
from sheepop.model import EncoderDecoder, ModelConfig, Transformer
from sheepop.model.probe import named_probes, watch
from sheepop.tokenizer import Tokenizer

# Numbers that are held at a time where every position has one for each entry of the vocabulary.
_LOGITS = 2**24
# What is asked of a block is kept until another block is asked, up to so many bytes.
_KEPT_BYTES = 2**28
_SHOWN = 10  # likeliest tokens
Keep = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Token:
    """A token of a prompt; ``begin:end`` are its bytes in the prompt's UTF-8, None where it stands for none of them."""

    position: int
    id: int
    text: str
    bytes: str
    begin: int | None
    end: int | None

    def to_dict(self) -> dict[str, Any]:
        """As plain data; bytes are hexadecimal."""
        return asdict(self)


class Trace:
    """One pass over a prompt. ``trace["blocks.0.attention.weights"]`` is the tensor that passed the probe of that name.

    `residuals` (L + 1, T, D) are the residual stream before each block, and behind the last.
    """

    def __init__(
        self, model: Transformer, tokenizer: Tokenizer, prompt: Prompt, embedded_TD: Tensor, residuals: Tensor
    ) -> None:
        self.model, self.tokenizer, self.prompt = model, tokenizer, prompt
        self.embedded, self.residuals = embedded_TD, residuals
        self._layer, self._kept = -1, dict[str, Tensor]()

    @classmethod
    @torch.no_grad()
    def of(cls, model: Transformer, tokenizer: Tokenizer, prompt: str | Sequence[int]) -> Trace:
        """Reads `prompt`, a text or token ids; raises `UsageError` for one that is empty or too long."""
        read = read_traced(model, tokenizer, prompt)
        model = model.sharing_copy().eval()
        residuals: list[Tensor] = []
        places = {f"blocks.{layer}.output": residuals.append for layer in range(len(model.layers))}
        embedded: list[Tensor] = []
        watched = {"embedded": embedded.append, "positioned": residuals.append, **places}
        input_ids = torch.tensor([read.token_ids], device=model.device)
        with watch(model, {**watched, "blocks.*.attention.weights": _look}):
            model.hidden_states(input_ids)
        return cls(model, tokenizer, read, embedded[0][0], torch.cat(residuals))

    @property
    def config(self) -> ModelConfig:
        """Of the model."""
        return self.model.config

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.model.layers)

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.prompt.token_ids)

    @property
    def token_ids(self) -> list[int]:
        """Of the prompt, with those that its tokenizer puts before every text."""
        return self.prompt.token_ids

    @cached_property
    def tokens(self) -> list[Token]:
        """The tokens with their bytes."""
        parts = [
            b"" if self._name_of(token_id) else self.tokenizer.token_bytes(token_id) for token_id in self.token_ids
        ]
        given, joined = self.prompt.text.encode(), b"".join(parts)
        shift = len(joined) - len(given)
        is_exact = shift >= 0 and joined[shift:] == given and not joined[:shift].strip()
        found, end = [], -shift
        for position, (token_id, part) in enumerate(zip(self.token_ids, parts, strict=True)):
            begin, end = end, end + len(part)
            span = (max(0, begin), max(0, end)) if is_exact and part else (None, None)
            found.append(Token(position, token_id, self.text_of(token_id), part.hex(), *span))
        return found

    def text_of(self, token_id: int) -> str:
        """A token for people: its text, its name, or its bytes where they are no characters."""
        if name := self._name_of(token_id):
            return name
        part = self.tokenizer.token_bytes(token_id)
        try:
            return visible(part.decode("utf-8"))
        except UnicodeDecodeError:
            return "".join(f"<{byte:02X}>" for byte in part)

    def _name_of(self, token_id: int) -> str:
        """Of a special token, or of an id that the tokenizer lacks: many models have more rows than tokens."""
        if token_id >= self.tokenizer.vocab_size and token_id not in self._specials:
            return f"<{token_id}>"
        return self._specials.get(token_id, "")

    @cached_property
    def _specials(self) -> dict[int, str]:
        return {token_id: name for name, token_id in self.tokenizer.special_tokens.items()}

    @cached_property
    def names(self) -> list[str]:
        """All that can be asked for, in the order in which it is computed."""
        return sorted(named_probes(self.model), key=_place)

    def __getitem__(self, name: str) -> Tensor:
        """The tensor at a probe, such as ``blocks.3.attention.scores``; raises `KeyError` for an unknown name."""
        if name not in self.names:
            raise KeyError(f"no probe is named {name!r}; trace.names lists all of them")
        layer = _layer_of(name)
        if layer is None:
            return self._outside(name)
        if layer != self._layer:
            self.forget()
            self._layer = layer
        if name not in self._kept and self.block_bytes <= _KEPT_BYTES:
            self._kept = self.collect([f"blocks.{layer}.*"])
        return self._kept[name] if name in self._kept else self.collect([name])[name]

    @property
    def block_bytes(self) -> int:
        """The size of all tensors inside of a block, about."""
        config, length = self.config, self.num_tokens
        scores = 2 * config.num_heads * length**2
        widths = 8 * config.d_model + 4 * config.ffn_size + 6 * config.num_heads * config.head_size
        return (scores + length * widths) * self.residuals.element_size()

    def forget(self) -> None:
        """Frees the inside of the block that was asked for last; it is computed again when it is asked for."""
        self._layer, self._kept = -1, {}

    @torch.no_grad()
    def collect(self, patterns: Iterable[str], keep: Keep | Mapping[str, Keep] | None = None) -> dict[str, Tensor]:
        """The tensors at all probes of blocks that match, each block computed once.

        `keep` says what is kept of each tensor, one function for all or one by pattern, so that what is large need not
        be held whole. Raises `KeyError` for a pattern that matches nothing.
        """
        found: dict[str, Tensor] = {}
        wanted: dict[int, dict[str, Keep]] = {}
        for pattern in patterns:
            cut = keep.get(pattern) if isinstance(keep, Mapping) else keep
            names = [name for name in self.names if fnmatchcase(name, pattern) and _layer_of(name) is not None]
            if not names:
                raise KeyError(f"no probe of a block matches {pattern!r}; trace.names lists all of them")
            for name in names:
                wanted.setdefault(int(name.split(".")[1]), {})[name] = cut or _whole
        for layer, keeps in sorted(wanted.items()):
            observers = {name: _keeper(found, name, cut) for name, cut in keeps.items()}
            step_by_step = watch(self.model, {f"blocks.{layer}.attention.weights": _look})
            with step_by_step, watch(self.model, observers):
                self.model.run_block(layer, self.residuals[layer][None])
        return found

    @torch.no_grad()
    def _outside(self, name: str) -> Tensor:
        if name == "embedded":
            return self.embedded
        if name == "positioned":
            return self.residuals[0]
        final_TD = self.final
        return final_TD if name == "final" else self.model.read_out(final_TD[None])[0]

    @cached_property
    def final(self) -> Tensor:
        """The states (T, D) that logits are read off: behind the final norm."""
        with torch.no_grad():
            return self.model.finish(self.residuals[-1][None])[0]

    @torch.no_grad()
    def log_probabilities(self, residual_TD: Tensor | None = None) -> Iterator[tuple[slice, Tensor]]:
        """Log-probabilities (t, V) in float32 or what is finer, for some positions at a time, with these.

        They are read off the last residual stream, or off another as if it were the last (the logit lens).
        """
        final = self.final if residual_TD is None else self.model.finish(residual_TD[None])[0]
        step = max(1, _LOGITS // self.config.vocabulary)
        for start in range(0, len(final), step):
            places = slice(start, min(start + step, len(final)))
            logits = self.model.read_out(final[None, places])[0]
            yield places, logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))

    @cached_property
    def predictions(self) -> list[Prediction]:
        """What every position predicts of the next one."""
        found: list[Prediction] = []
        follows = torch.tensor([*self.token_ids[1:], -1])
        for places, log_p in self.log_probabilities():
            p = log_p.exp()
            entropy = -(p * log_p.clamp(min=-1e4)).sum(-1)
            best, ids = p.topk(min(_SHOWN, p.shape[-1]))
            for row, position in enumerate(range(places.start, places.stop)):
                actual = int(follows[position])
                own = None if actual < 0 else float(log_p[row, actual])
                rank = None if own is None else int((log_p[row] > log_p[row, actual]).sum()) + 1
                top = [(int(i), float(x)) for i, x in zip(ids[row], best[row], strict=True)]
                found.append(Prediction(position, None if own is None else actual, own, rank, float(entropy[row]), top))
        return found

    def angles(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """Cosines and sines (T, R/2) of the angles by which a layer turns queries and keys; None where it does not."""
        return self.model.angles(self.model.windows[layer], self.num_tokens)

    @torch.no_grad()
    def unmasked_scores(self, layer: int) -> Tensor:
        """The scores (H, T, T) of a layer scaled and capped, before anything is hidden or added to them."""
        attention = self.model.layers[layer].attention
        q_HTC, k_KTC = (self[f"blocks.{layer}.attention.rotated_{name}"] for name in "qk")
        scale = q_HTC.shape[-1] ** -0.5 if attention.scale is None else attention.scale
        scores = scale * q_HTC @ k_KTC.repeat_interleave(len(q_HTC) // len(k_KTC), 0).transpose(-2, -1)
        return scores if attention.soft_cap is None else attention.soft_cap * (scores / attention.soft_cap).tanh()

    @torch.no_grad()
    def logits_behind(self, position: int) -> Tensor:
        """The logits (V,) of the token behind `position`; raises `IndexError` for a position that is not there."""
        return self.model.read_out(self.final[None, [range(self.num_tokens)[position]]])[0, 0]


def read_traced(model: Transformer, tokenizer: Tokenizer, prompt: str | Sequence[int]) -> Prompt:
    """The tokens of a prompt to be traced; raises `UsageError` for one that is empty or too long."""
    if isinstance(model, EncoderDecoder):
        raise UsageError("A trace follows one text through one network; this model is an encoder-decoder.")
    read = read_prompt("The prompt", prompt, model, tokenizer, "window")
    if len(read.token_ids) > model.config.max_seq_len:
        raise UsageError(
            f"The prompt has {len(read.token_ids):,} tokens, but the model reads {model.config.max_seq_len:,}. "
            "Shorten it."
        )
    return read


@dataclass(frozen=True)
class Prediction:
    """What the row of logits at `position` says of the token at ``position + 1``.

    `token_id` is the one that stands there, None behind the last; `logprob` is in nats and `rank` counts from 1. `top`
    are the likeliest tokens with their probabilities.
    """

    position: int
    token_id: int | None
    logprob: float | None
    rank: int | None
    entropy: float
    top: list[tuple[int, float]]

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


# The order of the probes of a block; those of a layer of experts stand among the parts of the feed-forward network.
_STAGES = (
    "attention_input", "attention.q", "attention.k", "attention.v", "attention.rotated_q", "attention.rotated_k",
    "attention.scores", "attention.weights", "attention.head_outputs", "attention_output", "middle",
    "feed_forward_input", "feed_forward", "feed_forward_output", "output",
)  # fmt: skip
_OUTSIDE = {"embedded": -2, "positioned": -1, "final": 1, "logits": 2}


def _place(name: str) -> tuple[int, int, int]:
    """Where a probe stands in a pass."""
    if name in _OUTSIDE:
        return _OUTSIDE[name], 0, 0
    _, layer, inside = name.split(".", 2)
    stage = next(number for number, stage in enumerate(_STAGES) if inside == stage or inside.startswith(f"{stage}."))
    return 0, int(layer), stage


def _layer_of(name: str) -> int | None:
    parts = name.split(".")
    return int(parts[1]) if parts[0] == "blocks" else None


def _look(value: Tensor) -> None:
    """Watching is enough to have attention computed step by step."""


def _whole(value: Tensor) -> Tensor:
    return value


def _keeper(found: dict[str, Tensor], name: str, cut: Keep) -> Callable[[Tensor], None]:
    # Experts see the tokens of all rows one behind the other; everything else has a batch dimension.
    is_flat = any(part in name for part in (".router.", ".experts.")) or name.endswith(".order")

    def keep(value: Tensor) -> None:
        part = cut(value if is_flat else value[0])
        found[name] = part.clone() if part.untyped_storage().nbytes() > part.nbytes else part

    return keep
