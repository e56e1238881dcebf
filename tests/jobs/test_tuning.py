"""Runs of post-training: the life of every run, on examples."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from sheepop.adapt.lora import full
from sheepop.checkpoint import RunDirectory, load_model, resolve_model_directory
from sheepop.checkpoint.model_description import read_quantization
from sheepop.checkpoint.model_directory import open_model, read_weights
from sheepop.checkpoint.weight_files import open_weights, read_all_weights
from sheepop.core.console import Console
from sheepop.core.errors import CheckpointError, ConfigError, SheepOpError, TokenizerError
from sheepop.core.files import write_checksums
from sheepop.core.json_lines import read_json_lines
from sheepop.jobs.config import SheepOpConfig, load_config
from sheepop.jobs.exchange import export_model
from sheepop.jobs.models import list_models
from sheepop.jobs.quantize import quantize_model
from sheepop.jobs.recipe import complete, draft
from sheepop.jobs.run.open import find_resumable
from sheepop.jobs.run.record import read_run_config
from sheepop.jobs.run.train import TrainOutcome
from sheepop.jobs.task.samples import TrainingSamples
from sheepop.jobs.task.shown import shown_examples
from sheepop.jobs.task.supervised import SupervisedTask
from sheepop.tokenizer import chat_templates

from ..running import train

SETTINGS = (
    "device=cpu",
    "training.precision=fp32",
    "training.global_batch_size=4",
    "training.micro_batch_size=2",
    "training.learning_rate=0.01",
    "training.log_interval=1",
    "training.checkpoint_interval=2",
    "training.sample_interval=3",
    "training.sample_tokens=4",
    "training.schedule=constant",
    "training.warmup_steps=0",
    "training.eval_interval=2",
    "data.validation_fraction=0.2",
    "tuning.method=sft",
    "tuning.neftune_noise_alpha=5",
)


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty questions about sheep, in letters that the model knows."""
    path = tmp_path_factory.mktemp("examples") / "chats.jsonl"
    said = [("number", f"{number}") for number in range(40)]
    rows = [[{"role": "user", "content": a}, {"role": "assistant", "content": b}] for a, b in said]
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def tuned(base: Path, examples: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainOutcome:
    """Six steps without a break, with a report."""
    output = tmp_path_factory.mktemp("tuned") / "run"
    return train(config(examples, output, "training.max_steps=6"), fork=base)


def config(examples: Path, output: Path, *overrides: str) -> SheepOpConfig:
    return load_config(overrides=(*SETTINGS, f"data.paths={examples}", f"output_dir={output}", *overrides))


def rows_of(run: Path) -> list[dict[str, Any]]:
    timed = {"seconds", "tokens_per_second", "mfu", "memory_bytes", "busy_cores"}
    rows, _ = read_json_lines(run / "metrics.jsonl")
    return [{key: value for key, value in row.items() if key not in timed} for row in rows]


def test_a_tuned_run_is_a_run_like_any_other(tuned: TrainOutcome, base: Path) -> None:
    run = RunDirectory.open(tuned.run)
    assert run.steps()[-1] == 6
    page = run.report.read_text()
    assert "Examples read" in page and "sft" in page
    assert tuned.scores is not None
    losses = [row["loss"] for row in rows_of(tuned.run) if row["split"] == "validation"]
    assert losses[-1] < losses[0]
    assert tuned.try_out is not None
    assert tuned.try_out.endswith(f"chat {tuned.run}")
    samples, _ = read_json_lines(run.samples_file)
    assert {row["prompt"] for row in samples} == {"User:\nnumber\nAssistant:\n"}


def test_the_template_is_kept_with_the_model(tuned: TrainOutcome, base: Path) -> None:
    before, after = load_model(base), load_model(tuned.run)
    assert chat_templates(before.tokenizer) == {}
    assert "generation" in chat_templates(after.tokenizer)["default"]
    assert before.tokenizer.fingerprint() == after.tokenizer.fingerprint()


def test_a_run_that_was_stopped_goes_on_bit_for_bit(
    tuned: TrainOutcome, base: Path, examples: Path, tmp_path: Path
) -> None:
    moved = tmp_path / "moved.jsonl"
    moved.write_bytes(examples.read_bytes())
    output = tmp_path / "run"
    train(config(moved, output, "training.max_steps=3"), fork=base)
    moved.unlink()  # a run keeps its examples
    stored = find_resumable(output)
    assert stored is not None
    train(load_config(overrides=["training.max_steps=6"], base=stored.record.requested), resume=True)
    whole, resumed = (read_all_weights(RunDirectory(place).checkpoint(6)) for place in (tuned.run, output))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_other_examples_for_a_run_that_goes_on_are_refused(tuned: TrainOutcome, examples: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_bytes(examples.read_bytes())
    stored = find_resumable(tuned.run)
    assert stored is not None
    for override, problem in (
        (f"data.paths=[{other}]", "A resumed run keeps its examples"),
        (f"tuning.validation_paths=[{other}]", r"tuning\.validation_paths was \[\] and is now"),
    ):
        with pytest.raises(ConfigError, match=problem):
            train(load_config(overrides=[override], base=stored.record.requested), resume=True)


def test_examples_of_different_lengths_train_unpacked(base: Path, examples: Path, tmp_path: Path) -> None:
    outcome = train(config(examples, tmp_path / "run", "data.packing=false", "training.max_steps=4"), fork=base)
    assert (outcome.steps, outcome.scores is not None) == (4, True)


def test_only_the_learnt_tokens_count(tuned: TrainOutcome) -> None:
    manifest = json.loads((RunDirectory(tuned.run).examples / "tokens" / "manifest.json").read_text())
    validation = [row for row in rows_of(tuned.run) if row["split"] == "validation"]
    assert validation and tuned.scores is not None
    # An answer is its digits and the end: two tokens below ten, and three from there on.
    held_out = manifest["examples"]["validation"]
    assert 2 * held_out <= tuned.scores.tokens <= 3 * held_out


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["data.documents=line"], "data.documents = 'line' is about running text and has no effect on examples"),
        (["data.clean.stages=[]"], "data.clean"),
        (["training.curriculum=easy_to_hard"], "training.curriculum = 'easy_to_hard' is about running text"),
        (["data.num_workers=2"], "data.num_workers = 2 is about running text"),
        (["data.paths=[]"], "data.paths is empty"),
        (["tokenizer.vocab_size=300"], "A tuned model keeps its tokenizer"),
        (["data.max_length=4096"], "data.max_length = 4096 is more than the 64 tokens that the model reads"),
        (["training.sample_prompts=[" + "number" * 20 + "]"], "training.sample_prompts"),
        (["model.d_model=64"], r"model\.d_model is 16 there, not 64"),
    ],
)
def test_settings_without_an_effect_are_refused(
    base: Path, examples: Path, tmp_path: Path, overrides: list[str], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        train(config(examples, tmp_path / "run", *overrides), fork=base)
    assert not (tmp_path / "run").exists()


def test_tuning_needs_a_model_and_its_settings_a_method(examples: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"teaches a finished model\. Say which: sheepop tune sft MODEL"):
        train(config(examples, tmp_path / "run"))
    with pytest.raises(ConfigError, match=r"neftune_noise_alpha has no effect without tuning\.method"):
        load_config(overrides=["tuning.neftune_noise_alpha=5"])


def test_a_template_of_a_file_is_kept_and_one_that_is_missing_is_named(
    base: Path, examples: Path, tmp_path: Path
) -> None:
    template = tmp_path / "mine.jinja"
    given = config(examples, tmp_path / "run", f"tuning.chat_template={template}", "training.max_steps=1")
    with pytest.raises(TokenizerError, match=r"mine\.jinja cannot be read"):
        train(given, fork=base)
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    outcome = train(given, fork=base)
    assert chat_templates(load_model(outcome.run).tokenizer) == {"default": template.read_text()}


def test_the_template_reads_the_variables_of_the_settings(base: Path, examples: Path, tmp_path: Path) -> None:
    template = tmp_path / "mine.jinja"
    template.write_text(
        "{{ style.name }}:{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    given = (f"tuning.chat_template={template}", "tuning.chat_template_kwargs={style: {name: brief}}")
    settings = config(examples, tmp_path / "run", *given)
    task = SupervisedTask(settings, RunDirectory(tmp_path / "run"), Console.silent())
    ((_, example, tokenizer),) = shown_examples(task, base, 1)
    assert tokenizer.decode(example.ids, skip_special=False) == "brief:number0"


def test_the_recipe_takes_smaller_steps_with_larger_models(base: Path, examples: Path) -> None:
    given = {"tuning": {"method": "sft"}, "data": {"paths": [str(examples)]}}
    found = complete(draft(given, base), lambda device: 1e9, Console.silent())
    assert found.chosen["training.max_epochs"] == 3
    assert found.config.training.optimizer == "adamw"
    assert found.chosen["training.learning_rate"] == found.config.training.learning_rate <= 1e-2
    kept = complete(draft({**given, "training": {"max_steps": 5}}, base), lambda device: 1e9, Console.silent())
    assert kept.config.training.max_epochs is None


def test_a_teacher_that_is_the_model_itself_differs_by_nothing_at_first(
    base: Path, examples: Path, tmp_path: Path
) -> None:
    teacher = (f"tuning.teacher.model={base}", "tuning.teacher.weight=1", "tuning.neftune_noise_alpha=null")
    outcome = train(config(examples, tmp_path / "run", *teacher, "training.max_steps=2"), fork=base)
    first, *_ = (row for row in rows_of(outcome.run) if row["split"] == "train")
    assert (first["objective"], first["divergence_from_teacher"]) == pytest.approx((0, 0), abs=1e-5)
    assert first["loss"] > 1
    with pytest.raises(ConfigError, match="teacher has no effect with method dpo"):
        config(examples, tmp_path / "other", *teacher, "tuning.method=dpo")
    with pytest.raises(ConfigError, match=r"training\.z_loss = 0\.1 has no effect on tune sft with a teacher"):
        train(config(examples, tmp_path / "other", *teacher, "training.z_loss=0.1"), fork=base)
    with pytest.raises(ConfigError, match="reference has no effect with method sft; it works with dpo or ppo or grpo"):
        config(examples, tmp_path / "other", f"tuning.reference={base}")


@pytest.mark.parametrize("key", ["tuning.teacher.model", "tuning.reference"])
def test_other_models_must_read_what_the_tuned_one_writes(
    base: Path, configured: Callable[..., SheepOpConfig], examples: Path, tmp_path: Path, key: str
) -> None:
    short, foreign = tmp_path / "short", tmp_path / "foreign"
    train(configured(short, "model.max_seq_len=32", "model.dropout=0", "training.max_steps=1"))
    train(
        configured(
            foreign,
            "tokenizer.algorithm=bpe",
            "tokenizer.vocab_size=300",
            "model.max_seq_len=64",
            "training.max_steps=1",
        )
    )
    method, data = ("sft", examples) if key == "tuning.teacher.model" else ("dpo", tmp_path / "pairs.jsonl")
    pairs = [{"prompt": f"{number} ", "chosen": "2", "rejected": "3"} for number in range(20)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    problems = {
        tmp_path / "none": "none does not exist|is not a model",
        short: "reads 32 tokens, fewer than the rows of 64",
        foreign: "has another tokenizer, so its probabilities are of other tokens",
    }
    for place, problem in problems.items():
        other = (f"tuning.method={method}", "tuning.neftune_noise_alpha=null", f"{key}={place}", "training.max_steps=1")
        with pytest.raises(SheepOpError, match=problem):
            train(config(data, tmp_path / "run", *other), fork=base)
        assert not (tmp_path / "run").exists()


LORA = ("tuning.lora.rank=3", "tuning.lora.alpha=6", "tuning.lora.dropout=0.1", "training.max_steps=6")


@pytest.fixture(scope="module", params=["float", "int8"])
def adapted(
    request: pytest.FixtureRequest, base: Path, examples: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """A run that learnt a change beside weights in floats, or in integers (QLoRA), and the model it began with."""
    origin, folder = base, tmp_path_factory.mktemp("adapted")
    if request.param == "int8":
        origin = folder / "base"
        quantize_model(base, origin, to="int8")
    return train(config(examples, folder / "run", *LORA), fork=origin).run, origin


def test_a_change_is_learnt_beside_weights_that_stay(adapted: tuple[Path, Path]) -> None:
    run, origin = RunDirectory.open(adapted[0]), adapted[1]
    checkpoint = run.checkpoint(6)
    before, stored = (open_weights(resolve_model_directory(place)) for place in (origin, checkpoint))
    assert before.keys() == stored.keys()
    assert all(torch.equal(before[name].read(), stored[name].read()) for name in before)
    files = [run.checkpoint(step) / "model.safetensors" for step in run.steps()]
    assert len({file.stat().st_ino for file in files}) == 1  # one file on the disk for all of them
    change = read_weights(checkpoint / "adapter.safetensors")
    layers = {name.partition(".changes.")[0] for name in change}
    names = {name.rpartition(".")[2] for name in layers}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"}
    assert all(change[f"{name}.changes.default.up"].abs().max() > 0 for name in layers)
    # Loaded, a layer is W + (6 / 3) B A, computed here in float64.
    plain, whole = load_model(origin), load_model(checkpoint)
    for name in layers:
        weight = full(plain.model.get_parameter(f"{name}.weight")).double()
        down, up = (change[f"{name}.changes.default.{part}"].double() for part in ("down", "up"))
        layer, base = whole.model.get_submodule(name), plain.model.get_submodule(name)
        y = torch.randn(5, weight.shape[1], dtype=torch.float64)
        difference = layer(y.float()).double() - base(y.float()).double()
        torch.testing.assert_close(difference, 2 * y @ down.T @ up.T, rtol=1e-4, atol=1e-5)


def test_what_a_change_lets_the_model_write_is_what_the_finished_model_writes(adapted: tuple[Path, Path]) -> None:
    run = RunDirectory.open(adapted[0])
    samples, _ = read_json_lines(run.samples_file)
    loaded, stored = load_model(run.checkpoint(6)), read_run_config(run)
    prompts = SupervisedTask(stored, run, Console.silent()).sample_prompts()
    again = TrainingSamples(loaded.model, loaded.tokenizer, stored, "cpu", prompts)(6)
    assert [(row["prompt"], row["text"]) for row in samples if row["step"] == 6] == [
        (row["prompt"], row["text"]) for row in again
    ]


def test_a_change_goes_on_bit_for_bit(adapted: tuple[Path, Path], examples: Path, tmp_path: Path) -> None:
    whole, origin = adapted
    output = tmp_path / "run"
    train(config(examples, output, *LORA, "training.max_steps=3"), fork=origin)
    stored = find_resumable(output)
    assert stored is not None
    train(load_config(overrides=["training.max_steps=6"], base=stored.record.requested), resume=True)
    files = [RunDirectory(place).checkpoint(6) / "adapter.safetensors" for place in (whole, output)]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_model_that_was_published_in_integers_is_tuned_forked_and_quantised(
    configured: Callable[..., SheepOpConfig], examples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHEEPOP_MODELS", str(tmp_path / "cache"))
    file = tmp_path / "base.gguf"
    wide = ("model.d_model=32", "model.max_seq_len=64", "model.dropout=0", "training.max_steps=1")
    export_model(train(configured(tmp_path / "wide", *wide)).run, file, format="gguf", quantize="q8_0")
    run = train(config(examples, tmp_path / "run", *LORA, "training.max_steps=1"), fork=file).run
    imported, tuned = load_model(file).model, load_model(run).model
    assert list_models()[0]["stored"] == ["float32", "int8"]
    assert all(torch.equal(full(tuned.get_parameter(name)), full(each)) for name, each in imported.named_parameters())
    opened = open_model(run).tensors["blocks.0.attention.q_proj.weight"].read()
    layer = tuned.blocks[0].attention.q_proj
    change = layer.changes["default"]
    assert torch.allclose(opened, full(layer.weight) + 2 * change.up @ change.down, atol=1e-6)
    for settings in (config(examples, tmp_path / "no"), load_config(overrides=[f"data.paths={examples}"])):
        with pytest.raises(ConfigError, match=r"are integers, which cannot be trained.* sheepop export .* --format hf"):
            train(settings.replace(output_dir=str(tmp_path / "no")), fork=file)
    with pytest.raises(CheckpointError, match=r"no second one can be added.*sheepop export .* --merge --output FLOATS"):
        train(config(examples, tmp_path / "again", *LORA, "training.max_steps=1"), fork=run)
    summary = quantize_model(file, tmp_path / "int8", to="int8")
    assert summary["perplexity_after"] == pytest.approx(summary["perplexity_before"], rel=0.01)
    with pytest.raises(CheckpointError, match="is already quantised"):
        quantize_model(tmp_path / "int8", tmp_path / "int4", to="int4")


def test_an_adapted_model_is_a_model_for_everything_else(
    adapted: tuple[Path, Path], examples: Path, tmp_path: Path
) -> None:
    """It may be tuned on: the change is in the weights then, but for integers, which would round it away."""
    run, origin = adapted
    again = config(examples, tmp_path / "again", *LORA, "training.max_steps=1")
    if read_quantization(resolve_model_directory(origin)) is not None:
        with pytest.raises(CheckpointError, match="holds an adapter on integer weights"):
            train(again, fork=run)
        with pytest.raises(ConfigError, match="are integers, which cannot be trained"):
            train(config(examples, tmp_path / "whole", "training.max_steps=1"), fork=origin)
        return
    outcome = train(again, fork=run)
    merged = read_all_weights(RunDirectory(outcome.run).base)
    expected = load_model(run).model.state_dict()
    assert all(torch.equal(merged[name], expected[name]) for name in merged)
    opened = open_model(run)
    assert all(torch.equal(tensor.read(), expected[name]) for name, tensor in opened.tensors.items())


def test_a_damaged_change_is_named(adapted: tuple[Path, Path], tmp_path: Path) -> None:
    copy = tmp_path / "model"
    shutil.copytree(resolve_model_directory(adapted[0]), copy)
    file = copy / "adapter.safetensors"
    tensors = read_weights(file)
    name = sorted(tensors)[0]
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, file)
    with pytest.raises(CheckpointError, match=r"adapter\.safetensors is damaged: its checksum differs"):
        load_model(copy)
    write_checksums(copy)
    with pytest.raises(CheckpointError, match="is not a layer of it, or lacks a tensor"):
        load_model(copy)
    save_file({**tensors, name: tensors[name][:1].clone()}, file)
    write_checksums(copy)
    with pytest.raises(CheckpointError, match="has the wrong shape"):
        load_model(copy)
