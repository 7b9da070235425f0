"""A resumed run continues the history only if a step is made of as many rows as before, in whatever parts."""

from __future__ import annotations

import json
import shutil
import warnings

import numpy as np
import pytest
import torch
from conftest import load_int8, token_rows, trace_lines, with_lora
from transformers import Trainer, TrainingArguments

from hf_gnmr import ConfigError, GNMRCallback, GNMRSession
from hf_gnmr.training.resuming import GlobalBatch

SETTINGS = {"max_o": 1, "alpha": 1.1, "alpha_init_fraction": 0.0}
ROWS = token_rows(1) * 64
BATCH = {k: torch.tensor(ROWS[0][k])[None] for k in ("input_ids", "labels")}


def arguments(folder, rows, accumulation, **changes):
    return TrainingArguments(
        output_dir=str(folder), use_cpu=True, report_to=[], save_strategy="steps", save_steps=3, logging_steps=1, seed=0,
        disable_tqdm=True, learning_rate=1e-9, per_device_train_batch_size=rows, gradient_accumulation_steps=accumulation,
        **{"max_steps": 3, **changes},
    )  # fmt: skip


@pytest.fixture(scope="module")
def begun(tiny, tmp_path_factory):
    """Three steps of 8 rows, and a checkpoint."""
    folder = tmp_path_factory.mktemp("begun") / "run"
    callback = GNMRCallback(**SETTINGS)
    Trainer(with_lora(load_int8(tiny)), arguments(folder, 8, 1), train_dataset=ROWS, callbacks=[callback]).train()
    return folder


def resume(begun, tiny, tmp_path, rows, accumulation, edit=None, **options):
    run = tmp_path / "run"
    shutil.copytree(begun, run)
    checkpoint = run / "checkpoint-3"
    if edit is not None:
        state = json.loads((checkpoint / "trainer_state.json").read_text())
        edit(state["stateful_callbacks"]["GNMRCallback"]["attributes"]["_setup"])
        (checkpoint / "trainer_state.json").write_text(json.dumps(state))
    callback = GNMRCallback(**SETTINGS, **options)
    model = with_lora(load_int8(tiny))
    trainer = Trainer(model, arguments(run, rows, accumulation, max_steps=6), train_dataset=ROWS, callbacks=[callback])
    trainer.train(resume_from_checkpoint=str(checkpoint))
    return trace_lines(run)[1], callback


@pytest.mark.parametrize(("rows", "accumulation"), [(8, 1), (4, 2), (2, 4), (1, 8)])
def test_a_step_of_as_many_rows_continues_the_history(begun, tiny, tmp_path, rows, accumulation):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*rows of a step.*")
        lines, callback = resume(begun, tiny, tmp_path, rows, accumulation)
    assert [line["step"] for line in lines] == list(range(1, 7)) and callback.controller.monitor.norm_count.tolist() == [
        6
    ] * 3
    for line in lines[3:]:
        np.testing.assert_allclose(line["gnmr"], 1.0, atol=0.03)
        assert line["triggered"] == []


@pytest.mark.parametrize(("rows", "accumulation"), [(1, 1), (4, 1), (8, 2), (16, 1)])
def test_a_step_of_other_rows_is_refused_naming_both(begun, tiny, tmp_path, rows, accumulation):
    with pytest.raises(ConfigError) as error:
        resume(begun, tiny, tmp_path, rows, accumulation)
    text = str(error.value)
    assert "8 rows a step (8 rows × gradient_accumulation_steps=1 × 1 process)" in text
    assert f"{rows * accumulation} rows a step ({rows} rows × gradient_accumulation_steps={accumulation}" in text
    assert "resume_history='new'" in text and "run.resume_history: new" in text


def test_a_new_history_is_started_where_asked_for(begun, tiny, tmp_path, capsys):
    lines, callback = resume(begun, tiny, tmp_path, 1, 1, resume_history="new")
    assert [line["step"] for line in lines] == list(range(1, 7)), "in the trace of the same run"
    assert callback.controller.monitor.norm_count.tolist() == [3] * 3
    assert callback.controller.steps_done == 6, "the schedules continue"
    np.testing.assert_allclose(lines[3]["gnmr"], 1.0)
    assert all(line["triggered"] == [] for line in lines[3:])
    assert "resumed at step 3 with a new history" in capsys.readouterr().out


def test_a_checkpoint_without_the_field_continues_with_a_warning(begun, tiny, tmp_path):
    def older(setup):
        del setup["rows_per_micro_batch"], setup["processes"]

    with pytest.warns(UserWarning, match="does not state the rows of a step; this run has 8 rows a step"):
        lines, callback = resume(begun, tiny, tmp_path, 8, 1, older)
    assert callback.controller.monitor.norm_count.tolist() == [6] * 3


def test_and_is_refused_as_before_under_another_accumulation(begun, tiny, tmp_path):
    def older(setup):
        del setup["rows_per_micro_batch"], setup["processes"]

    with pytest.raises(ConfigError, match="written with gradient_accumulation_steps=1, this run has 2"):
        resume(begun, tiny, tmp_path, 4, 2, older)


def test_a_new_history_also_ignores_other_settings(begun, tiny, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(begun, run)
    callback = GNMRCallback(max_o=1, alpha=1.3, alpha_init_fraction=0.0, trigger="jacobian", resume_history="new")
    trainer = Trainer(
        with_lora(load_int8(tiny)), arguments(run, 2, 1, max_steps=5), train_dataset=ROWS, callbacks=[callback]
    )
    trainer.train(resume_from_checkpoint=str(run / "checkpoint-3"))
    assert callback.controller.steps_done == 5 and callback.controller.name == "jacobian"


@pytest.mark.parametrize("value", ["fresh", "", None, True, "New"])
def test_resume_history_is_checked(value):
    with pytest.raises(ConfigError, match="resume_history=.*expected one of 'continue', 'new'"):
        GNMRCallback(resume_history=value)


@pytest.mark.parametrize("processes", [(4, 2), (1, 8), (8, 1)])
def test_processes_count(processes):
    before, now = processes
    batch = GlobalBatch(2, 8 // now, now)
    assert batch.check(GlobalBatch(2, 8 // before, before).to_dict()) is None, "half the processes, double accumulation"
    with pytest.raises(ConfigError, match=rf"× {before} process"):
        batch.check(GlobalBatch(4, 8 // before, before).to_dict())


def test_a_custom_loop_compares_what_it_knows(tiny):
    model = with_lora(load_int8(tiny)).train()

    def session(**options):
        return GNMRSession(model, max_o=1, alpha_init_fraction=0.0, **options)

    first = session(gradient_accumulation_steps=2)
    for _ in range(2):
        (model(**BATCH).loss / 2).backward()
    first.observe()
    first.decide()
    state = json.loads(json.dumps(first.state_dict()))
    first.detach()
    same = session(gradient_accumulation_steps=2)
    same.load_state_dict(state)
    assert same.controller.steps_done == 1
    same.detach()
    other = session(gradient_accumulation_steps=4)
    with pytest.raises(ConfigError, match=r"2 micro-batches a step.*4 micro-batches a step"):
        other.load_state_dict(state)
    other.detach()
    new = session(gradient_accumulation_steps=4, resume_history="new")
    new.load_state_dict(state)
    assert new.steps_done == 1 and new.controller.monitor.norm_count.tolist() == [0] * 3
    new.detach()
    known = session(gradient_accumulation_steps=2, rows_per_micro_batch=4)
    with pytest.warns(UserWarning, match="cannot be compared"):
        known.load_state_dict(state)
    known.detach()
    with pytest.raises(ConfigError, match="rows_per_micro_batch=0"):
        session(rows_per_micro_batch=0)
