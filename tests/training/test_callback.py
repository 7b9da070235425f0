"""The callback under the Trainer: spikes, non-finite gradients, windows, evaluation, resume, refusals."""

from __future__ import annotations

import json
import math
import pathlib

import numpy as np
import pytest
import torch
from conftest import load_bf16, load_int8, save_llama, token_rows, trace_lines, with_lora
from torch.utils.data import IterableDataset
from transformers import TrainerCallback, TrainingArguments

from hf_gnmr import ConfigError, GNMRCallback, GNMRConfig, SetupError
from hf_gnmr.backends.bnb.switchable import SwitchableLinear8bitLt
from hf_gnmr.trace.file import TraceError, read_trace
from hf_gnmr.training.mixin import GNMRTrainer


class AtStep(TrainerCallback):
    """Changes the model for one optimizer step and then undoes the change."""

    def __init__(self, step, do):
        self.step, self.do, self.undo = step, do, None

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if state.global_step + 1 == self.step:
            self.undo = self.do(model)

    def on_step_end(self, args, state, control, **kwargs):
        if self.undo is not None:
            self.undo()
            self.undo = None


def layer(model, index):
    return model.get_base_model().model.layers[index]


def scale_gradients(index, factor):
    def do(model):
        hooks = [p.register_hook(lambda g: g * factor) for p in layer(model, index).parameters() if p.requires_grad]
        return lambda: [hook.remove() for hook in hooks]

    return do


def scale_adapter(index, factor):
    """Scaled weights: the adapters of one layer have `factor` times their effect in this step."""

    def do(model):
        modules = [m for m in layer(model, index).modules() if isinstance(getattr(m, "scaling", None), dict)]
        for module in modules:
            module.scaling["default"] *= factor

        def undo():
            for module in modules:
                module.scaling["default"] /= factor

        return undo

    return do


@pytest.mark.parametrize("spike", [scale_gradients(1, 50.0), scale_adapter(1, 50.0)], ids=["gradients", "weights"])
@pytest.mark.parametrize("clip", [1.0, 0.05, 0.0])
def test_a_spike_in_one_layer_lifts_exactly_that_layer_in_the_next_step(trainer_for, tiny, tmp_path, spike, clip):
    model = with_lora(load_int8(tiny))
    callback = GNMRCallback(max_o=2, alpha=3.0, alpha_init_fraction=0, beta=3.0, t_lock=0)
    trainer_for(model, callback, AtStep(4, spike), max_grad_norm=clip, learning_rate=1e-6).train()
    _, lines = trace_lines(tmp_path / "run")
    assert [line["triggered"] for line in lines] == [[], [], [], [1], [], []]
    assert [line["active"] for line in lines] == [[], [], [], [], [1], []]
    assert lines[3]["gnmr"][1] > 20
    assert lines[4]["recovery_bytes"] == trace_lines(tmp_path / "run")[0]["units"][1]["bytes_recovery"]


def test_a_scaled_loss_is_seen_by_every_layer_and_capped_by_the_budget(trainer_for, tiny, tmp_path):
    calls = []

    def loss(outputs, labels, num_items_in_batch=None):
        calls.append(1)
        value = torch.nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        return value * (50.0 if len(calls) == 4 else 1.0)

    callback = GNMRCallback(max_o=2, alpha=3.0, alpha_init_fraction=0, beta=3.0, t_lock=0)
    trainer_for(with_lora(load_int8(tiny)), callback, compute_loss_func=loss, learning_rate=1e-6).train()
    _, lines = trace_lines(tmp_path / "run")
    assert lines[3]["triggered"] == [0, 1, 2]
    assert len(lines[4]["active"]) == 2 and lines[5]["active"] == []


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("clip", [1.0, 0.0])
def test_a_non_finite_gradient_in_one_layer(trainer_for, tiny, tmp_path, capsys, bad, clip):
    model = with_lora(load_int8(tiny))
    callback = GNMRCallback(max_o=1, alpha=3.0, alpha_init_fraction=0, beta=3.0, t_lock=0)
    trainer = trainer_for(model, callback, AtStep(3, scale_gradients(1, bad)), max_grad_norm=clip, learning_rate=1e-4)
    trainer.train()
    _, lines = trace_lines(tmp_path / "run")
    assert not math.isfinite(float(lines[2]["norms"][1])) and lines[2]["gnmr"][1] == "inf"
    assert lines[3]["active"] == [1] and lines[4]["active"] == []
    assert [line["update_withheld"] for line in lines] == [False, False, True, False, False, False]
    later = np.array([line["gnmr"] for line in lines[3:]], dtype=float)
    assert np.isfinite(later).all() and (later < 3).all(), "the history must stay clean"
    assert all(torch.isfinite(p).all() for p in model.parameters() if p.requires_grad), "the run must continue"
    assert "step 3: gradient not finite in layer 1; the optimizer's update was withheld" in capsys.readouterr().out
    assert callback.summary["non_finite_steps"] == 1 and callback.summary["withheld_updates"] == 1


def test_gradients_that_stay_non_finite_are_reported_every_step(trainer_for, tiny, capsys):
    model = with_lora(load_int8(tiny))
    for p in layer(model, 1).parameters():
        if p.requires_grad:
            p.register_hook(lambda g: g * math.nan)
    callback = GNMRCallback(max_o=1, alpha_init_fraction=0)
    trainer_for(model, callback).train()
    assert capsys.readouterr().out.count("gradient not finite in layer 1") == 6
    assert callback.summary["withheld_updates"] == 6
    json.dumps(callback.scalars(), allow_nan=False)
    assert callback.scalars()["gnmr/not_finite"] == 1
    assert all(torch.isfinite(p).all() for p in model.parameters() if p.requires_grad)


class Stream(IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


@pytest.mark.parametrize("iterable", [False, True])
def test_short_and_long_windows_are_logged_and_left_out(trainer_for, tiny, tmp_path, iterable):
    rows = token_rows(20)
    callback = GNMRCallback(max_o=1, alpha=1.5, alpha_init_fraction=0, beta=1.5)
    steps = 9 if not iterable else 8
    trainer = trainer_for(
        with_lora(load_int8(tiny)),
        callback,
        rows=Stream(rows) if iterable else rows,
        max_steps=steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        learning_rate=1e-9,
    )
    trainer.train()
    _, lines = trace_lines(tmp_path / "run")
    windows = [line["micro_batches"] for line in lines]
    assert set(windows) == ({4, 2} if not iterable else {4, 6}), windows
    for line in lines:
        odd = line["micro_batches"] != 4
        assert (line["skipped"] is not None) is odd
        assert (line["gnmr"] is None) is odd
        assert line["norms"] and line["triggered"] == [] and line["active"] == []
    assert callback.summary["skipped_steps"] == sum(window != 4 for window in windows)
    assert callback.controller.steps_done == sum(window == 4 for window in windows)


def test_a_step_that_the_scaler_skips_is_no_step(trainer_for, tiny, tmp_path):
    class Skips(TrainerCallback):
        def on_train_begin(self, args, state, control, optimizer=None, **kwargs):
            self.optimizer = optimizer

        def on_optimizer_step(self, args, state, control, **kwargs):
            self.optimizer._is_overflow = state.global_step == 2

    trainer = trainer_for(with_lora(load_int8(tiny)), Skips(), GNMRCallback(max_o=1, alpha_init_fraction=0))
    trainer.train()
    _, lines = trace_lines(tmp_path / "run")
    assert [line["skipped"] for line in lines] == [None, None, "loss scaler skipped the update", None, None, None]


@pytest.mark.parametrize("eval_path", ["low", "recovery", "active"])
def test_evaluation_feeds_nothing_toggles_nothing_and_runs_the_chosen_path(trainer_for, tiny, tmp_path, eval_path):
    rows = token_rows(8, seed=9)
    losses, traces = {}, {}
    for evaluate in (False, True):
        model = with_lora(load_int8(tiny))
        options = {"eval_strategy": "steps", "eval_steps": 2, "eval_dataset": rows} if evaluate else {}
        trainer = trainer_for(
            model,
            GNMRCallback(max_o=1, alpha=0.5, alpha_init_fraction=0, eval_path=eval_path),
            max_steps=4,
            learning_rate=1e-9,
            **options,
        )
        trainer.train()
        traces[evaluate] = [(line["norms"], line["gnmr"], line["active"]) for line in trace_lines(tmp_path / "run")[1]]
        losses[evaluate] = [e["eval_loss"] for e in trainer.state.log_history if "eval_loss" in e]
    assert traces[True] == traces[False]
    plain = {
        "low": trainer_for(with_lora(load_int8(tiny)), eval_dataset=rows).evaluate()["eval_loss"],
        "recovery": trainer_for(with_lora(load_bf16(tiny)), eval_dataset=rows).evaluate()["eval_loss"],
    }
    assert plain["low"] != plain["recovery"]
    if eval_path == "active":
        assert not {round(loss, 5) for loss in losses[True]} & {round(v, 5) for v in plain.values()}
    else:
        np.testing.assert_allclose(losses[True], plain[eval_path], atol=2e-6)


@pytest.mark.parametrize(
    ("options", "load", "expected"),
    [
        ({"trigger": "none"}, load_int8, {"promotion_ratio": 0.0, "recovery_bytes_bound": 0}),
        ({"trigger": "all"}, load_int8, {"promotion_ratio": 1.0}),
        ({"backend": "none"}, load_bf16, {"promotion_ratio": None, "recoverable_units": 0}),
        ({}, load_int8, {"recoverable_units": 3}),
    ],
    ids=["none", "all", "bf16", "gnmr"],
)
def test_every_run_is_monitored_whatever_it_lifts(trainer_for, tiny, tmp_path, options, load, expected):
    callback = GNMRCallback(alpha_init_fraction=0, **options)
    trainer_for(with_lora(load(tiny)), callback).train()
    assert all(line["gnmr"] for line in trace_lines(tmp_path / "run")[1])
    summary = callback.summary
    assert {name: summary[name] for name in expected} == expected
    if options == {"trigger": "all"}:
        assert summary["peak_recovery_bytes"] == summary["bytes_recovery"]


def test_trace_header_and_lines_have_every_promised_field(trainer_for, tiny, tmp_path):
    callback = GNMRCallback(GNMRConfig(max_o=2))
    trainer_for(with_lora(load_int8(tiny)), callback).train()
    header, lines = trace_lines(tmp_path / "run")
    promised = {"schema", "units", "config", "total_steps", "max_o", "trigger", "trigger_options", "backend", "census"}
    assert promised <= set(header)
    assert [set(u) for u in header["units"]] == [
        {"index", "layer", "name", "recoverable", "bytes_low", "bytes_recovery", "bytes_added"}
    ] * 3
    assert [u["name"] for u in header["units"]] == [f"model.layers.{i}" for i in range(3)]
    assert header["config"] == callback.config.to_dict() and header["total_steps"] == 6 and header["max_o"] == 2
    fields = {
        "step",
        "loss",
        "grad_norm",
        "norms",
        "gnmr",
        "delta_gnmr",
        "risk",
        "alpha",
        "beta",
        "triggered",
        "active",
        "micro_batches",
        "skipped",
        "step_ms",
        "controller_ms",
        "recovery_bytes",
    }
    assert all(fields <= set(line) for line in lines)
    assert [line["step"] for line in lines] == list(range(1, 7))
    assert lines[0]["alpha"] == 1.5 and lines[1]["alpha"] == 1.1
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert {
        "promotion_ratio",
        "hit_max_o_rate",
        "gnmr_exceedance",
        "delta_gnmr_exceedance",
        "switches",
        "dwell",
        "peak_recovery_bytes",
        "recovery_bytes_bound",
        "resident_bytes",
        "controller_ms",
        "controller_share",
    } <= set(summary)


def test_layers_without_adapters_are_no_units_and_indices_stay_the_models(trainer_for, tmp_path):
    folder = save_llama(tmp_path / "llama", num_hidden_layers=4)
    model = with_lora(load_int8(folder), target_modules=["q_proj", "down_proj"], layers_to_transform=[0, 2])
    trainer_for(model, GNMRCallback(max_o=2)).train()
    header, _ = trace_lines(tmp_path / "run")
    assert [(u["index"], u["layer"], u["name"]) for u in header["units"]] == [
        (0, 0, "model.layers.0"),
        (1, 2, "model.layers.2"),
    ]


def test_scalars_reach_the_logs_of_our_trainer(trainer_for, tiny, tmp_path):
    trainer = trainer_for(
        with_lora(load_int8(tiny)),
        GNMRCallback(max_o=1),
        trainer_class=GNMRTrainer,
        report_to=["tensorboard"],
    )
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logs) == 6 and all("gnmr/max" in entry and "gnmr/active" in entry for entry in logs)
    files = list(tmp_path.rglob("events.out.tfevents*"))
    assert files and any(b"gnmr/max" in f.read_bytes() for f in files)


# -- resume, repetition, exceptions --------------------------------------------------------------------------------


def comparable(lines):
    return [{k: v for k, v in line.items() if not k.endswith("_ms")} for line in lines]


@pytest.mark.parametrize("flag", [False, True])
def test_a_resumed_run_equals_the_straight_one(trainer_for, tiny, tmp_path, flag):
    settings = {"max_o": 1, "alpha": 0.9, "alpha_init": 2.0, "alpha_init_fraction": 0.25}
    common = {"lora_dropout": 0.1}
    straight = with_lora(load_int8(tiny), **common)
    trainer_for(straight, GNMRCallback(**settings), output_dir=str(tmp_path / "straight")).train()

    run = str(tmp_path / "run")
    first = trainer_for(
        with_lora(load_int8(tiny), **common), GNMRCallback(**settings), output_dir=run, save_strategy="steps", save_steps=3
    )
    first.train()
    cut = pathlib.Path(run) / "trace.jsonl"
    with cut.open("a") as file:
        file.write('{"step": 7, "lo')  # as a kill leaves it
    again = with_lora(load_int8(tiny), **common)
    callback = GNMRCallback(**settings)
    trainer = trainer_for(
        again, callback, output_dir=run, restore_callback_states_from_checkpoint=flag, save_strategy="steps", save_steps=2
    )
    trainer.train(resume_from_checkpoint=f"{run}/checkpoint-3")
    assert comparable(trace_lines(run)[1]) == comparable(trace_lines(tmp_path / "straight")[1])
    assert pathlib.Path(run, "trace.after-step-3.jsonl").read_text().count("\n") == 3
    for (name, p), (_, q) in zip(straight.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(p, q), name


def test_resuming_a_checkpoint_without_our_state_starts_the_history_from_scratch_and_says_so(trainer_for, tiny, tmp_path):
    run = str(tmp_path / "run")
    trainer_for(with_lora(load_int8(tiny)), output_dir=run, save_strategy="steps", save_steps=3).train()
    callback = GNMRCallback(max_o=1)
    trainer = trainer_for(with_lora(load_int8(tiny)), callback, output_dir=run, save_strategy="steps", save_steps=1)
    with pytest.warns(UserWarning, match="resumed at step 3 from a checkpoint without GNMR state"):
        trainer.train(resume_from_checkpoint=f"{run}/checkpoint-3")
    assert [line["step"] for line in trace_lines(run)[1]] == [4, 5, 6]
    assert callback.controller.steps_done == 3


def test_a_run_may_be_prolonged_and_the_trace_of_another_is_set_aside(trainer_for, tiny, tmp_path):
    run = str(tmp_path / "run")
    saving = {"output_dir": run, "save_strategy": "steps", "save_steps": 3}
    trainer_for(with_lora(load_int8(tiny)), GNMRCallback(max_o=1), max_steps=3, **saving).train()
    trainer_for(with_lora(load_int8(tiny)), GNMRCallback(max_o=1), **saving).train(
        resume_from_checkpoint=f"{run}/checkpoint-3"
    )
    assert [line["step"] for line in trace_lines(run)[1]] == list(range(1, 7))
    header, *lines = (tmp_path / "run" / "trace.jsonl").read_text().splitlines()
    other = json.loads(header) | {"run_id": "another"}
    (tmp_path / "run" / "trace.jsonl").write_text("\n".join([json.dumps(other), *lines]) + "\n")
    trainer_for(with_lora(load_int8(tiny)), GNMRCallback(max_o=1, recovery="device"), **saving).train(
        resume_from_checkpoint=f"{run}/checkpoint-3"  # the same weights from another store: the same run
    )
    assert [line["step"] for line in trace_lines(run)[1]] == [4, 5, 6]
    assert len(read_trace(tmp_path / "run" / "trace.1.jsonl").steps) == 6
    assert (tmp_path / "run" / "summary.1.json").exists()


def test_lines_lost_before_the_checkpoint_are_reported_and_counted(trainer_for, tiny, tmp_path, capsys):
    run = str(tmp_path / "run")
    saving = {"output_dir": run, "save_strategy": "steps", "save_steps": 4}
    trainer_for(with_lora(load_int8(tiny)), GNMRCallback(max_o=1), **saving).train()
    trace = tmp_path / "run" / "trace.jsonl"
    trace.write_text("".join(trace.read_text().splitlines(keepends=True)[:3]))
    callback = GNMRCallback(max_o=1)
    trainer_for(with_lora(load_int8(tiny)), callback, **saving).train(resume_from_checkpoint=f"{run}/checkpoint-4")
    assert [line["step"] for line in trace_lines(run)[1]] == [1, 2, 5, 6]
    assert "lacks the 2 steps before step 5" in capsys.readouterr().out
    assert callback.summary["missing_steps"] == 2


def test_a_subclass_resumes_as_well(trainer_for, tiny, tmp_path):
    class Mine(GNMRCallback):
        pass

    run = str(tmp_path / "run")
    saving = {"output_dir": run, "save_strategy": "steps", "save_steps": 3}
    trainer_for(with_lora(load_int8(tiny)), Mine(max_o=1), **saving).train()
    callback = Mine(max_o=1)
    trainer_for(with_lora(load_int8(tiny)), callback, **saving).train(resume_from_checkpoint=f"{run}/checkpoint-3")
    assert callback.controller.steps_done == 6
    assert [line["step"] for line in trace_lines(run)[1]] == list(range(1, 7))


def test_a_second_callback_is_refused_and_not_traced_as_if_it_ruled(trainer_for, tiny):
    trainer = trainer_for(with_lora(load_int8(tiny)), GNMRCallback(trigger="all"), GNMRCallback(trigger="none"))
    with pytest.raises(SetupError, match="second GNMRCallback"):
        trainer.train()


@pytest.mark.parametrize("trouble", ["summary is a folder", "disk full"])
def test_trouble_with_the_files_does_not_cost_the_training(trainer_for, tiny, tmp_path, capsys, monkeypatch, trouble):
    if trouble == "summary is a folder":
        (tmp_path / "run" / "summary.json").mkdir(parents=True)
    else:

        def full(self, record):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("hf_gnmr.trace.file.TraceWriter.write", full_after_header(full))
    trainer = trainer_for(with_lora(load_int8(tiny)), GNMRCallback())
    with pytest.warns(UserWarning, match=r"no summary.json|the trace ends before step 3"):
        trainer.train()
    assert trainer.state.global_step == 6
    if trouble == "disk full":
        assert json.loads((tmp_path / "run" / "summary.json").read_text())["missing_steps"] == 4
        assert "NO TRACE from step 3 on" in capsys.readouterr().out
        assert [line["step"] for line in trace_lines(tmp_path / "run")[1]] == [1, 2]


def full_after_header(full):
    """TraceWriter.write that works for the header and two steps."""
    from hf_gnmr.trace.file import TraceWriter

    write, calls = TraceWriter.write, []

    def limited(self, record):
        calls.append(1)
        return write(self, record) if len(calls) <= 3 else full(self, record)

    return limited


@pytest.mark.parametrize("damage", ["missing", "cut in the header", "cut in a line"])
def test_resuming_with_a_damaged_trace_loses_nothing_and_says_so(trainer_for, tiny, tmp_path, capsys, damage):
    run = str(tmp_path / "run")
    saving = {"output_dir": run, "save_strategy": "steps", "save_steps": 3}
    trainer_for(with_lora(load_int8(tiny)), GNMRCallback(max_o=1), **saving).train()
    trace = tmp_path / "run" / "trace.jsonl"
    data = trace.read_bytes()
    damaged = {"missing": b"", "cut in the header": data[:100], "cut in a line": data[:-20]}[damage]
    trace.write_bytes(damaged)
    if damage == "missing":
        trace.unlink()
    trainer_for(with_lora(load_int8(tiny)), GNMRCallback(max_o=1), **saving).train(
        resume_from_checkpoint=f"{run}/checkpoint-3"
    )
    out = capsys.readouterr().out
    steps = [line["step"] for line in trace_lines(run)[1]]
    kept = b"".join(p.read_bytes() for p in sorted((tmp_path / "run").glob("trace.*.jsonl")))
    if damage == "cut in a line":
        assert steps == [1, 2, 3, 4, 5, 6] and "earlier trace lines were set aside" in out
        assert damaged.endswith(kept) and kept
    else:
        assert steps == [4, 5, 6] and "is not (or no longer) the trace of this run" in out
        assert kept == damaged


@pytest.mark.parametrize(
    ("settings", "accumulation", "message"),
    [
        ({"alpha": 1.3}, 1, "written with config="),
        ({"trigger": "none"}, 1, "trigger='gnmr', this run has 'none'"),
        ({"recovery": "dequantize"}, 1, "recovery='originals', this run has 'dequantize'"),
        ({}, 2, "gradient_accumulation_steps=1, this run has 2"),
    ],
)
def test_resuming_with_other_settings_is_refused_by_name(trainer_for, tiny, tmp_path, settings, accumulation, message):
    run = str(tmp_path / "run")
    saving = {"output_dir": run, "save_strategy": "steps", "save_steps": 3}
    trainer_for(with_lora(load_int8(tiny)), GNMRCallback(), max_steps=3, **saving).train()
    before = (tmp_path / "run" / "trace.jsonl").read_text()
    model, callback = with_lora(load_int8(tiny)), GNMRCallback(**settings)
    trainer = trainer_for(model, callback, gradient_accumulation_steps=accumulation, **saving)
    with pytest.raises(ConfigError, match=message):
        trainer.train(resume_from_checkpoint=f"{run}/checkpoint-3")
    assert (tmp_path / "run" / "trace.jsonl").read_text() == before


def test_a_second_run_in_the_same_folder_loses_nothing(trainer_for, tiny, tmp_path):
    for _ in range(3):
        trainer_for(with_lora(load_int8(tiny)), GNMRCallback()).train()
    for name in ("trace.jsonl", "trace.1.jsonl", "trace.2.jsonl"):
        assert len(read_trace(tmp_path / "run" / name).steps) == 6


def test_training_twice_with_one_callback(trainer_for, tiny, tmp_path):
    trainer = trainer_for(with_lora(load_int8(tiny)), GNMRCallback(max_o=1))
    trainer.train()
    trainer.train()
    assert [line["step"] for line in trace_lines(tmp_path / "run")[1]] == list(range(1, 7))


def test_an_exception_in_mid_training_leaves_trace_and_a_model_that_trains_again(trainer_for, tiny, tmp_path):
    def stop(model):
        raise RuntimeError("stopped here")

    model = with_lora(load_int8(tiny))
    broken = trainer_for(model, GNMRCallback(max_o=1, alpha=0.5, alpha_init_fraction=0), AtStep(4, stop))
    with pytest.raises(RuntimeError, match="stopped here"):
        broken.train()
    assert [line["step"] for line in trace_lines(tmp_path / "run")[1]] == [1, 2, 3]
    assert any(isinstance(m, SwitchableLinear8bitLt) for m in model.modules())
    assert len(model._forward_hooks) == 1
    callback = GNMRCallback(max_o=1)
    trainer_for(model, callback).train()
    assert callback.summary["steps"] == 6
    assert not any(isinstance(m, SwitchableLinear8bitLt) for m in model.modules())
    assert not model._forward_hooks, "an interrupted run must not leave its hook working forever"


def test_detach_gives_the_plain_model_back_after_an_interrupt(trainer_for, tiny):
    def interrupt(model):
        raise KeyboardInterrupt

    model, callback = with_lora(load_int8(tiny)), GNMRCallback(max_o=1, alpha=0.5, alpha_init_fraction=0)
    with pytest.raises(KeyboardInterrupt):
        trainer_for(model, callback, AtStep(4, interrupt)).train()
    other = GNMRCallback(max_o=1, alpha=0.5, alpha_init_fraction=0)
    late = AtStep(3, lambda model: callback.detach)  # detaching the old callback must not disturb the new one
    trainer_for(model, other, late).train()
    assert other.summary["steps"] == 6 and other.summary["promotion_ratio"] > 0
    with pytest.raises(KeyboardInterrupt):
        trainer_for(model, callback, AtStep(4, interrupt)).train()
    callback.detach()
    callback.detach()
    assert not model._forward_hooks and not any(isinstance(m, SwitchableLinear8bitLt) for m in model.modules())
    model.merge_and_unload()


def test_training_without_a_step_is_refused(trainer_for, tiny):
    trainer = trainer_for(
        with_lora(load_int8(tiny)), GNMRCallback(), per_device_train_batch_size=128, dataloader_drop_last=True
    )
    with pytest.raises(SetupError, match="0 micro-batches"):
        trainer.train()


def test_without_a_trace_there_is_no_file_and_no_summary(trainer_for, tiny, tmp_path):
    callback = GNMRCallback(trace_path=False)
    trainer_for(with_lora(load_int8(tiny)), callback).train()
    assert callback.summary is None and not (tmp_path / "run" / "trace.jsonl").exists()
    trainer_for(with_lora(load_int8(tiny)), GNMRCallback(trace_path=tmp_path / "mine" / "t.jsonl")).train()
    assert len(read_trace(tmp_path / "mine" / "t.jsonl").steps) == 6


# -- refusals ------------------------------------------------------------------------------------------------------


def test_a_model_that_is_not_8_bit_is_refused(trainer_for, tiny):
    with pytest.raises(SetupError, match=r'not an 8-bit model.*load_in_8bit=True.*backend="none"'):
        trainer_for(with_lora(load_bf16(tiny)), GNMRCallback()).train()


def test_an_8_bit_model_without_adapters_is_refused(trainer_for, tiny):
    with pytest.raises(ValueError, match="cannot perform fine-tuning on purely quantized models"):  # by the Trainer
        trainer_for(load_int8(tiny), GNMRCallback())


def test_a_model_without_trainable_parameters_is_refused_by_the_callback_itself(tiny, tmp_path):
    model = load_int8(tiny).requires_grad_(False)
    state = type("State", (), {"max_steps": 3, "global_step": 0, "is_world_process_zero": True, "stateful_callbacks": {}})
    arguments = TrainingArguments(str(tmp_path), use_cpu=True)
    with pytest.raises(SetupError, match=r"none of the 3 decoder layers has a trainable parameter.*no trainable parameter"):
        GNMRCallback().on_train_begin(arguments, state, None, model=model, optimizer=None)


def test_adapters_outside_the_decoder_layers_only_are_refused(trainer_for, tiny):
    model = with_lora(load_int8(tiny), target_modules=["lm_head"])
    with pytest.raises(SetupError, match=r"trainable parameters only in lm_head.*Add LoRA to the decoder layers"):
        trainer_for(model, GNMRCallback()).train()


def test_max_o_above_the_units_is_refused(trainer_for, tiny):
    with pytest.raises(ConfigError, match="max_o=4: expected at most 3, the model's recoverable units"):
        trainer_for(with_lora(load_int8(tiny)), GNMRCallback(max_o=4)).train()


def test_a_refusal_leaves_the_model_plain(trainer_for, tiny):
    model = with_lora(load_int8(tiny))
    with pytest.raises(ConfigError):
        trainer_for(model, GNMRCallback(max_o=4)).train()
    assert not any(isinstance(m, SwitchableLinear8bitLt) for m in model.modules())
    assert not model._forward_hooks


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"alpah": 1.0}, "no argument 'alpah'"),
        ({"backend": "int4"}, "backend='int4'"),
        ({"trigger": "gsrn"}, "trigger='gsrn'"),
        ({"config": GNMRConfig(), "alpha": 1.0}, "not both"),
        ({"trace_path": True}, "trace_path=True"),
        ({"backend": "none", "trigger": "all"}, "nothing is switched"),
        ({"alpha": -1}, "alpha=-1"),
        ({"delta": 0}, "delta=0"),
        ({"config": {"foo": 1}}, "no argument 'foo'"),
        ({"layers": 3}, "layers=3"),
        ({"trace_path": 3}, "trace_path=3"),
    ],
)
def test_wrong_arguments_are_refused_at_construction(arguments, message):
    with pytest.raises(ConfigError, match=message):
        GNMRCallback(**arguments)


def test_a_trace_deleted_during_the_run_is_written_again_and_costs_nothing(trainer_for, tiny, tmp_path):
    def delete(model):
        (tmp_path / "run" / "trace.jsonl").unlink()
        return lambda: None

    trainer = trainer_for(with_lora(load_int8(tiny)), GNMRCallback(), AtStep(5, delete))
    with pytest.warns(UserWarning, match="trace.jsonl was deleted or moved away during the run: it was written again"):
        trainer.train()
    assert trainer.state.global_step == 6
    assert [line["step"] for line in trace_lines(tmp_path / "run")[1]] == list(range(1, 7))
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["missing_steps"] == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no such trace"),
        ("", "empty or cut within its header"),
        ('{"a": 1}\n', "schema None"),
        ('{"schema": 1}\nnot json\n{"step": 2}\n', "line 2: not JSON"),
    ],
)
def test_missing_foreign_and_broken_traces_are_refused(tmp_path, text, message):
    file = tmp_path / "trace.jsonl"
    if text is not None:
        file.write_text(text)
    with pytest.raises(TraceError, match=message):
        read_trace(file)


def test_a_trace_that_is_cut_in_its_last_line_is_read_without_it(tmp_path):
    file = tmp_path / "trace.jsonl"
    file.write_text('{"schema": 1}\n{"step": 1}\n{"st')
    trace = read_trace(file)
    assert trace.cut and len(trace.steps) == 1


def test_the_same_callback_twice_is_refused(tiny, trainer_for):
    callback = GNMRCallback(max_o=1)
    trainer = trainer_for(with_lora(load_int8(tiny)), callback)
    trainer.add_callback(callback)
    with pytest.raises(SetupError, match="this GNMRCallback is in the Trainer's callbacks twice"):
        trainer.train()


def test_a_training_continues_without_a_callback_that_was_detached_during_it(tiny, trainer_for, tmp_path):
    class Detach(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                callback.detach()

    callback = GNMRCallback(max_o=1)
    trainer = trainer_for(with_lora(load_int8(tiny)), callback)
    trainer.add_callback(Detach())
    trainer.train()
    steps = trainer.state.global_step
    assert steps > 3 and len(trace_lines(tmp_path / "run")[1]) == 2
    assert callback.scalars() == {}
    trainer.remove_callback(Detach)
    trainer.train()
    assert len(trace_lines(tmp_path / "run")[1]) == steps, "the next training is under control again"


@pytest.mark.parametrize("trigger", ["gnmr", "random"])
def test_two_callbacks_are_refused_before_the_first_step(tiny, trainer_for, trigger):
    options = {"promotion_ratio": 0.1} if trigger == "random" else None
    other = GNMRCallback(max_o=2, trigger=trigger, trigger_options=options)
    trainer = trainer_for(with_lora(load_int8(tiny)), GNMRCallback(max_o=1), other)
    with pytest.raises(SetupError, match=r"there is a second GNMRCallback: keep only one \(trainer.remove_callback\)"):
        trainer.train()
    assert trainer.state.global_step == 0
    trainer.remove_callback(other)
    trainer.train()


def test_a_callback_that_is_added_in_mid_training_is_refused_with_the_reason(tiny, trainer_for):
    class Add(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                trainer.add_callback(GNMRCallback(max_o=1))

    trainer = trainer_for(with_lora(load_int8(tiny)), Add())
    with pytest.raises(SetupError, match="was added after training began, .*before trainer.train"):
        trainer.train()
