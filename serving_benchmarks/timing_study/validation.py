"""Predict published times of other libraries' kernels row by row: each gets a time or a reason, in bounded time.

python -m serving_benchmarks.timing_study.validation points.csv --git DIR --jobs 2 --cache FOLDER > predicted.csv
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import itertools
import json
import multiprocessing
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import IO, NamedTuple

from vllm_rocm_ops.emulator import CodeObject
from vllm_rocm_ops.emulator.objects import KernelObject
from vllm_rocm_ops.timing import machines

from . import published, published_attention, published_gemm, published_mla, published_moe

LIMIT = 60.0  # seconds per row
PORTION = 8  # rows of similar launches that one process gets
LATE = "took longer than"
COLUMNS = (
    "gpu", "op", "code_object", "blob_at_measurement", "blob_latest", "commit", "M", "N", "K", "batch_or_experts", "extra",
)  # fmt: skip
FAMILIES = {
    "fp8gemm_blockscale": published_gemm.eight_bits,
    "i8gemm": published_gemm.eight_bits,
    "bf16gemm": published_gemm.bf16,
    "fmha_v3_fwd": published_attention.call,
    "fmoe": published_moe.call,
    "fmoe_2stages": published_moe.call,
    "mla": published_mla.call,
}
"""By the folder of a code object: the call of a row."""
STAND_IN = "MI300X"  # for products without a machine of their own


Key = tuple[str, ...]
"""A row's values of `COLUMNS`."""


class Late(BaseException):
    """A row takes too long. The handler of a malformed row must not catch it."""


class Found(NamedTuple):
    """The result of a row: a time in us, or why there is none."""

    us: float | None
    why: str


def object_at(git: Path, blob: str, folder: Path) -> Path:
    """Return the code object of a blob, from a bare git directory, or raise ValueError."""
    if not re.fullmatch("[0-9a-f]{40}", blob):
        raise ValueError(f"no code object is named: its blob must be 40 hex digits, got {blob!r}")
    path = folder / f"{blob}.co"
    if not path.is_file():
        command = ["git", f"--git-dir={git}", "cat-file", "blob", blob]
        try:
            content = subprocess.run(command, capture_output=True, check=True, timeout=LIMIT).stdout
        except (OSError, subprocess.SubprocessError):
            raise ValueError(f"{git} does not have the blob {blob}") from None
        path.write_bytes(content)
    return path


def machine_of(gpu: str) -> machines.Machine:
    """Return the machine of a row's product, the last named that has one, or raise ValueError."""
    names = re.findall("MI[0-9]+[A-Z]", gpu)
    if not names:
        raise ValueError(f"the GPU must be a product such as {STAND_IN}, got {gpu!r}")
    return machines.MACHINES[next((name for name in reversed(names) if name in machines.MACHINES), STAND_IN)]


def call(of: published.Row, kernel: KernelObject) -> published.Call:
    """Return the call of a row by the kernel of its object.

    Raises ValueError if the layout is unknown.
    """
    if of.family not in FAMILIES:
        raise ValueError(f"the arguments of {of.family or of.code_object} are not known")
    return FAMILIES[of.family](of, kernel)


def predict_row(fields: dict[str, str], git: Path, folder: Path, recorder: published.Recorder) -> Found:
    """Return the result of a row; no error leaves this function."""
    try:
        row = published.row(fields)
        machine = machine_of(row.gpu)
        if not row.family:
            raise ValueError(f"{row.code_object} is no code object of aiter")
        path = object_at(git, row.blob, folder)
        code = CodeObject(path)
        if len(code.kernels) != 1:
            raise ValueError(f"{row.code_object} must have one kernel, got {len(code.kernels)}")
        what = call(row, next(iter(code.kernels.values())))
        return Found(published.predict(machine, what, path, recorder), "")
    except Exception as error:  # noqa: BLE001  a malformed row must not stop the others
        text = " ".join(str(error).split())
        return Found(None, text if type(error) is ValueError else f"{type(error).__name__}: {text}")


def predict_rows(keys: list[Key], git: Path, folder: Path, limit: float) -> list[Found]:
    """Return the results of rows with similar launches, each after at most `limit` seconds."""

    def late(*_):
        raise Late

    recorder, found = published.Recorder(), []
    signal.signal(signal.SIGALRM, late)
    for key in keys:
        try:
            signal.setitimer(signal.ITIMER_REAL, limit)
            found.append(predict_row(dict(zip(COLUMNS, key, strict=True)), git, folder, recorder))
        except Late:
            found.append(Found(None, f"{LATE} {limit:.0f} s"))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    return found


def _portions(keys: list[Key]) -> list[list[Key]]:
    """Return portions of rows with similar launches, as a process keeps recordings.

    A portion has at most `PORTION` rows, so that processes end at about the same time. Portions are in the order of
    their first rows in the file.
    """
    place = {key: at for at, key in enumerate(keys)}
    alike: dict[Key, list[Key]] = {}
    for key in keys:
        of = dict(zip(COLUMNS, key, strict=True))
        names = ("code_object", "blob_at_measurement", "blob_latest", "N", "K", "batch_or_experts", "extra")
        alike.setdefault(tuple(of[name] for name in names), []).append(key)
    rows_of_m = COLUMNS.index("M")
    found = []
    for rows in alike.values():
        rows.sort(key=lambda key: (key[rows_of_m].zfill(9), key))
        found += [rows[at : at + PORTION] for at in range(0, len(rows), PORTION)]
    return sorted(found, key=lambda portion: min(place[key] for key in portion))


def _answers(keys: list[Key], git: Path, limit: float, jobs: int) -> Iterator[tuple[Key, Found]]:
    """Yield the results of rows, as processes return them."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(jobs, context) as pool:
        asked = {pool.submit(predict_rows, of, git, Path(folder), limit): of for of in _portions(keys)}
        for done in as_completed(asked):
            yield from zip(asked[done], done.result(), strict=True)


def _model() -> str:
    """Return the hash of all files that a prediction depends on."""
    digest, package, mine = hashlib.sha256(), Path(machines.__file__).parents[1], Path(__file__).parent
    parts = (
        package.glob("emulator/**/*.py"),
        package.glob("timing/*.*"),
        mine.glob("*.py"),
        package.glob("core/archs/*.py"),
    )
    for path in sorted(itertools.chain(*parts)):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def predictions(
    rows: list[dict[str, str]], git: Path, log: IO[str], limit: float = LIMIT, jobs: int = 1, kept: Path | None = None
) -> list[Found]:
    """Return the result of each row, by `jobs` processes.

    A repeated row, or one in the folder `kept`, gets the same result; another model has another file there, and rows that took too long are
    asked again. `log` gets a line for each new one.
    """
    begin, known = time.monotonic(), {}
    path = kept and kept / f"points-{_model()}.jsonl"
    if path and path.is_file():
        lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        known = {tuple(key): Found(us, why) for key, us, why in lines}
    keys = [tuple(fields[name] for name in COLUMNS) for fields in rows]
    new = [key for key in dict.fromkeys(keys) if key not in known]
    for count, (key, found) in enumerate(_answers(new, git, limit, jobs), 1):
        known[key] = found
        text = f"{found.us:.1f} us" if found.us else found.why
        print(f"{count} of {len(new)}, {time.monotonic() - begin:.0f} s: {text}", file=log, flush=True)
        if path and not found.why.startswith(LATE):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps([key, *found]) + "\n")
    return [known[key] for key in keys]


def run(
    path: Path, git: Path, out: IO[str], log: IO[str], limit: float = LIMIT, jobs: int = 1, kept: Path | None = None
) -> None:
    """Print the rows of a file with `predicted_us` and `why`, see `predictions`.

    Raises ValueError for a file without such rows, or without git's directory.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file, restval="")
            rows, names = list(reader), list(reader.fieldnames or ())
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"validation: {path} must be a CSV file, got {type(error).__name__}: {error}") from None
    missing = [name for name in COLUMNS if name not in names]
    if missing:
        raise ValueError(f"validation: {path} must have the columns {', '.join(COLUMNS)}, got no {missing[0]}")
    if not (git / "objects").is_dir():
        raise ValueError(f"validation: --git must be a bare git directory of ROCm/aiter, got {git}")
    added = [name for name in ("predicted_us", "why") if name not in names]
    writer = csv.DictWriter(out, [*names, *added], lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    for fields, found in zip(rows, predictions(rows, git, log, limit, jobs, kept), strict=True):
        us = "" if found.us is None else f"{found.us:.4g}"
        writer.writerow({**fields, "predicted_us": us, "why": found.why})


def main(argv: list[str] | None = None) -> int:
    """Print the rows with their predictions."""
    parser = argparse.ArgumentParser(
        prog="python -m serving_benchmarks.timing_study.validation", description=__doc__.splitlines()[0]
    )
    parser.add_argument("points", type=Path, metavar="CSV", help="a file like validation_points_gfx942.csv")
    parser.add_argument("--git", type=Path, required=True, metavar="DIR", help="a bare git directory of ROCm/aiter")
    parser.add_argument("--limit", type=float, default=LIMIT, metavar="SECONDS", help="of a row")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes")
    meaning = "a folder that keeps what rows got, for the next time that the same model is asked"
    parser.add_argument("--cache", type=Path, metavar="FOLDER", help=meaning)
    given = parser.parse_args(argv)
    if not given.limit > 0 or given.jobs < 1:
        parser.error("--limit and --jobs must be positive")
    try:
        run(given.points, given.git, sys.stdout, sys.stderr, given.limit, given.jobs, given.cache)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
