"""Compare replays of captured graphs with eager calls, while kernels are timed, in vLLM's workers and by `check`.

HIP 7.2.0 to 7.2.3 corrupts graphs on MI300X (ROCm/clr#279), of whichever kernels.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from vllm_rocm_ops.core import clock as clocks
from vllm_rocm_ops.core import stats
from vllm_rocm_ops.vllm.selection import watchdog

logger = logging.getLogger("vllm.vllm_rocm_ops")

ROWS_AT_A_TIME = 1024  # of two results, when compared


class Mismatch(Exception):
    """Signal that the plugin's result is wrong."""


class BrokenGraph(Exception):
    """Signal that a replayed graph of vLLM's kernel differs from its eager calls."""


def same(output: object) -> object:
    """Return a result as it is."""
    return output


class Replays:
    """Compare what a pair's graphs leave with what the same calls leave eagerly: results, and arguments that a call may write.

    The first and the last set of arguments are looked at.

    Args:
        calls: The plugin's function, and vLLM's if there is one.
        sets: Their arguments, in the order of the graphs.
        bound: The relative distance that is allowed for a kernel of vLLM's whose eager calls differ in bits.
        fresh: Copies the arguments of a call that may write them.
        shown: Returns what a comparison with the plugin's result reads of vLLM's, whose kernels may leave padding unwritten.
    """

    def __init__(
        self,
        calls: dict[str, Callable],
        sets: list[tuple],
        bound: float = 0.0,
        fresh: Callable = tuple,
        comparable: Callable = same,
    ):
        self._calls, self._sets, self._bound, self._fresh = calls, sets, bound, fresh
        self._shown = {"plugin": same, "baseline": comparable}
        self._eager: dict[str, list[Tensor]] = {}
        self._written: list[tuple[Tensor, Tensor]] = []  # arguments, and what they were

    def check(self, graphs: dict) -> None:
        """Raise `Mismatch` if a replay of the plugin's graph differs, `BrokenGraph` if one of vLLM's does."""
        raise_for(self.differing(graphs))

    def differing(self, graphs: dict) -> list[str]:
        """Replay each graph once, and return the names of those that left something else than eager calls."""
        if not self._eager:
            ends = self._sets[0], self._sets[-1]
            pairs = (pair for given in ends for pair in zip(given, self._fresh(given)))
            self._written = [
                (value, before) for value, before in pairs if isinstance(value, Tensor) and before is not value
            ]
            self._eager = {name: self._left(name) for name in self._calls}
            self._repeats = "baseline" in self._calls and same_bits(self._eager["baseline"], self._left("baseline"))
        names = []
        for name, graph in graphs.items():
            self._restore()
            with watchdog.around(name):
                graph.replay()
                clocks.finish()
            eager, replayed = self._eager[name], self._tensors(name, graph.outputs)
            if same_bits(eager, replayed):
                continue
            exactly = name == "plugin" or self._repeats
            if exactly or not all(distance(*pair) <= self._bound for pair in zip(replayed, eager, strict=True)):
                names.append(name)
        return names

    def _restore(self) -> None:
        for value, before in self._written:
            value.copy_(before)

    def _left(self, name: str) -> list[Tensor]:
        self._restore()
        with watchdog.around(name):
            outputs = clocks.run_all(self._calls[name], self._sets)
            clocks.finish()
        return [tensor.clone() for tensor in self._tensors(name, outputs)]

    def _tensors(self, name: str, outputs: tuple) -> list[Tensor]:
        comparable = map(self._shown[name], outputs)
        return [*flattened(tuple(comparable)), *(value for value, _ in self._written)]


def copies(given: tuple) -> tuple:
    """Return a call's arguments with copies of the tensors."""
    return tuple(value.clone() if isinstance(value, Tensor) else value for value in given)


def flattened(result: object) -> list[Tensor]:
    """Return the tensors of a result."""
    if isinstance(result, Tensor):
        return [result]
    return [tensor for part in result for tensor in flattened(part)] if isinstance(result, (tuple, list)) else []


def same_bits(some: list[Tensor], others: list[Tensor]) -> bool:
    """True if tensors have equal bits."""
    bits = ([tensor.reshape(-1).contiguous().view(torch.uint8) for tensor in each] for each in (some, others))
    return all(torch.equal(*pair) for pair in zip(*bits, strict=True))


def raise_for(differing: Iterable[str]) -> None:
    """Raise the error for a pair whose replays differ from eager calls."""
    if "plugin" in differing:
        raise Mismatch("a replayed graph differs from eager calls (ROCm/clr#279 is such a defect of HIP 7.2)")
    if differing:
        release = f"HIP {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
        raise BrokenGraph(f"a replayed graph of vLLM's kernel differs from its eager calls ({release})")


def warn_broken(what: str, error: BrokenGraph) -> None:
    """Warn, once per process, that graphs are broken here with and without the plugin."""
    if "graphs" not in stats.warned:
        stats.warned.add("graphs")
        text = (
            "vllm-rocm-ops: %s: %s, as ROCm/clr#279 describes of HIP 7.2.0 to 7.2.3. Answers may be wrong with and without the plugin. "
            "Try DEBUG_HIP_GRAPH_SEGMENT_SCHEDULING=0, another ROCm release, or --enforce-eager"
        )
        logger.warning(text, what, error)


def distance(plugin: Tensor, baseline: Tensor) -> float:
    """Return the relative distance of two whole results, a few rows at a time to save memory."""
    off = size = torch.zeros((), device=baseline.device)
    for plugin_rows, baseline_rows in zip(plugin.split(ROWS_AT_A_TIME), baseline.split(ROWS_AT_A_TIME)):
        off = off + (plugin_rows.float() - baseline_rows.float()).square().sum()
        size = size + baseline_rows.float().square().sum()
    return float(off.sqrt() / size.sqrt().clamp_min(1e-30))
