"""Chat templates for models without one: ready ones by name, and a simple one that any tokenizer can express."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from sheepop.core.errors import TokenizerError
from sheepop.tokenizer.chat import ChatTemplate, chat_templates
from sheepop.tokenizer.interface import Tokenizer
from sheepop.tokenizer.settings import LARGEST_TEMPLATE, read_text


class Turns(NamedTuple):
    """A format of chats: each turn is a header with the role, a text, its end, and what stands between turns.

    `begin` stands before all turns, `role` is a Jinja expression of the variable ``role``, `model` the assistant's
    name, and `tokens` are the special tokens that it needs.
    """

    header: tuple[str, str]
    end: str
    between: str
    model: str = "assistant"
    role: str = "role"
    begin: str = ""
    tokens: tuple[str, ...] = ()
    has_system: bool = True

    def template(self) -> str:
        """The chat template, which marks the answers with their ends."""
        first, last = self.header
        merged = (
            "{%- set system = '' %}"
            if self.has_system
            else "{%- set system = '' %}{%- if messages[0]['role'] in ('system', 'developer') %}"
            "{%- set system = messages[0]['content'] + '\\n\\n' %}{%- set messages = messages[1:] %}{% endif %}"
        )
        said = f"message['content'] + {self.end!r}"
        return (
            "{%- if tools %}{{ raise_exception('this template has no place for tools') }}{% endif %}"
            f"{{{{- {self.begin!r} }}}}{merged}"
            "{%- for message in messages %}{%- set role = message['role'] %}"
            "{%- if role == 'tool' or message['tool_calls'] %}"
            "{{ raise_exception('this template has no place for tools') }}{% endif %}"
            f"{{{{- {first!r} + {self.role} + {last!r} + (system if loop.first else '') }}}}"
            f"{{%- if role == 'assistant' %}}{{% generation %}}{{{{- {said} }}}}{{% endgeneration %}}"
            f"{{%- else %}}{{{{- {said} }}}}{{% endif %}}"
            f"{{{{- {self.between!r} }}}}{{% endfor %}}"
            f"{{%- if add_generation_prompt %}}{{{{- {first + self.model + last!r} }}}}{{% endif %}}"
        )


READY = {
    "chatml": Turns(("<|im_start|>", "\n"), "<|im_end|>", "\n", tokens=("<|im_start|>", "<|im_end|>")),
    "gemma": Turns(
        ("<start_of_turn>", "\n"), "<end_of_turn>", "\n", model="model", begin="<bos>", has_system=False,
        role="('model' if role == 'assistant' else role)", tokens=("<bos>", "<start_of_turn>", "<end_of_turn>"),
    ),
    "llama3": Turns(
        ("<|start_header_id|>", "<|end_header_id|>\n\n"), "<|eot_id|>", "", begin="<|begin_of_text|>",
        tokens=("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    ),
}  # fmt: skip
"""Formats of chats by their names; a base model whose vocabulary has their tokens can learn them."""


def default_template(tokenizer: Tokenizer) -> str:
    """Returns a chat template for a model without one: roles in plain words, and the model's end token after each turn.

    It uses only tokens that the model has. Raises `TokenizerError` if there is no end token.
    """
    names = {token_id: text for text, token_id in tokenizer.special_tokens.items()}
    begin = "".join(names.get(token_id, "") for token_id in tokenizer.prefix_ids)
    end = names[tokenizer.eos_id]
    return Turns(("", ":\n"), end, "\n", model="Assistant", role="(role | capitalize)", begin=begin).template()


def template_of(tokenizer: Tokenizer, variables: Mapping[str, Any] | None = None) -> ChatTemplate:
    """Opens the chat template of a tokenizer, which reads `variables`; the caller closes it.

    A tokenizer without one has the default one. Raises `TokenizerError` for variables that nothing reads.
    """
    if chat_templates(tokenizer) or variables:
        return ChatTemplate.of(tokenizer, variables=variables)
    return ChatTemplate(default_template(tokenizer))


def fitting(tokenizer: Tokenizer) -> list[str]:
    """The names of the ready templates whose tokens a tokenizer has."""
    special = tokenizer.special_tokens
    return [name for name, ready in READY.items() if all(token in special for token in ready.tokens)]


def named_template(name: str, tokenizer: Tokenizer) -> str:
    """The ready template `name`, or the one in the file of that name; raises `TokenizerError` for missing tokens."""
    if name not in READY:
        return read_text(Path(name), LARGEST_TEMPLATE)
    missing = [token for token in READY[name].tokens if token not in tokenizer.special_tokens]
    if missing:
        known = fitting(tokenizer)
        raise TokenizerError(
            f"The chat template {name} needs the special token {missing[0]}, which the model does not have. "
            + (f"It has those of {', '.join(known)}." if known else "Leave it out, or give a file.")
        )
    return READY[name].template()


def ends_of_turns(name: str | None, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The token that ends a turn of the ready template `name`; nothing for another template, whose model knows it."""
    return (tokenizer.special_tokens[READY[name].end],) if name in READY else ()
