"""Constrained output: a JSON schema, a regular expression, a choice of texts, or a grammar in Lark's syntax.

llguidance computes which tokens can come next, from the bytes of each token. Every grammar is first compiled in a
process with limits on time and memory, so that one that explodes fails alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from sheepop.core.bounded import BoundedProcess, BoundedProcessError, MemoryLimitError, TimeLimitError
from sheepop.core.errors import UsageError
from sheepop.generate.config import GenerationConfig
from sheepop.tokenizer import Tokenizer

_CHILD = "sheepop.generate.grammar_child"
_SECONDS, _MEMORY_BYTES = 5.0, 512 * 2**20
_LONGEST = 1_000_000
_DEEPEST = 200
# JSON may be separated by one space, or by a newline and a bounded indent: without a bound, a small model may write
# whitespace to the end of its text.
_JSON = {"whitespace_pattern": r"\n {0,40}| "}


class Grammars:
    """Compiles the grammars of requests, for a tokenizer and a model that never writes `forbidden` tokens (V,).

    A complete text can only end, with one of `end_ids`. Raises `UsageError` if there are none.
    """

    def __init__(self, tokenizer: Tokenizer, forbidden: Tensor, end_ids: Sequence[int]) -> None:
        self._tokenizer, self._writable, self._end_ids = tokenizer, ~forbidden.cpu(), sorted(end_ids)
        if not end_ids:
            raise UsageError("Constrained output needs a token that ends a text, but this tokenizer has none.")
        self._process = BoundedProcess(_CHILD, memory_bytes=_MEMORY_BYTES, seconds=_SECONDS)
        # Linux ends the process when the thread that started it ends, so a thread of this object calls it.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")

    def matcher(self, config: GenerationConfig) -> Matcher:
        """Returns a matcher for the text of a request whose settings have a grammar.

        Raises `UsageError` for an invalid grammar, or one that takes too much time or memory.
        """
        name, grammar = self._grammar(config)
        if len(grammar) > _LONGEST:
            raise UsageError(f"{name} has {len(grammar):,} characters; at most {_LONGEST:,} are accepted.")
        try:
            (wrong,) = self._thread.submit(lambda: tuple(self._process.request(grammar))).result()
        except TimeLimitError:
            raise UsageError(f"{name} takes longer than {_SECONDS:g} s to compile. Simplify it.") from None
        except MemoryLimitError:
            raise UsageError(f"{name} takes more than {_MEMORY_BYTES:,} bytes to compile. Simplify it.") from None
        except BoundedProcessError as error:
            raise UsageError(f"{name} cannot be compiled: {error}") from None
        if wrong:
            raise UsageError(f"{name} is not valid: {wrong.strip()}")
        limits = self._library.LLParserLimits(verbose_errors=False)  # clients must not see the details
        matcher = self._library.LLMatcher(self._vocabulary, grammar, log_level=0, limits=limits)
        return Matcher(matcher, self._writable, self._end_ids)

    def close(self) -> None:
        """Ends the process that compiles grammars."""
        self._thread.submit(self._process.close)
        self._thread.shutdown()

    def _grammar(self, config: GenerationConfig) -> tuple[str, str]:
        """The name of the setting with the grammar, and the grammar in llguidance's syntax."""
        if config.json_schema is not None:
            if _depth(config.json_schema) > _DEEPEST:
                raise UsageError(f"json_schema is nested deeper than {_DEEPEST} levels. Simplify it.")
            schema = json.dumps(config.json_schema)
            try:
                return "json_schema", self._library.LLMatcher.grammar_from_json_schema(schema, defaults=_JSON)
            except ValueError as error:  # the library reads fewer levels
                raise UsageError(f"json_schema is not valid: {error}.") from None
        if config.regex is not None:
            return "regex", self._library.LLMatcher.grammar_from_regex(config.regex)
        if config.choice:
            return "choice", "start: " + " | ".join(map(json.dumps, config.choice))
        return "grammar", config.grammar or ""

    @cached_property
    def _library(self) -> Any:
        try:
            import llguidance
        except ImportError as error:
            raise UsageError(f'Constrained output needs llguidance: pip install "sheepop[serve]" ({error})') from None
        return llguidance

    @cached_property
    def _vocabulary(self) -> Any:
        """The tokenizer in llguidance's form."""
        return self._library.LLTokenizer(
            self._library.TokenizerWrapper(_Vocabulary(self._tokenizer, self._end_ids)),
            n_vocab=max(len(self._writable), self._tokenizer.vocab_size),
            eos_token=list(self._end_ids),
        )


class Matcher:
    """The state of a grammar after a text."""

    def __init__(self, matcher: Any, writable: Tensor, end_ids: Sequence[int]) -> None:
        self._matcher, self._writable, self._end_ids = matcher, writable, list(end_ids)

    def allowed(self) -> Tensor:
        """A mask (V,) of the tokens that can come next; only tokens that end a text if the grammar is complete.

        Raises `UsageError` if the grammar proves too complex, or requires text that no token can write.
        """
        bits = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise UsageError(f"The grammar cannot be followed any further: {self._matcher.get_error()}")
        words = torch.frombuffer(bytearray(bits), dtype=torch.uint8)
        of_tokens = (words[:, None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten()
        allowed = of_tokens[: len(self._writable)].bool() & self._writable
        if not allowed.any():
            if not (self._matcher.is_accepting() or self._matcher.is_stopped()):
                raise UsageError("The grammar requires text that this model's tokenizer cannot write.")
            allowed[self._end_ids] = True
        return allowed

    def accept(self, token_id: int) -> None:
        """Advances the grammar by a token, which must be allowed."""
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token_id)

    def fork(self) -> Matcher:
        """Returns a second matcher in the same state."""
        return Matcher(self._matcher.deep_copy(), self._writable, self._end_ids)

    def allowed_after(self, guesses: Sequence[int]) -> list[Tensor]:
        """The masks (V,) after the text, and after each guess up to the first that is not allowed."""
        found = [self.allowed()]
        taken = 0
        for guess in guesses:
            if not found[-1][guess] or self._matcher.is_stopped() or not self._matcher.consume_token(guess):
                break
            taken += 1
            found.append(self.allowed())
        self._matcher.rollback(taken)
        return found


class _Vocabulary:
    """A tokenizer with the attributes that llguidance needs."""

    def __init__(self, tokenizer: Tokenizer, end_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id, self.bos_token_id = end_ids[0], tokenizer.special_id("bos")
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(tokenizer.special_tokens.values())

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)


def _depth(value: Any) -> int:
    """The nesting depth of lists and objects, computed without recursion."""
    depth, level = 0, [value]
    while level:
        depth += 1
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return depth
