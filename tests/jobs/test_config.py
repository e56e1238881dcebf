"""The configuration tree as a whole: files, overrides, and errors that help."""

from pathlib import Path

import pytest

from sheepop.core.config import dump_config
from sheepop.core.errors import ConfigError
from sheepop.jobs.config import SheepOpConfig, load_config


def test_overrides_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("model: {d_model: 64, num_heads: 4}\ntraining:\n  learning_rate: 3e-4\n")
    config = load_config(file, ["model.d_model=128", "training.betas=[0.8, 0.9]"])
    assert (config.model.d_model, config.model.num_heads, config.model.head_dim) == (128, 4, 32)
    assert config.training.learning_rate == 3e-4
    assert config.training.betas == (0.8, 0.9)
    assert config.seed == 0


def test_a_written_config_reads_back_equal(tmp_path: Path) -> None:
    config = load_config(None, ["model.preset=llama-4m", "model.num_kv_heads=2", "generation.stop=[a, b]", "seed=7"])
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(config))
    assert load_config(file) == config


def test_a_file_with_keys_that_were_renamed_is_read_under_their_present_names(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        "tuning:\n  method: ppo\n  ppo: {decay: 0.9, discount: 0.99, divergence_weight: 0.2, value_model: apart}\n"
    )
    ppo = load_config(file).tuning.ppo
    assert (ppo.gae_lambda, ppo.gamma, ppo.kl_coef, ppo.value_model) == (0.9, 0.99, 0.2, "separate")
    file.write_text("tuning: {method: grpo, grpo: {mean_over: longest, divergence_estimator: k2}}\n")
    grpo = load_config(file).tuning.grpo
    assert (grpo.loss_type, grpo.kl_estimator) == ("dr_grpo", "k2")
    file.write_text("tuning: {method: dpo, dpo: {loss: ipo, loss_type: hinge}}\n")
    with pytest.raises(ConfigError, match=r"tuning\.dpo\.loss: unknown key"):
        load_config(file)
    with pytest.raises(ConfigError, match=r"tuning\.ppo\.decay: unknown key"):
        load_config(None, ["tuning.ppo.decay=0.9"])


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("training.learning_rat=1", ["training.learning_rat: unknown key", "training.learning_rate"]),
        ("learning_rate=1", ["learning_rate: unknown key", "training.learning_rate"]),
        ("training.learning_rate=-1", ["training.learning_rate = -1", "greater than 0"]),
        ("training.learning_rate=fast", ["training.learning_rate = 'fast'", "number"]),
        ("model.dropout=1.5", ["model.dropout = 1.5", "less than 1"]),
        ("model.num_heads=3", ["d_model = 256 is not divisible by num_heads = 3", "multiple of 3"]),
        ("model.preset=gpt5", ["preset 'gpt5' is not known", "gpt2"]),
        ("model.norm=batchnorm", ["model.norm = 'batchnorm'", "layernorm", "rmsnorm"]),
        ("training.micro_batch_size=5", ["micro_batch_size = 5 does not divide", "global_batch_size = 32"]),
        ("device=tpu", ["device = 'tpu'", "cuda"]),
        ("seed=-1", ["seed = -1"]),
        ("no-equals-sign", ["'no-equals-sign' is not a setting of the form key=value"]),
    ],
)
def test_a_wrong_setting_is_explained(override: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [override])
    for part in parts:
        assert part in str(caught.value)


def test_nothing_changes_a_config_after_validation() -> None:
    config = SheepOpConfig()
    with pytest.raises(ValueError, match="frozen"):
        config.seed = 3  # type: ignore[misc]


def test_a_preset_gives_way_to_keys_beside_it() -> None:
    config = load_config(None, ["model.preset=gpt2", "model.num_layers=3"])
    assert (config.model.num_layers, config.model.d_model, config.model.vocab_size) == (3, 768, 50257)
