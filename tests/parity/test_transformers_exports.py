"""What SheepOp exports is loaded by transformers and computes the same logits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from sheepop.checkpoint import save_model
from sheepop.jobs.exchange import export_model, import_model
from sheepop.model import ModelConfig, build_model
from sheepop.tokenizer import CharTokenizer

transformers = pytest.importorskip("transformers")

ROWS = 133


def loaded(directory: Path) -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()


def random_ids() -> torch.Tensor:
    return torch.randint(4, 128, (2, 40), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def test_a_model_that_was_imported_goes_back_to_its_family(pair, tmp_path):
    result = export_model(pair.ours.directory, tmp_path / "back", max_shard_size="20KB")
    assert result["family"] == pair.theirs.config.model_type
    # The first two rows of OPT's positions are never read.
    unread = sum(
        2 * pair.ours.config.d_model for name, _ in pair.theirs.named_parameters() if "embed_positions" in name
    )
    # The factors of layers are no parameters of theirs, and do not change in training.
    factors = [tensor for name, tensor in pair.theirs.named_buffers() if name.endswith("layer_scalar")]
    assert result["parameters"] == sum(weight.numel() for weight in (*pair.theirs.parameters(), *factors)) - unread
    back = loaded(tmp_path / "back")
    assert type(back) is type(pair.theirs)
    for (name, weight), (theirs, expected) in zip(back.named_parameters(), pair.theirs.named_parameters(), strict=True):
        assert name == theirs
        assert torch.equal(weight, expected), name
    torch.testing.assert_close(back(random_ids()).logits, pair.theirs(random_ids()).logits, atol=1e-5, rtol=0)


MADE_HERE = {
    "llama": {"preset": "llama-1m", "d_model": 32, "num_heads": 4, "num_kv_heads": 2, "tie_weights": False},
    "mistral": {"preset": "llama-1m", "d_model": 32, "num_heads": 4, "sliding_window": 5},
    "qwen2": {"preset": "llama-1m", "d_model": 32, "num_heads": 4, "attention_bias": True},
    "qwen3": {"preset": "llama-1m", "d_model": 32, "num_heads": 4, "qk_norm": "head", "sliding_window": 6,
              "sliding_layers": (1,)},
    "phi3": {"preset": "llama-1m", "d_model": 32, "num_heads": 4, "rotary_fraction": 0.5},
    "olmo2": {"preset": "llama-1m", "d_model": 32, "num_heads": 4, "qk_norm": "width", "norm_position": "output"},
    "gpt2": {"preset": "gpt2", "d_model": 32, "num_heads": 4},
    "mixtral": {"preset": "llama-1m", "d_model": 32, "num_heads": 4, "experts": {"count": 4}},
    "bloom": {"preset": "gpt2", "d_model": 32, "num_heads": 4, "position_encoding": "alibi", "embedding_norm": True},
}  # fmt: skip


@pytest.mark.parametrize("family", MADE_HERE)
@torch.no_grad()
def test_a_model_that_was_made_here_goes_to_the_first_family_that_expresses_it(family, tmp_path):
    sizes = {"vocab_size": ROWS, "num_layers": 2, "max_seq_len": 64, "dropout": 0.0}
    model = build_model(ModelConfig(**{**MADE_HERE[family], **sizes}), seed=1).eval()
    for index, parameter in enumerate(model.parameters()):
        parameter.add_(0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index)))
    save_model(tmp_path / "ours", model, CharTokenizer(), {})
    assert export_model(tmp_path / "ours", tmp_path / "theirs")["family"] == family
    ids = random_ids()
    torch.testing.assert_close(loaded(tmp_path / "theirs")(ids).logits, model(ids), atol=1e-4, rtol=0)


@torch.no_grad()
def test_bfloat16_stays_bfloat16_there_and_back(tmp_path):
    config = transformers.LlamaConfig(
        vocab_size=ROWS, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        bos_token_id=2, eos_token_id=[3, 7], pad_token_id=0, max_position_embeddings=64,
    )  # fmt: skip
    theirs = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    theirs.save_pretrained(tmp_path / "theirs")
    CharTokenizer().save(tmp_path / "theirs")
    assert import_model(tmp_path / "theirs", tmp_path / "ours")["dtypes"] == ["bfloat16"]
    export_model(tmp_path / "ours", tmp_path / "back")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert back.dtype == torch.bfloat16
    for weight, expected in zip(back.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(weight, expected)
    assert back.generation_config.eos_token_id == [3, 7]
    assert json.loads((tmp_path / "back" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_the_exported_tokenizer_gives_the_same_ids(tmp_path):
    config = ModelConfig(preset="gpt2", vocab_size=ROWS, d_model=32, num_heads=4, num_layers=1, max_seq_len=64)
    save_model(tmp_path / "ours", build_model(config, seed=0), CharTokenizer(), {})
    export_model(tmp_path / "ours", tmp_path / "theirs")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")
    text = "One sheep, two sheep.\n"
    assert theirs(text, add_special_tokens=False)["input_ids"] == CharTokenizer().encode(text)
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (2, 3, 0)
    assert theirs.model_max_length == 64
