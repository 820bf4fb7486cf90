"""Tuned tables: configurations that were measured to be best, in <arch>/<op>.csv, the user's before the shipped ones.

Beside the user's, in <arch>/, lies what vLLM's workers measure of kernels (vllm/kernel_selection.py)."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import fcntl
import functools
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from vllm_rocm_ops.core.stats import warn_once

TABLES = Path(__file__).parents[1] / "tables"
POLL_SECONDS = 0.05


class TunedRow(NamedTuple):
    """A configuration from a tuned table, the origin of the row, and the file of the table."""

    config: object
    source: str
    path: Path


class _Row(NamedTuple):
    fields: dict[str, str]
    source: str


def config_fields(config) -> dict[str, str]:
    """A configuration as a tuned row holds it."""
    return {name: str(value) for name, value in dataclasses.asdict(config).items()}


@functools.cache
def table(path: Path, key: tuple[str, ...]) -> dict[tuple[str, ...], _Row]:
    """The tuned rows of one op on one arch, by the values of the key's columns. The columns of a table are `compute_units`, in
    which products of one arch differ; the problem's sizes; `config.<field>` for each field, empty if the configuration has no such
    field; and `source`, the origin of the row. A row whose configuration is empty says that no other configuration is faster than
    the one that ships. A table without these columns, or that cannot be read, is not used, with a warning."""
    try:
        with path.open(newline="") as file:
            lines = list(csv.DictReader(file))
        configs = [{f.removeprefix("config."): v for f, v in l.items() if v and f.startswith("config.")} for l in lines]
        return {tuple(l[k] for k in key): _Row(fields, l["source"]) for l, fields in zip(lines, configs)}
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except PermissionError:
        warn_once(str(path.parent), f"the tuned tables in {path.parent} are not used: this user may not read them")
        return {}
    except (KeyError, TypeError, AttributeError, ValueError, csv.Error, OSError) as error:
        warn_once(str(path), f"{path} is not used: {type(error).__name__} {error}")
        return {}


def replace(path: Path, text: str) -> None:
    """Writes a file that others read: they find the one before or this one, whole."""
    written = path.with_suffix(f".{os.getpid()}")
    written.write_text(text)
    written.replace(path)


@contextlib.contextmanager
def locked(path: Path, seconds: float) -> Iterator[None]:
    """Waits until no other process is within it for the same path. The end of a process, however it comes, ends that too. Raises
    TimeoutError where it takes longer than so many seconds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + seconds
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise TimeoutError(f"{path} is locked for more than {seconds:g} s") from None
                time.sleep(POLL_SECONDS)
        yield
