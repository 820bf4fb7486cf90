"""Say which calls the all-reduce's kernels support on a GPU, and which way each is predicted to be fastest, for `doctor`."""

from __future__ import annotations

import itertools

import torch

from vllm_rocm_ops import ops
from vllm_rocm_ops.collectives import flagged, launches, one_shot, wire
from vllm_rocm_ops.core.arch import Arch

RANKS, HIDDENS = (2, 4, 8), (4096, 7168, 16384)  # of the table
WAYS = {0: "one shot", 1: "one stage", 2: "two stages"}


def summary(sent: str) -> str:
    """Return the limits that hold for all sizes, and what is sent."""
    ranks, hidden = launches.RANKS, launches.LARGEST_HIDDEN
    one_shot_kib, stages_mib = launches.CAPACITY * launches.VALUES_IN_WORD * 2 >> 10, flagged.MAX_VALUES * 2 >> 20
    fp8 = f", FP8 above {one_shot_kib} KiB" if sent == wire.FP8 else ""
    return (
        f"{ranks[0]} to {ranks[-1]} GPUs of one machine, hidden sizes up to {hidden}, bf16 up to {stages_mib} MiB, fp16 up to "
        f"{one_shot_kib} KiB; sends 16 bits a value{fp8}"
    )


def ways(arch: Arch, sent: str) -> list[dict]:
    """Return, by ranks and hidden size, the rows of each way with a norm, first and last, and the first rows that send FP8."""
    found = []
    for ranks, hidden in itertools.product(RANKS, HIDDENS):
        group = launches.Group(0, (0,) * ranks, 0, 0, arch.compute_units, 1, payload=flagged.PAYLOAD, wire=sent)
        spans: dict[str, list[int]] = {}
        fp8_from = 0
        for rows in range(1, flagged.MAX_VALUES // hidden + 1):
            x = torch.empty(rows, hidden, dtype=torch.bfloat16, device="meta")
            a = ops.rms_norm.Arguments(x, None, 1e-6, False)
            planner, _ = one_shot.protocol(None, a, arch, group)
            config = planner.default(a, arch, group)
            way = WAYS[getattr(config, "stages", 0)]
            spans[way] = [spans.get(way, [rows])[0], rows]
            fp8_from = fp8_from or rows * (config.wire == wire.FP8)
        found.append({"ranks": ranks, "hidden": hidden, "rows": spans, "fp8_from": fp8_from})
    return found


def table(found: list[dict]) -> list[tuple[str, ...]]:
    """Return what `ways` found as rows of text."""
    rows = [("GPUs", "hidden", *(f"rows in {way}" for way in WAYS.values()), "FP8 from", "vLLM's from")]
    for each in found:
        spans = [f"{span[0]} to {span[1]}" if (span := each["rows"].get(way)) else "" for way in WAYS.values()]
        last = max(last for _, last in each["rows"].values())
        rows.append((str(each["ranks"]), str(each["hidden"]), *spans, str(each["fp8_from"] or ""), str(last + 1)))
    return rows
