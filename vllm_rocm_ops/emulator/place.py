"""The place of a launch among the launches that run at the same time on several devices."""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass
class Place:
    """The place of a launch among the launches that run at the same time. after: the waves of the launch that it comes after. epoch: the epoch of
    the words which it stores and awaits. waves: of all launches. room: the share of the device that is free, in a list. rng: chooses
    among waves; with `joins`, waves that meet go on together all the same."""

    device: int = 0
    queue: int = 0
    epoch: int = 0
    after: range = range(0)
    waves: int = 0
    room: list[float] | None = None
    rng: np.random.Generator | None = None
    joins: bool = True
