"""One prompt on its way to a completion: its tokens, its text, and whether it has ended. It holds no tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sheepop.core.random import derive_seed
from sheepop.generate.config import GenerationConfig
from sheepop.generate.prompt import Prompt
from sheepop.generate.stopping import StopMatcher
from sheepop.tokenizer import StreamDecoder, Tokenizer

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class Completion:
    """What was written for one prompt: its continuation, or for an encoder-decoder the target for it as the source.

    `text` ends before the stop string, if one was found. `token_ids` are all tokens that were chosen, with the
    ``<eos>`` or the pieces of the stop string that ended them; `logprobs` has the natural logarithm of each one's
    probability under the model itself, before temperature and the rest of the sampling settings.

    `finish_reason` is ``stop`` (``<eos>`` or a stop string), ``length`` (`max_new_tokens`, or the end of the
    context) or ``abort`` (the caller asked to stop). `num_dropped_prompt_tokens` counts the prompt's first tokens
    that the network did not read because the context could not hold them. `seed` repeats the text. `continues_prompt`
    says whether the text goes on where the prompt ends.
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


class Request:
    """State of one prompt. `context` are the tokens that the network reads to predict the next one; `seed` is the
    request's own, a function of the caller's seed and the prompt's index. A token of `end_ids` ends the text.

    When the context is full and `on_overflow` is ``slide`` or ``window``, it goes on with its last half, as if the text
    before had not been: the network never sees more than `max_seq_len` positions. A prompt that fills the context loses
    its first tokens, so that there is room for `max_new_tokens` but at most for half a context.
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
    ) -> None:
        self.index = index
        self.seed = derive_seed(seed, "request", index)
        self.prompt = prompt
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        prompt_ids = prompt.token_ids
        self.context = list(prompt_ids)
        if len(prompt_ids) >= max_seq_len:
            self.context = prompt_ids[-(max_seq_len - min(config.max_new_tokens, max_seq_len // 2)) :]
        self._num_dropped = len(prompt_ids) - len(self.context)
        self.config = config
        self._max_seq_len = max_seq_len
        self._call_seed = seed
        self._end_ids = end_ids
        special = set(tokenizer.special_tokens.values())
        self._decoder = StreamDecoder(tokenizer, continues=not special.issuperset(prompt_ids))
        self._stop = StopMatcher(config.stop)
        self._text: list[str] = []
        self._logprobs: list[float] = []

    @property
    def num_remaining(self) -> int:
        """Tokens that may still be written."""
        remaining = self.config.max_new_tokens - len(self.token_ids)
        # A target needs its beginning, whatever is said of a text that goes on.
        if self.config.on_overflow == "refuse" or self.prompt.source_ids is not None:
            remaining = min(remaining, self._max_seq_len - self.position)
        return remaining

    @property
    def position(self) -> int:
        """Index of the next token in prompt and text together."""
        return len(self.prompt.token_ids) + len(self.token_ids)

    @property
    def context_overflows(self) -> bool:
        """Whether the context has to slide before the network can read it."""
        return len(self.context) > self._max_seq_len

    def slide(self) -> None:
        """Drops the first half of the context."""
        self.context = self.context[-max(1, self._max_seq_len // 2) :]

    def accept(self, token_id: int, logprob: float) -> str:
        """Adds the token that was chosen and ends the request when it is the last; returns the text to show."""
        self.token_ids.append(token_id)
        self._logprobs.append(logprob)
        if token_id in self._end_ids:
            return self.finish("stop")
        self.context.append(token_id)
        shown = self._show(self._stop.push(self._decoder.push(token_id)))
        if self._stop.matched is not None:
            self.finish_reason = "stop"
        elif self.num_remaining == 0:
            shown += self.finish("length")
        return shown

    def finish(self, reason: FinishReason) -> str:
        """Ends the request; returns the text that was held back in case it became a character or a stop string."""
        shown = self._stop.push(self._decoder.finish())
        found = self._stop.matched is not None
        self.finish_reason = "stop" if found else reason
        return self._show(shown if found else shown + self._stop.finish())

    def completion(self) -> Completion:
        """The result; the request must have ended."""
        assert self.finish_reason is not None
        return Completion(
            text="".join(self._text),
            token_ids=self.token_ids,
            finish_reason=self.finish_reason,
            logprobs=self._logprobs,
            prompt=self.prompt.text,
            num_prompt_tokens=self.prompt.num_tokens,
            num_dropped_prompt_tokens=self._num_dropped,
            seed=self._call_seed,
            continues_prompt=self.prompt.source_ids is None,
        )

    def _show(self, text: str) -> str:
        self._text.append(text)
        return text
