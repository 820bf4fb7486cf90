"""csrc/build.py, which is no part of a package, as a module."""

import importlib.util
import sys
from pathlib import Path


def load_build(csrc: Path):
    """csrc/build.py of that tree as a module of its own."""
    spec = importlib.util.spec_from_file_location(f"build_{csrc.parent.name}", csrc / "build.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module
