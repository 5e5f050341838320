"""Builds the C kernels ahead of their first use: ``python -m paceline.models.kernels``.

    --out FOLDER put the libraries there instead of in the cache
    --machine aarch64  for another architecture

`make install` and a starting deployment run it in parallel with their other work. It needs only
Python, and a tenth of a second if the kernels are already built.
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
    """Build missing libraries and name them; on failure exit with code 1 and a reason."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and leave no partly built files
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
