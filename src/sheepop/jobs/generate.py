"""Continues prompts with a model from disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

from sheepop.checkpoint import load_model
from sheepop.checkpoint.exchange import dtype_named
from sheepop.core.device import resolve_device
from sheepop.core.errors import UsageError
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


def read_prompts(texts: Sequence[str], files: Sequence[Path], standard_input: BinaryIO | None) -> list[str]:
    """All prompts of a command: arguments, then files, then standard input when it is given.

    One line end at the end of a file or of standard input is not part of the prompt; line ends in it stay as they are.
    """
    prompts = list(texts)
    for file in files:
        try:
            prompts.append(_without_last_newline(file.read_bytes()))
        except FileNotFoundError:
            raise UsageError(f"The prompt file {file} does not exist.") from None
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"The prompt file {file} cannot be read as UTF-8 text: {error}.") from None
    if standard_input is not None:
        try:
            prompts.append(_without_last_newline(standard_input.read()))
        except UnicodeDecodeError as error:
            raise UsageError(f"Standard input is not UTF-8 text: {error}.") from None
    if not prompts:
        raise UsageError("There is no prompt. Give one with --prompt TEXT, --file FILE, or - for standard input.")
    return prompts


def _without_last_newline(content: bytes) -> str:
    return content.decode("utf-8").removesuffix("\n").removesuffix("\r")
