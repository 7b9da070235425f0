"""What a Trainer may add to the callback: its figures among the logs, and the loss in the trace.

    class MyTrainer(GNMRTrainerMixin, SFTTrainer):
        pass

Nothing here is needed for control; a callback alone can neither put keys into a Trainer's logs (they are reported before
callbacks see them) nor see a loss that is computed outside the model.  Checkpoints of mixtures of experts, which a plain
Trainer reads in part, are read whole, wherever they lie; the callback alone does so for those in the `output_dir`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import Trainer

from .callback import GNMRCallback
from .checkpoints import load_renamed


class GNMRTrainerMixin:
    """For any subclass of `transformers.Trainer`; stands before it among the bases."""

    def gnmr_callbacks(self: Any) -> list[GNMRCallback]:
        """The callbacks at work, usually one."""
        return [callback for callback in self.callback_handler.callbacks if isinstance(callback, GNMRCallback)]

    def training_step(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        """The Trainer's step; its loss goes to the trace."""
        loss = super().training_step(*args, **kwargs)  # type: ignore[misc]
        for callback in self.gnmr_callbacks():
            callback.note_loss(loss)
        return loss

    def log(self: Any, logs: dict[str, float], start_time: float | None = None) -> None:
        """The Trainer's log, with `gnmr/…` figures beside the loss (log_history, TensorBoard, W&B, Trackio)."""
        if "loss" in logs:
            for callback in self.gnmr_callbacks():
                logs = {**logs, **callback.scalars()}
        super().log(logs, start_time)  # type: ignore[misc]

    def _load_from_checkpoint(self: Any, resume_from_checkpoint: str, model: Any = None) -> None:
        """The Trainer's loading, and after it what the checkpoint holds under other names (fused experts)."""
        super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]
        load_renamed(self.model if model is None else model, Path(resume_from_checkpoint))
        for callback in self.gnmr_callbacks():
            callback.weights_loaded = True

    def _load_best_model(self: Any) -> None:
        super()._load_best_model()  # type: ignore[misc]
        load_renamed(self.model, Path(self.state.best_model_checkpoint))


class GNMRTrainer(GNMRTrainerMixin, Trainer):
    """The Trainer that `hf_gnmr.train` runs."""
