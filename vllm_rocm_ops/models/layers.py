"""List the launches that one rank makes in a decode step of a model, as vLLM builds it for this TP and EP.

`calls(model_config.read(model), tp, ep)` lists those that are calls of the plugin's ops: linear layers; the norms and activations
around them, with quantization for the linears that read their result (see vllm/graph/rewrite.py); routing and experts.
`launches` has the whole step in its order. vllm_launches.py says where the answers come from.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from vllm_rocm_ops import ops
from vllm_rocm_ops.core.arch import Arch
from vllm_rocm_ops.core.op import Case, Op, registered
from vllm_rocm_ops.models import arguments as model_arguments
from vllm_rocm_ops.models import vllm_launches
from vllm_rocm_ops.ops.shared import by_quantization
from vllm_rocm_ops.ops.shared.inputs import Inputs

ARCH = vllm_launches.AMD[-1]
"""The architecture whose kernels serve the most formats."""

AROUND_ATTENTION = "attention", "W_UK", "W_UV"
"""Calls that `sequence` omits, as vLLM chooses between the op and its own kernel at startup."""
PREFILL = "kv_b (prefill)"
DELTA_NET, GATED_NORM = "Gated DeltaNet", "gated norm"
"""Names of what vLLM runs between a layer's projections in Qwen3-Next and Qwen3.5."""
ATTENTION = ops.paged_attention_decode, ops.mla_decode
"""Decode attention ops, which vLLM calls if they were measured to be faster at every sequence length."""
LINEARS = tuple(op for op in registered() if op.linear)
"""Ops of linear layers."""


def with_arguments(table: dict[str, tuple[str, ...]], make: Callable[..., tuple]) -> dict[str, tuple]:
    """Return the ops of a table without a residual, each with the function that makes its arguments, by quantization."""
    found = ((kind, getattr(ops, names[0])) for kind, names in table.items())
    return {kind: (op, functools.partial(make, op)) for kind, op in found}


NORMS = with_arguments(by_quantization.NORMS, model_arguments.norm)
"""Norms without a residual, by the quantization of the linear that reads them; others quantize in a second launch."""
RESIDUAL = {getattr(ops, one): getattr(ops, two) for one, two in (n for n in by_quantization.NORMS.values() if n[1:])}
"""Norms whose op with a residual is another one."""
ACTIVATIONS = with_arguments(by_quantization.ACTIVATIONS, model_arguments.activation)
"""Activations by the quantization of the linear that reads them."""
GATES = with_arguments(by_quantization.GATES, model_arguments.gate)
"""Gates of attention's output by the quantization of the linear that reads it."""
ARGUMENTS = {
    **{op: op.linear for op in LINEARS},
    ops.topk_softmax: model_arguments.routing,
    ops.grouped_topk: model_arguments.routing,
    ops.fused_experts: model_arguments.experts,
    ops.paged_attention_decode: model_arguments.heads_attention,
    ops.mla_decode: model_arguments.mla_attention,
    ops.batched_gemm: model_arguments.absorbed,
    **dict([*NORMS.values(), *ACTIVATIONS.values(), *GATES.values()]),
    **{
        op: functools.partial(model_arguments.norm, op) for op in (*RESIDUAL.values(), ops.rms_norm_and_per_block_quant)
    },
}
"""Functions that make the arguments of a step's ops."""


@dataclass(frozen=True)
class LayerCall:
    """One call of an op.

    `arguments(tokens, inputs, *parameters)` makes the op's arguments; `count` is the number of calls per decode step, 0 for prefill
    only.
    """

    layer: str
    op: Op
    arguments: Callable[..., tuple]
    parameters: tuple
    dtype: torch.dtype
    count: int = 1
    fusion = None
    """The row of fused_calls.py that a call in place of others is of."""
    parts = ()
    """The calls that it replaces."""
    traits = ""
    """Text that follows the name of the op's shape in a record of times."""

    def case(self, tokens: int) -> Case:
        """Return the call with `tokens` tokens as a case of its op. On a GPU the generator may be on that GPU."""

        def make(device: str, generator: torch.Generator, fp8_dtype: torch.dtype) -> tuple:
            return self.arguments(tokens, Inputs(device, generator, fp8_dtype, self.dtype), *self.parameters)

        return Case(f"{self.layer} {tokens}", make)


@dataclass(frozen=True)
class Launch:
    """A launch of a step without an op: `runs` says what vLLM runs for a layer that no op serves."""

    layer: str
    parameters: tuple = ()
    runs: str = ""
    dtype: torch.dtype = torch.bfloat16


def built_for(arch: Arch | None) -> str:
    """Return the architecture for which vLLM builds models that run on `arch`: itself, unless it is another vendor's or None."""
    return arch.name if arch and arch.vendor == "amd" else ARCH


@functools.lru_cache(maxsize=64)
def _launches(config: str, tp: int, ep: int | None, arch: str, rocm_cache_layout: bool) -> list[LayerCall | Launch]:
    result: list[LayerCall | Launch] = []
    for count, launched in vllm_launches.blocks(json.loads(config), tp, ep, arch):
        block: list[LayerCall | Launch] = []
        for layer, name, parameters, dtype_name, runs in launched:
            op, dtype = name and getattr(ops, name), getattr(torch, dtype_name)
            if op is ops.paged_attention_decode:
                parameters = (*parameters, rocm_cache_layout)
            if op is None:
                block.append(Launch(layer, tuple(parameters), runs, dtype))
            else:
                made = layer, op, ARGUMENTS[op], tuple(parameters), dtype
                block.append(LayerCall(*made, count=int(layer != PREFILL)))
        result += block * count
    return result


def launches(
    config: dict, tp: int = 1, ep: int | None = None, arch: str = ARCH, rocm_cache_layout: bool = True
) -> list[LayerCall | Launch]:
    """Return all launches of one rank in the order of a step, repeated for each layer.

    Args:
        config: A Hugging Face configuration.
        tp: Tensor parallel ranks.
        ep: Expert parallel ranks, 0 for `tp`; None divides experts by `tp`.
        arch: The GPU's architecture.
        rocm_cache_layout: Whether the KV cache is ROCM_ATTN's or packed.

    Raises:
        ValueError: vLLM cannot build the model, or divide it this way.
    """
    if tp < 1:
        raise ValueError(f"tp must be positive, got {tp}")
    return _launches(json.dumps(config, sort_keys=True), tp, tp if ep == 0 else ep, arch, rocm_cache_layout)


def sequence(config: dict, tp: int = 1, ep: int | None = None, arch: str = ARCH) -> list[LayerCall]:
    """Return the calls of ops in the order of a step, without those in `AROUND_ATTENTION`."""
    return [
        call
        for call in launches(config, tp, ep, arch)
        if isinstance(call, LayerCall) and call.layer not in AROUND_ATTENTION
    ]


def distinct(found: Iterable[LayerCall | Launch]) -> list:
    """Return each call once, with its count; launches without an op once, with theirs."""
    counts = Counter(found)
    return [
        dataclasses.replace(each, count=each.count * times) if isinstance(each, LayerCall) else (each, times)
        for each, times in counts.items()
    ]


def calls(config: dict, tp: int = 1, ep: int | None = None, arch: str = ARCH) -> list[LayerCall]:
    """Return the distinct calls of `sequence` with their counts."""
    return distinct(sequence(config, tp, ep, arch))


def unserved(config: dict, tp: int = 1, ep: int | None = None, arch: str = ARCH) -> list[tuple[Launch, int]]:
    """Return the layers that no op serves, with their counts."""
    return distinct(each for each in launches(config, tp, ep, arch) if isinstance(each, Launch) and each.runs)


def attention(
    config: dict, tp: int = 1, rocm_cache_layout: bool = True, ep: int | None = None, arch: str = ARCH
) -> list[LayerCall]:
    """Return the distinct calls of decode attention with their counts, with ROCM_ATTN's cache or the packed one."""
    found = launches(config, tp, ep, arch, rocm_cache_layout)
    return distinct(call for call in found if isinstance(call, LayerCall) and call.op in ATTENTION)


def absorbed(config: dict, tp: int = 1, ep: int | None = None, arch: str = ARCH) -> list[LayerCall]:
    """Return the absorbed GEMMs of MLA decode (W_UK, W_UV)."""
    found = launches(config, tp, ep, arch)
    return distinct(call for call in found if isinstance(call, LayerCall) and call.op is ops.batched_gemm)
