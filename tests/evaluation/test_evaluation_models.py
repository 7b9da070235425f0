"""Built models: each precision is the model that it names, for runs and for adapters of any kind."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from conftest import byte_tokenizer, load_bf16
from safetensors.torch import load_file, save_file

pytest.importorskip("lm_eval")

from evaluation_runs import copied, evaluate, result

from hf_gnmr.evaluation.smoke import smoke_text
from hf_gnmr.evaluation.tokens import own_task
from hf_gnmr.train import main as train

pytest_plugins = ["evaluation_runs"]
pytestmark = pytest.mark.usefixtures("inside_tmp_path")
perplexity, token_perplexity = (getattr(own_task("wikitext_tokens"), n) for n in ("perplexity", "token_perplexity"))
TOKENS = ["wikitext_tokens"]


def test_recovery_is_the_bf16_model_exactly_where_the_adapter_does_nothing(runs, capsys):
    tasks = ["hellaswag", "wikitext_tokens"]
    evaluate(runs / "nothing", runs / "nothing-bf16", "--precision", "recovery", tasks=tasks)
    assert capsys.readouterr().out.count("ADAPTER WITHOUT EFFECT: it changes no logit") == 2
    for task in tasks:
        lifted, plain = (result(runs / name / "eval", "recovery", task) for name in ("nothing", "nothing-bf16"))
        assert lifted["per_item"] == plain["per_item"] and "BF16 path" in lifted["model"]
    evaluate(runs / "nothing", "--precision", "low", tasks=TOKENS)
    low = result(runs / "nothing" / "eval", "low", "wikitext_tokens")
    assert low["per_item"] != lifted["per_item"], "and INT8 is not"


def test_precisions_are_different_models_and_say_what_they_are(runs):
    labels, items = {}, {}
    for precision in ("low", "recovery", "final"):
        evaluate(runs / "gnmr", "--precision", precision, tasks=TOKENS)
        scored = result(runs / "gnmr" / "eval", precision, "wikitext_tokens")
        labels[precision], items[precision] = scored["model"], scored["per_item"]["token_perplexity"]
        assert scored["adapter_effect"] > 0
    last = json.loads((runs / "gnmr" / "trace.jsonl").read_text().splitlines()[-1])["active"]
    assert f"INT8 with layers {last} in BF16" in labels["final"] and "INT8 everywhere" in labels["low"]
    assert items["low"] != items["recovery"] != items["final"] != items["low"]


def test_recovery_with_a_trained_adapter_is_the_bf16_model_up_to_peft_s_rounding(runs, tmp_path):
    """PEFT adds the adapter in fp32 over plain linears and in BF16 over 8-bit ones: 0.5% of a block's loss."""
    # A tenth of the adapter: PEFT's rounding shrinks with it, INT8's does not; else both are alike on a model this small.
    run, adapter = copied(runs / "gnmr", tmp_path / "run"), tmp_path / "adapter"
    tensors = load_file(run / "adapter_model.safetensors")
    save_file({k: v * (0.1 if ".lora_B." in k else 1.0) for k, v in tensors.items()}, run / "adapter_model.safetensors")
    adapter.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(run / name, adapter)
    evaluate(adapter, "--output", tmp_path / "bf16", "--block", "128", tasks=TOKENS)
    scored = {"bf16": result(tmp_path / "bf16", "recovery", "wikitext_tokens")}
    for precision in ("recovery", "low"):
        options = ("--precision", precision, "--output", tmp_path / "gnmr", "--block", "128")
        evaluate(run, *options, tasks=TOKENS)
        scored[precision] = result(tmp_path / "gnmr", precision, "wikitext_tokens")
    losses = {name: np.array(list(r["per_item"]["token_perplexity"].values())) for name, r in scored.items()}
    assert "bfloat16" in scored["bf16"]["model"] and "BF16 path" in scored["recovery"]["model"]
    off = {name: np.abs(losses[name] / losses["bf16"] - 1).max() for name in ("recovery", "low")}
    assert off["recovery"] < 5e-3, off
    assert off["low"] > 2 * off["recovery"], "INT8 is farther away"


@pytest.mark.parametrize("kind", ["ia3", "lokr"])
@pytest.mark.parametrize("precision", ["recovery", "low"])
def test_adapters_of_other_kinds(tiny_lm, tmp_path, kind, precision):
    import peft

    config = {
        "ia3": lambda: peft.IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj", "v_proj"], feedforward_modules=[]),
        "lokr": lambda: peft.LoKrConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"]),
    }[kind]()
    model = peft.get_peft_model(load_bf16(tiny_lm), config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(torch.randn(p.shape, generator=generator) * 0.3)
    model.save_pretrained(tmp_path / "adapter")
    evaluate(tmp_path / "adapter", "--precision", precision, "--block", "64", tasks=TOKENS)
    scored = result(tmp_path / "adapter" / "eval", precision, "wikitext_tokens")
    blocks = list(token_perplexity(model.eval(), byte_tokenizer(), smoke_text(), block=64))
    assert scored["adapter_effect"] > 0
    close = 1e-6 if precision == "recovery" else 0.05
    assert scored["metrics"]["token_perplexity"] == pytest.approx(perplexity(blocks), rel=close)


def test_layers_without_adapters_are_lifted_as_well(runs, tmp_path):
    one_layer = ["lora.layers_to_transform=[2]", "lora.target_modules=[q_proj]"]
    one_layer += ["training.learning_rate=0", "training.max_steps=1"]
    for name, overrides in (("int8", []), ("bf16", ["backend.name=none"])):
        assert train([str(runs / "small.yaml"), f"training.output_dir={tmp_path / name}", *one_layer, *overrides]) == 0
        evaluate(tmp_path / name, "--precision", "recovery", tasks=TOKENS)
    lifted, plain = (result(tmp_path / name / "eval", "recovery", "wikitext_tokens") for name in ("int8", "bf16"))
    assert lifted["per_item"] == plain["per_item"]
