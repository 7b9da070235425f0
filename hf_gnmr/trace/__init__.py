"""A run's trace, and everything computed from it alone: figures, replays, thresholds, the page.  Never imports torch."""

from __future__ import annotations

from .file import Trace, TraceError, TraceWriter, read_trace

__all__ = ["Trace", "TraceError", "TraceWriter", "read_trace"]
