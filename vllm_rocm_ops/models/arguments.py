"""Make random arguments of a model's ops, with the sizes of its layers."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_rocm_ops.core.op import Op
from vllm_rocm_ops.core.quantization import MX_SCALES, STATIC
from vllm_rocm_ops.models.config import EXPERTS
from vllm_rocm_ops.ops.shared.gated_delta_net import MOST_PROJECTED
from vllm_rocm_ops.ops.shared.gemm import BLOCK
from vllm_rocm_ops.ops.shared.inputs import Inputs


def of_rows(op: Op, inputs: Inputs, **tensors: object) -> tuple:
    """Return the arguments of an op on rows: these, scale and dtype of its quantized result, and its defaults."""
    given = {"scale": inputs.scales(1), "quant_dtype": inputs.fp8_dtype}
    given = op.Arguments._field_defaults | given | tensors
    return tuple(given[name] for name in op.Arguments._fields)


def norm(
    op: Op, tokens: int, inputs: Inputs, hidden: int, residual: bool, epsilon: float, one_plus: bool = False
) -> tuple:
    """Return arguments of an RMSNorm. With `one_plus` it multiplies by 1 + weight."""
    x, *rest, weight = (inputs.values(*shape) for shape in [(tokens, hidden)] * (1 + residual) + [(hidden,)])
    given = {"input": x, "residual": rest[0] if rest else None, "weight": weight}
    return of_rows(op, inputs, **given, epsilon=epsilon, one_plus_weight=one_plus)


def gate(op: Op, tokens: int, inputs: Inputs, hidden: int, size: int) -> tuple:
    """Return arguments of an output gate on heads of `size` elements."""
    both = inputs.values(tokens, hidden // size, 2 * size)
    return of_rows(op, inputs, input=inputs.values(tokens, hidden), gate=both[..., size:])


def expert_gate(op: Op, tokens: int, inputs: Inputs, hidden: int, columns: int) -> tuple:
    """Return arguments of a shared expert's gated activation, with tokens of `columns`."""
    gate = inputs.values(1, columns) * columns**-0.5
    rows = {"input": inputs.values(tokens, 2 * hidden), "tokens": inputs.values(tokens, columns)}
    return of_rows(op, inputs, **rows, expert_gate=gate)


def activation(op: Op, tokens: int, inputs: Inputs, hidden: int) -> tuple:
    """Return arguments of a SwiGLU."""
    return of_rows(op, inputs, input=inputs.values(tokens, 2 * hidden))


def routing(tokens: int, inputs: Inputs, experts: int, topk: int, renormalize: bool, *rest) -> tuple:
    """Return arguments of `grouped_topk`, or without `rest` of `topk_softmax`."""
    *options, has_bias = rest or (False,)
    return inputs.values(tokens, experts), topk, renormalize, *options, inputs.scales(experts) if has_bias else None


def experts(
    tokens: int,
    inputs: Inputs,
    experts: int,
    here: int,
    topk: int,
    hidden: int,
    intermediate: int,
    quantization: str,
    is_quantized: bool = False,
    has_bias: bool = False,
    *swiglu: float | bool | None,
) -> tuple:
    """Return arguments of `fused_experts` with uniform routing over all experts; the rank has the first `here`.

    With `is_quantized`, hidden is already quantized per 128 columns. `swiglu` are the op's last arguments.
    """
    w1, w2 = (here, 2 * intermediate, hidden), (here, hidden, intermediate)
    scheme = EXPERTS[quantization]
    make = inputs.exponents if MX_SCALES[0] in scheme.scales else inputs.scales
    scales = [make(*scheme.shape(*size)).to(scheme.scales[0]) if scheme.scaled else None for size in (w1, w2)]

    weights, ids = inputs.scales(tokens, experts).topk(topk)
    expert_map = None
    if here < experts:
        numbers = torch.arange(experts, dtype=torch.int32, device=weights.device)
        expert_map = torch.where(numbers < here, numbers, -1)
    static = [inputs.scales(1) if quantization == STATIC else None for _ in range(2)]
    tokens_dtype = inputs.fp8_dtype if is_quantized else None
    if is_quantized:
        static[0] = inputs.scales(tokens, hidden // BLOCK)
    dtype = scheme.weight_dtype(inputs.dtype, inputs.fp8_dtype)
    weights_of = (
        inputs.bits(*size[:2], size[2] // 2) if scheme.numbers else inputs.values(*size, dtype=dtype)
        for size in (w1, w2)
    )
    values = inputs.values(tokens, hidden, dtype=tokens_dtype), *weights_of
    given = *values, weights, ids.int(), inputs.dtype, *scales, *static, expert_map
    if not (scheme.alone or has_bias or swiglu):
        return given
    biases = (inputs.values(*size[:2]) if has_bias else None for size in (w1, w2))
    return *given, 0, False, False, scheme.alone, *biases, *swiglu


def delta_net(
    requests: int,
    inputs: Inputs,
    key_heads: int,
    heads: int,
    is_interleaved: bool,
    state: str,
    kind: str,
    token_columns: int,
) -> tuple:
    """Return arguments of `gated_delta_net_decode`, with a slot and a row per request. Launches of few requests project b and a."""
    token_columns *= requests <= MOST_PROJECTED
    channels, slots = (2 * key_heads + heads) * BLOCK, 1 + requests
    ba, of_ba = inputs.values(requests, 2 * heads) if not token_columns else None, ()
    if token_columns:
        of_ba = inputs.values(requests, token_columns), inputs.values(2 * heads, token_columns) * token_columns**-0.5
    indices = torch.arange(1, slots, dtype=torch.int32, device=inputs.device).view(-1, 1)
    scales = (inputs.scales(1), None) if kind == "static" else (None, inputs.scales(requests, heads) if kind else None)
    return (
        *(inputs.values(requests, channels + heads * BLOCK), ba, is_interleaved),
        *(inputs.values(slots, 3, channels).transpose(1, 2), inputs.values(channels, 4)),
        inputs.values(slots, heads, BLOCK, BLOCK, dtype=getattr(torch, state)),
        *(inputs.scales(heads), inputs.values(heads), inputs.values(BLOCK), 1e-6, indices),
        inputs.values(requests, heads * BLOCK, dtype=inputs.fp8_dtype if kind else None),
        *(None, None, *scales, *of_ba),
    )


PAGE = 16  # tokens per page in vLLM


def heads_attention(
    tokens: int, inputs: Inputs, heads: int, kv_heads: int, size: int, positions: int, rocm_cache_layout: bool
) -> tuple:
    """Return arguments of decode attention: one token per request, `positions` keys, ROCM_ATTN's or TRITON_ATTN's cache."""
    places, width = pages(tokens, inputs, positions)
    return (
        inputs.values(tokens, heads, size),
        *caches(tokens * width, inputs, kv_heads, size, rocm_cache_layout),
        *places,
        size**-0.5,
    )


def caches(pages: int, inputs: Inputs, kv_heads: int, size: int, rocm_cache_layout: bool) -> tuple[Tensor, ...]:
    """Return the key and the value cache."""
    x = 16 // inputs.dtype.itemsize
    shapes = (
        ((kv_heads, size // x, PAGE, x), (kv_heads, size, PAGE)) if rocm_cache_layout else ((PAGE, kv_heads, size),) * 2
    )
    return tuple(inputs.values(pages, *shape) for shape in shapes)


def mla_attention(tokens: int, inputs: Inputs, heads: int, latent: int, rope: int, size: int, positions: int) -> tuple:
    """Return arguments of `mla_decode`."""
    places, width = pages(tokens, inputs, positions)
    queries = inputs.values(tokens, heads, latent), inputs.values(tokens, heads, rope)
    return *queries, inputs.values(tokens * width, PAGE, latent + rope), *places, size**-0.5


def absorbed(tokens: int, inputs: Inputs, heads: int, k: int, n: int, transposed: bool) -> tuple:
    """Return arguments of `batched_gemm`; weights are contiguous along N if transposed, else along K."""
    weights = inputs.values(heads, k, n) if transposed else inputs.values(heads, n, k).transpose(1, 2)
    return inputs.values(tokens, heads, k), weights


def pages(tokens: int, inputs: Inputs, positions: int) -> tuple[tuple[Tensor, Tensor], int]:
    """Return the block table and lengths of requests, and the pages per request."""
    width = -(-positions // PAGE)
    table = torch.arange(tokens * width, dtype=torch.int32, device=inputs.device).view(tokens, width)
    return (table, torch.full((tokens,), positions, dtype=torch.int32, device=inputs.device)), width
