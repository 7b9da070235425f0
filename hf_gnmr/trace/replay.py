"""The controller over a recorded trace under other settings: ``hf-gnmr replay TRACE --set alpha=1.2 --set max_o=4,6``.

Open loop: the norms are those that were recorded, under the recorded choices.  Had other units been lifted, they would have
been others.  A replay under the recorded settings is held to the recorded decisions, number by number.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from ..config import ConfigError, GNMRConfig
from ..control.controller import Bools, Controller, Floats, RiskMonitor
from ..control.triggers import TRIGGERS, make_trigger
from ..files import plain
from .file import TraceError
from .metrics import decision_figures, dwell
from .series import Series, read_series

NOTE = "open loop: the norms are the recorded ones; with other units lifted they would have differed"


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
    """Units on the recovery path during the step."""

    def figures(self, series: Series, rows: Any = slice(None)) -> dict[str, Any]:
        """Figures over some of the lines (a slice or a mask), as a run's summary has them; `mean_recovery_bytes` where the
        trace tells what units add."""
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
        ConfigError: settings that are not allowed, or a trigger that the trace does not hold all of.
    """
    controller = controller_of(series, changes, recorded_trigger=recorded_trigger)
    if not recorded_trigger and controller.config.delta == recorded_config(series).delta:
        # Scores depend on the norms and δ alone, and are on record, also where lines before them are missing.
        controller.monitor = _Recorded(series)
    size, units = len(series), len(series.names)
    gnmr, delta, risk = (np.full((size, units), np.nan) for _ in range(3))
    alpha, beta = np.full(size, np.nan), np.full(size, np.nan)
    triggered, active = np.zeros((size, units), dtype=bool), np.zeros((size, units), dtype=bool)
    with_signal = controller.signal is not None
    before = int(series.step[0]) - 1 - _steps_before(series) if size else 0
    for line in range(size):
        # Steps that are missing were steps all the same: the schedules go by their number.
        controller.steps_done += int(series.step[line]) - before - 1
        before = int(series.step[line])
        if controller.steps_done and line == 0:
            controller.active = controller._paths(np.zeros(units, dtype=bool))
        active[line] = controller.active
        if not series.counted[line]:
            continue
        signal = series.signal[line] if with_signal else None
        decision = controller.step(series.norms[line], series.seen[line], signal)
        gnmr[line], delta[line], risk[line] = decision.gnmr, decision.delta_gnmr, decision.risk
        alpha[line], beta[line] = decision.alpha, np.nan if decision.beta is None else decision.beta
        triggered[line] = decision.triggered
    return Replay(controller.config, controller.max_o, gnmr, delta, risk, alpha, beta, triggered, active)


def _steps_before(series: Series) -> int:
    """How many steps the controller had seen before the trace's first line.

    As many as the run had done; none where the recorded α says that the first phase began with the trace (a run that was
    gone on with without its history).
    """
    done, config = int(series.step[0]) - 1, recorded_config(series)
    phase = config.resolve_steps("alpha_init_fraction", series.header["total_steps"]) if config.alpha_init_fraction else 0
    first = series.alpha[series.counted][:1]
    anew = bool(len(first)) and phase <= done and config.alpha != config.alpha_init and first[0] == config.alpha_init
    return 0 if anew else done


class _Recorded(RiskMonitor):
    """Hands out the recorded scores, line by line."""

    def __init__(self, series: Series) -> None:
        rows = np.flatnonzero(series.counted).tolist()
        self._scores = iter([(series.gnmr[line], series.delta_gnmr[line]) for line in rows])

    def observe(self, norms: Floats, seen: Bools | None = None) -> tuple[Floats, Floats]:
        return next(self._scores)


def recorded(series: Series) -> Replay:
    """What the trace itself says."""
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


def controller_of(series: Series, changes: Mapping[str, Any] | None = None, *, recorded_trigger: bool = False) -> Controller:
    """The controller that a trace was written by, with some settings changed.

    Raises:
        ConfigError: as `replay`.
    """
    config = recorded_config(series)
    if changes:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # max_o=0 is a question here
            config = GNMRConfig(**{**config.to_dict(), **changes})
        count = int(series.recoverable.sum())
        if isinstance(changes.get("max_o"), int) and changes["max_o"] > count:
            raise ConfigError(f"max_o={changes['max_o']}: the trace has {count} recoverable units, at most that is allowed")
    trigger = series.header.get("trigger", "gnmr") if recorded_trigger else "gnmr"
    options = series.header.get("trigger_options", {}) if recorded_trigger else {}
    if recorded_trigger and trigger in TRIGGERS and TRIGGERS[trigger].options and not options:
        raise ConfigError(f"{series.path}: the header does not say the options of trigger {trigger!r} (an older trace)")
    total = series.header.get("total_steps")
    return make_trigger(
        trigger,
        len(series.names),
        config,
        total_steps=total,
        recoverable=series.recoverable,
        options=options,
        names=series.names,
    )


def recorded_config(series: Series) -> GNMRConfig:
    """The settings that a trace was written under.

    Raises:
        ConfigError: the header has none that can be read.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return GNMRConfig(**series.header["config"])
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{series.path}: the header has no settings that can be replayed ({error})") from error


def differences(series: Series) -> list[str]:
    """Where a replay under the recorded settings and trigger is not what was recorded; empty: exactly equal."""
    try:
        found = replay(series, recorded_trigger=True)
    except ConfigError as error:
        return [f"not replayed: {error}"]
    told = []
    if len(series) and series.step[0] != 1:
        told.append(f"the trace begins at step {series.step[0]}: a history before it is not known")
    gaps = np.flatnonzero(~series.adjacent)
    if len(gaps):
        told.append(f"steps are missing after step {series.step[gaps[0]]}: their norms are not known")
    for name in ("gnmr", "delta_gnmr", "risk", "alpha", "beta", "triggered", "active"):
        ours, theirs = getattr(found, name), getattr(series, name)
        same = (ours == theirs) if ours.dtype == bool else (ours == theirs) | (np.isnan(ours) & np.isnan(theirs))
        wrong = np.flatnonzero(~(same if same.ndim == 1 else same.all(axis=1)))
        if len(wrong):
            told.append(f"{name} differs in {len(wrong)} of {len(series)} steps, first in step {series.step[wrong[0]]}")
    return told


def mean_recovery_bytes(series: Series, active: Bools, rows: Any = slice(None)) -> float | None:
    """ΔM of active sets, mean over lines, at most (copies that units share are counted for each); None: not recorded."""
    units = series.header["units"]
    if not all("bytes_added" in unit for unit in units) or len(active) == 0:
        return None
    added = active @ np.array([unit["bytes_added"] for unit in units], dtype=np.float64)
    if series.header["census"].get("bytes_per_token"):
        added = added * np.nan_to_num(series.saved_tokens[rows])
    return float(added.mean())


def settings_grid(given: list[str]) -> list[dict[str, Any]]:
    """``alpha=1.1,1.2`` and so on as every combination.

    Raises:
        ConfigError: a field that GNMRConfig does not have, or a value that is none of its.
    """
    known = [f.name for f in fields(GNMRConfig)]
    axes: list[list[tuple[str, Any]]] = []
    for text in given:
        name, equals, values = text.partition("=")
        if not equals or name not in known:
            raise ConfigError(f"--set {text}: FIELD=VALUE[,VALUE...] of {', '.join(known)} is allowed")
        if any(name == axis[0][0] for axis in axes):
            raise ConfigError(f"--set {text}: {name} was given already; --set {name}=A,B makes a grid")
        axes.append([(name, _value(text, value)) for value in values.split(",")])
    return [dict(choice) for choice in itertools.product(*axes)]


def _value(text: str, value: str) -> Any:
    if value in ("null", "None", "off"):
        return None
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    raise ConfigError(f"--set {text}: {value!r} is no number (off: no β)")


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status (2: something to mend)."""
    parser = argparse.ArgumentParser(prog="hf-gnmr replay", description="A trace's norms under other settings.")
    parser.add_argument("trace", help="trace.jsonl, or the folder of a run")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE[,VALUE...]",
        dest="settings",
        help="a field of GNMRConfig; several values make a grid",
    )
    parser.add_argument("--json", action="store_true", help="the same as JSON")
    options = parser.parse_args(argv)
    try:
        series = read_series(options.trace, strict=False)
        grid = settings_grid(options.settings)
        told = differences(series)
        rows = [{"settings": "recorded", **recorded(series).figures(series)}]
        start = time.perf_counter()
        for changes in grid if options.settings else []:
            name = ", ".join(f"{k}={'off' if v is None else v}" for k, v in changes.items())
            rows.append({"settings": name, **replay(series, changes).figures(series)})
        seconds = time.perf_counter() - start
        if not len(series):
            raise ConfigError(f"{series.path}: no step was recorded")
    except (ConfigError, TraceError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    series.warn()
    if options.json:
        print(json.dumps(plain({"trace": str(series.path), "rows": rows, "differences": told, "note": NOTE}), indent=2))
        return 0
    print("\n".join(in_words(series, rows, told)))
    if len(rows) > 1:
        print(f"{len(rows) - 1} settings over {len(series)} steps in {1e3 * seconds:.0f} ms")
    return 0


def in_words(series: Series, rows: list[dict[str, Any]], told: list[str]) -> list[str]:
    """The table, and what is to be said about it."""

    def cell(key: str, value: Any) -> str:
        if value is None:
            return "n/a"
        if key in ("switches", "mean_recovery_bytes"):
            return f"{value:,.0f}"
        return f"{value:.2f}" if key == "mean_dwell" else f"{value:.2%}"

    columns = {
        "settings": "settings",
        "promotion_ratio": "promotion",
        "hit_max_o_rate": "hit-maxO",
        "gnmr_exceedance": "GNMR ≥ α",
        "delta_gnmr_exceedance": "ΔGNMR ≥ β",
        "switches": "switches",
        "mean_dwell": "dwell",
        "mean_recovery_bytes": "ΔM, mean",
        "unit_steps_as_recorded": "as recorded",
    }
    cells = [[row["settings"], *(cell(key, row[key]) for key in list(columns)[1:])] for row in rows]
    sizes = [max(len(line[i]) for line in (list(columns.values()), *cells)) for i in range(len(columns))]
    trigger, units = series.header.get("trigger"), len(series.names)
    lines = [f"{series.path}: {len(series)} steps of {units} units, trigger {trigger}"]
    for line in (list(columns.values()), *cells):
        rest = (text.rjust(size) for text, size in zip(line[1:], sizes[1:], strict=True))
        lines.append("  ".join([line[0].ljust(sizes[0]), *rest]))
    exact = "the replay under the recorded settings equals the recorded decisions exactly"
    lines += [exact] if not told else [f"NOT AS RECORDED: {text}" for text in told]
    return [*lines, NOTE]


if __name__ == "__main__":
    sys.exit(main())
