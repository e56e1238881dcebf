"""A directory of somebody else's is read when everything in it is understood, and refused by name otherwise."""

from __future__ import annotations

import ast
import json
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sheepop.checkpoint import load_model
from sheepop.checkpoint.exchange.reader import read_hugging_face
from sheepop.core.console import Console
from sheepop.core.errors import CheckpointError, UsageError
from sheepop.jobs.exchange import import_model

from .conftest import llama_tensors


def refused(directory: Path, *parts: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_hugging_face(directory)
    for part in parts:
        assert part in str(caught.value), str(caught.value)


def test_a_directory_is_read(make) -> None:
    model = read_hugging_face(make())
    assert (model.config.d_model, model.config.num_layers, model.config.tie_weights) == (8, 2, True)
    assert torch.equal(model.tensors["blocks.1.feed_forward.up_proj.weight"].read(), up(llama_tensors()))
    assert model.generation == {"eos_token_id": 3}


def up(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return tensors["model.layers.1.mlp.up_proj.weight"]


@pytest.mark.parametrize("model_type", ["t5", None, 7, "gemma9", "x" * 10_000])
def test_an_unknown_family(make, model_type) -> None:
    refused(make({"model_type": model_type}), "model_type", "a supported family", "llama", "bloom")


@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        ({"rotary_magic": 3, "auto_map": {"AutoModel": "code.Model"}}, ("rotary_magic", "auto_map")),
        ({"sliding_window": 8}, ("sliding_window = 8", "reads it from every model")),
        ({"hidden_size": "8"}, ("hidden_size = '8'", "whole number")),
        ({"hidden_size": 8.0}, ("hidden_size = 8.0", "whole number")),
        ({"hidden_size": True}, ("hidden_size = True", "whole number")),
        ({"hidden_size": -8}, ("d_model",)),
        ({"hidden_size": 10**40}, ("hidden_size", "more than any model has")),
        ({"num_hidden_layers": 10**6}, ("num_hidden_layers", "more than any model has")),
        ({"num_hidden_layers": 9000}, ("9000 layers", "20 tensors")),
        ({"max_position_embeddings": 10**9}, ("max_position_embeddings", "more than any model has")),
        ({"rms_norm_eps": 1e400}, ("rms_norm_eps = inf", "finite")),
        ({"rms_norm_eps": "tiny"}, ("rms_norm_eps", "number")),
        ({"tie_word_embeddings": 1}, ("tie_word_embeddings = 1", "true or false")),
        ({"hidden_act": "mish"}, ("hidden_act = 'mish'", "silu")),
        ({"hidden_act": ["silu"]}, ("hidden_act", "text")),
        ({"num_attention_heads": 3}, ("num_heads = 3",)),
        ({"quantization_config": {"bits": 4}}, ("quantization_config", "quantised")),
        ({"per_layer_config": {"0": {"hidden_size": 4}}}, ("per_layer_config",)),
        ({"pruned_heads": {"0": [1]}}, ("pruned_heads",)),
        ({"is_encoder_decoder": True}, ("is_encoder_decoder = True",)),
        ({"architectures": ["LlamaForSequenceClassification"]}, ("architectures", "LlamaForCausalLM")),
        ({"architectures": ["LlamaModel"], "tie_word_embeddings": False}, ("lm_head.weight is missing",)),
        ({"architectures": [["LlamaForCausalLM"]]}, ("architectures",)),
        ({"architectures": "LlamaForCausalLM"}, ("architectures",)),
        ({"eos_token_id": "</s>"}, ("eos_token_id",)),
        ({"eos_token_id": [3, None]}, ("eos_token_id",)),
    ],
)
def test_a_key_that_is_unknown_or_asks_for_what_we_lack(make, keys, parts) -> None:
    refused(make(keys), "hf", *parts)


def test_longrope_is_read_for_texts_of_the_original_context_and_the_note_says_so(make, tmp_path: Path) -> None:
    table = {"rope_type": "longrope", "short_factor": [1.5, 2.5], "long_factor": [3.0, 9.0]}
    keys = {"rope_scaling": {**table, "original_max_position_embeddings": 16}, "max_position_embeddings": 64}
    (note,) = import_model(make(keys), tmp_path / "ours")["notes"]
    assert "a context of 16 tokens, not of 64" in note
    config = load_model(tmp_path / "ours").config
    assert (config.max_seq_len, config.rotary_scaling.pair_factors) == (16, (1.5, 2.5))
    once = make({**keys, "max_position_embeddings": 16}, name="short")
    assert import_model(once, tmp_path / "whole")["notes"] == []


def test_program_code_that_comes_with_a_model_is_named_and_never_run(make, tmp_path) -> None:
    directory, trace = make({"auto_map": {"AutoConfig": "code.Config"}}), tmp_path / "was_run"
    (directory / "code.py").write_text(f"open({str(trace)!r}, 'w')")
    assert any("never runs it" in note for note in read_hugging_face(directory).notes)
    assert not trace.exists()


def test_every_unknown_key_is_named_at_once(make) -> None:
    unknown = {"first_thing": 1, "second_thing": None, "_origin": "x", "limits": [0.0, float("inf"), float("nan")]}
    (note,) = read_hugging_face(make(unknown)).notes
    named = "_origin, first_thing, limits, second_thing"
    assert note == f"Ignored keys of config.json, which transformers does not read for llama: {named}."
    refused(make({**unknown, "transformers_version": "7.0.1"}, name="newer"), named, "transformers 7.0.1 may read")


@pytest.mark.parametrize(
    "text", ["", "[1]", "{", '{"model_type": "llama", "model_type": "gpt2"}', "[" * 100_000, "\xff"]
)
def test_a_config_that_is_no_table(make, text: str) -> None:
    directory = make()
    (directory / "config.json").write_text(text, encoding="latin-1")
    refused(directory, "config.json")


def test_no_config(make) -> None:
    directory = make()
    (directory / "config.json").unlink()
    refused(directory, "has no config.json")


def test_an_end_token_that_no_model_writes_is_let_be(make) -> None:
    assert read_hugging_face(make({"eos_token_id": [3, 50256, -1]})).generation == {"eos_token_id": [3, 50256, -1]}


# Tensors


def test_every_tensor_that_does_not_fit_is_named(make) -> None:
    tensors = llama_tensors()
    del tensors["model.norm.weight"]
    tensors["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(4, 8)
    tensors["model.layers.7.extra"] = torch.zeros(1)
    refused(
        make(tensors=tensors),
        "model.norm.weight is missing",
        "model.layers.0.self_attn.q_proj.weight has shape (4, 8), expected (8, 8)",
        "model.layers.7.extra is unexpected",
    )


def test_a_wrong_vocabulary_size(make) -> None:
    refused(make({"vocab_size": 131}), "model.embed_tokens.weight has shape (130, 8), expected (131, 8)")


def test_a_tied_head_that_is_stored_beside_the_embedding(make) -> None:
    tensors = llama_tensors()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    assert "lm_head.weight" not in read_hugging_face(make(tensors=tensors, name="equal")).tensors
    tensors["lm_head.weight"][0, 0] += 1
    refused(make(tensors=tensors, name="other"), "lm_head.weight differs from model.embed_tokens.weight")


def test_names_without_the_usual_prefix_are_understood(make) -> None:
    tensors = {name.removeprefix("model."): tensor for name, tensor in llama_tensors().items()}
    model = read_hugging_face(make(tensors=tensors))
    assert torch.equal(model.tensors["blocks.1.feed_forward.up_proj.weight"].read(), up(llama_tensors()))


def test_tables_of_angles_from_older_versions_are_left_out_and_reported(make) -> None:
    table = "model.layers.0.self_attn.rotary_emb.inv_freq"
    for number, dtype in enumerate((torch.float32, torch.bool)):
        model = read_hugging_face(make(tensors=llama_tensors() | {table: torch.ones(2, dtype=dtype)}, name=str(number)))
        assert table in model.notes[0]


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.int64])
def test_weights_that_are_no_floating_point_numbers(make, dtype) -> None:
    tensors = llama_tensors()
    tensors["model.norm.weight"] = torch.ones(8).to(dtype)
    refused(make(tensors=tensors), "model.norm.weight", "dtype")


def test_nan_and_infinity_are_named_and_kept(make, tmp_path: Path, capsys) -> None:
    tensors = llama_tensors()
    tensors["model.norm.weight"][3] = float("nan")
    tensors["model.layers.0.mlp.up_proj.weight"][1, 1] = float("-inf")
    result = import_model(make(tensors=tensors), tmp_path / "ours", console=Console(quiet=True))
    names = {"final_norm.weight", "blocks.0.feed_forward.up_proj.weight"}
    assert set(result["not_finite"]) == names
    warning = capsys.readouterr().err
    assert "NaN or infinite values" in warning
    assert all(name in warning for name in names)
    assert load_file(tmp_path / "ours" / "model.safetensors")["final_norm.weight"].isnan().sum() == 1


def test_numbers_too_large_for_the_dtype_asked_for(make, tmp_path: Path) -> None:
    tensors = llama_tensors()
    tensors["model.norm.weight"][3] = 1e6
    with pytest.raises(
        CheckpointError, match=r"final_norm.weight has numbers up to 1e\+06, too large for torch.float16"
    ):
        import_model(make(tensors=tensors), tmp_path / "ours", dtype="float16")
    assert not (tmp_path / "ours").exists()


# Files


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.ckpt"])
def test_a_pickle_is_refused_with_the_command_that_converts_it(make, name: str) -> None:
    directory = make()
    (directory / "model.safetensors").rename(directory / name)
    refused(directory, name, "never opens", "save_pretrained", str(directory))


def test_the_command_against_pickles_is_one_that_a_shell_takes_for_nothing_else(make, tmp_path: Path) -> None:
    directory = make(name='it\'s $(touch spoiled) "x"')
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(CheckpointError) as caught:
        read_hugging_face(directory)
    python, option, program = shlex.split(str(caught.value).split("import the result: ")[1])
    assert (python, option) == ("python", "-c")
    named = [node.value for node in ast.walk(ast.parse(program)) if isinstance(node, ast.Constant)]
    assert str(directory) in named


def test_no_weights(make) -> None:
    directory = make()
    (directory / "model.safetensors").rename(directory / "adapter_model.safetensors")
    refused(directory, "neither model.safetensors", "adapter_model.safetensors")


def sharded(directory: Path) -> dict[str, str]:
    """Divides the weights of `directory` over two shards and returns the index that it wrote."""
    tensors = load_file(directory / "model.safetensors")
    names = sorted(tensors)
    places = {name: f"model-0000{1 + index % 2}-of-00002.safetensors" for index, name in enumerate(names)}
    for shard in set(places.values()):
        save_file({name: tensors[name] for name in names if places[name] == shard}, directory / shard)
    (directory / "model.safetensors").unlink()
    write_index(directory, places)
    return places


def write_index(directory: Path, places: object) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def test_shards_with_an_index_are_read(make) -> None:
    directory = make()
    sharded(directory)
    model = read_hugging_face(directory)
    assert torch.equal(model.tensors["blocks.1.feed_forward.up_proj.weight"].read(), up(llama_tensors()))


@pytest.mark.parametrize(
    "place",
    ["../weights.safetensors", "/etc/passwd", "sub/weights.safetensors", "..", ".", "", "a\0b", "sub/../../x"],
)
def test_an_index_that_points_elsewhere(make, tmp_path: Path, place: str) -> None:
    directory = make()
    places = sharded(directory)
    save_file(llama_tensors(), tmp_path / "weights.safetensors")
    write_index(directory, places | {"model.norm.weight": place})
    refused(directory, "is not the name of a file in this directory")


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "config.json", "model.safetensors.index.json"])
def test_a_link_that_leads_out_of_the_directory(make, tmp_path: Path, name: str) -> None:
    directory = make()
    sharded(directory)
    (directory / name).rename(tmp_path / "elsewhere")
    (directory / name).symlink_to(tmp_path / "elsewhere")
    refused(directory, name, "leads out of the directory")


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "additional_chat_templates/a.jinja"]
)
def test_a_file_of_the_tokenizer_that_is_a_link_out_of_the_directory(make, tmp_path: Path, name: str) -> None:
    directory = make()
    (tmp_path / "secret").write_text("{}")
    (directory / name).parent.mkdir(exist_ok=True)
    (directory / name).unlink(missing_ok=True)
    (directory / name).symlink_to(tmp_path / "secret")
    refused(directory, name, "leads out of the directory")


def test_links_of_other_files_and_directories(make, tmp_path: Path) -> None:
    directory = make()
    (tmp_path / "secret").write_text("secret")
    (directory / "README.md").symlink_to(tmp_path / "secret")
    assert read_hugging_face(directory).config.d_model == 8
    (tmp_path / "templates").mkdir()
    (directory / "additional_chat_templates").symlink_to(tmp_path / "templates")
    refused(directory, "additional_chat_templates is a link")


def test_links_into_the_store_of_a_hub_cache_are_followed(make, tmp_path: Path) -> None:
    source = make()
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "123", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(source.iterdir()):
        file.rename(blobs / str(number))
        (snapshot / file.name).symlink_to(Path("../../blobs") / str(number))
    (blobs / "template").write_text("{{ messages }}")
    (snapshot / "additional_chat_templates").mkdir()
    (snapshot / "additional_chat_templates" / "a.jinja").symlink_to("../../../blobs/template")
    model = read_hugging_face(snapshot)
    assert model.config.d_model == 8
    assert model.tokenizer.settings()["chat_template"] == [{"name": "a", "template": "{{ messages }}"}]


@pytest.mark.parametrize("places", [None, [], {"model.norm.weight": 3}, "x"])
def test_an_index_without_a_map(make, places) -> None:
    directory = make()
    sharded(directory)
    write_index(directory, places)
    refused(directory, "weight_map")


def test_an_index_that_does_not_fit_its_shards(make) -> None:
    directory = make()
    places = sharded(directory)
    moved = {"model.norm.weight": "model-00001-of-00002.safetensors"}
    assert places["model.norm.weight"] != moved["model.norm.weight"]
    write_index(directory, places | moved)
    refused(
        directory,
        "model.norm.weight is not in model-00001-of-00002.safetensors",
        "model.norm.weight in model-00002-of-00002.safetensors is not in the index",
    )


def test_a_shard_that_is_missing(make) -> None:
    directory = make()
    sharded(directory)
    (directory / "model-00002-of-00002.safetensors").unlink()
    refused(directory, "model-00002-of-00002.safetensors, which model.safetensors.index.json lists, is missing")


def test_one_file_and_an_index_side_by_side(make) -> None:
    directory = make()
    write_index(directory, {})
    refused(directory, "contains both")


def test_a_directory_in_place_of_a_file(make) -> None:
    directory = make()
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors").mkdir()
    refused(directory, "model.safetensors is not an ordinary file")


# Outputs


def test_an_output_that_holds_something_else_is_never_replaced(make, tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.txt").write_text("years of work")
    with pytest.raises(UsageError, match="is not a model"):
        import_model(make(), tmp_path / "thesis", overwrite=True)
    assert (tmp_path / "thesis" / "thesis.txt").read_text() == "years of work"


def test_a_model_is_replaced_only_when_that_is_asked_for(make, tmp_path: Path) -> None:
    directory = make()
    import_model(directory, tmp_path / "ours")
    with pytest.raises(UsageError, match="--overwrite"):
        import_model(directory, tmp_path / "ours", dtype="bfloat16")
    import_model(directory, tmp_path / "ours", dtype="bfloat16", overwrite=True)
    assert load_model(tmp_path / "ours").model.embedding.weight.dtype == torch.bfloat16


def test_an_output_within_the_source_is_refused(make) -> None:
    source = make()
    before = sorted(path.name for path in source.iterdir())
    for place in (source, source / "sheepop", source.parent / "hf" / ".." / "hf" / "x"):
        with pytest.raises(UsageError, match=r"is inside .*Choose a place outside it"):
            import_model(source, place, overwrite=True)
    assert sorted(path.name for path in source.iterdir()) == before


def test_a_model_that_holds_the_source_is_not_replaced(make, tmp_path: Path) -> None:
    import_model(make(), tmp_path / "ours")
    (tmp_path / "hf").rename(tmp_path / "ours" / "hf")
    with pytest.raises(UsageError, match="holds"):
        import_model(tmp_path / "ours" / "hf", tmp_path / "ours", overwrite=True)
    assert (tmp_path / "ours" / "hf" / "model.safetensors").is_file()


def test_an_import_of_our_own_model_says_that_it_is_one(make, tmp_path: Path) -> None:
    import_model(make(), tmp_path / "ours")
    with pytest.raises(CheckpointError, match="is already a SheepOp model"):
        import_model(tmp_path / "ours", tmp_path / "again")


def test_an_unknown_dtype(make, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="float32, float16, bfloat16"):
        import_model(make(), tmp_path / "ours", dtype="int3")
