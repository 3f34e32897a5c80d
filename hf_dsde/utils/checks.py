"""Checks of user-given values. Each error names the argument, the value, what is accepted and a way out."""

from __future__ import annotations

import math
from collections.abc import Collection


def _complain(argument: str, value: object, accepted: str, way_out: str) -> str:
    return f"`{argument}` is {value!r}, but {accepted} is needed. {way_out}".rstrip()


def check_integer(argument: str, value: object, minimum: int, maximum: int | None = None, *, way_out: str = "") -> int:
    """The value, if it is an integer (bool is none) within the bounds; a ValueError or TypeError otherwise."""
    bounds = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
    accepted = f"an integer {bounds}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(_complain(argument, value, accepted, way_out))
    if value < minimum or (maximum is not None and value > maximum):
        raise ValueError(_complain(argument, value, accepted, way_out))
    return value


def check_number(
    argument: str,
    value: object,
    minimum: float,
    maximum: float = math.inf,
    *,
    open_minimum: bool = False,
    way_out: str = "",
) -> float:
    """The value as a float, if it is a finite number within the bounds; `open_minimum` excludes the minimum itself."""
    least = f"greater than {minimum:g}" if open_minimum else f"of at least {minimum:g}"
    accepted = f"a number {least}" + ("" if maximum == math.inf else f" and at most {maximum:g}")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(_complain(argument, value, accepted, way_out))
    below = value <= minimum if open_minimum else value < minimum
    if not math.isfinite(value) or below or value > maximum:
        raise ValueError(_complain(argument, value, accepted, way_out))
    return float(value)


def check_flag(argument: str, value: object) -> bool:
    """The value, if it is True or False."""
    if not isinstance(value, bool):
        raise TypeError(_complain(argument, value, "True or False", ""))
    return value


def check_choice(argument: str, value: object, choices: Collection[str], *, way_out: str = "") -> str:
    """The value, if it is one of the choices."""
    accepted = "one of " + ", ".join(repr(choice) for choice in choices)
    if not isinstance(value, str):
        raise TypeError(_complain(argument, value, accepted, way_out))
    if value not in choices:
        raise ValueError(_complain(argument, value, accepted, way_out))
    return value
