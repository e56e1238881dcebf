"""An encoder-decoder writes the target of a source: token by token, by beam search, alone and in a batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sheepop.core.errors import UsageError
from sheepop.generate import GenerationConfig, Generator
from sheepop.model import EncoderDecoder

from .recomputing import GENERATORS

SOURCES = ["reverse abc", "x", "sort cba, and then some", "y"]
Build = Callable[..., EncoderDecoder]


@pytest.fixture
def build(toy_model, characters) -> Build:
    def make(**settings: Any) -> EncoderDecoder:
        return toy_model(architecture="encoder_decoder", vocab_size=characters.vocab_size, max_seq_len=32, **settings)

    return make


def plainly(model: EncoderDecoder, characters, source: str, count: int) -> list[int]:
    """The greedy target, with the whole network run again for every token."""
    source_ids = torch.tensor([[*characters.encode(source), characters.eos_id]])
    target = [characters.bos_id]
    forbidden = [characters.pad_id, characters.unk_id, characters.bos_id]
    with torch.inference_mode():
        while len(target) <= count and target[-1] != characters.eos_id:
            logits = model(source_ids, torch.tensor([target]))[0, -1].double()
            logits[forbidden] = -torch.inf
            target.append(int(logits.argmax()))
    return target[1:]


@pytest.mark.parametrize("encoding", ["sinusoidal", "learned", "rope", "alibi", "none"])
@pytest.mark.parametrize("generator", GENERATORS)
def test_greedy_targets_are_those_of_the_plain_loop(build: Build, characters, encoding: str, generator) -> None:
    model = build(position_encoding=encoding)
    config = GenerationConfig(temperature=0, max_new_tokens=9)
    completions = generator(model, characters, max_batch_size=3).generate(SOURCES, config)
    for source, done in zip(SOURCES, completions, strict=True):
        assert done.token_ids == plainly(model, characters, source, 9)
        assert done.text == characters.decode(done.token_ids)
        assert (done.prompt, done.continues_prompt) == (source, False)
        assert done.num_prompt_tokens == len(characters.encode(source)) + 1
        assert done.finish_reason == ("stop" if done.token_ids[-1] == characters.eos_id else "length")
    assert len({tuple(done.token_ids) for done in completions}) > 1


@pytest.mark.parametrize("generator", GENERATORS)
def test_rows_that_end_leave_the_others_with_their_own_sources(build: Build, characters, generator) -> None:
    """A likely end token gives targets of many lengths."""
    model = build(position_encoding="rope")
    with torch.no_grad():
        model.lm_head.weight[characters.eos_id] *= 2.5
    sources = [f"{first}{second}" for first, second in itertools.product("abcdefgh", repeat=2)][::3]
    config = GenerationConfig(temperature=0, max_new_tokens=12)
    together = generator(model, characters, max_batch_size=32).generate(sources, config)
    assert len({len(done.token_ids) for done in together}) > 2
    for source, done in zip(sources, together, strict=True):
        assert done.token_ids == plainly(model, characters, source, 12), source


def test_beam_search_finds_the_likeliest_target_of_all(build: Build, characters) -> None:
    """All targets of up to two tokens are compared."""
    model = build(position_encoding="rope")
    source = torch.tensor([[*characters.encode("sheep"), characters.eos_id]])
    allowed = [token for token in range(characters.vocab_size) if token not in (0, 1, 2)]
    with torch.inference_mode():
        first = model(source, torch.tensor([[characters.bos_id]]))[0, -1].double().log_softmax(-1)
        memory = model.encode(source.expand(len(allowed), -1))
        rows = torch.tensor([[characters.bos_id, token] for token in allowed])
        second = model.read_out(model.hidden_states(rows, memory=memory))[:, -1].double().log_softmax(-1)
    totals = {(characters.eos_id,): float(first[characters.eos_id])}
    for row, token in enumerate(allowed):
        if token != characters.eos_id:
            totals |= {(token, other): float(first[token] + second[row, other]) for other in allowed}
    best = max(totals, key=lambda text: totals[text] / ((5 + len(text)) / 6) ** 0.6)
    for generator in GENERATORS:
        config = GenerationConfig(num_beams=150, max_new_tokens=2)
        (done,) = generator(model, characters, max_batch_size=200).generate(["sheep"], config)
        assert tuple(done.token_ids) == best
        assert sum(done.logprobs) == pytest.approx(totals[best], abs=1e-5)


def test_one_beam_writes_what_greedy_does_and_several_write_the_same_alone_and_together(
    build: Build, characters
) -> None:
    generator = Generator(build(), characters, max_batch_size=8)
    greedy = generator.generate(SOURCES, GenerationConfig(temperature=0, max_new_tokens=8))
    one = generator.generate(SOURCES, GenerationConfig(temperature=0, num_beams=1, max_new_tokens=8))
    assert [done.token_ids for done in one] == [done.token_ids for done in greedy]
    config = GenerationConfig(num_beams=3, max_new_tokens=8)
    together = generator.generate(SOURCES, config)
    apart = generator.generate(SOURCES, config.replace(max_batch_size=1))
    assert [done.token_ids for done in together] == [done.token_ids for done in apart]


def test_a_drawn_target_repeats_with_its_seed(build: Build, characters) -> None:
    generator = Generator(build(), characters)
    config = GenerationConfig(temperature=1.0, max_new_tokens=8, seed=3)
    assert generator.generate(SOURCES, config) == generator.generate(SOURCES, config)


def test_a_target_may_fill_its_own_context_whatever_the_length_of_its_source(build: Build, characters) -> None:
    model = build()
    with torch.no_grad():
        model.lm_head.weight[characters.eos_id] = 0.0
    (done,) = Generator(model, characters).generate(["a" * 31], GenerationConfig(temperature=0, max_new_tokens=99))
    assert (len(done.token_ids), done.finish_reason) == (31, "length")


def test_a_source_that_does_not_fit_and_a_window_are_refused(build: Build, characters) -> None:
    generator = Generator(build(), characters)
    with pytest.raises(UsageError, match="has 32 tokens, but the encoder's max_seq_len = 32 has room for 31"):
        generator.generate(["a" * 32])
    with pytest.raises(UsageError, match="drops the beginning of a text, but a target needs it"):
        generator.generate(["a"], GenerationConfig(on_overflow="window"))
    with pytest.raises(UsageError, match="is empty"):
        generator.generate([""])
