"""Generates and scores text with a model from disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from sheepop.checkpoint import LoadedModel, load_model, with_adapters
from sheepop.checkpoint.generation_settings import GENERATION
from sheepop.checkpoint.lazy_tensor import dtype_named
from sheepop.core.device import resolve_device
from sheepop.core.errors import UsageError
from sheepop.evaluate.likelihood import Score, score_text
from sheepop.generate import Completion, GenerationConfig, Generator
from sheepop.generate.arithmetic import computing
from sheepop.generate.config import Activations, model_defaults
from sheepop.model import EncoderDecoder, Transformer


def load_adapted(
    model: str | Path,
    adapters: Sequence[str | Path] = (),
    *,
    device: str = "auto",
    dtype: str | None = None,
    activations: Activations = "exact",
) -> LoadedModel:
    """Loads a model with the sum of `adapters`; raises `CheckpointError` for an adapter that does not fit.

    Floats are used by memory map. A model with rounded `activations` is not for training.
    """
    loaded = load_model(model, resolve_device(device), dtype_named(dtype), mapped=True)
    loaded = with_adapters(loaded, adapters) if adapters else loaded
    return replace(loaded, model=computing(loaded.model, activations=activations))


class Loader:
    """Loads models, split over `tensor_parallel` processes that it starts, or whole if that is 1."""

    def __init__(
        self,
        adapters: Sequence[str | Path] = (),
        *,
        device: str = "auto",
        dtype: str | None = None,
        activations: Activations = "exact",
        tensor_parallel: int = 1,
    ) -> None:
        if tensor_parallel > 1 and activations != "exact":
            raise UsageError("--activations and --tensor-parallel cannot be combined. Leave one of them out.")
        if tensor_parallel > 1 and adapters:
            raise UsageError("--adapter and --tensor-parallel cannot be combined. Leave one of them out.")
        self._adapters, self._device, self._dtype, self._activations = adapters, device, dtype, activations
        self._followers = None
        if tensor_parallel > 1:
            # It loads torch's compiler, which takes a second and which one process does not need.
            from sheepop.generate.split_model import Followers

            self._followers = Followers(tensor_parallel, resolve_device(device))

    def __call__(self, model: str | Path) -> LoadedModel:
        """Loads a model; raises as `load_adapted` does, and `ConfigError` for a model that cannot be split."""
        if self._followers is not None:
            return self._followers.load(Path(model), dtype_named(self._dtype))
        return load_adapted(
            model, self._adapters, device=self._device, dtype=self._dtype, activations=self._activations
        )


def load_generator(
    model: str | Path,
    *,
    device: str = "auto",
    dtype: str | None = None,
    draft_model: str | Path | None = None,
    activations: Activations = "exact",
    adapters: Sequence[str | Path] = (),
    tensor_parallel: int = 1,
) -> Generator:
    """Loads a model for generation, with a smaller `draft_model` that guesses tokens for it if one is given.

    `dtype` names the dtype to compute in; None keeps that of the stored weights. The weights of `adapters` are added.
    `tensor_parallel` is the number of processes that the model is split over.
    """
    load = Loader(adapters, device=device, dtype=dtype, activations=activations, tensor_parallel=tensor_parallel)
    loaded = load(model)
    draft = None if draft_model is None else load_draft(draft_model, loaded, dtype)
    defaults = model_defaults(loaded.generation, str(loaded.directory / GENERATION))
    return Generator(
        loaded.model,
        loaded.tokenizer,
        end_ids=loaded.end_ids,
        draft_model=draft,
        defaults=defaults,
        memory=None if adapters else loaded.memory,  # which knows the network without adapters
    )


def load_draft(path: str | Path, target: LoadedModel, dtype: str | None) -> Transformer:
    """Loads a draft model for `target` on its device; raises `UsageError` if it does not match the target."""
    draft = load_model(path, str(target.model.device), dtype_named(dtype))
    if draft.tokenizer.fingerprint() != target.tokenizer.fingerprint():
        raise UsageError(
            f"The draft model {path} has another tokenizer than the model, so its guesses would be other tokens. "
            "Choose one with the same tokenizer."
        )
    if isinstance(draft.model, EncoderDecoder) != isinstance(target.model, EncoderDecoder):
        raise UsageError(
            f"Only one of the model and the draft model {path} has an encoder. Choose a draft model of the same kind."
        )
    if draft.config.max_seq_len < target.config.max_seq_len:
        raise UsageError(
            f"The draft model {path} has max_seq_len = {draft.config.max_seq_len}, the model "
            f"{target.config.max_seq_len}. Choose a draft model with the same or a longer context."
        )
    return draft.model


def write_texts(
    generator: Generator,
    prompts: Sequence[str],
    config: GenerationConfig,
    *,
    on_text: Callable[[str], None] | None = None,
    echo: bool = False,
) -> list[Completion]:
    """Generates a text for every prompt; `on_text` receives the text of a single prompt while it is generated.

    With `echo`, the first text starts with its prompt if the model continues prompts. Nothing is passed on before there
    is a text, so a refused request prints nothing. Raises as `Generator.generate` does.
    """
    pending = list(prompts) if echo and generator.continues_prompts else []

    def forward(_: int, text: str) -> None:
        if on_text is not None:
            on_text("".join([*pending, text]))
            pending.clear()

    completions = generator.generate(prompts, config, on_text=forward)
    if pending:
        forward(0, "")
    return completions


def score(
    model: str | Path,
    text: str,
    *,
    context: int | None = None,
    device: str = "auto",
    dtype: str | None = None,
    activations: Activations = "exact",
    adapters: Sequence[str | Path] = (),
) -> tuple[Score, Score | None]:
    """Loads a model with `adapters` and scores how well it predicts `text`, token by token; see `score_text`.

    The second score is that with the model's memory of its training text, None if it has none or `adapters` are given.
    """
    loaded = load_adapted(model, adapters, device=device, dtype=dtype, activations=activations)
    alone = score_text(loaded.model, loaded.tokenizer, text, context=context)
    if adapters or loaded.memory is None:
        return alone, None
    memory = loaded.memory.to(loaded.model.device)
    return alone, score_text(loaded.model, loaded.tokenizer, text, context=context, memory=memory)
