"""What is asked of a model on the command line is what the Python API gives."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

import sheepop
from sheepop.checkpoint import save_model
from sheepop.model import ModelConfig, build_model
from sheepop.tokenizer import CharTokenizer

Run = Callable[..., Any]


def test_json_has_all_that_was_asked_for(run: Run, trained: Path) -> None:
    lm = sheepop.load(trained, device="cpu")
    options = ("--num-completions", "2", "--top-logprobs", "3", "--max-new-tokens", "4", "--seed", "5", "--json")
    rows = json.loads(run("generate", trained, "Sheep", "-p", "The", *options, "--device", "cpu").out)
    expected = lm.generate_batch(["Sheep", "The"], num_completions=2, top_logprobs=3, max_new_tokens=4, seed=5)
    assert rows == json.loads(json.dumps([asdict(completion) for completion in expected]))
    assert [row["prompt"] for row in rows] == ["Sheep", "Sheep", "The", "The"]
    first = lm.model(torch.tensor([lm.tokenizer.encode("Sheep")])).log_softmax(-1)[0, -1]
    assert rows[0]["likeliest"][0]["logprobs"] == pytest.approx(first.topk(3).values.tolist(), abs=1e-5)


def test_several_texts_stand_below_their_numbers(run: Run, trained: Path) -> None:
    shown = run("generate", trained, "Sheep", "-n", "2", "--max-new-tokens", "3", "--seed", "5", "-q").out
    texts = sheepop.load(trained, device="cpu").generate_batch(["Sheep"], num_completions=2, max_new_tokens=3, seed=5)
    assert shown == "".join(f"--- {number} ---\n{text.text}\n" for number, text in enumerate(texts, start=1))


def test_texts_beside_one_that_is_lost_are_printed_before_the_error(run: Run, tmp_path: Path) -> None:
    """By a network that cannot read an @."""
    sizes = {"d_model": 16, "num_layers": 1, "num_heads": 2, "max_seq_len": 32, "tie_weights": False}
    tokenizer = CharTokenizer()
    model = build_model(ModelConfig(vocab_size=tokenizer.vocab_size, **sizes), 0)
    with torch.no_grad():
        model.embedding.weight[tokenizer.encode("@")] = math.nan
    save_model(tmp_path / "model", model, tokenizer, {})
    settings = ("--max-new-tokens", "4", "--greedy", "--seed", "5", "-q", "--device", "cpu")
    lm = sheepop.load(tmp_path / "model", device="cpu")
    first, last = lm.generate(["a", "x"], max_new_tokens=4, greedy=True, seed=5)
    given = ("generate", tmp_path / "model", "-p", "a", "-p", "b@d", "-p", "x", *settings)
    shown, as_json = run(*given), run(*given, "--json")
    assert shown.out == f"--- 1 ---\n{first.text}\n--- 3 ---\n{last.text}\n"
    assert json.loads(as_json.out) == [json.loads(json.dumps(each and asdict(each))) for each in (first, None, last)]
    for lost in (shown, as_json, run("generate", tmp_path / "model", "b@d", *settings, "--json")):
        assert (lost.code, lost.err.count("\n")) == (3, 1)
    assert shown.err == as_json.err
    assert shown.err.startswith("Error: Prompt 2 (position 3 of prompt and text): the network's logits are not finite")
    assert (lost.out, lost.err[:23]) == ("", "Error: The prompt (posi")


@pytest.mark.parametrize(
    ("option", "value", "fits"),
    [
        ("--choice", "fence", lambda text: text == "fence"),
        ("--regex", "[1-3]{4}", lambda text: re.fullmatch("[1-3]{4}", text)),
        ("--grammar", 'start: "ab"~2', lambda text: text == "abab"),
        ("--json-schema", '{"const": 5}', lambda text: json.loads(text) == 5),
    ],
)
def test_a_text_has_the_form_that_is_asked_for(
    run: Run, trained: Path, tmp_path: Path, option: str, value: str, fits: Callable[[str], object]
) -> None:
    pytest.importorskip("llguidance")
    (tmp_path / "form").write_text(value)
    given = tmp_path / "form" if option == "--grammar" else value
    shown = run("generate", trained, "Sheep", option, given, "-q")
    assert shown.code == 0, shown.err
    assert fits(shown.out.removesuffix("\n")), shown.out


def test_a_draft_model_changes_no_text(run: Run, trained: Path, tmp_path: Path) -> None:
    common = ("generate", trained, "Sheep number", "--max-new-tokens", "12", "--seed", "3", "-q")
    guessed = run(*common, "--guesses", "3", "--draft-model", trained)
    assert (guessed.code, guessed.out) == (0, run(*common).out)


def test_score_shows_every_token_and_the_sum(run: Run, trained: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("Sheep eat\n")
    expected = sheepop.load(trained, device="cpu").score("Sheep eat\n")
    scored = json.loads(run("score", trained, tmp_path / "text.txt", "--json").out)
    assert scored["bits_per_byte"] == pytest.approx(expected.bits_per_byte)
    assert (scored["num_tokens"], scored["num_bytes"], scored["pieces"]) == (9, 9, list("heep eat\n"))
    *table, last = run("score", trained, stdin="Sheep eat\n").out.splitlines()
    assert table[0].split() == ["probability", "log-prob", "rank", "token"]
    probability, logprob, rank, piece = table[1].split()
    assert (piece, int(rank)) == ("h", expected.ranks[0])
    assert float(probability.rstrip("%")) == pytest.approx(100 * math.exp(float(logprob)), abs=0.01)
    assert last.startswith("9 tokens, ")
    assert f"{expected.bits_per_byte:.4f} bits per byte" in last
    assert run("score", trained, "-", "--quiet", stdin="Sheep eat\n").out == f"{last}\n"
    assert run("score", trained, "Sheep eat\n", "--quiet").out == f"{last}\n"


def test_a_chat_reads_lines_where_there_is_no_terminal(run: Run, trained: Path, tmp_path: Path) -> None:
    lines = f"Sheep\n/again\n/nope\n/system Be brief.\n/save {tmp_path}/talk.json\n"
    done = run("chat", trained, "--max-new-tokens", "5", "--seed", "7", stdin=lines)
    assert done.code == 0, done.err
    lm = sheepop.load(trained, device="cpu")
    first, second = (lm.generate("Sheep", max_new_tokens=5, seed=seed).text for seed in (7, 8))
    assert done.out == f"{first}\n{second}\n"
    assert "no chat template" in done.err
    assert "no command /nope" in done.err
    assert json.loads((tmp_path / "talk.json").read_text())["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Sheep"},
        {"role": "assistant", "content": second},
    ]
