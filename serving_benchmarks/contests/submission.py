"""Load a contest submission: a file with custom_kernel(data)."""

from __future__ import annotations

import importlib.util
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
    spec = importlib.util.spec_from_file_location("submission", path)
    if spec is None:
        raise ValueError(f"--submission: {path} must be a Python file")
    module = importlib.util.module_from_spec(spec)
    task = types.ModuleType("task")
    task.input_t = task.output_t = Any
    before = {name: sys.modules.get(name) for name in ("task", "submission")}
    sys.modules |= {"task": task, "submission": module}
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"--submission: {path} does not load: {type(error).__name__}: {error}") from error
    finally:
        for name, module_before in before.items():
            if module_before is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module_before
    found = getattr(module, "custom_kernel", None)
    if found is None:
        raise ValueError(f"--submission: {path} must have a function custom_kernel(data)")
    return found
