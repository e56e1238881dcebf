"""Continues prompts with a model from disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from sheepop.checkpoint import load_model
from sheepop.checkpoint.exchange import dtype_named
from sheepop.core.device import resolve_device
from sheepop.core.errors import UsageError
from sheepop.generate import Completion, GenerationConfig, Generator
from sheepop.model import Transformer
from sheepop.tokenizer import Tokenizer


def load_generator(
    model: str | Path, *, device: str = "auto", dtype: str | None = None, draft_model: str | Path | None = None
) -> Generator:
    """The model that `model` means, ready to write, with a smaller one that guesses for it if `draft_model` names one.

    `dtype` is the name of the one to compute in; None keeps the one in which the weights are stored.
    """
    place = resolve_device(device)
    loaded = load_model(model, place, dtype_named(dtype))
    draft = None if draft_model is None else load_draft(draft_model, loaded.tokenizer, place, dtype)
    return Generator(loaded.model, loaded.tokenizer, end_ids=loaded.end_ids, draft_model=draft)


def load_draft(path: str | Path, tokenizer: Tokenizer, device: torch.device | str, dtype: str | None) -> Transformer:
    """A model that guesses for one with this tokenizer; raises `UsageError` where its own is another."""
    loaded = load_model(path, device, dtype_named(dtype))
    if loaded.tokenizer.fingerprint() != tokenizer.fingerprint():
        raise UsageError(
            f"The draft model {path} has another tokenizer than the model, so its guesses would be of other tokens. "
            "Choose one that was trained with the same tokenizer."
        )
    return loaded.model


def write_texts(
    generator: Generator,
    prompts: Sequence[str],
    config: GenerationConfig,
    *,
    batched: bool = True,
    on_text: Callable[[str], None] | None = None,
    echo: bool = False,
) -> list[Completion]:
    """Writes for every prompt; `on_text` hears the text of a single one as it is written.

    With `echo` it hears a prompt that is continued in front of its text, but not before there is any, so that nothing
    is heard of a request that is refused.
    """
    ahead = list(prompts) if echo and generator.continues_prompts else []

    def hear(_: int, text: str) -> None:
        if on_text is not None:
            on_text("".join([*ahead, text]))
            ahead.clear()

    completions = generator.generate(prompts, config, batched=batched, on_text=hear)
    if ahead:
        hear(0, "")
    return completions
