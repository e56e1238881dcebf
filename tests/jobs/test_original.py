"""A config.json of the original system loads unchanged and means the same."""

import json
from pathlib import Path
from typing import Any

import pytest

from sheepop.core.errors import ConfigError
from sheepop.jobs.config import load_config

ORIGINAL: dict[str, Any] = {
    "model": {
        "vocab_size": 50257,
        "d_model": 512,
        "num_layers": 6,
        "num_heads": 8,
        "d_ff": 2048,
        "max_seq_len": 512,
        "dropout": 0.1,
        "activation": "gelu",
        "layer_norm_eps": 1e-5,
        "bias": False,
        "tie_weights": True,
    },
    "training": {
        "batch_size": 32,
        "max_epochs": 10,
        "learning_rate": 1e-4,
        "weight_decay": 0.01,
        "warmup_steps": 1000,
        "max_grad_norm": 1.0,
        "gradient_accumulation_steps": 4,
        "use_amp": True,
        "save_dir": "./checkpoints",
        "log_interval": 100,
        "eval_interval": 1000,
    },
    "data": {"data_dir": "./data", "max_length": 512, "stride": 256, "num_workers": 4},
    "device": "cuda",
    "seed": 42,
}


def load(tmp_path: Path, tree: dict[str, Any]) -> Any:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(tree))
    return load_config(file)


def test_every_field_arrives_under_its_new_name(tmp_path: Path) -> None:
    config = load(tmp_path, ORIGINAL)
    model, training, data = config.model, config.training, config.data
    assert (model.vocab_size, model.d_model, model.num_layers, model.num_heads) == (50257, 512, 6, 8)
    assert (model.d_ff, model.max_seq_len, model.dropout, model.activation) == (2048, 512, 0.1, "gelu")
    assert (model.norm_eps, model.bias, model.tie_weights) == (1e-5, False, True)
    assert (training.micro_batch_size, training.global_batch_size) == (32, 128)
    assert (training.max_epochs, training.learning_rate, training.weight_decay) == (10, 1e-4, 0.01)
    assert (training.warmup_steps, training.max_grad_norm, training.precision) == (1000, 1.0, "auto")
    assert (training.log_interval, training.eval_interval) == (100, 1000)
    assert (data.paths, data.max_length, data.stride, data.num_workers) == (("./data",), 512, 256, 4)
    assert (config.output_dir, config.device, config.seed) == ("./checkpoints", "cuda", 42)


def test_what_the_original_did_without_a_setting_is_kept(tmp_path: Path) -> None:
    config = load(tmp_path, ORIGINAL)
    assert config.tokenizer.algorithm == "char"
    assert config.data.packing is False
    assert config.training.betas == (0.9, 0.999)


def test_use_amp_false_is_float32(tmp_path: Path) -> None:
    tree = {**ORIGINAL, "training": {**ORIGINAL["training"], "use_amp": False}}
    assert load(tmp_path, tree).training.precision == "fp32"


@pytest.mark.parametrize(
    ("section", "key", "value", "message"),
    [
        ("model", "d_modle", 3, r"model\.d_modle: unknown key"),
        ("training", "gradient_accumulation_steps", 0, r"gradient_accumulation_steps = 0"),
        ("training", "batch_size", "many", r"batch_size='many'|batch_size = 'many'"),
        ("model", "num_heads", 7, "not divisible by num_heads = 7"),
    ],
)
def test_a_wrong_value_is_named(tmp_path: Path, section: str, key: str, value: Any, message: str) -> None:
    tree = {**ORIGINAL, section: {**ORIGINAL[section], key: value}}
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, tree)


def test_our_own_files_are_not_mistaken_for_it(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model": {"d_model": 64, "num_heads": 4}, "training": {"max_epochs": 2}}))
    config = load_config(file)
    assert config.tokenizer.algorithm == "bpe"
    assert config.data.packing is True
