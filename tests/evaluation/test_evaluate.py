"""Downstream evaluation: identity with lm-eval and plain PyTorch, precisions, local files, going on, comparison, errors."""

from __future__ import annotations

import json
import math
import os
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import SMALL, byte_tokenizer, load_bf16, save_llama
from safetensors.torch import load_file, save_file

pytest.importorskip("lm_eval")

from hf_gnmr.cli import main as cli
from hf_gnmr.evaluation.compare import compare, difference
from hf_gnmr.evaluation.evaluate import build, resolve
from hf_gnmr.evaluation.smoke import smoke_text
from hf_gnmr.evaluation.tasks import harness_tasks, own_task, pages, parse_tasks
from hf_gnmr.train import main as train

perplexity, token_perplexity = (getattr(own_task("wikitext_tokens"), n) for n in ("perplexity", "token_perplexity"))

SHARED = pathlib.Path(__file__).parents[3] / "shared" / "data"


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tiny_lm, rows_file):
    """Folders of short runs: gnmr, BF16, and one whose adapter does nothing."""
    import yaml

    folder = tmp_path_factory.mktemp("runs")
    recipe = folder / "small.yaml"
    recipe.write_text(
        yaml.safe_dump(
            {
                "model": {"name": tiny_lm},
                "lora": {"r": 4, "lora_alpha": 64},
                "data": {
                    "name": rows_file,
                    "prompt": "Question: {question}\nAnswer:",
                    "answer": " {answer}",
                    "max_length": 96,
                },
                "training": {
                    "max_steps": 6,
                    "per_device_train_batch_size": 4,
                    "learning_rate": 1e-2,
                    "save_strategy": "no",
                    "report_to": "none",
                    "use_cpu": True,
                    "disable_tqdm": True,
                },
                "gnmr": {"max_o": 1, "alpha": 0.5, "alpha_init_fraction": 0.0},
            }
        )
    )
    for name, overrides in (
        ("gnmr", []),
        ("bf16", ["backend.name=none"]),
        ("nothing", ["training.learning_rate=0", "training.max_steps=1"]),
        ("nothing-bf16", ["training.learning_rate=0", "training.max_steps=1", "backend.name=none"]),
    ):
        assert train([str(recipe), f"training.output_dir={folder / name}", *overrides]) == 0
    return folder


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """What goes to the working directory goes to the test's."""
    monkeypatch.chdir(tmp_path)


def evaluate(*arguments, tasks=("hellaswag",), status=0):
    assert cli(["eval", *map(str, arguments), "--data", "builtin", "--tasks", *tasks, "--offline"]) == status


def result(folder, precision, task="hellaswag"):
    return json.loads((pathlib.Path(folder) / precision / f"{task}.json").read_text())


# -- identity ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("block", "stride"), [(32, None), (32, 8), (64, 64), (2048, None)])
def test_token_perplexity_is_that_of_ten_plain_lines(tiny_lm, block, stride):
    model, tokenizer, text = load_bf16(tiny_lm).eval(), byte_tokenizer(), smoke_text()
    ours = perplexity(list(token_perplexity(model, tokenizer, text, block=block, stride=stride)))
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    total, count, seen = 0.0, 0, 0
    for begin in range(0, ids.shape[1], stride or block):
        end = min(begin + block, ids.shape[1])
        labels = ids[:, begin:end].clone()
        labels[:, : max(seen - begin, 0)] = -100  # scored by an earlier block
        labels[:, 0] = -100
        number = int((labels != -100).sum())
        if number:
            with torch.no_grad():
                total += float(model(ids[:, begin:end], labels=labels).loss) * number
            count, seen = count + number, end
        if end == ids.shape[1]:
            break
    assert ours == pytest.approx(math.exp(total / count), rel=1e-4)


@pytest.mark.parametrize("task", ["hellaswag", "mmlu", "gsm8k", "wikitext"])
def test_a_base_through_our_loader_is_the_base_through_plain_lm_eval(tiny_lm, tmp_path, task):
    from lm_eval import evaluator
    from lm_eval.models.huggingface import HFLM

    more = ["--limit", "2", "--max-gen-tokens", "8", "--batch-size", "1"]
    evaluate(tiny_lm, "--output", tmp_path, *more, tasks=[task])
    ours = result(tmp_path, "recovery", task)
    plain = evaluator.simple_evaluate(
        model=HFLM(pretrained=tiny_lm, tokenizer=byte_tokenizer(), dtype="bfloat16", device="cpu", batch_size=1),
        tasks=list(harness_tasks(parse_tasks([task])[0], "builtin").values()),
        limit=2,
        bootstrap_iters=0,
        gen_kwargs="max_gen_toks=8" if task == "gsm8k" else None,
    )
    for name, samples in plain["samples"].items():
        for sample in samples:
            for metric in sample["metrics"]:
                key = metric if sample["filter"] == "none" else f"{metric},{sample['filter']}"
                value = sample[metric][0] if isinstance(sample[metric], (tuple, list)) else sample[metric]
                assert ours["per_item"][key][f"{name}/{sample['doc_id']}"] == pytest.approx(value, rel=1e-6)
    if task == "wikitext":
        assert ours["metrics"]["word_perplexity"] == pytest.approx(plain["results"]["wikitext"]["word_perplexity,none"])


def test_recovery_is_the_bf16_model_exactly_where_the_adapter_does_nothing(runs, capsys):
    tasks = ["hellaswag", "wikitext_tokens"]
    evaluate(runs / "nothing", runs / "nothing-bf16", "--precision", "recovery", tasks=tasks)
    out = capsys.readouterr().out
    assert out.count("ADAPTER WITHOUT EFFECT: it changes no logit") == 2
    for task in tasks:
        ours, theirs = (result(runs / name / "eval", "recovery", task) for name in ("nothing", "nothing-bf16"))
        assert ours["per_item"] == theirs["per_item"] and "BF16 path" in ours["model"]
    evaluate(runs / "nothing", "--precision", "low", tasks=["wikitext_tokens"])
    low = result(runs / "nothing" / "eval", "low", "wikitext_tokens")
    assert low["per_item"] != ours["per_item"], "and INT8 is not"


def test_precisions_are_different_models_and_say_what_they_are(runs):
    labels, items = {}, {}
    for precision in ("low", "recovery", "final"):
        evaluate(runs / "gnmr", "--precision", precision, tasks=["wikitext_tokens"])
        found = result(runs / "gnmr" / "eval", precision, "wikitext_tokens")
        labels[precision], items[precision] = found["model"], found["per_item"]["token_perplexity"]
        assert found["adapter_effect"] > 0
    last = json.loads((runs / "gnmr" / "trace.jsonl").read_text().splitlines()[-1])["active"]
    assert f"INT8 with layers {last} in BF16" in labels["final"] and "INT8 everywhere" in labels["low"]
    assert items["low"] != items["recovery"] != items["final"] != items["low"]
    assert resolve(str(runs / "gnmr"), None, None).precision == "low"
    assert resolve(str(runs / "bf16"), None, None).precision == "recovery"


def test_batch_sizes_agree(runs):
    """In BF16 padding moves a log-likelihood by rounding only: 1%."""
    scores = []
    for size in (1, 4):
        out = runs / f"batch{size}"
        evaluate(runs / "bf16", "--batch-size", size, "--output", out)
        answers = result(out, "recovery")["answers"]
        scores.append(np.array([[float(choice[0][0]) for choice in answers[item]] for item in sorted(answers)]))
    assert scores[0].shape == (8, 4) and np.ptp(scores[0]) > 1
    np.testing.assert_allclose(scores[0], scores[1], rtol=0.01)


def test_recovery_with_a_trained_adapter_is_the_bf16_model_up_to_peft_s_rounding(runs, tmp_path):
    """PEFT adds the adapter in fp32 over plain linears and in BF16 over 8-bit ones: 0.5% of a block's loss."""
    foreign = tmp_path / "adapter"
    foreign.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(runs / "gnmr" / name, foreign)
    evaluate(foreign, "--output", tmp_path / "bf16", "--block", "128", tasks=["wikitext_tokens"])
    losses = {"bf16": result(tmp_path / "bf16", "recovery", "wikitext_tokens")}
    for precision in ("recovery", "low"):
        more = ("--precision", precision, "--output", tmp_path / "gnmr", "--block", "128")
        evaluate(runs / "gnmr", *more, tasks=["wikitext_tokens"])
        losses[precision] = result(tmp_path / "gnmr", precision, "wikitext_tokens")
    values = {name: np.array(list(found["per_item"]["token_perplexity"].values())) for name, found in losses.items()}
    assert "bfloat16" in losses["bf16"]["model"] and "BF16 path" in losses["recovery"]["model"]
    off = {name: np.abs(values[name] / values["bf16"] - 1).max() for name in ("recovery", "low")}
    assert off["recovery"] < 5e-3, off
    assert off["low"] > 2 * off["recovery"], "INT8 is farther away"


# -- going on, errors ------------------------------------------------------------------------------------------------------


def test_what_is_finished_is_not_evaluated_again_and_what_is_not_goes_on(runs, capsys, monkeypatch):
    tasks = ["hellaswag", "wikitext_tokens"]
    evaluate(runs / "gnmr", tasks=tasks)
    file = runs / "gnmr" / "eval" / "low" / "hellaswag.json"
    before = file.read_bytes()
    (runs / "gnmr" / "eval" / "low" / "wikitext_tokens.json").unlink()
    capsys.readouterr()
    evaluate(runs / "gnmr", tasks=tasks)
    out = capsys.readouterr().out
    assert "hellaswag: there already" in out and "wikitext_tokens ..." in out and file.read_bytes() == before
    monkeypatch.setattr("hf_gnmr.evaluation.evaluate.build", lambda *arguments: pytest.fail("loaded a model"))
    evaluate(runs / "gnmr", tasks=tasks)
    monkeypatch.undo()
    evaluate(runs / "gnmr", "--limit", "2", tasks=["hellaswag"])
    assert (runs / "gnmr" / "eval" / "low" / "hellaswag.1.json").read_bytes() == before, "other settings lose nothing"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{runs}"], "neither a run (recipe.yaml), nor an adapter"),
        (["/no/such"], "/no/such: no such folder"),
        (["{runs}/gnmr", "--tasks", "arc"], "--tasks arc: gsm8k, mmlu, hellaswag"),
        (["{runs}/gnmr", "--tasks", "mmlu:"], "--tasks mmlu::"),
        (["{runs}/gnmr", "--tasks", "gsm8k", "gsm8k"], "given twice"),
        (["{runs}/gnmr", "--data", "{runs}"], "no gsm8k/test*.jsonl in it, which gsm8k needs"),
        (["{runs}/gnmr", "--limit", "0"], "--limit 0"),
        (["{runs}/gnmr", "--data", "builtin", "--shots", "9"], "--shots 9: gsm8k has 8 examples to show"),
        (["{runs}/../no-adapter", "--base", "x"], "holds no adapter that could be put over another base"),
        (["{runs}/bf16", "--data", "builtin", "--precision", "low"], "was trained in BF16"),
        (["{runs}/gnmr", "--data", "builtin", "--tasks", "hellaswag", "--chat-template", "--limit", "1"], "has none"),
        (["{runs}/gnmr", "--data", "builtin", "--tasks", "wikitext_tokens", "--block", "99999"], "--block 99999"),
    ],
)
def test_what_is_wrong_is_told(runs, capsys, arguments, message):
    assert cli(["eval", *(a.format(runs=runs) for a in arguments)]) == 2
    assert message in capsys.readouterr().err


def test_an_absent_adapter_and_one_of_another_base(runs, tmp_path, capsys):
    unfinished = tmp_path / "unfinished"
    unfinished.mkdir()
    (unfinished / "recipe.yaml").write_text((runs / "gnmr" / "recipe.yaml").read_text())
    evaluate(unfinished, status=2)
    assert "the run is not finished" in capsys.readouterr().err
    other = save_llama(tmp_path / "other", vocab_size=288, hidden_size=32, eos_token_id=2, bos_token_id=1)
    byte_tokenizer().save_pretrained(other)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (adapter / name).write_bytes((runs / "bf16" / name).read_bytes())
    evaluate(adapter, "--base", other, status=2)
    assert "does not fit" in capsys.readouterr().err
    evaluate(adapter, "--output", tmp_path / "out", tasks=["wikitext_tokens"])
    same = result(tmp_path / "out", "recovery", "wikitext_tokens")["per_item"]
    evaluate(runs / "bf16", tasks=["wikitext_tokens"])
    ours = result(runs / "bf16" / "eval", "recovery", "wikitext_tokens")["per_item"]
    assert same == ours, "any PEFT adapter with its base"


def test_a_checkpoint_of_a_run_is_that_run_at_its_step(runs, tmp_path, capsys):
    run = tmp_path / "run"
    more = [f"training.output_dir={run}", "training.save_strategy=steps", "training.save_steps=3"]
    assert train([str(runs / "small.yaml"), *more]) == 0
    steps = [json.loads(line) for line in (run / "trace.jsonl").read_text().splitlines()[1:]]
    third = next(s["active"] for s in steps if s["step"] == 3)
    evaluate(run / "checkpoint-3", "--precision", "final", tasks=["wikitext_tokens"])
    evaluate(run / "checkpoint-3", run, tasks=["wikitext_tokens"])
    out = capsys.readouterr().out
    assert f"INT8 with layers {third} in BF16" in out and out.count("bitsandbytes INT8 everywhere, bfloat16 beside it.") == 2
    figures = [result(f / "eval", "low", "wikitext_tokens")["metrics"] for f in (run / "checkpoint-3", run)]
    assert figures[0] != figures[1], "other adapters"


def test_a_base_that_was_moved_can_be_given(runs, tiny_lm, tmp_path, capsys):
    moved, run = tmp_path / "moved", tmp_path / "run"
    shutil.copytree(tiny_lm, moved)
    shutil.copytree(runs / "bf16", run, ignore=shutil.ignore_patterns("eval"))
    text = (run / "recipe.yaml").read_text()
    (run / "recipe.yaml").write_text(text.replace(str(tiny_lm), "models/not-here"))
    evaluate(run, status=2, tasks=["wikitext_tokens"])
    assert "models/not-here" in capsys.readouterr().err
    evaluate(run, "--base", moved, tasks=["wikitext_tokens"])
    assert f"trained over models/not-here, and put over {moved}" in capsys.readouterr().out
    evaluate(runs / "bf16", tasks=["wikitext_tokens"])
    ours, theirs = (result(f / "eval", "recovery", "wikitext_tokens")["per_item"] for f in (run, runs / "bf16"))
    assert ours == theirs


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
    evaluate(tmp_path / "adapter", "--precision", precision, "--block", "64", tasks=["wikitext_tokens"])
    found = result(tmp_path / "adapter" / "eval", precision, "wikitext_tokens")
    ours = list(token_perplexity(model.eval(), byte_tokenizer(), smoke_text(), block=64))
    assert found["adapter_effect"] > 0
    close = 1e-6 if precision == "recovery" else 0.05
    assert found["metrics"]["token_perplexity"] == pytest.approx(perplexity(ours), rel=close)


def test_adapters_that_add_virtual_tokens_are_refused(tiny_lm, tmp_path, capsys):
    import peft

    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    peft.get_peft_model(load_bf16(tiny_lm), config).save_pretrained(tmp_path / "adapter")
    evaluate(tmp_path / "adapter", status=2)
    assert "a PROMPT_TUNING adapter adds virtual tokens" in capsys.readouterr().err


def test_prompts_that_are_cut_are_counted(tmp_path, capsys):
    """Eight shots of bytes do not fit into 512 positions."""
    short = save_llama(tmp_path / "short", vocab_size=288, max_position_embeddings=512, eos_token_id=2, bos_token_id=1)
    byte_tokenizer().save_pretrained(short)
    evaluate(short, "--limit", "2", "--max-gen-tokens", "4", "--shots", "8", tasks=["gsm8k"])
    assert "2 of 2 prompts were cut on the left" in (out := capsys.readouterr().out)
    assert "2 prompts cut on the left" in out.split("\n|")[-1]
    evaluate(short, "--limit", "2", "--shots", "0", "--output", tmp_path / "whole", tasks=["mmlu", "hellaswag"])
    out = capsys.readouterr().out
    assert "--shots says nothing to hellaswag" in out and "cut on the left" not in out


def test_perplexities_have_standard_errors(runs):
    evaluate(runs / "bf16", "--block", "64", "--output", runs / "errors", tasks=["wikitext", "wikitext_tokens"])
    for task, metric in (("wikitext", "word_perplexity"), ("wikitext_tokens", "token_perplexity")):
        found = result(runs / "errors", "recovery", task)
        values = found["per_item"][metric].values()
        weights = [found["per_item_weight"][f"{metric}|{item}"] for item in found["per_item"][metric]]
        assert found["n"] >= 3
        rates = np.array([-v / w for v, w in zip(values, weights, strict=True)])
        rough = rates.std(ddof=1) / len(rates) ** 0.5 * found["metrics"][metric]  # the delta method, equal weights
        assert 0.3 * rough < found["stderr"][metric] < 3 * rough


# -- data ----------------------------------------------------------------------------------------------------------------


def test_articles_begin_at_headings_of_the_first_level():
    text = " \n = One = \n \n text = here \n = = Part = = \n \n more \n = Two = \n \n end \n"
    assert [page.split("=")[1].strip() for page in pages(text)] == ["One", "Two"]
    assert "Part" in pages(text)[0]


def test_the_layouts_of_public_data(tiny_lm):
    if not SHARED.is_dir():
        pytest.skip(f"no {SHARED}")
    counts = {
        "gsm8k": {"gsm8k": 200},
        "mmlu:philosophy": {"mmlu_philosophy": 311},
        "hellaswag": {"hellaswag": 500},
        "wikitext": {"wikitext": 60},
    }
    for name, expected in counts.items():
        tasks = harness_tasks(parse_tasks([name])[0], str(SHARED))
        assert {task: len(list(found.eval_docs)) for task, found in tasks.items()} == expected


def test_the_text_is_scored_whole(tiny_lm):
    tokenizer, text = byte_tokenizer(), smoke_text()
    model = load_bf16(tiny_lm).eval()
    blocks = list(token_perplexity(model, tokenizer, text, block=100))
    tokens = len(tokenizer(text, add_special_tokens=False)["input_ids"])
    assert sum(b["tokens"] for b in blocks) == tokens - math.ceil(tokens / 100), "all but each block's first"
    overlapping = list(token_perplexity(model, tokenizer, text, block=100, stride=50))
    assert sum(b["tokens"] for b in overlapping) == tokens - 1


# -- comparison ------------------------------------------------------------------------------------------------------------


def test_the_table_of_a_study(runs, tmp_path, capsys):
    evaluate(runs / "bf16", runs / "gnmr", tasks=["hellaswag", "wikitext_tokens"])
    capsys.readouterr()
    assert cli(["compare", str(runs / "bf16"), str(runs / "gnmr"), "--output", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "SMOKE" in out and "In brackets: difference from" in out and "shots 0" in out and "transformers" in out
    table = json.loads((tmp_path / "compare.json").read_text())
    assert table["reference"].endswith("bf16 (recovery)")
    row = next(cells for name, cells in table["rows"].items() if name.endswith("gnmr (low)"))
    assert row["hellaswag acc"]["difference"]["items"] == 8 and row["hellaswag acc"]["stderr"] is not None
    assert (tmp_path / "compare.md").read_text().strip() == out.strip()
    assert (tmp_path / "compare.csv").read_text().startswith("method,metric,value")
    assert cli(["compare", str(tmp_path)]) == 2
    assert "no evaluation in it" in capsys.readouterr().err
    assert cli(["compare", str(runs / "gnmr"), "--against", "nobody"]) == 2


def test_a_difference_is_noise_or_not_by_its_paired_interval():
    generator = np.random.default_rng(0)
    base = generator.random(400) < 0.5

    def with_scores(values):
        scores = {str(i): float(v) for i, v in enumerate(values)}
        return {"per_item": {"acc": scores}, "per_item_weight": {}, "item_hash": dict.fromkeys(scores, "same")}

    same = difference(with_scores(base), with_scores(base), "acc")
    assert same == {"value": 0.0, "low": 0.0, "high": 0.0, "items": 400, "within_noise": True}
    few = base.copy()
    few[:4] = ~few[:4]
    assert difference(with_scores(few), with_scores(base), "acc")["within_noise"]
    better = base | (generator.random(400) < 0.2)
    found = difference(with_scores(better), with_scores(base), "acc")
    assert not found["within_noise"] and found["value"] == pytest.approx(better.mean() - base.mean())
    nll = -generator.random(50) * 100
    weights = {f"token_perplexity|{i}": 100.0 for i in range(50)}

    def with_nll(values):
        scores = {"token_perplexity": {str(i): float(v) for i, v in enumerate(values)}}
        hashes = dict.fromkeys(scores["token_perplexity"], "same")
        return {"per_item": scores, "per_item_weight": weights, "item_hash": hashes}

    worse = difference(with_nll(nll * 1.01), with_nll(nll), "token_perplexity")
    assert worse["value"] == pytest.approx(math.exp(-nll.sum() * 1.01 / 5000) - math.exp(-nll.sum() / 5000))
    assert not worse["within_noise"]
    assert difference(with_scores(better[:9]), with_scores(base[:9]), "acc")["within_noise"] is None, "too few to tell"
    other = with_scores(base) | {"item_hash": {str(i): "another prompt" for i in range(400)}}
    assert difference(with_scores(better), other, "acc") is None
    assert difference(with_nll(nll * np.nan), with_nll(nll), "token_perplexity") is None


def test_results_are_never_those_of_another_model(runs, tiny_lm, tmp_path, capsys):
    tasks = ["wikitext_tokens"]
    evaluate(runs / "bf16", "--output", tmp_path / "out", tasks=tasks)
    evaluate(tiny_lm, "--output", tmp_path / "out", tasks=tasks, status=2)
    assert "is the result of" in capsys.readouterr().err
    evaluate("nowhere/model", status=2)
    assert "no folder nowhere/model here, and no such model" in capsys.readouterr().err
    copy = tmp_path / "run"
    shutil.copytree(runs / "bf16", copy, ignore=shutil.ignore_patterns("eval"))
    evaluate(copy, tasks=tasks)
    before = result(copy / "eval", "recovery", "wikitext_tokens")
    shutil.copy(runs / "nothing-bf16" / "adapter_model.safetensors", copy)
    evaluate(copy, tasks=tasks)
    after = result(copy / "eval", "recovery", "wikitext_tokens")
    assert after["per_item"] != before["per_item"] and after["adapter_effect"] == 0.0, "another adapter, another evaluation"
    assert (copy / "eval" / "recovery" / "wikitext_tokens.1.json").exists()
    assert "ADAPTER WITHOUT EFFECT" in capsys.readouterr().out


def test_layers_without_adapters_are_lifted_as_well(runs, tmp_path):
    recipe = str(runs / "small.yaml")
    only = ["lora.layers_to_transform=[2]", "lora.target_modules=[q_proj]"]
    only += ["training.learning_rate=0", "training.max_steps=1"]
    for name, more in (("int8", []), ("bf16", ["backend.name=none"])):
        assert train([recipe, f"training.output_dir={tmp_path / name}", *only, *more]) == 0
        evaluate(tmp_path / name, "--precision", "recovery", tasks=["wikitext_tokens"])
    ours, theirs = (result(tmp_path / name / "eval", "recovery", "wikitext_tokens") for name in ("int8", "bf16"))
    assert ours["per_item"] == theirs["per_item"]


def test_a_model_that_gives_nan_does_not_destroy_the_table(runs, tmp_path, capsys):
    broken = tmp_path / "broken"
    shutil.copytree(runs / "bf16", broken, ignore=shutil.ignore_patterns("eval"))
    weights = {k: v * float("nan") for k, v in load_file(broken / "adapter_model.safetensors").items()}
    save_file(weights, broken / "adapter_model.safetensors")
    evaluate(runs / "bf16", broken, tasks=["wikitext_tokens"])
    assert "| nan |" in capsys.readouterr().out


def test_offline_is_offline_and_needs_data(tiny_lm, capsys, monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    assert cli(["eval", tiny_lm, "--offline"]) == 2
    assert "--offline needs --data" in capsys.readouterr().err
    assert huggingface_hub.constants.HF_HUB_OFFLINE is True


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("mmlu/test.jsonl", '{"question": "?", "choices": [], "answer": 0}\n', "row 1: no subject"),
        ("hellaswag/validation.jsonl", "", "holds no rows"),
        ("gsm8k/test.jsonl", "[1]\n", "no JSON objects"),
        ("wikitext2/test.raw", b"\xff\xfe\x00", "cannot be read as text"),
        ("mmlu/test.jsonl", '{"question": "", "subject": "a", "choices": ["1", "2"], "answer": 0}\n', "a list of 4 texts"),
        ("mmlu/test.jsonl", '{"question": "", "subject": "a", "choices": [1, 2, 3, 4], "answer": "C"}\n', "answer='C'"),
        (
            "hellaswag/validation.jsonl",
            '{"activity_label": "", "ctx_a": "", "ctx_b": "", "endings": ["a", "b"], "label": ""}\n',
            "label=''",
        ),
        ("gsm8k/test.jsonl", '{"question": 3, "answer": "1"}\n', "question=3: a text"),
        ("hellaswag/validation2.jsonl", "{}", "all match hellaswag/validation*.jsonl: leave one"),
    ],
)
def test_broken_data_are_told_before_the_model_is_loaded(tiny_lm, tmp_path, capsys, monkeypatch, file, text, message):
    for split in ("mmlu/dev.jsonl", "gsm8k/train.jsonl", "hellaswag/validation.jsonl"):
        (tmp_path / split).parent.mkdir(exist_ok=True)
        row = '{"question": "?", "answer": %s, "subject": "a", "choices": ["1", "2", "3", "4"]}\n'
        (tmp_path / split).write_text(row % ('"1"' if "gsm8k" in split else "1"))
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_bytes(text if isinstance(text, bytes) else text.encode())
    monkeypatch.setattr("hf_gnmr.evaluation.evaluate.build", lambda *arguments: pytest.fail("loaded"))
    task = file.split("/")[0].replace("wikitext2", "wikitext")
    assert cli(["eval", tiny_lm, "--data", str(tmp_path), "--tasks", task]) == 2
    assert message in capsys.readouterr().err


def test_the_script_runs_from_a_shell_and_leaves_the_table(runs):
    script = pathlib.Path(__file__).parents[2] / "eval" / "downstream.sh"
    command = [str(script), str(runs / "bf16"), "--data", "builtin", "--tasks", "wikitext_tokens", "--offline"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHON": sys.executable}, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "| bf16 (recovery) |" in done.stdout
    for name in ("compare.md", "compare.json", "compare.csv"):
        assert (runs / "bf16" / "eval" / name).is_file()


def test_one_load_for_all_tasks_of_a_run(runs, monkeypatch):
    loads = []
    monkeypatch.setattr("hf_gnmr.evaluation.evaluate.build", lambda *arguments: loads.append(arguments) or build(*arguments))
    evaluate(runs / "gnmr", "--limit", "1", "--output", runs / "once", tasks=["hellaswag", "mmlu", "wikitext_tokens"])
    assert len(loads) == 1
    assert compare([runs / "once"])["smoke"]


# -- results belong to one model and one set of items ---------------------------------------------------------------------


def copied(run, to):
    shutil.copytree(run, to, ignore=shutil.ignore_patterns("eval"))
    return to


def test_another_adapter_configuration_is_another_model(runs, tmp_path, capsys):
    run = copied(runs / "gnmr", tmp_path / "run")
    evaluate(run, tasks=["wikitext_tokens", "hellaswag"])
    before = result(run / "eval", "low", "wikitext_tokens")["metrics"]
    config = json.loads((run / "adapter_config.json").read_text())
    (run / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 1}))
    capsys.readouterr()
    evaluate(run, tasks=["wikitext_tokens"])
    assert "there already" not in capsys.readouterr().out
    assert result(run / "eval", "low", "wikitext_tokens")["metrics"] != before
    assert cli(["compare", str(run)]) == 0
    out = capsys.readouterr().out
    assert "model 1 of 2" in out and "model 2 of 2" in out, "one row a model"


def test_a_run_that_was_moved_keeps_its_results_and_a_copy_is_a_row_of_its_own(runs, tmp_path, capsys):
    run = copied(runs / "gnmr", tmp_path / "run")
    evaluate(run, tasks=["wikitext_tokens"])
    shutil.move(run, tmp_path / "moved")
    capsys.readouterr()
    evaluate(tmp_path / "moved", tasks=["wikitext_tokens"])
    assert "there already" in capsys.readouterr().out
    shutil.copytree(tmp_path / "moved", tmp_path / "copy")
    assert cli(["compare", str(tmp_path / "moved"), str(tmp_path / "copy")]) == 0
    out = capsys.readouterr().out
    assert "| moved (low) |" in out and "| copy (low) |" in out


def test_a_trial_does_not_cost_a_full_result(runs, tmp_path, capsys, monkeypatch):
    run = copied(runs / "gnmr", tmp_path / "run")
    evaluate(run)
    evaluate(run, "--limit", "2")
    assert "n 2" in capsys.readouterr().out.split("In brackets")[-1]
    monkeypatch.setattr("hf_gnmr.evaluation.evaluate.build", lambda *arguments: pytest.fail("loaded"))
    evaluate(run)
    assert "there already" in (out := capsys.readouterr().out) and "hellaswag acc: n 8" in out
    evaluate(run, "--limit", "2")
    monkeypatch.undo()
    (run / "eval" / "low" / "hellaswag.json").write_text('{"cut')
    evaluate(run, "--limit", "3")
    assert "cannot be read (cut?)" in capsys.readouterr().out
    assert result(run / "eval", "low")["n"] == 3
    evaluate(run, run, status=2)
    assert "given twice" in capsys.readouterr().err


def test_other_texts_and_other_blocks_are_not_paired(runs, tmp_path, capsys):
    for name, text in (("one", smoke_text()), ("two", smoke_text().replace("year", "spring"))):
        (tmp_path / name / "wikitext2").mkdir(parents=True)
        (tmp_path / name / "wikitext2" / "test.raw").write_text(text)
    for out, run, data, block in (("a", "bf16", "one", 64), ("b", "gnmr", "two", 64), ("c", "gnmr", "one", 32)):
        more = ["--data", str(tmp_path / data), "--block", str(block), "--output", str(tmp_path / out)]
        assert cli(["eval", str(runs / run), *more, "--tasks", "wikitext_tokens", "--limit", "12", "--offline"]) == 0
    for other in "bc":
        capsys.readouterr()
        assert cli(["compare", str(tmp_path / "a"), str(tmp_path / other)]) == 0
        out = capsys.readouterr().out
        assert "(no item in common)" in out and "NOT THE SAME ITEMS" in out and "block 64" in out


def test_what_several_runs_were_evaluated_into_is_compared_by_its_folder(runs, tmp_path, capsys):
    evaluate(runs / "bf16", runs / "gnmr", "--output", tmp_path / "both")
    capsys.readouterr()
    assert cli(["compare", str(tmp_path / "both")]) == 0
    out = capsys.readouterr().out
    assert "| bf16-" in out and "| gnmr-" in out
    evaluate(runs / "bf16", "--output", tmp_path / "both" / "more", "--precision", "recovery", tasks=["mmlu:sums"])
    assert "mmlu:sums acc" in (out := capsys.readouterr().out) and "hellaswag" not in out, "what was asked for"
    assert "n 6" in out and "built-in rows" in out
    evaluate(runs / "bf16", status=2, tasks=["mmlu:xyz"])
    assert "has the subjects differences, sums" in capsys.readouterr().err


def test_a_model_whose_weights_were_all_trained(tmp_path, capsys):
    assert train([*SMALL, f"training.output_dir={tmp_path / 'run'}"]) == 0
    evaluate(tmp_path / "run", "--output", tmp_path / "out", "--block", "64", tasks=["wikitext_tokens"])
    found = result(tmp_path / "out", "recovery", "wikitext_tokens")
    assert found["adapter_effect"] is None and found["metrics"]["token_perplexity"] > 1
    evaluate(tmp_path / "run", "--base", "x", status=2)
    assert "needs no base" in capsys.readouterr().err


@pytest.mark.slow
def test_the_whole_script_on_the_built_in_model(tmp_path):
    """All five tasks on the built-in rows, from a shell: about a minute."""
    script = pathlib.Path(__file__).parents[2] / "eval" / "downstream.sh"
    command = [str(script), "builtin", "--data", "builtin", "--offline", "--output", str(tmp_path), "--max-gen-tokens", "32"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHON": sys.executable}, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "SMOKE" in done.stdout
    columns = next(line for line in done.stdout.splitlines() if line.startswith("| method"))
    for name in (
        "gsm8k exact_match,strict-match",
        "gsm8k exact_match,flexible-extract",
        "mmlu acc",
        "hellaswag acc_norm",
        "wikitext word_perplexity",
        "wikitext_tokens token_perplexity",
    ):
        assert name in columns
