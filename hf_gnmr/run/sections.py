"""A recipe's sections: what each key means and its default; `recipe` reads and checks them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

import yaml

from ..backends import BACKENDS, BackendOptions
from ..config import ConfigError, GNMRConfig
from ..control.controller import TriggerOptions
from ..control.triggers import TRIGGERS
from ..training.options import DEFAULT_BACKEND, DEFAULT_TRIGGER


class RecipeError(ConfigError):
    """A recipe or override that cannot be run; the message names key, value and what was expected."""


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


@dataclass
class BackendSection:
    """What is switched, and the options of that backend (its `Options` declares them, with defaults and checks)."""

    name: str = DEFAULT_BACKEND
    """One of `backends.BACKENDS`."""
    max_recovery_memory: int | str | None = None
    """Device memory that lifted layers may add, instead of gnmr.max_o: bytes, ``6GB``, ``500MiB``."""
    options: BackendOptions = field(default_factory=BACKENDS[DEFAULT_BACKEND].Options)
    """The backend's own; in YAML they are keys of the section."""

    def keywords(self) -> dict[str, Any]:
        """As `GNMRCallback` takes them."""
        return {"backend": self.name, "max_recovery_memory": self.max_recovery_memory, **self.options.to_dict()}

    def to_dict(self) -> dict[str, Any]:
        """As the section is written."""
        return {"name": self.name, "max_recovery_memory": self.max_recovery_memory, **self.options.to_dict()}


@dataclass
class TriggerSection:
    """How units are chosen, and the options of that trigger (its `Options` declares them, with defaults and checks)."""

    name: str = DEFAULT_TRIGGER
    """One of `control.triggers.TRIGGERS`."""
    options: TriggerOptions = field(default_factory=TRIGGERS[DEFAULT_TRIGGER].Options)
    """The trigger's own; in YAML they are keys of the section."""

    def keywords(self) -> dict[str, Any]:
        """As `GNMRCallback` takes them."""
        return {"trigger": self.name, "trigger_options": self.options}

    def to_dict(self) -> dict[str, Any]:
        """As the section is written."""
        return {"name": self.name, **self.options.to_dict()}


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

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """The recipe as resolved, by section, plain values; options of backend and trigger are keys of their sections."""
        values = dataclasses.asdict(self)
        return {**values, "backend": self.backend.to_dict(), "trigger": self.trigger.to_dict()}

    def to_yaml(self) -> str:
        """The recipe as resolved; reading it back gives an equal one."""
        values: dict[str, Any] = self.to_dict()
        if self.lora is None:
            values["lora"] = False
        return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
