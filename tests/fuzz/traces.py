"""Bad traces, given to report, replay, calibrate and diagnose."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

from fuzz.harness import Case, Place

COMMANDS: dict[str, Callable[[str], list[str]]] = {
    "report": lambda trace: ["report", trace, "--output", "page.html"],
    "replay": lambda trace: ["replay", trace, "--set", "alpha=0.8,1.2"],
    "calibrate": lambda trace: ["calibrate", trace, "--promotion-ratio", "0.2"],
    "diagnose": lambda trace: ["diagnose", trace],
}
HEADER: dict[str, tuple[Any, ...]] = {
    "schema": (None, 99, "1", [], -1),
    "units": (None, [], {}, "x", [7], [{}], [{"name": 7}]),
    "config": (None, [], "x", {"alpha": 0}, {"alpha": "x"}, {"alpha": 1e308, "beta": 1e-308}, {"delta": -1}, {"no_such": 1}),
    "max_o": (None, -1, "x", 1e308, [], 99, float("nan")),
    "trigger": (None, 7, "no_such", [], {}),
    "backend": (None, 7, [], {}),
    "trigger_options": (None, 7, [], "x", {"no_such": 1}),
    "census": (None, 7, [], "x", {"recovery_bytes_bound": "x"}, {"recovery_bytes_bound": 1e308}),
    "run_id": (None, 7, [], {}),
    "total_steps": ("x", -1, 0, 1e308, [], {}, 2**70),
}
LINE: dict[str, tuple[Any, ...]] = {
    "step": (None, 0, -1, "x", 1e308, 2**49, 2**60, 2, 2.5, []),
    "loss": ("x", [], {}, "nan", 1e308),
    "grad_norm": ("x", [], -1, 1e308),
    "norms": (None, [], [1], ["x"] * 4, [-1] * 4, [1e308] * 4, ["inf"] * 4, {}, [0, 0, 0, 0], [5e-324] * 4),
    "gnmr": (None, [1], ["x"] * 4, [1e308] * 4, [-1e308] * 4, "x"),
    "delta_gnmr": (None, [1], ["x"] * 4, [1e308] * 4),
    "risk": (None, [1], ["x"] * 4, [1e308] * 4),
    "alpha": (None, 0, -1, "x", 1e308, 1e-320, []),
    "beta": ("x", 0, -1, 1e308, []),
    "triggered": (None, [99], [-1], ["x"], 7, [0, 0, 0], [0.5]),
    "active": (None, [99], [-1], ["x"], 7, [0, 0, 0], [2**70]),
    "micro_batches": ("x", -1, 1e308, []),
    "skipped": (7, [], {}, True),
    "update_withheld": ("x", 7, []),
    "step_ms": ("x", -1, 1e308, [], 0),
    "controller_ms": ("x", -1, 1e308, []),
    "recovery_bytes": ("x", -1, 1e308, [], 2**70),
}
UNIT: dict[str, tuple[Any, ...]] = {
    "name": (None, 7, [], "", "n" * 5000, "\x1b[2J"),
    "layer": (None, "x", -1, []),
    "recoverable": (None, "x", 7, []),
    "bytes_added": (None, "x", -1, 1e308, 2**70, []),
    "index": (None, "x", 99, -1),
}
FILES: dict[str, str | bytes] = {
    "empty": "",
    "blank": "\n\n",
    "HTML": "<html></html>\n",
    "git-lfs pointer": "version https://git-lfs.github.com/spec/v1\n",
    "binary": bytes(range(256)) * 4,
    "zeros": b"\0" * 4096,
    "list": "[]\n",
    "number": "7\n",
    "deep": '{"schema":' + "[" * 3000 + "]" * 3000 + "}\n",
    "utf-16": '{"schema": 1}\n'.encode("utf-16"),
}


def trace(place: Place, change: Callable[[list[dict[str, Any]]], Any]) -> str:
    lines = [json.loads(line) for line in (place.shared / "traces" / "gnmr.jsonl").read_text().splitlines()]
    lines += [{**lines[1 + step % 12], "step": step + 1} for step in range(12, 120)]  # as many as calibrate needs
    change(lines)
    return place.file("trace.jsonl", "".join(json.dumps(line) + "\n" for line in lines))


def command(name: str, path: str) -> int:
    from hf_gnmr.cli import main

    return main(COMMANDS[name](path))


def changed(part: str, key: str, value: Any) -> Callable[[list[dict[str, Any]]], Any]:
    def change(lines: list[dict[str, Any]]) -> None:
        if part == "header":
            lines[0][key] = value
        elif part == "unit":
            lines[0]["units"][1][key] = value
        else:
            lines[1][key] = value

    return change


def cases() -> Iterator[Case]:
    generator = random.Random(18)
    order = list(COMMANDS)
    turn = 0
    for part, table, drawn in (("header", HEADER, 2), ("unit", UNIT, 2), ("line", LINE, 2)):
        for key, values in table.items():
            for number in sorted(generator.sample(range(len(values)), min(drawn, len(values)))):
                name = order[turn % len(order)]
                turn += 1
                value = values[number]
                change = changed(part, key, value)
                yield Case(
                    f"trace/{name}/{part}.{key}/{number}",
                    lambda place, name=name, change=change: command(name, trace(place, change)),
                    ("trace.jsonl",),
                    f"{part} {key}: {value!r:.80}",
                    slow=name == "report",
                )
    for file, content in FILES.items():
        name = order[turn % len(order)]
        turn += 1
        yield Case(
            f"trace/{name}/file {file}",
            lambda place, name=name, content=content: command(name, place.file("trace.jsonl", content)),
            ("trace.jsonl",),
            file,
        )
