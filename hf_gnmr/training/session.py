"""One controlled training, whatever drives it: the callback under a Trainer, or a custom loop.

    session = GNMRSession(model, total_steps=1000, gradient_accumulation_steps=4, output_dir="out")
    ...                                    # in each optimizer step:
    session.observe()                      # after its last backward, before clipping
    optimizer.step()
    session.decide(skipped=accelerator.optimizer_step_was_skipped)
    ...
    session.close()                        # examples/accelerate_loop.py is a complete loop

Paths change only in `decide`, so all micro-batches of a step, and the recomputation of checkpointed layers, use the same
choice.
"""

from __future__ import annotations

import os
import time
import uuid
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..config import ConfigError, GNMRConfig, SetupError
from ..control.controller import Decision, Trigger
from ..trace.metrics import step_scalars
from . import checks
from .census import census_lines, take_census, trace_header
from .distributed import is_distributed, world_size
from .first_steps import FirstSteps
from .forwards import ForwardProbe
from .gradients import GradientNorms
from .journal import TRACE_FILE, Journal, say, say_not_finite, write_summary
from .options import Options, make_config, signature_with_settings, split_settings, take_over, trigger_over
from .reading import Reading
from .resuming import GlobalBatch, ResumeHistory, State, check_setup, session_state
from .signals import SIGNALS


class GNMRSession:
    """Units, backend, controller, gradient norms and trace of one training.

    Args:
        model: the model whose forward is called in training: a PEFT model over an 8-bit base (wrappers from DDP and
            torch.compile are unwrapped). Parameters must already be on the devices on which they are trained.
        config: thresholds and budget; None means the defaults of `GNMRConfig`. Its fields may also be given as keywords.
        options: what is switched and how; its fields may also be given as keywords.
        total_steps: optimizer steps of the whole run; required if the configuration gives shares of it.
        gradient_accumulation_steps: micro-batches in a full window; shorter and longer windows do not count as steps.
        scaler: the gradient scaler in use (`accelerator.scaler`), or None.
        output_dir: folder for `trace.jsonl` and `summary.json`; None: neither is written.
        reduced: set by a Trainer's callback, which gets the model below DDP: gradients are averaged by the end of the
            backward, and the scaler is known.
        rows_per_micro_batch: rows of a micro-batch on this process; stored, so that a run that is resumed with another
            number of rows per step is refused. None: unknown, only micro-batches and processes are compared.
        resume_history: "continue" the history of the state that is loaded, or start a "new" one, e.g. because a step now
            has another number of rows.

    Raises:
        ConfigError: an invalid setting.
        SetupError: a model that cannot be controlled; the message names the fix.
    """

    def __init__(
        self,
        model: nn.Module,
        config: GNMRConfig | dict[str, Any] | None = None,
        options: Options | None = None,
        *,
        total_steps: int | None = None,
        gradient_accumulation_steps: int = 1,
        scaler: Any = None,
        output_dir: str | os.PathLike[str] | None = None,
        reduced: bool = False,
        rows_per_micro_batch: int | None = None,
        resume_history: ResumeHistory = "continue",
        **settings: Any,
    ) -> None:
        checks.check_objects(options, scaler, output_dir)
        of_options, thresholds = split_settings(settings, type(self).__name__)
        if options is not None and of_options:
            raise ConfigError(f"give options= or its fields as keywords, not both (got {', '.join(of_options)})")
        self.options = options = Options(**of_options) if options is None else options
        self.config = make_config(config, thresholds, type(self).__name__)
        self.total_steps, self.accumulation = total_steps, gradient_accumulation_steps
        self.trace: Path | None = None if output_dir is None else Path(output_dir) / TRACE_FILE
        checks.check_arguments(total_steps, gradient_accumulation_steps, rows_per_micro_batch, resume_history)
        self.batch = GlobalBatch(rows_per_micro_batch, gradient_accumulation_steps, world_size())
        self.resume_history = resume_history
        if self.trace is not None:
            checks.refuse_trace_place(self.trace, "output_dir", named=False)
        checks.check_model(model)
        self.main_process = not is_distributed() or torch.distributed.get_rank() == 0
        self.decision: Decision | None = None
        """The latest decision; None before the first step."""
        self.summary: dict[str, Any] | None = None
        """The figures of the run, once it has ended."""
        self.run_id = uuid.uuid4().hex
        self.steps_done = 0
        """Optimizer steps so far, including those that did not count for the controller."""
        self._resumed = False
        self._begun = False
        self._journal: Journal | None = None
        self._shown: dict[str, float] = {}
        self.reading: Reading | None = None
        """What `observe` fetched and `decide` has not used yet."""
        self._micro_batches = 0
        self._withheld = False
        self._closed = False
        if not reduced:
            checks.refuse_unreduced_gradients(model)
        self.units, self.backend, self.config = take_over(model, self.config, options)
        try:
            self.controller: Trigger = trigger_over(self.units, self.backend, self.config, options, total_steps)
            self.signal = SIGNALS[self.controller.signal](self.units) if self.controller.signal else None
            scaled = scaler is not None and scaler.is_enabled()
            # With a scaler, overflows are routine and skipped: nobody asks where they began.
            probe = ForwardProbe(self.units) if self.backend.changes_forward and not scaled else None
            self._gradients = GradientNorms(model, self.units, scaler, self.signal, gradient_accumulation_steps, probe)
            self.backend.reserve(self.controller.most_active())
            self._switch()
        except BaseException:
            self.backend.remove()
            raise
        self._scaled = scaled
        known = reduced or scaler is not None
        self._first = FirstSteps(model, self.units, self.accumulation, scaler_known=known, reports=lambda: self.main_process)

    def _switch(self) -> None:
        """Apply the controller's choice for the coming step."""
        if self.controller.exact:
            self.backend.apply_exact()
        else:
            self.backend.apply(self.controller.active)

    def begin(self) -> None:
        """Print the census and open the trace, after any `load_state_dict`; if not called, the first `observe` does it."""
        if self._begun:
            return
        self._begun = True
        if not self.main_process:
            return
        bytes_of_signal = 0 if self.signal is None else self.signal.state_bytes
        census = take_census(self.units, self.backend, self.controller, self._gradients.elsewhere, bytes_of_signal)
        for line in census_lines(census, self.backend):
            print(line, flush=True)
        for warning in (checks.one_process_of_several(), checks.scaler_missing(self._scaled)):
            if warning is not None:
                say(warning)
        if self.trace is not None:
            header = trace_header(self.units, self.backend, self.controller, census)
            header |= {"run_id": self.run_id, "total_steps": self.total_steps}
            self._journal = Journal(self.trace, header, self.steps_done if self._resumed else None)

    def observe(self, micro_batches: int | None = None) -> Reading:
        """Fetch the norms of the optimizer step that is about to happen: after its last backward, before clipping.

        Without a loss scaler, gradients that are not finite are dropped here, so that the optimizer updates nothing.

        Args:
            micro_batches: how many the step had; None: as many as there were backward passes.

        Raises:
            SetupError: the gradient came about where it cannot be read, or the first steps had no backward at all.
        """
        self._refuse_closed()
        checks.check_micro_batches(micro_batches)
        if self.reading is not None:
            raise SetupError("observe() a second time without decide(): call decide() after each optimizer step")
        if not self._begun:
            self.begin()
        losses = self._gradients.step_losses
        reading = self._gradients.read()
        if reading is None:
            reading = self._without_backward(losses)
        self.reading = reading
        self._micro_batches = reading.backwards if micro_batches is None else micro_batches
        if not self._scaled and not reading.finite:
            # A scaler would skip this update. Without one the optimizer would write NaN into every parameter it
            # touches (clipping spreads one bad layer to all), and no later step would be finite again.
            self._withheld = self._gradients.drop_gradients()
        return reading

    def _without_backward(self, losses: list[Tensor]) -> Reading:
        """The reading of a step in which no backward was seen: a batch that the loop skipped.

        Raises:
            SetupError: there was one that cannot be seen, or there was none in any of the first steps.
        """
        unseen = not self._gradients.last_micro_batch or self._gradients.holds_unseen_gradient()
        if unseen or not self._first.may_lack_backward():
            raise checks.no_gradient_seen(self.steps_done + 1)
        return Reading.of_nothing(len(self.units), losses)

    def decide(self, *, skipped: bool = False) -> Decision | None:
        """Choose the units for the next step and switch to them; call it after the optimizer's step.

        Args:
            skipped: whether the update was skipped; with a `scaler`, overflows are detected without it.

        Returns:
            The decision; None if the step did not count for the controller (skipped, or a window of another length).
        """
        self._refuse_closed()
        if self.reading is None:
            raise SetupError("decide() without observe(): call observe() after the backward, before clipping")
        start = time.perf_counter()
        reading, active = self.reading, self.controller.active
        self.reading = None  # read only once, whatever fails from here on
        # Under a scaler, fused optimizers (the Trainer's default is one) skip by themselves, and accelerate then reports the
        # step as done. The reading shows what the scaler saw.
        skipped = skipped or (self._scaled and not reading.finite)
        reason = checks.why_no_step(skipped, self._micro_batches, reading.backwards, self.accumulation)
        decision = None
        measured = self.backend.step_figures()
        if reason is None:
            decision = self.decision = self.controller.step(
                reading.norms, reading.seen, reading.signal, first_not_finite=reading.first_not_finite
            )
            self._switch()
        end = time.perf_counter()
        self.steps_done += 1
        if self.main_process and not self._scaled:  # with a loss scaler, overflows are routine
            say_not_finite(self.steps_done, self.units, reading, self._withheld)
        self._shown = {} if decision is None else step_scalars(decision, active, int(self.backend.recoverable.sum()))
        if self._journal is not None:
            self._journal.step(
                step=self.steps_done,
                reading=reading,
                decision=decision,
                active=active,
                micro_batches=self._micro_batches,
                skipped=reason,
                withheld=self._withheld,
                step_ms=1e3 * (end - reading.began),
                controller_ms=1e3 * (reading.seconds + end - start),
                recovery_bytes=self.backend.recovery_bytes(active),
                more=measured,
            )
        self._withheld = False
        self._first.saw(self.steps_done, reading, self._micro_batches, reason)
        if decision is not None:
            self._first.decided(self.backend.idle, reading, self.options.trigger)
        return decision

    def _refuse_closed(self) -> None:
        if self._closed:
            raise SetupError("this GNMRSession is closed: make a new one for another training")

    def close(self) -> dict[str, Any] | None:
        """End the training: restore the model, write the summary next to the trace and return it; may be called twice."""
        journal, unread = self._journal, self._gradients.unread
        if unread and not self.steps_done and not self._closed:
            warnings.warn(f"GNMRSession: {unread} backward passes but no observe(): nothing was monitored", stacklevel=2)
        self.detach()
        if journal is not None:
            self.summary = write_summary(journal.path, self.steps_done, journal.summary)
        return self.summary

    def detach(self) -> None:
        """Remove hooks and switched paths and close the trace, without a summary; may be called twice."""
        self._closed = True
        self._gradients.remove()
        self.backend.remove()
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    def discard(self) -> None:
        """Discard the backward passes since the last step, for a loop that drops a batch and its gradients."""
        self._gradients.discard()
        self.reading, self._withheld = None, False

    def note_loss(self, loss: Tensor) -> None:
        """Report a micro-batch's loss as it enters the backward; the trace records it if the model's own loss output takes
        no part in the backward (a loss computed outside the model)."""
        checks.check_loss(loss)
        self._gradients.step_losses.append(loss.detach().clone())  # the loop may divide it in place

    def scalars(self) -> dict[str, float]:
        """The latest step's figures, for a logger.

        Empty before the first step and after one that did not count for the controller. `gnmr/active` counts the units that
        were on the recovery path during the step; the maxima are over finite scores.
        """
        return dict(self._shown)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs; `accelerator.register_for_checkpointing(session)` stores it.

        Plain JSON values, except `signal`: the tensors that the trigger resumes from (gsnr only; otherwise empty).
        """
        return {
            "controller": self.controller.state_dict(),
            "setup": self.setup(),
            "run_id": self.run_id,
            "steps_done": self.steps_done,
            **({} if self.signal is None else {"signal": {k: t.clone() for k, t in self.signal.tensors().items()}}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`: history, locks, active set and trace. It also works mid-run, to go back a few steps.

        Raises:
            ConfigError: the state of a run with other settings or units, or fields that are missing or of a wrong type.
        """
        self.resume(*session_state(state))
        if self.signal is not None and self.resume_history == "continue":
            self.signal.load_tensors(state.get("signal", {}))

    def setup(self) -> dict[str, Any]:
        """What a history depends on besides the controller's own settings: a resumed run must have the same."""
        return {
            "layers": [unit.layer for unit in self.units],
            **self.batch.to_dict(),
            **self.backend.identity(),
        }

    def resume(self, step: int, controller: State | None, run_id: str | None, setup: State | None = None) -> None:
        """Continue after optimizer step `step`, with the controller's state and in the trace of run `run_id`, if given.

        Raises:
            ConfigError: the state of a run with other settings or units, or with steps of another size; with
                resume_history="new" no state is used.
        """
        if controller is not None and self.resume_history == "new":
            self.controller.pass_over(int(controller.get("steps_done", step)))
            self._switch()
            if self.main_process:
                say(f"resumed at step {step} with a new history (resume_history='new')")
        elif controller is not None:
            warning = check_setup(setup, self.setup(), self.batch)
            if warning is not None and self.main_process:
                warnings.warn(warning, stacklevel=3)
            self.controller.load_state_dict(dict(controller))
            self._switch()
        self.discard()
        if self._journal is not None:
            self._journal.close()
            self._journal = None
        self._begun = False
        self.run_id = run_id or self.run_id
        self.steps_done = step
        self._resumed = True


GNMRSession.__init__.__signature__ = signature_with_settings(GNMRSession.__init__)  # type: ignore[attr-defined]
