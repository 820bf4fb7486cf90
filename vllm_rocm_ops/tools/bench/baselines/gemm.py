"""Call other GEMM kernels with the ops' arguments: PyTorch, vLLM's CUTLASS, Triton and ROCm kernels, AITER.

`torch._scaled_mm` is hipBLASLt on ROCm and cuBLASLt on CUDA.
"""

import importlib

import torch

from vllm_rocm_ops import ops
from vllm_rocm_ops.ops.shared.gemm import BLOCK


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"it needs {what}")


def torch_scaled(a, b, sa, sb, dtype, bias=None):
    """Call PyTorch's FP8 GEMM."""
    return torch._scaled_mm(a, b, sa, sb.t() if sb.numel() > 1 else sb, bias=bias, out_dtype=dtype)


def torch_tensorwise(a, b, sa, sb, dtype, bias=None):
    """Call it with one scale per tensor: another result, at the speed of these kernels."""
    _require(sb.numel() > 1, "scales per token and channel; with other scales it equals torch")
    return torch._scaled_mm(a, b, sa[:1], sb[:1], bias=bias, out_dtype=dtype)


def torch_blocks(a, b, sa, sb, dtype):
    """Call PyTorch's block-scaled GEMM."""
    fits = sb.shape[1] % 4 == 0 and len(a) % 4 == 0
    _require(fits, "K to be a multiple of 512 and M of 4, or it reads scales out of bounds")
    return torch._scaled_mm(a, b.t(), sa, sb.t(), out_dtype=dtype)


def column_major(a, b, sa, sb, dtype):
    """Return the arguments with column-major activation scales, for cuBLASLt and vLLM's block kernels."""
    return a, b, sa.t().contiguous().t(), sb, dtype


def cutlass(a, b, sa, sb, dtype, bias=None):
    """Call vLLM's CUTLASS GEMM."""
    out = a.new_empty((len(a), b.shape[1]), dtype=dtype)
    torch.ops._C.cutlass_scaled_mm(out, a, b, sa, sb, bias)
    return out


def cutlass_tensorwise(a, b, sa, sb, dtype, bias=None):
    """Call vLLM's CUTLASS GEMM with one scale per tensor."""
    _require(sb.numel() > 1, "scales per token and channel; with other scales it equals vllm")
    return cutlass(a, b, sa[:1], sb[:1], dtype, bias)


def two_launches(a, b, sa, sb, scale, dtype=torch.bfloat16):
    """Call the plugin's scaled_mm and silu_and_mul_quant."""
    return ops.silu_and_mul_quant(ops.scaled_mm(a, b, sa, sb, dtype), scale, a.dtype)


def cutlass_and_silu(a, b, sa, sb, scale, dtype=torch.bfloat16):
    """Call vLLM's CUTLASS GEMM and its fused SwiGLU quantization."""
    out = a.new_empty((len(a), b.shape[1] // 2))
    torch.ops._C.silu_and_mul_quant(out, cutlass(a, b, sa, sb, dtype), scale)
    return out


def padded_blocks(a, b, sa, sb, dtype):
    """Return the arguments padded to a multiple of 4 tokens, which vLLM's kernel needs."""
    missing = -len(a) % 4
    if missing:
        a = torch.cat([a.view(torch.uint8), a.new_zeros(missing, a.shape[1], dtype=torch.uint8)]).view(a.dtype)
        sa = torch.cat([sa, sa.new_ones(missing, sa.shape[1])])
    return column_major(a, b, sa, sb, dtype)


def cutlass_blocks(a, b, sa, sb, dtype):
    """Call vLLM's block-scaled CUTLASS GEMM."""
    return cutlass(a, b.t(), sa, sb.t(), dtype)


def cutlass_gemm(a, b, dtype, sa=None, sb=None, bias=None, *rest):
    """Call vLLM's CUTLASS GEMM with `gemm`'s arguments: int8 and fp8, with scales."""
    _require(a.dtype == b.dtype and a.element_size() == 1 and not rest, "two operands of one 8-bit dtype")
    return cutlass(a, b, sa, sb, dtype, bias)


def rocm_tensorwise(a, b, sa, sb, dtype, bias=None):
    """Call vLLM's ROCm per-tensor FP8 GEMM."""
    _require(sb.numel() == 1, "one scale per tensor")
    kernels = importlib.import_module("vllm.model_executor.kernels.linear.scaled_mm.rocm")
    return kernels.rocm_per_tensor_float_w8a8_scaled_mm_impl(a, b, dtype, sa, sb, bias)


def triton_blocks(a, b, sa, sb, dtype):
    """Call vLLM's block-scaled Triton GEMM."""
    kernels = importlib.import_module("vllm.model_executor.layers.quantization.utils.fp8_utils")
    return kernels.w8a8_triton_block_scaled_mm(a, b, sa, sb, [BLOCK, BLOCK], dtype)


def aiter_rows(a, b, sa, sb, dtype, bias=None):
    """Call AITER's FP8 GEMM with row scales."""
    _require(sb.numel() > 1, "scales per token and channel")
    return importlib.import_module("aiter").gemm_a8w8_CK(a, b.t(), sa, sb, bias, dtype)


def aiter_shuffled(a, b, sa, sb, dtype, bias=None):
    """Return the arguments with a shuffled weight."""
    weight = importlib.import_module("aiter.ops.shuffle").shuffle_weight(b.t().contiguous(), layout=(16, 16))
    return a, weight, sa, sb, dtype, bias


def aiter_shuffled_rows(a, b, sa, sb, dtype, bias=None):
    """Call AITER's FP8 GEMM with row scales and a shuffled weight."""
    _require(sb.numel() > 1, "scales per token and channel")
    return importlib.import_module("aiter").gemm_a8w8_bpreshuffle(a, b, sa, sb, bias, dtype)


def aiter_blocks(a, b, sa, sb, dtype):
    """Call AITER's block-scaled GEMM."""
    return importlib.import_module("aiter").gemm_a8w8_blockscale(a, b, sa, sb, dtype=dtype)


def triton_w4a16(x, weight, scale, bias=None):
    """Call vLLM's Triton GEMM with INT4 weights."""
    importlib.import_module("vllm.model_executor.kernels.linear.mixed_precision.triton_w4a16")
    output = torch.ops.vllm.triton_w4a16_gemm(x, weight, scale, None, len(weight) // len(scale))
    return output if bias is None else output.add_(bias)


def marlin_weights(x, weight, scale, bias=None):
    """Return the arguments of vLLM's Marlin GEMM, with a copy of the weight in its order."""
    marlin = importlib.import_module("vllm.model_executor.layers.quantization.utils.marlin_utils")
    (k, n), group = (len(weight), 8 * weight.shape[1]), len(weight) // len(scale)
    shifts = torch.arange(0, 32, 4, device=weight.device, dtype=torch.int32)
    values = (weight.unsqueeze(-1) >> shifts & 15).flatten(1)
    words = (values.unflatten(0, (-1, 8)) << shifts[:, None]).sum(1, dtype=torch.int32)  # [K / 8, N]
    repacked = importlib.import_module("vllm._custom_ops").gptq_marlin_repack(words, k, n, 4)
    scales, zero_points = marlin.marlin_permute_scales(scale.contiguous(), k, n, group), words.new_empty(0)
    kind = importlib.import_module("vllm.scalar_type").scalar_types.uint4b8
    return (x, repacked, scales, zero_points, marlin.marlin_make_workspace_new(x.device), kind, n, k), {"bias": bias}


def marlin_w4a16(tensors: tuple, options: dict):
    """Call vLLM's Marlin GEMM."""
    marlin = importlib.import_module("vllm.model_executor.layers.quantization.utils.marlin_utils")
    return marlin.apply_gptq_marlin_linear(*tensors, **options)


def bf16_copy(x, weight, scale, bias=None):
    """Return the arguments with a weight in bf16, as vLLM copies MX weights for its emulation."""
    return x, ops.mx_dequantize(weight, scale), bias


def rocm_unquantized(x, weight, bias=None):
    """Call vLLM's unquantized linear op for ROCm."""
    importlib.import_module("vllm.model_executor.layers.utils")
    return torch.ops.vllm.rocm_unquantized_gemm(x, weight, bias)


def triton_dot_scaled(*arguments):
    """Call the Triton MXFP8 GEMM."""
    return importlib.import_module("vllm_rocm_ops.tools.bench.baselines.triton_mx").dot_scaled(*arguments)
