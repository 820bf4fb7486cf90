"""Run FP8 experts by `fused_experts` where it is faster, see base.py.

Scales are per 128x128 block, tensor or channel. Activations are quantized as in vLLM, except for one dynamic scale per
tensor: the op then uses one scale per token.
"""

from vllm_rocm_ops.vllm import seam
from vllm_rocm_ops.vllm.moe import base as experts

PLUGIN_EXPERTS: list[type] = []
"""The plugin's classes, in the order in which they are asked."""


def probe() -> None:
    """Raise `Unavailable` unless vLLM's selection of FP8 experts and their base class are as expected."""
    from vllm.model_executor.layers.fused_moe.oracle import fp8
    from vllm.model_executor.layers.quantization.utils import quant_utils

    experts.probe(fp8, "select_fp8_moe_backend", "config", "weight_key", "activation_key")
    for backend in ("TRITON", "AITER"):
        seam.require(backend in fp8.Fp8MoeBackend.__members__, f"Fp8MoeBackend.{backend}")
    for weight, activation in SCHEMES:
        seam.require(hasattr(quant_utils, weight) and hasattr(quant_utils, activation), f"{weight} and {activation}")


SCHEMES = (
    ("kFp8Static128BlockSym", "kFp8Dynamic128Sym"),
    ("kFp8StaticChannelSym", "kFp8DynamicTokenSym"),
    ("kFp8StaticTensorSym", "kFp8DynamicTokenSym"),
    ("kFp8StaticTensorSym", "kFp8DynamicTensorSym"),
    ("kFp8StaticTensorSym", "kFp8StaticTensorSym"),
)
"""vLLM's names of the supported pairs (weight key, activation key)."""


def install() -> None:
    """Have vLLM ask the plugin's experts first."""
    from vllm.model_executor.layers.fused_moe.oracle import fp8
    from vllm.model_executor.layers.quantization.utils import quant_utils

    schemes = tuple(tuple(getattr(quant_utils, key) for key in scheme) for scheme in SCHEMES)
    PLUGIN_EXPERTS.insert(0, experts.modular("RocmOpsFp8Experts", schemes, fp8, fp8.Fp8MoeBackend.TRITON))
    for scheme in schemes:
        PLUGIN_EXPERTS.insert(0, experts.modular("RocmOpsAiterFp8Experts", (scheme,), fp8, fp8.Fp8MoeBackend.AITER))
    select = fp8.select_fp8_moe_backend

    def select_fp8_moe_backend(config, weight_key, activation_key, *others, **more):
        scheme = weight_key, activation_key
        return experts.select(PLUGIN_EXPERTS, lambda: select(config, *scheme, *others, **more), config, *scheme)

    seam.replace_function(select.__name__, select, select_fp8_moe_backend)


SEAM = seam.Seam(
    name="fp8_experts",
    replaces="select_fp8_moe_backend of fused_moe/oracle/fp8.py",
    probe=probe,
    install=install,
    ops=("fused_experts",),
)
