"""Thresholds that meet a target on a trace: ``hf-gnmr calibrate TRACE --promotion-ratio 0.01``.

α and β are the same upper quantile of GNMR and of ΔGNMR, so that both weigh the same; which quantile is determined by
replays.  Blocks of steps spread over the run are held out and show how the thresholds generalise to steps that they were not
fitted to; the figure over tenths of the run shows how it changes in time.  Open loop, like every replay: norms would have
differed under other choices.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..config import ConfigError, GNMRConfig, parse_bytes, refusing
from ..control.controller import Bools
from ..files import FileError, plain, printable, writable, write_text
from ..reading import SHIPPED
from ..script import write_script
from ..terminal import TRACEBACK, TRACEBACK_HELP, cleaned, refused
from .metrics import exceedance
from .replay import Replay, mean_recovery_bytes, recorded_config, replay
from .replay_table import NOTE
from .series import Series, read_series

FIRST_PHASES = (0.1, 0.05, 0.025)
"""Shares of the steps that may get a separate α, the paper's 0.025 among them."""
TARGETS = {
    "promotion_ratio": "promotion ratio",
    "bytes_per_step": "ΔM a step, mean",
    "exceedance": "exceedance of α and of β",
}
TOLERANCE = 0.1
"""Relative distance from the target, on the fitted steps, up to which it counts as met."""
BLOCKS = 50
"""Number of blocks of steps, some of which are held out."""


@dataclass
class Proposal:
    """Thresholds, and the target figure that they reach on the trace."""

    target: str
    """One of `TARGETS`."""
    wanted: float
    settings: dict[str, Any]
    """Fields of `GNMRConfig`."""
    fitted: float
    """The target figure on the fitted steps."""
    held_out: float
    """The same on the held-out steps."""
    met: bool
    """Whether `fitted` is within `TOLERANCE` of the target."""
    tenths: list[float]
    """The same over each tenth of the run, in order."""
    steps: tuple[int, int]
    """Numbers of fitted and of held-out steps."""


def calibrate(
    series: Series, target: str, wanted: float, *, held_out: float = 0.3, beta: bool | None = None, max_o: Any = None
) -> Proposal:
    """Find thresholds that meet a target.

    Args:
        series: the trace.
        target: one of `TARGETS`.
        wanted: its value: a share, or bytes.
        held_out: share of the steps, in blocks spread over the run, that is not fitted.
        beta: whether Δ-GNMR is used; None: as recorded.
        max_o: maxO; None: as recorded.

    Raises:
        ConfigError: a target that cannot be met, or a trace that lacks what it needs.
    """
    size = len(series)
    _check_numbers(target, wanted, held_out, max_o)
    held = held_out_steps(size, held_out)
    fit = ~held
    if fit.sum() < 50 or held.sum() < 20:
        why = "" if series.problem is None else f" ({series.problem})"
        raise ConfigError(
            f"{series.path}: {size} steps, {held.sum()} of them held out: expected at least 50 to fit and 20 held out{why}"
        )
    mask = series.recoverable
    if not mask.any():
        raise ConfigError(f"{series.path}: no recoverable unit, nothing to choose")
    if target == "bytes_per_step" and not mean_recovery_bytes(series, np.ones_like(series.active)):
        raise ConfigError(f"{series.path} does not record what lifted units add, or they add nothing: use another target")
    config = recorded_config(series)
    with_beta = config.beta is not None if beta is None else beta
    total = series.header.get("total_steps") or size
    usable = series.counted & fit
    count = int(mask.sum())
    if isinstance(max_o, int) and max_o > count:
        raise ConfigError(f"max_o={max_o}: expected at most {count}, the trace's number of recoverable units")
    budget = {} if max_o is None else {"max_o": max_o}

    def settings(quantile: float) -> dict[str, Any]:
        b = _upper(series.delta_gnmr[usable][:, mask], quantile) if with_beta else None
        for share in FIRST_PHASES:
            early = usable & (series.step <= math.ceil(share * total))
            alpha = _upper(series.gnmr[usable & ~early][:, mask], quantile)
            reached = exceedance(series.gnmr[early][:, mask], np.full(int(early.sum()), alpha))
            # Early norms are compared with a short history, while the learning rate still grows.
            if reached is not None and reached > 2 * quantile:
                init = max(alpha, _upper(series.gnmr[early][:, mask], quantile))
                return {"alpha": alpha, "beta": b, "alpha_init": init, "alpha_init_fraction": share, **budget}
        alpha = _upper(series.gnmr[usable][:, mask], quantile)
        return {"alpha": alpha, "beta": b, "alpha_init": alpha, "alpha_init_fraction": 0.0, **budget}

    def run(quantile: float) -> Replay:
        return replay(series, settings(quantile))

    figure = _figure(target, series)
    if target == "exceedance":
        if not 0 < wanted < 1:
            raise ConfigError(f"exceedance={wanted!r}: expected a share between 0 and 1")
        quantile = wanted
    else:
        quantile = _search(lambda q: figure(run(q), fit), wanted, target)
    replayed = run(quantile)
    tenth = np.minimum(np.arange(size) * 10 // size, 9)
    fitted = figure(replayed, fit)
    return Proposal(
        target,
        wanted,
        replayed.config.to_dict(),
        fitted,
        figure(replayed, held),
        abs(fitted / wanted - 1) <= TOLERANCE,
        [figure(replayed, tenth == i) for i in range(10)],
        (int(fit.sum()), int(held.sum())),
    )


def held_out_steps(size: int, share: float) -> Bools:
    """Which of `size` lines are held out: whole blocks, spread evenly over the run."""
    block = np.arange(size) * BLOCKS // max(size, 1)
    return np.asarray(np.floor((block + 1) * share + 1e-9) > np.floor(block * share + 1e-9))


def _figure(target: str, series: Series) -> Callable[[Replay, Bools], float]:
    """The target figure of a replay over some of the lines."""

    def figure(replayed: Replay, rows: Bools) -> float:
        if target == "exceedance":  # of α; β's is the same share of ΔGNMR by construction
            counted = rows & series.counted
            return exceedance(replayed.gnmr[counted][:, series.recoverable], replayed.alpha[counted]) or 0.0
        value = replayed.figures(series, rows)["promotion_ratio" if target == "promotion_ratio" else "mean_recovery_bytes"]
        return float(value or 0.0)

    return figure


def _upper(scores: np.ndarray, share: float) -> float:
    """The score that a share of the pairs reaches, to four digits; just above it where many pairs tie at that score.

    Pairs whose norm is not finite reach every score.
    """
    seen = scores[~np.isnan(scores)]
    if not np.isfinite(seen).any():
        raise ConfigError("no finite score in the steps to fit")
    value = float(np.quantile(seen, 1 - min(share, 1.0), method="lower"))
    if math.isinf(value):
        broken = float(np.isinf(seen).mean())
        raise ConfigError(f"a share of {share:.3g} cannot be reached: norms that are not finite are {broken:.3g} of all")
    digits = 4 - math.ceil(math.log10(value)) if value > 0 else 4
    least = 10.0**-digits
    value = max(math.ceil(value * 10**digits) / 10**digits, least)
    above = value + least
    if abs(float((seen >= above).mean()) - share) < abs(float((seen >= value).mean()) - share):
        return round(above, digits)
    return value


def _search(ratio: Callable[[float], float], wanted: float, target: str) -> float:
    """The quantile at which `ratio` is `wanted`, by bisection on its logarithm."""
    if not wanted > 0:
        raise ConfigError(f"{target}={wanted!r}: expected a value above 0 (to lift nothing: max_o=0)")
    low, high = 1e-6, 1.0
    most = ratio(high)
    if most < wanted:
        raise ConfigError(
            f"{target}={wanted!r} cannot be met: with everything triggered it is {most:.4g}; raise max_o or lower the target"
        )
    for _ in range(24):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if ratio(middle) < wanted else (low, middle)
    below, above = ratio(low), ratio(high)
    return low if abs(below - wanted) <= abs(above - wanted) else high


def fragment(proposal: Proposal, command: str, extends: str | None) -> str:
    """A recipe fragment: a `gnmr` section, and the figures that it reaches as a comment."""
    lines = [f"# {printable(command, 400)}", *(f"# {line}" for line in in_words(proposal))]
    if extends is not None:
        lines.append(f"extends: {json.dumps(extends)}")
    lines.append("gnmr:")
    lines += [f"  {key}: {'null' if value is None else value}" for key, value in proposal.settings.items()]
    return "\n".join(lines) + "\n"


def in_words(proposal: Proposal) -> list[str]:
    """The target, and what the thresholds reach."""

    def amount(value: float) -> str:
        return f"{value:,.0f} bytes" if proposal.target == "bytes_per_step" else f"{value:.3%}"

    fit, held = proposal.steps
    lines = [
        f"{TARGETS[proposal.target]}: target {amount(proposal.wanted)}; {amount(proposal.fitted)} on {fit} fitted steps, "
        f"{amount(proposal.held_out)} on the {held} held out",
        f"over tenths of the run: {', '.join(map(amount, proposal.tenths))}",
    ]
    if max(proposal.tenths) > 3 * min(proposal.tenths):
        lines.append("it changes along the run: one pair of thresholds does not keep a constant rate")
    if not proposal.met:
        lines.append(
            f"NOT MET: {amount(proposal.fitted)} is the closest that thresholds reach (ties, norms that are not finite, or "
            "a fidelity warm-up, which no threshold changes)"
        )
    elif abs(proposal.held_out / proposal.wanted - 1) > 0.25:
        lines.append("it does not generalise well: the held-out steps differ by more than a quarter")
    return [*lines, NOTE]


@cleaned
def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status (1: the target is not met, 2: an error to fix)."""
    parser = argparse.ArgumentParser(prog="hf-gnmr calibrate", description="Thresholds that meet a target on a trace.")
    parser.add_argument("trace", help="trace.jsonl, or the folder of a run")
    target_group = parser.add_mutually_exclusive_group(required=True)
    target_group.add_argument("--promotion-ratio", type=float, metavar="SHARE")
    target_group.add_argument("--bytes-per-step", metavar="SIZE", help="mean ΔM, e.g. 2GB")
    target_group.add_argument("--exceedance", type=float, metavar="SHARE", help="of α, and of β")
    parser.add_argument(
        "--held-out", type=float, default=0.3, metavar="SHARE", help="of the steps, in blocks over the whole run"
    )
    parser.add_argument("--beta", choices=["on", "off"], help="default: as recorded")
    parser.add_argument("--max-o", type=_number, help="default: as recorded")
    parser.add_argument("--extends", metavar="RECIPE", help="make the fragment a recipe that extends this one")
    parser.add_argument("--output", metavar="FILE", help="also write the fragment to this file")
    parser.add_argument("--json", action="store_true", help="print the proposal as JSON")
    parser.add_argument(TRACEBACK, action="store_true", help=TRACEBACK_HELP)
    options = parser.parse_args(argv)
    try:
        target, value = next((name, v) for name in TARGETS if (v := getattr(options, name)) is not None)
        if target == "bytes_per_step":
            value = float(parse_bytes("--bytes-per-step", value))
        series = read_series(options.trace, strict=False)
        _check_numbers(target, value, options.held_out, options.max_o)
        if options.extends is not None and not is_file(options.extends):
            raise ConfigError(f"--extends {options.extends}: no such file")
        if options.output is not None:
            with refusing(f"--output {printable(options.output)}"):
                if os.path.lexists(options.output):
                    raise ConfigError(f"--output {options.output} exists already: name another file")
                try:
                    writable(options.output)
                except FileError as error:
                    raise ConfigError(f"--output {error}") from error
        proposal = calibrate(
            series,
            target,
            value,
            held_out=options.held_out,
            beta=None if options.beta is None else options.beta == "on",
            max_o=options.max_o,
        )
        command = shlex.join(["hf-gnmr", "calibrate", *(sys.argv[1:] if argv is None else argv)])
        extends = options.extends
        if extends is not None:
            # The path is relative to the folder of the recipe that contains it, and below it, or recipes refuse it.
            home = Path(options.output).resolve().parent if options.output else Path.cwd()
            if not any(Path(extends).resolve().is_relative_to(folder.resolve()) for folder in (home, *SHIPPED)):
                raise ConfigError(f"--extends {extends}: expected a recipe below {home}, where the fragment is to be")
            extends = os.path.relpath(extends, home)
        text = fragment(proposal, command, extends)
        if options.output is not None:
            (write_text if extends is None else write_script)(options.output, text)
    except (ConfigError, FileError, OSError) as error:
        return refused(error)
    series.warn()
    if options.json:
        print(json.dumps(plain(vars(proposal)), indent=2))
    else:
        print(text, end="")
    return 0 if proposal.met else 1


def _check_numbers(target: str, wanted: float, held_out: float, max_o: Any) -> None:
    """Raise ConfigError for a target, share or maxO out of range; NaN is out of every range."""
    most = math.inf if target == "bytes_per_step" else 1.0
    if not 0 < wanted < most:
        raise ConfigError(f"{target}={wanted!r}: expected a value above 0, {'finite' if most > 1 else 'and below 1'}")
    if not 0 < held_out < 1:
        raise ConfigError(f"held_out={held_out!r}: expected a share between 0 and 1")
    if max_o is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            GNMRConfig(max_o=max_o)


def is_file(path: str) -> bool:
    """Whether there is a file; false for what no file system takes as a name."""
    try:
        return Path(path).is_file()
    except OSError:
        return False


def _number(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


if __name__ == "__main__":
    sys.exit(main())
