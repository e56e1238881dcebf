"""What the benchmarks share: options, one table on the terminal, one JSON file with the machine beside the numbers."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from record import add_json_option, write_record
from sheepop.core.console import Console
from sheepop.jobs.bench import bench, render_bench


def add_options(parser: argparse.ArgumentParser, presets: Sequence[str]) -> None:
    """What every benchmark of presets can be told."""
    parser.add_argument("--presets", nargs="+", default=list(presets), help="model presets to measure")
    parser.add_argument("--seconds", type=float, default=10.0, help="time for each measurement")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or mps")
    add_json_option(parser)


def run(name: str, options: argparse.Namespace) -> None:
    """Runs the benchmark `name` for every preset; prints the tables and writes the JSON that was asked for."""
    results = []
    for preset in options.presets:
        results.append(
            bench(name, preset=preset, seconds=options.seconds, device=options.device, console=Console(quiet=True))
        )
        print(render_bench(results[-1]), end="\n\n")
    write_record(options.json, {"results": results})
