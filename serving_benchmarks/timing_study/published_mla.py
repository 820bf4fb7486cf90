"""MLA decode of ROCm/aiter with published times: arguments of `mla`'s persistent objects, and their schedule.

The kernel after them combines the splits. A row has requests as M, keys of each as N, and heads as K.
"""

from __future__ import annotations

import re
import struct
from typing import NamedTuple

from vllm_rocm_ops.emulator.objects import KernelObject

from .external_kernel import ObjectLaunch, Pointers
from .published import Call, Row, laid_out, numbers, zeros
from .published_gemm import WARM_BYTES

HEAD, VALUE = 576, 512  # values of a query's head, and of its result
STEP, FIXED = 16, 16  # keys per step of the schedule; fixed cost of a request, in steps
MAX_SPLITS = 32  # of a request
NAMES = """R LSE Q KV LTP LTD LTL scalar MQA splits Q_Bs Bs log2_page QTP STP RP QSCALE KVSCALE"""


class Work(NamedTuple):
    """A block's work on a request: keys from `start` to `end` of all.

    `part` is the index of its partial sum, -1 for the result.
    """

    request: int
    part: int
    start: int
    end: int


def divided(requests: int, keys: int, units: int) -> list[list[Work]]:
    """Return the work of each block, one per compute unit.

    Blocks get equal numbers of steps, in the order of requests and keys.
    """
    steps = -(-keys // STEP)
    parts = min(-(-units // requests), MAX_SPLITS)
    share = -(-requests * (steps + FIXED) // min(units, parts * requests)) + FIXED
    blocks: list[list[Work]] = []
    request = done = part = 0
    while request < requests:
        left, blocks = share, [*blocks, []]
        while request < requests and left > FIXED:
            first, last = request * keys, (request + 1) * keys
            start = first + done * STEP
            took = min(steps - done, left - FIXED)
            is_last = done + took == steps
            is_whole = is_last and not done
            end = last if is_last else start + took * STEP
            blocks[-1].append(Work(request, -1 if is_whole else part, start, end))
            left, done, part = left - took - FIXED, done + took, part + (not is_whole)
            if is_last:
                request, done = request + 1, 0
            else:
                break
    return blocks


def call(of: Row, kernel: KernelObject) -> Call:
    """Return the launch of a row.

    Raises ValueError for objects without a schedule as argument, or with other types.
    """
    name = of.code_object.rpartition("/")[2]
    if not re.match(r"mla_a8w8_qh128_.*_ps\.co", name) or of.k != "128":
        raise ValueError(f"{name} must be persistent, in FP8 and of 128 heads, which alone are known")
    requests, keys, heads = of.m, of.n, int(of.k)
    blocks = divided(requests, keys, of.units)
    works = [work for block in blocks for work in block]
    parts = 1 + max(work.part for work in works)
    inputs = {"Q": zeros(requests * heads * HEAD), "KV": zeros(requests * keys * HEAD)}
    values = {"R": zeros(4 * parts * heads * VALUE), "LSE": zeros(4 * max(1, parts) * heads), **inputs}
    values |= {"LTP": numbers(range(0, (requests + 1) * keys, keys)), "LTD": numbers(range(requests * keys))}
    values |= {"LTL": numbers([1] * requests), "scalar": HEAD**-0.5, "MQA": heads, "splits": 1, "Q_Bs": heads * HEAD}
    values |= {
        "Bs": HEAD,
        "log2_page": 0,
        "QTP": numbers(range(requests + 1)),
        "RP": zeros(2 * requests * heads * VALUE),
    }
    one = struct.unpack("<I", struct.pack("<f", 1.0))[0]
    values |= {"QSCALE": numbers([one]), "KVSCALE": numbers([one])}
    ends = [0]
    for block in blocks:
        ends.append(ends[-1] + len(block))
    table = [
        number
        for work in works
        for number in (work.request, work.part, work.request, work.request + 1, work.start, work.end,
                       (work.request + 1) * keys - work.end, 0)
    ]  # fmt: skip
    values["STP"] = Pointers(zeros(80), (numbers(ends), numbers(table)))
    grid = len(blocks), 1, 1
    total = sum(tensor.numel() for tensor in inputs.values())
    added = (4 * parts + 2 * requests * (parts > 0)) * heads * VALUE
    made = ObjectLaunch(kernel.name, grid, (256, 1, 1), laid_out(kernel, NAMES, values))
    return Call(made, grid, tuple(inputs.values()), total >= WARM_BYTES, (max(1, added),))
