"""MiniCPM, for which transformers has no class: its Llama with the factors in the weights computes the same."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from sheepop.checkpoint import load_model
from sheepop.checkpoint.exchange.families.descendants import MINICPM
from sheepop.checkpoint.expected_tensors import expected_tensors
from sheepop.core.errors import CheckpointError
from sheepop.jobs.exchange import export_model, import_model
from sheepop.tokenizer import CharTokenizer

transformers = pytest.importorskip("transformers")
SIZES = {
    "vocab_size": 133, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-3,
}  # fmt: skip
FACTORS = {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 8}
# The configuration of MiniCPM-2B, which has 2,724,880,896 parameters.
PUBLISHED = {
    "_name_or_path": "openbmb/CPM-2B", "architectures": ["MiniCPMForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_minicpm.MiniCPMConfig"}, "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "hidden_size": 2304, "initializer_range": 0.1, "intermediate_size": 5760,
    "max_position_embeddings": 4096, "model_type": "minicpm", "num_attention_heads": 36, "num_hidden_layers": 40,
    "num_key_value_heads": 36, "rms_norm_eps": 1e-05, "rope_scaling": None, "torch_dtype": "bfloat16",
    "transformers_version": "4.36.0", "use_cache": True, "vocab_size": 122753, "scale_emb": 12, "dim_model_base": 256,
    "scale_depth": 1.4,
}  # fmt: skip


@pytest.mark.parametrize("tied", [True, False])
def test_the_logits_are_those_of_a_llama_with_the_factors_in_its_weights(tmp_path: Path, tied: bool) -> None:
    torch.manual_seed(0)
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, tie_word_embeddings=tied)).eval()
    for parameter in llama.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    write(tmp_path / "theirs", llama, tied)
    import_model(tmp_path / "theirs", tmp_path / "ours")
    with torch.no_grad():
        scaled = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()
        scaled.load_state_dict(llama.state_dict())
        scaled.model.embed_tokens.weight.mul_(12)
        scaled.lm_head.weight.mul_(8 / 32)
        for layer in scaled.model.layers:
            layer.self_attn.o_proj.weight.mul_(1.4 / math.sqrt(3))
            layer.mlp.down_proj.weight.mul_(1.4 / math.sqrt(3))
        ids = torch.randint(0, 133, (2, 20))
        expected = scaled(ids).logits
        assert (load_model(tmp_path / "ours").model(ids) - expected).abs().max() < 2e-5 * expected.abs().max()
        result = export_model(tmp_path / "ours", tmp_path / "back")
        assert result["family"] == "granite"
        back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
        assert (back(ids).logits - expected).abs().max() < 2e-5 * expected.abs().max()


def write(place: Path, llama: Any, tied: bool) -> None:
    place.mkdir()
    keys = {**SIZES, **FACTORS, "model_type": "minicpm", "tie_word_embeddings": tied, "auto_map": {"AutoConfig": "c.C"}}
    (place / "config.json").write_text(json.dumps(keys))
    tensors = {name: tensor.clone() for name, tensor in llama.state_dict().items() if not (tied and "lm_head" in name)}
    save_file(tensors, place / "model.safetensors")
    CharTokenizer().save(place)


def test_the_published_configuration() -> None:
    reading = MINICPM.read(PUBLISHED, "config.json")
    config = reading.config
    assert (config.embedding_scale, config.logit_scale) == (12.0, 256 / 2304)
    assert config.residual_scale == pytest.approx(1.4 / math.sqrt(40))
    assert sum(math.prod(shape) for shape in expected_tensors(config).values()) == 2_724_880_896
    assert reading.ignored == ()


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"scale_depth": 0}, "scale_depth = 0 is not a factor above 0"),
        ({"dim_model_base": -1}, "dim_model_base = -1"),
        ({"num_experts": 8}, "num_experts = 8 gives the model experts"),
        ({"sparse_config": {"topk": 64}}, "sparse_config"),
        ({"surprise": 1}, "surprise of .*auto_map"),
        ({"hidden_act": "fatrelu"}, "hidden_act = 'fatrelu'"),
    ],
)
def test_what_is_not_computed_is_refused(keys: dict[str, Any], reason: str) -> None:
    with pytest.raises(CheckpointError, match=reason):
        MINICPM.read({**PUBLISHED, **keys}, "config.json")


def test_minicpm_4_is_read_too() -> None:
    """Its files name a factor of the model that guesses tokens, and scale angles by tables for short and long texts."""
    scaling = {
        "rope_type": "longrope", "long_factor": [1.0] * 32, "short_factor": [1.0] * 32,
        "original_max_position_embeddings": 32768,
    }  # fmt: skip
    keys = {"rope_scaling": scaling, "mup_denominator": 32, "max_position_embeddings": 32768, "num_key_value_heads": 2}
    config = MINICPM.read({**PUBLISHED, **keys}, "config.json").config
    assert (config.kv_heads, config.max_seq_len) == (2, 32768)
    assert config.rotary_scaling is not None and config.rotary_scaling.kind == "longrope"
