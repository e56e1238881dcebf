"""The rules of the house: which folder may import which, and what no file may do."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "sheepop"

# What a folder stands on. An arrow also allows what its target allows, and everything may use core.
STANDS_ON = {
    "core": set(),
    "report": {"core"},
    "download": {"report"},
    "tokenizer": {"core"},
    "data": {"tokenizer", "report"},
    "model": {"core"},
    "adapt": {"model"},
    "parallel": {"model", "adapt"},
    "checkpoint": {"tokenizer", "model", "adapt", "parallel"},
    "train": {"data", "checkpoint", "report"},
    "generate": {"checkpoint"},
    "posttrain": {"train", "generate"},
    "evaluate": {"data", "generate"},
    "interpret": {"data", "train", "generate"},
    "serve": {"data", "generate", "evaluate", "interpret"},
    "monitor": {"serve"},
    "plan": {"train"},
    "scale": {"train", "evaluate"},
    "jobs": {"download", "posttrain", "evaluate", "serve", "monitor", "plan", "scale"},
    "cli": {"jobs"},
    "language_model": {"jobs"},
    "runs": {"language_model"},
    "register": {"train"},
    "__main__": {"cli"},
    "__init__": {"runs", "register"},
}
LONGEST_FILE = 400
FORBIDDEN_NAMES = {"util", "utils", "helper", "helpers", "common", "misc"}
# These run code that is found in a file.
FORBIDDEN_IMPORTS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
FORBIDDEN_CALLS = {"torch.load", "numpy.load", "eval", "exec", "__import__", "importlib.import_module"}
MAY_PRINT = {"cli", "core.console"}
# The second names only modules of its own folder.
MAY_IMPORT_BY_NAME = {"core.lazy", "data.extract.dispatch"}
# The time of day jumps; what measures a duration reads a monotonic clock. These write down when something was.
TIME_OF_DAY = {"time.time", "time.time_ns"}
MAY_READ_THE_TIME_OF_DAY = {"train.sinks", "serve.answers", "serve.registry"}


@dataclass(frozen=True)
class Import:
    """One import of a module of ours, or of a name in it: from where to where, and whether it runs on import."""

    source: str
    target: str
    name: str
    line: int
    runs_on_import: bool


def allowed_targets(folder: str) -> set[str]:
    """Every folder that `folder` may import: the transitive closure of the table, core, and itself."""
    reached, pending = {folder, "core"}, [folder]
    while pending:
        for target in STANDS_ON.get(pending.pop(), set()) - reached:
            reached.add(target)
            pending.append(target)
    return reached


class House:
    """A source tree, parsed: its modules by dotted name below the package, and the imports between them."""

    def __init__(self, source: Path) -> None:
        self.package = source.name
        self.files = {path: path.relative_to(source) for path in sorted(source.rglob("*.py"))}
        self.modules = {self._module(relative): path for path, relative in self.files.items()}
        self.trees = {
            name: ast.parse(path.read_text(encoding="utf-8"), filename=str(path)) for name, path in self.modules.items()
        }
        self.folders = {
            ".".join(relative.parts[:depth])
            for relative in self.files.values()
            for depth in range(1, len(relative.parts))
        }
        self.imports = [found for name in self.modules for found in self._imports_of(name)]

    def place(self, module: str, line: int) -> str:
        return f"{self.files[self.modules[module]].as_posix()}:{line}"

    def problems(self) -> list[str]:
        """Every broken rule, one line each, with its place."""
        rules = (
            self._edges,
            self._folder_cycles,
            self._module_cycles,
            self._imports_by_other_means,
            self._sizes_and_names,
            self._package_files,
            self._calls,
        )
        return [problem for rule in rules for problem in rule()]

    def _edges(self) -> Iterator[str]:
        for found in self.imports:
            source, target = _folder(found.source), _folder(found.target)
            if source not in STANDS_ON:
                yield f"{self.place(found.source, found.line)}: folder {source} is not in the table"
            elif target not in allowed_targets(source):
                hidden = "" if found.runs_on_import else " (hidden in a function or under TYPE_CHECKING)"
                yield f"{self.place(found.source, found.line)}: {source} may not import {target}{hidden}"

    def _folder_cycles(self) -> Iterator[str]:
        graph: dict[str, set[str]] = {}
        for found in self.imports:
            source, target = _folder(found.source), _folder(found.target)
            if source != target:
                graph.setdefault(source, set()).add(target)
        yield from _cycle(graph, "folders")

    def _module_cycles(self) -> Iterator[str]:
        graph: dict[str, set[str]] = {}
        for found in self.imports:
            # A package's names handed on by its __init__ are reached through it, so that edge is no cycle by itself.
            inside_own_package = found.target == found.source.rpartition(".")[0]
            if found.source != found.target and not inside_own_package:
                graph.setdefault(found.source, set()).add(found.target)
        yield from _cycle(graph, "modules")
        for found in self.imports:
            if found.target == found.source.rpartition(".")[0] and found.target:
                yield f"{self.place(found.source, found.line)}: import from the module, not from its own package"

    def _imports_by_other_means(self) -> Iterator[str]:
        for name, tree in self.trees.items():
            for node in ast.walk(tree):
                for module in _imported_names(node):
                    if module.partition(".")[0] in FORBIDDEN_IMPORTS:
                        yield f"{self.place(name, node.lineno)}: {module} is not allowed here"
                if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
                    yield f"{self.place(name, node.lineno)}: import * hides what is imported"

    def _sizes_and_names(self) -> Iterator[str]:
        for path, relative in self.files.items():
            length = len(path.read_text(encoding="utf-8").splitlines())
            if length > LONGEST_FILE:
                yield f"{relative.as_posix()}: {length} lines, more than {LONGEST_FILE}"
            for part in relative.with_suffix("").parts:
                if part in FORBIDDEN_NAMES:
                    yield f"{relative.as_posix()}: {part} says nothing about what is inside"

    def _package_files(self) -> Iterator[str]:
        for path, relative in self.files.items():
            if path.name != "__init__.py" or relative == Path("__init__.py"):
                continue
            name = self._module(relative)
            for node in self.trees[name].body:
                if not _only_hands_on(node):
                    yield f"{self.place(name, node.lineno)}: __init__.py only hands names on"
            for found in self.imports:
                handed_on = f"{name}.{found.name}"
                if found.source == name and handed_on in self.modules.keys() | self.folders:
                    # Whichever is loaded last would be found under that name.
                    yield f"{self.place(name, found.line)}: {found.name} is a module of {name} too"

    def _calls(self) -> Iterator[str]:
        for name, tree in self.trees.items():
            aliases = _aliases(tree)
            for node in ast.walk(tree):
                if not isinstance(node, ast.Call):
                    continue
                called = _dotted(node.func, aliases)
                by_name = called == "importlib.import_module" and name in MAY_IMPORT_BY_NAME
                if called in FORBIDDEN_CALLS and not by_name:
                    yield f"{self.place(name, node.lineno)}: {called}() is not allowed here"
                if called in TIME_OF_DAY and name not in MAY_READ_THE_TIME_OF_DAY:
                    yield f"{self.place(name, node.lineno)}: {called}() jumps; time.monotonic() does not"
                may_print = name in MAY_PRINT or _folder(name) in MAY_PRINT
                if called == "print" and not may_print:
                    yield f"{self.place(name, node.lineno)}: only the command line and the console print"

    def _module(self, relative: Path) -> str:
        parts = relative.with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)

    def _imports_of(self, name: str) -> Iterator[Import]:
        tree = self.trees[name]
        on_import = set(map(id, _nodes_that_run_on_import(tree)))
        for node in ast.walk(tree):
            for module, imported in self._targets(name, node):
                yield Import(name, module, imported, node.lineno, id(node) in on_import)

    def _targets(self, name: str, node: ast.AST) -> Iterator[tuple[str, str]]:
        """The modules of ours that an import statement names, each with what it takes from there.

        The package's version belongs to everyone."""
        if isinstance(node, ast.Import):
            paths = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                is_package = self.modules[name].name == "__init__.py"
                here = [self.package, *name.split(".")] if name != "__init__" else [self.package, ""]
                above = here[: len(here) - node.level + (1 if is_package and name != "__init__" else 0)]
                base = ".".join([*above, *([base] if base else [])])
            paths = [f"{base}.{alias.name}" for alias in node.names]
        else:
            return
        for path in paths:
            if path != self.package and not path.startswith(f"{self.package}."):
                continue
            if path == f"{self.package}.__version__" or (path == self.package and self._takes_only_version(name)):
                continue
            module = path[len(self.package) + 1 :]
            while module and module not in self.modules and module not in self.folders:
                module = module.rpartition(".")[0]
            yield module or "__init__", path.rpartition(".")[2]

    def _takes_only_version(self, name: str) -> bool:
        return all(
            node.attr == "__version__"
            for node in ast.walk(self.trees[name])
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == self.package
        )


def _folder(module: str) -> str:
    return module.partition(".")[0]


def _cycle(graph: dict[str, set[str]], what: str) -> Iterator[str]:
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        yield f"{what} import each other: {' <- '.join(error.args[1])}"


def _imported_names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [node.module]
    return []


def _nodes_that_run_on_import(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        yield from _nodes_that_run_on_import(node)


def _only_hands_on(node: ast.stmt) -> bool:
    is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    is_all = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    return is_docstring or is_all or _is_lazy(node) or isinstance(node, ast.Import | ast.ImportFrom)


def _is_lazy(node: ast.stmt) -> bool:
    """Whether names are handed on when they are first asked for: imports for type checkers, else `lazy_exports`."""
    return (
        isinstance(node, ast.If)
        and ast.unparse(node.test) == "TYPE_CHECKING"
        and all(isinstance(line, ast.ImportFrom) for line in node.body)
        and [ast.unparse(line) for line in node.orelse] == ["__getattr__, __dir__ = lazy_exports(__name__)"]
    )


def _aliases(tree: ast.AST) -> dict[str, str]:
    """Local name to full name, for every import in the file: ``np`` is ``numpy``."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update({alias.asname: alias.name for alias in node.names if alias.asname})
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    return names


def _dotted(node: ast.expr, aliases: dict[str, str]) -> str:
    if isinstance(node, ast.Name):
        return aliases.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value, aliases)}.{node.attr}"
    return ""


# The house itself


@pytest.fixture(scope="module")
def house() -> House:
    return House(SOURCE)


def test_the_house_keeps_its_rules(house: House):
    assert house.problems() == []


def test_the_checker_sees_the_imports_of_the_house(house: House):
    seen = {(_folder(found.source), _folder(found.target)) for found in house.imports}
    assert {("train", "checkpoint"), ("jobs", "train"), ("cli", "jobs"), ("tokenizer", "core")} <= seen
    assert {_folder(name) for name in house.modules} <= STANDS_ON.keys()


def test_the_table_is_the_documented_order():
    assert allowed_targets("tokenizer") == {"tokenizer", "core"}
    assert allowed_targets("data") == {"data", "tokenizer", "report", "core"}
    assert allowed_targets("generate") == {"generate", "checkpoint", "tokenizer", "model", "adapt", "parallel", "core"}
    assert allowed_targets("jobs") == STANDS_ON.keys() - {
        "cli",
        "language_model",
        "runs",
        "register",
        "__main__",
        "__init__",
    }


LIBRARIES = {"torch", "transformers", "matplotlib", "plotly", "tensorboard"}
LIGHT = ["sheepop", "sheepop.cli.main", "sheepop.data", "sheepop.core.machine", "sheepop.core.speed"]
# What only training needs.
TRAINING = {"sheepop.train.loop", "torch.distributed.fsdp", "torch._dynamo"}


@pytest.mark.parametrize(
    ("module", "heavy"), [*((module, LIBRARIES) for module in LIGHT), ("sheepop.language_model", TRAINING)]
)
def test_what_must_start_fast_loads_no_heavy_library(module: str, heavy: set[str]):
    program = (
        f"import sys, {module}\n"
        f"heavy = {heavy} & set(sys.modules)\n"
        "sys.exit(f'loaded: {sorted(heavy)}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


# The checker


def problems(root: Path, files: dict[str, str]) -> list[str]:
    for name, text in files.items():
        path = root / "sheepop" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return House(root / "sheepop").problems()


LAZY = """
from typing import TYPE_CHECKING
from sheepop.core.lazy import lazy_exports
if TYPE_CHECKING:
    {}
else:
    __getattr__, __dir__ = lazy_exports(__name__)
"""
GOOD = {
    "__init__.py": f'"""Doc."""\n__version__ = "1"\n{LAZY.format("from sheepop.language_model import load")}',
    "language_model.py": "from sheepop.jobs import work\n",
    "core/__init__.py": "",
    "core/errors.py": "import json\n",
    "core/console.py": "print('x')\n",
    "model/__init__.py": '"""Doc."""\nfrom sheepop.model.network import run\n__all__ = ["run"]\n',
    "data/__init__.py": f'"""Doc."""\n{LAZY.format("from sheepop.data.corpus import Corpus")}__all__ = ["Corpus"]\n',
    "data/corpus.py": "",
    "core/lazy.py": "import importlib\nimportlib.import_module('sheepop.data')\n",
    "model/network.py": "import torch\nfrom sheepop.core.errors import E\nfrom . import layer\nfrom .layer import x\n",
    "model/layer.py": "from ..core import errors\n",
    "checkpoint/files.py": "from sheepop.model import run\nimport sheepop.core.errors\n",
    "train/loop.py": "from sheepop.checkpoint.files import save\nfrom sheepop.model.network import run\n",
    "jobs/work.py": "import sheepop\nfrom sheepop.train.loop import loop\nx = sheepop.__version__\n",
    "cli/main.py": "from sheepop.jobs.work import work\nprint('x')\n",
}


def test_a_good_tree_has_no_problems(tmp_path: Path):
    assert problems(tmp_path, GOOD) == []


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("core/a.py", "import sheepop.model\n", "core/a.py:1: core may not import model"),
        ("model/a.py", "\nfrom sheepop.train import loop\n", "model/a.py:2: model may not import train"),
        ("model/a.py", "from ..train import loop\n", "model/a.py:1: model may not import train"),
        ("model/a.py", "from .. import train\n", "model/a.py:1: model may not import train"),
        ("model/__init__.py", "from ..train import loop\n", "model/__init__.py:1: model may not import train"),
        ("data/a.py", "from sheepop import model\n", "data/a.py:1: data may not import model"),
        (
            "model/a.py",
            "def run():\n    from sheepop.train.loop import loop\n",
            "model/a.py:2: model may not import train (hidden in a function or under TYPE_CHECKING)",
        ),
        (
            "model/a.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from sheepop.jobs import work\n",
            "model/a.py:3: model may not import jobs (hidden in a function or under TYPE_CHECKING)",
        ),
        ("extra/a.py", "import sheepop.core.errors\n", "extra/a.py:1: folder extra is not in the table"),
        ("jobs/a.py", "from sheepop.cli.main import main\n", "jobs/a.py:1: jobs may not import cli"),
        (
            "model/a.py",
            "from sheepop.model import run\n",
            "model/a.py:1: import from the module, not from its own package",
        ),
        ("jobs/a.py", "from sheepop import load\n", "jobs/a.py:1: jobs may not import __init__"),
        ("jobs/a.py", "import sheepop\nsheepop.load('x')\n", "jobs/a.py:1: jobs may not import __init__"),
        ("model/a.py", "from torch import *\n", "model/a.py:1: import * hides what is imported"),
        ("model/a.py", "def f():\n    import pickle\n", "model/a.py:2: pickle is not allowed here"),
        ("model/a.py", "from marshal import loads\n", "model/a.py:1: marshal is not allowed here"),
        ("model/a.py", "import torch\nx = torch.load('f')\n", "model/a.py:2: torch.load() is not allowed here"),
        ("model/a.py", "from torch import load\nload('f')\n", "model/a.py:2: torch.load() is not allowed here"),
        ("model/a.py", "import numpy as np\nnp.load('f')\n", "model/a.py:2: numpy.load() is not allowed here"),
        (
            "model/a.py",
            "import importlib\nimportlib.import_module('sheepop.train')\n",
            "model/a.py:2: importlib.import_module() is not allowed here",
        ),
        ("model/a.py", "def f():\n    print(1)\n", "model/a.py:2: only the command line and the console print"),
        ("core/a.py", "print(1)\n", "core/a.py:1: only the command line and the console print"),
        ("core/a.py", "import time\ntime.time()\n", "core/a.py:2: time.time() jumps; time.monotonic() does not"),
        ("model/__init__.py", "x = 1\n", "model/__init__.py:1: __init__.py only hands names on"),
        ("model/__init__.py", "def f(): ...\n", "model/__init__.py:1: __init__.py only hands names on"),
        (
            "model/__init__.py",
            LAZY.format("print(1)"),
            "model/__init__.py:4: __init__.py only hands names on",
        ),
        (
            "model/__init__.py",
            LAZY.format("from sheepop.model.layer import layer"),
            "model/__init__.py:5: layer is a module of model too",
        ),
        ("model/utils.py", "", "model/utils.py: utils says nothing about what is inside"),
        ("common/a.py", "", "common/a.py: common says nothing about what is inside"),
        ("model/a.py", "x = 1\n" * 401, "model/a.py: 401 lines, more than 400"),
    ],
)
def test_a_broken_rule_is_named_with_its_place(tmp_path: Path, name: str, text: str, expected: str):
    assert expected in problems(tmp_path, {**GOOD, name: text})


def test_modules_that_import_each_other_are_found_even_when_the_imports_are_lazy(tmp_path: Path):
    found = problems(
        tmp_path,
        {
            "model/a.py": "from sheepop.model.b import x\n",
            "model/b.py": "def f():\n    from sheepop.model.c import y\n",
            "model/c.py": "import sheepop.model.a\n",
        },
    )
    assert len(found) == 1
    assert found[0].startswith("modules import each other: ")
    assert {"model.a", "model.b", "model.c"} <= set(found[0].partition(": ")[2].split(" <- "))


def test_folders_that_import_each_other_are_found(tmp_path: Path):
    found = problems(
        tmp_path,
        {
            "model/a.py": "import sheepop.core.x\n",
            "core/x.py": "",
            "core/y.py": "import sheepop.model.z\n",
            "model/z.py": "",
        },
    )
    assert found[0] == "core/y.py:1: core may not import model"
    assert found[1] in (
        "folders import each other: core <- model <- core",
        "folders import each other: model <- core <- model",
    )
