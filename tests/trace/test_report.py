"""The page of a run: self-contained, faithful when thinned, clear about a trace's faults; and the live view."""

from __future__ import annotations

import base64
import html
import io
import json
import math
import os
import pathlib
import re
import shutil
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from synthetic import stationary, write_trace

from hf_gnmr.cli import main
from hf_gnmr.trace import figures
from hf_gnmr.trace.columns import Columns
from hf_gnmr.trace.file import TraceError, read_trace
from hf_gnmr.trace.follow import Tail, follow, line_of, panel
from hf_gnmr.trace.metrics import by_unit, exceedance_curve, summarise
from hf_gnmr.trace.report import page
from hf_gnmr.trace.series import read_series, run_lengths


@pytest.fixture
def run(tmp_path):
    """A run of 200 steps with everything in it: spikes, a norm that is not finite, a skipped step, an unseen unit."""
    norms = stationary(200, 6)
    norms[50, 2] = np.inf
    seen = np.ones((200, 6), dtype=bool)
    seen[100:110, 4] = False
    folder = tmp_path / "<b>run & co"
    folder.mkdir()
    write_trace(folder / "trace.jsonl", norms, seen=seen, skipped=(120,), alpha=1.3, alpha_init_fraction=0.0, max_o=2)
    (folder / "recipe.yaml").write_text("model: {name: '<script>alert(1)</script>'}\n")
    return folder


def test_arrays_hold_what_the_lines_say(run):
    trace, series = read_trace(run / "trace.jsonl"), read_series(run)
    assert len(series) == len(trace.steps) == 200 and series.reasons == {119: "loss scaler skipped the update"}
    for i, line in enumerate(trace.steps):
        assert np.flatnonzero(series.active[i]).tolist() == line["active"]
        assert [None if np.isnan(x) else x for x in series.norms[i].tolist()] == [
            None if n is None else float(n) for n in line["norms"]
        ]
        assert series.counted[i] == (line["skipped"] is None)
        if line["skipped"] is None:
            assert series.risk[i].tolist() == [float(r) for r in line["risk"]]
        else:
            assert np.isnan(series.gnmr[i]).all() and np.isnan(series.alpha[i])
    assert summarise(trace) == summarise(series)


def test_per_unit_counts_add_up(run):
    series = read_series(run)
    rows = by_unit(series)
    assert sum(r["triggers"] for r in rows) == int(series.triggered.sum())
    for r in rows:
        assert r["by_gnmr"] + r["by_delta_gnmr"] + r["by_both"] + r["not_finite"] == r["triggers"]
        assert r["share_on_recovery"] == r["steps_on_recovery"] / 199
    assert rows[2]["not_finite"] == 1
    assert sum(r["switches"] for r in rows) == summarise(series)["switches"]
    assert sum(length for _, _, length in run_lengths(series.active, series.adjacent)) == int(series.active.sum())
    curve = exceedance_curve(series, np.array([1.3]))
    assert curve["gnmr"][0] == summarise(series)["gnmr_exceedance"]


def test_the_page_is_self_contained_and_escapes(run, tmp_path, capsys):
    output = tmp_path / "out.html"
    assert main(["report", str(run), "--output", str(output), "--figures", str(tmp_path / "figures")]) == 0
    text = output.read_text()
    assert f"written: {output}" in capsys.readouterr().out
    assert "<script" not in text and "&lt;script&gt;alert(1)" in text and "&lt;b&gt;run &amp; co" in text
    links = re.findall(r'(?:src|href)="([^"]*)"', text)
    assert all(link.startswith(("#", "data:")) for link in links), "nothing is fetched"
    assert not re.search(r"url\((?!#)", text) and "@import" not in text
    assert figures.INK not in text and figures.FAINT not in text and "prefers-color-scheme: dark" in text
    svgs = re.findall(r"<svg.*?</svg>", text, flags=re.S)
    assert len(svgs) == 3 and all(ElementTree.fromstring(svg).get("role") == "img" for svg in svgs)
    series = read_series(run)
    summary = summarise(series)
    assert f"<td>{summary['promotion_ratio']:.2%}</td>" in text and f"<td>{summary['switches']:,}</td>" in text
    assert text.count("<dt>") == 6 and "red: not finite" in text
    assert "model.layers.5" in text and "recipe, as resolved" in text
    names = {file.name for file in (tmp_path / "figures").iterdir()}
    assert len(names) == 6 and {n.rpartition(".")[2] for n in names} == {"png", "svg"}


def test_runs_side_by_side(run, tmp_path, capsys):
    other = tmp_path / "other" / "<b>run & co"
    other.mkdir(parents=True)
    write_trace(other / "trace.jsonl", stationary(90, 3, seed=1), trigger="none")
    output = tmp_path / "out.html"
    assert main(["report", str(run), str(other / "trace.jsonl"), "--output", str(output)]) == 0
    text = output.read_text()
    assert "Side by side" in text and len(re.findall("<svg", text)) == 7
    assert "other/&lt;b&gt;run &amp; co" in text, "names that distinguish them"


def pictures(text):
    """The pictures in a page, as arrays (rows, columns, 4)."""
    from matplotlib import image

    encoded = re.findall(r'href="data:image/png;base64,([^"]*)"', text)
    return [image.imread(io.BytesIO(base64.b64decode("".join(data.split())))) for data in encoded]


@pytest.mark.parametrize(("steps", "units"), [(300, 3), (1000, 7), (25_000, 3), (400, 500)])
def test_thinning_keeps_maxima_in_the_drawn_picture_too(tmp_path, steps, units):
    """Spikes of one step each: as many dark and as many blue cells in the picture as columns that have one."""
    norms = np.ones((steps, units))
    where = np.random.default_rng(0).choice(np.arange(10, steps - 2), 40, replace=False)
    norms[where, where % units] = 30.0
    series = read_series(
        write_trace(tmp_path / "trace.jsonl", norms, alpha=2.0, alpha_init_fraction=0.0, beta=None, t_lock=0, max_o=units)
    )
    columns = Columns.of(series)
    group = math.ceil(units / figures.ROWS)
    cells = {(int(columns.index[t]), (t % units) // group) for t in where}
    lifted = {(int(columns.index[t + 1]), (t % units) // group) for t in where}
    heat = next(p for p in pictures(page([series], ["x"])) if p.shape[1] >= figures.PIXELS)
    count, rows = len(columns.edges) - 1, math.ceil(units / group)
    small = heat.reshape(rows, heat.shape[0] // rows, count, heat.shape[1] // count, 4)
    dark = {(c, r) for r in range(rows) for c in range(count) if small[r, 0, c, 0, :3].sum() < 1.3}
    blue = {(c, r) for r in range(rows) for c in range(count) if small[r, -1, c, 0, 2] - small[r, -1, c, 0, 0] > 0.8}
    assert dark == cells and blue == lifted
    assert (small == small[:, :, :, :1]).all(), "whole pixels a cell"


def test_loss_spikes_are_drawn_and_gaps_and_broken_values_where_they_are(tmp_path):
    norms = stationary(1500, 3)
    path = write_trace(tmp_path / "trace.jsonl", norms, missing=range(301, 1001))
    lines = path.read_text().splitlines()
    changed = []
    for line in lines[1:]:
        record = json.loads(line)
        record["loss"] = {201: 50.0, 1230: "inf", 1240: "nan"}.get(record["step"], 1.0)
        changed.append(json.dumps(record))
    path.write_text("\n".join([lines[0], *changed]) + "\n")
    series = read_series(path)
    assert series.troubles == ["700 steps are missing, the first after step 300; figures leave them blank"]
    figure = figures.timeline(series)
    loss = figure.axes[3]
    thin = loss.lines[0]
    assert np.nanmax(thin.get_ydata()) == 50.0 and abs(thin.get_xdata()[np.nanargmax(thin.get_ydata())] - 201) < 3
    inside = (thin.get_xdata() > 305) & (thin.get_xdata() < 995)
    assert np.isnan(thin.get_ydata()[inside]).all() and inside.sum() > 100, "blank where steps are missing"
    crosses = next(line for line in loss.lines if line.get_marker() == "x")
    assert np.abs(crosses.get_xdata()[:, None] - [1230, 1240]).min(axis=1).max() < 3 and len(crosses.get_xdata()) == 2
    figures.pyplot().close(figure)
    text = page([series], ["gap"])
    assert "700 steps are missing" in text and len(text) < 5e6


def test_thresholds_below_one_lie_on_the_curve(tmp_path):
    series = read_series(write_trace(tmp_path / "t.jsonl", stationary(80, 3), alpha=0.4, alpha_init_fraction=0.0, beta=0.9))
    figure = figures.exceedances(series)
    curve = figure.axes[0].lines[0].get_xdata()
    assert curve.min() < 0.4 and curve.max() == pytest.approx(10.0)
    figures.pyplot().close(figure)


def test_hostile_names(tmp_path, capsys):
    file = write_trace(tmp_path / "trace.jsonl", stationary(60, 3))
    lines = file.read_text().splitlines()
    header = json.loads(lines[0])
    for unit, name in zip(header["units"], ("a\x1b[31m\n\x00b", "$\\frac{", "x" * 300), strict=True):
        unit["name"] = name
    folder = tmp_path / "_run"
    folder.mkdir()
    (folder / "trace.jsonl").write_text("\n".join([json.dumps(header), *lines[1:]]) + "\n")
    output = tmp_path / "o.html"
    arguments = ["report", str(folder), str(file), "--output", str(output), "--figures", str(tmp_path / "f")]
    assert main(arguments) == 0
    text = output.read_text()
    assert not re.search(r"[\x00\x1b]", text) and "x" * 121 not in text and "_run" in text
    for svg in (tmp_path / "f").glob("*.svg"):
        ElementTree.parse(svg)
    assert len(set(re.findall(r'\bid="([^"]*)"', text))) == len(re.findall(r'\bid="([^"]*)"', text)), "ids are unique"
    out = io.StringIO()
    follow(folder, out, every=0.01, patience=0.05)
    assert "\x1b" not in out.getvalue() and len(out.getvalue().splitlines()) == 60


def test_a_run_in_which_nothing_ever_happens(tmp_path):
    norms = np.linspace(2.0, 1.0, 40)[:, None] * np.ones((1, 3))
    series = read_series(write_trace(tmp_path / "trace.jsonl", norms, trigger="none"))
    series.gnmr *= 0.1  # not even the first observation, which is 1 by definition
    series.delta_gnmr *= 0.1
    text = page([series], ["calm"])
    assert "GNMR (never)" in text and "dwell: none" in text
    one = read_series(write_trace(tmp_path / "one.jsonl", norms[:1], trigger="all"))
    assert "<svg" in page([one], ["a single step"])


def test_many_units_are_folded(tmp_path):
    series = read_series(write_trace(tmp_path / "trace.jsonl", stationary(60, 120)))
    text = page([series], ["wide"])
    assert "all 120 units" in text and text.count("model.layers.119<") == 1


def edited(text, line, **changes):
    """A trace with one line's fields changed."""
    lines = text.splitlines()
    lines[line] = json.dumps({**json.loads(lines[line]), **changes})
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    ("damage", "status", "words"),
    [
        (lambda t: t[:-40], 0, "the last line is cut"),
        (lambda t: "\n".join([*t.splitlines()[:30], "{broken", *t.splitlines()[31:]]) + "\n", 0, "only the first 29 steps"),
        (lambda t: "\n".join([*t.splitlines()[:30], '{"step": 30}', *t.splitlines()[31:]]) + "\n", 0, "first 29 steps"),
        (lambda t: t.splitlines()[0] + "\n", 0, "no step was recorded"),
        (lambda t: "hello\n", 2, "not JSON"),
        (lambda t: '{"schema": 99}\n', 2, "schema 99"),
        (lambda t: "", 2, "empty"),
        (lambda t: '{"schema": 1}\n', 2, "no list of units"),
        (lambda t: "[1]\n", 2, "not an object"),
        (lambda t: t.replace('"max_o": 2', '"max_o": null', 1).replace('"max_o": 2', '"max_o": null', 1), 2, "max_o=None"),
        (lambda t: t.replace('"layer": 3', '"layer": "3"', 1), 2, "unit 3 of the header has layer='3'"),
        (lambda t: t.replace('"census": {', '"census": [{', 1).replace('}, "run_id"', '}], "run_id"', 1), 2, "census="),
        (lambda t: edited(t, 30, active=None), 0, "active=None: expected a list of unit indices"),
        (lambda t: edited(t, 30, active=[-1]), 0, "active=[-1]: expected a list of unit indices"),
        (lambda t: edited(t, 30, triggered=[True]), 0, "triggered=[True]: expected a list of unit indices"),
        (lambda t: edited(t, 30, step=12), 0, "step=12: expected a step after step 29"),
        (lambda t: edited(t, 30, step=True), 0, "step=True: expected a step after step 29"),
        (lambda t: edited(t, 30, norms=[-1.0] * 6), 0, "a norm is negative"),
        (lambda t: edited(t, 30, norms=[1.0]), 0, "expected 6 values, one a unit"),
        (lambda t: t.splitlines()[0] + "\n" + "[" * 100_000 + "\n", 0, "no step was recorded"),
    ],
)
def test_broken_cut_and_foreign_traces(run, tmp_path, capsys, damage, status, words):
    file = run / "trace.jsonl"
    file.write_text(damage(file.read_text()))
    output = tmp_path / "out.html"
    assert main(["report", str(run), "--output", str(output)]) == status
    assert words in capsys.readouterr().err
    for command in (["replay"], ["diagnose"], ["calibrate", "--exceedance", "0.1"]):  # no traceback from any of them
        assert main([command[0], str(run), *command[1:]]) in (0, 1, 2)
        assert capsys.readouterr().err
    if status == 0:
        assert html.unescape(words) in html.unescape(output.read_text()), "the page states it as well"
    else:
        assert not output.exists()


def test_without_matplotlib_the_error_states_what_to_install(run, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["report", str(run)]) == 2
    assert "pip install 'hf-gnmr[report]'" in capsys.readouterr().err


def test_following_a_growing_trace(run, tmp_path):
    lines = (run / "trace.jsonl").read_text().splitlines(keepends=True)
    folder = tmp_path / "live"
    folder.mkdir()
    out = io.StringIO()
    watcher = threading.Thread(target=follow, args=(folder, out), kwargs={"every": 0.02, "patience": 10})
    watcher.start()
    while not out.getvalue():
        time.sleep(0.01)
    file = folder / "trace.jsonl"
    with file.open("w") as writer:
        for line in lines[:20]:
            writer.write(line[:30])
            writer.flush()  # a line in two pieces
            time.sleep(0.005)
            writer.write(line[30:])
            writer.flush()
    (folder / "summary.json").write_text("{}")
    watcher.join(timeout=20)
    assert not watcher.is_alive(), "it ends with the run"
    shown = out.getvalue().splitlines()
    assert shown[0] == f"waiting for {file}" and len(shown) == 20
    assert shown[-1].startswith("step 19/200  loss ") and "maxO 2" in shown[-1]


def test_a_new_file_is_read_from_its_beginning(tmp_path):
    file = tmp_path / "trace.jsonl"
    tail = Tail(file)
    assert list(tail.new()) == []
    file.write_text('{"a": 1}\n{"b": 2}\n')
    assert len(list(tail.new())) == 2 and list(tail.new()) == []
    file.rename(tmp_path / "trace.1.jsonl")
    file.write_text('{"c": 3}\n')
    assert list(tail.new()) == [{"c": 3}]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("no json\n", "not JSON"),
        ("[1]\n", "not an object"),
        ('{"step": 1}\n', "no header"),
        ('{"schema": 5, "units": []}\n', "schema 5, expected 1"),
        ('{"schema": 1, "units": []}\n', "no list of units"),
    ],
)
def test_a_file_that_is_not_a_trace_is_not_followed(tmp_path, text, words):
    (tmp_path / "trace.jsonl").write_text(text)
    with pytest.raises(TraceError, match=words):
        follow(tmp_path, io.StringIO(), every=0.01, patience=0.01)


class Terminal(io.StringIO):
    """Output that is a terminal."""

    def isatty(self):
        return True


def test_on_a_terminal_the_last_step_is_drawn_in_place(run):
    out = Terminal()
    follow(run, out, every=0.01, patience=0.02)
    shown = out.getvalue().splitlines()
    assert shown[0].startswith("step 200/200") and len(shown) == 2 + 6, "the last step alone, one row a unit"
    assert "waiting" not in out.getvalue()


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("step", [1, 51, 61, 106, 120])
def test_the_panel_fits_the_terminal(run, step, width):
    trace = read_trace(run / "trace.jsonl")
    assert all(len(text) <= width for text in panel(trace.header, trace.steps[step - 1], width))


def test_the_panel_marks_lifted_units_and_steps_that_do_not_count(run):
    trace = read_trace(run / "trace.jsonl")
    assert "not counted: loss scaler" in line_of(trace.header, trace.steps[119])
    lifted = next(line for line in trace.steps if line["active"])
    assert any(text.startswith("*") for text in panel(trace.header, lifted, 100))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--output", "nowhere/x.html"], "--output nowhere/x.html: nowhere is not a folder"),
        (["--output", "."], "is a folder: expected a file name"),
        (["--output", "x.html", "--figures", "file"], "--figures file: not a folder"),
    ],
)
def test_output_paths_are_checked_first(run, tmp_path, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    assert main(["report", str(run), *arguments]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "x.html").exists()


@pytest.mark.parametrize("output", ["", "nowhere/x", "link", "folder/"])
@pytest.mark.parametrize("command", [["report"], ["calibrate", "--exceedance", "0.1"]], ids=["report", "calibrate"])
def test_places_where_nothing_can_be_written_are_refused_in_a_line(run, tmp_path, monkeypatch, capsys, command, output):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("nowhere/x")
    before = sorted(tmp_path.iterdir())
    assert main([command[0], str(run), *command[1:], "--output", output]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --output ") and error.count("\n") == 1
    assert any(words in error for words in ("names no file", "nowhere is not a folder", "link exists already"))
    assert sorted(tmp_path.iterdir()) == before


PAGES = {
    "of this version": None,
    "of version 0.1.0": b'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width='
    b'device-width, initial-scale=1"><title>GNMR report: run</title><style>body{}</style></head>\n<body>\n</body></html>\n',
}


@pytest.mark.parametrize("content", PAGES.values(), ids=PAGES)
def test_an_earlier_page_is_replaced(run, tmp_path, content):
    output = tmp_path / "page.html"
    if content is None:
        assert main(["report", str(run), "--output", str(output)]) == 0
    else:
        output.write_bytes(content)
    before = output.stat().st_ino
    assert main(["report", str(run), "--output", str(output)]) == 0
    assert output.stat().st_ino != before and output.read_text().startswith("<!doctype html>")


FILES_OF_A_RUN = [
    "trace.jsonl",
    "summary.json",
    "recipe.yaml",
    "adapter_model.safetensors",
    "README.md",
    "page.html",
    "empty",
]


@pytest.mark.parametrize("name", FILES_OF_A_RUN)
@pytest.mark.parametrize("by_link", [False, True])
def test_no_other_file_is_replaced(run, tmp_path, capsys, name, by_link):
    file = tmp_path / name
    if not name.startswith("trace"):
        file.write_text("" if name == "empty" else f"<html>mine, on {'<title>GNMR report: '}</html>")
    else:
        shutil.copy(run / "trace.jsonl", file)
    before, output = file.read_bytes(), file
    if by_link:
        output = tmp_path / "link.html"
        output.symlink_to(file)
    assert main(["report", str(run), "--output", str(output)]) == 2
    error = capsys.readouterr().err
    assert (
        error
        == f"error: --output {output} exists and is not a page of hf-gnmr report: name another file, or remove it first\n"
    )
    assert file.read_bytes() == before and output.is_symlink() == by_link


@pytest.mark.parametrize("kind", ["device", "link to a device", "fifo", "link to a folder"])
@pytest.mark.parametrize(
    "command", [["report", "RUN"], ["calibrate", "RUN", "--exceedance", "0.1"]], ids=lambda command: command[0]
)
def test_only_regular_files_are_written(run, tmp_path, capsys, kind, command):
    place = tmp_path / "place"
    if kind == "fifo":
        os.mkfifo(place)
    elif kind == "device":
        place = pathlib.Path("/dev/null")
    else:
        place.symlink_to("/dev/null" if kind == "link to a device" else tmp_path)
    before = os.lstat(place)
    assert main([argument.replace("RUN", str(run)) for argument in command] + ["--output", str(place)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --output") and error.count("\n") == 1
    assert os.path.samestat(os.lstat(place), before)


def test_figures_replace_only_figures(run, tmp_path, capsys):
    arguments = ["report", str(run), "--output", str(tmp_path / "p.html"), "--figures", str(tmp_path / "f")]
    assert main(arguments) == 0 and main(arguments) == 0
    for number, file in enumerate(sorted((tmp_path / "f").iterdir())[:2]):
        content = file.read_bytes()
        file.write_bytes(b"mine" if number else b"\x89PNG mine")
        assert main(arguments) == 2
        assert f"--figures: {file} exists and is not a figure of hf-gnmr report" in capsys.readouterr().err
        file.write_bytes(content)


def test_only_one_run_in_an_existing_folder_is_followed(run, tmp_path, capsys):
    assert main(["report", str(tmp_path / "a" / "b" / "c"), "--follow"]) == 2
    assert "no such folder" in capsys.readouterr().err
    assert main(["report", str(run), str(run), "--follow"]) == 2
    assert "--follow: expected one run, got 2" in capsys.readouterr().err


def test_a_closed_pipe_is_no_error(run):
    command = f"{sys.executable} -m hf_gnmr.cli diagnose '{run}' | head -c 10"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    assert done.stderr == ""


def test_json_of_a_summary_is_plain(run):
    summary = summarise(read_series(run))
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
