"""Traces from outside whose header holds what no run writes: one line, or text that is escaped; never a traceback."""

from __future__ import annotations

import json

import pytest
from synthetic import stationary, write_trace

from hf_gnmr.trace import replay, report

VALUES = [None, "\ud800", [1], {"a": 1}, 10**80]
COMMANDS = {
    "report": lambda run: report.main([str(run), "--output", str(run / "page.html")]),
    "replay": lambda run: replay.main([str(run)]),
}
PLACES = [
    "trigger_options", "trigger", "backend", "run_id", "config", "census", "total_steps", "max_o", "census.path",
    "census.low_path", "census.recovery_bytes_bound", "census.resident_bytes", "census.trigger_bytes", "config.alpha",
    "units.bytes_added", "units.name", "units.layer",
]  # fmt: skip


def hostile(folder, place, value):
    trace = write_trace(folder / "trace.jsonl", stationary(6, 2))
    header, *steps = trace.read_text().splitlines()
    values = json.loads(header)
    part, _, key = place.partition(".")
    for target in values["units"] if part == "units" else [values[part]] if key else [values]:
        target[key or part] = value
    trace.write_text("\n".join([json.dumps(values), *steps]) + "\n")
    return folder


def attempt(name, run, capsys):
    """The command's status; at most one line of error."""
    status = COMMANDS[name](run)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert status in (0, 1, 2) and len(lines) == (1 if status == 2 else 0)
    for page in run.glob("*.html"):
        page.read_text(encoding="utf-8")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", COMMANDS)
def test_no_value_of_a_header_ends_in_a_traceback(tmp_path, capsys, name, place):
    for number, value in enumerate(VALUES if name == "replay" else ["\ud800", [1]]):
        (tmp_path / str(number)).mkdir()
        attempt(name, hostile(tmp_path / str(number), place, value), capsys)


@pytest.mark.parametrize("trigger", ["random", "listed", "static"])
def test_no_options_of_a_trigger_end_in_a_traceback(tmp_path, capsys, trigger):
    options = [*VALUES, *({key: value} for key in ("ratio", "units", "seed") for value in VALUES)]
    for number, value in enumerate(options):
        (tmp_path / str(number)).mkdir()
        run = hostile(tmp_path / str(number), "trigger_options", value)
        text = (run / "trace.jsonl").read_text().replace('"trigger": "gnmr"', f'"trigger": "{trigger}"')
        (run / "trace.jsonl").write_text(text)
        attempt("replay", run, capsys)


@pytest.mark.parametrize("value", [None, "x", [1], True, 10**80, "\ud800"])
def test_what_units_add_is_a_number_of_bytes(tmp_path, capsys, value):
    assert replay.main([str(hostile(tmp_path, "units.bytes_added", value))]) == 2
    assert "units.0.bytes_added=" in (error := capsys.readouterr().err) and "expected a number of bytes" in error


@pytest.mark.parametrize("value", [None, "x", [1], 5])
def test_a_triggers_options_are_a_mapping(tmp_path, capsys, value):
    assert replay.main([str(hostile(tmp_path, "trigger_options", value))]) == 2
    assert f"trigger_options={value!r}: expected a mapping" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["backend", "census.path", "trigger"])
def test_half_of_a_surrogate_pair_is_escaped_in_a_page(tmp_path, capsys, place):
    run = hostile(tmp_path, place, "a\ud800b")
    assert COMMANDS["report"](run) == 0
    page = (run / "page.html").read_text(encoding="utf-8")
    assert "a\\ud800b" in page
