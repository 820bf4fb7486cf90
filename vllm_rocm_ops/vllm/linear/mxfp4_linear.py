"""Run linear layers of MXFP4 weights (e2m1 with one e8m0 scale per 32 of K) by `mx_gemm`, see mx_weights.py."""

from vllm_rocm_ops.vllm.linear import base as linear_base
from vllm_rocm_ops.vllm.linear import mx_weights

TABLE = linear_base.Table(
    *("_POSSIBLE_MXFP4_KERNELS", "mxfp4", "mxfp4.base.MxFp4LinearKernel", "config"), methods={"__init__": ("config",)}
)


def install() -> None:
    """Insert the plugin's kernel first in vLLM's table."""
    linear_base.register_first(mx_weights.kernel_class(TABLE, "RocmOpsMxfp4Linear"), TABLE.kernels())


SEAM = TABLE.seam(
    mx_weights.COMPARISON,
    install=install,
    probe=lambda: mx_weights.probe(TABLE),
    name="mxfp4_linear",
    ops=mx_weights.OPS,
)
