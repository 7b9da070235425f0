"""Runs cut at any step, also by kill -9, and resumed: bit for bit the uninterrupted run, or a clear refusal."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from conftest import load_int8, trace_lines, with_lora
from transformers import TrainerCallback

from hf_gnmr import ConfigError, GNMRCallback, SetupError, last_checkpoint

SETTINGS = {"max_o": 1, "alpha": 0.9, "alpha_init": 1.1, "alpha_init_fraction": 0.25, "t_lock": 2}
LORA = {"lora_dropout": 0.1}
HELPERS = pathlib.Path(__file__).parents[1], pathlib.Path(__file__).parent
"""Folders of the modules that a separate process imports: conftest and this file."""


def comparable(run):
    return [{k: v for k, v in line.items() if not k.endswith("_ms")} for line in trace_lines(run)[1]]


def model_for(tiny):
    return with_lora(load_int8(tiny), **LORA)


@pytest.fixture(scope="module")
def straight(tiny, tmp_path_factory):
    """Six uninterrupted steps with a checkpoint after each, and the parameters at the end."""
    from conftest import token_rows
    from transformers import Trainer, TrainingArguments

    folder = tmp_path_factory.mktemp("straight") / "run"
    model = model_for(tiny)
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        report_to=[],
        max_steps=6,
        save_strategy="steps",
        save_steps=1,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        logging_steps=1,
        disable_tqdm=True,
        seed=0,
    )
    Trainer(model, arguments, train_dataset=token_rows(), callbacks=[GNMRCallback(**SETTINGS)]).train()
    return folder, {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("step", [1, 2, 3, 4, 5])
def test_a_run_resumed_after_any_step_equals_the_straight_one(step, straight, trainer_for, tiny, tmp_path):
    folder, parameters = straight
    assert len({tuple(line["active"]) for line in comparable(folder)}) >= 3, "worth comparing with"
    run = tmp_path / "run"
    shutil.copytree(folder, run)
    model = model_for(tiny)
    trainer = trainer_for(model, GNMRCallback(**SETTINGS), save_strategy="steps", save_steps=1)
    trainer.train(resume_from_checkpoint=str(run / f"checkpoint-{step}"))
    assert comparable(run) == comparable(folder)
    assert all(torch.equal(p, parameters[n]) for n, p in model.named_parameters() if n in parameters)


class Kill(TrainerCallback):
    """Kills its own process with kill -9 at the end of a step."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def killed_run(folder, tiny, where, step):
    """What the subprocess runs."""
    from conftest import token_rows
    from transformers import Trainer, TrainerState, TrainingArguments

    class Dies(Trainer):
        def _save_rng_state(self, output_dir):
            if where == "while saving" and self.state.global_step == step:
                os.kill(os.getpid(), signal.SIGKILL)  # adapter and optimizer are written, trainer_state.json is not
            super()._save_rng_state(output_dir)

    if where == "while saving the state":
        whole = TrainerState.save_to_json

        def half(self, path):
            whole(self, path)
            if self.global_step == step:
                text = pathlib.Path(path).read_text()
                pathlib.Path(path).write_text(text[: len(text) // 2])
                os.kill(os.getpid(), signal.SIGKILL)

        TrainerState.save_to_json = half
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        report_to=[],
        max_steps=6,
        save_strategy="steps",
        save_steps=2,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        logging_steps=1,
        disable_tqdm=True,
        seed=0,
    )
    callbacks = [GNMRCallback(**SETTINGS), *([Kill(step)] if where == "between saves" else [])]
    Dies(model_for(tiny), arguments, train_dataset=token_rows(), callbacks=callbacks).train()


@pytest.mark.parametrize(
    ("where", "step", "last"),
    [
        pytest.param("between saves", 5, "checkpoint-4", marks=pytest.mark.slow),
        pytest.param("between saves", 1, None, marks=pytest.mark.slow),
        pytest.param("while saving", 4, "checkpoint-2", marks=pytest.mark.slow),
        ("while saving the state", 4, "checkpoint-2"),
    ],
)
def test_kill_9(where, step, last, straight, trainer_for, tiny, tmp_path, capsys):
    run = tmp_path / "run"
    code = f"import test_resume; test_resume.killed_run({str(run)!r}, {tiny!r}, {where!r}, {step})"
    result = subprocess.run(
        [sys.executable, "-c", f"import conftest; {code}"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, HELPERS), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == -signal.SIGKILL, result.stderr[-3000:]
    written = [line["step"] for line in trace_lines(run)[1]]
    assert written == list(range(1, step + 1)), "one line per step, flushed"
    checkpoint = last_checkpoint(run)
    assert (checkpoint.name if checkpoint else None) == last
    model = model_for(tiny)
    trainer = trainer_for(model, GNMRCallback(**SETTINGS), save_strategy="steps", save_steps=2)
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    folder, parameters = straight
    assert comparable(run) == comparable(folder)
    assert all(torch.equal(p, parameters[n]) for n, p in model.named_parameters() if n in parameters)
    aside = list(run.glob("trace.*.jsonl"))
    assert sum(len(f.read_text().splitlines()) for f in aside) >= step - int((last or "-0").split("-")[1]), "no line is lost"


def test_the_state_is_small_plain_json_and_does_not_grow(straight):
    folder, _ = straight
    sizes = []
    for step in (2, 6):
        text = (folder / f"checkpoint-{step}" / "trainer_state.json").read_text()
        state = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
        state = state["stateful_callbacks"]["GNMRCallback"]
        assert json.loads(json.dumps(state["attributes"])) == state["attributes"]
        sizes.append(len(json.dumps(state)))
    assert sizes[1] < 3000 and sizes[1] - sizes[0] < 500, "a window of δ values per unit, however long the run"


@pytest.mark.parametrize(
    ("optimizer_saved", "error", "message"),
    [
        (True, ValueError, "doesn't match the size of optimizer's group"),
        (False, SetupError, r"do not fit the model \(unexpected: .*layers\.0\.mlp\.down_proj\.lora_A"),
    ],
)
def test_a_checkpoint_of_a_model_with_other_layers_is_refused_by_name(
    straight, trainer_for, tiny, tmp_path, optimizer_saved, error, message
):
    """If the checkpoint has the optimizer's state as well, torch refuses that first: the Trainer loads it earlier. Otherwise
    the weights are refused by name."""
    run = tmp_path / "run"
    shutil.copytree(straight[0], run)
    if not optimizer_saved:
        (run / "checkpoint-3" / "optimizer.pt").unlink()
    model = with_lora(load_int8(tiny), layers_to_transform=[0, 2], target_modules=["q_proj"])
    with pytest.raises(error, match=message):
        trainer_for(model, GNMRCallback(**SETTINGS)).train(resume_from_checkpoint=str(run / "checkpoint-3"))
    assert comparable(run) == comparable(straight[0])


@pytest.mark.parametrize(
    ("damage", "message"), [({"version": 99}, "version 99"), ({"num_units": None}, "num_units=None, this run has 3")]
)
def test_a_damaged_state_is_refused_by_name(straight, trainer_for, tiny, tmp_path, damage, message):
    run = tmp_path / "run"
    shutil.copytree(straight[0], run)
    file = run / "checkpoint-3" / "trainer_state.json"
    state = json.loads(file.read_text())
    state["stateful_callbacks"]["GNMRCallback"]["attributes"]["_state"] |= damage
    file.write_text(json.dumps(state))
    with pytest.raises(ConfigError, match=message):
        trainer_for(model_for(tiny), GNMRCallback(**SETTINGS)).train(resume_from_checkpoint=str(run / "checkpoint-3"))
