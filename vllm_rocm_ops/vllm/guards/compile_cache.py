"""Add a fingerprint of the ops to vLLM's configuration.

vLLM's compile cache key covers vLLM's environment and configuration, not what a plugin replaced. A graph compiled
without the ops, or with other ops, would be loaded and run. vLLM hashes `additional_config` into the key, so the
fingerprint goes there.
"""

import hashlib
import logging

import vllm_rocm_ops
from vllm_rocm_ops.core import envs
from vllm_rocm_ops.core import launch as launches
from vllm_rocm_ops.core.stats import warn_once
from vllm_rocm_ops.vllm import seam
from vllm_rocm_ops.vllm.graph import compilation, compiled_ops
from vllm_rocm_ops.vllm.linear import base as linear_base

logger = logging.getLogger("vllm.vllm_rocm_ops")


def fingerprint() -> str:
    """Return a line of everything that a compiled graph depends on.

    It has the version, the active seams, the weight order, a hash of the code objects' stamps, the names of unreadable
    stamps, the shapes of shuffled weights, the patterns that stay vLLM's, and what else was decided for
    a graph.
    """
    stamps, unreadable = hashlib.sha256(), []
    for stamp in sorted(launches.CODE.glob("*/*.json")):
        try:
            stamps.update(stamp.read_bytes())
        except OSError as error:
            unreadable.append(f"{stamp.parent.name}/{stamp.name}")
            warn_once(str(stamp), f"{stamp} cannot be read: {error}. After an update, clear vLLM's compile cache.")
    order = "shuffled" if envs.VLLM_ROCM_OPS_SHUFFLE == "1" else "plain"
    what = f"{', '.join(seam.active())}; {order} weights; code {stamps.hexdigest()[:16]}"
    what += f"; unreadable {', '.join(unreadable)}" if unreadable else ""
    what += f"; shuffled {', '.join(sorted(linear_base.shuffled))}" if linear_base.shuffled else ""
    left = compiled_ops.patterns_left_to_vllm()
    what += f"; left to vLLM {', '.join(left)}" if left else ""
    return f"{vllm_rocm_ops.__version__} with {'; '.join((what, *compiled_ops.choices.others))}"


def mark(vllm_config) -> None:
    """Put the fingerprint into a configuration and log it. Logging is set up and all plugins are loaded by then."""
    line = fingerprint()
    if isinstance(vllm_config.additional_config, dict):
        vllm_config.additional_config = {**vllm_config.additional_config, "vllm_rocm_ops": line}
    else:
        logger.warning(
            "vllm-rocm-ops: additional_config is not a dict, so the compile cache does not know the plugin version. "
            "After an update, clear vLLM's compile cache."
        )
    logger.info("vllm-rocm-ops %s", line)


def mark_again(worker) -> None:
    """Add a loaded model's decisions to the fingerprint, also in the model's copies of the configuration."""
    decided = compiled_ops.patterns_left_to_vllm() or linear_base.shuffled or compiled_ops.choices.others
    if SEAM.name not in seam.active() or not decided:
        return
    modules = (module for model in compilation.models_of(worker) for module in model.modules())
    held = [worker.vllm_config, *(getattr(module, "vllm_config", None) for module in modules)]
    for config in {id(config): config for config in held if config is not None}.values():
        mark(config)


def probe() -> None:
    """Raise `Unavailable` unless `VllmConfig` has `additional_config` and the platform completes configurations."""
    from vllm.config import VllmConfig
    from vllm.platforms import current_platform

    seam.require("additional_config" in VllmConfig.__dataclass_fields__, "VllmConfig.additional_config")
    seam.require_parameters(current_platform.check_and_update_config, "vllm_config")


def install() -> None:
    """Mark each configuration when the platform has completed it."""
    from vllm.platforms import current_platform

    platform = type(current_platform)
    complete = platform.check_and_update_config

    def check_and_update_config(cls, vllm_config):
        complete(vllm_config)
        mark(vllm_config)

    platform.check_and_update_config = classmethod(check_and_update_config)


SEAM = seam.Seam(
    name="compile_cache",
    replaces="nothing; adds a fingerprint to VllmConfig.additional_config, so that no stale compiled graph is loaded",
    probe=probe,
    install=install,
)
