"""Two gloo ranks on the CPU against one process with the same global batch."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from hf_gnmr.trace import read_trace

pytestmark = pytest.mark.slow


def launch(command, recipe_file, out, *overrides):
    bin_folder = pathlib.Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [bin_folder / command[0], *command[1:], "-m", "hf_gnmr.train", recipe_file, f"training.output_dir={out}",
         "lora.lora_dropout=0", "gnmr.max_o=2", *overrides],
        capture_output=True, text=True, timeout=300, env=environment, check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return read_trace(out / "trace.jsonl").steps


def test_two_ranks_decide_as_one_process_with_the_same_global_batch(recipe_file, tmp_path):
    one = launch(["python"], recipe_file, tmp_path / "one", "training.per_device_train_batch_size=4")
    two = launch(
        ["torchrun", "--nproc_per_node", "2", "--master_port", "29571"], recipe_file, tmp_path / "two",
        "training.per_device_train_batch_size=2", "training.ddp_backend=gloo",
    )
    norms = [np.array([line["norms"] for line in lines], dtype=float) for lines in (one, two)]
    np.testing.assert_allclose(norms[0], norms[1], rtol=2e-2)  # 8-bit products depend on the rows beside
    np.testing.assert_allclose(norms[0][0], norms[1][0], rtol=1e-5)
    assert [line["active"] for line in one] == [line["active"] for line in two]
    assert any(line["active"] for line in one)
    assert (tmp_path / "two" / "summary.json").exists()
    assert not list((tmp_path / "two").glob("trace.*.jsonl")), "files come from rank 0 only"
