"""The tables of `cost.py`, one a part that was measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def table(payload: dict[str, Any]) -> str:
    """The results in Markdown."""
    return "\n\n".join("\n".join(render(payload[part])) for part, render in RENDERERS.items() if part in payload)


def span(value: dict[str, float], form: str = "{:.4f}") -> str:
    """Median and 95% interval."""
    return f"{form.format(value['median'])} ({form.format(value['low'])} to {form.format(value['high'])})"


def control_table(control: dict[str, Any]) -> list[str]:
    return [
        f"{control['units']} units, maxO {control['max_o']}, on average {control['mean_active']:.1f} lifted and "
        f"{control['mean_switches']:.1f} switched a step; a step takes {control['step_seconds']:.2f} s",
        "",
        "| control | median (95% interval) |",
        "|---|---|",
        f"| its timers, ms a step | {span(control['control_ms'], '{:.2f}')} |",
        f"| its timers over step time | {span(control['control_share'], '{:.3%}')} |",
        *(f"| {name} | {span(control[name])} |" for name in control if " / " in name),
    ]


def norms_table(norms: dict[str, Any]) -> list[str]:
    return [
        f"| norms of {norms['tensors']} gradients | median (95% interval) |",
        "|---|---|",
        f"| per unit, ms | {span(norms['ours_ms'], '{:.3f}')} |",
        f"| `torch.nn.utils.get_total_norm`, ms | {span(norms['floor_ms'], '{:.3f}')} |",
        f"| ratio | {span(norms['ours / floor'], '{:.2f}')} |",
    ]


def stores_table(stores: dict[str, Any]) -> list[str]:
    return [
        "| a step with every unit lifted | median (95% interval) |",
        "|---|---|",
        *(f"| {name} | {span(ratio, '{:.3f}')} |" for name, ratio in stores.items()),
    ]


def switching_table(stores: dict[str, Any]) -> list[str]:
    lines = ["| store | ms a layer switched | one / none replaced | 10% / none | all / none |", "|---|---|---|---|---|"]
    for store, figures in stores.items():
        ratios = " | ".join(span(figures[f"{share} / none"], "{:.3f}") for share in ("one", "10%", "all"))
        lines.append(f"| {store} | {span(figures['latency_ms_a_layer'])} | {ratios} |")
    return lines


def memory_table(ways: dict[str, Any]) -> list[str]:
    lines = [
        "| way | anonymous, MB | over INT8 | bound + resident | file pages | model's tensors | store's tensors, bytes | "
        "census |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for way, figures in ways.items():
        over = f"{figures['over_int8'] / 1e6:.1f}" if "over_int8" in figures else ""
        lines.append(
            f"| {way} | {figures['memory'] / 1e6:.1f} | {over} | {(figures['bound'] + figures['resident']) / 1e6:.1f} | "
            f"{figures['file_pages'] / 1e6:.1f} | {figures['model_tensors'] / 1e6:.1f} | {figures['store_tensors']:,} | "
            f"{figures['reported']:,} |"
        )
    return lines


def controller_table(decisions: dict[str, Any]) -> list[str]:
    return [
        "| units | ms a decision |",
        "|---|---|",
        *(f"| {units} | {span(milliseconds, '{:.3f}')} |" for units, milliseconds in decisions.items()),
    ]


RENDERERS: dict[str, Callable[[dict[str, Any]], list[str]]] = {
    "control": control_table,
    "norms": norms_table,
    "stores": stores_table,
    "switching": switching_table,
    "memory": memory_table,
    "controller": controller_table,
}
