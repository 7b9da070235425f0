"""A run as one page: ``hf-gnmr report RUN [RUN ...] --output report.html``.

The page stands alone: figures are drawn into it as SVG, nothing is fetched, no script is needed.  It follows the reader's
light or dark scheme, fits a phone (wide figures and tables scroll by themselves) and prints.  Every figure of a run in it is
from `metrics`, the diagnosis from `diagnose`; everything that comes from a file is escaped.
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
from ..config import ConfigError, SetupError
from ..files import printable, write_text
from . import figures
from .diagnose import diagnose
from .file import TraceError
from .metrics import by_unit, summarise
from .series import Series, read_series

MANY = 48
"""Units above which the table shows the busiest and folds the rest away."""
SHOWN = (
    ("backend", "backend"),
    ("trigger", "trigger"),
    ("steps", "steps"),
    ("skipped_steps", "skipped"),
    ("missing_steps", "missing"),
    ("non_finite_steps", "not finite"),
    ("units", "units"),
    ("max_o", "maxO"),
    ("promotion_ratio", "promotion ratio"),
    ("hit_max_o_rate", "hit-maxO rate"),
    ("gnmr_exceedance", "GNMR ≥ α"),
    ("delta_gnmr_exceedance", "ΔGNMR ≥ β"),
    ("switches", "switches"),
    ("mean_dwell", "mean dwell, steps"),
    ("peak_recovery_bytes", "ΔM, peak bytes"),
    ("recovery_bytes_bound", "ΔM, bound"),
    ("resident_bytes", "resident bytes"),
    ("peak_saved_bytes", "saved activations, peak bytes"),
    ("gss_max", "global spike score, highest"),
    ("controller_ms", "controller, ms a step"),
    ("controller_share", "controller, share of the step"),
    ("first_loss", "first loss"),
    ("last_loss", "last loss"),
)
"""Rows of the table of runs: keys of the summary, and their names."""
SHARES = ("promotion_ratio", "hit_max_o_rate", "gnmr_exceedance", "delta_gnmr_exceedance", "controller_share")

STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --faint: #8a94a3; --page: #ffffff; --card: #f5f7fa; --line: #d9dee6;
  --accent: #0f766e; --alarm: #b91c1c; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ee; --faint: #8390a2; --page: #14181f; --card: #1c222b;
  --line: #333c49; --accent: #2dd4bf; --alarm: #f87171; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 62rem; padding: 1rem; font: 15px/1.5 system-ui, sans-serif; color: var(--ink);
  background: var(--page); }
h1 { font-size: 1.5rem; margin: .5rem 0; } h3 { font-size: 1rem; margin: 1.4rem 0 .4rem; }
h2 { font-size: 1.2rem; margin: 2rem 0 .5rem; border-bottom: 1px solid var(--line); padding-bottom: .3rem;
  overflow-wrap: anywhere; }
p { margin: .4rem 0; } .note { color: var(--faint); font-size: .9em; overflow-wrap: anywhere; }
.alarm { border-left: 4px solid var(--alarm); padding: .4rem .8rem; background: var(--card); overflow-wrap: anywhere; }
.wide { overflow-x: auto; margin: .5rem 0; } .wide svg { min-width: 560px; width: 100%; height: auto; display: block; }
table { border-collapse: collapse; font-size: .87em; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .5rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
thead th { color: var(--faint); font-weight: 600; white-space: normal; }
.runs th { overflow-wrap: anywhere; min-width: 5rem; }
.bar { display: inline-block; height: .6em; background: var(--accent); vertical-align: baseline; margin-left: .4em; }
dl { margin: 0; } dt { font-weight: 600; margin-top: .7rem; } dd { margin: 0 0 0 1rem; } dd.do { color: var(--accent); }
details { margin: .6rem 0; } summary { cursor: pointer; font-weight: 600; }
pre { overflow-x: auto; background: var(--card); padding: .7rem; font-size: .82em; }
@media print { :root { --ink: #000; --page: #fff; --card: #f5f5f5; --faint: #555; --line: #bbb; --accent: #0f766e; }
  body { max-width: none; padding: 0; } .wide { overflow: visible; }
  .wide svg { min-width: 0; max-height: 22cm; width: auto; max-width: 100%; }
  .wide, tr, dl > * { break-inside: avoid; } h2, h3, dt, h2 + p { break-after: avoid; } pre { white-space: pre-wrap; }
  details::details-content { content-visibility: visible; block-size: auto; } table { font-size: .75em; } }
"""


def page(runs: list[Series], labels: list[str]) -> str:
    """The page of one or several runs.

    Raises:
        SetupError: matplotlib is not there.
    """
    summaries = [summarise(series) for series in runs]
    count = "one run" if len(runs) == 1 else f"{len(runs)} runs"
    parts = [f"<h1>GNMR report</h1><p class=note>hf_gnmr {html.escape(__version__)}; {count}, from the traces</p>"]
    for series, label in zip(runs, labels, strict=True):
        parts += [f"<p class=alarm>{html.escape(label)}: {html.escape(text)}</p>" for text in series.troubles]
    parts.append(_runs_table(summaries, labels))
    above = [text for s, text in zip(summaries, labels, strict=True) if s["peak_recovery_bytes"] > s["recovery_bytes_bound"]]
    if above:
        parts.append(
            f"<p class=note>ΔM of {html.escape(', '.join(above))} went beyond its bound, which is for the recovery path: "
            "a warm-up in 16 bits (trigger static) keeps more</p>"
        )
    shown = [(series, label) for series, label in zip(runs, labels, strict=True) if len(series)]
    if len(shown) > 1:
        parts.append("<h2>Side by side</h2>")
        parts.append(_svg(figures.comparison([s for s, _ in shown], [text for _, text in shown]), "comparison of the runs"))
    for series, label in zip(runs, labels, strict=True):
        parts.append(_run(series, label))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>GNMR report: {html.escape(', '.join(labels))}</title><style>{STYLE}</style></head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _runs_table(summaries: list[dict[str, Any]], labels: list[str]) -> str:
    rows = []
    for key, name in SHOWN:
        values = [s["dwell"]["mean"] if key == "mean_dwell" else s[key] for s in summaries]
        if all(v is None for v in values):
            continue
        rows.append([name, *(_value(key, v) for v in values)])
    return _table(["", *labels], rows, "runs")


def _value(key: str, value: Any) -> str:
    if value is None:
        return "–"
    if key in SHARES:
        return f"{value:.2%}"
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _table(head: list[str], rows: list[list[str]], kind: str = "") -> str:
    """A table; cells are escaped, but for those of `kind` "raw"."""
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
        stay = "–" if row["mean_dwell"] is None else f"{row['mean_dwell']:,.1f}"
        ends = ["–" if row[k] is None else f"{row[k]:.3g}" for k in ("max_gnmr", "mean_norm")]
        return [name, ("–" if share is None else f"{share:.2%}") + bar, *map(str, numbers), stay, *ends]

    if len(rows) <= MANY:
        return _table(head, [cells(row) for row in rows], "raw")
    busiest = sorted(rows, key=lambda row: (-row["steps_on_recovery"], -row["triggers"], row["unit"]))[: MANY // 2]
    return (
        f"<p class=note>the {len(busiest)} of {len(rows)} units that were on the recovery path the longest</p>"
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
        if file.is_file():
            parts.append(_folded(title, file.read_text(encoding="utf-8", errors="replace")))
    return "".join(parts)


def _folded(title: str, text: str) -> str:
    return f"<details><summary>{html.escape(title)}</summary><pre>{html.escape(text)}</pre></details>"


def _svg(figure: Any, describes: str) -> str:
    """A figure as SVG within the page, its stand-in colours the page's own."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    figures.pyplot().close(figure)
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    mark = f"f{next(_NUMBERS)}-"  # several figures stand in one page
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
    """Short names that tell the runs apart: the folder's, with its parents' where two are alike."""
    folders = [(path.parent if path.name == "trace.jsonl" else path).resolve() for path in paths]
    for depth in range(1, 8):
        names = [printable("/".join(folder.parts[-depth:])) for folder in folders]
        if len(set(names)) == len(names):
            return names
    return [f"{printable(folder.name)} ({i})" for i, folder in enumerate(folders, start=1)]


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status (2: something to mend)."""
    parser = argparse.ArgumentParser(prog="hf-gnmr report", description="Runs as one page that stands alone.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run, or its trace.jsonl")
    parser.add_argument("--output", default="report.html", metavar="FILE", help="the page (replaced); default report.html")
    parser.add_argument("--figures", metavar="FOLDER", help="write the figures there too")
    parser.add_argument("--format", nargs="+", choices=["png", "svg"], default=["png", "svg"], help="of --figures")
    parser.add_argument("--follow", action="store_true", help="no page: show a running job in the terminal")
    options = parser.parse_args(argv)
    try:
        if options.follow:
            from .follow import follow

            if len(options.runs) > 1:
                raise ConfigError(f"--follow takes one run, not {len(options.runs)}")
            return follow(Path(options.runs[0]))
        figures.pyplot()
        for name, path in (("--output", Path(options.output).parent), ("--figures", Path(options.figures or "."))):
            if (name == "--output" or path.exists()) and not path.is_dir():
                raise ConfigError(f"{name} {getattr(options, name[2:])}: {path} is no folder")
        if Path(options.output).is_dir():
            raise ConfigError(f"--output {options.output} is a folder: name a file")
        runs = [read_series(run, strict=False) for run in options.runs]
        labels = labels_of([Path(run) for run in options.runs])
        text = page(runs, labels)
        write_text(options.output, text)
        written = [options.output]
        if options.figures is not None:
            written += save_figures(runs, labels, Path(options.figures), options.format)
    except (ConfigError, SetupError, TraceError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    for series, label in zip(runs, labels, strict=True):
        series.warn(label)
    print(f"written: {', '.join(map(str, written))} ({len(text) / 1e6:.2f} MB)")
    return 0


def _file_name(label: str) -> str:
    return re.sub(r"[^\w.+-]+", "_", label)


def save_figures(runs: list[Series], labels: list[str], folder: Path, formats: list[str]) -> list[Path]:
    """Each figure of each run as a file of its own, for papers and slides: dark on white."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = {
        f"{_file_name(label)}_{name}": (draw, series)
        for series, label in zip(runs, labels, strict=True)
        if len(series)
        for name, draw in figures.OF_A_RUN.items()
    }
    written = []
    for name, (draw, series) in drawn.items():
        figure = draw(series)
        for kind in formats:
            file = folder / f"{name}.{kind}"
            figure.savefig(file, facecolor="white", dpi=160)
            written.append(file)
        figures.pyplot().close(figure)
    return written


if __name__ == "__main__":
    sys.exit(main())
