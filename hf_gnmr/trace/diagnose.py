"""The conditions of the paper's theory on a trace, and what to do about them: ``hf-gnmr diagnose TRACE``.

`theorems` asks whether the theorems' conditions hold, `choices` how the units were chosen.  All of it is computed from the
recorded norms and choices: a selected unit ran its recovery path in the next step.
"""

from __future__ import annotations

import argparse
import json
import sys

from ..config import ConfigError
from ..files import plain
from ..terminal import TRACEBACK, TRACEBACK_HELP, cleaned, refused
from .choices import chosen, oscillation, overlap
from .file import TraceError
from .finding import Finding
from .metrics import by_unit
from .series import Series, read_series
from .theorems import concentration_bound, efficacy, history_mean


def diagnose(series: Series) -> list[Finding]:
    """All findings of a trace.

    Raises:
        ConfigError: a trace without a step that counts, or without a recoverable unit.
    """
    if not series.counted.any() or not series.recoverable.any():
        raise ConfigError(f"{series.path}: no step that counts or no recoverable unit, nothing to diagnose")
    units = by_unit(series)
    return [
        efficacy(series),
        concentration_bound(series),
        history_mean(series),
        overlap(series, units),
        chosen(series, units),
        oscillation(series),
    ]


@cleaned
def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status (2: an error to fix)."""
    parser = argparse.ArgumentParser(prog="hf-gnmr diagnose", description="The conditions of the theory on a trace.")
    parser.add_argument("trace", help="trace.jsonl, or the folder of a run")
    parser.add_argument("--json", action="store_true", help="print all figures as JSON")
    parser.add_argument(TRACEBACK, action="store_true", help=TRACEBACK_HELP)
    options = parser.parse_args(argv)
    try:
        series = read_series(options.trace, strict=False)
        findings = diagnose(series)
    except (ConfigError, TraceError) as error:
        return refused(error)
    series.warn()
    if options.json:
        print(json.dumps(plain([vars(finding) for finding in findings]), indent=2))
    else:
        for finding in findings:
            print(f"{finding.name}\n  {finding.says}\n  -> {finding.advice}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
