"""List the installed kernels to benchmark and check the ops against: PyTorch, vLLM, FlashAttention, FlashMLA, AITER, Triton.

`BASELINES` is the only list of them. The ops never call these kernels. Baselines in an op's own file are not repeated here. vLLM's
row kernels are listed in vllm/graph/vllm_row_kernels.py, where a worker falls back to them.
"""

import contextlib
import functools
import importlib
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from torch.nn import functional

from vllm_rocm_ops.core.clock import Clock
from vllm_rocm_ops.core.op import Op, registered
from vllm_rocm_ops.models.fused_calls import EXPERT_GATES
from vllm_rocm_ops.tools.bench.baselines import (
    attention,
    experts,
    gated_delta_net,
    gemm,
    installed,
    routing,
    triton_kernels,
)
from vllm_rocm_ops.vllm.graph import vllm_row_kernels

ATTENTION, DECODE_ATTENTION, ADVICE = "attention", "decode-attention", "advice"
GATED_DELTA_NET = "gated-delta-net"


class Baseline(NamedTuple):
    """Describe another kernel for an op.

    `call` takes the result of `prepare` on the op's arguments; only `call` is timed. Both may raise for unsupported arguments.
    `is_there` tells whether the kernel is installed. `shapes` names the bench list that it supports, or `ADVICE`; "" is every other case.
    """

    call: Callable[..., object]
    prepare: Callable[..., tuple] = lambda *arguments: arguments
    is_there: Callable[[], bool] = lambda: True
    shapes: str = ""


def _attends(prepare: Callable[..., tuple], shapes: str = DECODE_ATTENTION) -> Baseline:
    """Return a baseline whose call is created by `prepare`."""
    return Baseline(lambda attend: attend(), prepare, shapes=shapes)


def _of_rows(name: str) -> Baseline:
    """Return vLLM's op of the same name, called with the op's outputs, which it writes, and arguments.

    vLLM's `fused_add_rms_norm` normalizes in place, into the input.
    """

    def prepare(*arguments) -> tuple:
        op = next(op for op in registered() if op.name == name)
        a = op.Arguments(*arguments)
        return op.allocate(a), a

    return Baseline(vllm_row_kernels.COMPILED[name], prepare, functools.partial(installed.has_compiled, name))


_has_cutlass = functools.partial(installed.has_compiled, "cutlass_scaled_mm")
_has_vllm = functools.partial(installed.has, "vllm")
_has_vllm_rocm = functools.partial(installed.has, "vllm", on_rocm=True)
_has_aiter = functools.partial(installed.has, "aiter", on_rocm=True)
_has_triton = functools.partial(installed.has, "triton")

BASELINES: dict[str, dict[str, Baseline]] = {
    **{name: {"vllm": _of_rows(name)} for name in vllm_row_kernels.COMPILED},
    "scaled_mm": {
        "torch": Baseline(gemm.torch_scaled),
        "torch tensorwise": Baseline(gemm.torch_tensorwise),
        "vllm": Baseline(gemm.cutlass, is_there=_has_cutlass),
        "vllm tensorwise": Baseline(gemm.cutlass_tensorwise, is_there=_has_cutlass),
        "vllm rocm": Baseline(gemm.rocm_tensorwise, is_there=_has_vllm_rocm),
        "aiter": Baseline(gemm.aiter_rows, is_there=_has_aiter),
        "aiter shuffled": Baseline(gemm.aiter_shuffled_rows, gemm.aiter_shuffled, _has_aiter),
    },
    "scaled_mm_silu_and_mul_quant": {
        "two launches": Baseline(gemm.two_launches),
        "vllm": Baseline(gemm.cutlass_and_silu, is_there=_has_cutlass),
    },
    "block_scaled_mm": {
        "torch": Baseline(gemm.torch_blocks, gemm.column_major),
        "vllm": Baseline(gemm.cutlass_blocks, gemm.padded_blocks, _has_cutlass),
        "vllm triton": Baseline(gemm.triton_blocks, is_there=_has_vllm),
        "aiter": Baseline(gemm.aiter_blocks, is_there=_has_aiter),
    },
    "fused_experts": {
        "vllm": Baseline(experts.call, experts.prepare, _has_vllm),
        "aiter": Baseline(experts.aiter, experts.aiter_prepare, _has_aiter, ADVICE),  # it may compile for minutes
    },
    "gemm": {"vllm": Baseline(gemm.cutlass_gemm, is_there=_has_cutlass)},
    "mxfp8_scaled_mm": {"triton": Baseline(gemm.triton_dot_scaled, is_there=_has_triton)},
    "router_gemm_topk": {"linear and top-k": Baseline(routing.linear_and_topk)},
    **{op.name: {"four launches": Baseline(routing.four_launches(alone))} for alone, (op, _) in EXPERT_GATES.items()},
    "grouped_topk": {"vllm": Baseline(routing.vllm_grouped_topk, is_there=_has_vllm)},
    "w4a16_gemm": {
        "vllm triton": Baseline(gemm.triton_w4a16, is_there=_has_vllm),
        "vllm marlin": Baseline(gemm.marlin_w4a16, gemm.marlin_weights, _has_vllm),
    },
    "mx_gemm": {"bf16 copy": Baseline(functional.linear, gemm.bf16_copy)},
    "unquantized_gemm": {"vllm rocm": Baseline(gemm.rocm_unquantized, is_there=_has_vllm_rocm)},
    "flash_attention": {
        "torch": Baseline(attention.torch_dense, shapes=ATTENTION),
        "flash-attn 3": _attends(attention.flash_dense, ATTENTION),
    },
    "paged_attention_decode": {
        "flash-attn 3": _attends(attention.flash_paged),
        "vllm triton": _attends(attention.unified),
    },
    "mla_decode": {
        "flash-attn 3": _attends(attention.flash_latent),
        "flashmla": _attends(attention.flash_mla),
        "vllm triton": _attends(attention.triton_mla),
    },
    "gated_delta_net_decode": {
        "two launches": Baseline(gated_delta_net.two_launches, gated_delta_net.prepare_tokens, shapes=GATED_DELTA_NET),
        "vllm triton": Baseline(gated_delta_net.call, gated_delta_net.prepare, _has_vllm, GATED_DELTA_NET),
    },
}
NOT_PYTORCHS = (  # ops whose PyTorch reference is not a baseline: two loop over experts or requests, one sums in float64
    "mx_gemm",
    "router_gemm_topk",
    "scaled_mm_silu_and_mul_quant",
    "fused_experts",
    "gated_delta_net_decode",
)


def baselines(op: Op, shapes: str = "") -> dict[str, Baseline]:
    """Return the installed baselines of an op by name, PyTorch first; with `shapes`, only the baselines of that bench list."""
    own = {} if shapes or op.name in NOT_PYTORCHS else {"torch": Baseline(op.baseline or op.reference)}
    return own | {
        n: baseline
        for n, baseline in BASELINES.get(op.name, {}).items()
        if baseline.shapes == shapes and baseline.is_there()
    }


def of_experts(arguments: tuple) -> dict[str, Baseline]:
    """Return every form of vLLM's fused MoE in each of its tile sizes, for calls like this one, if vLLM is installed.

    MXFP4 weights have triton_kernels' forms. MXFP8 weights have none, and `prepare` says why.
    """
    vllm = BASELINES["fused_experts"]["vllm"]
    if not vllm.is_there():
        return {}
    if experts.has_mx_scales(arguments):
        forms = triton_kernels.forms() if experts.is_four_bit(arguments) else {}
        return {name: Baseline(*form) for name, form in forms.items()} or {"vllm": vllm}
    forms = {name: vllm._replace(call=call) for name, call in experts.variants(arguments).items()}
    with_marlin = experts.is_int4(arguments) and installed.has_compiled("gptq_marlin_repack")
    return forms | ({"vllm marlin": Baseline(experts.marlin, experts.marlin_prepare)} if with_marlin else {})


def prepare(
    kernels: Mapping[str, Baseline], clock: Clock, sets: list[tuple]
) -> tuple[dict[str, object], dict[str, str]]:
    """Return the baselines prepared for a clock on these sets of arguments, and why the others are unavailable."""
    prepared, unavailable = {}, {}
    for name, baseline in kernels.items():
        try:
            prepared[name] = clock.prepare(baseline.call, [baseline.prepare(*arguments) for arguments in sets])
        except Exception as error:  # noqa: BLE001  any failure makes a baseline unavailable
            unavailable[name] = _why(error)
    return prepared, unavailable


def _why(error: Exception) -> str:
    """Return the first line of an error, or the place in the code of an error without a text."""
    if not str(error) and (places := traceback.extract_tb(error.__traceback__)):
        return f"{type(error).__name__}: {Path(places[-1].filename).name}:{places[-1].lineno}: {places[-1].line}"
    return f"{type(error).__name__}: {error}".splitlines()[0]


def load_vllm() -> str | None:
    """Register vLLM's compiled ops if vLLM is installed, and return its version."""
    installed.load()
    with contextlib.suppress(ImportError):
        return importlib.import_module("vllm").__version__
    return None
