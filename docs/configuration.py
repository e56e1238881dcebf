"""Writes the tables of configuration.md anew from the fields of the configuration: python docs/configuration.py"""

from __future__ import annotations

import re
from pathlib import Path

from sheepop.core.config import value_text
from sheepop.jobs.config_help import Setting, all_settings

PAGE = Path(__file__).with_suffix(".md")
TOP = "Top level"


def with_tables(page: str) -> str:
    """The text of the page with the first table below the heading of every section made from its fields."""
    tables: dict[str, list[str]] = {}
    for setting in all_settings():
        heading = f"`{setting.section}`" if setting.section else TOP
        head = ["| key | takes | default | meaning |", "|---|---|---|---|"]
        tables.setdefault(heading, head).append(_row(setting))
    for heading, rows in tables.items():
        below = re.escape(f"\n## {heading}\n") + r"(?:(?!\n## |\n\|).)*\n"
        page, count = re.subn(
            rf"({below})(?:\|[^\n]*\n)+", lambda found, rows=rows: found[1] + _lines(rows), page, flags=re.S
        )
        if count != 1:
            raise ValueError(f"{PAGE.name} needs one heading '## {heading}' with a table below it, and has {count}")
    return page


def _lines(rows: list[str]) -> str:
    return "".join(f"{row}\n" for row in rows)


def _row(setting: Setting) -> str:
    takes, default = setting.type, f"`{value_text(setting.default)}`"
    if setting.is_section or setting.entries:
        takes = re.sub("sections?", lambda word: f"[{word[0]}](#{setting.key.replace('.', '')})", takes)
    if setting.is_section or setting.required:
        default = "required" if setting.required else ""
    resume = " *May change on resume.*" if setting.may_change_on_resume and not setting.is_section else ""
    return f"| `{setting.name}` | {takes} | {default} | {setting.meaning}{resume} |"


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
