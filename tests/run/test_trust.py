"""A run's folder may come from anyone: it runs no code unasked, shows no other files, writes no escapes."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys

import pytest
from synthetic import stationary, write_trace

from hf_gnmr.cli import main

CODE = """
from pathlib import Path
from transformers import PretrainedConfig
Path({marker!r}).write_text("the model's own code ran")
class EvilConfig(PretrainedConfig):
    model_type = "evil"
"""


@pytest.fixture
def foreign_run(tmp_path):
    """A run whose recipe asks to run the code of its model; the code leaves a mark."""
    model, run, marker = tmp_path / "model", tmp_path / "run", tmp_path / "marker"
    model.mkdir()
    run.mkdir()
    (model / "config.json").write_text(
        json.dumps({"model_type": "evil", "auto_map": {"AutoConfig": "configuration_evil.EvilConfig"}})
    )
    (model / "configuration_evil.py").write_text(CODE.format(marker=str(marker)))
    recipe = f"model: {{name: {model}, trust_remote_code: true}}\ndata: {{name: builtin}}\nbackend: {{name: none}}\n"
    (run / "recipe.yaml").write_text(recipe)
    (run / "adapter_model.safetensors").write_bytes(b"")
    (run / "adapter_config.json").write_text("{}")
    write_trace(run / "trace.jsonl", stationary(20, 3))
    return run, marker


def command(*arguments, home):
    environment = {**os.environ, "HF_HOME": str(home), "HF_MODULES_CACHE": str(home / "modules")}
    return subprocess.run(
        [sys.executable, "-m", "hf_gnmr.cli", *arguments], capture_output=True, text=True, timeout=250, env=environment
    )


EVAL = ("--data", "builtin", "--tasks", "wikitext_tokens")


def test_eval_runs_code_only_with_its_own_flag(foreign_run, tmp_path):
    run, marker = foreign_run
    refused = command("eval", str(run), *EVAL, home=tmp_path)
    assert refused.returncode == 2 and not marker.exists()
    assert "trust_remote_code" in refused.stderr and "--trust-remote-code" in refused.stderr
    command("eval", str(run), *EVAL, "--trust-remote-code", home=tmp_path)
    assert marker.exists(), "with the flag the code runs"


def test_a_checkpoint_of_it_runs_none_either(foreign_run, capsys):
    run, marker = foreign_run
    checkpoint = run / "checkpoint-3"
    checkpoint.mkdir()
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        (checkpoint / name).write_bytes((run / name).read_bytes())
    assert main(["eval", str(checkpoint), *EVAL]) == 2
    assert "--trust-remote-code" in capsys.readouterr().err and not marker.exists()


@pytest.mark.parametrize(
    "arguments", [("plan", "{run}/recipe.yaml"), ("report", "{run}", "--output", "{run}/page.html"), ("compare", "{run}")]
)
def test_nothing_else_that_reads_the_folder_runs_code(foreign_run, arguments, capsys):
    run, marker = foreign_run
    main([argument.format(run=run) for argument in arguments])
    assert not marker.exists()


def test_plan_runs_it_with_a_flag_or_for_a_recipe_that_is_no_runs(foreign_run, tmp_path, capsys):
    run, _ = foreign_run
    assert main(["plan", str(run / "recipe.yaml")]) == 2
    assert "is the recipe of a run and asks to run code" in capsys.readouterr().err
    (tmp_path / "mine.yaml").write_text((run / "recipe.yaml").read_text())
    assert main(["plan", str(tmp_path / "mine.yaml"), "--rows", "1"]) == 2
    assert "cannot build a model" in capsys.readouterr().err, "its configuration was read, by its own code"


# -- links ---------------------------------------------------------------------------------------------------------------

SECRET = "a-private-key"


@pytest.mark.parametrize("name", ["recipe.yaml", "environment.json"])
@pytest.mark.parametrize("kind", ["link", "relative link", "link to a device", "fifo", "folder link"])
def test_the_page_shows_only_files_of_the_run(tmp_path, name, kind):
    pytest.importorskip("matplotlib")
    run = tmp_path / "run"
    write_trace(run / "trace.jsonl", stationary(30, 3))
    (tmp_path / "secret").write_text(SECRET)
    (tmp_path / "folder").mkdir()
    if kind == "fifo":
        os.mkfifo(run / name)
    else:
        targets = {"link": tmp_path / "secret", "relative link": "../secret", "folder link": tmp_path / "folder"}
        target = targets.get(kind, "/dev/zero")
        (run / name).symlink_to(target)
    assert main(["report", str(run), "--output", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert SECRET not in page and ("not shown" in page or kind == "fifo")


def test_a_link_inside_the_folder_is_shown(tmp_path):
    pytest.importorskip("matplotlib")
    run = tmp_path / "run"
    write_trace(run / "trace.jsonl", stationary(30, 3))
    (run / "first.yaml").write_text("model: {name: the-model}\n")
    (run / "recipe.yaml").symlink_to("first.yaml")
    (tmp_path / "link").symlink_to(run)
    assert main(["report", str(tmp_path / "link"), "--output", str(tmp_path / "page.html")]) == 0
    assert "the-model" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize("command_name", ["report", "replay", "diagnose"])
def test_a_trace_outside_the_folder_is_named_by_the_user_only(tmp_path, command_name, capsys):
    run = tmp_path / "run"
    run.mkdir()
    trace = write_trace(tmp_path / "other.jsonl", stationary(60, 3))
    (run / "trace.jsonl").symlink_to(trace)
    output = ["--output", str(tmp_path / "page.html")] if command_name == "report" else []
    assert main([command_name, str(run), *output]) == 2
    assert "a link to a file outside the folder; name the trace itself" in capsys.readouterr().err
    assert main([command_name, str(run / "trace.jsonl"), *output]) == 0


@pytest.mark.parametrize("name", ["recipe.yaml", "adapter_config.json", "config.json"])
def test_eval_follows_no_link_that_leaves_the_folder(tmp_path, name, capsys):
    run = tmp_path / "run"
    run.mkdir()
    if name == "config.json":
        (run / "recipe.yaml").write_text(
            "model: {name: builtin}\ndata: {name: builtin}\nbackend: {name: none}\nlora: false\n"
        )
    (tmp_path / "secret").write_text(SECRET)
    (run / name).symlink_to(tmp_path / "secret")
    assert main(["eval", str(run), *EVAL]) == 2
    error = capsys.readouterr().err
    assert f"{name} is a link to a file outside" in error and SECRET not in error


def test_links_of_the_hubs_cache_are_files_of_their_snapshot(tmp_path, capsys):
    from hf_gnmr.reading import inside

    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "0123", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "4567").write_text("{}")
    (snapshot / "adapter_config.json").symlink_to("../../blobs/4567")
    (snapshot / "recipe.yaml").symlink_to("../../../4567")
    assert inside(snapshot, "adapter_config.json") and not inside(snapshot, "recipe.yaml")


# -- escapes -------------------------------------------------------------------------------------------------------------

ESCAPES = "\x1b[31m\x1b]0;owned\x07\u202e\x9b2J"


def lines_of(trace):
    return [json.loads(line) for line in trace.read_text().split("\n") if line]


def hostile_trace(path, **changes):
    """A trace with escapes in its header's texts, reasons and unit names."""
    trace = write_trace(path, stationary(60, 3))
    header, *steps = lines_of(trace)
    for unit in header["units"]:
        unit["name"] += ESCAPES
    header["trigger"] = header["backend"] = f"gnmr{ESCAPES}"
    header["census"]["path"] = header["census"]["low_path"] = ESCAPES
    header.update(changes)
    steps[3]["skipped"] = ESCAPES
    trace.write_text("".join(json.dumps(line) + "\n" for line in (header, *steps)))
    return trace


@pytest.mark.parametrize(
    "arguments",
    [
        ("report", "{trace}", "--output", "{tmp}/page.html"), ("replay", "{trace}"), ("diagnose", "{trace}"),
        ("calibrate", "{trace}", "--exceedance", "0.2"), ("replay", "{trace}", "--set", f"alpha={ESCAPES}"),
        ("report", "{tmp}/" + ESCAPES), ("plan", "{tmp}/" + ESCAPES), ("eval", "{tmp}/" + ESCAPES),
        ("compare", "{tmp}/" + ESCAPES),
        ("plan", "quickstart", f"gnmr.{ESCAPES}=1"), ("plan", "quickstart", f"model.name=./{ESCAPES}"),
        ("eval", "x", "--tasks", ESCAPES), (ESCAPES,),
    ],
    ids=range(13),
)  # fmt: skip
@pytest.mark.parametrize(
    "changes",
    [{}, {"schema": ESCAPES}, {"config": {ESCAPES: 1}}, {"max_o": ESCAPES}],
    ids=["names", "schema", "config", "max_o"],
)
def test_no_escape_reaches_the_terminal(tmp_path, arguments, changes, capsys):
    if changes and "{trace}" not in arguments:
        pytest.skip("reads no trace")
    trace = hostile_trace(tmp_path / "run" / "trace.jsonl", **changes)
    with contextlib.suppress(SystemExit):
        main([argument.format(trace=trace, tmp=tmp_path) if "{" in argument else argument for argument in arguments])
    captured = capsys.readouterr()
    assert captured.out + captured.err
    for character in set(ESCAPES) - set("[31m]0;owned2J"):
        assert character not in captured.out + captured.err, repr(captured.out + captured.err)


@pytest.mark.parametrize("key", ["base_model_name_or_path", "peft_type", "revision"])
def test_no_escape_of_an_adapter_reaches_the_terminal(tmp_path, key, capsys):
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    values = {"peft_type": "LORA", "base_model_name_or_path": "./nowhere", "num_virtual_tokens": None, key: ESCAPES}
    (tmp_path / "adapter_config.json").write_text(json.dumps(values))
    assert main(["eval", str(tmp_path), *EVAL, "--base", f"./{ESCAPES}"]) == 2
    (tmp_path / "adapter_config.json").write_text(json.dumps({**values, "num_virtual_tokens": 3}))
    assert main(["eval", str(tmp_path), *EVAL]) == 2
    captured = capsys.readouterr()
    assert not {"\x1b", "\x07", "\u202e", "\x9b"} & set(captured.out + captured.err)


def test_no_escape_of_a_growing_trace_reaches_the_terminal(tmp_path):
    import io

    from hf_gnmr.terminal import CleanStream
    from hf_gnmr.trace.follow import follow

    trace = hostile_trace(tmp_path / "run" / "trace.jsonl")
    out = io.StringIO()
    follow(trace, CleanStream(out), every=0.01, patience=0.1)
    assert "step 60" in out.getvalue() and not {"\x1b", "\x07", "\u202e", "\x9b"} & set(out.getvalue())


@pytest.mark.parametrize("target", ["fifo", "folder"])
def test_following_a_trace_that_is_none_does_not_wait(tmp_path, target):
    from hf_gnmr.trace.file import TraceError
    from hf_gnmr.trace.follow import follow

    path = tmp_path / "run" / "trace.jsonl"
    path.parent.mkdir()
    if target == "fifo":
        os.mkfifo(path)
    else:
        path.mkdir()
    with pytest.raises(TraceError, match="expected a regular file"):
        follow(path, every=0.01, patience=0.1)
