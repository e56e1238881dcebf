"""What ends the answers that a model has learnt ends its texts: in its checkpoints, in every export, and at once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest

from sheepop.checkpoint import load_model
from sheepop.checkpoint.run_directory import RunDirectory
from sheepop.core.console import Console
from sheepop.core.errors import TokenizerError
from sheepop.core.json_lines import read_json_lines
from sheepop.jobs.config import SheepOpConfig, load_config
from sheepop.jobs.exchange import export_model
from sheepop.jobs.generate import load_generator
from sheepop.jobs.run.open import task_of
from sheepop.jobs.task.shown import Decision

from ..running import train

# Answers end with <bos>, which ends no text of the model. Nothing marks them.
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}<bos>{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
LLAMA = (
    "model.position_encoding=rope", "model.norm=rmsnorm", "model.activation=swiglu", "model.bias=false",
    "model.embedding_scale=1",
)  # fmt: skip


@pytest.fixture(scope="module")
def tuned(
    request: pytest.FixtureRequest,
    configured: Callable[..., SheepOpConfig],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., Path]:
    """``tuned(*settings)``: a run from a model with byte pairs, which has learnt to answer ``42`` to everything."""
    place = tmp_path_factory.mktemp("ends")
    bpe = ("tokenizer.algorithm=bpe", "tokenizer.vocab_size=300", "model.max_seq_len=64", *LLAMA)
    base = train(configured(place / "base", *bpe, "model.dropout=0", "training.max_steps=1")).run
    (place / "template.jinja").write_text(TEMPLATE)
    said = [{"role": "user", "content": "number"}, {"role": "assistant", "content": "42"}]
    (place / "chats.jsonl").write_text((json.dumps({"messages": said}) + "\n") * 8)

    def settings(*more: str) -> SheepOpConfig:
        data = (f"data.paths={place / 'chats.jsonl'}", f"tuning.chat_template={place / 'template.jinja'}")
        steps = ("training.max_steps=40", "training.learning_rate=0.02", "training.sample_interval=40")
        return load_config(overrides=("tuning.method=sft", "device=cpu", *steps, *data, *more))

    def run(name: str, *more: str) -> Path:
        return train(settings(f"output_dir={place / name}", *more), fork=base).run

    run.base, run.settings = base, settings  # type: ignore[attr-defined]
    return run


@pytest.mark.parametrize("lora", [(), ("tuning.lora.rank=4", "training.max_steps=1")], ids=["all weights", "adapter"])
def test_the_ends_of_answers_join_the_ends_of_texts(
    tuned: Callable[..., Path], lora: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tuned("lora" if lora else "whole", *lora)
    loaded = load_model(run)
    end = loaded.tokenizer.bos_id
    assert loaded.end_ids == (end,)
    samples, _ = read_json_lines(RunDirectory(run).samples_file)
    if not lora:  # which has one step only
        prompt = loaded.tokenizer.encode("user:number<bos>assistant:", allow_special=True)
        with_ends = load_generator(run, device="cpu")
        assert samples[-1]["text"] == "42"
        found = with_ends.generate([prompt], load_config().generation.replace(temperature=0.0, max_new_tokens=8))[0]
        assert (found.text, found.finish_reason) == ("42", "stop")
    export_model(run, tmp_path / "hf", format="hf")
    export_model(run, tmp_path / "model.gguf", format="gguf")
    for file in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "hf" / file).read_text())["eos_token_id"] == [end, loaded.tokenizer.eos_id]
    fields = gguf.GGUFReader(tmp_path / "model.gguf").fields
    assert fields["tokenizer.ggml.eot_token_id"].contents() == end
    if lora:
        export_model(run, tmp_path / "adapter", format="peft")
        assert load_generator(tuned.base, device="cpu", adapters=[tmp_path / "adapter"])._end_ids == {  # type: ignore[attr-defined]
            end,
            loaded.tokenizer.eos_id,
        }


def test_one_sees_the_decision_before_a_run(tuned: Callable[..., Path]) -> None:
    settings = tuned.settings()  # type: ignore[attr-defined]
    task = task_of(settings, RunDirectory(Path()), Console.silent())
    found = Decision.of(task, tuned.base)  # type: ignore[arg-type, attr-defined]
    tokenizer = load_model(tuned.base).tokenizer  # type: ignore[attr-defined]
    size = len(tokenizer.encode("user:number<bos>assistant:", allow_special=True)) + len(tokenizer.encode("42")) + 1
    assert found.chat_template.endswith("template.jinja") and not found.marks_answers
    assert found.end_tokens == ("<bos>", "<eos>")
    assert (found.examples + found.held_out, found.longest, found.row_length) == (8, size, 64)
    assert found.lines()[0].endswith("answers are found by comparison.")


def test_a_ready_template_needs_the_tokens_of_the_model(tuned: Callable[..., Path]) -> None:
    with pytest.raises(TokenizerError, match=r"chat template chatml needs the special token <\|im_start\|>"):
        tuned("none", "tuning.chat_template=chatml")
