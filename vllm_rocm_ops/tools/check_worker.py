"""The process in which the parts of `vllm-rocm-ops check` run, one after another, until one fails.

A new process imports nothing, but it makes a context on the GPU, loads kernels and starts the emulator: seconds, where a part takes
less. After a part that died, hung, raised an exception or found something wrong, the GPU's context or memory may be damaged, so that
the next part gets a new process. The process that starts them touches no GPU.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import os
import tempfile
import time
import traceback
from multiprocessing import connection
from pathlib import Path

import torch

from vllm_rocm_ops.core import launch
from vllm_rocm_ops.tools import check_parts

SOFT = 0.8  # of a part's seconds: then it stops by itself, between two pieces
GOOD = ("done", "stopped", "left out")  # ways to end
GRACE_SECONDS = 10.0  # for a process that is to end
SAID = 16000  # characters of a part's output that are kept, from its start and its end


def work(pipe: connection.Connection) -> None:
    """Run the parts that come through a pipe, and answer each when it has ended."""
    faulthandler.enable(2)
    gc.freeze()  # what was imported: a collection after each part takes 0.1 s with it
    with contextlib.suppress(EOFError):
        while (given := pipe.recv()) is not None:
            run_part(*given)
            pipe.send(True)


def run_part(kind: str, arguments: tuple, arch: str | None, seconds: float, results: str, said: str) -> None:
    """Write a line of JSON for each piece that a part finds, as soon as it is found, for `seconds` at most."""
    start = time.monotonic()
    with open(said, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    with open(results, "w") as file:

        def write(kind: str, found) -> None:
            file.write(json.dumps({kind: found}, default=str) + "\n")
            file.flush()

        try:
            device = contextlib.nullcontext()
            if arch:
                from vllm_rocm_ops.emulator import cases as emulated  # an extra

                torch.set_num_threads(1)
                device = launch.executor(emulated.emulator_of(arch))
            with device, contextlib.closing(check_parts.PARTS[kind](arch, *arguments)) as pieces:
                for piece in pieces:
                    write("found", piece)
                    if time.monotonic() - start > seconds:
                        write("stopped", True)
                        break
            settle()
        except Exception as error:  # noqa: BLE001  it is a finding
            traceback.print_exc()
            write("error", f"{type(error).__name__}: {error}".splitlines()[0])
        write("end", True)


def settle() -> None:
    """Wait for the GPU, so that a fault is charged to the part which caused it, and free what the part held."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


class Worker:
    """A process that runs parts, and the next one when it has failed."""

    def __init__(self, context):
        self.context, self.process = context, None

    def start(self) -> None:
        """Start a process, if there is none that works."""
        if self.process is not None and not self.process.is_alive():
            self.close()
        if self.process is None:
            self.pipe, given = self.context.Pipe()
            self.process = self.context.Process(target=work, args=(given,))
            self.process.start()
            given.close()

    def close(self, kill: bool = False) -> int | None:
        """End the process, and return its exit code."""
        if self.process is None:
            return None
        with contextlib.suppress(OSError):
            self.pipe.send(None)
        process, self.process = self.process, None
        process.join(0 if kill else GRACE_SECONDS)
        if process.is_alive():
            process.kill()
            process.join(GRACE_SECONDS)  # a process that waits for a GPU may stay for ever
        self.pipe.close()
        return process.exitcode

    def run(self, kind: str, arguments: tuple, arch: str | None, seconds: float) -> dict:
        """Run a part. Says how it ended: "done", "stopped" in time, "error: why", "hung" after its seconds, or "died"."""
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            results, said = os.path.join(folder, "results"), os.path.join(folder, "said")
            self.start()
            with contextlib.suppress(OSError):  # it died
                self.pipe.send((kind, arguments, arch, SOFT * seconds, results, said))
            heard = connection.wait([self.pipe, self.process.sentinel], seconds)
            if self.pipe in heard:
                with contextlib.suppress(OSError, EOFError):
                    self.pipe.recv()
            found = _lines(results)
            errors = [line["error"] for line in found if "error" in line]
            ended = "stopped" if any("stopped" in line for line in found) else "done"
            if not heard:
                ended = f"hung: killed after {seconds:.0f} s"
            elif not any("end" in line for line in found):
                ended = "died"
            elif errors:
                ended = "error: " + errors[0]
            if ended not in GOOD:
                code = self.close(kill=True)
                ended += f": exit code {code}" * (ended == "died")
            text = Path(said).read_text(errors="replace") if os.path.exists(said) else ""
            text = text if len(text) <= SAID else f"{text[: SAID // 2]}\n[...]\n{text[-SAID // 2 :]}"
        took = round(time.monotonic() - start, 1)
        return {
            "ended": ended,
            "seconds": took,
            "found": [line["found"] for line in found if "found" in line],
            "said": "" if ended in GOOD else text,
        }


def _lines(path: str) -> list[dict]:
    """Whole lines of a file."""
    found = []
    for line in Path(path).read_text().splitlines() if os.path.exists(path) else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found
