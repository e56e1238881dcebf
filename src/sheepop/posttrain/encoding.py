"""Examples as tokens, and which of these a model learns to write."""

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

# What may stand before a text so that a tokenizer's own space goes there; the first that shares no token with it.
_ANCHORS = (".", "\n", "0", "(")
_LEARNT, _GIVEN = ("bold green", "bold green underline"), ("dim", "dim underline")


@dataclass(frozen=True)
class Example:
    """Token ids, and for each whether a model learns to write it."""

    ids: list[int]
    supervised: list[bool]

    def __len__(self) -> int:
        return len(self.ids)

    def cut(self, length: int) -> Example:
        """The first `length` tokens."""
        return Example(self.ids[:length], self.supervised[:length])

    @property
    def prompt_length(self) -> int:
        """How many tokens stand before the first that is learnt."""
        return self.supervised.index(True) if any(self.supervised) else len(self)

    def up_to_the_end(self) -> Example:
        """Without what stands behind the last token that is learnt."""
        return self.cut(len(self) - self.supervised[::-1].index(True))


@dataclass(frozen=True)
class Group:
    """What one row becomes: one example, or the chosen and the rejected one.

    `value` is the margin of a pair, and 1 or -1 for an answer that is wanted or not. `fields` is what else a prompt's
    line says.
    """

    examples: tuple[Example, ...]
    value: float = 0.0
    fields: Mapping[str, Any] | None = None


def default_template(tokenizer: Tokenizer) -> str:
    """A chat template for a model without one: roles in plain words, and the model's own end token behind each turn.

    It needs no token that the model does not have. Raises `TokenizerError` where there is no end token.
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
    """The chat template of a tokenizer, or the default one where it has none; to be closed."""
    if chat_templates(tokenizer):
        return ChatTemplate.of(tokenizer)
    return ChatTemplate(default_template(tokenizer))


class ExampleEncoder:
    """Turns rows into examples with a model's tokenizer and chat template.

    What a model writes is marked by the template's ``{% generation %}`` blocks. For a template without them it is found
    by rendering: what an assistant's message adds to the text that asks for it.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self.tokenizer, self._template = tokenizer, template
        self._specials = [text for text in tokenizer.special_tokens if text]
        alone = tokenizer.decode_bytes(tokenizer.encode("a"), continues=True)
        self._adds_space = tokenizer.leading_spaces > 0 or alone.startswith(b" ")

    def __call__(self, row: Row) -> Group:
        """The examples of a row; raises `RowError` for one that cannot be learnt as it is."""
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
        """A prompt with an answer to it that is judged; what a template puts behind the answer is nobody's merit."""
        if isinstance(prompt, str) and isinstance(answer, str):
            row = Supervised("", prompt, answer)
        elif isinstance(answer, str):
            return self.answer(prompt, ({"role": "assistant", "content": answer},), tools)
        else:
            row = Supervised("", "", (*prompt, *answer), tools, learnt_from=len(prompt))
        return self.supervised(row).up_to_the_end()

    def prompt(self, prompt: Turns, tools: Sequence[object] = ()) -> Example:
        """What stands before an answer, as generation sees it; nothing of it is learnt."""
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
        """The example of a row whose answer is learnt; raises `RowError` where that has no token."""
        if isinstance(row.answer, str):
            example = self._plain(row.prompt, row.answer)
        else:
            example = self.conversation(row.answer, row.tools, row.learnt_from)
        # Nothing stands before the first token, so it cannot be learnt.
        example = Example(example.ids, [False, *example.supervised[1:]])
        if not any(example.supervised):
            raise RowError("has no token to learn")
        return example

    def conversation(self, messages: Sequence[Message], tools: Sequence[object] = (), learnt_from: int = 0) -> Example:
        """A conversation, of which the assistant's messages from `learnt_from` on are learnt."""
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
                f"the chat template marks {len(spans)} parts for {len(answers)} messages of the assistant, so those "
                "to learn cannot be told from the others"
            )
        self._require_all(messages, learnt, rendered.text, spans)
        return self._cut_at(rendered.text, spans)

    def _marked(self, messages: Sequence[Message], tools: Sequence[object]) -> Rendered:
        given = {"tools": list(tools)} if tools else {}
        rendered = self._template.render_marked(messages, **given)  # type: ignore[arg-type]
        if self._template.marks_answers:
            return rendered
        spans = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._template.render(messages[:number], add_generation_prompt=True, **given)  # type: ignore[arg-type]
            after = self._template.render(messages[: number + 1], **given)  # type: ignore[arg-type]
            if not after.startswith(before) or not rendered.text.startswith(after.rstrip()):
                raise TokenizerError(
                    "The chat template writes a conversation otherwise once it goes on, so what the assistant wrote "
                    "cannot be found. Mark it in the template with {% generation %} ... {% endgeneration %}, and "
                    "give the template with tuning.chat_template=FILE."
                )
            spans.append((len(before), len(after.rstrip())))
        return Rendered(rendered.text, tuple(spans))

    def _require_all(
        self, messages: Sequence[Message], learnt: Sequence[int], text: str, spans: Sequence[tuple[int, int]]
    ) -> None:
        """Refuses a template that leaves out what the assistant said, or does not mark it."""
        marked = "\0".join(text[begin:end] for begin, end in spans)
        place = 0
        for number in learnt:
            said = message_text(messages[number]).strip()
            found = marked.find(said, place)
            if found < 0:
                raise RowError(
                    f"messages[{number}]: the chat template leaves out what the assistant says there, or does not mark "
                    "it as written by the model"
                )
            place = found + len(said)

    def _refuse_specials(self, messages: Sequence[Message], tools: Sequence[object]) -> None:
        """A special token in somebody's words would end a turn, or begin one, that is none."""
        for where, value in (*((f"messages[{n}]", message) for n, message in enumerate(messages)), ("tools", tools)):
            for said in _texts(value):
                for special in self._specials:
                    if special in said:
                        raise RowError(f"{where}: holds the special token {special!r}")

    def _plain(self, prompt: str, answer: str) -> Example:
        """Text as generation sees it: the prompt, then what continues it and ends."""
        text = self._segments(prompt + answer, [(len(prompt), len(prompt) + len(answer))], allow_special=False)
        before = [*self.tokenizer.prefix_ids]
        return Example([*before, *text.ids, self.tokenizer.eos_id], [False] * len(before) + [*text.supervised, True])

    def _cut_at(self, text: str, spans: Sequence[tuple[int, int]]) -> Example:
        return self._segments(text, spans, allow_special=True)

    def _segments(self, text: str, spans: Sequence[tuple[int, int]], *, allow_special: bool) -> Example:
        """Tokens of a text whose `spans` are learnt, so cut that what stands before one has the tokens it has alone."""
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
        """The tokens of a text, or of one that continues another.

        A tokenizer that puts a space of its own in front of a text gets something to put it in front of, whose tokens
        are taken away again.
        """
        if continues and self._adds_space:
            for anchor in _ANCHORS:
                before = self.tokenizer.encode(anchor)
                found = self.tokenizer.encode(anchor + text, allow_special=allow_special)
                if found[: len(before)] == before:
                    return found[len(before) :]
        return self.tokenizer.encode(text, allow_special=allow_special)


def _texts(value: object) -> Iterator[str]:
    """Every text in a value as in JSON, keys too."""
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
    """The tokens of an example one by one, those that are learnt in green; every other one is underlined."""
    text = Text()
    for number, token in enumerate(preview_tokens(example, tokenizer)):
        styles = _LEARNT if token["supervised"] else _GIVEN
        text.append(token["text"], style=styles[number % 2])
    return text


def plain_preview(example: Example, tokenizer: Tokenizer) -> str:
    """The same without colours: what is learnt stands between ``[[`` and ``]]``."""
    parts, learnt = [], False
    for token in preview_tokens(example, tokenizer):
        if token["supervised"] != learnt:
            parts.append("[[" if token["supervised"] else "]]")
            learnt = token["supervised"]
        parts.append(token["text"])
    return "".join(parts) + ("]]" if learnt else "")


def preview_tokens(example: Example, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """For each token its id, its text and whether it is learnt; a character of several tokens stands at the last."""
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
