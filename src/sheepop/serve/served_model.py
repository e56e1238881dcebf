"""A served model: its engine, tokenizer and chat template, and the requests to it."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any, TypeVar

import torch

from sheepop.adapt.row_adapters import Adapter
from sheepop.checkpoint import LoadedModel
from sheepop.checkpoint.adapted import ADDED
from sheepop.checkpoint.generation_settings import GENERATION
from sheepop.core.errors import TokenizerError, UsageError
from sheepop.generate import GenerationConfig, Generator
from sheepop.generate.arithmetic import computing
from sheepop.generate.config import model_defaults
from sheepop.generate.engine import BLOCK_SIZE
from sheepop.generate.request import Request, read_prompt
from sheepop.generate.runner import hidden_states, is_led, length_batches
from sheepop.generate.sampler import Likeliest
from sheepop.model import Transformer
from sheepop.serve.answer_text import begun_section, shown_ids
from sheepop.serve.config import ServerConfig
from sheepop.serve.formats import Section, format_of
from sheepop.serve.logprobs import Tokens
from sheepop.serve.worker import EngineWorker, SideWork
from sheepop.tokenizer import ChatTemplate
from sheepop.tokenizer.chat import free_variables
from sheepop.tokenizer.ready_templates import ends_of_turns, named_template

T = TypeVar("T")
_TOKENS_PER_PASS = 2048  # of embeddings
_ROWS = 256  # of logits at a time
_FEWEST = 16  # requests may be prepared at a time, even if fewer may wait for the engine


class ServedModel:
    """A model with a running engine, whose cache may take `cache_bytes`; `close` ends both.

    With a `base`, of which `loaded` has the weights and an adapter, it runs on the engine of that model. Raises
    `UsageError` for an adapter that the engine cannot run. Its `fingerprint` is another one each time it is loaded, so
    that a client can tell the answers of a model from those of the one that replaced it.
    """

    def __init__(
        self,
        name: str,
        loaded: LoadedModel,
        config: ServerConfig,
        *,
        base: ServedModel | None = None,
        cache_bytes: int | None = None,
    ) -> None:
        self.name, self.loaded, self.base, self.fingerprint = name, loaded, base, f"fp_{secrets.token_hex(6)}"
        self.tokenizer, chosen = loaded.tokenizer, config.chat_template
        source = None if chosen is None else named_template(chosen, loaded.tokenizer)
        self.generator = Generator(
            computing(loaded.model, activations=config.activations),
            loaded.tokenizer,
            end_ids=(*loaded.end_ids, *ends_of_turns(chosen, loaded.tokenizer)),
            defaults=model_defaults(loaded.generation, str(loaded.directory / GENERATION)),
            max_seq_len=config.max_model_len,
            memory=None if base is not None else loaded.memory,
        )
        self.adapter: Adapter | None = None
        self.worker: EngineWorker
        self._numbers: Iterator[int]
        if base is not None:
            self.adapter, self._numbers, self.worker = Adapter.of(loaded.model, ADDED), base._numbers, base.worker
            self.worker.require(self.adapter)
        else:
            engine = self.generator.serving_engine(
                max_sequences=config.max_running,
                max_waiting=config.max_waiting,
                max_tokens=config.tokens_per_step,
                cache_bytes=cache_bytes,
                cache_dtype=config.cache_dtype,
                batch_invariant=config.batch_invariant,
                guesses=config.guesses,
            )
            engine.prepare()
            self._numbers, self.worker = itertools.count(), EngineWorker(engine, name)
        self._guesses, self._pools_last = config.guesses, config.embedding_pooling == "last"
        self._preparing = SideWork(f"preparing for {name}", threads=2, most=max(config.max_waiting, _FEWEST))
        # Slow grammars delay only other grammars.
        self._compiling = SideWork(f"grammars of {name}", threads=1, most=_FEWEST)
        self._scoring = SideWork(f"embeddings of {name}", threads=1, most=max(config.max_waiting, _FEWEST))
        self.template: ChatTemplate | None = None
        # Without a template, a model still continues texts, but nothing would read the variables.
        with suppress(*(() if config.chat_template_kwargs or chosen else (TokenizerError,))):
            self.template = ChatTemplate.of(loaded.tokenizer, variables=config.chat_template_kwargs, source=source)
        self.sections = format_of("" if self.template is None else self.template.source, config.answer_format)

    def shown_ids(self, sections: Sequence[Section]) -> frozenset[int]:
        """The special tokens that the text of an answer has, so that its `sections` can be told."""
        return shown_ids(self.tokenizer, sections)

    def begins_in(self, token_ids: Sequence[int]) -> Section | None:
        """The section of reasoning that a prompt of these tokens has begun, if it has."""
        return begun_section(self.tokenizer, self.sections, token_ids)

    async def requests(
        self,
        prompts: Sequence[str | Sequence[int]],
        config: GenerationConfig,
        *,
        priority: int,
        tenant: str,
        shown_ids: frozenset[int] = frozenset(),
    ) -> list[Request]:
        """Makes requests for the engine; raises `UsageError` for an invalid prompt or grammar."""
        work = self._compiling if config.is_constrained else self._preparing
        return await work.do(
            lambda: [
                self.request(
                    prompt,
                    config,
                    name="The prompt" if len(prompts) == 1 else f"Prompt {index + 1}",
                    index=index,
                    priority=priority,
                    tenant=tenant,
                    shown_ids=shown_ids,
                )
                for index, prompt in enumerate(prompts)
            ]
        )

    def request(
        self,
        prompt: str | Sequence[int],
        config: GenerationConfig,
        *,
        name: str = "The prompt",
        index: int = 0,
        priority: int = 0,
        tenant: str = "",
        shown_ids: frozenset[int] = frozenset(),
    ) -> Request:
        """Makes one request for the engine; a stop string that spells a special token is that token, too.

        Raises as `requests`.
        """
        special, vocab_size = self.tokenizer.special_tokens, self.tokenizer.vocab_size
        if wrong := [token_id for token_id in config.stop_token_ids if not 0 <= token_id < vocab_size]:
            raise UsageError(f"stop_token_ids: {wrong[0]} is not in the vocabulary of {vocab_size}.")
        if spelled := [special[text] for text in config.stop if text in special]:
            config = config.replace(stop_token_ids=(*config.stop_token_ids, *spelled))
        if self._guesses:
            config = config.replace(guesses=self._guesses)
        return self.generator.request(
            prompt, config, name=name, index=index, number=next(self._numbers), priority=priority, tenant=tenant,
            shown_ids=shown_ids, adapter=self.adapter,
        )  # fmt: skip

    def room(self, num_tokens: int, width: int) -> int:
        """The most tokens that each of `width` texts can have after a prompt, in the context and in the cache."""
        manager = self.worker.scheduler.manager
        whole = [count for count, reach in zip(manager.num_blocks, manager.reaches, strict=True) if reach is None]
        longest = [self.generator.max_seq_len, *(count // width * BLOCK_SIZE for count in whole)]
        return max(1, min(longest) - num_tokens)

    async def prepare(self, work: Callable[..., T], *arguments: Any, **settings: Any) -> T:
        """Returns the result of `work`, which reads a request, from a thread beside the engine."""
        return await self._preparing.do(work, *arguments, **settings)

    def read_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any] = MappingProxyType({"add_generation_prompt": True}),
        variables: Mapping[str, Any] = MappingProxyType({}),
        *,
        parse_special: bool = False,
    ) -> list[int]:
        """Renders a chat to tokens, by default up to the beginning of the answer.

        `options` are those of `ChatTemplate.render`, and `variables` the request's. A special token that a message
        spells is text, unless `parse_special`. Raises `TokenizerError` without a template, and as the template's
        `render`.
        """
        if self.template is None:
            raise TokenizerError(
                f"The model {self.name} has no chat template, so it cannot answer conversations. Use /v1/completions."
            )
        return self.template.encode(
            self.tokenizer, messages, parse_special=parse_special, **options, **free_variables(variables)
        )

    def encoded(self, prompt: str | list[int], *, with_prefix: bool, parse_special: bool) -> list[int]:
        """The tokens of a text, with the tokenizer's prefix and the special tokens that it spells, or token ids."""
        if not isinstance(prompt, str):
            return prompt
        prefix_ids = self.tokenizer.prefix_ids if with_prefix else ()
        return [*prefix_ids, *self.tokenizer.encode(prompt, allow_special=parse_special)]

    async def embed(self, prompts: Sequence[str | Sequence[int]]) -> tuple[list[list[float]], int]:
        """Returns a vector of length 1 for each text, as `server.embedding_pooling` says, and the number of all tokens.

        Raises `UsageError` for a text that does not fit.
        """
        model, longest = self.generator.model, self.generator.max_seq_len

        def read() -> list[list[int]]:
            return [read_prompt("input", each, model, self.tokenizer, "refuse", longest).token_ids for each in prompts]

        @torch.inference_mode()
        def embedded(texts: Sequence[Sequence[int]]) -> list[list[float]]:
            states = [found.float() for found in hidden_states(model, texts)]
            vectors = torch.stack([found[-1] if self._pools_last else found.mean(0) for found in states])
            return (vectors / vectors.norm(dim=1, keepdim=True).clamp(min=1e-12)).tolist()

        texts = await self._preparing.do(read)
        found: dict[int, list[float]] = {}
        for batch in length_batches(list(map(len, texts)), 0 if is_led(model) else _TOKENS_PER_PASS):
            found |= zip(batch, await self._scoring.do(embedded, [texts[number] for number in batch]), strict=True)
        return [found[number] for number in range(len(texts))], sum(map(len, texts))

    async def score(self, requests: Sequence[Request], top: int) -> list[Tokens]:
        """Returns the tokens of each prompt with log-probabilities and the `top` likeliest; None for the first."""
        found = []
        for request in requests:
            token_ids = request.prompt.token_ids
            logprobs, likeliest = await self._scoring.do(prompt_likelihoods, self.generator.model, token_ids, top)
            found.append(Tokens(token_ids, [None, *logprobs], [None, *likeliest]))
        return found

    def close(self) -> None:
        """Stops the engine unless it is another's, and the processes for the template and grammars."""
        if self.base is None:
            self.worker.close()
        self._preparing.close()
        self._compiling.close()
        self._scoring.close()
        self.generator.close()
        if self.template is not None:
            self.template.close()


@torch.inference_mode()
def prompt_likelihoods(model: Transformer, token_ids: Sequence[int], top: int) -> tuple[list[float], list[Likeliest]]:
    """The log-probability of each token of a prompt but the first, and the `top` likeliest tokens in its place."""
    if len(token_ids) < 2:
        return [], []
    (hidden_TD,) = hidden_states(model, [token_ids[:-1]])
    following = torch.tensor(token_ids[1:], device=model.device)
    logprobs: list[float] = []
    likeliest: list[Likeliest] = []
    for states_TD, labels in zip(torch.split(hidden_TD, _ROWS), torch.split(following, _ROWS), strict=True):
        found = model.logits(model.lm_head(states_TD[None]))[0].float().log_softmax(dim=-1)
        logprobs += found.gather(1, labels[:, None])[:, 0].tolist()
        best = found.topk(min(top, found.shape[1]), dim=-1)
        likeliest += map(Likeliest, best.indices.tolist(), best.values.tolist())
    return logprobs, likeliest
