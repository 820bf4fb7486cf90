"""Fuse the MLA norms, RoPE of keys and the paged cache write; kernels: csrc/ops/mla_norm_rope_and_cache.hip.

Replaces three launches between the first projection of MLA and its scores, with their bits: the RMSNorm of the query latent with
optional FP8 quantization, `rms_norm` of the key latent, and rotation and write of `rope_and_cache_mla`. Models without a query
latent, as DeepSeek-V2-Lite, run the rest.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from vllm_rocm_ops.core.arch import Arch
from vllm_rocm_ops.core.launch import Launch, fields
from vllm_rocm_ops.core.op import Case, Op, case_maker
from vllm_rocm_ops.core.tensors import aligned, apart_contract, describe, is_wide_float, row_stride
from vllm_rocm_ops.ops import rms_norm as norms
from vllm_rocm_ops.ops.shared import attention, rotation, rowwise
from vllm_rocm_ops.ops.shared.attention import CacheLayout
from vllm_rocm_ops.ops.shared.gemm import divisor
from vllm_rocm_ops.ops.shared.rotation import RopeConfig
from vllm_rocm_ops.ops.shared.rowwise import VECTOR

__all__ = ["mla_norm_rope_and_cache"]

LARGEST = rowwise.MAX_THREADS[1] * VECTOR  # elements per latent
OUTS = "q_out", "kv_out", "k_pe_out"


def _sizes(a) -> tuple[int, int, int]:
    """Return the sizes of the query latent, the key latent and the rotated part of a row."""
    q, kv = 0 if a.q_weight is None else a.q_weight.shape[0], a.kv_weight.shape[0]
    return q, kv, a.qkv.shape[1] - q - kv


def _outs(a) -> tuple[str, ...]:
    return OUTS[a.q_weight is None :]


def _kind(a) -> str:
    """Return how the query latent is stored, as the suffix of symbols."""
    if a.q_out is None or not attention.is_quantized(a.q_out):
        return ""
    if a.scales_out is None:
        return "_static_fp8_quant"
    return "_per_token_quant" if a.scales_out.shape[1] == 1 else "_per_block_quant"


def _contract(a) -> Iterator[tuple[str, str, str, bool]]:
    holds = a.qkv.dim() == 2 and is_wide_float(a.qkv)
    yield "qkv", "floating point of 16 bits or more, [T, row]", describe(a.qkv), holds
    (tokens, row), dtype = a.qkv.shape, a.qkv.dtype
    holds, wanted = (a.q_weight is None) == (a.q_out is None), "None" if a.q_weight is None else "given"
    yield "q_out", f"{wanted}, as q_weight", "None" if a.q_out is None else describe(a.q_out), holds
    for name in ("q_weight", "kv_weight")[a.q_weight is None :]:
        x = getattr(a, name)
        yield name, f"{dtype} [size > 0]", describe(x), x.dim() == 1 and x.dtype == dtype and len(x) > 0
    q, kv, rotated = _sizes(a)
    yield "qkv", f"rows longer than {q} + {kv}, the sizes of the weights", describe(a.qkv), rotated > 0
    for name, size in zip(OUTS, (q, kv, rotated)):
        if name not in _outs(a):
            continue
        x, shape = getattr(a, name), [tokens, size]
        holds = [*x.shape] == shape and (x.dtype == dtype or name == "q_out" and attention.is_quantized(x))
        yield name, f"{dtype}{' or e4m3' * (name == 'q_out')} {shape}", describe(x), holds
        yield apart_contract(name, x)
    holds = a.kv_cache.dim() == 3 and a.kv_cache.shape[2] == row - q and 0 not in a.kv_cache.shape
    yield "kv_cache", f"[pages, N, {row - q}]", describe(a.kv_cache), holds
    yield attention.cache_dtype_contract("kv_cache", a.kv_cache, dtype)
    yield from rotation.token_contract(a, tokens, dtype, rotated)
    for name in ("cache_scale", "q_scale", "scale_ub"):
        yield from attention.scale_contract(name, getattr(a, name))
    quantized = a.q_out is not None and attention.is_quantized(a.q_out)
    holds = a.q_scale is None or quantized and a.scales_out is None
    yield "q_scale", "None unless q_out is e4m3 and scales_out None", "one", holds
    if a.scales_out is None:
        yield "scales_out", "given where q_out is e4m3 and q_scale None", "None", not quantized or a.q_scale is not None
        return
    yield "scales_out", "None unless q_out is e4m3", "one", quantized
    x = a.scales_out
    holds = x.dim() == 2 and x.dtype == torch.float32 and len(x) == tokens and x.shape[1] > 0 and q % x.shape[1] == 0
    yield "scales_out", f"float32 [T={tokens}, groups that divide {q}]", describe(x), holds
    yield apart_contract("scales_out", x)


def _can_implement(a, arch: Arch) -> Iterator[tuple[str, bool]]:
    yield "qkv is bfloat16 or float16", a.qkv.dtype in attention.ELEMENTS
    fp8 = arch.fp8_dtype
    if a.q_out is not None:
        yield f"q_out is of qkv's dtype or {fp8}, the FP8 dtype of {arch.name}", a.q_out.dtype in (a.qkv.dtype, fp8)
    yield f"scales_out has one scale per row or per group of {rowwise.GROUP_SIZES}", _groups(a)
    yield f"latent sizes are multiples of {VECTOR} and at most {LARGEST}", _fits(a)
    yield f"all of k_pe is rotated, and its size is a multiple of {2 * rotation.PAIRS}", _rotates(a)
    yield "qkv's rows are contiguous", a.qkv.stride(1) == 1
    weights = ("q_weight", "kv_weight")[a.q_weight is None :]
    for name in (*_outs(a), *weights, "positions", "cos_sin_cache", "slot_mapping"):
        yield f"{name} is contiguous", getattr(a, name).is_contiguous()
    for name in ("qkv", *_outs(a), *weights, "cos_sin_cache"):
        yield f"{name} is 16-byte aligned", aligned(getattr(a, name))
    cache = a.kv_cache
    yield f"the cache is of qkv's dtype or {fp8}, the FP8 dtype of {arch.name}", cache.dtype in (a.qkv.dtype, fp8)
    yield "slots are contiguous", cache.stride(2) == 1
    yield f"slots are aligned to {VECTOR} elements", aligned(cache, VECTOR * cache.element_size())
    yield "there are fewer than 2^31 slots", cache.shape[0] * cache.shape[1] < 2**31


def _fits(a) -> bool:
    return all(size % VECTOR == 0 and size <= LARGEST for size in _sizes(a)[:2])


def _groups(a) -> bool:
    groups = 1 if a.scales_out is None else a.scales_out.shape[1]
    return groups == 1 or a.q_weight.shape[0] // groups in rowwise.GROUP_SIZES


def _rotates(a) -> bool:
    return a.cos_sin_cache.shape[1] == _sizes(a)[2] and _sizes(a)[2] % (2 * rotation.PAIRS) == 0


def _configs(a, arch: Arch) -> list[RopeConfig]:
    """Return whole waves for the longer latent and the pairs."""
    if not _fits(a) or not _groups(a) or not _rotates(a):
        return []
    vectors = max(*_sizes(a)[:2], _sizes(a)[2] // 2)
    return [RopeConfig(rowwise.threads_for(vectors // VECTOR, 1, arch))]


def _cost(config: RopeConfig, a, arch: Arch) -> dict[str, float]:
    """Return the launch and the HBM bytes."""
    moved = sum(x.numel() * x.element_size() for x in (a.qkv, *(getattr(a, name) for name in _outs(a))))
    moved += len(a.qkv) * a.kv_cache.shape[2] * a.kv_cache.element_size()
    return {"launch": attention.LAUNCH_US, "bytes": moved / (arch.bandwidth_gb_s * 1e3)}


def _plan(config: RopeConfig, outputs, a, arch: Arch) -> list[Launch]:
    if len(a.qkv) == 0:
        return []
    (q, kv, _), quantized = _sizes(a), attention.is_quantized(a.kv_cache)
    scale_row_stride, scale_stride = (0, 0) if a.scales_out is None else a.scales_out.stride()
    block, slot, _ = a.kv_cache.stride()
    args = {
        "qkv": a.qkv,
        "q_weight": a.q_weight,
        "kv_weight": a.kv_weight,
        "row_stride": row_stride(a.qkv),
        "q_size": q,
        "kv_size": kv,
        "threads_per_block": config.threads,
        "scale": a.scale_ub if a.q_scale is None else a.q_scale,
        "out": a.q_out,
        "scale_out": a.scales_out,
        "scale_row_stride": scale_row_stride,
        "scale_stride": scale_stride,
        "group_size": 0 if a.scales_out is None else q // a.scales_out.shape[1],
        "inverse_q_size": 1.0 / max(q, 1),
        "inverse_kv_size": 1.0 / kv,
        "epsilon": float(a.epsilon),
        "kv_out": a.kv_out,
        "k_pe_out": a.k_pe_out,
    }
    args |= fields("rotation", rotation.angles_fields(a))
    args |= fields("cache", {
        "data": a.kv_cache,
        "scale": a.cache_scale if quantized else None,
        "block_stride": block,
        "slot_stride": slot,
        "slots": a.slot_mapping,
        "num_slots": len(a.slot_mapping),
        "page_size": a.kv_cache.shape[1],
        "page_divisor": divisor(a.kv_cache.shape[1]),
    })  # fmt: skip
    symbol = f"mla_norm_rope_and_cache_{attention.ELEMENTS[a.qkv.dtype]}" + "_fp8" * quantized + _kind(a)
    return [Launch("mla_norm_rope_and_cache", symbol, (len(a.qkv), len(_outs(a)) - 1, 1), (config.threads, 1, 1), args)]


def _problem(a) -> dict[str, object]:
    return {"tokens": len(a.qkv), "sizes": "+".join(map(str, _sizes(a)))}


# Cases


def _inputs(tokens, sizes, given, device, generator, fp8_dtype) -> tuple:
    dtype, page = given.get("dtype", torch.bfloat16), given.get("page", 16)
    is_fp8, pages, (q, kv, size) = given.get("fp8", False), -(-(tokens + 3) // page), sizes
    kind, group, apart = given.get("kind", ""), given.get("group", q), given.get("apart", 0)

    def unwritten(columns: int, dtype: torch.dtype) -> Tensor:
        return torch.full((tokens, columns), torch.nan).to(dtype).to(device)

    qkv = torch.randn(tokens, sum(sizes) + apart, generator=generator).mul_(given.get("factor", 1.0)).to(dtype)
    scales = unwritten(q // max(group, 1), torch.float32)
    if given.get("transposed"):
        scales = scales.t().contiguous().t()
    return (
        qkv.to(device)[:, : sum(sizes)],
        *((1 + 0.2 * torch.randn(n, generator=generator)).to(dtype).to(device) if n else None for n in (q, kv)),
        given.get("epsilon", 1e-6),
        torch.randint(0, 97, (tokens,), generator=generator).to(device),
        rotation.cos_sin(97, given.get("rotary", size), given.get("cos_dtype", dtype), generator).to(device),
        given.get("is_neox", False),
        unwritten(q, fp8_dtype if kind else dtype) if q else None,
        *(unwritten(n, dtype) for n in (kv, size)),
        rotation.old_cache(
            (pages, page, kv + size), fp8_dtype if is_fp8 else dtype, given.get("padding", 0), generator
        ).to(device),
        rotation.slots(tokens, pages * page, given, generator).to(device),
        torch.tensor([0.021], device=device) if is_fp8 and not given.get("unscaled") else None,
        torch.tensor([0.013], device=device) if kind == "static" else None,
        scales if kind == "dynamic" else None,
        torch.tensor([given["bound"]], device=device) if "bound" in given else None,
    )


def _cases() -> Iterator[Case]:
    """Yield every kernel, both pairings, and latents that share their waves with pairs and that do not.

    More cases have latents of several waves and below one, an epsilon that matters, slot -1, fewer slots than tokens, any page size,
    and no queries.
    """
    case = case_maker(_inputs)
    kinds = {
        "": {},
        "-static": {"kind": "static"},
        "-token": {"kind": "dynamic"},
        "-block": {"kind": "dynamic", "group": 128},
    }
    for dtype, label in attention.ELEMENTS.items():
        for fp8 in (False, True):
            for kind, options in kinds.items():
                yield case(label + "-fp8" * fp8 + kind, 3, (384, 256, 64), dtype=dtype, fp8=fp8, **options)
    yield case("deepseek", 2, (1536, 512, 64), **kinds["-block"])
    for fp8 in (False, True):
        yield case("no-queries" + "-fp8" * fp8, 3, (0, 512, 64), fp8=fp8, apart=8 * fp8)
    yield case("neox", 3, (384, 512, 64), is_neox=True, cos_dtype=torch.float32, fp8=True)
    yield case("one-wave", 3, (128, 128, 32), page=3, padding=16, unmapped=1)
    yield case("longer-keys", 2, (128, 1032, 64), apart=8)
    yield case("pairs-beyond", 3, (128, 128, 2112), fp8=True)
    yield case("largest", 1, (LARGEST, 64, 16))
    yield case("longer-than-kernels", 1, (LARGEST + 128, 64, 16))
    yield case("epsilon", 3, (256, 128, 32), factor=2.0**-9, epsilon=1e-5)
    yield case("large", 3, (256, 128, 32), factor=2.0**56)
    yield case("unscaled", 3, (256, 128, 32), fp8=True, unscaled=True)
    yield case("part", 3, (256, 128, 32), rotary=16)
    yield case("scale_ub", 3, (256, 128, 32), bound=0.4, **kinds["-token"])
    yield case("groups-of-64", 3, (192, 128, 32), kind="dynamic", group=64, bound=0.4)
    yield case("groups-of-32", 3, (192, 128, 32), kind="dynamic", group=32)
    yield case("transposed", 3, (384, 128, 32), transposed=True, **kinds["-block"])
    yield case("no-tokens", 0, (256, 128, 32))


@functools.partial(
    Op,
    allocate=lambda a: None,
    contract=_contract,
    can_implement=_can_implement,
    configs=_configs,
    cost=_cost,
    plan=_plan,
    problem=_problem,
    cases=_cases,
    meanings=rotation.MEANINGS,
    mutates=("kv_cache",),
    writes=(*OUTS, "scales_out"),
    inexact=("kv_cache",),
    sums=True,
)
def mla_norm_rope_and_cache(
    qkv: Tensor,
    q_weight: Tensor | None,
    kv_weight: Tensor,
    epsilon: float,
    positions: Tensor,
    cos_sin_cache: Tensor,
    is_neox: bool,
    q_out: Tensor | None,
    kv_out: Tensor,
    k_pe_out: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    cache_scale: Tensor | None = None,
    q_scale: Tensor | None = None,
    scales_out: Tensor | None = None,
    scale_ub: Tensor | None = None,
) -> None:
    """Normalize both latents of rows [q | kv | k_pe], rotate k_pe, and write [kv | k_pe] to a paged MLA cache.

    Args:
        qkv: [T, q size + kv size + rotated size], bf16 or fp16; rows may be strided.
        q_weight: [q size], qkv's dtype; None for rows without q.
        kv_weight: [kv size], qkv's dtype.
        epsilon: Added to the mean square.
        cos_sin_cache: [positions, rotary size], qkv's dtype or float32: cosines, then sines; rotates k_pe.
        q_out: [T, q size], qkv's dtype, or e4m3 with q_scale or scales_out: receives the normalized q; None without
            q_weight.
        kv_out: [T, kv size], qkv's dtype: receives the normalized kv.
        k_pe_out: [T, rotated size], qkv's dtype: receives the rotated k_pe.
        kv_cache: [pages, N, kv size + rotated size], qkv's dtype or e4m3; updated in place.
        cache_scale: float32, one element: divides the rows of an e4m3 cache; None for 1.
        q_scale: float32, one element: static scale of an e4m3 q_out, as in `rms_norm_static_fp8_quant`.
        scales_out: [T, 1] or [T, groups], float32: receives dynamic scales per row or per group of 64 or 128.
        scale_ub: float32, one element: upper bound of the absolute maximum, or None.

    Source:
        vLLM's MultiHeadLatentAttentionWrapper: q_a and kv_a RMSNorm, `rotary_embedding` of k_pe,
        `concat_and_cache_mla`.
    """
    q, kv = 0 if q_weight is None else len(q_weight), len(kv_weight)
    queries, keys, k_pe = qkv.split([q, kv, qkv.shape[1] - q - kv], 1)
    if q_weight is None:
        normed = None
    elif q_scale is not None:
        normed = norms.rms_norm_static_fp8_quant.reference(queries, q_weight, q_scale, epsilon, q_out.dtype)
    elif scales_out is not None:
        quantization = q_out.dtype, q // scales_out.shape[1], False, scale_ub
        normed, scales = norms.rms_norm_per_block_quant.reference(queries, q_weight, epsilon, *quantization)
        scales_out.copy_(scales)
    else:
        normed = norms.rms_norm.reference(queries, q_weight, epsilon)
    if normed is not None:
        q_out.copy_(normed)
    kv_out.copy_(norms.rms_norm.reference(keys, kv_weight, epsilon))
    rotated = k_pe.clone().unsqueeze(1)
    rotation.rotate(rotated, positions, cos_sin_cache, is_neox)
    k_pe_out.copy_(rotated.squeeze(1))
    rows = kv_cache.unsqueeze(2)
    layout = CacheLayout(rows[..., kv:], rows[..., :kv])
    rotation.write(layout, k_pe_out.unsqueeze(1), kv_out.unsqueeze(1), slot_mapping, (cache_scale, cache_scale))
