"""Compare predictions with all published times whose code objects exist, by class, and by rank on one shape.

    python -m serving_benchmarks.timing_study.residuals points MEASUREMENTS --git DIR > points.csv
    python -m serving_benchmarks.timing_study.validation points.csv --git DIR --jobs 2 --cache FOLDER > predicted.csv
    python -m serving_benchmarks.timing_study.residuals judge predicted.csv

MEASUREMENTS has validation_points_gfx942.csv, aiter_gemm_gfx950_256cu.csv and peer_measurements.csv; DIR is a bare git
directory of ROCm/aiter. `points` lists their rows with a code object, `judge` writes published.json in this folder;
with `--keep` it keeps the entries of classes and pairs without a row in predicted.csv. Nothing of the model is fitted.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import math
import re
import statistics
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from vllm_rocm_ops.timing import machines

from . import left_out
from .report import APART

REPORT = Path(__file__).with_name("published.json")
POINTS, GEMMS, PEERS = "validation_points_gfx942.csv", "aiter_gemm_gfx950_256cu.csv", "peer_measurements.csv"
HEADER = (
    "set", "csv", "gpu", "cu_num", "op", "code_object", "blob_at_measurement", "blob_latest", "commit", "M", "N", "K",
    "batch_or_experts", "extra", "us",
)  # fmt: skip
LATENT = f"hsa/{machines.MI300X.arch.name}/mla/mla_a8w8_qh128_m32x4_n16x2_msk0_ps.co"  # aiter's for 128 heads
Row = dict[str, str]


def shape(row: Row) -> tuple[str, ...]:
    """Return what the kernels of a pair have in common: the GPU, and all that is computed."""
    extra = " ".join(word for word in row["extra"].split() if not word.startswith("splitK="))
    return (*(row[name] for name in ("gpu", "op", "M", "N", "K", "batch_or_experts")), extra)


def kind(row: Row) -> tuple[str, str, str]:
    """Return the class of a row."""
    return row["op"], row["gpu"], row["set"]


def _read(path: Path) -> list[Row]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _blobs(git: Path, names: Sequence[str]) -> dict[str, str]:
    """Return the blobs of commits' files, COMMIT:PATH, that the directory has."""
    command = ["git", f"--git-dir={git}", "cat-file", "--batch-check"]
    found = subprocess.run(command, input="\n".join(names), capture_output=True, text=True, check=True).stdout
    pairs = zip(names, found.splitlines(), strict=True)
    return {name: line.split()[0] for name, line in pairs if line.split()[1:2] == ["blob"]}


def _of_gfx950(folder: Path, git: Path) -> list[Row]:
    """Return the GEMMs of MI350X and MI355X that have code objects, as of the measurement."""
    rows = [row for row in _read(folder / GEMMS) if row["code_object"] and float(row["us"]) > 0]
    names = sorted({f"{row['commit']}:{row['code_object']}" for row in rows})
    blobs = _blobs(git, names)
    return [
        row
        | {"set": "other architecture", "csv": GEMMS, "batch_or_experts": row["B"] or "1"}
        | {
            "extra": f"splitK={row['splitK'] or 1}{' out=float32' * row['dtype'].endswith('>float32')}",
            "blob_latest": "",
        }
        | {"blob_at_measurement": blobs.get(f"{row['commit']}:{row['code_object']}", "")}
        for row in rows
    ]


def _latent(folder: Path, git: Path) -> list[Row]:
    """Return MLA decode by aiter's own kernel on MI300X: requests as M, keys as N, heads as K."""
    blob = _blobs(git, [f"HEAD:{LATENT}"]).get(f"HEAD:{LATENT}", "")
    found = []
    for row in _read(folder / PEERS):
        match = re.fullmatch(r"batch (\d+) heads (128) ctx (\d+)", row["extra"])
        if match and (row["op"], row["kernel"], row["gpu"]) == ("mla_decode", "aiter asm", machines.MI300X.name):
            sizes = {"M": match[1], "N": match[3], "K": match[2], "batch_or_experts": "1", "extra": ""}
            more = {"set": "peer", "csv": PEERS, "code_object": LATENT, "blob_latest": blob}
            found.append(row | sizes | more | {"blob_at_measurement": "", "commit": ""})
    return found


def apart(rows: Iterable[Row]) -> Iterator[tuple[Row, Row]]:
    """Yield pairs of different kernels on one shape whose times differ by more than `APART`.

    Of one kernel's times on a shape, the median counts.
    """
    shapes: dict[tuple, dict[tuple, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        same = row["code_object"], row["blob_at_measurement"] or row["blob_latest"], row["extra"]
        shapes[shape(row)][same].append(row)
    for kernels in shapes.values():
        medians = [sorted(of, key=lambda row: float(row["us"]))[(len(of) - 1) // 2] for of in kernels.values()]
        for one, other in itertools.combinations(medians, 2):
            times = sorted((float(one["us"]), float(other["us"])))
            if one["code_object"] != other["code_object"] and times[1] > (1 + APART) * times[0]:
                yield one, other


def listed(folder: Path, git: Path) -> list[Row]:
    """Return the rows.

    Raises OSError, KeyError and CalledProcessError for malformed inputs.
    """
    return [*_read(folder / POINTS), *_latent(folder, git), *_of_gfx950(folder, git)]


def _log(row: Row) -> float:
    return math.log(float(row["predicted_us"]) / float(row["us"]))


def _ratio(log: float) -> float:
    return round(math.expm1(log), 3)


def judged(rows: Sequence[Row]) -> dict:
    """Return the contents of `published.json`.

    It has, for each class, relative errors, why rows have none, and why rows are left out; and pairs by GPU and op.
    """
    classes: dict[tuple, list[Row]] = defaultdict(list)
    doubtful, left = left_out.reasons(rows), defaultdict(Counter)
    for row in rows:
        if id(row) in doubtful:
            left[kind(row)][doubtful[id(row)]] += 1
        else:
            classes[kind(row)].append(row)
    found = []
    for (op, gpu, of), mine in sorted(classes.items()):
        logs = [_log(row) for row in mine if row["predicted_us"]]
        # Other rows count as an infinite error.
        of_all = sorted([abs(log) for log in logs] + [math.inf] * (len(mine) - len(logs)))
        median, p90 = (of_all[max(0, math.ceil(part * len(of_all)) - 1)] for part in (0.5, 0.9))
        why = Counter(_reason(row["why"]) for row in mine if not row["predicted_us"])
        entry = {"op": op, "gpu": gpu, "set": of, "points": len(mine), "predicted": len(logs)}
        entry |= {
            "median": None if math.isinf(median) else _ratio(median),
            "p90": None if math.isinf(p90) else _ratio(p90),
        }
        entry |= {"bias": _ratio(statistics.median(logs)) if logs else None, "why": dict(why.most_common())}
        if (op, gpu, of) in left:
            entry["left out"] = dict(left[op, gpu, of].most_common())
        found.append(entry)
    ranks: dict[tuple, list[int]] = defaultdict(lambda: [0, 0])
    for one, other in apart(row for row in rows if row["predicted_us"] and id(row) not in doubtful):
        count = ranks[one["gpu"], one["op"]]
        count[0] += 1
        count[1] += (float(one["us"]) - float(other["us"])) * (
            float(one["predicted_us"]) - float(other["predicted_us"])
        ) > 0
    pairs = [
        {"gpu": gpu, "op": op, "pairs": all_of, "right": right} for (gpu, op), (all_of, right) in sorted(ranks.items())
    ]
    return {"classes": found, "pairs": pairs}


def merged(known: dict, found: dict) -> dict:
    """Return the new classes and pairs, and the known ones that are not among them."""
    made = {}
    for part, names in (("classes", ("op", "gpu", "set")), ("pairs", ("gpu", "op"))):
        of = {tuple(entry[name] for name in names): entry for entry in (*known[part], *found[part])}
        made[part] = [of[key] for key in sorted(of)]
    return made


def _reason(why: str) -> str:
    """Return the reason for a missing time, without the parts that are specific to a row."""
    if re.match("[A-Za-z]+: ", why):
        return re.sub(r"[^A-Za-z]*_Z.*? `(\w+)[^`]*`.*", r" in \1", why)[:80]
    return re.sub(r"\S+\.(co|s)\b", "it", why)


def main(argv: list[str] | None = None) -> int:
    """List the rows, or write the report."""
    parser = argparse.ArgumentParser(
        prog="python -m serving_benchmarks.timing_study.residuals", description=__doc__.splitlines()[0]
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("points", help="list the rows")
    command.add_argument("measurements", type=Path)
    command.add_argument("--git", type=Path, required=True, metavar="DIR")
    command = commands.add_parser("judge", help="write published.json")
    command.add_argument("rows", type=Path, nargs="+")
    command.add_argument("--keep", action="store_true", help="of classes without a row here, what published.json says")
    arguments = parser.parse_args(argv)
    try:
        if arguments.command == "points":
            writer = csv.DictWriter(sys.stdout, HEADER, lineterminator="\n", extrasaction="ignore")
            writer.writeheader()
            writer.writerows(listed(arguments.measurements, arguments.git))
            return 0
        rows = [row for path in arguments.rows for row in _read(path)]
        known = json.loads(REPORT.read_text())
        found = known | (merged(known, judged(rows)) if arguments.keep else judged(rows))
    except (OSError, KeyError, ValueError, subprocess.CalledProcessError) as error:
        print(f"residuals: {error!r}", file=sys.stderr)
        return 2
    REPORT.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{REPORT}: {len(found['classes'])} classes, {sum(each['pairs'] for each in found['pairs'])} pairs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
