"""A day with a published model, Gemma 3 270M in Q4_K_M: every command takes the file as it was published.

What it says is compared with transformers, which reads the same file. ``make test-models`` fetches it and sets
``SHEEPOP_TEST_MODEL`` to its folder.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from sheepop.checkpoint.model_directory import open_model

from ..command_line import in_process

ENVIRONMENT = "SHEEPOP_TEST_MODEL"
pytestmark = [
    pytest.mark.models,
    pytest.mark.skipif(ENVIRONMENT not in os.environ, reason=f"{ENVIRONMENT} names no folder with a model"),
]
PROMPT = "The three primary colours are"
TEXT = Path(__file__).parents[2].joinpath("docs", "quantization.md").read_text(encoding="utf-8")[:1500]


@pytest.fixture(scope="module")
def path() -> Path:
    (found,) = Path(os.environ[ENVIRONMENT]).glob("*.gguf")
    return found


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHEEPOP_MODELS", str(tmp_path_factory.mktemp("models")))
        yield


@pytest.fixture(scope="module")
def theirs(path: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("gguf")
    found = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    return found.eval()


def ids_of(model: Path, text: str) -> torch.Tensor:
    """The tokens (1, T) that the network reads for a text."""
    tokenizer = open_model(model).tokenizer
    return torch.tensor([[*tokenizer.prefix_ids, *tokenizer.encode(text)]])


def said(*arguments: object) -> Any:
    """What a command prints as JSON."""
    ended = in_process(*arguments, "--json")
    assert ended.code == 0, ended.err
    return json.loads(ended.out)


def test_greedy_text_is_that_of_transformers(path: Path, theirs: Any) -> None:
    (found,) = said("generate", path, PROMPT, "--greedy", "--max-new-tokens", 16)
    ids = ids_of(path, PROMPT)
    with torch.inference_mode():
        wanted = theirs.generate(ids, do_sample=False, max_new_tokens=16)[0, ids.shape[1] :].tolist()
    assert found["token_ids"] == wanted


def test_perplexity_is_that_of_transformers(path: Path, theirs: Any, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    found = said("score", path, tmp_path / "text.txt")
    ids = ids_of(path, TEXT)
    assert ids[0, -len(found["token_ids"]) :].tolist() == found["token_ids"]
    with torch.inference_mode():
        loss = torch.nn.functional.cross_entropy(theirs(ids).logits[0, :-1], ids[0, 1:]).item()
    assert found["perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)


def test_four_bits_hold(path: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    found = said("quantize", path, "--to", "int4", "-o", tmp_path / "int4", "--text", tmp_path / "text.txt")
    assert found["perplexity_after"] < 1.1 * found["perplexity_before"]


def test_an_adapter_is_learnt_and_exported(path: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    rows = [{"prompt": f"What is {n} plus {n}?", "completion": f"{2 * n}"} for n in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = tmp_path / "run"
    # Rows of the default length, which is the context of 32,768, would not fit the memory of most machines.
    settings = (
        "tuning.lora={}",
        "data.max_length=64",
        "training.micro_batch_size=4",
        "training.max_steps=20",
        "training.global_batch_size=4",
        "training.precision=fp32",
    )
    data = ("--data", tmp_path / "rows.jsonl", "--output", run, "--device", "cpu")
    ended = in_process("tune", "sft", path, *data, "training.sample_prompts=[]", *settings)
    assert ended.code == 0, ended.err
    losses = [row["loss"] for row in map(json.loads, (run / "metrics.jsonl").open()) if row["split"] == "train"]
    assert losses[-1] < 0.7 * losses[0]
    exported = said("export", run, "--format", "hf", "--output", tmp_path / "hf")
    assert exported["family"]
    (ours,) = said("generate", run, PROMPT, "--greedy", "--max-new-tokens", 8)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    ids = ids_of(run, PROMPT)
    with torch.inference_mode():
        assert model.generate(ids, do_sample=False, max_new_tokens=8)[0, ids.shape[1] :].tolist() == ours["token_ids"]
