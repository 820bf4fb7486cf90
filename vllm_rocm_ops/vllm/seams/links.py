"""Seam: a model's norms and activations know the linear that reads their result, their consumer.

vLLM gives an activation its linear in some models, and a norm its linear in none. When vLLM has built a model, whichever it is, the
source of its layers says which linear that is (readers.py). Layers that are written in another way have no consumer, and the log
says so once. Another plugin's models, as ROCm/ATOM's, are left alone.
"""

import functools
import logging

from vllm_rocm_ops.vllm import experts, seam

logger = logging.getLogger("vllm.vllm_rocm_ops")


def probe() -> None:
    """vLLM builds all models, also those of speculative decoding, in one function; what readers.py takes as whole has these names."""
    from vllm.model_executor.layers import attention_layer_base, linear
    from vllm.model_executor.layers.fused_moe.runner import moe_runner_interface
    from vllm.model_executor.model_loader import utils

    seam.require_parameters(utils.initialize_model, "vllm_config")
    seam.require(hasattr(attention_layer_base, "AttentionLayerBase"), "AttentionLayerBase")
    seam.require(hasattr(moe_runner_interface, "MoERunnerInterface"), "MoERunnerInterface")
    seam.require(hasattr(linear, "LinearBase") and hasattr(linear, "UnquantizedLinearMethod"), "LinearBase")


def install() -> None:
    """Wrap the function that builds a model."""
    from vllm.model_executor.model_loader import utils

    build = utils.initialize_model

    @functools.wraps(build)
    def initialize_model(*arguments, **keywords):
        model = build(*arguments, **keywords)
        link(model)
        return model

    experts.replace(build, initialize_model)


def link(model) -> None:
    """Set a model's consumers. Without them it runs all the same."""
    name = type(model).__qualname__
    if not type(model).__module__.startswith("vllm."):
        logger.info("vllm-rocm-ops: links: none in %s, which is another plugin's", name)
        return
    try:
        from vllm_rocm_ops.vllm import models

        models.set_consumers(model)
    except Exception as error:  # noqa: BLE001  vLLM starts without it
        logger.warning("vllm-rocm-ops: links: none in %s: %s: %s", name, type(error).__name__, error)


SEAM = seam.Seam(
    name="links",
    replaces="nothing; reads the models that initialize_model builds",
    probe=probe,
    install=install,
)
