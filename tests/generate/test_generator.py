"""Whole completions: against a plain loop without cache, batch or window code, and against texts known by hand."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch._C._distributed_c10d import HashStore

from sheepop.core.errors import CheckpointError, TokenizerError, UsageError
from sheepop.generate import Completion, GenerationConfig, Generator, NotFiniteError
from sheepop.model import Transformer
from sheepop.model.probe import watch
from sheepop.parallel.ranks import Ranks
from sheepop.tokenizer import CharTokenizer, Tokenizer, TokenizerConfig, tokenizer_from_json, train_tokenizer

from .recomputing import GENERATORS, RecomputingGenerator

Build = Callable[..., Transformer]

PROMPTS = ["def main(argument):", "x", "It was a dark and stormy", "<eos>"]
GREEDY = GenerationConfig(temperature=0, max_new_tokens=24)
SAMPLED = GenerationConfig(temperature=1.0, top_p=0.95, max_new_tokens=24, seed=5)


def texts(completions: Sequence[Completion]) -> list[str]:
    return [completion.text for completion in completions]


@torch.no_grad()
def plain_greedy(model: Transformer, tokenizer: Tokenizer, prompt: str, count: int) -> str:
    """Greedy continuation by definition; a full context is reduced to its last half."""
    context = tokenizer.encode(prompt)
    room = min(count, model.config.max_seq_len // 2)
    if len(context) >= model.config.max_seq_len:
        context = context[len(context) - (model.config.max_seq_len - room) :]
    written: list[int] = []
    while len(written) < count:
        logits = model(torch.tensor([context]))[0, -1].tolist()
        choices = [i for i in range(tokenizer.vocab_size) if i not in (0, 1, 2)]
        token = max(choices, key=lambda i: logits[i])
        written.append(token)
        context.append(token)
        if token == tokenizer.eos_id:
            break
        if len(context) > model.config.max_seq_len:
            context = context[len(context) - max(1, model.config.max_seq_len // 2) :]
    return tokenizer.decode(written)


@pytest.mark.parametrize(
    ("position_encoding", "norm", "num_kv_heads"),
    list(product(["sinusoidal", "learned", "rope"], ["layernorm", "rmsnorm"], [2, 4])),
)
def test_greedy_text_is_the_same_with_and_without_cache_together_and_apart(
    toy_model: Build, characters: CharTokenizer, position_encoding: str, norm: str, num_kv_heads: int
) -> None:
    model = toy_model(position_encoding=position_encoding, norm=norm, num_kv_heads=num_kv_heads)
    expected = [plain_greedy(model, characters, prompt, 24) for prompt in PROMPTS]
    assert len(set("".join(expected))) > 10  # the text varies
    for generator, size in product(GENERATORS, [16, 1]):
        assert texts(generator(model, characters).generate(PROMPTS, GREEDY.replace(max_batch_size=size))) == expected


@pytest.mark.parametrize("max_seq_len", [1, 2, 9, 16])
def test_windowed_greedy_text_equals_the_plain_loop(
    toy_model: Build, characters: CharTokenizer, max_seq_len: int
) -> None:
    model = toy_model(max_seq_len=max_seq_len, position_encoding="learned")
    expected = [plain_greedy(model, characters, prompt, 40) for prompt in PROMPTS]
    config = GREEDY.replace(on_overflow="window", max_new_tokens=40)
    for generator, size in product(GENERATORS, [16, 1]):
        completions = generator(model, characters).generate(PROMPTS, config.replace(max_batch_size=size))
        assert texts(completions) == expected
        assert {c.finish_reason for c in completions} <= {"length", "stop"}
        assert all(len(c.token_ids) == 40 or c.finish_reason == "stop" for c in completions)


def test_sampled_text_does_not_depend_on_cache_batch_or_order_of_calls(
    toy_model: Build, characters: CharTokenizer
) -> None:
    model = toy_model()
    expected = texts(Generator(model, characters).generate(PROMPTS, SAMPLED))
    for generator, size, asked in product(GENERATORS, [2, 3], [None, 1]):
        torch.manual_seed(size)
        completions = generator(model, characters, max_batch_size=size).generate(
            PROMPTS, SAMPLED.replace(max_batch_size=asked)
        )
        assert texts(completions) == expected
    assert texts(Generator(model, characters).generate(PROMPTS[:2], SAMPLED)) == expected[:2]


def test_requests_differ_seeds_differ_and_a_drawn_seed_repeats_the_text(
    toy_model: Build, characters: CharTokenizer
) -> None:
    generator = Generator(toy_model(), characters)
    first, second = generator.generate(["same", "same"], SAMPLED)
    assert first.text != second.text
    assert generator.generate(["same"], SAMPLED.replace(seed=6))[0].text != first.text
    drawn = generator.generate(["same"], SAMPLED.replace(seed=None))[0]
    again = generator.generate(["same"], SAMPLED.replace(seed=None))[0]
    assert drawn.text != again.text
    assert generator.generate(["same"], SAMPLED.replace(seed=drawn.seed))[0] == drawn


def test_the_mode_of_the_model_is_never_touched_while_texts_are_written(
    toy_model: Build, characters: CharTokenizer
) -> None:
    model = toy_model(dropout=0.5).train()
    modes: list[bool] = []
    with watch(model, {"final": lambda _: modes.extend(module.training for module in model.modules())}):
        Generator(model, characters).generate(["a"], GREEDY)
    assert all(modes)
    assert modes


def test_each_prompt_is_written_with_its_own_settings(toy_model: Build, characters: CharTokenizer) -> None:
    generator = Generator(toy_model(), characters)
    configs = [
        GREEDY,
        SAMPLED,
        SAMPLED.replace(top_k=3, repetition_penalty=1.3, seed=6),
        GREEDY.replace(max_new_tokens=3, repetition_penalty=1.3),
    ]
    together = texts(generator.generate(PROMPTS, configs))
    # The text of prompt i depends on i: each one is taken from a call in which all have its settings.
    assert together == [texts(generator.generate(PROMPTS, config))[i] for i, config in enumerate(configs)]


@pytest.mark.parametrize(
    ("configs", "problem"),
    [
        ([GREEDY], "2 prompts were given with 1 configurations"),
        ([GREEDY, GREEDY.replace(num_beams=2)], "the same num_beams"),
        ([GREEDY, GREEDY.replace(batch_invariant=True)], "the same batch_invariant"),
        ([GREEDY, GREEDY.replace(activations="rounded")], "the same activations"),
    ],
)
def test_settings_that_cannot_be_mixed_are_refused(
    toy_model: Build, characters: CharTokenizer, configs: list[GenerationConfig], problem: str
) -> None:
    with pytest.raises(UsageError, match=problem):
        Generator(toy_model(), characters).generate(["a", "b"], configs)


def test_only_tokens_of_the_tokenizer_are_written(toy_model: Build, characters: CharTokenizer) -> None:
    model = toy_model(vocab_size=160)
    config = GenerationConfig(temperature=1e6, top_p=1.0, max_new_tokens=60, seed=1)
    completions = Generator(model, characters).generate(["a"] * 12, config)
    written = {token for completion in completions for token in completion.token_ids}
    assert len(written) > 100  # nearly uniform, yet
    assert written <= set(range(3, 128))


def test_eos_ends_the_text_and_the_rest_of_the_batch_goes_on(toy_model: Build, characters: CharTokenizer) -> None:
    config = GenerationConfig(temperature=1e6, top_p=1.0, max_new_tokens=60, seed=1)
    generator = Generator(toy_model(), characters)
    completions = generator.generate(["a"] * 12, config)
    ended = [completion for completion in completions if completion.finish_reason == "stop"]
    assert 0 < len(ended) < 12
    assert len({len(completion.token_ids) for completion in ended}) > 1
    for completion in completions:
        has_eos = completion.token_ids[-1] == 3
        assert (completion.finish_reason == "stop") == has_eos
        assert 3 not in completion.token_ids[:-1]
        assert completion.text == characters.decode(completion.token_ids)
        assert len(completion.token_ids) == 60 or has_eos
        assert len(completion.logprobs) == len(completion.token_ids)
    apart = generator.generate(["a"] * 12, config.replace(max_batch_size=1))
    assert [c.token_ids for c in apart] == [c.token_ids for c in completions]


def test_one_token_for_both_ends_of_a_text_is_written_where_it_ends_one(
    chain_model: Build, single_bytes: Tokenizer
) -> None:
    """GPT-2's ``<|endoftext|>`` begins and ends texts: a beginning token is never written, except this one."""
    one = tokenizer_from_json(single_bytes.to_json(), {"bos_token": "<eos>", "eos_token": "<eos>"})
    end = one.eos_id
    assert one.bos_id == end
    ids = one.encode("ab")
    (completion,) = Generator(chain_model(one, [*ids, end]), one).generate(["a"], GREEDY)
    assert (completion.token_ids, completion.finish_reason) == ([ids[1], end], "stop")


def test_log_probabilities_are_the_models_own(toy_model: Build, characters: CharTokenizer) -> None:
    model = toy_model(vocab_size=140)
    config = SAMPLED.replace(temperature=0.3, top_k=4, repetition_penalty=1.5)
    completion = Generator(model, characters).generate(["log"], config)[0]
    sequence = characters.encode("log") + completion.token_ids
    with torch.no_grad():
        logits = model(torch.tensor([sequence]))[0].numpy().astype(np.float64)
    for place, (token, logprob) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
        row = logits[2 + place]
        assert logprob == pytest.approx(row[token] - math.log(np.exp(row).sum()), abs=1e-5)


def test_a_log_probability_by_hand(chain_model: Build, characters: CharTokenizer) -> None:
    model = chain_model(characters, characters.encode("abc"), score=2.0)
    completion = Generator(model, characters).generate(["a"], GREEDY.replace(max_new_tokens=2))[0]
    # One logit is 2, the other 127 are 0.
    assert completion.text == "bc"
    assert completion.logprobs == pytest.approx([2 - math.log(math.exp(2) + 127)] * 2, abs=1e-6)


def test_repetition_penalty_counts_prompt_and_text(chain_model: Build, characters: CharTokenizer) -> None:
    # In the cycle abcd every next logit is 4 and all others 0. A penalty of 100 makes 0.04 of it: still the largest.
    model = chain_model(characters, characters.encode("abcd"), score=4.0)
    generator = Generator(model, characters)
    assert generator.generate(["a"], GREEDY.replace(max_new_tokens=6, repetition_penalty=100.0))[0].text == "bcdabc"
    # At temperature 1 the successor has e^4 of e^4 + 124 (31 %); penalised it has e^0.04 of e^0.04 + 124 (1 %).
    config = GenerationConfig(temperature=1.0, top_p=1.0, max_new_tokens=1, seed=2)
    fresh = generator.generate(["a"] * 400, config)
    repeated = generator.generate(["ba"] * 400, config.replace(repetition_penalty=100.0))
    assert sum(c.text == "b" for c in fresh) == pytest.approx(400 * 0.306, abs=4 * 9.2)
    assert sum(c.text == "b" for c in repeated) < 15


def test_a_new_token_runs_the_network_on_one_position(toy_model: Build, characters: CharTokenizer) -> None:
    model = toy_model()
    counts: list[int] = []
    config = GREEDY.replace(max_new_tokens=6)
    with watch(model, {"embedded": lambda x_BTD: counts.append(x_BTD.shape[:2].numel())}):
        Generator(model, characters).generate(["hello"], config)
        assert counts == [5, 1, 1, 1, 1, 1]
        counts.clear()
        RecomputingGenerator(model, characters).generate(["hello"], config)
    assert counts == [5, 6, 7, 8, 9, 10]


def test_writing_stops_at_the_end_of_the_context(toy_model: Build, characters: CharTokenizer) -> None:
    model = toy_model(max_seq_len=16)
    prompts = ["a" * 15, "b" * 10, "c"]
    for size in (16, 1):
        completions = Generator(model, characters).generate(prompts, GREEDY.replace(max_batch_size=size))
        assert [len(c.token_ids) for c in completions] == [1, 6, 15]
        assert {c.finish_reason for c in completions} == {"length"}


def test_a_prompt_that_fills_the_context_is_refused_or_cut_on_request(
    toy_model: Build, characters: CharTokenizer
) -> None:
    generator = Generator(toy_model(max_seq_len=16), characters)
    with pytest.raises(UsageError, match=r"Prompt 2 has 16 tokens.*max_seq_len = 16.*on_overflow=window"):
        generator.generate(["fine", "x" * 16], GREEDY)
    text = "0123456789abcdefghijklmnop"
    for count, dropped in ((4, 26 - 12), (100, 26 - 8)):
        config = GREEDY.replace(on_overflow="window", max_new_tokens=count)
        completion = generator.generate([text], config)[0]
        assert completion.num_prompt_tokens == 26
        assert completion.num_dropped_prompt_tokens == dropped
        assert completion.prompt == text
        assert completion.text[:4] == generator.generate([text[dropped:]], GREEDY)[0].text[:4]
    assert generator.generate(["short"], GREEDY)[0].num_dropped_prompt_tokens == 0


def collected(generator: Generator, prompts: Sequence[Any], config: GenerationConfig) -> tuple[list[Completion], Any]:
    pieces: dict[int, list[str]] = defaultdict(list)
    completions = generator.generate(prompts, config, on_text=lambda index, text: pieces[index].append(text))
    return completions, pieces


def test_streamed_pieces_join_to_the_text(toy_model: Build, characters: CharTokenizer) -> None:
    generator = Generator(toy_model(), characters, max_batch_size=3)
    completions, pieces = collected(generator, PROMPTS, SAMPLED.replace(stop=("e", "qu")))
    assert sorted(pieces) == [c for c in range(4) if completions[c].text]
    for index, completion in enumerate(completions):
        assert "".join(pieces[index]) == completion.text
        assert all(pieces[index])


@pytest.mark.parametrize("stop", [("cde",), ("gh", "cdefghij"), ("e", "fgh"), ("bcdefg",), ("f", "ef", "def")])
def test_stop_strings_of_several_tokens(chain_model: Build, characters: CharTokenizer, stop: tuple[str, ...]) -> None:
    model = chain_model(characters, characters.encode("abcdefghijk"))
    completions, pieces = collected(Generator(model, characters), ["a"], GREEDY.replace(stop=stop))
    endings = {
        ("cde",): "b",
        ("gh", "cdefghij"): "bcdef",
        ("e", "fgh"): "bcd",
        ("bcdefg",): "",
        ("f", "ef", "def"): "bc",
    }
    assert completions[0].text == endings[stop]
    assert completions[0].finish_reason == "stop"
    assert "".join(pieces[0]) == endings[stop]
    assert characters.decode(completions[0].token_ids).endswith(stop)


def test_a_stop_string_that_never_completes_is_shown_in_the_end(chain_model: Build, characters: CharTokenizer) -> None:
    model = chain_model(characters, characters.encode("abcdefghijk"))
    config = GREEDY.replace(stop=("fgX", "jka"), max_new_tokens=10)
    completions, pieces = collected(Generator(model, characters), ["a"], config)
    assert completions[0].text == "bcdefghijk"
    assert completions[0].finish_reason == "length"
    assert pieces[0] == ["b", "c", "d", "e", "fgh", "i", "jk"]


def test_a_stop_string_in_the_prompt_does_not_count(chain_model: Build, characters: CharTokenizer) -> None:
    model = chain_model(characters, characters.encode("abcdefghijk"))
    completion = Generator(model, characters).generate(["cda"], GREEDY.replace(stop=("ab", "cd")))[0]
    assert completion.text == "b"


@pytest.fixture(scope="module")
def single_bytes() -> Tokenizer:
    return train_tokenizer(TokenizerConfig(algorithm="bpe", vocab_size=260), ["bytes without merges"])


def test_characters_of_several_bytes_appear_whole(chain_model: Build, single_bytes: Tokenizer) -> None:
    cycle = "é漢😀"  # two, three and four bytes, all different
    ids = single_bytes.encode(cycle)
    assert len(set(ids)) == 9
    generator = Generator(chain_model(single_bytes, ids), single_bytes)
    completions, pieces = collected(generator, ["é"], GREEDY.replace(max_new_tokens=9))
    assert pieces[0] == ["漢", "😀", "é"]
    assert completions[0].text == "漢😀é"

    completions, pieces = collected(generator, ["é"], GREEDY.replace(max_new_tokens=5))
    assert pieces[0] == ["漢", "\ufffd"]
    assert completions[0].text == "漢\ufffd" == single_bytes.decode(completions[0].token_ids)

    completions, pieces = collected(generator, ["é"], GREEDY.replace(stop=("😀é",)))
    assert pieces[0] == ["漢"]
    assert completions[0].finish_reason == "stop"
    assert len(completions[0].token_ids) == 9


def test_text_like_a_special_token_is_ordinary_text(chain_model: Build, single_bytes: Tokenizer) -> None:
    generator = Generator(chain_model(single_bytes, single_bytes.encode("<eos>")), single_bytes)
    completions = generator.generate(["<eos>"], GREEDY.replace(max_new_tokens=10))
    assert completions[0].num_prompt_tokens == 5
    assert completions[0].text == "<eos><eos>"


def test_token_ids_are_prompts_too(toy_model: Build, characters: CharTokenizer) -> None:
    generator = Generator(toy_model(), characters)
    expected = generator.generate(["hello"], SAMPLED)[0]
    for ids in (
        characters.encode("hello"),
        np.array(characters.encode("hello")),
        torch.tensor([104, 101, 108, 108, 111]),
    ):
        assert generator.generate([ids], SAMPLED)[0] == expected
    assert generator.generate([[104, 3, 101]], SAMPLED)[0].num_prompt_tokens == 3  # a document's end may be given
    assert generator.generate([], SAMPLED) == []


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ("one text", r"pass \[prompt\]"),
        ([""], "The prompt is empty. Give at least one character"),
        (["a", ""], "Prompt 2 is empty"),
        ([[]], "empty"),
        ([[5, 128]], "token id 128 at position 1 is not in the vocabulary. Ids run from 0 to 127"),
        ([[-1]], "token id -1 at position 0"),
        ([[1.5]], "must be text or a list of integer token ids"),
        ([7], "must be text or a list of integer token ids"),
        (["bad \udcff byte"], "not valid Unicode text: character 4"),
    ],
)
def test_a_prompt_that_cannot_be_continued_is_refused(
    toy_model: Build, characters: CharTokenizer, prompts: Any, words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        Generator(toy_model(), characters).generate(prompts, GREEDY)


def test_a_tokenizer_larger_than_the_model_is_refused(toy_model: Build) -> None:
    with pytest.raises(TokenizerError, match="129 tokens, but the model has only 128"):
        Generator(toy_model(), CharTokenizer("é"))


def test_damaged_weights_are_named_with_the_position(toy_model: Build, characters: CharTokenizer) -> None:
    model = toy_model(position_encoding="learned")
    with torch.no_grad():
        model.added_positions.table[10] = math.nan
    generator, words = (
        Generator(model, characters),
        r"^The prompt \(position 11 of prompt and text\): .*earlier checkpoint",
    )
    for config in (GREEDY, SAMPLED):
        with pytest.raises(CheckpointError, match=words):
            generator.generate(["12345678"], config)
        with pytest.raises(CheckpointError, match=words):
            list(generator.stream("12345678", config))


@pytest.mark.parametrize("max_batch_size", [1, 2, 16])
@pytest.mark.parametrize(
    "settings", [{"temperature": 0}, {"num_completions": 2, "seed": 3}, {"num_beams": 2, "temperature": 0}]
)
def test_texts_beside_those_whose_logits_are_not_finite_are_written_to_their_end(
    toy_model: Build, characters: CharTokenizer, settings: dict[str, Any], max_batch_size: int
) -> None:
    model, (bad,) = toy_model(), characters.encode("@")
    without = {} if "num_beams" in settings else {"logit_bias": {bad: -1000}}  # which beams refuse
    config = GenerationConfig(max_new_tokens=12, **settings, **without)
    prompts, count = ["a good one", "b@d", "x", "another b@d one", "the last"], config.num_completions
    expected = Generator(model, characters).generate(prompts, config)
    with torch.no_grad():
        model.embedding.weight[bad] = math.nan
    generator, shown = Generator(model, characters, max_batch_size=max_batch_size), defaultdict[int, str](str)
    for _ in range(2):  # the engine is clean afterwards
        shown.clear()
        with pytest.raises(
            NotFiniteError, match=r"^Prompt 2 \(position 3 of .*\), Prompt 4 \(position 15 of .*\): .* not finite"
        ) as failure:
            generator.generate(prompts, config, on_text=lambda index, text: shown.update({index: shown[index] + text}))
        kept = [None if number // count in (1, 3) else each.token_ids for number, each in enumerate(expected)]
        assert [each and each.token_ids for each in failure.value.completions] == kept
        if count == 1:
            assert [shown[number] for number in (0, 2, 4)] == texts(expected[::2])


def test_a_failure_on_one_rank_is_the_error_of_all(toy_model: Build, characters: CharTokenizer) -> None:
    model, (bad,), store = toy_model(), characters.encode("@"), HashStore()
    config = GREEDY.replace(logit_bias={bad: -1000})
    with torch.no_grad():
        model.embedding.weight[bad] = math.nan
    good = Generator(model, characters).generate(["a", "x"], config)

    def write(rank: int) -> tuple[str, list[Completion | None]]:
        with pytest.raises(NotFiniteError) as failure:
            Generator(model, characters, ranks=Ranks(rank, 2, store=store)).generate(["a", "x", "b@d"], config)
        return str(failure.value), failure.value.completions

    with ThreadPoolExecutor(2) as ranks:
        one, other = ranks.map(write, range(2))
    assert one == other
    assert one[0].startswith("Prompt 3 (position 3")
    assert [each and each.text for each in one[1]] == [*texts(good), None]


def test_the_caller_can_stop_it(chain_model: Build, characters: CharTokenizer) -> None:
    generator = Generator(chain_model(characters, characters.encode("abcdefghijk")), characters, max_batch_size=2)
    answers = iter([False, False, False, True, True])
    pieces: list[str] = []
    completions = generator.generate(
        ["a", "e", "a"],
        GREEDY.replace(stop=("dX",)),
        on_text=lambda index, text: pieces.append(f"{index}{text}"),
        should_stop=lambda: next(answers),
    )
    assert texts(completions) == ["bcd", "fgh", ""]
    assert {c.finish_reason for c in completions} == {"abort"}
    assert "".join(pieces) == "0b1f0c1g1h0d"


def test_a_model_in_training_writes_without_dropout_and_goes_on_training(
    toy_model: Build, characters: CharTokenizer
) -> None:
    model = toy_model(dropout=0.5)
    generator = Generator(model, characters)
    expected = texts(generator.generate(PROMPTS, GREEDY))
    model.train()
    state = torch.get_rng_state()
    assert texts(generator.generate(PROMPTS, GREEDY)) == expected
    with torch.autocast("cpu", torch.bfloat16):
        assert texts(generator.generate(PROMPTS, GREEDY)) == expected
    assert all(module.training for module in model.modules())
    assert torch.equal(torch.get_rng_state(), state)
    loss = model(torch.tensor([[5, 6, 7]])).sum()
    loss.backward()  # generation left no inference tensors behind


@pytest.mark.parametrize("position_encoding", ["sinusoidal", "learned", "rope"])
def test_bfloat16_parameters_write_in_bfloat16(
    chain_model: Build, toy_model: Build, characters: CharTokenizer, position_encoding: str
) -> None:
    model = toy_model(position_encoding=position_encoding).to(torch.bfloat16)
    for completion in Generator(model, characters).generate(PROMPTS, SAMPLED):
        assert completion.text
        assert all(math.isfinite(logprob) for logprob in completion.logprobs)
    chain = chain_model(characters, characters.encode("abcd")).to(torch.bfloat16)
    assert Generator(chain, characters).generate(["a"], GREEDY.replace(max_new_tokens=5))[0].text == "bcdab"


@pytest.mark.parametrize("drafts", [False, True], ids=["lookup", "model"])
def test_guesses_change_no_text(toy_model: Build, characters: CharTokenizer, drafts: bool) -> None:
    model = toy_model().double()
    plain, guessing = (
        Generator(model, characters, draft_model=network)
        for network in (None, toy_model(num_layers=1) if drafts else None)
    )
    for config in (GREEDY, SAMPLED, SAMPLED.replace(on_overflow="slide", max_new_tokens=90)):
        expected = plain.generate(PROMPTS, config)
        found = guessing.generate(PROMPTS, config.replace(guesses=4))
        assert [done.token_ids for done in found] == [done.token_ids for done in expected]


@pytest.mark.parametrize("drafts", [False, True], ids=["lookup", "model"])
def test_guessed_texts_have_the_models_distribution(toy_model: Build, characters: CharTokenizer, drafts: bool) -> None:
    """Three tokens out of four allowed ones, against the products of probabilities from a slow loop."""
    model, letters = toy_model().double(), [65, 66, 67, 68]
    config = SAMPLED.replace(
        temperature=1.0, top_k=None, top_p=1.0, max_new_tokens=3, min_new_tokens=3, guesses=2,
        logit_bias=dict.fromkeys(letters, 100.0), seed=7, repetition_penalty=1.0,
    )  # fmt: skip
    expected = {}
    for text in product(letters, repeat=3):
        ids = torch.tensor([[*characters.encode("ABAB"), *text]])
        with torch.no_grad():
            logits = model(ids)[0, 3:6][:, letters]
        probabilities = logits.softmax(-1).tolist()
        expected[text] = math.prod(row[letters.index(token)] for row, token in zip(probabilities, text, strict=True))
    assert sum(expected.values()) == pytest.approx(1)
    guessing = Generator(model, characters, draft_model=toy_model(num_layers=1).double() if drafts else None)
    count = 3000
    done = guessing.generate(["ABAB"] * count, config)
    found = Counter(tuple(each.token_ids) for each in done)
    common = [text for text, share in expected.items() if share * count >= 5]
    rare = 1 - sum(expected[text] for text in common)
    cells = [(found[text], expected[text]) for text in common]
    cells += [(count - sum(found[text] for text in common), rare)] if rare * count >= 5 else []
    statistic = sum((seen - share * count) ** 2 / (share * count) for seen, share in cells)
    # Wilson and Hilferty 1931: a chi-square variable's cube root is nearly normal; 3.09 is passed once in a thousand.
    freedom = len(cells) - 1
    assert freedom >= 5
    assert ((statistic / freedom) ** (1 / 3) - (1 - 2 / 9 / freedom)) / math.sqrt(2 / 9 / freedom) < 3.09


def test_near_ties_are_counted(chain_model: Callable[..., Transformer], characters: CharTokenizer) -> None:
    """If all tokens are equally likely, each is a tie; if one leads by far, none is."""
    sure = Generator(chain_model(characters, characters.encode("abcd")), characters)
    (done,) = sure.generate(["a"], GREEDY.replace(max_new_tokens=5))
    assert done.text == "bcdab" and done.near_ties == 0
    level = chain_model(characters, characters.encode("abcd"), score=0.0)
    flat = Generator(level, characters)
    (done,) = flat.generate(["a"], GREEDY.replace(max_new_tokens=5))
    assert done.near_ties == len(done.token_ids)
