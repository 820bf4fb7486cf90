"""Find published times that contradict their table: copies of another row's time, and impossible arithmetic rates.

Both follow from the rows alone, without a prediction, for all classes.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

from vllm_rocm_ops.timing import machines

from .validation import machine_of

Row = dict[str, str]
COPY = "several numbers of tokens have one time"
IMPOSSIBLE = "more arithmetic than the matrix units do"
DIGITS = 5  # from this many digits on, equal times are copies
PEAK = {machines.MI300X.arch.name: (4096, 2.1), machines.MI355X.arch.name: (8192, 2.4)}
"""8-bit operations per compute unit and cycle, and maximum GHz: CDNA3 and CDNA4 white papers, AMD Instinct data sheets.
"""


def _digits(us: str) -> int:
    """Return the number of published digits of a time, without trailing zeros."""
    return len(us.replace(".", "").strip("0") if "." in us else us.strip("0"))


def operations(row: Row) -> int:
    """Return the multiplications and additions of a GEMM or of fused experts; 0 for other ops."""
    topk, sizes = re.search(r"\btopk=(\d+)", row["extra"]), (row["M"], row["N"], row["K"])
    if not all(size.isdigit() for size in sizes) or row["op"].startswith(("attn", "attention", "mla")):
        return 0
    m, n, k = map(int, sizes)
    if row["op"].startswith("fused_moe"):
        return 2 * m * n * k * int(topk[1]) * (3 if row["op"].endswith("1+2") else 2) if topk else 0
    return 2 * m * n * k * int(row["batch_or_experts"] or 1)


def _is_impossible(row: Row) -> bool:
    if not (count := operations(row)):
        return False
    arch = machine_of(row["gpu"]).arch
    per_cycle, clock = PEAK[arch.name]
    return count > arch.compute_units * per_cycle * clock * 1e3 * float(row["us"])


def reasons(rows: Iterable[Row]) -> dict[int, str]:
    """Return why rows are left out, by their `id`.

    Of rows with equal times none is kept, as none says which of them was measured.
    """
    of_time: dict[tuple, list[Row]] = defaultdict(list)
    found = {}
    for row in rows:
        if _digits(row["us"]) >= DIGITS:
            sizes = (row[name] for name in ("gpu", "op", "N", "K", "batch_or_experts"))
            of_time[(*sizes, float(row["us"]))].append(row)
        if _is_impossible(row):
            found[id(row)] = IMPOSSIBLE
    for same in of_time.values():
        if len({row["M"] for row in same}) > 1:
            found |= {id(row): COPY for row in same}
    return found
