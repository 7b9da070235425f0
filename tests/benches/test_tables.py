"""The generated tables of the documentation: rewritten between their markers, checked, and up to date in this repository."""

from __future__ import annotations

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "eval"))

import controller_cost
import results
import tables

from hf_gnmr.files import FileError

PAGE = "# Page\n\n<!-- table: x -->\nold\n<!-- end table -->\n\nafter\n"
FRESH = "# Page\n\n<!-- table: x -->\n\n| new |\n|---|\n\n<!-- end table -->\n\nafter\n"


def render(name):
    if name != "x":
        raise FileError(f"{name}.json: no such file")
    return "| new |\n|---|"


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A README and a page of docs with an outdated block each, and one page without blocks."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text(PAGE)
    (tmp_path / "docs" / "A.md").write_text(PAGE)
    (tmp_path / "docs" / "B.md").write_text("no table\n")
    monkeypatch.setattr(tables, "REPOSITORY", tmp_path)
    monkeypatch.setattr(tables, "SOURCES", {"x": lambda: render("x")})
    return tmp_path


def test_tables_are_rewritten_between_their_markers(repository, capsys):
    assert tables.main([]) == 0
    assert (repository / "README.md").read_text() == (repository / "docs" / "A.md").read_text() == FRESH
    assert (repository / "docs" / "B.md").read_text() == "no table\n"
    assert capsys.readouterr().out.splitlines() == ["README.md: table x rewritten", "docs/A.md: table x rewritten"]
    assert tables.main([]) == 0 and capsys.readouterr().out == ""


def test_check_names_outdated_tables_and_changes_nothing(repository, capsys):
    (repository / "README.md").write_text(FRESH)
    assert tables.main(["--check"]) == 1
    assert capsys.readouterr().out == "docs/A.md: table x is out of date\n"
    assert (repository / "docs" / "A.md").read_text() == PAGE
    (repository / "docs" / "A.md").write_text(FRESH)
    assert tables.main(["--check"]) == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- table: x -->\n", "P.md: table x: expected a line <!-- end table --> after it"),
        ("<!-- table: x -->\n<!-- table: y -->\n<!-- end table -->\n", "P.md: table x: expected a line .* before table y"),
        ("<!-- end table -->\n", "P.md: <!-- end table --> without"),
        ("<!-- table: y -->\n<!-- end table -->\n", "P.md: table y: y.json: no such file"),
    ],
)
def test_blocks_that_cannot_be_rendered_are_refused(text, message):
    with pytest.raises(FileError, match=message):
        tables.with_tables(text, "P.md", render)


def test_no_page_is_written_where_one_cannot_be_rendered(repository, capsys):
    (repository / "docs" / "B.md").write_text("<!-- table: unknown -->\n<!-- end table -->\n")
    assert tables.main([]) == 2
    assert "B.md: table unknown" in capsys.readouterr().err
    assert (repository / "README.md").read_text() == PAGE


def test_a_marker_within_a_line_is_text():
    text = "Write `<!-- table: x -->` and `<!-- end table -->`.\n"
    assert tables.with_tables(text, "P.md", render) == (text, [])


def test_a_saved_result_is_rendered_by_its_bench(tmp_path):
    payload = {"steps": 5, "milliseconds": [{"units": 1000, "low": 1.0, "median": 2.0, "high": 3.0}]}
    results.save_result("r", bench="controller_cost", command="python x", seed=7, payload=payload, folder=tmp_path)
    text = tables.rendered("r", tmp_path)
    assert text.startswith("`python x`: ") and "seed 7." in text.splitlines()[0]
    assert text.endswith("\n\n" + controller_cost.table(payload)) and "| 1,000 | 2.000 | 1.000 to 3.000 | 2.000 |" in text


def test_a_result_of_an_unknown_bench_is_refused(tmp_path):
    results.save_result("r", bench="os", command="python x", seed=7, payload={}, folder=tmp_path)
    with pytest.raises(FileError, match="bench='os': expected one of activation_cost, controller_cost"):
        tables.rendered("r", tmp_path)


@pytest.mark.parametrize("bench", tables.BENCHES)
def test_every_bench_has_a_table(bench):
    assert callable(__import__(bench).table)


def test_the_tables_of_this_repository_are_up_to_date(capsys):
    assert tables.main(["--check"]) == 0, capsys.readouterr().out
