"""Use the shipped tuned tables only, give vLLM's CPU platform the seams, and start the longest files first."""

import functools
import gc
import importlib.abc
import os
import re
import sys
import threading
from collections import Counter
from pathlib import Path

import pace
import pytest
from marks import FULL

os.environ["VLLM_ROCM_OPS_TABLES"] = os.devnull
os.environ["VLLM_ROCM_OPS_ON_CPU"] = "1"
# One thread per process, as more would wait for each other on busy cores, and OpenMP's of a server would hang in its forks.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
gc.set_threshold(200_000)  # collections took up to 44 % of the time of files that make many objects


class OneLibrary(importlib.abc.MetaPathFinder):
    """Fail an import of a second build of vLLM's library, which would abort the process: both register the same ops.

    ROCm's platform names a build that need not be the CPU's, so it must find a stand-in, also where both are the same.
    """

    loaded = None

    def find_spec(self, name, path=None, target=None):
        if re.fullmatch(r"vllm\._C(_AVX\w+)?", name):
            if self.loaded not in (None, name):
                raise RuntimeError(f"{os.environ.get('PYTEST_CURRENT_TEST')} imports {name} beside {self.loaded}")
            self.loaded = name
        if name == "vllm.platforms.rocm" and not on_rocm() and not stood_in("vllm._C"):
            raise RuntimeError("import ROCm's platform by simulated.rocm_platform()")


def on_rocm() -> bool:
    import torch

    return bool(torch.version.hip)


def stood_in(name: str) -> bool:
    return name in sys.modules and sys.modules[name].__spec__ is None


sys.meta_path.insert(0, OneLibrary())

ASKING = (
    *("test_model_layers", "test_repo", "test_cli", "test_meta_model", "test_predict", "test_measurements"),
    "test_tune",
)
"""Files that ask vLLM for models' launches. One worker runs them, as each starts processes for the answers, in 10 s."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option of pace.py."""
    parser.addoption("--spare-seconds", type=float, help="judge files by tests/pace.py, with these seconds to spare")


def pytest_configure(config: pytest.Config) -> None:
    """Judge the pace, and end a run whose workers hang outside of tests: --session-timeout acts at the end of a test only."""
    pace.register(config)
    seconds = config.getoption("session_timeout", None)
    if seconds and not hasattr(config, "workerinput"):
        stderr = os.dup(2)

        def end():
            os.write(stderr, b"\nThe run takes longer than its limit: it is ended\n")
            os._exit(1)

        timer = threading.Timer(seconds + float(config.getoption("timeout") or config.getini("timeout")), end)
        timer.daemon = True
        timer.start()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the slowest first, so that no worker is left with one at the end: `ASKING`, files with slow tests, others as recorded."""
    slow = Counter(item.path.stem for item in items if item.get_closest_marker("slow"))
    recorded = [Path(file).stem for file, _ in pace.recorded().most_common()]
    files = dict.fromkeys((*ASKING, *dict(slow.most_common()), *recorded))
    place = {stem: place for place, stem in enumerate(files)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    """Give a file to one worker, all ASKING files to the same one, and all that fork engines to another (vllm/processes.py).

    With --full these are too many for one worker.
    """
    from xdist.scheduler import LoadFileScheduling

    @functools.cache
    def scope_of(file: str) -> str:
        path = config.rootpath / file
        if path.stem in ASKING:
            return "asking"
        text = path.read_text() if path.is_file() else ""
        return "engines" if not FULL and re.search(r"\b(engines[.,)]|processes\.run)", text) else file

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(super()._split_scope(nodeid))

    return Scheduling(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_finish() -> None:
    """Keep what is there before tests out of garbage collections."""
    gc.freeze()
    assert gc.get_freeze_count(), "a test module that was imported has replaced gc.freeze"


def pytest_unconfigure() -> None:
    """Let the interpreter's end release all, or nanobind lists leaks."""
    gc.unfreeze()


def state() -> dict[str, str]:
    """Return the state that tests of one process share.

    It consists of the package's variables that are set, variables that hide one, and seams that are off though this
    platform has them.
    """
    found = {name: value for name, value in os.environ.items() if name.startswith("VLLM_ROCM_OPS_")}
    envs, seam = map(sys.modules.get, ("vllm_rocm_ops.core.envs", "vllm_rocm_ops.vllm.seam"))
    hidden = vars(envs) if envs else {}
    found |= {name: f"{value!r} in envs" for name, value in hidden.items() if name.startswith("VLLM_ROCM_OPS_")}
    off = [one for one in seam.status() if not one.on and not one.reason.startswith("for ")] if seam else []
    return found | {f"seam {one.name}": one.reason for one in off}


@pytest.fixture(autouse=True)
def process_is_left_as_it_was():
    """Clear the warnings that are given once per process, and fail a test that leaves another state to later tests."""
    stats = sys.modules.get("vllm_rocm_ops.core.stats")
    if stats:
        stats.warned.clear()
    before = state()
    yield
    assert state() == before
