"""An error of spcheck itself: one sentence for the user, and a file for the bug report."""

from __future__ import annotations

import contextlib
import os
import platform
import shlex
import sys
import tempfile
import time
import traceback
from importlib import metadata
from pathlib import Path

from spcheck import __version__
from spcheck.errors import HostFailed

_PACKAGES = ("torch", "numpy", "click", "rich", "safetensors")


def internal_error(error: Exception) -> str:
    """Writes the report file; the sentence that names it, or the error alone where no file can be written."""
    what = _one_line(error)
    path = _write(report_text(error))
    if path is None:
        return f"internal error: {what} (no folder takes a report file)"
    return f"internal error: {what}; please open an issue and attach {path}: it says what ran and where it broke"


def report_text(error: Exception) -> str:
    """Versions, platform, command line and traceback; nothing of the environment's variables."""
    lines = [f"spcheck {__version__}, internal error", f"command   {shlex.join(sys.argv)}"]
    lines += [f"python    {platform.python_version()}", f"platform  {platform.platform()}"]
    lines += [f"{name:<9} {_version(name)}" for name in _PACKAGES]
    lines += ["", "".join(traceback.format_exception(error)).rstrip()]
    if isinstance(error, HostFailed) and error.details:
        lines += ["", "The host process said:", error.details.rstrip()]
    return "\n".join(lines) + "\n"


def _one_line(error: Exception) -> str:
    text = str(error) if isinstance(error, HostFailed) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not found"


def _write(text: str) -> Path | None:
    """A new file in the current folder, else in the temporary one, else nowhere."""
    name = f"spcheck-error-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
    for folder in (os.getcwd, tempfile.gettempdir):
        with contextlib.suppress(OSError):
            path = Path(folder()) / name
            with path.open("x", encoding="utf-8", errors="replace") as file:
                file.write(text)
            return path
    return None
