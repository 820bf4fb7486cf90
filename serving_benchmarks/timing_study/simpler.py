"""Compare models without a machine with published points: bytes over bandwidth, regression, median of the class.

The timing model must have smaller errors. They are fitted to half of the shapes of each kernel, by a hash of the shape,
and judged on the other half: `report.BASELINES`.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

from . import published, report
from .report import HALVES, Case
from .validation import machine_of

Row = dict[str, str]
QUERIES = 256  # query rows of a block of prefill attention
LATENT, VALUES = 576, 512  # numbers of an MLA key and of its value


def moved(row: Row) -> float | None:
    """Return the minimum bytes that a call reads and writes, or None for unknown ops.

    Experts are those hit by random tokens.
    """
    m, n, of = int(row["M"]), int(row["N"]), row["op"]
    groups, extra = int(row["batch_or_experts"] or 1), _numbers(row)
    if _is_product(of):
        size, out = 2 if of == "bf16" else 1, 4 if "out=float32" in row["extra"] else 2
        return (m + n) * int(row["K"]) * size + m * n * out
    if of.startswith("attn_fwd"):
        head = sum(map(int, (row["K"].split("/") * 2)[:2]))
        return 2 * groups * head * (m * extra["q_heads"] + n * extra["kv_heads"])
    if of.startswith("fused_moe"):
        experts, k = groups * (1 - (1 - extra["topk"] / groups) ** m), int(row["K"])
        whole = of.endswith("1+2")
        return experts * (3 if whole else 2) * n * k + m * k + 2 * m * (k if whole else extra["topk"] * n)
    if of == "mla_decode":
        return m * n * LATENT + m * int(row["K"]) * (LATENT + 2 * VALUES)
    return None


def _numbers(row: Row) -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)(?!\S)", row["extra"])}


def _is_product(op: str) -> bool:
    return op == "bf16" or op.startswith(("a8w8", "fp8"))


def _rounds(row: Row) -> int | None:
    """Return the rounds of blocks, or None if their tiles are unknown."""
    of, extra = published.row(row), _numbers(row)
    if _is_product(of.op):
        rows, columns = of.tile
        blocks = -(-of.m // rows) * -(-of.n // columns) * extra.get("splitK", 1)
    elif of.op.startswith("attn_fwd"):
        blocks = -(-of.m // QUERIES) * extra["q_heads"] * of.batch_or_experts
    else:
        return None
    return -(-blocks // of.units)


def _shape(row: Row) -> str:
    names = ("N", "K") if _is_product(row["op"]) else ("M", "N", "K", "batch_or_experts", "extra")
    return "|".join(row[name] for name in names)


def _kernel(row: Row) -> str:
    return f"{row['gpu']} {row['code_object']}"


def _half_of_each_kernel(rows: Iterable[Row]) -> set[tuple[str, str, str]]:
    """Return the fitted shapes, of each kernel in each set the half with the smaller hashes."""
    shapes: dict[tuple[str, str], set[str]] = defaultdict(set)
    for row in rows:
        shapes[_kernel(row), row["set"]].add(_shape(row))
    found = set()
    for kernel, of in shapes.items():
        by_hash = sorted(of, key=lambda shape: hashlib.sha256("|".join((*kernel, shape)).encode()).hexdigest())
        found |= {(*kernel, shape) for shape in by_hash[: (len(of) + 1) // 2]}
    return found


def cases(rows: Iterable[Row]) -> list[Case]:
    """Return the rows whose bytes are known.

    In attention, the steps along K are those along the keys.
    """
    known = [row for row in rows if moved(row) is not None]
    fitted, found = _half_of_each_kernel(known), []
    for row in known:
        rounds, kernel = _rounds(row), _kernel(row)
        half = HALVES[(kernel, row["set"], _shape(row)) not in fitted]
        sizes = int(row["M"]), int(row["N"]), int(row["K"] if _is_product(row["op"]) else row["N"])
        kind = "|".join((row["op"], row["gpu"], row["set"]))
        found.append(Case(kind, kernel, *sizes, half, float(row["us"]), 0.0, moved(row) / 1e6, rounds or 0))
    return found


def errors(rows: Sequence[Row]) -> list[dict]:
    """Return the median relative error of each simpler model, by class, on shapes that were not fitted.

    A regression needs kernels with known tiles.
    """
    by_gpu: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_gpu[row["gpu"]].append(row)
    found = {}
    for gpu, of in by_gpu.items():
        mine = cases(of)
        made = report.baselines(mine, machine_of(gpu)["hbm_bandwidth"]) if mine else {}
        tiled = {case.kind for case in mine if case.blocks}
        for name, classes in made.items():
            for kind, halves in classes.items():
                if HALVES[1] in halves:
                    op, _, of_set = kind.split("|")
                    entry = found.setdefault((op, gpu, of_set), {"op": op, "gpu": gpu, "set": of_set})
                    entry["points"] = halves[HALVES[1]]["points"]
                    is_known = kind in tiled or name != "regression per kernel"
                    entry[name] = halves[HALVES[1]]["median"] if is_known else None
    return [found[key] for key in sorted(found)]
