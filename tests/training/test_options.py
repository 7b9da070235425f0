"""Options are declared once, by each backend and trigger; everything else is derived from that declaration."""

from __future__ import annotations

import dataclasses
import inspect
import json

import pytest
import yaml

from hf_gnmr import ConfigError, GNMRCallback, GNMRConfig
from hf_gnmr.backends import BACKENDS, option_names
from hf_gnmr.config import field_docs
from hf_gnmr.control.triggers import TRIGGERS
from hf_gnmr.run.recipe import load_recipe
from hf_gnmr.run.sections import RecipeError
from hf_gnmr.training.options import Options

REQUIRED = {"random": {"promotion_ratio": 0.1}, "listed": {"units": ["*"]}}
"""Options that a trigger requires."""
DECLARED = [*((cls.name, cls.Options) for cls in BACKENDS.values()), *((cls.name, cls.Options) for cls in TRIGGERS.values())]


@pytest.mark.parametrize(("name", "declared"), DECLARED, ids=[f"{cls.__name__}-{name}" for name, cls in DECLARED])
def test_every_option_has_a_default_and_a_docstring(name, declared):
    docs = field_docs(declared)
    for field in dataclasses.fields(declared):
        assert field.default is not dataclasses.MISSING, field.name
        assert docs.get(field.name), f"{declared.__name__}.{field.name} has no docstring"


@pytest.mark.parametrize("backend", list(BACKENDS))
def test_callback_session_and_recipe_take_what_the_backend_declares(backend, tmp_path):
    declared = BACKENDS[backend].Options.defaults()
    callback = GNMRCallback(backend=backend, **declared)
    assert callback.options == Options(backend=backend, **declared) == Options(backend=backend)
    file = tmp_path / "r.yaml"
    section = {"name": backend, **declared}
    file.write_text(yaml.safe_dump({"model": {"name": "m"}, "data": {"name": "d"}, "backend": section}))
    recipe = load_recipe(file)
    assert recipe.backend.options == BACKENDS[backend].Options()
    assert set(recipe.to_dict()["backend"]) == {"name", "max_recovery_memory", *declared}
    again = tmp_path / "again.yaml"
    again.write_text(recipe.to_yaml())
    assert load_recipe(again) == recipe


@pytest.mark.parametrize("trigger", list(TRIGGERS))
def test_a_recipe_takes_what_the_trigger_declares(trigger, tmp_path):
    file = tmp_path / "r.yaml"
    section = {"name": trigger, **REQUIRED.get(trigger, {})}
    file.write_text(yaml.safe_dump({"model": {"name": "m"}, "data": {"name": "d"}, "trigger": section}))
    recipe = load_recipe(file)
    assert recipe.trigger.options == TRIGGERS[trigger].Options(**REQUIRED.get(trigger, {}))
    again = tmp_path / "again.yaml"
    again.write_text(recipe.to_yaml())
    assert load_recipe(again) == recipe


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"recovry": "host"}, "GNMRCallback has no argument 'recovry': did you mean 'recovery'"),
        ({"bits_lo": 4}, "did you mean 'bits_low'"),
        ({"alfa": 1.1}, "did you mean 'alpha'"),
        ({"zzz": 1}, "known: alpha"),
        ({"recovery": "disk"}, r"recovery='disk': expected one of 'host', 'device', 'dequantize'"),
        ({"recovery": None}, "recovery=None: expected one of"),
        ({"pin_memory": "yes"}, "pin_memory='yes': expected true or false"),
        ({"recovery": "dequantize", "pin_memory": True}, "true with recovery='host' only"),
        ({"recovery": "dequantize", "recovery_source": "x"}, "is not read with recovery='dequantize'"),
        ({"recovery_source": 3}, "recovery_source=3: expected a folder"),
        ({"eval_path": "lowest"}, "eval_path='lowest': expected one of"),
        ({"bits_low": 6}, r"bits_low=6 belongs to backend='activation' or 'lowbit'; this is backend='int8'"),
        ({"emulate": True}, "emulate=True belongs to backend='fp8'"),
        ({"backend": "fp8", "emulate": 1}, "emulate=1: expected one of False, True, 'auto'"),
        ({"backend": "fp8", "unit": "projection"}, "unit='projection': expected one of 'layer', 'experts', 'expert'"),
        ({"backend": "activation", "unit": "expert"}, "unit='expert': expected one of 'projection', 'layer'"),
        ({"backend": "activation", "bits_low": 5}, "bits_low=5: expected 4, 6"),
        ({"backend": "activation", "bits_low": 9, "format": "int"}, "bits_low=9: expected 2, 3"),
        ({"backend": "activation", "bits_low": 8}, "bits_recovery=8: expected more than bits_low=8"),
        ({"backend": "lowbit", "bits_low": 8}, "bits_low=8: expected 4 or 6 with backend='lowbit'"),
        ({"backend": "int4"}, "backend='int4': expected one of"),
        ({"trigger": "mean"}, "trigger='mean': expected one of"),
        ({"backend": "none", "trigger": "all"}, "nothing is switched"),
        ({"backend": "lowbit", "unit": "expert", "trigger": "gsnr"}, "use unit='experts'"),
        ({"max_recovery_memory": "6GB", "recovery": "dequantize"}, "lifted units add nothing"),
        ({"max_recovery_memory": "6GB", "trigger": "all"}, "takes no budget in bytes"),
        ({"max_recovery_memory": "6GB", "backend": "activation"}, "depends on the tokens"),
        ({"max_recovery_memory": "six"}, "max_recovery_memory='six': expected a number of bytes"),
        ({"layers": 3}, "layers=3: expected a pattern"),
        ({"trigger_options": ["units"]}, "expected a dict"),
    ],
)
def test_a_wrong_option_is_refused_by_name(settings, message):
    with pytest.raises(ConfigError, match=message):
        GNMRCallback(**settings)


@pytest.mark.parametrize("backend", list(BACKENDS))
def test_what_version_0_1_0_stored_is_still_accepted(backend, tmp_path):
    """It stored the options of all backends, at their defaults for the other backends, and all trigger options as null."""
    everything = {
        "recovery": "host",
        "recovery_source": None,
        "pin_memory": False,
        "eval_path": "low",
        "unit": None,
        "bits_low": 4,
        "bits_recovery": 8,
        "format": "float",
        "emulate": False,
        "max_recovery_memory": None,
    }
    assert GNMRCallback(backend=backend, **everything).options == Options(backend=backend)
    file = tmp_path / "r.yaml"
    triggers = dict.fromkeys(("promotion_ratio", "trace", "units", "seed", "hold", "warmup", "share"))
    file.write_text(
        yaml.safe_dump(
            {
                "model": {"name": "m"},
                "data": {"name": "d"},
                "backend": {"name": backend, **everything},
                "trigger": {"name": "gnmr", **triggers},
            }
        )
    )
    assert load_recipe(file).backend.options == BACKENDS[backend].Options()


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        ("backend", {"recovry": "host"}, r"unknown key backend\.recovry: did you mean backend\.recovery"),
        (
            "backend",
            {"name": "fp8", "bits_low": 6},
            r"backend\.bits_low=6 belongs to backend\.name='activation' or 'lowbit'",
        ),
        ("backend", {"name": "fp9"}, r"backend\.name='fp9': expected one of"),
        ("backend", {"name": "activation", "bits_low": "four"}, r"backend\.bits_low='four': expected int"),
        ("backend", {"name": "activation", "bits_low": 5}, r"backend\.bits_low=5: expected 4, 6"),
        ("backend", {"pin_memory": 3}, r"backend\.pin_memory=3: expected bool"),
        ("trigger", {"seed": 0}, r"trigger\.seed=0 belongs to trigger\.name='random'"),
        ("trigger", {"name": "random"}, "expected promotion_ratio or trace"),
        ("trigger", {"sed": 0}, r"did you mean trigger\.seed"),
    ],
)
def test_a_recipe_names_section_and_key(section, values, message, tmp_path):
    file = tmp_path / "r.yaml"
    file.write_text(yaml.safe_dump({"model": {"name": "m"}, "data": {"name": "d"}, section: values}))
    with pytest.raises(RecipeError, match=message):
        load_recipe(file)


def test_help_lists_every_setting():
    parameters = inspect.signature(GNMRCallback).parameters
    for name in (*option_names(), *(field.name for field in dataclasses.fields(GNMRConfig)), "backend", "trace_path"):
        assert name in parameters, name
    assert parameters["recovery"].default == "host" and parameters["alpha"].default == 1.1
    assert "settings" not in parameters


def test_options_survive_json():
    options = Options("activation", "listed", {"units": ["*.down_proj"]}, bits_low=6)
    assert Options(**json.loads(json.dumps(options.to_dict()))) == options
    assert options.unit_kind == "projection" and "bits_low=6" in repr(options)
