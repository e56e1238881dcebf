"""Scores of given texts, against a slow loop in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from sheepop.core.errors import UsageError
from sheepop.evaluate import likelihood
from sheepop.evaluate.likelihood import LikelihoodScorer, score_text
from sheepop.generate import Generator
from sheepop.model import Transformer
from sheepop.model.accounting.cost import pass_bytes
from sheepop.tokenizer import CharTokenizer

Build = Callable[..., Transformer]


def slow(model: Transformer, ids: list[int], position: int, begin: int) -> torch.Tensor:
    """The log-probabilities of the token at `position`, read from `begin` on."""
    with torch.no_grad():
        return model(torch.tensor([ids[begin:position]]))[0, -1].double().log_softmax(-1)


@pytest.mark.parametrize("length", [2, 5, 16, 17, 18, 24, 25, 33, 70])
@pytest.mark.parametrize("max_seq_len", [16, 15, 2, 1])
def test_every_token_is_predicted_once_from_half_a_context_at_least(
    shaken: Build, length: int, max_seq_len: int
) -> None:
    model, characters = shaken(max_seq_len=max_seq_len, position_encoding="rope"), CharTokenizer()
    text = "".join(chr(97 + place * 7 % 26) for place in range(length))
    ids = characters.encode(text)
    score = score_text(model, characters, text)
    assert score.context == max_seq_len
    assert score.token_ids == ids[1:]
    assert score.num_bytes == length - 1
    stride = max(1, max_seq_len // 2)
    # The first window predicts as many tokens as it reads; every later one `stride` more.
    for place in range(1, length):
        later = max(0, -(-(place - max_seq_len) // stride))
        begin = later * stride
        expected = slow(model, ids, place, begin)
        assert score.logprobs[place - 1] == pytest.approx(float(expected[ids[place]]), abs=1e-4)
        assert score.ranks[place - 1] == int((expected > expected[ids[place]]).sum()) + 1


def test_a_shorter_window_is_a_shorter_context(shaken: Build) -> None:
    model, characters, text = shaken(position_encoding="rope"), CharTokenizer(), "abcdefghijklmnopqrstuvwxyz"
    score, ids = score_text(model, characters, text, context=4), characters.encode(text)
    assert score.context == 4
    for place in range(1, len(ids)):
        expected = slow(model, ids, place, 2 * max(0, -(-(place - 4) // 2)))
        assert score.logprobs[place - 1] == pytest.approx(float(expected[ids[place]]), abs=1e-4)
    for context in (0, 65):
        with pytest.raises(UsageError, match=f"context = {context} must be at least 1 and at most the model's"):
            score_text(model, characters, text, context=context)


def test_windows_that_do_not_fit_the_free_memory_are_refused(shaken: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    model, characters, text = shaken(position_encoding="rope"), CharTokenizer(), "sheep" * 20
    config = model.config
    needed = pass_bytes(config, 16, 16) + 16 * config.vocabulary * 4
    monkeypatch.setattr(likelihood, "free_memory", lambda _: needed)
    with pytest.raises(UsageError, match=r"needs 0\.\d GB beside the weights, and 0\.\d GB are free.*--context 16$"):
        score_text(model, characters, text)
    assert score_text(model, characters, text, context=16).context == 16
    with pytest.raises(UsageError, match="--context"):
        LikelihoodScorer(Generator(model, characters)).score([([5], [6] * 40)])


def test_a_text_without_a_token_to_predict_is_refused(shaken: Build) -> None:
    for text in ("", "a"):
        with pytest.raises(UsageError, match="nothing to predict"):
            score_text(shaken(), CharTokenizer(), text)
