"""Marks of tests, and the choice of those that run by default."""

import collections
import heapq
import os
from collections.abc import Callable, Hashable, Sequence

import pytest

from vllm_rocm_ops.core.arch import ARCHS

FULL = bool(os.environ.get("FULL_TESTS"))
"""With --full."""
full = pytest.mark.skipif(not FULL, reason="takes long: bash tests/run.sh --full")

AMD = tuple(name for name, arch in ARCHS.items() if arch.vendor == "amd")

BUILT = (*AMD, *(pytest.param(name, marks=full) for name in ARCHS if name not in AMD))
"""Whose code objects are there: without a GPU NVIDIA's are built with --full only."""

CHIPS = (AMD[0], *(pytest.param(name, marks=full) for name in AMD[1:]))
"""Emulated, or read: the first by default, all with --full."""


def cover(reached: Sequence[frozenset[Hashable]], costs: Sequence[float]) -> set[int]:
    """Return the places of few cheap entries that together reach all that any entry reaches: greedily, the most per cost first,
    of equals the first; then without those, the dearest first, that the others make needless."""
    left, chosen = set().union(*reached), set()
    queue = [(-len(features) / costs[place], place) for place, features in enumerate(reached)]
    heapq.heapify(queue)
    while left:
        _, place = heapq.heappop(queue)
        worth = (-len(reached[place] & left) / costs[place], place)  # no more than when it was last looked at
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
    """A parameter for each value of a long list: few that reach what all reach run by default, all with --full."""
    values = list(values)
    chosen = cover([reached(value) for value in values], [cost(value) for value in values])
    return [value if place in chosen else pytest.param(value, marks=full) for place, value in enumerate(values)]
