"""Load a contest submission: a file with custom_kernel(data)."""

from __future__ import annotations

import runpy
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any


def load(path: Path) -> Callable[[object], object]:
    """Return the custom_kernel of a file, which may import `input_t` and `output_t` from `task`, as in the contests.

    Raises ValueError, which names the file.
    """
    if not path.is_file():
        raise ValueError(f"--submission: no file {path}")
    task, before = types.ModuleType("task"), sys.modules.get("task")
    task.input_t = task.output_t = Any
    sys.modules["task"] = task
    try:
        names = runpy.run_path(str(path), run_name="submission")
    except Exception as error:
        raise ValueError(f"--submission: {path} does not load: {type(error).__name__}: {error}") from error
    finally:
        del sys.modules["task"]
        sys.modules |= {"task": before} if before else {}
    if "custom_kernel" not in names:
        raise ValueError(f"--submission: {path} must have a function custom_kernel(data)")
    return names["custom_kernel"]
