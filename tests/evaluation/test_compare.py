"""The table: rows, differences, what is comparable, and results of the first version."""

from __future__ import annotations

import json
import math
import shutil

import numpy as np
import pytest

pytest.importorskip("lm_eval")

from evaluation_runs import STORED, copied, evaluate
from safetensors.torch import load_file, save_file

from hf_gnmr.cli import main as cli
from hf_gnmr.evaluation.compare import difference
from hf_gnmr.evaluation.smoke import smoke_text

pytest_plugins = ["evaluation_runs"]
pytestmark = pytest.mark.usefixtures("inside_tmp_path")


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
    assert "--against 'nobody': expected one of" in capsys.readouterr().err


def test_results_of_the_first_version_are_read_as_then(tmp_path, capsys):
    assert cli(["compare", str(STORED), "--output", str(tmp_path)]) == 0
    assert "| evaluation (recovery) | 0.0000 ± 0.0000 | 1.0000 ± 0.0000 | 280.1162 |" in capsys.readouterr().out
    table, before = (json.loads((folder / "compare.json").read_text()) for folder in (tmp_path, STORED))
    scoring = {column: cell.pop("scoring") for column, cell in table["rows"]["evaluation (recovery)"].items()}
    assert table == before
    assert scoring["hellaswag acc"] == {"batch": 8, "softmax": "bfloat16"}, "as they were computed then"
    assert scoring["wikitext_tokens token_perplexity"] == {"softmax": "float32"}
    lines, lines_before = ((folder / "compare.csv").read_text().splitlines() for folder in (tmp_path, STORED))
    assert [line.rsplit(",", 2)[0] for line in lines] == lines_before


def test_results_of_two_ways_to_score_are_told_apart(tmp_path, capsys):
    for name in ("old", "new"):
        shutil.copytree(STORED / "recovery", tmp_path / name / "recovery")
    file = tmp_path / "new" / "recovery" / "hellaswag.json"
    scored = json.loads(file.read_text())
    scored["key"] |= {"batch_size": 4, "softmax_dtype": "float32"}
    file.write_text(json.dumps(scored))
    assert cli(["compare", str(tmp_path / "old"), str(tmp_path / "new")]) == 0
    lines = capsys.readouterr().out.splitlines()
    (note,) = [line for line in lines if line.startswith("hellaswag acc:")]
    assert "batch 8, softmax bfloat16 or batch 4, softmax float32. NOT SCORED IN THE SAME WAY in all rows." in note
    assert "NOT THE SAME ITEMS" not in note


@pytest.mark.parametrize("name", ["compare.md", "compare.json", "compare.csv"])
@pytest.mark.parametrize("kind", ["file", "folder", "link to a device"])
def test_other_files_under_the_tables_names_are_refused(tmp_path, capsys, name, kind):
    place = tmp_path / name
    if kind == "file":
        place.write_text("mine")
    elif kind == "folder":
        place.mkdir()
    else:
        place.symlink_to("/dev/null")
    assert cli(["compare", str(STORED), "--output", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --output") and name in error and error.count("\n") == 1
    assert kind != "file" or place.read_text() == "mine"
    assert [file.name for file in tmp_path.iterdir()] == [name]


def test_an_earlier_table_is_replaced_or_moved_aside_as_a_whole(tmp_path):
    for name in ("compare.json", "compare.csv"):
        shutil.copy(STORED / name, tmp_path / name)
    (tmp_path / "compare.1.csv").write_text("an earlier one")
    table = json.loads((tmp_path / "compare.json").read_text())
    table["rows"] = {"another": {}}
    (tmp_path / "compare.json").write_text(json.dumps(table, indent=2))
    assert cli(["compare", str(STORED), "--output", str(tmp_path)]) == 0
    assert json.loads((tmp_path / "compare.2.json").read_text())["rows"] == {"another": {}}
    assert (tmp_path / "compare.2.csv").read_text() == (STORED / "compare.csv").read_text()
    assert cli(["compare", str(STORED), "--output", str(tmp_path)]) == 0
    assert not (tmp_path / "compare.3.json").exists()


@pytest.mark.parametrize("text", ['{"cut', "[]"])
def test_a_broken_result_is_named(tmp_path, capsys, text):
    shutil.copytree(STORED, tmp_path / "results")
    (tmp_path / "results" / "recovery" / "hellaswag.json").write_text(text)
    assert cli(["compare", str(tmp_path / "results")]) == 2
    assert "hellaswag.json" in capsys.readouterr().err


# -- one difference --------------------------------------------------------------------------------------------------------

GENERATOR = np.random.default_rng(0)
SCORES = GENERATOR.random(400) < 0.5
BETTER = SCORES | (GENERATOR.random(400) < 0.2)
NLL = -GENERATOR.random(50) * 100


def of_scores(values):
    """A result with a 0 or 1 for each item."""
    scores = {str(i): float(v) for i, v in enumerate(values)}
    return {"per_item": {"acc": scores}, "per_item_weight": {}, "item_hash": dict.fromkeys(scores, "same")}


def of_blocks(values):
    """A result with a log-likelihood for each block of 100 tokens."""
    scores = {str(i): float(v) for i, v in enumerate(values)}
    weights = {f"token_perplexity|{i}": 100.0 for i in scores}
    return {"per_item": {"token_perplexity": scores}, "per_item_weight": weights, "item_hash": dict.fromkeys(scores, "same")}


def test_a_row_has_no_difference_from_itself():
    same = difference(of_scores(SCORES), of_scores(SCORES), "acc")
    assert same == {"value": 0.0, "low": 0.0, "high": 0.0, "items": 400, "within_noise": True}


def test_a_few_other_answers_are_noise_and_many_are_not():
    few = SCORES.copy()
    few[:4] = ~few[:4]
    assert difference(of_scores(few), of_scores(SCORES), "acc")["within_noise"]
    better = difference(of_scores(BETTER), of_scores(SCORES), "acc")
    assert not better["within_noise"] and better["value"] == pytest.approx(BETTER.mean() - SCORES.mean())


def test_perplexities_differ_by_their_paired_blocks():
    worse = difference(of_blocks(NLL * 1.01), of_blocks(NLL), "token_perplexity")
    assert worse["value"] == pytest.approx(math.exp(-NLL.sum() * 1.01 / 5000) - math.exp(-NLL.sum() / 5000))
    assert not worse["within_noise"]


def test_too_few_items_have_no_verdict():
    assert difference(of_scores(BETTER[:9]), of_scores(SCORES[:9]), "acc")["within_noise"] is None


def test_other_prompts_and_scores_that_are_not_finite_have_no_difference():
    other = of_scores(SCORES) | {"item_hash": {str(i): "another prompt" for i in range(400)}}
    assert difference(of_scores(BETTER), other, "acc") is None
    assert difference(of_blocks(NLL * np.nan), of_blocks(NLL), "token_perplexity") is None


# -- what is comparable ----------------------------------------------------------------------------------------------------


def test_a_model_that_gives_nan_does_not_destroy_the_table(runs, tmp_path, capsys):
    broken = copied(runs / "bf16", tmp_path / "broken")
    weights = {k: v * float("nan") for k, v in load_file(broken / "adapter_model.safetensors").items()}
    save_file(weights, broken / "adapter_model.safetensors")
    evaluate(runs / "bf16", broken, tasks=["wikitext_tokens"])
    assert "| nan |" in capsys.readouterr().out


def test_other_texts_and_other_blocks_are_not_paired(runs, tmp_path, capsys):
    for name, text in (("one", smoke_text()), ("two", smoke_text().replace("year", "spring"))):
        (tmp_path / name / "wikitext2").mkdir(parents=True)
        (tmp_path / name / "wikitext2" / "test.raw").write_text(text)
    for out, run, data, block in (("a", "bf16", "one", 64), ("b", "gnmr", "two", 64), ("c", "gnmr", "one", 32)):
        options = ["--data", str(tmp_path / data), "--block", str(block), "--output", str(tmp_path / out)]
        assert cli(["eval", str(runs / run), *options, "--tasks", "wikitext_tokens", "--limit", "12", "--offline"]) == 0
    for other in "bc":
        capsys.readouterr()
        assert cli(["compare", str(tmp_path / "a"), str(tmp_path / other)]) == 0
        out = capsys.readouterr().out
        assert "(no item in common)" in out and "NOT THE SAME ITEMS" in out and "block 64" in out


def test_the_output_of_several_runs_is_compared_by_its_folder(runs, tmp_path, capsys):
    evaluate(runs / "bf16", runs / "gnmr", "--output", tmp_path / "both")
    capsys.readouterr()
    assert cli(["compare", str(tmp_path / "both")]) == 0
    out = capsys.readouterr().out
    assert "| bf16-" in out and "| gnmr-" in out
    evaluate(runs / "bf16", "--output", tmp_path / "both" / "one", "--precision", "recovery", tasks=["mmlu:sums"])
    assert "mmlu:sums acc" in (out := capsys.readouterr().out) and "hellaswag" not in out, "only the requested task"
    assert "n 6" in out and "built-in rows" in out
