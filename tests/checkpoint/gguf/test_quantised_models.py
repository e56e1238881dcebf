"""A quantised file becomes a model with the same integers, scales and offsets, which computes what the file says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sheepop.adapt.quantization import dequantized
from sheepop.adapt.stored_weight import StoredWeight
from sheepop.checkpoint.gguf.container import Container
from sheepop.checkpoint.gguf.reader import read_gguf
from sheepop.checkpoint.model_directory import load_model, open_model
from sheepop.core.files import read_json
from sheepop.jobs.exchange import export_model, import_model
from sheepop.model import Transformer

WIDE = {"d_model": 256, "num_layers": 2, "d_ff": 256}
# An architecture, a mixture of types, changed sizes, the formats of the imported matrices, and the most bits a weight.
FILES: dict[str, tuple[str, str, dict[str, int], set[str], float]] = {
    "rotated rows": ("llama", "q8_0", {}, {"int8"}, 9),
    "matrices in one": ("phi3", "q4_0", {"d_model": 64}, {"int4", "int8"}, 9),
    "experts": ("mixtral", "q5_0", {}, {"int8"}, 9),
    "a tied embedding": ("gemma3", "q8_0", {}, {"int8"}, 9),
    "inputs of layers": ("gemma4", "q8_0", {}, {"int8"}, 9),
    "experts with joined matrices": ("gemma4-experts", "q8_0", {}, {"int8"}, 9),
    "a mixture": ("llama", "q4_k_m", WIDE, {"int4", "int8"}, 8),
}


def stored(model: Transformer) -> dict[str, StoredWeight]:
    return {name: weight for name, weight in model.named_parameters() if isinstance(weight, StoredWeight)}


@pytest.fixture(scope="module", params=FILES)
def imported(
    request: pytest.FixtureRequest, make: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, dict[str, Any]]:
    """The name of a file, its path, and the summary of its import."""
    architecture, dtype, sizes, _, _ = FILES[request.param]
    folder = tmp_path_factory.mktemp("imported")
    path = make(architecture, **sizes).write(folder / "toy.gguf", dtype=dtype)
    return request.param, path, import_model(path, folder / "model")


def test_matrices_have_the_numbers_of_the_file(imported: tuple[str, Path, dict[str, Any]]) -> None:
    name, path, summary = imported
    formats, bits = FILES[name][3:]
    model = load_model(summary["path"]).model
    found = stored(model)
    assert {weight.stored for weight in found.values()} == formats
    assert summary["dtypes"] == sorted({"float32", *formats})
    assert sum(part.nbytes for weight in found.values() for part in weight.parts if part is not None) * 8 <= bits * sum(
        weight.numel() for weight in found.values()
    )
    numbers = read_gguf(path).tensors
    exact = {name for name in numbers if ".router." in name or name == "layer_inputs.projection.weight"}
    assert found.keys() == {name for name, tensor in numbers.items() if len(tensor.shape) > 1} - exact
    assert summary["parameters"] == sum(
        tensor.count for name, tensor in numbers.items() if not name.endswith("balance")
    )
    for name, parameter in model.named_parameters():
        rows = parameter.rows() if isinstance(parameter, StoredWeight) else parameter
        assert torch.equal(rows, numbers[name].read()), name
    assert torch.equal(
        open_model(summary["path"]).tensors["embedding.weight"].read(), numbers["embedding.weight"].read()
    )


def test_the_embedding_is_that_of_llama_cpps_own_package(imported: tuple[str, Path, dict[str, Any]]) -> None:
    gguf = pytest.importorskip("gguf")
    (theirs,) = (tensor for tensor in gguf.GGUFReader(imported[1]).tensors if tensor.name == "token_embd.weight")
    wanted = gguf.quants.dequantize(theirs.data, theirs.tensor_type)
    found = load_model(imported[2]["path"]).model.embedding(torch.arange(len(wanted)))
    assert found.numpy().tobytes() == wanted.tobytes()


def test_logits_are_those_of_the_dequantised_model_in_float64(imported: tuple[str, Path, dict[str, Any]]) -> None:
    model = load_model(imported[2]["path"]).model
    exact = dequantized(load_model(imported[2]["path"]).model).double()
    for tokens in (3, 150):  # the second has more rows than the kernels for few rows take
        ids = torch.arange(tokens).reshape(-1, min(tokens, 50)) % model.config.vocabulary
        with torch.inference_mode():
            wanted, found = exact(ids), model(ids)
        assert (found - wanted).abs().max() < 2e-5 * wanted.abs().max()


def test_the_directory_says_how_it_is_stored(imported: tuple[str, Path, dict[str, Any]]) -> None:
    formats, directory = FILES[imported[0]][3], Path(imported[2]["path"])
    described = read_json(directory / "config.json")
    assert described["format_version"] == 5
    assert described["quantization"] == {"weights": min(formats), "dtype": "float32", "is_mixed": True}
    assert f"`{min(formats)}` and larger formats, quantised from `float32`" in (directory / "README.md").read_text()


def test_a_dtype_dequantises(imported: tuple[str, Path, dict[str, Any]], tmp_path: Path) -> None:
    summary = import_model(imported[1], tmp_path / "half", dtype="bfloat16")
    assert "quantization" not in read_json(tmp_path / "half" / "config.json")
    numbers = read_gguf(imported[1]).tensors
    for name, parameter in load_model(summary["path"]).model.named_parameters():
        assert torch.equal(parameter, numbers[name].read().bfloat16()), name


@pytest.mark.parametrize("dtype", ["q8_0", "q4_0"])
def test_the_same_blocks_are_exported_again(make: Callable[..., Any], tmp_path: Path, dtype: str) -> None:
    path = make("llama").write(tmp_path / "toy.gguf", dtype=dtype)
    import_model(path, tmp_path / "model")
    export_model(tmp_path / "model", tmp_path / "again.gguf", format="gguf", quantize=dtype)
    with Container(path) as before, Container(tmp_path / "again.gguf") as after:
        assert before.tensors.keys() == after.tensors.keys()
        for name, record in before.tensors.items():
            own, other = after.tensors[name], record.file[record.start : record.start + record.size]
            assert own.file[own.start : own.start + own.size] == other, name


def test_what_cannot_stay_as_it_is_becomes_floats_with_a_note(make: Callable[..., Any], tmp_path: Path) -> None:
    """An embedding that the file stores times a factor has other numbers than ours."""
    path = make("llama-biases").write(tmp_path / "toy.gguf", dtype="q8_0")
    summary = import_model(path, tmp_path / "model")
    (note,) = (note for note in summary["notes"] if "are dequantised" in note)
    assert "token_embd.weight" in note
    model = load_model(summary["path"]).model
    assert "embedding.weight" not in stored(model) and "blocks.0.attention.q_proj.weight" in stored(model)
    numbers = read_gguf(path).tensors
    assert torch.equal(model.embedding.weight, numbers["embedding.weight"].read())
