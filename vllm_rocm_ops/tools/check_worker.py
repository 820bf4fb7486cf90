"""Run the parts of `vllm-rocm-ops check` in a worker process, which is replaced after a failure.

Parts share a process because a new one takes seconds to create a GPU context, load kernels and start the emulator, longer than many
parts. After a part that died, hung, raised or found a wrong result, the GPU context or memory may be corrupt, so the next part gets a
new process. The parent process never touches the GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import json
import os
import signal
import tempfile
import time
import traceback
from multiprocessing import connection
from pathlib import Path

import torch

from vllm_rocm_ops.core import launch
from vllm_rocm_ops.tools import check_parts

SOFT = 0.8  # fraction of the time limit after which a part stops itself, between two results
GOOD = ("done", "stopped", "left out")  # successful values of "ended"
GRACE_SECONDS = 10.0  # for a process to exit
PR_SET_PDEATHSIG = 1  # of Linux
SAID = 16000  # characters of a part's output to keep, half from the start and half from the end


def end_with(parent: int) -> None:
    """End this process when its parent does, or the thread of it that started this process."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # which ended before
        os._exit(1)


def work(pipe: connection.Connection) -> None:
    """Run the parts that arrive through a pipe, and reply after each."""
    import torch._dynamo  # noqa: F401  PyTorch imports it when it first computes some functions on meta tensors

    end_with(os.getppid())
    faulthandler.enable(2)
    gc.freeze()  # a collection after each part takes 0.1 s with the imported modules
    with contextlib.suppress(EOFError):
        while (given := pipe.recv()) is not None:
            run_part(*given)
            pipe.send(True)


def run_part(kind: str, arguments: tuple, arch: str | None, seconds: float, results: str, said: str) -> None:
    """Run one part for at most `seconds`, and write each result as a line of JSON at once."""
    start = time.monotonic()
    with open(said, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    with open(results, "w") as file:

        def write(kind: str, value) -> None:
            file.write(json.dumps({kind: value}, default=str) + "\n")
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
        except Exception as error:  # noqa: BLE001  an exception is a result
            traceback.print_exc()
            write("error", f"{type(error).__name__}: {error}".splitlines()[0])
        write("end", True)


def settle() -> None:
    """Synchronize the GPU, so that a fault is attributed to the part that caused it, and free the part's memory."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


class Worker:
    """Manage the process that runs parts, and replace it after a failure."""

    def __init__(self, context):
        self.context, self.process = context, None

    def start(self) -> None:
        if self.process is not None and not self.process.is_alive():
            self.close()
        if self.process is None:
            self.pipe, given = self.context.Pipe()
            self.process = self.context.Process(target=work, args=(given,))
            self.process.start()
            given.close()

    def close(self, kill: bool = False) -> int | None:
        if self.process is None:
            return None
        with contextlib.suppress(OSError):
            self.pipe.send(None)
        process, self.process = self.process, None
        process.join(0 if kill else GRACE_SECONDS)
        if process.is_alive():
            process.kill()
            process.join(GRACE_SECONDS)  # a process that waits for a GPU may never exit
        self.pipe.close()
        return process.exitcode

    def run(self, kind: str, arguments: tuple, arch: str | None, seconds: float) -> dict:
        """Run a part and return its results.

        "ended" is "done", "stopped" (at its soft limit), "error: why", "hung" (past its time limit) or "died".
        """
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            results, said = os.path.join(folder, "results"), os.path.join(folder, "said")
            self.start()
            with contextlib.suppress(OSError):  # the process died
                self.pipe.send((kind, arguments, arch, SOFT * seconds, results, said))
            heard = connection.wait([self.pipe, self.process.sentinel], seconds)
            if self.pipe in heard:
                with contextlib.suppress(OSError, EOFError):
                    self.pipe.recv()
            lines = _lines(results)
            errors = [line["error"] for line in lines if "error" in line]
            ended = "stopped" if any("stopped" in line for line in lines) else "done"
            if not heard:
                ended = f"hung: killed after {seconds:.0f} s"
            elif not any("end" in line for line in lines):
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
            "found": [line["found"] for line in lines if "found" in line],
            "said": "" if ended in GOOD else text,
        }


def _lines(path: str) -> list[dict]:
    """Return the complete JSON lines of a file."""
    results = []
    for line in Path(path).read_text().splitlines() if os.path.exists(path) else ():
        try:
            results.append(json.loads(line))
        except ValueError:
            break
    return results
