"""Published times of others' kernels, predicted row by row: each gets a time or a reason, whatever is in it, in bounded time."""

from __future__ import annotations

import csv
import multiprocessing
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

from vllm_rocm_ops.emulator import CodeObject
from vllm_rocm_ops.emulator.objects import KernelObject

from . import machines, published, published_attention, published_gemm, published_moe

LIMIT = 60.0  # seconds of a row
COLUMNS = ("gpu", "op", "code_object", "blob_at_measurement", "blob_latest", "M", "N", "K", "batch_or_experts", "extra")
FAMILIES = {
    "fp8gemm_blockscale": published_gemm.eight_bits,
    "i8gemm": published_gemm.eight_bits,
    "bf16gemm": published_gemm.bf16,
    "fmha_v3_fwd": published_attention.call,
    "fmoe": published_moe.call,
    "fmoe_2stages": published_moe.call,
}
"""By the folder of a code object: the call of a row."""
STAND_IN = "MI300X"  # for products without a machine of their own


class Found(NamedTuple):
    """What a row got: a time in us, or why there is none."""

    us: float | None
    why: str


def object_at(git: Path, blob: str, folder: Path) -> Path:
    """The code object of a blob, from a bare git directory. Raises ValueError."""
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
    """The machine of a row's product. Raises ValueError."""
    name = next(iter(re.findall("MI[0-9]+[A-Z]", gpu)), "")
    if not name:
        raise ValueError(f"the GPU must be a product such as {STAND_IN}, got {gpu!r}")
    return machines.MACHINES.get(name, machines.MACHINES[STAND_IN])


def call(of: published.Row, kernel: KernelObject) -> published.Call:
    """The call of a row by the kernel of its object. Raises ValueError where the layout is not known."""
    if of.family not in FAMILIES:
        raise ValueError(f"the arguments of {of.family or of.code_object} are not known")
    return FAMILIES[of.family](of, kernel)


def predict_row(fields: dict[str, str], git: Path, folder: Path, recorder: published.Recorder) -> Found:
    """What a row gets; no error leaves this function."""
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
    except Exception as error:  # noqa: BLE001  a row of whatever must not stop the others
        text = " ".join(str(error).split())
        return Found(None, text if type(error) is ValueError else f"{type(error).__name__}: {text}")


def _work(connection, git: Path, folder: Path) -> None:
    """A process that predicts the rows that it is sent."""
    recorder = published.Recorder()
    while fields := connection.recv():
        connection.send(predict_row(fields, git, folder, recorder))


class _Worker:
    """A process that can be stopped in the middle of a row."""

    def __init__(self, git: Path, folder: Path):
        context = multiprocessing.get_context("fork")
        self.connection, other = context.Pipe()
        self.process = context.Process(target=_work, args=(other, git, folder), daemon=True)
        self.process.start()
        other.close()

    def ask(self, fields: dict[str, str], limit: float) -> Found | None:
        """What the row gets; None, and the process is at its end, if it fails or takes longer than `limit` seconds."""
        try:
            self.connection.send(fields)
            if self.connection.poll(limit):
                return self.connection.recv()
        except (EOFError, OSError):
            pass
        self.stop()
        return None

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


def predictions(rows: list[dict[str, str]], git: Path, log: IO[str], limit: float = LIMIT) -> Iterator[Found]:
    """What each row gets, in order; a row that was there before gets the same. `log` is told of each."""
    known: dict[tuple, Found] = {}
    worker, begin = None, time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        try:
            for place, fields in enumerate(rows):
                key = tuple(fields[name] for name in COLUMNS)
                if key not in known:
                    worker = worker or _Worker(git, Path(folder))
                    found = worker.ask(fields, limit)
                    if found is None:
                        worker, found = (
                            None,
                            Found(None, f"took longer than {limit:.0f} s, or more memory than there is"),
                        )
                    known[key] = found
                shown = f"{known[key].us:.1f} us" if known[key].us else known[key].why
                print(f"{place + 1} of {len(rows)}, {time.monotonic() - begin:.0f} s: {shown}", file=log, flush=True)
                yield known[key]
        finally:
            if worker:
                worker.stop()


def run(path: Path, git: Path, out: IO[str], log: IO[str], limit: float = LIMIT) -> None:
    """Prints the rows of a file with `predicted_us` and `why`. Raises ValueError for a file that has no such rows, or without git's
    directory."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file, restval="")
            rows, names = list(reader), list(reader.fieldnames or ())
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"predict: --points {path} must be a CSV file, got {type(error).__name__}: {error}") from None
    missing = [name for name in COLUMNS if name not in names]
    if missing:
        raise ValueError(f"predict: --points {path} must have the columns {', '.join(COLUMNS)}, got no {missing[0]}")
    if not (git / "objects").is_dir():
        raise ValueError(f"predict: --git must be a bare git directory of ROCm/aiter, got {git}")
    added = [name for name in ("predicted_us", "why") if name not in names]
    writer = csv.DictWriter(out, [*names, *added], lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    for fields, found in zip(rows, predictions(rows, git, log, limit), strict=True):
        us = "" if found.us is None else f"{found.us:.4g}"
        writer.writerow({**fields, "predicted_us": us, "why": found.why})
        out.flush()
