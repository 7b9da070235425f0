"""What a grid of runs (`stress.py`) consists of: arms and formats from the command line, jobs, and their recipes."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

from hf_gnmr.config import ConfigError
from hf_gnmr.control.triggers import TRIGGERS
from hf_gnmr.run.recipe import find_recipe, load_recipe

FREE_OF_MAX_O = ("none", "all", "exact", "static")
"""Arms that are the same whatever maxO is."""
RECHOOSING = ("gnmr", "gsnr", "jacobian")
"""Arms that choose units again in each step, so that a list of those lifted most is another arm."""


@dataclasses.dataclass(frozen=True)
class Arm:
    """One way to choose units."""

    trigger: str
    thresholds: tuple[str, str] | None = None
    """ALPHA and BETA as text."""
    ratio: float | None = None
    of: Arm | None = None
    """Of `listed`: the arm whose most lifted units are taken."""
    units: str | None = None
    """Of `listed`: a pattern of names."""

    @property
    def label(self) -> str:
        """Its name in tables."""
        if self.of is not None:
            return f"{self.trigger} {self.of.label}"
        if self.units is not None:
            return f"{self.trigger} {self.units}"
        if self.thresholds is not None:
            return f"{self.trigger} {'/'.join(self.thresholds)}"
        return self.trigger if self.ratio is None else f"{self.trigger} {self.ratio:g}"

    @property
    def matched(self) -> Arm | None:
        """The arm whose number of lifted units a control takes over; None: it takes over none."""
        if self.trigger == "random" and self.thresholds is not None:
            return Arm("gnmr", self.thresholds)
        return self.of

    @property
    def free_of_max_o(self) -> bool:
        """Whether its runs are the same under every maxO."""
        return self.trigger in FREE_OF_MAX_O or self.units is not None

    def overrides(self) -> list[str]:
        """The thresholds as overrides of a recipe."""
        if self.thresholds is None:
            return []
        alpha, beta = self.thresholds
        *init, final = stages(alpha)
        # One stage replaces the two that the recipe may have.
        first = [f"gnmr.alpha_init={init[0]}"] if init else ["gnmr.alpha_init_fraction=0.0"]
        return [*first, f"gnmr.alpha={final}", f"gnmr.beta={'null' if beta == 'off' else beta}"]


def stages(alpha: str) -> list[str]:
    """INIT-ALPHA or ALPHA as one or two numbers; a minus after an e belongs to the number."""
    parts = re.split(r"(?<![eE])-", alpha)
    if not 1 <= len(parts) <= 2:
        raise ValueError(alpha)
    return parts


@dataclasses.dataclass(frozen=True)
class Job:
    """One run of the grid."""

    arm: Arm
    form: str
    max_o: int | None
    seed: int

    @property
    def name(self) -> str:
        """The run's folder."""
        parts = [self.form.replace(":", "-"), *([] if self.max_o is None else [f"maxo{self.max_o}"])]
        label = self.arm.label.replace("*", "any").replace("?", "one")
        return "_".join([*parts, re.sub(r"[^\w.-]", "-", label), f"seed{self.seed}"])

    @property
    def matched(self) -> Job | None:
        """The run whose trace a control needs."""
        return None if self.arm.matched is None else dataclasses.replace(self, arm=self.arm.matched)


@dataclasses.dataclass(frozen=True)
class Study:
    """What all runs of a grid share."""

    recipe: str
    """A recipe's name or file."""
    overrides: list[str]
    out: Path
    """Folder of the runs."""


def arm_of(text: str) -> Arm:
    """An arm from its text on the command line.

    Raises:
        ConfigError: not an arm.
    """
    name, *thresholds = text.split(":")
    if name == "listed":
        if thresholds[:1] and thresholds[0] in RECHOOSING:
            return Arm(name, of=arm_of(":".join(thresholds)))
        if len(thresholds) == 1 and re.search(r"[*?\[]|\w\.\D", thresholds[0]):
            return Arm(name, units=thresholds[0])
        raise ConfigError(
            f"--arms {text}: expected listed:gnmr:ALPHA:BETA, listed:gsnr, listed:jacobian, or a pattern such as "
            "listed:*.down_proj"
        )
    counts = {"gnmr": (2,), "random": (1, 2)}.get(name, (0,))
    if name not in (*TRIGGERS, "exact") or len(thresholds) not in counts:
        raise ConfigError(
            f"--arms {text}: expected one of {', '.join(TRIGGERS)}, exact; gnmr with :ALPHA:BETA, random with that or "
            ":RATIO, listed with :ARM or :PATTERN"
        )
    try:
        numbers = [float(part) for i, t in enumerate(thresholds) if (i, t) != (1, "off") for part in stages(t)]
    except ValueError:
        raise ConfigError(f"--arms {text}: expected numbers, INIT-ALPHA or (for β) off") from None
    if len(thresholds) == 1:
        return Arm(name, ratio=numbers[0])
    return Arm(name, (thresholds[0], thresholds[1]) if thresholds else None)


def overrides_of(job: Job, study: Study) -> list[str]:
    """What a job changes in the recipe."""
    arm = job.arm
    changes = [
        *study.overrides,
        f"training.output_dir={study.out / job.name}",
        f"training.seed={job.seed}",
        "run.resume=false",
        *format_overrides(job.form),
        "training.disable_tqdm=true",
        f"trigger.name={'none' if arm.trigger == 'exact' else arm.trigger}",
    ]
    if arm.trigger == "exact":  # the plain model: nothing is switched, norms are still traced
        changes = [c for c in changes if not c.startswith(("backend.", "trigger."))] + ["backend.name=none"]
    changes += (arm.of or arm).overrides()
    if job.max_o is not None:
        changes.append(f"gnmr.max_o={job.max_o}")
    if arm.trigger == "random":
        changes.append(f"trigger.seed={job.seed}")
    if arm.units is not None:
        changes.append(f"trigger.units={json.dumps([arm.units])}")
    if arm.ratio is not None:
        changes.append(f"trigger.promotion_ratio={arm.ratio}")
    if job.matched is not None:
        changes.append(f"trigger.trace={study.out / job.matched.name / 'trace.jsonl'}")
    if arm.trigger == "static" and not any(o.startswith("trigger.warmup") for o in study.overrides):
        changes.append("trigger.warmup=0.05")  # 500 of the paper's 10,000 and more steps
    if arm.trigger != "static":
        changes = [c for c in changes if not c.startswith(("trigger.warmup", "trigger.share"))]
    if arm.trigger != "random":
        changes = [c for c in changes if not c.startswith("trigger.hold")]
    return changes


def format_overrides(form: str) -> list[str]:
    """A format as overrides of a recipe.

    Raises:
        ConfigError: not KIND:LOW:RECOVERY.
    """
    kind, *bits = form.split(":")
    if len(bits) != 2 or kind not in ("float", "int", "lowbit", "fp8") or (kind == "fp8" and bits != ["8", "16"]):
        raise ConfigError(f"--formats {form}: expected float, int or lowbit with :LOW:RECOVERY in bits, or fp8:8:16")
    if kind == "fp8":
        return ["backend.name=fp8"]
    widths = [f"backend.bits_low={bits[0]}", f"backend.bits_recovery={bits[1]}"]
    name = "lowbit" if kind == "lowbit" else "activation"
    return [*widths, f"backend.name={name}", *([] if kind == "lowbit" else [f"backend.format={kind}"])]


def format_of(recipe_name: str, overrides: list[str]) -> str:
    """The format that a recipe has itself.

    Raises:
        ConfigError: its backend has none.
    """
    backend = load_recipe(find_recipe(recipe_name), overrides).backend
    options = backend.options.to_dict()
    if backend.name not in ("activation", "lowbit", "fp8"):
        raise ConfigError(f"{recipe_name}: backend.name={backend.name!r}: expected activation, lowbit or fp8")
    if backend.name == "fp8":
        return "fp8:8:16"
    kind = "lowbit" if backend.name == "lowbit" else options["format"]
    return f"{kind}:{options['bits_low']}:{options['bits_recovery']}"
