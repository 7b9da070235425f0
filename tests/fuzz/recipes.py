"""Bad recipes and overrides: keys, values and types drawn from a seed, and shapes written out."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import yaml
from fuzz.harness import Case, Place

SEED = 16
LONG = "x" * 5000


def base_recipe(place: Place) -> dict[str, Any]:
    """One step of LoRA on the tiny model."""
    return {
        "model": {"name": str(place.shared / "model")},
        "lora": {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]},
        "data": {
            "name": str(place.shared / "rows.jsonl"), "prompt": "Q: {question}\nA:", "answer": " {answer}", "max_length": 64,
        },
        "training": {
            "output_dir": str(place.folder / "out"), "max_steps": 1, "per_device_train_batch_size": 2, "report_to": "none",
            "learning_rate": 1e-3, "save_strategy": "no", "use_cpu": True, "disable_tqdm": True, "logging_steps": 1,
        },
        "gnmr": {"max_o": 1, "alpha": 0.9, "alpha_init_fraction": 0.0},
        "backend": {"name": "none"},
    }  # fmt: skip


def dumped(recipe: Any) -> str:
    return yaml.safe_dump(recipe, allow_unicode=True, sort_keys=False)


def changed(place: Place, section: str, **values: Any) -> dict[str, Any]:
    recipe = copy.deepcopy(base_recipe(place))
    recipe.setdefault(section, {})
    recipe[section] |= values
    return recipe


def train(place: Place, recipe: Any, *overrides: str) -> int:
    from hf_gnmr.train import main

    return main([place.file("r.yaml", recipe if isinstance(recipe, (str, bytes)) else dumped(recipe)), *overrides])


def plan(place: Place, recipe: Any, *overrides: str) -> int:
    from hf_gnmr.run.plan import main

    return main([place.file("r.yaml", recipe if isinstance(recipe, (str, bytes)) else dumped(recipe)), *overrides])


# Values that a key of each type cannot take.
NOT_A_NUMBER = (
    "many",
    [],
    {"a": 1},
    float("nan"),
    float("inf"),
    float("-inf"),
    -(2**70),
    -1e300,
    "1e",
    "0x",
    LONG,
    "\0",
    [1, 2],
)
NOT_WHOLE = (*NOT_A_NUMBER, 0.5, 1e308, "2.5", 2**70, 10**30)
NOT_TEXT = ([], {"a": 1}, [[]], {"": None}, 5, 2.5, True)
NOT_A_FLAG = ("maybe", [], {"a": 1}, 7, 2.5, LONG, "")
NOT_A_NAME = ("nothing-of-this-name", LONG, "", "\0", "GNMR\n", "no/such", [], {"a": 1}, 7, "☃")
NO_PATH = ("/no/such/folder", "./missing", "\0", "/" + "a/" * 2500, "/dev/null/x", "~nobody-here/x", "./" + "n" * 5000)

PLANNED: dict[str, tuple[Any, ...]] = {
    "model.name": (*NOT_TEXT, *NO_PATH, "", None),
    "model.revision": NOT_TEXT,
    "model.trust_remote_code": NOT_A_FLAG,
    "model.llm_int8_threshold": NOT_A_NUMBER,
    "model.architecture": ("llama", [], 7, [1], LONG),
    "model.dtype": ("float64", "int4", [], 7, "", LONG),
    "model.builtin_size": NOT_A_NAME,
    "lora.r": NOT_WHOLE,
    "lora.lora_alpha": NOT_WHOLE,
    "lora.lora_dropout": (*NOT_A_NUMBER, 1.5),
    "lora.target_modules": ("[", "(", "nothing", [], ["nothing"], {"a": 1}, 7, [7], "", "(" * 300, LONG, None, [""]),
    "lora.layers_to_transform": ("0", [-1], [99], ["a"], [0.5], {"a": 1}, [[0]], [2**70]),
    "lora.use_rslora": NOT_A_FLAG,
    "gnmr.alpha": (*NOT_A_NUMBER, 0, -1),
    "gnmr.alpha_init": (*NOT_A_NUMBER, 0),
    "gnmr.alpha_init_fraction": (*NOT_A_NUMBER, 1.5, -0.1),
    "gnmr.beta": (*NOT_A_NUMBER, 0),
    "gnmr.delta": (*NOT_WHOLE, 0),
    "gnmr.max_o": (*NOT_A_NUMBER, -1, 1.5, 99, 2**70),
    "gnmr.t_lock": NOT_WHOLE,
    "gnmr.fidelity_warmup": (*NOT_A_NUMBER, 2),
    "backend.name": NOT_A_NAME,
    "backend.max_recovery_memory": ("much", "-1GB", "5XB", [], {"a": 1}, 0, -1, 2**70, "1e400GB", LONG),
    "trigger.name": NOT_A_NAME,
}
TRAINED: dict[str, tuple[Any, ...]] = {
    "training.optim": NOT_A_NAME,
    "training.lr_scheduler_type": NOT_A_NAME,
    "training.lr_scheduler_kwargs": ("x", [], 7, {"no_such": 1}),
    "training.optim_args": ("x", [], {"a": 1}, 7),
    "training.report_to": (
        ["wandb"],
        "wandb",
        "no_such_logger",
        ["tensorboard", "no_such"],
        7,
        {"a": 1},
        ["mlflow"],
        "comet_ml",
    ),
    "training.save_strategy": NOT_A_NAME,
    "training.eval_strategy": (*NOT_A_NAME, "steps"),
    "training.logging_strategy": NOT_A_NAME,
    "training.save_steps": ("many", [], -1, float("nan"), 0),
    "training.seed": (*NOT_WHOLE, -1, 2**32),
    "training.data_seed": (*NOT_WHOLE, 2**32),
    "training.max_steps": (*NOT_WHOLE, 0, -2),
    "training.num_train_epochs": (*NOT_A_NUMBER, -1),
    "training.per_device_train_batch_size": (*NOT_WHOLE, 0, -1),
    "training.gradient_accumulation_steps": (*NOT_WHOLE, 0, 99),
    "training.learning_rate": (*NOT_A_NUMBER, -1),
    "training.warmup_steps": ("many", [], -1, float("nan")),
    "training.dataloader_num_workers": ("many", [], 10**9, float("nan")),
    "training.accelerator_config": ("x", [], 7, {"no_such": 1}),
    "training.fsdp": ("no_such", [], 7, {"a": 1}),
    "training.fsdp_config": ("/no/such.json", [], 7),
    "training.deepspeed": ("/no/such.json", 7, {"a": 1}),
    "training.gradient_checkpointing_kwargs": ("x", [], 7),
    "training.torch_compile_backend": ("no_such", 7, []),
    "training.bf16": NOT_A_FLAG,
    "training.output_dir": (None, [], {"a": 1}, 7, "", "\0", "/dev/null/x", "/proc/x", "n" * 5000),
    "training.log_level": NOT_A_NAME,
    "training.resume_from_checkpoint": ("x", "/no/such"),
    "training.label_names": ("x", 7, {"a": 1}),
    "training.metric_for_best_model": ("loss", [], 7),
    "training.hub_strategy": NOT_A_NAME,
    "training.liger_kernel_config": ("x", [], 7),
    "training.use_liger_kernel": (True,),
    "training.load_best_model_at_end": (True,),
    "training.push_to_hub": (True,),
    "training.neftune_noise_alpha": ("much", [], float("nan")),
    "training.train_sampling_strategy": NOT_A_NAME,
    "training.parallelism_config": ("x", 7, {"a": 1}),
    "training.ddp_backend": ("no_such", 7, []),
    "run.overwrite": NOT_A_FLAG,
    "run.resume": (7, [], {"a": 1}, "/no/such/checkpoint", LONG, "\0", True),
    "run.resume_history": NOT_A_NAME,
    "run.bf16_products": NOT_A_NAME,
    "data.max_length": (*NOT_WHOLE, 0, 2),
    "data.rows": (*NOT_WHOLE, 0, -1),
    "data.eval_rows": (*NOT_WHOLE, 40, 10**6),
    "data.generate_rows": (*NOT_WHOLE, 5),
    "data.split": (*NOT_TEXT, "no_such"),
    "data.eval_split": (*NOT_TEXT, "no_such"),
    "data.prompt": (*NOT_TEXT, "{missing}", "{", "{}", "{question.__class__}", "", "{question!x}", "{question:>999999999}"),
    "data.answer": (*NOT_TEXT, "{missing}", "}", "{0}", "{answer:d}", "missing column"),
    "data.streaming": (*NOT_A_FLAG, True),
    "data.documents": (5, "many"),
    "data.name": (*NOT_TEXT, *NO_PATH, "", "./x.csv", "./x.jsonl", "no/such-set"),
    "data.text": (*NOT_TEXT, "missing column"),
}
DRAWN = 2
"""Values a key."""

SHAPES: dict[str, tuple[str | bytes, tuple[str, ...]]] = {
    "empty": ("", ("r.yaml",)),
    "list": ("- 1\n- 2\n", ("r.yaml",)),
    "number": ("7\n", ("r.yaml",)),
    "text": ("hello\n", ("r.yaml",)),
    "unclosed": ("model: {name: x\n", ("r.yaml",)),
    "tab": ("model:\n\tname: x\n", ("r.yaml",)),
    "twice": ("model: {name: x}\nmodel: {name: y}\n", ("model",)),
    "binary": (bytes(range(256)), ("r.yaml",)),
    "latin-1": ("model: {name: caf\xe9}\n".encode("latin-1"), ("r.yaml",)),
    "utf-16": ("model: {name: x}\n".encode("utf-16"), ("r.yaml",)),
    "two documents": ("model: {name: x}\n---\nmodel: {name: y}\n", ("r.yaml",)),
    "deep": ("model: " + "[" * 2000 + "]" * 2000 + "\n", ("r.yaml",)),
    "bomb": (
        "a: &a [1,1]\n" + "".join(f"a{i}: &a{i} [*a{i - 1 if i else ''},*a{i - 1 if i else ''}]\n" for i in range(40)),
        ("r.yaml",),
    ),
    "unknown alias": ("model: *nothing\n", ("r.yaml",)),
    "python tag": ("model: !!python/object/apply:os.getcwd []\n", ("r.yaml",)),
    "no model": ("data: {name: builtin}\n", ("model",)),
    "no data": ("model: {name: builtin}\n", ("data",)),
    "model without a name": ("model: {revision: x}\ndata: {name: builtin}\n", ("model.name",)),
    "section as a list": ("model: [x]\ndata: {name: builtin}\n", ("model",)),
    "section as text": ("model: builtin\ndata: {name: builtin}\n", ("model",)),
    "unknown section": ("modle: {name: x}\ndata: {name: builtin}\n", ("modle",)),
    "number as a section": ("7: {name: x}\n", ("7",)),
    "unknown key": ("model: {nmae: x}\ndata: {name: builtin}\n", ("nmae",)),
    "long key": (f"model: {{{'k' * 1000}: x}}\ndata: {{name: builtin}}\n", ("kkk",)),
    "list as a key": ("model: {? [a] : x}\ndata: {name: builtin}\n", ("r.yaml", "model")),
    "extends nothing": ("extends: no-such-recipe\n", ("extends", "no-such-recipe")),
    "extends itself": ("extends: r.yaml\n", ("r.yaml",)),
    "extends a number": ("extends: 7\n", ("extends",)),
    "extends outside": ("extends: /etc/passwd\n", ("extends",)),
    "lora true": ("model: {name: builtin}\ndata: {name: builtin}\nlora: true\n", ("lora",)),
    "scratch without architecture": ("model: {name: scratch}\ndata: {name: builtin}\nlora: false\n", ("model",)),
    "null byte": ("model: {name: a\0b}\n", ("r.yaml",)),
}
OVERRIDES: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "no value": (["gnmr.alpha"], ("gnmr.alpha",)),
    "no key": (["=3"], ("=3",)),
    "no section": (["alpha=3"], ("alpha=3",)),
    "no field": (["gnmr.=3"], ("gnmr.",)),
    "empty": ([""], ("''",)),
    "dots": (["..=1"], ("..=1", "section")),
    "unknown section": (["gnrm.alpha=1"], ("gnrm",)),
    "unknown key": (["gnmr.alhpa=1"], ("alhpa",)),
    "deeper key": (["model.architecture.hidden_size=1"], ("architecture.hidden_size",)),
    "unclosed": (["lora.target_modules=["], ("lora.target_modules",)),
    "empty beta": (["gnmr.beta="], ("gnmr.beta",)),
    "empty alpha": (["gnmr.alpha="], ("gnmr.alpha",)),
    "empty max_steps": (["training.max_steps="], ("training.max_steps",)),
    "twice": (["gnmr.alpha=1", "gnmr.alpha=2"], ("gnmr.alpha",)),
    "twice the same": (["gnmr.alpha=1", "gnmr.alpha=1"], ("gnmr.alpha",)),
    "mapping for a number": (["gnmr.alpha={a: 1}"], ("gnmr.alpha",)),
    "deep value": (["lora.target_modules=" + "[" * 500], ("lora.target_modules",)),
    "null byte": (["model.name=a\0b"], ("model.name",)),
    "long": (["model.name=" + LONG], ("model.name",)),
    "lora of lora false": (["lora=false"], ("lora",)),
    "half a character": (["model.revision=\udce9"], ("model.revision",)),
    "two lines": (["model.name=a\nb: c"], ("model.name",)),
    "option of another backend": (["backend.name=fp8", "backend.recovery=host"], ("recovery", "lora", "fp8")),
    "trigger without its option": (["backend.name=int8", "trigger.name=random"], ("promotion_ratio", "trigger")),
    "list without units": (["backend.name=int8", "trigger.name=listed"], ("units", "trigger")),
    "trace that is missing": (["backend.name=int8", "trigger.name=random", "trigger.trace=/no/such"], ("trace", "/no/such")),
    "units that are not there": (["backend.name=int8", "trigger.name=listed", "trigger.units=[nothing]"], ("nothing",)),
    "layers that match nothing": (["backend.name=int8", "model.layers=nothing.*"], ("nothing.*",)),
    "hold without share": (["backend.name=int8", "trigger.name=static", "trigger.hold=-1"], ("hold", "trigger")),
    "budget with max_o": (["backend.name=int8", "backend.max_recovery_memory=1GB"], ("max_recovery_memory",)),
    "recovery_source that is missing": (["backend.name=int8", "backend.recovery_source=/no/such"], ("recovery_source",)),
    "bits": (["backend.name=lowbit", "backend.bits_low=7"], ("bits_low",)),
    "unit": (["backend.name=int8", "backend.unit=house"], ("unit",)),
    "streaming of rows": (["data.streaming=true"], ("streaming",)),
    "scratch": (["model.name=scratch"], ("scratch",)),
    "attention": (["model.attn_implementation=no_such"], ("attn_implementation",)),
    "T_lock": (["gnmr.t_lock=99999999999999"], ("t_lock",)),
}


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else f"{text[:40]}… ({len(text)})"


def cases() -> Iterator[Case]:
    generator = random.Random(SEED)
    for table, command in ((PLANNED, plan), (TRAINED, train)):
        for key, values in table.items():
            section, name = key.split(".")
            for number in sorted(generator.sample(range(len(values)), min(DRAWN, len(values)))):
                value = values[number]

                def run(
                    place: Place, section: str = section, name: str = name, value: Any = value, command: Any = command
                ) -> int:
                    return command(place, changed(place, section, **{name: value}))

                slow = section == "training"
                yield Case(f"recipe/{key}/{number}", run, (key, name), f"{key}: {short(value)}", slow=slow)
    for name, (text, names) in SHAPES.items():
        yield Case(f"recipe/shape/{name}", lambda place, text=text: plan(place, text), names, short(text))
    for name, (overrides, names) in OVERRIDES.items():
        yield Case(
            f"override/{name}",
            lambda place, overrides=overrides: train(place, base_recipe(place), *overrides),
            names,
            " ".join(map(short, overrides)),
        )
