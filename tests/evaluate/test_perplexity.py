"""Perplexity and bits per byte, counted by hand and against a pass over every window."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from sheepop.core.errors import DataError, UsageError
from sheepop.evaluate.likelihood import score_text
from sheepop.evaluate.perplexity import Text, evaluate_perplexity, windows
from sheepop.generate import Generator
from sheepop.model import Transformer
from sheepop.tokenizer import CharTokenizer, TokenizerConfig, train_tokenizer

TEXTS = [
    Text("a", "the sheep sleep deep " * 9, "barn/a.txt"),
    Text("b", "sixty-four and more, quietly.", "barn/b.txt"),
    Text("c", "x", "field/c.txt"),
    Text("d", "no more sheep to count, " * 4, "field/d.txt"),
]


@pytest.mark.parametrize("length", [1, 2, 5, 63, 64, 65, 66, 130])
@pytest.mark.parametrize("stride", [1, 3, 32, 64])
def test_every_token_is_predicted_once_behind_those_before_it(length: int, stride: int) -> None:
    tokenizer = CharTokenizer()
    text = "".join(chr(97 + place % 26) for place in range(length))
    ids = [*tokenizer.encode(text), tokenizer.eos_id]
    found = list(windows(Text("t", text), tokenizer, 64, stride))
    assert [token for window in found for token in window.predicted] == ids[1:]
    place = 1
    for number, window in enumerate(found):
        assert len(window.context) + len(window.predicted) <= 65
        assert list(window.context) == ids[place - len(window.context) : place]
        if number:
            assert len(window.predicted) <= stride
            assert len(window.context) >= 65 - stride
        place += len(window.predicted)


def test_a_model_that_guesses_evenly_needs_the_bits_of_its_vocabulary(shaken: Callable[..., Transformer]) -> None:
    model = shaken()
    with torch.no_grad():
        model.lm_head.weight.zero_()
    found = evaluate_perplexity(Generator(model, CharTokenizer()), [Text("t", "abcde", "s")])
    # Behind "a" there are b, c, d, e and the end: 7 bits for each of 5 tokens, over 4 bytes.
    assert found.measure("bits_per_byte").value == pytest.approx(5 * 7 / 4)
    assert found.measure("loss").value == pytest.approx(math.log(128), abs=1e-6)
    assert found.measure("perplexity").value == pytest.approx(128, rel=1e-5)
    assert found.measure("loss").count == 5


def test_numbers_equal_those_of_a_pass_over_each_window(generator: Generator) -> None:
    model, tokenizer = generator.model, generator.tokenizer
    nats, right, tokens, num_bytes = 0.0, 0, 0, 0
    for text in TEXTS:
        ids = [*tokenizer.encode(text.text), tokenizer.eos_id]
        for place in range(1, len(ids)):
            # Stride 128 of a context of 256: in windows behind the first, at least 129 tokens come before.
            begin = 0 if place <= 256 else ((place - 257) // 128 + 1) * 128
            with torch.no_grad():
                logits = model(torch.tensor([ids[begin:place]]))[0, -1].double().log_softmax(-1)
            nats -= float(logits[ids[place]])
            right += int(logits.argmax()) == ids[place]
            tokens += 1
        num_bytes += len(text.text) - 1
    found = evaluate_perplexity(generator, TEXTS)
    assert found.measure("loss").value == pytest.approx(nats / tokens, rel=1e-5)
    assert found.measure("bits_per_byte").value == pytest.approx(nats / math.log(2) / num_bytes, rel=1e-5)
    assert found.measure("accuracy").value == right / tokens
    for measure in found.measures[:4]:
        assert measure.interval is not None
        assert measure.interval[0] <= measure.value <= measure.interval[1]
    assert "fewer than 20 documents" in found.notes[0]


def test_parts_add_up_to_the_whole(generator: Generator) -> None:
    found = evaluate_perplexity(generator, TEXTS)
    assert [table.title for table in found.tables] == [
        "By source",
        "By number of tokens before the predicted one",
        "By length of the document",
    ]
    for table in found.tables:
        tokens, num_bytes, losses, _, bits = (list(column) for column in list(zip(*table.rows, strict=True))[1:])
        assert sum(tokens) == found.measure("loss").count
        whole = sum(count * loss for count, loss in zip(tokens, losses, strict=True))
        assert whole / sum(tokens) == pytest.approx(found.measure("loss").value)
        known = [(size, each) for size, each in zip(num_bytes, bits, strict=True) if size]
        ends = sum(count * loss for count, size, loss in zip(tokens, num_bytes, losses, strict=True) if not size)
        summed = sum(size * each for size, each in known) + ends / math.log(2)
        assert summed / sum(num_bytes) == pytest.approx(found.measure("bits_per_byte").value)


def test_it_agrees_with_the_score_of_a_text(generator: Generator) -> None:
    text = "counting sheep again and again. " * 12
    theirs = score_text(generator.model, generator.tokenizer, text)
    ids = generator.tokenizer.encode(text)
    with torch.no_grad():
        # The end of the text is predicted here, and not there.
        begin = ((len(ids) - 257) // 128 + 1) * 128
        end = generator.model(torch.tensor([ids[begin:]]))[0, -1].log_softmax(-1)[generator.tokenizer.eos_id]
    ours = evaluate_perplexity(generator, [Text("t", text)]).measure("loss")
    assert ours.value * ours.count == pytest.approx(theirs.loss * len(theirs.logprobs) - float(end), rel=1e-4)


def test_bytes_are_those_of_utf_8(shaken: Callable[..., Transformer]) -> None:
    tokenizer = train_tokenizer(TokenizerConfig(vocab_size=270), ["é€ and 𝄞, é€ and 𝄞 " * 9])
    model = shaken(vocab_size=tokenizer.vocab_size)
    found = evaluate_perplexity(Generator(model, tokenizer), [Text("t", "€é𝄞 and €")])
    first = len(tokenizer.token_bytes(tokenizer.encode("€é𝄞 and €")[0]))
    assert found.items[0].weight == len("€é𝄞 and €".encode()) - first


def test_characters_that_a_tokenizer_cannot_write_are_told(generator: Generator) -> None:
    found = evaluate_perplexity(generator, [Text("t", "sheep é and 𝄞")])
    assert any("2 of 13 predicted tokens replace characters" in note for note in found.notes)


def test_what_cannot_be_predicted_is_refused(generator: Generator) -> None:
    with pytest.raises(DataError, match="no text to predict"):
        evaluate_perplexity(generator, [Text("t", "")])
    with pytest.raises(UsageError, match="stride = 257 must be at least 1 and at most the window of 256"):
        evaluate_perplexity(generator, TEXTS, stride=257)
    with pytest.raises(UsageError, match="context = 257 must be at least 1 and at most the model's context of 256"):
        evaluate_perplexity(generator, TEXTS, context=257)


def test_a_window_may_be_shorter_than_the_context(generator: Generator) -> None:
    found = evaluate_perplexity(generator, TEXTS, context=32)
    nats, count = 0.0, 0
    for text in TEXTS:
        for window in windows(text, generator.tokenizer, 32, 16):
            for place, token in enumerate(window.predicted):
                read = [*window.context, *window.predicted[:place]]
                with torch.no_grad():
                    nats -= float(generator.model(torch.tensor([read]))[0, -1].double().log_softmax(-1)[token])
                count += 1
    assert found.measure("loss").value == pytest.approx(nats / count, rel=1e-6)
    assert found.settings["context"] == 32
    assert found.settings["stride"] == 16


def test_the_default_window_is_named_where_the_context_is_longer(shaken: Callable[..., Transformer]) -> None:
    model = shaken(max_seq_len=4096, position_encoding="rope", num_layers=1)
    found = evaluate_perplexity(Generator(model, CharTokenizer()), [Text("t", "sheep", "s")])
    assert found.settings["context"] == 2048
    assert any("Windows have 2,048 tokens; the model's context is 4,096" in note for note in found.notes)


def test_a_single_window_has_no_interval(generator: Generator) -> None:
    found = evaluate_perplexity(generator, [Text("t", "sheep")])
    assert [measure.interval for measure in found.measures] == [None] * 5
    assert any("nothing to compute an interval from" in note for note in found.notes)
