"""Whole runs through the command line."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch
from conftest import load_bf16, trace_lines
from peft import PeftModel
from safetensors.torch import load_file

from hf_gnmr.cli import main as cli
from hf_gnmr.run.folder import OutputFolder
from hf_gnmr.run.heldout import after_marker, is_right
from hf_gnmr.run.models import add_adapters, load_base
from hf_gnmr.run.recipe import LoraSection, ModelSection, load_recipe
from hf_gnmr.trace.file import read_trace
from hf_gnmr.train import main


def refused(capsys, *arguments):
    """The one-line error of a run that must not start, before the model is loaded."""
    capsys.readouterr()
    assert main(list(arguments)) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1, captured.err
    return captured.err


def test_a_run_leaves_every_file_it_promises(recipe_file, tmp_path, tiny_lm, capsys):
    assert main([recipe_file, "data.eval_rows=4", "data.generate_rows=2", "data.max_new_tokens=4"]) == 0
    run = tmp_path / "run"
    summary = json.loads((run / "summary.json").read_text())
    results = json.loads((run / "results.json").read_text())
    environment = json.loads((run / "environment.json").read_text())
    assert summary["steps"] == 6 and summary["backend"] == "int8"
    assert results["eval_rows"] == 4 and 0 <= results["exact_match"] <= 1 and results["peak_process_bytes"] > 1e6
    assert environment["packages"]["torch"] == torch.__version__ and environment["seed"] == 0
    assert environment["data"]["rows"] == 36
    assert main([str(run / "recipe.yaml"), f"training.output_dir={tmp_path / 'again'}"]) == 0
    ours, theirs = (read_trace(folder / "trace.jsonl").steps for folder in (run, tmp_path / "again"))
    assert [line["norms"] for line in ours] == [line["norms"] for line in theirs], "the resolved recipe is the run"
    PeftModel.from_pretrained(load_bf16(tiny_lm), run)
    out = capsys.readouterr().out
    assert "max_o: 1" in out and "runs on: cpu" in out and "36 rows" in out


def test_the_modes_start_from_the_same_adapters_and_see_the_same_data(recipe_file, tmp_path, tiny_lm):
    section, lora = ModelSection(tiny_lm), LoraSection(r=4)
    adapters = {}
    for backend in ("int8", "none"):
        model = add_adapters(load_base(tiny_lm, section, backend), lora, seed=5)
        adapters[backend] = {n: p for n, p in model.named_parameters() if "lora_" in n}
    assert adapters["int8"].keys() == adapters["none"].keys() and adapters["int8"]
    for name, p in adapters["int8"].items():
        assert torch.equal(p, adapters["none"][name]) and p.dtype == torch.float32
        assert (p.abs().max() > 0) == (".lora_A." in name)
    losses = {}
    for mode, overrides in {
        "gnmr": [],
        "none": ["trigger.name=none"],
        "all": ["trigger.name=all"],
        "bf16": ["backend.name=none"],
    }.items():
        out = tmp_path / mode
        assert main([recipe_file, f"training.output_dir={out}", "training.bf16=true", *overrides]) == 0
        header, lines = trace_lines(out)
        losses[mode] = [line["loss"] for line in lines]
        assert header["backend"] == ("none" if mode == "bf16" else "int8")
    assert losses["all"][0] == losses["bf16"][0], "B is zero: with every unit lifted the first loss is the BF16 model's"
    assert losses["none"][0] == losses["gnmr"][0] and losses["none"][0] != losses["bf16"][0]
    assert max(abs(a - b) for a, b in zip(losses["none"], losses["bf16"], strict=True)) < 0.05


def test_adapters_from_a_folder(recipe_file, tmp_path, tiny_lm, capsys):
    first = tmp_path / "first"
    assert main([recipe_file, f"training.output_dir={first}"]) == 0
    assert (
        main(
            [
                recipe_file,
                f"training.output_dir={tmp_path / 'second'}",
                f"lora.init_adapter={first}",
                "training.learning_rate=0",
                "training.max_steps=1",
            ]
        )
        == 0
    )
    a, b = (load_file(folder / "adapter_model.safetensors") for folder in (first, tmp_path / "second"))
    assert all(torch.equal(a[k], b[k]) for k in a)
    other = ["lora.target_modules=[q_proj]", f"training.output_dir={tmp_path / 'third'}"]
    assert main([recipe_file, f"lora.init_adapter={first}", *other]) == 2
    assert "does not fit: 0 tensors missing, 36 unexpected" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main([recipe_file, f"lora.init_adapter={tmp_path / 'empty'}", *other]) == 2
    assert "does not fit" in capsys.readouterr().err


def test_an_output_folder_that_holds_a_run(recipe_file, tmp_path, capsys):
    assert main([recipe_file]) == 0
    before = (tmp_path / "run" / "trace.jsonl").read_bytes()
    error = refused(capsys, recipe_file)
    assert "holds a run already" in error and "run.resume=auto" in error and "run.overwrite=true" in error
    assert (tmp_path / "run" / "trace.jsonl").read_bytes() == before
    assert main([recipe_file, "run.overwrite=true"]) == 0
    assert (tmp_path / "run.1" / "trace.jsonl").read_bytes() == before, "the old run is moved aside, not lost"


def test_resume_takes_the_last_whole_checkpoint(recipe_file, tmp_path):
    straight = ["training.output_dir=" + str(tmp_path / "straight")]
    assert main([recipe_file, *straight]) == 0
    saving = ["training.save_strategy=steps", "training.save_steps=2", "run.resume=auto"]
    assert main([recipe_file, *saving]) == 0
    run = tmp_path / "run"
    (run / "checkpoint-6" / "trainer_state.json").unlink()  # as if killed while saving
    (run / "checkpoint-9").mkdir()
    (run / "checkpoint-8").mkdir()
    (run / "checkpoint-8" / "trainer_state.json").write_text('{"glob')
    assert OutputFolder(load_recipe(recipe_file, saving)).checkpoint.name == "checkpoint-4"
    assert main([recipe_file, *saving]) == 0
    resumed, whole = read_trace(run / "trace.jsonl").steps, read_trace(tmp_path / "straight" / "trace.jsonl").steps
    keys = ("step", "loss", "norms", "gnmr", "delta_gnmr", "active", "triggered")
    assert [[line[k] for k in keys] for line in resumed] == [[line[k] for k in keys] for line in whole]


def test_what_is_wrong_is_told_before_the_model_is_loaded(recipe_file, tmp_path, capsys):
    for override, message in (
        ("gnmr.max_o=1.5", "gnmr.max_o=1.5"),
        ("backend.name=fp9", "backend='fp9': one of 'int8', 'activation', 'fp8', 'lowbit', 'none'"),
        ("backend.name=fp8", "no FP8 product on cpu"),
        ("trigger.name=gsnrr", "trigger='gsnrr'"),
        ("backend.recovery=disk", "recovery='disk'"),
        ("backend.eval_path=both", "eval_path='both'"),
        ("data.name=/gone/rows.jsonl", "no such file"),
        ("model.name=/gone/model", "model.name='/gone/model': no such folder"),
        ("data.prompt=ask", "no column 'ask'"),
        ("training.eval_strategy=steps", "needs data.eval_rows above 0"),
        ("training.fsdp=full_shard", "fsdp partitions the gradients"),
        ("training.optim=galore_adamw_layerwise", "uses up each gradient"),
        ("training.resume_from_checkpoint=x", "use run.resume"),
        ("training.do_train=false", "a recipe is for training"),
        ("data.eval_split=test", "needs data.eval_rows above 0"),
        ("data.prompt='{question'", "not a template"),
        ("data.prompt='{question:d}'", "cannot be filled"),
        ("gnmr.max_o=4", "the model has 3 decoder layers"),
        ("lora.layers_to_transform=[0, 7]", "the layers are 0 to 2"),
        ("run.resume=/gone/checkpoint-3", "not a whole checkpoint"),
        ("training.save_strategy=sometimes", "training.save_strategy='sometimes'"),
    ):
        assert message in refused(capsys, recipe_file, override), override
        assert not (tmp_path / "run" / "trace.jsonl").exists()


def files_of(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_run_killed_before_its_first_checkpoint_starts_anew_and_loses_no_line(recipe_file, tmp_path, capsys):
    assert main([recipe_file]) == 0
    run = tmp_path / "run"
    for name in ("adapter_model.safetensors", "results.json", "summary.json"):
        (run / name).unlink()
    trace = (run / "trace.jsonl").read_bytes()
    assert main([recipe_file, "run.resume=auto"]) == 0
    assert "no checkpoint in" in capsys.readouterr().out
    assert (run / "trace.1.jsonl").read_bytes() == trace and (run / "recipe.1.yaml").is_file()
    assert [line["step"] for line in trace_lines(run)[1]] == list(range(1, 7))


def test_a_finished_run_is_not_trained_further_by_another_launch(recipe_file, tmp_path, capsys):
    saving = ["training.save_strategy=steps", "training.save_steps=3", "run.resume=auto"]
    assert main([recipe_file, *saving]) == 0
    before = files_of(tmp_path / "run")
    assert main([recipe_file, *saving]) == 0
    assert "is finished (6 steps): nothing to do" in capsys.readouterr().out
    assert files_of(tmp_path / "run") == before
    assert main([recipe_file, *saving, "training.max_steps=8"]) == 0, "a run may be prolonged"
    assert [line["step"] for line in trace_lines(tmp_path / "run")[1]] == list(range(1, 9))


def test_a_run_cut_off_after_its_last_checkpoint_is_completed_without_another_step(recipe_file, tmp_path):
    saving = ["training.save_strategy=steps", "training.save_steps=3", "run.resume=auto", "data.eval_rows=4"]
    assert main([recipe_file, *saving]) == 0
    run = tmp_path / "run"
    adapter, summary = (run / "adapter_model.safetensors").read_bytes(), (run / "summary.json").read_bytes()
    loss = json.loads((run / "results.json").read_text())["eval_loss"]
    for name in ("adapter_model.safetensors", "adapter_config.json", "results.json", "summary.json"):
        (run / name).unlink()
    assert main([recipe_file, *saving]) == 0
    assert (run / "adapter_model.safetensors").read_bytes() == adapter
    assert (run / "summary.json").read_bytes() == summary
    assert json.loads((run / "results.json").read_text())["eval_loss"] == pytest.approx(loss, abs=1e-6)


def test_a_run_by_epochs_is_finished_when_they_are_done(recipe_file, tmp_path, capsys):
    saving = ["training.save_strategy=steps", "training.save_steps=3", "run.resume=auto", "training.max_steps=-1"]
    assert main([recipe_file, *saving, "training.num_train_epochs=1.5"]) == 0
    before = files_of(tmp_path / "run")
    for epochs in (1.5, 1):
        assert main([recipe_file, *saving, f"training.num_train_epochs={epochs}"]) == 0
        assert "nothing to do" in capsys.readouterr().out
        assert files_of(tmp_path / "run") == before


def test_resume_refuses_other_training_settings_and_checkpoints_that_are_not_whole(recipe_file, tmp_path, capsys):
    saving = ["training.save_strategy=steps", "training.save_steps=3", "training.save_only_model=true"]
    assert main([recipe_file, *saving]) == 0
    assert "no whole checkpoint" in refused(capsys, recipe_file, "run.resume=auto")
    saving[2] = "run.overwrite=true"
    assert main([recipe_file, *saving]) == 0
    again = ["run.resume=auto", "training.max_steps=9"]
    for override in ("training.learning_rate=1e-2", "training.per_device_train_batch_size=2", "training.bf16=true"):
        assert f"{override.split('=')[0]}=" in refused(capsys, recipe_file, *again, *saving[:2], override)
    recipe = tmp_path / "run" / "recipe.yaml"
    for text in ("", "model: {name: [", "- a"):
        recipe.write_text(text)
        assert "recipe.yaml, which the resumed run was begun with" in refused(capsys, recipe_file, *again)


def test_overwriting_moves_only_when_the_start_is_good_and_nothing_that_is_needed(
    recipe_file, tmp_path, capsys, monkeypatch
):
    assert main([recipe_file]) == 0
    run = tmp_path / "run"
    before = files_of(run)
    rows = run / "rows.jsonl"
    rows.write_text('{"question": "q", "answer": "a"}\n')
    assert "would move data.name" in refused(capsys, recipe_file, "run.overwrite=true", f"data.name={rows}")
    rows.unlink()
    monkeypatch.chdir(run)
    assert "current folder" in refused(capsys, recipe_file, "run.overwrite=true", "training.output_dir=.")
    monkeypatch.chdir(tmp_path)
    for override in (
        "backend.recovery_source=/nowhere",
        "training.lr_scheduler_type=cosine_with_min_lr",
        "training.dataloader_num_workers=-3",
        "model.layers=nothing.*",
        "trigger.name=listed trigger.units=[nothing]",
        "trigger.name=static trigger.warmup=99",
    ):
        assert main([recipe_file, "run.overwrite=true", *override.split()]) == 2, override
        assert files_of(run) == before and not (tmp_path / "run.1").exists(), override
    (tmp_path / "link").symlink_to(run)
    assert main([recipe_file, "run.overwrite=true", f"training.output_dir={tmp_path / 'link'}"]) == 0
    assert files_of(tmp_path / "run.1") == before and (tmp_path / "link").resolve() == run
    assert (run / "summary.json").is_file()


def test_exact_match_counts_what_greedy_decoding_gets_right_in_any_batch(tiny_lm):
    """A model that answers by the length of the prompt: right for some rows, in batches of unequal prompts."""
    from conftest import byte_tokenizer

    from hf_gnmr.run.heldout import exact_matches

    tokenizer = byte_tokenizer()

    class Counts(torch.nn.Module):
        device, config = torch.device("cpu"), type("C", (), {})()

        def generate(self, input_ids, attention_mask, max_new_tokens, **options):
            assert bool(attention_mask[:, -1].all()), "prompts must end where decoding begins"
            answers = [f"#### {int(n) % 3}" for n in attention_mask.sum(1)]
            new = tokenizer(answers, add_special_tokens=False, return_tensors="pt")["input_ids"]
            return torch.cat([input_ids, new], dim=1)

    rows = [{"prompt": "x" * n, "answer": f" so\n#### {n % 3 if n % 4 else 9}"} for n in range(1, 41)]
    recipe = type("R", (), {"data": type("D", (), {"answer_marker": "####", "max_new_tokens": 8})})
    assert exact_matches(Counts(), tokenizer, rows, recipe) == 30
    assert tokenizer.padding_side == byte_tokenizer().padding_side


def test_dropout_does_not_depend_on_how_the_model_was_loaded(recipe_file, tmp_path, monkeypatch):
    runs = []
    for draws in (0, 7):

        def loading(*arguments, draws=draws):
            torch.rand(draws)
            return load_base(*arguments)

        monkeypatch.setattr("hf_gnmr.run.prepare.load_base", loading)
        out = tmp_path / str(draws)
        assert main([recipe_file, f"training.output_dir={out}", "lora.lora_dropout=0.2", "training.max_steps=3"]) == 0
        runs.append([line["norms"] for line in trace_lines(out)[1]])
    assert runs[0] == runs[1]


@pytest.mark.slow
def test_one_recipe_three_ways(recipe_file, tmp_path):
    script = pathlib.Path(__file__).parents[2] / "eval" / "three_ways.py"
    out = tmp_path / "out"
    result = subprocess.run(
        [sys.executable, script, recipe_file, "--out", out, "--rounds", "11", "training.max_steps=2", "data.eval_rows=4"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    table = (out / "table.md").read_text()
    for row in ("held-out loss", "promotion ratio", "hit-maxO", "switches", "weight bytes", "step time against INT8"):
        assert f"| {row}" in table
    ratios = json.loads((out / "table.json").read_text())["step_time_ratios"]
    assert ratios["int8"]["median"] == 1.0 and ratios["bf16"]["median"] > 0


def test_resume_refuses_what_would_destroy_or_mix_runs(recipe_file, tmp_path, capsys):
    saving = ["training.save_strategy=steps", "training.save_steps=3"]
    a, b = tmp_path / "a", tmp_path / "b"
    assert main([recipe_file, *saving, f"training.output_dir={a}"]) == 0
    assert main([recipe_file, f"training.output_dir={b}"]) == 0
    before = {folder: files_of(folder) for folder in (a, b)}
    assert "no whole checkpoint to go on from" in refused(capsys, recipe_file, f"training.output_dir={b}", "run.resume=auto")
    assert "holds a run of its own" in refused(
        capsys, recipe_file, f"training.output_dir={b}", f"run.resume={a}/checkpoint-3"
    )
    for override in ("gnmr.alpha=1.3", "lora.r=8", "trigger.name=none", "training.seed=5", "data.max_length=64"):
        error = refused(capsys, recipe_file, f"training.output_dir={a}", "run.resume=auto", "training.max_steps=9", override)
        assert override.split("=")[0] in error and "was begun with" in error
    assert {folder: files_of(folder) for folder in (a, b)} == before


def test_resume_into_a_new_folder_and_overwrite_with_resume(recipe_file, tmp_path, capsys):
    saving = ["training.save_strategy=steps", "training.save_steps=3"]
    assert main([recipe_file, *saving]) == 0
    elsewhere = tmp_path / "elsewhere"
    assert main([recipe_file, f"training.output_dir={elsewhere}", f"run.resume={tmp_path}/run/checkpoint-3"]) == 0
    assert [line["step"] for line in trace_lines(elsewhere)[1]] == [4, 5, 6]
    assert "it starts anew" in capsys.readouterr().out
    before = files_of(tmp_path / "run")
    assert main([recipe_file, *saving, "run.resume=auto", "run.overwrite=true"]) == 0
    assert files_of(tmp_path / "run.1") == before
    assert [line["step"] for line in trace_lines(tmp_path / "run")[1]] == list(range(1, 7))


def test_a_refused_start_touches_no_file_and_does_not_block_the_next(recipe_file, tmp_path, capsys):
    for override in ("gnmr.max_o=4", "lora.target_modules=[nothing]", "training.adam_beta1=2", "training.report_to=[nope]"):
        assert main([recipe_file, override]) == 2, override
        assert not (tmp_path / "run").exists() or not list((tmp_path / "run").iterdir()), override
    assert main([recipe_file]) == 0


def test_what_cannot_be_written_is_told_before_the_model_is_loaded(recipe_file, tmp_path, capsys):
    file = tmp_path / "file"
    file.write_text("")
    assert "is not a folder" in refused(capsys, recipe_file, f"training.output_dir={file}")
    assert "cannot be written" in refused(capsys, recipe_file, f"training.output_dir={file}/run")


def test_exact_match_is_decided_by_the_reference():
    assert is_right(" 3 + 4 = 7\n#### 7", "#### 7", "####")
    assert is_right("#### 1,200 \nmore", "so\n#### 1200", "####")
    assert not is_right("no marker", "#### 7", "####")
    assert not is_right("anything", "answer without marker", "####")
    assert is_right(" yes ", "yes", "####") and is_right("yes", "yes", "")
    assert after_marker("nothing", "####") is None


def test_label_smoothing_has_a_loss_in_the_trace_of_our_trainer(recipe_file, tmp_path):
    saving = ["training.save_strategy=steps", "training.save_steps=6"]
    assert main([recipe_file, *saving, "training.label_smoothing_factor=0.1", "training.gradient_accumulation_steps=2"]) == 0
    state = json.loads((tmp_path / "run" / "checkpoint-6" / "trainer_state.json").read_text())
    logged = [entry["loss"] for entry in state["log_history"] if "loss" in entry]
    assert [line["loss"] for line in trace_lines(tmp_path / "run")[1]] == pytest.approx(logged, abs=2e-3)


def test_the_launchers_precision_is_the_one_that_is_told(recipe_file, tmp_path, capsys, monkeypatch):
    from hf_gnmr.run.environment import precision

    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert precision(type("A", (), {"bf16": False, "fp16": False})) == "bf16"
    assert precision(type("A", (), {"bf16": False, "fp16": True})) == "fp16"
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    assert precision(type("A", (), {"bf16": False, "fp16": False})) == "off"


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher",
    [
        [sys.executable, "-m", "hf_gnmr.train"],
        ["hf-gnmr", "train"],
        ["accelerate", "launch", "--cpu", "-m", "hf_gnmr.train"],
        ["torchrun", "--nproc_per_node", "1", "-m", "hf_gnmr.train"],
        ["accelerate", "launch", "--cpu", "--no_python"],
    ],
    ids=["python -m", "hf-gnmr", "accelerate", "torchrun", "recipe itself"],
)
def test_every_way_to_launch(recipe_file, tmp_path, launcher):
    file = pathlib.Path(recipe_file)
    file.write_text("#!/usr/bin/env -S hf-gnmr train\n" + file.read_text())
    file.chmod(0o755)
    command = [str(pathlib.Path(sys.executable).parent / launcher[0]) if "/" not in launcher[0] else launcher[0]]
    path = f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    result = subprocess.run(
        [*command, *launcher[1:], str(file)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PATH": path},
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert len(read_trace(tmp_path / "run" / "trace.jsonl").steps) == 6


def test_command_line_help_and_unknown_commands(capsys):
    for arguments, status in ((["--help"], 0), (["train", "--help"], 0), (["nope"], 2), ([], 2)):
        with pytest.raises(SystemExit) as stop:
            cli(arguments)
        assert stop.value.code == status
    assert cli(["import-gguf", "/gone.gguf", "/tmp/never"]) == 2
    assert "/gone.gguf: no such file" in capsys.readouterr().err
