"""Validation of what users pass to the runtime: each check returns the value in its plain type, or raises ConfigError
naming the field, what was given and what is allowed. NumPy's numbers are numbers; bool is none."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable
from typing import TypeVar, cast

from kvstream.errors import ConfigError

__all__ = ["instance", "seconds", "text", "token_range", "whole"]

_T = TypeVar("_T")


def whole(field: str, value: object, low: int, high: int) -> int:
    """An integer from `low` to `high`."""
    if type(value) is int and low <= value <= high:
        return value  # what nearly every call has, without the abstract class's check
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ConfigError(field, f"must be an integer from {low} to {high}, is {_shown(value)}")
    number = int(value)
    if not low <= number <= high:
        shown = number if number.bit_length() < 128 else f"one of {number.bit_length()} bits"
        raise ConfigError(field, f"must be from {low} to {high}, is {shown}")
    return number


def seconds(field: str, value: object, *, zero: bool = False) -> float:
    """A finite number of seconds, greater than zero (or zero, where that makes sense)."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ConfigError(field, f"must be a number of seconds, is {_shown(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or number < 0 or number > 1e9 or (number == 0 and not zero):
        raise ConfigError(field, f"must be a finite number of seconds {'from' if zero else 'above'} zero, is {number}")
    return number


def text(field: str, value: object, limit: int) -> str:
    """A string of 1 to `limit` characters."""
    if not isinstance(value, str):
        raise ConfigError(field, f"must be a string, is {_shown(value)}")
    if not 0 < len(value) <= limit:
        raise ConfigError(field, f"has {len(value)} characters; 1 to {limit} are allowed")
    if not value.isascii() and value != value.encode(errors="replace").decode():
        raise ConfigError(field, f"{value!r} is not valid Unicode")
    return value


def token_range(value: object, tokens: int) -> tuple[int, int]:
    """A pair (start, stop) with 0 <= start < stop <= tokens."""
    given: object = value
    pair = list(cast("Iterable[object]", value)) if isinstance(value, tuple | list) else []
    if len(pair) != 2:
        raise ConfigError("tokens", f"must be a pair (start, stop), is {_shown(given)}")
    start, stop = (whole("tokens", bound, 0, tokens) for bound in pair)
    if start >= stop:
        raise ConfigError("tokens", f"({start}, {stop}) is not a range within the stream's {tokens} tokens")
    return start, stop


def instance(field: str, value: _T, kind: type[_T]) -> _T:
    """An object of that class, whatever the annotation promised."""
    if not isinstance(value, kind):
        raise ConfigError(field, f"must be a {kind.__name__}, is {_shown(value)}")
    return value


def _shown(value: object) -> str:
    shown = repr(value)
    return f"{shown if len(shown) <= 60 else shown[:57] + '...'} ({type(value).__name__})"
