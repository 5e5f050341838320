"""Measure methods against AR, interleaved, in one process, on the same prompts.

Every repetition runs every method on every group of prompts, in an order that rotates, so that a
change in the machine's speed affects all of them. ``tokens_per_second`` is measured
from end to end, prefill included, the same way for the engine and for transformers' ``generate``;
``decode_tokens_per_second`` leaves the time to the first token out. A speedup is the median of
paired ratios: the same prompts in the same repetition.

``speedup_bound`` is the speedup that the same tokens per forward would give with a drafter that
takes no time: ``tau * cost(1) / cost(n)``, where ``cost(1)`` is a round of AR, and ``cost(n)`` the
same round with the forwards that verified this method's drafts. All of them are measured in the
same run, and paired like speedups.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.bench import peers as peer_names
from paceline.bench.backends import (
    Backend,
    BatchRun,
    LocalBackend,
    encode_turns,
    without_kernels,
)
from paceline.bench.environment import describe_environment
from paceline.bench.peers import TransformersPeer
from paceline.bench.prompts import Prompt, builtin_prompts, limit_per_category
from paceline.bench.suites import SUITES, read_prompts
from paceline.bench.synthetic import Mix
from paceline.chat import template_of
from paceline.config import SpeculationConfig, parse_speculation
from paceline.demo import TARGET_DIR
from paceline.engine import EngineLimits
from paceline.errors import InvalidArgument
from paceline.loading import DTYPES, load_engine, load_runner, pick_device
from paceline.methods import METHODS
from paceline.model_names import default_drafter, resolve_model
from paceline.models.base import Segment
from paceline.numerics import NUMERICS
from paceline.plan import Plan, resolve
from paceline.sampling import SamplingParams
from paceline.tokenizer import ChatTemplate

Progress = Callable[[int, int, str], None]
"""Called with (runs done, total runs, label of the next run)."""

_WARMUP_TOKENS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """The options of a benchmark.

    Attributes:
        target, drafter: folders or names of models (:mod:`paceline.model_names`); without a
            target, the demo pair.
        heads: folder of trained heads; see :func:`paceline.loading.load_engine`.
        adapter: folder of the target's adapter with which all methods generate.
        prompts: a file; without one, the built-in prompts.
        suite: the format of ``prompts`` (:mod:`paceline.bench.suites`); None: Spec-Bench's.
        chat: ask the prompts as questions, with the target's chat template and all turns of a
            conversation, and end an answer where the model ends it; None: if the target has a
            template and the prompts come from a file. AR's answers to earlier turns are the history
            of later ones for all methods.
        methods: "all", or methods of the catalogue, as a sequence or separated by commas. Knobs
            follow a method's name: ``draft_model:num_speculative_tokens=6``. AR always runs.
        batch: prompts generated together.
        repetitions: runs of every method on every prompt.
        limit: prompts of each category at most.
        peers: also run transformers' ``generate``; None: where the two can be compared, at
            temperature 0, without chat or adapter, and with a named dtype.
        batch_invariant: "auto" is the default of the model's path; "both" also measures the cost
            of the mode.
        topology: "colocated" measures an engine in this process; "actors" and "both" need the
            backend of a deployment.
        allow_lossy: also measure methods that can change the target's output.
        numerics: the target's (:mod:`paceline.numerics`).
        synthetic_acceptance: also measure drafts that are right with this probability at each
            token, read from AR's answers (:mod:`paceline.bench.synthetic`); None: do not.
        synthetic_tokens: number of tokens of each such draft.
        samples: also return every run (``samples`` in the result).
    """

    target: str | Path | None = None
    drafter: str | Path | None = None
    heads: str | Path | None = None
    adapter: str | Path | None = None
    prompts: str | Path | None = None
    suite: str | None = None
    chat: bool | None = None
    methods: str | Sequence[str] = "all"
    batch: int = 1
    max_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    repetitions: int = 3
    limit: int | None = None
    peers: bool | None = None
    batch_invariant: str = "auto"
    topology: str = "colocated"
    allow_lossy: bool = False
    dtype: str = "float32"
    device: str = "auto"
    numerics: str = "fastest"
    synthetic_acceptance: float | None = None
    synthetic_tokens: int = 4
    samples: bool = False

    def __post_init__(self) -> None:
        for name in ("batch", "max_tokens", "repetitions", "limit", "synthetic_tokens"):
            value = getattr(self, name)
            if name == "limit" and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InvalidArgument(name, value, "an integer >= 1")
        for name, known in (
            ("batch_invariant", ("auto", "on", "off", "both")),
            ("topology", ("colocated", "actors", "both")),
            ("dtype", ("auto", *DTYPES)),
            ("numerics", NUMERICS),
        ):
            if getattr(self, name) not in known:
                raise InvalidArgument(name, getattr(self, name), f"one of {', '.join(known)}")
        if self.suite is not None and self.suite not in SUITES:
            raise InvalidArgument("suite", self.suite, f"one of {', '.join(SUITES)}")
        if self.suite is not None and self.prompts is None:
            raise InvalidArgument(
                "suite", self.suite, f"a file in prompts ({SUITES[self.suite].file})"
            )
        if self.adapter is not None:
            for name, alone in (("topology", "colocated"), ("batch_invariant", "auto")):
                if getattr(self, name) != alone:
                    raise InvalidArgument(name, getattr(self, name), f"{alone} with an adapter")
            if self.peers:
                raise InvalidArgument("peers", True, "none with an adapter")
        if self.peers and self.temperature != 0:
            raise InvalidArgument(
                "peers",
                True,
                "temperature 0: transformers draws other samples than coupled sampling, so the "
                "outputs cannot be compared",
            )
        rate = self.synthetic_acceptance
        if rate is not None and not 0 <= rate <= 1:  # NaN is neither
            raise InvalidArgument("synthetic_acceptance", rate, "a probability in [0, 1]")
        if rate is not None and self.topology == "actors":
            raise InvalidArgument(
                "synthetic_acceptance", rate,
                "topology colocated or both: its drafter runs in this process",
            )  # fmt: skip
        if self.drafter is not None and self.target is None:
            raise InvalidArgument("drafter", str(self.drafter), "a target to go with it")
        if self.peers and self.dtype == "auto":
            raise InvalidArgument("dtype", "auto", "with peers, one of " + ", ".join(DTYPES))
        if self.peers and self.chat:
            raise InvalidArgument(
                "peers", True,
                "no chat: peers generate a fixed number of tokens, and answers end by themselves",
            )  # fmt: skip
        self.sampling_params(is_chat=False)

    def sampling_params(self, *, is_chat: bool) -> SamplingParams:
        """Without chat, a sequence gets all tokens: end-of-sequence tokens do not stop it."""
        return SamplingParams(
            temperature=self.temperature,
            seed=self.seed,
            max_tokens=self.max_tokens,
            ignore_eos=not is_chat,
        )

    def template(self) -> ChatTemplate | None:
        """The chat template that the prompts go through; None: they are continued as they are."""
        if self.chat is None and (self.prompts is None or self.peers):
            return None
        target = TARGET_DIR if self.target is None else resolve_model(self.target)
        return template_of(target, self.chat)


def parse_methods(
    methods: str | Sequence[str],
    known: Iterable[str],
    *,
    allow_lossy: bool = False,
    unavailable: Mapping[str, str] | None = None,
) -> dict[str, tuple[SpeculationConfig, Plan]]:
    """The request behind each label and the plan that it resolves to; AR first.

    Args:
        known: methods that can run; "all" means the lossless ones, and with ``allow_lossy`` the
            others too.
        unavailable: reasons why other methods cannot.

    Raises:
        InvalidArgument: an unknown method (lists the known ones), a method that cannot run (with
            the reason), a lossy method without ``allow_lossy``, a knob that a method does not have.
    """
    known = [name for name in known if name in METHODS]
    labels = _labels(methods)
    if not labels:
        raise InvalidArgument("methods", methods, f"all, or some of {', '.join(known)}")
    if "all" in labels:
        labels += [name for name in known if METHODS[name].lossless or allow_lossy]
    plans: dict[str, tuple[SpeculationConfig, Plan]] = {}
    for label in ["ar", *(label for label in labels if label != "all")]:
        name, *knobs = _split(label, ":")
        if unavailable and name in unavailable:
            able = f"a method that can run here ({unavailable[name]}): {', '.join(known)}"
            raise InvalidArgument("methods", name, able)
        if name not in known:
            raise InvalidArgument("methods", name, f"all, or some of {', '.join(known)}")
        values: dict[str, Any] = {"method": name, "allow_lossy": allow_lossy}
        for knob in knobs:
            key, equals, text = knob.partition("=")
            if not equals:
                raise InvalidArgument("methods", label, "knobs in the form name:key=value")
            values[key] = _knob_value(text)
        config = parse_speculation(values, f"methods[{label}]")
        plans[label] = (config, resolve(config))
    return plans


def _labels(methods: str | Sequence[str]) -> list[str]:
    labels = _split(methods) if isinstance(methods, str) else methods
    return [label.strip() for label in labels if label.strip()]


def _split(text: str, separator: str = ",") -> list[str]:
    """Split a text at separators, except inside JSON lists."""
    parts, depth = [""], 0
    for sign in text:
        depth += (sign == "[") - (sign == "]")
        if sign == separator and depth <= 0:
            parts.append("")
        else:
            parts[-1] += sign
    return parts


def _knob_value(text: str) -> Any:
    """The JSON value of a text that is JSON, else the text itself: ``4``, ``true``, ``kary``."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def run_bench(
    options: BenchOptions,
    progress: Progress | None = None,
    backends: Sequence[Backend] = (),
    *,
    local: LocalBackend | None = None,
    partial: bool = False,
) -> dict[str, Any]:
    """Run a benchmark and return its result as JSON values.

    Args:
        options: what to measure.
        progress: called before every run.
        backends: deployments to measure beside the engine in this process (topology "both") or in
            its place ("actors"). They must serve the same target.
        local: of :func:`load_backend` with these options; None loads it.
        partial: after Ctrl-C, return the result of the prompts that all methods have had by then.

    Returns:
        ``environment``, ``results`` (a row for each method and category, and for the category
        "all"), ``notes``, ``unavailable`` (methods of "all" that cannot run here, and why),
        ``interrupted`` (whether prompts or repetitions are missing), ``batch_invariant_cost`` if
        both modes were measured, and ``samples`` if they are wanted.

    Raises:
        InvalidArgument: an option is wrong; the message names it.
        ModelNotFound: a model folder is missing or damaged.
        KeyboardInterrupt: Ctrl-C, unless a ``partial`` result can be given.
    """
    if options.topology != "colocated" and not backends:
        raise InvalidArgument(
            "topology", options.topology, "colocated, unless a running deployment is given"
        )
    notes: list[str] = []
    here = [] if options.topology == "actors" else _local_backends(options, notes, local)
    every: list[Backend] = [*here, *(backends if options.topology != "colocated" else ())]
    template = options.template()
    params = options.sampling_params(is_chat=template is not None)
    groups = _groups(options, every[0], template, params, notes)
    entries = _entries(options, every, template is not None, notes)
    if options.synthetic_acceptance is not None:
        entries += [_synthetic_entry(options, b, entries, groups, params) for b in here]
    runs: _Runs = {}
    try:
        _measure(options, every, entries, groups, params, notes, progress, runs)
    except KeyboardInterrupt:
        runs = _whole_comparisons(runs, len(entries))
        if not (partial and runs):
            raise
    measured, wanted = len(runs) // len(entries), options.repetitions * len(groups)
    if measured < wanted:
        notes.append(f"interrupted: {measured} of {wanted} runs of each method are in the table")
    result: dict[str, Any] = {
        "environment": {
            **describe_environment(),
            **_settings(options, every),
            "chat": template is not None,
        },
        "results": _rows(options, entries, groups, runs),
        "notes": notes,
        "interrupted": measured < wanted,
        "unavailable": [
            {"method": name, "reason": reason, "topology": backend.topology}
            for backend in every
            for name, reason in backend.unavailable.items()
            if "all" in _labels(options.methods)
        ],
    }
    if options.samples:
        result["samples"] = _samples(options, entries, groups, runs)
    if options.batch_invariant == "both" and len(here) == 2 and measured == wanted:
        result["batch_invariant_cost"] = _batch_invariant_cost(options, *here)
    return result


def _local_backends(
    options: BenchOptions, notes: list[str], given: LocalBackend | None
) -> list[LocalBackend]:
    if given is not None:
        return [given]
    if options.batch_invariant == "both":
        on = load_backend(options, batch_invariant=True)
        off = load_backend(options, batch_invariant=False)
        if off.batch_invariant:
            with without_kernels():
                off = load_backend(options, batch_invariant=False)
            notes.append(
                "the C kernels are always batch-invariant, so the mode is off in plain torch only"
            )
        return [on, off]
    mode = {"auto": None, "on": True, "off": False}[options.batch_invariant]
    backend = load_backend(options, batch_invariant=mode)
    if mode is False and backend.batch_invariant:
        notes.append("the C kernels are always batch-invariant: switching it off gains nothing")
    return [backend]


def load_backend(options: BenchOptions, *, batch_invariant: bool | None = None) -> LocalBackend:
    """The engine that a benchmark with these options measures in this process."""
    engine = load_engine(
        options.target,
        options.drafter,
        heads=options.heads,
        dtype=options.dtype,
        device=options.device,
        batch_invariant=batch_invariant,
        numerics=options.numerics,
        translate="omnidraft" in (options.methods or ""),
        adapters=None if options.adapter is None else {"adapter": options.adapter},
        # Prompts repeat here, and every repetition must cost the same.
        limits=EngineLimits(max_sessions=max(64, options.batch), prefix_cache=False),
    )
    return LocalBackend(engine)


# --- prompts -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Group:
    """Prompts of one category, generated together."""

    category: str
    prompt_ids: tuple[str, ...]
    token_ids: tuple[tuple[int, ...], ...]


def _groups(
    options: BenchOptions,
    backend: Backend,
    template: ChatTemplate | None,
    params: SamplingParams,
    notes: list[str],
) -> list[_Group]:
    if options.prompts is None:
        given: Sequence[Prompt] = builtin_prompts()
    else:
        given = read_prompts(options.prompts, options.suite or "spec-bench")
    prompts = limit_per_category(given, options.limit)
    room = backend.context_length - options.max_tokens
    if room < 1:
        raise InvalidArgument(
            "max_tokens", options.max_tokens, f"less than the context of {backend.context_length}"
        )
    encoded: list[tuple[Prompt, tuple[int, ...]]] = []
    num_cut = 0
    for prompt in prompts:
        for turn in encode_turns(prompt, backend, template, params, room):
            ids = turn[1]
            if not ids:
                raise InvalidArgument("prompts", prompt.prompt_id, "a text of at least one token")
            num_cut += len(ids) > room
            encoded.append((turn[0], tuple(ids[-room:])))
    if num_cut:
        notes.append(
            f"{num_cut} of {len(encoded)} prompts were cut from the left to {room} tokens, so that "
            f"{options.max_tokens} more fit into the context of {backend.context_length}"
        )
    groups = []
    for category in dict.fromkeys(prompt.category for prompt in prompts):
        members = [item for item in encoded if item[0].category == category]
        for start in range(0, len(members), options.batch):
            # A last group that is too small is filled up from the start of the category: rows of
            # different batch sizes could not be compared.
            chosen = [members[(start + i) % len(members)] for i in range(options.batch)]
            groups.append(
                _Group(
                    category,
                    tuple(prompt.prompt_id for prompt, _ in chosen),
                    tuple(ids for _, ids in chosen),
                )
            )
        if len(members) % options.batch:
            notes.append(
                f"{category}: {len(members)} prompts do not fill batches of {options.batch}; some "
                "run more than once"
            )
    return groups


# --- what runs -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """A line of the comparison: a method on a backend.

    Attributes:
        baseline: index of the entry of AR on the same backend, over which speedups are measured.
        reference: index of the entry of AR whose tokens these have to be.
        has_same_tokens: whether its tokens must be AR's; None if they may differ by design.
    """

    method: str
    topology: str
    batch_invariant: bool | None
    generate: Callable[[Sequence[Sequence[int]], SamplingParams], BatchRun]
    baseline: int
    reference: int
    has_same_tokens: bool | None = True
    note: str | None = None


def _entries(
    options: BenchOptions, backends: Sequence[Backend], is_chat: bool, notes: list[str]
) -> list[_Entry]:
    entries: list[_Entry] = []
    first_invariant = backends[0].batch_invariant
    for backend in backends:
        baseline = len(entries)
        plans = parse_methods(
            options.methods,
            backend.methods,
            allow_lossy=options.allow_lossy,
            unavailable=backend.unavailable,
        )
        for label, (config, plan) in plans.items():
            same: bool | None = True
            note = None
            if not plan.rule.lossless:
                same, note = None, f"the rule {plan.rule.name} is not lossless"
            elif not plan.method.lossless:
                same, note = None, "leaves out layers of the target"
            elif options.temperature > 0 and plan.rule.name not in ("coupled", "greedy"):
                same = None
                note = f"the rule {plan.rule.name} has AR's distribution, not its tokens"
            entries.append(
                _Entry(
                    method=label,
                    topology=backend.topology,
                    batch_invariant=backend.batch_invariant,
                    generate=_generate_with(backend, config),
                    baseline=baseline,
                    # Two batch-invariant targets agree with each other, wherever they run.
                    reference=0 if backend.batch_invariant and first_invariant else baseline,
                    has_same_tokens=same,
                    note=note,
                )
            )
    comparable = options.temperature == 0 and not is_chat and options.dtype != "auto"
    comparable = comparable and options.adapter is None
    if options.peers or (options.peers is None and comparable):
        entries += _peer_entries(options, notes)
    return entries


def _generate_with(
    backend: Backend, config: SpeculationConfig
) -> Callable[[Sequence[Sequence[int]], SamplingParams], BatchRun]:
    return lambda prompts, params: backend.generate(config, prompts, params)


def _synthetic_config(options: BenchOptions) -> SpeculationConfig:
    """The request of synthetic drafts, whose drafter stands in for that of ``prompt_lookup``."""
    return SpeculationConfig(
        method="prompt_lookup",
        length="fixed",
        num_speculative_tokens=options.synthetic_tokens,
        acceptance="coupled",
    )


def _synthetic_entry(
    options: BenchOptions,
    backend: LocalBackend,
    entries: Sequence[_Entry],
    groups: Sequence[_Group],
    params: SamplingParams,
) -> _Entry:
    assert options.synthetic_acceptance is not None
    answers: dict[tuple[int, ...], Sequence[int]] = {}
    for group in groups:
        run = backend.generate(SpeculationConfig(method="ar"), group.token_ids, params)
        for prompt, sequence in zip(group.token_ids, run.sequences, strict=True):
            answers[prompt] = sequence.token_ids
    engine = backend.engine.sibling()
    engine.drafters["prompt_lookup"] = Mix(
        answers,
        engine.target.vocab_size,
        rho=options.synthetic_acceptance,
        seed=options.seed,
    )
    baseline = next(
        i
        for i, entry in enumerate(entries)
        if entry.topology == backend.topology and entry.batch_invariant == backend.batch_invariant
    )
    return _Entry(
        # No name of a method has parentheses.
        method=f"synthetic({options.synthetic_acceptance:g}, {options.synthetic_tokens})",
        topology=backend.topology,
        batch_invariant=backend.batch_invariant,
        generate=_generate_with(LocalBackend(engine), _synthetic_config(options)),
        baseline=baseline,
        reference=entries[baseline].reference,
        note="not a method: drafts read from AR's answers, each token right with probability "
        f"{options.synthetic_acceptance:g}; making them takes next to no time",
    )


def _peer_entries(options: BenchOptions, notes: list[str]) -> list[_Entry]:
    drafter = options.drafter or default_drafter(options.target)
    peer = TransformersPeer(
        resolve_model(options.target or TARGET_DIR),
        None if drafter is None else resolve_model(drafter),
        dtype=DTYPES[options.dtype],
        device=torch.device(pick_device(options.device)),
    )
    methods = peer.methods
    if options.batch > 1:
        methods = [peer_names.AR]
        notes.append(
            "transformers' assisted decoding takes one sequence: with batches, its AR runs alone"
        )
    notes.append(
        "transformers: generate() with the same weights, dtype, threads, prompts and number of "
        "tokens, greedy; an assistant model drafts with transformers' own defaults"
    )

    def generate_with(
        method: str,
    ) -> Callable[[Sequence[Sequence[int]], SamplingParams], BatchRun]:
        return lambda prompts, params: peer.generate(method, prompts, params.max_tokens)

    return [
        _Entry(
            method=method,
            topology="colocated",
            batch_invariant=None,
            generate=generate_with(method),
            baseline=0,
            reference=0,
            note="computed by other code: ties within rounding may fall differently",
        )
        for method in methods
    ]


# --- measuring -----------------------------------------------------------------------------------

_Runs = dict[tuple[int, int, int], BatchRun]
"""By (entry, group, repetition)."""


def _measure(
    options: BenchOptions,
    backends: Sequence[Backend],
    entries: Sequence[_Entry],
    groups: Sequence[_Group],
    params: SamplingParams,
    notes: list[str],
    progress: Progress | None,
    runs: _Runs,
) -> None:
    """Fill ``runs``, which has all that was measured when this is interrupted."""
    total = len(entries) * (1 + options.repetitions * len(groups))
    done = 0

    def tell(what: str) -> None:
        if progress is not None:
            progress(done, total, what)

    for entry in entries:  # first runs allocate, compile and read pages: they are not counted
        tell(f"warming up {entry.method}")
        entry.generate(groups[0].token_ids, replace(params, max_tokens=_warmup_tokens(options)))
        done += 1
    for repetition in range(options.repetitions):
        # The same prompts come again, and drafters that learn would know their answers.
        remembering = [backend.topology for backend in backends if not backend.forget()]
        if remembering and repetition == 1:
            notes.append(
                f"{', '.join(remembering)}: drafters that learn from earlier requests "
                "(suffix_decoding, sam_decoding and their kin) have met the prompts in earlier "
                "repetitions"
            )
        for g, group in enumerate(groups):
            for turn in range(len(entries)):
                e = (turn + g + repetition) % len(entries)
                tell(f"{entries[e].method} on {group.category}")
                runs[e, g, repetition] = entries[e].generate(group.token_ids, params)
                done += 1
    tell("done")


def _whole_comparisons(runs: _Runs, num_entries: int) -> _Runs:
    """Those of groups that all entries have had in a repetition."""
    had = Counter(key[1:] for key in runs)
    return {key: run for key, run in runs.items() if had[key[1:]] == num_entries}


def _warmup_tokens(options: BenchOptions) -> int:
    return min(_WARMUP_TOKENS, options.max_tokens)


def _rows(
    options: BenchOptions, entries: Sequence[_Entry], groups: Sequence[_Group], runs: _Runs
) -> list[dict[str, Any]]:
    rows = []
    measured = [g for g in range(len(groups)) if (0, g, 0) in runs]
    categories = list(dict.fromkeys(groups[g].category for g in measured))
    for category in [*categories, "all"]:
        members = [g for g in measured if category in (groups[g].category, "all")]
        of_category = [
            _row(options, entries, groups, runs, entry, category, members)
            for entry in range(len(entries))
        ]
        _compare_rounds(of_category)
        rows += of_category
    return rows


def _compare_rounds(rows: Sequence[dict[str, Any]]) -> None:
    """Add to each round what its topology costs, over the same method's in one process."""
    local = {row["method"]: row["round_ms_p50"] for row in rows if row["topology"] == "colocated"}
    for row in rows:
        here, there = row["round_ms_p50"], local.get(row["method"])
        if row["topology"] != "colocated" and here is not None and there is not None:
            row["added_round_ms_p50"] = here - there


def _row(
    options: BenchOptions,
    entries: Sequence[_Entry],
    groups: Sequence[_Group],
    runs: _Runs,
    index: int,
    category: str,
    members: Sequence[int],
) -> dict[str, Any]:
    entry = entries[index]
    repetitions = range(options.repetitions)
    keys = [(g, r) for g in members for r in repetitions if (index, g, r) in runs]
    mine = [runs[index, g, r] for g, r in keys]
    speeds = [run.tokens_per_second for run in mine]
    ratios = [
        run.tokens_per_second / runs[entry.baseline, g, r].tokens_per_second
        for run, (g, r) in zip(mine, keys, strict=True)
    ]
    sequences = [sequence for run in mine for sequence in run.sequences]
    num_tokens = sum(len(sequence.token_ids) for sequence in sequences)
    num_forwards = sum(sequence.num_target_forwards for sequence in sequences)
    drafted = [s.num_drafted for s in sequences if s.num_drafted is not None]
    accepted = [s.num_accepted for s in sequences if s.num_accepted is not None]
    decode = [
        sum(s.decode_tokens_per_second for s in run.sequences if s.decode_tokens_per_second)
        for run in mine
        if all(s.decode_tokens_per_second for s in run.sequences)
    ]
    overheads = [1e6 * seconds for run in mine for seconds in run.round_overheads]
    rounds = [1e3 * seconds for run in mine for seconds in run.round_seconds]
    forwards = [forward for run in mine for forward in run.forwards]
    found = [_bound(run, runs[entry.baseline, *key]) for run, key in zip(mine, keys, strict=True)]
    bounds = [bound for bound in found if bound is not None]
    drafting = [run.draft_seconds for run in mine if run.draft_seconds is not None]
    mismatches = None
    if entry.has_same_tokens is not None:
        mismatches = sum(not same for g, r in keys for same in _identical(runs, entry, index, g, r))
    return {
        "method": entry.method,
        "category": category,
        "topology": entry.topology,
        "batch_invariant": entry.batch_invariant,
        "tokens_per_second": statistics.median(speeds),
        "p25": _percentile(speeds, 25),
        "p75": _percentile(speeds, 75),
        "speedup_vs_ar": statistics.median(ratios),
        "workload_speedup_vs_ar": sum(runs[entry.baseline, g, r].seconds for g, r in keys)
        / sum(run.seconds for run in mine),
        "speedup_p25": _percentile(ratios, 25),
        "speedup_p75": _percentile(ratios, 75),
        "speedup_bound": statistics.median(bounds) if bounds else None,
        "decode_tokens_per_second": statistics.median(decode) if decode else None,
        "mean_accepted_length": num_tokens / num_forwards if num_forwards else None,
        "acceptance_rate": sum(accepted) / sum(drafted) if sum(drafted) else None,
        "identical_to_ar": None if mismatches is None else mismatches == 0,
        "mismatch_rate": None if mismatches is None else mismatches / len(sequences),
        "round_overhead_us_p50": _percentile(overheads, 50) if overheads else None,
        "round_overhead_us_p90": _percentile(overheads, 90) if overheads else None,
        "round_ms_p50": _percentile(rounds, 50) if rounds else None,
        "added_round_ms_p50": None,
        "verify_rows": statistics.fmean(rows for rows, _ in forwards) if forwards else None,
        "verify_ms": 1e3 * statistics.fmean(s for _, s in forwards) if forwards else None,
        "draft_share": sum(drafting) / sum(run.seconds for run in mine) if drafting else None,
        "drafted_by_depth": _summed([s.drafted_by_depth for s in sequences]),
        "accepted_by_depth": _summed([s.accepted_by_depth for s in sequences]),
        "num_prompts": len({prompt for g in members for prompt in groups[g].prompt_ids}),
        "batch": options.batch,
        "num_samples": len(mine),
        "note": entry.note,
    }


def _identical(runs: _Runs, entry: _Entry, index: int, group: int, repetition: int) -> list[bool]:
    """Whether each sequence of a run has AR's tokens.

    Repetitions compare with AR's first one, so AR has to repeat itself too.
    """
    mine, reference = runs[index, group, repetition], runs[entry.reference, group, 0]
    return [
        ours.token_ids == theirs.token_ids
        for ours, theirs in zip(mine.sequences, reference.sequences, strict=True)
    ]


def _bound(run: BatchRun, ar: BatchRun) -> float | None:
    """The speedup of this run over AR's if its drafts took no time; None if that is unknown."""
    num_forwards = sum(sequence.num_target_forwards for sequence in run.sequences)
    if not run.forwards or not ar.forwards or not num_forwards:
        return None
    length = sum(len(sequence.token_ids) for sequence in run.sequences) / num_forwards
    one = statistics.fmean(ar.round_seconds)
    more = statistics.fmean(s for _, s in run.forwards) - statistics.fmean(
        s for _, s in ar.forwards
    )
    return length * one / (one + more)


def _summed(counts: Sequence[Sequence[int]]) -> list[int]:
    """The sums of counters by depth."""
    return [sum(column) for column in zip_longest(*counts, fillvalue=0)]


def _samples(
    options: BenchOptions, entries: Sequence[_Entry], groups: Sequence[_Group], runs: _Runs
) -> list[dict[str, Any]]:
    """Every run: what was generated, how long it took, and whether it has AR's tokens."""
    samples = []
    for (e, g, r), run in sorted(runs.items()):
        entry = entries[e]
        ratio = run.tokens_per_second / runs[entry.baseline, g, r].tokens_per_second
        samples.append(
            {
                "method": entry.method,
                "topology": entry.topology,
                "batch_invariant": entry.batch_invariant,
                "category": groups[g].category,
                "prompt_ids": list(groups[g].prompt_ids),
                "repetition": r,
                "num_tokens": [len(sequence.token_ids) for sequence in run.sequences],
                "seconds": run.seconds,
                "speedup_vs_ar": ratio,
                "identical_to_ar": (
                    None if entry.has_same_tokens is None else _identical(runs, entry, e, g, r)
                ),
            }
        )
    return samples


def _percentile(values: Sequence[float], percent: float) -> float:
    return float(np.percentile(values, percent))


def _settings(options: BenchOptions, backends: Sequence[Backend]) -> dict[str, Any]:
    modes = list(dict.fromkeys(backend.batch_invariant for backend in backends))
    return {
        "target": "demo" if options.target is None else str(options.target),
        "drafter": (
            "demo"
            if options.target is None
            else None
            if options.drafter is None
            else str(options.drafter)
        ),
        "adapter": None if options.adapter is None else str(options.adapter),
        "prompts": "built-in" if options.prompts is None else str(options.prompts),
        "suite": options.suite,
        "synthetic_acceptance": options.synthetic_acceptance,
        "dtype": options.dtype,
        "device": pick_device(options.device),
        "batch_invariant": modes[0] if len(modes) == 1 else "both",
        "fingerprint": " ".join(dict.fromkeys(backend.fingerprint for backend in backends)),
        "batch": options.batch,
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "seed": options.seed,
        "repetitions": options.repetitions,
        "tokens_per_second": "generated tokens over wall time from end to end, prefill included",
        "speedup_vs_ar": "median of paired ratios: same prompts, same repetition",
        "workload_speedup_vs_ar": "time of AR for all prompts together over this method's",
        "speedup_bound": "the speedup if drafts took no time: mean accepted length x cost of a "
        "round of AR / cost of that round with this method's forwards; median of paired values",
    }


# --- the cost of batch-invariant mode -------------------------------------------------------------


def _batch_invariant_cost(
    options: BenchOptions, on: LocalBackend, off: LocalBackend
) -> list[dict[str, Any]]:
    """Milliseconds of one forward with and without the mode, by number of tokens in it.

    One token is a step of AR; more are a verification. ``on_ms`` is the engine as it runs,
    ``torch_on_ms`` the mode without the C kernels. All runners take turns after the same prefix.
    """
    with without_kernels():
        plain = load_runner(
            options.target or TARGET_DIR,
            dtype=options.dtype,
            device=options.device,
            batch_invariant=True,
        )
    runners = {"on_ms": on.runner, "off_ms": off.runner, "torch_on_ms": plain}
    vocab_size = on.runner.vocab_size
    prefix = np.arange(min(200, on.context_length - 16), dtype=np.int64) % vocab_size
    sequences = {name: runner.new_sequence() for name, runner in runners.items()}
    for name, runner in runners.items():
        runner.forward([Segment(sequences[name], prefix, logits="none")])
        runner.commit(sequences[name], range(len(prefix)))
    rows = []
    for count in (1, 5, 8, 16):
        tokens = np.arange(count, dtype=np.int64) % vocab_size
        seconds: dict[str, list[float]] = {name: [] for name in runners}
        for _ in range(15):
            for name, runner in runners.items():
                started = time.perf_counter()
                # Reading a value waits for a GPU.
                float(runner.forward([Segment(sequences[name], tokens)]).logits[-1, 0])
                seconds[name].append(time.perf_counter() - started)
                runner.commit(sequences[name], ())
        medians = {name: 1e3 * statistics.median(times) for name, times in seconds.items()}
        rows.append(
            {
                "num_tokens": count,
                **medians,
                "cost": medians["on_ms"] / medians["off_ms"],
                "cost_in_torch": medians["torch_on_ms"] / medians["off_ms"],
            }
        )
    for name, runner in runners.items():
        runner.free(sequences[name])
    return rows
