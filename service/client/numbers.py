"""Numbers that callers give: refused by name before anything is leased, counted or sent."""

from __future__ import annotations

import math
import operator

from megamoe.errors import InvalidArgumentError, must_be


def integer(name: str, value: object) -> int:
    """A number that fits 64 bits. Raises InvalidArgumentError."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise InvalidArgumentError(must_be(name, "an integer", repr(value))) from None
    if not -(2**63) <= number < 2**63:
        raise InvalidArgumentError(must_be(name, "a 64-bit integer", number))
    return number


def whole(name: str, value: object, end: int) -> int:
    """An integer from 0 below `end`. Raises InvalidArgumentError."""
    number = integer(name, value)
    if not 0 <= number < end:
        raise InvalidArgumentError(must_be(name, f"from 0 to {end - 1}", number))
    return number


def check_time(name: str, value: object) -> None:
    """Raise InvalidArgumentError unless it is None or a time."""
    if value is not None and not (isinstance(value, int | float) and 0 <= value < math.inf):
        raise InvalidArgumentError(must_be(name, "a finite number of at least 0", repr(value)))
