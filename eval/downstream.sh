#!/usr/bin/env bash
# Downstream evaluation: GSM8K, MMLU, HellaSwag and WikiText-2 by lm-eval, ending in a table of all runs side by side.
#
#   eval/downstream.sh RUN... [--tasks gsm8k mmlu:philosophy ...] [--data DIR] [--limit N] [--precision low|recovery|final] ...
#
# RUN: the output folder of a training, a PEFT adapter's folder, or a base model. `hf-gnmr eval --help` lists all options.
# A finished task is not evaluated again; an interrupted evaluation resumes at the first unfinished task.
set -euo pipefail
python="${PYTHON:-python}"
exec "$python" -m hf_gnmr.evaluation.evaluate "$@"
