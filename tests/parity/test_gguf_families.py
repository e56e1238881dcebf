"""A model of transformers becomes ours, then a GGUF file under its name in llama.cpp, and comes back with its bits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from sheepop.checkpoint import load_model
from sheepop.jobs.exchange import export_model, import_model
from sheepop.tokenizer import CharTokenizer

from .conftest import DELTA, FULL, LATENT, LLAMA, LLAMA3, ROUTED, SLIDING, randomised

transformers = pytest.importorskip("transformers")

SQUARE_DELTA = DELTA | {
    "head_dim": 16, "linear_value_head_dim": 6, "layer_types": ["linear_attention", "linear_attention", FULL],
}  # fmt: skip
SQUARE = LLAMA | {"num_hidden_layers": 4}
# The class of the model without its ending, keys as in published models, and the name of the architecture.
FAMILIES: dict[str, tuple[str, Mapping[str, Any], str]] = {
    "gemma": ("Gemma", LLAMA | {"head_dim": 10}, "gemma"),
    "smollm3": ("SmolLM3", SQUARE, "smollm3"),
    "glm4": ("Glm4", LLAMA | {"head_dim": 12}, "glm4"),
    "exaone4": ("Exaone4", LLAMA | {
        "sliding_window": None, "layer_types": [FULL] * 3, "rope_parameters": LLAMA3,
    }, "exaone4"),
    "exaone4-32b": ("Exaone4", LLAMA | {"num_hidden_layers": 64, "sliding_window": 5}, "exaone4"),
    "cohere": ("Cohere", LLAMA, "command-r"),
    "cohere2": ("Cohere2", SQUARE | {"sliding_window": 5}, "cohere2"),
    "granite": ("Granite", LLAMA | {
        "embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22, "attention_multiplier": 0.1,
    }, "granite"),
    "olmo3": ("Olmo3", SQUARE | {"sliding_window": 5}, "olmo2"),
    "gpt-oss": ("GptOss", LLAMA | {
        "head_dim": 12, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5,
        "layer_types": [SLIDING, FULL, SLIDING],
    }, "gpt-oss"),
    "starcoder2": ("Starcoder2", LLAMA, "starcoder2"),
    "phi": ("Phi", LLAMA | {"num_key_value_heads": 4}, "phi2"),
    "stablelm": ("StableLm", LLAMA | {"use_qkv_bias": True}, "stablelm"),
    "stablelm-parallel": ("StableLm", LLAMA | {"use_parallel_residual": True}, "stablelm"),
    "arcee": ("Arcee", LLAMA | {"head_dim": 12}, "arcee"),
    "seed-oss": ("SeedOss", LLAMA | {"head_dim": 12}, "seed_oss"),
    "lfm2": ("Lfm2", LLAMA | {
        "layer_types": ["conv", FULL, "conv"], "conv_bias": False, "conv_L_cache": 4, "block_auto_adjust_ff_dim": False,
    }, "lfm2"),
    "lfm2-moe": ("Lfm2Moe", LLAMA | {
        "layer_types": ["conv", FULL, "conv"], "num_dense_layers": 1, "num_experts": 5, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    }, "lfm2moe"),
    "granitemoe": ("GraniteMoe", LLAMA | {
        "embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22, "attention_multiplier": 0.1,
        "num_local_experts": 4,
    }, "granitemoe"),
    "olmoe": ("Olmoe", LLAMA | {"num_key_value_heads": 4, "num_experts": 4, "num_experts_per_tok": 2}, "olmoe"),
    "qwen2-moe": ("Qwen2Moe", LLAMA | {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 16,
    }, "qwen2moe"),
    "glm4-moe": ("Glm4Moe", LLAMA | ROUTED | {
        "head_dim": 12, "use_qk_norm": True, "attention_bias": True, "first_k_dense_replace": 1, "n_group": 3,
        "topk_group": 2, "num_experts_per_tok": 3, "n_shared_experts": 2, "routed_scaling_factor": 2.5,
    }, "glm4moe"),
    "qwen3-next": ("Qwen3Next", LLAMA | SQUARE_DELTA | {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 16,
    }, "qwen3next"),
    "qwen3.5": ("Qwen3_5", LLAMA | SQUARE_DELTA, "qwen35"),
    # Written under the other name, since both compute the same.
    "qwen3.5-moe": ("Qwen3_5Moe", LLAMA | SQUARE_DELTA | {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 16,
    }, "qwen3next"),
    "deepseek-v3": ("DeepseekV3", LATENT | ROUTED | {
        "first_k_dense_replace": 1, "n_group": 3, "topk_group": 2, "num_experts_per_tok": 3, "n_shared_experts": 2,
        "routed_scaling_factor": 2.5, "rms_norm_eps": 1e-6, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 2000.0, "factor": 4.0, "original_max_position_embeddings": 16,
            "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
        },
    }, "deepseek2"),
    "deepseek-v2-lite": ("DeepseekV2", LATENT | ROUTED | {
        "num_hidden_layers": 27, "q_lora_rank": None, "num_experts_per_tok": 2, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "rms_norm_eps": 1e-6,
    }, "deepseek2"),
    "ernie": ("Ernie4_5", LLAMA | {"head_dim": 12}, "ernie4_5"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_a_family_goes_to_its_architecture_and_back(name: str, tmp_path: Path) -> None:
    family, keys, architecture = FAMILIES[name]
    theirs = load_theirs(family, keys)
    theirs.save_pretrained(tmp_path / "theirs")
    CharTokenizer().save(tmp_path / "theirs")
    import_model(tmp_path / "theirs", tmp_path / "ours")
    result = export_model(tmp_path / "ours", tmp_path / "toy.gguf", format="gguf")
    assert result["family"] == architecture
    import_model(tmp_path / "toy.gguf", tmp_path / "back")
    ours, back = load_model(tmp_path / "ours").model, load_model(tmp_path / "back").model
    assert back.config == ours.config
    wanted = ours.state_dict()
    for tensor_name, tensor in back.state_dict().items():
        own = wanted[tensor_name]
        zero_centered = ours.config.norm == "rmsnorm_zero_centered" and tensor_name.endswith("norm.weight")
        if zero_centered and ".mixer." not in tensor_name:
            own = (1 + own) - 1
        if tensor_name.endswith(".mixer.decay"):
            own = own.exp().log()
        assert torch.equal(tensor, own), tensor_name
    ids = torch.randint(4, 128, (2, 40), generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(back(ids), theirs(ids).logits, atol=1e-4, rtol=1e-5)


def load_theirs(family: str, keys: Mapping[str, Any]) -> Any:
    ids = {"bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0}
    found = getattr(transformers, f"{family}TextConfig", None) or getattr(transformers, f"{family}Config")
    config = found(**{**keys, **ids})
    config._attn_implementation = "eager"
    return randomised(getattr(transformers, f"{family}ForCausalLM")(config)).eval()
