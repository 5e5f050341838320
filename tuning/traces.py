"""What the target says, and what each drafter would have proposed at every position of it.

Recording runs the real engine with the real drafters, but every draft is looked at and then thrown
away, so that the session moves on by one token a round: the drafter is seen at every position, in
the state that it has there. The target's own output is generated first, and rounds follow it. From
a recording the accepted length of thousands of configurations is computed without a model
(:mod:`tuning.simulator`).

A *family* is a drafter with the knobs that decide what it proposes, whatever the length, the node
budget and the static shape of the draft. There are three kinds of recordings:

``ranks``
    For drafters that any shape expands. What follows a node depends on its ancestors alone, so
    the place of the right token among the candidates, level by level along the right path, gives
    the accepted length of every static tree. Of drafters whose candidates depend on the prefix
    alone, however much of it is drafted, one level is recorded and serves for all.
``order``
    For trees whose nodes compete (``confidence``, ``dyspec``, ``rsd_s``): one tree of the largest
    size, and the order in which smaller ones take its nodes.
``drafts``
    For drafters that make whole drafts: they are asked for a draft of every budget.

Rows that learn from what was drafted and rejected, rules that accept by chance and rules that are
not lossless have no recording: :func:`why_not` says so.
"""

from __future__ import annotations

import hashlib
import io
import json
import time
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from paceline.acceptance.base import AcceptanceRule, PathLogits
from paceline.config import MAX_NODES, SpeculationConfig
from paceline.drafters.base import AsyncDrafter, Drafter, is_remote
from paceline.engine import Engine
from paceline.errors import InvalidArgument
from paceline.methods import SHAPE_KNOBS, length_bounds
from paceline.plan import Plan, resolve
from paceline.profile import fingerprint
from paceline.sampling import SamplingParams
from paceline.session import Session
from paceline.shapes.base import ALL_DRAWS, Expander, Level, Shape, TreeBuilder, grow
from paceline.shapes.confidence import ConfidenceTree
from paceline.shapes.dyspec import DySpec
from paceline.shapes.rsd_s import StochasticBeam
from paceline.tree import depths
from paceline.types import EMPTY_DRAFT, Acceptance, Budget, Draft, Draws
from tuning.results import Results

VERSION = 1
FILE = "traces.npz"
NUM_RANKS = 64  # candidates among which the right token is looked for: all that a template can name
ABSENT = 255  # the right token is not among them, or the draft ends before
NEVER = 65535  # a node that no draft has
LIMIT_S = 300.0  # after which no further recording begins
_TOGETHER = 16  # prompts that are recorded at once, where drafters do not remember earlier ones
_BUDGETS = 4  # of a drafter with models in it that are asked for in one recording

Kind: TypeAlias = Literal["ranks", "order", "drafts"]
Progress = Callable[[int, int, str], None]
"""Called with (recordings done, recordings in all, what comes next)."""

# What one of these proposes after a token depends on the tokens before it, whether they are
# committed or drafted.
_PREFIX_ONLY = frozenset({"draft_model", "early_exit", "s2d", "staged"})
_EXPANDING = _PREFIX_ONLY | {"fewer_layers"}  # and every head that shapes expand
# Asking one of these twice gives the same draft, and nothing comes of a draft's rejection. The
# last ones of each group are made of others.
_LOOKUP = frozenset({"prompt_lookup", "suffix", "sam", "copyspec", "aggressive"})
_COMPOSITE = frozenset({"suffix_or_draft_model", "copyspec_or_draft_model", "rasd", "combined"})
_REMEMBERING = frozenset({"suffix", "suffix_or_draft_model", "sam", "rasd", "combined"})
_DYNAMIC = frozenset({"confidence", "dyspec", "rsd_s"})

_LENGTH_KNOBS = frozenset(
    {"num_speculative_tokens", "node_budget", "length", "length_min", "length_max",
     "stop_threshold", "allow_lossy"}
)  # fmt: skip
_SHAPE_KNOBS = frozenset({"shape", "branching"}.union(*SHAPE_KNOBS.values()))
_RULE_KNOBS = frozenset({"acceptance", "draft_support"})
# Beside the drafter's own code and the size of a draft, what makes a round cheap or dear.
_COST_KNOBS = frozenset(
    {"shape", "exit_layers", "exit_threshold", "speedup_ratio", "min_layers", "max_layers",
     "depth_decay", "drafters", "stage_tokens", "fallback_depth", "use_tree"}
)  # fmt: skip


# --- families -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Family:
    """What one recording serves.

    Attributes:
        key: equal for configurations whose drafts come from the same recording.
        cost_key: equal for those whose drafts are made by the same code; the exit layer, of which
            costs are a function, is no part of it.
        kind: of the recording.
        label: for people.
    """

    key: str
    cost_key: str
    kind: Kind
    label: str


def why_not(plan: Plan, params: SamplingParams) -> str | None:
    """Why a configuration cannot be simulated; None where it can."""
    method, rule = plan.method, plan.rule
    if not (method.lossless and rule.lossless):
        return "its output is not the target's"
    if is_ar(plan):
        return None
    if params.temperature > 0 and rule.name != "coupled":
        return f"rule {rule.name!r} accepts by chance above temperature 0"
    if plan.config.length not in ("fixed", "goodput"):
        return f"controller {plan.config.length!r} chooses lengths from what it sees"
    names = {row.drafter for row in plan.parts} | {method.drafter}
    replayable = _EXPANDING | _LOOKUP | _COMPOSITE
    if any(name not in replayable for name in names) and not _is_head(plan):
        return "what it drafts depends on what was drafted before"
    return None


def is_ar(plan: Plan) -> bool:
    """Whether a configuration never drafts."""
    return plan.method.drafter == "none" or plan.config.num_speculative_tokens == 0


def _is_head(plan: Plan) -> bool:
    """Whether a trained head drafts that a shape expands."""
    method = plan.method
    return method.head is not None and method.shape is not None


def parts_of(plan: Plan) -> list[tuple[Family, Budget]]:
    """The drafts that a configuration may ask for, and where each is recorded.

    One with a constant length; each of its lengths for the controller ``goodput``.
    """
    config = plan.config
    budgets = [Budget(config.num_speculative_tokens or 0, config.node_budget or 0)]
    if config.length == "goodput":
        bounds = length_bounds(config)
        budgets = [bounds.budget(d) for d in range(max(1, bounds.shortest), bounds.longest + 1)]
        if config.shape == "dyspec":  # a recording for each depth would cost too much
            budgets = budgets[-1:]
    return [(_family(plan, budget), budget) for budget in budgets]


def _family(plan: Plan, budget: Budget) -> Family:
    drafter, knobs = plan.method.drafter, plan.config.overrides()
    del knobs["method"]
    shape = plan.config.shape
    dropped = set(_LENGTH_KNOBS)
    kind: Kind = "drafts"
    if drafter in _EXPANDING or _is_head(plan):
        dropped |= _SHAPE_KNOBS | _RULE_KNOBS
        kind = "order" if shape in _DYNAMIC else "ranks"
        if kind == "order":
            dropped -= {"shape", "branching"}
    kept = {name: value for name, value in sorted(knobs.items()) if name not in dropped}
    told: dict[str, Any] = {"drafter": drafter, "policy": plan.method.depth_policy, **kept}
    own_exit = plan.config.exit_layer is not None  # otherwise it is the target's default
    dear = {name: value for name, value in told.items() if name in _COST_KNOBS}
    cost_key = json.dumps({"drafter": drafter, "own_exit": own_exit, **dear})
    if shape == "dyspec" and kind == "order":
        told["depth"] = budget.depth  # which nodes a smaller tree has instead is not recorded
    words = [f"{name}={json.dumps(value)}" for name, value in kept.items() if name != "acceptance"]
    return Family(json.dumps(told), cost_key, kind, " ".join([plan.method.name, *words]))


def with_budget(plan: Plan, budget: Budget, **changes: Any) -> SpeculationConfig:
    """The configuration with drafts of a constant budget, and other changes."""
    knobs = plan.config.overrides()
    for name in ("length_min", "length_max", "stop_threshold"):
        knobs.pop(name, None)
    knobs |= {"length": "fixed", "num_speculative_tokens": budget.depth}
    return SpeculationConfig.model_validate(knobs | {"node_budget": budget.nodes} | changes)


# --- recordings -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class RankRecording:
    """Where the right tokens are among a drafter's candidates.

    Attributes:
        ranks: of the right token at each depth, given that the tokens before it were drafted;
            ABSENT where no draft has it.  # uint8 [positions, depth]
        reached: depth of the deepest drafts that the drafter makes, if less than asked for.
        prefix_only: the rank at a depth is the first one of the position where the token stands.
        context_length: where a draft would end behind it the drafter makes none; 0: no matter.
    """

    kind: ClassVar[Kind] = "ranks"

    ranks: npt.NDArray[np.uint8]
    reached: int
    prefix_only: bool
    context_length: int = 0

    def covers(self, budget: Budget) -> bool:
        return self.prefix_only or budget.depth <= self.ranks.shape[1]


@dataclass(frozen=True, slots=True, eq=False)
class OrderRecording:
    """When trees of different sizes take the right path's nodes.

    Attributes:
        before: how many nodes of a tree that is ``d + 1`` deep come before the right path's node
            at depth ``k + 1``; NEVER where there is no such node.
            # uint16 [positions, depth (k), depth (d)]
        total: nodes of the largest tree of each depth.  # uint16 [positions, depth]
        reached: as in :class:`RankRecording`.
        nodes: budget of the largest tree.
        context_length: as in :class:`RankRecording`.
    """

    kind: ClassVar[Kind] = "order"

    before: npt.NDArray[np.uint16]
    total: npt.NDArray[np.uint16]
    reached: int
    nodes: int
    context_length: int = 0

    def covers(self, budget: Budget) -> bool:
        return budget.depth <= self.before.shape[1] and budget.nodes <= self.nodes


@dataclass(frozen=True, slots=True, eq=False)
class DraftRecording:
    """How much of each draft is right.

    Attributes:
        budgets: depth and nodes.  # int64 [budgets, 2]
        accepted: length of the right path in the draft.  # uint8 [positions, budgets]
        nodes: of the draft.  # uint16 [positions, budgets]
    """

    kind: ClassVar[Kind] = "drafts"

    budgets: npt.NDArray[np.int64]
    accepted: npt.NDArray[np.uint8]
    nodes: npt.NDArray[np.uint16]

    def place(self, budget: Budget) -> int | None:
        """Column of a budget."""
        found = np.flatnonzero((self.budgets == (budget.depth, budget.nodes)).all(axis=1))
        return int(found[0]) if len(found) else None

    def covers(self, budget: Budget) -> bool:
        return self.place(budget) is not None

    def joined(self, other: DraftRecording) -> DraftRecording:
        """With the budgets of another recording of the same positions."""
        new = [i for i, budget in enumerate(other.budgets) if not self.covers(Budget(*budget))]
        return DraftRecording(
            np.concatenate([self.budgets, other.budgets[new]]),
            np.concatenate([self.accepted, other.accepted[:, new]], axis=1),
            np.concatenate([self.nodes, other.nodes[:, new]], axis=1),
        )


Recording: TypeAlias = RankRecording | OrderRecording | DraftRecording


@dataclass(frozen=True, slots=True, eq=False)
class Truth:
    """What the target says after each prompt, one output after the other.

    Attributes:
        output_ids: # int64 [positions]
        offsets: where each output begins, and the end of the last.  # int64 [prompts + 1]
        prompt_lengths: # int64 [prompts]
        room: tokens that could have been generated: more than there are where the output came to
            an end by itself.  # int64 [prompts]
    """

    output_ids: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    prompt_lengths: npt.NDArray[np.int64]
    room: npt.NDArray[np.int64]

    @property
    def num_prompts(self) -> int:
        return len(self.prompt_lengths)

    def output(self, prompt: int) -> list[int]:
        found: list[int] = self.output_ids[self.offsets[prompt] : self.offsets[prompt + 1]].tolist()
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Traces:
    """Recordings of a set of prompts.

    Attributes:
        key: what they hold for, see :func:`traces_key`.
        concurrency: prompts that are decoded together.
        params: how the target's tokens were chosen.
        truth: the target's output.
        recordings: by :attr:`Family.key`.
        refused: why the engine cannot run a family.
    """

    key: dict[str, str]
    concurrency: int
    params: SamplingParams
    truth: Truth
    recordings: dict[str, Recording]
    refused: dict[str, str]

    def covers(self, family: Family, budget: Budget) -> bool:
        """Whether nothing is left to record of a family and a budget."""
        found = self.recordings.get(family.key)
        return family.key in self.refused or (found is not None and found.covers(budget))

    def missing(self, configs: Iterable[SpeculationConfig]) -> list[SpeculationConfig]:
        """Those of the configurations that could be simulated, and are not recorded."""
        found = []
        for config in configs:
            plan = resolve(config)
            hopeless = is_ar(plan) or why_not(plan, self.params) is not None
            if not hopeless and not all(self.covers(*part) for part in parts_of(plan)):
                found.append(config)
        return found

    # --- files ------------------------------------------------------------------------------------

    def save(self, results: Results, name: str = FILE) -> None:
        """Write one file into a result folder."""
        arrays = {f"truth.{field.name}": getattr(self.truth, field.name) for field in fields(Truth)}
        index = []
        for number, (key, recording) in enumerate(self.recordings.items()):
            values: dict[str, Any] = {"key": key, "kind": recording.kind}
            for field in fields(recording):
                value = getattr(recording, field.name)
                if isinstance(value, np.ndarray):
                    arrays[f"{number}.{field.name}"] = value
                else:
                    values[field.name] = value
            index.append(values)
        head = {
            "version": VERSION,
            "key": self.key,
            "concurrency": self.concurrency,
            "params": asdict(self.params),
            "recordings": index,
            "refused": self.refused,
        }
        arrays["index"] = np.frombuffer(json.dumps(head).encode(), np.uint8)
        file = io.BytesIO()
        np.savez_compressed(file, allow_pickle=False, **arrays)
        results.write_bytes(name, file.getvalue())

    @staticmethod
    def load(results: Results, key: Mapping[str, str], name: str = FILE) -> Traces:
        """Read the traces of a result folder.

        Raises:
            InvalidArgument: there are none, they are damaged or of another version, or they hold
                for other models, prompts or parameters than ``key`` says.
        """
        where = results.path(name)
        try:
            with np.load(io.BytesIO(results.read_bytes(name)), allow_pickle=False) as file:
                arrays = {entry: file[entry] for entry in file.files}
            head = json.loads(arrays.pop("index").tobytes())
            if head["version"] != VERSION:
                raise InvalidArgument(
                    "traces", where, f"traces of version {VERSION}, not {head['version']}"
                )
            traces = _traces(head, arrays)
        except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile, EOFError) as error:
            if isinstance(error, InvalidArgument):
                raise
            raise InvalidArgument("traces", where, f"a file of traces ({error})") from error
        for part, wanted in key.items():
            if traces.key.get(part) != wanted:
                allowed = f"traces whose {part} is {wanted}, not {traces.key.get(part)}"
                raise InvalidArgument("traces", where, allowed)
        return traces


def _traces(head: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> Traces:
    truth = Truth(**{field.name: arrays[f"truth.{field.name}"] for field in fields(Truth)})
    recordings = {}
    for number, values in enumerate(head["recordings"]):
        kind = next(kind for kind in _KINDS if kind.kind == values["kind"])
        given = {
            field.name: arrays.get(f"{number}.{field.name}", values.get(field.name))
            for field in fields(kind)
        }
        recordings[values["key"]] = kind(**given)
    raw = head["params"]
    for name in ("stop", "stop_token_ids"):
        raw[name] = tuple(raw[name])
    raw["logit_bias"] = {int(token): bias for token, bias in raw["logit_bias"].items()}
    return Traces(
        dict(head["key"]), head["concurrency"], SamplingParams(**raw), truth, recordings,
        dict(head["refused"]),
    )  # fmt: skip


_KINDS: tuple[type[Recording], ...] = (RankRecording, OrderRecording, DraftRecording)


def traces_key(
    target: str | Path,
    drafter: str | Path | None,
    heads: str | Path | None,
    dtype: str,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    concurrency: int = 1,
) -> dict[str, str]:
    """What traces hold for: models and what is decoded, not the machine.

    Args:
        heads: the folder with a folder for each of the target's trained heads.
    """
    kinds = sorted(path for path in Path(heads).iterdir() if path.is_dir()) if heads else []
    workload = json.dumps([[list(map(int, prompt)) for prompt in prompts], asdict(params)])
    return {
        "target": fingerprint(Path(target)),
        "drafter": fingerprint(Path(drafter)) if drafter is not None else "",
        "heads": " ".join(f"{path.name}:{fingerprint(path)}" for path in kinds),
        "dtype": dtype,
        "workload": hashlib.sha256(workload.encode()).hexdigest()[:16],
        "concurrency": str(concurrency),
    }


# --- recording ------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Task:
    """A family, and the budgets that it will be asked for.

    Attributes:
        num_points: configurations that it serves.
    """

    family: Family
    plan: Plan
    budgets: set[tuple[int, int]]
    num_points: int = 0

    @property
    def depth(self) -> int:
        return max(depth for depth, _ in self.budgets)

    @property
    def nodes(self) -> int:
        return max(nodes for _, nodes in self.budgets)

    @property
    def rank(self) -> tuple[bool, bool, int]:
        """What is recorded first: what is cheap, and what serves many points."""
        composite = self.plan.method.drafter in _COMPOSITE
        return composite, self.family.kind == "order", -self.num_points

    def split(self) -> list[_Task]:
        """In parts, where each budget costs as much as the first."""
        if self.plan.method.drafter not in _COMPOSITE:
            return [self]
        budgets = sorted(self.budgets)
        return [
            replace(self, budgets=set(budgets[start : start + _BUDGETS]))
            for start in range(0, len(budgets), _BUDGETS)
        ]


def record(
    engine: Engine,
    configs: Iterable[SpeculationConfig],
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    key: Mapping[str, str],
    concurrency: int = 1,
    known: Traces | None = None,
    limit_s: float = LIMIT_S,
    progress: Progress = lambda done, total, what: None,
) -> Traces:
    """Record what the given configurations need to be simulated.

    Configurations that cannot be simulated are passed over, and so are those that this engine
    refuses (:attr:`Traces.refused`). The engine itself learns nothing: siblings of it run.

    A recording takes about as long as decoding all prompts a few times. Drafters that are made of
    others with models in them need one for every few budgets, so they come last.

    Args:
        engine: whose drafters are in this process.
        params: of all prompts.
        key: see :func:`traces_key`.
        concurrency: prompts that will be decoded together. Drafters that remember earlier outputs
            find those of the groups of so many prompts that came before.
        known: traces with the same key, whose recordings are taken over where they suffice.
        limit_s: seconds after which no further recording begins: :meth:`Traces.missing` says what
            is left out.

    Raises:
        InvalidArgument: ``known`` has another key, or the engine cannot decode a prompt.
    """
    if not prompts:
        raise InvalidArgument("prompts", [], "at least one prompt")
    if known is not None and known.key != dict(key):
        raise InvalidArgument("known", known.key, f"traces with the key {dict(key)}")
    started = time.monotonic()
    tasks = _tasks(configs, params, known)
    total = len(tasks) + (known is None)
    progress(0, total, "the target's output")
    truth = known.truth if known else _generate(engine, prompts, params)
    recordings = dict(known.recordings) if known else {}
    refused = dict(known.refused) if known else {}
    for done, task in enumerate(tasks, total - len(tasks)):
        if time.monotonic() - started > limit_s:
            break
        progress(done, total, task.family.label)
        name = task.family.key
        try:
            new = _record(engine, task, prompts, params, truth, concurrency)
        except _RefusedError as error:
            refused[name] = str(error.__cause__)
            continue
        before = recordings.get(name)
        if isinstance(new, DraftRecording) and isinstance(before, DraftRecording):
            new = before.joined(new)
        recordings[name] = new
    progress(total, total, "done")
    return Traces(dict(key), concurrency, params, truth, recordings, refused)


class _RefusedError(Exception):
    """The engine does not take a configuration."""


def _tasks(
    configs: Iterable[SpeculationConfig], params: SamplingParams, known: Traces | None
) -> list[_Task]:
    tasks: dict[str, _Task] = {}
    for config in configs:
        plan = resolve(config)
        if is_ar(plan) or why_not(plan, params):
            continue
        for family, budget in parts_of(plan):
            if known is not None and known.covers(family, budget):
                continue
            task = tasks.setdefault(family.key, _Task(family, plan, set()))
            task.budgets.add((budget.depth, budget.nodes))
            task.num_points += 1
    for key, task in tasks.items():
        before = known.recordings.get(key) if known else None
        if isinstance(before, OrderRecording):  # what it covers is not given up
            task.budgets.add((before.before.shape[1], before.nodes))
    parts = [part for task in tasks.values() for part in task.split()]
    return sorted(parts, key=lambda task: task.rank)


def _generate(engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams) -> Truth:
    sibling, ar = engine.sibling(), SpeculationConfig(method="ar")
    sessions: list[Session] = []
    for start in range(0, len(prompts), _TOGETHER):
        sessions += sibling.generate(prompts[start : start + _TOGETHER], params, ar)
    outputs = [session.output_ids for session in sessions]
    return Truth(
        np.concatenate([np.asarray(output, np.int64) for output in outputs]),
        np.cumsum([0, *map(len, outputs)]).astype(np.int64),
        np.asarray([session.prompt_length for session in sessions], np.int64),
        np.asarray([session.max_length - session.prompt_length for session in sessions], np.int64),
    )


def _record(
    engine: Engine,
    task: _Task,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    truth: Truth,
    concurrency: int,
) -> Recording:
    recorder = _RECORDERS[task.family.kind](task, truth)
    name = task.plan.method.drafter
    sibling = engine.sibling()
    together = concurrency if name in _REMEMBERING else _TOGETHER
    together = min(together, engine.limits.max_waiting)
    for start in range(0, len(prompts), together):
        sessions: list[Session] = []
        try:
            for number in range(start, min(start + together, len(prompts))):
                try:
                    session = sibling.submit(prompts[number], params, recorder.config)
                except InvalidArgument as error:
                    raise _RefusedError from error
                sessions.append(session)
                recorder.follow(session, number)
            if sibling.drafters[name] is not recorder:
                recorder.wrap(sibling.drafters[name])
                sibling.drafters[name] = recorder
            while not all(session.finished for session in sessions):
                sibling.step()
        finally:
            for session in sessions:
                sibling.cancel(session.session_id)
        if recorder.error is not None:
            raise RuntimeError(f"{name} cannot be recorded") from recorder.error
        for session in sessions:
            if session.error is not None:
                raise session.error
            if session.stats.drafter_lost:
                raise RuntimeError(f"{name} failed while it was recorded; the log says how")
    return recorder.recording()


class _Follow:
    """An acceptance rule that commits a known output token by token.

    Without it the output could come to differ from the known one, where a target's rounding
    depends on what is computed beside a token.
    """

    lossless = True

    def __init__(self, rule: AcceptanceRule, output: list[int], prompt_length: int) -> None:
        self.name, self.chain_only, self.draws = rule.name, rule.chain_only, rule.draws
        self._output = output
        self._prompt_length = prompt_length

    def accept(self, draft: Draft, logits: PathLogits) -> Acceptance:
        return Acceptance((), self._output[logits.position - self._prompt_length])


class _Recorder(ABC):
    """In the place of a drafter: looks at what it proposes, and proposes nothing itself.

    Attributes:
        config: what sessions are submitted with.
        error: why looking failed.
    """

    config: SpeculationConfig

    def __init__(self, task: _Task, truth: Truth) -> None:
        self.error: Exception | None = None
        self._truth = truth
        self._rules: dict[str, _Follow] = {}
        self._prompts: dict[str, int] = {}  # number of each session's
        self._outputs = [truth.output(prompt) for prompt in range(truth.num_prompts)]
        self._drafter: Any = None

    def wrap(self, drafter: Drafter | AsyncDrafter) -> None:
        if is_remote(drafter):
            raise InvalidArgument("engine", "a drafter elsewhere", "drafters in this process")
        self._drafter = drafter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)  # open, observe, ...: as if nobody looked

    def follow(self, session: Session, number: int) -> None:
        """Make a session commit the known output of a prompt."""
        name = session.session_id
        self._prompts[name] = number
        self._rules[name] = _Follow(session.plan.rule, self._outputs[number], session.prompt_length)
        session.plan = self._plan(session.plan, session)

    def propose(self, sessions: Sequence[Session], budgets: Sequence[Budget]) -> list[Draft]:
        try:
            self._look(sessions)
        except Exception as error:
            self.error = error
            raise
        return [EMPTY_DRAFT] * len(sessions)

    def _position(self, session: Session) -> int:
        """Where a session is, in the arrays over all outputs."""
        first = int(self._truth.offsets[self._prompts[session.session_id]])
        return first + session.length - session.prompt_length

    def _following(self, session: Session) -> list[int]:
        """The right tokens from here on."""
        output = self._outputs[self._prompts[session.session_id]]
        return output[session.length - session.prompt_length :]

    def _plan(self, plan: Plan, session: Session) -> Plan:
        return replace(plan, rule=self._rules[session.session_id])

    @abstractmethod
    def _look(self, sessions: Sequence[Session]) -> None:
        """Write down what the drafter proposes now."""

    @abstractmethod
    def recording(self) -> Recording:
        """What was written down."""

    @property
    def _context_length(self) -> int:
        """Behind which the drafter makes no drafts, where it has a context of its own."""
        runner = getattr(self._drafter, "runner", None)
        return int(getattr(runner, "context_length", 0))


class _Expanded(_Recorder):
    """Looks at an expanding drafter through a shape of its own."""

    def __init__(self, task: _Task, truth: Truth, depth: int, nodes: int, **changes: Any) -> None:
        super().__init__(task, truth)
        # At temperature 0 all rules want the most likely tokens, above it only this one is here.
        self.config = with_budget(
            task.plan, Budget(depth, nodes), acceptance="coupled", draft_support=None, **changes
        )
        self._depth = depth
        self._nodes = nodes
        self._reached = 0
        self._num_positions = len(truth.output_ids)

    @property
    def draws(self) -> frozenset[Draws]:
        return ALL_DRAWS

    def _plan(self, plan: Plan, session: Session) -> Plan:
        return replace(super()._plan(plan, session), shape=self)

    def _look(self, sessions: Sequence[Session]) -> None:
        depths = [min(self._depth, session.remaining - 1) for session in sessions]
        self._drafter.propose(sessions, [Budget(depth, self._nodes) for depth in depths])

    def build(
        self, expander: Expander, sessions: Sequence[Session], budgets: Sequence[Budget]
    ) -> list[Draft]:
        """As a shape does. A drafter may have cut the budgets."""
        self._reached = max(self._reached, *(budget.depth for budget in budgets))
        return self._build(expander, sessions, budgets)

    @abstractmethod
    def _build(
        self, expander: Expander, sessions: Sequence[Session], budgets: Sequence[Budget]
    ) -> list[Draft]: ...


class _Ranks(_Expanded):
    """Follows the right path, as deep as the drafter's candidates have it."""

    def __init__(self, task: _Task, truth: Truth) -> None:
        self._prefix_only = task.plan.method.drafter in _PREFIX_ONLY
        depth = 1 if self._prefix_only else task.depth
        unshaped = dict.fromkeys(_SHAPE_KNOBS)
        super().__init__(task, truth, depth, depth, **{**unshaped, "shape": "chain"})
        self._ranks = np.full((self._num_positions, depth), ABSENT, np.uint8)

    def _build(
        self, expander: Expander, sessions: Sequence[Session], budgets: Sequence[Budget]
    ) -> list[Draft]:
        following = {session.session_id: self._following(session) for session in sessions}

        def step(tree: TreeBuilder, frontier: list[int], level: Level, row: int) -> list[int]:
            right = following[tree.session.session_id]
            node = frontier[0]
            depth = tree.depth_of[node] if node >= 0 else 0
            if depth >= len(right):
                return []
            choices = tree.choose(node, level, row, NUM_RANKS)
            if right[depth] not in choices.tokens:
                return []
            rank = choices.tokens.index(right[depth])
            self._ranks[self._position(tree.session), depth] = rank
            return [tree.add(node, choices, rank)]

        trees = [TreeBuilder(s, b) for s, b in zip(sessions, budgets, strict=True)]
        grow(expander, trees, step, lambda depth: NUM_RANKS)
        return [tree.draft() for tree in trees]

    def recording(self) -> Recording:
        return RankRecording(self._ranks, self._reached, self._prefix_only, self._context_length)


class _Order(_Expanded):
    """Grows the largest tree with the real shape."""

    def __init__(self, task: _Task, truth: Truth) -> None:
        nodes = min(MAX_NODES, task.nodes)
        super().__init__(task, truth, task.depth, nodes)
        assert task.plan.shape is not None
        self._shape: Shape = task.plan.shape
        self._before = np.full((self._num_positions, self._depth, self._depth), NEVER, np.uint16)
        self._total = np.zeros((self._num_positions, self._depth), np.uint16)

    def _build(
        self, expander: Expander, sessions: Sequence[Session], budgets: Sequence[Budget]
    ) -> list[Draft]:
        drafts, orders = _grown(self._shape, expander, sessions, budgets)
        for session, draft, order in zip(sessions, drafts, orders, strict=True):
            if not draft.num_nodes:
                continue
            position, limits = self._position(session), np.arange(1, self._depth + 1)
            place = np.argsort(order)  # of each node
            shallow = depths(draft.parent_indices)[order][:, None] <= limits  # [nodes, depth]
            self._total[position] = shallow.sum(0)
            for depth, node in enumerate(right_path(draft, self._following(session))):
                counts = shallow[: place[node]].sum(0)
                self._before[position, depth, depth:] = counts[depth:]
        return drafts

    def recording(self) -> Recording:
        return OrderRecording(
            self._before, self._total, self._reached, self._nodes, self._context_length
        )


def _grown(
    shape: Shape, expander: Expander, sessions: Sequence[Session], budgets: Sequence[Budget]
) -> tuple[list[Draft], list[list[int]]]:
    """Trees, and their nodes in the order in which smaller trees would take them."""
    if isinstance(shape, ConfidenceTree):
        trees = shape.grow(expander, sessions, budgets)
        orders = [
            sorted(range(len(tree.values)), key=lambda node, tree=tree: -tree.values[node][0])  # type: ignore[misc]
            for tree in trees
        ]
        return [tree.draft() for tree in trees], orders
    assert isinstance(shape, DySpec | StochasticBeam)
    drafts = shape.build(expander, sessions, budgets)
    return drafts, [list(range(draft.num_nodes)) for draft in drafts]


class _Drafts(_Recorder):
    """Asks for a draft of every budget."""

    def __init__(self, task: _Task, truth: Truth) -> None:
        super().__init__(task, truth)
        self._budgets = sorted(task.budgets)
        self._plans = [resolve(with_budget(task.plan, Budget(*budget))) for budget in self._budgets]
        self.config = self._plans[-1].config
        shape = len(truth.output_ids), len(self._budgets)
        self._accepted = np.zeros(shape, np.uint8)
        self._nodes = np.zeros(shape, np.uint16)

    def _look(self, sessions: Sequence[Session]) -> None:
        for column, ((depth, nodes), plan) in enumerate(
            zip(self._budgets, self._plans, strict=True)
        ):
            for session in sessions:
                session.plan = self._plan(plan, session)
            budgets = [Budget(min(depth, session.remaining - 1), nodes) for session in sessions]
            drafts = self._drafter.propose(sessions, budgets)
            for session, draft in zip(sessions, drafts, strict=True):
                position = self._position(session)
                right = right_path(draft, self._following(session))
                self._accepted[position, column] = len(right)
                self._nodes[position, column] = draft.num_nodes

    def recording(self) -> Recording:
        return DraftRecording(np.asarray(self._budgets, np.int64), self._accepted, self._nodes)


_RECORDERS: Mapping[Kind, Callable[[_Task, Truth], _Recorder]] = {
    "ranks": _Ranks,
    "order": _Order,
    "drafts": _Drafts,
}


def right_path(draft: Draft, output: Sequence[int]) -> list[int]:
    """Nodes of a draft that say what comes, from the root down."""
    below: dict[tuple[int, int], int] = {}
    for node, step in enumerate(
        zip(draft.parent_indices.tolist(), draft.token_ids.tolist(), strict=True)
    ):
        below.setdefault(step, node)  # of equal siblings a rule takes the first
    path: list[int] = []
    for token in output:
        step = (path[-1] if path else -1, token)
        if step not in below:
            break
        path.append(below[step])
    return path
