"""The same house on a CUDA device: equal logits, a run that repeats bit for bit, and text from its model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sheepop.generate import GenerationConfig
from sheepop.jobs.config import load_config
from sheepop.jobs.generate import load_generator
from sheepop.model import ModelConfig, build_model

from ..generate.recomputing import RecomputingGenerator
from ..running import train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
]

TIMING = ("seconds", "tokens_per_second", "mfu", "mfu_nominal", "memory_bytes", "busy_cores")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for number in range(40):
        (folder / f"{number:02}.txt").write_text(f"Sheep number {number} jumps over the fence.\n" * 8)
    return folder


def run(text: Path, output: Path, steps: int, **options: Any) -> list[dict[str, Any]]:
    settings = [
        "tokenizer.algorithm=char",
        "model.d_model=64",
        "model.num_layers=2",
        "model.num_heads=4",
        "model.num_kv_heads=2",
        "model.max_seq_len=64",
        "model.position_encoding=rope",
        "training.compile=false",  # auto may choose another way the second time
        "training.optimizer=muon",
        "training.schedule=constant",
        "training.warmup_steps=2",
        "training.log_interval=1",
        "training.global_batch_size=8",
        "training.micro_batch_size=4",
        f"training.max_steps={steps}",
        "training.checkpoint_interval=5",
        "training.eval_interval=5",
        "training.sample_interval=100",
    ]
    train(load_config(None, settings, options={"data": {"paths": [str(text)]}, "output_dir": str(output)}), **options)
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in TIMING} for row in rows]


@pytest.mark.parametrize("position_encoding", ["sinusoidal", "learned", "rope"])
def test_logits_equal_those_of_the_cpu(position_encoding: str) -> None:
    config = ModelConfig(
        vocab_size=200, d_model=64, num_layers=2, num_heads=4, max_seq_len=64, position_encoding=position_encoding
    )
    model = build_model(config, seed=1).eval()
    ids = torch.randint(200, (3, 64), generator=torch.Generator().manual_seed(0))
    documents = (torch.arange(64) > 20).long().expand(3, -1)
    with torch.no_grad():
        expected = model(ids, document_ids=documents)
        found = model.cuda()(ids.cuda(), document_ids=documents.cuda())
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-3, atol=1e-4)


def test_a_run_repeats_and_resumes_bit_for_bit(text: Path, tmp_path: Path) -> None:
    unbroken = run(text, tmp_path / "unbroken", 20)
    assert run(text, tmp_path / "again", 20) == unbroken
    run(text, tmp_path / "resumed", 10)
    assert run(text, tmp_path / "resumed", 20, resume=True) == unbroken


def test_text_is_the_same_with_and_without_the_cache(text: Path, tmp_path: Path) -> None:
    run(text, tmp_path / "run", 20)
    generator = load_generator(tmp_path / "run", device="cuda")
    config = GenerationConfig(temperature=0.0, max_new_tokens=24)
    texts = [
        [completion.text for completion in each.generate(["Sheep", "number 12"], config)]
        for each in (generator, RecomputingGenerator(generator.model, generator.tokenizer))
    ]
    assert texts[0] == texts[1]
