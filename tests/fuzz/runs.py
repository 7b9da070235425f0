"""Bad run folders: results given to compare, checkpoints to be resumed, runs to be evaluated."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fuzz.harness import Case, Place
from fuzz.models import HTML, POINTER
from fuzz.recipes import base_recipe, train

RESULT: dict[str, tuple[Any, ...]] = {
    "precision": (None, 7, [], "no_such", {}),
    "task": (None, 7, [], {}, "n" * 5000),
    "key": (None, 7, [], "x", {}),
    "in_bf16": (None, "x", []),
    "smoke": (None, "x", []),
    "model": (None, 7, [], {}),
    "adapter_effect": ("x", [], {}),
    "machine": (None, 7, [], {}, {"packages": 7}, {"packages": []}),
    "lm_eval": (7, [], {}),
    "metrics": (None, 7, [], {}, {"acc": "x"}, {"acc": None}, {"acc": []}, {"other": 1.0}),
    "n": (None, "x", [], -1, 1e308),
    "shots": (None, 7, "x", {}, [None]),
    "per_item": (
        None,
        7,
        [],
        {},
        {"acc": None},
        {"acc": []},
        {"acc": {"a": "x"}},
        {"acc": {"a": None}},
        {"acc": {"a": 1e308, "b": -1e308}},
    ),
    "per_item_weight": (None, 7, [], {"a": "x"}, "x"),
    "item_hash": (None, 7, [], "x"),
    "batch_size": ("x", [], {}),
    "truncated": ("x", [], {}, -1),
    "key.files": (None, 7, [], "x", {"a": 7}),
    "key.limit": ("x", [], {}),
    "key.dtype": (None, 7, []),
    "key.base_files": (7, "x"),
    "key.block": ("x", [], {}),
}
TASKS = ("hellaswag", "wikitext_tokens")
RESULT_FILES: dict[str, bytes] = {
    "empty": b"",
    "HTML": HTML,
    "pointer": POINTER,
    "list": b"[]",
    "truncated": b'{"task": "hella',
    "zeros": b"\0" * 99,
    "deep": b'{"a":' + b"[" * 4000 + b"]" * 4000 + b"}",
    "NaN": b'{"per_item": NaN, "task": "hellaswag", "key": {}}',
}


def compared(task: str, change: Callable[[Path], None]) -> Callable[[Place], int]:
    def run(place: Place) -> int:
        from hf_gnmr.cli import main

        folder = place.copy("results")
        (folder / "compare.json").unlink()
        (folder / "compare.csv").unlink()
        other = place.copy("results", "reference")
        (other / "compare.json").unlink()
        (other / "compare.csv").unlink()
        change(folder / "recovery" / f"{task}.json")
        return main(["compare", str(other), str(folder), "--output", "table"])

    return run


def setting(key: str, value: Any) -> Callable[[Path], None]:
    def change(file: Path) -> None:
        result = json.loads(file.read_text())
        part, _, name = key.rpartition(".")
        (result[part] if part else result)[name] = value
        file.write_text(json.dumps(result))

    return change


def without(key: str) -> Callable[[Path], None]:
    def change(file: Path) -> None:
        result = json.loads(file.read_text())
        part, _, name = key.rpartition(".")
        del (result[part] if part else result)[name]
        file.write_text(json.dumps(result))

    return change


# -- resumed -------------------------------------------------------------------------------------------------------------


def edited(change: Callable[[dict[str, Any]], Any]) -> Callable[[bytes], bytes]:
    def edit(old: bytes) -> bytes:
        values = json.loads(old)
        change(values)
        return json.dumps(values).encode()

    return edit


def attributes(state: dict[str, Any]) -> dict[str, Any]:
    stored = state["stateful_callbacks"]["GNMRCallback"]
    return (stored[-1] if isinstance(stored, list) else stored)["attributes"]


CHECKPOINT: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "state empty": ("trainer_state.json", lambda old: b""),
    "state HTML": ("trainer_state.json", lambda old: HTML),
    "state a list": ("trainer_state.json", lambda old: b"[]"),
    "state truncated": ("trainer_state.json", lambda old: old[: len(old) // 2]),
    "state without steps": ("trainer_state.json", edited(lambda s: s.pop("global_step"))),
    "state steps text": ("trainer_state.json", edited(lambda s: s.update(global_step="x"))),
    "state steps negative": ("trainer_state.json", edited(lambda s: s.update(global_step=-1))),
    "state steps null": ("trainer_state.json", edited(lambda s: s.update(global_step=None))),
    "state unknown field": ("trainer_state.json", edited(lambda s: s.update(no_such=1))),
    "callbacks null": ("trainer_state.json", edited(lambda s: s.update(stateful_callbacks=None))),
    "callbacks a list": ("trainer_state.json", edited(lambda s: s.update(stateful_callbacks=[]))),
    "attributes a list": (
        "trainer_state.json",
        edited(lambda s: s["stateful_callbacks"].update(GNMRCallback={"attributes": []})),
    ),
    "controller a list": ("trainer_state.json", edited(lambda s: attributes(s).update(_state=[]))),
    "controller empty": ("trainer_state.json", edited(lambda s: attributes(s).update(_state={}))),
    "controller without norms": ("trainer_state.json", edited(lambda s: attributes(s)["_state"].pop("norm_sum"))),
    "controller short": ("trainer_state.json", edited(lambda s: attributes(s)["_state"].update(norm_count=[1]))),
    "controller negative": ("trainer_state.json", edited(lambda s: attributes(s)["_state"].update(steps_done=-5))),
    "controller text": ("trainer_state.json", edited(lambda s: attributes(s)["_state"].update(norm_sum=["x", "x"]))),
    "controller window": ("trainer_state.json", edited(lambda s: attributes(s)["_state"].update(window=[]))),
    "setup a list": ("trainer_state.json", edited(lambda s: attributes(s).update(_setup=[]))),
    "run_id a list": ("trainer_state.json", edited(lambda s: attributes(s).update(_run_id=[]))),
    "adapter empty": ("adapter_model.safetensors", lambda old: b""),
    "adapter HTML": ("adapter_model.safetensors", lambda old: HTML),
    "adapter truncated": ("adapter_model.safetensors", lambda old: old[:-100]),
    "adapter config empty": ("adapter_config.json", lambda old: b""),
    "adapter config a list": ("adapter_config.json", lambda old: b"[]"),
    "optimizer empty": ("optimizer.pt", lambda old: b""),
    "optimizer HTML": ("optimizer.pt", lambda old: HTML),
    "optimizer truncated": ("optimizer.pt", lambda old: old[: len(old) // 2]),
    "scheduler pointer": ("scheduler.pt", lambda old: POINTER),
    "rng zeros": ("rng_state.pth", lambda old: b"\0" * 100),
}


def resumed(file: str, change: Callable[[bytes], bytes]) -> Callable[[Place], int]:
    def run(place: Place) -> int:
        folder = place.copy("run", "out")
        path = folder / "checkpoint-1" / file
        path.write_bytes(change(path.read_bytes()))
        recipe = base_recipe(place)
        recipe["training"] |= {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
        recipe["run"] = {"resume": str(folder / "checkpoint-1")}
        return train(place, recipe)

    return run


# -- evaluated -----------------------------------------------------------------------------------------------------------

EVALUATED: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "recipe empty": ("recipe.yaml", lambda old: b""),
    "recipe HTML": ("recipe.yaml", lambda old: HTML),
    "recipe of another model": ("recipe.yaml", lambda old: old.replace(b"name: ", b"name: /no/such", 1)),
    "adapter empty": ("adapter_model.safetensors", lambda old: b""),
    "adapter HTML": ("adapter_model.safetensors", lambda old: HTML),
    "adapter truncated": ("adapter_model.safetensors", lambda old: old[:-100]),
    "adapter pointer": ("adapter_model.safetensors", lambda old: POINTER),
    "config empty": ("adapter_config.json", lambda old: b""),
    "config a list": ("adapter_config.json", lambda old: b"[]"),
    "config without type": ("adapter_config.json", edited(lambda c: c.pop("peft_type"))),
    "config unknown type": ("adapter_config.json", edited(lambda c: c.update(peft_type="NO_SUCH"))),
    "config rank text": ("adapter_config.json", edited(lambda c: c.update(r="x"))),
    "config rank negative": ("adapter_config.json", edited(lambda c: c.update(r=-1))),
    "config no targets": ("adapter_config.json", edited(lambda c: c.update(target_modules=None))),
    "config other targets": ("adapter_config.json", edited(lambda c: c.update(target_modules=["nothing"]))),
}


def evaluated(file: str, change: Callable[[bytes], bytes]) -> Callable[[Place], int]:
    def run(place: Place) -> int:
        from hf_gnmr.cli import main

        folder = place.copy("run", "evaluated")
        path = folder / file
        path.write_bytes(change(path.read_bytes()))
        return main(["eval", str(folder), "--data", "builtin", "--tasks", "wikitext_tokens", "--offline", "--limit", "1"])

    return run


def cases() -> Iterator[Case]:
    generator = random.Random(19)
    for turn, (key, values) in enumerate(RESULT.items()):
        name = key.rpartition(".")[2]
        for number in sorted(generator.sample(range(len(values)), min(2, len(values)))):
            task = TASKS[(turn + number) % 2]
            yield Case(
                f"result/{key}/{number}",
                compared(task, setting(key, values[number])),
                (name, f"{task}.json"),
                f"{task}.json {key}: {values[number]!r:.80}",
            )
        if key not in ("truncated", "key.base_files", "key.block", "batch_size"):
            change = compared(TASKS[turn % 2], without(key))
            yield Case(f"result/{key}/missing", change, (name, f"{TASKS[turn % 2]}.json"), f"no {key}")
    for name, content in RESULT_FILES.items():
        yield Case(
            f"result/file {name}",
            compared("hellaswag", lambda file, content=content: file.write_bytes(content)),  # type: ignore[misc]
            ("hellaswag.json",),
            name,
        )
    for name, (file, change) in CHECKPOINT.items():
        yield Case(
            f"checkpoint/{name}",
            resumed(file, change),
            (file, "checkpoint-1", "controller state", "setup"),
            f"{file}: {name}",
            slow=True,
        )
    for name, (file, change) in EVALUATED.items():
        yield Case(
            f"evaluated/{name}", evaluated(file, change), (file, "evaluated", "model.name"), f"{file}: {name}", slow=True
        )
