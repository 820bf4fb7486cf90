"""Run the schedules of the tables in notes.md.

`run FILE` runs what FILE lacks and appends the results; `page FILE` sums them up in schedules.csv and writes the
tables.
"""

from __future__ import annotations

import csv
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from one_shot import ARCHS, BUGS, RANKS, SCHEDULES, compile_one_shot, finds, run_schedule

from vllm_rocm_ops.emulator import errors

SUMS = Path(__file__).with_suffix(".csv")
PAGE = Path(__file__).with_name("notes.md")
PLANTED = {
    "store_scope": "scope bit: the store has `sc1` only",
    "load_scope": "scope bit: the load has `sc1` only",
    "wait": "wait: the value is used at once",
    "any_epoch": "epoch: any epoch but 0 passes",
    "swap": "buffer swap: one buffer",
    "torn": "torn word: two stores of 4 bytes",
    "skip_peer": "rank 0 does not wait for the last peer",
    "two_streams": "two streams per rank",
    "block_counter": "an epoch counter per block",
    "narrow_epoch": "epochs of 2 bits",
    "fresh_memory": "epochs that come round to 0 with fresh memory",
    "shared_slots": "sums of a rank's blocks in the slots of a rank",
    "residency": "residency: a grid larger than what is resident",
}
SEEDS_OF_BUGS = 16
SLICES = 100  # per cell without a bug, so that all cells progress together
FIELDS = ("planted", "arch", "ranks", "hidden", "first", "schedules", "expected", "ms")
"""The columns of a line, which has the schedules from seed `first` on.

`expected` counts those with right sums, or in which the planted bug was found; `ms` is processor time.
"""


def cells() -> dict[tuple, int]:
    """Return the number of schedules in each cell, by planted bug, architecture, ranks and hidden size."""
    found = {(bug, arch, ranks, 512): SEEDS_OF_BUGS for bug in BUGS for arch in ARCHS for ranks in RANKS}
    right = {("", arch, ranks, hidden): n for hidden, n in SCHEDULES.items() for arch in ARCHS for ranks in RANKS}
    return found | right


def read(path: Path) -> dict[tuple, list[dict]]:
    """Return the lines of a file by cell."""
    found: dict[tuple, list[dict]] = {}
    with path.open(newline="") as file:
        for line in csv.DictReader(file):
            key = line["planted"], line["arch"], int(line["ranks"]), int(line["hidden"])
            found.setdefault(key, []).append({name: float(line[name]) for name in FIELDS[4:]})
    return found


def run(path: Path) -> None:
    """Run the schedules that a file lacks, in slices, and append each slice."""
    if not path.exists():
        path.write_text(",".join(FIELDS) + "\n")
    done = {cell: int(sum(line["schedules"] for line in lines)) for cell, lines in read(path).items()}
    with tempfile.TemporaryDirectory() as folder:
        code = {arch: compile_one_shot(arch, Path(folder), "ALL_RANKS") for arch in ARCHS}
        for part in range(1, SLICES + 1):
            for cell, total in cells().items():
                first, end = done.get(cell, 0), total if cell[0] else total * part // SLICES
                if first < end:
                    seen, spent = _slice(cell, code[cell[1]], range(first, end))
                    with path.open("a", newline="") as file:
                        csv.writer(file).writerow((*cell, first, end - first, seen, round(1000 * spent)))
                    done[cell] = end


def _slice(cell: tuple, code: Path, seeds: range) -> tuple[int, float]:
    bug, arch, ranks, hidden = cell
    seen, start = 0, time.process_time()
    for seed in seeds:
        if bug:
            seen += finds(code, arch, ranks, bug, seed)
            continue
        try:
            run_schedule(code, arch, ranks, hidden, seed)
            seen += 1
        except (errors.EmulatorError, AssertionError) as error:
            print(f"{cell}, seed {seed}: {error}", file=sys.stderr, flush=True)
    return seen, time.process_time() - start


def summed(path: Path) -> Iterable[tuple]:
    """Yield one line for each cell of a file."""
    for cell, lines in read(path).items():
        sums = [int(sum(line[name] for line in lines)) for name in FIELDS[5:]]
        yield (*cell, 0, *sums)


def tables() -> dict[str, str]:
    """Return the page's tables by name."""
    seen = {cell: lines[0] for cell, lines in read(SUMS).items()}
    right, found = [], []
    for hidden in SCHEDULES:
        for ranks in RANKS:
            of_archs = [seen["", arch, ranks, hidden] for arch in ARCHS]
            counts = [f"{line['expected']:,.0f} of {line['schedules']:,.0f}" for line in of_archs]
            spent = statistics.mean(line["ms"] / line["schedules"] for line in of_archs)
            right.append((str(hidden), str(ranks), *counts, f"{SCHEDULES[hidden]:,}", f"{spent:.0f}"))
    for bug, (kinds, _) in BUGS.items():
        kinds = kinds if isinstance(kinds, tuple) else (kinds,)
        counts = ["/".join(f"{seen[bug, arch, ranks, 512]['expected']:.0f}" for ranks in RANKS) for arch in ARCHS]
        found.append((PLANTED[bug], ", ".join(kind.__name__ for kind in kinds), *counts))
    return {
        "schedules": _markdown(("hidden", "ranks", *ARCHS, "of", "ms per schedule"), right),
        "planted": _markdown(
            ("planted", "found as", *(f"{arch}, {'/'.join(map(str, RANKS))} ranks" for arch in ARCHS)), found
        ),
    }


def _markdown(header: tuple, rows: list[tuple]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, ("---",) * len(header), *rows))


def with_tables(text: str) -> str:
    """Return the page with the tables."""
    for name, table in tables().items():
        before, after = f"<!-- {name} -->", f"<!-- /{name} -->"
        head, _, rest = text.partition(before)
        text = f"{head}{before}\n\n{table}\n\n{after}{rest.partition(after)[2]}"
    return text


def write_page(path: Path) -> None:
    """Write the sums of a file to schedules.csv, and the page."""
    with SUMS.open("w", newline="") as file:
        csv.writer(file).writerows([FIELDS, *summed(path)])
    PAGE.write_text(with_tables(PAGE.read_text()))


if __name__ == "__main__":
    {"run": run, "page": write_page}[sys.argv[1]](Path(sys.argv[2]))
