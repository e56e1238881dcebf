"""Beam search against an exhaustive search, against greedy search, and by hand."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sheepop.core.config import validate
from sheepop.core.errors import ConfigError
from sheepop.generate import GenerationConfig, Generator
from sheepop.generate.beam_search import Beam

from .recomputing import GENERATORS, RecomputingGenerator

VOCABULARY, EOS = 4, 3


class Tables:
    """A toy network: log-probabilities that depend only on the tokens so far."""

    def __init__(self, seed: int, sharpness: float = 2.0) -> None:
        self._seed, self._sharpness = seed, sharpness

    def after(self, token_ids: Sequence[int]) -> Tensor:
        digits = sum((token + 1) * 5**place for place, token in enumerate(token_ids))
        generator = torch.Generator().manual_seed(self._seed * 100_003 + digits)
        logits = torch.randn(VOCABULARY, generator=generator, dtype=torch.float64) * self._sharpness
        return logits.log_softmax(-1)


def beam(num_beams: int, max_tokens: int, length_penalty: float = 0.6) -> Beam:
    return Beam(num_beams=num_beams, max_tokens=max_tokens, end_ids={EOS}, length_penalty=length_penalty)


def found(tables: Tables, num_beams: int, max_tokens: int, length_penalty: float = 0.6) -> tuple[list[int], float]:
    searched = beam(num_beams, max_tokens, length_penalty)
    while searched.live:
        searched.extend(torch.stack([tables.after(hypothesis.token_ids) for hypothesis in searched.live]))
    best = searched.best()
    return list(best.token_ids), searched.score(best)


def every_text(max_tokens: int) -> list[tuple[int, ...]]:
    """All texts that end in <eos> or are cut at the limit."""
    ended = [(*body, EOS) for length in range(max_tokens) for body in itertools.product(range(EOS), repeat=length)]
    return ended + list(itertools.product(range(EOS), repeat=max_tokens))


def exhaustive(tables: Tables, max_tokens: int, length_penalty: float) -> tuple[list[int], float]:
    def score(text: tuple[int, ...]) -> float:
        total = sum(float(tables.after(text[:place])[token]) for place, token in enumerate(text))
        return total / ((5 + len(text)) / 6) ** length_penalty

    best = max(every_text(max_tokens), key=score)
    return list(best), score(best)


@pytest.mark.parametrize("length_penalty", [0.0, 0.6, 1.0, 3.0])
@pytest.mark.parametrize("seed", range(6))
def test_a_beam_as_wide_as_there_are_texts_finds_the_best_of_all(seed: int, length_penalty: float) -> None:
    tables = Tables(seed)
    token_ids, score = found(tables, len(every_text(4)), 4, length_penalty)
    expected, best = exhaustive(tables, 4, length_penalty)
    assert token_ids == expected
    assert score == pytest.approx(best, abs=1e-12)


def test_the_length_penalty_changes_which_text_is_best() -> None:
    lengths = {penalty: {len(exhaustive(Tables(seed), 4, penalty)[0]) for seed in range(6)} for penalty in (0.0, 3.0)}
    assert sum(lengths[0.0]) / len(lengths[0.0]) < sum(lengths[3.0]) / len(lengths[3.0])


@given(st.integers(0, 500), st.integers(1, 12), st.integers(1, 6), st.sampled_from([0.0, 0.6, 2.0]))
def test_a_search_finds_a_text_whose_score_is_its_own_and_the_early_end_costs_nothing(
    seed: int, num_beams: int, max_tokens: int, length_penalty: float
) -> None:
    tables = Tables(seed)
    token_ids, score = found(tables, num_beams, max_tokens, length_penalty)
    total = sum(float(tables.after(token_ids[:place])[token]) for place, token in enumerate(token_ids))
    assert score == pytest.approx(total / ((5 + len(token_ids)) / 6) ** length_penalty)
    assert token_ids[-1] == EOS or len(token_ids) == max_tokens
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Beam, "_is_decided", lambda self: False)
        assert found(tables, num_beams, max_tokens, length_penalty) == (token_ids, score)


@given(st.integers(0, 500), st.integers(1, 8))
def test_one_beam_is_greedy(seed: int, max_tokens: int) -> None:
    tables, text = Tables(seed), list[int]()
    while len(text) < max_tokens and EOS not in text:
        text.append(int(tables.after(text).argmax()))
    assert found(tables, 1, max_tokens)[0] == text


def test_a_beam_by_hand() -> None:
    searched = beam(2, 5, 0.0)
    first = torch.tensor([[0.5, 0.3, 0.0, 0.2]], dtype=torch.float64).log()
    assert searched.extend(first) == [0, 0]
    assert [hypothesis.token_ids for hypothesis in searched.live] == [(0,), (1,)]
    # 0.5 * 0.4 and 0.3 * 0.6 are the best two; the second ends, which narrows the beam to one.
    second = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.1, 0.1, 0.2, 0.6]], dtype=torch.float64).log()
    assert searched.extend(second) == [0]
    assert [hypothesis.token_ids for hypothesis in searched.live] == [(0, 0)]
    assert [hypothesis.token_ids for hypothesis in searched.finished] == [(1, EOS)]
    assert searched.score(searched.finished[0]) == pytest.approx(math.log(0.18))
    # 0.2 * 0.5 is already below 0.18, and can only fall.
    assert searched.extend(torch.tensor([[0.5, 0.2, 0.2, 0.1]], dtype=torch.float64).log()) == []
    assert searched.best().token_ids == (1, EOS)
    assert searched.best().logprobs == pytest.approx((math.log(0.3), math.log(0.6)))


def test_of_equally_good_continuations_the_earlier_hypothesis_and_the_smaller_id_come_first() -> None:
    searched = beam(3, 5)
    searched.extend(torch.full((1, VOCABULARY), math.log(0.25), dtype=torch.float64))
    assert [hypothesis.token_ids for hypothesis in searched.live] == [(0,), (1,), (2,)]
    assert searched.extend(torch.full((3, VOCABULARY), math.log(0.25), dtype=torch.float64)) == [0, 0, 0]
    assert [hypothesis.token_ids for hypothesis in searched.live] == [(0, 0), (0, 1), (0, 2)]


def test_tokens_that_are_forbidden_are_not_taken_even_when_there_are_few_others() -> None:
    searched = beam(4, 5)
    searched.extend(torch.tensor([[-torch.inf, 0.0, -torch.inf, -torch.inf]], dtype=torch.float64))
    assert [hypothesis.token_ids for hypothesis in searched.live] == [(1,)]


@pytest.mark.parametrize("generator", GENERATORS)
def test_a_decoder_finds_the_text_that_an_exhaustive_search_finds(toy_model, characters, generator) -> None:
    """The beam is wide enough for every first token, so all texts of up to two tokens are compared."""
    model = toy_model(vocab_size=characters.vocab_size, position_encoding="rope")
    config = GenerationConfig(num_beams=128, max_new_tokens=2, length_penalty=0.0)
    (done,) = generator(model, characters).generate(["sheep"], config)
    prompt = characters.encode("sheep")
    forbidden = [characters.pad_id, characters.unk_id, characters.bos_id]
    with torch.inference_mode():
        first = model(torch.tensor([prompt]))[0, -1].double().log_softmax(-1)
        others = [token for token in range(characters.vocab_size) if token not in [*forbidden, characters.eos_id]]
        rows = torch.tensor([[*prompt, token] for token in others])
        second = model(rows)[:, -1].double().log_softmax(-1)
        second = second.index_fill(1, torch.tensor(forbidden), -torch.inf)
    totals = first[others][:, None] + second
    best = int(totals.argmax())
    expected = [others[best // totals.shape[1]], best % totals.shape[1]]
    if float(first[characters.eos_id]) > float(totals.max()):
        expected = [characters.eos_id]
    assert done.token_ids == expected
    assert sum(done.logprobs) == pytest.approx(max(float(totals.max()), float(first[characters.eos_id])), abs=1e-4)


def test_a_beam_is_at_least_as_good_as_greedy_and_the_same_with_and_without_cache(toy_model, characters) -> None:
    model = toy_model(vocab_size=characters.vocab_size, position_encoding="rope")
    generator = Generator(model, characters)
    prompts = ["sheep", "a", "the long prompt"]
    settings = {"max_new_tokens": 12, "length_penalty": 0.0}
    greedy = generator.generate(prompts, GenerationConfig(temperature=0, max_new_tokens=12))
    one = generator.generate(prompts, GenerationConfig(temperature=0, num_beams=1, **settings))
    assert [done.token_ids for done in one] == [done.token_ids for done in greedy]
    four = generator.generate(prompts, GenerationConfig(num_beams=4, **settings))
    plain = RecomputingGenerator(model, characters).generate(prompts, GenerationConfig(num_beams=4, **settings))
    apart = generator.generate(prompts, GenerationConfig(num_beams=4, max_batch_size=1, **settings))
    for searched, other, alone, taken in zip(four, plain, apart, greedy, strict=True):
        assert searched.token_ids == other.token_ids == alone.token_ids
        assert sum(searched.logprobs) >= sum(taken.logprobs) - 1e-6
    assert [done.token_ids for done in four] != [done.token_ids for done in greedy]


def test_the_pieces_of_a_searched_text_and_a_stop_are_handed_on(toy_model, characters) -> None:
    generator = Generator(toy_model(vocab_size=characters.vocab_size), characters)
    pieces: list[tuple[int, str]] = []
    done = generator.generate(
        ["a", "b"],
        GenerationConfig(num_beams=3, max_new_tokens=6),
        on_text=lambda index, text: pieces.append((index, text)),
    )
    assert pieces == [(index, completion.text) for index, completion in enumerate(done)]
    (stopped,) = generator.generate(["a"], GenerationConfig(num_beams=3, max_new_tokens=6), should_stop=lambda: True)
    assert (stopped.finish_reason, len(stopped.token_ids)) == ("abort", 0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": 0.8}, "without sampling, so temperature = 0.8 cannot be combined with it"),
        ({"top_k": 3}, "num_beams = 4 cannot be combined with top_k = 3"),
        ({"top_p": 0.5}, r"num_beams = 4 cannot be combined with top_p = 0\.5"),
        ({"num_beams": "4"}, "num_beams = '4': input should be a valid integer"),
        ({"stop": "x"}, r"num_beams = 4 cannot be combined with stop = \('x',\)"),
        ({"repetition_penalty": 1.2}, "num_beams = 4 cannot be combined with repetition_penalty = 1.2"),
        ({"on_overflow": "window"}, "num_beams = 4 cannot be combined with on_overflow = 'window'"),
    ],
)
def test_what_beams_cannot_be_had_with_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(GenerationConfig, {"num_beams": 4, **settings})
    assert validate(GenerationConfig, {"num_beams": 4}).greedy
