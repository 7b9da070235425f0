"""Bad arguments of the public names."""

from __future__ import annotations

import copy
import dataclasses
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from fuzz.harness import Case, Place

CONFIG: dict[str, tuple[Any, ...]] = {
    "alpha": (None, "x", [], {}, 0, -1, float("nan"), float("inf"), True, 1j, b"1", object()),
    "alpha_init": (None, "x", [], 0, -1, float("nan"), True, 1j),
    "alpha_init_fraction": (None, "x", [], 2, -1, float("nan"), True),
    "beta": ("x", [], 0, -1, float("nan"), float("inf"), True, 1j),
    "delta": (None, "x", [], 0, -1, 1.5, float("inf"), True, 2**70),
    "max_o": (None, "x", [], -1, 1.0, 1.5, float("nan"), True, 2**70),
    "t_lock": (None, "x", [], -1, 0.5, True, 2**70),
    "fidelity_warmup": (None, "x", [], 2, -1, float("nan"), True),
}
CALLBACK: dict[str, tuple[Any, ...]] = {
    "config": (7, "x", [], object(), {"no_such": 1}, {7: 1}, {"alpha": "x"}, ()),
    "backend": (None, 7, [], "no_such", {}, object()),
    "trigger": (None, 7, [], "no_such", {}, object()),
    "trigger_options": (7, "x", [], {"no_such": 1}, {7: 7}, object()),
    "layers": (7, [], {}, object()),
    "max_recovery_memory": ("much", -1, 0, [], {}, 1.5, True, float("nan"), "1e400GB"),
    "trace_path": (7, [], {}, True, "\0", "/dev/null", "/no/such/\0/x", "n" * 5000, object()),
    "resume_history": (None, 7, [], "no_such", {}),
    "recovery": (7, [], "no_such", None),
    "recovery_source": (7, [], {}, "/no/such", "\0"),
    "pin_memory": ("x", 7, []),
    "eval_path": (7, [], "no_such", None),
    "unit": (7, [], "no_such", {}),
    "no_such_argument": (7,),
}
SESSION: dict[str, tuple[Any, ...]] = {
    "model": (None, 7, "x", [], object(), {}),
    "config": (7, "x", {"no_such": 1}),
    "options": (7, "x", {}, []),
    "total_steps": ("x", 0, -1, 1.5, [], True, 2**70),
    "gradient_accumulation_steps": ("x", 0, -1, None, 1.5, [], True, 2**70),
    "scaler": (7, "x", [], object()),
    "output_dir": (7, [], {}, "\0", "/dev/null", object()),
    "rows_per_micro_batch": ("x", 0, -1, 1.5, [], 2**70),
    "resume_history": (None, 7, "no_such", []),
    "layers": (7, "nothing.*", [], "[", "("),
    "max_o": (99, -1),
}
OTHER: dict[str, Callable[[Place], Any]] = {}


def other(name: str) -> Callable[[Callable[[Place], Any]], Callable[[Place], Any]]:
    def keep(function: Callable[[Place], Any]) -> Callable[[Place], Any]:
        OTHER[name] = function
        return function

    return keep


def model() -> Any:
    """The tiny model with adapters, for `backend="none"`."""
    from conftest import random_llama, with_lora

    return with_lora(random_llama(num_hidden_layers=2))


def session(**arguments: Any) -> Any:
    from hf_gnmr import GNMRSession

    base = {"model": None, "total_steps": 10, "backend": "none", "max_o": 1}
    values = {**base, **arguments}
    values["model"] = model() if "model" not in arguments else arguments["model"]
    if "options" in values:
        del values["backend"]
    if "config" in values:
        del values["max_o"]
    return GNMRSession(values.pop("model"), **values)


def callback(**arguments: Any) -> Any:
    from hf_gnmr import GNMRCallback

    return GNMRCallback(**arguments)


def controller(**changes: Any) -> Any:
    from hf_gnmr import Controller, GNMRConfig

    arguments: dict[str, Any] = {"num_units": 3, "config": GNMRConfig(max_o=1), "total_steps": 10, **changes}
    return Controller(arguments.pop("num_units"), arguments.pop("config"), **arguments)


CONTROLLER: dict[str, tuple[Any, ...]] = {
    "num_units": (None, 0, -1, "x", 1.5, [], True),
    "config": (7, "x", [], {}, {"alpha": 1}),
    "total_steps": ("x", -1, 0, 1.5, []),
    "recoverable": (7, "x", [True], [[True] * 3], {}, object()),
    "options": (7, "x", [], {"no_such": 1}, {7: 7}),
    "names": (7, None, [1]),
}
STEP: dict[str, tuple[Any, ...]] = {
    "norms": (None, "x", [], [1], [[1, 2, 3]], [-1, 1, 1], ["a", "b", "c"], {}, 7, object(), [None] * 3, [1j] * 3),
    "seen": ("x", [], [True], 7, {}, object()),
    "signal": ("x", [1], {}, object()),
    "scores": (7, "x", [], ([1], [1])),
    "first_not_finite": (99, -9, "x", [], 1.5),
}
STATE: dict[str, tuple[Any, ...]] = {
    "version": (None, 99, "1", []),
    "trigger": (None, "no_such", 7),
    "num_units": (None, 2, -1, "3"),
    "config": (None, [], 7, {"alpha": 7}),
    "alpha_init_steps": (None, -1, "x", [], 1.5, 2**70),
    "fidelity_warmup_steps": (None, -1, "x", [], 2**70),
    "recoverable": (None, [], [True], "x"),
    "steps_done": (None, -1, "x", [], 1.5, 2**70, float("nan")),
    "norm_sum": (None, [], [1], "x", [-1.0] * 3, ["x"] * 3, 7, {}),
    "norm_count": (None, [], [1], "x", [-1] * 3, ["x"] * 3, [2**70] * 3, [0.5] * 3),
    "window": (None, [], [[]], "x", [[1.0]], [[-1.0] * 3] * 5, 7),
    "gnmr_count": (None, [], [1], "x", [-1] * 3, [2**70] * 3),
    "lock": (None, [], [1], "x", [-1] * 3, [2**70] * 3, 7),
    "active": (None, [], [True], "x", [[True] * 3], 7),
    "options": ([], 7, {"no_such": 1}),
}
SESSION_STATE: dict[str, tuple[Any, ...]] = {
    "steps_done": (None, -1, "x", [], 1.5, 2**70),
    "controller": ([], 7, "x", {}),
    "setup": ([], 7, "x", {"layers": 7}, {"layers": [0]}),
    "run_id": ([], 7, {}),
}


def loaded(key: str, value: Any, missing: bool = False) -> Callable[[Place], Any]:
    def run(place: Place) -> Any:
        state = controller(num_units=3).state_dict()
        if missing:
            del state[key]
        else:
            state[key] = value
        target = controller(num_units=3)
        target.load_state_dict(state)
        target.step([1.0, 2.0, 3.0])
        return target.steps_done

    return run


def session_loaded(key: str, value: Any, missing: bool = False) -> Callable[[Place], Any]:
    def run(place: Place) -> Any:
        target = session()
        state = copy.deepcopy(target.state_dict())
        if missing:
            del state[key]
        else:
            state[key] = value
        target.load_state_dict(state)
        return target.steps_done

    return run


@other("load_state_dict/none")
def _(place: Place) -> Any:
    return controller().load_state_dict(None)


@other("load_state_dict/list")
def _(place: Place) -> Any:
    return controller().load_state_dict([])


@other("session.load_state_dict/none")
def _(place: Place) -> Any:
    return session().load_state_dict(None)


@other("session.load_state_dict/list")
def _(place: Place) -> Any:
    return session().load_state_dict([1])


@other("session.observe/text")
def _(place: Place) -> Any:
    return session().observe("x")


@other("session.decide/first")
def _(place: Place) -> Any:
    return session().decide()


@other("session.note_loss/number")
def _(place: Place) -> Any:
    return session().note_loss(7)


@other("session.note_loss/none")
def _(place: Place) -> Any:
    return session().note_loss(None)


def quantised(place: Place, **options: Any) -> Any:
    from conftest import random_llama
    from torch import bfloat16

    from hf_gnmr import quantize_int8

    return type(quantize_int8(random_llama(bfloat16, num_hidden_layers=1), **options)).__name__


for number, value in enumerate(("x", None, [], -1, float("nan"), float("inf"), {}, True, 1j)):
    OTHER[f"quantize_int8.threshold/{number}"] = lambda place, value=value: quantised(place, threshold=value)


def called(name: str, *arguments: Any) -> Callable[[Place], Any]:
    def run(place: Place) -> Any:
        import hf_gnmr

        return getattr(hf_gnmr, name)(*arguments)

    return run


@other("quantize_int8.model/fp32")
def _(place: Place) -> Any:
    from conftest import random_llama

    from hf_gnmr import quantize_int8

    return quantize_int8(random_llama(num_hidden_layers=1))


@other("quantize_int8.model/meta")
def _(place: Place) -> Any:
    import torch
    from conftest import random_llama

    from hf_gnmr import quantize_int8

    return quantize_int8(random_llama(torch.bfloat16, num_hidden_layers=1).to("meta"))


@other("quantize_int8.model/twice")
def _(place: Place) -> Any:
    import torch
    from conftest import random_llama

    from hf_gnmr import quantize_int8

    return quantize_int8(quantize_int8(random_llama(torch.bfloat16, num_hidden_layers=1)))


@other("quantize_int8.model/plain module")
def _(place: Place) -> Any:
    import torch

    from hf_gnmr import quantize_int8

    return quantize_int8(torch.nn.Sequential(torch.nn.Linear(4, 4, dtype=torch.bfloat16)))


for number, value in enumerate((None, 7, "x", [], {}, object)):
    OTHER[f"quantize_int8.model/{number}"] = called("quantize_int8", value)
    OTHER[f"restore_plain.model/{number}"] = called("restore_plain", value)
for number, value in enumerate((None, 7, [], "\0", "/no/such", {}, "n" * 5000, "")):
    OTHER[f"read_trace.path/{number}"] = called("read_trace", value)
    OTHER[f"last_checkpoint.folder/{number}"] = called("last_checkpoint", value)
for number, arguments in enumerate(((1,), ("x",) * 9)):
    OTHER[f"Decision/{number}"] = called("Decision", *arguments)
NAMES: dict[str, tuple[str, ...]] = {
    "load_state_dict": ("state",),
    "session.load_state_dict": ("state",),
    "session.observe": ("micro_batches", "no gradient was seen"),
    "session.decide": ("observe()",),
    "session.note_loss": ("loss",),
    "quantize_int8.threshold": ("threshold",),
    "quantize_int8.model": ("model", "quantize_int8", "torch.float32", "Linear", "meta"),
    "restore_plain.model": ("model",),
    "read_trace.path": ("path", "/no/such", "nnn", "cannot be read", "expected"),
    "last_checkpoint.folder": ("folder", "path", "/no/such", "nnn", "output_dir"),
    "Decision": ("argument",),
}


def quietly(run: Callable[[Place], Any]) -> Callable[[Place], Any]:
    def quiet(place: Place) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return run(place)

    return quiet


def config_of(**values: Any) -> Any:
    from hf_gnmr import GNMRConfig

    return dataclasses.asdict(GNMRConfig(**values))


def step_of(**values: Any) -> Any:
    arguments = {"norms": [1.0, 2.0, 3.0], **values}
    return controller().step(**arguments)


def cases() -> Iterator[Case]:
    generator = random.Random(20)
    tables: tuple[tuple[str, dict[str, tuple[Any, ...]], Callable[..., Any], int], ...] = (
        ("GNMRConfig", CONFIG, config_of, 2),
        ("GNMRCallback", CALLBACK, callback, 2),
        ("GNMRSession", SESSION, session, 2),
        ("Controller", CONTROLLER, controller, 2),
        ("Controller.step", STEP, step_of, 3),
    )
    for owner, table, make, drawn in tables:
        for key, values in table.items():
            for number in sorted(generator.sample(range(len(values)), min(drawn, len(values)))):
                value = values[number]
                yield Case(
                    f"api/{owner}.{key}/{number}",
                    quietly(lambda place, make=make, key=key, value=value: make(**{key: value})),
                    (key, "has no option"),
                    f"{owner}({key}={value!r:.60})",
                    api=True,
                )
    for owner, states, make_case in (("Controller", STATE, loaded), ("GNMRSession", SESSION_STATE, session_loaded)):
        for key, values in states.items():
            for number in sorted(generator.sample(range(len(values)), min(2, len(values)))):
                yield Case(
                    f"api/{owner}.load_state_dict.{key}/{number}",
                    quietly(make_case(key, values[number])),
                    (key, "layers"),
                    f"{owner}.load_state_dict({key}={values[number]!r:.60})",
                    api=True,
                )
            if key != "options":
                yield Case(
                    f"api/{owner}.load_state_dict.{key}/missing",
                    quietly(make_case(key, None, True)),
                    (key,),
                    f"no {key}",
                    api=True,
                )
    for name, run in OTHER.items():
        yield Case(f"api/{name}", quietly(run), NAMES[name.split("/")[0]], name, api=True)
