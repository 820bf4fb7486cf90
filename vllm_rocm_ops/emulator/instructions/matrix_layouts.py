"""Define the layouts of a matrix instruction's operands.

Sources: CDNA4 ISA, section 7.1.4 (general formulas), 7.1.5.1 (8 bit and smaller) and 7.5.1 (sparse). gfx942 follows the same formulas: the
tests compare every lane with the output of AMD's matrix instruction calculator.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..waves import LANES


@dataclass(frozen=True, eq=False)
class Layout:
    """Map an operand's coordinates x to `lane[x]` and `item[x]`.

    A is indexed [block, i, k], B [block, j, k], C and D [block, i, j]. Item n of a lane is bits [n * bits, (n + 1) * bits) of the
    operand's registers.
    """

    lane: np.ndarray
    item: np.ndarray
    bits: int

    @property
    def items(self) -> int:
        """Return the elements per lane."""
        return self.lane.size // LANES

    @property
    def dwords(self) -> int:
        """Return the registers of the operand."""
        return self.items * self.bits // 32

    @cached_property
    def gather(self) -> np.ndarray:
        """Return the positions of the elements in a flat [lane, item] array."""
        return self.lane * self.items + self.item

    @cached_property
    def scatter(self) -> np.ndarray:
        """Return the inverse: for every lane and item, the position of its element in the flat operand."""
        inverse = np.empty(self.lane.size, dtype=np.int64)
        inverse[self.gather.ravel()] = np.arange(self.lane.size)
        return inverse

    def through(self, lanes: np.ndarray) -> Layout:
        """Return the layout if lane l reads the registers of lane `lanes[l]` instead of its own."""
        return Layout(lanes[self.lane], self.item, self.bits)


def input_layout(rows: int, blocks: int, k: int, bits: int) -> Layout:
    """Return the layout of A (rows = M) or B (rows = N): CDNA4 ISA, 7.1.4.1.

    A lane holds consecutive k. An operand of eight registers is two halves of four, each with its own half of k (7.1.5.1 for
    f8f6f4, 7.5.1.3 for the B of the larger sparse instructions).
    """
    groups = LANES // (rows * blocks)
    run = k // groups
    if run * bits == 8 * 32:
        run //= 2
    block, row, k = np.ogrid[:blocks, :rows, :k]
    lane = row + rows * (block + blocks * (k // run % groups))
    item = k % run + run * (k // (run * groups))
    return Layout(*np.broadcast_arrays(lane, item), bits)


def output_layout(m: int, n: int, blocks: int, bits: int) -> Layout:
    """Return the layout of C and D: CDNA4 ISA, 7.1.4.2.

    If one item of all lanes holds several rows of several blocks (v_mfma_f64_4x4x4_4b_f64 only), the ISA keeps a block's rows
    adjacent, and AMD's calculator a row's blocks. This follows the calculator, whose order the inputs have, too.
    """
    height = 1 if bits == 64 else 4
    blocks_per_item = -(-LANES * height // (n * m))
    rows_per_item = LANES // blocks_per_item // n
    row_groups = m // (height * rows_per_item)
    block, i, j = np.ogrid[:blocks, :m, :n]
    lane = j + n * (block % blocks_per_item + blocks_per_item * (i // height % rows_per_item))
    item = i % height + height * (i // (height * rows_per_item) + row_groups * (block // blocks_per_item))
    return Layout(*np.broadcast_arrays(lane, item), bits)


def lane_groups(blgp: int) -> np.ndarray:
    """Return the lane whose B register each lane's place takes: CDNA4 ISA, table 29."""
    lane = np.arange(LANES)
    if blgp == 3:
        return (lane + 16) % LANES
    return lane % 32 + 32 * (blgp - 1) if blgp < 3 else lane % 16 + 16 * (blgp - 4)
