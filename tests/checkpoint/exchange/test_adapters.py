"""Adapters against PEFT, which writes what we read and reads what we write: the same logits."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sheepop.adapt.lora import adapted_layers, add_lora, merged
from sheepop.adapt.lora_config import LoraConfig
from sheepop.checkpoint.exchange.adapters import read_adapter, write_adapter
from sheepop.checkpoint.exchange.choice import FAMILIES
from sheepop.checkpoint.exchange.reader import read_hugging_face
from sheepop.core.errors import CheckpointError, ConfigError
from sheepop.model import Transformer, blank_model
from sheepop.tokenizer import CharTokenizer

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 130, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}
LLAMA = {"model_type": "llama", **SIZES, "intermediate_size": 48, "max_position_embeddings": 32}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**LLAMA, "num_key_value_heads": 2, "tie_word_embeddings": False},
    "tied": {**LLAMA, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "gpt2": {"model_type": "gpt2", "vocab_size": 130, "n_layer": 2, "n_head": 4, "n_embd": 32, "n_positions": 32},
    "gpt_neox": {**LLAMA, "model_type": "gpt_neox", "intermediate_size": 64},
    "phi3": {**LLAMA, "model_type": "phi3", "pad_token_id": 0, "num_key_value_heads": 2},
    "deepseek_v3": {
        **LLAMA, "model_type": "deepseek_v3", "num_key_value_heads": 4, "kv_lora_rank": 10, "q_lora_rank": 14,
        "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5, "first_k_dense_replace": 1, "n_group": 2,
        "topk_group": 1, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
    },
    "cohere": {**LLAMA, "model_type": "cohere", "num_key_value_heads": 2, "logit_scale": 1.0, "eos_token_id": 3},
}  # fmt: skip
READ: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"target_modules": "all-linear", "r": 4, "lora_alpha": 12}),
    ("llama", {"target_modules": ["q_proj", "down_proj"], "use_rslora": True, "rank_pattern": {"q_proj": 6}}),
    (
        "llama",
        {"target_modules": ["k_proj", "up_proj"], "use_dora": True, "alpha_pattern": {"layers.1.mlp.up_proj": 3}},
    ),
    ("llama", {"target_modules": ["embed_tokens", "v_proj"], "r": 5}),
    ("llama", {"target_modules": ["lm_head", "v_proj"], "use_rslora": True}),
    ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]}),
    ("tied", {"target_modules": ["embed_tokens", "v_proj"], "r": 5}),
    ("tied", {"target_modules": ["lm_head"], "r": 5}),
    ("tied", {"target_modules": ["lm_head", "embed_tokens", "o_proj"], "lora_alpha": 3}),
    ("tied", {"target_modules": ["embed_tokens", "o_proj"], "ensure_weight_tying": True}),
    ("gpt_neox", {"target_modules": ["embed_out", "embed_in", "dense"]}),
    ("gpt2", {"target_modules": ["c_attn", "c_fc", "c_proj"], "fan_in_fan_out": True}),
    ("gpt_neox", {"target_modules": ["query_key_value", "dense"], "use_dora": True}),
    ("phi3", {"target_modules": ["qkv_proj", "gate_up_proj"], "use_dora": True}),
    ("cohere", {"target_modules": ["q_proj", "k_proj"], "use_dora": True}),
    (
        "deepseek_v3",
        {"target_modules": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"], "use_dora": True},
    ),
]
WRITTEN: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"targets": ("q_proj", "up_proj"), "rank_stabilised": True, "rank": 3}),
    ("llama", {"targets": ("embedding", "o_proj")}),
    ("llama", {"targets": ("lm_head", "o_proj")}),
    ("tied", {"targets": ("embedding", "lm_head")}),
    ("tied", {"targets": ("lm_head", "k_proj")}),
    ("gpt2", {"rank": 2}),
    ("gpt2", {"targets": ("v_proj", "down_proj"), "rank_stabilised": True}),
    ("gpt_neox", {"targets": ("q_proj", "v_proj"), "dora": True}),
    ("phi3", {"targets": ("k_proj", "gate_proj", "o_proj"), "dora": True}),
    ("cohere", {"targets": ("q_proj", "k_proj"), "rank": 2}),
    ("deepseek_v3", {"targets": ("q_proj", "v_proj", "kv_latent_proj"), "rank": 2}),
]
IDS = torch.randint(5, 130, (2, 11), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Iterator[None]:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    yield


@pytest.fixture(scope="module")
def peft() -> Any:
    """PEFT, which takes seconds to load, and so only where its tests run."""
    return pytest.importorskip("peft", reason="PEFT is not installed")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Transformer]]:
    """The same weights in transformers and here."""
    found = {}
    for name, keys in MODELS.items():
        torch.manual_seed(0)
        theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**keys)).eval()
        place = tmp_path_factory.mktemp(name)
        theirs.save_pretrained(place)
        foreign = read_hugging_face(place, CharTokenizer())
        ours = blank_model(foreign.config).eval()
        missing, unknown = ours.load_state_dict(
            {name: tensor.read() for name, tensor in foreign.tensors.items()}, strict=False
        )
        assert not unknown
        assert missing == (["lm_head.weight"] if foreign.config.tie_weights else [])
        found[name] = theirs, ours
    return found


def drawn(parameters: Iterator[torch.nn.Parameter]) -> None:
    draws = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in parameters:
            parameter += 0.1 * torch.randn(parameter.shape, generator=draws)


def assert_same(theirs: Any, ours: Transformer) -> None:
    with torch.no_grad():
        torch.testing.assert_close(ours(IDS), theirs(IDS).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("name", "settings"), READ, ids=str)
def test_what_peft_writes_is_read(
    peft: Any, pairs: dict[str, tuple[Any, Transformer]], name: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    theirs, ours = (deepcopy(model) for model in pairs[name])
    adapted = peft.get_peft_model(theirs, peft.LoraConfig(task_type="CAUSAL_LM", **settings)).eval()
    drawn(p for key, p in adapted.named_parameters() if "lora_" in key or "modules_to_save" in key)
    adapted.save_pretrained(tmp_path)
    read_adapter(tmp_path, ours, FAMILIES[MODELS[name]["model_type"]])
    assert_same(adapted, ours.eval())
    assert_same(adapted, merged(ours).eval())


@pytest.mark.parametrize(("name", "settings"), WRITTEN, ids=str)
def test_what_is_written_peft_reads_and_so_do_we(
    peft: Any, pairs: dict[str, tuple[Any, Transformer]], name: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    theirs, ours = (deepcopy(model) for model in pairs[name])
    again = deepcopy(ours)
    add_lora(ours, LoraConfig(**settings), name="mine")
    drawn(p for layer in adapted_layers(ours).values() for p in layer.changes.parameters())
    write_adapter(tmp_path, ours, FAMILIES[MODELS[name]["model_type"]], name="mine")
    assert_same(peft.PeftModel.from_pretrained(theirs, tmp_path).eval(), ours.eval())
    read_adapter(tmp_path, again, FAMILIES[MODELS[name]["model_type"]])
    with torch.no_grad():
        torch.testing.assert_close(again.eval()(IDS), ours(IDS), rtol=1e-4, atol=1e-4)


SPOILED: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "IA3"}, "peft_type = 'IA3' is not LORA, the kind of adapter that SheepOp reads"),
    ({"bias": "all"}, "bias = 'all' means that biases were trained"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa' changed the base weights"),
    ({"modules_to_save": ["lm_head"]}, r"modules_to_save names lm_head, but SheepOp finds no weight"),
    ({"use_qalora": True}, "use_qalora = True is not known"),
    ({"r": 5}, r"q_proj.lora_A.weight has the shape \(4, 32\), not \(5, 32\)"),
    ({"r": "4"}, "r = '4' is not a whole number"),
    ({"lora_alpha": "x"}, "lora_alpha = 'x' is not a number"),
    ({"rank_pattern": {"(": 4}}, "not a regular expression"),
    ({"rank_pattern": {"q_proj": -4}}, "not a number above 0"),
    ({"use_dora": True}, "needs"),
]


@pytest.mark.parametrize(("keys", "message"), SPOILED, ids=str)
def test_what_would_compute_something_else_is_refused_and_nothing_is_changed(
    pairs: dict[str, tuple[Any, Transformer]], keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    ours = deepcopy(pairs["llama"][1])
    add_lora(ours, LoraConfig(targets=("q_proj",), rank=4))
    write_adapter(tmp_path, ours, FAMILIES["llama"])
    described = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**described, **keys}))
    plain = deepcopy(pairs["llama"][1])
    with pytest.raises(CheckpointError, match=message):
        read_adapter(tmp_path, plain, FAMILIES["llama"])
    assert not adapted_layers(plain)
    assert all(parameter.requires_grad for parameter in plain.parameters())


def test_tensors_without_a_place_missing_files_and_unknown_names(
    pairs: dict[str, tuple[Any, Transformer]], tmp_path: Path
) -> None:
    ours = deepcopy(pairs["llama"][1])
    with pytest.raises(CheckpointError, match=r"is not a LoRA adapter: it has no adapter_config.json"):
        read_adapter(tmp_path, ours, FAMILIES["llama"])
    with pytest.raises(ConfigError, match="no adapter called 'default'; it has: none"):
        write_adapter(tmp_path, ours, FAMILIES["llama"])
    add_lora(ours, LoraConfig(targets=("q_proj",), rank=4))
    write_adapter(tmp_path, ours, FAMILIES["llama"])
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    place = "base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight"
    save_file({**tensors, place: torch.zeros(4, 32)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=r"SheepOp has no layer for base_model.model.model.layers.7"):
        read_adapter(tmp_path, deepcopy(pairs["llama"][1]), FAMILIES["llama"])
    del tensors["base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"]
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers.1.self_attn.q_proj has the tensors"):
        read_adapter(tmp_path, deepcopy(pairs["llama"][1]), FAMILIES["llama"])
