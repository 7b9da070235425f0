"""What comes from outside is bounded: each command ends in seconds, within memory, with one line that names the fault."""

from __future__ import annotations

import json
import os
import pathlib
import resource
import subprocess
import sys
import time

import pytest
import yaml

from hf_gnmr.reading import MAX_DEPTH, MAX_DIGITS, MAX_EXTENDS, MAX_YAML_BYTES, MAX_YAML_KEYS, MAX_YAML_NODES
from hf_gnmr.run.recipe import RecipeError, load_recipe

CPU_SECONDS = 45
"""Of a command; importing torch and transformers takes 6 of them, on a slow machine more."""
ADDRESS_SPACE = 12 * 2**30
"""Bytes; torch alone maps several GB."""
BASE = "model: {name: builtin}\ndata: {name: builtin}\n"


def limited(seconds=CPU_SECONDS):
    def limit():
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))

    return limit


def command(*arguments, cwd=None, seconds=CPU_SECONDS):
    """A command of `hf-gnmr` under the limits."""
    return subprocess.run(
        [sys.executable, "-m", "hf_gnmr.cli", *map(str, arguments)],
        preexec_fn=limited(seconds), capture_output=True, text=True, timeout=250, cwd=cwd,
    )  # fmt: skip


def refused(run, *parts):
    """The command's only line: what it expected."""
    assert run.returncode == 2, (run.returncode, run.stderr[-2000:])
    lines = [line for line in run.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "Traceback" not in run.stderr and len(lines[0]) < 3000, run.stderr[-2000:]
    for part in parts:
        assert part in lines[0], lines[0]
    return lines[0]


def laughs(key):
    """Nine levels of nine aliases each: 9^9 values below one key."""
    lines = ["gnmr:", "  alpha: &a [1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    for before, name in zip("abcdefgh", "bcdefghi", strict=True):
        lines.append(f"  x{name}: &{name} [{', '.join([f'*{before}'] * 9)}]")
    return BASE + "\n".join(lines) + f"\n{key}: *i\n"


RECIPES = {
    "aliases": (laughs("trigger"), f"at most {MAX_YAML_NODES:,} values"),
    "aliases in a value": (laughs("lora"), f"at most {MAX_YAML_NODES:,} values"),
    "alias in itself": (BASE + "gnmr: &a {alpha: *a}\n", "an alias inside the value that it stands for"),
    "flow nesting": (BASE + f"lora: {'[' * 1000}{']' * 1000}\n", f"at most {MAX_DEPTH} levels"),
    "block nesting": (BASE + "lora:\n" + "".join(" " * (i + 1) + "a:\n" for i in range(400)), f"at most {MAX_DEPTH} levels"),
    "mapping nesting": (BASE + "lora: " + "{a: " * 1000, f"at most {MAX_DEPTH} levels"),
    "keys": (BASE + "training:\n" + "".join(f"  k{i}: 1\n" for i in range(20_000)), f"at most {MAX_YAML_KEYS:,} keys"),
    "values": (BASE + f"lora: [{'1, ' * 60_000}1]\n", f"at most {MAX_YAML_NODES:,} values"),
    "digits": (BASE + f"gnmr: {{delta: {'9' * 5000}}}\n", f"5,000 digits: expected at most {MAX_DIGITS}"),
    "size": (BASE + "#" * MAX_YAML_BYTES, f"at most {MAX_YAML_BYTES:,} bytes"),
    "duplicate": (BASE + "gnmr: {alpha: 1, alpha: 2}\n", "duplicate key 'alpha'"),
    "tag": (BASE + "gnmr: {alpha: !!timestamp x}\n", "does not fit its tag"),
    "list as key": (BASE + "gnmr: {[a]: 1}\n", "a key that is a list or mapping"),
    "long value": (BASE + f"training: {{learning_rate: {'x' * 500_000}}}\n", "training.learning_rate='xxx"),
    "long key": (BASE + f"training: {{{'x' * 900}: 1}}\n", "unknown key training.xxx"),
    "delta": (BASE + "gnmr: {delta: 1000000000}\n", "gnmr.delta=1000000000: expected a whole number, at most 10,000"),
    "lock": (BASE + "gnmr: {t_lock: 1e300}\n", "gnmr.t_lock"),
    "units": (BASE + f"gnmr: {{max_o: 1{'0' * 50}}}\n", "gnmr.max_o"),
    "memory": (BASE + f"backend: {{max_recovery_memory: 1{' ' * 100_000}x}}\n", "max_recovery_memory="),
    "length": ("model: {name: builtin}\ndata: {name: builtin, max_length: 1000000000000}\n", "data.max_length"),
    "workers": (BASE + "training: {dataloader_num_workers: 1000000}\n", "training.dataloader_num_workers"),
    "rank": (BASE + "lora: {r: 1000000000}\n", "lora.r=1000000000: expected a finite number, at least 1 and at most 65,536"),
}
"""Recipes and a part of the message."""


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_beyond_a_limit_is_refused(tmp_path, name):
    """Through the function that every command calls; `test_a_recipe_under_limits` runs the costly ones as a command."""
    text, message = RECIPES[name]
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises((RecipeError, ValueError)) as error:
        recipe = load_recipe(tmp_path / "r.yaml")
        from hf_gnmr.train import check

        check(recipe)
    assert message in str(error.value) and len(str(error.value)) < 5000


@pytest.mark.parametrize("name", ["aliases", "flow nesting", "keys", "digits"])
def test_a_recipe_under_limits(tmp_path, name):
    text, message = RECIPES[name]
    (tmp_path / "r.yaml").write_text(text)
    refused(command("plan", tmp_path / "r.yaml"), message)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (f"gnmr.delta={'9' * 5000}", "expected at most"),
        (f"lora.target_modules={'[' * 1000}", "levels of nesting"),
        ("gnmr.delta=1000000000", "at most 10,000"),
        ("trigger.units=" + "{a: &a [1, 1], b: *b}", "undefined alias"),
        ("gnmr.alpha=" + "x" * 100_000, "gnmr.alpha='xxx"),
    ],
    ids=["digits", "nesting", "delta", "alias", "long"],
)
def test_an_override_beyond_a_limit_is_refused(tmp_path, override, message):
    (tmp_path / "r.yaml").write_text(BASE)
    with pytest.raises(RecipeError, match=message) as error:
        load_recipe(tmp_path / "r.yaml", [override])
    assert len(str(error.value)) < 1000


# -- extends -------------------------------------------------------------------------------------------------------------

SECRET = "root:$6$nobody-may-see-this:"


@pytest.fixture
def outside(tmp_path):
    """A folder of recipes, and beside it a file that is none of their business."""
    (tmp_path / "secret").write_text(SECRET + "\n\t{[")
    folder = tmp_path / "recipes"
    folder.mkdir()
    (folder / "link.yaml").symlink_to(tmp_path / "secret")
    (folder / "folder").symlink_to(tmp_path)
    (folder / "below").mkdir()
    (folder / "below" / "notes.yaml").write_text(f"password: '{SECRET}'\n")
    foreign = {
        "key": f"_: '{SECRET}'\nlora: {{r: 4}}\n", "section": f"data: '{SECRET}'\n", "list": f"data: ['{SECRET}']\n",
        "extends": f"extends: '{SECRET}'\nlora: {{r: 4}}\n", "key_only": f"_: '{SECRET}'\n",
    }  # fmt: skip
    for name, text in foreign.items():
        (folder / "below" / f"{name}.yaml").write_text(text)
    (folder / "below" / "broken.yaml").write_text(f"{SECRET}\n\t{{[ {SECRET} *{SECRET}")
    os.mkfifo(folder / "fifo.yaml")
    return folder


@pytest.mark.parametrize(
    ("extends", "message"),
    [
        ("/etc/shadow", "expected a recipe below"),
        ("/dev/zero", "expected a recipe below"),
        ("../secret", "expected a recipe below"),
        ("link.yaml", "expected a recipe below"),
        ("folder/secret", "expected a recipe below"),
        ("fifo.yaml", "expected a regular file, got a FIFO"),
        ("below", "got a folder"),
        ("below/notes.yaml", "expected a recipe with the sections"),
        ("below/broken.yaml", "is not valid YAML"),
        ("below/key.yaml", "_: expected the line .*got another text"),
        ("below/key_only.yaml", "_: expected the line .*got another text"),
        ("below/section.yaml", "data=a str in .*section.yaml: expected a section"),
        ("below/list.yaml", "data=a list in .*list.yaml: expected a section"),
        ("below/extends.yaml", "cannot be read"),
        ("gone.yaml", "cannot be read"),
        ('"nul\\0.yaml"', "not a usable path"),
    ],
)
def test_extends_reads_recipes_only_and_shows_nothing_else(outside, extends, message):
    (outside / "r.yaml").write_text(f"extends: {extends}\n{BASE}")
    with pytest.raises(RecipeError, match=message) as error:
        load_recipe(outside / "r.yaml")
    assert "nobody-may-see-this" not in str(error.value) and "password" not in str(error.value)


@pytest.mark.parametrize("target", ["/dev/zero", "fifo.yaml", "/dev/stdin"])
def test_extends_never_waits(outside, target):
    (outside / "r.yaml").write_text(f"extends: {target}\n{BASE}")
    refused(command("plan", outside / "r.yaml"))


def test_recipes_below_and_those_of_the_package_are_extended(outside):
    (outside / "below" / "base.yaml").write_text("extends: ../top.yaml\nlora: {r: 4}\n")
    (outside / "top.yaml").write_text(BASE + "gnmr: {alpha: 1.25}\n")
    (outside / "r.yaml").write_text("extends: below/base.yaml\n")
    recipe = load_recipe(outside / "r.yaml")
    assert (recipe.lora.r, recipe.gnmr.alpha) == (4, 1.25)


@pytest.mark.parametrize(("length", "fits"), [(MAX_EXTENDS, True), (MAX_EXTENDS + 1, False), (1500, False)])
def test_a_chain_has_an_end(tmp_path, length, fits):
    for i in range(length):
        (tmp_path / f"r{i}.yaml").write_text(f"extends: r{i + 1}.yaml\n")
    (tmp_path / f"r{length}.yaml").write_text(BASE)
    if fits:
        assert load_recipe(tmp_path / "r0.yaml").model.name == "builtin"
    else:
        with pytest.raises(RecipeError, match=f"at most {MAX_EXTENDS} recipes that extend each other"):
            load_recipe(tmp_path / "r0.yaml")


def test_a_circle_is_named(tmp_path):
    for name, other in (("a", "b"), ("b", "a")):
        (tmp_path / f"{name}.yaml").write_text(f"extends: {other}.yaml\n{BASE}")
    with pytest.raises(RecipeError, match="extends itself"):
        load_recipe(tmp_path / "a.yaml")


# -- files ---------------------------------------------------------------------------------------------------------------


def sparse(path, size):
    with path.open("wb") as file:
        file.truncate(size)
    return path


@pytest.mark.parametrize("kind", ["sparse", "100 MB", "fifo", "folder", "zero", "link to zero"])
@pytest.mark.parametrize("entry", ["recipe", "trace", "rows", "text", "results"])
def test_other_files_and_large_ones_are_refused(tmp_path, kind, entry, capsys):
    from hf_gnmr.config import ConfigError
    from hf_gnmr.files import FileError, read_json
    from hf_gnmr.run.data import check_source, load_rows
    from hf_gnmr.run.packing import check_text_source, documents
    from hf_gnmr.run.sections import DataSection
    from hf_gnmr.trace.series import read_series

    path = (
        tmp_path
        / {"recipe": "r.yaml", "trace": "t.jsonl", "rows": "rows.jsonl", "text": "t.jsonl", "results": "r.json"}[entry]
    )
    if kind == "sparse":
        sparse(path, 20 * 10**9)
    elif kind == "100 MB":
        path.write_bytes(b"{" + b'"a": 1, ' * 12_500_000)
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "zero":
        path = pathlib.Path("/dev/zero")
    else:
        path.symlink_to("/dev/zero")
    section = DataSection(str(path), text="text" if entry == "text" else None)

    def read():
        if entry == "recipe":
            load_recipe(path)
        elif entry == "trace":
            read_series(path)
        elif entry == "rows":
            check_source(section)
            load_rows(section, 0)
        elif entry == "text":
            check_text_source(section)
            list(documents(section, "train"))
        else:
            read_json(path)

    if (kind, entry) in (("folder", "rows"), ("folder", "text")):
        pytest.skip("a folder may be a data set")
    with pytest.raises((ConfigError, FileError)) as error:
        read()
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize("kind", ["deep", "digits", "list", "cut", "deep objects"])
def test_json_beyond_a_limit_is_one_line(tmp_path, kind):
    from hf_gnmr.files import FileError, read_json

    text = {
        "deep": '{"a": ' + "[" * 1000 + "]" * 1000 + "}",
        "deep objects": '{"a": ' * 100_000 + "1" + "}" * 100_000,
        "digits": '{"a": ' + "9" * 5000 + "}",
        "list": "[1]",
        "cut": '{"a": "' + "x" * 100_000,
    }[kind]
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(FileError, match=r"x\.json") as error:
        read_json(tmp_path / "x.json")
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize(("levels", "fits"), [(MAX_DEPTH, True), (MAX_DEPTH + 1, False)])
def test_the_depth_is_exact(levels, fits):
    from hf_gnmr.files import FileError
    from hf_gnmr.reading import parse_json
    from hf_gnmr.run.yaml12 import YamlError, load_yaml

    text = "[" * levels + "1" + "]" * levels
    if fits:
        assert parse_json(text, "x") == load_yaml(text)
    else:
        with pytest.raises(FileError, match="levels"):
            parse_json(text, "x")
        with pytest.raises(YamlError, match="levels"):
            load_yaml(text)


def test_aliases_that_expand_to_little_are_read():
    from hf_gnmr.run.yaml12 import load_yaml

    assert load_yaml("a: &x {b: [1, 2]}\nc: *x\nd: [*x, *x]\n")["d"] == [{"b": [1, 2]}] * 2


# -- grids, models, expressions ------------------------------------------------------------------------------------------


def test_a_grid_is_counted_before_it_is_built(tmp_path):
    from synthetic import stationary, write_trace

    trace = write_trace(tmp_path / "trace.jsonl", stationary(60, 3))
    values = ",".join(str(1 + i / 1000) for i in range(100))
    sets = [f"--set={name}={values}" for name in ("alpha", "alpha_init", "beta")] + [
        "--set=delta=" + ",".join(map(str, range(1, 101)))
    ]
    refused(command("replay", trace, *sets, seconds=20), "expected at most 10,000 combinations, got 100,000,000")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 1_000_000}, "num_hidden_layers=1000000: expected at most 1,024"),
        ({"num_hidden_layers": 10**30}, "num_hidden_layers"),
        ({"hidden_size": 10**9}, "hidden_size=1000000000: expected at most"),
        ({"vocab_size": 10**12}, "vocab_size"),
        ({"num_attention_heads": 10**8}, "num_attention_heads"),
        ({"intermediate_size": 10**10}, "intermediate_size"),
        ({"max_position_embeddings": 10**11}, "max_position_embeddings"),
        ({"hidden_size": 2**23, "intermediate_size": 2**24, "num_hidden_layers": 1000}, "parameters"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("source", ["recipe", "folder"])
def test_a_models_sizes_are_bounded_before_it_is_built(tmp_path, changes, message, source):
    from hf_gnmr.run.plan_figures import plan

    architecture = {
        "model_type": "llama", "vocab_size": 288, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 2, **changes,
    }  # fmt: skip
    recipe = {"data": {"name": "builtin"}, "lora": False, "backend": {"name": "fp8", "emulate": True}}
    if source == "recipe":
        recipe["model"] = {"name": "scratch", "tokenizer": "bytes", "architecture": architecture}
    else:
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **architecture}))
        recipe["model"] = {"name": str(tmp_path / "model")}
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe))
    if "parameters" in message and source == "folder":
        pytest.skip("the same check of the same model")
    with pytest.raises(RecipeError, match=message):
        plan(load_recipe(tmp_path / "r.yaml"))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_models_folder_never_blocks(tmp_path, name):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "model" / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / "model" / name)
    (tmp_path / "r.yaml").write_text(f"model: {{name: {tmp_path / 'model'}}}\ndata: {{name: builtin}}\n")
    refused(command("plan", tmp_path / "r.yaml"), name, "a FIFO")


@pytest.mark.parametrize("pattern", [r"(\w+\.?)+!", r"([a-z_.0-9]+)*X", r"(.+)+X$", r"(?:(?:\w|\.)+)+,"])
def test_an_expression_that_backtracks_is_refused(pattern, monkeypatch):
    from hf_gnmr.run import patterns

    monkeypatch.setattr(patterns, "MATCH_SECONDS", 2)
    names = [f"model.layers.{i}.self_attn.some_long_projection_name_q_proj" for i in range(3)]
    with pytest.raises(RecipeError, match=r"lora.target_modules=.*within 2 seconds"):
        patterns.check_patterns({"target_modules": pattern}, names, "lora.")


def test_all_expressions_share_one_limit_and_the_slow_one_is_named(monkeypatch):
    from hf_gnmr.run import patterns

    monkeypatch.setattr(patterns, "MATCH_SECONDS", 2)
    slow = {rf"(a|aa)+x{i}": 8 for i in range(20)}
    begun = time.perf_counter()
    with pytest.raises(RecipeError, match=r"rank_pattern='\(\.\*\\\\\.\)\?\(\(a\|aa\)\+x0"):
        patterns.check_patterns({"rank_pattern": {"q_proj|b": 4, **slow}}, ["a" * 60], "lora.")
    assert time.perf_counter() - begun < 10


def test_compiling_an_expression_counts_too(monkeypatch):
    from hf_gnmr.run import patterns

    monkeypatch.setattr(patterns, "MATCH_SECONDS", 1)
    with pytest.raises(RecipeError, match="within 1 seconds"):
        patterns.check_patterns({"target_modules": "(?i)" + "[\\0-\U0010ffff]" * 500}, ["a"], "lora.")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target_modules": "(q_proj"}, "not a regular expression"),
        ({"target_modules": "a" * 20_000 + "*"}, "at most 10,000 characters"),
        ({"rank_pattern": {"(": 3}}, "rank_pattern"),
        ({"layers_pattern": ["h", "["]}, "layers_pattern"),
    ],
)
def test_expressions_that_cannot_be_used_are_named(options, message):
    from hf_gnmr.run.patterns import check_patterns

    with pytest.raises(RecipeError, match=message):
        check_patterns(options, ["a.b"], "x: ")


def test_honest_expressions_pass():
    from hf_gnmr.run.patterns import check_patterns

    names = [f"model.layers.{i}.{part}" for i in range(100) for part in ("self_attn.q_proj", "mlp.down_proj")]
    options = {
        "target_modules": r".*layers\.(1|2|3)\..*(q|v)_proj$",
        "layers_pattern": "layers",
        "rank_pattern": {"q_.*": 8},
    }
    check_patterns(options, names, "lora.")
    check_patterns({"target_modules": "all-linear"}, names, "lora.")


@pytest.mark.parametrize("template", ["{question:99999999999}", "{question:>1000000000}", "{question:.100000f}"])
def test_a_templates_widths_are_bounded(template):
    from hf_gnmr.run.data import check_source
    from hf_gnmr.run.sections import DataSection

    with pytest.raises(RecipeError, match="widths of at most 4 digits"):
        check_source(DataSection("builtin", prompt=template))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"r": 10**9}, "r=1000000000"),
        ({"r": 10**6}, "rank of at most 65,536"),
        ({"r": 8, "rank_pattern": {"q_proj": 10**6}}, "rank of at most 65,536"),
        ({"layer_replication": [[0, 10**6]]}, "layer_replication"),
        ({"layer_replication": [[0, 1]] * 5000}, "layer_replication"),
    ],
)
def test_an_adapters_sizes_are_bounded(values, message):
    from hf_gnmr.run.adapter_config import check_adapter

    with pytest.raises(RecipeError, match=message):
        check_adapter(values, "adapter_config.json")


@pytest.mark.parametrize("kind", ["header", "units", "line", "nesting", "digits", "long line", "step"])
def test_a_trace_beyond_a_limit_is_one_line(tmp_path, kind, monkeypatch):
    from synthetic import stationary, write_trace

    from hf_gnmr.trace import file
    from hf_gnmr.trace.series import read_series

    trace = write_trace(tmp_path / "trace.jsonl", stationary(30, 3))
    header, *steps = trace.read_text().splitlines()
    values = json.loads(steps[4])
    if kind == "header":
        header = json.dumps({**json.loads(header), "max_o": int("9" * 90)})
    elif kind == "units":
        units = json.loads(header)["units"]
        header = json.dumps({**json.loads(header), "units": [{**units[0], "bytes_low": 10**90}, *units[1:]]})
    elif kind == "nesting":
        steps[4] = json.dumps(values)[:-1] + ', "x": ' + "[" * 1000 + "]" * 1000 + "}"
    elif kind == "digits":
        steps[4] = json.dumps(values)[:-1] + ', "x": ' + "9" * 5000 + "}"
    elif kind == "step":
        steps[4] = json.dumps({**values, "step": 2**61})
    elif kind == "long line":
        monkeypatch.setattr(file, "MAX_TRACE_LINE_BYTES", 100_000)
        steps[4] = json.dumps(values)[:-1] + ', "x": "' + "y" * 200_000 + '"}'
    else:
        steps[4] = json.dumps({**values, "active": list(range(10**5))})
    trace.write_text("\n".join([header, *steps]) + "\n")
    with pytest.raises(file.TraceError, match=r"trace\.jsonl") as error:
        read_series(trace)
    assert len(str(error.value)) < 1500
