"""The notebooks of examples/ run, in order, in one process, with a toy model in place of the one they make."""

from __future__ import annotations

import ast
import io
import json
import re
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

import sheepop
from sheepop.core.console import Console

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
SIZES = {
    "model.d_model": 32, "model.num_layers": 2, "model.num_heads": 2, "model.max_seq_len": 64,
    "tokenizer.vocab_size": 270, "training.global_batch_size": 4, "training.precision": "fp32",
    "training.max_steps": 4, "training.checkpoint_interval": 2, "training.log_interval": 1, "training.sample_tokens": 4,
}  # fmt: skip
TEXT = "".join(f"def read{n}(self):\n    return self.count + {n}\n" for n in range(60))

Namespace = dict[str, Any]


def cells(notebook: Path, kind: str) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == kind]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Namespace, str]]:
    """What the notebooks left in their names and printed; each got small values for its parameters."""
    place = tmp_path_factory.mktemp("notebooks")
    (place / "code.py").write_text(TEXT)
    short = {key: value for key, value in SIZES.items() if key.startswith("training.") and "batch" not in key}
    run, tuned = place / "run", {**short, "training.global_batch_size": 4}
    parameters: dict[str, Namespace] = {
        "1-first-model": {"FILES": [place / "code.py"], "RUN": run, "MINUTES": None, "SETTINGS": SIZES},
        "2-fine-tune": {
            "MODEL": run, "RUN": place / "tuned", "EXAMPLES": place / "colours.jsonl", "NEW_TOKENS": 4,
            "SETTINGS": tuned,
        },
        "3-look-inside": {"MODEL": run},
        "4-evaluate": {"MODEL": run, "HELD_OUT": [place / "code.py"] * 2, "LONGEST": 1000},
        "5-control": {"RUN": run, "TEXT": TEXT, "NUM_ROWS": 4, "ROW_LENGTH": 32, "ITERATIONS": 3},
    }  # fmt: skip
    assert [notebook.stem for notebook in NOTEBOOKS] == list(parameters)
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MPLBACKEND", "Agg")
        patch.setattr("matplotlib.pyplot.show", lambda: __import__("matplotlib.pyplot").pyplot.close("all"))
        patch.setattr("sheepop.runs.Console", lambda quiet: Console.silent())
        for notebook in NOTEBOOKS:
            found[notebook.stem] = execute(notebook, parameters[notebook.stem])
    return found


def execute(notebook: Path, parameters: Namespace) -> tuple[Namespace, str]:
    namespace: Namespace = {"__name__": "__main__"}
    printed = io.StringIO()
    for number, cell in enumerate(cells(notebook, "code")):
        with redirect_stdout(printed):
            exec(compile("".join(cell["source"]), f"{notebook.name}, code cell {number}", "exec"), namespace)
        if cell["metadata"].get("tags") == ["parameters"]:
            assert parameters.keys() <= namespace.keys()
            namespace |= parameters
    return namespace, printed.getvalue()


def test_the_first_makes_the_model_that_the_others_read(ran: dict[str, tuple[Namespace, str]]):
    names, printed = ran["1-first-model"]
    assert printed.startswith("2 blocks, width 32, 270 tokens in the vocabulary\n")
    again = names["lm"].generate(names["PROMPT"], max_new_tokens=60, temperature=1.0, seed=1)
    assert printed.count(f"--- temperature 1.0\n{names['PROMPT']}{again.text}\n") == 1


def test_fine_tuning_trains_an_adapter_of_rank_8(ran: dict[str, tuple[Namespace, str]]):
    names, printed = ran["2-fine-tune"]
    assert all(8 in shape for shape in names["trained"].values()) and names["trained"]
    assert "18 examples" in printed and f"{names['sizes']:,} numbers" in printed


def test_looking_inside_finds_the_model_consistent(ran: dict[str, tuple[Namespace, str]]):
    names, printed = ran["3-look-inside"]
    logits = names["lm"].model(names["trace"].model.embedding.weight.new_tensor([names["trace"].token_ids]).long())
    assert names["found"].total == pytest.approx(float(logits[0, -1].max()), abs=1e-4)
    assert "WRONG" not in printed and printed.count("after block") == 2


def test_evaluating_agrees_with_the_score_of_the_model(ran: dict[str, tuple[Namespace, str]]):
    names, _ = ran["4-evaluate"]
    alone = sheepop.load(names["MODEL"]).score(TEXT[:1000]).bits_per_byte
    assert names["rows"]["the model"] == pytest.approx(alone, rel=1e-4)
    assert names["low"] <= 0.8 and float(names["high"]) == pytest.approx(alone, rel=1e-4)


def test_control_measures_what_a_slow_computation_measures(ran: dict[str, tuple[Namespace, str]]):
    """The curvature along a direction from losses alone, in float64; a gradient's size from its rows."""
    import torch

    names, _ = ran["5-control"]
    model, rows, direction = names["model"], names["ids"], names["direction"]
    product = names["hessian_product"](direction)
    model.double()
    names["weights"][:] = list(model.parameters())
    exact = names["hessian_product"](direction.double(), 1e-4)
    assert float(direction @ product) == pytest.approx(float(direction.double() @ exact), rel=0.05)
    alone = torch.stack([names["gradient"](row[None]) for row in rows])
    torch.testing.assert_close(alone.mean(0).float(), names["whole"], atol=1e-5, rtol=1e-3)
    true, batch = alone.mean(0).square().sum(), len(rows)
    variance = alone.var(dim=0, correction=1).sum()
    assert float(names["noise"]) == pytest.approx(float(variance), rel=1e-2)
    assert float(names["signal"]) == pytest.approx(float(true - variance / batch), rel=1e-2, abs=1e-4)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_a_notebook_is_stored_without_what_it_printed(notebook: Path):
    content = json.loads(notebook.read_text(encoding="utf-8"))
    assert (content["nbformat"], content["nbformat_minor"]) == (4, 5)
    assert notebook.read_text(encoding="utf-8") == json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    assert len({cell["id"] for cell in content["cells"]}) == len(content["cells"])
    code = cells(notebook, "code")
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    assert [cell["metadata"] for cell in code if cell["metadata"]] == [{"tags": ["parameters"]}]
    for cell in code:
        ast.parse("".join(cell["source"]))
    for cell in cells(notebook, "markdown"):
        for link in re.findall(r"\]\((?!https?:)([^)#]+)", "".join(cell["source"])):
            assert (notebook.parent / link).is_file(), link
