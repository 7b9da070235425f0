"""What a run reports about itself: the census at train begin, the trace's header, and one summary line at the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..backends import Backend, bf16_cpu
from ..backends.units import Unit
from ..control.controller import Trigger


def take_census(
    units: Sequence[Unit], backend: Backend, trigger: Trigger, elsewhere: int = 0, trigger_bytes: int = 0
) -> dict[str, Any]:
    """What is monitored and what is switched, as plain JSON values.

    Args:
        units: the monitored units.
        backend: what switches them.
        trigger: what chooses them.
        elsewhere: trainable numbers outside the units.
        trigger_bytes: what the trigger's signal keeps on the device.
    """
    return {
        "units": len(units),
        "unit_names": units[0].name if len(units) == 1 else f"{units[0].name} to {units[-1].name}",
        "recoverable_units": int(backend.recoverable.sum()),
        "trainable_parameters_in_units": sum(unit.numel for unit in units),
        "backend": backend.name,
        "trigger": trigger.name,
        "max_o": trigger.max_o,
        "recovery_bytes_bound": backend.recovery_bytes_bound(trigger.most_active()),
        "resident_bytes": backend.resident_bytes,
        "host_bytes": backend.host_bytes,
        **({"bf16_products": "float32 kernels"} if bf16_cpu.active() else {}),
        **backend.census(),
        "trainable_parameters_elsewhere": elsewhere,
        "trigger_bytes": trigger_bytes,
    }


def trace_header(units: Sequence[Unit], backend: Backend, trigger: Trigger, census: dict[str, Any]) -> dict[str, Any]:
    """The header's fields that do not depend on the Trainer."""
    return {
        "units": [
            {
                "index": unit.index,
                "layer": unit.layer,
                "name": unit.name,
                "recoverable": bool(backend.recoverable[unit.index]),
                "bytes_low": int(backend.bytes_low[unit.index]),
                "bytes_recovery": int(backend.bytes_recovery[unit.index]),
                "bytes_added": int(backend.bytes_added[unit.index]),
            }
            for unit in units
        ],
        "config": trigger.config.to_dict(),
        "max_o": trigger.max_o,
        "trigger": trigger.name,
        "trigger_options": trigger.options_dict(),
        "backend": backend.name,
        "census": census,
    }


def census_lines(census: dict[str, Any], backend: Backend) -> list[str]:
    """The census as the lines printed at train begin."""
    head = (
        f"{census['units']} units ({census['unit_names']}), {census['recoverable_units']} recoverable; "
        f"backend {census['backend']}, trigger {census['trigger']}, maxO {census['max_o']}"
    )
    elsewhere = [
        f"{count:,} {what}"
        for key, what in (
            ("trainable_parameters_elsewhere", "trainable parameters"),
            ("modules_8bit_elsewhere", "8-bit modules, which stay 8-bit"),
        )
        if (count := census.get(key, 0))
    ]
    outside = [f"outside these units, neither monitored nor switched: {'; '.join(elsewhere)}"] if elsewhere else []
    by = census.get("bf16_products")
    products = [f"BF16 products run by {by}, inputs and results in BF16: this CPU emulates BF16"] if by else []
    return [f"GNMR: {line}" for line in (head, *outside, *backend.census_lines(census), *products)]


def summary_in_words(summary: dict[str, Any]) -> str:
    """The summary as one line, printed at the end of a run."""

    def share(value: float | None) -> str:
        return "n/a" if value is None else f"{value:.2%}"

    return (
        f"GNMR: {summary['steps']} steps ({summary['skipped_steps']} skipped, {summary['non_finite_steps']} not finite); "
        f"promotion ratio {share(summary['promotion_ratio'])}, hit-maxO {share(summary['hit_max_o_rate'])}, "
        f"{summary['switches']} switches; controller {summary['controller_ms'] or 0:.2f} ms per step "
        f"({share(summary['controller_share'])})"
    )
