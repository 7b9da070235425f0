"""One answer of a diagnosis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..control.gnmr import Controller
from .series import Series

FEW = 30
"""Events below which no rate is concluded."""


@dataclass
class Finding:
    """One question, its answer in numbers, and what to do."""

    name: str
    figures: dict[str, Any]
    says: str
    advice: str


def by_thresholds(series: Series) -> bool:
    """Whether the run chose by R and locks, so that thresholds and locks are the settings to change."""
    return bool(series.header["trigger"] == Controller.name)
