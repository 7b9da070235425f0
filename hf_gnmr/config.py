"""The controller's settings: the paper's symbols, checked once.

Every check names the field, the value it got and what was expected, so that a wrong setting fails before a model is
loaded.  Options of triggers and backends use the same checks.  Fractions of a step count or of a unit count are resolved
with exact rational arithmetic: 0.07 of 100 steps is 7, although ``0.07 * 100`` is 7.000000000000001 in floating point.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import difflib
import inspect
import itertools
import math
import re
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

from .terminal import described, is_own, shown

if TYPE_CHECKING:
    from typing_extensions import Self


class ConfigError(ValueError):
    """A setting that cannot be used; the message names field, value and what was expected."""


MAX_DELTA = 10_000
"""Of `delta`."""
MAX_HISTORY = 1_500_000
"""Of `delta` × units: the monitor keeps delta scores of every unit. A checkpoint holds them as text, some 35 bytes each, in
`trainer_state.json`, which must stay readable (`reading.MAX_JSON_BYTES`)."""
MAX_COUNT = 10**9
"""Of numbers of steps and units (`max_o`, `t_lock`): beyond any run, and far from the end of int64."""


class SetupError(RuntimeError):
    """A model, Trainer or machine on which training must not start; the message names the reason and the fix."""


@contextlib.contextmanager
def refusing(where: str, error_class: type[Exception] = ConfigError) -> Iterator[None]:
    """Turn errors of other packages into one of ours, the cause kept; `where` names the field or file that was read.

    Raises:
        error_class: for a foreign error; our own errors pass as they are.
    """
    try:
        yield
    except Exception as error:
        if is_own(error):
            raise
        raise error_class(f"{where}: {described(error, hint=False)}") from error


@dataclass
class GNMRConfig:
    """Thresholds, windows and budget of the risk monitor and the recovery policy.

    The symbols are those of the GNMR paper (arXiv 2606.00539), Algorithms 1 and 2 and section 3.4.  The defaults are
    its LLaMA-2 13B LoRA setting (Appendix E.3), with maxO given as a share of the layers.

    Raises:
        ConfigError: at construction, naming the field, its value and the expected range.
    """

    alpha: float = 1.1
    """Long-horizon threshold α on GNMR once the initial phase is over. Finite, above 0."""

    alpha_init: float = 1.5
    """α during the initial phase, while the history is short. Finite, above 0."""

    alpha_init_fraction: float = 0.025
    """Length of the initial phase as a share of the total steps, 0 to 1, rounded up to whole steps. 0: α is constant."""

    beta: float | None = 1.5
    """Short-window threshold β on Δ-GNMR. Finite, above 0; None switches Δ-GNMR off as a trigger."""

    delta: int = 5
    """Length δ of Δ-GNMR's window, in finite GNMR values of the unit. At least 1."""

    max_o: int | float = 0.25
    """Budget maxO: a whole number of units (0: nothing is ever lifted), or a float strictly between 0 and 1: that share
    of the recoverable units, rounded down, at least 1."""

    t_lock: int = 1
    """T_lock: for how many further decisions a unit stays a candidate after a trigger that got a seat. At least 0."""

    fidelity_warmup: float = 0.0
    """Share of the total steps, 0 to 1, rounded up, run with every recoverable unit on the recovery path."""

    def __post_init__(self) -> None:
        for name in ("alpha", "alpha_init"):
            setattr(self, name, above_zero(name, getattr(self, name)))
        if self.beta is not None:
            self.beta = above_zero("beta", self.beta, " (or None: Δ-GNMR triggers nothing)")
        for name in ("alpha_init_fraction", "fidelity_warmup"):
            setattr(self, name, share(name, getattr(self, name), "a share of the steps from 0 to 1"))
        self.delta = whole("delta", self.delta, 1, most=MAX_DELTA)
        self.t_lock = whole("t_lock", self.t_lock, 0, most=MAX_COUNT)
        self.max_o = _check_max_o(self.max_o)

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain JSON values."""
        return dataclasses.asdict(self)

    def check_history(self, units: int) -> None:
        """Refuse a window of `delta` scores that is too much for this many units.

        Raises:
            ConfigError: naming delta, the number of units and the highest delta for it.
        """
        if self.delta * units > MAX_HISTORY:
            raise ConfigError(
                f"delta={self.delta}: expected at most {max(1, MAX_HISTORY // units):,} for {units:,} units "
                f"(delta × units at most {MAX_HISTORY:,}), got {self.delta * units:,} scores"
            )

    def resolve_max_o(self, recoverable_units: int) -> int:
        """maxO as a number of units, clipped to the number of recoverable ones (SPEC: the controller clips)."""
        if recoverable_units <= 0:
            return 0
        if isinstance(self.max_o, int):
            return min(self.max_o, recoverable_units)
        return max(1, math.floor(exact(self.max_o) * recoverable_units))

    def resolve_steps(self, field: str, total_steps: int | None) -> int:
        """A share of the steps as whole steps, rounded up.

        Raises:
            ConfigError: a share above 0 without a total number of steps.
        """
        fraction = getattr(self, field)
        if fraction == 0:
            return 0
        if total_steps is None:
            raise ConfigError(
                f"{field}={fraction!r} is a share of the total number of steps, which is unknown here: "
                f"give total_steps, or set {field}=0"
            )
        return math.ceil(exact(fraction) * total_steps)


def exact(value: float) -> Fraction:
    """The decimal number that the user wrote, as an exact fraction (0.07 is 7/100, not the nearest binary double)."""
    return Fraction(repr(float(value)))


def number(name: str, value: Any, expected: str) -> float:
    """`value` as a float; booleans and text do not count as numbers.

    Raises:
        ConfigError: naming field, value and type, and what was expected.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ConfigError(f"{name}={shown(value)}: expected {expected}, got a {type(value).__name__}")
    try:
        return float(value)
    except OverflowError:
        raise ConfigError(f"{name}: expected {expected}, got a whole number beyond the range of a float") from None


def above_zero(name: str, value: Any, also: str = "") -> float:
    """A finite number above 0.

    Raises:
        ConfigError: anything else.
    """
    expected = f"a finite number above 0{also}"
    result = number(name, value, expected)
    if not math.isfinite(result) or result <= 0:
        raise ConfigError(f"{name}={shown(value)}: expected {expected}")
    return result


def share(name: str, value: Any, what: str = "a number from 0 to 1") -> float:
    """A number from 0 to 1.

    Raises:
        ConfigError: anything else.
    """
    result = number(name, value, what)
    if not 0.0 <= result <= 1.0:
        raise ConfigError(f"{name}={shown(value)}: expected {what}")
    return result


def whole(name: str, value: Any, least: int, what: str = "a whole number", most: int = MAX_COUNT) -> int:
    """A whole number (4.0 counts as 4) from `least` to `most`.

    Raises:
        ConfigError: anything else.
    """
    expected = f"{what}, at least {least}"
    result = number(name, value, expected)
    if math.isfinite(result) and result > most:
        raise ConfigError(f"{name}={shown(value)}: expected {what}, at most {most:,}")
    if not math.isfinite(result) or result != int(result) or result < least:
        raise ConfigError(f"{name}={shown(value)}: expected {expected}")
    return int(result)


def integer(name: str, value: Any, least: int, what: str = "a whole number", most: int = 2**63 - 1) -> int:
    """An integer from `least` to `most` (4.0 does not count).

    Raises:
        ConfigError: anything else.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ConfigError(f"{name}={shown(value)}: expected {what}, at least {least}")
    if int(value) > most:
        raise ConfigError(f"{name}={shown(value)}: expected {what}, at most {most:,}")
    return int(value)


def one_of(name: str, value: Any, choices: Iterable[Any]) -> None:
    """Raise ConfigError unless `value` is one of `choices`, of the same type."""
    listed = list(choices)
    if not any(value == choice and type(value) is type(choice) for choice in listed):
        raise ConfigError(f"{name}={shown(value)}: expected one of {', '.join(map(repr, listed))}")


def nearest(name: Any, known: Iterable[str]) -> str:
    """A hint for an unknown name (YAML keys may also be numbers): the nearest known one, or all of them."""
    names = list(known)
    text = name[:100] if isinstance(name, str) else shown(name)
    matches = difflib.get_close_matches(text, names, n=1, cutoff=0.6)
    return f"did you mean {matches[0]!r}?" if matches else f"known: {', '.join(names)}"


def _check_max_o(value: Any) -> int | float:
    expected = "a whole number of units (0 or more), or a float strictly between 0 and 1 (share of the recoverable units)"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ConfigError(f"max_o={shown(value)}: expected {expected}, got a {type(value).__name__}")
    if isinstance(value, Integral):
        if value < 0:
            raise ConfigError(f"max_o={shown(value)}: expected {expected}")
        if int(value) > MAX_COUNT:
            raise ConfigError(f"max_o={shown(value)}: expected a whole number of units, at most {MAX_COUNT:,}")
        if value == 0:
            warnings.warn("max_o=0: no unit is ever lifted, the run stays on the low-cost path", stacklevel=4)
        return int(value)
    if not 0.0 < float(value) < 1.0:
        raise ConfigError(f"max_o={shown(value)}: expected {expected}")
    return float(value)


def field_docs(cls: type) -> dict[str, str]:
    """The docstrings below a dataclass's fields, by field name, including those of its bases."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for statement, following in itertools.pairwise(body.body):
            if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)):
                continue
            if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                docs[statement.target.id] = " ".join(str(following.value.value).split())
    return docs


def field_defaults(cls: type) -> dict[str, Any]:
    """The defaults of a dataclass's fields, by field name; fields without one are left out."""
    defaults = {}
    for field in dataclasses.fields(cls):
        if field.default is not dataclasses.MISSING:
            defaults[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            defaults[field.name] = field.default_factory()
    return defaults


@dataclass(frozen=True)
class DeclaredOptions:
    """Options that a backend or a trigger declares for itself: each field has a default and a docstring, values are checked
    at construction.

    Raises:
        ConfigError: naming field, value and what was expected.
    """

    @classmethod
    def of(cls, values: Mapping[str, Any], owner: str) -> Self:
        """The options with these values; `owner` is named where one is unknown, as "backend='int8'".

        Raises:
            ConfigError: an unknown option, with the nearest known one; or a wrong value.
        """
        for name in values:
            if name not in cls.defaults():
                hint = nearest(name, cls.defaults()) if cls.defaults() else "it has none"
                raise ConfigError(f"{owner} has no option {shown(name)}: {hint}")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """The options as plain JSON values."""
        return dataclasses.asdict(self)

    def changed(self) -> dict[str, Any]:
        """Those that differ from their defaults, as plain JSON values."""
        return {name: value for name, value in self.to_dict().items() if value != self.defaults()[name]}

    def paths(self) -> dict[str, str]:
        """Options that name something on disk which the run reads, by field."""
        return {}

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Field names and their defaults."""
        return field_defaults(cls)

    def _convert(self, name: str, value: Any) -> None:
        """Set a field to its checked value, in `__post_init__`."""
        object.__setattr__(self, name, value)


SIZES = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def parse_bytes(name: str, value: int | str) -> int:
    """A size in bytes from a whole number or text such as "6GB" (decimal) or "500MiB" (binary).

    Raises:
        ConfigError: anything else, or a size that is not above 0.
    """
    # Only a short text: the expression takes quadratic time, and a float of hundreds of digits is infinite.
    match = (
        re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*", value)
        if isinstance(value, str) and len(value) < 64
        else None
    )
    if match and match[2].lower() in SIZES:
        size = int(float(match[1]) * SIZES[match[2].lower()])
    elif isinstance(value, int) and not isinstance(value, bool):
        size = value
    else:
        size = 0
    if not 0 < size < 2**63:
        raise ConfigError(f"{name}={shown(value)}: expected a number of bytes above 0, or text such as '6GB' or '500MiB'")
    return size
