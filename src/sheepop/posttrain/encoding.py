"""Tokenises examples and marks the tokens that the model learns to write."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from sheepop.core.errors import SheepOpError, TokenizerError
from sheepop.core.facts import visible
from sheepop.posttrain.rows import Judged, Prompt, Row, RowError, Supervised, Turns
from sheepop.tokenizer import ChatTemplate, Tokenizer, chat_templates
from sheepop.tokenizer.chat import Rendered
from sheepop.tokenizer.messages import Message, message_text

# Texts to put before another, so that a tokenizer adds its leading space there; the first that shares no token is used.
_ANCHORS = (".", "\n", "0", "(")
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
    """The examples of one row: one, or the chosen and the rejected one.

    `value` is the margin of a pair, and 1 or -1 for a desirable or undesirable answer. `fields` are the other keys of a
    prompt's line.
    """

    examples: tuple[Example, ...]
    value: float = 0.0
    fields: Mapping[str, Any] | None = None


def default_template(tokenizer: Tokenizer) -> str:
    """Returns a chat template for a model without one: roles in plain words, and the model's end token after each turn.

    It uses only tokens that the model has. Raises `TokenizerError` if there is no end token.
    """
    end = next(text for text, token_id in tokenizer.special_tokens.items() if token_id == tokenizer.eos_id)
    names = {token_id: text for text, token_id in tokenizer.special_tokens.items()}
    begin = "".join(names.get(token_id, "") for token_id in tokenizer.prefix_ids)
    return (
        "{%- if tools %}{{ raise_exception('this template has no place for tools') }}{% endif %}"
        "{{- " + repr(begin) + " }}"
        "{%- for message in messages %}"
        "{%- if message['role'] == 'tool' or message['tool_calls'] %}"
        "{{ raise_exception('this template has no place for tools') }}{% endif %}"
        "{{- message['role'] | capitalize + ':\\n' }}"
        "{%- if message['role'] == 'assistant' %}"
        "{% generation %}{{- message['content'] + " + repr(end) + " }}{% endgeneration %}"
        "{%- else %}{{- message['content'] + " + repr(end) + " }}{% endif %}"
        "{{- '\\n' }}{% endfor %}"
        "{%- if add_generation_prompt %}{{- 'Assistant:\\n' }}{% endif %}"
    )


def template_of(tokenizer: Tokenizer) -> ChatTemplate:
    """Opens the chat template of a tokenizer, or the default one if it has none; the caller closes it."""
    if chat_templates(tokenizer):
        return ChatTemplate.of(tokenizer)
    return ChatTemplate(default_template(tokenizer))


class ExampleEncoder:
    """Turns rows into examples with a model's tokenizer and chat template.

    The template's ``{% generation %}`` blocks mark the tokens to learn. For a template without them, the encoder
    renders the conversation up to each answer with and without it, and marks the difference.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self.tokenizer, self._template = tokenizer, template
        self._specials = [text for text in tokenizer.special_tokens if text]
        alone = tokenizer.decode_bytes(tokenizer.encode("a"), continues=True)
        self._adds_space = tokenizer.leading_spaces > 0 or alone.startswith(b" ")

    def __call__(self, row: Row) -> Group:
        """Returns the examples of a row; raises `RowError` for a row that cannot be learnt."""
        if isinstance(row, Supervised):
            return Group((self.supervised(row),))
        if isinstance(row, Prompt):
            return Group((self.prompt(row.prompt, row.tools),), fields=row.fields)
        if isinstance(row, Judged):
            answer = self.answer(row.prompt, row.answer, row.tools)
            return Group((answer,), 1.0 if row.is_desirable else -1.0)
        chosen, rejected = (self.answer(row.prompt, answer, row.tools) for answer in (row.chosen, row.rejected))
        if chosen.ids == rejected.ids:
            raise RowError("rejected: has the same tokens as chosen")
        return Group((chosen, rejected), 0.0 if row.margin is None else row.margin)

    def answer(self, prompt: Turns, answer: Turns, tools: tuple[Mapping[str, Any], ...] = ()) -> Example:
        """A prompt with an answer to compare; without the text that the template adds after the answer."""
        if isinstance(prompt, str) and isinstance(answer, str):
            row = Supervised("", prompt, answer)
        elif isinstance(answer, str):
            return self.answer(prompt, ({"role": "assistant", "content": answer},), tools)
        else:
            row = Supervised("", "", (*prompt, *answer), tools, learnt_from=len(prompt))
        example = self.supervised(row)
        return example.cut(len(example) - example.supervised[::-1].index(True))

    def prompt(self, prompt: Turns, tools: Sequence[object] = ()) -> Example:
        """A prompt as generation sees it; none of its tokens are learnt."""
        if isinstance(prompt, str):
            ids = [*self.tokenizer.prefix_ids, *self.tokenizer.encode(prompt)]
        else:
            self._refuse_specials(prompt, tools)
            given = {"tools": list(tools)} if tools else {}
            try:
                text = self._template.render(prompt, add_generation_prompt=True, **given)  # type: ignore[arg-type]
            except SheepOpError as error:
                raise RowError(str(error)) from None
            ids = self.tokenizer.encode(text, allow_special=True)
        return Example(ids, [False] * len(ids))

    def supervised(self, row: Supervised) -> Example:
        """The example of a row whose answer is learnt; raises `RowError` if no token is learnt."""
        if isinstance(row.answer, str):
            example = self._plain(row.prompt, row.answer)
        else:
            example = self.conversation(row.answer, row.tools, row.learnt_from)
        # No token comes before the first one, so it cannot be predicted.
        example = Example(example.ids, [False, *example.supervised[1:]])
        if not any(example.supervised):
            raise RowError("has no token to learn")
        return example

    def conversation(self, messages: Sequence[Message], tools: Sequence[object] = (), learnt_from: int = 0) -> Example:
        """A conversation in which the assistant's messages from `learnt_from` on are learnt."""
        self._refuse_specials(messages, tools)
        try:
            rendered = self._marked(messages, tools)
        except SheepOpError as error:
            raise RowError(str(error)) from None
        answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        spans = list(rendered.written)
        learnt = [n for n in answers if n >= learnt_from and messages[n].get("weight", 1)]
        if len(spans) == len(answers):
            spans = [span for span, number in zip(spans, answers, strict=True) if number in learnt]
        elif learnt != answers:
            raise RowError(
                f"the chat template marks {len(spans)} parts for {len(answers)} messages of the assistant, so those to "
                "learn cannot be found"
            )
        _require_all(messages, learnt, "\0".join(rendered.text[begin:end] for begin, end in spans))
        return self._segments(rendered.text, spans, allow_special=True)

    def _marked(self, messages: Sequence[Message], tools: Sequence[object]) -> Rendered:
        given = {"tools": list(tools)} if tools else {}
        rendered = self._template.render_marked(messages, **given)  # type: ignore[arg-type]
        if self._template.marks_answers(with_tools=bool(tools)):
            return rendered
        spans = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._template.render(messages[:number], add_generation_prompt=True, **given)  # type: ignore[arg-type]
            after = self._template.render(messages[: number + 1], **given)  # type: ignore[arg-type]
            if not after.startswith(before) or not rendered.text.startswith(after.rstrip()):
                raise TokenizerError(
                    "The chat template renders earlier messages differently once a conversation continues, so the "
                    "assistant's text cannot be found. Mark it in the template with {% generation %} ... "
                    "{% endgeneration %}, and give the template with tuning.chat_template=FILE."
                )
            spans.append((len(before), len(after.rstrip())))
        return Rendered(rendered.text, tuple(spans))

    def _refuse_specials(self, messages: Sequence[Message], tools: Sequence[object]) -> None:
        """Raises `RowError` for the text of a special token in a message, which would end or begin a turn."""
        for where, value in (*((f"messages[{n}]", message) for n, message in enumerate(messages)), ("tools", tools)):
            for said in _texts(value):
                for special in self._specials:
                    if special in said:
                        raise RowError(f"{where}: contains the special token {special!r}")

    def _plain(self, prompt: str, answer: str) -> Example:
        """Plain text as generation sees it: the prompt, then the learnt continuation and the end token."""
        text = self._segments(prompt + answer, [(len(prompt), len(prompt) + len(answer))], allow_special=False)
        before = [*self.tokenizer.prefix_ids]
        return Example([*before, *text.ids, self.tokenizer.eos_id], [False] * len(before) + [*text.supervised, True])

    def _segments(self, text: str, spans: Sequence[tuple[int, int]], *, allow_special: bool) -> Example:
        """Tokenises a text piece by piece, so that the text before a learnt span has the same tokens as alone."""
        ids: list[int] = []
        supervised: list[bool] = []
        place = 0
        for begin, end in (*spans, (len(text), len(text))):
            for part, learnt in ((text[place:begin], False), (text[begin:end], True)):
                found = self._encode(part, allow_special, continues=bool(ids)) if part else []
                ids += found
                supervised += [learnt] * len(found)
            place = end
        return Example(ids, supervised)

    def _encode(self, text: str, allow_special: bool, *, continues: bool) -> list[int]:
        """Tokenises a text that begins a row, or one that continues it.

        A tokenizer that adds a leading space gets a continuation with an anchor before it, whose tokens are removed.
        """
        if continues and self._adds_space:
            for anchor in _ANCHORS:
                before = self.tokenizer.encode(anchor)
                found = self.tokenizer.encode(anchor + text, allow_special=allow_special)
                if found[: len(before)] == before:
                    return found[len(before) :]
        return self.tokenizer.encode(text, allow_special=allow_special)


def _require_all(messages: Sequence[Message], learnt: Sequence[int], marked: str) -> None:
    """Raises `RowError` if the template drops an answer of the assistant or does not mark it."""
    place = 0
    for number in learnt:
        said = message_text(messages[number]).strip()
        found = marked.find(said, place)
        if found < 0:
            raise RowError(
                f"messages[{number}]: the chat template leaves out the assistant's text, or does not mark it as "
                "written by the model"
            )
        place = found + len(said)


def _texts(value: object) -> Iterator[str]:
    """Yields every text in a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield str(key)
            yield from _texts(inner)
    elif isinstance(value, Sequence):
        for inner in value:
            yield from _texts(inner)


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
