"""SpeculationConfig: the one schema for "how to speculate".

The same schema is a library argument, a field of a gRPC or HTTP request, a block of the Serve
YAML, the values of the Helm chart, a point of the search space and the output of a sweep.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, get_args

from pydantic import BaseModel, ValidationError, create_model

from paceline.errors import InvalidArgument
from paceline.knobs import MAX_DEPTH, MAX_NODES, Knobs
from paceline.methods import KNOBS

__all__ = ["MAX_DEPTH", "MAX_NODES", "SpeculationConfig", "keys_at", "parse_speculation", "refused"]

if TYPE_CHECKING:

    class _Schema(Knobs):
        """The fields of the parts' knobs are only known at run time."""

        def __init__(self, **knobs: Any) -> None: ...
        def __getattr__(self, knob: str) -> Any: ...

else:
    _Schema = create_model(
        "_Schema", __base__=Knobs, **{name: knob.field() for name, knob in KNOBS.items()}
    )


class SpeculationConfig(_Schema):
    """A method of the catalogue and its knobs. ``None`` means the method's own default.

    Unknown keys, and knobs that the chosen method does not have, are errors. The fields are those
    of :class:`paceline.knobs.Knobs` and the knobs that the parts of the catalogue declare.
    """


def keys_at(schema: type[BaseModel], path: Iterable[str | int]) -> list[str]:
    """The keys that a nested schema accepts in the block at ``path``."""
    for part in path:
        inner = schema.model_fields[str(part)].annotation
        # An optional block is a union of its schema and None.
        kinds = [k for k in (inner, *get_args(inner)) if isinstance(k, type)]
        schema = next(kind for kind in kinds if issubclass(kind, BaseModel))
    return sorted(schema.model_fields)


def refused(schema: type[BaseModel], error: ValidationError, prefix: str = "") -> InvalidArgument:
    """The first of a schema's complaints, with its key, the value and what is allowed there."""
    first = error.errors()[0]
    key = prefix + ".".join(str(part) for part in first["loc"])
    allowed = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        allowed = "one of the keys " + ", ".join(keys_at(schema, first["loc"][:-1]))
    return InvalidArgument(key, first["input"], allowed)


def parse_speculation(
    value: Mapping[str, Any] | None, prefix: str = "speculation"
) -> SpeculationConfig:
    """Build a SpeculationConfig from untrusted keys and values.

    Raises:
        InvalidArgument: names the first offending key as ``prefix.key``, and what is allowed.
    """
    if value is not None and not isinstance(value, Mapping):
        raise InvalidArgument(prefix, value, "a mapping from knobs to values")
    try:
        return SpeculationConfig.model_validate(dict(value or {}))
    except ValidationError as error:
        raise refused(SpeculationConfig, error, f"{prefix}.") from None
