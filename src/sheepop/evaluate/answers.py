"""Answers that a model writes to prompts, in its chat template if it has one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sheepop.core.errors import TokenizerError
from sheepop.generate import GenerationConfig, Generator
from sheepop.tokenizer import ChatTemplate, Tokenizer

Message = Mapping[str, str]
_BATCH = 32  # prompts between two calls of on_done


def answers_of(
    generator: Generator,
    prompts: Sequence[str | Sequence[Message]],
    config: GenerationConfig,
    variables: Mapping[str, Any] | None = None,
    *,
    on_done: Callable[[int], None] | None = None,
) -> list[str]:
    """The answers to prompts, each a text or a conversation; a model without a chat template continues texts.

    The template sees `variables`. `on_done` gets the number of further answers that are finished. Raises
    `TokenizerError` for a conversation, and for variables, if the model has no chat template.
    """
    requests: list[str | list[int]] = []
    try:
        template = ChatTemplate.of(generator.tokenizer, variables=variables)
    except TokenizerError:
        if variables or any(not isinstance(prompt, str) for prompt in prompts):
            raise
        requests = [str(prompt) for prompt in prompts]
    else:
        with template:
            for prompt in prompts:
                messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
                requests.append(chat_prompt(generator.tokenizer, template, messages))
    found: list[str] = []
    for begin in range(0, len(requests), _BATCH):
        completions = generator.generate(requests[begin : begin + _BATCH], config)
        found += [completion.text for completion in completions]
        if on_done is not None:
            on_done(len(completions))
    return found


def chat_prompt(tokenizer: Tokenizer, template: ChatTemplate, messages: Sequence[Message]) -> list[int]:
    """The token ids of a conversation up to where the model's next answer begins."""
    return template.encode(tokenizer, messages, add_generation_prompt=True)
