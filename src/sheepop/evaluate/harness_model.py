"""A SheepOp model behind lm-eval's interface, with the same results as lm-eval's backend for transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from sheepop.core.config import validate
from sheepop.core.errors import DataError, TokenizerError
from sheepop.core.random import derive_seed
from sheepop.evaluate.likelihood import LikelihoodScorer
from sheepop.generate import GenerationConfig, Generator
from sheepop.tokenizer import ChatTemplate
from sheepop.tokenizer.chat import chat_templates

_BATCH = 64  # texts that are generated between two reports of progress
_MAX_NEW_TOKENS = 256
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_SAMPLING = ("top_k", "top_p", "min_p", "typical_p", "repetition_penalty")


class Answers:
    """A model's answers to lm-eval's requests.

    The model reads at most `context` tokens at a time, by default as many as it can. Raises `UsageError` for a longer
    context and for an encoder-decoder, and `TokenizerError` if the tokenizer has neither a begin-of-text nor an
    end-of-text token.
    """

    def __init__(
        self,
        generator: Generator,
        template: ChatTemplate | None = None,
        seed: int = 0,
        on_progress: Callable[[int], None] | None = None,
        context: int | None = None,
    ) -> None:
        self._scorer = LikelihoodScorer(generator, context=context)
        self._generator, self._template, self._seed = generator, template, seed
        self._on_progress = on_progress or (lambda count: None)
        self._longest = self._scorer.longest
        self.tokenizer = generator.tokenizer
        bos, eos = self.tokenizer.special_id("bos"), self.tokenizer.special_id("eos")
        self.prefix_id = self.tokenizer.eos_id if bos is None else bos
        self._prefix = self.tokenizer.decode([self.prefix_id], skip_special=False)
        self._end = [] if eos is None else [self.tokenizer.decode([eos], skip_special=False)]
        self._shortened = 0
        self._notes: list[str] = []
        self.encode = lru_cache(16)(self._encode)  # the choices of a question share one context

    def score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[tuple[float, bool]]:
        """The log-probability of each continuation after its context, and whether greedy decoding would write it."""
        for context, continuation in pairs:
            if not context or not continuation:
                whole = self.tokenizer.decode([*context, *continuation])
                raise DataError(f"A task has an empty context or continuation, in or near {whole[-80:]!r}.")
        self._shortened += sum(len(before) + len(after) > self._longest + 1 for before, after in pairs)
        return [(found.total, found.is_greedy) for found in self._scorer.score(pairs, on_done=self._on_progress)]

    def roll(self, texts: Sequence[str]) -> list[float]:
        """The log-probability of each whole text, in lm-eval's windows of the context."""
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        windows = [
            (number, make_disjoint_window(window))
            for number, text in enumerate(texts)
            for window in get_rolling_token_windows(self.encode(text), self.prefix_id, self._longest, 1)
        ]
        totals = [0.0] * len(texts)
        for (number, _), (total, _) in zip(windows, self.score([window for _, window in windows]), strict=True):
            totals[number] += total
        return totals

    def write(self, requested: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        """A text for each prompt and its ``generation_kwargs``, up to the first of its stop strings."""
        requests = [self._request(prompt, settings) for prompt, settings in requested]
        written: list[str] = []
        for begin in range(0, len(requests), _BATCH):
            group = requests[begin : begin + _BATCH]
            seed = derive_seed(self._seed, "tasks", begin)
            completions = self._generator.generate(
                [prompt for prompt, _ in group], [config.replace(seed=seed) for _, config in group]
            )
            for completion, (_, config) in zip(completions, group, strict=True):
                text = self.tokenizer.decode(completion.token_ids)  # decoded without the prompt, as transformers does
                for stop in config.stop:
                    text = text.split(stop)[0]
                written.append(text)
            self._on_progress(len(group))
        return written

    def render(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool) -> str:
        """A conversation in the chat template; without `add_generation_prompt` it ends with the last content."""
        assert self._template is not None
        try:
            text = self._template.render(messages, add_generation_prompt=add_generation_prompt)
        except TokenizerError:
            others = [message for message in messages if message["role"] != "system"]
            if len(others) == len(messages):
                raise
            text = self._template.render(others, add_generation_prompt=add_generation_prompt)
            self._notes.append("The chat template has no system message, so the task's description was left out.")
        if add_generation_prompt:
            return text
        last = messages[-1]["content"]
        place = text.rfind(last.strip())
        if place < 0:
            raise DataError(f"The chat template changes the answer that a task begins, {last!r}. Leave out --chat.")
        whole = last.lstrip() if text.startswith(last.lstrip(), place) else last.strip()
        return text[: place + len(whole)]

    def take_notes(self, task: str) -> list[str]:
        """Notes for the report on the answers to `task`, which are those since the last call."""
        notes = list(dict.fromkeys(self._notes))
        if self._shortened:
            notes.append(
                f"{self._shortened:,} texts of {task} were longer than the context of {self._longest} tokens, "
                "so their first tokens were left out."
            )
        self._shortened, self._notes = 0, []
        return notes

    def _encode(self, text: str, add_special_tokens: bool | None = None) -> list[int]:
        """The ids of a text with the tokenizer's prefix; special tokens in the text are recognised."""
        ids = self.tokenizer.encode(text, allow_special=True)
        adds = not text.startswith(self._prefix) if add_special_tokens is None else add_special_tokens
        return [*self.tokenizer.prefix_ids, *ids] if adds else ids

    def _request(self, prompt: str, settings: Mapping[str, Any]) -> tuple[list[int], GenerationConfig]:
        config = generation_config(settings, self._end)
        room = self._longest - config.max_new_tokens
        if room < 1:
            raise DataError(
                f"A task lets the model write {config.max_new_tokens} tokens, but its context of {self._longest} must "
                "have room for the question too. Set a smaller max_gen_toks in the task file's generation_kwargs."
            )
        ids = self.encode(prompt) or [self.prefix_id]
        self._shortened += len(ids) > room
        return ids[-room:], config


def generation_config(requested: Mapping[str, Any], end: Sequence[str]) -> GenerationConfig:
    """Translates a task's ``generation_kwargs`` as lm-eval's backend for transformers does.

    `end` are further stop strings. Raises `DataError` for an unknown key, and `ConfigError` for a value that is out of
    range.
    """
    given = dict(requested)
    until = given.pop("until", None) or []
    stops = dict.fromkeys([*([until] if isinstance(until, str) else until), *end])
    lengths = [int(value) for value in (given.pop(name, None) for name in _LENGTHS) if value is not None]
    temperature, draws = float(given.pop("temperature", 0.0)), given.pop("do_sample", None)
    if draws and temperature == 0:
        raise DataError("A task's generation_kwargs have do_sample without a temperature above 0. Set one of them.")
    if given.get("num_beams") == 1:
        del given["num_beams"]
    if unknown := sorted(given.keys() - set(_SAMPLING)):
        known = ", ".join(["until", "do_sample", "temperature", *_SAMPLING, *_LENGTHS])
        raise DataError(f"A task's generation_kwargs have {', '.join(unknown)}. SheepOp knows {known}.")
    # transformers samples from the 50 likeliest tokens by default; 0 turns that off.
    given["top_k"] = given.get("top_k", 50) or None
    return validate(
        GenerationConfig,
        {
            "top_p": 1.0,
            **given,
            "temperature": 0.0 if draws is False else temperature,
            "max_new_tokens": lengths[0] if lengths else _MAX_NEW_TOKENS,
            "stop": list(stops),
        },
    )


def language_model(answers: Answers) -> Any:
    """`answers` as an lm-eval model; lm-eval's base class splits texts into contexts and continuations."""
    from lm_eval.api.model import TemplateLM

    class SheepOp(TemplateLM):  # type: ignore[misc]
        eot_token_id = answers.tokenizer.eos_id
        prefix_token_id = answers.prefix_id
        tokenizer_name = answers.tokenizer.fingerprint()

        def chat_template(self, chat_template: bool | str = False) -> str | None:
            return chat_templates(answers.tokenizer).get("default") if chat_template else None

        def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
            return answers.render(chat_history, add_generation_prompt=add_generation_prompt)

        def tok_encode(self, string: str, add_special_tokens: bool | None = None) -> list[int]:
            return answers.encode(string, add_special_tokens)

        def _loglikelihood_tokens(self, requests: list[Any], **options: Any) -> list[tuple[float, bool]]:
            return answers.score([(context, continuation) for _, context, continuation in requests])

        def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
            return answers.roll([request.args[0] for request in requests])

        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
            return answers.write([request.args for request in requests])

    return SheepOp()
