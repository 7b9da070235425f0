"""The output folder: what may start in it, what is resumed, and that no run loses a file to another."""

from __future__ import annotations

import json
import os
import shutil
import warnings

import pytest
import torch
import yaml
from conftest import trace_lines
from runs import SAVING, files_of, refused
from safetensors.torch import load_file, save_file

from hf_gnmr.files import FileError
from hf_gnmr.run.folder import CHECKPOINT, OutputFolder, is_whole, last_checkpoint
from hf_gnmr.run.recipe import load_recipe
from hf_gnmr.trace.file import read_trace
from hf_gnmr.train import main
from hf_gnmr.training.whole import damage

# -- checkpoints, by their files -----------------------------------------------------------------------------------------


def write_checkpoint(folder, step, weights="adapter_model.safetensors", **state):
    """A checkpoint as far as its files go."""
    checkpoint = folder / f"checkpoint-{step}"
    checkpoint.mkdir(parents=True)
    for name in CHECKPOINT:
        torch.save({"state": torch.arange(8.0)}, checkpoint / name)
    shard = "model-00001-of-00001.safetensors" if weights.endswith(".json") else weights
    save_file({"a": torch.ones(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}, checkpoint / shard)
    if weights.endswith(".json"):
        (checkpoint / weights).write_text(json.dumps({"weight_map": {"a": shard, "b": shard}}))
    values = {"global_step": step, "max_steps": 6, "num_train_epochs": 2, **state}
    (checkpoint / "trainer_state.json").write_text(json.dumps(values))
    return checkpoint


@pytest.mark.parametrize("weights", ["adapter_model.safetensors", "model.safetensors", "model.safetensors.index.json"])
def test_a_checkpoint_with_all_its_files_is_whole(tmp_path, weights):
    assert is_whole(write_checkpoint(tmp_path, 3, weights))


@pytest.mark.parametrize("name", [*CHECKPOINT, "adapter_model.safetensors"])
def test_a_checkpoint_that_lacks_a_file_is_not(tmp_path, name):
    checkpoint = write_checkpoint(tmp_path, 3)
    (checkpoint / name).unlink()
    assert not is_whole(checkpoint)


@pytest.mark.parametrize("text", ["", '{"glob', "[1]", "\x00"])
def test_a_checkpoint_with_a_broken_state_is_not(tmp_path, text):
    checkpoint = write_checkpoint(tmp_path, 3)
    (checkpoint / "trainer_state.json").write_text(text)
    assert not is_whole(checkpoint)


CUTS = {"empty": 0.0, "header": 0.02, "half": 0.5, "last byte": 1.0}
"""How much of a file is left when it is cut; 1.0: all but its last byte."""


@pytest.mark.parametrize("share", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize(
    "name",
    [
        "optimizer.pt",
        "scheduler.pt",
        "rng_state.pth",
        "rng_state_1.pth",
        "scaler.pt",
        "adapter_model.safetensors",
        "gnmr_trigger.safetensors",
        "second/adapter_model.safetensors",
        "adapter_model.bin",
    ],
)
def test_a_checkpoint_with_a_file_that_is_cut_off_is_not_whole(tmp_path, name, share):
    checkpoint = write_checkpoint(tmp_path, 3)
    file = checkpoint / name
    file.parent.mkdir(exist_ok=True)
    if name == "rng_state_1.pth":
        torch.save({"state": 1}, checkpoint / "rng_state_0.pth")
    if name.endswith(".safetensors"):
        save_file({"a": torch.ones(20, 30)}, file)
    else:
        torch.save({"state": torch.arange(800.0)}, file)
    assert is_whole(checkpoint)
    content = file.read_bytes()
    file.write_bytes(content[: min(int(share * len(content)), len(content) - 1)])
    assert not is_whole(checkpoint)
    assert file.name in damage(checkpoint)


def index_without(checkpoint, change):
    index = checkpoint / "model.safetensors.index.json"
    shard = checkpoint / "model-00001-of-00001.safetensors"
    if change == "shard missing":
        shard.unlink()
    elif change == "shard cut off":
        shard.write_bytes(shard.read_bytes()[:-1])
    elif change == "tensor missing":
        save_file({"a": torch.ones(2, 3)}, shard)
    elif change == "index empty":
        index.write_text("")
    else:
        index.write_text('{"weight_map": {"a": "../model.safetensors"}}')


@pytest.mark.parametrize("change", ["shard missing", "shard cut off", "tensor missing", "index empty", "shard elsewhere"])
def test_a_sharded_checkpoint_that_is_not_whole(tmp_path, change):
    checkpoint = write_checkpoint(tmp_path, 3, "model.safetensors.index.json")
    assert is_whole(checkpoint)
    index_without(checkpoint, change)
    assert not is_whole(checkpoint)


@pytest.mark.parametrize(("ranks", "missing"), [((0, 1), None), ((0, 1, 2), None), ((1,), 0), ((0,), 1), ((0, 2), 1)])
def test_a_checkpoint_of_several_processes_needs_each_ones_random_state(tmp_path, ranks, missing):
    checkpoint = write_checkpoint(tmp_path, 3)
    for rank in ranks:
        torch.save({"rank": rank}, checkpoint / f"rng_state_{rank}.pth")
    assert is_whole(checkpoint) == (missing is None)
    assert missing is None or f"no rng_state_{missing}.pth" in damage(checkpoint)


def test_files_with_wrong_entries_are_not_whole(tmp_path):
    checkpoint = write_checkpoint(tmp_path, 3)
    content = (checkpoint / "optimizer.pt").read_bytes()
    (checkpoint / "optimizer.pt").write_bytes(b"\0" * 400 + content[400:])  # blocks that never reached the disk
    assert "optimizer.pt" in damage(checkpoint)


@pytest.mark.parametrize("name", ["optimizer.pt", "rng_state.pth"])
@pytest.mark.parametrize("place", [0.3, 0.5, 0.7])
def test_a_torch_file_that_is_damaged_in_its_middle_is_not_whole(tmp_path, name, place):
    checkpoint = write_checkpoint(tmp_path, 3)
    torch.save({"state": torch.arange(8000.0)}, checkpoint / name)
    content = bytearray((checkpoint / name).read_bytes())
    content[int(place * len(content))] ^= 1
    (checkpoint / name).write_bytes(content)
    assert f"{name} is damaged: 0 does not have its checksum" in damage(checkpoint)


def test_torch_files_without_checksums_are_whole(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        checkpoint = write_checkpoint(tmp_path, 3)
    finally:
        torch.serialization.set_crc32_options(True)
    assert is_whole(checkpoint)


def test_the_earlier_checkpoint_is_taken_and_reported(tmp_path):
    for step in (2, 4, 6):
        write_checkpoint(tmp_path, step)
    for step, name in ((4, "optimizer.pt"), (6, "adapter_model.safetensors")):
        (tmp_path / f"checkpoint-{step}" / name).write_bytes(b"")
    with warnings.catch_warnings(record=True) as caught:
        assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-2"
    (text,) = [str(warning.message) for warning in caught]
    assert "checkpoint-6 is not complete" in text and "checkpoint-4 is not complete" in text
    assert "adapter_model.safetensors is empty" in text and "optimizer.pt is empty" in text
    assert text.endswith("checkpoint-2 is used")


def test_the_last_whole_checkpoint_is_the_one_of_most_steps(tmp_path):
    assert last_checkpoint(tmp_path) is None
    for step in (2, 9, 10):
        write_checkpoint(tmp_path, step)
    (tmp_path / "checkpoint-12").mkdir()
    (tmp_path / "checkpoint-best").mkdir()
    with pytest.warns(UserWarning, match=r"checkpoint-12 is not complete: no trainer_state.json, .*checkpoint-10 is used"):
        assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-10"


def test_checkpoints_of_which_none_is_whole_are_reported(tmp_path):
    (tmp_path / "checkpoint-12").mkdir()
    with pytest.warns(UserWarning, match="has 1 checkpoints, none of them complete"):
        assert last_checkpoint(tmp_path) is None


@pytest.mark.parametrize(
    ("step", "overrides", "finished_at"),
    [
        (6, ["training.max_steps=6"], 6),
        (6, ["training.max_steps=4"], 6),
        (6, ["training.max_steps=7"], None),
        (3, ["training.max_steps=6"], None),
        (6, ["training.max_steps=-1", "training.num_train_epochs=2"], 6),
        (6, ["training.max_steps=-1", "training.num_train_epochs=1.5"], 6),
        (6, ["training.max_steps=-1", "training.num_train_epochs=2.1"], None),
        (3, ["training.max_steps=-1", "training.num_train_epochs=2"], None),
    ],
)
def test_whether_a_run_is_finished_is_known_from_its_checkpoint(recipe_file, tmp_path, step, overrides, finished_at):
    write_checkpoint(tmp_path / "run", step)
    assert OutputFolder(load_recipe(recipe_file, ["run.resume=auto", *overrides])).finished_at() == finished_at


def test_a_state_that_breaks_after_the_check_is_named(recipe_file, tmp_path):
    checkpoint = write_checkpoint(tmp_path / "run", 3)
    folder = OutputFolder(load_recipe(recipe_file, ["run.resume=auto"]))
    (checkpoint / "trainer_state.json").write_text("{")
    with pytest.raises(FileError, match="trainer_state.json"):
        folder.finished_at()


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_refused(recipe_file, tmp_path, capsys):
    (tmp_path / "locked").mkdir(mode=0o500)
    assert "cannot be written" in refused(capsys, recipe_file, f"training.output_dir={tmp_path}/locked/run")


# -- runs ----------------------------------------------------------------------------------------------------------------


def test_a_folder_that_holds_a_run_is_refused_or_moved_aside(recipe_file, tmp_path, capsys):
    assert main([recipe_file]) == 0
    before = (tmp_path / "run" / "trace.jsonl").read_bytes()
    error = refused(capsys, recipe_file)
    assert "already holds a run" in error and "run.resume=auto" in error and "run.overwrite=true" in error
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
    with pytest.warns(UserWarning, match=r"checkpoint-4 is used"):
        folder = OutputFolder(load_recipe(recipe_file, saving))
    assert folder.checkpoint.name == "checkpoint-4"
    with pytest.warns(UserWarning, match=r"checkpoint-4 is used"):
        assert main([recipe_file, *saving]) == 0
    resumed, whole = read_trace(run / "trace.jsonl").steps, read_trace(tmp_path / "straight" / "trace.jsonl").steps
    keys = ("step", "loss", "norms", "gnmr", "delta_gnmr", "active", "triggered")
    assert [[line[k] for k in keys] for line in resumed] == [[line[k] for k in keys] for line in whole]


def test_a_run_killed_before_its_first_checkpoint_starts_from_scratch_and_loses_no_line(recipe_file, tmp_path, capsys):
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
    saving = [*SAVING, "run.resume=auto"]
    assert main([recipe_file, *saving]) == 0
    before = files_of(tmp_path / "run")
    assert main([recipe_file, *saving]) == 0
    assert "is finished (6 steps): nothing to do" in capsys.readouterr().out
    assert files_of(tmp_path / "run") == before
    assert main([recipe_file, *saving, "training.max_steps=8"]) == 0, "a run may be prolonged"
    assert [line["step"] for line in trace_lines(tmp_path / "run")[1]] == list(range(1, 9))


def test_a_run_cut_off_after_its_last_checkpoint_is_completed_without_another_step(recipe_file, tmp_path):
    saving = [*SAVING, "run.resume=auto", "data.eval_rows=4"]
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


@pytest.mark.parametrize("epochs", [1.5, 1])
def test_a_run_by_epochs_is_finished_when_they_are_done(recipe_file, tmp_path, capsys, epochs):
    saving = [*SAVING, "run.resume=auto", "training.max_steps=-1"]
    assert main([recipe_file, *saving, "training.num_train_epochs=1.5"]) == 0
    before = files_of(tmp_path / "run")
    assert main([recipe_file, *saving, f"training.num_train_epochs={epochs}"]) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert files_of(tmp_path / "run") == before


def test_a_run_that_saved_weights_only_cannot_be_resumed(recipe_file, capsys):
    assert main([recipe_file, *SAVING, "training.save_only_model=true"]) == 0
    with pytest.warns(UserWarning, match="none of them complete"):
        assert "no complete checkpoint" in refused(capsys, recipe_file, "run.resume=auto")


@pytest.fixture
def saved(recipe_file, tmp_path):
    """A finished run with checkpoints, and its files."""
    run = tmp_path / "run"
    assert main([recipe_file, *SAVING]) == 0
    return run, files_of(run)


@pytest.mark.parametrize(
    "override",
    [
        "training.learning_rate=1e-2",
        "training.bf16=true",
        "training.seed=5",
        "gnmr.alpha=1.3",
        "lora.r=8",
        "trigger.name=none",
        "data.max_length=64",
    ],
)
def test_resume_refuses_other_settings(saved, recipe_file, capsys, override):
    run, before = saved
    error = refused(capsys, recipe_file, "run.resume=auto", "training.max_steps=9", *SAVING, override)
    assert f"{override.split('=')[0]}=" in error and "was started with" in error
    assert files_of(run) == before


def rewrite(file, change):
    tensors = load_file(file)
    save_file(change(tensors), file, metadata={"format": "pt"})


FIRST = "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"
MISFITS = {
    "missing": (lambda t: {k: v for k, v in t.items() if k != FIRST}, "missing: "),
    "unexpected": (lambda t: {**t, FIRST.replace("layers.0", "layers.7"): t[FIRST].clone()}, "unexpected: "),
    "other keys": (lambda t: {k.replace("lora_A", "lora_X"): v for k, v in t.items()}, "unexpected: "),
    "other shape": (lambda t: {**t, FIRST: torch.ones(2, t[FIRST].shape[1])}, "of another shape: "),
}
"""What is done to a checkpoint's adapter, and how the refusal begins to name it."""


@pytest.mark.parametrize(("change", "message"), MISFITS.values(), ids=MISFITS)
def test_resume_refuses_an_adapter_that_does_not_fit(saved, recipe_file, capsys, change, message):
    run, _ = saved
    rewrite(run / "checkpoint-3" / "adapter_model.safetensors", change)
    shutil.rmtree(run / "checkpoint-6")
    before = files_of(run)
    assert main([recipe_file, "run.resume=auto", *SAVING]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert (
        error.startswith("error: the weights in")
        and "do not fit the model" in error
        and message in error
        and "lora_" in error
    )
    assert files_of(run) == before


def test_an_explicit_checkpoint_that_is_cut_off_is_refused(saved, recipe_file, capsys):
    file = saved[0] / "checkpoint-3" / "optimizer.pt"
    file.write_bytes(file.read_bytes()[:-100])
    error = refused(capsys, recipe_file, f"run.resume={saved[0]}/checkpoint-3", *SAVING)
    assert "expected a complete checkpoint" in error and "optimizer.pt is empty or cut off" in error


def test_a_checkpoint_without_random_state_is_resumed_and_reported(saved, recipe_file):
    run = saved[0]
    (run / "checkpoint-3" / "rng_state.pth").unlink()
    shutil.rmtree(run / "checkpoint-6")
    with pytest.warns(UserWarning, match=r"checkpoint-3 has no rng_state.pth: dropout and sampling will not be those"):
        assert main([recipe_file, "run.resume=auto", *SAVING]) == 0


@pytest.mark.parametrize("text", ["", "model: {name: [", "- a"])
def test_resume_refuses_a_broken_stored_recipe(saved, recipe_file, capsys, text):
    (saved[0] / "recipe.yaml").write_text(text)
    error = refused(capsys, recipe_file, "run.resume=auto", "training.max_steps=9")
    assert "recipe.yaml, the recipe of the run to be resumed" in error


@pytest.mark.parametrize(
    "key", ["lora.use_rslora", "data.max_new_tokens", "gnmr.t_lock", "model.layers", "backend.pin_memory"]
)
def test_a_key_that_is_younger_than_the_stored_recipe_had_its_default(saved, recipe_file, capsys, key):
    stored = saved[0] / "recipe.yaml"
    recipe = yaml.safe_load(stored.read_text())
    section, name = key.split(".")
    default = recipe[section].pop(name)
    stored.write_text(yaml.safe_dump(recipe))
    folder = OutputFolder(load_recipe(recipe_file, ["run.resume=auto", "training.max_steps=9", *SAVING]))
    assert folder.begun_with[section][name] == default
    error = refused(capsys, recipe_file, "run.resume=auto", "training.max_steps=9", *SAVING, "lora.use_rslora=true")
    assert "lora.use_rslora=True: the run to be resumed was started with False" in error


def test_resume_without_a_stored_recipe_is_reported(saved, recipe_file, capsys):
    (saved[0] / "recipe.yaml").unlink()
    assert OutputFolder(load_recipe(recipe_file, ["run.resume=auto", "lora.r=8"])).begun_with == {}
    assert "no recipe.yaml beside" in capsys.readouterr().out


def test_resume_refuses_to_mix_runs(saved, recipe_file, tmp_path, capsys):
    (run, before), other = saved, tmp_path / "other"
    assert main([recipe_file, f"training.output_dir={other}"]) == 0
    before_other = files_of(other)
    error = refused(capsys, recipe_file, f"training.output_dir={other}", "run.resume=auto")
    assert "no complete checkpoint to resume" in error
    error = refused(capsys, recipe_file, f"training.output_dir={other}", f"run.resume={run}/checkpoint-3")
    assert "holds a different run" in error
    assert files_of(run) == before and files_of(other) == before_other


def test_overwriting_moves_nothing_that_is_needed(recipe_file, tmp_path, capsys, monkeypatch):
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
    (tmp_path / "link").symlink_to(run)
    assert main([recipe_file, "run.overwrite=true", f"training.output_dir={tmp_path / 'link'}"]) == 0
    assert files_of(tmp_path / "run.1") == before and (tmp_path / "link").resolve() == run
    assert (run / "summary.json").is_file()


@pytest.mark.parametrize(
    "overrides",
    [
        ["backend.recovery_source=/nowhere"],
        ["training.lr_scheduler_type=cosine_with_min_lr"],
        ["training.dataloader_num_workers=-3"],
        ["model.layers=nothing.*"],
        ["trigger.name=listed", "trigger.units=[nothing]"],
        ["trigger.name=static", "trigger.warmup=99"],
    ],
    ids=lambda overrides: overrides[-1],
)
def test_overwriting_moves_nothing_for_a_start_that_is_refused(saved, recipe_file, tmp_path, overrides):
    run, before = saved
    assert main([recipe_file, "run.overwrite=true", *overrides]) == 2
    assert files_of(run) == before and not (tmp_path / "run.1").exists()


def test_resume_into_a_new_folder_and_overwrite_with_resume(recipe_file, tmp_path, capsys):
    assert main([recipe_file, *SAVING]) == 0
    elsewhere = tmp_path / "elsewhere"
    assert main([recipe_file, f"training.output_dir={elsewhere}", f"run.resume={tmp_path}/run/checkpoint-3"]) == 0
    assert [line["step"] for line in trace_lines(elsewhere)[1]] == [4, 5, 6]
    assert "the trace of this run" in capsys.readouterr().out
    before = files_of(tmp_path / "run")
    assert main([recipe_file, *SAVING, "run.resume=auto", "run.overwrite=true"]) == 0
    assert files_of(tmp_path / "run.1") == before
    assert [line["step"] for line in trace_lines(tmp_path / "run")[1]] == list(range(1, 7))


@pytest.mark.parametrize(
    "override", ["gnmr.max_o=4", "lora.target_modules=[nothing]", "training.adam_beta1=2", "training.report_to=[nope]"]
)
def test_a_refused_start_touches_no_file_and_does_not_block_the_next(recipe_file, tmp_path, override):
    assert main([recipe_file, override]) == 2
    assert not (tmp_path / "run").exists() or not list((tmp_path / "run").iterdir())
    assert main([recipe_file]) == 0


def test_a_folder_that_cannot_be_written_is_reported_before_the_model_is_loaded(recipe_file, tmp_path, capsys):
    file = tmp_path / "file"
    file.write_text("")
    assert "is not a folder" in refused(capsys, recipe_file, f"training.output_dir={file}")
    assert "cannot be written" in refused(capsys, recipe_file, f"training.output_dir={file}/run")
