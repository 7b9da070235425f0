"""Reading evaluation files."""

from __future__ import annotations

import pytest

from hf_gnmr.config import ConfigError
from hf_gnmr.evaluation.rows import file_hash, json_lines, pages, read_text, wikitext_rows

TEXT = " \n = One = \n \n text = here \n = = Part = = \n \n more \n = Two = \n \n end \n"


def test_articles_begin_at_first_level_headings(tmp_path):
    (tmp_path / "text").write_text(TEXT)
    assert [page.split("=")[1].strip() for page in pages(TEXT)] == ["One", "Two"]
    assert "Part" in pages(TEXT)[0]
    assert wikitext_rows(tmp_path / "text") == [{"page": page} for page in pages(TEXT)]


def test_a_text_without_headings_is_one_article():
    assert pages("plain\n") == ["plain\n"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "got no rows"),
        ("\n\n", "got no rows"),
        ("[1]\n", "expected a JSON object"),
        ('{"cut', "cannot be read as JSON lines"),
    ],
)
def test_broken_json_lines_are_refused(tmp_path, text, message):
    (tmp_path / "rows.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=f"rows.jsonl.*{message}"):
        json_lines(tmp_path / "rows.jsonl")


@pytest.mark.parametrize("read", [json_lines, read_text, wikitext_rows])
def test_a_missing_file_is_named(tmp_path, read):
    with pytest.raises(ConfigError, match="nothing-here cannot be read"):
        read(tmp_path / "nothing-here")


def test_a_hash_is_of_contents(tmp_path):
    for name, text in (("a", "x"), ("b", "x"), ("c", "y")):
        (tmp_path / name).write_text(text)
    a, b, c = (file_hash(tmp_path / name) for name in "abc")
    assert a == b != c and len(a) == 16
