"""Builds the native kernels into a wheel, for each level of instructions of its kind of processor.

Without a C++ compiler the wheel is pure Python, and kernels are compiled where they are used. The compiler is ``CXX``,
or ``c++``; for a cross compiler ``SHEEPOP_WHEEL_PLATFORM`` names the platform, such as ``linux_aarch64``.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class KernelHook(BuildHookInterface[Any]):
    """Adds the kernels to a wheel, which is then one for this platform."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compiles every kernel, unless the installation is editable."""
        if version == "editable":
            return
        platform = os.environ.get("SHEEPOP_WHEEL_PLATFORM") or re.sub(r"[.-]", "_", sysconfig.get_platform())
        compiler = shlex.split(os.environ.get("CXX", "c++"))
        kernels = _module(Path(self.root, "src", "sheepop", "core", "kernel_build.py"))
        machine = "x86_64" if platform.endswith("x86_64") else "arm64"
        for source in sorted(kernels.KERNELS.glob("*.cpp")):
            for level in kernels.LEVELS:
                if level.machine == machine and platform.endswith(("x86_64", "aarch64", "arm64")):
                    self._add(kernels, source, level, compiler, build_data)
        if build_data["force_include"]:
            build_data["pure_python"], build_data["tag"] = False, f"py3-none-{platform}"

    def _add(
        self, kernels: ModuleType, source: Path, level: Any, compiler: list[str], build_data: dict[str, Any]
    ) -> None:
        folder = Path(self.root, "build", "kernels")  # pip asks for the metadata first, which also comes here
        built = next(kernels.intact_kernels(folder, kernels.stem_of(source, level)), None)
        for threads in (["-fopenmp"], []) if built is None else ():
            try:
                built = kernels.build(source, level, compiler, threads, folder)
                break
            except (OSError, subprocess.SubprocessError) as error:
                why = getattr(error, "stderr", None) or str(error).encode()
                self.app.display_warning(f"{source.name} is not built for {level.name}: {why.decode(errors='replace')}")
        if built is not None:
            inside = source.parent.relative_to(Path(self.root, "src")) / "prebuilt" / built.name
            build_data["force_include"][str(built)] = str(inside)


def _module(path: Path) -> ModuleType:
    """Loads one file of the package, whose other modules need what is not installed here."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
