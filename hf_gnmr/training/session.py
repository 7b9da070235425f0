"""One controlled training, whatever drives it: the callback under a Trainer, or a custom loop.

    session = GNMRSession(model, total_steps=1000, gradient_accumulation_steps=4, output_dir="out")
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            if accelerator.sync_gradients:
                session.observe()                                  # after the backward, before clipping
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if accelerator.sync_gradients:
                session.decide(skipped=accelerator.optimizer_step_was_skipped)
            optimizer.zero_grad()
    session.close()

Paths change only in `decide`, so all micro-batches of a step, and the recomputation of checkpointed layers, use the same
choice.
"""

from __future__ import annotations

import math
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
from .census import census_lines, take_census, trace_header
from .checks import one_process_of_several, refuse_trace_place, refuse_unreduced_gradients, scaler_missing
from .distributed import is_distributed
from .gradients import GradientNorms, Reading
from .journal import TRACE_FILE, Journal, OddWindows, say, say_not_finite, say_out_of_reach, write_summary
from .options import Options, make_config, signature_with_settings, split_settings, take_over, trigger_over
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
        reduced: with several processes, accept a model that is not wrapped in DDP: the caller guarantees that gradients
            are averaged by the end of the backward (a Trainer's callback gets the model below DDP).

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
        **settings: Any,
    ) -> None:
        of_options, thresholds = split_settings(settings, type(self).__name__)
        if options is not None and of_options:
            raise ConfigError(f"give options= or its fields as keywords, not both (got {', '.join(of_options)})")
        self.options = options = Options(**of_options) if options is None else options
        self.config = make_config(config, thresholds, type(self).__name__)
        self.total_steps, self.accumulation = total_steps, gradient_accumulation_steps
        self.trace: Path | None = None if output_dir is None else Path(output_dir) / TRACE_FILE
        if isinstance(total_steps, bool) or not (total_steps is None or (isinstance(total_steps, int) and total_steps > 0)):
            raise ConfigError(f"total_steps={total_steps!r}: expected a whole number above 0, or None")
        if isinstance(gradient_accumulation_steps, bool) or not (
            isinstance(gradient_accumulation_steps, int) and gradient_accumulation_steps > 0
        ):
            raise ConfigError(
                f"gradient_accumulation_steps={gradient_accumulation_steps!r}: expected a whole number above 0"
            )
        if self.trace is not None:
            refuse_trace_place(self.trace, "output_dir", named=False)
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
        self._closed = self._looked = False
        self._windows = OddWindows(gradient_accumulation_steps)
        if not reduced:
            refuse_unreduced_gradients(model)
        self.units, self.backend, self.config = take_over(model, self.config, options)
        try:
            self.controller: Trigger = trigger_over(self.units, self.backend, self.config, options, total_steps)
            self.signal = SIGNALS[self.controller.signal](self.units) if self.controller.signal else None
            self._gradients = GradientNorms(model, self.units, scaler, self.signal, gradient_accumulation_steps)
            self.backend.reserve(self.controller.most_active())
            self._switch()
        except BaseException:
            self.backend.remove()
            raise
        self._scaled = scaler is not None and scaler.is_enabled()

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
        census = take_census(self.units, self.backend, self.controller)
        census["trainable_parameters_elsewhere"] = self._gradients.elsewhere
        census["trigger_bytes"] = 0 if self.signal is None else self.signal.state_bytes
        for line in census_lines(census, self.backend):
            print(line, flush=True)
        for warning in (one_process_of_several(), scaler_missing(self._scaled)):
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
            SetupError: no gradient was seen.
        """
        if self._closed:
            raise SetupError("this GNMRSession is closed: make a new one for another training")
        if self.reading is not None:
            raise SetupError("observe() a second time without decide(): call decide() after each optimizer step")
        if not self._begun:
            self.begin()
        reading = self.reading = self._gradients.read()
        if reading is None:
            raise SetupError(
                f"no gradient was seen at step {self.steps_done + 1}: the loss does not come from the outputs of the given "
                "model (a custom compute_loss that calls an inner module?), the model was not in training mode, accelerate "
                "does not consider this the last micro-batch (GradientState), or there is a second GNMRCallback. Compute "
                "the loss from model(**inputs) after model.train(), so that the unclipped gradient can be read"
            )
        self._micro_batches = reading.backwards if micro_batches is None else micro_batches
        if not self._scaled and not math.isfinite(reading.total_norm):
            # A scaler would skip this update. Without one the optimizer would write NaN into every parameter it
            # touches (clipping spreads one bad layer to all), and no later step would be finite again.
            self._withheld = self._gradients.drop_gradients()
        return reading

    def decide(self, *, skipped: bool = False) -> Decision | None:
        """Choose the units for the next step and switch to them; call it after the optimizer's step.

        Args:
            skipped: whether the update was skipped; with a `scaler`, overflows are detected without it.

        Returns:
            The decision; None if the step did not count for the controller (skipped, or a window of another length).
        """
        if self._closed:
            raise SetupError("this GNMRSession is closed: make a new one for another training")
        if self.reading is None:
            raise SetupError("decide() without observe(): call observe() after the backward, before clipping")
        start = time.perf_counter()
        reading, active = self.reading, self.controller.active
        self.reading = None  # read only once, whatever fails from here on
        reason = None
        # Under a scaler, fused optimizers (the Trainer's default is one) skip by themselves, and accelerate then reports the
        # step as done. The reading shows what the scaler saw.
        if skipped or (self._scaled and not math.isfinite(reading.total_norm)):
            reason = "loss scaler skipped the update"
        elif self._micro_batches != self.accumulation:
            reason = f"window of {self._micro_batches} micro-batches instead of {self.accumulation}"
        decision = None
        measured = self.backend.step_figures()
        if reason is None:
            decision = self.decision = self.controller.step(reading.norms, reading.seen, reading.signal)
            self._switch()
        end = time.perf_counter()
        self.steps_done += 1
        if self.main_process:
            # With a loss scaler, overflows are routine, and the scaler skips the update.
            if not self._scaled:
                say_not_finite(self.steps_done, self.units, reading, self._withheld)
            self._windows.saw(self._micro_batches)
            if decision is not None and not self._looked:
                self._looked = True
                say_out_of_reach(self.units, self.backend.idle(), reading, self.options.trigger)
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
        return decision

    def close(self) -> dict[str, Any] | None:
        """End the training: restore the model, write the summary next to the trace and return it; may be called twice."""
        journal, unread = self._journal, self._gradients.unread
        if unread and not self.steps_done and not self._closed:
            warnings.warn(
                f"GNMRSession: {unread} backward passes but no observe(): nothing was monitored or switched",
                stacklevel=2,
            )
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
        self._gradients.step_losses.append(loss.detach())

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
            ConfigError: the state of a run with other settings or units.
        """
        self.resume(int(state["steps_done"]), state["controller"], state["run_id"], state["setup"])
        if self.signal is not None:
            self.signal.load_tensors(state.get("signal", {}))

    def setup(self) -> dict[str, Any]:
        """What a history depends on besides the controller's own settings: a resumed run must have the same."""
        return {
            "layers": [unit.layer for unit in self.units],
            "gradient_accumulation_steps": self.accumulation,
            **self.backend.identity(),
        }

    def resume(
        self, step: int, controller: dict[str, Any] | None, run_id: str | None, setup: dict[str, Any] | None = None
    ) -> None:
        """Continue after optimizer step `step`, with the controller's state and in the trace of run `run_id`, if given."""
        if controller is not None:
            for name, value in self.setup().items():
                if setup is not None and setup.get(name) != value:
                    raise ConfigError(
                        f"the checkpoint was written with {name}={setup.get(name)!r}, this run has {value!r}: resume with "
                        "the model and settings of the checkpoint, or start from scratch"
                    )
            self.controller.load_state_dict(controller)
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
