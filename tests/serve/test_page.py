"""The documentation of the server: its examples run against a live one, and its lists match the code."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from sheepop.serve.access import Doorkeeper

from .conftest import Live

PAGE = (Path(__file__).parents[2] / "docs" / "server.md").read_text(encoding="utf-8")


def fences(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)


def here(example: str, live: Live) -> str:
    return example.replace("http://127.0.0.1:8000", live.url).replace('"quickstart"', '"plain"')


def test_the_examples_run(live: Live, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("openai")
    examples = fences("python")
    assert len(examples) == 2
    for example in examples:
        exec(here(example, live), {})
        assert len(capsys.readouterr().out) >= 40


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_commands_for_curl_run(live: Live) -> None:
    commands = [block for block in fences("bash") if block.startswith("curl")]
    assert commands
    for command in commands:
        done = subprocess.run(["bash", "-c", here(command, live)], capture_output=True, check=True)
        answer = json.loads(done.stdout)
        (choice,), written = answer["choices"], answer["usage"]["completion_tokens"]
        assert (written, choice["finish_reason"]) == (40, "length") or (written < 40, choice["finish_reason"]) == (
            True,
            "stop",
        )


def test_the_file_of_keys_is_read(tmp_path: Path) -> None:
    (keys,) = [block for block in fences("json") if block.startswith("[")]
    (tmp_path / "keys.json").write_text(keys)
    doorkeeper = Doorkeeper(str(tmp_path / "keys.json"))
    assert doorkeeper.client({"authorization": "Bearer another-random-word"}).settings.requests_per_minute == 600


def test_every_path_and_every_metric_is_listed(live: Live) -> None:
    import httpx

    paths = httpx.get(f"{live.url}/openapi.json").json()["paths"]
    for path in paths:
        assert path.replace("{name}", "NAME") in PAGE
    families = re.findall(r"^# TYPE (\w+) ", httpx.get(f"{live.url}/metrics").text, flags=re.MULTILINE)
    assert {name for name in families if not name.endswith("_created")} | {"sheepop_replicas"} == set(
        re.findall(r"`(sheepop_\w+)`", PAGE)
    )
