"""Tokenises examples and marks the tokens that the model learns to write."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.text import Text

from sheepop.core.console import Console
from sheepop.core.facts import counted, visible
from sheepop.posttrain.rows import LEARNT_KEYS, Judged, Prompt, Row, RowError, Supervised, Turns, is_learnt
from sheepop.posttrain.turns import AnswerFinder, Findings
from sheepop.tokenizer import ChatTemplate, Tokenizer
from sheepop.tokenizer.chat import as_template_reads
from sheepop.tokenizer.messages import Message, message_text
from sheepop.tokenizer.spelled import SpelledTokens

# Texts to put before another, so that a tokenizer adds its leading space there; the first that shares no token is used.
_ANCHORS = (".", "\n", "0", "(")
Encode = Callable[[str], list[int]]
_LEARNT, _GIVEN = ("bold green", "bold green underline"), ("dim", "dim underline")


@dataclass(frozen=True)
class Example:
    """The token ids of an example, and for each whether it is learnt."""

    ids: list[int]
    supervised: list[bool]

    def __len__(self) -> int:
        return len(self.ids)

    def cut(self, length: int) -> Example:
        """The first `length` tokens."""
        return Example(self.ids[:length], self.supervised[:length])


@dataclass(frozen=True)
class Group:
    """An example, or the chosen and the rejected one of a pair.

    `value` is the margin of a pair, and 1 or -1 for a desirable or undesirable answer. `fields` are the other keys of a
    prompt's line; those of a conversation have its ``messages`` and ``tools``, too.
    """

    examples: tuple[Example, ...]
    value: float = 0.0
    fields: Mapping[str, Any] | None = None

    def cut(self, length: int) -> Group:
        """The first `length` tokens of each example."""
        return replace(self, examples=tuple(example.cut(length) for example in self.examples))


class ExampleEncoder:
    """Turns rows into examples with a model's tokenizer and chat template.

    `end_ids` are tokens that end the model's texts, in addition to the tokenizer's own. `AnswerFinder` says which
    tokens of a conversation are learnt.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, end_ids: Collection[int] = ()) -> None:
        self.tokenizer = tokenizer
        self._end_ids = tuple(end_ids)
        special = {text: number for text, number in tokenizer.special_tokens.items() if text}
        own = {*end_ids, tokenizer.special_id("eos")}
        self._finder = AnswerFinder(template, special, [text for text, number in special.items() if number in own])
        alone = tokenizer.decode_bytes(tokenizer.encode("a"), continues=True)
        self._adds_space = tokenizer.leading_spaces > 0 or alone.startswith(b" ")

    @property
    def findings(self) -> Findings:
        """What was found out about the template so far."""
        return self._finder.findings

    @property
    def end_ids(self) -> list[int]:
        """The tokens that end the texts of a model that has learnt the answers so far, without the tokenizer's own."""
        special, own = self.tokenizer.special_tokens, self.tokenizer.special_id("eos")
        learnt = [special[text] for text in self.findings.ends if special[text] != own]
        return list(dict.fromkeys([*self._end_ids, *learnt]))

    def tell(self, console: Console) -> None:
        """Says what a person should know about the answers so far: how they end and begin, and how they are stored."""
        found = self.findings
        names = {number: text for text, number in self.tokenizer.special_tokens.items()}
        if joining := [names[number] for number in self.end_ids[len(self._end_ids) :]]:
            console.info(f"Answers end with {' or '.join(joining)}, which joins the tokens that end the model's texts.")
        if found.apart:
            console.info(
                f"The chat template renders earlier turns differently once a conversation continues, so "
                f"{counted(found.apart, 'answer')} became examples of their own, as in generation."
            )
        if found.endless:
            console.warn(
                f"{counted(found.endless, 'answer')} end without a special token, because the chat template writes "
                "none there, so the model does not learn to stop. Give another template with tuning.chat_template."
            )
        for end, count in found.unread.items():
            console.warn(
                f"A prompt in generation ends with {end!r}, but {counted(count, 'answer')} here do not follow that. "
                "Give them the reasoning that belongs there, or set tuning.chat_template_kwargs here and in generation."
            )

    def __call__(self, row: Row) -> tuple[Group, ...]:
        """Returns the examples of a row; raises `RowError` for a row that cannot be learnt."""
        if isinstance(row, Supervised):
            return tuple(Group((example,)) for example in self.supervised(row))
        if isinstance(row, Prompt):
            said = {} if isinstance(row.prompt, str) else {"messages": list(map(_seen, row.prompt)), "tools": row.tools}
            return (Group((self.prompt(row.prompt, row.tools),), fields={**row.fields, **said}),)
        if isinstance(row, Judged):
            answer = self.answer(row.prompt, row.answer, row.tools)
            return (Group((answer,), 1.0 if row.is_desirable else -1.0),)
        chosen, rejected = (self.answer(row.prompt, answer, row.tools) for answer in (row.chosen, row.rejected))
        if chosen.ids == rejected.ids:
            raise RowError("rejected: has the same tokens as chosen")
        return (Group((chosen, rejected), 0.0 if row.margin is None else row.margin),)

    def answer(self, prompt: Turns, answer: Turns, tools: tuple[Mapping[str, Any], ...] = ()) -> Example:
        """A prompt with an answer to compare; without the text that the template adds after the answer."""
        if isinstance(prompt, str) and isinstance(answer, str):
            row = Supervised("", prompt, answer)
        elif isinstance(answer, str):
            return self.answer(prompt, ({"role": "assistant", "content": answer},), tools)
        else:
            row = Supervised("", "", (*prompt, *answer), tools, learnt_from=len(prompt))
        examples = self.supervised(row)
        if len(examples) > 1:
            raise RowError(
                "the chat template renders earlier turns differently, so an answer of several turns is not one text. "
                "Compare answers of one turn"
            )
        return examples[0].cut(len(examples[0]) - examples[0].supervised[::-1].index(True))

    def prompt(self, prompt: Turns, tools: Sequence[Mapping[str, Any]] = ()) -> Example:
        """A prompt as generation sees it; none of its tokens are learnt."""
        if isinstance(prompt, str):
            ids = [*self.tokenizer.prefix_ids, *self.tokenizer.encode(prompt)]
        else:
            spelled = SpelledTokens(self.tokenizer, [prompt, tools])
            messages, functions = spelled.hidden([list(map(_seen, prompt)), list(tools)])
            ids = spelled.encode(self._finder.prompt(messages, functions))
        return Example(ids, [False] * len(ids))

    def supervised(self, row: Supervised) -> list[Example]:
        """The examples of a row whose answers are learnt; raises `RowError` if no token is learnt."""
        if isinstance(row.answer, str):
            examples = [self._plain(row.prompt, row.answer)]
        else:
            examples = self.conversation(row.answer, row.tools, row.learnt_from)
        # No token comes before the first one, so it cannot be predicted.
        examples = [Example(example.ids, [False, *example.supervised[1:]]) for example in examples]
        if not all(any(example.supervised) for example in examples):
            raise RowError("has no token to learn")
        return examples

    def conversation(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), learnt_from: int = 0
    ) -> list[Example]:
        """A conversation in which the assistant's messages from `learnt_from` on are learnt.

        Messages with ``weight`` 0 or ``train`` false are not learnt. Special tokens that a text spells stay text.
        """
        learnt = [
            number
            for number, message in enumerate(messages)
            if message["role"] == "assistant" and number >= learnt_from and is_learnt(message)
        ]
        if not learnt:
            raise RowError("has no answer to learn")
        spelled = SpelledTokens(self.tokenizer, [messages, tools])
        seen, functions = spelled.hidden([list(map(_seen, messages)), list(tools)])
        found = self._finder.texts(seen, learnt, functions, spelled.encode)
        return [self._segments(each.text, each.written, spelled.encode) for each in found]

    def _plain(self, prompt: str, answer: str) -> Example:
        """Plain text as generation sees it: the prompt, then the learnt continuation and the end token."""
        text = self._segments(prompt + answer, [(len(prompt), len(prompt) + len(answer))], self.tokenizer.encode)
        before = [*self.tokenizer.prefix_ids]
        return Example([*before, *text.ids, self.tokenizer.eos_id], [False] * len(before) + [*text.supervised, True])

    def _segments(self, text: str, spans: Sequence[tuple[int, int]], encode: Encode) -> Example:
        """Tokenises a text piece by piece, so that the text before a learnt span has the same tokens as alone."""
        ids: list[int] = []
        supervised: list[bool] = []
        place = 0
        for begin, end in (*spans, (len(text), len(text))):
            for part, learnt in ((text[place:begin], False), (text[begin:end], True)):
                found = self._encode(part, encode, continues=bool(ids)) if part else []
                ids += found
                supervised += [learnt] * len(found)
            place = end
        return Example(ids, supervised)

    def _encode(self, text: str, encode: Encode, *, continues: bool) -> list[int]:
        """Tokenises a text that begins a row, or one that continues it.

        A tokenizer that adds a leading space gets a continuation with an anchor before it, whose tokens are removed.
        """
        if continues and self._adds_space:
            for anchor in _ANCHORS:
                before = self.tokenizer.encode(anchor)
                found = encode(anchor + text)
                if found[: len(before)] == before:
                    return found[len(before) :]
        return encode(text)


def _seen(message: Message) -> dict[str, Any]:
    """A message as templates read it, its content as one text, without what says whether it is learnt."""
    seen = {key: value for key, value in as_template_reads(message).items() if key not in LEARNT_KEYS}
    return {**seen, "content": message_text(message)} if isinstance(seen.get("content"), list) else seen


def preview(example: Example, tokenizer: Tokenizer) -> Text:
    """The tokens of an example as coloured text: learnt ones green, every second one underlined."""
    text = Text()
    for number, token in enumerate(preview_tokens(example, tokenizer)):
        text.append(token["text"], style=(_LEARNT if token["supervised"] else _GIVEN)[number % 2])
    return text


def plain_preview(example: Example, tokenizer: Tokenizer) -> str:
    """The tokens of an example as plain text, with learnt ones between ``[[`` and ``]]``."""
    parts, learnt = [], False
    for token in preview_tokens(example, tokenizer):
        if token["supervised"] != learnt:
            parts.append("[[" if token["supervised"] else "]]")
            learnt = token["supervised"]
        parts.append(token["text"])
    return "".join(parts) + ("]]" if learnt else "")


def preview_tokens(example: Example, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The id, the text and `supervised` of each token; a character of several tokens is given to the last of them."""
    names = {token_id: name for name, token_id in tokenizer.special_tokens.items()}
    found: list[dict[str, Any]] = []
    held: list[int] = []
    for token_id, supervised in zip(example.ids, example.supervised, strict=True):
        if token_id in names:
            text, held = names[token_id], []
        else:
            held.append(token_id)
            try:
                text, held = b"".join(map(tokenizer.token_bytes, held)).decode("utf-8"), []
            except UnicodeDecodeError:
                text = ""
        found.append({"id": token_id, "text": visible(text), "supervised": supervised})
    return found
