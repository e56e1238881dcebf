"""One contestant of `train_speed.py --against` in a process of its own: SheepOp's training step or nanoGPT's.

Reads one JSON request a line and answers with one: {"steps": 3} takes three steps on the next rows and tells what they
took and lost; {"memory": true} tells the peak so far.
"""

from __future__ import annotations

import contextlib
import io
import json
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sheepop.core.console import Console
from sheepop.core.device import keep_freed_memory, resolve_device
from sheepop.core.speed import synchronize
from sheepop.data import Batch
from sheepop.model import ModelConfig, Transformer, build_model
from sheepop.train import TrainingConfig, build_optimizers
from sheepop.train.budget import measure_step
from sheepop.train.evaluation_weights import TrainedWeights
from sheepop.train.objective import NextToken
from sheepop.train.placement import OneDevice
from sheepop.train.source import PreparedStep
from sheepop.train.step import StepRunner
from skipped_products import skip_products

Step = Callable[[int], float]  # the number of a step to its loss

LEARNING_RATE, BETAS, DECAY, CLIP = 6e-4, (0.9, 0.95), 0.1, 1.0


@dataclass(frozen=True)
class Shape:
    """What both train: nanoGPT's network (GELU, learned positions, LayerNorm, no biases, tied) at some size."""

    num_layers: int
    num_heads: int
    d_model: int
    seq_len: int
    batch: int
    vocab_size: int

    @property
    def tokens(self) -> int:
        """Tokens in a step."""
        return self.batch * self.seq_len

    def model_config(self) -> ModelConfig:
        """The same network in SheepOp's words."""
        return ModelConfig(
            vocab_size=self.vocab_size,
            d_model=self.d_model,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            max_seq_len=self.seq_len,
            position_encoding="learned",
            norm="layernorm",
            activation="gelu",
            bias=False,
            dropout=0.0,
        )


@dataclass(frozen=True)
class Contestant:
    """Who trains what and how; a process is started with this as its argument."""

    shape: Shape
    device: str
    precision: str = "fp32"  # fp32, bf16 (float32 weights), all-bf16
    compiled: bool = False
    nanogpt: str | None = None  # the folder of the checkout; SheepOp without one
    products: bool = True  # false leaves out products of matrices and attention

    def to_json(self) -> str:
        """The contestant as an argument of a command."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Contestant:
        """Back from `to_json`."""
        fields = json.loads(text)
        return cls(**{**fields, "shape": Shape(**fields["shape"])})


class LearnableRows:
    """Rows in which every second token follows from the one before by a fixed rule; row i is a function of i."""

    num_samples = 1 << 40

    def __init__(self, shape: Shape) -> None:
        self.max_length, self._vocab_size = shape.seq_len, shape.vocab_size
        self._follower = np.random.default_rng(0).permutation(shape.vocab_size)

    def batch(self, sample_indices: NDArray[np.int64]) -> Batch:
        """Rows with a label everywhere."""
        tokens = np.empty((len(sample_indices), self.max_length + 1), dtype=np.int64)
        for row, index in zip(tokens, sample_indices, strict=True):
            # Frequencies as in a language: a few tokens make up most of a row.
            share = np.random.default_rng(int(index)).random(self.max_length + 1) ** 3
            row[:] = (share * self._vocab_size).astype(np.int64)
            row[1::2] = self._follower[row[:-1:2]]
        zeros = np.zeros((len(sample_indices), self.max_length), dtype=np.int64)
        return Batch(tokens[:, :-1].copy(), tokens[:, 1:].copy(), zeros, zeros, has_boundaries=False)

    def token_range(self, sample: int) -> tuple[int, int]:
        """Where a row would stand if rows followed each other."""
        return sample * self.max_length, (sample + 1) * self.max_length


def training_config(shape: Shape, **settings: Any) -> TrainingConfig:
    """The optimizer's settings, the same for both."""
    return TrainingConfig(
        global_batch_size=shape.batch,
        learning_rate=LEARNING_RATE,
        betas=BETAS,
        weight_decay=DECAY,
        max_grad_norm=CLIP,
        **settings,
    )


def fastest_setting(shape: Shape, device: str, *, compiles: bool) -> tuple[str, bool]:
    """The precision and compilation that a run with both on ``auto`` would choose here."""
    keep_freed_memory(device)
    config = training_config(shape, precision="auto", compile="auto" if compiles else False)
    timing = measure_step(
        lambda: build_model(shape.model_config(), 0, device),
        LearnableRows(shape),
        NextToken(),
        config,
        device,
        seconds=9.0,
        console=Console(quiet=True),
    )
    return timing.precision, timing.compiled


def sheepop(contestant: Contestant) -> tuple[Step, int]:
    """SheepOp's step, by the runner that its loop has, and its parameters' number."""
    shape, device = contestant.shape, contestant.device
    keep_freed_memory(device)
    config = training_config(shape, precision=contestant.precision, compile=contestant.compiled)
    model = build_model(shape.model_config(), 0, device)
    optimizers = build_optimizers(model, config)
    placement = OneDevice(model, precision=contestant.precision, device=device, compiled=contestant.compiled)
    rows, objective = LearnableRows(shape), NextToken.configured(config)
    runner = StepRunner(placement, objective, optimizers, TrainedWeights(), CLIP)

    def step(number: int) -> float:
        samples = np.arange(number * shape.batch, (number + 1) * shape.batch)
        prepared = PreparedStep.of(rows.batch(samples), shape.batch, objective, device=device)
        return runner.take(prepared, number=number).loss

    return step, sum(parameter.numel() for parameter in model.parameters())


def nanogpt(contestant: Contestant) -> tuple[Step, int]:
    """nanoGPT's model and optimizer from its checkout, in the order of its training script, from SheepOp's weights."""
    assert contestant.nanogpt is not None
    sys.path.insert(0, contestant.nanogpt)
    from model import GPT, GPTConfig  # type: ignore[import-not-found]

    shape, device = contestant.shape, contestant.device
    if device == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = True
    with contextlib.redirect_stdout(io.StringIO()):
        model = GPT(
            GPTConfig(
                block_size=shape.seq_len,
                vocab_size=shape.vocab_size,
                n_layer=shape.num_layers,
                n_head=shape.num_heads,
                n_embd=shape.d_model,
                dropout=0.0,
                bias=False,
            )
        )
        model.load_state_dict(nanogpt_weights(build_model(shape.model_config(), 0)))
        model.to(device, dtype=torch.bfloat16 if contestant.precision == "all-bf16" else torch.float32)
        optimizer = model.configure_optimizers(DECAY, LEARNING_RATE, BETAS, device)
    run = torch.compile(model) if contestant.compiled else model
    rows = LearnableRows(shape)

    def step(number: int) -> float:
        batch = rows.batch(np.arange(number * shape.batch, (number + 1) * shape.batch))
        ids, labels = (torch.from_numpy(array).to(device) for array in (batch.input_ids, batch.labels))
        with torch.autocast(device, dtype=torch.bfloat16, enabled=contestant.precision == "bf16"):
            _, loss = run(ids, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.item())

    return step, sum(parameter.numel() for parameter in model.parameters())


def nanogpt_weights(model: Transformer) -> dict[str, torch.Tensor]:
    """SheepOp's weights under nanoGPT's names."""
    own = model.state_dict()
    named = {
        "transformer.wte.weight": own["embedding.weight"],
        "transformer.wpe.weight": own["added_positions.table"],
        "transformer.ln_f.weight": own["final_norm.weight"],
        "lm_head.weight": own["lm_head.weight"],
    }
    for layer in range(model.config.num_layers):
        block, theirs = f"blocks.{layer}.", f"transformer.h.{layer}."
        projections = [own[f"{block}attention.{name}_proj.weight"] for name in "qkv"]
        named |= {
            f"{theirs}ln_1.weight": own[f"{block}attention_norm.weight"],
            f"{theirs}attn.c_attn.weight": torch.cat(projections),
            f"{theirs}attn.c_proj.weight": own[f"{block}attention.o_proj.weight"],
            f"{theirs}ln_2.weight": own[f"{block}feed_forward_norm.weight"],
            f"{theirs}mlp.c_fc.weight": own[f"{block}feed_forward.up_proj.weight"],
            f"{theirs}mlp.c_proj.weight": own[f"{block}feed_forward.down_proj.weight"],
        }
    return named


def peak_memory(device: str) -> int:
    """Bytes: of the GPU's tensors, or of this whole process on a CPU."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def serve(contestant: Contestant) -> None:
    """Answers requests from standard input until it ends."""
    answers = sys.stdout
    sys.stdout = sys.stderr  # what a library prints is no answer
    if contestant.nanogpt is None:
        resolve_device(contestant.device)
    if not contestant.products:
        skip_products()
    step, parameters = (sheepop if contestant.nanogpt is None else nanogpt)(contestant)
    number = 0
    print(json.dumps({"parameters": parameters}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if request.get("memory"):
            answer: dict[str, Any] = {"memory": peak_memory(contestant.device)}
        else:
            started, processor = time.perf_counter(), time.process_time()
            losses = [step(number + offset) for offset in range(request["steps"])]
            synchronize(contestant.device)
            number += request["steps"]
            answer = {
                "seconds": time.perf_counter() - started,
                "processor_seconds": time.process_time() - processor,
                "losses": losses,
            }
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "choose":
        wanted = Contestant.from_json(sys.argv[2])
        resolve_device(wanted.device)
        print(json.dumps(fastest_setting(wanted.shape, wanted.device, compiles=wanted.compiled)))
    else:
        serve(Contestant.from_json(sys.argv[1]))
