"""A recipe's sections: what each key means and its default; `recipe` reads and checks them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

import yaml

from ..config import ConfigError, GNMRConfig


class RecipeError(ConfigError):
    """A recipe or override that cannot be run; the message names key, value and what is allowed."""


@dataclass
class ModelSection:
    """The base model."""

    name: str
    """Hub id, local folder, ``builtin``: the small LLaMA that the project builds and pre-trains itself, or ``scratch``: a
    model of `architecture` with random weights, to be pre-trained."""
    revision: str | None = None
    """Branch, tag or commit on the Hub."""
    trust_remote_code: bool = False
    """Run model code from the Hub. Off unless you trust its author."""
    attn_implementation: str | None = None
    """transformers' attention implementation; None: its default."""
    llm_int8_threshold: float = 6.0
    """LLM.int8's outlier threshold (backend int8)."""
    architecture: dict[str, Any] | None = None
    """transformers configuration values (`model_type` and dimensions): what ``scratch`` builds; elsewhere for `hf-gnmr
    plan`, where the model's own are not at hand, and a run holds them against the model's."""
    tokenizer: str | None = None
    """For ``scratch``: Hub id or folder of a tokenizer, or ``bytes``: one token a byte."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Of the weights where all of them are trained (`lora: false`); None: float32."""
    layers: str | None = None
    """Pattern for the decoder layers of an unknown architecture, e.g. ``transformer.blocks.*``."""


@dataclass
class LoraSection:
    """The adapters (PEFT's names). All runs of one seed start from the same adapters, whatever the base's dtype."""

    r: int = 8
    lora_alpha: int = 16
    lora_dropout: float = 0.05
    target_modules: str | list[str] = "all-linear"
    layers_to_transform: list[int] | None = None
    use_rslora: bool = False
    init_adapter: str | None = None
    """Folder of an adapter to start from; None: A drawn from the training seed, B zero."""


@dataclass
class DataSection:
    """Prompt and answer rows; the loss is taken on the answer only."""

    name: str
    """Hub id, a local .json, .jsonl or .parquet file (.txt with `text`), or ``builtin``: what the project generates."""
    text: str | None = None
    """Column of plain text: pre-training on packed blocks of `max_length` tokens instead of prompts and answers (``text``
    with .txt files and ``builtin``). `rows` and `eval_rows` then count blocks."""
    streaming: bool = False
    """With `text` and a Hub data set: read it while training (needs training.max_steps)."""
    documents: int | None = None
    """With `text`: documents that ``builtin`` generates (other sources have their own)."""
    subset: str | None = None
    split: str = "train"
    prompt: str = "question"
    """A column, or a template such as ``"Question: {question}\\nAnswer:"``."""
    answer: str = "answer"
    """A column (joined to the prompt by a space), or a template such as ``" {answer}"``."""
    max_length: int = 1024
    """Tokens a sequence, beginning and end tokens included. Longer ones are cut, and counted."""
    rows: int | None = None
    """Training rows to use; None: all."""
    eval_split: str | None = None
    """Split for the held-out loss; None: the last `eval_rows` rows of `split` are held out."""
    eval_rows: int = 0
    """Held-out rows for the loss at the end (and for training.eval_strategy); 0: none."""
    generate_rows: int = 0
    """How many of the held-out rows are answered by greedy decoding at the end, for exact match; 0: none."""
    max_new_tokens: int = 128
    answer_marker: str = "####"
    """Exact match compares what follows this marker (the whole answer where the reference has none)."""


OF_BACKEND = {
    "int8": ("recovery", "recovery_source", "pin_memory", "eval_path"),
    "activation": ("bits_low", "bits_recovery", "format", "unit"),
    "fp8": ("emulate", "eval_path", "unit"),
    "lowbit": ("bits_low", "bits_recovery", "eval_path", "unit"),
}
"""Options that not every backend has."""
UNITS = {
    "activation": ("projection", "layer"),
    "fp8": ("layer", "experts", "expert"),
    "lowbit": ("layer", "experts", "expert"),
}
"""Kinds of unit that a backend has, its default first; the others' units are decoder layers."""


@dataclass
class BackendSection:
    """What is switched."""

    name: str = "int8"
    recovery: str = "host"
    """The store of recovery weights: ``host``, ``device`` or ``dequantize``."""
    recovery_source: str | None = None
    max_recovery_memory: int | str | None = None
    """Device memory that lifted layers may add, instead of gnmr.max_o: bytes, ``6GB``, ``500MiB``."""
    pin_memory: bool = False
    eval_path: str = "low"
    unit: str | None = None
    """What is switched as one. ``activation``: ``projection`` (the default) or ``layer``; ``fp8``, ``lowbit``: ``layer``
    (the default), ``experts`` (a layer's experts together) or ``expert`` (each)."""
    bits_low: int = 4
    """Bits on the low-cost path. ``activation``, of saved activations: 2 to 8; ``lowbit``: 4 or 6."""
    bits_recovery: int = 8
    """On the recovery path; 16: not quantised."""
    format: str = "float"
    """``activation``: ``float`` (E2M1, E3M2, E4M3) or ``int``."""
    emulate: bool | Literal["auto"] = False
    """``fp8``: true: emulated; ``auto``: emulated where the device has no FP8; false: refused there."""

    def options(self) -> dict[str, Any]:
        """As `hf_gnmr.training.options.Options` names them."""
        return {("backend" if k == "name" else k): v for k, v in dataclasses.asdict(self).items()}


@dataclass
class TriggerSection:
    """How units are chosen."""

    name: str = "gnmr"
    promotion_ratio: float | None = None
    """``random``, ``listed``: mean share of units that is lifted."""
    trace: str | None = None
    """``random``: a trace whose promotion ratio is taken instead; ``listed``: whose most lifted units are, too."""
    units: list[str] | None = None
    """``listed``: names or patterns of the units that are lifted for good."""
    seed: int | None = None
    """``random``: of the draws; None: 0."""
    hold: int | None = None
    """``random``: steps that a draw stays in force; None: 1."""
    warmup: int | float | None = None
    """``static``: steps of the warm-up in 16 bits, or a share of all; None: 500."""
    share: float | None = None
    """``static``: share of units that is lifted for good; None: 0.25."""

    def options(self) -> dict[str, Any]:
        """The trigger's own options that were given."""
        return {k: v for k, v in dataclasses.asdict(self).items() if k != "name" and v is not None}


@dataclass
class RunSection:
    """What to do with an output folder that already holds a run."""

    overwrite: bool = False
    """Move the old run aside (folder.1, folder.2, …) and start anew."""
    resume: Literal["auto", False] | str = False
    """``auto``: from the last whole checkpoint, if there is one; a path: from that checkpoint; false: never.
    `overwrite` comes first: with it the run starts anew."""


@dataclass
class Recipe:
    """A whole run, every value of its final type."""

    model: ModelSection
    data: DataSection
    lora: LoraSection | None = field(default_factory=LoraSection)
    """None (``lora: false``): all weights are trained."""
    training: dict[str, Any] = field(default_factory=dict)
    """Fields of `TrainingArguments`."""
    gnmr: GNMRConfig = field(default_factory=GNMRConfig)
    backend: BackendSection = field(default_factory=BackendSection)
    trigger: TriggerSection = field(default_factory=TriggerSection)
    run: RunSection = field(default_factory=RunSection)

    def to_yaml(self) -> str:
        """The recipe as resolved; reading it back gives an equal one."""
        values = dataclasses.asdict(self)
        if self.lora is None:
            values["lora"] = False
        return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
