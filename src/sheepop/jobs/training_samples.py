"""Text that a model writes while it is trained."""

from __future__ import annotations

from typing import Any

import torch

from sheepop.core.errors import ConfigError, UsageError
from sheepop.core.random import derive_seed
from sheepop.generate import Generator
from sheepop.jobs.config import SheepOpConfig
from sheepop.model import Transformer, blank_model
from sheepop.tokenizer import Tokenizer


def check_samples(config: SheepOpConfig, tokenizer: Tokenizer) -> None:
    """Raises `ConfigError` for a prompt that the model cannot continue, before a step is taken for it."""
    with torch.device("meta"):
        model = blank_model(config.model)
    try:
        Generator(model, tokenizer).require(config.training.sample_prompts, config.generation)
    except UsageError as error:
        raise ConfigError(f"training.sample_prompts: {error}") from None


class TrainingSamples:
    """Continues `training.sample_prompts` with the settings of `generation`; the callback of the loop."""

    def __init__(self, model: Transformer, tokenizer: Tokenizer, config: SheepOpConfig, device: str) -> None:
        self._config = config
        self._generator = Generator(model, tokenizer, device=device)

    def __call__(self, step: int) -> list[dict[str, Any]]:
        """One row per prompt, with a seed that depends on the step alone."""
        prompts = self._config.training.sample_prompts
        if not prompts:
            return []
        settings = self._config.generation.replace(
            max_new_tokens=self._config.training.sample_tokens,
            seed=derive_seed(self._config.seed, "training sample", step),
        )
        completions = self._generator.generate(list(prompts), settings)
        return [{"prompt": done.prompt, "text": done.text} for done in completions]
