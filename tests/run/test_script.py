"""A recipe is YAML and Python at once: both ends agree, whatever its values, and every launcher runs the file itself."""

from __future__ import annotations

import ast
import os
import pathlib
import shutil
import subprocess
import sys

import pytest
import yaml
from conftest import write_recipe
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_gnmr import script
from hf_gnmr.run.dump import dump
from hf_gnmr.run.recipe import RecipeError, load_recipe
from hf_gnmr.run.sections import DataSection, LoraSection, ModelSection, Recipe
from hf_gnmr.run.yaml12 import Yaml12
from hf_gnmr.trace.file import read_trace

REPOSITORY = pathlib.Path(__file__).parents[2]
SHIPPED = sorted((REPOSITORY / "recipes").glob("*.yaml"))
BIN = pathlib.Path(sys.executable).parent
MINIMAL = "model: {name: m}\ndata: {name: d}\n"


def python_half(text):
    """The string that Python sees the recipe in, and the statements behind it."""
    annotation, *rest = ast.parse(text).body
    assert isinstance(annotation, ast.AnnAssign) and annotation.target.id == script.KEY and annotation.value is None
    return ast.literal_eval(annotation.annotation), [ast.unparse(statement) for statement in rest]


def check_both_ways(text):
    """A text that is a script: Python's string holds all of the YAML but the frame, and YAML reads the same from both."""
    inside, statements = python_half(text)
    assert text == "\n".join(script.HEAD) + inside + "'''" + text.partition("# '''")[2]
    assert statements == python_half(script.as_script(MINIMAL))[1]
    values = yaml.load(text, Loader=Yaml12)
    assert values.pop(script.KEY) == script.OPENING
    assert values == yaml.load(inside, Loader=Yaml12)
    return values


@pytest.mark.parametrize("path", SHIPPED, ids=[p.stem for p in SHIPPED])
def test_a_shipped_recipe_is_a_script(path):
    text = path.read_bytes().decode()
    assert text.startswith("\n".join(script.HEAD) + "\n") and text.endswith("\n" + script.TAIL + "\n")
    values = check_both_ways(text)
    assert values.keys() >= {"extends"} or values.keys() >= {"model", "data"}
    assert path.stat().st_mode & 0o111 == 0o111


@pytest.mark.parametrize("ends", ["\n", "\r\n"], ids=["unix", "windows"])
@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"], ids=["plain", "bom"])
def test_line_ends_and_a_byte_order_mark_change_nothing(tmp_path, ends, bom):
    file = tmp_path / "recipe.yaml"
    file.write_bytes(bom + script.as_script(MINIMAL).replace("\n", ends).encode())
    assert load_recipe(file) == load_recipe_of(tmp_path, MINIMAL)
    compile(file.read_bytes(), file, "exec")


def load_recipe_of(folder, text):
    (folder / "other").mkdir(exist_ok=True)
    file = folder / "other" / "recipe.yaml"
    file.write_text(text)
    return load_recipe(file)


TEXTS = st.text(st.characters(codec=None, exclude_categories=()), max_size=30) | st.text(
    st.sampled_from("'\"\\# \n\t:-{}[]%&*!|>\x85\u2028a1e.0_"), max_size=30
)
VALUES = st.recursive(
    TEXTS | st.booleans() | st.integers(-(10**9), 10**9) | st.none() | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(values=st.dictionaries(TEXTS.filter(lambda key: key != script.KEY), VALUES, min_size=1, max_size=4))
def test_whatever_is_written_reads_back_both_ways(values):
    text = script.as_script(dump(values))
    assert check_both_ways(text) == values


@settings(max_examples=40, deadline=None)
@given(prompt=TEXTS, name=TEXTS)
@pytest.mark.parametrize("key", ["'''", "a'", "\\", "x'''\\", "1e5"])
def test_a_resolved_recipe_reads_back_as_itself(key, prompt, name):
    recipe = Recipe(
        model=ModelSection("scratch", tokenizer=f"{key}{name}", architecture={"model_type": key, key: [name, key]}),
        data=DataSection(name, prompt=prompt + key, answer=key),
        lora=None,
        training={"output_dir": key, "run_name": prompt},
    )
    values = check_both_ways(script.as_script(recipe.to_yaml()))
    assert values == {**recipe.to_dict(), "lora": False}
    assert yaml.safe_load(recipe.to_yaml()) == values, "read by YAML 1.1 too"


@pytest.mark.parametrize("key", ["'''", "it's", "\\", "'", "''", "'a'''b'", "a\\'''", "1e5", "01", "no"])
def test_awkward_values_through_a_file(tmp_path, key):
    recipe = Recipe(ModelSection(key), DataSection("d", prompt=key), LoraSection(target_modules=[key]), {"output_dir": key})
    file = tmp_path / "recipe.yaml"
    script.write_script(file, recipe.to_yaml())
    assert load_recipe(file) == recipe
    check_both_ways(file.read_bytes().decode())


def test_quotes_in_a_comment_do_not_end_the_string():
    check_both_ways(script.as_script("# says '''\nmodel: {name: \"a'''b\"}"))


def test_a_written_recipe_may_be_run_by_those_who_may_read_it(tmp_path):
    file = tmp_path / "recipe.yaml"
    script.write_script(file, MINIMAL)
    mode = file.stat().st_mode
    assert (mode & 0o444) >> 2 == mode & 0o111 and mode & 0o100


# -- what the reader accepts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", ["_: r'''", "_: r'''  # opens the string", "_: \"r'''\"", "'_': r'''"])
def test_the_key_is_accepted_in_any_recipe(tmp_path, line):
    (tmp_path / "base.yaml").write_text(f"{line}\n{MINIMAL}")
    (tmp_path / "more.yaml").write_text(f"extends: base.yaml\n{line}\nlora: {{r: 4}}\n")
    (tmp_path / "plain.yaml").write_text(MINIMAL)
    assert load_recipe(tmp_path / "base.yaml", ["training.output_dir=o"]) == load_recipe(
        tmp_path / "plain.yaml", ["training.output_dir=o"]
    )
    assert load_recipe(tmp_path / "more.yaml").lora.r == 4


@pytest.mark.parametrize(
    ("line", "got"),
    [
        ("_: r", "got 'r'"),
        ("_: r''''", "got \"r''''\""),
        ("_: ''", "got ''"),
        ("_: R'''", "got \"R'''\""),
        ("_: null", "got NoneType"),
        ("_:", "got NoneType"),
        ("_: 3", "got int"),
        ("_: [r''']", "got list"),
        ("_: {name: r'''}", "got dict"),
        ("_: r'''\n_: r'''", "duplicate key '_'"),
    ],
)
@pytest.mark.parametrize("extended", [False, True])
def test_another_value_is_refused(tmp_path, line, got, extended):
    file = tmp_path / "r.yaml"
    file.write_text(f"{line}\n{MINIMAL}")
    if extended:
        (tmp_path / "upper.yaml").write_text("extends: r.yaml\n")
        file = tmp_path / "upper.yaml"
    with pytest.raises(RecipeError) as error:
        load_recipe(file)
    if extended and "duplicate" in got:  # of a file that another one names, no message shows what it holds
        got = "r.yaml is not valid YAML: line 2, column 1"
    elif extended and not got.removeprefix("got ").isidentifier():
        got = "got another text"
    assert got in str(error.value)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("model: {name: m, _: r'''}\ndata: {name: d}\n", "model._"),
        (MINIMAL + "gnmr:\n  _: r'''\n", "gnmr._"),
        ("data: {name: d}\nmodel: {name: m, architecture: {_: \"r'''\"}}\n", "model.architecture._"),
        (MINIMAL + "training: {lr_scheduler_kwargs: {a: [{_: 1}]}}\n", "training.lr_scheduler_kwargs.a._"),
    ],
)
def test_another_place_is_refused(tmp_path, text, place):
    file = tmp_path / "r.yaml"
    file.write_text(text)
    with pytest.raises(RecipeError, match=f"{place}: expected `_: r'''` at the top level only"):
        load_recipe(file)


def test_another_place_is_refused_in_an_override(tmp_path):
    file = tmp_path / "r.yaml"
    file.write_text(MINIMAL)
    with pytest.raises(RecipeError, match="model.architecture._: expected"):
        load_recipe(file, ["model.architecture={_: 1}"])
    with pytest.raises(RecipeError, match="expected section.key=value"):
        load_recipe(file, ["_=r'''"])


# -- launchers --------------------------------------------------------------------------------------------------------------


def launch(*command, cwd, status=0):
    """Standard output and error of a command in our environment's `bin`, run in another folder."""
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    program = shutil.which(command[0], path=path) or str(cwd / command[0])
    result = subprocess.run(
        [program, *command[1:]], cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == status, result.stderr[-3000:]
    return result.stdout, result.stderr


@pytest.mark.parametrize("name", ["__mp_main__", "recipe"])
def test_a_script_that_is_not_run_does_nothing(name):
    """As when a data loader's process imports the main module once more."""
    namespace = {"__name__": name, "__file__": "recipe.yaml"}
    exec(compile(script.as_script(MINIMAL), "recipe.yaml", "exec"), namespace)


@pytest.mark.parametrize("way", ["the file", pytest.param("python", marks=pytest.mark.slow)])
def test_an_error_is_one_line(tmp_path, way):
    file = str(REPOSITORY / "recipes" / "llama2_13b_lora.yaml")
    command = ["python", file] if way == "python" else [file]
    out, err = launch(*command, "gnmr.alpa=2", cwd=tmp_path, status=2)
    assert (out, err) == ("", "error: unknown key gnmr.alpa: did you mean gnmr.alpha?\n")
    assert not list(tmp_path.iterdir())


TINY = [
    "training.max_steps=3",
    "training.disable_tqdm=true",
    "training.use_cpu=true",
    "training.per_device_train_batch_size=2",
    "data.rows=40",
    "data.eval_rows=0",
    "data.generate_rows=0",
    "lora.r=2",
]
"""Overrides that make `quickstart` a matter of seconds, with the tests' model."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher",
    [
        ["python"],
        [],
        ["accelerate", "launch", "--cpu"],
        ["accelerate", "launch", "--config_file", str(REPOSITORY / "recipes" / "accelerate" / "cpu.yaml")],
        ["torchrun", "--nproc_per_node", "1"],
    ],
    ids=["python", "the file itself", "accelerate", "accelerate with a configuration", "torchrun"],
)
def test_every_launcher_runs_a_shipped_recipe(tmp_path, tiny_lm, launcher):
    recipe = str(REPOSITORY / "recipes" / "quickstart.yaml")
    out, _ = launch(
        *launcher, recipe, *TINY, f"model.name={tiny_lm}", "training.output_dir=run", "gnmr.max_o=1", cwd=tmp_path
    )
    assert len(read_trace(tmp_path / "run" / "trace.jsonl").steps) == 3 and "files are in run" in out


@pytest.mark.slow
def test_what_a_run_wrote_runs_too_and_has_help(tmp_path, tiny_lm):
    recipe = str(REPOSITORY / "recipes" / "quickstart.yaml")
    assert "section.key=value" in launch("accelerate", "launch", "--cpu", recipe, "--help", cwd=tmp_path)[0]
    launch("python", recipe, *TINY, f"model.name={tiny_lm}", "training.output_dir=run", "gnmr.max_o=1", cwd=tmp_path)
    launch("run/recipe.yaml", "training.output_dir=again", cwd=tmp_path)
    first, again = (read_trace(tmp_path / name / "trace.jsonl").steps for name in ("run", "again"))
    assert [line["norms"] for line in first] == [line["norms"] for line in again]


@pytest.mark.slow
def test_two_processes_run_a_recipe_with_extends_from_another_folder(tmp_path, tiny_lm, rows_file):
    (tmp_path / "mine").mkdir()
    (tmp_path / "elsewhere").mkdir()
    write_recipe(tmp_path / "mine" / "base.yaml", tiny_lm, rows_file, seed=0)
    script.write_script(
        tmp_path / "mine" / "child.yaml", "extends: base.yaml\ntraining: {output_dir: run, ddp_backend: gloo}\n"
    )
    command = [
        "torchrun",
        "--nproc_per_node",
        "2",
        "--master_port",
        "0",
        "--rdzv_backend",
        "c10d",
        "--rdzv_endpoint",
        "localhost:0",
    ]
    out, _ = launch(*command, "../mine/child.yaml", "training.max_steps=2", cwd=tmp_path / "elsewhere")
    assert "world size 2" in out
    trace = read_trace(tmp_path / "elsewhere" / "run" / "trace.jsonl")
    assert len(trace.steps) == 2 and not list((tmp_path / "elsewhere" / "run").glob("trace.*.jsonl"))
