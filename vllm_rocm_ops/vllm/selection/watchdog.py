"""Mark what is timed, for the next start if this process dies, and end a process in which a launch of the plugin's hangs.

The clock runs only inside `outstanding`, from a launch to the end of the wait for it. It stands still while vLLM's
kernel runs or compiles, which may take minutes, and while this process waits for another. The plugin's all-reduce has
a time limit of its own, in the kernel.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

logger = logging.getLogger("vllm.vllm_rocm_ops")

WARN_SECONDS, END_SECONDS = 30.0, 120.0
POLL_SECONDS = 0.5
STATUS = 70  # of a process that was ended


class Watch(threading.Thread):
    """Watch the launches of one comparison, which a file marks while it runs."""

    def __init__(self, path: Path, text: str):
        super().__init__(daemon=True)
        self.path, self.text, self.begun = path, text, None
        self.done = threading.Event()

    def run(self) -> None:
        warned = None
        while not self.done.wait(min(POLL_SECONDS, END_SECONDS / 10)):
            begun = self.begun
            waited = 0.0 if begun is None else time.monotonic() - begun
            what = self.text.replace("\n", ", ")
            if waited > END_SECONDS:
                logger.critical(
                    "vllm-rocm-ops: a launch hangs, so this process ends, and the op is off from the next start: %s",
                    what,
                )
                with contextlib.suppress(OSError):
                    self.path.write_text(f"{self.text}\nits launch hung for {END_SECONDS:.0f} s")
                logging.shutdown()
                os._exit(STATUS)
            if waited > WARN_SECONDS and begun != warned:
                warned = begun
                text = "vllm-rocm-ops: a launch has not ended for %.0f s (the process is ended after %.0f s): %s"
                logger.warning(text, waited, END_SECONDS, what)


_watch: Watch | None = None


@contextlib.contextmanager
def outstanding() -> Iterator[None]:
    """Run the clock of the current watch, if there is one."""
    watched = _watch
    if watched is None:
        yield
        return
    watched.begun = time.monotonic()
    try:
        yield
    finally:
        watched.begun = None


def around(name: str) -> contextlib.AbstractContextManager:
    """Return what surrounds a launch of one side of a comparison: `outstanding` for "plugin" alone."""
    return outstanding() if name == "plugin" else contextlib.nullcontext()


@contextlib.contextmanager
def marker(path: Path, text: str) -> Iterator[None]:
    """Keep a file while the plugin is timed, and watch launches that `outstanding` names.

    A hang is told in the log and in the file. A file that is left over shows where a process died.
    """
    global _watch
    with contextlib.suppress(OSError):
        path.write_text(text)
    before, _watch = _watch, Watch(path, text)
    _watch.start()
    try:
        yield
    finally:
        _watch.done.set()
        _watch = before
        with contextlib.suppress(OSError):
            path.unlink()


def take_marker(path: Path, off: dict[str, str], ended: dict[str, int], save: Callable) -> None:
    """Record the op during whose timing a process died, before the next may die.

    The process may have been killed, so the op is timed again, after all others. It is off once a second process died
    there before one succeeded, or at once if the watchdog says that its launch hung.
    """
    try:
        op, what, hung = (*path.read_text().split("\n"), "", "")[:3]
    except OSError:
        return
    if op and hung:
        off[op] = f"{hung}, at {what}"
        save()
    elif op:
        ended[op] = ended.get(op, 0) + 1
        if ended[op] > 1:
            off[op] = f"{ended[op]} processes died while timing it, the last one at {what}"
        else:
            logger.warning("vllm-rocm-ops: a process died while timing %s, which is timed again", what)
        save()
    with contextlib.suppress(OSError):
        path.unlink()
