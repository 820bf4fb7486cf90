"""Everything that knows vLLM. `register` is the entry point `vllm.general_plugins`.

vLLM calls it once in every process (front end, engine core, each worker) and dies if it raises, so it never does.
"""

import functools
import logging

from vllm_rocm_ops import envs

logger = logging.getLogger("vllm.vllm_rocm_ops")


def register() -> None:
    """Put the ops into vLLM, seam by seam. Idempotent, initialises no device, does nothing elsewhere than on ROCm, CPU and,
    where it is asked for, NVIDIA."""
    try:
        from vllm_rocm_ops.vllm import seam

        know_variables()
        seam.install_all()
    except Exception as error:  # noqa: BLE001  an exception here would end vLLM itself
        logger.warning("vllm-rocm-ops is off: %s: %s", type(error).__name__, error)


def know_variables() -> None:
    """Have vLLM know our environment variables: it warns of others that begin with its name, or ends, as the user wants, and
    keys its compile cache by those it knows."""
    from vllm.envs import environment_variables

    for name in envs.VARIABLES:
        environment_variables.setdefault(name, functools.partial(getattr, envs, name))
