"""Try the plugin's kernels in a child process when vLLM first starts on a machine.

On AMD a fault ends the process and a hang blocks it. So the smoke stages of `check` run before a worker opens the GPU,
and an op that fails there is off in this start already. The child must have ended before vLLM measures free memory, and
no worker may have opened the GPU, as a driver that resets it ends all its processes: the child cannot run beside the
loading of weights. It runs beside what precedes that, while the front end configures the engine and starts processes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from vllm_rocm_ops.core import envs, tables
from vllm_rocm_ops.core import op as op_module
from vllm_rocm_ops.vllm import seam
from vllm_rocm_ops.vllm.selection import kernel_selection

logger = logging.getLogger("vllm.vllm_rocm_ops")

SECONDS = 30.0  # for all stages, in the child
SECONDS_TO_END = 5.0  # that others wait longer
SECONDS_TO_START = 5.0  # that a front end waits at most
CODE = "from vllm_rocm_ops.tools import first_start; first_start.main()"


def applies() -> bool:
    """True if there is a GPU to try."""
    return seam.served_platform() not in (None, "cpu")


def is_known() -> bool:
    """True if a record was made by the same software.

    This process cannot ask for the GPU and the driver without opening it. Where these alone are new, nothing is tried,
    and the marks and the watchdog of kernel_timing.py remain.
    """
    records = map(kernel_selection.read, envs.tables().glob("*/measured-*.json"))
    return any(kernel_selection.is_same_software(record.machine) for record in records)


def lock() -> Path:
    """Return the path whose lock the process holds that runs the child."""
    return envs.tables() / "trial.lock"


def begin() -> None:
    """Try the kernels in a thread, as an engine is about to be configured. Workers wait for it before they open a GPU.

    Returns when the child runs: a fork of this process meanwhile would hold the pipe by which it starts.
    """
    started = threading.Event()
    threading.Thread(target=is_done, args=(None, started.set), daemon=True).start()
    started.wait(SECONDS_TO_START)


def before_device(worker) -> None:
    """Try the kernels if this machine has no record, or wait while another process of it does."""
    if not applies() or is_done(worker):
        return
    begun = time.monotonic()
    with contextlib.suppress(TimeoutError), tables.locked(lock(), SECONDS + SECONDS_TO_END):
        pass
    logger.info("vllm-rocm-ops: waited %.1f s until the kernels were tried", time.monotonic() - begun)


def is_done(worker, started: Callable[[], None] = lambda: None) -> bool:
    """Try the kernels if this machine has no record. False if another process tries them now.

    `started` is called once the child runs, or there is none.
    """
    begun = time.monotonic()
    try:
        if not applies() or is_known():
            return not tables.is_locked(lock())  # a failure is recorded before the child ends
        with tables.locked(lock(), 0.0):
            if not is_known():
                outcome = run(device_of(worker), begun + SECONDS, started)
                text = "vllm-rocm-ops: first start with this software: %d smoke stages ran in %.1f s, before a worker opens its GPU: %s"
                level, said = logging.WARNING if outcome["failed"] else logging.INFO, "; ".join(outcome["failed"])
                logger.log(level, text, outcome["ran"], time.monotonic() - begun, said or "all passed")
    except TimeoutError:
        return False
    except Exception as error:  # noqa: BLE001  the worker starts anyway
        text = "vllm-rocm-ops: the kernels are not tried before they are used: %s: %s"
        logger.warning(text, type(error).__name__, error)
    finally:
        started()
    return True


def device_of(worker) -> dict[str, str]:
    """Return the environment in which a child sees one GPU alone, by the rank of the worker, or the first one.

    With data parallelism that may be another worker's of this server, as vLLM numbers the ranks of a machine later.
    """
    from vllm.platforms import current_platform

    rank = worker.local_rank if worker else 0
    assigned = worker and getattr(worker.parallel_config, "assigned_physical_gpu_ids", None)
    physical = assigned[rank] if assigned else current_platform.device_id_to_physical_device_id(rank)
    return dict.fromkeys((current_platform.device_control_env_var, "HIP_VISIBLE_DEVICES"), str(physical))  # HIP's first


def run(environment: dict[str, str], end: float, started: Callable[[], None]) -> dict:
    """Return the outcome of the child, and what it said besides, after it has ended."""
    with tempfile.TemporaryFile("w+") as outcome, tempfile.TemporaryFile("w+") as said:
        command = [sys.executable, "-c", CODE, str(end), str(os.getpid())]
        environment = envs.of_child({**environment, "PYTHONSAFEPATH": "1"})  # no package of the current folder
        child = subprocess.Popen(command, stdout=outcome, stderr=said, env=environment, start_new_session=True)
        started()
        try:
            child.wait(max(end - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # with what it started
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(SECONDS_TO_END)
        outcome.seek(0)
        said.seek(0)
        try:
            return json.loads(outcome.read())
        except ValueError:
            last = said.read().strip().rpartition("\n")[2]
            return {"ran": 0, "failed": [last or f"no answer within {SECONDS:.0f} s"], "off": {}}


def after_device() -> None:
    """Run without their kernels all ops that the machine's record has off, those too that nothing chooses at a call."""
    with seam.surviving("no record was read"):
        op_module.off.update(kernel_selection.record_here().off)
