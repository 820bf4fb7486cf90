"""What multiplies and routes beside the ops, with their arguments: PyTorch, vLLM's CUTLASS, Triton and ROCm kernels, AITER.

`torch._scaled_mm` is hipBLASLt on ROCm and cuBLASLt on CUDA.
"""

import importlib

import torch

from vllm_rocm_ops import ops
from vllm_rocm_ops.ops.families.gemm import BLOCK


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"it takes {what}")


def torch_scaled(a, b, sa, sb, dtype, bias=None):
    return torch._scaled_mm(a, b, sa, sb.t() if sb.numel() > 1 else sb, bias=bias, out_dtype=dtype)


def torch_tensorwise(a, b, sa, sb, dtype, bias=None):
    """With one scale each in place of the given ones: another product, but the speed that these kernels have."""
    _require(sb.numel() > 1, "scales per token and channel; with others it is the same as torch")
    return torch._scaled_mm(a, b, sa[:1], sb[:1], bias=bias, out_dtype=dtype)


def torch_blocks(a, b, sa, sb, dtype):
    fits = sb.shape[1] % 4 == 0 and len(a) % 4 == 0
    _require(fits, "K a multiple of 512 and M one of 4, or it reads scales past their end")
    return torch._scaled_mm(a, b.t(), sa, sb.t(), out_dtype=dtype)


def column_major(a, b, sa, sb, dtype):
    """Scales of the activations as cuBLASLt and vLLM's block kernels want them."""
    return a, b, sa.t().contiguous().t(), sb, dtype


def cutlass(a, b, sa, sb, dtype, bias=None):
    out = a.new_empty((len(a), b.shape[1]), dtype=dtype)
    torch.ops._C.cutlass_scaled_mm(out, a, b, sa, sb, bias)
    return out


def cutlass_tensorwise(a, b, sa, sb, dtype, bias=None):
    _require(sb.numel() > 1, "scales per token and channel; with others it is the same as vllm")
    return cutlass(a, b, sa[:1], sb[:1], dtype, bias)


def two_launches(a, b, sa, sb, scale, dtype=torch.bfloat16):
    """Ours, one after the other."""
    return ops.silu_and_mul_quant(ops.scaled_mm(a, b, sa, sb, dtype), scale, a.dtype)


def cutlass_and_silu(a, b, sa, sb, scale, dtype=torch.bfloat16):
    out = a.new_empty((len(a), b.shape[1] // 2))
    torch.ops._C.silu_and_mul_quant(out, cutlass(a, b, sa, sb, dtype), scale)
    return out


def padded_blocks(a, b, sa, sb, dtype):
    """Padded to a multiple of 4 tokens, which vLLM's kernel takes."""
    missing = -len(a) % 4
    if missing:
        a = torch.cat([a.view(torch.uint8), a.new_zeros(missing, a.shape[1], dtype=torch.uint8)]).view(a.dtype)
        sa = torch.cat([sa, sa.new_ones(missing, sa.shape[1])])
    return column_major(a, b, sa, sb, dtype)


def cutlass_blocks(a, b, sa, sb, dtype):
    return cutlass(a, b.t(), sa, sb.t(), dtype)


def cutlass_gemm(a, b, dtype, sa=None, sb=None, bias=None, *rest):
    """Of `gemm`'s arguments: int8, and fp8, with scales."""
    _require(a.dtype == b.dtype and a.element_size() == 1 and not rest, "two operands of one type of 8 bits")
    return cutlass(a, b, sa, sb, dtype, bias)


def rocm_tensorwise(a, b, sa, sb, dtype, bias=None):
    _require(sb.numel() == 1, "one scale per tensor")
    kernels = importlib.import_module("vllm.model_executor.kernels.linear.scaled_mm.rocm")
    return kernels.rocm_per_tensor_float_w8a8_scaled_mm_impl(a, b, dtype, sa, sb, bias)


def triton_blocks(a, b, sa, sb, dtype):
    kernels = importlib.import_module("vllm.model_executor.layers.quantization.utils.fp8_utils")
    return kernels.w8a8_triton_block_scaled_mm(a, b, sa, sb, [BLOCK, BLOCK], dtype)


def aiter_rows(a, b, sa, sb, dtype, bias=None):
    _require(sb.numel() > 1, "scales per token and channel")
    return importlib.import_module("aiter").gemm_a8w8_CK(a, b.t(), sa, sb, bias, dtype)


def aiter_shuffled(a, b, sa, sb, dtype, bias=None):
    weight = importlib.import_module("aiter.ops.shuffle").shuffle_weight(b.t().contiguous(), layout=(16, 16))
    return a, weight, sa, sb, dtype, bias


def aiter_shuffled_rows(a, b, sa, sb, dtype, bias=None):
    _require(sb.numel() > 1, "scales per token and channel")
    return importlib.import_module("aiter").gemm_a8w8_bpreshuffle(a, b, sa, sb, bias, dtype)


def aiter_blocks(a, b, sa, sb, dtype):
    return importlib.import_module("aiter").gemm_a8w8_blockscale(a, b, sa, sb, dtype=dtype)


def rocm_unquantized(x, weight, bias=None):
    importlib.import_module("vllm.model_executor.layers.utils")
    return torch.ops.vllm.rocm_unquantized_gemm(x, weight, bias)


def triton_dot_scaled(*arguments):
    return importlib.import_module("vllm_rocm_ops.tools.bench.peers.triton_mx").dot_scaled(*arguments)


def vllm_grouped_topk(gating_output, *how):
    router = importlib.import_module("vllm.model_executor.layers.fused_moe.router.grouped_topk_router")
    return router.grouped_topk(gating_output, gating_output, *how)
