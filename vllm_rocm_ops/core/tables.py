"""Read tuned tables: the fastest measured configurations in <arch>/<op>.csv of the user's folder. None ship.

The <arch>/ folder also stores the kernel timings of vLLM's workers (vllm/selection/kernel_selection.py).
"""

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

POLL_SECONDS = 0.05


class TunedRow(NamedTuple):
    """A configuration from a tuned table, the origin of its row, and the table's path."""

    config: object
    source: str
    path: Path


class _Row(NamedTuple):
    fields: dict[str, str]
    source: str


def config_fields(config) -> dict[str, str]:
    """Return a configuration as a tuned row stores it."""
    return {name: str(value) for name, value in dataclasses.asdict(config).items()}


def is_stored(config, fields: dict[str, str]) -> bool:
    """True if a tuned row's fields are this configuration; a field that the row lacks has its default."""
    known = dataclasses.fields(config)
    is_same = (fields.get(field.name, str(field.default)) == str(getattr(config, field.name)) for field in known)
    return fields.keys() <= {field.name for field in known} and all(is_same)


@functools.cache
def table(path: Path, key: tuple[str, ...]) -> dict[tuple[str, ...], _Row]:
    """Return the tuned rows of one op on one arch, by the values of the key's columns.

    A table's columns are `compute_units`, which distinguishes products of an arch; the problem's sizes; `config.<field>` for each
    field, empty if the configuration lacks it; and `source`, the origin of the row. An empty configuration means that none is faster
    than the default. A table that lacks these columns, or cannot be read, is ignored with a warning.
    """
    try:
        with path.open(newline="") as file:
            lines = list(csv.DictReader(file))
        fields = {f: f.removeprefix("config.") for l in lines for f in l if f.startswith("config.")}
        configs = [{fields[f]: v for f, v in l.items() if v and f in fields} for l in lines]
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
    """Replace a file atomically: readers find the old or the new file, whole."""
    written = path.with_suffix(f".{os.getpid()}")
    written.write_text(text)
    written.replace(path)


@contextlib.contextmanager
def locked(path: Path, seconds: float) -> Iterator[None]:
    """Hold a lock on a path against other processes; a process that ends releases it.

    Raises:
        TimeoutError: Another process holds the lock for more than `seconds`.
    """
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
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # for forks of this process, too, which have the file open


def is_locked(path: Path) -> bool:
    """True if another process holds the lock on a path."""
    try:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False
