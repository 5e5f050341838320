"""How close a quantised model's logits are to those of its weights, and whether they are stable.

    python -m benchmarks.quality --text FILE [--model smollm2] [--tokens 20000] [--out FILE]

Three tables, all on the same GGUF file and the same tokens of a text in windows of 512:

1. KL divergence of Paceline's logits (inputs rounded to eight bits) from transformers' on the
   dequantised weights in float32, also for the roundings that Paceline makes itself (`--dtype`).
2. Perplexity, beside llama.cpp's.
3. One or sixteen: at how many positions the logits have the same bits, and the same best token,
   whether tokens are verified one at a time or sixteen at a time; for every type, beside llama.cpp.

llama.cpp takes part where `llama-cpp-python` is installed (docs/benchmarks.md).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.to_gguf import TYPES, to_gguf
from paceline.bench.environment import describe_environment
from paceline.gguf_folder import model_folder
from paceline.loading import load_runner
from paceline.model_names import resolve_model
from paceline.models.base import ModelRunner, Segment
from paceline.models.llama_config import LlamaConfig
from paceline.models.llama_tensors import load_weights
from paceline.models.quants import quantise
from paceline.tokenizer import load_tokenizer

WINDOW = 512
K_TYPES = {"Q4_K_M": 15, "Q5_K_M": 17, "Q6_K": 18}
"""Mixtures of types that llama.cpp makes, with its numbers for them."""
OWN_ROUNDINGS = {"q8_0": "Q8_0", "q4_0": "Q4_0"}

Logits = npt.NDArray[np.float32]
Compute = Callable[[Sequence[int], int], Logits]
"""Logits after each of some tokens, given so many of them at a time.  # [num_tokens, vocab_size]"""


def log_softmax(logits: Logits) -> npt.NDArray[np.float64]:
    """In float64.  # [rows, vocab_size]"""
    wide = logits.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(-1, keepdims=True))
    return wide


def of_runner(runner: ModelRunner) -> Compute:
    """Paceline's logits."""

    def compute(tokens: Sequence[int], at_once: int) -> Logits:
        sequence, rows = runner.new_sequence(), []
        try:
            for start in range(0, len(tokens), at_once):
                ids = np.asarray(tokens[start : start + at_once], np.int64)
                rows.append(runner.forward([Segment(sequence, ids, logits="all")]).logits.numpy())
                runner.commit(sequence, range(len(ids)))
        finally:
            runner.free(sequence)
        return np.concatenate(rows)

    return compute


def of_llama_cpp(file: Path, threads: int) -> Compute | None:
    """llama.cpp's logits, where it is installed."""
    try:
        import llama_cpp
    except ImportError:
        return None
    model = llama_cpp.Llama(
        str(file), n_ctx=WINDOW, n_batch=WINDOW, n_threads=threads, n_threads_batch=threads,
        logits_all=True, verbose=False,
    )  # fmt: skip

    def compute(tokens: Sequence[int], at_once: int) -> Logits:
        model.reset()
        for start in range(0, len(tokens), at_once):
            model.eval(tokens[start : start + at_once])
        return np.array(model.scores[: len(tokens)], np.float32)

    return compute


def of_transformers(config: Path, weights: dict[str, torch.Tensor]) -> Compute:
    """transformers' logits in float32, of weights by Hugging Face's names."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = AutoConfig.from_pretrained(config)
    model = AutoModelForCausalLM.from_config(settings, dtype=torch.float32).eval()
    lacking, unknown = model.load_state_dict(weights, strict=False)
    assert not unknown and set(lacking) <= {"lm_head.weight"}, (lacking, unknown)
    model.tie_weights()

    def compute(tokens: Sequence[int], at_once: int) -> Logits:
        assert at_once >= len(tokens)
        with torch.no_grad():
            logits = model(torch.tensor([list(tokens)])).logits[0]
        return np.asarray(logits.numpy(), np.float32)

    return compute


def divergence(ours: Compute, theirs: Compute, windows: Sequence[Sequence[int]]) -> dict[str, Any]:
    """KL(theirs || ours) for each token, in nats."""
    values, same = [], []
    for window in track(windows, "KL divergence", transient=True):
        p, q = log_softmax(theirs(window, WINDOW)), log_softmax(ours(window, WINDOW))
        values.append((np.exp(p) * (p - q)).sum(-1))
        same.append(p.argmax(-1) == q.argmax(-1))
    kl = np.concatenate(values)
    return {
        "tokens": len(kl), "mean": float(kl.mean()), "median": float(np.median(kl)),
        "p99": float(np.quantile(kl, 0.99)), "max": float(kl.max()),
        "same_best": float(np.concatenate(same).mean()),
    }  # fmt: skip


def perplexity(compute: Compute, windows: Sequence[Sequence[int]], what: str) -> float:
    """exp of the mean negative log-likelihood of each window's tokens but the first."""
    total = count = 0.0
    for window in track(windows, f"perplexity, {what}", transient=True):
        logs = log_softmax(compute(window, WINDOW)[:-1])
        total -= logs[np.arange(len(logs)), window[1:]].sum()
        count += len(logs)
    return math.exp(total / count)


def steadiness(compute: Compute, tokens: Sequence[int]) -> dict[str, int]:
    """Compare one token at a time with sixteen at a time."""
    one, sixteen = compute(tokens, 1), compute(tokens, 16)
    return {
        "positions": len(tokens),
        "same_bits": int((one.view(np.uint32) == sixteen.view(np.uint32)).all(-1).sum()),
        "same_best": int((one.argmax(-1) == sixteen.argmax(-1)).sum()),
    }


def rounded(weights: dict[str, torch.Tensor], kind: str) -> dict[str, torch.Tensor]:
    """The weights after the rounding of `--dtype`, which leaves vectors as they are."""
    return {
        name: tensor if tensor.ndim == 1 or "embed_tokens" in name
        else torch.from_numpy(quantise(tensor.numpy(), kind).floats())
        for name, tensor in weights.items()
    }  # fmt: skip


def write_folder(source: Path, weights: dict[str, torch.Tensor], out: Path) -> Path:
    """A model folder in float32, with an output layer of its own."""
    from safetensors.torch import save_file

    out.mkdir()
    for file in model_folder(source).glob("*.json"):
        if not file.name.startswith("model"):
            (out / file.name).write_text(file.read_text("utf-8"), "utf-8")
    save_file({name: tensor.contiguous() for name, tensor in weights.items()},
              out / "model.safetensors")  # fmt: skip
    return out


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence llama.cpp, which writes a line for each tensor to the process's own stderr."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def files_of_every_type(folder: Path, out: Path) -> dict[str, Path]:
    """The model as a GGUF file of each type; K types where llama.cpp is there to make them."""
    files = {}
    for kind in track(TYPES, "writing files", transient=True):
        files[kind] = out / f"{kind}.gguf"
        to_gguf(folder, files[kind], kind)
    try:
        import llama_cpp
    except ImportError:
        return files
    for kind, number in K_TYPES.items():
        settings = llama_cpp.llama_model_quantize_default_params()
        settings.ftype = number
        file = out / f"{kind}.gguf"
        with quiet():
            failed = llama_cpp.llama_model_quantize(
                str(files["F32"]).encode(), str(file).encode(), settings
            )
        if not failed:
            files[kind] = file
    return files


def measure(options: argparse.Namespace) -> dict[str, Any]:
    source = resolve_model(options.model)
    text = options.text.read_text("utf-8")
    tokens = load_tokenizer(source).encode(text[: 8 * options.tokens], add_special_tokens=False)
    tokens = tokens[: options.tokens]
    windows = [tokens[i : i + WINDOW] for i in range(0, len(tokens) - WINDOW + 1, WINDOW)]
    if not windows:
        raise SystemExit(f"{options.text} has {len(tokens)} tokens: at least {WINDOW} are needed")
    few = windows[: options.windows]
    model = model_folder(source)
    weights = {
        name: tensor.float()
        for name, tensor in load_weights(model, LlamaConfig.from_folder(model)).items()
    }
    result: dict[str, Any] = {
        "model": options.model, "text": options.text.name, "tokens": len(windows) * WINDOW,
        "processor": describe_environment()["cpu"], "threads": torch.get_num_threads(),
    }  # fmt: skip
    ours = of_runner(load_runner(source, dtype="auto"))
    theirs = of_transformers(model_folder(source), weights)
    result["divergence"] = {"as the file has them": divergence(ours, theirs, few)}
    llama_cpp = of_llama_cpp(source, options.threads)
    result["perplexity"] = {"Paceline": perplexity(ours, windows, "Paceline")}
    if llama_cpp is not None:
        result["divergence"]["llama.cpp"] = divergence(llama_cpp, theirs, few)
        result["perplexity"]["llama.cpp"] = perplexity(llama_cpp, windows, "llama.cpp")
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_folder(source, weights, Path(scratch) / "floats")
        for dtype, kind in OWN_ROUNDINGS.items():
            found = of_runner(load_runner(folder, dtype=dtype))
            other = of_transformers(folder, rounded(weights, kind))
            result["divergence"][f"--dtype {dtype}"] = divergence(found, other, few)
        result["one_or_sixteen"] = {}
        sample = tokens[: options.positions]
        files = files_of_every_type(folder, Path(scratch))
        for kind, file in track(files.items(), "one or sixteen", transient=True):
            row = {"Paceline": steadiness(of_runner(load_runner(file, dtype="auto")), sample)}
            peer = of_llama_cpp(file, options.threads)
            if peer is not None:
                row["llama.cpp"] = steadiness(peer, sample)
            result["one_or_sixteen"][kind] = row
    return result


def show(result: dict[str, Any]) -> None:
    console = Console()
    console.print(
        f"{result['model']} · {result['tokens']} tokens of {result['text']} · "
        f"{result['processor']}, {result['threads']} threads", highlight=False,
    )  # fmt: skip
    table = Table(title="KL divergence from transformers in float32 on the same weights, nats")
    for column in ("", "mean", "median", "99 %", "largest", "same best token"):
        table.add_column(column, justify="right" if column else "left")
    for name, row in result["divergence"].items():
        numbers = [f"{row[key]:.2e}" for key in ("mean", "median", "p99", "max")]
        table.add_row(name, *numbers, f"{row['same_best']:.1%}")
    console.print(table)
    console.print(
        "perplexity: "
        + ", ".join(f"{name} {value:.3f}" for name, value in result["perplexity"].items()),
        highlight=False,
    )
    table = Table(title="one or sixteen tokens verified at once: positions with the same")
    for column in ("type", "Paceline: bits", "best token", "llama.cpp: bits", "best token"):
        table.add_column(column, justify="right" if column != "type" else "left")
    for kind, row in result["one_or_sixteen"].items():
        cells = []
        for system in ("Paceline", "llama.cpp"):
            found = row.get(system)
            of = "" if found is None else f" of {found['positions']}"
            cells += [
                "–" if found is None else f"{found[key]}{of}" for key in ("same_bits", "same_best")
            ]
        table.add_row(kind, *cells)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, required=True, help="of which tokens are taken")
    parser.add_argument("--model", default="smollm2", help="a GGUF file, or a name of one")
    parser.add_argument("--tokens", type=int, default=20_000, help="for the perplexity")
    parser.add_argument("--windows", type=int, default=4, help=f"of {WINDOW}, for the divergence")
    parser.add_argument("--positions", type=int, default=128, help="for one or sixteen")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, help="a file for the numbers")
    options = parser.parse_args()
    result = measure(options)
    show(result)
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
