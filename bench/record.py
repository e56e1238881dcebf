"""What a benchmark leaves behind: one JSON file, with the machine beside the numbers."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sheepop.core.machine import describe_machine


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """Lets the user ask for the file."""
    parser.add_argument("--json", type=Path, help="file to write the numbers to")


def write_record(path: Path | None, numbers: Mapping[str, Any]) -> None:
    """Writes the numbers when a file was asked for."""
    if path is not None:
        path.write_text(json.dumps({"machine": describe_machine().to_dict(), **numbers}, indent=2) + "\n")
