"""Runs on pairs: what they train, what they count, and that text and pairs are not taken for each other."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sheepop.checkpoint import load_model
from sheepop.core.config import read_config_file
from sheepop.core.console import Console
from sheepop.core.errors import ConfigError, DataError
from sheepop.core.json_lines import read_json_lines
from sheepop.data import Corpus
from sheepop.data.batches import PairBatch
from sheepop.data.documents import Pair
from sheepop.generate import GenerationConfig
from sheepop.interpret.store import StoredTrace
from sheepop.jobs.config import load_config
from sheepop.jobs.data import build, show_step
from sheepop.jobs.generate import load_generator
from sheepop.jobs.learning_rate import find_rate
from sheepop.jobs.run.request import RunRequest
from sheepop.jobs.run.train import TrainOutcome
from sheepop.jobs.trace import trace_prompt
from sheepop.model import EncoderDecoder, ModelConfig, build_model

from ..running import train

TOY = (
    "tokenizer.algorithm=char",
    "model.d_model=16",
    "model.num_layers=1",
    "model.num_heads=2",
    "model.max_seq_len=24",
    "training.global_batch_size=4",
    "training.max_steps=4",
    "training.precision=fp32",
    "training.log_interval=1",
    "training.sample_tokens=4",
    "device=cpu",
)

PAIRS = (*TOY, "model.architecture=encoder_decoder")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    records = [{"source": f"double {number}", "target": str(2 * number)} for number in range(60)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for number in range(30):
        (folder / f"{number:02}.txt").write_text(f"Sheep number {number} jumps over the fence.\n" * 2)
    return folder


def test_which_token_fills_a_batch_up_changes_nothing() -> None:
    """So a tokenizer without a padding token does: its <eos> fills up, and is masked like any other."""
    sides = [([10, 11, 12, 13, 3], [2, 5, 3]), ([14, 3], [2, 6, 7, 8, 9, 3]), ([15, 16, 3], [2, 3])]
    pairs = [(np.array(source), np.array(target)) for source, target in sides]
    sizes = {"vocab_size": 20, "d_model": 16, "num_layers": 2, "num_heads": 2, "max_seq_len": 8, "dropout": 0.0}
    model = build_model(ModelConfig(architecture="encoder_decoder", **sizes), seed=1)

    def loss_and_gradients(batch: PairBatch) -> tuple[Tensor, list[Tensor]]:
        inputs = {name: torch.from_numpy(values) for name, values in batch.inputs().items()}
        logits_BTV = model.lm_head(model.hidden_states(**inputs))
        labels = torch.from_numpy(batch.labels).flatten()
        loss = torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), labels, ignore_index=-100, reduction="sum")
        return loss.detach(), list(torch.autograd.grad(loss, list(model.parameters())))

    alone = [loss_and_gradients(PairBatch.of([pair], 0)) for pair in pairs]
    loss = torch.stack([one for one, _ in alone]).sum()
    gradients = [torch.stack(found).sum(dim=0) for found in zip(*(many for _, many in alone), strict=True)]
    for filler in (0, 3, 17):
        found, found_gradients = loss_and_gradients(PairBatch.of(pairs, filler))
        torch.testing.assert_close(found, loss)
        torch.testing.assert_close(found_gradients, gradients, rtol=1e-4, atol=1e-5)


def run(data: Path, output: Path, *settings: str, console: Console | None = None, **options: Any) -> TrainOutcome:
    overrides = (*settings, f"data.paths={data}", f"output_dir={output}")
    return train(load_config(overrides=overrides), console=console, **options)


@pytest.fixture(scope="module")
def finished(pairs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "finished"
    traced = ("trace.prompt=double 3", 'trace.target="6"')
    run(pairs, path, *PAIRS, "training.sample_prompts=[double 3]", "training.label_smoothing=0.1", *traced)
    return path


def test_a_run_counts_target_tokens_and_leaves_a_model_that_writes_targets(finished: Path) -> None:
    corpus = Corpus.open(finished / "corpus")
    train_rows = [row for row in read_json_lines(finished / "metrics.jsonl")[0] if row["split"] == "train"]
    targets = [len(Pair.of(document).target) + 1 for document in corpus.documents("train")]
    # Four steps of four pairs, whose targets have two to four characters with their end.
    assert 4 * 4 * min(targets) <= train_rows[-1]["tokens"] <= 4 * 4 * max(targets)
    assert train_rows[-1]["objective"] > train_rows[-1]["loss"] * 0.5
    held_out = [Pair.of(document) for document in corpus.documents("validation")]
    loaded = load_model(finished)
    assert isinstance(loaded.model, EncoderDecoder)
    (done,) = load_generator(finished, device="cpu").generate(
        [held_out[0].source], GenerationConfig(temperature=0, max_new_tokens=5)
    )
    assert (done.prompt, done.continues_prompt) == (held_out[0].source, False)
    samples, _ = read_json_lines(finished / "samples.jsonl")
    assert {row["prompt"] for row in samples} == {"double 3"}


def test_source_and_target_are_traced(finished: Path, tmp_path: Path) -> None:
    """While it trains and afterwards, with a picture for each kind of attention."""
    trace = trace_prompt(finished / "checkpoints/step-00000004", "double 3", tmp_path / "trace", target="6").trace
    stored = StoredTrace.open(finished / "traces/step-00000004")
    for name in ("residuals", "source_residuals", "blocks.0.cross_attention.weights", "logits"):
        expected = (
            trace.residuals if name == "residuals" else trace.source.residuals if "source" in name else trace[name]
        )
        assert torch.equal(stored.read(name), expected), name
    kinds = ("attention", "cross_attention", "encoder_attention")
    for kind in kinds:
        data = json.loads((tmp_path / f"trace/{kind}_L0.json").read_text())
        path = f"encoder_blocks.0.{kind.removeprefix('encoder_')}" if kind.startswith("enc") else f"blocks.0.{kind}"
        assert data["weights"] == trace[f"{path}.weights"].tolist()
        assert len(data["tokens"]) == (9 if kind == "encoder_attention" else 2)
        assert len(data["keys"]) == (2 if kind == "attention" else 9)
    with pytest.raises(ConfigError, match=r"target needs a prompt"):
        run(tmp_path / "pairs", tmp_path / "run", *PAIRS, 'trace.target="6"')


def test_what_follows_from_the_architecture_is_written_down(finished: Path) -> None:
    data = read_config_file(finished / "config.yaml")["data"]
    assert data["extract"]["pair"] == ["source", "target"]
    assert data["packing"] is False
    assert data["clean"]["stages"] == ["exact_duplicates"]
    asked = json.loads((finished / "environment.json").read_text())["asked"]
    assert asked["data"]["extract"]["pair"] is None


def test_a_step_is_traced_to_whole_pairs(finished: Path) -> None:
    shown = list(show_step(finished, 2))
    assert [row for row, _ in shown] == [0, 1, 2, 3]
    for _, origin in shown:
        word, number, *_ = origin.text.split()
        assert (word, origin.kind, origin.pages) == ("double", "pair", ("source", "target"))
        line = int(origin.place.removeprefix("line ")) - 1
        assert number == f"{line}{2 * line}"


def test_a_budget_of_tokens_counts_target_tokens(pairs: Path, tmp_path: Path) -> None:
    settings = [setting for setting in PAIRS if not setting.startswith("training.max_steps")]
    outcome = run(pairs, tmp_path / "run", *settings, "training.max_tokens=100")
    targets = [len(Pair.of(document).target) + 1 for document in Corpus.open(outcome.run / "corpus").documents("train")]
    assert outcome.steps == math.ceil(100 / (4 * sum(targets) / len(targets)))


def test_a_tokenizer_of_pieces_does_as_well(pairs: Path, tmp_path: Path) -> None:
    outcome = run(pairs, tmp_path / "run", *PAIRS, "tokenizer.algorithm=bpe", "tokenizer.vocab_size=300")
    assert outcome.scores is not None
    corpus = Corpus.open(outcome.run / "corpus")
    tokenizer = corpus.tokenizer()
    targets = [Pair.of(document).target for document in corpus.documents("validation")]
    assert outcome.scores.tokens == sum(len(tokenizer.encode(target)) + 1 for target in targets)
    assert outcome.scores.bytes == sum(len(target.encode()) for target in targets)


def test_a_fork_keeps_the_architecture_and_reads_pairs(pairs: Path, finished: Path, tmp_path: Path) -> None:
    settings = [setting for setting in TOY if not setting.startswith(("model.", "tokenizer."))]
    outcome = run(pairs, tmp_path / "fork", *settings, fork=finished)
    assert isinstance(load_model(outcome.run).model, EncoderDecoder)


def test_a_learning_rate_is_looked_for_with_pairs(pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sheepop.jobs.learning_rate.NUM_STEPS", 30)
    config = load_config(overrides=(*PAIRS, f"data.paths={pairs}", f"output_dir={tmp_path / 'rate'}"))
    assert 1e-6 < find_rate(RunRequest.exactly(config)).test.suggestion < 1


def test_a_corpus_that_was_built_before_is_taken(pairs: Path, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    build([str(pairs), "data.extract.pair=[source,target]", "tokenizer.algorithm=char"], corpus, None, Console.silent())
    assert run(corpus, tmp_path / "run", *PAIRS).steps == 4
    with pytest.raises(ConfigError, match="holds pairs of source and target, but a decoder learns from text"):
        run(corpus, tmp_path / "other", *TOY)


def test_text_is_refused_by_an_encoder_decoder(text: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="An encoder-decoder learns from pairs: give JSON lines"):
        run(text, tmp_path / "run", *PAIRS)
    corpus = tmp_path / "corpus"
    build([str(text), "tokenizer.algorithm=char"], corpus, None, Console.silent())
    with pytest.raises(ConfigError, match="holds text, but an encoder-decoder learns from pairs"):
        run(corpus, tmp_path / "run", *PAIRS)


def test_pairs_are_refused_by_a_decoder(pairs: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"Pairs of source and target are for model\.architecture=encoder_decoder"):
        run(pairs, tmp_path / "run", *TOY)
    with pytest.raises(ConfigError, match=r"data\.extract\.pair reads pairs"):
        run(pairs, tmp_path / "run", *TOY, "data.extract.pair=[source,target]")


def test_a_decoder_reads_pairs_as_text_where_a_template_says_how(pairs: Path, tmp_path: Path) -> None:
    run(pairs, tmp_path / "run", *TOY, 'data.extract.template="{source} is {target}."', "data.clean.preset=none")
    (first, *_) = Corpus.open(tmp_path / "run" / "corpus").documents("train")
    assert first.text.startswith("double ") and " is " in first.text


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("training.sequence_length_warmup=[[2,8]]", r"training\.sequence_length_warmup cuts rows of text"),
        ("data.packing=true", r"data\.packing=true is for text"),
    ],
)
def test_settings_for_text_are_refused(pairs: Path, tmp_path: Path, setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(pairs, tmp_path / "run", *PAIRS, setting)


def test_long_pairs_are_refused_or_left_out_with_their_number(pairs: Path, tmp_path: Path) -> None:
    # "double 5" and its end are 9 tokens, "double 15" has one more.
    with pytest.raises(DataError, match="longest source has 10, the longest target 4"):
        run(pairs, tmp_path / "run", *PAIRS, "data.max_length=9")
    messages = io.StringIO()
    console = Console(quiet=True, file=messages)
    outcome = run(pairs, tmp_path / "left", *PAIRS, "data.max_length=9", "data.long_pairs=leave_out", console=console)
    corpus = Corpus.open(outcome.run / "corpus")
    long = sum(len(Pair.of(document).source) > 8 for document in corpus.documents("train"))
    assert f"{long} of {corpus.train.num_documents} training pairs are longer than 9 tokens and are left out" in (
        messages.getvalue()
    )


def test_memory_is_estimated_and_kept_to(pairs: Path, tmp_path: Path) -> None:
    outcome = run(pairs, tmp_path / "run", *PAIRS, "training.activation_checkpointing=auto", "training.memory_budget=1")
    assert read_config_file(outcome.run / "config.yaml")["training"]["activation_checkpointing"] == "none"
    with pytest.raises(ConfigError, match="with every block checkpointed"):
        run(pairs, tmp_path / "x", *PAIRS, "training.activation_checkpointing=auto", "training.memory_budget=1e-6")
