"""Bad arguments of every command."""

from __future__ import annotations

from collections.abc import Iterator

from fuzz.harness import Case, Place
from fuzz.traces import trace

LONG = "n" * 5000
ARGUMENTS: dict[str, tuple[list[list[str]], tuple[str, ...]]] = {}


def _add(command: str, *rows: tuple[list[str], str]) -> Iterator[tuple[str, list[str], str]]:
    for number, (arguments, name) in enumerate(rows):
        yield f"{command}/{number}", [command, *arguments] if command else arguments, name


TRACE, MODEL, RUN, RECIPE = "TRACE", "MODEL", "RUN", "RECIPE"
"""Stand for paths of the worker's files."""
ROWS = [
    *_add("", ([], "command"), (["no_such"], "no_such"), ([""], "''"), (["--no-such"], "command"), (["n" * 300], "nnn")),
    *_add(
        "train",
        ([], "recipe"),
        (["no_such.yaml"], "no_such.yaml"),
        ([LONG], "nnn"),
        (["a\0b"], "a"),
        (["/"], "/"),
        (["--x"], "recipe"),
        (["/dev/zero"], "/dev/zero"),
        ([""], "''"),
    ),
    *_add(
        "plan",
        ([], "recipe"),
        (["no_such"], "no_such"),
        ([RECIPE, "--processes", "0"], "--processes"),
        ([RECIPE, "--processes", "-3"], "--processes"),
        ([RECIPE, "--processes", "x"], "--processes"),
        ([RECIPE, "--rows", "0"], "--rows"),
        ([RECIPE, "--rows", "-1"], "--rows"),
        ([RECIPE, "--rows", "x"], "--rows"),
        ([RECIPE, "--device-memory", "much"], "--device-memory"),
        ([RECIPE, "--device-memory", "0"], "--device-memory"),
        ([RECIPE, "--device-memory", "9" * 400], "--device-memory"),
        ([RECIPE, "--no-such"], "--no-such"),
        ([RECIPE, "--processes", "9" * 30], "--processes"),
        ([LONG], "nnn"),
        (["a\0b"], "a"),
        ([RECIPE, "--rows", "9" * 50], "--rows"),
    ),
    *_add(
        "eval",
        ([], "RUN"),
        (["/no/such"], "/no/such"),
        ([MODEL, "--tasks", "no_such"], "no_such"),
        ([MODEL, "--tasks"], "--tasks"),
        ([MODEL, "--limit", "0"], "--limit"),
        ([MODEL, "--limit", "x"], "--limit"),
        ([MODEL, "--batch-size", "0"], "--batch-size"),
        ([MODEL, "--shots", "-1", "--data", "builtin", "--offline"], "--shots"),
        ([MODEL, "--dtype", "int3"], "--dtype"),
        ([MODEL, "--precision", "x"], "--precision"),
        ([MODEL, "--block", "0"], "--block"),
        ([MODEL, "--stride", "-1"], "--stride"),
        ([MODEL, "--offline"], "--data"),
        ([MODEL, "--data", "/no/such", "--offline"], "/no/such"),
        ([MODEL], "--data"),
        ([MODEL, "--base", "/no/such", "--data", "builtin", "--offline"], "--base"),
        ([RUN, "--base", "/no/such", "--data", "builtin", "--offline"], "--base"),
        ([MODEL, MODEL, "--data", "builtin", "--offline"], "given twice"),
        ([MODEL, "--output", "/dev/null", "--data", "builtin", "--offline"], "--output"),
        ([MODEL, "--max-gen-tokens", "0"], "--max-gen-tokens"),
        ([LONG], "nnn"),
        (["./" + LONG], "nnn"),
        (["a\0b"], "a"),
        (
            [MODEL, "--chat-template", "--data", "builtin", "--offline", "--tasks", "hellaswag", "--limit", "1"],
            "--chat-template",
        ),
        ([MODEL, "--precision", "final", "--data", "builtin", "--offline"], "final"),
        ([MODEL, "--shots", "9" * 30, "--data", "builtin", "--offline", "--tasks", "hellaswag"], "--shots"),
        ([MODEL, "--limit", "9" * 30, "--output", "/proc/x", "--data", "builtin", "--offline"], "--limit"),
    ),
    *_add(
        "compare",
        ([], "RUN"),
        (["/no/such"], "/no/such"),
        ([MODEL], "model"),
        (["."], "."),
        (["/"], "/"),
        (["RESULTS", "--against", "nobody"], "--against"),
        (["RESULTS", "--output", "/dev/null"], "--output"),
        (["RESULTS", "--output", "/proc/x/y"], "--output"),
        ([LONG], "nnn"),
        (["a\0b"], "a"),
        (["RESULTS", "--output", "x/\0"], "--output"),
        (["RESULTS", "--output", LONG], "--output"),
        (["RESULTS/recovery/hellaswag.json"], "hellaswag.json"),
        (["RESULTS", "--against", ""], "--against"),
    ),
    *_add(
        "report",
        ([], "RUN"),
        (["/no/such"], "/no/such"),
        (["."], "."),
        ([TRACE, "--output", "/dev/null"], "/dev/null"),
        ([TRACE, "--output", "/proc/x"], "/proc/x"),
        ([TRACE, "--output", "/dev/full"], "/dev/full"),
        ([TRACE, "--output", LONG], "nnn"),
        ([TRACE, "--output", ""], "--output"),
        ([TRACE, "--output", "a\0b"], "a"),
        ([TRACE, "--figures", "/dev/null"], "/dev/null"),
        ([TRACE, "--figures", "/proc/x"], "/proc/x"),
        ([TRACE, "--format", "gif"], "--format"),
        ([TRACE, TRACE, "--follow"], "--follow"),
        (["/no/such", "--follow"], "/no: no such folder"),
        ([LONG], "nnn"),
        (["a\0b"], "a"),
        (["a\0b", "--follow"], "a"),
    ),
    *_add(
        "replay",
        ([], "trace"),
        (["/no/such"], "/no/such"),
        ([TRACE, "--set", "alpha"], "alpha"),
        ([TRACE, "--set", "=1"], "--set"),
        ([TRACE, "--set", "alhpa=1"], "alhpa"),
        ([TRACE, "--set", "alpha=0"], "alpha"),
        ([TRACE, "--set", "alpha=x"], "alpha"),
        ([TRACE, "--set", "alpha="], "alpha"),
        ([TRACE, "--set", "alpha=1,"], "alpha"),
        ([TRACE, "--set", "max_o=99"], "max_o"),
        ([TRACE, "--set", "delta=1e9"], "delta"),
        ([TRACE, "--set", "delta=" + "9" * 5000], "delta"),
        ([TRACE, "--set", "alpha=nan"], "alpha"),
        ([TRACE, "--set", "max_o=0.0"], "max_o"),
        ([TRACE, "--set", "t_lock=-1"], "t_lock"),
        ([TRACE, "--set", ""], "--set"),
        ([TRACE, "--set", "alpha=1", "--set", "alpha=2"], "alpha"),
        ([LONG], "nnn"),
        (["a\0b"], "a"),
        ([TRACE, "--set", "fidelity_warmup=2"], "fidelity_warmup"),
        ([TRACE, "--set", "alpha=" + ",".join(["1"] * 100_000)], "--set"),
        ([TRACE, "--set", "beta=[1"], "beta"),
    ),
    *_add(
        "calibrate",
        ([], "trace"),
        ([TRACE], "--promotion-ratio"),
        ([TRACE, "--promotion-ratio", "2"], "promotion"),
        ([TRACE, "--promotion-ratio", "-1"], "promotion"),
        ([TRACE, "--promotion-ratio", "nan"], "promotion"),
        ([TRACE, "--promotion-ratio", "x"], "--promotion-ratio"),
        ([TRACE, "--promotion-ratio", "0"], "promotion"),
        ([TRACE, "--bytes-per-step", "much"], "--bytes-per-step"),
        ([TRACE, "--bytes-per-step", "0"], "--bytes-per-step"),
        ([TRACE, "--bytes-per-step", "9" * 300], "--bytes-per-step"),
        ([TRACE, "--exceedance", "7"], "exceedance"),
        ([TRACE, "--exceedance", "inf"], "exceedance"),
        ([TRACE, "--exceedance", "0.1", "--held-out", "1"], "held"),
        ([TRACE, "--exceedance", "0.1", "--held-out", "nan"], "held"),
        ([TRACE, "--exceedance", "0.1", "--held-out", "-1"], "held"),
        ([TRACE, "--exceedance", "0.1", "--max-o", "99"], "max"),
        ([TRACE, "--exceedance", "0.1", "--max-o", "-1"], "max"),
        ([TRACE, "--exceedance", "0.1", "--max-o", "nan"], "max"),
        ([TRACE, "--exceedance", "0.1", "--max-o", "x"], "--max-o"),
        ([TRACE, "--exceedance", "0.1", "--beta", "maybe"], "--beta"),
        ([TRACE, "--exceedance", "0.1", "--extends", "/no/such"], "--extends"),
        ([TRACE, "--exceedance", "0.1", "--output", "/dev/null"], "--output"),
        ([TRACE, "--exceedance", "0.1", "--output", "/no/such/x.yaml"], "/no/such"),
        ([TRACE, "--exceedance", "0.1", "--output", "a\0b"], "--output"),
        ([TRACE, "--exceedance", "0.1", "--output", LONG], "nnn"),
        ([TRACE, "--exceedance", "0.1", "--extends", "a\0b"], "--extends"),
        ([TRACE, "--exceedance", "0.1", "--max-o", "9" * 5000], "max_o"),
        ([TRACE, "--exceedance", "0.1", "--extends", LONG], "--extends"),
    ),
    *_add(
        "diagnose",
        ([], "trace"),
        (["/no/such"], "/no/such"),
        (["."], "."),
        (["/dev/zero"], "/dev/zero"),
        (["a\0b"], "a"),
        ([LONG], "nnn"),
    ),
    *_add(
        "import-gguf",
        ([], "gguf_file"),
        (["/no/such", "x"], "/no/such"),
        ([TRACE, "out"], "trace.jsonl"),
        ([MODEL, "out"], "model"),
        ([TRACE, "/"], "/"),
        (["a\0b", "out"], "a"),
        ([LONG, "out"], "nnn"),
        ([TRACE, "a\0b"], "a"),
        (["BAD.gguf", "out"], "bad.gguf"),
        (["EMPTY.gguf", "out"], "empty.gguf"),
        (["HTML.gguf", "out"], "html.gguf"),
    ),
]


def placed(place: Place, argument: str) -> str:
    from fuzz.recipes import base_recipe, dumped

    if argument == TRACE:
        return trace(place, lambda lines: None)
    if argument == MODEL:
        return str(place.shared / "model")
    if argument == RUN:
        return str(place.shared / "run")
    if argument == RECIPE:
        return place.file("r.yaml", dumped(base_recipe(place)))
    if argument.startswith("RESULTS"):
        return str(place.shared / "results") + argument.removeprefix("RESULTS")
    gguf = {"BAD.gguf": b"GGUF\3\0\0\0" + b"\xff" * 64, "EMPTY.gguf": b"", "HTML.gguf": b"<html></html>"}
    return place.file(argument.lower(), gguf[argument]) if argument in gguf else argument


def cases() -> Iterator[Case]:
    for name, arguments, expected in ROWS:

        def run(place: Place, arguments: list[str] = arguments) -> int:
            from hf_gnmr.cli import main

            return main([placed(place, argument) for argument in arguments])

        yield Case(
            f"command/{name}",
            run,
            (expected,),
            " ".join(a[:40] for a in arguments).replace("\0", "\\0"),
            slow=arguments[:1] in (["eval"], ["report"]),
        )
