"""The best model for the minutes, and the classic small recipe, beside nanoGPT's model in the same run.

    python bench/train_quality.py --against PATH files --minutes 5 --json bench/results/train_quality.json
    python bench/train_quality.py --against PATH shakespeare --data plays.txt --json bench/results/shakespeare.json

`files`: the quickstart's defaults, and nanoGPT's model with its best small recipe for a CPU (4 layers, d 128, T 64, 12
rows, AdamW at 1e-3), get the same files, the same tokenizer and the same time; the quickstart's includes its
tokenizer, measurements and validations, nanoGPT's is steps alone, for as long as the quickstart really took.
`shakespeare`: 2,000 steps of that recipe by characters, and recipes/shakespeare-characters.yaml, which has the same
size. The held-out text is the same for both, every token counted once; `files` lets rows overlap by a half, for both,
and compresses the same text with what ``warm_compressors.py`` finds.

PATH is a checkout of nanoGPT, whose ``model.py`` is imported.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from record import add_json_option, write_record
from sheepop.core.console import Console
from sheepop.data import Batches, Corpus, PackedBatches, PaddedBatches
from sheepop.jobs.config import load_config
from sheepop.jobs.quickstart import quickstart
from sheepop.jobs.run.request import RunRequest
from sheepop.jobs.run.train import train
from sheepop.jobs.task.corpus_batches import build_batches
from warm_compressors import warm_compressors

ROWS, LENGTH, WIDTH, LAYERS, HEADS = 12, 64, 128, 4, 4
RATE, LOWEST_RATE, WARMUP, CLIP = 1e-3, 1e-4, 100, 1.0
STEPS = 2000
RECIPE = Path(__file__).parent.parent / "recipes" / "shakespeare-characters.yaml"
PUBLISHED = 1.88  # the loss on held-out text that nanoGPT's documentation names for this recipe
Progress = Callable[[int], float]


def train_nanogpt(path: Path, corpus: Corpus, progress: Progress) -> tuple[Any, int, float]:
    """nanoGPT's model trained by its recipe until `progress`, the share that is done, reaches 1.

    Returns the model, its steps and the seconds they took.
    """
    sys.path.insert(0, str(path))
    from model import GPT, GPTConfig  # type: ignore[import-not-found]

    torch.manual_seed(1337)
    tokens = np.asarray(corpus.train.tokens(0, corpus.train.num_tokens), dtype=np.int64)
    sizes = {"n_layer": LAYERS, "n_head": HEADS, "n_embd": WIDTH, "dropout": 0.0, "bias": False}
    with contextlib.redirect_stdout(io.StringIO()):
        model = GPT(GPTConfig(block_size=LENGTH, vocab_size=corpus.tokenizer().vocab_size, **sizes))
        optimizer = model.configure_optimizers(0.1, RATE, (0.9, 0.99), "cpu")
    generator = torch.Generator().manual_seed(1337)
    columns = np.arange(LENGTH + 1)
    step, started = 0, time.monotonic()
    while (share := progress(step)) < 1:
        starts = torch.randint(len(tokens) - LENGTH, (ROWS,), generator=generator).numpy()
        rows = torch.from_numpy(tokens[starts[:, None] + columns])
        cosine = (1 + math.cos(math.pi * share)) / 2
        rate = RATE * (step + 1) / WARMUP if step < WARMUP else LOWEST_RATE + (RATE - LOWEST_RATE) * cosine
        for group in optimizer.param_groups:
            group["lr"] = rate
        _, loss = model(rows[:, :-1], rows[:, 1:].contiguous())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
    return model.eval(), step, time.monotonic() - started


def score_nanogpt(model: Any, corpus: Corpus, *, overlapping: bool) -> dict[str, float]:
    """Its loss in nats per token and bits per byte on every held-out token that SheepOp's model predicts too.

    Where rows are `overlapping` a token is predicted from half a row at least, as SheepOp's model does it then.
    """
    tokenizer = corpus.tokenizer()
    lengths = tokenizer.byte_lengths()
    batches: Batches = PackedBatches(corpus.validation, max_length=LENGTH, pad_id=tokenizer.pad_id)
    if overlapping:
        batches = PaddedBatches(
            corpus.validation, max_length=LENGTH, pad_id=tokenizer.pad_id, stride=LENGTH // 2, count_once=True
        )
    total, count, num_bytes = 0.0, 0, 0
    with torch.inference_mode():
        for start in range(0, batches.num_samples, 64):
            batch = batches.batch(np.arange(start, min(start + 64, batches.num_samples)))
            labels = torch.from_numpy(batch.labels)
            # With targets its forward gives logits of every position.
            logits, _ = model(torch.from_numpy(batch.input_ids), labels.clamp(min=0))
            total += torch.nn.functional.cross_entropy(
                logits.flatten(0, 1).double(), labels.flatten(), ignore_index=-100, reduction="sum"
            ).item()
            predicted = batch.labels[batch.labels != -100]
            count, num_bytes = count + predicted.size, num_bytes + int(lengths[predicted].sum())
    return {"loss": total / count, "bits_per_byte": total / math.log(2) / num_bytes, "tokens": count}


def compare_files(options: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Both on the same files, tokenizer and time."""
    quiet = Console(quiet=True)
    ours = quickstart(work / "run", minutes=options.minutes, paths=options.data, device="cpu", console=quiet)
    seconds = sum(ours.seconds.values())
    corpus = Corpus.open(work / "run" / "corpus")
    started = time.monotonic()
    model, steps, _ = train_nanogpt(options.against, corpus, lambda step: (time.monotonic() - started) / seconds)
    theirs = score_nanogpt(model, corpus, overlapping=True)
    warm, missing = warm_compressors(corpus)
    return {
        "minutes": options.minutes,
        "sheepop": {**ours.scores.to_dict(), "seconds": ours.seconds},
        "sheepop with its memory": None if ours.with_memory is None else ours.with_memory.to_dict(),
        "nanogpt": {**theirs, "steps": steps, "seconds": seconds},
        "compressors": {**ours.baselines.named, **warm},
        "missing": missing,
        "lower_by": 1 - ours.scores.bits_per_byte / theirs["bits_per_byte"],
    }


def compare_shakespeare(options: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Both for `STEPS` steps of the same size on one text, letter by letter."""
    changes = {
        "data": {"paths": options.data},
        "training": {"max_steps": STEPS, "eval_interval": STEPS // 20, "eval_tokens": 16384, "sample_interval": STEPS},
        "output_dir": str(work / "run"),
        "device": "cpu",
    }
    config = load_config(RECIPE, options=changes)
    sizes = config.model.d_model, config.model.num_layers, config.model.max_seq_len, config.training.global_batch_size
    assert sizes == (WIDTH, LAYERS, LENGTH, ROWS), sizes
    outcome = train(RunRequest.exactly(config, console=Console(quiet=True)))
    assert outcome.scores is not None
    rows = [json.loads(line) for line in (work / "run" / "metrics.jsonl").read_text().splitlines()]
    corpus = Corpus.open(work / "run" / "corpus")
    model, _, seconds = train_nanogpt(options.against, corpus, lambda step: step / STEPS)
    batches = build_batches(config, corpus.train, corpus.tokenizer())
    reached = next((row for row in rows if row["split"] == "validation" and row["loss"] <= PUBLISHED), None)
    return {
        "steps": STEPS,
        "rows": batches.num_samples,
        "published": PUBLISHED,
        "published_reached": None if reached is None else {key: reached[key] for key in ("step", "seconds", "loss")},
        "sheepop": {**outcome.scores.to_dict(), "seconds": rows[-1]["seconds"]},
        "nanogpt": {**score_nanogpt(model, corpus, overlapping=False), "seconds": seconds},
    }


def main() -> None:
    """Runs one comparison, prints its table and writes the JSON that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=["files", "shakespeare"])
    parser.add_argument("--against", type=Path, required=True, metavar="PATH", help="a checkout of nanoGPT")
    parser.add_argument("--data", nargs="+", default=[], metavar="PATH", help="text; files: the standard library")
    parser.add_argument("--minutes", type=float, default=5.0)
    add_json_option(parser)
    options = parser.parse_args()
    if options.experiment == "shakespeare" and not options.data:
        parser.error("shakespeare needs --data PATH, a text of about a megabyte")
    with tempfile.TemporaryDirectory() as place:
        record = (compare_files if options.experiment == "files" else compare_shakespeare)(options, Path(place))
    print("| model | loss | bits per byte |\n| --- | ---: | ---: |")
    for name in ("sheepop", "sheepop with its memory", "nanogpt"):
        if record.get(name) is None:
            continue
        print(f"| {name} | {record[name]['loss']:.4f} | {record[name]['bits_per_byte']:.4f} |")
    for name, bits in record.get("compressors", {}).items():
        print(f"| {name} | | {bits:.4f} |")
    for name, reason in record.get("missing", {}).items():
        print(f"| {name} | | {reason} |")
    print(f"\n{json.dumps(record, indent=2)}")
    write_record(options.json, record)


if __name__ == "__main__":
    main()
