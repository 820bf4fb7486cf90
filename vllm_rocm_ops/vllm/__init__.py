"""Everything that knows vLLM. `register` is the entry point `vllm.general_plugins`.

vLLM calls `register` once in every process: front end, engine core, each worker. An exception from it would end vLLM, so it
raises none.
"""

import functools
import logging
import os
from multiprocessing import util

from vllm_rocm_ops import fallbacks
from vllm_rocm_ops.core import envs

logger = logging.getLogger("vllm.vllm_rocm_ops")


def register() -> None:
    """Install the seams on ROCm, and where the user asked for them: VLLM_ROCM_OPS_ON_NVIDIA=1, VLLM_ROCM_OPS_ON_CPU=1. Idempotent.
    Initialises no device."""
    try:
        from vllm_rocm_ops.vllm import seam

        know_variables()
        if seam.install_all():
            summarize_at_exit()
    except Exception as error:  # noqa: BLE001  an exception here would end vLLM itself
        logger.warning("vllm-rocm-ops is off: %s: %s", type(error).__name__, error)


_summarizing = 0  # the process that does


def summarize_at_exit(*_) -> None:
    """Log what fell back in this process when it ends, and in its forks. vLLM's workers end as processes of multiprocessing do."""
    global _summarizing
    if _summarizing != os.getpid():
        _summarizing = os.getpid()
        util.Finalize(None, summarize, exitpriority=0)
        util.register_after_fork(summarize, summarize_at_exit)


def summarize() -> None:
    """Log which ops fell back in this process, how often and why, in one line. Nothing if none did."""
    found = [f"{op} {calls} times ({why})" for op, reasons in fallbacks().items() for why, calls in reasons.items()]
    if found:
        logger.info("vllm-rocm-ops: in this process vLLM's own code ran instead of %s", "; ".join(found))


def know_variables() -> None:
    """Register our environment variables with vLLM. vLLM warns of an unknown VLLM_ variable, or refuses to start, as the user
    wants. Its compile cache is keyed by the variables that it knows."""
    from vllm.envs import environment_variables

    for name in envs.VARIABLES:
        environment_variables.setdefault(name, functools.partial(getattr, envs, name))
