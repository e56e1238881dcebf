"""``sheepop trace``: what it shows and writes is what the Python API has."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import sheepop
from sheepop.interpret.lens import logit_lens, residual_norms
from sheepop.interpret.parts import direct_attribution
from sheepop.interpret.store import StoredTrace

Run = Callable[..., Any]
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def folder(run: Run, trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("traces") / "sheep"
    drawn = ("--temperature", "0.5", "--top-k", "3", "--position", "2", "--against", "S")
    ended = run("trace", trained, "Sheep $x_1$ 中", "--output", output, "--compare", trained, *drawn, "--device", "cpu")
    assert ended.code == 0, ended.err
    assert "BROKEN" not in ended.out and ended.out.count("holds  ") == 8
    assert f"Written: {output}" in ended.err
    return output


def test_pictures_show_the_numbers_of_the_trace(trained: Path, folder: Path) -> None:
    trace = sheepop.load(trained, device="cpu").trace("Sheep $x_1$ 中")
    names = {"lens", "residual_norms", "embedding_map", "next_token", "attribution", "comparison", "attention_L0"}
    assert {path.stem for path in folder.glob("*.png")} == {path.stem for path in folder.glob("*.svg")} == names
    assert all(path.read_bytes().startswith(PNG) for path in folder.glob("*.png"))
    data = {name: json.loads((folder / f"{name}.json").read_text()) for name in names}
    assert data["attention_L0"]["weights"] == trace["blocks.0.attention.weights"].tolist()
    assert data["residual_norms"]["norms"] == residual_norms(trace.target).tolist()
    assert data["lens"]["divergence"] == logit_lens(trace).divergence.tolist()
    token = trace.predictions[2].top[0][0]
    rival = trace.tokenizer.encode("S")[0]
    found = direct_attribution(trace, 2, token, rival)
    assert data["attribution"]["parts"] == pytest.approx(dict(zip(found.names, found.values, strict=True)))
    p = trace.logits_behind(2).softmax(-1)
    assert data["next_token"]["probabilities"] == pytest.approx(sorted(p.tolist(), reverse=True)[:20], rel=1e-5)
    left = [x for x in data["next_token"]["drawn_with"] if x]
    squares = [float(x) ** 2 for x in p.topk(3).values]  # temperature 1/2
    assert left == pytest.approx([square / sum(squares) for square in squares], rel=1e-4)
    assert data["comparison"]["changed"] == [] and max(map(max, data["comparison"]["distance"])) == 0
    stored = StoredTrace.open(folder)
    assert stored.read("residuals").tolist() == trace.residuals.tolist()


def test_json_has_what_is_shown(run: Run, trained: Path) -> None:
    found = json.loads(run("trace", trained, "--prompt", "Sheep", "--json", "--device", "cpu").out)
    trace = sheepop.load(trained, device="cpu").trace("Sheep")
    assert [token["id"] for token in found["tokens"]] == trace.token_ids
    assert found["attribution"]["total"] == pytest.approx(float(trace["logits"][-1].max()), abs=1e-5)
    assert all(check["holds"] for check in found["checks"])


@pytest.mark.parametrize(
    ("arguments", "code", "problem"),
    [
        ((), 2, "Give one prompt, as TEXT or with --prompt"),
        (("a", "--prompt", "b"), 2, "Give one prompt"),
        (("",), 2, "empty"),
        (("Sheep" * 20,), 2, "The prompt has 100 tokens, but the model reads 32"),
        (("Sheep", "--position", "5"), 2, "--position 5 is outside the prompt"),
        (("Sheep", "--token", "no"), 2, "'no' is 2 tokens of this model, not one"),
        (("Sheep", "--temperature", "-1"), 2, "temperature"),
        (("Sheep", "--compare", "nowhere"), 3, "nowhere"),
        (("Sheep", "--target", "ram"), 2, "This model reads one text"),
    ],
)
def test_what_cannot_be_traced_is_refused(
    run: Run, trained: Path, arguments: tuple[str, ...], code: int, problem: str
) -> None:
    ended = run("trace", trained, *arguments, "--device", "cpu")
    assert (ended.code, ended.out) == (code, "") and problem in ended.err, ended.err
    assert "Traceback" not in ended.err


def test_a_directory_is_replaced_only_when_asked(run: Run, trained: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "notes.txt").write_text("mine")
    ended = run("trace", trained, "Sheep", "--output", kept)
    assert ended.code != 0 and "already exists" in ended.err
    assert [path.name for path in kept.iterdir()] == ["notes.txt"]
