"""A published model, Gemma 3 270M in Q4_K_M, is the model that transformers reads from the same file.

The environment variable ``SHEEPOP_TEST_MODEL`` names the folder that contains the file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sheepop.adapt.quantization import dequantized
from sheepop.adapt.stored_weight import StoredWeight
from sheepop.checkpoint.gguf.container import Container
from sheepop.checkpoint.gguf.reader import GGUFFile, open_gguf
from sheepop.checkpoint.gguf.writer import MIXTURES, write_gguf
from sheepop.checkpoint.lazy_tensor import LazyTensor
from sheepop.checkpoint.model_directory import load_model
from sheepop.evaluate.likelihood import score_text
from sheepop.jobs.exchange import import_model

TEXT = "Sheep graze on the hill. In 1789 the"
ENVIRONMENT = "SHEEPOP_TEST_MODEL"
pytestmark = [
    pytest.mark.models,
    pytest.mark.skipif(ENVIRONMENT not in os.environ, reason=f"{ENVIRONMENT} names no folder with a model"),
]


@pytest.fixture(scope="module")
def path() -> Path:
    (found,) = Path(os.environ[ENVIRONMENT]).glob("*.gguf")
    return found


@pytest.fixture(scope="module")
def published(path: Path) -> Iterator[GGUFFile]:
    with open_gguf(path) as file:
        yield file


def test_logits_are_those_of_transformers(path: Path, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    import_model(path, tmp_path / "model")
    loaded = load_model(tmp_path / "model")
    input_ids = torch.tensor([loaded.tokenizer.encode(TEXT)])
    with torch.inference_mode():
        # In float64, since theirs in float32 are off by nearly as much as is allowed.
        wanted = theirs.double().eval()(input_ids).logits
        found = loaded.model.eval()(input_ids)[..., : wanted.shape[-1]]
    assert (found - wanted).abs().max() < 1e-4
    assert wanted.std() > 1  # they are not all alike


def test_the_model_is_stored_as_in_the_file(path: Path, published: GGUFFile, tmp_path: Path) -> None:
    """Each matrix has the file's numbers, in at most a fifth more bytes; another program's text is as likely."""
    summary = import_model(path, tmp_path / "model")
    assert summary["bytes"] < 1.2 * path.stat().st_size
    model = load_model(tmp_path / "model").model
    with torch.inference_mode():
        for name, parameter in model.named_parameters():
            if name != "embedding.weight":  # which is large
                rows = parameter.rows() if isinstance(parameter, StoredWeight) else parameter
                assert torch.equal(rows, published.tensors[name].read()), name
        assert isinstance(model.embedding.weight, StoredWeight)
        tokenizer = published.tokenizer()
        found = score_text(model, tokenizer, TEXT).perplexity
        plain = score_text(dequantized(model), tokenizer, TEXT).perplexity
    assert found == pytest.approx(plain, rel=1e-5)


def test_the_mixture_is_that_of_the_published_file(path: Path, published: GGUFFile) -> None:
    mixture = MIXTURES["q4_k_m"]
    with Container(path) as container:
        matrices = {name: record for name, record in container.tensors.items() if len(record.shape) == 2}
    assert len(matrices) == 127
    for name, record in matrices.items():
        assert mixture.type_of(name, record.shape[-1], published.config) is record.kind, name


def test_quantising_the_published_numbers_again_gives_the_same_numbers(path: Path) -> None:
    """Up to the scales, which are fitted to rounded numbers this time."""
    largest = {"q4_k": 0.001, "q5_0": 1e-7, "q6_k": 0.001, "q8_0": 1e-7}
    with Container(path) as container:
        for name in ("blk.3.attn_output", "blk.3.ffn_up", "blk.0.ffn_down", "blk.0.attn_v"):
            kind, rows = container.tensors[f"{name}.weight"].kind, container.read(f"{name}.weight")
            again = kind.decode(kind.encode(rows), rows.shape[-1])
            assert (again - rows).norm() < largest[kind.name] * rows.norm(), kind.name


def test_the_model_is_exported_again_in_the_same_types(path: Path, published: GGUFFile, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    # The first rows of the embedding, without a tokenizer, so that the test is quick.
    config = published.config.replace(vocab_size=512)
    embedding = published.tensors["embedding.weight"].read()[:512]
    tensors = {**published.tensors, "embedding.weight": LazyTensor.of(embedding)}
    write_gguf(tmp_path / "again.gguf", config, tensors, None, dtype="q4_k_m", name="again")
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for tensor in gguf.GGUFReader(tmp_path / "again.gguf").tensors:
        assert tensor.tensor_type == theirs[tensor.name].tensor_type, tensor.name
    with open_gguf(tmp_path / "again.gguf") as file:
        for name in ("blocks.0.feed_forward.down_proj.weight", "blocks.5.attention.o_proj.weight"):
            wanted = published.tensors[name].read()
            assert (file.tensors[name].read() - wanted).norm() < 0.001 * wanted.norm()
