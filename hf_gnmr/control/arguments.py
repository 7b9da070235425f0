"""What comes from outside into a trigger: arguments and stored states, checked with the name of the field.

A state comes from a checkpoint, which may be cut, edited or of another program.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..config import ConfigError, integer
from ..terminal import shown

MOST_STEPS = 2**53
"""Of counters in a state."""


def array(name: str, value: Any, shape: tuple[int, ...], dtype: type) -> NDArray[Any]:
    """`value` as an array of this shape; numbers for float, and for bool what is true or false (0 and 1 too).

    Raises:
        ConfigError: anything else, naming it.
    """
    what = {float: "numbers", int: "whole numbers", bool: "true or false"}[dtype]
    expected = f"an array of shape {shape}, {what}"
    if value is None or isinstance(value, (str, bytes, Mapping)):
        raise ConfigError(f"{name}={shown(value)}: expected {expected}")
    try:
        result = np.asarray(value)
        if result.shape != shape:
            raise ConfigError(f"{name} has shape {result.shape}: expected {shape}, {what}")
        allowed = {float: "fiubUO", int: "iu", bool: "b"}[dtype]
        binary = dtype is bool and result.dtype.kind in "iuf" and bool(np.isin(result, (0, 1)).all())
        if result.size and result.dtype.kind not in allowed and not binary:
            raise ConfigError(f"{name}={shown(value)}: expected {expected}")
        return result.astype({float: np.float64, int: np.int64, bool: np.bool_}[dtype])
    except ConfigError:
        raise
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{name}={shown(value)}: expected {expected} ({error})") from error


class State:
    """A stored state's fields, each checked as it is taken.

    Raises:
        ConfigError: not a mapping.
    """

    def __init__(self, state: Any, what: str) -> None:
        if not isinstance(state, Mapping):
            raise ConfigError(f"{what} state={shown(state)}: expected a dict, as state_dict() returns it")
        self.values, self.what = state, what

    def _taken(self, name: str) -> Any:
        if name not in self.values:
            raise ConfigError(f"{self.what} state: {name} is missing; it is cut, or of another program")
        return self.values[name]

    def count(self, name: str, least: int = 0) -> int:
        """A whole number from `least` on."""
        return integer(f"{self.what} state: {name}", self._taken(name), least, most=MOST_STEPS)

    def counts(self, name: str, shape: tuple[int, ...]) -> NDArray[np.int64]:
        """Whole numbers, none below 0."""
        values = array(f"{self.what} state: {name}", self._taken(name), shape, int)
        if (values < 0).any() or (values > MOST_STEPS).any():
            raise ConfigError(f"{self.what} state: {name}={shown(values.tolist())}: expected whole numbers from 0 on")
        return values

    def floats(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float64]:
        """Floats, none below 0; "inf" and "nan" are stored as texts."""
        values = array(f"{self.what} state: {name}", self._taken(name), shape, float)
        if (values < 0).any():
            raise ConfigError(f"{self.what} state: {name}={shown(values.tolist())}: expected numbers from 0 on")
        return values

    def bools(self, name: str, shape: tuple[int, ...]) -> NDArray[np.bool_]:
        """True or false."""
        return array(f"{self.what} state: {name}", self._taken(name), shape, bool)

    def text(self, name: str) -> str | None:
        """A text or None."""
        value = self._taken(name)
        if value is not None and not isinstance(value, str):
            raise ConfigError(f"{self.what} state: {name}={shown(value)}: expected a text")
        return value

    def mapping(self, name: str) -> Mapping[str, Any] | None:
        """A dict or None."""
        value = self._taken(name)
        if value is not None and not isinstance(value, Mapping):
            raise ConfigError(f"{self.what} state: {name}={shown(value)}: expected a dict")
        return value
