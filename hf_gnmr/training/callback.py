"""GNMRCallback: connects a session to the Trainer's events; it decides nothing itself.

    Trainer(model, args, train_dataset=..., callbacks=[GNMRCallback()]).train()

In each step, the model's backward leaves a reading of the norms (`gradients`), `on_pre_optimizer_step` fetches it,
`on_step_end` lets the controller decide and the backend apply the decision, and one line is written to the trace.
"""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from ..backends.units import Unit
from ..config import ConfigError, GNMRConfig, SetupError, one_of
from ..control.controller import Decision, Trigger
from ..files import replacing
from .checkpoints import is_checkpoint_of, load_renamed
from .checks import refuse_trace_place, refuse_unreadable_gradients, refuse_windows_never_full, rows_per_micro_batch
from .fit import refuse_misfit
from .journal import TRACE_FILE
from .options import (
    DEFAULT_BACKEND,
    DEFAULT_TRIGGER,
    Options,
    make_config,
    signature_with_settings,
    split_settings,
    take_over,
    trigger_over,
)
from .resuming import ResumeHistory
from .session import GNMRSession

_BEGUN: weakref.WeakKeyDictionary[nn.Module, tuple[Any, Any]] = weakref.WeakKeyDictionary()
"""The callback that last took over a model, and the state of that training, both as weak references."""

SIGNAL_FILE = "gnmr_trigger.safetensors"


class GNMRCallback(TrainerCallback, ExportableState):
    """Runtime stability control for low-precision training, as a Trainer callback.

    Args:
        config: thresholds and budget; None means the defaults of `GNMRConfig`. Its fields may also be given as keywords.
        backend: "int8" (bitsandbytes INT8 ↔ BF16), "activation" (saved activations in few bits), "fp8" (hybrid FP8),
            "lowbit" (4 and 6 bits, simulated) or "none" (monitor only).
        trigger: "gnmr", "none" (all on the low-cost path), "all" (all on the recovery path), "gsnr", "jacobian", "static",
            "random", "listed".
        trigger_options: the trigger's own options, see `hf_gnmr.control.triggers`; e.g. {"promotion_ratio": 0.1} for
            "random".
        layers: pattern for the decoder layers of an unknown architecture, e.g. "transformer.blocks.*".
        max_recovery_memory: device memory that lifted layers may add, instead of max_o: bytes, "6GB", "500MiB".
        trace_path: file for the trace; None: `trace.jsonl` in the Trainer's output_dir; False: no trace, no summary.
        resume_history: "continue" the checkpoint's history (steps must have as many rows as before), or start a "new" one.
        settings: the backend's own options (listed in the README's table, declared in `hf_gnmr.backends`) and the fields of
            `GNMRConfig`.

    Raises:
        ConfigError: at construction, an invalid setting.
        SetupError: at train begin, a model or Trainer that cannot be controlled; the message names the fix.
    """

    def __init__(
        self,
        config: GNMRConfig | dict[str, Any] | None = None,
        *,
        backend: str = DEFAULT_BACKEND,
        trigger: str = DEFAULT_TRIGGER,
        trigger_options: Mapping[str, Any] | None = None,
        layers: str | None = None,
        max_recovery_memory: int | str | None = None,
        trace_path: str | os.PathLike[str] | bool | None = None,
        resume_history: ResumeHistory = "continue",
        **settings: Any,
    ) -> None:
        one_of("resume_history", resume_history, ("continue", "new"))
        self.resume_history = resume_history
        of_backend, thresholds = split_settings(settings, "GNMRCallback")
        self.config = make_config(config, thresholds, "GNMRCallback")
        self.options = Options(backend, trigger, trigger_options, layers, max_recovery_memory, **of_backend)
        if trace_path is not None and trace_path is not False and not isinstance(trace_path, (str, os.PathLike)):
            raise ConfigError(f"trace_path={trace_path!r}: expected a path, None or False")
        if trace_path is not None and not isinstance(trace_path, bool):
            refuse_trace_place(trace_path, "trace_path", named=True)
        self.trace_path = trace_path
        self.session: GNMRSession | None = None
        """The running training, or the last one."""
        self._state: dict[str, Any] | None = None
        """The controller's state in the checkpoint from which the Trainer rebuilt this callback, if it did."""
        self._run_id: str | None = None
        self._setup: dict[str, Any] | None = None
        self._folder: str | None = None
        """The folder in which the training saves its checkpoints."""
        self._micro_batches = 0
        self._detached = False
        self.weights_loaded = False
        """Whether the Trainer has loaded all of a checkpoint's weights (`GNMRTrainerMixin` does)."""

    @property
    def units(self) -> list[Unit]:
        """The monitored layers; empty before train begin."""
        return [] if self.session is None else self.session.units

    @property
    def controller(self) -> Trigger | None:
        """The controller in use; None before train begin."""
        return None if self.session is None else self.session.controller

    @property
    def decision(self) -> Decision | None:
        """The latest decision; None before the first step."""
        return None if self.session is None else self.session.decision

    @property
    def summary(self) -> dict[str, Any] | None:
        """The figures of the run, once it has ended."""
        return None if self.session is None else self.session.summary

    # -- Trainer events ------------------------------------------------------------------------------------------

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._refuse_another(kwargs["model"], state)
        self.detach()
        self.session, self._detached = None, False
        if state.max_steps < 1:
            raise SetupError(f"the training has {state.max_steps} optimizer steps: expected at least 1")
        refuse_windows_never_full(kwargs.get("train_dataloader"), args.gradient_accumulation_steps)
        if self.trace_path is None:
            refuse_trace_place(Path(args.output_dir) / TRACE_FILE, "output_dir", named=False)
        model = kwargs["model"]
        refuse_unreadable_gradients(args, model)
        session = GNMRSession(
            model,
            self.config,
            self.options,
            total_steps=state.max_steps,
            gradient_accumulation_steps=args.gradient_accumulation_steps,
            scaler=getattr(kwargs.get("optimizer"), "scaler", None),
            reduced=True,
            rows_per_micro_batch=rows_per_micro_batch(args, kwargs.get("train_dataloader")),
            resume_history=self.resume_history,
        )
        try:
            session.main_process = state.is_world_process_zero
            if self.trace_path is not False:
                session.trace = Path(args.output_dir) / TRACE_FILE if self.trace_path is None else Path(str(self.trace_path))
            self._restore(session, state, model, Path(args.output_dir))
            session.begin()
        except BaseException:
            session.detach()
            raise
        self.session = session
        self.weights_loaded = False  # set again by each resume
        self._folder = str(Path(args.output_dir).resolve())
        self._run_id = session.run_id
        self._micro_batches = 0

    def _refuse_another(self, model: nn.Module, state: TrainerState) -> None:
        """Raise SetupError if another callback has taken over the model in this call of `Trainer.train`."""
        other, of_state = (reference() for reference in _BEGUN.get(model, (lambda: None, lambda: None)))
        if of_state is state and other is not None and not other._detached:
            which = (
                "this GNMRCallback is in the Trainer's callbacks twice"
                if other is self
                else "there is a second GNMRCallback"
            )
            raise SetupError(f"{which}: keep only one (trainer.remove_callback)")
        _BEGUN[model] = (weakref.ref(self), weakref.ref(state))

    def rehearse(self, args: TrainingArguments, model: nn.Module, total_steps: int) -> None:
        """Raise what train begin would raise for this model, and leave the model unchanged."""
        refuse_unreadable_gradients(args, model)
        units, backend, config = take_over(model, self.config, self.options)
        try:
            trigger_over(units, backend, config, self.options, total_steps)
        finally:
            backend.remove()

    def on_substep_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._micro_batches += 1

    def on_pre_optimizer_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._detached:
            return
        if self._running().reading is not None:
            raise SetupError(
                "on_pre_optimizer_step was called twice in one step: this GNMRCallback is in the Trainer's callbacks twice. "
                "Add it only once"
            )
        self._running().observe(self._micro_batches + 1)
        self._micro_batches = 0

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._detached:
            return
        self._running().decide(skipped=bool(getattr(kwargs.get("optimizer"), "step_was_skipped", False)))

    def _running(self) -> GNMRSession:
        if self.session is None:
            raise SetupError(
                "this GNMRCallback was added after training began, and it takes over a model at train begin only: add it "
                "before trainer.train()"
            )
        return self.session

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Save the tensors that the trigger resumes from, next to the Trainer's own files."""
        tensors = {} if self.session is None or self.session.signal is None else self.session.signal.tensors()
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if tensors and state.is_world_process_zero and folder.is_dir():
            marks = {"run_id": str(self._run_id), "step": str(state.global_step)}
            stored = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
            with replacing(folder / SIGNAL_FILE) as partial:
                save_file(stored, partial, metadata=marks)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.session is not None:
            self.session.close()

    def detach(self) -> None:
        """Remove hooks and switched paths from the model and close the trace; may be called twice.

        For a model that is used after its training was interrupted. If it is called during training, the remaining steps
        run without control: on the low-cost path under `int8`, where the model's own weights are 8-bit, otherwise on the
        plain path.
        """
        if self.session is not None:
            self.session.detach()
            self._detached = True

    # -- State in the Trainer's checkpoints ------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What the Trainer stores in `trainer_state.json`: the arguments to rebuild this callback, and its state."""
        path = self.trace_path
        return {
            "args": {
                "config": self.config.to_dict(),
                **self.options.stored(),
                "trace_path": path if isinstance(path, bool) or path is None else str(path),
            },
            "attributes": {
                "_state": self.controller.state_dict() if self.controller is not None else self._state,
                "_run_id": self._run_id,
                "_folder": self._folder,
                "_setup": self._setup if self.session is None else self.session.setup(),
            },
        }

    def _restore(self, session: GNMRSession, state: TrainerState, model: nn.Module, folder: Path) -> None:
        """Restore the state in the checkpoint, if this is a resumed run."""
        # The Trainer stores a callback's state under the name of its class. A checkpoint written without this callback has
        # no such entry, and the Trainer's next save expects one.
        stored: Any = state.stateful_callbacks.setdefault(type(self).__name__, {})
        attributes = (stored[-1] if isinstance(stored, list) else stored).get("attributes") or {}
        if state.global_step == 0:
            return
        checkpoint = f"checkpoint-{state.global_step}"
        places = [folder / checkpoint, Path(str(attributes.get("_folder"))) / checkpoint]
        if not self.weights_loaded:
            self._check_weights(state, model, places)
        saved = attributes.get("_state")
        run_id = None if saved is None else attributes.get("_run_id")
        session.resume(state.global_step, saved, run_id, attributes.get("_setup"))
        if session.signal is not None and session.signal.tensors() and self.resume_history == "continue":
            files = [place / SIGNAL_FILE for place in places]
            tensors = next((t for file in files if (t := _tensors_of(file, run_id, state.global_step)) is not None), None)
            if tensors is not None:
                session.signal.load_tensors(tensors)
            else:
                warnings.warn(
                    f"no {SIGNAL_FILE} from step {state.global_step} of that run in {places[0]}: the running means of "
                    f"trigger {self.options.trigger!r} start from scratch",
                    stacklevel=2,
                )
        if saved is None:
            warnings.warn(
                f"resumed at step {state.global_step} from a checkpoint without GNMR state: the history starts from scratch",
                stacklevel=2,
            )
        elif self._state is not None and state.is_world_process_zero:
            print("GNMR: settings come from the checkpoint (restore_callback_states_from_checkpoint)", flush=True)

    def _check_weights(self, state: TrainerState, model: nn.Module, places: list[Path]) -> None:
        """Refuse a checkpoint that does not fit the model, and load what a plain Trainer skips.

        Raises:
            SetupError: weights that do not fit.
        """
        source = next((place for place in places if is_checkpoint_of(place, state)), None)
        if source is None:
            if state.is_world_process_zero:
                print(
                    f"GNMR: NOT CHECKED whether the checkpoint's weights fit the model: it is not in {places[0].parent} "
                    "(GNMRTrainerMixin checks a checkpoint in any folder)",
                    flush=True,
                )
            return
        refuse_misfit(model, source)
        renamed = load_renamed(model, source)
        if renamed and state.is_world_process_zero:
            print(f"GNMR: {len(renamed)} weights that the Trainer had skipped were loaded from {source}", flush=True)

    # -- For custom Trainers ------------------------------------------------------------------------------------------

    def scalars(self) -> dict[str, float]:
        """The latest step's figures, for a custom `Trainer.log` to add to its logs (`GNMRSession.scalars`)."""
        return {} if self.session is None or self._detached else self.session.scalars()

    def note_loss(self, loss: Tensor) -> None:
        """For a custom Trainer to report each micro-batch's loss (`GNMRSession.note_loss`)."""
        if self.session is not None and not self._detached:
            self.session.note_loss(loss)


GNMRCallback.__init__.__signature__ = signature_with_settings(GNMRCallback.__init__)  # type: ignore[attr-defined]


def _tensors_of(file: Path, run_id: str | None, step: int) -> dict[str, Tensor] | None:
    """A trigger's tensors, if the file exists and belongs to that run and step."""
    if not file.is_file():
        return None
    with safe_open(file, framework="pt") as stored:
        marks = stored.metadata() or {}
        if (marks.get("run_id"), marks.get("step")) != (str(run_id), str(step)):
            return None
        return {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 (not a dict)
