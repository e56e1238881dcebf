"""One prompt on its way to a completion: its tokens, its text, and whether it has ended. It holds no tensor."""

from __future__ import annotations

from sheepop.core.random import derive_seed
from sheepop.generate.completion import Completion, FinishReason
from sheepop.generate.config import GenerationConfig
from sheepop.generate.stopping import StopMatcher
from sheepop.tokenizer import StreamDecoder, Tokenizer


class Request:
    """State of one prompt. `context` are the tokens that the network reads to predict the next one; `seed` is the
    request's own, a function of the caller's seed and the prompt's index. A token of `end_ids` ends the text.

    Where an encoder reads the prompt, its tokens are `source_ids`, and `prompt_ids` are those that begin every target.

    When the context is full and `on_overflow` is ``window``, it goes on with its last half, as if the text before
    had not been: the network never sees more than `max_seq_len` positions. A prompt that fills the
    context loses its first tokens, so that there is room for `max_new_tokens` but at most for half a context.
    """

    def __init__(
        self,
        index: int,
        prompt: str,
        prompt_ids: list[int],
        config: GenerationConfig,
        tokenizer: Tokenizer,
        end_ids: frozenset[int],
        *,
        max_seq_len: int,
        seed: int,
        source_ids: list[int] | None = None,
    ) -> None:
        self.index = index
        self.seed = derive_seed(seed, "request", index)
        self.prompt_ids, self.source_ids = prompt_ids, source_ids
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.context = list(prompt_ids)
        if len(prompt_ids) >= max_seq_len:
            self.context = prompt_ids[-(max_seq_len - min(config.max_new_tokens, max_seq_len // 2)) :]
        self._num_dropped = len(prompt_ids) - len(self.context)
        self._prompt = prompt
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
        if self.config.on_overflow == "refuse":
            remaining = min(remaining, self._max_seq_len - self.position)
        return remaining

    @property
    def position(self) -> int:
        """Index of the next token in prompt and text together."""
        return len(self.prompt_ids) + len(self.token_ids)

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
            prompt=self._prompt,
            num_prompt_tokens=len(self.prompt_ids if self.source_ids is None else self.source_ids),
            num_dropped_prompt_tokens=self._num_dropped,
            seed=self._call_seed,
            continues_prompt=self.source_ids is None,
        )

    def _show(self, text: str) -> str:
        self._text.append(text)
        return text
