"""Connect the ops to vLLM. `register` is the entry point in the group `vllm.general_plugins`.

vLLM calls `register` once in every process: front end, engine core, each worker. An exception in it would end vLLM, so
it raises none.
"""

import functools
import logging
import os
from multiprocessing import util

from vllm_rocm_ops import fallbacks
from vllm_rocm_ops.core import envs

logger = logging.getLogger("vllm.vllm_rocm_ops")


def register() -> None:
    """Install the seams on ROCm. Idempotent, and initializes no device.

    Other platforms are opt-in: VLLM_ROCM_OPS_ON_NVIDIA=1, VLLM_ROCM_OPS_ON_CPU=1.
    """
    try:
        from vllm_rocm_ops.vllm import seam

        know_variables()
        if seam.install_all():
            summarize_at_exit()
    except Exception as error:  # noqa: BLE001  an exception here would end vLLM itself
        logger.warning("vllm-rocm-ops is off: %s: %s. vLLM's own code runs.", type(error).__name__, error)


_summarizing = 0  # id of the process that logs at exit


def summarize_at_exit(*_) -> None:
    """Log the fallbacks of this process, and of its forks, when it ends.

    vLLM's workers end as multiprocessing processes do, which skips `atexit`.
    """
    global _summarizing
    if _summarizing != os.getpid():
        _summarizing = os.getpid()
        util.Finalize(None, summarize, exitpriority=0)
        util.register_after_fork(summarize, summarize_at_exit)


def summarize() -> None:
    """Log which ops fell back in this process, how often and why, in one line. Log nothing if none did."""
    lines = [f"{op} {calls}x ({why})" for op, reasons in fallbacks().items() for why, calls in reasons.items()]
    if lines:
        logger.info("vllm-rocm-ops: calls that fell back to vLLM's own code in this process: %s", "; ".join(lines))


def know_variables() -> None:
    """Register the package's environment variables with vLLM.

    vLLM warns of unknown VLLM_ variables, or refuses to start, as configured. Known variables are part of its compile
    cache key.
    """
    from vllm.envs import environment_variables

    for name in envs.VARIABLES:
        environment_variables.setdefault(name, functools.partial(getattr, envs, name))
