"""Commands that only look or refuse start at once: none loads torch, or another library that takes its time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from ..command_line import Launcher

# Runs one command after the other in this process; what any of them loads is still there after it.
PROGRAM = """
import contextlib, io, json, sys
from sheepop.cli.main import main

HEAVY = {"torch", "datatrove", "transformers", "matplotlib", "plotly", "tensorboard", "scipy", "pandas"}
for arguments, expected in json.loads(sys.argv[1]):
    sys.argv = ["sheepop", *arguments]
    code, out, err = 0, io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
    print(json.dumps([code == expected, sorted(HEAVY & set(sys.modules)), out.getvalue() + err.getvalue()]))
"""


def test_what_looks_or_refuses_loads_no_heavy_library(trained: Path) -> None:
    run = str(trained)
    commands: list[tuple[list[str], int]] = [
        (["--help"], 0),
        (["train", "--help"], 0),
        (["train", "--bogus"], 2),
        (["train", "--data", "notes", "training.lerning_rate=1"], 2),
        (["train", "--resume", f"{run}-nowhere"], 2),
        (["quickstart", "--data", "notes", "training.lerning_rate=1"], 2),
        (["data", "build", "notes", "--output", "corpus", "data.bogus=1"], 2),
        (["scale", "--data", "notes"], 2),
        (["scale", "--data", "notes", "--budget", "0h"], 2),
        (["generate", run, "--prompt", "x", "--top-k", "0"], 2),
        (["generate", run, "x", "--top-logprobs", "3"], 2),
        (["chat", f"{run}-nowhere"], 3),
        (["score", f"{run}-nowhere"], 3),
        (["tokenizer", "encode", run, "Sheep"], 0),
        (["data", "stats", run], 0),
        (["data", "show", run, "--tokens", "0:5"], 0),
        (["runs", run, run], 2),
        (["runs", run], 0),
        (["runs", str(trained.parent), "--json"], 0),
    ]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(commands)], capture_output=True, text=True, check=True
    )
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(results) == len(commands)
    for (arguments, _), (as_expected, heavy, said) in zip(commands, results, strict=True):
        assert as_expected, (arguments, said)
        assert heavy == [], arguments
    assert "quickstart" in results[0][2]
    assert "Did you mean training.learning_rate?" in results[3][2]
    listed = json.loads(results[-1][2])["runs"]
    assert [run["parameters"] for run in listed if run["name"] == trained.name] != [None]


def test_a_shell_completes_verbs() -> None:
    """As the script asks that ``sheepop --install-completion`` puts into a shell."""
    for words, place, expected in (("sheepop qu", 1, ["quickstart", "quantize"]), ("sheepop data sh", 2, ["show"])):
        asked = {"_SHEEPOP_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(place)}
        environment = {**os.environ, **asked}
        program = "import sys; sys.argv[0] = 'sheepop'; from sheepop.cli.main import main; main()"
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
        )
        assert done.stdout.split() == expected


ENDING = """
import atexit
import sys
import threading
import time

import sheepop


@sheepop.register.command("end")
def end() -> None:
    '''End with a thread and a function that are left.'''

    def work() -> None:
        time.sleep(0.05)
        print("thread")

    atexit.register(print, "exit function")
    threading.Thread(target=work).start()
    print("command")
    sys.exit(7)
"""


def test_a_command_ends_as_python_ends(tmp_path: Path, launcher: Launcher) -> None:
    (tmp_path / "plugin.py").write_text(ENDING)
    done = launcher.run("--plugin", tmp_path / "plugin.py", "end")
    assert (done.code, done.out, done.err) == (7, "command\nthread\nexit function\n", "")
    watched = (
        "import sys\nfrom sheepop.__main__ import main\nsys.setprofile(lambda *_: None)\n"
        "try:\n    main()\nexcept SystemExit:\n    sys.setprofile(None)\n    print('profile')"
    )
    done = launcher.run("--plugin", tmp_path / "plugin.py", "end", program=watched)
    assert done.out.endswith("profile\n")
