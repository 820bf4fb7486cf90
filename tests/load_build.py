"""Loads csrc/build.py, which is in no package, as a module."""

import importlib.util
import sys
from pathlib import Path


def load_build(csrc: Path):
    """The module csrc/build.py of a tree."""
    spec = importlib.util.spec_from_file_location(f"build_{csrc.parent.name}", csrc / "build.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module there
    spec.loader.exec_module(module)
    return module
