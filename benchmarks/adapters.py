"""What an adapter (LoRA) costs: tokens a second with and without, for one session and for several.

    python -m benchmarks.adapters [--target demo] [--rank 16] [--sessions 1,8] [--tokens 128]
        [--repetitions 5] [--threads 1] [--dtype auto] [--adapter-dtype float32]
    python -m benchmarks.adapters --write FOLDER [--target demo] [--rank 16]

Adapters of all linear layers, with random numbers, are written in PEFT's format to a temporary
folder and loaded beside the target. All sessions decode as AR, together and after the same prompt:
with none, with one adapter, and each with an adapter of its own. The three take turns. Each
session's tokens are compared with those that it has alone. With `--write`, one such adapter is all
that is made.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch
from safetensors.torch import save_file

from paceline.bench.environment import describe_environment
from paceline.config import SpeculationConfig
from paceline.engine import Engine, EngineLimits
from paceline.gguf_folder import model_folder
from paceline.loading import limit_threads, load_engine
from paceline.model_names import resolve_model
from paceline.models.llama_config import LlamaConfig
from paceline.models.llama_tensors import linear_names, tensor_shapes
from paceline.request import Request
from paceline.sampling import SamplingParams

AR = SpeculationConfig(method="ar")
PROMPT = "A language model predicts"


def write_adapter(
    folder: Path, base: Path, rank: int, seed: int, dtype: torch.dtype = torch.float32
) -> Path:
    """A random adapter of all linear layers of a model's layers, as PEFT writes it."""
    config = LlamaConfig.from_folder(base)
    shapes, generator = tensor_shapes(config), torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config.num_layers):
        for module in (name for names in linear_names(config, layer).values() for name in names):
            outputs, inputs = shapes[f"{module}.weight"]
            for part, shape in (("lora_A", (rank, inputs)), ("lora_B", (outputs, rank))):
                wide = 0.3 * shape[1] ** -0.5
                values = wide * torch.randn(shape, generator=generator)
                tensors[f"base_model.model.{module}.{part}.weight"] = values.to(dtype)
    folder.mkdir()
    fields = {
        "peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": "all-linear",
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    return folder


def generate(
    engine: Engine, adapters: Sequence[str], num_tokens: int
) -> tuple[float, list[list[int]]]:
    """Decode with each of the adapters at once; tokens a second after the prompts, and tokens."""
    assert engine.tokenizer is not None
    prompt = engine.tokenizer.encode(PROMPT)
    params = SamplingParams(max_tokens=num_tokens + 1, ignore_eos=True)
    sessions = [engine.submit(Request(prompt, params, AR, adapter=name)) for name in adapters]
    while any(session.stats.num_tokens == 0 for session in sessions):
        engine.step()
    before = sum(session.stats.num_tokens for session in sessions)
    started = time.perf_counter()
    while engine.has_work:
        engine.step()
    seconds = time.perf_counter() - started
    count = sum(session.stats.num_tokens for session in sessions) - before
    return count / seconds, [session.output_ids for session in sessions]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="demo")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--sessions", default="1,8", help="numbers of sessions, by commas")
    parser.add_argument("--tokens", type=int, default=128, help="of each session")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument(
        "--adapter-dtype", default="float32", choices=("float32", "bfloat16"),
        help="in which the adapters are stored; products read as many bytes",
    )  # fmt: skip
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="only write an adapter")
    options = parser.parse_args()
    counts = [int(count) for count in options.sessions.split(",")]
    limit_threads(options.threads)
    base = model_folder(resolve_model(options.target))
    stored = getattr(torch, options.adapter_dtype)
    if options.write is not None:
        write_adapter(options.write, base, options.rank, 0, stored)
        return
    names = [f"adapter-{i}" for i in range(max(counts))]
    with tempfile.TemporaryDirectory() as scratch:
        engine = load_engine(
            options.target, dtype=options.dtype, kv_tokens=max(counts) * (options.tokens + 64),
            limits=EngineLimits(prefix_cache=False),
            adapters={
                name: write_adapter(Path(scratch) / name, base, options.rank, seed, stored)
                for seed, name in enumerate(names)
            },
        )  # fmt: skip
    environment = describe_environment()
    print(
        f"{environment['cpu']}, {options.threads} threads; {options.target}, rank {options.rank} "
        f"in all linear layers, {options.adapter_dtype}, AR, {options.tokens} tokens; "
        f"commit {environment['git_commit']}"
    )
    alone = {name: generate(engine, [name], options.tokens)[1][0] for name in ("", *names)}
    print(f"{'sessions':>8}  {'adapters':12}{'tokens/s':>9}{'range':>15}{'to none':>9}")
    for count in counts:
        mixes = {"none": [""] * count, "one": names[:1] * count}
        if count > 1:
            mixes["one each"] = names[:count]
        rates: dict[str, list[float]] = {label: [] for label in mixes}
        for _ in range(options.repetitions):
            for label, mix in mixes.items():
                rate, tokens = generate(engine, mix, options.tokens)
                assert tokens == [alone[name] for name in mix], "tokens depend on the batch"
                rates[label].append(rate)
        for label, found in rates.items():
            ratios = [a / b for a, b in zip(found, rates["none"], strict=True)]
            spread = f"{min(found):.0f} to {max(found):.0f}"
            print(f"{count:8}  {label:12}{median(found):9.0f}{spread:>15}{median(ratios):9.2f}")


if __name__ == "__main__":
    main()
