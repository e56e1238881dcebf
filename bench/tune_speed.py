"""Post-training beside TRL: examples per second and peak memory of SFT, LoRA, DPO and GRPO steps on one processor core.

Both start from one model that transformers has saved: a published one (`--model`), or one with new weights, a Llama or
the shape of Gemma 3 270M (262,144 tokens). They read the same rows in the same order, so that every step has the same
rows in both, and AdamW moves all weights in float32, or in tasks that end with `lora` adapters of rank 8 in all linear
layers. In a GRPO step one prompt is answered as often as a step has examples. Every measurement has a process of its
own with one thread, and time is processor time, which other programs do not lengthen. Both are measured with activation
checkpointing, which TRL has by default, and without. Ours is measured with padded rows, as theirs are, and for SFT
packed, as it is by default. A last row is pre-training at the same shape: the tokens of full rows.

python bench/tune_speed.py --peers DIR --shape gemma3-270m --json bench/results/tune_speed.json

`DIR` holds trl (pip install --target DIR trl); without it only our own rows are measured. `--model` takes what
`sheepop export MODEL --format hf` writes.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from processes import answer, forget_peak, measured_apart, peak_bytes
from record import add_json_option, write_record

MEBIBYTE = 2**20
SEED = 0  # of the order of rows
ANSWER = 32  # tokens of an answer that the model writes
WORDS = "sheep wool fence meadow shepherd barn lamb grass hill dog river stone cloud evening morning gate"


def method_of(task: str) -> str:
    """The method of a task: packed rows and pre-training are read as for SFT."""
    return next((method for method in ("dpo", "grpo") if task.startswith(method)), "sft")


def measure(
    who: str, task: str, model: str, data: str, steps: int, batch: int, length: int, checkpointing: bool, peers: str
) -> dict[str, Any]:
    """Seconds of a step (median, without the first two), peak memory, and examples or tokens in a step."""
    torch.set_num_threads(1)
    if who == "trl":
        sys.path.insert(0, peers)
        return measure_trl(task, model, data, steps, batch, length, checkpointing)
    return measure_ours(task, model, data, steps, batch, length, checkpointing)


class Clock:
    """Times steps of this process; memory counts from the third on. What is in use when it is made are libraries."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        forget_peak("cpu")
        self.before = peak_bytes("cpu")
        self._last = time.process_time()

    def step(self) -> None:
        """A step has ended."""
        now = time.process_time()
        self.seconds.append(now - self._last)
        if len(self.seconds) == 2:
            forget_peak("cpu")
        self._last = time.process_time()

    def found(self, count: float) -> dict[str, Any]:
        """What was measured of steps with so many examples or tokens."""
        measured = {"seconds": statistics.median(self.seconds[2:]), "peak": peak_bytes("cpu"), "before": self.before}
        return {**measured, "count": count}


def measure_trl(
    task: str, model: str, data: str, steps: int, batch: int, length: int, checkpointing: bool
) -> dict[str, Any]:
    """TRL's trainer of the task."""
    import transformers
    import trl
    from datasets import Dataset

    clock = Clock()

    class Marks(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *arguments: Any, **named: Any) -> None:
            clock.step()

    rows = [json.loads(line) for line in Path(data).read_text().splitlines()]
    method = method_of(task)
    config, trainer = {
        "sft": (trl.SFTConfig, trl.SFTTrainer), "dpo": (trl.DPOConfig, trl.DPOTrainer),
        "grpo": (trl.GRPOConfig, trl.GRPOTrainer),
    }[method]  # fmt: skip
    more: dict[str, Any] = {}
    if method == "grpo":
        of_task = {"num_generations": batch, "max_completion_length": ANSWER, "beta": 0.0, "shuffle_dataset": False}
        more["reward_funcs"] = lambda completions, **_: [float(text.count("e")) for text in completions]
    else:
        of_task = {"max_length": length}
    if task.endswith("lora"):
        import peft

        more["peft_config"] = peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    with tempfile.TemporaryDirectory() as output:
        settings = config(
            output, max_steps=steps, per_device_train_batch_size=batch, gradient_accumulation_steps=1, use_cpu=True,
            report_to=[], save_strategy="no", logging_strategy="no", learning_rate=1e-5, bf16=False, **of_task,
            gradient_checkpointing=checkpointing, disable_tqdm=True, model_init_kwargs={"dtype": "float32"},
            train_sampling_strategy="sequential",
        )  # fmt: skip
        if method == "dpo":
            settings.precompute_ref_log_probs = True  # as ours are
        made = trainer(
            model, args=settings, train_dataset=Dataset.from_list(rows), callbacks=[Marks()],
            processing_class=transformers.AutoTokenizer.from_pretrained(model), **more,
        )  # fmt: skip
        made.train()
    return clock.found(batch)


def measure_ours(
    task: str, model: str, data: str, steps: int, batch: int, length: int, checkpointing: bool
) -> dict[str, Any]:
    """Steps of our run; ``packed`` is SFT with packed rows, ``lora`` with an adapter, ``text`` pre-training."""
    import numpy as np

    from sheepop.checkpoint import RunDirectory
    from sheepop.core.console import Console
    from sheepop.core.random import seed_torch
    from sheepop.jobs.config import load_config
    from sheepop.jobs.run.open import task_of
    from sheepop.jobs.run.resolve import build_network, prepare_process
    from sheepop.jobs.run.step_memory import in_memory
    from sheepop.jobs.task.fork import Fork
    from sheepop.jobs.task.interface import with_training
    from sheepop.train import build_optimizers
    from sheepop.train.evaluation_weights import TrainedWeights
    from sheepop.train.placement import OneDevice
    from sheepop.train.source import PreparedStep
    from sheepop.train.step import StepRunner

    method = method_of(task)
    packs = task in ("packed", "text")
    tuning = {"method": method, "long_examples": "cut", "lora": {"rank": 8} if task.endswith("lora") else None}
    if method == "grpo":
        rewards = Path(data).with_name("reward.py")
        rewards.write_text("def reward(prompt, completion, **fields):\n    return completion.count('e')\n")
        answers = {"reward": str(rewards), "group_size": batch, "max_new_tokens": ANSWER, "kl_coef": 0.0}
        tuning |= {"long_examples": "refuse", "grpo": answers}
    settings = {
        "tuning": tuning,
        "data": {
            "paths": [data], "packing": packs or method != "sft", "max_length": length, "validation_fraction": 0.0
        },
        "training": {
            "global_batch_size": batch, "precision": "fp32", "learning_rate": 1e-5,
            "max_steps": steps, "compile": False, "warmup_steps": 0,
            "activation_checkpointing": "full" if checkpointing else "none",
            **dict.fromkeys(("eval_interval", "sample_interval", "checkpoint_interval"), steps),
        },
        "device": "cpu",
        "seed": SEED,
    }  # fmt: skip
    clock = Clock()
    with tempfile.TemporaryDirectory() as output:
        asked = load_config(options={**settings, "output_dir": output})
        run = RunDirectory(Path(output))
        prepare_process(asked)
        task_here = task_of(asked, run, Console.silent(), Fork(Path(model))).prepared({})
        training = in_memory(task_here, task_here.config.training, {}, "cpu", chooses_rows=True)
        training = training.replace(micro_batch_size=training.micro_batch_size or batch)
        task_here = task_here.with_config(with_training(task_here.config, training))
        network = build_network(task_here, "cpu")
        placement = OneDevice(network, precision="fp32", device="cpu")
        objective = task_here.objective()
        source, schedule = task_here.source(objective, placement), task_here.schedule
        runner = StepRunner(
            placement, objective, build_optimizers(network, task_here.config.training), TrainedWeights(), 1.0
        )
        task_here.origin.forget()  # type: ignore[union-attr]
        examples = []
        for number in range(steps):
            prepared = source.prepare(number)
            if task == "text":  # the same rows with every token to be learnt
                rows = schedule.batch(number)
                full = type(rows)(rows.input_ids, np.roll(rows.input_ids, -1, 1), *_apart(rows), has_boundaries=False)
                prepared = PreparedStep.of(full, training.micro_batch_size, objective, device="cpu")
            runner.take(
                prepared,
                number=number,
                rate=1e-5,
                before_forward=lambda n, step=number: seed_torch(0, "dropout", step, n),
            )
            clock.step()
            examples.append(_examples(schedule.batch(number)) if packs else batch)
        tokens = prepared.num_computed
    return clock.found(tokens if task == "text" else statistics.mean(examples[2:])) | {"tokens": tokens}


def _apart(rows: Any) -> tuple[Any, Any]:
    return rows.positions, rows.document_ids


def _examples(rows: Any) -> int:
    """Examples in packed rows: the runs of tokens, without the padding at the end."""
    return sum(len(set(ids[mask].tolist())) for ids, mask in zip(rows.document_ids, rows.labels >= 0, strict=True))


def write_examples(place: Path, task: str, count: int) -> Path:
    """Questions with answers of very different lengths, as people write them; also in the order that ours reads."""
    from sheepop.data import SampleOrder

    draw, words = random.Random(0), WORDS.split()

    def said(low: int, high: int) -> str:
        return " ".join(draw.choice(words) for _ in range(round(low * (high / low) ** draw.random())))

    path = place / f"{task}.jsonl"
    keys = {"dpo": ("chosen", "rejected"), "grpo": ()}.get(task, ("completion",))
    rows = [{"prompt": said(5, 60), **{key: " " + said(5, 150) for key in keys}} for _ in range(count)]
    read = [rows[number] for number in SampleOrder(count, SEED).indices(0, count)]
    for file, lines in ((path, rows), (in_order(path), read)):
        file.write_text("".join(json.dumps(row) + "\n" for row in lines))
    return path


def in_order(path: Path) -> Path:
    """The same rows in the order in which our steps read them."""
    return path.with_suffix(".ordered.jsonl")


def write_model(theirs: Path, shape: str, width: int, layers: int) -> None:
    """A model with new weights, as transformers saves it."""
    import transformers

    from sheepop.core.console import Console
    from sheepop.tokenizer import TokenizerConfig, train_tokenizer

    theirs.mkdir()
    texts = [WORDS + "\n"] * 50 + [Path(json.__file__).read_text()] * 3
    train_tokenizer(TokenizerConfig(vocab_size=1024), texts, console=Console.silent()).save(theirs)
    size = json.loads((theirs / "tokenizer.json").read_text())
    shared = {"bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0, "tie_word_embeddings": True}
    if shape == "llama":
        config = transformers.LlamaConfig(
            vocab_size=max(32_000, len(size["model"]["vocab"])), hidden_size=width, intermediate_size=width * 8 // 3,
            num_hidden_layers=layers, num_attention_heads=width // 64, num_key_value_heads=width // 64,
            max_position_embeddings=1024, **shared,
        )  # fmt: skip
    else:
        config = transformers.Gemma3TextConfig(
            vocab_size=262_144, hidden_size=640, intermediate_size=2048, num_hidden_layers=18, num_attention_heads=4,
            num_key_value_heads=1, head_dim=256, query_pre_attn_scalar=256, sliding_window=512,
            max_position_embeddings=32_768, **shared,
        )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(theirs)


def main() -> None:
    """Runs the benchmark."""
    if answer(measure):
        return
    parser = argparse.ArgumentParser(description="Post-training steps beside TRL.")
    parser.add_argument("--peers", default="", help="a folder with trl")
    parser.add_argument("--model", type=Path, help="a model as transformers saves it, instead of one with new weights")
    parser.add_argument("--shape", choices=["llama", "gemma3-270m"], default="llama")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--length", type=int, default=256, help="the most tokens of an example")
    parser.add_argument("--batch", type=int, default=8, help="examples in a step, or pairs")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=2, help="measurements of each, one contestant after the other")
    tasks = ["packed", "sft", "lora", "text", "dpo", "dpo-lora", "grpo", "grpo-lora"]
    parser.add_argument("--tasks", nargs="+", choices=tasks, default=tasks, help="what is measured")
    add_json_option(parser)
    asked = parser.parse_args()
    from sheepop.jobs.exchange import import_model  # not in the processes that measure

    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        theirs, ours = asked.model or place / "theirs", place / "ours"
        if asked.model is None:
            write_model(theirs, asked.shape, asked.width, asked.layers)
        import_model(theirs, ours)
        rows_read = asked.batch * asked.steps
        counts = {"packed": 4 * rows_read, "sft": rows_read, "dpo": rows_read, "grpo": asked.steps}
        data = {task: write_examples(place, task, count) for task, count in counts.items()}
        rows: list[tuple[str, str, str, bool]] = [
            ("ours, packed", "ours", "packed", False),
            ("ours, pre-training", "ours", "text", False),
        ]
        for task in ("sft", "lora", "dpo", "dpo-lora", "grpo", "grpo-lora"):
            rows += [("ours", "ours", task, True), ("ours without checkpointing", "ours", task, False)]
            trl = [("TRL", "trl", task, True), ("TRL without checkpointing", "trl", task, False)]
            rows += trl if asked.peers else []
        rows = [row for row in rows if row[2] in asked.tasks]
        shared = {"steps": asked.steps, "batch": asked.batch, "length": asked.length, "peers": asked.peers}
        found: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for _ in range(asked.rounds):
            for name, who, task, checkpointing in rows:
                model = theirs if who == "trl" else ours
                file = data[task if task == "packed" else "packed" if task == "text" else method_of(task)]
                file = in_order(file) if who == "trl" else file
                settings = {"who": who, "task": task, "model": str(model), "data": str(file), **shared}
                measured = measured_apart(__file__, {**settings, "checkpointing": checkpointing})
                print(
                    f"{task} {name}: {measured['seconds']:.2f} s, {measured['peak'] / MEBIBYTE:,.0f} MiB",
                    file=sys.stderr,
                )
                found.setdefault((name, "sft" if task in ("packed", "text") else task), []).append(measured)
    results = [summary(name, task, runs) for (name, task), runs in found.items()]
    print(f"{'task':9} {'who':28} {'ms a step':>10} {'per second':>11} {'peak MiB':>9} {'over libraries':>15}")
    for row in results:
        speed, memory = (row["ms"], row["per_second"]), (row["peak_mib"], row["own_mib"])
        print(
            f"{row['task']:9} {row['who']:28} {speed[0]:10,.0f} {speed[1]:11,.1f} {memory[0]:9,.0f} {memory[1]:15,.0f}"
        )
    settings = {**vars(asked), "json": None, "peers": None, "model": asked.model and asked.model.name}
    write_record(asked.json, {"settings": settings, "results": results})


def summary(name: str, task: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The median of some measurements of one contestant."""
    middle: Callable[[str], float] = lambda key: statistics.median(run[key] for run in runs)  # noqa: E731
    seconds = middle("seconds")
    return {
        "task": task,
        "who": name,
        "ms": 1000 * seconds,
        "per_second": middle("count") / seconds,
        "tokens_per_second": runs[0].get("tokens", 0) / seconds,
        "peak_mib": middle("peak") / MEBIBYTE,
        "own_mib": (middle("peak") - middle("before")) / MEBIBYTE,
    }


if __name__ == "__main__":
    main()
