"""A served model: its engine, tokenizer and chat template, and the requests to it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any

import torch

from sheepop.checkpoint import LoadedModel
from sheepop.checkpoint.generation_settings import GENERATION
from sheepop.core.errors import TokenizerError
from sheepop.generate import GenerationConfig, Generator
from sheepop.generate.config import model_defaults
from sheepop.generate.request import Request, read_prompt
from sheepop.generate.runner import hidden_states
from sheepop.serve.config import ServerConfig
from sheepop.serve.worker import EngineWorker, SideWork
from sheepop.tokenizer import ChatTemplate
from sheepop.tokenizer.chat import free_variables

_FEWEST = 16  # requests may be prepared at a time, even if fewer may wait for the engine


class ServedModel:
    """A model with a running engine; `close` ends both."""

    def __init__(self, name: str, loaded: LoadedModel, config: ServerConfig) -> None:
        self.name = name
        self.tokenizer = loaded.tokenizer
        self.generator = Generator(
            loaded.model,
            loaded.tokenizer,
            end_ids=loaded.end_ids,
            defaults=model_defaults(loaded.generation, str(loaded.directory / GENERATION)),
        )
        engine = self.generator.serving_engine(
            max_sequences=config.max_running,
            max_waiting=config.max_waiting,
            max_tokens=config.tokens_per_step,
            cache_bytes=None if config.cache_memory is None else int(config.cache_memory * 2**30),
            cache_in_int8=config.cache_dtype == "int8",
            batch_invariant=config.batch_invariant,
            guesses=config.guesses,
        )
        self.worker = EngineWorker(engine, name)
        self.created = int(time.time())
        self._numbers, self._guesses = itertools.count(), config.guesses
        self._preparing = SideWork(f"preparing for {name}", threads=2, most=max(config.max_waiting, _FEWEST))
        # Slow grammars delay only other grammars.
        self._compiling = SideWork(f"grammars of {name}", threads=1, most=_FEWEST)
        self.template: ChatTemplate | None = None
        # Without a template, a model still continues texts, but nothing would read the variables.
        with suppress(*(() if config.chat_template_kwargs else (TokenizerError,))):
            self.template = ChatTemplate.of(loaded.tokenizer, variables=config.chat_template_kwargs)

    async def requests(
        self, prompts: Sequence[str | Sequence[int]], config: GenerationConfig, *, priority: int, tenant: str
    ) -> list[Request]:
        """Makes requests for the engine; raises `UsageError` for an invalid prompt or grammar."""
        work = self._compiling if config.is_constrained else self._preparing
        return await work.do(
            lambda: [
                self.request(prompt, config, index=index, priority=priority, tenant=tenant)
                for index, prompt in enumerate(prompts)
            ]
        )

    def request(
        self,
        prompt: str | Sequence[int],
        config: GenerationConfig,
        *,
        index: int = 0,
        priority: int = 0,
        tenant: str = "",
    ) -> Request:
        """Makes one request for the engine; raises as `requests`."""
        if self._guesses:
            config = config.replace(guesses=self._guesses)
        return self.generator.request(
            prompt, config, index=index, number=next(self._numbers), priority=priority, tenant=tenant
        )

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any] = MappingProxyType({"add_generation_prompt": True}),
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Renders a chat to tokens, by default up to the beginning of the answer.

        `options` are those of `ChatTemplate.render`, and `variables` the request's. Raises `TokenizerError` without a
        template, and as `ChatTemplate.render`.
        """
        template = self.template
        if template is None:
            raise TokenizerError(
                f"The model {self.name} has no chat template, so it cannot answer conversations. Use /v1/completions."
            )

        def work() -> list[int]:
            text = template.render(messages, **options, **free_variables(variables or {}))
            return self.tokenizer.encode(text, allow_special=True)

        return await self._preparing.do(work)

    async def tokens(self, text: str, *, with_prefix: bool) -> list[int]:
        """Encodes a text."""
        prefix_ids = self.tokenizer.prefix_ids if with_prefix else ()
        return [*prefix_ids, *await self._preparing.do(self.tokenizer.encode, text)]

    async def embed(self, prompt: str | Sequence[int]) -> tuple[list[float], int]:
        """Returns the mean of the last hidden states of a text, scaled to length 1, and the number of its tokens.

        Raises `UsageError` for a text that does not fit.
        """
        model = self.generator.model

        @torch.inference_mode()
        def work() -> tuple[list[float], int]:
            token_ids = read_prompt("input", prompt, model, self.tokenizer, "refuse").token_ids
            mean_D = hidden_states(model, token_ids).float().mean(0)
            return (mean_D / mean_D.norm().clamp(min=1e-12)).tolist(), len(token_ids)

        return await self._preparing.do(work)

    def close(self) -> None:
        """Stops the engine, and the processes for the template and grammars."""
        self.worker.close()
        self._preparing.close()
        self._compiling.close()
        self.generator.close()
        if self.template is not None:
            self.template.close()
