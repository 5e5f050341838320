"""Knobs: the settings of a method, each declared beside the part that reads it.

A part (drafter, shape, acceptance rule, length controller, depth policy) lists its knobs as
:class:`Knob` objects and reads their values with ``config[KNOB]``. Everything else is derived from
the declarations: the schema of requests (:mod:`paceline.config`) and with it the Serve YAML and the
chart's schema, the fields and comments of the gRPC message, docs/methods.md, the checks of
:mod:`paceline.plan`, and what a sweep may vary and a simulation must know (:mod:`paceline.tuning`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar, get_origin

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

MAX_DEPTH = 64
MAX_NODES = 256

T = TypeVar("T")


@dataclass(frozen=True)
class Knob(Generic[T]):
    """A setting of a part.

    Attributes:
        name: key in requests and files; parts that share a name share the declaration.
        kind: type of a value, as pydantic understands it. A list is ``tuple[...]``: JSON and YAML
            give lists, and a tuple keeps the config hashable.
        default: the part's default. None: the part chooses by itself, as ``help`` says.
        help: what the knob does; ends with a period.
        ge, gt, le: bounds of a number.
        max_length: bound of a list, which has at least one item.
        search: values that a sweep tries for ``auto``; (): a sweep varies the knob only over values
            that its file lists.
        costs: the knob changes what a round costs, not only which tokens are drafted.
    """

    name: str
    kind: Any
    default: T
    help: str
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    max_length: int | None = None
    search: tuple[Any, ...] = ()
    costs: bool = False

    def but(self, default: T) -> Knob[T]:
        """The same knob with another default, for a part that shares it."""
        return replace(self, default=default)

    def is_same(self, other: Knob[Any]) -> bool:
        """Whether both declare one setting: they differ in nothing but the default."""
        return self == other.but(self.default)

    def field(self) -> tuple[Any, FieldInfo]:
        """Annotation and pydantic field of the knob in the schema, where None means unset."""
        is_list = get_origin(self.kind) is tuple
        bounds: dict[str, Any] = {"ge": self.ge, "gt": self.gt, "le": self.le}
        if is_list:
            bounds |= {"strict": False, "min_length": 1, "max_length": self.max_length}
        bounds = {name: bound for name, bound in bounds.items() if bound is not None}
        return self.kind | None, Field(default=None, description=self.help, **bounds)


class HasKnobs(Protocol):
    """A part of the catalogue."""

    @property
    def knobs(self) -> tuple[Knob[Any], ...]:
        """The knobs that the part reads, with its defaults."""
        ...


class Knobs(BaseModel):
    """Values of knobs: those of every method by attribute, those of the parts by ``knobs[KNOB]``.

    The complete schema is :class:`paceline.config.SpeculationConfig`. A value is None where it was
    not given; in the config of a plan, every knob of the method is filled in.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    method: str = Field(
        default="draft_model", description="A method of the catalogue (`paceline methods`)."
    )
    num_speculative_tokens: int | None = Field(
        default=None, ge=0, le=MAX_DEPTH, description="Depth of the draft; 0 is plain AR decoding."
    )
    node_budget: int | None = Field(
        default=None,
        ge=0,
        le=MAX_NODES,
        description="Most nodes in a draft; default: its depth.",
    )
    shape: str | None = Field(default=None, description="Tree shape of an expanding drafter.")
    acceptance: str | None = Field(default=None, description="Acceptance rule.")
    length: str | None = Field(default=None, description="Length controller.")
    allow_lossy: bool = Field(
        default=False, description="Permit methods and rules that can change the target's output."
    )

    def __getitem__(self, knob: Knob[T]) -> T:
        """The value of a part's knob; the knob's default where none was given."""
        value = getattr(self, knob.name, None)
        return knob.default if value is None else value

    def overrides(self) -> dict[str, Any]:
        """The fields that are set, as :func:`paceline.config.parse_speculation` accepts them."""
        return self.model_dump(exclude_none=True, exclude_defaults=False)
