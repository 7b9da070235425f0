"""Controller and trace are usable without torch: none of their modules imports it."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import hf_gnmr.control
import hf_gnmr.trace

MODULES = [
    f"{package.__name__}.{module.name}"
    for package in (hf_gnmr.control, hf_gnmr.trace)
    for module in pkgutil.iter_modules(package.__path__)
]


def test_no_module_of_control_and_trace_imports_torch():
    assert {"hf_gnmr.trace.report", "hf_gnmr.trace.lifted", "hf_gnmr.control.gnmr"} <= set(MODULES)
    code = (
        "import importlib, sys\n"
        f"for name in {MODULES!r}:\n"
        "    importlib.import_module(name)\n"
        "    heavy = {'torch', 'transformers', 'peft', 'bitsandbytes'} & set(sys.modules)\n"
        "    assert not heavy, f'{name} imports {heavy}'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
