"""The YAML that says what a sweep searches: models, workload, objective, and the space itself.

Any field of ``SpeculationConfig`` may stand under ``space``, and ``topology`` and ``dtype`` beside
them. A field is part of a point only where its method has that knob, so a flat list of fields is
a conditional space: no exit layer for a lookup drafter. ``when`` adds conditions of one's own, and
``auto`` stands for the values that the knob's part proposes (:class:`paceline.knobs.Knob`). AR is
always a point.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from paceline.bench.prompts import Prompt, builtin_prompts, limit_per_category
from paceline.bench.suites import read_prompts
from paceline.chat import template_of
from paceline.config import SpeculationConfig, parse_speculation, refused
from paceline.deployments.config import ModelConfig, VllmConfig
from paceline.deployments.vllm_plan import chain_plan
from paceline.errors import InvalidArgument, ModelNotFound, PacelineError
from paceline.loading import DTYPES
from paceline.methods import KNOBS, METHODS
from paceline.model_names import KNOWN_NAMES, pin_model
from paceline.plan import known_knobs, resolve
from paceline.rpc.mirrors import served_with
from paceline.sampling import SamplingParams
from paceline.tokenizer import ChatTemplate
from paceline.tuning.results import OBJECTIVES, Metrics, Point

SPACES_DIR = Path(__file__).parent / "spaces"
"""The spaces that ship: ``demo``, ``exit_layers``, ``trees``, ``split``, ``everything``."""
TOPOLOGIES = ("colocated", "actors")
# Enumerating more than so many points takes longer than measuring the first ones: larger spaces
# are sampled.
MAX_POINTS = 20_000
# Which knobs a point has depends on these: they are chosen first.
_FIRST = ("method", "shape", "acceptance", "length", "drafters")
_OUTER = {"topology": TOPOLOGIES, "dtype": tuple(DTYPES)}


class _Block(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Workload(_Block):
    """What is decoded, with the method and with AR."""

    prompts: str | None = Field(
        None, description="JSONL in Spec-Bench's format; null: the built-in prompts."
    )
    categories: tuple[str, ...] | None = Field(
        None, min_length=1, description="Categories of the prompts; null: all."
    )
    limit: int | None = Field(None, ge=1, description="Prompts of each category at most.")
    chat: bool | Literal["auto"] = Field(
        "auto",
        description="Ask the prompts as questions, with the target's chat template and all turns, "
        "and end an answer where the model ends it; auto: if the target has a template and the "
        "prompts come from a file.",
    )
    max_tokens: int = Field(96, ge=2, description="Tokens generated for each prompt.")
    concurrency: int = Field(1, ge=1, le=256, description="Requests decoded together.")
    temperature: float = Field(0.0, ge=0.0)
    seed: int = Field(0, ge=0)

    def template(self, target: str | Path) -> ChatTemplate | None:
        """The chat template that the prompts go through; None: they are continued as they are."""
        if self.chat == "auto":
            return None if self.prompts is None else template_of(target, None)
        return template_of(target, self.chat)

    def sampling_params(self, *, is_chat: bool = False) -> SamplingParams:
        """Without chat, a sequence gets all tokens: end-of-sequence tokens do not stop it."""
        return SamplingParams(
            temperature=self.temperature,
            seed=self.seed,
            max_tokens=self.max_tokens,
            ignore_eos=not is_chat,
        )


class Constraints(_Block):
    """What the best configuration must keep to; a trial that does not is marked, not hidden."""

    lossless: bool = Field(
        True, description="Leave out methods and rules that can change the output."
    )
    latency_p99_ms: float | None = Field(None, gt=0, description="Of a whole request.")
    memory_mb: float | None = Field(
        None, gt=0, description="Peak resident memory of the measuring process."
    )

    def broken_by(self, metrics: Metrics) -> str | None:
        """The constraint that a measurement breaks, with its value; None where it keeps to all."""
        if metrics.identical_to_ar is False:
            return "its tokens are not those of AR"
        if self.latency_p99_ms is not None and metrics.latency_p99_ms > self.latency_p99_ms:
            return f"latency_p99_ms: {metrics.latency_p99_ms:.1f}, at most {self.latency_p99_ms:g}"
        if self.memory_mb is not None and metrics.memory_mb > self.memory_mb:
            return f"memory_mb: {metrics.memory_mb:.0f}, at most {self.memory_mb:g}"
        return None


class Measurement(_Block):
    """When a trial has measured enough."""

    min_effect: float = Field(
        0.03,
        gt=0,
        lt=1,
        description="Difference of speedups that matters: a trial ends when its confidence "
        "interval is narrower than this share.",
    )
    confidence: float = Field(0.95, gt=0.5, lt=1)
    repetitions: int = Field(6, ge=2, le=100, description="Pairs of each prompt at most.")
    prompts_per_rung: int | None = Field(
        None,
        ge=1,
        description="Groups of prompts that are added between two decisions to stop a trial; "
        "null: a quarter of them.",
    )


class Search(_Block):
    """How points are chosen."""

    algorithm: Literal["optuna", "random", "grid"] = "optuna"
    trials: int | None = Field(
        None, ge=1, description="Trials at most, AR among them; null: 24, and for a grid all."
    )
    time_s: float | None = Field(None, gt=0, description="Seconds for all trials together.")
    simulate: bool = Field(
        True, description="Record traces first, and measure the points first that simulate best."
    )
    simulated_first: int = Field(
        8, ge=0, description="Points that are measured because they simulate best."
    )
    early_stopping: bool = Field(
        True, description="End trials that cannot win (confidence intervals, and ASHA)."
    )
    confirm: int = Field(
        3, ge=1, le=20, description="Best trials that are measured once more, side by side."
    )
    seed: int = Field(0, ge=0)
    drafters: tuple[str, ...] = Field(
        (),
        description="Draft models, as model.drafter: a sweep with each of them, and the best of "
        "all.",
    )


class Resources(_Block):
    """What Ray reserves for a trial. Trials that share a machine disturb one another."""

    cpus: float | None = Field(None, gt=0, description="null: all CPUs of the smallest node.")
    gpus: float = Field(0.0, ge=0)


class Tracking(_Block):
    """Where else results go. TensorBoard's logs are always written, in ``tune/``."""

    mlflow_uri: str | None = Field(None, description="MLflow tracking server.")
    wandb_project: str | None = Field(None, description="Weights & Biases project.")


@dataclass(frozen=True, slots=True)
class Condition:
    """``when`` of a field: it is part of a point where another field has one of these values."""

    field: str
    values: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """The values of one field.

    Attributes:
        values: as they stand in a point; None leaves the knob to the method.
        numeric: whether they are equally spaced numbers, so that a search may use their order.
    """

    name: str
    values: tuple[Any, ...]
    numeric: bool = False
    when: tuple[Condition, ...] = ()


class _Document(_Block):
    """The YAML file; ``space`` is parsed by hand."""

    name: str = Field("sweep", min_length=1, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    description: str | None = None
    model: ModelConfig = ModelConfig()
    engine: Literal["paceline", "vllm"] = Field("paceline", description="What runs the target.")
    vllm: VllmConfig = VllmConfig()
    workload: Workload = Workload()
    objective: str | tuple[str, ...] = "goodput"
    constraints: Constraints = Constraints()
    measurement: Measurement = Measurement()
    search: Search = Search()
    resources: Resources = Resources()
    tracking: Tracking = Tracking()
    space: dict[str, Any]


@dataclass(frozen=True)
class Space:
    """A checked sweep file."""

    document: _Document
    choices: tuple[Choice, ...]
    source: str = ""

    @staticmethod
    def from_dict(document: Mapping[str, Any]) -> Space:
        """What :meth:`as_dict` said, which was checked when the file was read."""
        parsed = _Document.model_validate(document)
        return Space(parsed, _parse_choices(parsed))

    @property
    def objectives(self) -> tuple[str, ...]:
        given = self.document.objective
        return (given,) if isinstance(given, str) else given

    def as_dict(self) -> dict[str, Any]:
        """The document with its defaults, as JSON values."""
        return self.document.model_dump(mode="json")

    # --- points -----------------------------------------------------------------------------------

    def walk(self, choose: Callable[[Choice], Any]) -> dict[str, Any]:
        """Choose a value for each field that applies, in an order in which conditions are known."""
        values: dict[str, Any] = {}
        for choice in self.choices:
            if self._applies(choice, values):
                values[choice.name] = choose(choice)
        return values

    def point(self, values: Mapping[str, Any]) -> Point:
        """The point with these values.

        Raises:
            InvalidArgument: a combination that cannot work.
        """
        knobs = {k: v for k, v in values.items() if k not in _OUTER and v is not None}
        if not self.document.constraints.lossless:
            knobs.setdefault("allow_lossy", True)
        point = Point(
            speculation=parse_speculation(knobs, "space"),
            topology=values.get("topology", "colocated"),
            dtype=values.get("dtype", self.document.model.dtype),
        )
        if self.document.engine == "vllm":
            chain_plan(point.speculation, self.document.vllm.max_speculative_tokens)
        plan = resolve(point.speculation)
        if plan.rule.name == "greedy" and self.document.workload.temperature > 0:
            raise InvalidArgument("space.acceptance", "greedy", "'coupled' above temperature 0")
        return point

    def values_of(self, point: Point) -> dict[str, Any]:
        """What :meth:`walk` chose for a point of this space; AR may lie outside."""
        given = point.speculation.model_dump(exclude_defaults=True)
        given |= {"method": point.speculation.method}
        given |= {"topology": point.topology, "dtype": point.dtype}
        return self.walk(lambda choice: given.get(choice.name))

    @cached_property
    def ar(self) -> Point:
        """The baseline, which is always a point."""
        return Point(
            speculation=SpeculationConfig(method="ar"), dtype=str(self.document.model.dtype)
        )

    @property
    def points(self) -> tuple[Point, ...]:
        """Every point once, AR first; a sample of ``MAX_POINTS`` where there are more.

        Raises:
            InvalidArgument: nothing is left of a method, with the reason.
        """
        return self._enumerated[0]

    @cached_property
    def _enumerated(self) -> tuple[tuple[Point, ...], frozenset[str]]:
        """The points, and the fields that some point has."""
        used: set[str] = set()
        found: dict[str, Point] = {self.ar.key: self.ar}
        refused: dict[str, InvalidArgument] = {}
        alive = {None}
        source = self._combinations() if self.size <= MAX_POINTS else self._samples()
        for values in source:
            try:
                point = self.point(values)
            except InvalidArgument as error:
                refused.setdefault(str(values["method"]), error)
                continue
            alive.add(values["method"])
            used |= values.keys()
            found.setdefault(point.key, point)
        for method, error in refused.items():
            if method not in alive:
                raise InvalidArgument(
                    "space.method", method,
                    f"a method that some point of the space fits; {error.field} = "
                    f"{error.value!r} does not: {error.allowed}",
                )  # fmt: skip
        return tuple(found.values()), frozenset(used)

    @cached_property
    def size(self) -> int:
        """Number of combinations, those included that cannot work and those that are equal."""
        return sum(1 for _ in itertools.islice(self._combinations(), MAX_POINTS + 1))

    def _combinations(self) -> Iterator[dict[str, Any]]:
        def extend(index: int, values: dict[str, Any]) -> Iterator[dict[str, Any]]:
            if index == len(self.choices):
                yield dict(values)
                return
            choice = self.choices[index]
            if not self._applies(choice, values):
                yield from extend(index + 1, values)
                return
            for value in choice.values:
                yield from extend(index + 1, {**values, choice.name: value})

        return extend(0, {})

    def _samples(self) -> Iterator[dict[str, Any]]:
        rng = random.Random(self.document.search.seed)
        for _ in range(MAX_POINTS):
            yield self.walk(lambda choice: rng.choice(choice.values))

    def _applies(self, choice: Choice, values: Mapping[str, Any]) -> bool:
        if any(values.get(c.field) not in c.values for c in choice.when):
            return False
        if choice.name in ("method", "dtype"):
            return True
        method = METHODS[values["method"]]
        if choice.name == "topology":
            # Elsewhere the drafter is in the target's process in either topology.
            return served_with(method, "draft_model")
        if method.name == "ar":
            return False
        return choice.name in known_knobs({k: v for k, v in values.items() if v is not None})

    # --- prompts ----------------------------------------------------------------------------------

    @cached_property
    def prompts(self) -> tuple[Prompt, ...]:
        """The prompts, categories in turn, so that the first few already stand for all.

        Raises:
            InvalidArgument: the file, a category or a prompt is not there.
        """
        workload = self.document.workload
        given = builtin_prompts() if workload.prompts is None else read_prompts(workload.prompts)
        known = list(dict.fromkeys(prompt.category for prompt in given))
        for name in workload.categories or ():
            if name not in known:
                raise InvalidArgument(
                    "workload.categories", name, f"one of {', '.join(sorted(known))}"
                )
        wanted = workload.categories or known
        kept = [p for p in limit_per_category(given, workload.limit) if p.category in wanted]
        for prompt in kept:
            if not prompt.text.strip():
                raise InvalidArgument("workload.prompts", prompt.prompt_id, "a text")
        by_category = [[p for p in kept if p.category == name] for name in wanted]
        turns = itertools.zip_longest(*by_category)
        return tuple(prompt for turn in turns for prompt in turn if prompt is not None)


# --- reading the file -----------------------------------------------------------------------------


def find_space(name: str | Path) -> Path:
    """A file by its path, or one of the spaces that ship by its name."""
    path = Path(name)
    shipped = SPACES_DIR / f"{path.stem}.yaml"
    if path.exists() or not shipped.exists() or len(path.parts) > 1:
        return path
    return shipped


def read_space(path: str | Path, changes: Sequence[str] = ()) -> Space:
    """Read and check a sweep file.

    Args:
        changes: ``key.path=VALUE`` in YAML's notation, over what the file says.

    Raises:
        InvalidArgument: not YAML, an unknown field, a value that is not allowed, an empty space,
            conditions that nothing can meet.
    """
    path = find_space(path)
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        shipped = ", ".join(sorted(p.stem for p in SPACES_DIR.glob("*.yaml")))
        allowed = f"a file, or a space that ships ({shipped}): {error.strerror}"
        raise InvalidArgument("space", str(path), allowed) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InvalidArgument("space", str(path), f"a YAML file: {error}") from None
    if not isinstance(data, dict):
        raise InvalidArgument("space", str(path), "a mapping with the key 'space'")
    for change in changes:
        _change(data, change)
    return parse_space(data, source=str(path), folder=path.parent)


def _change(data: dict[str, Any], change: str) -> None:
    dotted, equals, text = change.partition("=")
    keys = dotted.split(".")
    if not equals or not all(keys):
        raise InvalidArgument("set", change, "KEY.PATH=VALUE, such as search.trials=8")
    block = data
    for key in keys[:-1]:
        inner = block.get(key)
        if not isinstance(inner, dict):
            inner = {}
        block[key] = inner = dict(inner)
        block = inner
    try:
        block[keys[-1]] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InvalidArgument("set", change, f"a YAML value: {error}") from None


def parse_space(data: Mapping[str, Any], *, source: str = "", folder: Path | None = None) -> Space:
    """Check a document that was read already; see :func:`read_space`.

    Args:
        folder: what relative paths of model folders and prompts start from.
    """
    data = {str(key): value for key, value in data.items()}
    for key, kind in _Document.model_fields.items():
        if key in data and data[key] is None and kind.annotation is not str:
            del data[key]  # `model:` with nothing behind it
    if not data.get("space"):
        raise InvalidArgument("space", data.get("space"), "at least one field, such as `method`")
    try:
        document = _Document.model_validate(data)
    except ValidationError as error:
        raise refused(_Document, error) from None
    document = _with_paths(document, folder)
    space = Space(document, _parse_choices(document), source)
    _check_objectives(space)
    _check_fields(space)
    _check_drafters(space)
    return space


def _with_paths(document: _Document, folder: Path | None) -> _Document:
    """Paths of the file are relative to it; the rest of the program sees absolute ones.

    Names of models stay names, which every node of a cluster resolves by itself.
    """

    def absolute(name: str | None) -> str | None:
        if name is None:
            return None
        given = Path(name).expanduser()
        beside = (folder or Path()) / given
        return str((beside if beside.exists() else given).resolve())

    model = document.model
    from_hub = (model.heads or "").startswith("hf:")
    changes = {"heads": model.heads if from_hub else absolute(model.heads)}
    if not from_hub and changes["heads"] is not None and not Path(changes["heads"]).is_dir():
        raise InvalidArgument("model.heads", changes["heads"], "a folder that exists")

    def pinned(field: str, name: str) -> str:
        beside = (folder or Path()) / Path(name).expanduser()
        try:
            known = name in KNOWN_NAMES or not beside.exists()
            return pin_model(name if known else beside)
        except ModelNotFound as error:
            raise InvalidArgument(field, name, f"a model: {error}") from error

    for role, name in (("target", model.target), ("drafter", model.drafter)):
        if name is not None:
            changes[role] = pinned(f"model.{role}", name)
    drafters = tuple(pinned("search.drafters", name) for name in document.search.drafters)
    search = document.search.model_copy(update={"drafters": drafters})
    model = model.model_copy(update=changes)
    workload = document.workload.model_copy(update={"prompts": absolute(document.workload.prompts)})
    return document.model_copy(update={"model": model, "workload": workload, "search": search})


def _check_drafters(space: Space) -> None:
    drafters = space.document.search.drafters
    if drafters and space.document.model.drafter is not None:
        raise InvalidArgument(
            "model.drafter", space.document.model.drafter, "nothing beside search.drafters"
        )
    if len(set(drafters)) < len(drafters):
        raise InvalidArgument("search.drafters", list(drafters), "each draft model once")


def _check_objectives(space: Space) -> None:
    if not space.objectives:
        raise InvalidArgument("objective", [], f"one or more of {', '.join(OBJECTIVES)}")
    for name in space.objectives:
        if name not in OBJECTIVES:
            raise InvalidArgument("objective", name, f"one or more of {', '.join(OBJECTIVES)}")
    if len(set(space.objectives)) < len(space.objectives):
        raise InvalidArgument("objective", list(space.objectives), "each objective once")


def _parse_choices(document: _Document) -> tuple[Choice, ...]:
    known = {*SpeculationConfig.model_fields, *_OUTER} - {"allow_lossy"}
    given = {str(name): value for name, value in document.space.items()}
    for name in given:
        if name == "allow_lossy":
            raise InvalidArgument(
                "space.allow_lossy", given[name], "constraints.lossless: false, for all points"
            )
        if name not in known:
            allowed = "one of the fields " + ", ".join(sorted(known))
            raise InvalidArgument(f"space.{name}", given[name], allowed)
    given.setdefault("method", ["draft_model"])
    choices = {name: _parse_choice(name, value) for name, value in given.items()}
    for method in choices["method"].values:
        if method not in METHODS:
            raise InvalidArgument("space.method", method, f"one of {', '.join(sorted(METHODS))}")
    return tuple(_in_order(choices))


def _parse_choice(name: str, value: Any) -> Choice:
    when: tuple[Condition, ...] = ()
    numeric = False
    values: list[Any]
    place = f"space.{name}"
    if value == "auto" and name in KNOBS:
        value = list(KNOBS[name].search)
        if not value:
            declared = ", ".join(sorted(knob.name for knob in KNOBS.values() if knob.search))
            raise InvalidArgument(place, "auto", f"a list of values; `auto` is for {declared}")
    if isinstance(value, Mapping):
        allowed = "a value, a list of values, {min, max, step} or {values}, and `when` beside them"
        unknown = value.keys() - {"min", "max", "step", "values", "when"}
        if (
            unknown
            or ("values" in value) == ("min" in value)
            or ("min" in value) != ("max" in value)
        ):
            raise InvalidArgument(place, dict(value), allowed)
        when = _parse_when(place, value.get("when"))
        if "values" in value:
            values = value["values"]
            if not isinstance(values, list):
                raise InvalidArgument(f"{place}.values", values, "a list")
        else:
            values, numeric = _parse_range(place, value), True
    else:
        values = list(value) if isinstance(value, list) else [value]
    if not values:
        raise InvalidArgument(place, value, "at least one value")
    checked = [_check_value(name, item) for item in values]
    if len({str(item) for item in checked}) < len(checked):
        raise InvalidArgument(place, value, "each value once")
    return Choice(name, tuple(checked), numeric and len(checked) > 1, when)


def _parse_range(place: str, value: Mapping[str, Any]) -> list[Any]:
    low, high, step = value["min"], value["max"], value.get("step", 1)
    for part, number in (("min", low), ("max", high), ("step", step)):
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise InvalidArgument(f"{place}.{part}", number, "a number")
    if step <= 0:
        raise InvalidArgument(f"{place}.step", step, "above 0")
    if high < low:
        raise InvalidArgument(f"{place}.max", high, f"at least min ({low})")
    count = math.floor((high - low) / step + 1e-9) + 1
    if count > 1000:
        raise InvalidArgument(f"{place}.step", step, "a step that gives at most 1000 values")
    whole = all(isinstance(number, int) for number in (low, step))
    return [low + i * step if whole else round(low + i * step, 9) for i in range(count)]


def _parse_when(place: str, when: Any) -> tuple[Condition, ...]:
    if when is None:
        return ()
    if not isinstance(when, Mapping) or not when:
        raise InvalidArgument(f"{place}.when", when, "a mapping from fields to values")
    return tuple(
        Condition(str(name), tuple(value) if isinstance(value, list) else (value,))
        for name, value in when.items()
    )


def _check_value(name: str, value: Any) -> Any:
    """A value as it stands in a config; None is the method's own default."""
    place = f"space.{name}"
    if value is None:
        if name in ("method", *_OUTER):
            raise InvalidArgument(place, value, "a name")
        return None
    if name in _OUTER:
        if value not in _OUTER[name]:
            raise InvalidArgument(place, value, f"one of {', '.join(_OUTER[name])}")
        return value
    try:
        config = parse_speculation({name: value}, "space")
    except InvalidArgument as error:
        hint = " (a list is a choice of values: a list of lists is one of lists)"
        raise InvalidArgument(
            error.field, error.value, error.allowed + (hint if "tuple" in error.allowed else "")
        ) from None
    return getattr(config, name)


def _in_order(choices: Mapping[str, Choice]) -> Iterator[Choice]:
    """Fields after those that they depend on."""
    names = [name for name in _FIRST if name in choices]
    names += [name for name in choices if name not in _FIRST]
    done: set[str] = set()
    for choice in choices.values():
        for condition in choice.when:
            place = f"space.{choice.name}.when.{condition.field}"
            if condition.field not in choices or condition.field == choice.name:
                fields = ", ".join(sorted(choices.keys() - {choice.name}))
                raise InvalidArgument(place, condition.field, f"a field of the space: {fields}")
            possible = choices[condition.field].values
            for value in condition.values:
                if value not in possible:
                    allowed = f"values that the field has: {', '.join(map(str, possible))}"
                    raise InvalidArgument(place, value, allowed)
    for name in names:
        late = [c.field for c in choices[name].when if name in _FIRST and c.field not in _FIRST]
        if late:
            allowed = f"conditions on {', '.join(_FIRST)}: which knobs exist hangs on this field"
            raise InvalidArgument(f"space.{name}.when", late, allowed)
    while names:
        ready = [n for n in names if all(c.field in done for c in choices[n].when)]
        if not ready:
            raise InvalidArgument(
                f"space.{names[0]}.when", [c.field for c in choices[names[0]].when],
                f"conditions that do not go round in a circle: {', '.join(names)}",
            )  # fmt: skip
        names.remove(ready[0])
        done.add(ready[0])
        yield choices[ready[0]]


def _check_fields(space: Space) -> None:
    """That every method fits somewhere, and that every field belongs to some point."""
    document = space.document
    for method in next(c for c in space.choices if c.name == "method").values:
        entry = METHODS[method]
        if document.constraints.lossless and not entry.lossless:
            raise InvalidArgument(
                "space.method", method,
                "a lossless method, or constraints.lossless: false",
            )  # fmt: skip
        if entry.drafter == "client":
            raise InvalidArgument("space.method", method, "a method that drafts by itself")
    points, used = space._enumerated
    methods = next(c for c in space.choices if c.name == "method").values
    for choice in space.choices:
        if choice.name not in used:
            raise InvalidArgument(
                f"space.{choice.name}", list(choice.values),
                f"a field that some point has: none of {', '.join(methods)} has it, or its "
                "conditions are never met",
            )  # fmt: skip
    if all(point.is_ar for point in points):
        raise InvalidArgument("space", list(document.space), "some point beside AR")


class SweepError(PacelineError, RuntimeError):
    """A sweep cannot start or go on."""
