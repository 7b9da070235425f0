"""``hf-gnmr COMMAND ...``: one command for each job, each with --help."""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module

from .config import ConfigError, SetupError
from .reading import FileError
from .terminal import TRACEBACK, TRACEBACK_HELP, cleaned, refused

COMMANDS = {
    "train": ("train", "run a recipe"),
    "plan": ("run.plan", "what a recipe needs, without loading weights"),
    "eval": ("evaluation.evaluate", "evaluate runs on GSM8K, MMLU, HellaSwag and WikiText-2"),
    "compare": ("evaluation.compare", "evaluated runs side by side"),
    "report": ("trace.report", "runs as one page, from their traces; --follow: a running one in the terminal"),
    "replay": ("trace.replay", "a trace's norms under other settings"),
    "calibrate": ("trace.calibrate", "thresholds that meet a target on a trace"),
    "diagnose": ("trace.diagnose", "whether a trace meets the theory's conditions, and what to do"),
}
"""Each command's module, whose `main` it runs, and its help."""


@cleaned
def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    arguments = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="hf-gnmr", description="Runtime stability control for low-precision training.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (_, help_) in COMMANDS.items():
        commands.add_parser(name, help=help_, add_help=False)
    gguf = commands.add_parser("import-gguf", help="turn a GGUF file into a folder of BF16 safetensors")
    gguf.add_argument("gguf_file")
    gguf.add_argument("folder", help="to be created")
    gguf.add_argument(TRACEBACK, action="store_true", help=TRACEBACK_HELP)
    if arguments[:1] and arguments[0] in COMMANDS:
        # Each command has its own parser and imports what it needs: a trace is shown without loading torch.
        try:
            status = int(import_module(f".{COMMANDS[arguments[0]][0]}", __package__).main(arguments[1:]))
            sys.stdout.flush()
        except BrokenPipeError:  # `| head` has read enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        return status
    options = parser.parse_args(arguments)
    try:
        from .run.gguf import import_gguf

        print(f"written: {import_gguf(options.gguf_file, options.folder)}")
    except (ConfigError, SetupError, FileError) as error:
        return refused(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
