"""What else is installed that computes what an op does, to be timed and checked beside it: PyTorch, vLLM, FlashAttention, FlashMLA,
AITER, Triton. `PEERS` is the one list of them.

Nothing here is called by the ops. What an op's own file names as its peer is not repeated. vLLM's kernels of rows are listed where
a worker falls back to them, in vllm/fusion/native_rows.py.
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
    """`call` takes what `prepare` makes of the op's arguments; only `call` is timed. Either may raise for what it does not
    take. `is_there` says whether it is installed. `shapes` is the list of bench whose arguments it takes, "" for all of the op's."""

    call: Callable[..., object]
    prepare: Callable[..., tuple] = lambda *arguments: arguments
    is_there: Callable[[], bool] = lambda: True
    shapes: str = ""


def _attends(prepare: Callable[..., tuple], shapes: str = DECODE_ATTENTION) -> Peer:
    """A peer that `prepare` makes a call of."""
    return Peer(lambda attend: attend(), prepare, shapes=shapes)


def _of_rows(name: str) -> Peer:
    """vLLM's op of the same name, of our op's outputs, which it writes, and arguments. It normalises `fused_add_rms_norm` in place,
    into the input."""

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
NOT_PYTORCHS = (
    "scaled_mm_silu_and_mul_quant",
    "fused_experts",
)  # their references are no peers: the latter loops over experts


def peers(op: Op, shapes: str = "") -> dict[str, Peer]:
    """Return the installed peers of an op by name, PyTorch's first; with `shapes`, the peers of a list of bench alone."""
    own = {} if shapes or op.name in NOT_PYTORCHS else {"torch": Peer(op.peer or op.reference)}
    return own | {n: peer for n, peer in PEERS.get(op.name, {}).items() if peer.shapes == shapes and peer.is_there()}


def of_experts(arguments: tuple) -> dict[str, Peer]:
    """Every form of vLLM's experts in each of its tiles, for calls like this one, if vLLM is installed."""
    vllm = PEERS["fused_experts"]["vllm"]
    found = experts.variants(arguments) if vllm.is_there() else {}
    return {name: vllm._replace(call=call) for name, call in found.items()}


def prepare(found: Mapping[str, Peer], clock: Clock, sets: list[tuple]) -> tuple[dict[str, object], dict[str, str]]:
    """Return each peer as a clock takes it, on these sets of the op's arguments, and why the others are unavailable."""
    prepared, unavailable = {}, {}
    for name, peer in found.items():
        try:
            prepared[name] = clock.prepare(peer.call, [peer.prepare(*arguments) for arguments in sets])
        except Exception as error:  # noqa: BLE001  whatever a peer says, it is not available
            unavailable[name] = (f"{type(error).__name__}: {error}".splitlines() or [""])[0]
    return prepared, unavailable


def load_vllm() -> str | None:
    """Register vLLM's compiled ops if vLLM is installed, and return its version."""
    installed.load()
    with contextlib.suppress(ImportError):
        return importlib.import_module("vllm").__version__
    return None
