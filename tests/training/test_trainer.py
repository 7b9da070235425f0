"""Trainer settings and Trainers from elsewhere, each with the callback added and nothing else changed."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from conftest import byte_tokenizer, load_int8, random_llama, token_rows, trace_lines, with_lora
from peft import LoraConfig
from safetensors.torch import load_file
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback

from hf_gnmr import GNMRCallback, GNMRTrainerMixin
from hf_gnmr.backends.bnb.switchable import SwitchableLinear8bitLt
from hf_gnmr.training.mixin import GNMRTrainer

MOVING = {"max_o": 1, "alpha": 0.9, "alpha_init_fraction": 0.0}


def figures(run):
    return [(line["norms"], line["gnmr"], line["active"], line["loss"]) for line in trace_lines(run)[1]]


def is_plain(model):
    return not any(isinstance(m, SwitchableLinear8bitLt) for m in model.modules()) and not model._forward_hooks


@pytest.fixture
def straight(trainer_for, tiny, tmp_path):
    """Six plain steps, to compare with."""
    trainer_for(with_lora(load_int8(tiny)), GNMRCallback(**MOVING), output_dir=str(tmp_path / "straight")).train()
    return figures(tmp_path / "straight")


def test_the_best_model_is_loaded_at_the_end(trainer_for, tiny, tmp_path, straight):
    model = with_lora(load_int8(tiny))
    trainer = trainer_for(
        model,
        GNMRCallback(**MOVING),
        eval_dataset=token_rows(8, seed=9),
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        load_best_model_at_end=True,
        learning_rate=1e-3,
        metric_for_best_model="eval_loss",
        greater_is_better=True,  # the first evaluation is the worst: best by this
    )
    trainer.train()
    assert figures(tmp_path / "run") == straight
    best = load_file(f"{trainer.state.best_model_checkpoint}/adapter_model.safetensors")
    names = {n.replace(".default", ""): p for n, p in model.named_parameters() if "lora_" in n}
    assert not trainer.state.best_model_checkpoint.endswith("checkpoint-6")
    assert all(torch.equal(names[name], tensor) for name, tensor in best.items()) and is_plain(model)


def test_early_stopping(trainer_for, tiny, tmp_path, straight):
    model, callback = with_lora(load_int8(tiny)), GNMRCallback(**MOVING)
    trainer = trainer_for(
        model,
        callback,
        EarlyStoppingCallback(early_stopping_patience=1, early_stopping_threshold=1.0),  # no loss moves that far
        eval_dataset=token_rows(8, seed=9),
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=True,
    )
    trainer.train()
    done = trainer.state.global_step
    assert done < 6 and callback.summary["steps"] == done and is_plain(model)
    assert figures(tmp_path / "run") == straight[:done]


def test_a_batch_size_that_is_found_by_running_out_of_memory(trainer_for, tiny, tmp_path):
    """`auto_find_batch_size` calls the whole inner loop again after each failure, with the same callback."""

    class Small(Trainer):
        def training_step(self, model, inputs, *args, **kwargs):
            if len(inputs["input_ids"]) > 4 and self.state.global_step == 2:
                raise RuntimeError("CUDA out of memory.")
            return super().training_step(model, inputs, *args, **kwargs)

    model, callback = with_lora(load_int8(tiny)), GNMRCallback(**MOVING)
    trainer = trainer_for(model, callback, trainer_class=Small, auto_find_batch_size=True, per_device_train_batch_size=8)
    trainer.train()
    assert trainer._train_batch_size <= 4
    lines = trace_lines(tmp_path / "run")[1]
    assert [line["step"] for line in lines] == list(range(1, 7)) and callback.summary["steps"] == 6
    assert (tmp_path / "run" / "trace.1.jsonl").exists(), "the attempt that failed is kept"
    assert is_plain(model)


def test_model_init_gives_each_run_a_new_model(trainer_for, tiny, tmp_path):
    made = []

    def new():
        made.append(with_lora(load_int8(tiny)))
        return made[-1]

    callback = GNMRCallback(**MOVING)
    trainer = trainer_for(None, callback, model_init=new)
    runs = []
    for _ in range(2):
        trainer.train()
        runs.append(figures(tmp_path / "run"))
        assert callback.units[0].module is made[-1].get_base_model().model.layers[0]
    assert len(made) == 3 and runs[0] == runs[1] and all(map(is_plain, made))


@pytest.mark.slow
def test_compiled_training_sees_the_same_and_recompiles_for_no_choice(trainer_for, tiny, tmp_path, straight):
    graphs = {"none": [], "gnmr": []}

    class Count(TrainerCallback):
        def __init__(self, counts):
            self.counts = counts

        def on_step_end(self, *args, **kwargs):
            self.counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])

    for trigger, counts in graphs.items():
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = with_lora(load_int8(tiny))
        callback = GNMRCallback(**MOVING, trigger=trigger)
        trainer_for(model, callback, Count(counts), torch_compile=True, torch_compile_backend="aot_eager").train()
        assert is_plain(model)
    torch._dynamo.reset()
    compiled = figures(tmp_path / "run")
    np.testing.assert_allclose([f[0] for f in compiled], [f[0] for f in straight], rtol=2e-2)
    assert [f[2] for f in compiled] == [f[2] for f in straight]
    assert len({tuple(f[2]) for f in compiled}) == 4, "every layer was lifted once"
    assert graphs["gnmr"] == graphs["none"] and graphs["gnmr"][0] > 0, "as many graphs as without any switching"
    assert graphs["gnmr"][-1] == graphs["gnmr"][2], "and none after the first steps"


@pytest.mark.parametrize("optimizer", ["adamw_torch", "adamw_torch_fused"])
def test_a_real_loss_scaler(trainer_for, tiny, tmp_path, straight, optimizer):
    """torch's own GradScaler under the Trainer (FP16 on a CPU has none by itself): an overflow skips the update and does not
    count as a step; the moving scale is in no norm. A fused optimizer skips by itself, and accelerate does not notice."""

    class Scaled(Trainer):
        def create_accelerator_and_postprocess(self):
            super().create_accelerator_and_postprocess()
            self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=65536.0, growth_interval=2)

    scales = []

    class Overflow(TrainerCallback):
        def on_step_begin(self, args, state, control, model=None, **kwargs):
            self.hook = None
            if state.global_step == 2:
                p = next(p for n, p in model.named_parameters() if "lora_B" in n)
                self.hook = p.register_hook(lambda g: g * math.inf)

        def on_step_end(self, args, state, control, optimizer=None, **kwargs):
            scales.append(optimizer.scaler.get_scale())
            if self.hook is not None:
                self.hook.remove()

    callback = GNMRCallback(**MOVING)
    trainer = trainer_for(
        with_lora(load_int8(tiny)), callback, Overflow(), trainer_class=Scaled, optim=optimizer, max_grad_norm=0
    )
    trainer.train()
    assert len(set(scales)) > 1, scales
    lines = trace_lines(tmp_path / "run")[1]
    assert [line["skipped"] for line in lines] == [None, None, "loss scaler skipped the update", None, None, None]
    assert lines[2]["norms"][0] == "inf" and lines[2]["gnmr"] is None and lines[2]["update_withheld"] is False
    for line, expected in zip(lines[:2], straight[:2], strict=True):
        np.testing.assert_allclose(line["norms"], expected[0], rtol=1e-5)
        assert line["loss"] == pytest.approx(expected[3], rel=1e-5)
    ratios = np.array([line["gnmr"] for line in lines if line["gnmr"]])
    assert ratios.min() > 0.5 and ratios.max() < 2.0, "a moving scale would show as 0.5 or 2"
    assert callback.controller.steps_done == 5


@pytest.mark.parametrize("optimizer", ["adamw_torch", "adafactor", "sgd", "rmsprop", "lion_32bit"])
def test_first_step_norms_do_not_depend_on_the_optimizer(trainer_for, tiny, tmp_path, straight, optimizer):
    trainer_for(with_lora(load_int8(tiny)), GNMRCallback(**MOVING), optim=optimizer).train()
    assert figures(tmp_path / "run")[0] == straight[0]


def test_saved_activations_moved_to_the_host_and_noise_on_embeddings(trainer_for, tiny, tmp_path, straight):
    """A user's saved-tensor hooks see and return the same as always, for lifted and for low layers."""
    seen = []

    class Offloaded(Trainer):
        def training_step(self, *args, **kwargs):
            def pack(tensor):
                seen.append(tensor.dtype)
                return tensor.clone()

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                return super().training_step(*args, **kwargs)

    trainer_for(with_lora(load_int8(tiny)), GNMRCallback(**MOVING), trainer_class=Offloaded).train()
    assert figures(tmp_path / "run") == straight and seen
    trainer_for(with_lora(load_int8(tiny)), GNMRCallback(**MOVING), neftune_noise_alpha=5.0).train()
    assert all(math.isfinite(line["loss"]) for line in trace_lines(tmp_path / "run")[1])


# -- TRL -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bf16", [False, True])
def test_label_smoothing_is_computed_in_float32(trainer_for, bf16):
    """Of BF16 logits too, where transformers' own rounds each loss to three digits."""
    rows = token_rows(4, seed=9)
    model = random_llama().bfloat16()
    trainer = trainer_for(
        model,
        GNMRCallback(**MOVING, backend="none"),
        trainer_class=GNMRTrainer,
        eval_dataset=rows,
        per_device_eval_batch_size=4,
        label_smoothing_factor=0.1,
        bf16=bf16,
    )
    loss = trainer.evaluate()["eval_loss"]
    ids = torch.tensor([row["input_ids"] for row in rows])
    with torch.no_grad():
        logits = trainer.model(input_ids=ids).logits.double()
    flat, labels = logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
    assert loss == pytest.approx(torch.nn.functional.cross_entropy(flat, labels, label_smoothing=0.1).item(), rel=1e-6)


@pytest.mark.parametrize(
    "kind", ["peft_config", *(pytest.param(k, marks=pytest.mark.slow) for k in ("peft model", "packing"))]
)
def test_supervised_fine_tuning_by_trl(kind, tiny_lm, tmp_path):
    datasets, trl = pytest.importorskip("datasets"), pytest.importorskip("trl")

    class WithLogs(GNMRTrainerMixin, trl.SFTTrainer):
        pass

    rows = datasets.Dataset.from_list(
        [
            {"text": f"What is {a} plus {a + 3}? It is {2 * a + 3}."}
            if kind == "packing"
            else {"prompt": f"What is {a} plus {a + 3}?", "completion": f" It is {2 * a + 3}."}
            for a in range(40)
        ]
    )
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    runs = {}
    for trainer_class in (trl.SFTTrainer, WithLogs):
        model = load_int8(tiny_lm)
        arguments = trl.SFTConfig(
            output_dir=str(tmp_path / "run"),
            use_cpu=True,
            report_to=[],
            max_steps=6,
            save_strategy="no",
            seed=0,
            per_device_train_batch_size=4,
            learning_rate=1e-3,
            disable_tqdm=True,
            logging_steps=1,
            bf16=False,
            packing=kind == "packing",
            max_length=64,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = trainer_class(
                with_lora(model, task_type="CAUSAL_LM") if kind == "peft model" else model,
                arguments,
                train_dataset=rows,
                processing_class=byte_tokenizer(),
                peft_config=None if kind == "peft model" else lora,
                callbacks=[GNMRCallback(**MOVING)],
            )
            trainer.train()
        lines = trace_lines(tmp_path / "run")[1]
        assert len({tuple(line["active"]) for line in lines}) >= 2 and np.isfinite([line["norms"] for line in lines]).all()
        runs[trainer_class] = [(line["norms"], line["active"]) for line in lines]
        logged = [entry for entry in trainer.state.log_history if "loss" in entry]
        if trainer_class is WithLogs:
            np.testing.assert_allclose([line["loss"] for line in lines], [e["loss"] for e in logged], rtol=1e-4)
            assert all("gnmr/max" in entry for entry in logged)
        assert is_plain(trainer.model)
    assert runs[WithLogs] == runs[trl.SFTTrainer]
