"""``sheepop import`` and ``sheepop export`` as a user calls them, and what they say when they cannot."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sheepop.tokenizer import CharTokenizer

from ..command_line import COMMAND, Ended, Launcher, in_process
from .conftest import Run


def assert_refused(result: Ended, code: int, *parts: str) -> None:
    assert result.code == code, result.err
    assert result.out == ""
    assert result.err.startswith("Error: ")
    assert "Traceback" not in result.err
    for part in parts:
        assert part in result.err, result.err


LLAMA = (
    "model.preset=llama-1m",
    "model.d_model=16",
    "model.num_layers=1",
    "model.num_heads=2",
    "model.max_seq_len=32",
    "tokenizer.algorithm=char",
    "training.max_steps=2",
    "training.global_batch_size=4",
    "training.precision=fp32",
)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory, text_folder: Path) -> Path:
    """A finished tiny run whose network is a Llama."""
    output = tmp_path_factory.mktemp("runs") / "llama"
    result = in_process("train", "--data", text_folder, "--output", output, "--quiet", *LLAMA)
    assert result.code == 0, result.err
    return output


def test_a_run_goes_out_and_comes_back_and_writes_the_same_text(run: Run, llama: Path, tmp_path: Path) -> None:
    done = run("export", llama, "--format", "hf", "--output", tmp_path / "hf")
    assert done.code == 0, done.err
    assert "llama" in done.out
    imported = run("import", tmp_path / "hf", "-o", tmp_path / "ours", "--json")
    assert imported.code == 0, imported.err
    assert json.loads(imported.out)["family"] == "llama"
    words = [
        run("generate", model, "-p", "Sheep", "--greedy", "--max-new-tokens", "8", "-q").out
        for model in (llama, tmp_path / "ours")
    ]
    assert words[0] == words[1] != ""


@pytest.mark.parametrize("options", [(), ("--dtype", "float16"), ("--quantize", "q8_0"), ("--no-tokenizer",)])
def test_a_run_goes_through_a_gguf_file(run: Run, llama: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    file = tmp_path / "sheep.gguf"
    done = run("export", llama, "--format", "gguf", "-o", file, *options)
    if "--quantize" in options:  # rows of 16 numbers do not divide into blocks of 32
        assert_refused(done, 3, "multiples of 32")
        return
    assert done.code == 0, done.err
    own = ("--tokenizer", llama / "corpus" / "tokenizer") if "--no-tokenizer" in options else ()
    imported = run("import", file, "-o", tmp_path / "ours", "-q", *own)
    assert imported.code == 0, imported.err
    assert run("generate", tmp_path / "ours", "-p", "Sheep", "--max-new-tokens", "2", "-q").code == 0
    assert_refused(run("export", llama, "--format", "gguf", "-o", file, *options), 2, "--overwrite")
    assert run("export", llama, "--format", "gguf", "-o", file, *options, "--overwrite").code == 0


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (("--format", "hf", "--quantize", "q8_0"), "q8_0"),
        (("--format", "gguf", "--quantize", "q8_0", "--dtype", "float16"), "q8_0"),
        (("--format", "gguf", "--quantize", "q4"), "q4"),
        (("--format", "gguf", "--max-shard-size", "1GB"), "max_shard_size"),
        (("--format", "hf", "--no-tokenizer"), "tokenizer"),
        (("--format", "gguf", "--dtype", "float8"), "float8"),
    ],
)
def test_options_that_cannot_be_honoured(
    run: Run, llama: Path, tmp_path: Path, options: tuple[str, ...], word: str
) -> None:
    assert_refused(run("export", llama, "-o", tmp_path / "x", *options), 2, word)


def test_weights_are_computed_in_the_dtype_that_is_asked_for(run: Run, llama: Path, tmp_path: Path) -> None:
    assert run("export", llama, "--format", "hf", "-o", tmp_path / "hf", "--dtype", "bfloat16", "-q").code == 0
    assert run("import", tmp_path / "hf", "-o", tmp_path / "ours", "-q").code == 0
    assert load_file(tmp_path / "ours" / "model.safetensors")["embedding.weight"].dtype == torch.bfloat16
    for dtype in ("float32", "bfloat16"):
        assert run("generate", tmp_path / "ours", "-p", "S", "--max-new-tokens", "2", "--dtype", dtype).code == 0
    assert_refused(run("generate", tmp_path / "ours", "-p", "S", "--dtype", "float31"), 2, "float31")


@pytest.fixture
def foreign(run: Run, llama: Path, tmp_path: Path) -> Path:
    assert run("export", llama, "--format", "hf", "-o", tmp_path / "hf", "-q").code == 0
    return tmp_path / "hf"


def changed(directory: Path, **keys: object) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **keys}))


def test_bad_sources(run: Run, foreign: Path, tmp_path: Path) -> None:
    output = tmp_path / "ours"
    assert_refused(run("import", tmp_path / "nowhere", "-o", output), 3, "does not exist")
    assert_refused(run("import", foreign / "config.json", "-o", output), 3, "is a file, but not a GGUF file")
    (tmp_path / "empty").mkdir()
    assert_refused(run("import", tmp_path / "empty", "-o", output), 3, "has no config.json")
    changed(foreign, vocab_size=129)
    assert_refused(run("import", foreign, "-o", output), 3, "model.embed_tokens.weight has shape")
    changed(foreign, vocab_size=128, attention_chunk_size=4)
    assert_refused(run("import", foreign, "-o", output), 3, "attention_chunk_size = 4")
    changed(foreign, model_type="mamba")
    assert_refused(run("import", foreign, "-o", output), 3, "mamba", "llama")
    assert not output.exists()


def test_a_file_that_is_damaged(run: Run, foreign: Path, tmp_path: Path) -> None:
    weights = foreign / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    assert_refused(run("import", foreign, "-o", tmp_path / "ours"), 3, "model.safetensors is damaged")
    weights.rename(foreign / "pytorch_model.bin")
    assert_refused(run("import", foreign, "-o", tmp_path / "ours"), 3, "pickle", "save_pretrained")


def replaced(file: Path, start: int, content: bytes) -> None:
    whole = file.read_bytes()
    file.write_bytes(whole[:start] + content + whole[start + len(content) :])


def with_index(directory: Path, place: str) -> None:
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": place}}))


SPOILERS: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "a header that claims a giant length": (
        lambda directory: replaced(directory / "model.safetensors", 0, struct.pack("<Q", 2**62)),
        ("model.safetensors is damaged", "header too large", "download it again"),
    ),
    "a header that is no JSON": (
        lambda directory: replaced(directory / "model.safetensors", 8, b"sheep"),
        ("model.safetensors is damaged", "invalid JSON", "download it again"),
    ),
    "an index that points above": (
        lambda directory: with_index(directory, "../secret.safetensors"),
        ("'../secret.safetensors' is not the name of a file in this directory", "Correct the index"),
    ),
    "an index that points to the root": (
        lambda directory: with_index(directory, "/etc/passwd"),
        ("'/etc/passwd' is not the name of a file in this directory",),
    ),
    "a tokenizer with too many tokens": (
        lambda directory: CharTokenizer("äöüßéèà漢字").save(directory),
        ("137 tokens, but the model has only 128 embedding rows", "Use the tokenizer of this model"),
    ),
    "a config of another task": (
        lambda directory: changed(directory, architectures=["LlamaForSequenceClassification"]),
        ("architectures", "LlamaForCausalLM"),
    ),
    "quantised weights": (
        lambda directory: changed(directory, quantization_config={"quant_method": "quip"}),
        ("quantization_config", "Export the model in float16"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("spoiler", SPOILERS)
def test_what_was_spoiled_is_said_in_one_paragraph(run: Run, foreign: Path, tmp_path: Path, spoiler: str) -> None:
    spoil, parts = SPOILERS[spoiler]
    spoil(foreign)
    result = run("import", foreign, "-o", tmp_path / "ours")
    assert_refused(result, 3, *parts)
    assert result.err.count("\n") == 1
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize(
    ("spoil", "parts"),
    [
        (lambda file: replaced(file, 4, struct.pack("<I", 9)), ("GGUF version 9", "Convert the model again")),
        (lambda file: replaced(file, 4, struct.pack(">I", 3)), ("big-endian", "Convert the model again")),
        (lambda file: file.write_bytes(file.read_bytes()[:-50]), ("would end at byte", "download it again")),
        (lambda file: file.write_bytes(file.read_bytes()[:50]), ("bytes are left", "download it again")),
        (lambda file: replaced(file, file.stat().st_size - 1, b"\x7f"), ("its checksum differs",)),
    ],
)
def test_a_spoiled_gguf_file_is_said_in_one_paragraph(
    run: Run, llama: Path, tmp_path: Path, spoil: Callable[[Path], object], parts: tuple[str, ...]
) -> None:
    assert run("export", llama, "--format", "gguf", "-o", tmp_path / "toy.gguf", "-q").code == 0
    spoil(tmp_path / "toy.gguf")
    result = run("import", tmp_path / "toy.gguf", "-o", tmp_path / "ours")
    assert_refused(result, 3, "toy.gguf", *parts)
    assert result.err.count("\n") == 1


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for m in messages", "is not a valid Jinja template"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "calls itself too deeply"),
    ],
)
def test_a_chat_template_that_does_not_work_is_warned_of(
    run: Run, foreign: Path, tmp_path: Path, template: str, words: str
) -> None:
    (foreign / "chat_template.jinja").write_text(template)
    done = run("import", foreign, "-o", tmp_path / "ours", "-q")
    assert (done.code, done.out) == (0, "")
    assert done.err.startswith("Warning: The chat template of the model ")
    assert words in " ".join(done.err.split())


def test_a_divided_import_writes_the_same_text(run: Run, llama: Path, foreign: Path, tmp_path: Path) -> None:
    done = run("import", foreign, "-o", tmp_path / "ours", "--max-shard-size", "4KB", "--json")
    assert json.loads(done.out)["warnings"] == []
    assert (tmp_path / "ours" / "model.safetensors.index.json").is_file()
    words = [
        run("generate", model, "-p", "Sheep", "--greedy", "--max-new-tokens", "8", "-q").out
        for model in (llama, tmp_path / "ours")
    ]
    assert words[0] == words[1] != ""


def test_a_disk_that_takes_no_more(launcher: Launcher, foreign: Path, tmp_path: Path) -> None:
    """The process may write files of 8 KB at most, as if the disk were full."""
    program = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192)); {COMMAND}"
    done = launcher.run("import", foreign, "-o", tmp_path / "ours", program=program)
    assert done.code == 1
    assert done.err.startswith(f"Error: Cannot write {tmp_path / 'ours'}: the file would be larger")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_nan_is_warned_of_even_when_quiet(run: Run, foreign: Path, tmp_path: Path) -> None:
    tensors = load_file(foreign / "model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, foreign / "model.safetensors")
    done = run("import", foreign, "-o", tmp_path / "ours", "-q")
    assert (done.code, done.out) == (0, "")
    assert "There are NaN or infinite values in final_norm.weight" in done.err


def test_what_no_family_expresses(run: Run, trained: Path, tmp_path: Path) -> None:
    result = run("export", trained, "--format", "hf", "-o", tmp_path / "hf")
    assert_refused(result, 3, "position_encoding (sinusoidal here, learned there)", "llama: ")
    assert not (tmp_path / "hf").exists()


def test_an_output_in_use(run: Run, llama: Path, foreign: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    assert_refused(run("export", llama, "--format", "hf", "-o", tmp_path, "--overwrite"), 2, "is not an export")
    assert_refused(run("export", llama, "--format", "hf", "-o", foreign), 2, "--overwrite")
    assert_refused(run("import", foreign, "-o", tmp_path, "--overwrite"), 2, "contains", "Choose another place")
    assert_refused(run("import", foreign, "-o", foreign / "ours"), 2, "is inside", "Choose a place outside it")
    assert_refused(run("export", llama, "-o", llama / "hf"), 2, "is inside", "Choose a place outside it")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("years of work")
    assert_refused(run("import", foreign, "-o", tmp_path / "other", "--overwrite"), 2, "is not a model")
    unknown = run("export", llama, "--format", "onnx", "-o", tmp_path / "x")
    assert unknown.code == 2
    assert "'onnx' is not one of 'hf'" in unknown.err
    assert_refused(run("export", llama, "--format", "hf", "-o", tmp_path / "x", "--max-shard-size", "big"), 2, "big")
    assert (tmp_path / "thesis.txt").read_text() == "years of work"
