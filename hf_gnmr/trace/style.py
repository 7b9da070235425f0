"""The page's style sheet: light and dark schemes, narrow screens, print."""

from __future__ import annotations

STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --faint: #8a94a3; --page: #ffffff; --card: #f5f7fa; --line: #d9dee6;
  --accent: #0f766e; --alarm: #b91c1c; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ee; --faint: #8390a2; --page: #14181f; --card: #1c222b;
  --line: #333c49; --accent: #2dd4bf; --alarm: #f87171; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 62rem; padding: 1rem; font: 15px/1.5 system-ui, sans-serif; color: var(--ink);
  background: var(--page); }
h1 { font-size: 1.5rem; margin: .5rem 0; } h3 { font-size: 1rem; margin: 1.4rem 0 .4rem; }
h2 { font-size: 1.2rem; margin: 2rem 0 .5rem; border-bottom: 1px solid var(--line); padding-bottom: .3rem;
  overflow-wrap: anywhere; }
p { margin: .4rem 0; } .note { color: var(--faint); font-size: .9em; overflow-wrap: anywhere; }
.alarm { border-left: 4px solid var(--alarm); padding: .4rem .8rem; background: var(--card); overflow-wrap: anywhere; }
.wide { overflow-x: auto; margin: .5rem 0; } .wide svg { min-width: 560px; width: 100%; height: auto; display: block; }
table { border-collapse: collapse; font-size: .87em; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .5rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
thead th { color: var(--faint); font-weight: 600; white-space: normal; }
.runs th { overflow-wrap: anywhere; min-width: 5rem; }
.bar { display: inline-block; height: .6em; background: var(--accent); vertical-align: baseline; margin-left: .4em; }
dl { margin: 0; } dt { font-weight: 600; margin-top: .7rem; } dd { margin: 0 0 0 1rem; } dd.do { color: var(--accent); }
details { margin: .6rem 0; } summary { cursor: pointer; font-weight: 600; }
pre { overflow-x: auto; background: var(--card); padding: .7rem; font-size: .82em; }
@media print { :root { --ink: #000; --page: #fff; --card: #f5f5f5; --faint: #555; --line: #bbb; --accent: #0f766e; }
  body { max-width: none; padding: 0; } .wide { overflow: visible; }
  .wide svg { min-width: 0; max-height: 22cm; width: auto; max-width: 100%; }
  .wide, tr, dl > * { break-inside: avoid; } h2, h3, dt, h2 + p { break-after: avoid; } pre { white-space: pre-wrap; }
  details::details-content { content-visibility: visible; block-size: auto; } table { font-size: .75em; } }
"""
