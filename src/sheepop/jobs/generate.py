"""Continues prompts with a model from disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from sheepop.checkpoint import load_model
from sheepop.checkpoint.exchange import dtype_named
from sheepop.core.device import resolve_device
from sheepop.generate import Completion, GenerationConfig, Generator


def generate_text(
    model: str | Path,
    prompts: Sequence[str],
    config: GenerationConfig,
    *,
    device: str = "auto",
    dtype: str | None = None,
    batched: bool = True,
    on_text: Callable[[int, str], None] | None = None,
    echo: bool = False,
) -> list[Completion]:
    """Loads the model that `model` means and writes for every prompt; `on_text` hears text as it is written.

    With `echo` it hears a prompt that is continued in front of its text, but not before there is any, so that nothing
    is heard of a request that is refused. `dtype` is the name of the one to compute in; None keeps the one in which
    the weights are stored.
    """
    device = resolve_device(device)
    loaded = load_model(model, device, dtype_named(dtype))
    generator = Generator(loaded.model, loaded.tokenizer, end_ids=loaded.end_ids)
    ahead = dict(enumerate(prompts)) if echo and generator.continues_prompts else {}

    def hear(index: int, text: str) -> None:
        if on_text is not None:
            on_text(index, ahead.pop(index, "") + text)

    completions = generator.generate(prompts, config, batched=batched, on_text=hear)
    for index in list(ahead):
        hear(index, "")
    return completions
