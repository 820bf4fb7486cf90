"""What runs in a decode step where ours does not: what vLLM's engine runs, as functions of the arguments of our ops.

For each op the first of a list that takes the arguments and computes what the op's reference does: what vLLM compiles,
its own ops and what else peers.py knows, as far as loaded, then PyTorch. Quantisation of what no op of ours quantises is
here too, for both sides.

What vLLM 0.33 compiles by default, on CUDA and on ROCm without AITER: under Inductor its custom ops are off (rms_norm,
silu_and_mul and quant_fp8, in config/vllm.py), so that Inductor fuses the PyTorch forms of a norm or an activation and of
the quantisation behind it, static or per token, into one kernel; the passes that would put C++ kernels there are then off
too. One graph serves any number of tokens: guards are dropped, and the first run has max_num_batched_tokens of them,
which Inductor takes for the size when it chooses tiles. Two cases differ:
- Weights in blocks turn quant_fp8 on, and with it the passes for norms and activations: rms_norm_per_block_quant and, on
  CUDA alone, silu_and_mul_per_block_quant. On ROCm an activation is compiled and then quantised by an op.
- LlamaMLP calls silu_and_mul_quant itself where the linear that follows says which static input it takes. Those of
  the methods in SAY_THEIR_INPUT do, with the kernels of CUDA, not with those of ROCm (wvSplitKQ, torch._scaled_mm).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import stock_attention
import torch
from torch import Tensor

from vllm_rocm_ops import ops, quantization
from vllm_rocm_ops.bench import peers
from vllm_rocm_ops.correctness import as_tuple, clone
from vllm_rocm_ops.families import rowwise
from vllm_rocm_ops.families.gemm import BLOCK
from vllm_rocm_ops.op import Op
from vllm_rocm_ops.quantization import LIMIT
from vllm_rocm_ops.tensors import rows_of

UNCHECKED = ("fused_experts", "grouped_topk")  # the reference goes through all experts; equal experts come in any order
MOST_DIFFERENCE = 0.05  # of the norms of results
REFUSALS = (RuntimeError, ValueError, TypeError, AssertionError, ImportError)
PREFERRED = {
    "scaled_mm": ("vllm", "vllm rocm", "torch"),
    "block_scaled_mm": ("vllm", "vllm triton", "torch"),
    "unquantized_gemm": ("vllm rocm", "torch"),
    "grouped_topk": ("vllm", "torch"),
    "fused_experts": ("vllm",),
}
SAY_THEIR_INPUT = ("quark", "compressed-tensors")
MOST_TOKENS = 16384  # vLLM's max_num_batched_tokens for its LLM class on a GPU with 70 GiB or more
COMPILED = "vllm compiled"
BACKEND = "inductor"


def has(name: str, namespace: str = "_C") -> bool:
    """Whether vLLM's op is loaded."""
    peers.load()
    return hasattr(getattr(torch.ops, namespace), name)


# Quantisation: (values, scale)


def per_token(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    if not x.is_cuda or not has("dynamic_per_token_scaled_fp8_quant"):
        return quantization.per_token(x.float(), dtype, None)
    values, scale = torch.empty_like(x, dtype=dtype), rowwise.scales(x, rows_of(x), 1, False)
    torch.ops._C.dynamic_per_token_scaled_fp8_quant(values, x, scale, None)
    return values, scale


def per_block(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """With column-major scales, as most products want them."""
    scale = rowwise.scales(x, rows_of(x), x.shape[-1] // BLOCK, True)
    if not x.is_cuda or not has("per_token_group_fp8_quant"):
        values, found = quantization.per_token(x.float().unflatten(-1, (-1, BLOCK)), dtype, None)
        return values.flatten(-2), scale.copy_(found.view(scale.shape))
    values = torch.empty_like(x, dtype=dtype)
    limit = LIMIT[dtype]
    torch.ops._C.per_token_group_fp8_quant(x, values, scale, BLOCK, 1e-10, -limit, limit, False, True, False)
    return values, scale


def static(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    if not x.is_cuda or not has("static_scaled_fp8_quant"):
        return quantization.static(x.float(), scale, dtype), scale
    values = torch.empty_like(x, dtype=dtype)
    torch.ops._C.static_scaled_fp8_quant(values, x, scale, None)
    return values, scale


# What vLLM compiles: its PyTorch forms, by op


def _sum(input: Tensor, residual: Tensor | None) -> Tensor:
    """input + residual unrounded, which the residual takes over."""
    x = input.float()
    if residual is not None:
        x = x + residual.float()
        residual.copy_(x)
    return x


def _norm(x: Tensor, weight: Tensor, epsilon: float, one_plus_weight: bool) -> Tensor:
    n = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)
    return (n * (1.0 + weight.float())).to(weight.dtype) if one_plus_weight else n.to(weight.dtype) * weight


def _by_static(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (x.float() * scale.reciprocal()).clamp(-LIMIT[dtype], LIMIT[dtype]).to(dtype)


def _by_token(x: Tensor, dtype: torch.dtype, scale_ub: Tensor | None) -> tuple[Tensor, Tensor]:
    largest = x.abs().amax(-1, keepdim=True).float()
    if scale_ub is not None:
        largest = largest.clamp(max=scale_ub)
    scale = (largest / LIMIT[dtype]).clamp(min=1 / (LIMIT[dtype] * 512))
    return _by_static(x, scale, dtype), scale


def _rms_norm(input, weight, epsilon, one_plus_weight=False):
    return _norm(_sum(input, None), weight, epsilon, one_plus_weight)


def _fused_add_rms_norm(input, residual, weight, epsilon, one_plus_weight=False):
    return _norm(_sum(input, residual), weight, epsilon, one_plus_weight)


def _rms_norm_static(input, weight, scale, epsilon, dtype, one_plus_weight=False):
    return _by_static(_norm(_sum(input, None), weight, epsilon, one_plus_weight), scale, dtype)


def _fused_add_rms_norm_static(input, residual, weight, scale, epsilon, dtype, one_plus_weight=False):
    return _by_static(_norm(_sum(input, residual), weight, epsilon, one_plus_weight), scale, dtype)


def _rms_norm_per_token(input, weight, epsilon, dtype, scale_ub=None, residual=None, one_plus_weight=False):
    return _by_token(_norm(_sum(input, residual), weight, epsilon, one_plus_weight), dtype, scale_ub)


def _silu_and_mul(input):
    gate, up = input.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def _silu_and_mul_static(input, scale, dtype):
    return _by_static(_silu_and_mul(input), scale, dtype)


def _silu_and_mul_per_token(input, dtype, scale_ub=None):
    return _by_token(_silu_and_mul(input), dtype, scale_ub)


NATIVE = {
    "rms_norm": _rms_norm,
    "fused_add_rms_norm": _fused_add_rms_norm,
    "rms_norm_static_fp8_quant": _rms_norm_static,
    "fused_add_rms_norm_static_fp8_quant": _fused_add_rms_norm_static,
    "rms_norm_dynamic_per_token_quant": _rms_norm_per_token,
    "silu_and_mul": _silu_and_mul,
    "silu_and_mul_quant": _silu_and_mul_static,
    "silu_and_mul_per_token_quant": _silu_and_mul_per_token,
}


class Compiled:
    """A function of an op's arguments, compiled as vLLM compiles a model: once, with MOST_TOKENS rows, for any number of
    them. Raises RuntimeError rather than compile for the rows of a call."""

    def __init__(self, native: Callable, backend: str | Callable):
        options = {"guard_filter_fn": lambda guards: [guard.guard_type != "SHAPE_ENV" for guard in guards]}
        self.call = torch.compile(native, backend=backend, fullgraph=True, dynamic=False, options=options)
        self.known: set[tuple] = set()

    def __call__(self, *arguments):
        layout = tuple(_but_rows(value) for value in arguments)
        if layout not in self.known:
            self.call(*map(_with_most_rows, arguments))
            self.known.add(layout)
        with torch.compiler.set_stance("fail_on_recompile"):
            return self.call(*arguments)


compiled = functools.cache(Compiled)


def _but_rows(value):
    """What decides how an argument is compiled."""
    if not isinstance(value, Tensor):
        return value
    return value.shape[value.dim() > 1 :], value.stride(), value.dtype, value.device, value.is_inference()


def _with_most_rows(value):
    """An argument of the same layout whose rows are MOST_TOKENS and not to be relied on; what has no rows stays."""
    if not isinstance(value, Tensor) or value.dim() < 2:
        return value
    stand_in = torch.empty_strided(
        (MOST_TOKENS, *value.shape[1:]), value.stride(), dtype=value.dtype, device=value.device
    )
    torch._dynamo.mark_dynamic(stand_in, 0)
    return stand_in


def compiles(op: Op, method: str | None) -> bool:
    """Whether vLLM leaves the op to Inductor for a model that is quantised so."""
    if op is ops.silu_and_mul_quant:
        return torch.version.hip is not None or method not in SAY_THEIR_INPUT
    return op.name in NATIVE


# Ops


def _rows(op: Op, run: Callable) -> Callable:
    """vLLM's op, which writes what it is given, as one that returns it."""

    def call(*arguments):
        a = op.Arguments(*arguments)
        if op is ops.fused_add_rms_norm:  # it normalises in place
            run(None, a)
            return a.input
        outputs = op.allocate(a)
        run(outputs, a)
        return outputs

    return call


def _silu_and_mul_then_quantise(input: Tensor, quant_dtype: torch.dtype, scale_ub: Tensor | None = None):
    product = input.new_empty((*input.shape[:-1], input.shape[-1] // 2))
    torch.ops._C.silu_and_mul(product, input)
    return per_token(product, quant_dtype)


def _silu_and_mul_then_blocks(input: Tensor, quant_dtype: torch.dtype, *_):
    return per_block(compiled(_silu_and_mul, BACKEND)(input), quant_dtype)


def _grouped_topk(gating_output, topk, renormalize, groups, topk_group, scoring_func, scale, bias):
    if scoring_func != "sigmoid" or bias is None:
        raise ValueError("it takes sigmoid scores and a bias")
    return torch.ops._moe_C.grouped_topk(gating_output, groups, topk_group, topk, renormalize, scale, bias, 1)


def _of_peer(peer: peers.Peer, *arguments):
    return peer.call(*peer.prepare(*arguments))


def candidates(op: Op, method: str | None) -> Iterator[tuple[str, Callable]]:
    """Functions of the op's arguments that compute it on a GPU, by name, the first choice first, for a model that is
    quantised by a method."""
    if op.name in stock_attention.KINDS:
        yield from stock_attention.candidates(op)
        return
    if compiles(op, method):
        yield COMPILED, compiled(NATIVE[op.name], BACKEND)
    elif op is ops.silu_and_mul_per_block_quant and torch.version.hip:
        yield f"{COMPILED} silu_and_mul + per_token_group_fp8_quant", _silu_and_mul_then_blocks
    run = peers.vllm_call(op)
    if run is not None:
        yield "vllm", _rows(op, run)
        yield "vllm, of a contiguous copy", lambda x, *others: _rows(op, run)(x.contiguous(), *others)
    if op is ops.silu_and_mul_per_token_quant and has("silu_and_mul") and has("dynamic_per_token_scaled_fp8_quant"):
        yield "vllm silu_and_mul + dynamic_per_token_scaled_fp8_quant", _silu_and_mul_then_quantise
    if op is ops.grouped_topk and has("grouped_topk", "_moe_C"):
        yield "vllm grouped_topk", _grouped_topk
    found = peers.peers(op)
    for name in PREFERRED.get(op.name, ("torch",)):
        if name in found and op is ops.block_scaled_mm and name == "vllm":  # pads tokens, if it cannot take them so
            yield name, found[name].call
            yield f"{name}, padded", lambda *arguments: _of_peer(found["vllm"], *arguments)[: len(arguments[0])]
        elif name in found:
            yield name, functools.partial(_of_peer, found[name])


class Stock:
    """An op as vLLM computes it. The first call with arguments so laid out finds what takes them; `used` names what
    ran, each with what was refused before."""

    def __init__(self, op: Op, device: str, method: str | None = None):
        self.op, self.used = op, {}
        self.candidates = [("reference", op.reference)] if device == "cpu" else list(candidates(op, method))
        self._chosen: dict[tuple, Callable] = {}

    def __bool__(self) -> bool:
        """Whether there is anything that computes the op."""
        return bool(self.candidates)

    def __call__(self, *arguments):
        key = tuple((value.shape, value.stride()) for value in arguments if isinstance(value, Tensor))
        if key not in self._chosen:
            self._chosen[key] = self._choose(arguments)
        return self._chosen[key](*arguments)

    def _choose(self, arguments: tuple) -> Callable:
        refused = []
        for name, call in self.candidates:
            try:
                if call is not self.op.reference:
                    mine, theirs = _copies(arguments), _copies(arguments)
                    result = call(*mine)
                    if self.op.name not in UNCHECKED:
                        require_same(result, self.op.reference(*theirs))
                        for updated in self.op.mutates:
                            require_same(*(getattr(self.op.Arguments(*given), updated) for given in (mine, theirs)))
            except REFUSALS as error:
                refused.append(f"{name}: {reason(error)}")
                continue
            self.used[name] = refused
            return call
        raise RuntimeError(f"nothing computes {self.op.name}: {'; '.join(refused)}")


def _copies(arguments: tuple) -> tuple:
    return tuple(clone(value, value.device) if isinstance(value, Tensor) else value for value in arguments)


def reason(error: Exception) -> str:
    """Its kind and first line; what stopped a compiler, not that it did."""
    error = getattr(error, "inner_exception", error)
    return f"{type(error).__name__} {str(error).partition(chr(10))[0]}"


def require_same(result, expected) -> None:
    """Raises ValueError for a result that is another."""
    for mine, wanted in zip(as_tuple(result), as_tuple(expected), strict=True):
        if mine.numel() == wanted.numel() == 0:
            continue
        off = ((mine.float() - wanted.float()).norm() / wanted.float().norm()).item()
        if not off <= MOST_DIFFERENCE:
            raise ValueError(f"its result is off by {off:.2f} of the reference's")
