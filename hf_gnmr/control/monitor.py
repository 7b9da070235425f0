"""The risk monitor (paper, sections 3.1 and 3.2, Algorithm 1): norms in, scores out."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..terminal import shown

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


class RiskMonitor:
    """GNMR and Δ-GNMR of every unit (paper, sections 3.1 and 3.2, Algorithm 1).

    Args:
        num_units: number of monitored units.
        delta: window δ of Δ-GNMR, in finite GNMR values.
    """

    def __init__(self, num_units: int, delta: int) -> None:
        self.num_units = num_units
        self.delta = delta
        self.norm_sum = np.zeros(num_units)
        self.norm_count = np.zeros(num_units, dtype=np.int64)
        # A ring buffer per unit: row `gnmr_count % delta` is the next to be overwritten. Units advance separately,
        # because a norm that is not finite enters no history. Unfilled rows hold 0 and so add nothing to a sum.
        self.window = np.zeros((delta, num_units))
        self.gnmr_count = np.zeros(num_units, dtype=np.int64)
        self._units = np.arange(num_units)

    def observe(self, norms: Floats, seen: Bools | None = None) -> tuple[Floats, Floats]:
        """Score one step and enter it into the history.

        Args:
            norms: gradient norms n[b, t], float64, shape (num_units,); inf and nan allowed.
            seen: units that had a gradient; None: all. The others' history stays as it is.

        Returns:
            GNMR and Δ-GNMR, float64, shape (num_units,) each; +inf where the norm is not finite, nan where not seen.
        """
        finite = np.isfinite(norms) if seen is None else np.isfinite(norms) & seen
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            mean = self.norm_sum / self.norm_count
            gnmr = np.where((self.norm_count > 0) & (mean != 0), norms / mean, 1.0)
            filled = np.minimum(self.gnmr_count, self.delta)
            recent = self.window.sum(axis=0) / filled
            delta_gnmr = np.where((filled > 0) & (recent != 0), gnmr / recent, 1.0)
        gnmr[~finite] = np.inf
        delta_gnmr[~finite] = np.inf

        self.norm_sum[finite] += norms[finite]
        self.norm_count += finite
        # A finite norm can still overflow the ratio; such a GNMR must not enter the window.
        usable = np.isfinite(gnmr)
        if seen is not None:
            gnmr[~seen] = delta_gnmr[~seen] = np.nan
        columns = self._units[usable]
        self.window[self.gnmr_count[usable] % self.delta, columns] = gnmr[usable]
        self.gnmr_count += usable
        return gnmr, delta_gnmr


def check_norms(norms: ArrayLike, num_units: int) -> Floats:
    """`norms` as float64 of shape (num_units,); raises a ValueError that names what is wrong."""
    try:
        values = np.asarray(norms, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"norms={shown(norms)}: expected {num_units} numbers, one per unit") from error
    if values.shape != (num_units,):
        raise ValueError(f"norms have shape {values.shape}: expected ({num_units},), one value per unit")
    if (values < 0).any():
        unit = int(np.flatnonzero(values < 0)[0])
        raise ValueError(f"norm of unit {unit} is {float(values[unit])!r}: expected 0 or more (inf and nan included)")
    return values


def encode_floats(values: ArrayLike) -> list[float | str]:
    """Floats as JSON values: finite ones exactly, the others as "inf", "-inf", "nan"."""
    return [v if math.isfinite(v) else str(v) for v in np.asarray(values, dtype=np.float64).tolist()]


def decode_floats(values: Sequence[float | str]) -> Floats:
    """The inverse of `encode_floats`."""
    return np.array([float(v) for v in values], dtype=np.float64)
