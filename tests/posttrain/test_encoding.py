"""Which tokens of an example are learnt: transformers says it for chats, generation for what stands before them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sheepop.jobs.task.shown import plain_preview, preview
from sheepop.posttrain.encoding import Example, ExampleEncoder
from sheepop.posttrain.rows import RowError, Supervised
from sheepop.tokenizer import ChatTemplate, Tokenizer, load_tokenizer
from sheepop.tokenizer.ready_templates import default_template

from .conftest import MARKED, TEXTS, UNMARKED, chat

ALGORITHMS = ("bpe", "unigram", "wordpiece")
LONG = chat("What is two plus five?", "seven.", "The sheep?", "jumps over the fence, Käse 🧀")["messages"]


@contextmanager
def encoding(tokenizer: Tokenizer, template: str) -> Iterator[ExampleEncoder]:
    with ChatTemplate(template, {"eos_token": "<eos>"}) as chat_template:
        yield ExampleEncoder(tokenizer, chat_template)


def learnt(example: Example, tokenizer: Tokenizer) -> list[str]:
    """The texts of the runs of tokens that are learnt."""
    runs: list[list[int]] = []
    for number, supervised in enumerate(example.supervised):
        if supervised and (number == 0 or not example.supervised[number - 1]):
            runs.append([])
        if supervised:
            runs[-1].append(example.ids[number])
    return [tokenizer.decode(run, skip_special=False, continues=True) for run in runs]


@pytest.mark.parametrize("template", [MARKED, UNMARKED], ids=["marked", "unmarked"])
def test_the_mask_of_a_chat_is_that_of_transformers(
    tokenizers: dict[str, Tokenizer], tmp_path: Path, template: str
) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = tokenizers["bpe"]
    tokenizer.save(tmp_path)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    theirs.chat_template = MARKED
    expected = theirs.apply_chat_template(LONG, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    with encoding(tokenizer, template) as encode:
        (found,) = encode.conversation(LONG)
    assert found.ids == expected["input_ids"]
    assert found.supervised == [bool(flag) for flag in expected["assistant_masks"]]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_answers_with_their_ends_are_learnt_and_nothing_else(tokenizers: dict[str, Tokenizer], algorithm: str) -> None:
    tokenizer = tokenizers[algorithm]
    with encoding(tokenizer, MARKED) as encode:
        (found,) = encode.conversation(LONG)
        (whole,) = encode.conversation(LONG, learnt_from=3)
    texts = [text.replace(" ", "") for text in learnt(found, tokenizer)]
    assert len(texts) == 2
    assert texts[0] == "seven.<|im_end|>"
    assert texts[1].startswith("jumpsoverthefence,") and texts[1].endswith("<|im_end|>")
    assert [text.replace(" ", "") for text in learnt(whole, tokenizer)] == texts[1:]
    assert whole.ids == found.ids


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_what_stands_before_an_answer_has_the_tokens_of_the_prompt_alone(
    tokenizers: dict[str, Tokenizer], algorithm: str
) -> None:
    tokenizer = tokenizers[algorithm]
    with encoding(tokenizer, MARKED) as encode, ChatTemplate(MARKED) as template:
        (found,) = encode.conversation(LONG[:2])
        prompt = tokenizer.encode(template.render(LONG[:1], add_generation_prompt=True), allow_special=True)
        text = template.render(LONG[:2])
    begin = found.supervised.index(True)
    assert found.ids[:begin] == prompt
    decoded = tokenizer.decode(found.ids, skip_special=False)
    assert decoded.replace(" ", "") == tokenizer.decode(
        tokenizer.encode(text, allow_special=True), skip_special=False
    ).replace(" ", "")


def test_plain_text_ends_with_the_end_token(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["bpe"]
    with encoding(tokenizer, MARKED) as encode:
        (found,) = encode.supervised(Supervised("line 1", "two plus", " five <eos>"))
    prompt, answer = tokenizer.encode("two plus"), tokenizer.encode(" five <eos>")
    assert found.ids == [*prompt, *answer, tokenizer.eos_id]
    assert found.supervised == [False] * len(prompt) + [True] * (len(answer) + 1)
    assert found.ids.count(tokenizer.eos_id) == 1  # what only looks like it is text


@pytest.mark.parametrize(
    ("template", "messages", "problem"),
    [
        (
            "{% generation %}{{ messages[-1].content }}{% endgeneration %}",  # the words of a dropped turn are in it
            chat("a", "yes", "b", "yes it is")["messages"],
            r"messages\[0\]\.content: .* leaves out",
        ),
        ("{{ messages[0].content }}", LONG, r"messages\[1\]\.content: .* leaves out"),
        ("{{ messages | length }}{{ messages[-1].content }}", LONG, r"messages\[0\]\.content: .* leaves out"),
        ("{{ raise_exception('no') }}", LONG, "does not accept this conversation"),
    ],
)
def test_a_conversation_that_would_be_learnt_wrong_is_refused(
    tokenizers: dict[str, Tokenizer], template: str, messages: Any, problem: str
) -> None:
    with encoding(tokenizers["bpe"], template) as encode, pytest.raises(RowError, match=problem):
        encode.supervised(Supervised("line 1", "", tuple(messages)))


@pytest.mark.parametrize(
    ("raised", "problem"),
    [
        ("{{ raise_exception('no tools') }}", r"does not accept this conversation \(no tools\)"),
        ("{{ tools.name.first }}", "(?i)chat template"),
    ],
)
def test_a_template_that_raises_on_tools_is_an_error_of_the_row(
    tokenizers: dict[str, Tokenizer], raised: str, problem: str
) -> None:
    messages = tuple(chat("a", "yes")["messages"])
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    with encoding(tokenizers["bpe"], "{% if tools %}" + raised + "{% endif %}" + MARKED) as encode:
        assert len(encode.supervised(Supervised("line 1", "", messages))) == 1
        with pytest.raises(RowError, match=problem):
            encode.supervised(Supervised("line 2", "", messages, (tool,)))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_prompt_that_ends_in_a_word_keeps_its_tokens(tokenizers: dict[str, Tokenizer], algorithm: str) -> None:
    """Where prompt and answer are one word in two parts, the whole text has other tokens than the prompt alone."""
    tokenizer = tokenizers[algorithm]
    with encoding(tokenizer, MARKED) as encode:
        (found,) = encode.supervised(Supervised("line 1", "The she", "ep jumps"))
    prompt = tokenizer.encode("The she")
    assert found.ids[: len(prompt)] == prompt
    assert found.supervised == [False] * len(prompt) + [True] * (len(found) - len(prompt))
    if algorithm != "wordpiece":  # which writes no continuation without its own mark
        assert tokenizer.decode(found.ids) == "The sheep jumps"


def test_a_tokenizer_that_begins_every_text_with_a_space_adds_none_in_the_middle(tmp_path: Path) -> None:
    tokenizers_library = pytest.importorskip("tokenizers")
    made = tokenizers_library.Tokenizer(tokenizers_library.models.BPE())
    made.pre_tokenizer = tokenizers_library.pre_tokenizers.ByteLevel(add_prefix_space=True)
    made.decoder = tokenizers_library.decoders.ByteLevel()
    alphabet = tokenizers_library.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers_library.trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["<eos>"]
    )
    made.train_from_iterator(TEXTS, trainer)
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    tokenizer = load_tokenizer(tmp_path)
    with encoding(tokenizer, MARKED) as encode:
        (found,) = encode.supervised(Supervised("line 1", "The she", "ep jumps"))
    assert tokenizer.decode(found.ids).strip() == "The sheep jumps"


def test_an_answer_of_weight_nought_is_not_learnt(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["bpe"]
    with encoding(tokenizer, MARKED) as encode:
        (found,) = encode.conversation([LONG[0], {**LONG[1], "weight": 0}, *LONG[2:]])
    assert learnt(found, tokenizer) == ["jumps over the fence, Käse 🧀<|im_end|>"]


def test_nothing_can_be_learnt_of_a_first_token(tokenizers: dict[str, Tokenizer]) -> None:
    with encoding(tokenizers["bpe"], MARKED) as encode:
        (found,) = encode.supervised(Supervised("line 1", "", "seven"))
    assert found.supervised == [False] + [True] * (len(found) - 1)


@dataclass
class WithBeginning:
    """A tokenizer whose makers begin every text with ``<bos>``."""

    inner: Tokenizer

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        return (self.inner.bos_id,)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def test_an_answer_behind_a_beginning_is_learnt_whole(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer: Any = WithBeginning(tokenizers["bpe"])
    with encoding(tokenizer, MARKED) as encode:
        (found,) = encode.supervised(Supervised("line 1", "", "seven"))
    assert found.ids == [tokenizer.bos_id, *tokenizer.encode("seven"), tokenizer.eos_id]
    assert found.supervised == [False] + [True] * (len(found) - 1)


def test_the_template_for_models_without_one_begins_as_their_texts_begin(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer: Any = WithBeginning(tokenizers["bpe"])
    with encoding(tokenizer, default_template(tokenizer)) as encode:
        (found,) = encode.conversation(LONG)
        with pytest.raises(RowError, match="this template has no place for tools"):
            encode.conversation(LONG, tools=[{"type": "function"}])
    assert found.ids[0] == tokenizer.bos_id and found.ids.count(tokenizer.bos_id) == 1


def test_the_template_for_models_without_one_needs_no_new_token(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["bpe"]
    with encoding(tokenizer, default_template(tokenizer)) as encode, ChatTemplate(default_template(tokenizer)) as chat_:
        (found,) = encode.conversation(LONG)
        asked = chat_.render(LONG[:1], add_generation_prompt=True)
    assert learnt(found, tokenizer) == ["seven.<eos>", "jumps over the fence, Käse 🧀<eos>"]
    assert asked == "User:\nWhat is two plus five?<eos>\nAssistant:\n"


def test_a_preview_marks_what_is_learnt(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["bpe"]
    with encoding(tokenizer, MARKED) as encode:
        (found,) = encode.conversation(LONG[2:])
    asked, said = "<|im_start|>user\nThe sheep?<|im_end|>\n", "jumps over the fence, Käse 🧀<|im_end|>"
    expected = f"{asked}<|im_start|>assistant\n[[{said}]]\n"
    assert plain_preview(found, tokenizer) == expected
    coloured = preview(found, tokenizer)
    green = "".join(coloured.plain[span.start : span.end] for span in coloured.spans if "green" in str(span.style))
    assert green == said


def test_users_of_the_encoder_hear_of_rows_without_anything_to_learn(
    tokenizers: dict[str, Tokenizer], lines: Callable[..., Path]
) -> None:
    template = MARKED.replace("== 'assistant'", "== 'nobody'")
    with (
        encoding(tokenizers["bpe"], template) as encode,
        pytest.raises(RowError, match="does not mark it as written by the model"),
    ):
        encode.supervised(Supervised("line 1", "", tuple(LONG)))
