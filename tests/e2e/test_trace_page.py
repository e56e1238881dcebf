"""The commands and programs of docs/trace.md run, in order, on a model at toy size."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

import sheepop

from ..command_line import in_process

PAGE = Path(__file__).parents[2] / "docs" / "trace.md"


def test_everything_on_the_page_does_what_it_says(
    tiny: tuple[str, ...],
    text_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes").symlink_to(text_folder)
    made = in_process("train", "--data", "notes", "--output", "runs/quickstart", *tiny)
    assert made.code == 0, made.err
    page = PAGE.read_text(encoding="utf-8")
    for kind, block in re.findall(r"^```(bash|python)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE):
        if kind == "python":
            exec(compile(block, str(PAGE), "exec"), {})
            continue
        for line in block.splitlines():
            more = ["training.precision=fp32"] if " train " in line else []
            ended = in_process(*shlex.split(line)[1:], *more, "--device", "cpu")
            assert ended.code == 0, f"{line}: {ended.err}"
    assert "torch.Size([2, 9, 9])" in capsys.readouterr().out
    assert (tmp_path / "traces/hello/attention_L0.png").is_file()
    assert len(list((tmp_path / "runs/further/traces").iterdir())) >= 2
    named = re.findall(r"`(attention_L0|lens|residual_norms|embedding_map|next_token|attribution)`", page)
    assert len(named) == 6 and all((tmp_path / f"traces/hello/{name}.json").is_file() for name in named)
    assert sheepop.load("runs/further", device="cpu").trace("def").num_tokens == 3
