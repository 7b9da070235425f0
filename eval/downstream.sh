#!/usr/bin/env bash
# Downstream evaluation: GSM8K, MMLU, HellaSwag and WikiText-2 by lm-eval, ending in a table of all runs side by side.
#
#   eval/downstream.sh RUN... [--tasks gsm8k mmlu:philosophy ...] [--data DIR] [--limit N] [--precision low|recovery|final] ...
#
# RUN: an output folder of a training, a PEFT adapter's folder, or a base model. `hf-gnmr eval --help` has every option.
# A finished task is not evaluated again; an interrupted evaluation goes on where it was.
set -euo pipefail
python="${PYTHON:-python}"
exec "$python" -m hf_gnmr.evaluation.evaluate "$@"
