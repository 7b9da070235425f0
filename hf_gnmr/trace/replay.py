"""The controller over a recorded trace under other settings: ``hf-gnmr replay TRACE --set alpha=1.2 --set max_o=4,6``.

Open loop: the norms are those recorded under the recorded choices.  Had other units been lifted, the norms would have
differed.  A replay under the recorded settings is compared with the recorded decisions, number by number.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..config import ConfigError, GNMRConfig
from ..control.controller import Bools, Floats, Trigger
from ..control.triggers import TRIGGERS, make_trigger
from ..files import plain
from ..terminal import TRACEBACK, TRACEBACK_HELP, cleaned, printable, refused, shown
from .file import TraceError
from .metrics import decision_figures, dwell
from .replay_table import NOTE, in_words, settings_grid
from .series import Series, read_series


@dataclass
class Replay:
    """Decisions over the lines of a trace. Arrays are (S, U), or (S,)."""

    config: GNMRConfig
    max_o: int
    gnmr: Floats
    delta_gnmr: Floats
    risk: Floats
    """nan on lines that do not count."""
    alpha: Floats
    beta: Floats
    triggered: Bools
    active: Bools
    """Units on the recovery path *during* the step, as in a trace (`Decision.active` is the set for the next step)."""

    def figures(self, series: Series, rows: Any = slice(None)) -> dict[str, Any]:
        """Figures over some of the lines (a slice or a mask), as in a run's summary; `mean_recovery_bytes` is None where the
        trace does not record what units add."""
        counted, mask = series.counted[rows], series.recoverable
        active, adjacent = self.active[rows], np.diff(series.step[rows]) == 1
        recorded = series.active[rows][counted]
        differing = (active[counted] ^ recorded)[:, mask]
        return {
            **decision_figures(
                active[counted],
                self.gnmr[rows][counted],
                self.delta_gnmr[rows][counted],
                self.alpha[rows][counted],
                self.beta[rows][counted],
                mask,
                self.max_o,
            ),
            "switches": int((active[1:] ^ active[:-1])[adjacent].sum()),
            "mean_dwell": dwell(active, adjacent)["mean"],
            "mean_recovery_bytes": mean_recovery_bytes(series, active, rows),
            "unit_steps_as_recorded": float(1 - differing.mean()) if differing.size else None,
        }


def replay(series: Series, changes: Mapping[str, Any] | None = None, *, recorded_trigger: bool = False) -> Replay:
    """Run the controller over a trace.

    Args:
        series: the trace.
        changes: fields of `GNMRConfig` that differ from the recorded ones.
        recorded_trigger: replay the trigger that was recorded, instead of `gnmr`.

    Raises:
        ConfigError: invalid settings, or a trigger whose options are not in the trace.
    """
    trigger = trigger_of(series, changes, recorded_trigger=recorded_trigger)
    # Scores depend on the norms and δ only. They are on record even where the lines before them are missing.
    scores_recorded = not recorded_trigger and trigger.config.delta == recorded_config(series).delta
    size, units = len(series), len(series.names)
    gnmr, delta, risk = (np.full((size, units), np.nan) for _ in range(3))
    alpha, beta = np.full(size, np.nan), np.full(size, np.nan)
    triggered, active = np.zeros((size, units), dtype=bool), np.zeros((size, units), dtype=bool)
    previous = int(series.step[0]) - 1 - _steps_before(series) if size else 0
    for line in range(size):
        missing = int(series.step[line]) - previous - 1
        if missing:
            trigger.pass_over(missing)
        previous = int(series.step[line])
        active[line] = trigger.active
        if not series.counted[line]:
            continue
        signal = None if trigger.signal is None else series.signal[line]
        scores = (series.gnmr[line], series.delta_gnmr[line]) if scores_recorded else None
        first = series.first_not_finite[line]
        first_not_finite = None if np.isnan(first) else int(first)
        decision = trigger.step(series.norms[line], series.seen[line], signal, scores, first_not_finite)
        gnmr[line], delta[line], risk[line] = decision.gnmr, decision.delta_gnmr, decision.risk
        alpha[line], beta[line] = decision.alpha, np.nan if decision.beta is None else decision.beta
        triggered[line] = decision.triggered
    return Replay(trigger.config, trigger.max_o, gnmr, delta, risk, alpha, beta, triggered, active)


def _steps_before(series: Series) -> int:
    """How many steps the controller had seen before the trace's first line.

    As many as the run had taken; none where the recorded α shows that the first phase began with the trace (a run resumed
    without its history).
    """
    done, config = int(series.step[0]) - 1, recorded_config(series)
    phase = config.resolve_steps("alpha_init_fraction", series.header["total_steps"]) if config.alpha_init_fraction else 0
    first = series.alpha[series.counted][:1]
    fresh = bool(len(first)) and phase <= done and config.alpha != config.alpha_init and first[0] == config.alpha_init
    return 0 if fresh else done


def recorded(series: Series) -> Replay:
    """The recorded decisions, in the form of a replay."""
    return Replay(
        recorded_config(series),
        int(series.header["max_o"]),
        series.gnmr,
        series.delta_gnmr,
        series.risk,
        series.alpha,
        series.beta,
        series.triggered,
        series.active,
    )


def trigger_of(series: Series, changes: Mapping[str, Any] | None = None, *, recorded_trigger: bool = False) -> Trigger:
    """A fresh trigger with a trace's units and settings, some of them changed. Arguments and errors: see `replay`."""
    config = recorded_config(series)
    if changes:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # max_o=0 is a legitimate question here
            config = GNMRConfig(**{**config.to_dict(), **changes})
        count = int(series.recoverable.sum())
        if isinstance(changes.get("max_o"), int) and changes["max_o"] > count:
            raise ConfigError(f"max_o={changes['max_o']}: expected at most {count}, the trace's number of recoverable units")
    name = series.header.get("trigger", "gnmr") if recorded_trigger else "gnmr"
    options = series.header.get("trigger_options", {}) if recorded_trigger else {}
    if recorded_trigger and name in TRIGGERS and TRIGGERS[name].Options.defaults() and not options:
        raise ConfigError(f"{series.path}: the header has no options of trigger {name!r} (an older trace)")
    try:
        return make_trigger(
            name,
            len(series.names),
            config,
            total_steps=series.header.get("total_steps"),
            recoverable=series.recoverable,
            options=options,
            names=series.names,
        )
    except ConfigError:
        raise
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
        why = f"{type(error).__name__}: {printable(str(error), 200)}"
        raise ConfigError(
            f"{series.path}: trigger {shown(name)} cannot have trigger_options={shown(options)} ({why})"
        ) from error


def recorded_config(series: Series) -> GNMRConfig:
    """The settings that a trace was written under.

    Raises:
        ConfigError: the header has none, or none that can be read.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return GNMRConfig(**series.header["config"])
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{series.path}: the header has no settings that can be replayed ({error})") from error


def differences(series: Series) -> list[str]:
    """Where a replay under the recorded settings and trigger differs from the record; empty: exactly equal."""
    try:
        replayed = replay(series, recorded_trigger=True)
    except ConfigError as error:
        return [f"not replayed: {error}"]
    sentences = []
    if len(series) and series.step[0] != 1:
        sentences.append(f"the trace begins at step {series.step[0]}: the history before it is unknown")
    gaps = np.flatnonzero(~series.adjacent)
    if len(gaps):
        sentences.append(f"steps are missing after step {series.step[gaps[0]]}: their norms are unknown")
    for name in ("gnmr", "delta_gnmr", "risk", "alpha", "beta", "triggered", "active"):
        values, record = getattr(replayed, name), getattr(series, name)
        same = (values == record) if values.dtype == bool else (values == record) | (np.isnan(values) & np.isnan(record))
        lines = np.flatnonzero(~(same if same.ndim == 1 else same.all(axis=1)))
        if len(lines):
            sentences.append(f"{name} differs in {len(lines)} of {len(series)} steps, first in step {series.step[lines[0]]}")
    return sentences


def mean_recovery_bytes(series: Series, active: Bools, rows: Any = slice(None)) -> float | None:
    """ΔM of active sets, mean over lines; an upper bound, as copies that units share are counted for each of them.

    Args:
        series: the trace.
        active: (S, U), of the lines in `rows`.
        rows: a slice or a mask of lines.

    Returns:
        bytes; None where the trace does not record what units add.
    """
    units = series.header["units"]
    if not all("bytes_added" in unit for unit in units) or len(active) == 0:
        return None
    added = active @ np.array([unit["bytes_added"] for unit in units], dtype=np.float64)
    if series.header["census"].get("bytes_per_token"):
        added = added * np.nan_to_num(series.saved_tokens[rows])
    return float(added.mean())


@cleaned
def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status (2: an error to fix)."""
    parser = argparse.ArgumentParser(prog="hf-gnmr replay", description="The recorded norms under other settings.")
    parser.add_argument("trace", help="trace.jsonl, or the folder of a run")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE[,VALUE...]",
        dest="settings",
        help="a field of GNMRConfig; several values make a grid",
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument(TRACEBACK, action="store_true", help=TRACEBACK_HELP)
    options = parser.parse_args(argv)
    try:
        series = read_series(options.trace, strict=False)
        grid = settings_grid(options.settings)
        unequal = differences(series)
        rows = [{"settings": "recorded", **recorded(series).figures(series)}]
        start = time.perf_counter()
        for changes in grid if options.settings else []:
            name = ", ".join(f"{k}={'off' if v is None else v}" for k, v in changes.items())
            rows.append({"settings": name, **replay(series, changes).figures(series)})
        seconds = time.perf_counter() - start
        if not len(series):
            raise ConfigError(f"{series.path}: no step was recorded")
    except (ConfigError, TraceError) as error:
        return refused(error)
    series.warn()
    if options.json:
        print(json.dumps(plain({"trace": str(series.path), "rows": rows, "differences": unequal, "note": NOTE}), indent=2))
        return 0
    print("\n".join(in_words(series, rows, unequal)))
    if len(rows) > 1:
        print(f"{len(rows) - 1} settings over {len(series)} steps in {1e3 * seconds:.0f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
