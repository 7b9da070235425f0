"""What a run says about itself: the census at train begin, the trace's header, and one line at the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..backends import Backend
from ..backends.units import Unit
from ..control.controller import Controller


def take_census(units: Sequence[Unit], backend: Backend, controller: Controller) -> dict[str, Any]:
    """What is monitored and switched, in plain JSON values."""
    return {
        "units": len(units),
        "unit_names": units[0].name if len(units) == 1 else f"{units[0].name} to {units[-1].name}",
        "recoverable_units": int(backend.recoverable.sum()),
        "trainable_parameters_in_units": sum(unit.numel for unit in units),
        "backend": backend.name,
        "trigger": controller.name,
        "max_o": controller.max_o,
        "recovery_bytes_bound": backend.recovery_bytes_bound(controller.most_active()),
        "resident_bytes": backend.resident_bytes,
        "host_bytes": backend.host_bytes,
        **backend.census(),
    }


def trace_header(units: Sequence[Unit], backend: Backend, controller: Controller, census: dict[str, Any]) -> dict[str, Any]:
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
        "config": controller.config.to_dict(),
        "max_o": controller.max_o,
        "trigger": controller.name,
        "trigger_options": controller.options_dict(),
        "backend": backend.name,
        "census": census,
    }


def census_in_words(census: dict[str, Any]) -> list[str]:
    """The census as the lines printed at train begin."""
    lines = [
        f"GNMR: {census['units']} units ({census['unit_names']}), {census['recoverable_units']} recoverable; "
        f"backend {census['backend']}, trigger {census['trigger']}, maxO {census['max_o']}"
    ]
    elsewhere = [
        f"{count:,} {what}"
        for key, what in (
            ("trainable_parameters_elsewhere", "trainable parameters"),
            ("modules_8bit_elsewhere", "8-bit modules, which stay so"),
        )
        if (count := census.get(key, 0))
    ]
    if elsewhere:
        lines.append(f"GNMR: outside these units, neither watched nor switched: {'; '.join(elsewhere)}")
    if "path" in census:
        return [*lines, f"GNMR: {census['path']}"]
    left = ", ".join(f"{count} {kind}" for kind, count in census["modules_not_switched"].items())
    left = f"NOT switched: {left}, {census['bytes_not_switched']:,} bytes" if left else "none left out"
    host = f", {census['host_bytes']:,} in the host's memory" if census["host_bytes"] else ""
    lines += [
        f"GNMR: {census['modules_switched']} modules switched, {census['share_switched']:.1%} of the layers' frozen weight "
        f"bytes ({left})",
        f"GNMR: low-cost path: {census['low_path']}; {census['bytes_low']:,} bytes",
        f"GNMR: recovery path: {census['recovery_path']} ({census['recovery_source']}); {census['bytes_recovery']:,} bytes "
        f"for all layers, at most {census['recovery_bytes_bound']:,} added at a time, {census['resident_bytes']:,} resident "
        f"whatever is active{host}",
        f"GNMR: evaluation during training runs the {census['eval_path']} path",
    ]
    if "note" in census:
        lines.append(f"GNMR: {census['note']}")
    return lines


def summary_in_words(summary: dict[str, Any]) -> str:
    """One line for the end of a run."""

    def share(value: float | None) -> str:
        return "n/a" if value is None else f"{value:.2%}"

    return (
        f"GNMR: {summary['steps']} steps ({summary['skipped_steps']} skipped, {summary['non_finite_steps']} not finite); "
        f"promotion ratio {share(summary['promotion_ratio'])}, hit-maxO {share(summary['hit_max_o_rate'])}, "
        f"{summary['switches']} switches; controller {summary['controller_ms'] or 0:.2f} ms a step "
        f"({share(summary['controller_share'])})"
    )
