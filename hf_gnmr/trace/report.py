"""A run as one page: ``hf-gnmr report RUN [RUN ...] --output report.html``.

The page is self-contained: figures are inline SVG, nothing is fetched and no script is needed.  It follows the reader's
light or dark scheme, fits a phone (wide figures and tables scroll separately) and prints.  All numbers of a run come from
`metrics`, the diagnosis from `diagnose`; everything that comes from a file is escaped.
"""

from __future__ import annotations

import argparse
import html
import io
import itertools
import json
import re
import sys
from pathlib import Path
from typing import Any

from .. import __version__
from ..config import ConfigError, SetupError, refusing
from ..files import FileError, printable, write_bytes, write_text
from ..reading import MAX_PAGE_BYTES, inside, read_bytes
from ..terminal import REPLACED, TRACEBACK, TRACEBACK_HELP, cleaned, refused
from . import fields, figures
from .diagnose import diagnose
from .fields import Row
from .metrics import by_unit, summarise
from .outputs import TITLE, check_figure, check_paths
from .series import Series, read_series
from .style import STYLE

MANY = 48
"""Units above which the table shows the busiest and folds the rest."""
ROWS: dict[str, Row] = {
    "backend": Row("backend"),
    "trigger": Row("trigger"),
    "steps": Row("steps"),
    "skipped_steps": Row("skipped"),
    "missing_steps": Row("missing"),
    "non_finite_steps": Row("not finite"),
    "units": Row("units"),
    "max_o": Row("maxO"),
    "promotion_ratio": Row("promotion ratio", share=True),
    "hit_max_o_rate": Row("hit-maxO rate", share=True),
    "gnmr_exceedance": Row("GNMR ≥ α", share=True),
    "delta_gnmr_exceedance": Row("ΔGNMR ≥ β", share=True),
    "switches": Row("switches"),
    "mean_dwell": Row("mean dwell, steps"),
    "recovery_bytes_bound": Row("ΔM, bound"),
    "resident_bytes": Row("resident bytes"),
    "controller_share": Row("controller, share of the step", share=True),
}
"""Rows of the table of runs, by key of the summary; `fields.SCALARS` adds those that depend on one scalar field."""


def page(runs: list[Series], labels: list[str]) -> str:
    """The page of one or several runs.

    Raises:
        SetupError: matplotlib is not installed.
    """
    summaries = [summarise(series) for series in runs]
    count = "one run" if len(runs) == 1 else f"{len(runs)} runs"
    parts = [f"<h1>GNMR report</h1><p class=note>hf_gnmr {html.escape(__version__)}; {count}, from the traces</p>"]
    for series, label in zip(runs, labels, strict=True):
        parts += [f"<p class=alarm>{html.escape(label)}: {html.escape(text)}</p>" for text in series.troubles]
    parts.append(_runs_table(summaries, labels))
    above = [
        label for s, label in zip(summaries, labels, strict=True) if s["peak_recovery_bytes"] > s["recovery_bytes_bound"]
    ]
    if above:
        parts.append(
            f"<p class=note>ΔM of {html.escape(', '.join(above))} exceeded its bound, which applies to the recovery path: "
            "a warm-up in 16 bits (trigger static) keeps more</p>"
        )
    shown = [(series, label) for series, label in zip(runs, labels, strict=True) if len(series)]
    if len(shown) > 1:
        parts.append("<h2>Side by side</h2>")
        drawn = figures.comparison([series for series, _ in shown], [label for _, label in shown])
        parts.append(_svg(drawn, "comparison of the runs"))
    for series, label in zip(runs, labels, strict=True):
        parts.append(_run(series, label))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"{TITLE}{html.escape(', '.join(labels))}</title><style>{STYLE}</style></head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _runs_table(summaries: list[dict[str, Any]], labels: list[str]) -> str:
    of_scalars = ((f.key, f.row, f.row.after) for scalar in fields.SCALARS for f in scalar.figures if f.row is not None)
    rows = []
    for key, row in fields.placed(ROWS, of_scalars).items():
        values = [summary["dwell"]["mean"] if key == "mean_dwell" else summary[key] for summary in summaries]
        if any(value is not None for value in values):
            rows.append([row.label, *(_value(row, value) for value in values)])
    return _table(["", *labels], rows, "runs")


def _value(row: Row, value: Any) -> str:
    if value is None:
        return "–"
    if row.share:
        return f"{value:.2%}"
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _table(head: list[str], rows: list[list[str]], kind: str = "") -> str:
    """A table; cells are escaped unless `kind` is "raw"."""
    safe = (lambda text: text) if kind == "raw" else html.escape
    lines = ["<tr>" + "".join(f"<td>{safe(cell)}</td>" for cell in row) + "</tr>" for row in rows]
    top = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    return f'<div class="wide {kind}"><table><thead><tr>{top}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def _run(series: Series, label: str) -> str:
    parts = [f"<h2>{html.escape(label)}</h2><p class=note>{html.escape(str(series.path))}</p>"]
    if len(series):
        parts.append(_svg(figures.timeline(series), f"scores, lifted units, loss and gradient norm of {label}"))
        parts.append("<h3>Units</h3>" + _units(series))
        parts.append("<h3>How long, how many, how high</h3>")
        parts.append(_svg(figures.histograms(series), f"dwell and switches of {label}"))
        parts.append(_svg(figures.exceedances(series), f"exceedance of thresholds of {label}"))
        try:
            findings = diagnose(series)
        except ConfigError as error:
            parts.append(f"<p class=note>{html.escape(str(error))}</p>")
        else:
            parts.append(
                "<h3>Diagnosis</h3><dl>"
                + "".join(
                    f"<dt>{html.escape(f.name)}</dt><dd>{html.escape(f.says)}</dd><dd class=do>{html.escape(f.advice)}</dd>"
                    for f in findings
                )
                + "</dl>"
            )
    parts.append("<h3>What ran</h3>" + _setup(series))
    return "\n".join(parts)


def _units(series: Series) -> str:
    rows = by_unit(series)
    head = [
        "unit",
        "on recovery",
        "triggers",
        "GNMR alone",
        "ΔGNMR alone",
        "both",
        "not finite",
        "switches",
        "mean dwell",
        "highest GNMR",
        "mean norm",
    ]

    def cells(row: dict[str, Any]) -> list[str]:
        share = row["share_on_recovery"]
        bar = "" if not share else f'<span class=bar style="width:{4 * share:.2f}rem"></span>'
        name = html.escape(row["name"]) + ("" if row["recoverable"] else " (only monitored)")
        numbers = [row[k] for k in ("triggers", "by_gnmr", "by_delta_gnmr", "by_both", "not_finite", "switches")]
        dwell = "–" if row["mean_dwell"] is None else f"{row['mean_dwell']:,.1f}"
        levels = ["–" if row[k] is None else f"{row[k]:.3g}" for k in ("max_gnmr", "mean_norm")]
        return [name, ("–" if share is None else f"{share:.2%}") + bar, *map(str, numbers), dwell, *levels]

    if len(rows) <= MANY:
        return _table(head, [cells(row) for row in rows], "raw")
    busiest = sorted(rows, key=lambda row: (-row["steps_on_recovery"], -row["triggers"], row["unit"]))[: MANY // 2]
    return (
        f"<p class=note>the {len(busiest)} of {len(rows)} units with the most steps on the recovery path</p>"
        + _table(head, [cells(row) for row in busiest], "raw")
        + f"<details><summary>all {len(rows)} units</summary>"
        + _table(head, [cells(row) for row in rows], "raw")
        + "</details>"
    )


def _setup(series: Series) -> str:
    header = series.header
    census = header.get("census", {})
    lines = (
        [str(census["path"])]
        if "path" in census
        else [
            f"low-cost path: {census.get('low_path', '–')}",
            f"recovery path: {census.get('recovery_path', '–')}",
        ]
    )
    parts = [f"<p>{html.escape(line)}</p>" for line in lines]
    parts.append(
        _folded(
            "settings",
            json.dumps(
                {
                    **header.get("config", {}),
                    "max_o": header.get("max_o"),
                    "trigger": header.get("trigger"),
                    "trigger_options": header.get("trigger_options", {}),
                },
                indent=1,
            ),
        )
    )
    parts.append(_folded("census", json.dumps(census, indent=1)))
    for name, title in (("recipe.yaml", "recipe, as resolved"), ("environment.json", "environment")):
        file = series.path.parent / name
        if file.is_file() or file.is_symlink():
            parts.append(_folded(title, _text_of(file)))
    return "".join(parts)


def _text_of(file: Path) -> str:
    """A file of the run's folder, or why it is not shown: the page may be given away, so it shows no other files."""
    if not inside(file.parent, file.name):
        return f"not shown: {file.name} is a link to a file outside the run's folder"
    try:
        text = read_bytes(file, MAX_PAGE_BYTES).decode("utf-8", errors="replace")
    except FileError as error:
        return f"not shown: {error}"
    return "".join(c if c.isprintable() or c in "\n\t" else REPLACED for c in text)


def _folded(title: str, text: str) -> str:
    return f"<details><summary>{html.escape(title)}</summary><pre>{html.escape(text)}</pre></details>"


def _svg(figure: Any, describes: str) -> str:
    """A figure as inline SVG, its placeholder colours replaced by the page's."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    figures.pyplot().close(figure)
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    mark = f"f{next(_NUMBERS)}-"  # ids are unique across the figures of a page
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{mark}", svg)
    svg = svg.replace(figures.INK, "var(--ink)").replace(figures.FAINT, "var(--faint)")
    svg = re.sub(r'font: ([0-9.]+)px [^;"]*', r"font: \1px system-ui, sans-serif", svg)
    svg = svg.replace("<svg", f'<svg role="img" aria-label="{html.escape(describes)}"', 1)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*" height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    return f"<div class=wide>{svg}</div>"


_NUMBERS = itertools.count(1)


def labels_of(paths: list[Path]) -> list[str]:
    """Short names that distinguish the runs: the folder's, preceded by its parents' where two are equal."""
    folders = [(path.parent if path.name == "trace.jsonl" else path).resolve() for path in paths]
    for depth in range(1, 8):
        names = [printable("/".join(folder.parts[-depth:])) for folder in folders]
        if len(set(names)) == len(names):
            return names
    return [f"{printable(folder.name)} ({i})" for i, folder in enumerate(folders, start=1)]


def _file_name(label: str) -> str:
    return re.sub(r"[^\w.+-]+", "_", label)


def _drawn(runs: list[Series], labels: list[str]) -> dict[str, tuple[Any, Series]]:
    """The figures to draw, by their files' names without the ending."""
    return {
        f"{_file_name(label)}_{name}": (draw, series)
        for series, label in zip(runs, labels, strict=True)
        if len(series)
        for name, draw in figures.OF_A_RUN.items()
    }


def figure_files(runs: list[Series], labels: list[str], folder: Path, formats: list[str]) -> list[Path]:
    """The files that `save_figures` writes."""
    return [folder / f"{name}.{kind}" for name in _drawn(runs, labels) for kind in formats]


def save_figures(runs: list[Series], labels: list[str], folder: Path, formats: list[str]) -> list[Path]:
    """Write each figure of each run to a separate file, for papers and slides: dark on white."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, (draw, series) in _drawn(runs, labels).items():
        figure = draw(series)
        for kind in formats:
            file = folder / f"{name}.{kind}"
            content = io.BytesIO()
            figure.savefig(content, format=kind, facecolor="white", dpi=160)
            write_bytes(file, content.getvalue())
            written.append(file)
        figures.pyplot().close(figure)
    return written


@cleaned
def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status (2: an error to fix)."""
    parser = argparse.ArgumentParser(prog="hf-gnmr report", description="Runs as one self-contained page.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run, or its trace.jsonl")
    page_help = "the page; replaces only an earlier page; default report.html"
    parser.add_argument("--output", default="report.html", metavar="FILE", help=page_help)
    parser.add_argument("--figures", metavar="FOLDER", help="also write the figures to this folder")
    parser.add_argument(
        "--format", nargs="+", choices=["png", "svg"], default=["png", "svg"], help="file formats of --figures"
    )
    parser.add_argument("--follow", action="store_true", help="no page: show a running job in the terminal")
    parser.add_argument(TRACEBACK, action="store_true", help=TRACEBACK_HELP)
    options = parser.parse_args(argv)
    try:
        if options.follow:
            return _follow(options.runs)
        return _write(options)
    except (ConfigError, SetupError, FileError, OSError) as error:
        return refused(error)


def _follow(runs: list[str]) -> int:
    from .follow import follow

    if len(runs) > 1:
        raise ConfigError(f"--follow: expected one run, got {len(runs)}")
    return follow(Path(runs[0]))


def _write(options: argparse.Namespace) -> int:
    """Write the page, and the figures where they are asked for."""
    figures.pyplot()
    check_paths(options.output, None if options.figures is None else Path(options.figures))
    runs = [read_series(run, strict=False) for run in options.runs]
    labels = labels_of([Path(run) for run in options.runs])
    if options.figures is not None:
        for file in figure_files(runs, labels, Path(options.figures), options.format):
            check_figure(file)
    text = page(runs, labels)
    with refusing(f"--output {printable(options.output)}"):
        write_text(options.output, text)
    written = [options.output]
    if options.figures is not None:
        written += save_figures(runs, labels, Path(options.figures), options.format)
    for series, label in zip(runs, labels, strict=True):
        series.warn(label)
    print(f"written: {', '.join(map(str, written))} ({len(text) / 1e6:.2f} MB)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
