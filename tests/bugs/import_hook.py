"""Import a module of the package with a mistake in it."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from pathlib import Path

from .bug import Bug
from .kernel_copy import replaced


def plant(bug: Bug) -> None:
    """Make this process, which has not imported the module, import it with the mistake."""
    replaced(bug.path.read_text(), bug.file, bug.old, bug.new)
    module = ".".join(("vllm_rocm_ops", *Path(bug.file).with_suffix("").parts))
    if module in sys.modules:
        raise RuntimeError(f"{module} is imported already")
    sys.meta_path.insert(0, _Finder(bug, module))


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, bug: Bug, module: str):
        self.bug, self.module = bug, module

    def find_spec(self, name, path, target=None):
        if name != self.module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        spec.loader = _Loader(self.bug, name, spec.origin)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, bug: Bug, name: str, path: str):
        super().__init__(name, path)
        self.bug = bug

    def get_code(self, fullname):
        source = replaced(Path(self.path).read_text(), *self.bug.text)
        return compile(source, self.path, "exec", dont_inherit=True)
