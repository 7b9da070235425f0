"""The page of a run: stands alone, honest when thinned, tells what is wrong with a trace; and the live view."""

from __future__ import annotations

import io
import json
import re
import sys
import threading
import time
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from synthetic import stationary, write_trace

from hf_gnmr import figures
from hf_gnmr.cli import main
from hf_gnmr.follow import Tail, follow, line_of, panel
from hf_gnmr.metrics import by_unit, exceedance_curve, summarise
from hf_gnmr.report import page
from hf_gnmr.series import read_series, run_lengths
from hf_gnmr.trace import TraceError, read_trace


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


def test_the_page_stands_alone_and_escapes(run, tmp_path, capsys):
    output = tmp_path / "out.html"
    assert main(["report", str(run), "--output", str(output), "--figures", str(tmp_path / "figures")]) == 0
    text = output.read_text()
    assert f"written: {output}" in capsys.readouterr().out
    assert "<script" not in text and "&lt;script&gt;alert(1)" in text and "&lt;b&gt;run &amp; co" in text
    links = re.findall(r'(?:src|href)="([^"]*)"', text)
    assert all(link.startswith(("#", "data:")) for link in links), "nothing is fetched"
    assert not re.search(r'url\((?!#)', text) and "@import" not in text
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
    assert "other/&lt;b&gt;run &amp; co" in text, "names that tell them apart"


def test_thinning_keeps_maxima(tmp_path):
    norms = np.ones((25_000, 3))
    norms[12_345, 1] = 7.0
    series = read_series(write_trace(tmp_path / "trace.jsonl", norms, alpha=1.5, alpha_init_fraction=0.0, beta=None))
    edges = figures.columns(len(series))
    assert len(edges) == figures.COLUMNS + 1 and edges[0] == 0 and edges[-1] == 25_000
    scores = figures.thin(series.gnmr, edges, np.fmax)
    assert scores.shape == (figures.COLUMNS, 3) and scores.max() == series.gnmr.max() == pytest.approx(7.0)
    lifted = figures.thin(series.active, edges, np.logical_or)
    assert lifted[:, 1].sum() == 1 and lifted.sum() == 1
    text = page([series], ["long"])
    assert len(text) < 5e6 and "maxima are kept" in text


def test_a_run_in_which_nothing_ever_happens(tmp_path):
    norms = np.linspace(2.0, 1.0, 40)[:, None] * np.ones((1, 3))
    series = read_series(write_trace(tmp_path / "trace.jsonl", norms, trigger="none"))
    series.gnmr[0] = series.delta_gnmr[0] = 0.9  # not even the first observation, which is 1 by definition
    text = page([series], ["calm"])
    assert "GNMR (never)" in text and "dwell: none" in text
    one = read_series(write_trace(tmp_path / "one.jsonl", norms[:1], trigger="all"))
    assert "<svg" in page([one], ["a single step"])


def test_many_units_are_folded(tmp_path):
    series = read_series(write_trace(tmp_path / "trace.jsonl", stationary(60, 120)))
    text = page([series], ["wide"])
    assert "all 120 units" in text and text.count("model.layers.119<") == 1


@pytest.mark.parametrize(
    ("damage", "status", "words"),
    [
        (lambda t: t[:-40], 0, "the last line is cut"),
        (lambda t: "\n".join([*t.splitlines()[:30], "{broken", *t.splitlines()[31:]]) + "\n", 0, "only the first 29 steps"),
        (lambda t: "\n".join([*t.splitlines()[:30], '{"step": 30}', *t.splitlines()[31:]]) + "\n", 0, "first 29 steps"),
        (lambda t: t.splitlines()[0] + "\n", 0, "no step was recorded"),
        (lambda t: "hello\n", 2, "not JSON"), (lambda t: '{"schema": 99}\n', 2, "schema 99"), (lambda t: "", 2, "empty"),
        (lambda t: '{"schema": 1}\n', 2, "no list of units"), (lambda t: "[1]\n", 2, "not an object"),
    ],
)
def test_broken_cut_and_foreign_traces(run, tmp_path, capsys, damage, status, words):
    file = run / "trace.jsonl"
    file.write_text(damage(file.read_text()))
    output = tmp_path / "out.html"
    assert main(["report", str(run), "--output", str(output)]) == status
    assert words in capsys.readouterr().err
    if status == 0:
        assert words in output.read_text(), "the page says it too"
    else:
        assert not output.exists()


def test_without_matplotlib_it_says_what_to_install(run, monkeypatch, capsys):
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


def test_a_new_file_is_read_from_its_beginning_and_a_foreign_one_refused(tmp_path):
    file = tmp_path / "trace.jsonl"
    tail = Tail(file)
    assert list(tail.new()) == []
    file.write_text('{"a": 1}\n{"b": 2}\n')
    assert len(list(tail.new())) == 2 and list(tail.new()) == []
    file.rename(tmp_path / "trace.1.jsonl")
    file.write_text('{"c": 3}\n')
    assert list(tail.new()) == [{"c": 3}]
    for text, words in (("no json\n", "not JSON"), ("[1]\n", "no object"), ('{"step": 1}\n', "no header"),
                        ('{"schema": 5, "units": []}\n', "schema 5")):
        file.write_text(text)
        with pytest.raises(TraceError, match=words):
            follow(tmp_path, io.StringIO(), every=0.01, patience=0.01)


def test_the_panel_fits_the_terminal(run):
    trace = read_trace(run / "trace.jsonl")
    for line in (trace.steps[0], trace.steps[50], trace.steps[60], trace.steps[105], trace.steps[119]):
        for width in (40, 80, 200):
            assert all(len(text) <= width for text in panel(trace.header, line, width))
    assert "not counted: loss scaler" in line_of(trace.header, trace.steps[119])
    lifted = next(line for line in trace.steps if line["active"])
    assert any(text.startswith("*") for text in panel(trace.header, lifted, 100))


def test_json_of_a_summary_is_plain(run):
    json.dumps(summarise(read_series(run)), allow_nan=False)
