"""A model that becomes a GGUF file and comes back is the same model: configuration, tensors, tokenizer."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sheepop.checkpoint.gguf.container import Container
from sheepop.checkpoint.gguf.description import choose_architecture
from sheepop.checkpoint.gguf.quantized_types import TYPES
from sheepop.checkpoint.gguf.reader import open_gguf, read_gguf
from sheepop.checkpoint.gguf.writer import write_gguf
from sheepop.checkpoint.lazy_tensor import ForeignModel, LazyTensor
from sheepop.checkpoint.model_directory import load_weights
from sheepop.core.errors import CheckpointError, StorageError
from sheepop.model import ModelConfig, Transformer

# What llama.cpp's own package copies of a file that another program wrote.
NOT_OURS = ("general.", "tokenizer.ggml.", "split.")


def network(model: ForeignModel) -> Transformer:
    with torch.device("meta"):
        found = Transformer(model.config)
    load_weights(found, {name: tensor.read().float() for name, tensor in model.tensors.items()}, Path("gguf"))
    return found.eval()


def rewrite_as_a_stranger(
    source: Path,
    target: Path,
    change: Callable[[Any], None] = lambda writer: None,
    name: str | None = None,
    merge: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]] | None = None,
) -> Path:
    """The same model written by llama.cpp's package: without checksum, and without the keys of SheepOp.

    `name` is another architecture, and `merge` changes tensors of 32 bits.
    """
    gguf = pytest.importorskip("gguf")
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, name or architecture)
    for key, field in reader.fields.items():
        if not key.startswith((*NOT_OURS, f"{architecture}.")) or key == "general.architecture":
            continue
        kinds = field.types
        key = key.replace(f"{architecture}.", f"{writer.arch}.")
        writer.add_key_value(key, field.contents(), kinds[0], kinds[1] if len(kinds) > 1 else None)
    if merge is not None:
        for key, array in merge({tensor.name: np.array(tensor.data) for tensor in reader.tensors}).items():
            writer.add_tensor(key, array)
    for tensor in reader.tensors if merge is None else ():
        writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def test_everything_comes_back_bit_for_bit(tmp_path: Path, toy: Any) -> None:
    model = read_gguf(toy.write(tmp_path / "toy.gguf", dtype="f32"))
    assert model.config == toy.config
    assert model.tokenizer.fingerprint() == toy.tokenizer.fingerprint()
    wanted = toy.tensors
    assert model.tensors.keys() == wanted.keys()
    for name, tensor in model.tensors.items():
        assert tensor.shape == wanted[name].shape
        found, own = tensor.read(), wanted[name].read()
        is_centred = toy.config.norm == "rmsnorm_zero_centered" and ".mixer.norm" not in name
        if name.endswith(".mixer.decay"):
            # The file has -exp(decay).
            torch.testing.assert_close(found, own, rtol=1e-6, atol=1e-6)
        elif is_centred and name.endswith("norm.weight"):
            # The file has 1 + weight in single precision.
            assert torch.equal(found, (1 + own) - 1), name
        elif name == "embedding.weight" and not toy.config.tie_weights and toy.config.embedding_scale != 1.0:
            torch.testing.assert_close(found, own, rtol=2e-7, atol=0)
        else:
            assert torch.equal(found, own), name


def test_a_stranger_with_the_same_keys_is_the_same_network(tmp_path: Path, toy: Any) -> None:
    path = rewrite_as_a_stranger(toy.write(tmp_path / "toy.gguf", dtype="f32"), tmp_path / "stranger.gguf")
    with open_gguf(path) as file:
        assert file.architecture.name == toy.architecture
        model = ForeignModel(file.config, file.tensors, toy.tokenizer, {}, {})
        found = network(model)
    input_ids = torch.randint(0, toy.config.vocabulary, (2, 40), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        ours, theirs = toy.model(input_ids), found(input_ids)
    # The exact GELU is read as its tanh form where that is what the architecture's models have.
    tolerance = 5e-3 if toy.config.activation != file.config.activation else 2e-4
    torch.testing.assert_close(theirs, ours, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("name", "architecture"), [("qwen3", "qwen3vl"), ("qwen3moe", "qwen3vlmoe")])
def test_the_language_model_of_one_that_reads_pictures_is_read(
    tmp_path: Path, make: Callable[..., Any], name: str, architecture: str
) -> None:
    toy = make(name)

    def add_pictures(writer: Any) -> None:
        writer.add_rope_dimension_sections([4, 2, 2, 0])
        writer.add_num_deepstack_layers(3)

    path = rewrite_as_a_stranger(toy.write(tmp_path / "toy.gguf"), tmp_path / "seeing.gguf", add_pictures, architecture)
    with open_gguf(path) as file:
        assert file.architecture.name == architecture
        found = network(ForeignModel(file.config, file.tensors, toy.tokenizer, {}, {}))
    ids = torch.randint(0, toy.config.vocabulary, (2, 40), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        torch.testing.assert_close(found(ids), toy.model(ids))
    assert choose_architecture(file.config, architecture).name == name


def test_queries_keys_and_values_may_be_stored_as_one(tmp_path: Path, make: Callable[..., Any]) -> None:
    """As in older files of Phi-2; llama.cpp reads both."""
    toy = make("phi2")

    def merge(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        apart = {name: tensors.pop(name) for name in list(tensors) if re.search(r"attn_[qkv]\.", name)}
        for layer in range(toy.config.num_layers):
            for kind in ("weight", "bias"):
                parts = [apart[f"blk.{layer}.attn_{short}.{kind}"] for short in "qkv"]
                tensors[f"blk.{layer}.attn_qkv.{kind}"] = np.concatenate(parts)
        return tensors

    path = rewrite_as_a_stranger(toy.write(tmp_path / "toy.gguf", dtype="f32"), tmp_path / "merged.gguf", merge=merge)
    with open_gguf(path) as file:
        assert file.config.attention_bias
        found = {name: tensor.read() for name, tensor in file.tensors.items()}
    assert found.keys() == toy.tensors.keys()
    assert all(torch.equal(found[name], tensor.read()) for name, tensor in toy.tensors.items())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama3", "gemma3", "gpt2", "mixtral"])
def test_half_precision_stays_what_it_is(
    tmp_path: Path, make: Callable[..., Any], name: str, dtype: torch.dtype
) -> None:
    toy = make(name)
    toy.model.to(dtype)
    export = write_gguf(tmp_path / "toy.gguf", toy.config, toy.tensors, toy.tokenizer, name="toy")
    assert set(export.types) == {"f32", {torch.float16: "f16", torch.bfloat16: "bf16"}[dtype]}
    wanted = toy.tensors
    for name, tensor in read_gguf(tmp_path / "toy.gguf").tensors.items():
        own = wanted[name].read()
        if name.endswith("router.balance"):
            continue
        assert tensor.dtype == dtype, name
        if toy.config.norm == "rmsnorm_zero_centered" and name.endswith("norm.weight"):
            assert torch.equal(tensor.read(), ((1 + own.float()) - 1).to(dtype)), name
        else:
            assert torch.equal(tensor.read(), own), name


def test_small_tensors_that_half_precision_cannot_hold_stay_exact(tmp_path: Path, make: Callable[..., Any]) -> None:
    toy = make("llama")
    tensors = toy.tensors
    exact = 1 + torch.arange(32) * 2.0**-20
    tensors = {
        name: LazyTensor.of(tensor.read().bfloat16()) for name, tensor in tensors.items() if name != "final_norm.weight"
    }
    tensors["final_norm.weight"] = LazyTensor.of(exact)
    write_gguf(tmp_path / "toy.gguf", toy.config, tensors, toy.tokenizer, name="toy")
    found = read_gguf(tmp_path / "toy.gguf").tensors
    assert found["final_norm.weight"].dtype == torch.float32
    assert torch.equal(found["final_norm.weight"].read(), exact)
    assert found["blocks.0.attention_norm.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["llama", "phi3", "mixtral"])
def test_q8_0_is_read_as_its_blocks_say(tmp_path: Path, make: Callable[..., Any], name: str) -> None:
    toy = make(name)
    found = read_gguf(toy.write(tmp_path / "toy.gguf", dtype="q8_0")).tensors
    for name, tensor in toy.tensors.items():
        own = tensor.read()
        rows = own.reshape(-1, own.shape[-1])
        kept = own.ndim == 1 or name.endswith("router.weight")
        wanted = own if kept else TYPES["q8_0"].decode(TYPES["q8_0"].encode(rows), own.shape[-1]).reshape(own.shape)
        assert torch.equal(found[name].read(), wanted), name


def test_files_say_what_they_hold(tmp_path: Path, make: Callable[..., Any]) -> None:
    path = make("llama").write(tmp_path / "toy.gguf", dtype="q8_0", name="A toy")
    source = read_gguf(path).source
    assert source["format"] == "gguf"
    assert source["architecture"] == "llama"
    assert source["tensor_types"] == {"q8_0": 23, "f32": 7}
    assert source["metadata"]["general.name"] == "A toy"
    with Container(path) as container:
        assert container.metadata["general.file_type"].content == 7
        assert container.metadata["general.quantization_version"].content == 2
        names = list(container.tensors)
    # Tensors stand in the order in which a network needs them, with the layers one behind the other.
    assert names[:3] == ["token_embd.weight", "output_norm.weight", "output.weight"]
    assert [name.split(".")[1] for name in names[3:]] == sorted(name.split(".")[1] for name in names[3:])


def test_only_one_tensor_is_asked_for_at_a_time(tmp_path: Path, make: Callable[..., Any]) -> None:
    toy = make("phi3")
    asked: list[str] = []

    def watch(name: str, tensor: LazyTensor) -> LazyTensor:
        def read() -> torch.Tensor:
            asked.append(name)
            return tensor.read()

        return LazyTensor(tensor.shape, tensor.dtype, read)

    written: list[int] = []
    tensors = {name: watch(name, tensor) for name, tensor in toy.tensors.items()}
    write_gguf(
        tmp_path / "toy.gguf", toy.config, tensors, toy.tokenizer, name="toy", dtype="f16", advance=written.append
    )
    # Each twice: for writing, and for comparing what was written.
    assert sorted(asked) == sorted([*tensors, *tensors])
    with Container(tmp_path / "toy.gguf") as container:
        assert sum(written) == sum(record.size for record in container.tensors.values())


def test_an_existing_file_is_left_alone(tmp_path: Path, make: Callable[..., Any]) -> None:
    toy = make("llama")
    path = tmp_path / "toy.gguf"
    path.write_text("precious")
    with pytest.raises(StorageError, match="already exists"):
        toy.write(path)
    assert path.read_text() == "precious"
    assert [entry.name for entry in tmp_path.iterdir()] == ["toy.gguf"]
    toy.write(path, replace=True)
    assert path.read_bytes()[:4] == b"GGUF"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"final_norm.weight": None}, "final_norm.weight is missing"),
        ({"stray": torch.zeros(2)}, "stray is unexpected"),
        ({"final_norm.weight": torch.zeros(3)}, r"final_norm.weight has shape \(3,\), expected \(32,\)"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    tmp_path: Path, make: Callable[..., Any], change: dict[str, torch.Tensor | None], message: str
) -> None:
    toy = make("llama")
    tensors = toy.tensors
    for name, tensor in change.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = LazyTensor.of(tensor)
    with pytest.raises(CheckpointError, match=message):
        write_gguf(tmp_path / "toy.gguf", toy.config, tensors, toy.tokenizer, name="toy")
    assert list(tmp_path.iterdir()) == []


def test_a_router_that_is_balanced_by_biases_is_refused(tmp_path: Path, make: Callable[..., Any]) -> None:
    toy = make("mixtral")
    toy.model.state_dict()["blocks.1.feed_forward.router.balance"][2] = 0.1
    with pytest.raises(CheckpointError, match=r"blocks\.1\.feed_forward\.router\.balance is not zero"):
        toy.write(tmp_path / "toy.gguf")


def test_what_a_type_cannot_hold_is_named(tmp_path: Path, make: Callable[..., Any]) -> None:
    toy = make("llama")
    with torch.no_grad():
        toy.model.lm_head.weight[3, 3] = 1e6
    with pytest.raises(CheckpointError, match=r"output\.weight cannot be stored as f16: it contains 1e\+06"):
        toy.write(tmp_path / "toy.gguf", dtype="f16")
    with pytest.raises(CheckpointError, match=r"has rows of 40 numbers, but q8_0 needs multiples of 32"):
        make("llama", d_ff=40).write(tmp_path / "toy.gguf", dtype="q8_0")
    with pytest.raises(CheckpointError, match="'q4_k' is not a type that SheepOp writes: f32, f16, bf16, q8_0"):
        toy.write(tmp_path / "toy.gguf", dtype="q4_k")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["llama", "gptneox-one-by-one", "sinusoidal"])
def test_numbers_that_are_none_survive(tmp_path: Path, make: Callable[..., Any], name: str) -> None:
    toy = make(name)
    with torch.no_grad():
        toy.model.embedding.weight[3, 3] = float("nan")
        toy.model.embedding.weight[4, 4] = float("inf")
    found = read_gguf(toy.write(tmp_path / "toy.gguf", dtype="f16")).tensors["embedding.weight"].read()
    assert found.isnan().nonzero().tolist() == [[3, 3]]
    assert found.isinf().nonzero().tolist() == [[4, 4]]


def test_a_disk_that_changes_what_is_written_is_noticed(
    tmp_path: Path, make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from sheepop.checkpoint.gguf import writer

    write = writer.write_container

    def write_badly(path: Path, *arguments: Any) -> None:
        write(path, *arguments)
        content = bytearray(path.read_bytes())
        content[-100] ^= 1
        path.write_bytes(content)

    monkeypatch.setattr(writer, "write_container", write_badly)
    with pytest.raises(CheckpointError, match="checksum differs"):
        make("llama").write(tmp_path / "toy.gguf")
    assert list(tmp_path.iterdir()) == []


def content_of(path: Path) -> tuple[ModelConfig, dict[str, bytes], str]:
    """Everything that a reader of the file gets."""
    model = read_gguf(path)
    tensors = {name: tensor.read().view(torch.uint8).numpy().tobytes() for name, tensor in model.tensors.items()}
    return model.config, tensors, model.tokenizer.fingerprint()


@given(data=st.data())
@settings(max_examples=150)
def test_a_changed_byte_is_noticed_or_changes_nothing(
    tmp_path_factory: pytest.TempPathFactory, small_file: bytes, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("changed")
    (folder / "whole.gguf").write_bytes(small_file)
    place = data.draw(st.integers(0, len(small_file) - 1))
    changed = bytearray(small_file)
    changed[place] ^= data.draw(st.integers(1, 255))
    (folder / "changed.gguf").write_bytes(changed)
    try:
        found = content_of(folder / "changed.gguf")
    except CheckpointError:
        return
    assert found == content_of(folder / "whole.gguf")


@given(data=st.data())
@settings(max_examples=300)
def test_a_file_without_a_checksum_is_read_or_refused_in_words(
    tmp_path_factory: pytest.TempPathFactory, small_file: bytes, data: st.DataObject
) -> None:
    # Another name of the key, as if a stranger had written the file.
    changed = bytearray(small_file.replace(b"sheepop.checksum", b"sheepop.checksux"))
    head = changed.index(b"sheepop.checksux") + 2000
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, min(head, len(changed)) - 1))
        changed[place] = data.draw(st.integers(0, 255))
    end = data.draw(st.one_of(st.just(len(changed)), st.integers(0, len(changed))))
    path = tmp_path_factory.mktemp("changed") / "toy.gguf"
    path.write_bytes(changed[:end])
    try:
        content_of(path)
    except CheckpointError as error:
        assert len(str(error)) > 20
