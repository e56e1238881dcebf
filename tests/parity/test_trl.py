"""The losses of TRL's trainers for the same model and the same examples, where TRL is installed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sheepop.adapt.scalar_head import REWARD_HEAD, add_scalar_head
from sheepop.checkpoint import load_model
from sheepop.core.console import Console
from sheepop.jobs.exchange import import_model
from sheepop.posttrain.encoding import ExampleEncoder
from sheepop.posttrain.example_batches import GroupedExamples, PackedExamples
from sheepop.posttrain.example_store import ExampleStore, build_examples
from sheepop.posttrain.preference import PairwisePreference, PairwiseReward, PreferenceLoss, log_probabilities_of
from sheepop.posttrain.rows import Preference, Supervised
from sheepop.tokenizer import TokenizerConfig, train_tokenizer
from sheepop.tokenizer.ready_templates import template_of
from sheepop.train.objective import NextToken
from sheepop.train.validation import mean_losses

trl = pytest.importorskip("trl")
transformers = pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")

WORDS = ["sheep", "wool", "fence", "barn", "lamb", "grass"]


def pair(number: int) -> dict[str, str]:
    prompt, wrong = " ".join(WORDS[: 1 + number % 4]), f" no {WORDS[-number % 6]}"
    return {"prompt": prompt, "chosen": f" {WORDS[number % 6]} {number}", "rejected": wrong * (1 + number % 3)}


PAIRS = [pair(number) for number in range(6)]
SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 6, "use_cpu": True, "report_to": [], "bf16": False, "max_length": 96,
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A policy and a reference as transformers saves them, and both imported."""
    place = tmp_path_factory.mktemp("trl")
    tokenizer = train_tokenizer(TokenizerConfig(vocab_size=260), ["sheep wool\n" * 9], console=Console.silent())
    found = {}
    for seed, name in enumerate(("policy", "reference")):
        torch.manual_seed(seed)
        config = transformers.LlamaConfig(
            vocab_size=260, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=128, bos_token_id=2, eos_token_id=3, pad_token_id=0,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config)
        for parameter in model.parameters():  # far enough from each other that losses differ
            parameter.data.normal_(0, 0.2)
        found[name] = place / name
        found[name].mkdir()
        tokenizer.save(found[name])
        model.save_pretrained(found[name])
        import_model(found[name], place / f"ours-{name}")
        found[f"ours-{name}"] = place / f"ours-{name}"
    return found


def trained(trainer: Any) -> float:
    """The loss of its first batch."""
    (batch,) = list(trainer.get_train_dataloader())
    with torch.no_grad():
        return float(trainer.compute_loss(trainer.model.eval(), trainer._prepare_inputs(batch)))


def store(models: dict[str, Path], place: Path, rows: list[dict[str, Any]], wanted: type[Any]) -> ExampleStore:
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = load_model(models["ours-policy"]).tokenizer
    settings: dict[str, Any] = {"max_length": 96, "long_examples": "refuse", "validation_fraction": 0.0}
    with template_of(tokenizer) as template:
        encoder = ExampleEncoder(tokenizer, template)
        return build_examples(
            [place / "rows.jsonl"], place / "store", encoder, wanted, console=Console.silent(), **settings
        )


@pytest.fixture
def ours(models: dict[str, Path], tmp_path: Path) -> Callable[..., float]:
    """``ours(objective, reference=...)``: our loss of all pairs."""

    def loss(objective: Any, *, reference: bool = False, head: torch.Tensor | None = None) -> float:
        model = load_model(models["ours-policy"]).model
        pairs = GroupedExamples(store(models, tmp_path, PAIRS, Preference).train, max_length=96, pad_id=0)
        settings: dict[str, Any] = {"batch_size": 6, "precision": "fp32", "device": "cpu"}
        if reference:
            pairs = pairs.with_reference(
                log_probabilities_of(load_model(models["ours-reference"]).model, pairs, **settings)
            )
        if head is not None:
            add_scalar_head(model, REWARD_HEAD).weight.data.copy_(head)
        return mean_losses(model, objective, pairs, **settings).loss

    return loss


@pytest.mark.parametrize(
    ("theirs", "kind", "smoothing"),
    [
        ("sigmoid", "sigmoid", 0.0), ("hinge", "hinge", 0.0), ("robust", "robust", 0.2),
        ("ipo", "ipo", 0.0),
    ],
)  # fmt: skip
def test_preference_losses_are_those_of_trl(
    models: dict[str, Path], ours: Callable[..., float], tmp_path: Path, theirs: str, kind: Any, smoothing: float
) -> None:
    trainer = trl.DPOTrainer(
        transformers.AutoModelForCausalLM.from_pretrained(models["policy"], dtype=torch.float32),
        transformers.AutoModelForCausalLM.from_pretrained(models["reference"], dtype=torch.float32),
        args=trl.DPOConfig(str(tmp_path / "out"), beta=0.3, loss_type=[theirs], label_smoothing=smoothing, **SETTINGS),
        train_dataset=datasets.Dataset.from_list(PAIRS),
        processing_class=transformers.AutoTokenizer.from_pretrained(models["policy"]),
    )
    loss = ours(PairwisePreference([(1.0, PreferenceLoss(kind, 0.3, smoothing))]), reference=True)
    assert loss == pytest.approx(trained(trainer), rel=1e-4)


def test_the_loss_of_a_reward_model_is_that_of_trl(
    models: dict[str, Path], ours: Callable[..., float], tmp_path: Path
) -> None:
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(
        models["policy"], num_labels=1, dtype=torch.float32
    )
    head = torch.randn(1, 32, generator=torch.Generator().manual_seed(0))
    theirs.score.weight.data.copy_(head)
    rows = [{side: row["prompt"] + row[side] for side in ("chosen", "rejected")} for row in PAIRS]
    trainer = trl.RewardTrainer(
        theirs,
        args=trl.RewardConfig(str(tmp_path / "out"), center_rewards_coefficient=0.05, **SETTINGS),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=transformers.AutoTokenizer.from_pretrained(models["policy"]),
    )
    assert ours(PairwiseReward(0.05, margins=False), head=head) == pytest.approx(trained(trainer), rel=1e-4)


def test_the_loss_of_fine_tuning_is_that_of_trl(models: dict[str, Path], tmp_path: Path) -> None:
    rows = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in PAIRS]
    trainer = trl.SFTTrainer(
        transformers.AutoModelForCausalLM.from_pretrained(models["policy"], dtype=torch.float32),
        args=trl.SFTConfig(str(tmp_path / "out"), **SETTINGS),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=transformers.AutoTokenizer.from_pretrained(models["policy"]),
    )
    packed = PackedExamples(store(models, tmp_path, rows, Supervised).train, max_length=96, pad_id=0)
    assert packed.num_samples < len(rows)
    model = load_model(models["ours-policy"]).model
    found = mean_losses(model, NextToken(), packed, batch_size=9, precision="fp32", device="cpu")
    assert found.loss == pytest.approx(trained(trainer), rel=1e-4)
