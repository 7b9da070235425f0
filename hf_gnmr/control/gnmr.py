"""The trigger `gnmr`, the paper's controller: at most maxO units whose risk reaches 1, with locks (§3.3, Algorithm 2).

    controller = Controller(num_units, GNMRConfig(), total_steps=1000)
    decision = controller.step(norms)

`RecoveryPolicy` is Algorithm 2 alone, from risks to seats.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .arguments import State
from .controller import Bools, Floats, Scores, Trigger, top_units


class RecoveryPolicy:
    """Top-maxO selection with locks (paper, section 3.3, Algorithm 2).

    Args:
        recoverable: which units have both paths, bool, shape (num_units,).
        max_o: seats, a number of units.
        t_lock: for how many further decisions a triggered unit that got a seat stays in the pool.
    """

    def __init__(self, recoverable: Bools, max_o: int, t_lock: int) -> None:
        self.recoverable = recoverable
        self.max_o = max_o
        self.t_lock = t_lock
        self.lock = np.zeros(recoverable.shape[0], dtype=np.int64)

    def select(self, risk: Floats) -> tuple[Bools, Bools]:
        """One decision.

        Args:
            risk: R[b, t], float64, shape (num_units,).

        Returns:
            triggered and seated units, bool, shape (num_units,) each.
        """
        triggered: Bools = self.recoverable & (risk >= 1.0)
        pool = np.flatnonzero(triggered | (self.lock > 0))
        seated = np.zeros_like(triggered)
        seated[top_units(risk, pool, self.max_o)] = True
        np.maximum(self.lock - 1, 0, out=self.lock)
        # Only a fresh trigger sets the lock: a seat kept by the lock alone would otherwise renew itself for ever.
        self.lock[triggered & seated] = self.t_lock
        return triggered, seated


class Controller(Trigger):
    """Monitor, schedules and recovery policy together. Arguments are those of `Trigger`."""

    name = "gnmr"
    takes_budget = True

    def prepare(self) -> None:
        self.policy = RecoveryPolicy(self.recoverable, self.max_o, self.config.t_lock)

    def choose(self, scores: Scores) -> tuple[Bools, Bools]:
        return self.policy.select(scores.risk)

    def more_state(self) -> dict[str, Any]:
        return {"lock": self.policy.lock.tolist()}

    def load_more(self, state: dict[str, Any]) -> None:
        self.policy.lock = State(state, "controller").counts("lock", (self.num_units,))
