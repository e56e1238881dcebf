"""Looks at a run before it starts: opens it in a temporary place as `train` would, and takes its first steps there."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import torch
from torch import nn

from sheepop.checkpoint import RunDirectory, resolve_model_directory
from sheepop.core.console import Console
from sheepop.core.device import return_freed_memory
from sheepop.core.errors import SheepOpError
from sheepop.core.files import require_writable
from sheepop.core.machine import available_memory
from sheepop.data.discovery import require_paths
from sheepop.download.catalog import HUB
from sheepop.jobs.config import SheepOpConfig
from sheepop.jobs.first_steps import FirstSteps
from sheepop.jobs.recipe import Completed
from sheepop.jobs.run.open import OpenRun, task_of
from sheepop.jobs.run.record import StageTimes
from sheepop.jobs.run.request import RunRequest
from sheepop.jobs.run.resolve import check_layout, fitted, prepare_process, resolved
from sheepop.jobs.run.step_memory import adapting, bytes_of_a_step, in_memory
from sheepop.jobs.task import Task
from sheepop.jobs.task.evaluations import EvaluationSet
from sheepop.jobs.task.examples import ExampleTask
from sheepop.jobs.task.fork import Fork
from sheepop.model import Transformer, blank_model, num_parameters
from sheepop.model.accounting.cost import cache_bytes
from sheepop.model.accounting.saved_activations import count_going_back
from sheepop.plan.findings import Disk, Findings, free_bytes, most_checkpoints
from sheepop.plan.memory import MemoryParts, Trained, largest_that_fits, memory_parts, update_bytes
from sheepop.plan.sample import directory_bytes, sampled
from sheepop.report import data_size
from sheepop.train import TrainingConfig
from sheepop.train.budget import resolve_compile, resolve_training
from sheepop.train.precision import candidates, check_precision

_FLOAT32 = 4
_WRITTEN_TOGETHER = 128  # answers; see `sheepop.jobs.task.rewards`


@dataclass
class Preflight:
    """What was found out about a run on this machine; a part is None if the checks before it failed.

    `share` is how much of the text was read, `steps` are those of the run, and `besides` are the seconds of all else by
    part.
    """

    findings: Findings = field(default_factory=Findings)
    config: SheepOpConfig | None = None
    share: float = 1.0
    memory: MemoryParts | None = None
    usable: float | None = None
    largest_rows: int | None = None
    disk: Disk | None = None
    steps_taken: FirstSteps | None = None
    besides: dict[str, float] = field(default_factory=dict)
    steps: int = 0
    assumed: list[str] = field(default_factory=list)


def preflight(request: RunRequest, seconds: float) -> Preflight:
    """Checks a new run on this machine, and times its steps for about `seconds`. It writes nothing that stays."""
    found = Preflight()
    findings, config = found.findings, request.settings
    findings.passes("output", lambda: _check_output(request))
    places = [place for place in config.data.paths if "://" not in place and not place.startswith(HUB)]
    found_data = findings.passes("data", lambda: require_paths(map(Path, places)))
    has_layout = findings.passes("layout", lambda: check_layout(config, request.ranks))
    device = findings.attempt("device", lambda: prepare_process(config)) if has_layout else None
    computes = config.training.precision == "auto" or device is None
    if not computes:
        computes = findings.passes("precision", lambda: check_precision(config.training.precision, str(device)))
    _check_evaluation(findings, config)
    if device is not None and found_data:
        with TemporaryDirectory(prefix="sheepop-plan-") as place:
            _Look(request, found, device, Path(place), seconds if computes else None).look()
    return found


def _check_output(request: RunRequest) -> None:
    """Raises what `train` would if no run can be written at the output."""
    RunDirectory(request.path).require_place(request.replaces)
    path = request.path.absolute()
    require_writable(next(place for place in (path, *path.parents) if place.exists()))


def _check_evaluation(findings: Findings, config: SheepOpConfig) -> None:
    """Loads the evaluations of the run, except questions that are made of its text."""
    tasks = [task for task in config.evaluation.tasks if task != "cloze"]
    if tasks or config.evaluation.texts:
        without = config.replace(evaluation={**config.evaluation.model_dump(), "tasks": tasks})
        findings.attempt("evaluation", lambda: EvaluationSet.load(without, None))


@dataclass
class _Look:
    """Opens the run of `request` in the directory `place`, stage by stage, and writes into `found` what it learns.

    Steps are timed for `budget` seconds; None takes none.
    """

    request: RunRequest
    found: Preflight
    device: str
    place: Path
    budget: float | None

    def look(self) -> None:
        """Goes through the stages; one that fails ends the look, except where the next ones do not need it."""
        findings, request = self.found.findings, self.request
        completed = findings.attempt("configuration", request.completed)
        if completed is None:
            return
        began = time.monotonic()
        opened = self._opened(completed.config)
        self.found.besides["preparation"] = began - request.began + (time.monotonic() - began) / self.found.share
        if opened is not None:
            self.found.config = opened.config
            if self.budget is not None:
                self._measure(opened, completed)

    def _measure(self, task: Task, completed: Completed) -> None:
        """Counts memory and disk, and takes steps if they fit."""
        findings, request = self.found.findings, self.request
        if not task.held_out_tokens:
            findings.add(
                "validation",
                "No text is held out, so nothing will be validated and the best checkpoint is unknown. Raise "
                "data.validation_fraction.",
                ends=False,
            )
        training = findings.attempt("memory", lambda: self._in_memory(task))
        if training is None:
            return
        fits = task.with_config(task.config.replace(training=training.model_dump()))
        self._count_memory(fits)
        if not self._fits_memory():
            self._count_disk(fits, self._without_measuring(fits))
            return
        began = time.monotonic()
        settled = findings.attempt(
            "measuring",
            lambda: resolved(fits, completed.config, completed.chosen, request, self.device, StageTimes()),
        )
        if settled is None:
            return
        self.found.besides["preparation"] += time.monotonic() - began
        task, record = settled
        self.found.config = task.config
        self._count_disk(task, task.config.training)
        run = OpenRun(request, self.device, task.run, task, record)
        with _out_of_memory(findings):
            findings.attempt("first steps", lambda: self._take_steps(run))

    def _opened(self, config: SheepOpConfig) -> Task | None:
        """The task with its data, of which a sample was read if there are many."""
        findings, request = self.found.findings, self.request
        if request.fork is not None:
            fork = request.fork
            if findings.attempt("model", lambda: resolve_model_directory(fork, request.console)) is None:
                return None
        if not any((config.training.mixture, config.data.mix)):
            paths, self.found.share = sampled(config.data.paths, self.place / "sample")
            config = config.replace(data={**config.data.model_dump(), "paths": paths})
        if self.found.share < 1:
            self.found.assumed.append(
                f"{self.found.share:.1%} of the text was read, and the rest is taken to be alike."
            )
        run = RunDirectory.create(self.place / "run")
        origin = None if request.fork is None else Fork(request.fork)
        task = task_of(config, run, Console.silent(), origin)
        ranks, device = request.ranks, self.device
        for name, stage in {
            "data": lambda task: task.prepared(request.given, ranks.size),
            "tokenizer and model": lambda task: task.settled(),
            "rows and batch": lambda task: _with_rows(
                fitted(task, ranks, device, is_open=task.config.training.micro_batch_size is None)
            ),
        }.items():
            after = findings.attempt(name, _applied(stage, task))
            if after is None:
                return None
            task = after
        return task

    def _in_memory(self, task: Task) -> TrainingConfig:
        training = resolve_compile(task.config.training, self.device)
        chooses = task.origin is not None and not self.request.ranks.are_several
        return in_memory(task, training, self.request.given, self.device, chooses_rows=chooses)

    def _count_memory(self, task: Task) -> None:
        """Counts the memory of a step by part, and the largest micro-batch."""
        config, training, device = task.config, task.config.training, self.device
        length, process, before, program = task.batches().max_length, psutil.Process(), 0.0, 0.0
        if device != "cuda":  # whose memory is another than that of the process
            before = float(process.memory_info().rss)
            return_freed_memory()  # as the first step does
            program = float(process.memory_info().rss)
        free = torch.cuda.mem_get_info()[0] if device == "cuda" else available_memory()
        network, texts, precision = _network(task), task.texts_of_row, candidates(training.precision, device)[0]
        of_blocks = [_bytes(block, trained=True) for block in network.layers]
        adapters, frozen, update = None, 0.0, update_bytes(config.model, training.optimizer)
        if config.tuning.lora is not None:
            update = 0.0  # of few weights
            adapters, frozen = round(_bytes(network, trained=True) / _FLOAT32), _bytes(network, trained=False)
        cache = reference = 0.0
        if config.tuning.method in ("ppo", "grpo", "distill"):
            answers = min(_WRITTEN_TOGETHER, training.global_batch_size)
            cache = float(cache_bytes(config.model, answers, length))
            if isinstance(task, ExampleTask) and task.needs_reference and not _is_below_adapters(config):
                reference = _FLOAT32 * float(num_parameters(config.model))

        def parts(rows: int) -> MemoryParts:
            own = training.replace(micro_batch_size=rows)
            step = bytes_of_a_step(config, own, length, device, task.origin, texts)
            back = count_going_back(
                config.model, texts * rows, length, precision=precision, device=device, change=adapting(config)
            )
            return memory_parts(
                config.model, own, precision, step, Trained(of_blocks, back, update, adapters, frozen),
                program=program, preparation=before, cache=cache, reference=reference,
            )  # fmt: skip

        batch = training.global_batch_size
        self.found.memory = parts(training.micro_batch_size or batch)
        self.found.usable = float(free)
        sizes_of_rows = [rows for rows in range(1, batch + 1) if batch % rows == 0]
        self.found.largest_rows = largest_that_fits(sizes_of_rows, lambda rows: parts(rows).tensors, free)

    def _fits_memory(self) -> bool:
        """Whether steps fit into the memory that is free; says from which moment on they would not."""
        memory, usable, findings = self.found.memory, self.found.usable, self.found.findings
        assert memory is not None and usable is not None
        if memory.tensors <= usable:
            return True
        first = memory.tensors - memory.moments
        when = (
            f"Its first backward pass fits with {data_size(first)}, but the optimizer's moments, which exist from the "
            f"first update on, take {data_size(memory.moments)} more"
            if first <= usable
            else f"It needs {data_size(memory.tensors)}"
        )
        rows = self.found.largest_rows
        advice = "a smaller model (model.d_model, model.num_layers), tuning.lora for a finished one"
        if rows is not None:
            advice = f"training.micro_batch_size={rows}"
        findings.add(
            "memory",
            f"A step does not fit into the {data_size(usable)} of memory that are free. {when}. Use {advice}, or "
            "training.activation_checkpointing=full.",
        )
        return False

    def _without_measuring(self, task: Task) -> TrainingConfig:
        """The training settings with the number of steps, if that needs no measuring."""
        training, seq_len = task.config.training.replace(max_minutes=None), task.batches().tokens_per_sample
        return resolve_training(
            training.replace(precision=candidates(training.precision, self.device)[0]), None,
            device=self.device, num_samples=task.schedule.num_samples, seq_len=seq_len,
            validation_tokens=task.held_out_tokens,
        )  # fmt: skip

    def _count_disk(self, task: Task, training: TrainingConfig) -> None:
        """Counts the files of the run, and says if they do not fit."""
        memory, settings, findings = self.found.memory, training.resolved(), self.found.findings
        assert memory is not None
        own = self.request.settings.training
        steps = settings.total_steps
        if own.max_steps is None and own.max_minutes is None:
            steps = round(steps / self.found.share)
        self.found.steps = steps
        saved = memory.moments + (memory.gradients if task.config.tuning.lora is not None else memory.weights)
        if training.ema_decay is not None:
            saved += memory.gradients
        interval = settings.checkpoint_interval
        if own.checkpoint_interval is None:
            interval = max(1, round(steps / 10))
        count = most_checkpoints(steps, interval, training.keep_checkpoints, milestones=training.keep_milestones)
        data = directory_bytes(task.run.path) / self.found.share
        disk = self.found.disk = Disk(free_bytes(self.request.path), data, saved, count)
        if disk.fits:
            return
        room = max(0, int((disk.free - disk.data) // disk.checkpoint))
        advice = f"Lower training.keep_checkpoints (now {training.keep_checkpoints})"
        if training.keep_milestones:
            advice += ", set training.keep_milestones=false"
        findings.add(
            "disk",
            f"The run takes up to {data_size(disk.needed)}: {data_size(disk.data)} of data and {count:,} checkpoints "
            f"of {data_size(disk.checkpoint)}. The disk of {self.request.path} has {data_size(disk.free)} left, which "
            f"hold {room:,} checkpoints. {advice}, or give an --output on a larger disk.",
        )

    def _take_steps(self, run: OpenRun) -> None:
        """Takes two steps at the largest shape, and times those of the run and all else."""
        found = self.found
        found.steps_taken = first = FirstSteps.of(run, found.steps, self.budget or 0.0)
        if not first.is_finite:
            found.findings.add(
                "first steps",
                "The loss or its gradient is not finite in the first steps. Lower training.learning_rate, and use "
                "training.precision=fp32 or bf16 instead of fp16.",
            )
            return
        assert found.memory is not None
        found.memory = replace(found.memory, report=float(first.drawing))
        self._count_besides(run, first)

    def _count_besides(self, run: OpenRun, first: FirstSteps) -> None:
        """Counts the seconds of all that the run does besides its steps."""
        found, settings, held_out = self.found, run.config.training, run.task.held_out()
        validations = self._times("eval_interval", 10, settings)
        evaluations, saves = (
            validations + (run.task.origin is not None),
            self._times("checkpoint_interval", 10, settings),
        )
        if held_out is not None:
            rows = whole = held_out.num_samples / found.share
            if settings.eval_tokens is not None:
                rows = min(whole, settings.eval_tokens / held_out.tokens_per_sample)
            found.besides |= {"validations": first.scoring * rows * evaluations, "score": first.scoring * whole}
            saves = max(saves, validations)  # the best one is kept
        found.besides |= {
            "network": first.beginning,
            "checkpoints": first.checkpoint * saves,
            "samples": first.samples * (1 + self._times("sample_interval", 5, settings)),
            "evaluations": first.evaluations * evaluations,
            "report": first.report,
        }

    def _times(self, name: str, default: int, settings: TrainingConfig) -> int:
        """How often the run does what it does at this interval, by default so often."""
        interval, steps = getattr(settings, name), self.found.steps
        if getattr(self.request.settings.training, name) is None:
            interval = max(1, round(steps / default))
        return math.ceil(steps / interval)


def _network(task: Task) -> Transformer:
    """The network of a run: with LoRA with its weights, which may be integers, else without any."""
    if task.config.tuning.lora is not None:
        return task.network("cpu")
    with torch.device("meta"):
        return blank_model(task.config.model)


def _bytes(part: nn.Module, *, trained: bool) -> float:
    """The bytes of the weights of a part that are trained, or of the others."""
    return float(sum(each.nbytes for each in part.parameters() if each.requires_grad == trained))


def _is_below_adapters(config: SheepOpConfig) -> bool:
    """Whether the model without its adapters is the reference."""
    return config.tuning.lora is not None and config.tuning.reference is None


def _applied(stage: Callable[[Task], Task], task: Task) -> Callable[[], Task]:
    return lambda: stage(task)


def _with_rows(task: Task) -> Task:
    """Returns the task after it has made its rows and its schedule, which raises if they cannot be made."""
    task.batches()
    _ = task.schedule
    return task


@contextmanager
def _out_of_memory(findings: Findings) -> Iterator[None]:
    """Turns a failed allocation in the block into a finding."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError, RuntimeError) as error:
        if isinstance(error, SheepOpError) or not (
            isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate" in str(error)
        ):
            raise
        findings.add(
            "memory",
            "Memory ran out in the first steps. Lower training.micro_batch_size, or use "
            "training.activation_checkpointing=full.",
        )
