"""What a Trainer may add to the callback: its figures among the logs, and the loss in the trace.

    class MyTrainer(GNMRTrainerMixin, SFTTrainer):
        pass

Nothing here is needed for control; a callback alone can neither put keys into a Trainer's logs (they are reported before
callbacks see them) nor see a loss that is computed outside the model.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import Trainer

from .callback import GNMRCallback


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


class GNMRTrainer(GNMRTrainerMixin, Trainer):
    """The Trainer that `hf_gnmr.train` runs."""
