"""lm-eval: identity with its own command, batches, cut prompts, subjects."""

from __future__ import annotations

import argparse
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import byte_tokenizer, save_llama
from torch import nn
from transformers import LlamaConfig

pytest.importorskip("lm_eval")

from evaluation_runs import evaluate, result

from hf_gnmr.config import ConfigError
from hf_gnmr.evaluation.harness import harness_tasks, language_model
from hf_gnmr.evaluation.tasks import Request, parse_tasks

pytest_plugins = ["evaluation_runs"]
pytestmark = pytest.mark.usefixtures("inside_tmp_path")


@pytest.mark.parametrize(
    "task", ["hellaswag", "gsm8k", *(pytest.param(t, marks=pytest.mark.slow) for t in ("mmlu", "wikitext"))]
)
def test_a_base_through_our_loader_is_the_base_through_plain_lm_eval(tiny_lm, tmp_path, task):
    from lm_eval import evaluator
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    evaluate(tiny_lm, "--output", tmp_path, "--limit", "2", "--max-gen-tokens", "8", "--batch-size", "1", tasks=[task])
    scored = result(tmp_path, "recovery", task)
    plain = evaluator.simple_evaluate(
        model=HFLM(
            pretrained=tiny_lm,
            tokenizer=byte_tokenizer(),
            dtype="bfloat16",
            softmax_dtype="float32",
            device="cpu",
            batch_size=1,
        ),
        tasks=list(harness_tasks(parse_tasks([task])[0], "builtin").values()),
        task_manager=TaskManager(include_defaults=False),  # the tasks are given: its definitions are not needed
        limit=2,
        bootstrap_iters=0,
        gen_kwargs="max_gen_toks=8" if task == "gsm8k" else None,
    )
    for name, samples in plain["samples"].items():
        for sample in samples:
            for metric in sample["metrics"]:
                key = metric if sample["filter"] == "none" else f"{metric},{sample['filter']}"
                value = sample[metric][0] if isinstance(sample[metric], (tuple, list)) else sample[metric]
                assert scored["per_item"][key][f"{name}/{sample['doc_id']}"] == pytest.approx(value, rel=1e-6)
    if task == "wikitext":
        assert scored["metrics"]["word_perplexity"] == pytest.approx(plain["results"]["wikitext"]["word_perplexity,none"])


@pytest.mark.parametrize(
    ("run", "precision"),
    [
        pytest.param("bf16", "recovery", marks=pytest.mark.slow),
        ("gnmr", "low"),
        pytest.param("gnmr", "recovery", marks=pytest.mark.slow),
    ],
)
def test_batch_sizes_agree(runs, run, precision, capsys):
    """Padding moves a log-likelihood by rounding only, in BF16 and in INT8: 1%."""
    scores = []
    for size in (1, 4):
        out = runs / f"{run}-{precision}-{size}"
        evaluate(runs / run, "--batch-size", size, "--precision", precision, "--output", out)
        assert f"batch {size}, softmax float32" in capsys.readouterr().out
        scored = result(out, precision)
        assert (scored["key"]["batch_size"], scored["key"]["softmax_dtype"]) == (size, "float32")
        answers = scored["answers"]
        scores.append(np.array([[float(choice[0][0]) for choice in answers[item]] for item in sorted(answers)]))
    assert scores[0].shape == (8, 4) and np.ptp(scores[0]) > 1
    np.testing.assert_allclose(scores[0], scores[1], rtol=0.01)
    rounded = torch.tensor(scores[0], dtype=torch.float32).bfloat16().double().numpy()
    assert (rounded != scores[0]).mean() > 0.9, "log-likelihoods are finer than BF16"


def test_choices_that_bf16_cannot_tell_apart_are_not_decided_by_order(tmp_path):
    """Two continuations of one token, whose log-probabilities differ by less than BF16 resolves."""
    from lm_eval.api.instance import Instance

    class Fixed(nn.Module):
        config = LlamaConfig(vocab_size=288)
        device = torch.device("cpu")

        def forward(self, ids, **ignored):
            logits = torch.zeros(*ids.shape, 288, dtype=torch.bfloat16)
            logits[..., byte_tokenizer()("b", add_special_tokens=False)["input_ids"][-1]] = 2**-6
            return SimpleNamespace(logits=logits)

        def tie_weights(self):
            pass

    lm = language_model(Fixed(), byte_tokenizer(), argparse.Namespace(batch_size=4), None)
    asked = [Instance("loglikelihood", {}, ("x", choice), i) for i, choice in enumerate("ab")]
    a, b = (value for value, _ in lm.loglikelihood(asked, disable_tqdm=True))
    assert b - a == pytest.approx(2**-6, rel=1e-4)


def test_prompts_that_are_cut_are_counted(tmp_path, capsys):
    """Eight shots of bytes do not fit into 512 positions."""
    short = save_llama(tmp_path / "short", vocab_size=288, max_position_embeddings=512, eos_token_id=2, bos_token_id=1)
    byte_tokenizer().save_pretrained(short)
    evaluate(short, "--limit", "2", "--max-gen-tokens", "4", "--shots", "8", tasks=["gsm8k"])
    assert "2 of 2 prompts were cut on the left" in (out := capsys.readouterr().out)
    assert "2 prompts cut on the left" in out.split("\n|")[-1]
    evaluate(short, "--limit", "2", "--shots", "0", "--output", tmp_path / "whole", tasks=["mmlu", "hellaswag"])
    out = capsys.readouterr().out
    assert "--shots does not apply to hellaswag" in out and "cut on the left" not in out


@pytest.mark.parametrize(("metric", "task"), [("word_perplexity", "wikitext"), ("token_perplexity", "wikitext_tokens")])
def test_perplexities_have_standard_errors(runs, metric, task):
    evaluate(runs / "bf16", "--block", "64", "--output", runs / "errors", tasks=[task])
    scored = result(runs / "errors", "recovery", task)
    values = scored["per_item"][metric].values()
    weights = [scored["per_item_weight"][f"{metric}|{item}"] for item in scored["per_item"][metric]]
    assert scored["n"] >= 3
    rates = np.array([-v / w for v, w in zip(values, weights, strict=True)])
    rough = rates.std(ddof=1) / len(rates) ** 0.5 * scored["metrics"][metric]  # the delta method, equal weights
    assert 0.3 * rough < scored["stderr"][metric] < 3 * rough


def test_a_subject_that_lm_eval_does_not_know_borrows_another_s_definition():
    tasks = harness_tasks(Request("mmlu"), "builtin")
    assert list(tasks) == ["mmlu_differences", "mmlu_sums"]
    config = tasks["mmlu_sums"].dump_config()
    assert config["task"] == "mmlu_sums" and config["description"].endswith("(with answers) about sums.\n\n")
    assert len(list(tasks["mmlu_sums"].eval_docs)) == 6


def test_a_subject_must_be_on_the_hub():
    with pytest.raises(ConfigError, match="--tasks mmlu:xyz: lm-eval has no such mmlu subject"):
        harness_tasks(Request("mmlu", "xyz"), None)
