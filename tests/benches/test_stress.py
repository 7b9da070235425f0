"""The stress grid: a 20-step grid through the command line, what its table says, going on, errors."""

from __future__ import annotations

import importlib.util
import json
import math
import pathlib
import statistics
import subprocess
import sys
import time
from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

REPOSITORY = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(REPOSITORY / "eval"))
spec = importlib.util.spec_from_file_location("stress", REPOSITORY / "eval" / "stress.py")
stress = importlib.util.module_from_spec(spec)
sys.modules["stress"] = stress
spec.loader.exec_module(stress)
SMALL = [
    "activation_small",
    "training.max_steps=20",
    "training.eval_strategy=no",
    "data.documents=400",
    "data.eval_rows=8",
    "training.per_device_train_batch_size=4",
    "training.logging_steps=20",
    "model.architecture={model_type: llama, vocab_size: 288, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2,"
    " num_attention_heads: 2, max_position_embeddings: 128, tie_word_embeddings: false}",
]
ARMS = [
    "listed:jacobian",
    "random:1.5:1.3",
    "random:0.1",
    "none",
    "all",
    "exact",
    "gnmr:1.5:1.3",
    "gsnr",
    "jacobian",
    "static",
]


def grid(out, *arguments):
    command = [sys.executable, str(REPOSITORY / "eval" / "stress.py"), *SMALL, "--out", str(out), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)


@pytest.mark.slow
def test_a_grid_of_twenty_steps(tmp_path):
    out = tmp_path / "grid"
    arguments = ["--arms", *ARMS, "--seeds", "1", "2", "--formats", "int:2:8", "--max-o", "2"]
    done = grid(out, *arguments, "--times", "1")
    assert done.returncode == 0, done.stderr[-3000:]
    table = json.loads((out / "stress.json").read_text())
    rows = {r["arm"]: r for r in table["rows"]}
    assert len(rows) == len(ARMS) and all(r["seeds"] == [1, 2] for r in rows.values())
    ours = {
        seed: json.loads((out / f"int-2-8_maxo2_gnmr-1.5-1.3_seed{seed}" / "results.json").read_text())["eval_loss"]
        for seed in (1, 2)
    }
    low = {seed: json.loads((out / f"int-2-8_none_seed{seed}" / "results.json").read_text())["eval_loss"] for seed in (1, 2)}
    high = {seed: json.loads((out / f"int-2-8_all_seed{seed}" / "results.json").read_text())["eval_loss"] for seed in (1, 2)}
    row = rows["gnmr 1.5/1.3"]
    assert row["against_none"]["mean"] == pytest.approx(statistics.mean(ours[s] - low[s] for s in (1, 2)))
    assert row["against_none"]["stderr"] == pytest.approx(abs((ours[1] - low[1]) - (ours[2] - low[2])) / 2)
    assert row["perplexity"] == pytest.approx(statistics.mean(math.exp(x) for x in ours.values()))
    means = [statistics.mean(math.exp(x) for x in d.values()) for d in (low, ours, high)]
    gaps = [math.exp(low[s]) - math.exp(high[s]) for s in (1, 2)]
    if statistics.mean(gaps) > stress.t_quantile(0.975, 1) * statistics.stdev(gaps) / math.sqrt(2):
        assert row["gap_closed"]["value"] == pytest.approx((means[0] - means[1]) / (means[0] - means[2]))
    else:
        assert row["gap_closed"] is None
    assert sum(row["lifted"].values()) == pytest.approx(1) and rows["none"]["lifted"] == {}
    assert rows["all"]["lifted"]["down_proj"] == pytest.approx(1 / 7)
    control = rows["random 1.5/1.3"]
    assert abs(control["promotion_ratio"] - row["promotion_ratio"]) < 0.03 and row["against_random"]["seeds"] == 2
    always = rows["listed jacobian"]
    assert always["promotion_ratio"] == pytest.approx(rows["jacobian"]["promotion_ratio"], abs=0.005)
    assert rows["jacobian"]["against_listed"]["mean"] == pytest.approx(rows["jacobian"]["loss"] - always["loss"])
    assert always["hit_max_o_rate"] >= 0.9 and len(always["lifted"]) <= 4, "two units in each of two runs (19 of 20 steps')"
    assert [rows[arm]["promotion_ratio"] for arm in ("none", "all", "exact")] == [0, 1, None]
    assert rows["gsnr"]["trigger_bytes"] > 0 == rows["jacobian"]["trigger_bytes"]
    assert rows["none"]["peak_saved_bytes"] < row["peak_saved_bytes"] < rows["all"]["peak_saved_bytes"]
    assert set(table["step_times"]) == {
        "plain",
        "fixed",
        "gnmr",
        "none",
        "all",
        "gsnr",
        "jacobian",
        "static",
        "random",
        "none, against fixed",
    }
    assert "| int:2:8 | 2 | gnmr 1.5/1.3 | 2 |" in done.stdout and (out / "stress.md").read_text().strip() in done.stdout
    seeds = [
        json.loads((out / f"int-2-8_maxo2_random-1.5-1.3_seed{s}" / "trace.jsonl").read_text().splitlines()[0])
        for s in (1, 2)
    ]
    assert seeds[0]["trigger"] == "random"
    other = grid(out, *arguments, "--table-only")
    assert other.returncode == 0
    changed = subprocess.run(
        [
            sys.executable,
            str(REPOSITORY / "eval" / "stress.py"),
            *SMALL,
            "training.learning_rate=1e-4",
            "--out",
            str(out),
            *arguments,
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert changed.returncode == 2 and "section training has other settings" in changed.stderr
    before = (out / "int-2-8_all_seed1" / "trace.jsonl").stat().st_mtime_ns
    (out / "int-2-8_none_seed1" / "results.json").unlink()  # broken off
    again = grid(out, *arguments)
    assert "20 runs, 1 of them to do" in again.stdout and again.returncode == 0
    assert (out / "int-2-8_all_seed1" / "trace.jsonl").stat().st_mtime_ns == before
    assert json.loads((out / "int-2-8_none_seed1" / "results.json").read_text())["eval_loss"] == low[1], "and the same again"


@pytest.mark.slow
def test_a_grid_of_products_in_two_stages(tmp_path):
    out = tmp_path / "grid"
    arguments = [
        "lowbit_small",
        *SMALL[1:],
        "training.max_steps=8",
        "backend.eval_path=recovery",
        "--out",
        str(out),
        "--max-o",
        "1",
        "--arms",
        "none",
        "all",
        "exact",
        "gnmr:1.5-0.9:off",
        "random:1.5-0.9:off",
        "--seeds",
        "1",
        "2",
        "--formats",
        "lowbit:4:8",
        "lowbit:4:16",
    ]
    command = [sys.executable, str(REPOSITORY / "eval" / "stress.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = {(r["format"], r["arm"]): r for r in json.loads((out / "stress.json").read_text())["rows"]}
    assert len(rows) == 10 and all(r["seeds"] == [1, 2] for r in rows.values())
    for form in ("lowbit:4:8", "lowbit:4:16"):
        assert rows[form, "exact"]["loss"] == rows["lowbit:4:16", "all"]["loss"], "all lifted, unquantised: the plain model"
    assert rows["lowbit:4:8", "all"]["loss"] != rows["lowbit:4:16", "all"]["loss"]
    header, first, *_ = map(json.loads, (out / "lowbit-4-8_maxo1_gnmr-1.5-0.9-off_seed1" / "trace.jsonl").open())
    assert header["config"]["alpha_init"] == 1.5 and header["config"]["alpha"] == 0.9 and header["config"]["beta"] is None
    assert first["alpha"] == 1.5, "one of eight steps is the first stage"
    row = rows["lowbit:4:8", "gnmr 1.5-0.9/off"]
    assert row["against_random"]["seeds"] == 2 and set(row["lifted"]) <= {"layers.0", "layers.1"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arms", "gnmr"], "--arms gnmr:"),
        (["--arms", "mean"], "--arms mean"),
        (["--arms", "listed:gsnr"], "listed:gsnr needs gsnr"),
        (["--arms", "listed:none"], "--arms listed:none"),
        (["--arms", "listed"], "--arms listed: "),
        (["--arms", "listed:0.1"], "--arms listed:0.1: "),
        (["--arms", "listed:gnmr"], "--arms gnmr:"),
        (["--arms", "listed:down_proj"], "such as listed:*.down_proj"),
        (["--arms", "listed:*.[qk]_proj", "listed:*.{qk}_proj"], "would have the folders of listed *.[qk]_proj"),
        (["--arms", "random:1.5:1.3"], "needs gnmr:1.5:1.3"),
        (["--formats", "int:1:8"], "bits_low=1"),
        (["--formats", "int"], "--formats int"),
        (["--formats", "lowbit:5:8"], "bits_low=5"),
        (["--formats", "fp8:8:8"], "--formats fp8:8:8"),
        (["--workers", "0"], "--workers 0"),
        (["--arms", "random:off"], "--arms random:off"),
        (["--arms", "gnmr:1-2-3:off"], "--arms gnmr:1-2-3:off"),
        (["--arms", "gnmr:x:1.3"], "--arms gnmr:x:1.3"),
        (["--arms", "gsnr", "--max-o", "-1"], "max_o=-1"),
        (["--arms", "gsnr", "--max-o", "15"], "max_o=15: the model has 14 recoverable units"),
        (["--arms", "listed:*.foo"], "'*.foo'"),
        (["--arms", "random:0.5", "--max-o", "0"], "promotion_ratio=0.5 is 7 units in the mean, and max_o allows 0"),
        (["--arms", "random:0.5", "--max-o", "3"], "promotion_ratio=0.5 is 7 units in the mean, and max_o allows 3"),
    ],
)
def test_what_is_wrong_is_told_before_anything_runs(tmp_path, capsys, monkeypatch, arguments, message):
    given = arguments if "--arms" in arguments else ["--arms", "none", *arguments]
    monkeypatch.setattr(sys, "argv", ["stress.py", *SMALL, "--out", str(tmp_path / "grid"), *given])
    assert stress.main() == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "grid").exists()


class Pool:
    """A worker in this process."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return False

    def submit(self, call, *args):
        future = Future()
        try:
            future.set_result(call(*args))
        except Exception as error:
            future.set_exception(error)
        return future


def test_controls_run_on_whole_traces_only_and_other_processes_keep_theirs(tmp_path, monkeypatch, capsys):
    arms = [stress.Arm("none"), stress.Arm("gnmr", ("1.5", "1.3")), stress.Arm("random", ("1.5", "1.3")), stress.Arm("all")]
    jobs = [stress.Job(arm, "int:2:8", 2, 1) for arm in arms]
    options, there, ran = options_of(tmp_path), set(), []
    options.workers = 2

    def run(options, job):
        ran.append(job.arm.trigger)
        if job.arm.trigger == troubled:
            raise trouble
        there.add(job)
        return {"eval_loss": 1.0}

    monkeypatch.setattr(stress, "worker", Pool)
    monkeypatch.setattr(stress, "run", run)
    monkeypatch.setattr(stress, "read", lambda options, job: {} if job in there else None)
    troubled, trouble = "gnmr", stress.BrokenProcessPool("gone")
    assert stress.run_all(options, jobs) == 2 and ran == ["none", "gnmr", "all"]
    said = capsys.readouterr().out
    assert "gnmr-1.5-1.3_seed1: FAILED: its process was killed" in said
    assert "random-1.5-1.3_seed1: FAILED: int-2-8_maxo2_gnmr-1.5-1.3_seed1, its model, is not there" in said
    troubled, trouble = "random", stress.BusyError("x")
    assert stress.run_all(options, jobs) == 0 and ran[3:] == ["gnmr", "random"]
    assert "random-1.5-1.3_seed1: left to the other process" in capsys.readouterr().out


@pytest.mark.slow
def test_a_grid_and_its_workers_may_be_killed(tmp_path):
    out, name = tmp_path / "grid", "int-2-8_none_seed1"
    arguments = ["training.max_steps=400", "--formats", "int:2:8", "--seeds", "1", "--arms", "none", "all"]
    command = [sys.executable, str(REPOSITORY / "eval" / "stress.py"), *SMALL, "--out", str(out), *arguments]

    def start():
        begun = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        trace = out / name / "trace.jsonl"
        for _ in range(1200):
            if trace.exists() and trace.stat().st_mtime > started and len(trace.read_text().splitlines()) > 3:
                break
            time.sleep(0.05)
        else:
            pytest.fail(f"no run began: {begun.communicate(timeout=5)[0] if begun.poll() is not None else command}")
        workers = [p for p in psutil.Process(begun.pid).children() if "spawn_main" in " ".join(p.cmdline())]
        assert len(workers) == 1
        return begun, workers[0]

    started = time.time()
    main, worker = start()
    main.kill()
    psutil.wait_procs([worker], timeout=20)
    # (Where nobody reaps orphans, a zombie is left.)
    assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE, "no run goes on without its grid"
    before = (out / name / "trace.jsonl").read_text()
    started = time.time()
    main, worker = start()
    assert (out / f"{name}.1" / "trace.jsonl").read_text() == before, "what was broken off is moved aside"
    worker.kill()
    said, _ = main.communicate(timeout=300)
    assert main.returncode == 1 and f"1/2 {name}: FAILED: its process was killed" in said
    assert "2/2 int-2-8_all_seed1: loss" in said
    assert "1 of 2 runs are not there yet" in (out / "stress.md").read_text()
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0 and "2 runs, 1 of them to do" in done.stdout, done.stderr[-2000:]
    assert (out / f"{name}.2" / "trace.jsonl").exists()


def options_of(*arguments):
    return SimpleNamespace(recipe=SMALL[0], overrides=[*SMALL[1:], *arguments[1:]], out=arguments[0])


def test_a_run_whose_trace_is_not_whole_is_none_and_one_of_other_settings_is_refused(tmp_path):
    from hf_gnmr.config import ConfigError
    from hf_gnmr.run.recipe import find_recipe, load_recipe

    job, options = stress.Job(stress.Arm("none"), "int:2:8", None, 1), options_of(tmp_path)
    folder = tmp_path / job.name
    assert stress.read(options, job) is None
    folder.mkdir()
    assert stress.read(options, job) is None
    recipe = load_recipe(find_recipe(options.recipe), stress.overrides_of(job, options))
    (folder / "recipe.yaml").write_text(recipe.to_yaml())
    (folder / "results.json").write_text('{"eval_loss": 1.0}')
    for missing, steps, there in ((0, 20, True), (3, 20, False), (0, 17, False)):
        (folder / "summary.json").write_text(json.dumps({"steps": steps, "missing_steps": missing}))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(stress, "lifted_kinds", lambda folder: {})
            found = stress.read(options, job)
        assert (found is not None) == there and (found is None or found["eval_loss"] == 1.0)
    (folder / "results.json").unlink()
    assert stress.read(options, job) is None
    with pytest.raises(ConfigError, match="section training has other settings"):
        stress.read(options_of(tmp_path, "training.learning_rate=1.0"), job)


def test_one_process_at_a_run(tmp_path):
    with (tmp_path / "x.log").open("a") as first, (tmp_path / "x.log").open("a") as second:
        stress._lock(first, tmp_path / "x")
        with pytest.raises(stress.BusyError, match="x"):
            stress._lock(second, tmp_path / "x")
    with (tmp_path / "x.log").open("a") as third:
        stress._lock(third, tmp_path / "x")


def test_differences_that_cannot_be_taken():
    assert stress.paired({1: 2.0}, {2: 1.0}) is None and stress.paired({1: 1.0}, {1: 1.0})["mean"] == 0.0
    assert stress.t_quantile(0.975, 2) == pytest.approx(4.3027, abs=1e-3)
    assert stress.t_quantile(0.8, 29) == pytest.approx(0.8542, abs=1e-3)
    assert stress.paired({1: 1.0, 2: 2.0, 3: 4.0}, dict.fromkeys((1, 2, 3), 0.0))["detectable"] == pytest.approx(
        (4.3027 + 1.0607) * statistics.stdev([1, 2, 4]) / 3**0.5, rel=1e-3
    )
    one = stress.paired({1: 2.0, 2: math.nan}, {1: 1.5, 2: 1.0})
    assert one["mean"] == 0.5 and one["stderr"] is None and one["seeds"] == 1 and one["diverged"] == 1
    assert stress.gap_closed({1: math.nan}, {1: 2.0}, {1: 1.0}) is None
    assert stress.gap_closed({1: 1.0, 2: 1.0}, {1: 1.0, 2: 1.3}, {1: 1.1, 2: 1.1}) is None, "no gap but for noise"
    assert stress.gap_closed({1: 1.0}, {1: 1.1}, {1: 0.9}) is None, "one seed tells no gap"
    worse = dict.fromkeys(range(4), 1.1)
    assert stress.gap_closed(*(dict.fromkeys(range(4), 1.0),) * 2, worse) is None, "the recovery path is the worse one"
    closed = stress.gap_closed(*(dict.fromkeys(range(4), loss) for loss in (1.5, 2.0, 1.0)))
    expected = (math.exp(2) - math.exp(1.5)) / (math.exp(2) - math.exp(1))
    assert closed["value"] == pytest.approx(expected) == closed["low"] == closed["high"]


@pytest.mark.parametrize("seeds", [3, 8])
def test_the_interval_of_the_gap_closed_holds_the_true_one_in_95_of_100_grids(seeds):
    """40% of a gap of 0.05 nats, seeds 0.01 apart and 0.004 of noise in each run."""
    draw, held, told = np.random.default_rng(seeds), 0, 0
    for _ in range(1000):
        seed, noise = draw.normal(0, 0.01, seeds), draw.normal(0, 0.004, (3, seeds))
        low, ours, high = (dict(enumerate(loss + seed + n)) for loss, n in zip((1.60, 1.58, 1.55), noise, strict=True))
        found = stress.gap_closed(ours, low, high)
        if found is not None:
            told += 1
            true = (math.exp(1.60) - math.exp(1.58)) / (math.exp(1.60) - math.exp(1.55))
            held += found["low"] <= true <= found["high"]
    assert told > 900 and 0.93 < held / told < 0.97


def test_what_an_arm_is_held_against():
    def run(loss, ratio):
        return {"eval_loss": loss, "promotion_ratio": ratio, "lifted": {}}

    words = {
        "none": (None, 2.0, 0.0),
        "gnmr:1.5:1.3": (4, 1.9, 0.1),
        "random:1.5:1.3": (4, 1.8, 0.1),
        "listed:gnmr:1.5:1.3": (4, 1.7, 0.1),
        "gsnr": (4, 1.6, 0.142),
        "random:0.1428": (4, 1.5, 0.143),
        "listed:*.down_proj": (None, 1.4, 0.1428),
        "static": (None, 1.3, 0.3),
    }
    runs = {
        stress.Job(stress.arm_of(text), "int:2:8", max_o, 1): run(loss, ratio)
        for text, (max_o, loss, ratio) in words.items()
    }
    rows = {row["arm"]: row for row in stress.rows_of(runs)}
    against = {arm: row["against_random"] and round(row["against_random"]["mean"], 6) for arm, row in rows.items()}
    assert against == {
        "none": None,
        "gnmr 1.5/1.3": 0.1,
        "random 1.5/1.3": None,
        "listed gnmr 1.5/1.3": -0.1,
        "gsnr": 0.1,
        "random 0.1428": None,
        "listed *.down_proj": -0.1,
        "static": None,
    }
    assert {arm for arm, row in rows.items() if row["against_listed"]} == {"gnmr 1.5/1.3"}
    assert rows["gnmr 1.5/1.3"]["against_listed"]["mean"] == pytest.approx(0.2)


def test_arms_and_formats_in_a_recipes_words():
    kind = stress.arm_of("listed:*.down_proj")
    assert kind.label == "listed *.down_proj" and kind.free_of_max_o
    assert stress.Job(kind, "int:2:8", None, 1).name == "int-2-8_listed-any.down_proj_seed1"
    twin = stress.arm_of("listed:gnmr:1.5:off")
    assert twin.of == stress.Arm("gnmr", ("1.5", "off")) and twin.label == "listed gnmr 1.5/off" and not twin.free_of_max_o
    assert stress.Job(twin, "int:2:8", 4, 1).name == "int-2-8_maxo4_listed-gnmr-1.5-off_seed1"
    arm = stress.Arm("gnmr", ("1.5-1.1", "off"))
    assert arm.label == "gnmr 1.5-1.1/off"
    assert arm.overrides() == ["gnmr.alpha_init=1.5", "gnmr.alpha=1.1", "gnmr.beta=null"]
    assert stress.Arm("gnmr", ("1e-1", "1.5")).overrides() == [
        "gnmr.alpha_init_fraction=0.0",
        "gnmr.alpha=1e-1",
        "gnmr.beta=1.5",
    ]
    assert [stress.format_of(name, []) for name in ("activation_small", "lowbit_small", "pangu_small", "moe_small")] == [
        "float:4:8",
        "lowbit:6:8",
        "lowbit:4:8",
        "fp8:8:16",
    ]
    assert "backend.name=activation" in stress.format_overrides("int:2:8"), "whatever the recipe's backend is"
