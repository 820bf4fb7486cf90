"""Import a module of the package, or of the study of its timing, with a mistake in it. This module imports nothing of the package."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "vllm_rocm_ops"
STUDY = ROOT / "serving_benchmarks" / "timing_study"


def module_of(file: str) -> str:
    path = path_of(file)
    root = STUDY if path.is_relative_to(STUDY) else PACKAGE
    return ".".join(path.relative_to(root.parent).with_suffix("").parts)


def path_of(file: str) -> Path:
    """Return the path of a file of the package, or of the study, which names its folder."""
    return (STUDY.parent if file.startswith(f"{STUDY.name}/") else PACKAGE) / file


def plant(file: str, source: str) -> None:
    """Make this process, which has not imported the module, import it with another source."""
    if module_of(file) in sys.modules:
        raise RuntimeError(f"{module_of(file)} is imported already")
    sys.meta_path.insert(0, _Finder(module_of(file), source))


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, module: str, source: str):
        self.module, self.source = module, source

    def find_spec(self, name, path, target=None):
        if name != self.module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        spec.loader = _Loader(self.source, name, spec.origin)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, source: str, name: str, path: str):
        super().__init__(name, path)
        self.source = source

    def get_code(self, fullname):
        return compile(self.source, self.path, "exec", dont_inherit=True)
