"""Every family against transformers' implementation of it: logits, greedy text, packed documents, one training step."""

from __future__ import annotations

import base64
import copy
import json
import random
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sheepop.checkpoint import load_model
from sheepop.checkpoint.exchange.choice import FAMILIES
from sheepop.checkpoint.exchange.fields import Activation
from sheepop.checkpoint.exchange.reader import canonical
from sheepop.checkpoint.exchange.rope_parameters import LayerRopeParameters, RopeParameters
from sheepop.checkpoint.exchange.tensor_rules import to_ours
from sheepop.checkpoint.mapping import Value
from sheepop.checkpoint.weight_files import open_weights
from sheepop.core.errors import CheckpointError
from sheepop.generate import GenerationConfig, Generator
from sheepop.jobs.exchange import import_model
from sheepop.model import ModelConfig, Transformer, build_model
from sheepop.model.loss import cross_entropy

from .conftest import TOYS, toy_config

TOKENS, VOCAB = 128, 133
# Padding, unknown, beginning, and rows without a token: SheepOp never writes them.
UNWRITTEN = [0, 1, 2, *range(TOKENS, VOCAB)]


def random_ids(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(4, TOKENS, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_every_switch_is_away_from_its_default_in_some_toy(family):
    """What a toy leaves at its default proves nothing of how it is read."""
    configs = [toy_config(name).to_dict() for name in TOYS]
    toys = [config for config in configs if config["model_type"] == family.model_type]
    for field in family.fields:
        # BLOOM has no last position, so that its length plays no part.
        if isinstance(field, Value | Activation) and field.theirs != "seq_length":
            keys = (field.theirs, *getattr(field, "aliases", ()))
            values = [toy[key] for toy in toys for key in keys if key in toy]
            assert any(value != field.default for value in values), field.theirs
    if any(isinstance(field, RopeParameters | LayerRopeParameters) for field in family.fields):
        tables = [toy["rope_parameters"] for toy in toys]
        tables = [table.get("full_attention", table) for table in tables]
        assert any(table["rope_theta"] not in (10_000.0, 1_000_000.0) for table in tables)
        assert any(table["rope_type"] != "default" for table in tables)


def test_the_spelling_of_transformers_4_means_the_same(pair):
    keys = json.loads((pair.ours.directory.parent / "theirs" / "config.json").read_text())
    keys["torch_dtype"] = keys.pop("dtype")
    table = keys.pop("rope_parameters", None) or {}
    if keys["model_type"] == "gemma4_text":
        keys["rope_parameters"], table = table, {}  # this family is newer
    if "full_attention" in table:
        keys["rope_local_base_freq"] = table["sliding_attention"]["rope_theta"]
        table = table["full_attention"]
    family = FAMILIES[keys["model_type"]]
    base, fraction = ("rotary_emb_base", "rotary_pct") if family.model_type == "gpt_neox" else ("rope_theta", None)
    if table:
        keys[base] = table.pop("rope_theta")
        if "partial_rotary_factor" in table:
            keys[fraction or "partial_rotary_factor"] = table.pop("partial_rotary_factor")
        keys["rope_scaling"] = table if table["rope_type"] != "default" else None
    assert family.read_config(keys, "config.json") == pair.ours.config


@pytest.mark.parametrize(
    ("pair", "prefix", "buffers"),
    [
        ("gpt2", "transformer.", ("h.{}.attn.bias", "h.{}.attn.masked_bias")),
        ("bloom-tied", "transformer.", ()),
        ("pythia", "", (f"gpt_neox.layers.{{}}.attention.{name}" for name in
                        ("bias", "masked_bias", "rotary_emb.inv_freq"))),
        ("llama3", "", ("model.layers.{}.self_attn.rotary_emb.inv_freq",)),
    ],
    indirect=["pair"],
)  # fmt: skip
def test_weights_are_read_under_the_names_of_the_published_files(pair, prefix, buffers, tmp_path):
    """Older files lack the prefix of the names, and hold tables that are no weights."""
    theirs = shutil.copytree(pair.ours.directory.parent / "theirs", tmp_path / "theirs")
    tensors = {name.removeprefix(prefix): tensor for name, tensor in load_file(theirs / "model.safetensors").items()}
    tensors |= {name.format(layer): torch.ones(3) for name in buffers for layer in range(pair.ours.config.num_layers)}
    save_file(tensors, theirs / "model.safetensors")
    import_model(theirs, tmp_path / "ours")
    for name, tensor in load_model(tmp_path / "ours").model.state_dict().items():
        assert torch.equal(tensor, pair.ours.model.state_dict()[name]), name


@torch.no_grad()
@pytest.mark.parametrize("pair", ["kimi-k2"], indirect=True)
def test_kimi_k2_is_deepseek_v3_by_another_name_with_layers_that_predict_further(pair, tmp_path):
    """Its files name program code, which is never run, and its tokenizer is a rank file of tiktoken."""
    theirs = shutil.copytree(pair.ours.directory.parent / "theirs", tmp_path / "theirs")
    keys = json.loads((theirs / "config.json").read_text())
    code = {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}
    published = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1, "seq_aux": True}
    keys |= {"model_type": "kimi_k2", "auto_map": code, "num_nextn_predict_layers": 1, **published}
    (theirs / "config.json").write_text(json.dumps(keys))
    for file in theirs.glob("tokenizer*"):
        file.unlink()
    (theirs / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "TikTokenTokenizer"}))
    ranks = "".join(f"{base64.b64encode(bytes((byte,))).decode()} {byte}\n" for byte in range(256))
    (theirs / "tiktoken.model").write_text(ranks)
    tensors = load_file(theirs / "model.safetensors")
    rows = {"model.embed_tokens.weight", "lm_head.weight"}
    tensors = {name: F.pad(tensor, (0, 0, 0, 140)) if name in rows else tensor for name, tensor in tensors.items()}
    keys["vocab_size"] = VOCAB + 140
    (theirs / "config.json").write_text(json.dumps(keys))
    further = {f"model.layers.3.{name}": torch.ones(3) for name in ("enorm.weight", "eh_proj.weight")}
    save_file(tensors | further, theirs / "model.safetensors")
    result = import_model(theirs, tmp_path / "ours")
    assert result["family"] == "deepseek_v3"
    assert any("predict further tokens: model.layers.3.eh_proj.weight; model" in note for note in result["notes"])
    assert any("never runs it, and read the model as an ordinary kimi_k2" in note for note in result["notes"])
    ids = random_ids(2, 30)
    model = load_model(tmp_path / "ours")
    torch.testing.assert_close(model.model(ids)[..., :VOCAB], pair.theirs(ids).logits, atol=1e-4, rtol=0)
    assert model.tokenizer.encode("漢字") == list("漢字".encode())
    keys["unknown"] = 1
    (theirs / "config.json").write_text(json.dumps(keys))
    with pytest.raises(CheckpointError, match="does not know the key unknown of deepseek_v3"):
        import_model(theirs, tmp_path / "refused")


@pytest.mark.parametrize("pair", ["qwen3.5"], indirect=True)
def test_tensors_that_transformers_does_not_read_are_left_out_with_a_note(pair, tmp_path):
    theirs = shutil.copytree(pair.ours.directory.parent / "theirs", tmp_path / "theirs")
    tensors = load_file(theirs / "model.safetensors")
    save_file(tensors | {f"mtp.layers.0.{name}.weight": torch.ones(3) for name in "ab"}, theirs / "model.safetensors")
    notes = import_model(theirs, tmp_path / "ours")["notes"]
    (note,) = (note for note in notes if "does not read" in note)
    assert note.startswith("Left out 2 tensors that transformers does not read: mtp.layers.0.a.weight")
    for name, tensor in load_model(tmp_path / "ours").model.state_dict().items():
        assert torch.equal(tensor, pair.ours.model.state_dict()[name]), name


# Keys that people and programs leave in published files, with values that would change much if anyone read them.
LEFT_BEHIND = {
    "_model_name_or_path": "x", "_rope_scaling_validation": True, "model_name": "x", "neftune_noise_alpha": 5,
    "num_logits_to_keep": 1, "use_flash_attn": False, "qkv_bias": True, "use_qk_norm": True, "use_rotary": False,
    "shared_expert_intermediate_size": 7, "time_step_limit": [0.0, float("inf")], "logit_scale": 9.0, "seq_len": 3,
    "rotary_scale": float("nan"), "max_sequence": 2, "norm_type": "none", "causal": False, "softcap": 0.1,
    "parallel_block": True, "mup_scale": 3.0, "emb_scale": 3.0, "dim": 1, "layers": 1, "trainer": {"lr": 1},
}  # fmt: skip


@torch.no_grad()
def test_keys_that_transformers_does_not_have_change_neither_its_logits_nor_our_network(pair):
    keys = json.loads((pair.ours.directory.parent / "theirs" / "config.json").read_text())
    drawn = random.Random(pair.name)
    names = ["".join(drawn.choices("abcdefghijklmnopqrstuvwxyz_", k=12)) for _ in range(20)]
    extra = LEFT_BEHIND | {name: drawn.choice([0, 1.5, True, None, "x", [2], {"a": 1}]) for name in names}
    extra = {name: value for name, value in extra.items() if not hasattr(pair.theirs.config, name)}
    assert len(extra) > 40
    other = type(pair.theirs)(type(pair.theirs.config)(**{**keys, **extra, "attn_implementation": "eager"})).eval()
    other.load_state_dict(pair.theirs.state_dict())
    ids = random_ids(2, 30)
    assert torch.equal(other(ids).logits, pair.theirs(ids).logits)
    family = FAMILIES[keys["model_type"]]
    reading = family.read({**keys, **extra}, "config.json")
    assert (reading.config, set(reading.ignored)) == (pair.ours.config, extra.keys())


@torch.no_grad()
def test_the_logits_are_equal_also_past_the_sliding_window(pair):
    ids = random_ids(3, 40)
    torch.testing.assert_close(pair.ours.model(ids), pair.theirs(ids).logits, atol=1e-4, rtol=0)


def test_greedy_text_is_equal_when_prompts_of_several_lengths_run_in_one_padded_batch(pair):
    prompts = [random_ids(length, seed=length).tolist() for length in (3, 19, 8)]
    config = GenerationConfig(temperature=0.0, max_new_tokens=14)
    completions = Generator(pair.ours.model, pair.ours.tokenizer).generate(prompts, config)
    for prompt, completion in zip(prompts, completions, strict=True):
        expected = pair.theirs.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=14, do_sample=False,
            suppress_tokens=UNWRITTEN, eos_token_id=3, pad_token_id=0,
        )  # fmt: skip
        assert completion.token_ids == expected[0, len(prompt) :].tolist()


@torch.no_grad()
def test_packed_documents_have_the_logits_that_each_has_alone(pair):
    documents = [random_ids(length, seed=length) for length in (7, 13, 4)]
    packed = torch.cat(documents)[None]
    document_ids = torch.cat([torch.full_like(ids, number) for number, ids in enumerate(documents)])[None]
    positions = torch.cat([torch.arange(len(ids)) for ids in documents])[None]
    logits = pair.ours.model(packed, positions=positions, document_ids=document_ids)[0]
    for ids, found in zip(documents, logits.split([len(ids) for ids in documents]), strict=True):
        torch.testing.assert_close(found, pair.theirs(ids[None]).logits[0], atol=1e-4, rtol=0)


@torch.no_grad()
def test_in_bfloat16_the_logits_are_as_exact_as_theirs(pair):
    ids = random_ids(3, 40)
    exact = pair.ours.model(ids)
    ours = load_model(pair.ours.directory, dtype=torch.bfloat16).model(ids)
    theirs = copy.deepcopy(pair.theirs).to(torch.bfloat16)(ids).logits
    assert ours.dtype == torch.bfloat16
    assert (ours.float() - exact).abs().mean() <= 1.2 * (theirs.float() - exact).abs().mean()


def test_loss_and_every_gradient_of_a_training_step_agree(pair, tmp_path):
    ours, theirs = trainable(pair.ours.model), copy.deepcopy(pair.theirs).train()
    ids = random_ids(4, 24, seed=5)
    expected = F.cross_entropy(theirs(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    expected.backward()
    loss = cross_entropy(ours(ids), F.pad(ids[:, 1:], (0, 1), value=-100))
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
    gradients = gradients_under_our_names(theirs, ours.config, tmp_path)
    fixed = {name for name, _ in ours.named_parameters() if name.endswith(".factor")}  # no parameters of theirs
    for name, parameter in ((name, each) for name, each in ours.named_parameters() if name not in fixed):
        torch.testing.assert_close(
            parameter.grad, gradients[name], atol=1e-5, rtol=1e-3, msg=lambda text, name=name: f"{name}: {text}"
        )


def trainable(model: Transformer) -> Transformer:
    copied = build_model(model.config, seed=0)
    copied.load_state_dict(model.state_dict())
    return copied.train()


def gradients_under_our_names(theirs: nn.Module, config: ModelConfig, folder: Path) -> dict[str, Tensor]:
    """Gradients of transformers' parameters, which transformers writes to the disk as if they were weights."""
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    theirs.save_pretrained(folder)
    family = FAMILIES[theirs.config.model_type]
    tensors, _ = canonical(open_weights(folder), family)
    return {name: tensor.read() for name, tensor in to_ours(family.tensor_groups(config), tensors, config).items()}
