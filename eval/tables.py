"""Bring the generated tables of README.md and docs/*.md up to date.

    python eval/tables.py            rewrites the files whose tables have changed
    python eval/tables.py --check    changes nothing; exit status 1, and the blocks' names, where a table is out of date

A block begins with a line `<!-- table: NAME -->` and ends with a line `<!-- end table -->`. What lies between comes from
`SOURCES`, where NAME is one of its keys, else from `eval/results/NAME.json`: the result's command, date, machine and
versions, and the table that its bench's module renders.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from results import REPOSITORY, RESULTS, provenance, read_result

from hf_gnmr.backends import BACKENDS, option_names
from hf_gnmr.config import field_docs
from hf_gnmr.files import FileError, write_text


def options_table() -> str:
    """The options of all backends, as their `Options` declare them."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for backend in BACKENDS.values():
        docs = field_docs(backend.Options)
        for name, default in backend.Options.defaults().items():
            choices = [f"`{value}`: {summary}" for value, summary in backend.Options.choices(name).items()]
            meaning = "; ".join([docs[name].replace("``", "`").rstrip("."), *choices])
            rows.setdefault((name, repr(default).replace("'", '"'), meaning[:1].lower() + meaning[1:]), []).append(
                backend.name
            )
    lines = ["| option | backends | default | meaning |", "|---|---|---|---|"]
    for name in option_names():
        for (option, default, meaning), backends in rows.items():
            if option == name:
                lines.append(f"| `{option}` | {', '.join(f'`{b}`' for b in backends)} | `{default}` | {meaning} |")
    return "\n".join(lines)


SOURCES: dict[str, Callable[[], str]] = {"options": options_table}
"""Tables that are derived from the code, by name: Markdown without a trailing newline."""
BENCHES = ("activation_cost", "controller_cost", "cost", "report_cost", "stress", "three_ways")
"""Modules with a `table(payload)`."""
BEGIN = re.compile(r"<!-- table: (\S+) -->\s*")
END = "<!-- end table -->"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit status 1 if a table is out of date")
    options = parser.parse_args(arguments)
    try:
        outdated = update(REPOSITORY, rendered, write=not options.check)
    except FileError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for page, name in outdated:
        print(f"{page.relative_to(REPOSITORY)}: table {name} {'is out of date' if options.check else 'rewritten'}")
    return 1 if options.check and outdated else 0


def rendered(name: str, folder: Path = RESULTS) -> str:
    """The text of a block.

    Raises:
        FileError: no such source or result, or a result of an unknown bench.
    """
    if name in SOURCES:
        return SOURCES[name]()
    result = read_result(name, folder)
    if result["bench"] not in BENCHES:
        raise FileError(f"{folder / name}.json: bench={result['bench']!r}: expected one of {', '.join(BENCHES)}")
    table: str = importlib.import_module(result["bench"]).table(result["payload"])
    return f"{provenance(result)}\n\n{table}"


def update(repository: Path, render: Callable[[str], str], *, write: bool) -> list[tuple[Path, str]]:
    """The blocks of README.md and docs/*.md that are out of date, as (page, name); with `write` they are rewritten.

    Raises:
        FileError: a block without an end or an unknown name; no file is written then.
    """
    outdated: list[tuple[Path, str]] = []
    changed: dict[Path, str] = {}
    for page in [repository / "README.md", *sorted((repository / "docs").glob("*.md"))]:
        text = page.read_text(encoding="utf-8")
        changed[page], names = with_tables(text, page.name, render)
        outdated += [(page, name) for name in names]
    if write:
        for page in dict.fromkeys(page for page, _ in outdated):
            write_text(page, changed[page])
    return outdated


def with_tables(text: str, page: str, render: Callable[[str], str]) -> tuple[str, list[str]]:
    """A page's text with its blocks rendered again, and the names of those that differ from before.

    Raises:
        FileError: a block without an end, an end without a beginning, or what `render` raises, with the page and block.
    """
    kept: list[str] = []
    outdated: list[str] = []
    block: list[str] = []
    name: str | None = None
    for line in text.splitlines():
        begins = BEGIN.fullmatch(line)
        if begins and name is not None:
            raise FileError(f"{page}: table {name}: expected a line {END} before table {begins[1]}")
        if line.rstrip() == END:
            if name is None:
                raise FileError(f"{page}: {END} without a line <!-- table: NAME --> before it")
            try:
                new = ["", *render(name).splitlines(), ""]
            except FileError as error:
                raise FileError(f"{page}: table {name}: {error}") from error
            if new != block:
                outdated.append(name)
            kept += new
            name = None
        if name is None:
            kept.append(line)
        else:
            block.append(line)
        if begins:
            name, block = begins[1], []
    if name is not None:
        raise FileError(f"{page}: table {name}: expected a line {END} after it")
    return "\n".join(kept) + "\n", outdated


if __name__ == "__main__":
    sys.exit(main())
