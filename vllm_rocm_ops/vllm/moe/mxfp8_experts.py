"""Run MX-FP8 experts (e4m3fn with one e8m0 scale per 32 of K) by `fused_experts` where it is faster, see base.py.

On ROCm only gfx950 has matrix instructions for this format. There vLLM's Triton experts serve all other calls. A layer that
vLLM gives to AITER stays AITER's: it shuffles rows of gate and up into each other, and the scales, which the op does not
read. vLLM routes the tokens.
"""

from vllm_rocm_ops.vllm import seam
from vllm_rocm_ops.vllm.moe import base as experts

PLUGIN_EXPERTS: list[type] = []
"""The plugin's classes, in the order in which they are asked."""

SCHEME = "kMxfp8Static", "kMxfp8Dynamic"
"""vLLM's names of the weight key and the activation key."""


def probe() -> None:
    """Raise `Unavailable` unless vLLM's selection of MX-FP8 experts and their base class are as expected."""
    from vllm.model_executor.layers.fused_moe.oracle import fp8, mxfp8
    from vllm.model_executor.layers.quantization.utils import quant_utils

    experts.probe(mxfp8, "select_mxfp8_moe_backend", "config")
    seam.require_parameters(mxfp8._mxfp8_backend_to_kernel_cls, "backend")
    for backend in ("TRITON_MXFP8", "AITER_MXFP8"):
        seam.require(backend in fp8.Fp8MoeBackend.__members__, f"Fp8MoeBackend.{backend}")
    seam.require(all(hasattr(quant_utils, key) for key in SCHEME), " and ".join(SCHEME))


def install() -> None:
    """Have vLLM ask the plugin's experts first."""
    from vllm.model_executor.layers.fused_moe.oracle import fp8, mxfp8
    from vllm.model_executor.layers.quantization.utils import quant_utils

    scheme, backend = tuple(getattr(quant_utils, key) for key in SCHEME), fp8.Fp8MoeBackend.TRITON_MXFP8
    PLUGIN_EXPERTS.append(experts.modular("RocmOpsMxfp8Experts", (scheme,), mxfp8, backend))
    select = mxfp8.select_mxfp8_moe_backend

    def select_mxfp8_moe_backend(config):
        return experts.select(PLUGIN_EXPERTS, lambda: select(config), config, *scheme)

    experts.replace(select, select_mxfp8_moe_backend)


SEAM = seam.Seam(
    name="mxfp8_experts",
    replaces="select_mxfp8_moe_backend of fused_moe/oracle/mxfp8.py",
    probe=probe,
    install=install,
    ops=("fused_experts",),
    platforms=("rocm", "cpu"),
)
