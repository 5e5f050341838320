"""Builds the C kernels ahead of their first use: ``python -m paceline.models.kernels``.

    --out FOLDER       put the libraries there instead of where they are looked for
    --machine aarch64  for another architecture

`make install` and a deployment that starts run it beside what else takes time then. It needs
nothing but Python, and a tenth of a second where the kernels have been built before.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from pathlib import Path

from paceline.models import kernels
from paceline.models.kernels import build


def main(arguments: list[str] | None = None) -> None:
    """Build what is missing and name it; exit code 1 and a reason where that does not work."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and leave nothing half built behind
    parser = argparse.ArgumentParser(
        prog="python -m paceline.models.kernels", description="Build the C kernels."
    )
    parser.add_argument("--out", type=Path, help="folder for the libraries (default: the cache)")
    parser.add_argument("--machine", help="architecture to compile for (default: this one)")
    options = parser.parse_args(arguments)
    if options.machine and not options.out:
        parser.error("--machine needs --out")
    started = time.monotonic()
    failed: dict[str, str] = {}
    try:
        if options.out is None:
            made = kernels.libraries()
        else:
            made, failed = build.build(options.out, options.machine)
    except (build.BuildFailed, kernels.KernelsUnavailable) as error:
        sys.exit(str(error))
    for name, file in made.items():
        print(f"{name:12} {file}")
    for name, why in failed.items():
        print(f"{name:12} not made: {why}")
    print(f"{len(made)} variants in {time.monotonic() - started:.1f} s")


if __name__ == "__main__":
    main()
