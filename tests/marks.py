"""Marks of tests, and the selection that runs by default."""

import collections
import heapq
import os
from collections.abc import Callable, Hashable, Sequence

import pytest

from vllm_rocm_ops.core.archs import ARCHS

FULL = bool(os.environ.get("FULL_TESTS"))
"""True with --full: all tests run."""
full = pytest.mark.skipif(not FULL, reason="takes long: bash tests/run.sh --full")

AMD = tuple(name for name, arch in ARCHS.items() if arch.vendor == "amd")

BUILT = tuple(ARCHS) if FULL else AMD
"""Archs whose code objects are built: without a GPU, NVIDIA's with --full only."""

CHIPS = AMD if FULL else AMD[:1]
"""Archs to emulate, or whose code to read: the first by default, all with --full."""


def cover(reached: Sequence[frozenset[Hashable]], costs: Sequence[float]) -> set[int]:
    """Return the indices of few cheap entries that together reach all that any entry reaches.

    Greedy: the entry that reaches most per cost first, the earlier among equals. Then, dearest first, entries that the
    others make redundant are dropped.
    """
    left, chosen = set().union(*reached), set()
    queue = [(-len(features) / costs[place], place) for place, features in enumerate(reached)]
    heapq.heapify(queue)
    while left:
        _, place = heapq.heappop(queue)
        worth = (-len(reached[place] & left) / costs[place], place)  # an upper bound: no more than when last computed
        if queue and worth > queue[0]:
            heapq.heappush(queue, worth)
        else:
            left -= reached[place]
            chosen.add(place)
    times = collections.Counter(feature for place in chosen for feature in reached[place])
    for place in sorted(chosen, key=lambda place: (-costs[place], place)):
        if all(times[feature] > 1 for feature in reached[place]):
            times.subtract(reached[place])
            chosen.remove(place)
    return chosen


def few_of(values, reached: Callable = lambda value: frozenset({"one"}), cost: Callable = lambda value: 1.0) -> list:
    """Return of a long list by default few values that reach what all reach, with --full all."""
    values = list(values)
    chosen = (
        range(len(values)) if FULL else cover([reached(value) for value in values], [cost(value) for value in values])
    )
    return [values[place] for place in sorted(chosen)]
