"""Values of a parsed config.json, checked one by one."""

from __future__ import annotations

import math
from typing import Any

from paceline.errors import InvalidArgument


def count_of(raw: dict[str, Any], key: str, default: int | None = None, least: int = 1) -> int:
    """An integer; KeyError without a default."""
    value = raw[key] if default is None or raw.get(key) is not None else default
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InvalidArgument(key, value, f"an integer of {least} or more")
    return value


def number_of(raw: dict[str, Any], key: str, default: float) -> float:
    """A number above 0; the default for null."""
    value = raw.get(key)
    value = default if value is None else value
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:
        raise InvalidArgument(key, value, "a number above 0")
    return float(value)


def flag_of(raw: dict[str, Any], key: str) -> bool:
    """True or false; false for null."""
    value = raw.get(key)
    if value is not None and not isinstance(value, bool):
        raise InvalidArgument(key, value, "true or false")
    return bool(value)
