"""What pyproject.toml cannot say: a wheel brings the compiled C kernels.

Its tag names no Python, because the kernels do not know Python, and as platform the oldest one that
they run on. Without a compiler the wheel has no kernels, works everywhere, and says so.
PACELINE_WHEEL_MACHINE=aarch64 makes the wheel of another architecture, for which CC must compile;
PACELINE_WHEEL_VARIANTS="portable avx2" makes one with these variants of the kernels alone.
An editable install brings nothing: a checkout builds its kernels at first use.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel

KERNELS = Path("paceline/models/kernels")
OLDEST_GLIBC = 17  # that pip knows by number on Arm: manylinux_2_17


def load_build() -> ModuleType:
    """The module that compiles, without its package: nothing that imports is installed here."""
    spec = importlib.util.spec_from_file_location("build_kernels", KERNELS / "build.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def say(line: str) -> None:
    sys.stderr.write(f"paceline: {line}\n")


def platform_of(libraries: list[Path], machine: str) -> str | None:
    """The platform tag that these libraries' needs allow; None for setuptools' own choice.

    Of what they need, glibc is the system's; libgomp comes with torch.
    """
    needed = [
        int(minor) for file in libraries
        for minor in re.findall(rb"GLIBC_2\.(\d+)", file.read_bytes())
    ]  # fmt: skip
    return f"manylinux_2_{max(OLDEST_GLIBC, *needed)}_{machine}" if needed else None


class Wheel(bdist_wheel):
    """A wheel with the kernels, if there is a compiler."""

    _platform: str | None = None

    def run(self) -> None:
        out = Path(self.get_finalized_command("build").build_lib) / KERNELS / "lib"
        libraries = self._compile(out)
        self.root_is_pure = not libraries
        self.distribution.has_ext_modules = lambda: bool(libraries)  # where `install` puts files
        super().run()
        shutil.rmtree(out, ignore_errors=True)  # setuptools keeps the folder for the next wheel

    def _compile(self, out: Path) -> list[Path]:
        build = load_build()
        shutil.rmtree(out, ignore_errors=True)  # what a wheel that failed left there
        asked_for = os.environ.get("PACELINE_WHEEL_MACHINE")
        machine = asked_for or platform.machine()
        try:
            made, failed = build.build(out, machine, self._variants(build, machine))
        except build.BuildFailed as error:
            if asked_for:
                raise SystemExit(f"no wheel for {machine}: {error}") from error
            say(f"THE WHEEL HAS NO KERNELS and will compute slowly with torch: {error}")
            return []
        for name, why in failed.items():
            say(f"the wheel lacks the variant {name}: {why}")
        say(f"the wheel has the kernels {', '.join(made)}")
        libraries = list(made.values())
        self._platform = platform_of(libraries, machine)
        return libraries

    @staticmethod
    def _variants(build: ModuleType, machine: str) -> list[str]:
        known = [variant.name for variant in build.variants(machine)]
        chosen = os.environ.get("PACELINE_WHEEL_VARIANTS", "").split()
        if wrong := [name for name in chosen if name not in known]:
            raise SystemExit(f"PACELINE_WHEEL_VARIANTS names {wrong[0]!r}: one of {known}")
        return chosen or known

    def get_tag(self) -> tuple[str, str, str]:
        tag = super().get_tag()
        return tag if self.root_is_pure else ("py3", "none", self._platform or tag[2])


setup(cmdclass={"bdist_wheel": Wheel})
