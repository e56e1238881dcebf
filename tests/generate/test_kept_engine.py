"""The engine stays between calls: what is read again, and what makes it start anew."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from sheepop.core.errors import CheckpointError
from sheepop.generate import GenerationConfig, Generator, paged_cache
from sheepop.language_model import LanguageModel
from sheepop.model import Transformer
from sheepop.model.probe import watch
from sheepop.tokenizer import CharTokenizer

Build = Callable[..., Transformer]

GREEDY = GenerationConfig(temperature=0, max_new_tokens=20)
PROMPT = "It was a dark and stormy night; the rain fell in"  # three blocks of 16 tokens


def counting(generator: Generator) -> list[int]:
    """The numbers of tokens that the network reads from now on, pass by pass."""
    counts: list[int] = []
    generator.model.embedding.register_forward_hook(lambda _, inputs, __: counts.append(inputs[0].numel()))
    return counts


def alone(model: Transformer, characters: CharTokenizer, prompt: str, config: GenerationConfig = GREEDY) -> str:
    """The text of an engine of its own."""
    return Generator(model, characters).generate([prompt], config)[0].text


def test_the_next_turn_reads_only_what_is_new(toy_model: Build, characters: CharTokenizer) -> None:
    model = toy_model(max_seq_len=256)
    generator = Generator(model, characters)
    counts, conversation = counting(generator), PROMPT
    stored = 0
    for _ in range(3):
        completion = generator.generate([conversation], GREEDY)[0]
        assert counts[0] == len(conversation) - stored
        assert completion.text == alone(model, characters, conversation)
        # All full blocks are found again; the last token that was written was never read.
        stored = 16 * ((completion.num_prompt_tokens + len(completion.token_ids) - 1) // 16)
        conversation += completion.text + " and then"
        counts.clear()


def test_as_many_texts_are_written_at_a_time_as_asked_for(toy_model: Build, characters: CharTokenizer) -> None:
    generator = Generator(toy_model(), characters, max_batch_size=3)
    counts = counting(generator)
    for asked, most in ((None, 3), (1, 1), (5, 5)):
        counts.clear()
        generator.generate(list("abcde"), GREEDY.replace(max_batch_size=asked))  # prompts of one token
        assert max(counts) == most and sum(counts) == 5 * GREEDY.max_new_tokens


def test_other_settings_and_longer_texts_start_anew_and_are_right(toy_model: Build, characters: CharTokenizer) -> None:
    model = toy_model(max_seq_len=64)
    generator = Generator(model, characters, max_batch_size=2)
    for settings in ({}, {"guesses": 2}, {"batch_invariant": True}, {"activations": "rounded"}, {}, {"seed": 3}):
        config = GREEDY.replace(**settings)
        assert generator.generate([PROMPT[:30]], config)[0].text == alone(model, characters, PROMPT[:30], config)
    several = [PROMPT[number:40] for number in range(5)]
    found = [completion.text for completion in generator.generate(several, GREEDY)]
    assert found == [alone(model, characters, prompt) for prompt in several]


@pytest.mark.parametrize("first", [None, 3])
def test_longer_and_more_texts_keep_what_was_read(
    toy_model: Build, characters: CharTokenizer, monkeypatch: pytest.MonkeyPatch, first: int | None
) -> None:
    """Also where the cache has only so many blocks at first."""
    if first is not None:
        monkeypatch.setattr(paged_cache, "_num_at_first", lambda num_blocks, _: min(first, num_blocks))
    model = toy_model(max_seq_len=256)
    generator = Generator(model, characters, max_batch_size=4)
    expected = generator.generate([PROMPT], GREEDY)[0].text
    kept, counts = generator._kept, counting(generator)
    many = [PROMPT[number:] * 4 for number in range(4)]
    texts = [completion.text for completion in generator.generate(many, GREEDY)]
    assert texts == [alone(model, characters, prompt) for prompt in many]
    counts.clear()
    assert generator.generate([PROMPT], GREEDY)[0].text == expected
    assert counts[0] == 16  # two blocks are found again, and one has the last token, which is always read
    assert kept is not None and generator._kept is not None and generator._kept.engine is kept.engine


def test_changed_weights_are_seen(toy_model: Build, characters: CharTokenizer) -> None:
    model = toy_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    generator = Generator(model, characters)
    before, kept = generator.generate([PROMPT[:20]], GREEDY)[0].text, generator._kept
    model(torch.tensor([characters.encode(PROMPT[:20])]))[..., 5].sum().backward()
    optimizer.step()
    after = generator.generate([PROMPT[:20]], GREEDY)[0].text
    assert after == alone(model, characters, PROMPT[:20]) != before
    with torch.no_grad():
        model.embedding.weight.copy_(torch.randn(model.embedding.weight.shape))
    assert generator.generate([PROMPT[:20]], GREEDY)[0].text == alone(model, characters, PROMPT[:20])
    assert kept is not None and generator._kept is not None and generator._kept.engine is kept.engine


def test_whoever_watches_sees_every_token(toy_model: Build, characters: CharTokenizer) -> None:
    model = toy_model()
    generator = Generator(model, characters)
    generator.generate([PROMPT[:20]], GREEDY)
    counts: list[int] = []
    with watch(model, {"embedded": lambda x_BTD: counts.append(x_BTD.shape[:2].numel())}):
        generator.generate([PROMPT[:20]], GREEDY)
    assert counts[0] == 20


def test_a_stream_that_is_left_or_fails_leaves_a_clean_engine(toy_model: Build, characters: CharTokenizer) -> None:
    model = toy_model(max_seq_len=128)
    generator = Generator(model, characters)
    expected = alone(model, characters, PROMPT)
    stream = iter(generator.stream(PROMPT, GREEDY))
    first = next(stream)
    # Another text meanwhile gets an engine of its own.
    assert generator.generate([PROMPT], GREEDY)[0].text == expected
    assert first + "".join(stream) == expected
    left = iter(generator.stream(PROMPT, GREEDY))
    next(left)
    del left
    assert generator.generate([PROMPT], GREEDY)[0].text == expected
    with torch.no_grad():
        weight = model.embedding.weight.clone()
        model.embedding.weight.fill_(torch.nan)
        with pytest.raises(CheckpointError, match="not finite"):
            generator.generate([PROMPT], GREEDY)
        model.embedding.weight.copy_(weight)
    assert generator.generate([PROMPT], GREEDY)[0].text == expected


def test_closing_frees_the_cache_and_later_calls_start_again(toy_model: Build, characters: CharTokenizer) -> None:
    model = toy_model()
    lm = LanguageModel(model, characters, model.config, max_batch_size=3)
    prompts = [PROMPT[number : number + 20] for number in range(4)]
    texts = [completion.text for completion in lm.generate(prompts, greedy=True, max_new_tokens=5)]
    assert texts == [lm.generate(prompt, greedy=True, max_new_tokens=5).text for prompt in prompts]
    counts = counting(lm._generator)
    lm.generate(prompts[0], greedy=True, max_new_tokens=5)
    lm.close()
    lm.generate(prompts[0], greedy=True, max_new_tokens=5)
    assert counts[0] == 4 and counts[5] == 20
