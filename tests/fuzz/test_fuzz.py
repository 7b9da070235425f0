"""Bad inputs, drawn from a seed, are answered by a clear line, or accepted as the table in `accepted` says.

``pytest -s`` shows how many there are of each kind.  `known` lists what is not mended yet: it can only shrink.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from fuzz.accepted import ACCEPTED
from fuzz.cases import all_cases
from fuzz.harness import GOOD, KINDS
from fuzz.known import KNOWN

WORKER = Path(__file__).with_name("worker.py")
CASES = {case.id: case for case in all_cases()}
WINGS = list(dict.fromkeys(id_.split("/")[0] for id_ in CASES))
QUICK = {wing: [case.id for case in CASES.values() if case.id.split("/")[0] == wing and not case.slow] for wing in WINGS}
SLOW = {wing: [case.id for case in CASES.values() if case.id.split("/")[0] == wing and case.slow] for wing in WINGS}
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(WORKER.parents[2]), "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    """A function: ids -> outcomes, through one worker."""
    folder = tmp_path_factory.mktemp("fuzz")
    with (folder / "errors.txt").open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, str(WORKER), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=ENVIRONMENT,
        )
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "ready\n", (folder / "errors.txt").read_text()[-2000:]

        def outcomes(ids):
            results = []
            for id_ in ids:
                process.stdin.write(f"{id_}\n")
                process.stdin.flush()
                results.append(json.loads(process.stdout.readline()))
            return results

        yield outcomes
        process.stdin.close()
        process.wait(timeout=60)


def judged(outcomes):
    """Fail with every outcome that is neither good nor known, and with what is known and no longer so."""
    counts = Counter(outcome["kind"] for outcome in outcomes)
    print("  ".join(f"{kind} {counts[kind]}" for kind in KINDS))
    wrong = []
    for outcome in outcomes:
        kind, expected = outcome["kind"], KNOWN.get(outcome["id"])
        if expected is not None:
            if kind != expected:
                wrong.append(f"{outcome['id']}: known as {expected}, now {kind}: change known.py")
        elif kind not in GOOD:
            wrong.append(f"{outcome['id']} ({outcome['about']}): {kind}: {outcome['line']}")
        elif kind == "accepted" and ACCEPTED.get(outcome["id"], "\0") not in outcome["output"] + outcome["line"]:
            wrong.append(f"{outcome['id']} ({outcome['about']}): accepted: {outcome['line']}")
        elif kind == "clear" and outcome["id"] in ACCEPTED:
            wrong.append(f"{outcome['id']}: in the table of accepted ones, and refused: {outcome['line']}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("wing", [wing for wing in WINGS if QUICK[wing]])
def test_bad_inputs_are_answered_in_a_line(worker, wing):
    judged(worker(QUICK[wing]))


@pytest.mark.slow
@pytest.mark.parametrize("wing", [wing for wing in WINGS if SLOW[wing]])
def test_bad_inputs_that_take_longer_are_answered_in_a_line(worker, wing):
    judged(worker(SLOW[wing]))


def test_few_are_accepted():
    assert len(ACCEPTED) <= len(CASES) / 10
    assert ACCEPTED.keys() <= CASES.keys()


def test_what_is_known_is_a_failure_of_a_case():
    assert KNOWN.keys() <= CASES.keys() and set(KNOWN.values()) <= set(KINDS) - set(GOOD)
    assert not KNOWN.keys() & ACCEPTED.keys()


COMMANDS = [
    (["-m", "hf_gnmr.train", "no-such.yaml"], "no recipe file 'no-such.yaml'"),
    (["-m", "hf_gnmr.cli", "plan", "quickstart", "--processes", "0"], "--processes=0"),
    (["-m", "hf_gnmr.cli", "replay", "n" * 5000], "File name too long"),
    (["-m", "hf_gnmr.cli", "compare", "a b", "--against", "x"], "a b"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "named"), COMMANDS)
@pytest.mark.parametrize("traceback", [False, True])
def test_the_command_line_itself(tmp_path, arguments, named, traceback):
    more = ["--traceback"] if traceback else []
    done = subprocess.run(
        [sys.executable, *arguments, *more], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 2 and named in done.stderr
    assert sum(line.startswith("error: ") for line in done.stderr.splitlines()) == 1
    assert ("Traceback" in done.stderr) is traceback
