"""The stress grid: a 20-step grid through the command line, what its table says, resuming, errors."""

from __future__ import annotations

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

import arms  # noqa: E402
import grid  # noqa: E402
import step_times  # noqa: E402
import stress  # noqa: E402
import stress_tables  # noqa: E402

from hf_gnmr.config import ConfigError  # noqa: E402
from hf_gnmr.control.triggers import TRIGGERS, check_trigger  # noqa: E402
from hf_gnmr.run.recipe import find_recipe, load_recipe  # noqa: E402

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


def run_grid(out, *arguments):
    command = [sys.executable, str(REPOSITORY / "eval" / "stress.py"), *SMALL, "--out", str(out), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)


@pytest.mark.slow
def test_a_grid_of_twenty_steps(tmp_path):
    out = tmp_path / "grid"
    arguments = ["--arms", *ARMS, "--seeds", "1", "2", "--formats", "int:2:8", "--max-o", "2"]
    done = run_grid(out, *arguments, "--times", "1")
    assert done.returncode == 0, done.stderr[-3000:]
    table = json.loads((out / "stress.json").read_text())
    rows = {r["arm"]: r for r in table["rows"]}
    assert len(rows) == len(ARMS) and all(r["seeds"] == [1, 2] for r in rows.values())
    gnmr, low, high = (
        {seed: json.loads((out / f"{run}_seed{seed}" / "results.json").read_text())["eval_loss"] for seed in (1, 2)}
        for run in ("int-2-8_maxo2_gnmr-1.5-1.3", "int-2-8_none", "int-2-8_all")
    )
    row = rows["gnmr 1.5/1.3"]
    assert row["against_none"]["mean"] == pytest.approx(statistics.mean(gnmr[s] - low[s] for s in (1, 2)))
    assert row["against_none"]["stderr"] == pytest.approx(abs((gnmr[1] - low[1]) - (gnmr[2] - low[2])) / 2)
    assert row["perplexity"] == pytest.approx(statistics.mean(math.exp(x) for x in gnmr.values()))
    means = [statistics.mean(math.exp(x) for x in d.values()) for d in (low, gnmr, high)]
    gaps = [math.exp(low[s]) - math.exp(high[s]) for s in (1, 2)]
    if statistics.mean(gaps) > stress_tables.t_quantile(0.975, 1) * statistics.stdev(gaps) / math.sqrt(2):
        assert row["gap_closed"]["value"] == pytest.approx((means[0] - means[1]) / (means[0] - means[2]))
    else:
        assert row["gap_closed"] is None
    assert sum(row["lifted"].values()) == pytest.approx(1) and rows["none"]["lifted"] == {}
    assert rows["all"]["lifted"]["down_proj"] == pytest.approx(1 / 7)
    control = rows["random 1.5/1.3"]
    assert abs(control["promotion_ratio"] - row["promotion_ratio"]) < 0.03 and row["against_random"]["seeds"] == 2
    listed = rows["listed jacobian"]
    assert listed["promotion_ratio"] == pytest.approx(rows["jacobian"]["promotion_ratio"], abs=0.005)
    assert rows["jacobian"]["against_listed"]["mean"] == pytest.approx(rows["jacobian"]["loss"] - listed["loss"])
    assert listed["hit_max_o_rate"] >= 0.9 and len(listed["lifted"]) <= 4, "two units in each of two runs (19 of 20 steps')"
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
    table_only = run_grid(out, *arguments, "--table-only")
    assert table_only.returncode == 0
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
    assert changed.returncode == 2 and "other settings in section training" in changed.stderr
    before = (out / "int-2-8_all_seed1" / "trace.jsonl").stat().st_mtime_ns
    (out / "int-2-8_none_seed1" / "results.json").unlink()  # interrupted
    again = run_grid(out, *arguments)
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
        (["--arms", "gsnr", "--max-o", "15"], "max_o=15: expected at most 14, the model's recoverable units"),
        (["--arms", "listed:*.foo"], "'*.foo'"),
        (["--arms", "random:0.5", "--max-o", "0"], "promotion_ratio=0.5 is 7 units on average, but max_o allows 0"),
        (["--arms", "random:0.5", "--max-o", "3"], "promotion_ratio=0.5 is 7 units on average, but max_o allows 3"),
    ],
)
def test_errors_are_reported_before_anything_runs(tmp_path, capsys, monkeypatch, arguments, message):
    options = arguments if "--arms" in arguments else ["--arms", "none", *arguments]
    monkeypatch.setattr(sys, "argv", ["stress.py", *SMALL, "--out", str(tmp_path / "grid"), *options])
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


def test_controls_run_on_whole_traces_only_and_other_processes_keep_their_runs(tmp_path, monkeypatch, capsys):
    kinds = [arms.Arm("none"), arms.Arm("gnmr", ("1.5", "1.3")), arms.Arm("random", ("1.5", "1.3")), arms.Arm("all")]
    jobs = [arms.Job(arm, "int:2:8", 2, 1) for arm in kinds]
    study, finished, ran = study_in(tmp_path), set(), []

    def run(study, job):
        ran.append(job.arm.trigger)
        if job.arm.trigger == failing:
            raise error
        finished.add(job)
        return {"eval_loss": 1.0}

    monkeypatch.setattr(grid, "worker", Pool)
    monkeypatch.setattr(grid, "run", run)
    monkeypatch.setattr(grid, "read", lambda study, job: {} if job in finished else None)
    failing, error = "gnmr", grid.BrokenProcessPool("gone")
    assert grid.run_all(study, jobs, workers=2) == 2 and ran == ["none", "gnmr", "all"]
    printed = capsys.readouterr().out
    assert "gnmr-1.5-1.3_seed1: FAILED: its process was killed" in printed
    gnmr = "int-2-8_maxo2_gnmr-1.5-1.3_seed1"
    assert f"random-1.5-1.3_seed1: FAILED: {gnmr}, which it is matched to, is not finished" in printed
    failing, error = "random", grid.BusyError("x")
    assert grid.run_all(study, jobs, workers=2) == 0 and ran[3:] == ["gnmr", "random"]
    assert "random-1.5-1.3_seed1: left to the other process" in capsys.readouterr().out


@pytest.mark.slow
def test_a_grid_and_its_workers_may_be_killed(tmp_path):
    out, name = tmp_path / "grid", "int-2-8_none_seed1"
    arguments = ["training.max_steps=400", "--formats", "int:2:8", "--seeds", "1", "--arms", "none", "all"]
    command = [sys.executable, str(REPOSITORY / "eval" / "stress.py"), *SMALL, "--out", str(out), *arguments]

    def start():
        begun = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        trace = out / name / "trace.jsonl"
        for _ in range(6000):  # five minutes: a busy machine without fast BF16 products takes a while to start
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
    assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE, "no run continues without its grid"
    before = (out / name / "trace.jsonl").read_text()
    started = time.time()
    main, worker = start()
    assert (out / f"{name}.1" / "trace.jsonl").read_text() == before, "an interrupted run is moved aside"
    worker.kill()
    printed, _ = main.communicate(timeout=300)
    assert main.returncode == 1 and f"1/2 {name}: FAILED: its process was killed" in printed
    assert "2/2 int-2-8_all_seed1: loss" in printed
    assert "1 of 2 runs are not finished" in (out / "stress.md").read_text()
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0 and "2 runs, 1 of them to do" in done.stdout, done.stderr[-2000:]
    assert (out / f"{name}.2" / "trace.jsonl").exists()


def study_in(folder, *overrides):
    return arms.Study(SMALL[0], [*SMALL[1:], *overrides], folder)


@pytest.fixture
def finished_run(tmp_path):
    """A run as it is left on disk, but for its trace: study, job and folder."""
    study, job = study_in(tmp_path), arms.Job(arms.Arm("none"), "int:2:8", None, 1)
    folder = tmp_path / job.name
    folder.mkdir()
    recipe = load_recipe(find_recipe(study.recipe), arms.overrides_of(job, study))
    (folder / "recipe.yaml").write_text(recipe.to_yaml())
    (folder / "results.json").write_text('{"eval_loss": 1.0}')
    (folder / "summary.json").write_text('{"steps": 20, "missing_steps": 0}')
    return study, job, folder


@pytest.mark.parametrize(("missing", "steps", "whole"), [(0, 20, True), (3, 20, False), (0, 17, False)])
def test_only_a_run_with_a_whole_trace_is_finished(finished_run, monkeypatch, missing, steps, whole):
    study, job, folder = finished_run
    (folder / "summary.json").write_text(json.dumps({"steps": steps, "missing_steps": missing}))
    monkeypatch.setattr(grid, "lifted_kinds", lambda folder: {})
    figures = grid.read(study, job)
    assert (figures is not None) == whole and (figures is None or figures["eval_loss"] == 1.0)


@pytest.mark.parametrize("file", ["results.json", "summary.json", "recipe.yaml"])
def test_a_run_without_a_file_is_not_finished(finished_run, file):
    study, job, folder = finished_run
    (folder / file).unlink()
    assert grid.read(study, job) is None


def test_a_run_without_a_folder_is_not_finished(tmp_path):
    assert grid.read(study_in(tmp_path), arms.Job(arms.Arm("none"), "int:2:8", None, 1)) is None


def test_a_run_with_other_settings_is_refused_finished_or_not(finished_run, tmp_path):
    _, job, folder = finished_run
    (folder / "results.json").unlink()
    with pytest.raises(ConfigError, match="other settings in section training"):
        grid.read(study_in(tmp_path, "training.learning_rate=1.0"), job)


def test_one_process_at_a_run(tmp_path):
    with (tmp_path / "x.log").open("a") as first, (tmp_path / "x.log").open("a") as second:
        grid.lock(first, tmp_path / "x")
        with pytest.raises(grid.BusyError, match="x"):
            grid.lock(second, tmp_path / "x")
    with (tmp_path / "x.log").open("a") as third:
        grid.lock(third, tmp_path / "x")


def test_differences_that_cannot_be_taken():
    assert stress_tables.paired({1: 2.0}, {2: 1.0}) is None and stress_tables.paired({1: 1.0}, {1: 1.0})["mean"] == 0.0
    assert stress_tables.t_quantile(0.975, 2) == pytest.approx(4.3027, abs=1e-3)
    assert stress_tables.t_quantile(0.8, 29) == pytest.approx(0.8542, abs=1e-3)
    assert stress_tables.paired({1: 1.0, 2: 2.0, 3: 4.0}, dict.fromkeys((1, 2, 3), 0.0))["detectable"] == pytest.approx(
        (4.3027 + 1.0607) * statistics.stdev([1, 2, 4]) / 3**0.5, rel=1e-3
    )
    diverged = stress_tables.paired({1: 2.0, 2: math.nan}, {1: 1.5, 2: 1.0})
    assert diverged["mean"] == 0.5 and diverged["stderr"] is None and diverged["seeds"] == 1 and diverged["diverged"] == 1
    assert stress_tables.gap_closed({1: math.nan}, {1: 2.0}, {1: 1.0}) is None
    assert stress_tables.gap_closed({1: 1.0, 2: 1.0}, {1: 1.0, 2: 1.3}, {1: 1.1, 2: 1.1}) is None, "no gap but for noise"
    assert stress_tables.gap_closed({1: 1.0}, {1: 1.1}, {1: 0.9}) is None, "one seed establishes no gap"
    worse = dict.fromkeys(range(4), 1.1)
    assert stress_tables.gap_closed(*(dict.fromkeys(range(4), 1.0),) * 2, worse) is None, (
        "the recovery path is the worse one"
    )
    closed = stress_tables.gap_closed(*(dict.fromkeys(range(4), loss) for loss in (1.5, 2.0, 1.0)))
    expected = (math.exp(2) - math.exp(1.5)) / (math.exp(2) - math.exp(1))
    assert closed["value"] == pytest.approx(expected) == closed["low"] == closed["high"]


@pytest.mark.parametrize("seeds", [3, 8])
def test_the_interval_of_the_gap_closed_covers_the_true_one_in_95_of_100_grids(seeds):
    """40% of a gap of 0.05 nats, seeds 0.01 apart and 0.004 of noise in each run."""
    draw, covered, established = np.random.default_rng(seeds), 0, 0
    for _ in range(1000):
        seed, noise = draw.normal(0, 0.01, seeds), draw.normal(0, 0.004, (3, seeds))
        low, arm, high = (dict(enumerate(loss + seed + n)) for loss, n in zip((1.60, 1.58, 1.55), noise, strict=True))
        closed = stress_tables.gap_closed(arm, low, high)
        if closed is not None:
            established += 1
            true = (math.exp(1.60) - math.exp(1.58)) / (math.exp(1.60) - math.exp(1.55))
            covered += closed["low"] <= true <= closed["high"]
    assert established > 900 and 0.93 < covered / established < 0.97


def test_what_an_arm_is_compared_with():
    def run(loss, ratio):
        return {"eval_loss": loss, "promotion_ratio": ratio, "lifted": {}}

    cases = {
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
        arms.Job(arms.arm_of(text), "int:2:8", max_o, 1): run(loss, ratio) for text, (max_o, loss, ratio) in cases.items()
    }
    rows = {row["arm"]: row for row in stress_tables.rows_of(runs)}
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


def test_arms_and_formats_as_overrides_of_a_recipe():
    kind = arms.arm_of("listed:*.down_proj")
    assert kind.label == "listed *.down_proj" and kind.free_of_max_o
    assert arms.Job(kind, "int:2:8", None, 1).name == "int-2-8_listed-any.down_proj_seed1"
    twin = arms.arm_of("listed:gnmr:1.5:off")
    assert twin.of == arms.Arm("gnmr", ("1.5", "off")) and twin.label == "listed gnmr 1.5/off" and not twin.free_of_max_o
    assert arms.Job(twin, "int:2:8", 4, 1).name == "int-2-8_maxo4_listed-gnmr-1.5-off_seed1"
    arm = arms.Arm("gnmr", ("1.5-1.1", "off"))
    assert arm.label == "gnmr 1.5-1.1/off"
    assert arm.overrides() == ["gnmr.alpha_init=1.5", "gnmr.alpha=1.1", "gnmr.beta=null"]
    assert arms.Arm("gnmr", ("1e-1", "1.5")).overrides() == [
        "gnmr.alpha_init_fraction=0.0",
        "gnmr.alpha=1e-1",
        "gnmr.beta=1.5",
    ]
    assert "backend.name=activation" in arms.format_overrides("int:2:8"), "whatever the recipe's backend is"


@pytest.mark.parametrize(
    ("recipe", "form"),
    [
        ("activation_small", "float:4:8"),
        ("lowbit_small", "lowbit:6:8"),
        ("pangu_small", "lowbit:4:8"),
        ("moe_small", "fp8:8:16"),
    ],
)
def test_the_format_of_a_recipe(recipe, form):
    assert arms.format_of(recipe, []) == form


@pytest.mark.parametrize(("trigger", "options"), step_times.SIDES.items())
def test_sides_of_the_step_times_are_triggers_with_their_options(trigger, options):
    check_trigger(trigger, options)


def test_every_trigger_is_timed_but_listed():
    assert set(TRIGGERS) - set(step_times.SIDES) == {"listed"}


@pytest.mark.parametrize(("part", "unmeasurable"), [(None, set()), (0, {"gsnr", "jacobian"})])
def test_signals_are_not_timed_over_parts_of_a_tensor(part, unmeasurable):
    units = [SimpleNamespace(part=part)]
    assert {trigger for trigger in step_times.SIDES if not step_times.measurable(trigger, units)} == unmeasurable
