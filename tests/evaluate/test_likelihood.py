"""`LikelihoodScorer` against one pass of the network over every single text, without a cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sheepop.core.errors import UsageError
from sheepop.evaluate.likelihood import LikelihoodScorer
from sheepop.generate import GenerationConfig, Generator
from sheepop.generate.blocks import BlockManager
from sheepop.model import Transformer
from sheepop.tokenizer import CharTokenizer

NETWORKS: dict[str, dict[str, Any]] = {
    "learned positions": {},
    "rotary, grouped heads": {"position_encoding": "rope", "num_kv_heads": 2, "norm": "rmsnorm"},
    "windows": {"position_encoding": "rope", "sliding_window": 8, "sliding_layers": [0]},
    "delta net": {
        "gated_delta_net": {
            "layers": [1],
            "num_key_heads": 1,
            "num_value_heads": 2,
            "key_head_dim": 6,
            "value_head_dim": 5,
        },
    },
    "n-grams and convolutions": {"ngrams": {"orders": [2, 3], "rows": 64}, "short_convolution": 3},
}


def alone(
    model: Transformer, context: Sequence[int], continuation: Sequence[int]
) -> tuple[list[float], list[bool], list[float]]:
    """The definition: one pass over the whole text, or as much of its end as fits, in float64."""
    read = [*context, *continuation][-(model.config.max_seq_len + 1) :]
    with torch.no_grad():
        logits = model(torch.tensor([read[:-1]]))[0].double()
    rows = logits[-len(continuation) :].log_softmax(-1)
    targets = torch.tensor(list(continuation))
    logprobs = rows.gather(1, targets[:, None])[:, 0]
    return logprobs.tolist(), (rows.argmax(-1) == targets).tolist(), rows.max(-1).values.tolist()


def check(model: Transformer, texts: Sequence[tuple[list[int], list[int]]], tokens_per_pass: int) -> None:
    scorer = LikelihoodScorer(Generator(model, CharTokenizer()), tokens_per_pass=tokens_per_pass)
    for (context, continuation), found in zip(texts, scorer.score(texts), strict=True):
        logprobs, is_likeliest, best = alone(model, context, continuation)
        assert found.logprobs == pytest.approx(logprobs, abs=2e-4)
        assert found.total == pytest.approx(sum(logprobs), abs=2e-3)
        assert found.is_likeliest == is_likeliest
        assert found.is_greedy == all(is_likeliest)
        assert found.best_logprobs == pytest.approx(best, abs=2e-4)


@pytest.mark.parametrize("tokens_per_pass", [100, 13])  # with 13, most texts take several passes
@pytest.mark.parametrize("changes", NETWORKS.values(), ids=NETWORKS.keys())
def test_every_text_is_given_what_the_network_gives_it_alone(
    shaken: Callable[..., Transformer], changes: dict[str, Any], tokens_per_pass: int
) -> None:
    generator = torch.Generator().manual_seed(1)

    def drawn(count: int) -> list[int]:
        return torch.randint(4, 90, (count,), generator=generator).tolist()

    beginning = drawn(40)
    contexts = [drawn(1), drawn(15), drawn(16), drawn(17), drawn(63), drawn(90)]
    contexts += [[*beginning, *drawn(count)] for count in (0, 1, 5, 8, 20)]
    texts = [(context, drawn(count)) for context in contexts for count in (1, 2, 9, 30, 64)]
    check(shaken(**changes), texts, tokens_per_pass)


ids = st.integers(4, 9)


@settings(max_examples=30)
@given(
    st.lists(
        st.tuples(st.lists(ids, min_size=1, max_size=70), st.lists(ids, min_size=1, max_size=20)),
        min_size=1,
        max_size=12,
    ),
    st.integers(1, 200),
)
def test_texts_that_begin_alike_in_any_way_are_told_apart(
    shaken: Callable[..., Transformer], texts: list[tuple[list[int], list[int]]], tokens_per_pass: int
) -> None:
    # With few different tokens, many prefixes, contexts and whole texts are equal.
    again = [([*context, *continuation], continuation) for context, continuation in texts]
    check(shaken(num_layers=1), [*texts, *again, *texts], tokens_per_pass)


def test_more_short_texts_than_the_cache_has_blocks(shaken: Callable[..., Transformer]) -> None:
    texts = [([token], [token % 7 + 4, 9]) for token in range(4, 250)]
    check(shaken(vocab_size=256, num_layers=1), texts, tokens_per_pass=512)


def test_blocks_that_no_later_text_shares_are_used_again(
    shaken: Callable[..., Transformer], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: set[int] = set()
    take = BlockManager._take

    def counted(manager: BlockManager, kind: int) -> int:
        taken.add(block := take(manager, kind))
        return block

    monkeypatch.setattr(BlockManager, "_take", counted)
    # Eight texts of three blocks each; those of the first three begin with the same block.
    contexts = [[5] * 20, [5] * 16 + [6] * 4, [5] * 16 + [7] * 4, *([token] * 20 for token in range(8, 13))]
    check(shaken(num_layers=1), [(context, [9] * 20) for context in contexts], tokens_per_pass=20)
    assert len(taken) <= 5


def test_a_greedy_continuation_is_what_the_model_writes(shaken: Callable[..., Transformer]) -> None:
    generator = Generator(shaken(), CharTokenizer())
    prompt = CharTokenizer().encode("abcabc")

    written = generator.generate([prompt], GenerationConfig(temperature=0.0, max_new_tokens=12))[0]
    other = [*written.token_ids[:-1], written.token_ids[-1] % 80 + 4]
    found, not_found = LikelihoodScorer(generator).score([(prompt, written.token_ids), (prompt, other)])
    assert found.is_greedy
    assert not not_found.is_greedy
    assert found.logprobs == pytest.approx(written.logprobs, abs=1e-4)


def test_progress_is_told_once_for_every_text(shaken: Callable[..., Transformer]) -> None:
    told: list[int] = []
    texts = [([5, 6], [7]), ([5, 6], [7]), ([8], [9, 10])]
    LikelihoodScorer(Generator(shaken(), CharTokenizer())).score(texts, on_done=told.append)
    assert sum(told) == 3


def test_texts_without_two_ends_and_those_that_do_not_fit_are_refused(shaken: Callable[..., Transformer]) -> None:
    generator = Generator(shaken(), CharTokenizer())
    with pytest.raises(UsageError, match="context = 0 must be at least 1"):
        LikelihoodScorer(generator, context=0)
    scorer = LikelihoodScorer(generator)
    for text in (([], [5]), ([5], [])):
        with pytest.raises(UsageError, match="Text 2"):
            scorer.score([([5], [6]), text])
    with pytest.raises(UsageError, match="65 tokens does not fit the model's context of 64"):
        scorer.score([([5], [6] * 65)])
    assert scorer.score([]) == []
