"""What else is installed that computes what an op does, to be timed beside it: PyTorch, vLLM's compiled ops, AITER, Triton.

What an op's own file names as its peer is not repeated here. `torch._scaled_mm` is hipBLASLt on ROCm and cuBLASLt on CUDA. Nothing here is called by the ops.
"""

import contextlib
import functools
import importlib.util
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from vllm_rocm_ops import ops
from vllm_rocm_ops.core.clock import Clock
from vllm_rocm_ops.core.op import Op
from vllm_rocm_ops.ops.families.gemm import BLOCK
from vllm_rocm_ops.tools.bench import vllm_experts


class Peer(NamedTuple):
    """`call` takes what `prepare` makes of the op's arguments; only `call` is timed. Either may raise for what it does not
    take."""

    call: Callable[..., object]
    prepare: Callable[..., tuple] = lambda *arguments: arguments


def peers(op: Op) -> dict[str, Peer]:
    """The peers of an op, by name."""
    found = dict(PYTORCH.get(op.name, {"torch": Peer(op.peer or op.reference)}))
    vllm = vllm_call(op)
    if vllm is not None:

        def prepare(*arguments):
            a = op.Arguments(*arguments)
            return op.allocate(a), a

        found["vllm"] = Peer(vllm, prepare)
    for name, peer, is_there in OTHERS.get(op.name, ()):
        if is_there():
            found[name] = peer
    return found


def prepare(found: Mapping[str, Peer], clock: Clock, sets: list[tuple]) -> tuple[dict[str, object], dict[str, str]]:
    """What a clock takes of each peer, on so many sets of the op's arguments; and why the others are unavailable."""
    prepared, unavailable = {}, {}
    for name, peer in found.items():
        try:
            prepared[name] = clock.prepare(peer.call, [peer.prepare(*arguments) for arguments in sets])
        except Exception as error:  # noqa: BLE001  whatever a peer says, it is not available
            unavailable[name] = (f"{type(error).__name__}: {error}".splitlines() or [""])[0]
    return prepared, unavailable


def load_vllm() -> str | None:
    """Register vLLM's compiled ops if vLLM is installed, and return its version."""
    load()
    with contextlib.suppress(ImportError):
        return importlib.import_module("vllm").__version__
    return None


@functools.cache
def load() -> None:
    """Registers vLLM's compiled ops if vLLM is installed."""
    with contextlib.suppress(ImportError):
        importlib.import_module("vllm._custom_ops")


# vLLM's ops that write into tensors: (torch.ops._C, outputs, arguments)

ROWS = {
    "rms_norm": lambda c, out, a: c.rms_norm(out, a.input, a.weight, a.epsilon),
    "fused_add_rms_norm": lambda c, out, a: c.fused_add_rms_norm(a.input, a.residual, a.weight, a.epsilon),
    "rms_norm_static_fp8_quant": lambda c, out, a: c.rms_norm_static_fp8_quant(
        out, a.input, a.weight, a.scale, a.epsilon
    ),
    "fused_add_rms_norm_static_fp8_quant": lambda c, out, a: c.fused_add_rms_norm_static_fp8_quant(
        out, a.input, a.residual, a.weight, a.scale, a.epsilon
    ),
    "rms_norm_dynamic_per_token_quant": lambda c, out, a: c.rms_norm_dynamic_per_token_quant(
        out[0], a.input, a.weight, out[1], a.epsilon, a.scale_ub, a.residual
    ),
    "rms_norm_per_block_quant": lambda c, out, a: c.rms_norm_per_block_quant(
        out[0], a.input, a.weight, out[1], a.epsilon, a.scale_ub, a.residual, a.group_size, a.is_scale_transposed
    ),
    "silu_and_mul": lambda c, out, a: c.silu_and_mul(out, a.input),
    "silu_and_mul_quant": lambda c, out, a: c.silu_and_mul_quant(out, a.input, a.scale),
    "silu_and_mul_per_block_quant": lambda c, out, a: c.silu_and_mul_per_block_quant(
        out[0], a.input, out[1], a.group_size, a.scale_ub, a.is_scale_transposed
    ),
}


def vllm_call(op: Op) -> Callable[[object, tuple], None] | None:
    """vLLM's op of the same name as a function of our op's outputs, which it writes, and arguments; None where it has none.
    It normalises `fused_add_rms_norm` in place, into the input."""
    load()
    if op.name not in ROWS or not hasattr(torch.ops._C, op.name):
        return None
    return lambda outputs, arguments: ROWS[op.name](torch.ops._C, outputs, op.Arguments(*arguments))


# Products: peers take the op's arguments


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"it takes {what}")


def _torch_scaled(a, b, sa, sb, dtype, bias=None):
    return torch._scaled_mm(a, b, sa, sb.t() if sb.numel() > 1 else sb, bias=bias, out_dtype=dtype)


def _torch_tensorwise(a, b, sa, sb, dtype, bias=None):
    """With one scale each in place of the given ones: another product, but the speed that these kernels have."""
    _require(sb.numel() > 1, "scales per token and channel; with others it is the same as torch")
    return torch._scaled_mm(a, b, sa[:1], sb[:1], bias=bias, out_dtype=dtype)


def _torch_blocks(a, b, sa, sb, dtype):
    fits = sb.shape[1] % 4 == 0 and len(a) % 4 == 0
    _require(fits, "K a multiple of 512 and M one of 4, or it reads scales past their end")
    return torch._scaled_mm(a, b.t(), sa, sb.t(), out_dtype=dtype)


def column_major(a, b, sa, sb, dtype):
    """Scales of the activations as cuBLASLt and vLLM's block kernels want them."""
    return a, b, sa.t().contiguous().t(), sb, dtype


def _cutlass(a, b, sa, sb, dtype, bias=None):
    out = a.new_empty((len(a), b.shape[1]), dtype=dtype)
    torch.ops._C.cutlass_scaled_mm(out, a, b, sa, sb, bias)
    return out


def _cutlass_tensorwise(a, b, sa, sb, dtype, bias=None):
    _require(sb.numel() > 1, "scales per token and channel; with others it is the same as vllm")
    return _cutlass(a, b, sa[:1], sb[:1], dtype, bias)


def _two_launches(a, b, sa, sb, scale, dtype=torch.bfloat16):
    """Ours, one after the other."""
    return ops.silu_and_mul_quant(ops.scaled_mm(a, b, sa, sb, dtype), scale, a.dtype)


def _cutlass_and_silu(a, b, sa, sb, scale, dtype=torch.bfloat16):
    out = a.new_empty((len(a), b.shape[1] // 2))
    torch.ops._C.silu_and_mul_quant(out, _cutlass(a, b, sa, sb, dtype), scale)
    return out


def _padded_blocks(a, b, sa, sb, dtype):
    """Padded to a multiple of 4 tokens, which vLLM's kernel takes."""
    missing = -len(a) % 4
    if missing:
        a = torch.cat([a.view(torch.uint8), a.new_zeros(missing, a.shape[1], dtype=torch.uint8)]).view(a.dtype)
        sa = torch.cat([sa, sa.new_ones(missing, sa.shape[1])])
    return column_major(a, b, sa, sb, dtype)


def _cutlass_blocks(a, b, sa, sb, dtype):
    return _cutlass(a, b.t(), sa, sb.t(), dtype)


def _cutlass_gemm(a, b, dtype, sa=None, sb=None, bias=None, *rest):
    """Of `gemm`'s arguments: int8, and fp8, with scales."""
    _require(a.dtype == b.dtype and a.element_size() == 1 and not rest, "two operands of one type of 8 bits")
    return _cutlass(a, b, sa, sb, dtype, bias)


def _rocm_tensorwise(a, b, sa, sb, dtype, bias=None):
    _require(sb.numel() == 1, "one scale per tensor")
    kernels = importlib.import_module("vllm.model_executor.kernels.linear.scaled_mm.rocm")
    return kernels.rocm_per_tensor_float_w8a8_scaled_mm_impl(a, b, dtype, sa, sb, bias)


def _triton_blocks(a, b, sa, sb, dtype):
    kernels = importlib.import_module("vllm.model_executor.layers.quantization.utils.fp8_utils")
    return kernels.w8a8_triton_block_scaled_mm(a, b, sa, sb, [BLOCK, BLOCK], dtype)


def _aiter_rows(a, b, sa, sb, dtype, bias=None):
    _require(sb.numel() > 1, "scales per token and channel")
    return importlib.import_module("aiter").gemm_a8w8_CK(a, b.t(), sa, sb, bias, dtype)


def _aiter_shuffled(a, b, sa, sb, dtype, bias=None):
    weight = importlib.import_module("aiter.ops.shuffle").shuffle_weight(b.t().contiguous(), layout=(16, 16))
    return a, weight, sa, sb, dtype, bias


def _aiter_shuffled_rows(a, b, sa, sb, dtype, bias=None):
    _require(sb.numel() > 1, "scales per token and channel")
    return importlib.import_module("aiter").gemm_a8w8_bpreshuffle(a, b, sa, sb, bias, dtype)


def _aiter_blocks(a, b, sa, sb, dtype):
    return importlib.import_module("aiter").gemm_a8w8_blockscale(a, b, sa, sb, dtype=dtype)


def _rocm_unquantized(x, weight, bias=None):
    importlib.import_module("vllm.model_executor.layers.utils")
    return torch.ops.vllm.rocm_unquantized_gemm(x, weight, bias)


def _triton_dot_scaled(*arguments):
    return importlib.import_module("vllm_rocm_ops.tools.bench.triton_mx").dot_scaled(*arguments)


# Mixtures of experts: see vllm_experts.py


def _vllm_grouped_topk(gating_output, *how):
    router = importlib.import_module("vllm.model_executor.layers.fused_moe.router.grouped_topk_router")
    return router.grouped_topk(gating_output, gating_output, *how)


def _has_cutlass() -> bool:
    load()
    return hasattr(torch.ops._C, "cutlass_scaled_mm")


def _has_vllm_rocm() -> bool:
    return torch.version.hip is not None and vllm_experts.has_vllm()


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _has_aiter() -> bool:
    return torch.version.hip is not None and importlib.util.find_spec("aiter") is not None


PYTORCH: dict[str, dict[str, Peer]] = {
    "scaled_mm": {"torch": Peer(_torch_scaled), "torch tensorwise": Peer(_torch_tensorwise)},
    "scaled_mm_silu_and_mul_quant": {"two launches": Peer(_two_launches)},
    "block_scaled_mm": {"torch": Peer(_torch_blocks, column_major)},
    "fused_experts": {},  # the reference goes through all experts, one by one
}
OTHERS: dict[str, tuple[tuple[str, Peer, Callable[[], bool]], ...]] = {
    "scaled_mm": (
        ("vllm", Peer(_cutlass), _has_cutlass),
        ("vllm tensorwise", Peer(_cutlass_tensorwise), _has_cutlass),
        ("vllm rocm", Peer(_rocm_tensorwise), _has_vllm_rocm),
        ("aiter", Peer(_aiter_rows), _has_aiter),
        ("aiter shuffled", Peer(_aiter_shuffled_rows, _aiter_shuffled), _has_aiter),
    ),
    "scaled_mm_silu_and_mul_quant": (("vllm", Peer(_cutlass_and_silu), _has_cutlass),),
    "block_scaled_mm": (
        ("vllm", Peer(_cutlass_blocks, _padded_blocks), _has_cutlass),
        ("vllm triton", Peer(_triton_blocks), vllm_experts.has_vllm),
        ("aiter", Peer(_aiter_blocks), _has_aiter),
    ),
    "fused_experts": (("vllm", Peer(vllm_experts.call, vllm_experts.prepare), vllm_experts.has_vllm),),
    "gemm": (("vllm", Peer(_cutlass_gemm), _has_cutlass),),
    "mxfp8_scaled_mm": (("triton", Peer(_triton_dot_scaled), _has_triton),),
    "grouped_topk": (("vllm", Peer(_vllm_grouped_topk), vllm_experts.has_vllm),),
    "unquantized_gemm": (("vllm rocm", Peer(_rocm_unquantized), _has_vllm_rocm),),
}
