"""Texts scored and written with the memory of a corpus, against a loop that corrects one token at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from sheepop.evaluate.likelihood import LikelihoodScorer, score_text
from sheepop.generate import GenerationConfig, Generator
from sheepop.model import Transformer
from sheepop.model.corpus_index import CorpusIndex
from sheepop.model.corpus_memory import CorpusMemory
from sheepop.tokenizer import CharTokenizer

Build = Callable[..., Transformer]
TOKENIZER = CharTokenizer()
CORPUS = "the cat sat on the mat. the dog sat on the log. " * 3


@pytest.fixture(scope="module")
def memory() -> CorpusMemory:
    """A memory whose gate has drawn weights, large enough to change what is written."""
    torch.manual_seed(1)
    found = CorpusMemory(CorpusIndex.build(torch.tensor(TOKENIZER.encode(CORPUS)), 128, 6), 12).requires_grad_(False)
    for parameter in found.gate.parameters():
        parameter.mul_(4)
    return found


def slow(model: Transformer, memory: CorpusMemory, ids: Sequence[int], written: int = 0) -> Tensor:
    """The corrected log-probabilities (V,) of the token after `ids`, the last of which the model has `written`."""
    row, own = torch.tensor([list(ids)]), torch.tensor([written])
    with torch.no_grad():
        logits = model(row)[0, -1:]
        recalled = memory.recall(row, torch.arange(1, len(ids) + 1)[None], only_last=True, written=own)
        return memory(logits, recalled)[0].double().log_softmax(-1)


def test_a_score_with_a_memory_is_that_of_the_corrected_logits(toy_model: Build, memory: CorpusMemory) -> None:
    model, text = toy_model(), "the dog sat on the mat"
    ids = TOKENIZER.encode(text)
    score = score_text(model, TOKENIZER, text, memory=memory)
    expected = [slow(model, memory, ids[:place]) for place in range(1, len(ids))]
    own = [float(found[token]) for found, token in zip(expected, ids[1:], strict=True)]
    assert score.logprobs == pytest.approx(own, abs=1e-4)
    assert score.ranks == [int((found > value).sum()) + 1 for found, value in zip(expected, own, strict=True)]
    assert score.logprobs != pytest.approx(score_text(model, TOKENIZER, text).logprobs, abs=1e-2)
    scorer = LikelihoodScorer(Generator(model, TOKENIZER), memory=memory)
    (found,) = scorer.score([(ids[:5], ids[5:])])
    assert found.logprobs == pytest.approx(own[4:], abs=1e-4)
    assert found.best_logprobs == pytest.approx([float(each.max()) for each in expected[4:]], abs=1e-4)


@pytest.mark.parametrize("settings", [{}, {"guesses": 3}, {"num_completions": 2}], ids=str)
def test_each_token_is_chosen_from_corrected_logits(
    toy_model: Build, memory: CorpusMemory, settings: dict[str, int]
) -> None:
    model, prompts = toy_model(), ["the cat", "on"]
    config = GenerationConfig(max_new_tokens=12, temperature=0.0, **settings)
    found = Generator(model, TOKENIZER, memory=memory).generate(prompts, config)
    for prompt, completion in zip(prompts, found[:: len(found) // 2], strict=True):
        ids = TOKENIZER.encode(prompt)
        for written, (token, logprob) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
            expected = slow(model, memory, ids, written)
            expected[[TOKENIZER.pad_id, TOKENIZER.unk_id, TOKENIZER.bos_id]] = -torch.inf
            assert token == int(expected.argmax())
            assert logprob == pytest.approx(float(expected[token]), abs=1e-4)
            ids.append(token)


def test_beams_have_corrected_probabilities(toy_model: Build, memory: CorpusMemory) -> None:
    model, ids = toy_model(), TOKENIZER.encode("the cat")
    config = GenerationConfig(max_new_tokens=8, num_beams=3)
    (found,) = Generator(model, TOKENIZER, memory=memory).generate(["the cat"], config)
    for written, (token, logprob) in enumerate(zip(found.token_ids, found.logprobs, strict=True)):
        assert logprob == pytest.approx(
            float(slow(model, memory, [*ids, *found.token_ids[:written]], written)[token]), abs=1e-4
        )


def test_requests_choose_whether_they_use_the_memory(toy_model: Build, memory: CorpusMemory) -> None:
    model, prompts = toy_model(), ["the cat", "the cat", "the dog"]
    configs = [GenerationConfig(max_new_tokens=12, temperature=0.0, use_memory=use) for use in (True, False, True)]
    found = Generator(model, TOKENIZER, memory=memory).generate(prompts, configs)
    with_memory, without = (Generator(model, TOKENIZER, memory=each) for each in (memory, None))
    assert found[0].token_ids == with_memory.generate(prompts[:1], configs[0])[0].token_ids
    assert found[1].token_ids == without.generate(prompts[:1], configs[0])[0].token_ids
    assert found[2].token_ids == with_memory.generate(prompts[2:], configs[0])[0].token_ids
    assert found[0].token_ids != found[1].token_ids
