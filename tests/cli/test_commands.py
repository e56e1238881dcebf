"""Every verb does what it says, and prints what a program can read when asked to."""

from __future__ import annotations

import base64
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import sheepop
from sheepop.checkpoint.run_directory import RUN_ENTRIES
from sheepop.cli.main import _program
from sheepop.generate import GenerationConfig
from sheepop.model.presets import PRESETS
from sheepop.tokenizer import TokenizerConfig

from ..command_line import Launcher

Run = Callable[..., Any]


def test_help_and_version_load_no_heavy_library() -> None:
    code = (
        "import sys\n"
        "sys.argv = ['sheepop', '--help']\n"
        "from sheepop.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'numpy', 'pydantic', 'tokenizers', 'matplotlib', 'plotly'} & set(sys.modules)\n"
        "print(sorted(heavy), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
    assert "quickstart" in done.stdout


def test_one_part_of_a_file_that_is_left_out_is_no_many(
    run: Run, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = json.loads(run("data", "stats", trained / "corpus", "--json").out)
    report["files"]["refused_parts"] = {"encrypted": 1, "too deep": 1200}
    monkeypatch.setattr("sheepop.jobs.data.stats", lambda directory: report)
    lines = [line.strip() for line in run("data", "stats", trained).out.splitlines()]
    assert "1 part of files left out: encrypted" in lines
    assert "1,200 parts of files left out: too deep" in lines


def test_version(run: Run) -> None:
    assert run("--version").out == f"sheepop {sheepop.__version__}\n"


def verbs(command: Any = _program(), path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words of every verb."""
    if not hasattr(command, "commands"):
        yield path
        return
    for name, inner in command.commands.items():
        yield from verbs(inner, (*path, name))


@pytest.mark.parametrize("verb", list(verbs()), ids=" ".join)
def test_the_help_of_every_verb_has_an_example(run: Run, verb: tuple[str, ...]) -> None:
    result = run(*verb, "--help")
    assert result.code == 0
    assert f"sheepop {' '.join(verb)}" in result.out
    assert "Example" in result.out


def test_help_names_the_defaults_of_the_configuration(run: Run) -> None:
    text = run("generate", "--help").out
    usual = GenerationConfig()
    for value in (usual.max_new_tokens, usual.temperature, usual.top_p, usual.length_penalty):
        assert f"({value})" in text
    assert f"({TokenizerConfig().vocab_size})" in run("tokenizer", "train", "--help").out


def test_config_says_what_can_be_set(run: Run) -> None:
    assert "  default    0.001\n" in run("config", "training.learning_rate").out
    assert "  learning_rate: 0.001" in run("config", "training").out
    rows = json.loads(run("config", "--json").out)
    assert {"training.learning_rate", "data.mix.pattern", "seed"} <= {row["key"] for row in rows}
    wrong = run("config", "training.learnig_rate")
    assert wrong.code == 2
    assert "Did you mean training.learning_rate?" in wrong.err


def test_train_reports_its_scores_as_json(run: Run, text_folder: Path, tmp_path: Path) -> None:
    result = run(
        *("train", "--data", text_folder, "--output", tmp_path / "run", "--json", "-q"),
        *("tokenizer.algorithm=char", "model.d_model=16", "model.num_layers=1", "model.num_heads=2"),
        *("model.max_seq_len=32", "training.global_batch_size=4", "training.max_steps=3", "training.precision=fp32"),
    )
    found = json.loads(result.out)
    assert found["steps"] == 3
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert found["tokens"] == [row["tokens"] for row in rows if row["split"] == "train"][-1]
    assert found["held_out_tokens"] > 0
    assert 0 < found["bits_per_byte"] < 20
    assert (tmp_path / "run" / "report.html").is_file()
    assert (tmp_path / "run" / "plots" / "curves.png").is_file()


def test_a_run_consists_of_known_entries(trained: Path) -> None:
    """Others would keep --overwrite from replacing it."""
    assert {entry.name for entry in trained.iterdir()} == RUN_ENTRIES - {
        ".replaced",
        ".replaced-moving",
        ".corpus.building",
        "advice.json",
        "base",
        "examples",
        "difficulty.safetensors",
        "wandb",
        "profile",
        "stacks",
        "traces",
        "plan.html",
    }


def test_a_finished_run_resumes_to_the_same_scores(run: Run, trained: Path) -> None:
    before = (trained / "metrics.jsonl").read_bytes()
    result = run("train", "--resume", trained, "--json", "-q")
    assert result.code == 0, result.err
    assert json.loads(result.out)["steps"] == 6
    assert (trained / "metrics.jsonl").read_bytes() == before


def test_generate_streams_the_prompt_and_its_continuation(run: Run, trained: Path) -> None:
    result = run("generate", trained, "--prompt", "Sheep", "--max-new-tokens", "5", "--seed", "1")
    assert result.code == 0, result.err
    assert result.out.startswith("Sheep")
    assert result.out.endswith("\n")


def test_the_same_seed_gives_the_same_text_however_it_is_run(run: Run, trained: Path) -> None:
    common = ("generate", trained, "-p", "Sheep", "-p", "number 2", "--seed", "4", "--max-new-tokens", "8", "--json")
    one = ("--max-batch-size", "1")
    texts = [
        [row["text"] for row in json.loads(run(*common, *extra).out)]
        for extra in ((), one, ("--batch-invariant",), ("--batch-invariant", *one))
    ]
    assert texts[0] == texts[1] == texts[2] == texts[3]
    assert len(texts[0]) == 2


def test_prompts_come_from_files_and_standard_input(run: Run, trained: Path, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("Sheep\n")
    options = ("--greedy", "--max-new-tokens", "4", "--json")
    rows = [
        json.loads(run("generate", trained, *source, *options, stdin=stdin).out)[0]
        for source, stdin in (
            (("--prompt", "Sheep"), None),
            (("--file", tmp_path / "p.txt"), None),
            (("-",), "Sheep\n"),
            (("Sheep",), None),
        )
    ]
    for row in rows:
        del row["seed"]  # greedy text needs none
    assert rows[0] == rows[1] == rows[2] == rows[3]
    assert rows[0]["prompt"] == "Sheep"
    assert len(rows[0]["logprobs"]) == len(rows[0]["token_ids"]) == 4


def test_line_ends_in_a_prompt_stay_as_they_are(run: Run, trained: Path, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_bytes(b"a\r\nb\r\n")
    options = ("--greedy", "--max-new-tokens", "1", "--json")
    for source, stdin in ((("--file", tmp_path / "p.txt"), None), (("-",), "a\r\nb\r\n")):
        assert json.loads(run("generate", trained, *source, *options, stdin=stdin).out)[0]["prompt"] == "a\r\nb"


def test_a_file_name_cannot_command_the_terminal(run: Run, trained: Path, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "red\x1b[31m\nname.txt").write_text("Sheep jump over the fence.\n" * 20)
    settings = ("data.validation_fraction=0", f"tokenizer.path={trained / 'corpus' / 'tokenizer'}")
    assert run("data", "build", tmp_path / "in", "-o", tmp_path / "corpus", "--workers", 0, "-q", *settings).code == 0
    shown = run("data", "show", tmp_path / "corpus", "--tokens", "0:10").out
    assert "red\\x1b[31m⏎name.txt" in shown
    assert len(shown.splitlines()) == 2


def test_a_model_cannot_command_the_terminal(launcher: Launcher, trained: Path) -> None:
    prompt = "Sheep\x1b[31m\x07"
    command = ("generate", trained, "--prompt", prompt, "--greedy", "--max-new-tokens", "3", "--device", "cpu")
    screen, terminal = pty.openpty()
    for prompts in ((), ("--prompt", prompt)):
        done = launcher.run(*command, *prompts, stdout=terminal)
        assert done.code == 0, done.err
        assert os.read(screen, 1000).count(b"Sheep\\x1b[31m\\x07") == 1 + bool(prompts)
    os.close(screen)
    os.close(terminal)


def test_what_a_model_wrote_comes_as_it_is_into_a_file(run: Run, trained: Path) -> None:
    assert run("generate", trained, "--prompt", "a\x1b[31m", "--max-new-tokens", "1").out.startswith("a\x1b[31m")


def test_a_window_lets_a_long_prompt_through(run: Run, trained: Path) -> None:
    result = run("generate", trained, "--prompt", "x" * 40, "--window", "--max-new-tokens", "3", "--json")
    assert result.code == 0, result.err
    assert json.loads(result.out)[0]["num_dropped_prompt_tokens"] > 0


def test_tokenizer_encode_names_every_token(run: Run, trained: Path) -> None:
    rows = json.loads(run("tokenizer", "encode", trained, "Hi", "--json").out)
    assert rows == [{"id": 72, "text": "H"}, {"id": 105, "text": "i"}]
    piped = json.loads(run("tokenizer", "encode", trained, "--json", stdin="é\r\n").out)
    assert "".join(row["text"] for row in piped).endswith("\r\n")
    special = json.loads(run("tokenizer", "encode", trained, "<eos>", "--allow-special", "--json").out)
    assert special == [{"id": 3, "text": "<eos>"}]


@pytest.mark.parametrize(("algorithm", "size"), [("bpe", 300), ("wordpiece", 170), ("unigram", 360), ("char", 128)])
def test_tokenizer_train_and_show(run: Run, text_folder: Path, tmp_path: Path, algorithm: str, size: int) -> None:
    options = ("--algorithm", algorithm, "--vocab-size", str(size), "--json", "-q")
    trained = run("tokenizer", "train", text_folder, "-o", tmp_path / "t", *options)
    assert trained.code == 0, trained.err
    shown = json.loads(run("tokenizer", "show", tmp_path / "t", "--json").out)
    assert (shown["algorithm"], shown["vocab_size"]) == (algorithm, size)
    assert shown["special_tokens"] == {"<pad>": 0, "<unk>": 1, "<bos>": 2, "<eos>": 3}
    assert shown["fingerprint"] == json.loads(trained.out)["fingerprint"]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_tokenizer_convert_writes_the_same_tokens(run: Run, tmp_path: Path) -> None:
    ranks = tmp_path / "mine.tiktoken"
    tokens = [*(bytes((byte,)) for byte in range(256)), b"Hi"]
    ranks.write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(token), i) for i, token in enumerate(tokens)))
    made = run("tokenizer", "convert", ranks, "-o", tmp_path / "mine", "--pattern", "cl100k")
    assert (made.code, made.out) == (0, f"Wrote {tmp_path / 'mine'}: bpe, 257 tokens.\n"), made.err
    for place, options in ((ranks, ("--pattern", "cl100k")), (tmp_path / "mine", ())):
        rows = json.loads(run("tokenizer", "encode", place, "Hi!", "--json", *options).out)
        assert rows == [{"id": 256, "text": "Hi"}, {"id": 33, "text": "!"}]
    assert run("tokenizer", "convert", ranks, "-o", tmp_path / "mine", "--pattern", "cl100k").code == 2
    assert run("tokenizer", "convert", ranks, "-o", tmp_path / "other").code == 3


def test_a_built_corpus_can_be_trained_on(run: Run, text_folder: Path, tmp_path: Path) -> None:
    built = run("data", "build", text_folder, "-o", tmp_path / "corpus", "--json", "-q", "tokenizer.vocab_size=300")
    assert built.code == 0, built.err
    counts = json.loads(built.out)
    assert counts["train_documents"] + counts["validation_documents"] == 30
    result = run(
        *("train", "--data", tmp_path / "corpus", "--output", tmp_path / "run", "-q"),
        *("model.d_model=16", "model.num_layers=1", "model.num_heads=2", "model.max_seq_len=32"),
        *("training.global_batch_size=4", "training.max_steps=2", "training.precision=fp32"),
    )
    assert result.code == 0, result.err
    assert not (tmp_path / "run" / "corpus").exists()


def test_the_guides_own_command_with_its_config(run: Run, text_folder: Path, tmp_path: Path) -> None:
    config = {
        "model": {
            "vocab_size": 200,
            "d_model": 16,
            "num_layers": 1,
            "num_heads": 2,
            "d_ff": 32,
            "max_seq_len": 32,
            "dropout": 0.1,
            "activation": "gelu",
            "layer_norm_eps": 1e-5,
            "bias": False,
            "tie_weights": True,
        },
        "training": {
            "batch_size": 4,
            "max_epochs": 1,
            "learning_rate": 1e-3,
            "weight_decay": 0.01,
            "warmup_steps": 2,
            "max_grad_norm": 1.0,
            "gradient_accumulation_steps": 2,
            "use_amp": True,
            "log_interval": 1,
            "save_dir": str(tmp_path / "checkpoints"),
            "eval_interval": 5,
        },
        "data": {"data_dir": "unused", "max_length": 32, "stride": 16, "num_workers": 0},
        "device": "cuda",
        "seed": 42,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    file = text_folder / "00.txt"
    result = run("train", "--data", file, "--config", tmp_path / "config.json", "--device", "cpu", "-q")
    assert result.code == 0, result.err
    run_directory = tmp_path / "checkpoints"
    checkpoint = run_directory / "checkpoints" / (run_directory / "checkpoints" / "latest").read_text().strip()
    written = run("generate", checkpoint, "--prompt", "Sheep", "--max-new-tokens", "4")
    assert written.code == 0, written.err
    assert written.out.startswith("Sheep")


def test_a_step_of_a_run_is_one_that_it_has(run: Run, trained: Path, tmp_path: Path) -> None:
    assert run("data", "show", trained, "--step", 6).err == ""
    beyond = run("data", "show", trained, "--step", 7)
    assert (beyond.code, beyond.out) == (2, "") and "has 6 steps, but --step is 7" in beyond.err
    shutil.copytree(trained, tmp_path / "run")
    (tmp_path / "run" / "config.yaml").write_text(
        (trained / "config.yaml").read_text().replace("max_steps: 6", "max_steps: 9")
    )
    ahead = run("data", "show", tmp_path / "run", "--step", 7)
    assert ahead.code == 0 and ahead.out and "latest checkpoint is from step 6. Step 7 will read this" in ahead.err


def test_doctor_names_the_interpreter_and_torch(run: Run) -> None:
    result = run("doctor")
    assert result.code == 0, result.err
    assert f"{sys.version_info.major}.{sys.version_info.minor}" in result.out
    assert "torch" in result.out


def test_bench_measures_tokens_and_share_of_peak(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"d_model": 32, "num_layers": 1, "num_heads": 2, "max_seq_len": 32, "vocab_size": 300}
    monkeypatch.setitem(PRESETS, "llama-1m", {**PRESETS["llama-1m"], **small})
    result = run("bench", "--preset", "llama-1m", "--seconds", "0.1", "--device", "cpu", "--json", "-q")
    assert result.code == 0, result.err
    rows = json.loads(result.out)["results"]
    assert {row["name"] for row in rows} == {"train", "generate"}
    assert all(row["tokens_per_second"] > 0 and 0 < row["share_of_peak"] < 2 for row in rows)


def test_bench_measures_a_model_and_names_the_wall(run: Run, trained: Path) -> None:
    result = run("bench", "generate", trained, "--seconds", "0.1", "--device", "cpu", "--json", "-q")
    assert result.code == 0, result.err
    found = json.loads(result.out)
    model = sheepop.load(trained, "cpu").model
    weights = sum(weight.nbytes for weight in model.parameters())
    assert found["weight_bytes"] == weights
    rows = found["results"]
    assert [(row["name"], row["texts"], row["sampling"]) for row in rows] == [
        ("prompt", 1, ""),
        *(("decode", texts, kind) for texts in (1, 8, 32) for kind in ("greedy", "sampled")),
    ]
    config, length = model.config, round(rows[0]["tokens_per_second"] * rows[0]["step_seconds"])
    weights_of_blocks = sum(weight.numel() for weight in model.blocks.parameters() if weight.ndim == 2)
    # Every token but the last of a prompt needs no logits; token t sees t keys, in two products for each head.
    head, seen = config.d_model * config.vocabulary, length * (length + 1) / 2
    attention = config.num_layers * 4 * config.num_heads * config.head_dim * seen
    assert rows[0]["share_of_peak"] * rows[0]["step_seconds"] * found["peak"] == pytest.approx(
        2 * (length * weights_of_blocks + head) + attention
    )
    for row in rows[1:]:
        assert row["tokens_per_second"] * row["step_seconds"] == pytest.approx(row["texts"])
        # Every step reads all weights once, and keys and values besides.
        assert row["share_of_bandwidth"] * row["step_seconds"] * found["bandwidth"] > weights
        assert row["wall"] == "calls and threads"  # of a tiny model
    table = run("bench", "generate", trained, "--seconds", "0.1", "--device", "cpu", "-q").out
    assert "wall" in table and "decode      32 sampled" in table


@pytest.mark.parametrize(("number", "word"), [(signal.SIGINT, "Interrupted."), (signal.SIGTERM, "Terminated.")])
def test_a_signal_before_training_says_so_and_leaves_nothing(
    run: Run,
    text_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    word: str,
) -> None:
    def interrupted(*arguments: object, **options: object) -> None:
        os.kill(os.getpid(), number)
        time.sleep(10)

    monkeypatch.setattr("sheepop.data.build.train_tokenizer", interrupted)
    before = signal.getsignal(signal.SIGTERM)
    result = run("train", "--data", text_folder, "--output", tmp_path / "run", "-q")
    assert (result.code, result.out) == (128 + number, "")
    assert result.err.startswith(f"{word} No step was taken") and "Traceback" not in result.err
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is before


def test_ctrl_c_while_writing_says_that_it_stopped(run: Run, trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sheepop.jobs.generate.load_model", interrupted)
    result = run("generate", trained, "--prompt", "S")
    assert (result.code, result.out, result.err) == (130, "", "Interrupted.\n")


def test_a_full_context_is_pointed_out(run: Run, trained: Path) -> None:
    request = ("generate", trained, "--prompt", "Sheep", "--greedy", "--max-new-tokens")
    assert "--window" in run(*request, "200").err
    assert run(*request, "200", "--quiet").err == ""
    told = run(*request, "3").err
    assert "--window" not in told
    assert re.search(r"^3 tokens in \d+\.\d s: \d+\.\d tokens a second\.$", told, re.MULTILINE)
