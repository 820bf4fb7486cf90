"""Everything that knows vLLM. `register` is the entry point `vllm.general_plugins`.

vLLM calls `register` once in every process: front end, engine core, each worker. An exception from it would end vLLM, so it
raises none.
"""

import functools
import logging

from vllm_rocm_ops import envs

logger = logging.getLogger("vllm.vllm_rocm_ops")


def register() -> None:
    """Install the seams on ROCm, and where the user asked for them: VLLM_ROCM_OPS_ON_NVIDIA=1, VLLM_ROCM_OPS_ON_CPU=1. Idempotent.
    Initialises no device."""
    try:
        from vllm_rocm_ops.vllm import seam

        know_variables()
        seam.install_all()
    except Exception as error:  # noqa: BLE001  an exception here would end vLLM itself
        logger.warning("vllm-rocm-ops is off: %s: %s", type(error).__name__, error)


def know_variables() -> None:
    """Register our environment variables with vLLM. vLLM warns of an unknown VLLM_ variable, or refuses to start, as the user
    wants. Its compile cache is keyed by the variables that it knows."""
    from vllm.envs import environment_variables

    for name in envs.VARIABLES:
        environment_variables.setdefault(name, functools.partial(getattr, envs, name))
