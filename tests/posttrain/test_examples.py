"""Examples on disk and in rows: nothing lost, nothing twice, packed as unpacked."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sheepop.core.console import Console
from sheepop.core.errors import DataError
from sheepop.model import ModelConfig, build_model
from sheepop.posttrain.encoding import ExampleEncoder
from sheepop.posttrain.example_batches import PackedExamples, PaddedExamples, best_fit
from sheepop.posttrain.example_store import ExampleSplit, ExampleStore, build_examples
from sheepop.posttrain.rollouts import questions_of
from sheepop.posttrain.rows import Prompt
from sheepop.posttrain.supervised import NoisyEmbeddings
from sheepop.tokenizer import ChatTemplate, Tokenizer
from sheepop.train import TrainingConfig
from sheepop.train.budget import runner_here
from sheepop.train.objective import NextToken
from sheepop.train.placement import OneDevice
from sheepop.train.source import PreparedStep
from sheepop.train.tensor_batch import TensorBatch

from .conftest import MARKED, chat

NETWORK = ModelConfig(vocab_size=128, d_model=32, num_layers=1, num_heads=2, max_seq_len=16, dropout=0.0)
Build = Callable[..., ExampleStore]


@pytest.fixture
def build(tokenizers: dict[str, Tokenizer], tmp_path: Path) -> Iterator[Build]:
    """``build(path, validation=PATH, max_length=N, ...)``: the store of the examples of a file."""
    with ChatTemplate(MARKED) as template:
        encoder = ExampleEncoder(tokenizers["bpe"], template)

        def make(path: Path, name: str = "store", **settings: Any) -> ExampleStore:
            given = {"max_length": 64, "long_examples": "refuse", "validation_fraction": 0.0, **settings}
            return build_examples([path], tmp_path / name, encoder, console=Console.silent(), **given)

        yield make


def test_a_prompt_keeps_its_messages_for_rewards(build: Build, lines: Callable[..., Path]) -> None:
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "two?"}]
    path = lines([{"prompt": asked, "answer": 2}, {"prompt": "two?", "answer": 2}])
    one, other = questions_of(build(path, wanted=Prompt).train, [0, 1])
    assert (one.messages, one.fields) == (asked, {"answer": 2})
    assert (other.messages, other.fields) == ((), {"answer": 2})


def split_of(examples: list[list[bool]]) -> ExampleSplit:
    """A split whose tokens are numbered through from 1; an example is where its tokens are learnt."""
    flat = [flag for example in examples for flag in example]
    return ExampleSplit(
        np.arange(1, len(flat) + 1, dtype=np.int32),
        np.array(flat, dtype=np.uint8),
        np.cumsum([len(example) for example in examples], dtype=np.int64),
    )


def test_a_store_holds_every_example_once_and_counts_reconcile(
    build: Build, lines: Callable[..., Path], tokenizers: dict[str, Tokenizer]
) -> None:
    path = lines([chat(f"{number} plus five?", f"seven {number}") for number in range(200)])
    store = build(path, validation_fraction=0.25)
    tokenizer = tokenizers["bpe"]
    texts = [
        tokenizer.decode(split.example(number).ids.tolist())
        for split in (store.train, store.validation)
        for number in range(split.num_examples)
    ]
    assert sorted(texts) == sorted(f"user\n{n} plus five?\nassistant\nseven {n}\n" for n in range(200))
    assert 25 < store.validation.num_examples < 75
    counts = store.manifest["examples"]
    assert counts["read"] == 200 == counts["train"] + counts["validation"] + counts["left_out"]
    assert build(path, "again", validation_fraction=0.25).fingerprint == store.fingerprint


def test_equal_examples_are_never_on_both_sides(build: Build, lines: Callable[..., Path]) -> None:
    store = build(lines([chat(f"{number % 10}?", "seven") for number in range(200)]), validation_fraction=0.5)
    sides = [
        {split.example(number).ids.tobytes() for number in range(split.num_examples)}
        for split in (store.train, store.validation)
    ]
    assert sides[0] and sides[1] and not sides[0] & sides[1]


def test_held_out_examples_may_come_from_a_file(build: Build, lines: Callable[..., Path]) -> None:
    path, other = lines([chat("a", "b")] * 3), lines([chat("c", "d")] * 2, name="other.jsonl")
    store = build(path, validation_fraction=0.9, validation_paths=[other])
    assert (store.train.num_examples, store.validation.num_examples) == (3, 2)


def test_long_examples_go_as_the_policy_says(build: Build, lines: Callable[..., Path]) -> None:
    path = lines([chat("a", "b"), chat("a", "seven " * 30)])
    with pytest.raises(DataError, match=r"1 example of 2 have more than 24 tokens; the longest has \d+\. Raise"):
        build(path, "refused", max_length=24)
    left_out = build(path, "left", max_length=24, long_examples="leave_out")
    assert (left_out.train.num_examples, left_out.manifest["examples"]["left_out"]) == (1, 1)
    cut = build(path, "cut", max_length=24, long_examples="cut")
    assert cut.train.lengths.tolist()[1] == 24
    path = lines([chat("a", "b"), chat("seven " * 30, "a")])
    with pytest.raises(DataError, match="line 2: has no token to learn within the first 24"):
        build(path, "nothing", max_length=24, long_examples="cut")


def test_a_damaged_store_is_named(build: Build, lines: Callable[..., Path]) -> None:
    store = build(lines([chat("a", "b")]))
    file = store.directory / "train-supervised.bin"
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(DataError, match=r"train-supervised\.bin is missing or damaged"):
        ExampleStore.open(store.directory)
    manifest = store.directory / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format_version": 2}))
    with pytest.raises(DataError, match="Install a newer SheepOp"):
        ExampleStore.open(store.directory)


@given(st.lists(st.integers(1, 20), max_size=40))
def test_rows_hold_every_example_once_and_are_no_worse_than_first_fit(lengths: list[int]) -> None:
    rows = best_fit(lengths, 20)
    assert sorted(number for row in rows for number in row) == list(range(len(lengths)))
    sums: list[int] = []
    for length in sorted(lengths, reverse=True):  # first-fit decreasing, the slow way
        place = next((i for i, total in enumerate(sums) if total + length <= 20), None)
        sums = [*sums, length] if place is None else [t + length * (i == place) for i, t in enumerate(sums)]
    assert all(sum(lengths[number] for number in row) <= 20 for row in rows)
    assert len(rows) <= len(sums) + 1


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=9), min_size=1, max_size=12))
def test_every_learnt_token_is_a_label_once(examples: list[list[bool]]) -> None:
    split = split_of(examples)
    expected, begin = [], 0
    for example in examples:  # the first token of an example is predicted from nothing
        expected += [begin + place + 1 for place, flag in enumerate(example) if flag and place]
        begin += len(example)
    for rows in (PackedExamples(split, max_length=10, pad_id=0), PaddedExamples(split, max_length=10, pad_id=0)):
        batch = rows.batch(np.arange(rows.num_samples))
        labels = batch.labels[batch.labels != -100]
        assert sorted(labels.tolist()) == expected
        # Tokens are numbered through, so the one before a label is one less, in the same document.
        assert (batch.input_ids[batch.labels != -100] == labels - 1).all()
        inputs = batch.input_ids[batch.input_ids != 0]
        assert sorted(inputs.tolist()) == list(range(1, split.num_tokens + 1))


def test_padded_rows_are_as_long_as_the_longest_of_their_batch_and_a_plan_takes_them_so() -> None:
    rows = PaddedExamples(split_of([[True] * 3, [True] * 5, [True] * 9]), max_length=16, pad_id=0)
    batch = rows.batch(np.array([0, 1])).cut(rows.max_length)
    assert (batch.input_ids.shape, rows.max_length) == ((2, 5), 9)


def test_micro_batches_of_padded_rows_have_no_padding_that_all_of_their_rows_share() -> None:
    rows = PaddedExamples(split_of([[True] * 3, [True] * 9, [True] * 5, [True] * 2]), max_length=16, pad_id=0)
    batch = rows.batch(np.arange(4))
    step = PreparedStep.of(batch, 2, NextToken(), device="cpu")
    assert [piece.labels.shape for piece in step.micro_batches] == [(2, 9), (2, 5)]
    assert (step.num_tokens, step.num_reported, step.num_computed) == (15, 15, 28)
    for number, piece in enumerate(step.micro_batches):
        for whole, cut in ((batch.input_ids, piece.inputs["input_ids"]), (batch.labels, piece.labels)):
            assert cut.tolist() == whole[2 * number : 2 * number + 2, : cut.shape[1]].tolist()


def test_the_loss_of_packed_examples_is_that_of_each_alone() -> None:
    generator = np.random.default_rng(1)
    split = split_of([(generator.random(length) < 0.6).tolist() for length in (5, 9, 3, 12, 7, 1, 8)])
    model = build_model(NETWORK.replace(num_layers=2), 0, "cpu").double()
    placement = OneDevice(model, precision="fp32", device="cpu")
    found = {}
    for rows in (PackedExamples(split, max_length=16, pad_id=0), PaddedExamples(split, max_length=16, pad_id=0)):
        model.zero_grad()
        total = 0.0
        for number in range(rows.num_samples):
            batch = TensorBatch.from_numpy(rows.batch(np.array([number])), "cpu")
            loss = NextToken().loss_sums(placement, batch).objective
            loss.backward()
            total += loss.item()
        found[type(rows)] = total, model.embedding.weight.grad.clone()
    packed, alone = found.values()
    assert packed[0] == pytest.approx(alone[0], rel=1e-6)
    torch.testing.assert_close(packed[1], alone[1], rtol=1e-4, atol=1e-6)


def test_a_step_of_unequal_rows_has_the_gradient_of_one_batch() -> None:
    """Rows with 1, 9 and 4 learnt tokens: the mean is over all of them, however the step is cut."""
    split = split_of([[False] * (16 - learnt) + [True] * learnt for learnt in (1, 9, 4)])
    batch = PackedExamples(split, max_length=16, pad_id=0).batch(np.arange(3))
    found = []
    for size in (3, 2, 1):
        model = build_model(NETWORK, seed=1, device="cpu").double()
        runner = runner_here(model, NextToken(), TrainingConfig(max_grad_norm=None), "fp32", "cpu")
        runner.gradients(PreparedStep.of(batch, size, NextToken(), device="cpu"))
        found.append([parameter.grad for parameter in model.parameters()])
    wanted = build_model(NETWORK, seed=1, device="cpu").double()
    logits = wanted(torch.from_numpy(batch.input_ids))
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.from_numpy(batch.labels).flatten()).backward()
    for gradients in found:
        for ours, parameter in zip(gradients, wanted.parameters(), strict=True):
            torch.testing.assert_close(ours, parameter.grad, rtol=1e-12, atol=1e-15)


def test_rows_of_a_mixture_are_each_of_one_part() -> None:
    split = split_of([[False, True]] * 7)
    parts = [np.array([0, 2, 4, 6]), np.array([1, 3, 5])]
    rows = PackedExamples(split, max_length=6, pad_id=0, parts=parts).rows
    assert sorted(number for row in rows for number in row) == list(range(7))
    assert all(len({number % 2 for number in row}) == 1 for row in rows)


def test_what_conversations_lose_is_counted_once(
    tokenizers: dict[str, Tokenizer], lines: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = [{"from": who, "value": what} for who, what in (("human", "2+2?"), ("gpt", "4"), ("human", "3?"))]
    data = lines([{"conversations": turns}, {"conversations": turns[:2]}, {"conversations": turns}])
    given: dict[str, Any] = {"max_length": 64, "long_examples": "refuse", "validation_fraction": 0.0}
    with ChatTemplate(MARKED) as template:
        encoder = ExampleEncoder(tokenizers["bpe"], template)
        store = build_examples([data], tmp_path / "store", encoder, console=Console(), **given)
    assert store.manifest["changed"] == {"Left out questions after the last answer": 2}
    assert "Left out questions after the last answer in 2 conversations." in capsys.readouterr().err
    names, numbers = store.files
    assert (names, numbers.tolist()) == ([str(data)], [0, 0, 0])


def test_noise_on_embeddings_has_the_bound_of_the_paper_and_is_gone_afterwards() -> None:
    model = build_model(NETWORK, 0, "cpu")
    placement = OneDevice(model, precision="fp32", device="cpu")
    split = split_of([[True] * 16] * 4)
    rows = PackedExamples(split, max_length=16, pad_id=0)
    batch = TensorBatch.from_numpy(rows.batch(np.arange(4)), "cpu")
    clean = placement.modules.embedding(batch.inputs["input_ids"])
    seen: list[torch.Tensor] = []

    class Recorded(NextToken):
        def loss_sums(self, network: Any, batch: TensorBatch) -> Any:
            seen.append(network.modules.embedding(batch.inputs["input_ids"]).detach())
            return super().loss_sums(network, batch)

    plain = NextToken().loss_sums(placement, batch).objective.item()
    torch.manual_seed(0)
    noisy = NoisyEmbeddings(Recorded(), alpha=5.0).loss_sums(placement, batch).objective.item()
    noise = seen[0] - clean
    bound = 5.0 / (16 * 32) ** 0.5
    assert 0.98 * bound < noise.abs().max().item() <= bound * (1 + 1e-6)
    assert noise.std().item() == pytest.approx(bound / 3**0.5, rel=0.05)  # of a uniform distribution
    assert noisy != plain
    assert NextToken().loss_sums(placement, batch).objective.item() == plain


def test_examples_that_cannot_be_learnt_are_left_out_and_counted(
    tokenizers: dict[str, Tokenizer], lines: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line is no object, and the template has no place for the reasoning of another."""
    thought = {"messages": [*chat("a", "b")["messages"][:1], {"role": "assistant", "content": "b", "thinking": "c"}]}
    data = lines([chat("What?", "seven"), "[]", thought, chat("And?", "eight")])
    for policy in ("refuse", "leave_out"):
        with ChatTemplate(MARKED, {"eos_token": "<eos>"}) as template:
            encoder, place = ExampleEncoder(tokenizers["bpe"], template), tmp_path / policy
            given: Any = {"max_length": 64, "long_examples": "refuse", "validation_fraction": 0.0}
            if policy == "refuse":
                with pytest.raises(DataError, match=r"1 of 4 lines cannot be used.*\n.*line 2: is not a JSON object"):
                    build_examples([data], place, encoder, bad_examples="refuse", console=Console.silent(), **given)
                continue
            store = build_examples([data], place, encoder, bad_examples="leave_out", console=Console(), **given)
    counts = store.manifest["examples"]
    assert (counts["read"], counts["train"], counts["bad"]) == (4, 2, 2)
    assert [problem.partition(", ")[2] for problem in store.manifest["problems"]] == [
        "line 2: is not a JSON object",
        "line 3: messages[1].reasoning_content: the chat template leaves out this field. Remove it, or give another "
        "template: tuning.chat_template=FILE",
    ]
    assert "2 examples cannot be learnt and were left out" in capsys.readouterr().err.replace("\n", " ")
