"""Scores of given texts, against a slow loop in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from sheepop.core.errors import UsageError
from sheepop.generate.likelihood import score_text
from sheepop.model import Transformer
from sheepop.tokenizer import CharTokenizer

Build = Callable[..., Transformer]


def slow(model: Transformer, ids: list[int], position: int, begin: int) -> torch.Tensor:
    """The log-probabilities of the token at `position`, read from `begin` on."""
    with torch.no_grad():
        return model(torch.tensor([ids[begin:position]]))[0, -1].double().log_softmax(-1)


@pytest.mark.parametrize("length", [2, 5, 16, 17, 18, 24, 25, 33, 70])
@pytest.mark.parametrize("max_seq_len", [16, 15, 2, 1])
def test_every_token_is_predicted_once_from_half_a_context_at_least(
    toy_model: Build, length: int, max_seq_len: int
) -> None:
    model, characters = toy_model(max_seq_len=max_seq_len, position_encoding="rope"), CharTokenizer()
    text = "".join(chr(97 + place * 7 % 26) for place in range(length))
    ids = characters.encode(text)
    score = score_text(model, characters, text)
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


def test_a_text_without_a_token_to_predict_is_refused(toy_model: Build) -> None:
    for text in ("", "a"):
        with pytest.raises(UsageError, match="nothing to predict"):
            score_text(toy_model(), CharTokenizer(), text)
