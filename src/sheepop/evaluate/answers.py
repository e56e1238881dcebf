"""What a model writes for prompts: as an answer in its chat template, or as the text that goes on behind them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from sheepop.core.errors import TokenizerError
from sheepop.generate import GenerationConfig, Generator
from sheepop.tokenizer import ChatTemplate

Message = Mapping[str, str]
_TOGETHER = 32


def answers_of(
    generator: Generator,
    prompts: Sequence[str | Sequence[Message]],
    config: GenerationConfig,
    *,
    on_done: Callable[[int], None] | None = None,
) -> list[str]:
    """The answers to prompts, texts or conversations; a model without a chat template continues texts.

    `on_done` hears how many more are written. Raises `TokenizerError` for a conversation that the model has no template
    for.
    """
    tokenizer, found = generator.tokenizer, []
    try:
        template = ChatTemplate.of(tokenizer)
    except TokenizerError:
        if any(not isinstance(prompt, str) for prompt in prompts):
            raise
        template = None
    asked: list[str | list[int]] = []
    if template is None:
        asked = [str(prompt) for prompt in prompts]
    else:
        with template:
            for prompt in prompts:
                messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
                text = template.render(messages, add_generation_prompt=True)
                asked.append(tokenizer.encode(text, allow_special=True))
    for begin in range(0, len(asked), _TOGETHER):
        group = generator.generate(asked[begin : begin + _TOGETHER], config)
        found += [done.text for done in group]
        if on_done is not None:
            on_done(len(group))
    return found
