"""The step axis of a figure in at most `COLUMNS` columns: long traces are thinned, maxima are kept."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .series import Series

COLUMNS = 600


@dataclass
class Columns:
    """The step axis in columns."""

    edges: np.ndarray
    """(C + 1,): step numbers."""
    index: np.ndarray
    """(S,): the column of each line."""

    @classmethod
    def of(cls, series: Series) -> Columns:
        """At most `COLUMNS`, over the steps from the first line's to the last one's."""
        first, last = int(series.step[0]), int(series.step[-1])
        count = min(COLUMNS, last - first + 1)
        edges = first + (np.arange(count + 1) * (last - first + 1)) / count
        index = ((series.step - first) * count) // (last - first + 1)
        return cls(edges, index)

    @property
    def filled(self) -> np.ndarray:
        """(C,): columns with a line."""
        return np.bincount(self.index, minlength=len(self.edges) - 1) > 0

    @property
    def middle(self) -> np.ndarray:
        """(C,): step numbers to draw at; a column of one step at that step."""
        return (self.edges[:-1] + self.edges[1:] - 1) / 2

    def reduce(self, values: np.ndarray, by: np.ufunc) -> np.ndarray:
        """(S, ...) to (C, ...) by a ufunc such as `np.fmax`, which ignores nan; blank columns are nan, or False."""
        reduced = by.reduceat(values, np.flatnonzero(np.diff(self.index, prepend=-1)), axis=0)
        out = np.full((len(self.edges) - 1, *values.shape[1:]), False if values.dtype == bool else np.nan)
        out[self.filled] = reduced
        return out.astype(bool) if values.dtype == bool else out


def by_rows(values: np.ndarray, group: int, by: np.ufunc) -> np.ndarray:
    """(C, U) to (C, rows): each row combines `group` units."""
    return values if group == 1 else by.reduceat(values, np.arange(0, values.shape[1], group), axis=1)


def moving_mean(values: np.ndarray, columns: Columns) -> np.ndarray:
    """Mean of the finite values (S,) in a window of columns around each, (C,); nan where a column has none."""
    count, finite = len(columns.edges) - 1, np.isfinite(values)
    sums = np.bincount(columns.index[finite], values[finite], minlength=count)
    numbers = np.bincount(columns.index[finite], minlength=count).astype(float)
    half = max(0, count // 200)
    summed = [np.concatenate([[0.0], np.cumsum(x)]) for x in (sums, numbers)]
    low, high = np.maximum(np.arange(count) - half, 0), np.minimum(np.arange(count) + half + 1, count)
    total, number = (s[high] - s[low] for s in summed)
    return np.where(numbers > 0, total / np.maximum(number, 1), np.nan)
