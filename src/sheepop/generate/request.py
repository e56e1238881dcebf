"""Requests on their way to completions: their texts, and whether they have ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from sheepop.core.random import derive_seed
from sheepop.generate.beam_search import Beam, Branch
from sheepop.generate.blocks import BlockTable
from sheepop.generate.config import GenerationConfig
from sheepop.generate.constraints import Matcher
from sheepop.generate.prompt import Prompt
from sheepop.generate.sampler import Likeliest
from sheepop.generate.scheduler import Reader
from sheepop.generate.stopping import StopMatcher
from sheepop.tokenizer import StreamDecoder, Tokenizer

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class Completion:
    """What was written for one prompt: its continuation, or for an encoder-decoder the target for it as the source.

    `text` ends before the stop string, if one was found. `token_ids` are all tokens that were chosen, with the
    ``<eos>`` or the pieces of the stop string that ended them; `logprobs` has the natural logarithm of each one's
    probability under the model itself, before temperature and the rest of the sampling settings, and `likeliest` the
    tokens that the model preferred there, where they were asked for.

    `finish_reason` is ``stop`` (``<eos>``, a stop token or a stop string), ``length`` (`max_new_tokens`, or the end of
    the context) or ``abort`` (the caller asked to stop). `num_dropped_prompt_tokens` counts the prompt's first tokens
    that the network did not read because the context could not hold them. `seed` repeats the text. `continues_prompt`
    says whether the text goes on where the prompt ends. `near_ties` counts tokens that were chosen by so little that
    among other requests, with other roundings, another one could have been.
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

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Self:
        """What ``dataclasses.asdict`` has made plain data of, read back."""
        return cls(**{**record, "likeliest": tuple(Likeliest(**each) for each in record["likeliest"])})


class Candidate:
    """One of the texts that a request writes. `context` are the tokens that the network reads to predict the next one.

    When the context is full and `on_overflow` is ``slide`` or ``window``, it goes on with its last half, as if the text
    before had not been: the network never sees more than `max_seq_len` positions. A prompt that fills the context loses
    its first tokens, so that there is room for `max_new_tokens` but at most for half a context.
    """

    def __init__(self, request: Request, index: int) -> None:
        self.request, self.index = request, index
        self.seed = request.seed if index == 0 else derive_seed(request.seed, "candidate", index)
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.likeliest: list[Likeliest] = []
        self.near_ties = 0
        self.matcher = None if request.matcher is None else request.matcher.fork()
        self.finish_reason: FinishReason | None = None
        self.drafts: list[int] = []
        self.salt = request.salt
        self.table: BlockTable | None = None
        prompt_ids, longest = request.prompt.token_ids, request.max_seq_len
        self.context = list(prompt_ids)
        if len(prompt_ids) >= longest:
            self.context = prompt_ids[-(longest - min(request.config.max_new_tokens, longest // 2)) :]
        self.num_dropped = len(prompt_ids) - len(self.context)
        self._stop = StopMatcher(request.config.stop)
        self._decoder = request.decoder()
        self._text: list[str] = []

    @property
    def num_remaining(self) -> int:
        """Tokens that may still be written."""
        request = self.request
        remaining = request.config.max_new_tokens - len(self.token_ids)
        # A target needs its beginning, whatever is said of a text that goes on.
        if request.config.on_overflow == "refuse" or request.prompt.source_ids is not None:
            remaining = min(remaining, request.max_seq_len - self.position)
        return remaining

    @property
    def num_guessable(self) -> int:
        """Tokens that may be guessed: as many as are asked for, may be written beside the next one, and fit."""
        request = self.request
        return max(0, min(request.config.guesses, self.num_remaining - 1, request.max_seq_len - len(self.context)))

    @property
    def position(self) -> int:
        """Index of the next token in prompt and text together."""
        return len(self.request.prompt.token_ids) + len(self.token_ids)

    @property
    def context_overflows(self) -> bool:
        """Whether the context has to slide before the network can read it."""
        return len(self.context) > self.request.max_seq_len

    def slide(self) -> None:
        """Drops the first half of the context."""
        self.context = self.context[-max(1, self.request.max_seq_len // 2) :]

    def accept(self, token_id: int, logprob: float, likeliest: Likeliest | None = None) -> str:
        """Adds the token that was chosen and ends the text when it is the last; returns what may be shown."""
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        if likeliest is not None:
            self.likeliest.append(likeliest)
        if token_id in self.request.end_ids:
            return self.finish("stop")
        if self.matcher is not None:
            self.matcher.accept(token_id)
        self.context.append(token_id)
        shown = self._show(self._stop.push(self._decoder.push(token_id)))
        if self._stop.matched is not None:
            self.finish_reason = "stop"
        elif self.num_remaining == 0:
            shown += self.finish("length")
        return shown

    def finish(self, reason: FinishReason) -> str:
        """Ends the text; returns what was held back in case it became a character or a stop string."""
        shown = self._stop.push(self._decoder.finish())
        found = self._stop.matched is not None
        self.finish_reason = "stop" if found else reason
        return self._show(shown if found else shown + self._stop.finish())

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
        """What is written so far, but for what is held back."""
        return "".join(self._text)

    def _show(self, text: str) -> str:
        self._text.append(text)
        return text


class Request:
    """A prompt, how to continue it, and the texts that are written: `num_candidates` of them, or those of a beam.

    `seed` is the request's own, a function of the caller's seed and the prompt's `index`. `matcher` knows the grammar
    that the text has to follow. A token of `end_ids` ends a text. Requests with a smaller `priority` go first, those of
    equal priority in the order of their `number`. Only requests of one `tenant` share what the cache holds.
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
        number: int = 0,
        priority: int = 0,
        tenant: str = "",
        matcher: Matcher | None = None,
    ) -> None:
        self.index, self.prompt, self.config = index, prompt, config
        self.call_seed, self.seed = seed, derive_seed(seed, "request", index)
        self.max_seq_len, self.matcher = max_seq_len, matcher
        self.end_ids = end_ids.union(config.stop_token_ids)
        self.order = (priority, number)
        # Keys and values of a target depend on its source.
        self.salt = tenant if prompt.source_ids is None else f"{tenant}\0{prompt.source_ids}"
        self.num_candidates = 1 if config.num_beams > 1 else max(config.best_of or 1, config.num_completions)
        self._tokenizer = tokenizer
        self._continues = not set(tokenizer.special_tokens.values()).issuperset(prompt.token_ids)
        self.candidates = [Candidate(self, 0)]
        self.beam: Beam | None = None
        self.branches: list[Branch] = []
        if config.num_beams > 1:
            first = self.candidates[0]
            self.beam = Beam(
                num_beams=config.num_beams,
                max_tokens=first.num_remaining,
                end_ids=self.end_ids,
                length_penalty=config.length_penalty,
            )
            self.branches = [Branch(first.context, self.salt)]

    @property
    def writing(self) -> list[Candidate]:
        """The texts that have not ended."""
        return [candidate for candidate in self.candidates if candidate.finish_reason is None]

    @property
    def readers(self) -> Sequence[Reader]:
        """What the network reads for this request."""
        return self.writing if self.beam is None else self.branches

    @property
    def width(self) -> int:
        """The most texts that the network reads at a time."""
        return max(self.num_candidates, self.config.num_beams)

    @property
    def source_ids(self) -> list[int] | None:
        """What an encoder reads for it."""
        return self.prompt.source_ids

    @property
    def longest(self) -> int:
        """The most tokens that one of its texts can have in the context."""
        return min(len(self.candidates[0].context) + self.config.max_new_tokens, self.max_seq_len)

    def fork(self) -> list[Candidate]:
        """Makes all its other candidates, which have the first one's prompt."""
        twins = [Candidate(self, index) for index in range(1, self.num_candidates)]
        self.candidates += twins
        return twins

    def decoder(self) -> StreamDecoder:
        """A decoder of what follows the prompt."""
        return StreamDecoder(self._tokenizer, continues=self._continues)

    def chosen(self) -> list[Candidate]:
        """The texts that are wanted; of more than these, the ones whose tokens are likeliest on average."""
        if len(self.candidates) <= self.config.num_completions:
            return self.candidates
        likeliest = sorted(self.candidates, key=lambda c: -sum(c.logprobs) / max(1, len(c.logprobs)))
        return likeliest[: self.config.num_completions]

    def completions(self) -> list[Completion]:
        """The results."""
        return [candidate.completion() for candidate in self.chosen()]
