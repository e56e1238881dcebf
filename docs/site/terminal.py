"""Draws what a command shows on a terminal of 100 columns, from a real run of it in tmux: docs/images/terminal.svg.

Example:  python docs/site/terminal.py sheepop quickstart
"""

from __future__ import annotations

import io
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

TARGET = Path(__file__).parents[1] / "images" / "terminal.svg"
COLUMNS, LINES = 100, 33


def main() -> None:
    """Runs the command to its end, and draws what then stands on the screen."""
    command = shlex.join(sys.argv[1:])
    with tempfile.TemporaryDirectory() as place:
        tmux = ["tmux", "-u", "-S", f"{place}/tmux", "-f", "/dev/null"]
        done = Path(place) / "done"
        line = f"{command}; touch {done}; sleep 60"
        subprocess.run([*tmux, "new-session", "-d", "-x", str(COLUMNS), "-y", str(LINES), line], check=True)
        while not done.exists():
            time.sleep(0.5)
        shown = subprocess.run([*tmux, "capture-pane", "-e", "-p"], capture_output=True, text=True, check=True)
        subprocess.run([*tmux, "kill-server"], check=True)
    draw(f"$ {command}\n{shown.stdout.rstrip()}")


def draw(screen: str) -> None:
    """Writes the picture; its letters are those of the reader's machine, because a picture may load nothing."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(screen))
    svg = re.sub(r"@font-face \{.*?\}\s*", "", console.export_svg(title="sheepop"), flags=re.DOTALL)
    TARGET.write_text(svg.replace("Fira Code", "ui-monospace"), encoding="utf-8")


if __name__ == "__main__":
    main()
