"""An imported model is used as its makers meant it: its dtype, the tokens that end its texts, where it came from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import sheepop
from sheepop.checkpoint import load_model, resolve_model_directory
from sheepop.checkpoint.identity import identities
from sheepop.core.errors import CheckpointError, UsageError
from sheepop.core.files import write_checksums
from sheepop.generate import GenerationConfig, Generator
from sheepop.jobs.exchange import import_model

from .conftest import llama_tensors


def bfloat16_tensors() -> dict[str, torch.Tensor]:
    return {name: tensor.bfloat16() for name, tensor in llama_tensors().items()}


def test_weights_keep_the_dtype_that_they_are_stored_in(make, tmp_path: Path) -> None:
    import_model(make(tensors=bfloat16_tensors()), tmp_path / "ours")
    stored, exact = load_model(tmp_path / "ours"), load_model(tmp_path / "ours", dtype=torch.float32)
    assert {parameter.dtype for parameter in stored.model.parameters()} == {torch.bfloat16}
    assert {parameter.dtype for parameter in exact.model.parameters()} == {torch.float32}
    for one, other in zip(stored.model.parameters(), exact.model.parameters(), strict=True):
        assert torch.equal(one.float(), other)
    assert exact.model.lm_head.weight is exact.model.embedding.weight
    assert stored.model.rotary_positions.cos.dtype == torch.float32
    ids = torch.arange(4, 20)[None]
    expected = exact.model(ids)
    # bfloat16 rounds by up to 1 in 256, many times over.
    assert (stored.model(ids).float() - expected).norm() < 0.1 * expected.norm()


def test_of_several_stored_dtypes_the_one_that_holds_every_number_is_taken(make, tmp_path: Path) -> None:
    tensors = bfloat16_tensors()
    tensors["model.norm.weight"] = llama_tensors()["model.norm.weight"]
    import_model(make(tensors=tensors), tmp_path / "ours")
    model = load_model(tmp_path / "ours").model
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert torch.equal(model.final_norm.weight, tensors["model.norm.weight"])
    assert model(torch.arange(4, 20)[None]).isfinite().all()


def test_an_import_in_another_dtype(make, tmp_path: Path) -> None:
    result = import_model(make(), tmp_path / "ours", dtype="bfloat16")
    assert result["dtypes"] == ["bfloat16"]
    weight = load_model(tmp_path / "ours").model.final_norm.weight
    assert torch.equal(weight, llama_tensors()["model.norm.weight"].bfloat16())


def test_the_python_api_takes_a_dtype_by_name(make, tmp_path: Path) -> None:
    import_model(make(), tmp_path / "ours")
    assert sheepop.load(tmp_path / "ours", "cpu", dtype="bfloat16").model.embedding.weight.dtype == torch.bfloat16
    with pytest.raises(UsageError, match="float32, float16, bfloat16"):
        sheepop.load(tmp_path / "ours", dtype="double")


def first_tokens(model, count: int) -> list[int]:
    config = GenerationConfig(temperature=0.0, max_new_tokens=count)
    return Generator(model.model, model.tokenizer, end_ids=model.end_ids).generate([[5, 6, 7]], config)[0].token_ids


def test_every_token_that_the_source_names_ends_a_text(make, tmp_path: Path) -> None:
    import_model(make({"eos_token_id": None}, name="none"), tmp_path / "free")
    free = load_model(tmp_path / "free")
    assert free.end_ids == ()
    written = first_tokens(free, 12)
    assert len(written) == 12
    end = written[5]
    import_model(make({"eos_token_id": [3, end, 50256]}, name="some"), tmp_path / "ended")
    ended = load_model(tmp_path / "ended")
    assert ended.end_ids == (3, end)
    assert first_tokens(ended, 12) == written[: written.index(end) + 1]
    assert sheepop.load(tmp_path / "ended").end_ids == (3, end)


def test_the_file_of_generation_settings_goes_before_the_config_and_travels_whole(make, tmp_path: Path) -> None:
    directory = make({"eos_token_id": 9})
    settings = {"eos_token_id": [3, 8], "temperature": 0.6, "do_sample": True}
    (directory / "generation_config.json").write_text(json.dumps(settings))
    import_model(directory, tmp_path / "ours")
    assert load_model(tmp_path / "ours").end_ids == (3, 8)
    assert json.loads((tmp_path / "ours" / "generation_config.json").read_text()) == settings


@pytest.mark.parametrize(
    "content", ["[]", '{"eos_token_id": "x"}', "{", '{"temperature": NaN}', '{"top_p": 1e400}', '{"text": "\\ud800"}']
)
def test_generation_settings_that_cannot_be_read(make, tmp_path: Path, content: str) -> None:
    directory = make()
    (directory / "generation_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"generation_config|eos_token_id"):
        import_model(directory, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_a_model_directory_whose_generation_settings_are_spoiled(make, tmp_path: Path) -> None:
    import_model(make(), tmp_path / "ours")
    (tmp_path / "ours" / "generation_config.json").write_text('{"eos_token_id": {}}')
    write_checksums(tmp_path / "ours")
    with pytest.raises(CheckpointError, match="eos_token_id"):
        load_model(tmp_path / "ours")


def test_the_record_says_where_a_model_came_from(make, tmp_path: Path) -> None:
    directory = make({"transformers_version": "4.40.1"})
    import_model(directory, tmp_path / "ours")
    assert load_model(tmp_path / "ours").provenance == {
        "imported": {
            "format": "hugging face",
            "family": "llama",
            "directory": str(directory),
            "transformers_version": "4.40.1",
        },
        "trained_on": identities(resolve_model_directory(directory)),
    }
