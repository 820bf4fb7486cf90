"""Print for `doctor` which calls the all-reduce's kernels support, and which protocol is predicted to be fastest."""

from __future__ import annotations

import itertools

import torch

from vllm_rocm_ops import ops
from vllm_rocm_ops.collectives import all_reduce, flagged, launches, wire
from vllm_rocm_ops.core.arch import Arch

RANKS, HIDDENS = (2, 4, 8), (4096, 7168, 16384)  # of the table
PROTOCOLS = {0: "one shot", 1: "one stage", 2: "two stages"}  # by stages


def summary(wires: tuple[str, ...]) -> str:
    """Return the limits of all protocols, and the wire formats."""
    ranks, hidden = launches.RANKS, launches.LARGEST_HIDDEN
    one_shot_kib, stages_mib = launches.CAPACITY * launches.VALUES_IN_WORD * 2 >> 10, flagged.MAX_VALUES * 2 >> 20
    fp8 = f", FP8 above {one_shot_kib} KiB where faster" if wire.FP8 in wires else ""
    return (
        f"{ranks[0]} to {ranks[-1]} GPUs of one machine, hidden sizes up to {hidden}, bf16 up to {stages_mib} MiB, fp16 up to "
        f"{one_shot_kib} KiB; sends 16 bits a value{fp8}"
    )


def spans(arch: Arch, wires: tuple[str, ...]) -> list[dict]:
    """Return, by ranks and hidden size, each protocol's [first, last] number of rows with a norm, and the first with FP8."""
    result = []
    for ranks, hidden in itertools.product(RANKS, HIDDENS):
        group = launches.Group(0, (0,) * ranks, 0, 0, arch.compute_units, 1, payload=flagged.PAYLOAD, wires=wires)
        by_protocol: dict[str, list[int]] = {}
        fp8_from = 0
        for rows in range(1, flagged.MAX_VALUES // hidden + 1):
            x = torch.empty(rows, hidden, dtype=torch.bfloat16, device="meta")
            a = ops.rms_norm.Arguments(x, None, 1e-6, False)
            planner, _ = all_reduce.choose_protocol(None, a, arch, group)
            config = planner.default(a, arch, group)
            protocol = PROTOCOLS[getattr(config, "stages", 0)]
            by_protocol[protocol] = [by_protocol.get(protocol, [rows])[0], rows]
            fp8_from = fp8_from or rows * (config.wire == wire.FP8)
        result.append({"ranks": ranks, "hidden": hidden, "rows": by_protocol, "fp8_from": fp8_from})
    return result


def table(found: list[dict]) -> list[tuple[str, ...]]:
    """Return the result of `spans` as rows of text."""
    rows = [("GPUs", "hidden", *(f"rows in {each}" for each in PROTOCOLS.values()), "FP8 from", "vLLM's from")]
    for each in found:
        cells = [f"{span[0]} to {span[1]}" if (span := each["rows"].get(name)) else "" for name in PROTOCOLS.values()]
        last = max(last for _, last in each["rows"].values())
        rows.append((str(each["ranks"]), str(each["hidden"]), *cells, str(each["fp8_from"] or ""), str(last + 1)))
    return rows
