"""`LanguageModel`, the small Python API: load a model, look at its logits, let it write."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Unpack

from sheepop.checkpoint import load_model
from sheepop.checkpoint.exchange import dtype_named
from sheepop.core.device import resolve_device
from sheepop.generate import Completion, Generator
from sheepop.generate.config import Settings, requested
from sheepop.generate.generator import TextStream
from sheepop.generate.scoring import Score, score_text
from sheepop.jobs.tokenizer import find_tokenizer
from sheepop.model import ModelConfig, Transformer
from sheepop.tokenizer import ChatTemplate, Tokenizer


@dataclass(frozen=True)
class LanguageModel:
    """A network with its tokenizer. ``lm.model(input_ids)`` maps (B, T) ids to (B, T, V) logits.

    An encoder-decoder takes the ids of sources (B, S) and of targets (B, T).
    """

    model: Transformer
    tokenizer: Tokenizer
    config: ModelConfig
    end_ids: tuple[int, ...] = ()

    def generate(
        self, prompt: str, *, on_text: Callable[[str], None] | None = None, **settings: Unpack[Settings]
    ) -> Completion:
        """Continues `prompt`; keyword arguments are those of `Settings`, named as ``sheepop generate`` names them.

        `on_text` is called with the text as it is written. Raises `ConfigError` for a setting that is out of range,
        `UsageError` for one that is unknown and for a prompt that is empty or too long.
        """
        return self.generate_batch([prompt], on_text=on_text and (lambda _, text: on_text(text)), **settings)[0]

    def generate_batch(
        self, prompts: list[str], *, on_text: Callable[[int, str], None] | None = None, **settings: Unpack[Settings]
    ) -> list[Completion]:
        """Continues several prompts together; the text of each is what `generate` would write for it."""
        return self._generator.generate(prompts, requested(**settings), on_text=on_text)

    def stream(self, prompt: str, **settings: Unpack[Settings]) -> TextStream:
        """The text that `generate` writes, piece by piece: ``for piece in lm.stream("Once"): print(piece, end="")``."""
        return self._generator.stream(prompt, requested(**settings))

    def score(self, text: str) -> Score:
        """How well the model predicts `text`, token by token; raises `UsageError` for an empty one."""
        return score_text(self.model, self.tokenizer, text)

    def chat(self, messages: Sequence[Mapping[str, Any]], **settings: Unpack[Settings]) -> Completion:
        """The model's answer to a conversation, a list of ``{"role": ..., "content": ...}``.

        The model's own chat template makes the prompt. Raises `TokenizerError` where it has none.
        """
        with ChatTemplate.of(self.tokenizer) as template:
            prompt = template.render(messages, add_generation_prompt=True)
        token_ids = self.tokenizer.encode(prompt, allow_special=True)
        return self._generator.generate([token_ids], requested(**settings))[0]

    @cached_property
    def _generator(self) -> Generator:
        return Generator(self.model, self.tokenizer, end_ids=self.end_ids)


def load(path: str | Path, device: str = "auto", dtype: str | None = None) -> LanguageModel:
    """Reads a run (its best checkpoint), a checkpoint or a model directory onto `device`.

    `dtype` is float32, bfloat16 or float16; None keeps the one in which the weights are stored. The weights have
    no gradients; ``lm.model.requires_grad_()`` makes them trainable.
    """
    loaded = load_model(path, resolve_device(device), dtype_named(dtype))
    return LanguageModel(loaded.model.requires_grad_(False), loaded.tokenizer, loaded.config, loaded.end_ids)


def load_tokenizer(path: str | Path, *, pattern: str | None = None) -> Tokenizer:
    """Reads the tokenizer of a tokenizer file or directory, or of a model, run or corpus.

    It reads ``tokenizer.json``, SentencePiece models, tiktoken's rank files and GPT-2's ``encoder.json`` with
    ``vocab.bpe``; `pattern` says how a rank file cuts text, where its name does not.
    """
    return find_tokenizer(path, pattern)
