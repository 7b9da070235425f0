"""GNMRCallback: the wiring between the Trainer and the parts; it decides nothing.

    Trainer(model, args, train_dataset=..., callbacks=[GNMRCallback()]).train()

A step's way: the model's backward leaves a reading of the norms (`gradients`), `on_pre_optimizer_step` fetches it,
`on_step_end` has the controller decide and the backend put the decision in force, and one line goes to the trace.
Paths change nowhere else, so all micro-batches of a step, and the recomputation of checkpointed layers, see one choice.
"""

from __future__ import annotations

import math
import os
import time
import uuid
import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from .backends import BACKENDS, Backend, check_backend
from .backends.int8 import check_options
from .census import census_in_words, take_census, trace_header
from .checks import refuse_unreadable_gradients, refuse_windows_never_full
from .config import ConfigError, GNMRConfig, SetupError
from .controller import Bools, Controller, Decision
from .gradients import GradientNorms, Reading
from .journal import TRACE_FILE, Journal, write_summary
from .triggers import check_trigger, make_trigger
from .units import Unit, find_units


class GNMRCallback(TrainerCallback, ExportableState):
    """Runtime stability control for low-precision training, as a Trainer callback.

    Args:
        config: thresholds and budget; None means the defaults of `GNMRConfig`. Its fields may also be given as keywords.
        backend: "int8" (bitsandbytes INT8 ↔ BF16) or "none" (monitor only).
        trigger: "gnmr", "none" (all on the low-cost path) or "all" (all on the recovery path).
        recovery: "host" (original BF16 weights) or "dequantize" (BF16 compute on dequantised weights).
        recovery_source: folder or Hub id of the original weights; None: what the model was loaded from.
        layers: pattern for the decoder layers of an unknown architecture, e.g. "transformer.blocks.*".
        eval_path: path in eval mode: "low", "recovery" or "active".
        trace_path: file for the trace; None: `trace.jsonl` in the Trainer's output_dir; False: no trace, no summary.

    Raises:
        ConfigError: at construction, a setting that is not allowed.
        SetupError: at train begin, a model or Trainer on which control cannot work; the message names the mend.
    """

    def __init__(
        self,
        config: GNMRConfig | dict[str, Any] | None = None,
        *,
        backend: str = "int8",
        trigger: str = "gnmr",
        recovery: str = "host",
        recovery_source: str | os.PathLike[str] | None = None,
        layers: str | None = None,
        eval_path: str = "low",
        trace_path: str | os.PathLike[str] | bool | None = None,
        **settings: Any,
    ) -> None:
        known = [field.name for field in fields(GNMRConfig)]
        for name in [*settings, *(config if isinstance(config, dict) else {})]:
            if name not in known:
                raise ConfigError(f"GNMRCallback has no argument {name!r}: GNMRConfig's fields are {', '.join(known)}")
        if config is not None and settings:
            raise ConfigError(f"give config= or its fields as keywords, not both (got {', '.join(settings)})")
        if isinstance(config, dict):
            config = GNMRConfig(**config)
        if config is not None and not isinstance(config, GNMRConfig):
            raise ConfigError(f"config={config!r}: a GNMRConfig is allowed")
        check_backend(backend)
        check_trigger(trigger)
        check_options(recovery=recovery, recovery_source=recovery_source, eval_path=eval_path)
        if trace_path is not None and trace_path is not False and not isinstance(trace_path, (str, os.PathLike)):
            raise ConfigError(f"trace_path={trace_path!r}: a path, None or False is allowed")
        if layers is not None and not isinstance(layers, str):
            raise ConfigError(f"layers={layers!r}: a pattern such as 'transformer.blocks.*', or None, is allowed")
        if backend == "none" and trigger != "gnmr":
            raise ConfigError(f"trigger={trigger!r} with backend='none': nothing is switched, leave the trigger at 'gnmr'")
        self.config = config or GNMRConfig(**settings)
        self.backend_name, self.trigger_name = backend, trigger
        self.recovery, self.recovery_source, self.eval_path = recovery, recovery_source, eval_path
        self.layers, self.trace_path = layers, trace_path

        self.units: list[Unit] = []
        self.controller: Controller | None = None
        self.decision: Decision | None = None
        """The latest decision; None before the first step."""
        self.summary: dict[str, Any] | None = None
        """The figures of the run, once it has ended."""
        self._backend: Backend | None = None
        self._gradients: GradientNorms | None = None
        self._journal: Journal | None = None
        self._state: dict[str, Any] | None = None
        """The controller's state in the checkpoint that this callback was built anew from, if it was."""
        self._run_id: str | None = None
        self._shown: dict[str, float] = {}
        self._reading: Reading | None = None
        self._micro_batches = 0
        self._withheld = False
        self._scaled = False
        self._step_start = 0.0

    # -- Trainer events ------------------------------------------------------------------------------------------

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        model = kwargs["model"]
        if state.max_steps < 1:
            raise SetupError(f"the training has {state.max_steps} optimizer steps: there is nothing to do")
        refuse_windows_never_full(kwargs.get("train_dataloader"), args.gradient_accumulation_steps)
        try:
            self._take_over(args, model)
            self._begin(args, state, model, kwargs.get("optimizer"))
        except BaseException:
            self.detach()
            raise

    def rehearse(self, args: TrainingArguments, model: nn.Module) -> None:
        """Raise what train begin would raise about this model, and leave it as it is."""
        try:
            self._take_over(args, model)
        finally:
            self.detach()

    def _take_over(self, args: TrainingArguments, model: nn.Module) -> None:
        """Find units and make them switchable, or refuse."""
        self.detach()
        refuse_unreadable_gradients(args, model)
        self.units = find_units(model, self.layers)
        options: dict[str, Any] = {}
        if self.backend_name == "int8":
            options = {
                "recovery": self.recovery,
                "recovery_source": self.recovery_source,
                "eval_path": self.eval_path,
            }
        self._backend = BACKENDS[self.backend_name](model, self.units, **options)
        count = int(self._backend.recoverable.sum())
        if count and isinstance(self.config.max_o, int) and self.config.max_o > count:
            raise ConfigError(f"max_o={self.config.max_o}: the model has {count} recoverable units, at most that is allowed")

    def _begin(self, args: TrainingArguments, state: TrainerState, model: nn.Module, optimizer: Any) -> None:
        assert self._backend is not None
        recoverable = self._backend.recoverable
        self.controller = make_trigger(
            self.trigger_name, len(self.units), self.config, total_steps=state.max_steps, recoverable=recoverable
        )
        resumed = self._restore(state)
        scaler = getattr(optimizer, "scaler", None)
        self._gradients = GradientNorms(model, self.units, scaler)
        self._scaled = scaler is not None and scaler.is_enabled()
        self._micro_batches, self._reading, self._withheld = 0, None, False
        self.decision = None
        self.summary = None
        self._backend.apply(self.controller.active)
        census = take_census(self.units, self._backend, self.controller)
        if state.is_world_process_zero:
            for line in census_in_words(census):
                print(line, flush=True)
            if self.trace_path is not False:
                path = Path(args.output_dir) / TRACE_FILE if self.trace_path is None else Path(str(self.trace_path))
                header = trace_header(self.units, self._backend, self.controller, census)
                header |= {"run_id": self._run_id, "total_steps": state.max_steps}
                self._journal = Journal(path, header, state.global_step if resumed else None)
        self._step_start = time.perf_counter()

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        # With an iterable data set this can come in the middle of a window, whose clock already runs.
        if self._micro_batches == 0:
            self._step_start = time.perf_counter()

    def on_substep_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._micro_batches += 1

    def on_pre_optimizer_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        assert self._gradients is not None
        self._micro_batches += 1
        self._reading = self._gradients.read()
        if self._reading is None:
            raise SetupError(
                f"no gradient was seen at step {state.global_step + 1}: the loss does not come from the outputs of the "
                "model that the Trainer calls (a custom compute_loss that calls an inner module?), or a second "
                "GNMRCallback is at work. Compute the loss from model(**inputs), so that the unclipped gradient can be read"
            )
        if not self._scaled and not math.isfinite(self._reading.total_norm):
            # A scaler would skip this update. Without one the optimizer would write NaN into every parameter it
            # touches (clipping spreads one bad layer over all), and no later step could be finite again.
            self._gradients.drop_gradients()
            self._withheld = True

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        assert self.controller is not None and self._backend is not None and self._reading is not None
        start = time.perf_counter()
        reading = self._reading
        active = self.controller.active
        skipped = self._not_a_step(args, kwargs.get("optimizer"))
        decision = None
        if skipped is None:
            decision = self.decision = self.controller.step(reading.norms)
            self._backend.apply(decision.active)
        end = time.perf_counter()
        if state.is_world_process_zero:
            self._report(state.global_step, reading)
        self._shown = {} if decision is None else self._figures(decision, active)
        if self._journal is not None:
            self._journal.step(
                step=state.global_step,
                reading=reading,
                decision=decision,
                active=active,
                micro_batches=self._micro_batches,
                skipped=skipped,
                withheld=self._withheld,
                step_ms=1e3 * (end - self._step_start),
                controller_ms=1e3 * (reading.seconds + end - start),
                recovery_bytes=self._backend.recovery_bytes(active),
            )
        self._micro_batches, self._reading, self._withheld = 0, None, False
        self._step_start = time.perf_counter()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        journal = self._journal
        self.detach()
        if journal is not None:
            self.summary = write_summary(journal.path, state.global_step)

    def detach(self) -> None:
        """Take hooks and paths off the model and close the trace, as the end of training does; may be called twice.

        Only needed where training was broken off and the model is used without another run.
        """
        if self._gradients is not None:
            self._gradients.remove()
        if self._backend is not None:
            self._backend.remove()
        if self._journal is not None:
            self._journal.close()
        self._gradients = self._backend = self._journal = None

    # -- State in the Trainer's checkpoints ------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What the Trainer stores in `trainer_state.json`: arguments to build this callback anew, and its state."""
        return {
            "args": {
                "config": self.config.to_dict(),
                "backend": self.backend_name,
                "trigger": self.trigger_name,
                "recovery": self.recovery,
                "recovery_source": None if self.recovery_source is None else str(self.recovery_source),
                "layers": self.layers,
                "eval_path": self.eval_path,
                "trace_path": self.trace_path if isinstance(self.trace_path, bool) or self.trace_path is None
                else str(self.trace_path),
            },
            "attributes": {
                "_state": self.controller.state_dict() if self.controller is not None else self._state,
                "_run_id": self._run_id,
            },
        }

    def _restore(self, state: TrainerState) -> bool:
        """Continue from the state in the checkpoint, if this is a resumed run; returns whether it is one."""
        assert self.controller is not None
        # The Trainer files a callback's state under its class's name. A checkpoint written without this callback has no
        # entry, and the Trainer's next save would miss it.
        stored: Any = state.stateful_callbacks.setdefault(type(self).__name__, {})
        attributes = (stored[-1] if isinstance(stored, list) else stored).get("attributes") or {}
        self._run_id = uuid.uuid4().hex
        if state.global_step == 0:
            return False
        saved = attributes.get("_state")
        if saved is None:
            warnings.warn(
                f"resumed at step {state.global_step} from a checkpoint without GNMR state: the history starts anew",
                stacklevel=2,
            )
        else:
            self.controller.load_state_dict(saved)
            self._run_id = attributes.get("_run_id") or self._run_id
            if self._state is not None and state.is_world_process_zero:
                print("GNMR: settings are those of the checkpoint (restore_callback_states_from_checkpoint)", flush=True)
        return True

    # -- What is printed, logged and written -----------------------------------------------------------------------

    def scalars(self) -> dict[str, float]:
        """The latest step's figures, for a `Trainer.log` that adds them to its logs.

        Empty before the first step and after one that was no step for the controller. `gnmr/active` counts the units that
        were on the recovery path during the step; the maxima are over finite scores.
        """
        return dict(self._shown)

    def note_loss(self, loss: Tensor) -> None:
        """For a Trainer to tell each micro-batch's loss, as it enters the backward; the trace has it where the model's own
        loss output takes no part (label smoothing, `compute_loss_func`)."""
        if self._gradients is not None:
            self._gradients.step_losses.append(loss)

    def _figures(self, decision: Decision, active: Bools) -> dict[str, float]:
        assert self._backend is not None
        recoverable = int(self._backend.recoverable.sum())
        finite = np.isfinite(decision.gnmr)
        return {
            "gnmr/max": float(decision.gnmr[finite].max(initial=0.0)),
            "gnmr/delta_max": float(decision.delta_gnmr[finite].max(initial=0.0)),
            "gnmr/not_finite": int((~finite).sum()),
            "gnmr/triggered": int(decision.triggered.sum()),
            "gnmr/active": int(active.sum()),
            "gnmr/promotion": float(active.sum() / recoverable) if recoverable else 0.0,
        }

    def _not_a_step(self, args: TrainingArguments, optimizer: Any) -> str | None:
        """Why the optimizer step that just was is no step for the controller; None if it is one."""
        if getattr(optimizer, "step_was_skipped", False):
            return "loss scaler skipped the update"
        if self._micro_batches != args.gradient_accumulation_steps:
            return f"window of {self._micro_batches} micro-batches instead of {args.gradient_accumulation_steps}"
        return None

    def _report(self, step: int, reading: Reading) -> None:
        """Say what must not go unnoticed. With a loss scaler, overflows are its daily business and it skips the update."""
        bad = [self.units[i].layer for i in np.flatnonzero(~np.isfinite(reading.norms))]
        if not self._scaled and (bad or self._withheld):
            where = f"in layer{'s' if len(bad) > 1 else ''} {', '.join(map(str, bad))}" if bad else "outside the layers"
            update = "; the optimizer's update was withheld" if self._withheld else ""
            print(f"GNMR: step {step}: gradient not finite {where}{update}", flush=True)
