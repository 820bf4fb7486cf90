"""Describe a launch among concurrent launches on several devices."""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass
class Place:
    """A launch among concurrent launches.

    after: the waves of the launch before it in its queue. epoch: the epoch of the words that it stores and awaits. waves: total over
    all launches. room: the device's free share, in a list. rng: chooses among waves; with `joins`, waves that meet still continue
    together.
    """

    device: int = 0
    queue: int = 0
    epoch: int = 0
    after: range = range(0)
    waves: int = 0
    room: list[float] | None = None
    rng: np.random.Generator | None = None
    joins: bool = True
