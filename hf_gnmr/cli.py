"""``hf-gnmr COMMAND ...``: one command a job, each with --help."""

from __future__ import annotations

import argparse
import sys

from .config import ConfigError, SetupError


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    arguments = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="hf-gnmr", description="Runtime stability control for low-precision training.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("train", help="run a recipe", add_help=False)
    gguf = commands.add_parser("import-gguf", help="turn a GGUF file into a folder of BF16 safetensors")
    gguf.add_argument("gguf_file")
    gguf.add_argument("folder", help="to be made")
    commands.add_parser("plan", help="what a recipe needs, without loading weights", add_help=False)
    commands.add_parser("eval", help="evaluate runs on GSM8K, MMLU, HellaSwag and WikiText-2", add_help=False)
    commands.add_parser("compare", help="evaluated runs side by side", add_help=False)
    if arguments[:1] == ["eval"]:
        from .evaluate import main as evaluate

        return evaluate(arguments[1:])
    if arguments[:1] == ["compare"]:
        from .compare import main as compare

        return compare(arguments[1:])
    if arguments[:1] == ["train"]:
        from .train import main as train

        return train(arguments[1:])
    if arguments[:1] == ["plan"]:
        from .plan import main as plan

        return plan(arguments[1:])
    options = parser.parse_args(arguments)
    try:
        from .models import import_gguf

        print(f"written: {import_gguf(options.gguf_file, options.folder)}")
    except (ConfigError, SetupError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
