"""Checks what this machine has for SheepOp, what is missing, and what each missing piece would add."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
import textwrap
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from sheepop.core.facts import counted, plural
from sheepop.core.machine import LIBRARIES, Machine, describe_machine, has_python_headers
from sheepop.core.speed import measure_matrix_peak
from sheepop.report import flops

Status = Literal["ok", "warning", "missing"]

GB = 1e9
_QUICKSTART_MEMORY = 4 * GB
_QUICKSTART_DISK = 2 * GB
_COMPILER_REMEDY = "Debian and Ubuntu: apt install g++. macOS: xcode-select --install."
_MARKS: dict[Status, str] = {"ok": "ok", "warning": "warn", "missing": "none"}
# Optional packages, each with its extra and what does not work without it.
_OPTIONAL_PACKAGES = {
    "magika": ("data", "file types are recognised only by names and first bytes"),
    "pypdfium2": ("data", "PDF files are left out of a corpus"),
    "trafilatura": ("data", "web pages and books are left out of a corpus"),
    "openpyxl": ("data", "spreadsheets are left out of a corpus"),
    "office-oxide": ("data", "doc files are left out of a corpus"),
    "pyarrow": ("data", "Parquet and Arrow files are left out of a corpus"),
    "SQLAlchemy": ("data", "databases cannot be read with --query"),
    "rapidocr": ("ocr", "images and scanned pages are left out of a corpus"),
    "fastapi": ("serve", "sheepop serve cannot run"),
    "uvicorn": ("serve", "sheepop serve cannot run"),
    "prometheus-client": ("serve", "sheepop serve cannot run"),
    "lm-eval": ("eval", "tasks of lm-eval cannot be run; those of SheepOp can"),
    "llguidance": ("serve", "output cannot be constrained to a JSON schema, regular expression, choice or grammar"),
    "ray": ("cluster", "corpora are built, and models served, on one machine only"),
    "transformers": ("dev", "the parity tests against Hugging Face's models are skipped"),
    "pytest": ("dev", "the tests cannot run"),
    "ruff": ("dev", "make lint cannot run"),
}


@dataclass(frozen=True)
class Check:
    """The result of one check. `consequence` and `remedy` are empty when all is well."""

    name: str
    status: Status
    value: str
    consequence: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class DoctorReport:
    """All checks, the machine, and its measured matrix peaks: FLOP/s by ``device dtype``."""

    checks: tuple[Check, ...]
    machine: Machine
    matrix_peaks: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data."""
        return asdict(self)


def doctor(directory: str | Path = ".") -> DoctorReport:
    """Checks this machine and measures its matrix products, about half a second each.

    `directory` is where runs would be written.
    """
    machine = describe_machine(directory)
    peaks = measure_peaks(machine)
    checks = (
        *(check(machine) for check in _MACHINE_CHECKS),
        check_headers(has_python_headers()),
        check_torch(),
        check_kernels(),
        check_bfloat16(peaks),
        check_sandbox(),
        *(_check_package(name, "parts of SheepOp do not work", "pip install sheepop") for name in LIBRARIES),
        *(
            _check_package(name, loss, f'pip install "sheepop[{extra}]"')
            for name, (extra, loss) in _OPTIONAL_PACKAGES.items()
        ),
    )
    return DoctorReport(checks, machine, peaks)


def measure_peaks(machine: Machine) -> dict[str, float]:
    """FLOP/s of matrix products in float32 and bfloat16 on the CPU and on each kind of accelerator."""
    import torch

    devices = dict.fromkeys(["cpu", *(accelerator.kind for accelerator in machine.accelerators)])
    return {
        f"{device} {str(dtype).removeprefix('torch.')}": measure_matrix_peak(dtype, device)
        for device in devices
        for dtype in (torch.float32, torch.bfloat16)
    }


def render_doctor(report: DoctorReport) -> str:
    """The report as text: status, name and value of each check; below them the consequence and the remedy."""
    installed = [check for check in report.checks if check.name in LIBRARIES and check.status == "ok"]
    shown = [check for check in report.checks if check not in installed]
    shown.append(Check("Libraries", "ok", ", ".join(f"{check.name} {check.value}" for check in installed)))
    shown += [Check(f"Matrix peak, {name}", "ok", flops(rate)) for name, rate in report.matrix_peaks.items()]
    width = max(len(check.name) for check in shown)
    # Hyphens do not break lines, so that names and commands can be searched for and copied.
    wrap = partial(textwrap.wrap, width=110, break_on_hyphens=False, break_long_words=False)
    lines: list[str] = []
    for check in shown:
        start = f"{_MARKS[check.status]:<5} {check.name:<{width}}  "
        indent = " " * len(start)
        lines += wrap(check.value, initial_indent=start, subsequent_indent=indent)
        for text in (check.consequence, check.remedy):
            lines += wrap(text, initial_indent=indent, subsequent_indent=indent)
    wanting = sum(check.status != "ok" for check in report.checks)
    verb = "needs" if wanting == 1 else "need"
    lines += [
        "",
        f"{wanting} of {len(report.checks)} checks {verb} attention." if wanting else "Everything is in place.",
    ]
    return "\n".join(lines)


def check_bfloat16(peaks: dict[str, float]) -> Check:
    """Whether bfloat16 is faster than float32 on the best device measured."""
    device = next((name for name in ("cuda", "mps") if f"{name} bfloat16" in peaks), "cpu")
    ratio = peaks[f"{device} bfloat16"] / peaks[f"{device} float32"]
    value = f"{ratio:.2g} times the speed of float32 on {device}"
    if ratio > 1:
        return Check("bfloat16", "ok", value)
    consequence = "precision: auto trains in float32 here; processors with AMX or AVX-512 BF16, and GPUs, are faster."
    return Check("bfloat16", "missing", value, consequence)


def check_sandbox() -> Check:
    """Whether generated programs can run in isolation."""
    from sheepop.core.sandbox import IsolationError, Sandbox

    try:
        Sandbox.find()
        return Check("Sandbox", "ok", "generated programs run in isolation, with bubblewrap")
    except IsolationError as error:
        return Check("Sandbox", "missing", "none", "sheepop eval code does not work here.", str(error))


def check_python(machine: Machine) -> Check:
    """The Python interpreter."""
    environment = "" if sys.prefix != sys.base_prefix else ", not in a virtual environment"
    return Check("Python", "ok", f"{machine.python}{environment}")


def check_platform(machine: Machine) -> Check:
    """The operating system; SheepOp supports Linux and macOS."""
    if machine.platform.startswith("Windows"):
        return Check("Platform", "warning", machine.platform, "Native Windows is not supported.", "Use WSL.")
    return Check("Platform", "ok", machine.platform)


def check_processor(machine: Machine) -> Check:
    """The processor, the cores that this process may use, and the matrix and vector units."""
    value = f"{machine.processor or 'unknown'}, {machine.cores:g} usable {plural(machine.cores, 'core')}"
    if machine.matrix_units:
        return Check("Processor", "ok", f"{value}, {' '.join(machine.matrix_units)}")
    return Check("Processor", "warning", f"{value}, no vector unit found", "Training on the CPU will be slow.")


def check_memory(machine: Machine) -> Check:
    """Main memory, within the limit of a container."""
    value = f"{machine.memory / GB:.1f} GB, {machine.memory_available / GB:.1f} GB free"
    if machine.memory_available >= _QUICKSTART_MEMORY:
        return Check("Memory", "ok", value)
    return Check(
        "Memory",
        "warning",
        value,
        "The quickstart uses up to 4 GB and may be killed by the system.",
        "Close other programs, or choose a smaller model and micro-batch.",
    )


def check_disk(machine: Machine) -> Check:
    """Free space where runs are written."""
    value = f"{machine.disk_free / GB:.1f} GB free"
    if machine.disk_free >= _QUICKSTART_DISK:
        return Check("Disk", "ok", value)
    remedy = "Free some space, or write to another disk with --output."
    return Check("Disk", "warning", value, "A run with its checkpoints may not fit.", remedy)


def check_accelerator(machine: Machine) -> Check:
    """GPUs that torch can use."""
    if not machine.accelerators:
        return Check(
            "GPU",
            "missing",
            "none that torch can use",
            "Training and generation run on the CPU; a GPU is 10 to 1,000 times faster for larger models.",
            "If there is a GPU, install its driver and a torch build for it (make TORCH_INDEX=URL ...).",
        )
    names = [
        f"{card.name} ({card.kind}{'' if card.memory is None else f', {card.memory / GB:.0f} GB'})"
        for card in machine.accelerators
    ]
    return Check("GPU", "ok", ", ".join(names))


def check_compiler(machine: Machine) -> Check:
    """The C++ compiler, which torch.compile and SheepOp's own kernels need."""
    if machine.compiler:
        return Check("C++ compiler", "ok", machine.compiler)
    return Check(
        "C++ compiler",
        "missing",
        "none",
        "On the CPU, training is not compiled (training.compile has no effect), which is slower. SheepOp's own kernels "
        "need it where the package has none for the machine.",
        _COMPILER_REMEDY,
    )


_MACHINE_CHECKS: tuple[Callable[[Machine], Check], ...] = (
    check_python,
    check_platform,
    check_processor,
    check_memory,
    check_disk,
    check_accelerator,
    check_compiler,
)


def check_headers(present: bool) -> Check:
    """Python's C headers, which code generated by torch.compile includes."""
    if present:
        return Check("Python headers", "ok", "Python.h found")
    return Check(
        "Python headers",
        "missing",
        "no Python.h",
        "torch.compile cannot build its code for the CPU.",
        "Debian and Ubuntu: apt install python3-dev.",
    )


def check_torch() -> Check:
    """The instructions that PyTorch's own CPU kernels use, and its threads."""
    import torch

    capability = torch.backends.cpu.get_cpu_capability()
    value = f"{torch.__version__}, CPU kernels for {capability}, {counted(torch.get_num_threads(), 'thread')}"
    # Elsewhere than on x86 the default is what every processor has, such as NEON on ARM.
    if capability in ("DEFAULT", "NO AVX") and platform.machine().lower() in ("x86_64", "amd64"):
        consequence = "torch uses its slowest kernels here."
        remedy = "Unset ATEN_CPU_CAPABILITY if it is set; otherwise a newer processor is needed."
        return Check("torch kernels", "warning", value, consequence, remedy)
    return Check("torch kernels", "ok", value)


def check_kernels() -> Check:
    """Whether SheepOp's own CPU kernels are there; compiles them if they are missing."""
    from sheepop.adapt.native_products import formats_with_rounding
    from sheepop.adapt.stored_weight import kernels_here

    found = kernels_here()
    if found.library is not None:
        formats = ", ".join(formats_with_rounding()) or "no format"
        return Check("native kernels", "ok", f"{found.words}; activations can be rounded for {formats}")
    consequence = "Text is generated on the CPU by PyTorch's kernels, slower, and many times slower with int8 and int4."
    return Check("native kernels", "missing", f"none: {found.words}", consequence, _COMPILER_REMEDY)


def _check_package(name: str, consequence: str, remedy: str) -> Check:
    try:
        return Check(name, "ok", importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Check(name, "missing", "not installed", f"Without it, {consequence}.", remedy)
