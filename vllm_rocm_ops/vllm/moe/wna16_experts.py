"""Run INT4 experts with bf16 tokens by `fused_experts` where it is faster, see base.py.

Weights are symmetric, in groups of 32 or 128 of K, in the layout of vLLM's Triton experts, which serve all other calls.
Checkpoints of compressed-tensors, moe_wna16 and Quark have them, the last if all layers have one group size. Left to
vLLM: AWQ (zero points), act-order, and layers that it gives to another backend than TRITON.
"""

import torch

from vllm_rocm_ops.ops.shared.experts import CONVERTED
from vllm_rocm_ops.vllm import seam
from vllm_rocm_ops.vllm.moe import base as experts
from vllm_rocm_ops.vllm.moe.expert_support import log_unsupported

PLUGIN_EXPERTS: list[type] = []
"""The plugin's classes, in the order in which they are asked."""

SCHEMES = "kInt4Static", "kInt4Static32"
"""vLLM's names of the supported weight keys: groups of 32, and all others."""

FACTORY = "make_wna16_moe_kernel"


def probe() -> None:
    """Raise `Unavailable` unless vLLM's selection of WNA16 experts and its factory are as expected."""
    from vllm.model_executor.layers.fused_moe import modular_kernel
    from vllm.model_executor.layers.fused_moe.oracle import int_wna16
    from vllm.model_executor.layers.quantization.utils import quant_utils

    parameters = "config", "weight_key", "quant_config", "may_have_zp", "may_have_bias"
    experts.probe(int_wna16, "select_wna16_moe_backend", *parameters)
    seam.require_parameters(getattr(int_wna16, FACTORY), "moe_quant_config", "moe_config", "experts_cls", "backend")
    seam.require_parameters(int_wna16._backend_incompatibility_reason, "backend", "moe_config", *parameters[2:])
    seam.require("TRITON" in int_wna16.WNA16MoEBackend.__members__, "WNA16MoEBackend.TRITON")
    seam.require(all(hasattr(quant_utils, key) for key in SCHEMES), " and ".join(SCHEMES))
    seam.require_parameters(modular_kernel.FusedMoEKernel.__init__, "prepare_finalize", "fused_experts")


def group_size(quant_config) -> int | None:
    """Return the values of K that share a scale, None if layers differ, as Quark's configuration allows."""
    quark = getattr(quant_config, "quant_config", None)
    if not isinstance(quark, dict):
        return getattr(quant_config, "group_size", None)
    by_layer = [quark.get(name) or {} for name in ("layer_quant_config", "layer_type_quant_config")]
    configs = [quark.get("global_quant_config"), *(config for layers in by_layer for config in layers.values())]
    weights = [config["weight"] for config in configs if config and config.get("weight")]
    sizes = {weight.get("group_size") for weight in weights if weight.get("dtype") in ("int4", "uint4")}
    return sizes.pop() if len(sizes) == 1 else None


def unsupported(config, quant_config, may_have_zp: bool) -> str:
    """Return what the op does not support of a layer's groups and tokens, empty if it supports them."""
    group, dtype = group_size(quant_config), config.in_dtype
    if may_have_zp:
        return "INT4 with zero points"
    if group is None:
        return "INT4 in groups that differ by layer"
    if not any(group == scheme.group for scheme in CONVERTED.values() if torch.bfloat16 in scheme.scales):
        return f"INT4 in groups of {group}"
    sizes = config.hidden_dim, config.intermediate_size_per_partition
    if any(size % group for size in sizes):
        return f"{' and '.join(map(str, sizes))} columns in groups of {group}"
    return "" if dtype == torch.bfloat16 else f"INT4 weights with {dtype}"


def install() -> None:
    """Have vLLM ask the plugin's experts first, and build its `FusedMoEKernel` of them."""
    from vllm.model_executor.layers.fused_moe.oracle import int_wna16
    from vllm.model_executor.layers.quantization.utils import quant_utils

    backend = int_wna16.WNA16MoEBackend.TRITON
    schemes = tuple((getattr(quant_utils, key), None) for key in SCHEMES)
    made = experts.modular("RocmOpsWna16Experts", schemes, int_wna16, backend)
    PLUGIN_EXPERTS.append(made)
    select, make = int_wna16.select_wna16_moe_backend, getattr(int_wna16, FACTORY)

    def select_wna16_moe_backend(
        config, weight_key, quant_config, may_have_zp, may_have_bias, allow_tile_padding=False
    ):
        arguments = quant_config, may_have_zp, may_have_bias, allow_tile_padding

        def vllm_selects() -> tuple:
            return select(config, weight_key, *arguments)

        reason = unsupported(config, quant_config, may_have_zp)
        reason = reason or int_wna16._backend_incompatibility_reason(backend, config, *arguments)
        if reason:
            log_unsupported(reason)
        elif seam.served_platform() == "cpu" or vllm_selects() == (backend, made.baseline_class()):
            return experts.select(PLUGIN_EXPERTS, vllm_selects, config, weight_key, None)
        return vllm_selects()

    def make_wna16_moe_kernel(moe_quant_config, moe_config, experts_cls, *others, **more):
        if experts_cls not in PLUGIN_EXPERTS:
            return make(moe_quant_config, moe_config, experts_cls, *others, **more)
        # vLLM's factory asserts that the class is its own.
        vllm_class = int_wna16.backend_to_kernel_cls(backend)[0]
        kernel = make(moe_quant_config, moe_config, vllm_class, *others, **more)
        return type(kernel)(kernel.prepare_finalize, experts_cls(moe_config, moe_quant_config))

    seam.replace_function(select.__name__, select, select_wna16_moe_backend)
    seam.replace_function(FACTORY, make, make_wna16_moe_kernel)


SEAM = seam.Seam(
    name="wna16_experts",
    replaces="select_wna16_moe_backend of fused_moe/oracle/int_wna16.py",
    probe=probe,
    install=install,
    ops=("fused_experts",),
)
