"""The language models of multimodal families against transformers' implementation of the whole model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from sheepop.checkpoint import load_model
from sheepop.checkpoint.exchange.reader import read_hugging_face
from sheepop.core.errors import CheckpointError
from sheepop.generate import GenerationConfig, Generator
from sheepop.jobs.exchange import export_model, import_model
from sheepop.tokenizer import CharTokenizer

from .conftest import DELTA, FULL, LLAMA, SLIDING, YARN, randomised

transformers = pytest.importorskip("transformers")
SIGHT = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
IDS = {"bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0}
TOYS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        "Gemma3ForConditionalGeneration",
        LLAMA | IDS | {
            "head_dim": 10, "query_pre_attn_scalar": 17, "sliding_window": 4, "layer_types": [SLIDING, SLIDING, FULL],
            "rope_parameters": {
                SLIDING: {"rope_type": "default", "rope_theta": 50.0},
                FULL: {"rope_type": "linear", "rope_theta": 4000.0, "factor": 8.0},
            },
        },
        {"vision_config": SIGHT | {"patch_size": 14, "model_type": "siglip_vision_model"}, "mm_tokens_per_image": 4},
    ),
    "gemma4": (
        "Gemma4ForConditionalGeneration",
        LLAMA | IDS | {
            "head_dim": 8, "global_head_dim": 12, "sliding_window": 4, "vocab_size_per_layer_input": 133,
            "num_hidden_layers": 4, "layer_types": [SLIDING, FULL, SLIDING, FULL], "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 4,
        },
        {"vision_config": SIGHT | {"num_key_value_heads": 2, "head_dim": 8}, "audio_config": None},
    ),
    "mistral3": (
        "Mistral3ForConditionalGeneration",
        LLAMA | IDS | {"model_type": "mistral", "head_dim": 12, "sliding_window": None, "rope_parameters": YARN},
        {
            "vision_config": SIGHT | {"patch_size": 14, "head_dim": 8, "model_type": "pixtral"},
            "tie_word_embeddings": False, "image_token_index": 1,
        },
    ),
    "qwen3_vl": (
        "Qwen3VLForConditionalGeneration",
        LLAMA | IDS | {"head_dim": 16, "attention_bias": True, "rope_parameters": {
            "rope_type": "default", "rope_theta": 300.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True,
        }},
        {
            "vision_config": {
                "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32,
                "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
            },
            "tie_word_embeddings": True, "image_token_id": 1,
        },
    ),
    "qwen3_5": (
        "Qwen3_5ForConditionalGeneration",
        LLAMA | DELTA | IDS | {"head_dim": 16, "rms_norm_eps": 1e-3, "num_hidden_layers": 4, "rope_parameters": {
            "rope_type": "default", "rope_theta": 300.0, "mrope_section": [1, 1, 0], "mrope_interleaved": True,
            "partial_rotary_factor": 0.25,
        }},
        {
            "vision_config": {
                "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32,
                "num_position_embeddings": 16,
            },
            "image_token_id": 1,
        },
    ),
}  # fmt: skip


def saved(name: str, folder: Path) -> nn.Module:
    """The toy of that name, written by transformers with our tokenizer."""
    architecture, text, outer = TOYS[name]
    config = transformers.AutoConfig.for_model(name, text_config=text, **outer)
    config._attn_implementation = "eager"
    theirs = randomised(getattr(transformers, architecture)(config)).eval()
    theirs.save_pretrained(folder)
    CharTokenizer().save(folder)
    return theirs


@pytest.mark.parametrize("name", TOYS)
@torch.no_grad()
def test_logits_and_greedy_text_are_equal_and_the_export_is_a_language_model(name, tmp_path):
    theirs = saved(name, tmp_path / "theirs")
    result = import_model(tmp_path / "theirs", tmp_path / "ours")
    assert any("tensors that text does not need" in note for note in result["notes"])
    ours = load_model(tmp_path / "ours")
    ids = torch.randint(4, 128, (3, 40), generator=torch.Generator().manual_seed(0))
    expected = theirs(ids).logits
    torch.testing.assert_close(ours.model(ids), expected, atol=1e-4, rtol=0)
    prompt = ids[0, :9]
    config = GenerationConfig(temperature=0.0, max_new_tokens=14)
    (completion,) = Generator(ours.model, ours.tokenizer).generate([prompt.tolist()], config)
    written = theirs.generate(
        prompt[None], attention_mask=torch.ones(1, 9), max_new_tokens=14, do_sample=False,
        suppress_tokens=[0, 1, 2, *range(128, 133)], eos_token_id=3, pad_token_id=0,
    )  # fmt: skip
    assert completion.token_ids == written[0, 9:].tolist()
    export_model(tmp_path / "ours", tmp_path / "back")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", attn_implementation="eager").eval()
    torch.testing.assert_close(back(ids).logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", TOYS)
def test_names_of_older_and_of_newer_versions_are_the_same_model(name, tmp_path):
    saved(name, tmp_path / "theirs")
    expected = read_hugging_face(tmp_path / "theirs").tensors
    tensors = load_file(tmp_path / "theirs" / "model.safetensors")
    newer = any(key.startswith("model.language_model.") for key in tensors)
    renamed = {
        (key.replace("model.language_model.", "language_model.model.").replace("model.visual.", "visual.") if newer
         else key.replace("language_model.lm_head.", "lm_head.")
         .replace("language_model.model.", "model.language_model.")
         .replace("vision_tower", "model.vision_tower")): tensor
        for key, tensor in tensors.items()
    }  # fmt: skip
    assert renamed.keys() != tensors.keys()
    save_file(renamed, tmp_path / "theirs" / "model.safetensors")
    found = read_hugging_face(tmp_path / "theirs").tensors
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key].read(), expected[key].read()) for key in found)


@pytest.mark.parametrize("name", ["gemma3", "mistral3"])
def test_without_a_key_a_projection_that_is_stored_is_used_as_transformers_uses_it(name, tmp_path):
    theirs = saved(name, tmp_path / "theirs")
    keys = json.loads((tmp_path / "theirs" / "config.json").read_text())
    tied = keys.pop("tie_word_embeddings", True)
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(keys))
    assert read_hugging_face(tmp_path / "theirs").config.tie_weights is tied
    again = type(theirs).from_pretrained(tmp_path / "theirs")
    assert (again.lm_head.weight is again.get_input_embeddings().weight) is tied


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"text_config": None}, "text_config = None is not a table"),
        ({"text_config": {"model_type": "llama"}}, "model_type = 'llama' is not the language model gemma3_text"),
        ({"architectures": ["Gemma3ForSequenceClassification"]}, "architectures"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"surprise": 1, "auto_map": {"AutoConfig": "code.Config"}}, "surprise of gemma3"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings = 1 is not true or false"),
    ],
)
def test_what_is_refused(keys, reason, tmp_path):
    saved("gemma3", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **keys}))
    with pytest.raises(CheckpointError, match=reason):
        read_hugging_face(tmp_path)


def test_a_key_that_nobody_reads_is_named(tmp_path):
    saved("gemma3", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["inner"] = config["outer"] = 1
    (tmp_path / "config.json").write_text(json.dumps(config))
    notes = "\n".join(read_hugging_face(tmp_path).notes)
    assert "does not read: outer." in notes and "for gemma3_text: inner." in notes
