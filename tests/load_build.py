"""Load csrc/build.py, which is in no package, as a module."""

import importlib.util
import sys
from pathlib import Path

ARCHS = "vllm_rocm_ops/core/archs"


def load_build(csrc: Path):
    """Return the module csrc/build.py of a tree.

    A copy without the package gets this tree's archs.
    """
    archs = csrc.parent / ARCHS
    if not archs.exists():
        archs.parent.mkdir(parents=True, exist_ok=True)
        archs.symlink_to(Path(__file__).resolve().parents[1] / ARCHS)
    spec = importlib.util.spec_from_file_location(f"build_{csrc.parent.name}", csrc / "build.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module there
    sys.path.insert(0, str(csrc))  # for debug_info.py
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(csrc))
    return module
