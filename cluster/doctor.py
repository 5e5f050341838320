"""`paceline doctor`: what this machine has, what is wrong, and how to repair it.

Each check is a function that returns a :class:`Result`. It imports what it examines itself, so that
a broken package is a finding and not a crash.
"""

from __future__ import annotations

import contextlib
import enum
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

GATEWAY_PORT = 50051
HTTP_PORT = 8000
DASHBOARD_PORT = 8265

_GB = 1e9


class Status(enum.Enum):
    """With a warning Paceline works, with a failure it does not."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Result:
    """What a check found; ``mend`` says how to repair it, if there is something to repair."""

    name: str
    status: Status
    detail: str
    mend: str = ""

    def as_dict(self) -> dict[str, str]:
        return {
            "name": self.name,
            "status": self.status.value,
            "detail": self.detail,
            "mend": self.mend,
        }


def run_checks(*, deep: bool = False) -> Iterator[tuple[str, Result | None]]:
    """Run all checks in order; yields ``(name, None)`` before each and ``(name, result)`` after it.

    Args:
        deep: also start a local Ray and stop it again.
    """
    checks: dict[str, Callable[[], Result]] = {
        "python": check_python,
        "packages": check_packages,
        "torch": check_torch,
        "processor": check_processor,
        "kernels": check_kernels,
        "threads": check_threads,
        "ray": lambda: check_ray(start=deep),
        "grpc": check_grpc,
        "ports": check_ports,
        "memory": check_memory,
        "disk": check_disk,
        "models": check_models,
        "exactness": check_exactness,
    }
    for name, check in checks.items():
        yield name, None
        try:
            result = check()
        except Exception as error:
            detail = f"the check itself failed: {type(error).__name__}: {error}"
            result = Result(
                name, Status.FAIL, detail, "run `paceline --debug doctor` and report it"
            )
            if os.environ.get("PACELINE_DEBUG"):
                raise
        yield name, result


# --- software -------------------------------------------------------------------------------------


def check_python() -> Result:
    version = platform.python_version()
    detail = f"{platform.python_implementation()} {version} on {platform.platform(terse=True)}"
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        return Result("python", Status.FAIL, detail, "install Python 3.11, 3.12 or 3.13")
    return Result("python", Status.OK, detail)


def check_packages() -> Result:
    """Whether installed packages are in the ranges that Paceline declares."""
    from packaging.requirements import Requirement

    try:
        declared = importlib.metadata.requires("paceline") or []
    except importlib.metadata.PackageNotFoundError:
        return Result(
            "packages",
            Status.WARN,
            "paceline is not installed, only importable; versions were not compared",
            "pip install -e . in the source tree (`make install`)",
        )
    wrong, count = [], 0
    for requirement in map(Requirement, declared):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        count += 1
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{requirement} is missing")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} {version} does not fit {requirement.specifier}")
    if wrong:
        return Result("packages", Status.FAIL, "; ".join(wrong), "pip install --upgrade paceline")
    return Result("packages", Status.OK, f"{count} packages, all in their ranges")


def check_torch() -> Result:
    try:
        import torch
    except ImportError as error:
        return Result("torch", Status.FAIL, f"cannot be imported: {error}", "pip install torch")
    parts = [torch.__version__, f"{torch.get_num_threads()} threads"]
    if torch.cuda.is_available():
        parts += [
            f"{torch.cuda.get_device_name(i)} "
            f"({torch.cuda.get_device_properties(i).total_memory / _GB:.0f} GB)"
            for i in range(torch.cuda.device_count())
        ]
    else:
        parts.append("no CUDA device: models run on the CPU")
    detail = ", ".join(parts)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if cores is not None and torch.get_num_threads() > cores:
        return Result(
            "torch",
            Status.WARN,
            f"{detail}; this process may use only {cores} cores",
            f"export OMP_NUM_THREADS={cores}",
        )
    return Result("torch", Status.OK, detail)


def check_processor() -> Result:
    """The processor's vector units that the kernels use."""
    from torch.backends.cpu import get_cpu_capability

    wanted = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16")
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    values = {
        key.strip().lower(): value.strip() for key, _, value in (x.partition(":") for x in lines)
    }
    flags = set((values.get("flags") or values.get("features") or "").split())
    present = [name for name in wanted if name in flags]
    name = values.get("model name") or platform.processor() or platform.machine()
    detail = f"{name}, torch uses {get_cpu_capability()}"
    if present:
        detail += f"; {', '.join(present)}"
    if flags and not flags & {"avx512_bf16", "amx_bf16", "bf16"}:
        return Result(
            "processor", Status.OK, f"{detail}; no bfloat16 units: float32 is the faster dtype"
        )
    return Result("processor", Status.OK, detail)


def check_kernels() -> Result:
    """The kernel variant that runs, its numerics, and its speed against the machine's limits."""
    from paceline.errors import InvalidArgument
    from paceline.models import kernels

    try:
        usable, detail = kernels.status()
    except InvalidArgument as error:
        return Result("kernels", Status.FAIL, str(error), "unset PACELINE_KERNELS")
    if not usable:
        slower = f"plain torch runs instead of the C kernels, slower: {detail}"
        return Result("kernels", Status.WARN, slower, _kernels_mend(detail))
    from paceline.bench.kernels import glance

    seen = glance()
    detail = (
        f"variant {kernels.variant()}; numerics class {seen.classes}; one row reaches "
        f"{seen.one_row:.0%} of what memory gives ({seen.memory / 1e9:.0f} GB/s), eight rows "
        f"{seen.eight_rows:.0%} of the roofline ({2 * seen.peak / 1e9:.0f} GFLOP/s); {detail}"
    )
    faster = kernels.what_is_missing()
    return Result("kernels", Status.WARN if faster else Status.OK, detail, faster)


def _kernels_mend(reason: str) -> str:
    if "PACELINE_KERNELS" in reason:
        return "unset PACELINE_KERNELS"
    if "libgomp" in reason:
        return "install GCC's OpenMP library (Debian: apt install libgomp1)"
    return (
        "install a C compiler (Debian: apt install gcc; macOS: xcode-select --install), or name "
        "one in CC; a wheel made by `make wheel` needs none"
    )


def check_threads() -> Result:
    """How many threads the demo target uses, and why; measured once and kept."""
    from paceline.loading import load_engine
    from paceline.profile import report_costs

    report = report_costs(load_engine())
    parts = [f"{name.replace('_', ' ')}: {value}" for name, value in report.items()]
    return Result("threads", Status.OK, "; ".join(parts))


def check_ray(*, start: bool = False) -> Result:
    """Ray's version; with ``start``, also whether a local Ray starts."""
    install = "pip install 'paceline[serve]' (only serving needs it)"
    if importlib.util.find_spec("ray") is None:
        return Result("ray", Status.WARN, "not installed", install)
    version = importlib.metadata.version("ray")
    if importlib.util.find_spec("ray.serve") is None:
        return Result("ray", Status.FAIL, f"{version} without Serve", install)
    address = _running_ray()
    if address is not None:
        return Result("ray", Status.OK, f"{version}, a cluster runs at {address}")
    if not start:
        return Result("ray", Status.OK, f"{version}, no local cluster is running")
    import time

    import ray

    started = time.perf_counter()
    try:
        ray.init(
            address="local",
            num_cpus=1,
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
        )
        answer = ray.get(ray.remote(_process_id).remote(), timeout=60)
    except Exception as error:
        return Result(
            "ray",
            Status.FAIL,
            f"{version}, but a local Ray does not start: {type(error).__name__}: {error}",
            f"look into {tempfile.gettempdir()}/ray/session_latest/logs; the usual causes are "
            "little memory, a full disk and a proxy variable that catches loopback "
            "(export no_proxy=127.0.0.1,localhost)",
        )
    finally:
        ray.shutdown()
    seconds = time.perf_counter() - started
    detail = f"{version}, a local Ray started and ran a task (pid {answer}) in {seconds:.0f} s"
    return Result("ray", Status.OK, detail)


def _process_id() -> int:
    return os.getpid()


def _running_ray() -> str | None:
    """The address of a cluster that was started on this machine and answers, else None."""
    addresses = [os.environ.get("RAY_ADDRESS", "")]
    record = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray" / "ray_current_cluster"
    with contextlib.suppress(OSError):  # no Ray was started, or another user started it
        addresses.append(record.read_text().strip())
    for address in addresses:
        host, _, port = address.rpartition("://")[2].rpartition(":")
        if host and port.isdecimal():
            try:
                socket.create_connection((host, int(port)), timeout=1).close()
            except OSError:
                continue  # a file of a cluster that has stopped
            return address
    return None


def check_grpc() -> Result:
    install = "pip install 'paceline[serve]' (only serving needs it)"
    if importlib.util.find_spec("grpc") is None:
        return Result("grpc", Status.WARN, "not installed", install)
    try:
        import grpc

        # The generated code needs a recent grpcio.
        import paceline.rpc.gen.paceline.v1.generate_pb2_grpc  # noqa: F401
    except Exception as error:
        return Result("grpc", Status.FAIL, f"{type(error).__name__}: {error}", install)
    proxies = [
        name
        for name in ("grpc_proxy", "https_proxy", "http_proxy", "HTTPS_PROXY", "HTTP_PROXY")
        if os.environ.get(name)
    ]
    exempt = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    if proxies and "127.0.0.1" not in exempt and exempt != "*":
        return Result(
            "grpc",
            Status.WARN,
            f"{grpc.__version__}; {proxies[0]} is set and does not exempt loopback",
            "export no_proxy=127.0.0.1,localhost",
        )
    return Result("grpc", Status.OK, grpc.__version__)


# --- machine --------------------------------------------------------------------------------------


PORTS = {GATEWAY_PORT: "gRPC gateway", HTTP_PORT: "HTTP gateway", DASHBOARD_PORT: "Ray dashboard"}


def check_ports(ports: Mapping[int, str] = PORTS) -> Result:
    """Whether the ports of a local deployment are free on loopback."""
    taken = [port for port in ports if not port_is_free(port)]
    if not taken:
        return Result("ports", Status.OK, ", ".join(f"{p} ({what})" for p, what in ports.items()))
    names = ", ".join(f"{port} ({ports[port]})" for port in taken)
    return Result(
        "ports",
        Status.WARN,
        f"in use: {names}",
        "if that is not a running Paceline (`paceline status`): see who it is with "
        f"`ss -ltnp 'sport = :{taken[0]}'`, or set another port in the config of `paceline up`",
    )


def port_is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a server could listen there now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def check_memory() -> Result:
    """Memory that this process may still use; a local deployment needs about 4 GB."""
    from paceline.memory import memory

    total, available = memory()
    shared = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else None
    detail = f"{available / _GB:.1f} of {total / _GB:.1f} GB available"
    if available < 1 * _GB:
        return Result("memory", Status.FAIL, detail, "free at least 1 GB; serving takes about 4 GB")
    if available < 4 * _GB:
        return Result(
            "memory", Status.WARN, detail, "free some: a local deployment takes about 4 GB"
        )
    if shared is not None and shared < 1 * _GB:
        return Result(
            "memory",
            Status.WARN,
            f"{detail}, but only {shared / _GB:.2f} GB of shared memory; Ray is slow with that",
            "give /dev/shm 2 GB (docker run --shm-size=2g)",
        )
    return Result("memory", Status.OK, detail)


def check_disk() -> Result:
    """Free disk space for Ray's session files and logs."""
    folder = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    usage = shutil.disk_usage(folder)
    detail = f"{usage.free / _GB:.0f} GB free in {folder}"
    mend = "make room, or point RAY_TMPDIR to a larger disk"
    if usage.free < 1 * _GB:
        return Result("disk", Status.FAIL, detail, mend)
    if usage.free < 4 * _GB or usage.free < 0.05 * usage.total:
        # Above 95 % Ray spills no objects.
        return Result("disk", Status.WARN, f"{detail}, of {usage.total / _GB:.0f} GB", mend)
    return Result("disk", Status.OK, detail)


# --- models ---------------------------------------------------------------------------------------

_MEND_MODELS = "reinstall paceline; in a source tree, `make demo-models` trains the pair again"


def check_models(folders: tuple[Path, Path] | None = None) -> Result:
    """Whether target and drafter (None: the demo pair) load and share a tokenizer."""
    from paceline.demo import DRAFTER_DIR, TARGET_DIR
    from paceline.errors import PacelineError
    from paceline.loading import load_engine

    folders = folders or (TARGET_DIR, DRAFTER_DIR)
    try:
        engine = load_engine(*folders)
    except PacelineError as error:
        return Result("models", Status.FAIL, str(error), _MEND_MODELS)
    sizes = [
        sum(f.stat().st_size for f in folder.glob("*.safetensors")) / 1e6 for folder in folders
    ]
    return Result(
        "models",
        Status.OK,
        f"demo pair: target {sizes[0]:.1f} MB, drafter {sizes[1]:.1f} MB, one tokenizer of "
        f"{engine.target.vocab_size} entries, context {engine.target.context_length}",
    )


def check_exactness() -> Result:
    """Whether drafts do not change the output here: chains and trees give AR's tokens."""
    from paceline.config import SpeculationConfig
    from paceline.errors import PacelineError
    from paceline.loading import load_engine
    from paceline.sampling import SamplingParams

    try:
        engine = load_engine(batch_invariant=True)
    except PacelineError as error:
        return Result("exactness", Status.FAIL, f"no model to check with: {error}", _MEND_MODELS)
    assert engine.tokenizer is not None
    prompts = [engine.tokenizer.encode(text) for text in ("def main(argv):\n", "import os\n")]

    def tokens(method: str, temperature: float) -> list[list[int]]:
        params = SamplingParams(max_tokens=24, temperature=temperature, seed=7, ignore_eos=True)
        sessions = engine.generate(prompts, params, SpeculationConfig(method=method))
        return [session.output_ids for session in sessions]

    for temperature in (0.0, 1.0):
        expected = tokens("ar", temperature)
        for method in ("draft_model", "draft_model_tree", "prompt_lookup"):
            if tokens(method, temperature) != expected:
                return Result(
                    "exactness",
                    Status.FAIL,
                    f"{method} at temperature {temperature:g} gave other tokens than AR in "
                    "batch-invariant mode",
                    "this processor breaks a promise of Paceline: please report it with the "
                    "output of `paceline doctor --json`; PACELINE_KERNELS=off may avoid it",
                )
    return Result("exactness", Status.OK, "chain, tree and lookup drafts give AR's tokens")
