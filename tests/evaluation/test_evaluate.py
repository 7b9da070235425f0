"""``hf-gnmr eval``: what is refused before a model is loaded, offline, the script, one load per run."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("lm_eval")

from evaluation_runs import SCRIPT, evaluate, no_model_is_built

from hf_gnmr.cli import main as cli
from hf_gnmr.evaluation.compare import compare
from hf_gnmr.evaluation.evaluate import build

pytest_plugins = ["evaluation_runs"]
pytestmark = pytest.mark.usefixtures("inside_tmp_path")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{runs}"], "neither a run (recipe.yaml), nor an adapter"),
        (["/no/such"], "/no/such: no such folder"),
        (["{runs}/gnmr", "--tasks", "arc"], "--tasks arc: expected gsm8k, mmlu, hellaswag"),
        (["{runs}/gnmr", "--tasks", "mmlu:"], "--tasks mmlu::"),
        (["{runs}/gnmr", "--tasks", "gsm8k", "gsm8k"], "given twice"),
        (["{runs}/gnmr", "--data", "{runs}"], "no gsm8k/test*.jsonl in it, which gsm8k needs"),
        (["{runs}/gnmr", "--limit", "0"], "--limit 0: expected a whole number above 0"),
        (["{runs}/gnmr", "--max-gen-tokens", "-1"], "--max-gen-tokens -1: expected a whole number above 0"),
        (["{runs}/gnmr", "--data", "builtin", "--shots", "9"], "--shots 9: gsm8k has 8 examples to show"),
        (["{runs}/bf16", "--data", "builtin", "--tasks", "mmlu:xyz"], "of the built-in rows: differences, sums"),
        (["{runs}/../no-adapter", "--base", "x"], "holds no adapter that could be put over another base"),
        (["{runs}/bf16", "--data", "builtin", "--precision", "low"], "was trained in BF16"),
        (["{runs}/gnmr", "--data", "builtin", "--tasks", "hellaswag", "--chat-template", "--limit", "1"], "has none"),
        (["{runs}/gnmr", "--data", "builtin", "--tasks", "wikitext_tokens", "--block", "99999"], "--block 99999"),
    ],
)
def test_errors_are_reported_before_a_model_is_loaded(runs, capsys, monkeypatch, arguments, message):
    no_model_is_built(monkeypatch)
    assert cli(["eval", *(a.format(runs=runs) for a in arguments)]) == 2
    assert message in capsys.readouterr().err


def test_offline_is_offline_and_needs_data(tiny_lm, capsys, monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    assert cli(["eval", tiny_lm, "--offline"]) == 2
    assert "--offline needs --data" in capsys.readouterr().err
    assert huggingface_hub.constants.HF_HUB_OFFLINE is True


def test_one_load_for_all_tasks_of_a_run(runs, monkeypatch):
    loads = []
    monkeypatch.setattr("hf_gnmr.evaluation.evaluate.build", lambda *arguments: loads.append(arguments) or build(*arguments))
    evaluate(runs / "gnmr", "--limit", "1", "--output", runs / "once", tasks=["hellaswag", "mmlu", "wikitext_tokens"])
    assert len(loads) == 1
    assert compare([runs / "once"])["smoke"]


def run_script(*arguments):
    command = [str(SCRIPT), *map(str, arguments), "--data", "builtin", "--offline"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHON": sys.executable}, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_the_script_runs_from_a_shell_and_leaves_the_table(runs):
    assert "| bf16 (recovery) |" in run_script(runs / "bf16", "--tasks", "wikitext_tokens")
    assert {"compare.md", "compare.json", "compare.csv"} <= {file.name for file in (runs / "bf16" / "eval").iterdir()}


@pytest.mark.slow
def test_the_whole_script_on_the_built_in_model(tmp_path):
    """All five tasks on the built-in rows, from a shell: about a minute."""
    out = run_script("builtin", "--output", tmp_path, "--max-gen-tokens", "32")
    assert "SMOKE" in out
    columns = next(line for line in out.splitlines() if line.startswith("| method"))
    expected = {
        "gsm8k exact_match,strict-match",
        "gsm8k exact_match,flexible-extract",
        "mmlu acc",
        "hellaswag acc_norm",
        "wikitext word_perplexity",
        "wikitext_tokens token_perplexity",
    }
    assert expected <= set(columns.strip("| ").split(" | "))
