"""A mixin for Trainers: the callback's figures in their logs, and their loss in the trace.

    class MyTrainer(GNMRTrainerMixin, SFTTrainer):
        pass

Control does not need it; but a callback alone can neither add keys to a Trainer's logs (they are reported before callbacks
see them) nor see a loss that is computed outside the model.  Checkpoints of mixtures of experts, of which a plain Trainer
loads only a part, are loaded completely from any folder; the callback alone does so only for those in the `output_dir`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import Trainer
from transformers.trainer_pt_utils import LabelSmoother

from .callback import GNMRCallback
from .checkpoints import load_renamed
from .fit import refuse_misfit


class GNMRTrainerMixin:
    """For any subclass of `transformers.Trainer`; list it before the Trainer among the base classes."""

    def gnmr_callbacks(self: Any) -> list[GNMRCallback]:
        """The Trainer's GNMR callbacks, usually one."""
        return [callback for callback in self.callback_handler.callbacks if isinstance(callback, GNMRCallback)]

    def training_step(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        """The Trainer's step; its loss is reported to the trace."""
        loss = super().training_step(*args, **kwargs)  # type: ignore[misc]
        for callback in self.gnmr_callbacks():
            callback.note_loss(loss)
        return loss

    def log(self: Any, logs: dict[str, float], start_time: float | None = None) -> None:
        """The Trainer's log, with `gnmr/…` figures next to the loss (log_history, TensorBoard, W&B, Trackio)."""
        if "loss" in logs:
            for callback in self.gnmr_callbacks():
                logs = {**logs, **callback.scalars()}
        super().log(logs, start_time)  # type: ignore[misc]

    def _load_from_checkpoint(self: Any, resume_from_checkpoint: str, model: Any = None) -> None:
        """The Trainer's loading, then the weights that the checkpoint stores under other names (fused experts).

        Raises:
            SetupError: weights that do not fit the model.
        """
        refuse_misfit(self.model if model is None else model, Path(resume_from_checkpoint))
        super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]
        load_renamed(self.model if model is None else model, Path(resume_from_checkpoint))
        for callback in self.gnmr_callbacks():
            callback.weights_loaded = True

    def _load_best_model(self: Any) -> None:
        super()._load_best_model()  # type: ignore[misc]
        load_renamed(self.model, Path(self.state.best_model_checkpoint))


class Float32LabelSmoother(LabelSmoother):
    """transformers' label smoothing with the log-softmax in float32, as its other losses have it.

    Its own takes it in the dtype of the logits: a loss of a BF16 model without autocast is rounded to BF16's three digits.
    """

    def __call__(self, model_output: Any, labels: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        logits = model_output["logits"] if isinstance(model_output, dict) else model_output[0]
        return super().__call__({"logits": logits.float()}, labels, *args, **kwargs)


class GNMRTrainer(GNMRTrainerMixin, Trainer):
    """The Trainer that `hf_gnmr.train` runs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.args.label_smoothing_factor != 0:
            self.label_smoother = Float32LabelSmoother(epsilon=self.args.label_smoothing_factor)
