"""Bad data files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from typing import Any

from fuzz.harness import Case, Place
from fuzz.recipes import base_recipe, train

GOOD = [{"question": f"What is {a} plus 1?", "answer": f"It is {a + 1}."} for a in range(8)]
LINES = "".join(json.dumps(row) + "\n" for row in GOOD)


def rows_with(**changes: Any) -> str:
    """JSON lines of which the third row has other values."""
    rows = [dict(row) for row in GOOD]
    rows[2] |= changes
    return "".join(json.dumps(row) + "\n" for row in rows)


def parquet(place: Place, rows: dict[str, Any]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = place.folder / "made.parquet"
    pq.write_table(pa.table(rows), file)
    return file.read_bytes()


CONTENTS: dict[str, tuple[str, str | bytes]] = {
    "empty": ("d.jsonl", ""),
    "only blank lines": ("d.jsonl", "\n\n\n"),
    "truncated line": ("d.jsonl", LINES[:-20]),
    "not JSON": ("d.jsonl", "hello\nworld\n"),
    "HTML": ("d.jsonl", "<!doctype html><html><body>404 Not Found</body></html>\n"),
    "git-lfs pointer": ("d.jsonl", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n"),
    "binary": ("d.jsonl", bytes(range(256)) * 8),
    "latin-1": ("d.jsonl", (LINES + '{"question": "caf\xe9", "answer": "x"}\n').encode("latin-1")),
    "utf-16": ("d.jsonl", LINES.encode("utf-16")),
    "null bytes": ("d.jsonl", "\0" * 1000),
    "a list of rows": ("d.jsonl", json.dumps(GOOD)),
    "numbers": ("d.jsonl", "1\n2\n3\n"),
    "lists": ("d.jsonl", "[1]\n[2]\n"),
    "null rows": ("d.jsonl", "null\nnull\n"),
    "NaN": ("d.jsonl", '{"question": NaN, "answer": "x"}\n'),
    "deep": ("d.jsonl", '{"question": ' + "[" * 3000 + "]" * 3000 + ', "answer": "x"}\n'),
    "many digits": ("d.jsonl", '{"question": ' + "9" * 6000 + ', "answer": "x"}\n'),
    "no answer column": ("d.jsonl", '{"question": "x"}\n' * 4),
    "no question column": ("d.jsonl", '{"answer": "x"}\n' * 4),
    "answer missing once": ("d.jsonl", LINES + '{"question": "x"}\n'),
    "answer null": ("d.jsonl", rows_with(answer=None)),
    "answer empty": ("d.jsonl", rows_with(answer="")),
    "answer blank": ("d.jsonl", rows_with(answer="  ")),
    "all answers empty": ("d.jsonl", '{"question": "x", "answer": ""}\n' * 6),
    "answer a list": ("d.jsonl", rows_with(answer=["x"])),
    "answer a mapping": ("d.jsonl", rows_with(answer={"a": 1})),
    "question a list": ("d.jsonl", rows_with(question=[1, 2])),
    "half a character": ("d.jsonl", '{"question": "\\ud800", "answer": "\\udc00"}\n' * 4),
    "empty JSON": ("d.json", ""),
    "truncated JSON": ("d.json", json.dumps(GOOD)[:-9]),
    "JSON null": ("d.json", "null"),
    "JSON number": ("d.json", "7"),
    "JSON of no rows": ("d.json", "[]"),
    "JSON of empty rows": ("d.json", "[{}, {}]"),
    "JSON of mixed rows": ("d.json", json.dumps([*GOOD, 7])),
    "JSON of columns": ("d.json", json.dumps({"question": ["x"], "answer": ["y"]})),
    "JSON under a key": ("d.json", json.dumps({"data": GOOD})),
    "JSON HTML": ("d.json", "<html></html>"),
    "empty Parquet": ("d.parquet", b""),
    "Parquet HTML": ("d.parquet", b"<html></html>"),
    "Parquet truncated": ("d.parquet", b"PAR1" + b"\0" * 100),
    "Parquet of marks": ("d.parquet", b"PAR1\0\0\0\0\0\0\0\0PAR1"),
    "Parquet pointer": ("d.parquet", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n"),
    "CSV": ("d.csv", "question,answer\nx,y\n"),
    "no ending": ("d", LINES),
    "gzip": ("d.jsonl.gz", b"\x1f\x8b\x08\0\0\0"),
    "text as rows": ("d.txt", "some text\n"),
}
KINDS: dict[str, Callable[[Any], None]] = {
    "folder": os.mkdir,
    "fifo": os.mkfifo,
    "device": lambda path: os.symlink("/dev/zero", path),
    "loop": lambda path: os.symlink(path, path),
    "unreadable link": lambda path: os.symlink("/no/such/file", path),
}
SETTINGS: dict[str, tuple[str, str | bytes, dict[str, Any], tuple[str, ...]]] = {
    "text of no length": ("d.txt", "", {"text": "text", "prompt": None}, ("d.txt", "data")),
    "text of blanks": ("d.txt", " \n\n ", {"text": "text"}, ("d.txt", "data")),
    "text latin-1": ("d.txt", b"caf\xe9 " * 50, {"text": "text"}, ("d.txt",)),
    "text of zeros": ("d.txt", b"\0" * 500, {"text": "text"}, ("d.txt", "data")),
    "text too short for a block": ("d.txt", "a few words", {"text": "text", "max_length": 64}, ("data",)),
    "text column of numbers": ("d.jsonl", '{"t": 7}\n' * 20, {"text": "t"}, ("d.jsonl", "data")),
    "text column missing": ("d.jsonl", LINES, {"text": "t"}, ("data.text", "d.jsonl")),
    "text column null": ("d.jsonl", '{"t": null}\n' * 20, {"text": "t"}, ("d.jsonl", "data")),
    "text streamed from a file": ("d.jsonl", '{"t": "x"}\n', {"text": "t", "streaming": True}, ("streaming", "data")),
    "text held out entirely": ("d.txt", "words " * 200, {"text": "text", "eval_rows": 10**6}, ("eval_rows",)),
    "held out entirely": ("d.jsonl", LINES, {"eval_rows": 8}, ("eval_rows",)),
    "prompt too long": ("d.jsonl", rows_with(question="w " * 5000), {"max_length": 8}, ("max_length", "data")),
    "all prompts too long": (
        "d.jsonl",
        LINES,
        {"max_length": 8, "prompt": "Q" * 200 + "{question}"},
        ("max_length", "data"),
    ),
    "template of a number": ("d.jsonl", rows_with(question="x"), {"prompt": "{question:d}"}, ("data.prompt", "question")),
    "template of an index": ("d.jsonl", LINES, {"prompt": "{question[0]}"}, ("data.prompt",)),
    "template of an attribute": ("d.jsonl", LINES, {"answer": "{answer.__class__}"}, ("data.answer",)),
    "another split of a file": ("d.jsonl", LINES, {"split": "validation"}, ("split",)),
    "subset of a file": ("d.jsonl", LINES, {"subset": "main"}, ("subset",)),
    "eval_split of a file": ("d.jsonl", LINES, {"eval_split": "test"}, ("eval_split",)),
    "generate without eval": ("d.jsonl", LINES, {"generate_rows": 2}, ("generate_rows",)),
}


def cases() -> Iterator[Case]:
    for name, (file, content) in CONTENTS.items():

        def run(place: Place, file: str = file, content: str | bytes = content, settings: Any = None) -> int:
            recipe = base_recipe(place)
            recipe["data"] |= {"name": place.file(file, content), **(settings or {})}
            return train(place, recipe)

        yield Case(f"data/{name}", run, (file, "data."), f"{file}: {content[:60]!r}")
    for name, make in KINDS.items():

        def odd(place: Place, make: Callable[[Any], None] = make) -> int:
            path = place.folder / "odd.jsonl"
            make(path)
            recipe = base_recipe(place)
            recipe["data"]["name"] = str(path)
            return train(place, recipe)

        yield Case(f"data/{name}", odd, ("odd.jsonl",), name)
    for name, (file, content, settings, names) in SETTINGS.items():
        yield Case(
            f"data/{name}",
            lambda place, run=run, file=file, content=content, settings=settings: run(place, file, content, settings),
            names,
            f"{file}: {content[:40]!r} with {settings}",
        )
    for name, rows in {
        "Parquet of numbers": {"question": [1, 2], "answer": [3, 4]},
        "Parquet of lists": {"question": [["x"], ["y"]], "answer": [["x"], ["y"]]},
        "Parquet of nulls": {"question": ["x", "y"], "answer": [None, None]},
        "Parquet of no rows": {"question": [], "answer": []},
        "Parquet of other columns": {"a": ["x"], "b": ["y"]},
        "Parquet of bytes": {"question": [b"\xff"], "answer": [b"\xfe"]},
    }.items():
        yield Case(
            f"data/{name}",
            lambda place, run=run, rows=rows: run(place, "d.parquet", parquet(place, rows)),
            ("d.parquet", "data."),
            f"{rows}",
        )
