"""Requests: their prompts as the network reads them, their texts, and completions."""

from __future__ import annotations

import operator
import time
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Literal, Self

from torch import Tensor

from sheepop.adapt.row_adapters import Adapter
from sheepop.core.errors import PromptTooLongError, UsageError
from sheepop.core.random import derive_seed
from sheepop.generate.beam_search import Beam
from sheepop.generate.config import GenerationConfig
from sheepop.generate.constraints import Matcher
from sheepop.generate.penalties import Occurrences
from sheepop.generate.sampler import Likeliest, Row
from sheepop.generate.scheduler import Grant, Reader
from sheepop.generate.stop_strings import StopMatcher
from sheepop.model import EncoderDecoder, Transformer
from sheepop.tokenizer import StreamDecoder, Tokenizer

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class Prompt:
    """A prompt as text and as token ids.

    The completion follows `token_ids`. For an encoder-decoder the prompt's tokens are `source_ids`, and `token_ids` are
    those that begin every target.
    """

    text: str
    token_ids: list[int]
    source_ids: list[int] | None = None

    @property
    def num_tokens(self) -> int:
        """The number of tokens of the prompt, with its prefix or end token."""
        return len(self.token_ids if self.source_ids is None else self.source_ids)


def read_prompt(
    name: str,
    prompt: str | Sequence[int],
    model: Transformer,
    tokenizer: Tokenizer,
    on_overflow: str,
    longest: int | None = None,
) -> Prompt:
    """Encodes `prompt` for `model`; messages call it `name`; see `GenerationConfig` for `on_overflow`.

    It must fit a context of `longest` tokens, by default the model's. A text gets the tokenizer's prefix tokens; token
    ids are used as they are. Raises `UsageError` for a prompt that is empty, is not text, has an id outside the
    vocabulary, or does not fit.
    """
    has_encoder = isinstance(model, EncoderDecoder)
    longest = longest or model.config.max_seq_len
    if has_encoder and on_overflow == "window":
        raise UsageError(
            "on_overflow=window (--window) drops the beginning of a text, but a target needs it. Leave it out."
        )

    def check_length(count: int) -> None:
        if on_overflow == "window" or count < longest:
            return
        if has_encoder:
            raise PromptTooLongError(
                f"{name} has {count} tokens, but the encoder's max_seq_len = {longest} has room for "
                f"{longest - 1} and the end token. Shorten it."
            )
        raise PromptTooLongError(
            f"{name} has {count} tokens, but the model's context of max_seq_len = {longest} has room for "
            f"{longest - 1} and a new one. Shorten it, or set on_overflow=window (--window) to keep "
            "only its last tokens."
        )

    if isinstance(prompt, Sized) and not isinstance(prompt, str):
        check_length(len(prompt))  # before millions of ids are read
    token_ids = encode_prompt(name, prompt, tokenizer, () if has_encoder else tokenizer.prefix_ids)
    check_length(len(token_ids))
    text = prompt if isinstance(prompt, str) else tokenizer.decode(token_ids)
    if has_encoder:
        return Prompt(text, [tokenizer.bos_id], [*token_ids, tokenizer.eos_id])
    return Prompt(text, token_ids)


def encode_prompt(
    name: str, prompt: str | Sequence[int], tokenizer: Tokenizer, prefix_ids: Sequence[int] = ()
) -> list[int]:
    """Returns `prefix_ids` and the ids of a text, or given token ids unchanged; raises `UsageError` for bad input."""
    if isinstance(prompt, str):
        try:
            prompt.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UsageError(
                f"{name} is not valid Unicode text: character {error.start} is half of a surrogate pair, which "
                "stands for a byte that is not UTF-8. Give it as UTF-8."
            ) from None
        token_ids = [*prefix_ids, *tokenizer.encode(prompt)]
    else:
        try:
            token_ids = [operator.index(value) for value in prompt]
        except TypeError:
            raise UsageError(f"{name} must be text or a list of integer token ids, not {prompt!r}.") from None
    if not token_ids:
        raise UsageError(f"{name} is empty. Give at least one character for the model to continue.")
    for position, token_id in enumerate(token_ids):
        if not 0 <= token_id < tokenizer.vocab_size:
            raise UsageError(
                f"{name}: token id {token_id} at position {position} is not in the vocabulary. "
                f"Ids run from 0 to {tokenizer.vocab_size - 1}."
            )
    return token_ids


@dataclass(frozen=True)
class Completion:
    """The text generated for one prompt: its continuation, or for an encoder-decoder the target of the source.

    `text` ends before the stop string, if one was found. `token_ids` are all generated tokens, with the ``<eos>`` or
    the pieces of the stop string that ended them. `logprobs` has the natural logarithm of each token's probability
    under the model itself, before temperature and the other sampling settings. `likeliest` has the model's likeliest
    tokens at each position, if they were requested.

    `finish_reason` is ``stop`` (``<eos>``, a stop token or a stop string), ``length`` (`max_new_tokens`, or the end of
    the context) or ``abort`` (the caller stopped it). `num_dropped_prompt_tokens` counts the first prompt tokens that
    the network did not read because they did not fit the context. `seed` reproduces the text. `continues_prompt` is
    False for a target. `near_ties` counts tokens that won so narrowly that another batch, with other rounding, could
    have chosen another token.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: list[float]
    prompt: str
    num_prompt_tokens: int
    num_dropped_prompt_tokens: int
    seed: int
    continues_prompt: bool = True
    likeliest: tuple[Likeliest, ...] = ()
    near_ties: int = 0

    def record(self) -> dict[str, Any]:
        """The completion as a dictionary, which shares its lists."""
        return {**vars(self), "likeliest": [vars(each) for each in self.likeliest]}

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Self:
        """Restores a completion from its `record`."""
        return cls(**{**record, "likeliest": tuple(Likeliest(**each) for each in record["likeliest"])})


class Candidate(Reader):
    """One of the texts that a request writes. `context` has the tokens that the network reads to predict the next one.

    When the context is full and `on_overflow` is ``slide`` or ``window``, only its last half is kept, so the network
    never sees more than `max_seq_len` positions. A prompt that fills the context loses its first tokens, to make room
    for `max_new_tokens` or half a context, whichever is less. `num_expected` tokens are sampled, but not known yet; if
    they are read before, the context has numbers in their place that `runner.Reading` explains.
    """

    def __init__(self, request: Request, index: int) -> None:
        prompt_ids, longest = request.prompt.token_ids, request.max_seq_len
        context = list(prompt_ids)
        if len(prompt_ids) >= longest:
            context = prompt_ids[-(longest - min(request.config.max_new_tokens, longest // 2)) :]
        super().__init__(context, request.salt, adapter=request.adapter, source_ids=request.prompt.source_ids)
        self.request, self.index = request, index
        self.seed = request.seed if index == 0 else derive_seed(request.seed, "candidate", index)
        self.logprobs: list[float] = []
        self.likeliest: list[Likeliest] = []
        self.near_ties, self.num_expected, self._num_unknown = 0, 0, 0
        self.matcher = None if request.matcher is None else request.matcher.fork()
        self.finish_reason: FinishReason | None = None
        self.num_dropped = len(prompt_ids) - len(context)
        self._most = request.config.max_new_tokens
        # A target never slides, whatever `on_overflow` is, because it needs its beginning.
        if request.config.on_overflow == "refuse" or request.prompt.source_ids is not None:
            self._most = min(self._most, longest - len(prompt_ids))
        self._occurrences = Occurrences(prompt_ids, self.token_ids) if request.config.penalises else None
        self._stop = StopMatcher(request.config.stop)
        self._decoder = StreamDecoder(request.tokenizer, shown_ids=request.shown_ids, continues=request.continues)
        self._text: list[str] = []

    @property
    def num_remaining(self) -> int:
        """The number of tokens that may still be written."""
        return self._most - len(self.token_ids)

    @property
    def num_guessable(self) -> int:
        """The number of tokens to guess: those requested, limited by `num_remaining` and the context."""
        request = self.request
        return max(0, min(request.config.guesses, self.num_remaining - 1, request.max_seq_len - len(self.context)))

    @property
    def position(self) -> int:
        """The index of the next token in prompt and text together."""
        return len(self.request.prompt.token_ids) + len(self.token_ids)

    def row(self, guesses: Sequence[int] = (), allowed: Tensor | None = None) -> Row:
        """The sampler's row for the token after the text and `guesses`."""
        num_written = len(self.token_ids) + self.num_expected + len(guesses)
        following = (*self.context[len(self.context) - self._num_unknown :], *guesses)
        return Row(self.request.config, num_written, self.seed, self._occurrences, allowed, following)

    def expect(self, row: int) -> None:
        """Counts on the token that is sampled in `row` of a step, which the next step may read before it is known.

        No step reads the last token of a text, nor one that makes the context slide.
        """
        self.num_expected += 1
        if self.num_expected + len(self.token_ids) < self._most and len(self.context) < self.request.max_seq_len:
            self.context.append(-1 - row)
            self._num_unknown += 1

    @property
    def is_full(self) -> bool:
        """Whether the context has more tokens than the network can read."""
        return len(self.context) > self.request.max_seq_len

    def slide(self) -> None:
        """Drops the first half of the context."""
        self.context = self.context[-max(1, self.request.max_seq_len // 2) :]

    def accept(self, token_id: int, logprob: float, likeliest: Likeliest | None = None) -> str:
        """Adds a sampled token, ends the text if it is the last, and returns the new text that can be shown."""
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        if likeliest is not None:
            self.likeliest.append(likeliest)
        if token_id in self.request.end_ids:
            return self.finish("stop")
        if self.matcher is not None:
            self.matcher.accept(token_id)
        if self._num_unknown:
            self.context[-self._num_unknown] = token_id
            self._num_unknown -= 1
        else:
            self.context.append(token_id)
        text, may_end = self._decoder.push(token_id), len(self.token_ids) >= self.request.config.min_new_tokens
        shown = self._show(self._stop.push(text) if may_end else text)
        if self._stop.matched is not None:
            self._end("stop")
        elif self.num_remaining == 0:
            shown += self.finish("length")
        return shown

    def finish(self, reason: FinishReason) -> str:
        """Ends the text; returns the rest, withheld so far as part of a possible character or stop string."""
        shown = self._stop.push(self._decoder.finish())
        found = self._stop.matched is not None
        self._end("stop" if found else reason)
        return self._show(shown if found else shown + self._stop.finish())

    def _end(self, reason: FinishReason) -> None:
        """Ends the text and drops the tokens that are not known yet."""
        self.finish_reason = reason
        del self.context[len(self.context) - self._num_unknown :]
        self._num_unknown = 0
        self.request.writing = [other for other in self.request.writing if other is not self]

    def completion(self) -> Completion:
        """The result; the text must have ended."""
        assert self.finish_reason is not None
        request = self.request
        return Completion(
            text=self.text,
            token_ids=self.token_ids,
            finish_reason=self.finish_reason,
            logprobs=self.logprobs,
            prompt=request.prompt.text,
            num_prompt_tokens=request.prompt.num_tokens,
            num_dropped_prompt_tokens=self.num_dropped,
            seed=request.call_seed,
            continues_prompt=request.prompt.source_ids is None,
            likeliest=tuple(self.likeliest),
            near_ties=self.near_ties,
        )

    @property
    def text(self) -> str:
        """The text so far, without what is withheld as part of a possible stop string."""
        return "".join(self._text)

    @property
    def stop(self) -> str | None:
        """The stop string that ended the text."""
        return self._stop.matched

    def _show(self, text: str) -> str:
        self._text.append(text)
        return text


class Request:
    """A prompt, its settings, and the texts that continue it: `num_candidates` of them, or the branches of a beam.

    Messages call its prompt `name`. The attribute `seed` is derived from the argument `seed`, the caller's, and the
    prompt's `index`. `matcher` enforces a grammar. Requests run in order of `priority`, smaller first, then of
    `number`. Only requests of the same `tenant` and `adapter` share cached prefixes. The text has the special tokens of
    `shown_ids`. `writing` are the unfinished texts. If a request `can_run_ahead`, the network can read a token before
    the host knows it.
    """

    def __init__(
        self,
        index: int,
        prompt: Prompt,
        config: GenerationConfig,
        tokenizer: Tokenizer,
        end_ids: frozenset[int],
        *,
        max_seq_len: int,
        seed: int,
        name: str = "The prompt",
        number: int = 0,
        priority: int = 0,
        tenant: str = "",
        matcher: Matcher | None = None,
        shown_ids: frozenset[int] = frozenset(),
        adapter: Adapter | None = None,
    ) -> None:
        self.index, self.prompt, self.config, self.name = index, prompt, config, name
        self.call_seed, self.seed = seed, derive_seed(seed, "request", index)
        self.end_ids, self.shown_ids = end_ids.union(config.stop_token_ids), shown_ids
        self.max_seq_len, self.matcher, self.order = max_seq_len, matcher, (priority, number)
        # Keys and values depend on the adapter, and those of a target on its source.
        self.salt = repr((tenant, 0 if adapter is None else adapter.number, prompt.source_ids))
        self.num_candidates = 1 if config.num_beams > 1 else max(config.best_of or 1, config.num_completions)
        self.tokenizer, self.adapter = tokenizer, adapter
        self.continues = not set(tokenizer.special_tokens.values()).issuperset(prompt.token_ids)
        self.candidates = [Candidate(self, 0)]
        self.writing = list(self.candidates)
        self.num_cached, self.seconds_waited = 0, 0.0
        self.is_new, self._made = True, time.monotonic()
        self.can_run_ahead = matcher is None and config.num_beams == 1
        self.uses_memory = config.use_memory and adapter is None  # the memory fits the network without adapters
        self.beam: Beam | None = None
        self.branches: list[Reader] = []  # the hypotheses with their prompt, as the network reads them
        if config.num_beams > 1:
            first = self.candidates[0]
            self.beam = Beam(
                num_beams=config.num_beams,
                max_tokens=first.num_remaining,
                end_ids=self.end_ids,
                length_penalty=config.length_penalty,
            )
            self.branches = [Reader(first.context, self.salt, adapter=adapter, source_ids=prompt.source_ids)]

    def begin(self, grants: Sequence[Grant]) -> None:
        """Records at the first step how long the request waited, and how many tokens of its prompt were cached."""
        self.num_cached = sum(grant.chunk.start for grant in grants)
        self.seconds_waited, self.is_new = time.monotonic() - self._made, False

    @property
    def readers(self) -> Sequence[Reader]:
        """The texts that the network reads for this request."""
        return self.writing if self.beam is None else self.branches

    @property
    def width(self) -> int:
        """The most texts that the network reads at a time."""
        return max(self.num_candidates, self.config.num_beams)

    @property
    def longest(self) -> int:
        """The most tokens that one of its texts can have in the context."""
        return min(len(self.candidates[0].context) + self.config.max_new_tokens, self.max_seq_len)

    def fork(self) -> list[Candidate]:
        """Creates and returns the other candidates, which share the prompt of the first."""
        others = [Candidate(self, index) for index in range(1, self.num_candidates)]
        self.candidates += others
        self.writing = [*self.writing, *others]
        return others

    def chosen(self) -> list[Candidate]:
        """The `num_completions` texts to return: those whose tokens are likeliest on average."""
        if len(self.candidates) <= self.config.num_completions:
            return self.candidates
        likeliest = sorted(self.candidates, key=lambda c: -sum(c.logprobs) / max(1, len(c.logprobs)))
        return likeliest[: self.config.num_completions]

    def completions(self) -> list[Completion]:
        """Returns the completions of the chosen texts."""
        return [candidate.completion() for candidate in self.chosen()]
