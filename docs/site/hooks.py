"""What the site has beside the pages of docs/: scripts that draw, the icon, and each file that a page links to."""

from __future__ import annotations

import ast
import html
import json
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "src" / "sheepop" / "serve" / "page"
# What docs/site/assets.py fetches, and the list of it. The site's KaTeX is that of the page.
ASSETS = {
    ROOT / "build" / "site-assets": Path(__file__).with_name("packages.json"),
    PAGE / "vendor": PAGE / "vendor" / "packages.json",
}
SOURCE = "source/{}.html"
# A link out of docs/, after a label that may name a function or a test.
_LINK = re.compile(r"(\[`[^`\]]*?(?:::([\w.]+))?`\]|\])\((\.\./[^)\s#]+)(?:#[^)\s]*)?\)")
_PLAIN_LINK = re.compile(r"\[([\w-]+\.md)\](?=\(\1[)#])")
_FENCE = re.compile(r"(^ *```.*?^ *```$)", re.MULTILINE | re.DOTALL)
_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{name}</title>
<style>:root {{ color-scheme: light dark }} pre {{ font: 13px/1.45 ui-monospace, monospace }}
:target {{ background: #0072b255 }} i {{ opacity: .45; font-style: normal; user-select: none }}
body {{ font-family: system-ui, sans-serif }}</style>
<h1>{name}</h1>
<pre>{lines}</pre>
"""


def on_files(files: Files, config: MkDocsConfig, **_: Any) -> Files:
    """Adds to the site what no page of docs/ is."""
    for folder, listed in ASSETS.items():
        packages = json.loads(listed.read_text(encoding="utf-8")).values()
        for name, _ in (file for about in packages for file in about["files"].values()):
            if folder != PAGE / "vendor" or name.startswith("katex/"):
                files.append(File.generated(config, f"assets/{name}", abs_src_path=str(folder / name)))
    for name in ("site.css", "formulas.js"):
        files.append(File.generated(config, f"assets/{name}", abs_src_path=str(Path(__file__).with_name(name))))
    icon = (PAGE / "icon.svg").read_text(encoding="utf-8")
    files.append(File.generated(config, "assets/icon.svg", content=icon))
    files.append(File.generated(config, "assets/logo.svg", content=icon.replace("#0072b2", "#fff")))
    linked = {match[3] for page in files.documentation_pages() for match in _LINK.finditer(_text(page))}
    for place in sorted({(ROOT / "docs" / link).resolve() for link in linked}):
        name = place.relative_to(ROOT).as_posix()
        files.append(File.generated(config, SOURCE.format(name), content=_source_page(place, name)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Turns links out of docs/ into links to those files on the site, and GitHub's formulas into plain ones.

    A link that is called like the file is called like the page.
    """
    parts = _FENCE.split(markdown)
    for number in range(0, len(parts), 2):
        plain = re.sub(r"\$`([^`]+)`\$", r"$\1$", parts[number])
        parts[number] = _PLAIN_LINK.sub(_titled, _LINK.sub(_to_source, plain))
    return "".join(parts)


def _titled(match: re.Match[str]) -> str:
    with (ROOT / "docs" / match[1]).open(encoding="utf-8") as page:
        return f"[{page.readline().removeprefix('# ').strip()}]"


def _text(page: File) -> str:
    return "".join(_FENCE.split(page.content_string)[::2])


def _to_source(match: re.Match[str]) -> str:
    name = (ROOT / "docs" / match[3]).resolve().relative_to(ROOT).as_posix()
    anchor = f"#{match[2]}" if match[2] and name.endswith(".py") else ""
    return f"{match[1]}({SOURCE.format(name)}{anchor})"


def _source_page(place: Path, name: str) -> str:
    if place.is_dir():
        text = "\n".join(sorted(path.name for path in place.iterdir() if path.name[0] not in "._"))
    else:
        text = place.read_text(encoding="utf-8")
    symbols = _symbols(ast.parse(text).body) if place.suffix == ".py" else {}
    lines = [
        f'<span id="{symbols.get(number, f"L{number}")}"><i>{number:4d} </i> {html.escape(line)}</span>'
        for number, line in enumerate(text.splitlines(), start=1)
    ]
    return _PAGE.format(name=html.escape(name), lines="\n".join(lines))


def _symbols(body: list[ast.stmt], prefix: str = "") -> dict[int, str]:
    """The names that a file defines, by the number of the line."""
    found: dict[int, str] = {}
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found[node.lineno] = prefix + node.name
        if isinstance(node, ast.ClassDef):
            found |= _symbols(node.body, f"{prefix}{node.name}.")
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            if isinstance(target, ast.Name):
                found[node.lineno] = prefix + target.id
    return found
