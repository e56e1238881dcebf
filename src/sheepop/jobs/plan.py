"""Plans a run before it starts: on this machine by looking at it, on another one by counts."""

from __future__ import annotations

import torch

from sheepop.core.budget import Budget
from sheepop.core.errors import UsageError
from sheepop.core.facts import counted
from sheepop.core.processor_time import QUIET
from sheepop.data import Corpus, is_corpus
from sheepop.jobs.config import SheepOpConfig
from sheepop.jobs.preflight import Preflight, preflight
from sheepop.jobs.run.plan import assumed_training, new_settings, state_numbers
from sheepop.jobs.run.request import RunRequest
from sheepop.jobs.run.resolve import check_layout, shared_steps
from sheepop.model import blank_model, num_parameters
from sheepop.model.accounting.cost import step_flops
from sheepop.parallel.ranks import Ranks
from sheepop.plan.findings import Findings
from sheepop.plan.layout import EFFICIENCY, USABLE, Laid, Work, lay_out
from sheepop.plan.machine import MachineConfig
from sheepop.plan.run_plan import RunPlan
from sheepop.plan.timing import Course, mean_interval
from sheepop.train import build_optimizers
from sheepop.train.budget import most_steps

_WRITES = ("ppo", "grpo", "distill")


def plan_a_run(
    request: RunRequest,
    *,
    budget: Budget | None = None,
    machine: MachineConfig | None = None,
    price: float | None = None,
    seconds: float = 15.0,
) -> RunPlan:
    """Plans the requested new run, on this machine or on `machine`; it starts nothing and writes nothing that stays.

    Steps are timed for `seconds`. `price` is that of the machine in US dollars an hour. What would end the run is among
    the findings. Raises `ConfigError` for settings that are none, and `UsageError` for a budget in dollars without a
    price.
    """
    usd = price if price is not None or machine is None else machine.usd_per_hour
    if budget is not None and budget.kind == "usd" and usd is None:
        raise UsageError(
            f"--budget {budget.words} needs the price of the machine: give --price USD, for an hour, or "
            "usd_per_hour in the file of the machine."
        )
    if request.resumes:
        raise UsageError("A plan is for a new run. Leave out the run to resume.")
    _ = request.settings  # which raises for settings that are none
    if machine is None:
        return _here(preflight(request, seconds), budget, usd)
    return _elsewhere(request, machine, budget, usd)


def _here(found: Preflight, budget: Budget | None, usd: float | None) -> RunPlan:
    """The plan for this machine."""
    config, course, first = found.config, None, found.steps_taken
    if first is not None and len(first.seconds) > 1:
        step = mean_interval(first.seconds)
        course = Course(found.steps, step, found.besides, first.tokens, first.flops, usd, first.quiet)
        if config is not None and config.tuning.method in _WRITES:
            found.assumed.append("Answers stay as long as those of the model before its first step.")
        if first.quiet < QUIET:
            found.assumed.append(
                f"The machine stays as busy as now: the first steps got {first.quiet:.0%} of their processor time. The "
                "lower bound is for a machine without other programs."
            )
    if usd is not None:
        found.assumed.append(f"An hour of this machine costs {usd:,.2f} USD.")
    rows = None
    if config is not None:
        rows = config.training.micro_batch_size or config.training.global_batch_size
    return RunPlan(
        machine="this machine",
        parameters=None if config is None or config.model.vocab_size is None else num_parameters(config.model),
        findings=found.findings.found,
        memory=found.memory,
        usable=found.usable,
        tensors=None if first is None else first.tensors,
        process=None if first is None else first.process,
        rows=rows,
        largest_rows=found.largest_rows,
        disk=found.disk,
        course=course,
        budget=budget,
        assumed=found.assumed,
    )


def _elsewhere(request: RunRequest, machine: MachineConfig, budget: Budget | None, usd: float | None) -> RunPlan:
    """The plan for a machine that is not here."""
    findings, speed = Findings(), machine.devices * machine.teraflops * 1e12 * EFFICIENCY.middle
    found = findings.attempt("configuration", lambda: new_settings(request, speed))
    if found is None:
        return RunPlan(machine.name, None, findings.found, budget=budget)
    config, assumed = found
    if config.training.precision == "fp8" and not machine.float8:
        findings.add(
            "precision",
            f"training.precision = fp8 needs GPUs that compute in float8, and {machine.name} does not. Use bf16.",
        )
    is_open = config.training.micro_batch_size is None
    training, more = assumed_training(config.training, on_gpu=True)
    whole = config.replace(training=training.model_dump())
    ranks, chooses = Ranks(0, machine.devices), "parallel" not in request.given
    if not chooses:
        findings.passes("layout", lambda: check_layout(whole, ranks))
        if not findings.end_the_run:
            findings.attempt("batch", lambda: shared_steps(whole, ranks, is_open=is_open))
    work = _work(whole, rows=None if is_open else config.training.micro_batch_size)
    layouts: list[Laid] = []
    if not findings.end_the_run:
        layouts = findings.attempt("layout", lambda: lay_out(work, machine, None if chooses else config.parallel)) or []
        if not layouts and not findings.end_the_run:
            findings.add(*_why_none(work, machine))
    return RunPlan(
        machine=machine.name,
        parameters=num_parameters(whole.model),
        findings=findings.found,
        usable=USABLE * machine.memory_gb * 1e9,
        course=_course(config, work, layouts, usd),
        budget=budget,
        layouts=layouts,
        assumed=[*assumed, *more, *_assumptions(config, machine, usd)],
    )


def _work(config: SheepOpConfig, rows: int | None) -> Work:
    """A step of `config` to lay out."""
    training, num_tokens = config.training, config.data.max_length or config.model.max_seq_len
    with torch.device("meta"):
        optimizers = build_optimizers(blank_model(config.model), training)
    batch = training.global_batch_size
    tokens, trained = batch * num_tokens, None if config.tuning.lora is None else 0
    mode = training.activation_checkpointing
    return Work(
        model=config.model,
        batch=batch,
        num_tokens=num_tokens,
        precision=training.precision,
        device="cuda" if torch.cuda.is_available() else "cpu",
        flops=step_flops(config.model, num_tokens, tokens, tokens, trained),
        state=state_numbers(training, optimizers),
        rows=rows,
        recomputed=mode if mode in ("selective", "full") else None,
    )


def _why_none(work: Work, machine: MachineConfig) -> tuple[str, str]:
    """The check and the words for a machine without a layout."""
    most = max(count for count in range(1, work.batch + 1) if work.batch % count == 0 and machine.devices % count == 0)
    if most < machine.devices // (8 * 16):
        return "batch", (
            f"A step has {work.batch:,} rows (training.global_batch_size), which {machine.devices:,} GPUs cannot share "
            f"evenly. Use a multiple of {machine.devices:,}, or of a divisor that leaves several GPUs for each row."
        )
    return "memory", (
        f"No layout of {machine.name} fits {USABLE:.0%} of {machine.memory_gb:g} GB for each GPU and shares "
        f"{work.batch:,} rows (training.global_batch_size) evenly. Use more GPUs, a smaller model, shorter rows, or a "
        f"multiple of {machine.devices:,} rows."
    )


def _course(config: SheepOpConfig, work: Work, layouts: list[Laid], usd: float | None) -> Course | None:
    """The time of the run with the fastest layout; None without one, and for methods that write answers."""
    if not layouts or config.tuning.method in _WRITES:
        return None
    corpora = [path for path in config.data.paths if is_corpus(path)]
    samples = Corpus.open(corpora[0], verify=False).train.num_tokens // work.num_tokens if corpora else None
    training = config.training
    if samples is None:
        training = training.replace(max_epochs=None)
    steps = most_steps(training, samples or 1, work.num_tokens)
    if steps is None and samples is not None:
        steps = training.batch_sizes().steps_to(samples)
    return Course(steps or 0, layouts[0].seconds, {}, work.batch * work.num_tokens, work.flops, usd)


def _assumptions(config: SheepOpConfig, machine: MachineConfig, usd: float | None) -> list[str]:
    found = [
        f"{counted(machine.devices, 'GPU')} with {machine.memory_gb:g} GB, {machine.teraflops:g} TFLOP/s, "
        f"{machine.link_gb_per_second:g} GB/s to {machine.devices_per_node - 1} others of a node and "
        f"{machine.network_gb_per_second:g} GB/s to other nodes.",
        f"A step reaches {EFFICIENCY.middle:.0%} of the nominal rate ({EFFICIENCY.low:.0%} to {EFFICIENCY.high:.0%}); "
        "weights and gradients are sent while it computes, and other messages wait. The start of kernels, for which "
        "small networks wait, is not counted.",
        f"Tensors may take {USABLE:.0%} of a GPU's memory.",
        "The text and the disk of that machine were not looked at.",
    ]
    if not torch.cuda.is_available():
        found.append("Activations are counted with the kernels of a CPU.")
    if usd is not None:
        found.append(f"An hour of all GPUs costs {usd:,.2f} USD.")
    if config.tuning.lora is not None:
        found.append("Memory is counted as if all weights were trained, which is more than LoRA needs.")
    if config.tuning.method in _WRITES:
        found.append(
            f"tuning.method = {config.tuning.method} writes answers between steps, whose time is not predicted."
        )
    return found
