"""Machines that a run can be planned for without having them: a table of usual ones, and files that describe others."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from sheepop.core.config import Config, read_config_file, validate
from sheepop.core.errors import ConfigError, UsageError
from sheepop.core.speed import nominal_teraflops

THIS = "this"
_NAMED = re.compile(r"(?P<kind>[a-z0-9]+)x(?P<count>[1-9][0-9]{0,5})", re.ASCII)
_NATIVE_FLOAT8 = {"h100", "h200"}


class MachineConfig(Config):
    """A machine of equal accelerators, as a file describes it."""

    name: str = "a machine"
    """What to call the machine."""
    devices: int = Field(ge=1, strict=True)
    """Number of accelerators in all."""
    devices_per_node: int = Field(8, ge=1, strict=True)
    """Accelerators that share the fast link."""
    memory_gb: float = Field(gt=0, lt=1e6, allow_inf_nan=False)
    """Memory of an accelerator, in 10^9 bytes."""
    teraflops: float = Field(gt=0, lt=1e6, allow_inf_nan=False)
    """Nominal rate of an accelerator in bfloat16, in 10^12 operations per second."""
    link_gb_per_second: float = Field(gt=0, lt=1e6, allow_inf_nan=False)
    """What an accelerator sends to others of its node, in 10^9 bytes per second."""
    network_gb_per_second: float = Field(gt=0, lt=1e6, allow_inf_nan=False)
    """What an accelerator sends to other nodes, in 10^9 bytes per second."""
    float8: bool = False
    """Whether the accelerators compute in float8."""
    usd_per_hour: float | None = Field(None, gt=0, lt=1e9, allow_inf_nan=False)
    """Price of the whole machine for an hour, in US dollars."""


@dataclass(frozen=True)
class _Kind:
    """An accelerator: its memory in GB, what it sends in GB/s within and between nodes, and a price per hour in USD."""

    memory: float
    link: float
    network: float
    usd: float


# Memory and NVLink (one direction) from NVIDIA's data sheets. The network is an adapter of 400 or 200 Gb/s for each
# GPU, as in the DGX systems. The price is a round one for a rented GPU: an assumption that a plan states.
_KINDS = {
    "a100": _Kind(80, 300, 25, 1.6),
    "h100": _Kind(80, 450, 50, 2.5),
    "h200": _Kind(141, 450, 50, 3.5),
}


def find_machine(text: str) -> MachineConfig | None:
    """The machine with this name, such as ``h100x8``, or of this YAML file; None for ``this``.

    Raises `UsageError` for an unknown name, and `ConfigError` for a file that describes no machine.
    """
    if text == THIS:
        return None
    if Path(text).suffix.lower() in (".yaml", ".yml", ".json"):
        try:
            return validate(MachineConfig, read_config_file(text))
        except ConfigError as error:
            raise ConfigError(f"--machine {text}: {error}") from None
    match = _NAMED.fullmatch(text.lower())
    kind = None if match is None else _KINDS.get(match["kind"])
    if match is None or kind is None:
        near = difflib.get_close_matches(text.lower(), [f"{name}x8" for name in _KINDS], n=1)
        guess = f" Did you mean {near[0]}?" if near else ""
        raise UsageError(
            f"--machine {text!r} is unknown.{guess} Known are this, {', '.join(f'{name}xN' for name in _KINDS)} for N "
            "GPUs, and a YAML file with devices, memory_gb, teraflops, link_gb_per_second and network_gb_per_second."
        )
    count, rates = int(match["count"]), nominal_teraflops(match["kind"].upper())
    assert rates is not None
    return MachineConfig(
        name=f"{count:,} x {match['kind'].upper()}",
        devices=count,
        memory_gb=kind.memory,
        teraflops=rates[0],
        link_gb_per_second=kind.link,
        network_gb_per_second=kind.network,
        float8=match["kind"] in _NATIVE_FLOAT8,
        usd_per_hour=round(count * kind.usd, 2),
    )
