"""The cost of loading a model: peak memory, memory afterwards, and seconds.

    python -m benchmarks.memory [--checkpoints float32,Q4_1] [--dtypes auto,q4_0] [--out FILE]
    python -m benchmarks.memory --models smollm2 --replicas 8

Each load runs in a process of its own: first *cold*, without packed weights in its cache, and then
*warm*. Random Llamas of 0.3 billion weights are written to a temporary folder.

All numbers exclude what the same process uses before it loads, with everything imported. Memory is
what the kernel counts as resident: anonymous pages, which belong to the process alone, and pages of
mapped files, which processes share and which the kernel may drop when it needs them. *Peak* is the
maximum of both together while the process loads the model and computes its fingerprint (VmHWM);
*used* is what is resident after a forward, which reads all weights. Peak/used should be at most
1.2. The anonymous part of the peak is sampled every millisecond.

Replicas are counted in proportional set size (PSS): of a page that n processes map, each has 1/n.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file

from paceline.bench.environment import describe_environment
from paceline.cache import cache_folder
from paceline.demo import TARGET_DIR
from paceline.model_names import KNOWN_NAMES, resolve_model
from paceline.models.layouts import INDEX
from paceline.models.llama_config import LlamaConfig
from paceline.models.llama_tensors import tensor_shapes
from paceline.models.quants import QUANT_TYPES

FOLDERS = ("float32", "bfloat16", "float16", "sharded")
FILES = ("Q4_1", "Q8_0", "F16", "BF16", "F32", "Q4_K")
DTYPES = ("auto", "float32", "bfloat16", "q8_0", "q4_0", "int8")
FLOATS = ("auto", "float32", "bfloat16")
SIZES = {
    "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 20,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 32000,
    "max_position_embeddings": 2048, "tie_word_embeddings": False,
}  # fmt: skip
MB = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One load. Bytes above the process' base; seconds.

    Attributes:
        path: fast, or general for transformers.
        cache: cold or warm.
        base: resident before loading.
        peak: maximum resident while loading; ``peak_anonymous`` is its anonymous part, sampled.
        used: resident after a forward.
    """

    checkpoint: str
    dtype: str
    path: str
    cache: str
    base: int
    peak: int
    peak_anonymous: int
    used: int
    used_anonymous: int
    seconds: float

    @property
    def ratio(self) -> float:
        return self.peak / self.used


# --- checkpoints ----------------------------------------------------------------------------------


def make_checkpoint(kind: str, folder: Path, sizes: dict[str, Any] | None = None) -> Path:
    """A random Llama with the demo's tokenizer: a folder, or a GGUF file.

    Args:
        kind: one of ``FOLDERS`` or ``FILES``; "sharded" is bfloat16 in four files.
        folder: to write to.
        sizes: of its config.json; default ``SIZES``.
    """
    if kind in FILES:
        from benchmarks.to_gguf import to_gguf

        source, file = folder / "F32-source", folder / f"{kind}.gguf"
        if not source.is_dir():
            make_checkpoint("float32", source, sizes)
        if not file.is_file():
            to_gguf(source / "float32", file, kind, _random_blocks if kind == "Q4_K" else None)
        return file
    made = folder / kind
    if made.is_dir():
        return made
    made.mkdir(parents=True)
    dtype = "bfloat16" if kind == "sharded" else kind
    config = json.loads((TARGET_DIR / "config.json").read_text())
    config |= (SIZES if sizes is None else sizes) | {"dtype": dtype}
    (made / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TARGET_DIR / name, made)
    shapes = tensor_shapes(LlamaConfig.from_folder(made))
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.ones(shape, dtype=getattr(torch, dtype)) if len(shape) == 1
        else torch.randn(shape, generator=generator).mul_(0.02).to(getattr(torch, dtype))
        for name, shape in shapes.items()
    }  # fmt: skip
    if kind != "sharded":
        save_file(tensors, made / "model.safetensors", {"format": "pt"})
        return made
    names, places = sorted(tensors), {}
    for shard in range(4):
        file = f"model-{shard + 1:05}-of-00004.safetensors"
        places |= dict.fromkeys(names[shard::4], file)
        save_file({name: tensors[name] for name in names[shard::4]}, made / file, {"format": "pt"})
    (made / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return made


def _random_blocks(name: str, weight: npt.NDArray[Any]) -> tuple[npt.NDArray[np.uint8], str]:
    """Random integers in K types, mixed as llama.cpp's Q4_K_M has them.  # [outputs, bytes]"""
    kind = "Q6_K" if "attn_v" in name or "ffn_down" in name else "Q4_K"
    layout, scales = QUANT_TYPES[kind], (208,) if kind == "Q6_K" else (0, 2)
    shape = len(weight), weight.shape[1] // layout.inputs, layout.size
    raw = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    for place in scales:
        raw[..., place : place + 2] = np.full((*shape[:2], 1), 1e-4, np.float16).view(np.uint8)
    return raw.reshape(len(weight), -1), kind


# --- one process ----------------------------------------------------------------------------------


def _resident(pid: int | str = "self") -> dict[str, int]:
    """Bytes by the kernel's names."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    pairs = (line.split(":") for line in lines)
    return {
        name: int(value.split()[0]) * 1024
        for name, value in pairs
        if name in ("VmRSS", "VmHWM", "RssAnon")
    }


def _load(model: str, dtype: str, path: str) -> None:
    """The loading process: prints its progress, and stays until its input ends."""
    import tokenizers  # noqa: F401

    from paceline.config import SpeculationConfig
    from paceline.engine import Engine
    from paceline.loading import load_engine, load_runner
    from paceline.models import kernels
    from paceline.sampling import SamplingParams
    from paceline.target import ModelTarget

    if path == "general":
        import transformers.models.llama.modeling_llama  # noqa: F401
    kernels.load()

    def say(**more: Any) -> None:
        print(json.dumps(_resident() | more), flush=True)

    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    say()
    start = time.perf_counter()
    if model:
        if path == "general":
            engine = Engine(ModelTarget(load_runner(model, dtype=dtype, general=True)))
        else:
            engine = load_engine(model, dtype=dtype)
        say(seconds=time.perf_counter() - start, fingerprint=str(engine.target.fingerprint))
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        engine.generate([list(range(4, 20))], params, SpeculationConfig(method="ar"))
        say()
    sys.stdin.read()


@contextmanager
def _process(*options: str, cache: Path) -> Iterator[subprocess.Popen[str]]:
    environment = os.environ | {
        "PACELINE_CACHE_DIR": str(cache), "PACELINE_MEASURE": "off", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.memory", "--load", *options],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.communicate()


def _said(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"a load failed with {process.wait()}")
    said: dict[str, Any] = json.loads(line)
    return said


class _Watch(threading.Thread):
    """The maximum of a process's anonymous memory while this context is open."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._pid, self._ended, self.most = pid, threading.Event(), 0
        self.start()

    def run(self) -> None:
        while not self._ended.wait(0.001):
            self.most = max(self.most, _resident(self._pid).get("RssAnon", 0))

    def end(self) -> int:
        self._ended.set()
        self.join()
        return self.most


def measure_load(name: str, model: Path, dtype: str, path: str, cache: Path) -> Load:
    """Load a model in a process of its own."""
    warm = any((cache / "paceline" / "packed").glob("*.json"))
    with _process(str(model), dtype, path, cache=cache) as process:
        base = _said(process)
        watch = _Watch(process.pid)
        loaded = _said(process)
        anonymous = watch.end()
        used = _said(process)
    return Load(
        checkpoint=name, dtype=dtype, path=path, cache="warm" if warm else "cold",
        base=base["VmRSS"], peak=loaded["VmHWM"] - base["VmRSS"],
        peak_anonymous=anonymous - base["RssAnon"], used=used["VmRSS"] - base["VmRSS"],
        used_anonymous=used["RssAnon"] - base["RssAnon"], seconds=loaded["seconds"],
    )  # fmt: skip


# --- replicas -------------------------------------------------------------------------------------


def measure_replicas(model: Path, dtype: str, count: int, cache: Path) -> dict[str, int]:
    """PSS of ``count`` processes together, in bytes, with the model and without it."""

    def together(*options: str, steps: int) -> int:
        processes = [_process(*options, cache=cache) for _ in range(count)]
        running = [process.__enter__() for process in processes]
        try:
            for process in running:
                for _ in range(steps):
                    _said(process)
            rollups = [Path(f"/proc/{p.pid}/smaps_rollup").read_text() for p in running]
            return sum(
                int(line.split()[1]) * 1024
                for text in rollups for line in text.splitlines() if line.startswith("Pss:")
            )  # fmt: skip
        finally:
            for process in processes:
                process.__exit__(None, None, None)

    with _process(str(model), dtype, "fast", cache=cache) as process:  # fills the cache
        for _ in range(3):
            _said(process)
    return {
        "with_model": together(str(model), dtype, "fast", steps=3),
        "without": together("", dtype, "fast", steps=1),
    }


# --- the table ------------------------------------------------------------------------------------


@contextmanager
def _cache(folder: Path) -> Iterator[Path]:
    """A cache that holds only compiled kernels."""
    with tempfile.TemporaryDirectory(dir=folder, prefix="cache-") as name:
        (Path(name) / "paceline").mkdir()
        (Path(name) / "paceline" / "kernels").symlink_to(cache_folder("kernels"))
        yield Path(name)


HEADER = ("checkpoint", "dtype", "path", "cache", "peak", "anon", "used", "anon", "peak/used", "s")


def _row(load: Load) -> tuple[str, ...]:
    numbers = (load.peak, load.peak_anonymous, load.used, load.used_anonymous)
    return (
        load.checkpoint, load.dtype, load.path, load.cache,
        *(f"{number / MB:.0f}" for number in numbers), f"{load.ratio:.2f}", f"{load.seconds:.1f}",
    )  # fmt: skip


def _print(cells: Sequence[str]) -> None:
    print("| " + " | ".join(cells) + " |", flush=True)


def _chosen(text: str, allowed: Sequence[str], option: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    for name in names:
        if name not in allowed:
            sys.exit(f"{option}: {name!r} is none of {', '.join(allowed)}")
    return names


def _loads(options: argparse.Namespace, folder: Path) -> Iterator[Load]:
    kinds = _chosen(options.checkpoints, (*FOLDERS, *FILES), "--checkpoints")
    dtypes = _chosen(options.dtypes, DTYPES, "--dtypes")
    paths = _chosen(options.paths, ("fast", "general"), "--paths")
    models = [(name, resolve_model(name)) for name in options.models.split(",") if name]
    for name, model in [*models, *((kind, None) for kind in kinds)]:
        found = model or make_checkpoint(name, folder)
        for path in paths if found.is_dir() else ("fast",):
            for dtype in dtypes:
                if (path == "general" or name in FILES or model) and dtype not in FLOATS:
                    continue
                with _cache(folder) as cache:
                    for _ in range(2 if path == "fast" else 1):
                        yield measure_load(name, found, dtype, path, cache)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="smollm2", help=f"names: {', '.join(KNOWN_NAMES)}, ...")
    parser.add_argument("--checkpoints", default=",".join((*FOLDERS, *FILES)), help="random ones")
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--paths", default="fast,general")
    parser.add_argument(
        "--replicas", type=int, default=0, help="measure only this many processes at once"
    )
    parser.add_argument("--folder", type=Path, help="for checkpoints; default: temporary")
    parser.add_argument("--out", type=Path, help="also write the numbers to this file, as JSON")
    parser.add_argument("--load", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load is not None:
        _load(*options.load)
        return
    environment = describe_environment()
    found: dict[str, Any] = {"environment": environment, "loads": [], "replicas": []}
    print(f"{environment['cpu']}, {environment['cores']} cores; MB above an engine without a model")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        if options.replicas:
            for name in options.models.split(","):
                with _cache(folder) as cache:
                    pss = measure_replicas(resolve_model(name), "auto", options.replicas, cache)
                found["replicas"].append({"model": name, "count": options.replicas, **pss})
                own = pss["with_model"] - pss["without"]
                print(
                    f"{options.replicas} replicas of {name}: {pss['with_model'] / MB:.0f} MB (PSS) "
                    f"together, {pss['without'] / MB:.0f} without a model, {own / MB:.0f} more"
                )
        else:
            _print(HEADER)
            _print(["---"] * 4 + ["--:"] * 6)
            for load in _loads(options, folder):
                _print(_row(load))
                found["loads"].append(asdict(load) | {"ratio": load.ratio})
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
