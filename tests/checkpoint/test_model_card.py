"""A card says what is known and nothing else, hostile names stay text, and scores are recorded whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markdown_it.token import Token

from sheepop.adapt.quantization import quantize
from sheepop.checkpoint import RunDirectory, load_model, save_model
from sheepop.checkpoint.model_card import model_card, record_scores
from sheepop.checkpoint.model_directory import unique_weights, write_model
from sheepop.checkpoint.run_directory import damaged_model
from sheepop.core import verified_files
from sheepop.core.errors import CheckpointError, StorageError
from sheepop.core.files import damaged_files, read_json
from sheepop.core.locks import exclusive_lock
from sheepop.jobs.exchange import export_model, import_model
from sheepop.model import ModelConfig, Transformer, build_model
from sheepop.tokenizer import CharTokenizer, Tokenizer

from ..command_line import in_process

TRAINED: dict[str, Any] = {"sheepop_version": "1.2", "corpus_fingerprint": "ab12", "tokenizer_fingerprint": "cd34"}
TRAINED |= {"step": 1500, "tokens": 6_144_000}
SCORE = {
    "kind": "perplexity",
    "name": "held-out",
    "measure": "bits per byte",
    "value": 1.25,
    "interval": (1.125, 1.5),
    "count": 4321,
    "definition": "mean number of bits",
    "settings": {"stride": 16},
}
LLAMA = {"preset": "llama-1m", "vocab_size": 130, "d_model": 16, "num_heads": 2, "num_layers": 2, "max_seq_len": 32}
HOSTILE = [
    "<script>alert(1)</script><img src=x onerror=alert(1)>",
    "`code` ``more`` `",
    "a | b \\| c |",
    "[click](javascript:x) ![x](http://evil.example/x.png) http://evil.example <http://evil.example>",
    "x\n\n# Heading\n\n- list\n\n---\nlicense: mit\n---\n",
    "---\nlicense: mit\n---",
    "# End of what SheepOp writes; your own goes below.\n<!-- End of what SheepOp writes; your own goes below. -->",
    "key: [unclosed {yaml: *anchor & !!python/object:os.system",
    "\x00\x1b[31m\u202egnp.exe\u200b\ud800",
    "--> <!--",
    "```\nfence",
    "",
    "very long " * 500,
]


@pytest.fixture
def config() -> ModelConfig:
    return ModelConfig(**LLAMA)


@pytest.fixture
def directory(tmp_path: Path, config: ModelConfig) -> Path:
    save_model(tmp_path / "m", build_model(config, seed=3), CharTokenizer(), TRAINED)
    return tmp_path / "m"


def card_of(directory: Path) -> str:
    return (directory / "README.md").read_text(encoding="utf-8")


def front_matter(card: str) -> Any:
    """What the hub's own reader makes of it."""
    return ModelCard(card, ignore_metadata_errors=False).data


def blocks(card: str) -> list[Token]:
    """The card as a Markdown reader sees it, without the front matter."""
    return MarkdownIt("commonmark").enable("table").parse(card[card.index("\n---\n") + 5 :])


def table_row(card: str, name: str) -> str:
    (row,) = re.findall(rf"^\| {name} \| (.*) \|$", card, re.MULTILINE)
    return row


# What it says


def test_a_saved_model_has_a_card_of_its_network_and_its_making(directory: Path, config: ModelConfig) -> None:
    card = card_of(directory)
    total = sum(parameter.numel() for parameter in build_model(config, seed=0).parameters())
    assert f"# A language model of {total:,} parameters" in card
    assert table_row(card, "parameters") == f"{total:,}"
    assert table_row(card, "context") == "32 tokens"
    assert table_row(card, "vocabulary") == "130 tokens"
    assert table_row(card, "tokenizer") == "`char`, 128 tokens"
    assert "Trained with SheepOp `1.2`: 1,500 steps, 6,144,000 tokens." in card
    assert "Fingerprint of the data: `ab12`." in card
    assert damaged_files(directory) == []


def test_what_is_unknown_is_said_to_be_unknown(directory: Path) -> None:
    card, found = card_of(directory), front_matter(card_of(directory))
    assert found.license is None and found.language is None and found.eval_results is None
    for line in ("Licence: unknown", "Training documents: unknown", "None are recorded"):
        assert line in card


def test_licence_language_and_data_are_those_that_were_given(config: ModelConfig) -> None:
    given = {"license": "Apache-2.0", "language": ["en", "de", "Klingon"], "run": {"kind": "sft", "command": "x y"}}
    given["data"] = {"documents": 1234, "licenses": {"MIT": 1000, "": 234}}
    card = model_card(config, CharTokenizer(), given)
    assert front_matter(card).license == "apache-2.0"
    assert front_matter(card).language == ["en", "de"]
    assert "Training documents: 1,234." in card
    assert "`MIT` 1,000, `none stated` 234" in card
    assert "Trained (`sft`)" in card and "Command: `x y`" in card
    other = front_matter(model_card(config, CharTokenizer(), {"license": "Ours: ask first"}))
    assert (other.license, other.license_name) == ("other", "Ours: ask first")


def test_the_kind_of_a_model_stands_in_its_card(tmp_path: Path, model: Transformer, tokenizer: Tokenizer) -> None:
    save_model(tmp_path / "q", quantize(model, "int8"), tokenizer, {"quantized": {"weights": "int8", "from": "a/b"}})
    card = card_of(tmp_path / "q")
    assert table_row(card, "weights") == "`int8`, quantised from `float32`"
    assert "Quantised to `int8` from `a/b`." in card
    assert front_matter(card).tags == ["sheepop", "int8"]
    adapted = {"adapter": {"rank": 8}, "reward_head": True}
    card = model_card(model.config, tokenizer, {}, stored=adapted)
    assert front_matter(card).tags == ["sheepop", "reward-model", "lora"]
    assert "LoRA of rank `8`" in card and "# A reward model" in card and "lm.rewards(" in card


@pytest.mark.parametrize(
    "keys",
    [
        {"architecture": "encoder_decoder", "num_layers": 2, "num_encoder_layers": 1},
        {"experts": {"count": 4}, "sliding_window": 8, "num_kv_heads": 1, "position_encoding": "rope"},
        {"ngrams": {"rows": 64}, "short_convolution": 3, "position_encoding": "alibi", "tie_weights": False},
    ],
)
def test_other_networks_are_counted_as_they_are_built(keys: dict[str, Any]) -> None:
    config = ModelConfig(**{"vocab_size": 128, "d_model": 16, "num_heads": 2, "num_layers": 2, **keys})
    total = sum(parameter.numel() for parameter in build_model(config, seed=0).parameters())
    assert table_row(model_card(config, CharTokenizer(), {}), "parameters").startswith(f"{total:,}")


def test_scores_stand_in_the_card_and_in_the_model_index(config: ModelConfig) -> None:
    perplexity = {**SCORE, "measure": "perplexity", "value": 7.5, "step": 1200, "interval": None}
    scores = [SCORE, perplexity, {**SCORE, "name": "none", "value": None}]
    card = model_card(config, CharTokenizer(), {"evaluations": scores})
    found = front_matter(card).eval_results
    assert [(each.dataset_name, each.metric_type, each.metric_value) for each in found] == [
        ("held-out", "bits-per-byte", 1.25),
        ("held-out", "perplexity", 7.5),
    ]
    assert "| `perplexity` `held-out` | `bits per byte` | 1.25 | 1.125 to 1.5 | 4,321 | unknown |" in card
    assert "| `perplexity` `held-out` | `perplexity` | 7.5 | unknown | 4,321 | at step 1,200 |" in card
    assert '- `bits per byte`: `mean number of bits`, with `{"stride": 16}`.' in card


def test_a_card_depends_on_nothing_but_the_model(directory: Path, config: ModelConfig) -> None:
    again = directory.with_name("again")
    save_model(again, build_model(config, seed=3), CharTokenizer(), TRAINED)
    assert card_of(again) == card_of(directory)


# Hostile texts


def hostile(text: str) -> dict[str, Any]:
    """Provenance in which every text is `text`."""
    score = {**SCORE, "kind": text, "name": text, "measure": text, "definition": text, "settings": {text: text}}
    return {
        **dict.fromkeys(("sheepop_version", "corpus_fingerprint", "tokenizer_fingerprint"), text),
        "step": 1,
        "license": text,
        "language": text,
        "run": {"kind": text, "command": text},
        "data": {"documents": 1, "licenses": {text: 1}},
        "imported": {"directory": text},
        "quantized": {"weights": text, "from": text},
        "evaluations": [{**score, "date": text}],
    }


def check_that_it_stays_text(config: ModelConfig, text: str) -> None:
    card = model_card(config, CharTokenizer(), hostile(text))
    found, plain = blocks(card), blocks(model_card(config, CharTokenizer(), hostile("plain")))
    assert [token.type for token in found] == [token.type for token in plain]
    comments = [token.content for token in found if token.type == "html_block"]
    assert all(re.fullmatch(r"<!-- [^<>]* -->\s*", comment) for comment in comments)
    inline = [child.type for token in found for child in token.children or ()]
    assert set(inline) <= {"text", "code_inline"}
    data = front_matter(card)
    assert data.library_name == "sheepop" and data.tags == ["sheepop"]
    assert data.license in (None, "other", "mit")
    assert len(data.eval_results) == 1
    shown = [child.content for token in found for child in token.children or ()]
    assert all(character.isprintable() for text in shown for character in text)


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_texts_stay_texts(config: ModelConfig, text: str) -> None:
    check_that_it_stays_text(config, text)


@given(text=st.text("`|\\<>[]()!#*_-~:\n\t &\"'ax", max_size=24))
def test_no_text_becomes_markup(text: str) -> None:
    check_that_it_stays_text(ModelConfig(**LLAMA), text)


@pytest.mark.parametrize("value", [None, 3, 10**400, float("inf"), True, [], [[]], {}, {"x": {}}, "text", ["text"]])
def test_provenance_of_other_types_breaks_nothing(config: ModelConfig, value: Any) -> None:
    keys = ("step", "tokens", "license", "language", "run", "data", "imported", "quantized", "evaluations")
    front_matter(model_card(config, CharTokenizer(), dict.fromkeys(keys, value)))
    nested = {
        "run": {"kind": value},
        "data": {"documents": value, "licenses": value},
        "quantized": {"perplexity": value},
    }
    scores = [dict.fromkeys(SCORE, value), value]
    front_matter(
        model_card(config, CharTokenizer(), {**nested, "evaluations": scores, "imported": {"metadata": value}})
    )


# Recording scores


def test_scores_are_recorded_and_the_model_stays_whole(directory: Path) -> None:
    weights = (directory / "model.safetensors").stat()
    record_scores(directory, [SCORE])
    assert damaged_files(directory) == []
    assert load_model(directory).provenance == {**TRAINED, "evaluations": [json.loads(json.dumps(SCORE))]}
    assert front_matter(card_of(directory)).eval_results[0].metric_value == 1.25
    after = (directory / "model.safetensors").stat()
    assert (after.st_ino, after.st_mtime_ns) == (weights.st_ino, weights.st_mtime_ns)
    sums = read_json(directory / "checksums.json")
    assert "provenance.json" in sums and "README.md" not in sums


def test_a_score_of_the_same_settings_takes_the_place_of_the_older_one(directory: Path) -> None:
    other = {**SCORE, "settings": {"stride": 32}}
    record_scores(directory, [SCORE, other])
    record_scores(directory, [{**SCORE, "value": 1.0}, {**SCORE, "measure": "loss", "value": float("nan")}])
    found = load_model(directory).provenance["evaluations"]
    values = [(each["measure"], each["settings"]["stride"], each["value"]) for each in found]
    assert values == [("bits per byte", 16, 1.0), ("bits per byte", 32, 1.25), ("loss", 16, None)]


def test_a_checkpoint_of_a_run_keeps_its_state(tmp_path: Path, model: Transformer, tokenizer: Tokenizer) -> None:
    run = RunDirectory.create(tmp_path / "run")
    with run.write_checkpoint(5) as place:
        write_model(place, model.config, unique_weights(model), tokenizer, {**TRAINED, "evaluations": [SCORE]}, {})
        (place / "state").mkdir()
        (place / "state" / "state.json").write_text("{}")
    assert "held-out" in card_of(run.checkpoint(5))
    record_scores(run.path, [{**SCORE, "name": "later"}])
    (run.checkpoint(5) / "README.md").write_text("mine")
    assert run.latest_good(pytest.fail) == 5
    assert [score["name"] for score in load_model(run.path).provenance["evaluations"]] == ["held-out", "later"]
    assert (run.checkpoint(5) / "state" / "state.json").read_text() == "{}"


def test_scores_do_not_go_over_to_other_weights(directory: Path, config: ModelConfig) -> None:
    record_scores(directory, [SCORE])
    save_model(directory.with_name("n"), build_model(config, 4), CharTokenizer(), load_model(directory).provenance)
    assert load_model(directory.with_name("n")).provenance == TRAINED
    assert "None are recorded" in card_of(directory.with_name("n"))


def test_a_model_without_a_card_gets_one(directory: Path) -> None:
    (directory / "README.md").unlink()
    assert damaged_model(directory) == []
    record_scores(directory, [SCORE])
    assert "held-out" in card_of(directory)


def test_what_the_user_wrote_stays(directory: Path) -> None:
    mine = card_of(directory).replace("\n---\n\n<!--", "\ndatasets: [sheep]\n---\n\nMy model.\n\n<!--") + "\nThanks.\n"
    (directory / "README.md").write_text(mine)
    load_model(directory)
    record_scores(directory, [SCORE])
    record_scores(directory, [{**SCORE, "value": 1.5}])
    card = card_of(directory)
    assert "My model." in card and card.endswith("\nThanks.\n")
    assert front_matter(card).datasets == ["sheep"]
    assert front_matter(card).eval_results[0].metric_value == 1.5
    assert card.count("| 1.5 |") == 1 and "| 1.25 |" not in card


def test_a_part_that_the_user_changed_stays_as_it_is(directory: Path) -> None:
    mine = card_of(directory).replace("# A language model", "# Dolly, a language model")
    (directory / "README.md").write_text(mine)
    record_scores(directory, [SCORE])
    assert card_of(directory)[card_of(directory).index("<!--") :] == mine[mine.index("<!--") :]
    assert front_matter(card_of(directory)).eval_results[0].metric_value == 1.25


@pytest.mark.parametrize("content", [b"My own card.\n", b"\xff\xfe", b""])
def test_a_card_that_is_the_users_own_stays(directory: Path, content: bytes) -> None:
    (directory / "README.md").write_bytes(content)
    record_scores(directory, [SCORE])
    assert (directory / "README.md").read_bytes() == content
    assert load_model(directory).provenance["evaluations"]


def test_a_card_that_is_a_link_is_not_followed(directory: Path) -> None:
    (directory / "README.md").unlink()
    (directory / "README.md").symlink_to("/nowhere/else.md")
    record_scores(directory, [SCORE])
    assert (directory / "README.md").is_symlink()


@pytest.mark.parametrize("name", ["model.safetensors", "provenance.json", "checksums.json"])
def test_a_damaged_model_gets_no_new_checksums(directory: Path, name: str) -> None:
    content = bytearray((directory / name).read_bytes())
    content[len(content) // 2] ^= 1
    (directory / name).write_bytes(content)
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    with pytest.raises(CheckpointError, match="cannot be recorded"):
        record_scores(directory, [SCORE])
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == before


def test_two_at_a_time_are_refused(directory: Path) -> None:
    held = exclusive_lock(directory / ".scores.lock", CheckpointError("in use"))
    with held, pytest.raises(CheckpointError, match="Another process is writing to"):
        record_scores(directory, [SCORE])


def test_a_reader_sees_a_whole_model_while_scores_are_recorded(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader has read the checksums, and is at the weights when what it compares next changes."""
    sha256, pending = verified_files.sha256_file, [SCORE]

    def slow(path: str | Path) -> str:
        if Path(path).name == "model.safetensors" and pending:
            record_scores(directory, [pending.pop()])
        return sha256(path)

    monkeypatch.setattr(verified_files, "sha256_file", slow)
    assert load_model(directory).provenance["evaluations"]


# Disturbed at every operation on files

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def disturbed(directory: Path, moment: int, disturb: Callable[[], None]) -> int:
    """Records scores in another process, which is disturbed at the operation number `moment` that changes a file.

    Returns its exit status: 0 when all went well, 7 when it raised `StorageError`.
    """
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    count = 0

    def operation() -> None:
        nonlocal count
        count += 1
        if count == moment:
            disturb()

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("os.rename", "os.remove") or (event == "open" and arguments[2] & WRITING):
            operation()

    fsync = os.fsync

    def flushed(descriptor: Any) -> None:
        operation()
        fsync(descriptor)

    status = 9
    with contextlib.suppress(BaseException):
        os.fsync = flushed
        sys.addaudithook(audit)
        try:
            record_scores(directory, [{**SCORE, "value": 2.5}])
            status = 0
        except StorageError:
            status = 7
    os._exit(status)


def die() -> None:
    os._exit(5)


def full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize(("disturb", "status"), [(die, 5), (full, 7)])
def test_disturbed_at_any_moment_the_model_is_whole(directory: Path, disturb: Callable[[], None], status: int) -> None:
    record_scores(directory, [SCORE])
    before = contents(directory)
    record_scores(directory, [{**SCORE, "value": 2.5}])
    after = contents(directory)
    changed = {name for name in after if after[name] != before[name]}
    assert changed == {"README.md", "provenance.json", "checksums.json"}
    moments = 0
    while True:
        for name in changed:
            (directory / name).write_bytes(before[name])
        moments += 1
        found = disturbed(directory, moments, disturb)
        if found == 0:
            break
        assert found == status
        assert damaged_files(directory) == []
        assert load_model(directory).provenance["evaluations"][0]["value"] in (1.25, 2.5)
        assert (directory / "README.md").read_bytes() in (before["README.md"], after["README.md"])
        record_scores(directory, [{**SCORE, "value": 2.5}])
        assert contents(directory) == after
    assert moments > 15
    assert contents(directory) == after


def test_a_place_that_cannot_be_written_to_is_named(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = os.open

    def refused(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
        if flags & WRITING and str(path).startswith(str(directory)):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return opened(path, flags, *arguments, **options)

    monkeypatch.setattr(os, "open", refused)
    with pytest.raises(StorageError, match=rf"{re.escape(str(directory))}.*read-only"):
        record_scores(directory, [SCORE])


# What it tells to type


def code(card: str, language: str) -> str:
    (text,) = (token.content for token in blocks(card) if token.type == "fence" and token.info == language)
    return text


def test_the_commands_of_a_card_work(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(directory)
    (command,) = code(card_of(directory), "bash").splitlines()
    done = in_process(*shlex.split(command)[1:])
    assert done.code == 0 and done.out.startswith("Once upon a time"), done.err
    exec(code(card_of(directory), "python"), {})
    assert capsys.readouterr().out


def test_an_export_has_a_card_for_transformers(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    record_scores(directory, [SCORE])
    export_model(directory, directory.with_name("hf"))
    card = card_of(directory.with_name("hf"))
    assert front_matter(card).library_name == "transformers"
    assert front_matter(card).eval_results[0].metric_value == 1.25
    monkeypatch.chdir(directory.with_name("hf"))
    exec(code(card, "python"), {})
    assert "Once upon a time" in capsys.readouterr().out
    import_model(directory.with_name("hf"), directory.with_name("again"))
    assert "Imported: `family` `llama`" in card_of(directory.with_name("again"))
    export_model(directory.with_name("again"), directory.with_name("once-more"))
    card = card_of(directory.with_name("once-more"))
    assert "`llama`" in card and str(directory.parent) not in card
