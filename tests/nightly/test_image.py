"""The images, built without a daemon on Debian's own packages, and started as pods start them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deployments.conftest import free_port

ROOT = Path(__file__).parents[2]
MODELS = Path.home() / ".cache/paceline/models"
MISSING = [name for name in ("buildah", "mmdebstrap", "unshare") if not shutil.which(name)]
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)} (Debian has it)"),
    pytest.mark.skipif(os.getuid() != 0, reason="only root can build a file system"),
]
# The root is read-only for the user, as in a pod: its own places are /tmp and the home in memory.
START = """
mount --bind "$1" "$1" && mount -o remount,bind,ro "$1"
mount -t proc proc "$1/proc" && mount --rbind /dev "$1/dev"
mount -t tmpfs tmpfs "$1/tmp" && mount -t tmpfs -o uid=1000 tmpfs "$1/home/paceline"
cache="$1/home/paceline/.cache"
install -d -o 1000 -g 1000 "$cache" "$cache/paceline" "$cache/paceline/models"
if [ -d "$2" ]; then cp "$2"/SmolLM2-*.gguf "$cache/paceline/models"; fi
chmod -R a+rX "$cache"
root=$1; shift 2
exec chroot --userspec=1000:1000 "$root" env -i HOME=/home/paceline \
  PATH=/opt/venv/bin:/usr/bin:/bin \
  RAY_USAGE_STATS_ENABLED=0 HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 "$@"
"""


def host_pip() -> list[str]:
    """Mounts with which pip in the build sees the indexes and certificates of this machine."""
    pip = [sys.executable, "-m", "pip", "config"]
    said = subprocess.run([*pip, "debug"], capture_output=True, text=True, check=True).stdout
    files = re.findall(r"^ *(/\S+), exists: True", said, re.MULTILINE)
    said += subprocess.run([*pip, "list"], capture_output=True, text=True, check=True).stdout
    said += "".join(Path(file).read_text() for file in files)
    folders = {Path(p) for p in re.findall(r"(?:file://|[= '])(/[^\s']+)", said)}
    # An index in files refers to packages beside it.
    folders = {path.parent if path.name == "simple" else path for path in folders}
    mounts = [path for path in folders if path.is_dir()] + [Path("/etc/ssl/certs")]
    result = [f"--volume={path}:{path}:ro" for path in mounts]
    return result + [f"--volume={file}:/etc/pip.conf:ro" for file in files[-1:]]


def public_pip(folder: Path) -> list[str]:
    """As :func:`host_pip`, without wheels that lie on this machine: they may be builds for CPUs."""
    pip = [sys.executable, "-m", "pip", "config", "list"]
    said = subprocess.run(pip, capture_output=True, text=True, check=True).stdout
    kept = re.findall(r"^(?:global|:env:)\.(index-url|proxy|cert|trusted-host)='(.*)'$", said, re.M)
    file = folder / "pip.conf"
    file.write_text(
        "\n".join(["[global]", *(f"{key} = {value}" for key, value in dict(kept).items())])
    )
    return ["--volume=/etc/ssl/certs:/etc/ssl/certs:ro", f"--volume={file}:/etc/pip.conf:ro"]


class Image:
    """A container of an image: its target, its files, and how to run something in it."""

    def __init__(self, target: str, root: Path) -> None:
        self.target = target
        self.root = root

    def command(self, *words: str) -> list[str]:
        start = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "bash", "-ec", START, "-"]
        return [*start, str(self.root), str(MODELS), *words]

    def run(self, *words: str) -> str:
        done = subprocess.run(
            self.command(*words), capture_output=True, text=True, check=False, timeout=300
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module", params=["cpu", "cuda", "vllm"])
def image(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Image]:
    target: str = request.param
    if target != "cpu" and not os.environ.get("PACELINE_GPU_IMAGES"):
        pytest.skip("PACELINE_GPU_IMAGES=1 builds it, with 25 (cuda) or 45 GB of disk (vllm)")
    folder = tmp_path_factory.mktemp("image")
    places = [f"--root={folder}/store", f"--runroot={folder}/run"]

    def buildah(*words: str) -> str:
        done = subprocess.run(
            ["buildah", *places, *words], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return done.stdout.strip()

    base = folder / "base.tar"
    packages = "--include=python3,python3-venv,ca-certificates"
    bootstrap = ["mmdebstrap", "--quiet", "--variant=minbase", packages, "bookworm", base]
    done = subprocess.run(bootstrap, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"Debian's packages cannot be had: {done.stderr[-300:]}")
    empty = buildah("from", "scratch")
    buildah("add", "--quiet", empty, str(base), "/")
    buildah("commit", "--quiet", "--rm", empty, "localhost/base")
    base.unlink()
    buildah(
        "build", "--isolation=chroot", f"--target={target}", "--build-arg=BASE=localhost/base",
        *(host_pip() if target == "cpu" else public_pip(folder)), "--tag=localhost/paceline", ".",
    )  # fmt: skip
    container = buildah("from", "localhost/paceline")
    root = Path(buildah("mount", container))
    used = subprocess.run(["du", "-sm", root], capture_output=True, text=True, check=True).stdout
    print(f"image {target}: {used.split()[0]} MB")
    yield Image(target, root)
    buildah("rm", container)
    shutil.rmtree(folder, ignore_errors=True)


def test_an_unprivileged_user_generates_on_a_read_only_root(image: Image) -> None:
    said = image.run("sh", "-c", "id -u; touch /opt/x 2>&1 || true")
    assert said.startswith("1000\n")
    assert "Read-only file system" in said
    image.run("paceline", "doctor")
    assert image.run("paceline", "generate", "def read(path):", "--max-tokens", "8").strip()


def test_the_kernels_of_all_variants_are_inside_and_no_compiler(image: Image) -> None:
    from paceline.models.kernels import build

    (lib,) = image.root.glob("opt/venv/lib/python3*/site-packages/paceline/models/kernels/lib")
    variants = [variant.name for variant in build.variants(os.uname().machine)]
    files = [file.name for file in lib.iterdir()]
    assert all(any(variant in name for name in files) for variant in variants), files
    for compiler in ("gcc", "cc", "clang", "c++"):
        # Triton, which vLLM brings, calls one when it starts.
        assert (image.root / "usr/bin" / compiler).exists() == (
            image.target == "vllm" and compiler in ("gcc", "cc")
        )


def test_torch_is_the_build_for_the_target(image: Image) -> None:
    said = image.run("python", "-c", "import torch; print(torch.version.cuda)").strip()
    assert (said == "None") == (image.target == "cpu")
    if image.target == "vllm":
        assert image.run("python", "-c", "import vllm; print(vllm.__version__)").startswith("0.32")


@pytest.mark.skipif(
    not [*MODELS.glob("SmolLM2-*.gguf")], reason="`paceline models get smollm2` downloads it"
)
def test_a_cold_start_takes_thirty_seconds(image: Image) -> None:
    """From the start of the process to the port that answers, with Ray and SmolLM2."""
    if image.target != "cpu":
        pytest.skip("it would be loaded on the CPU as well")
    grpc, http = free_port(), free_port()
    (config,) = image.root.glob(
        "opt/venv/lib/*/site-packages/paceline/deployments/configs/smollm2.yaml"
    )
    command = image.command(
        "paceline", "up", "--foreground", "--config", f"/{config.relative_to(image.root)}",
        "--port", str(grpc), "--http-port", str(http),
    )  # fmt: skip
    begin = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        said = ""
        for line in process.stdout:
            said += line
            if "ready at" in line:
                break
        seconds = time.monotonic() - begin
        assert "ready at" in said, said
        print(f"cold start: {seconds:.1f} s")
        assert seconds <= 30
    finally:
        # The first process of its namespace: all others end with it. (Another user than ours does
        # not get the signal of `unshare --kill-child`.)
        subprocess.run(["pkill", "-KILL", "--parent", str(process.pid)], check=False)
        process.wait()
