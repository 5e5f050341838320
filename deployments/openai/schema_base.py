"""What the schemas of all requests are made of."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Integer = Annotated[int, Field(strict=True)]
Flag = Annotated[bool, Field(strict=True)]
Text = Annotated[str, Field(strict=True)]
TokenIds = list[Integer]


UNKNOWN_KEYS: ContextVar[str] = ContextVar("unknown_keys", default="forbid")
"""What becomes of unknown keys in the request that is being read: "forbid" or "ignore"."""


class Body(BaseModel):
    """A part of a request."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _drop_unknown(cls, data: Any) -> Any:
        if UNKNOWN_KEYS.get() == "forbid" or not isinstance(data, dict):
            return data
        known = {field.alias or name for name, field in cls.model_fields.items()}
        return {key: value for key, value in data.items() if key in known}
