"""Which files a report may replace: pages and figures that hf_gnmr wrote, of any version, and no others."""

from __future__ import annotations

import os
from pathlib import Path

from ..config import ConfigError
from ..files import FileError, replaceable, writable

TITLE = "<title>GNMR report: "
"""By it and by its first tag a page is recognised; pages of all versions have both near their beginning."""


def check_paths(output: str, folder: Path | None) -> None:
    """Refuse places for the page or the figures, before anything is computed.

    Raises:
        ConfigError: naming option and place.
    """
    try:
        writable(output)
        replaceable(output, _is_page, "a page of hf-gnmr report")
    except FileError as error:
        raise ConfigError(f"--output {error}") from error
    if folder is not None and os.path.lexists(folder) and not folder.is_dir():
        raise ConfigError(f"--figures {folder}: not a folder")


def check_figure(file: Path) -> None:
    """Refuse to replace a file that is no figure.

    Raises:
        ConfigError: naming option and file.
    """
    try:
        replaceable(file, _is_figure, "a figure of hf-gnmr report")
    except FileError as error:
        raise ConfigError(f"--figures: {error}") from error


def _is_page(beginning: bytes) -> bool:
    return beginning.startswith(b"<!doctype html>") and TITLE.encode() in beginning


def _is_figure(beginning: bytes) -> bool:
    """Whether matplotlib wrote the PNG or SVG file that begins so."""
    return beginning.startswith((b"\x89PNG", b"<?xml")) and b"atplotlib" in beginning
