"""The generator: continues prompts with a trained network."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from sheepop.adapt.row_adapters import Adapter
from sheepop.adapt.scalar_head import REWARD_HEAD
from sheepop.adapt.stored_weight import StoredWeight
from sheepop.core.errors import TokenizerError, UsageError
from sheepop.core.machine import available_memory
from sheepop.generate.arithmetic import computing
from sheepop.generate.config import Activations, CacheDtype, GenerationConfig
from sheepop.generate.constraints import Grammars
from sheepop.generate.engine import BLOCK_SIZE, Engine
from sheepop.generate.native_block import prepared
from sheepop.generate.paged_cache import bytes_per_block, state_bytes
from sheepop.generate.request import Completion, Request, read_prompt
from sheepop.generate.sampler import Sampler
from sheepop.generate.updates import NotFiniteError, TextStream, Update
from sheepop.model import EncoderDecoder, Transformer
from sheepop.model.corpus_memory import CorpusMemory
from sheepop.model.probe import someone_watches
from sheepop.parallel.ranks import ALONE, Ranks
from sheepop.tokenizer import Tokenizer

OnText = Callable[[int, str], None]


@dataclass(frozen=True)
class _KeptEngine:
    """An engine that stays for the next call.

    Once the weights have other `versions`, its keys and values are forgotten.
    """

    engine: Engine
    kind: tuple[object, ...]
    versions: tuple[int, ...]


class Generator:
    """Generates continuations; with an encoder-decoder, targets of sources.

    It computes in the data type of the model's parameters, but on a CPU whose kernels read 16 bits in float32.

    The engine stays between calls, so that a prompt which begins like an earlier one, such as the next turn of a
    conversation, is read from there on only. After weights have changed in place, prompts are read anew; see `close`.

    `device` moves the model; None leaves it where it is. At most `max_batch_size` prompts run at once, or as many as
    a request asks for, which bounds the memory of their keys and values. `end_ids` end a text, as the
    tokenizer's own end token does. `draft_model`, a smaller one with the same vocabulary, makes the guesses of
    `GenerationConfig.guesses`; without it they come from the text itself. `defaults` are the model's own settings,
    which callers apply with `GenerationConfig.over`. A `max_seq_len` below the model's shortens its context. The
    `memory` of the training text corrects predictions. Several `ranks` with the same weights, all called with the same
    arguments, share prompts and texts to score. Raises `TokenizerError` if the tokenizer has more tokens than a model.
    """

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer,
        *,
        device: torch.device | str | None = None,
        max_batch_size: int = 16,
        end_ids: Sequence[int] = (),
        draft_model: Transformer | None = None,
        defaults: Mapping[str, Any] | None = None,
        max_seq_len: int | None = None,
        ranks: Ranks = ALONE,
        memory: CorpusMemory | None = None,
    ) -> None:
        networks = (model,) if draft_model is None else (model, draft_model)
        for network in networks:
            if tokenizer.vocab_size > network.config.vocabulary:
                raise TokenizerError(
                    f"The tokenizer has {tokenizer.vocab_size} tokens, but the model has only "
                    f"{network.config.vocabulary}. Use the tokenizer that the model was trained with."
                )
        if hasattr(model, REWARD_HEAD):
            raise UsageError("A reward model judges answers and writes none. Use the model that it was trained from.")
        if max_batch_size < 1:
            raise UsageError(f"max_batch_size must be at least 1, got {max_batch_size}.")
        # A copy of the modules, in evaluation mode, so that a model in training keeps its own mode.
        self._model, self._copies = prepared(model if device is None else model.to(device))
        self.tokenizer, self.max_batch_size = tokenizer, max_batch_size
        self.ranks, self.memory = ranks, None if memory is None else memory.to(self._model.device)
        self.defaults = dict(defaults or {})
        self.max_seq_len = model.config.max_seq_len if max_seq_len is None else max_seq_len
        if self.max_seq_len > model.config.max_seq_len:
            raise UsageError(
                f"The context of {max_seq_len} tokens is longer than the model's, max_seq_len = "
                f"{model.config.max_seq_len}. Ask for less."
            )
        own = tokenizer.special_id("eos")
        self._end_ids = frozenset(end_ids if own is None else (*end_ids, own))
        self._sampler = Sampler.of(self.tokenizer, self.model, self._end_ids)
        self._draft: tuple[Transformer, Sampler] | None = None
        if draft_model is not None:
            small, copies = prepared(draft_model.to(self._model.device))
            self._copies += copies
            self._draft = small, Sampler.of(self.tokenizer, small, self._end_ids)
        tensors = [tensor for network in networks for tensor in (*network.parameters(), *network.buffers())]
        self._weights = [tensor for tensor in tensors if not isinstance(tensor, StoredWeight)]  # which never change
        self._kept: _KeptEngine | None = None
        self._networks: dict[tuple[bool, Activations], Transformer] = {}

    @property
    def model(self) -> Transformer:
        """The network over the weights of the given model, with the fastest layers for its device."""
        self._refresh()
        return self._model

    def _refresh(self) -> None:
        """Copies weights that may have changed to the layers that have copies of them."""
        for copy, original in self._copies:
            copy.copy_(original)

    @property
    def continues_prompts(self) -> bool:
        """Whether a text continues its prompt; False for an encoder-decoder."""
        return not isinstance(self.model, EncoderDecoder)

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        config: GenerationConfig | Sequence[GenerationConfig] | None = None,
        *,
        on_text: OnText | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> list[Completion]:
        """Continues every prompt, a text or a list of token ids; returns completions in the order of the prompts.

        For an encoder-decoder a prompt is a source and the completion its target. `config` is one for all prompts or
        one for each; these must agree in `num_beams`, `max_batch_size`, `cache_dtype`, `activations` and
        `batch_invariant`.

        The text of prompt i is a function of (model, prompt, config, seed, i). It does not change, up to rounding, if
        prompts run together, one after another (a `max_batch_size` of 1), or on several ranks, which all return all
        completions. A prompt given as text gets the tokenizer's prefix tokens; token ids are used as they are.
        `on_text` is called with (i, piece) for each final piece of the text of prompt i, if this rank runs it and it
        has one completion. When `should_stop` returns true, unfinished texts end with the reason ``abort``.

        Raises `UsageError` for a prompt that is empty, has a token id outside the vocabulary, or fills the context
        unless `on_overflow` is ``window``. Raises `NotFiniteError` if the network's logits are not finite for some
        prompts, once the other texts have been written to their end; the error has their `completions`.
        """
        requests = self._requests(prompts, config or GenerationConfig())
        if not requests:
            return []

        def write(numbers: range) -> list[list[dict[str, Any]] | str]:
            """The records of each request, or the place where it failed."""
            here, failed = [requests[number] for number in numbers], dict[Request, str]()
            for update in self._steps(self._engine(here), should_stop) if here else ():
                if isinstance(update.error, NotFiniteError):
                    failed[update.request] = update.error.places[0]
                elif update.error is not None:
                    raise update.error
                elif on_text is not None and update.text and update.request.num_candidates == 1:
                    on_text(update.request.index, update.text)
            return [failed.get(each) or [completion.record() for completion in each.completions()] for each in here]

        written = self.ranks.shared(len(requests), write)
        if places := [found for found in written if isinstance(found, str)]:
            kept: list[Completion | None] = []
            for request, found in zip(requests, written, strict=True):
                kept += [None] * request.config.num_completions if isinstance(found, str) else map(Completion.of, found)
            raise NotFiniteError(places, kept)
        return [Completion.of(record) for records in written for record in records]

    def stream(self, prompt: str | Sequence[int], config: GenerationConfig | None = None) -> TextStream:
        """Streams the text of one prompt as it is generated; raises as `generate` does."""
        (request,) = self._requests([prompt], config or GenerationConfig())
        if request.num_candidates > 1:
            raise UsageError("A stream is one text. Set num_completions = 1, without best_of.")
        return TextStream(request, self._steps(self._engine([request]), None))

    def close(self) -> None:
        """Frees the engine, and ends the process that compiles grammars; later calls start them again."""
        self._kept = None
        if (grammars := self.__dict__.pop("_grammars", None)) is not None:
            grammars.close()

    def require(self, prompts: Sequence[str | Sequence[int]], config: GenerationConfig) -> None:
        """Raises `UsageError` for a prompt that `generate` would refuse, without running the network."""
        self._requests(prompts, config)

    def _steps(self, engine: Engine, should_stop: Callable[[], bool] | None) -> Iterator[Update]:
        """Yields the updates of all steps until the engine is idle, or until `should_stop` aborts its requests.

        The engine is not kept after an error, also of a single request.
        """
        try:
            while not engine.is_idle:
                if should_stop is not None and should_stop():
                    yield from engine.abort_all()
                    return
                # The caller, who runs between the updates, must not inherit these modes.
                with torch.inference_mode(), torch.autocast(self._model.device.type, enabled=False):
                    updates = engine.step()
                for update in updates:
                    if update.error is not None:
                        self._kept = None
                    yield update
        except Exception:
            self._kept = None
            raise
        finally:
            if not engine.is_idle:  # the caller left, or a step failed
                engine.abort_all()

    def _engine(self, requests: Sequence[Request]) -> Engine:
        """An engine with these requests alone, whose cache may take half of the free memory."""
        config = requests[0].config
        max_sequences = max(config.max_batch_size or self.max_batch_size, *(request.width for request in requests))
        guesses = max(request.config.guesses for request in requests)
        needed = max(request.width * -(-request.longest // BLOCK_SIZE) for request in requests)
        # CUDA graphs read the memory in which they were captured.
        places = [weight.data_ptr() for weight in self._weights]
        arithmetic = config.cache_dtype, config.activations, config.batch_invariant
        kind = (max_sequences, guesses, *arithmetic, *places)
        self._refresh()
        versions, kept = self._versions(), self._kept
        if (
            kept is not None
            and kept.engine.is_idle
            and kept.kind == kind
            and (kept.versions == versions or (versions is not None and not guesses))
            and kept.engine.scheduler.manager.num_blocks[0] >= needed
        ):
            if kept.versions != versions:
                kept.engine.scheduler.manager.forget()
                self._kept = replace(kept, versions=versions)
            engine = kept.engine
            engine.scheduler.max_waiting = len(requests)
        else:
            self._kept = kept = None  # its memory is free for the next
            engine = self.serving_engine(
                max_sequences=max_sequences,
                max_waiting=len(requests),
                cache_dtype=config.cache_dtype,
                activations=config.activations,
                batch_invariant=config.batch_invariant,
                guesses=guesses,
                least=needed,
            )
            if versions is not None:
                self._kept = _KeptEngine(engine, kind, versions)
        for request in requests:
            engine.add(request)
        return engine

    def _versions(self) -> tuple[int, ...] | None:
        """How often each weight was changed in place; None if that is unknown, or if a probe watches the network."""
        if someone_watches() or any(tensor.is_inference() for tensor in self._weights):
            return None
        return tuple(tensor._version for tensor in self._weights)

    @cached_property
    def _grammars(self) -> Grammars:
        return Grammars(self.tokenizer, self._sampler.forbidden, sorted(self._end_ids))

    def _requests(
        self, prompts: Sequence[str | Sequence[int]], config: GenerationConfig | Sequence[GenerationConfig]
    ) -> list[Request]:
        if isinstance(prompts, str):
            raise UsageError("prompts must be a list of prompts; for a single one, pass [prompt].")
        configs = [config] * len(prompts) if isinstance(config, GenerationConfig) else list(config)
        if len(configs) != len(prompts):
            raise UsageError(
                f"{len(prompts)} prompts were given with {len(configs)} configurations. Give one for all, or one per "
                "prompt."
            )
        for name in ("num_beams", "max_batch_size", "cache_dtype", "activations", "batch_invariant"):
            if len({getattr(each, name) for each in configs}) > 1:
                raise UsageError(f"Prompts that are given together need the same {name}. Give them in separate calls.")
        drawn = secrets.randbits(32)
        if any(each.seed is None for each in configs):
            drawn = self.ranks.told(drawn)
        return [
            self.request(
                prompt,
                settings if settings.seed is not None else settings.replace(seed=drawn),
                name="The prompt" if len(prompts) == 1 else f"Prompt {index + 1}",
                index=index,
                number=index,
            )
            for index, (prompt, settings) in enumerate(zip(prompts, configs, strict=True))
        ]

    def request(
        self,
        prompt: str | Sequence[int],
        config: GenerationConfig,
        *,
        name: str = "The prompt",
        index: int = 0,
        number: int = 0,
        priority: int = 0,
        tenant: str = "",
        shown_ids: frozenset[int] = frozenset(),
        adapter: Adapter | None = None,
    ) -> Request:
        """Makes a request for an engine of this model; raises `UsageError` as `generate` does, or for a bad grammar."""
        if unknown := [token_id for token_id in config.logit_bias if not 0 <= token_id < self.tokenizer.vocab_size]:
            raise UsageError(
                f"logit_bias: token id {unknown[0]} is not in the vocabulary. Ids run from 0 to "
                f"{self.tokenizer.vocab_size - 1}."
            )
        return Request(
            index,
            read_prompt(name, prompt, self.model, self.tokenizer, config.on_overflow, self.max_seq_len),
            config,
            self.tokenizer,
            self._end_ids,
            max_seq_len=self.max_seq_len,
            seed=secrets.randbits(32) if config.seed is None else config.seed,
            name=name,
            number=number,
            priority=priority,
            tenant=tenant,
            shown_ids=shown_ids,
            adapter=adapter,
            matcher=self._grammars.matcher(config) if config.is_constrained else None,
        )

    def serving_engine(
        self,
        *,
        max_sequences: int,
        max_waiting: int,
        max_tokens: int | None = None,
        cache_bytes: int | None = None,
        cache_dtype: CacheDtype = "auto",
        activations: Activations = "exact",
        batch_invariant: bool = False,
        guesses: int = 0,
        least: int = 0,
    ) -> Engine:
        """Builds an engine for requests that arrive over time.

        Its cache has at most `cache_bytes`, by default half of the free memory, but at least `least` blocks, and never
        more than `max_sequences` whole contexts need.
        """
        most = max_sequences * -(-self.max_seq_len // BLOCK_SIZE)
        if cache_bytes is None:
            cache_bytes = free_memory(self.model.device) // 2
        models = [self.model] if self._draft is None or guesses == 0 else [self.model, self._draft[0]]
        cache_bytes -= sum(state_bytes(model, max_sequences, BLOCK_SIZE, guesses) for model in models)
        per_block = sum(bytes_per_block(model, BLOCK_SIZE, guesses, cache_dtype=cache_dtype) for model in models)
        return Engine.build(
            self._computing(batch_invariant, activations),
            self._sampler,
            num_blocks=max(least, min(most, max(0, cache_bytes) // per_block)),
            max_sequences=max_sequences,
            max_waiting=max_waiting,
            max_tokens=max_tokens,
            cache_dtype=cache_dtype,
            batch_invariant=batch_invariant,
            guesses=guesses,
            draft=self._draft,
            memory=self.memory,
        )

    def _computing(self, batch_invariant: bool, activations: Activations) -> Transformer:
        kind = batch_invariant, activations
        if kind not in self._networks:
            self._networks[kind] = computing(self.model, batch_invariant=batch_invariant, activations=activations)
        self._refresh()
        return self._networks[kind]


def free_memory(device: torch.device) -> int:
    """Returns the bytes of memory that this process may still use on `device`."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()
