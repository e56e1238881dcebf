"""Samples: text that a model writes during training, and the prompts to try it with."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from sheepop.core.errors import ConfigError, UsageError
from sheepop.core.files import atomic_directory, write_checksums
from sheepop.core.program import typed
from sheepop.core.random import derive_seed
from sheepop.data import Corpus
from sheepop.generate import Generator
from sheepop.interpret.config import TraceConfig
from sheepop.jobs.config import SheepOpConfig
from sheepop.model import Transformer, blank_model
from sheepop.tokenizer import Tokenizer

Samples = Callable[[int], list[dict[str, Any]]]
"""A callback of the loop: step to one row a text."""
_PROMPTS = 3
_PROMPT_CHARACTERS = 48


def held_out_prompts(corpus: Corpus) -> list[str]:
    """The beginnings of three held-out documents; if there are fewer, also of lines further down."""
    texts = [document.text.lstrip() for document in islice(corpus.documents("validation"), _PROMPTS)]
    parts = math.ceil(_PROMPTS / max(1, len(texts)))
    places = [(text, text.rfind("\n", 0, len(text) * part // parts) + 1) for part in range(parts) for text in texts]
    prompts = (text[start : start + _PROMPT_CHARACTERS] for text, start in places)
    return list(dict.fromkeys(prompt for prompt in prompts if prompt.strip()))[:_PROMPTS]


def with_prompts(config: SheepOpConfig, corpus: Corpus) -> SheepOpConfig:
    """`config` with the beginning of a held-out text as prompt, if no prompt is given and the model is a decoder."""
    if config.training.sample_prompts is not None:
        return config
    found = held_out_prompt(config, corpus)
    prompts = [] if found is None else [found]
    return config.replace(training={**config.training.model_dump(), "sample_prompts": prompts})


def held_out_prompt(config: SheepOpConfig, corpus: Corpus) -> str | None:
    """The beginning of a held-out text, at most half a context long; None for an encoder-decoder."""
    if config.model.architecture == "encoder_decoder":
        return None
    tokenizer, most = corpus.tokenizer(), config.model.max_seq_len // 2
    found = next(iter(held_out_prompts(corpus)), "")
    while len(tokenizer.encode(found)) > most:
        found = found[: len(found) // 2]
    return found if found.strip() else None


def generate_command(run: Path, prompt: str | None) -> str:
    """The command that lets the model of a run continue the first line of `prompt`."""
    return typed("generate", run, "--prompt", first_line(prompt))


def first_line(prompt: str | None) -> str:
    """The first line of `prompt`, as a text to type; dots stand for a text if there is none."""
    lines = [] if prompt is None else prompt.strip().splitlines()
    return lines[0] if lines else "..."


def check_samples(config: SheepOpConfig, tokenizer: Tokenizer, prompts: Sequence[str | Sequence[int]]) -> None:
    """Raises `ConfigError` for a prompt that the model cannot continue or trace."""
    with torch.device("meta"):
        model = blank_model(config.model)
    key = "training.sample_prompts"
    try:
        Generator(model, tokenizer).require(prompts, config.generation)
        if config.trace.prompt is not None:
            from sheepop.interpret.tokens import read_traced

            key = "trace.prompt"
            read_traced(model, tokenizer, config.trace.prompt, config.trace.target)
    except UsageError as error:
        raise ConfigError(f"{key}: {error}") from None


class TrainingTraces:
    """Traces a prompt into the folder `traces` at each sampling step, then writes `samples`, if any."""

    def __init__(
        self, model: Transformer, tokenizer: Tokenizer, config: TraceConfig, traces: Path, samples: Samples | None
    ) -> None:
        self._model, self._tokenizer, self._config = model, tokenizer, config
        self._traces, self._samples = traces, samples

    def __call__(self, step: int) -> list[dict[str, Any]]:
        """Writes the trace to a directory named by the step, replacing an older one; returns the rows of samples."""
        # Few runs trace, and these load much.
        from sheepop.interpret.checks import check_trace
        from sheepop.interpret.store import write_trace
        from sheepop.interpret.trace import Trace

        assert self._config.prompt is not None
        trace = Trace.of(self._model, self._tokenizer, self._config.prompt, self._config.target)
        self._traces.mkdir(exist_ok=True)
        with atomic_directory(self._traces / f"step-{step:08d}", replace=True) as directory:
            write_trace(trace, directory, check_trace(trace), str(self._traces.parent), step=step)
            write_checksums(directory)
        return [] if self._samples is None else self._samples(step)


class TrainingSamples:
    """Continues `prompts` with the settings under `generation`; a callback of the loop."""

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer,
        config: SheepOpConfig,
        device: str,
        prompts: Sequence[str | Sequence[int]],
        end_ids: Sequence[int] = (),
    ) -> None:
        self._config, self._prompts = config, prompts
        self._generator = Generator(model, tokenizer, device=device, end_ids=end_ids)

    def __call__(self, step: int) -> list[dict[str, Any]]:
        """Returns one row per prompt; the seed depends on the step alone."""
        settings = self._config.generation.replace(
            max_new_tokens=self._config.training.sample_tokens,
            seed=derive_seed(self._config.seed, "training sample", step),
        )
        completions = self._generator.generate(self._prompts, settings)
        self._generator.close()  # training needs the memory
        return [{"prompt": done.prompt, "text": done.text} for done in completions]
