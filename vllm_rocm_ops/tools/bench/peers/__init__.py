"""List the installed kernels to benchmark and check the ops against: PyTorch, vLLM, FlashAttention, FlashMLA, AITER, Triton.

`PEERS` is the only list of them. The ops never call these kernels. Peers that an op's file names are not repeated here. vLLM's
row kernels are listed in vllm/fusion/native_rows.py, where a worker falls back to them.
"""

import contextlib
import functools
import importlib
from collections.abc import Callable, Mapping
from typing import NamedTuple

from vllm_rocm_ops.core.clock import Clock
from vllm_rocm_ops.core.op import Op, registered
from vllm_rocm_ops.tools.bench.peers import attention, experts, installed, products
from vllm_rocm_ops.vllm.fusion import native_rows

ATTENTION, DECODE_ATTENTION = "attention", "decode-attention"


class Peer(NamedTuple):
    """Describe another kernel for an op.

    `call` takes the result of `prepare` on the op's arguments; only `call` is timed. Both may raise for unsupported arguments.
    `is_there` tells whether the kernel is installed. `shapes` names the bench list that it supports; "" is every other case.
    """

    call: Callable[..., object]
    prepare: Callable[..., tuple] = lambda *arguments: arguments
    is_there: Callable[[], bool] = lambda: True
    shapes: str = ""


def _attends(prepare: Callable[..., tuple], shapes: str = DECODE_ATTENTION) -> Peer:
    """Return a peer whose call is created by `prepare`."""
    return Peer(lambda attend: attend(), prepare, shapes=shapes)


def _of_rows(name: str) -> Peer:
    """Return vLLM's op of the same name, called with the op's outputs, which it writes, and arguments.

    vLLM's `fused_add_rms_norm` normalizes in place, into the input.
    """

    def prepare(*arguments) -> tuple:
        op = next(op for op in registered() if op.name == name)
        a = op.Arguments(*arguments)
        return op.allocate(a), a

    return Peer(native_rows.COMPILED[name], prepare, functools.partial(installed.has_compiled, name))


_has_cutlass = functools.partial(installed.has_compiled, "cutlass_scaled_mm")
_has_vllm = functools.partial(installed.has, "vllm")
_has_vllm_rocm = functools.partial(installed.has, "vllm", on_rocm=True)
_has_aiter = functools.partial(installed.has, "aiter", on_rocm=True)
_has_triton = functools.partial(installed.has, "triton")

PEERS: dict[str, dict[str, Peer]] = {
    **{name: {"vllm": _of_rows(name)} for name in native_rows.COMPILED},
    "scaled_mm": {
        "torch": Peer(products.torch_scaled),
        "torch tensorwise": Peer(products.torch_tensorwise),
        "vllm": Peer(products.cutlass, is_there=_has_cutlass),
        "vllm tensorwise": Peer(products.cutlass_tensorwise, is_there=_has_cutlass),
        "vllm rocm": Peer(products.rocm_tensorwise, is_there=_has_vllm_rocm),
        "aiter": Peer(products.aiter_rows, is_there=_has_aiter),
        "aiter shuffled": Peer(products.aiter_shuffled_rows, products.aiter_shuffled, _has_aiter),
    },
    "scaled_mm_silu_and_mul_quant": {
        "two launches": Peer(products.two_launches),
        "vllm": Peer(products.cutlass_and_silu, is_there=_has_cutlass),
    },
    "block_scaled_mm": {
        "torch": Peer(products.torch_blocks, products.column_major),
        "vllm": Peer(products.cutlass_blocks, products.padded_blocks, _has_cutlass),
        "vllm triton": Peer(products.triton_blocks, is_there=_has_vllm),
        "aiter": Peer(products.aiter_blocks, is_there=_has_aiter),
    },
    "fused_experts": {"vllm": Peer(experts.call, experts.prepare, _has_vllm)},
    "gemm": {"vllm": Peer(products.cutlass_gemm, is_there=_has_cutlass)},
    "mxfp8_scaled_mm": {"triton": Peer(products.triton_dot_scaled, is_there=_has_triton)},
    "grouped_topk": {"vllm": Peer(products.vllm_grouped_topk, is_there=_has_vllm)},
    "unquantized_gemm": {"vllm rocm": Peer(products.rocm_unquantized, is_there=_has_vllm_rocm)},
    "flash_attention": {
        "torch": Peer(attention.torch_dense, shapes=ATTENTION),
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
}
NOT_PYTORCHS = (  # ops whose PyTorch reference is not a peer: that of fused_experts loops over experts
    "scaled_mm_silu_and_mul_quant",
    "fused_experts",
)


def peers(op: Op, shapes: str = "") -> dict[str, Peer]:
    """Return the installed peers of an op by name, PyTorch first; with `shapes`, only the peers of that bench list."""
    own = {} if shapes or op.name in NOT_PYTORCHS else {"torch": Peer(op.peer or op.reference)}
    return own | {n: peer for n, peer in PEERS.get(op.name, {}).items() if peer.shapes == shapes and peer.is_there()}


def of_experts(arguments: tuple) -> dict[str, Peer]:
    """Return every form of vLLM's fused MoE in each of its tile sizes, for calls like this one, if vLLM is installed."""
    vllm = PEERS["fused_experts"]["vllm"]
    found = experts.variants(arguments) if vllm.is_there() else {}
    return {name: vllm._replace(call=call) for name, call in found.items()}


def prepare(found: Mapping[str, Peer], clock: Clock, sets: list[tuple]) -> tuple[dict[str, object], dict[str, str]]:
    """Return the peers prepared for a clock on these sets of arguments, and why the others are unavailable."""
    prepared, unavailable = {}, {}
    for name, peer in found.items():
        try:
            prepared[name] = clock.prepare(peer.call, [peer.prepare(*arguments) for arguments in sets])
        except Exception as error:  # noqa: BLE001  any failure makes a peer unavailable
            unavailable[name] = (f"{type(error).__name__}: {error}".splitlines() or [""])[0]
    return prepared, unavailable


def load_vllm() -> str | None:
    """Register vLLM's compiled ops if vLLM is installed, and return its version."""
    installed.load()
    with contextlib.suppress(ImportError):
        return importlib.import_module("vllm").__version__
    return None
