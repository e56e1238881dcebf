"""The page about a log: its numbers are those of the figures, and hostile prompts stay text."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

import sheepop
from sheepop.checkpoint import RunDirectory
from sheepop.core.errors import DataError, UsageError
from sheepop.jobs.config import load_config
from sheepop.jobs.monitor import _texts_of_run, compare, mean_states, monitor
from sheepop.jobs.run.record import write_run_config
from sheepop.monitor.answered import read_answers
from sheepop.monitor.figures import Alert
from sheepop.serve.conversation_log import SUFFIX, LogFaults, check_sum

from ..command_line import in_process
from ..running import train
from .conftest import Say
from .test_drift import KNOWN, STRANGE, text
from .test_review import HOSTILE


class Tags(HTMLParser):
    """The elements of a page with their attributes, and all of its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture
def log(say: Say, tmp_path: Path) -> Path:
    """Sixty answers over three days, of which one in three are bad; the prompts are hostile, or of known words."""
    draw = random.Random(0)
    for number in range(60):
        say(
            HOSTILE if number == 7 else text(draw, KNOWN, 8),
            HOSTILE if number % 2 else f"Answer {number}.",
            votes=(0 if number in (1, 7) else -1 if number % 3 == 0 else 1,),
            mean_logprob=-2.0 if number == 7 else -1.0,
            time=f"2026-03-{1 + number // 20:02d}T10:00:00+00:00",
        )
    return tmp_path / "log"


def test_hostile_prompts_are_text_on_the_page(log: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    shown = in_process("monitor", log, "--html", page)
    assert (shown.code, shown.err) == (0, f"Page: {page}\n")
    read = Tags(page.read_text(encoding="utf-8"))
    names = [tag for tag, _ in read.tags]
    assert "img" not in names and "svg" not in names and names.count("textarea") == 0
    assert not any(name.startswith("on") for _, attributes in read.tags for name in attributes)
    assert "<script>document.title = 'broken'</script>" in read.text, "which the unsure answer without a vote shows"
    figures = monitor(log).models["m"].figures
    assert figures.shares["bad"] is not None and str(figures.shares["bad"]) in read.text
    assert figures.shares["bad"].value == 20 / 58
    # A chart of three days, with the share of bad votes on each.
    (chart, *_) = [json.loads(part) for part in page.read_text().split('type="application/json">')[1:] for part in
                   [part.split("</script>")[0]]]  # fmt: skip
    (bad,) = [each for each in chart["data"] if each["name"].startswith("bad")]
    assert bad["x"] == ["2026-03-01", "2026-03-02", "2026-03-03"]
    days = monitor(log).models["m"].over_time
    assert bad["y"] == [share.value for day in days.values() if (share := day.shares["bad"])]


def test_prompts_are_compared_with_a_corpus(log: Path, say: Say, tmp_path: Path) -> None:
    draw = random.Random(9)
    (tmp_path / "texts").mkdir()
    for number in range(30):
        (tmp_path / "texts" / f"{number}.txt").write_text(text(draw, KNOWN, 300))
    settings = ["data.clean.stages=[]", "tokenizer.algorithm=char"]
    made = in_process("data", "build", tmp_path / "texts", "--output", tmp_path / "corpus", "--quiet", *settings)
    assert made.code == 0, made.err
    alike = in_process("monitor", log, "--against", tmp_path / "corpus", "--alert", "drift>0.5")
    assert alike.code == 0 and "told from the data by words" in alike.out
    for _ in range(60):
        say(text(draw, STRANGE, 8), "Answer.")
    html = tmp_path / "page.html"
    drifted = in_process("monitor", log, "--against", tmp_path / "corpus", "--alert", "drift>0.5", "--html", html)
    assert drifted.code == 1 and "prompts by words: drift>0.5" in drifted.err
    assert "Prompts and training data" in html.read_text() and STRANGE[0] in html.read_text()
    assert in_process("monitor", log, "--alert", "drift>0.5").code == 2
    with pytest.raises(DataError, match="neither a corpus nor a run"):
        compare(list(read_answers(log, LogFaults())), tmp_path)


def test_prompts_are_compared_by_the_hidden_states_of_a_run(
    text_folder: Path, tiny: tuple[str, ...], say: Say, tmp_path: Path
) -> None:
    run, tuned = tmp_path / "run", tmp_path / "tuned"
    train(load_config(overrides=(*tiny, f"data.paths={text_folder}", f"output_dir={run}", "device=cpu")))
    for number in range(60):
        say(f"Sheep number {number % 30} jumps over", "the fence.", votes=(1,))
    answers = list(read_answers(tmp_path / "log", LogFaults()))
    alike = compare(answers, run, device="cpu")
    assert set(alike) == {"words", "pairs of words", "hidden states"}
    lm = sheepop.load(run, device="cpu")
    texts = ["Sheep", "Sheep number 1 jumps over the fence and the hill and", "the fence"]
    states = mean_states(lm.model, lm.tokenizer, texts)
    for given, state in zip(texts, states, strict=True):
        ids = lm.tokenizer.encode(given)[: lm.config.max_seq_len]
        with torch.inference_mode():
            expected = lm.model.hidden_states(torch.tensor([ids]))[0].mean(0)
        assert state == pytest.approx(expected.numpy(), abs=1e-5)
    strange = [replace(each, prompt=f"{each.asked[::-1]}") for each in answers]
    found = compare(strange, run, device="cpu")
    assert all(each.is_certain for each in found.values())
    # A tuned run was trained on the prompts of its rows.
    rows = [{"prompt": f"Sheep {number}", "completion": " jumps"} for number in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = load_config(overrides=(f"data.paths={tmp_path / 'rows.jsonl'}", f"output_dir={tuned}"))
    (tuned / "checkpoints").mkdir(parents=True)
    write_run_config(RunDirectory(tuned), config)
    assert sorted(_texts_of_run(tuned)) == sorted(row["prompt"] for row in rows)
    (tmp_path / "rows.jsonl").unlink()
    with pytest.raises(DataError, match="is not here any more"):
        list(_texts_of_run(tuned))


def test_records_of_another_form_are_counted_and_the_others_are_read(log: Path) -> None:
    (path,) = log.glob(f"*{SUFFIX}")
    lines = path.read_bytes().splitlines()
    body = {"number": len(lines), "kind": "answer", "id": "x", "answers": [{"choice": 0, "text": 7}]}
    forms = [
        body,
        {**body, "answers": None},
        {**body, "kind": "of a later version"},
        {"kind": "vote", "id": ["x"], "vote": "many"},
    ]
    with path.open("ab") as file:
        for number, form in enumerate(forms):
            content = json.dumps({**form, "number": len(lines) + number}).encode()[:-1]
            file.write(content + b',"check":"' + check_sum(path.name, content) + b'"}\n')
    faults = LogFaults()
    assert len(list(read_answers(log, faults))) == 60
    assert faults == LogFaults(unknown=3)
    assert "3 of an unknown form" in in_process("monitor", log).err


def test_an_alert_names_a_known_share() -> None:
    assert str(Alert.of("drift > 0.6")) == "drift>0.6"
    with pytest.raises(UsageError, match=r"The shares are cut, left, .*unsure, drift"):
        Alert.of("angry>0.6")
