"""Continues prompts with a model from disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from sheepop.checkpoint import LoadedModel, load_model, with_adapters
from sheepop.checkpoint.exchange import dtype_named
from sheepop.core.device import resolve_device
from sheepop.core.errors import UsageError
from sheepop.generate import Completion, GenerationConfig, Generator
from sheepop.model import EncoderDecoder, Transformer


def load_adapted(
    model: str | Path, adapters: Sequence[str | Path] = (), *, device: str = "auto", dtype: str | None = None
) -> LoadedModel:
    """The model that `model` means with `adapters`, added up; raises `CheckpointError` for one that does not fit."""
    loaded = load_model(model, resolve_device(device), dtype_named(dtype))
    return with_adapters(loaded, adapters) if adapters else loaded


class Loader:
    """Loads models in parts, on `tensor_parallel` processes that it starts, or whole where that is 1."""

    def __init__(
        self,
        adapters: Sequence[str | Path] = (),
        *,
        device: str = "auto",
        dtype: str | None = None,
        tensor_parallel: int = 1,
    ) -> None:
        if tensor_parallel > 1 and adapters:
            raise UsageError("A model with an adapter is not split over processes. Leave one of them out.")
        self._adapters, self._device, self._dtype = adapters, device, dtype
        self._followers = None
        if tensor_parallel > 1:
            # It loads torch's compiler, which takes a second and which one process does not need.
            from sheepop.generate.split_model import Followers

            self._followers = Followers(tensor_parallel, resolve_device(device))

    def __call__(self, model: str | Path) -> LoadedModel:
        """The model that `model` means; raises as `load_adapted` does, and `ConfigError` for one that has no parts."""
        if self._followers is not None:
            return self._followers.load(Path(model), dtype_named(self._dtype))
        return load_adapted(model, self._adapters, device=self._device, dtype=self._dtype)


def load_generator(
    model: str | Path,
    *,
    device: str = "auto",
    dtype: str | None = None,
    draft_model: str | Path | None = None,
    adapters: Sequence[str | Path] = (),
    tensor_parallel: int = 1,
) -> Generator:
    """The model that `model` means, ready to write, with a smaller one that guesses for it if `draft_model` names one.

    `dtype` is the name of the one to compute in; None keeps the one in which the weights are stored. `adapters` are as
    `load_adapted` takes them. With `tensor_parallel` so many processes have a part of the model each.
    """
    loaded = Loader(adapters, device=device, dtype=dtype, tensor_parallel=tensor_parallel)(model)
    draft = None if draft_model is None else load_draft(draft_model, loaded, dtype)
    return Generator(loaded.model, loaded.tokenizer, end_ids=loaded.end_ids, draft_model=draft)


def load_draft(path: str | Path, target: LoadedModel, dtype: str | None) -> Transformer:
    """A model that guesses for `target`, on its device; raises `UsageError` for one that cannot read what it reads."""
    draft = load_model(path, str(target.model.device), dtype_named(dtype))
    if draft.tokenizer.fingerprint() != target.tokenizer.fingerprint():
        raise UsageError(
            f"The draft model {path} has another tokenizer than the model, so its guesses would be of other tokens. "
            "Choose one that was trained with the same tokenizer."
        )
    if isinstance(draft.model, EncoderDecoder) != isinstance(target.model, EncoderDecoder):
        raise UsageError(
            f"Of the model and the draft model {path} only one has an encoder. Choose one of the same kind."
        )
    if draft.config.max_seq_len < target.config.max_seq_len:
        raise UsageError(
            f"The draft model {path} reads max_seq_len = {draft.config.max_seq_len} tokens, the model "
            f"{target.config.max_seq_len}. Choose one that reads as many."
        )
    return draft.model


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
