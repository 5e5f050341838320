"""Ray nodes as a cluster has them: processes of `ray start`, with token authentication."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).parents[1]
RAY = str(Path(sys.executable).with_name("ray"))


def clean_environment(home: Path) -> dict[str, str]:
    """Of processes that see nothing of a Ray that runs here, with a home (and a token) of their
    own."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    return {
        # The kernels that are built already are looked for under the home.
        "XDG_CACHE_HOME": str(Path.home() / ".cache"), **clean,
        "HOME": str(home), "RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{clean['PATH']}",
    }  # fmt: skip


def make_token(environment: dict[str, str]) -> None:
    """What every node and every command of the cluster shows to the others."""
    subprocess.run(
        [RAY, "get-auth-token", "--generate"], env=environment, check=True, capture_output=True
    )


@contextmanager
def ray_node(command: list[str], environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A node that ends with the block. (`ray stop` would end every Ray of the machine.)"""
    node = subprocess.Popen(
        [RAY, "start", *command, "--block"], env=environment, cwd=ROOT, text=True,
        start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        assert node.stdout is not None
        assert any("Ray runtime started" in line for line in node.stdout)
        yield node
    finally:
        node.terminate()
        try:
            # One whose workers have died, or that has little of the machine, may take longer.
            with suppress(subprocess.TimeoutExpired):
                node.wait(30)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(node.pid, signal.SIGKILL)
            node.wait(10)


def raylets(parent: int) -> list[int]:
    """The raylet that a `ray start --block` is waiting for: the node is alive while it is."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            name = (folder / "comm").read_text().strip()
            of = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue
        if of == parent and name == "raylet":
            found.append(int(folder.name))
    return found
