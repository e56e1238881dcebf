"""A mistake costs one short paragraph and an exit code: no traceback, and nothing of the user's is touched."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ..command_line import COMMAND, Launcher

Run = Callable[..., Any]


def assert_refused(result: Any, code: int, *parts: str) -> None:
    assert result.code == code, result
    for part in parts:
        assert part in result.err, result.err
    assert result.err.startswith("Error: ")
    assert "Traceback" not in result.err
    assert result.out == ""


def test_a_missing_folder(run: Run, tmp_path: Path) -> None:
    result = run("train", "--data", tmp_path / "nowhere", "--output", tmp_path / "run", "-q")
    assert_refused(result, 3, "nowhere", "does not exist")


def test_an_empty_folder(run: Run, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    result = run("train", "--data", tmp_path / "empty", "--output", tmp_path / "run", "-q")
    assert_refused(result, 3, "empty")


def test_nothing_readable_lists_the_reasons(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "junk"
    folder.mkdir()
    (folder / "a.bin").write_bytes(bytes(range(256)) * 10)
    (folder / "b.txt").write_bytes(b"")
    (folder / ".hidden").write_text("text")
    result = run("train", "--data", folder, "--output", tmp_path / "run", "-q")
    assert_refused(result, 3, "binary 1", "empty 1", "hidden 1")


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        (("model.architecture=encoder_decoder",), ("refused in files: empty 1, invalid 1, missing 1", "'target'")),
        ((), ("There is no text",)),
    ],
)
def test_a_file_without_one_good_pair(
    run: Run, tmp_path: Path, tiny: tuple[str, ...], settings: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    lines = ['{"source": "a"}', '{"source": "a", "target": 1}', '{"source": "a", "target": ""}']
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines if settings else ['{"source": "a", "target": "b"}']) + "\n")
    result = run("train", "--data", tmp_path / "pairs.jsonl", "--output", tmp_path / "run", "-q", *tiny, *settings)
    assert_refused(result, 3, *parts)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("setting", "parts"),
    [
        ("training.learning_rte=1", ("unknown key", "training.learning_rate")),
        ("training.learning_rate=-3", ("training.learning_rate", "greater than 0")),
        ("model.num_heads=5", ("d_model = 16 is not divisible by num_heads = 5",)),
        ("model.vocab_size=10", ("model.vocab_size = 10 is smaller than the tokenizer's 128",)),
        ("data.max_length=64", ("data.max_length = 64 is more than model.max_seq_len = 32",)),
    ],
)
def test_a_wrong_setting(
    run: Run, text_folder: Path, tmp_path: Path, setting: str, parts: tuple[str, ...], tiny: tuple[str, ...]
) -> None:
    result = run("train", "--data", text_folder, "--output", tmp_path / "run", "-q", *tiny, setting)
    assert_refused(result, 2, *parts)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (("--profile-steps", 2), "add --profile"),
        (("--find-learning-rate", "--fork", "runs/other"), "--fork"),
        (("--exportable", "--fork", "runs/other"), "--fork"),
    ],
)
def test_an_option_that_would_have_no_effect(
    run: Run, text_folder: Path, tmp_path: Path, options: tuple[Any, ...], part: str
) -> None:
    result = run("train", "--data", text_folder, "--output", tmp_path / "run", *options)
    assert_refused(result, 2, part)
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_cuda_where_there_is_none(run: Run, text_folder: Path, tmp_path: Path, tiny: tuple[str, ...]) -> None:
    result = run("train", "--data", text_folder, "--output", tmp_path / "run", "--device", "cuda", "-q", *tiny)
    assert_refused(result, 2, "'cuda' was requested", "Usable here: ")
    assert not (tmp_path / "run").exists()


def test_a_vocabulary_larger_than_the_corpus_allows(
    run: Run, text_folder: Path, tmp_path: Path, tiny: tuple[str, ...]
) -> None:
    settings = ("tokenizer.algorithm=bpe", "tokenizer.vocab_size=5000")
    result = run("train", "--data", text_folder, "--output", tmp_path / "run", "-q", *tiny, *settings)
    assert_refused(result, 3, "5000", "allows")


def test_no_data(run: Run, tmp_path: Path, tiny: tuple[str, ...]) -> None:
    assert_refused(run("train", "--output", tmp_path / "run", "-q", *tiny), 2, "--data")


def test_an_output_that_holds_a_run(run: Run, text_folder: Path, trained: Path, tiny: tuple[str, ...]) -> None:
    before = (trained / "metrics.jsonl").read_bytes()
    result = run("train", "--data", text_folder, "--output", trained, "-q", *tiny)
    assert_refused(result, 2, "already holds a run", "--resume auto", "--overwrite")
    assert (trained / "metrics.jsonl").read_bytes() == before


def test_an_output_that_holds_something_else(
    run: Run, text_folder: Path, tmp_path: Path, tiny: tuple[str, ...]
) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    result = run("train", "--data", text_folder, "--output", tmp_path, "--overwrite", "-q", *tiny)
    assert_refused(result, 2, "not empty and is not a run")
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_resume_and_overwrite_together(run: Run, trained: Path) -> None:
    assert_refused(run("train", "--resume", trained, "--overwrite"), 2, "give only one of them")


def test_resume_of_what_is_no_run(run: Run, tmp_path: Path) -> None:
    assert_refused(run("train", "--resume", tmp_path), 2, "does not hold a run")


@pytest.mark.parametrize("part", ["checkpoints", "checkpoints/step-00000006", "config.yaml"])
def test_resume_of_a_part_of_a_run_names_the_run(run: Run, trained: Path, part: str) -> None:
    assert_refused(run("train", "--resume", trained / part), 2, f"is part of the run in {trained}.", "--fork")


def test_resume_with_other_settings(run: Run, trained: Path) -> None:
    result = run("train", "--resume", trained, "-q", "training.learning_rate=0.5")
    assert_refused(result, 2, "training.learning_rate was 0.001 and is now 0.5")


def test_a_corpus_built_with_another_tokenizer(
    run: Run, text_folder: Path, tmp_path: Path, tiny: tuple[str, ...]
) -> None:
    assert run("data", "build", text_folder, "-o", tmp_path / "corpus", "-q", "tokenizer.vocab_size=300").code == 0
    made = run("tokenizer", "train", text_folder, "-o", tmp_path / "other", "--vocab-size", "290", "-q")
    assert made.code == 0, made.err
    settings = (f"tokenizer.path={tmp_path / 'other'}",)
    result = run("train", "--data", tmp_path / "corpus", "--output", tmp_path / "run", "-q", *tiny[1:], *settings)
    assert_refused(result, 3, "built with another tokenizer")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ((), ("There is no prompt",)),
        (("--prompt", ""), ("empty",)),
        (("--prompt", "x" * 40), ("40", "32", "--window")),
        (("--prompt", "x", "--temperature", "-1"), ("temperature", "-1")),
        (("--prompt", "x", "--temperature", "nan"), ("temperature", "nan")),
        (("--prompt", "x", "--top-p", "0"), ("top_p",)),
        (("--prompt", "x", "--top-k", "0"), ("top_k",)),
        (("--prompt", "x", "--max-new-tokens", "0"), ("max_new_tokens",)),
        (("--prompt", "x", "--stop", ""), ("stop",)),
        (("--prompt", "x", "--beams", "0"), ("num_beams",)),
        (("--prompt", "x", "--beams", "3", "--temperature", "0.5"), ("num_beams = 3", "temperature")),
        (("--prompt", "x", "--beams", "3", "--window"), ("num_beams = 3", "on_overflow")),
        (("--prompt", "x", "--length-penalty", "2"), ("length_penalty", "beams")),
        (("--prompt", "x", "--greedy", "--temperature", "0.5"), ("greedy", "temperature is 0.5")),
        (("--file", "nowhere.txt"), ("nowhere.txt does not exist",)),
        (("x", "--greedy", "--top-p", "0.5"), ("top_p = 0.5", "greedy")),
        (("x", "--temperature", "0", "-n", "3"), ("num_completions = 3", "greedy")),
        (("x", "-n", "3", "--best-of", "2"), ("best_of = 2", "num_completions = 3")),
        (("x", "--min-new-tokens", "9", "--max-new-tokens", "8"), ("min_new_tokens = 9", "max_new_tokens = 8")),
        (("x", "--regex", "a", "--choice", "b"), ("regex", "choice")),
        (("x", "--json-schema", "{bad"), ("--json-schema", "line 1", "not valid JSON")),
        (("x", "--json-schema", "nowhere.json"), ("schema file nowhere.json does not exist",)),
        (("x", "--grammar", "nowhere.lark"), ("grammar file nowhere.lark does not exist",)),
        (("x", "--top-logprobs", "2"), ("--top-logprobs", "--json")),
        (("x", "--draft-model", "runs/small"), ("--draft-model", "--guesses")),
    ],
)
def test_a_wrong_request_to_generate(
    run: Run, trained: Path, arguments: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    assert_refused(run("generate", trained, "-q", *arguments), 2, *parts)


@pytest.mark.parametrize(
    ("arguments", "code", "parts"),
    [
        (("http://127.0.0.1:9",), 3, ("127.0.0.1:9", "cannot be reached")),
        (("http://127.0.0.1:9", "--device", "cpu"), 2, ("--device",)),
        (("nowhere",), 3, ("nowhere does not exist",)),
        (("nowhere", "--model", "small"), 2, ("--model", "server")),
    ],
)
def test_a_chat_with_nobody(run: Run, arguments: tuple[str, ...], code: int, parts: tuple[str, ...]) -> None:
    assert_refused(run("chat", *arguments), code, *parts)


@pytest.mark.parametrize(
    ("text", "parts"),
    [(b"", "nothing to predict"), (b"S", "nothing to predict"), (b"\xff\xfe", "cannot be read as UTF-8")],
)
def test_a_text_that_has_no_score(run: Run, trained: Path, tmp_path: Path, text: bytes, parts: str) -> None:
    (tmp_path / "text.txt").write_bytes(text)
    assert_refused(run("score", trained, tmp_path / "text.txt"), 2, parts)
    assert_refused(run("score", trained, tmp_path / "other.txt"), 2, "other.txt does not exist")


def test_a_temperature_that_is_no_number_is_wrong_usage(run: Run, trained: Path) -> None:
    result = run("generate", trained, "--prompt", "x", "--temperature", "hot")
    assert result.code == 2
    assert "Traceback" not in result.err


@pytest.mark.parametrize("damage", ["truncate", "flip", "foreign"])
def test_a_damaged_model_is_named_and_not_used(run: Run, trained: Path, tmp_path: Path, damage: str) -> None:
    best = (trained / "checkpoints" / "best").read_text().strip()
    model = tmp_path / "model"
    shutil.copytree(trained / "checkpoints" / best, model)
    weights = model / "model.safetensors"
    content = bytearray(weights.read_bytes())
    if damage == "truncate":
        weights.write_bytes(content[:-10])
    elif damage == "flip":
        content[-10] ^= 1
        weights.write_bytes(content)
    else:
        (model / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    name = "config.json" if damage == "foreign" else "model.safetensors"
    assert_refused(run("generate", model, "--prompt", "S"), 3, name)


def test_a_path_without_a_model(run: Run, tmp_path: Path) -> None:
    assert_refused(run("generate", tmp_path / "nowhere", "--prompt", "S"), 3, "does not exist")
    assert_refused(run("generate", tmp_path, "--prompt", "S"), 3, "is not a model")


def test_what_a_file_holds_cannot_steer_the_terminal(run: Run, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "config.json").write_text(json.dumps({"model_type": "a\x1b]0;title\x07"}))
    result = run("import", tmp_path / "source", "--output", tmp_path / "model")
    assert_refused(result, 3, "a\\x1b]0;title\\x07")
    assert "\x1b" not in result.err


def test_the_tokenizer_of_nothing(run: Run, tmp_path: Path) -> None:
    assert_refused(run("tokenizer", "show", tmp_path), 3, "holds no tokenizer")


@pytest.mark.parametrize("encoding", ["utf-8:strict", "utf-8:surrogateescape", "latin-1"])
def test_text_for_the_tokenizer_that_is_not_utf_8(launcher: Launcher, trained: Path, encoding: str) -> None:
    # What Python does to its standard input where PYTHONIOENCODING says so.
    name, _, errors = encoding.partition(":")
    program = f"import sys; sys.stdin.reconfigure(encoding={name!r}, errors={errors or 'strict'!r}); {COMMAND}"
    answer = launcher.run("tokenizer", "encode", trained, program=program, stdin=b"caf\xe9")
    assert (answer.code, "Standard input is not UTF-8 text" in answer.err) == (2, True)


def test_a_step_has_no_other_split(run: Run, trained: Path) -> None:
    assert_refused(
        run("data", "show", trained, "--step", 1, "--split", "validation"), 2, "--split is only for --tokens"
    )


def test_an_unknown_benchmark(run: Run) -> None:
    done = run("bench", "cooking")
    assert done.code == 2
    assert ": 'cooking' is not one of 'train'" in done.err


@pytest.mark.parametrize("arguments", [("train", "model"), ("generate", "model", "--preset", "gpt2")])
def test_a_model_is_measured_by_one_benchmark_only(run: Run, arguments: tuple[str, ...]) -> None:
    done = run("bench", *arguments)
    assert done.code == 2
    assert "sheepop bench generate MODEL" in done.err
    for option in (("--dtype", "float32"), ("--activations", "rounded")):
        assert "--dtype and --activations are for a model" in run("bench", "generate", *option).err


def test_a_start_that_fails_leaves_the_output_free(
    run: Run, text_folder: Path, tmp_path: Path, tiny: tuple[str, ...]
) -> None:
    assert run("train", "--data", tmp_path / "typo", "--output", tmp_path / "run", "-q", *tiny).code == 3
    assert run("train", "--data", text_folder, "--output", tmp_path / "run", "-q", *tiny).code == 0


def test_an_overwrite_that_fails_keeps_the_old_run(
    run: Run, trained: Path, tmp_path: Path, tiny: tuple[str, ...]
) -> None:
    before = sorted(path.relative_to(trained) for path in trained.rglob("*"))
    assert run("train", "--data", tmp_path / "typo", "--output", trained, "--overwrite", "-q", *tiny).code == 3
    assert sorted(path.relative_to(trained) for path in trained.rglob("*")) == before


def test_resume_with_other_data(run: Run, trained: Path, tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("Other words.\n" * 50)
    result = run("train", "--resume", trained, "-q", "--data", tmp_path / "other.txt")
    assert_refused(result, 2, "keeps its text", "other.txt")


def test_a_setting_that_a_finished_corpus_was_built_without(
    run: Run, trained: Path, tmp_path: Path, tiny: tuple[str, ...]
) -> None:
    for setting, built in (("tokenizer.algorithm=bpe", "'char'"), ("data.documents=line", "'file'")):
        result = run("train", "--data", trained / "corpus", "-o", tmp_path / "run", "-q", *tiny[1:], setting)
        assert_refused(result, 2, setting.partition("=")[0], "has no effect", built)


@pytest.mark.parametrize("minutes", ["0", "-1", "nan", "inf"])
def test_a_quickstart_without_time(run: Run, tmp_path: Path, minutes: str) -> None:
    assert_refused(run("quickstart", "--minutes", minutes, "-o", tmp_path / "run"), 2, f"minutes = {float(minutes)}")


def test_a_quickstart_where_a_run_is_says_how_to_go_on(run: Run, trained: Path) -> None:
    assert_refused(run("quickstart", "-o", trained), 2, "already holds a run", "(--resume)", "--overwrite")


def test_an_empty_prompt_of_several_is_counted_from_one(run: Run, trained: Path) -> None:
    assert_refused(run("generate", trained, "-p", "x", "-p", ""), 2, "Prompt 2 is empty")


@pytest.mark.parametrize(
    "command", [("train", "--data", "TEXT"), ("data", "build", "TEXT"), ("runs", "RUN", "COPY"), ("export", "RUN")]
)
def test_an_output_whose_name_is_taken_is_wrong_usage(
    command: tuple[str, ...], run: Run, trained: Path, text_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "taken").write_text("mine")
    shutil.copytree(trained, tmp_path / "copy")
    places = {"TEXT": text_folder, "RUN": trained, "COPY": tmp_path / "copy"}
    result = run(*(places.get(part, part) for part in command), "--output", tmp_path / "taken")
    assert result.code == 2 and "already" in result.err
    assert (tmp_path / "taken").read_text() == "mine"


@pytest.mark.parametrize(
    "arguments",
    [
        ("train", "--data", ".", "--output", "{}"),
        ("train", "--resume", "{}"),
        ("data", "build", "text", "--output", "{}"),
        ("generate", "{}", "--prompt", "a"),
        ("runs", "{}"),
        ("import", "{}", "--output", "model"),
    ],
)
def test_a_name_that_is_too_long_is_wrong_usage(run: Run, arguments: tuple[str, ...]) -> None:
    result = run(*(argument.format("n" * 300) for argument in arguments))
    assert_refused(result, 2, f"The name {'n' * 100}... (3", "characters) is too long. Give a shorter one.")
    assert len(result.err) < 200


@pytest.mark.parametrize(
    "setting",
    [
        "output_dir: 'runs/{}'",
        "tokenizer: {{path: '{}'}}",
        "data: {{paths: ['{}']}}",
        "training: {{initial_embeddings: '{}'}}",
    ],
)
def test_a_name_that_no_file_can_have(run: Run, text_folder: Path, tmp_path: Path, setting: str) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(setting.format("a\\0b").replace("'", '"'))
    data = () if "paths" in setting else ("--data", text_folder)
    output = () if "output" in setting else ("--output", tmp_path / "run")
    assert_refused(run("train", "--config", config, *data, *output, "-q"), 2, "a path cannot contain a NUL character")
