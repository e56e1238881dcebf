"""lm-eval asking the server through ``local-completions``, beside its backend for transformers on the same model."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="lm-eval asks: pip install sheepop[eval]")
pytest.importorskip("datasets", reason="lm-eval reads its tasks with datasets")
pytest.importorskip("accelerate", reason="lm-eval's own backend needs accelerate")
pytest.importorskip("tenacity", reason="lm-eval asks servers with tenacity: pip install lm-eval[api]")

from sheepop.checkpoint import load_model
from sheepop.serve.config import ServerConfig
from sheepop.serve.served_model import ServedModel

from ..evaluate.test_harness import WORDS, build_pair
from .conftest import Live

TASK = """
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
task: local
output_type: multiple_choice
test_split: test
doc_to_text: story
doc_to_choice: endings
doc_to_target: right
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
  - {{metric: acc_norm, aggregation: mean, higher_is_better: true}}
"""


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    draw = random.Random(3)

    def some(count: int) -> str:
        return " ".join(draw.choices(WORDS, k=count))

    rows = [
        {"story": some(8), "endings": [some(1 + number % 4) for _ in range(4)], "right": draw.randrange(4)}
        for number in range(12)
    ]
    (tmp_path / "test.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "local.yaml").write_text(TASK.format(file=tmp_path / "test.jsonl"))
    yield tmp_path


def test_choices_are_scored_as_through_transformers(task: Path) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.openai_completions import LocalCompletionsAPI
    from lm_eval.tasks import TaskManager

    pair = build_pair(task, "llama")
    config = ServerConfig(max_running=4, max_waiting=8)
    live = Live(config, models=["m"], load=lambda name: ServedModel(name, load_model(task / "ours"), config))

    def scores(model: Any) -> tuple[dict[str, Any], list[float], list[bool]]:
        manager = TaskManager(include_path=str(task), include_defaults=False)
        found = simple_evaluate(model, tasks=["local"], task_manager=manager, bootstrap_iters=10)
        answers = [answer[0] for sample in found["samples"]["local"] for answer in sample["resps"]]
        results = {name: found["results"]["local"][f"{name},none"] for name in ("acc", "acc_norm")}
        return results, [float(answer[0]) for answer in answers], [bool(answer[1]) for answer in answers]

    try:
        served = LocalCompletionsAPI(
            base_url=f"{live.url}/v1/completions", model="m", tokenizer=str(task / "theirs"), max_length=96,
            batch_size=3, add_bos_token=True,
        )  # fmt: skip
        ours, theirs = scores(served), scores(HFLM(pretrained=pair.theirs, tokenizer=pair.tokenizer, device="cpu"))
    finally:
        live.close()
    assert ours[0] == theirs[0]
    assert ours[1] == pytest.approx(theirs[1], abs=1e-4)
    assert ours[2] == theirs[2]
    assert len(set(ours[1])) > 40  # none is a constant
