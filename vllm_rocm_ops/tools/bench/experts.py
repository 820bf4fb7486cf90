"""Define the routed expert layers of public models to benchmark against vLLM's fused MoE (baselines/experts.py).

Each of `SHARES` is one rank's share of a layer. `tp8`: all experts, an eighth of each. `ep8`: an eighth of the experts, the tokens of
all ranks. `+shared`: the shared expert is appended as one that every token uses. Experts are equally likely. Weights exceed the cache,
and each call of a graph has its own tokens and expert ids. The floor is the time to read the weights of the experts hit, with tokens
in and out, averaged over the calls.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from vllm_rocm_ops.core.clock import Clock
from vllm_rocm_ops.core.quantization import BLOCKS, MX_SCALES, TOKEN, UNQUANTIZED
from vllm_rocm_ops.models import arguments as model_arguments
from vllm_rocm_ops.models.config import EXPERTS
from vllm_rocm_ops.ops import fused_experts
from vllm_rocm_ops.ops.shared.experts import CONVERTED, columns_of
from vllm_rocm_ops.ops.shared.inputs import Inputs
from vllm_rocm_ops.tools.bench.baselines import Baseline, of_experts, triton_kernels
from vllm_rocm_ops.tools.bench.baselines import experts as vllm_experts
from vllm_rocm_ops.tools.bench.shapes import Check, Shape, made_case

TOKENS = tuple(2**i for i in range(11))
CALLS = {16: 32, 256: 16, 1024: 4}  # calls per sample, by the maximum number of tokens


@dataclass(frozen=True)
class Share:
    """One rank's share of a layer.

    It has `routed` of `known` experts with `intermediate` columns each; a token uses `topk` of the known ones, and the shared
    expert with `shared`. FP8 weights have a scale per 128x128 block, or per row without `blocks`; tokens are quantized likewise.
    With `swiglu`, the op's last arguments, experts have that activation, and biases.
    """

    known: int
    routed: int
    topk: int
    hidden: int
    intermediate: int
    shared: bool = False
    blocks: bool = True
    swiglu: tuple[float | bool | None, ...] = ()

    @property
    def experts(self) -> int:
        return self.routed + self.shared


SHARES = {
    "deepseek-v3-tp8": Share(256, 256, 8, 7168, 256),
    "deepseek-v3-tp8+shared": Share(256, 256, 8, 7168, 256, shared=True),
    "deepseek-v3-ep8": Share(256, 32, 8, 7168, 2048),
    "deepseek-v3-ep8+shared": Share(256, 32, 8, 7168, 2048, shared=True),
    "kimi-k2-ep8": Share(384, 48, 8, 7168, 2048),
    "qwen3-30b-a3b": Share(128, 128, 8, 2048, 768),
    "qwen3-next-80b": Share(512, 512, 10, 2048, 512),
    "qwen3-235b-a22b-tp4": Share(128, 128, 8, 4096, 384),
    "mixtral-8x7b-tp2": Share(8, 8, 2, 4096, 7168),
    "mixtral-8x22b-tp8": Share(8, 8, 2, 6144, 2048),
    "glm-4.5-air": Share(128, 128, 8, 4096, 1408),
    "llama-4-maverick-tp8": Share(128, 128, 1, 5120, 1024),
    "gpt-oss-120b": Share(128, 128, 4, 2880, 2880, blocks=False),
    "deepseek-v2-lite": Share(64, 64, 6, 2048, 1408),
}


FOUR_BIT_SHARES = {
    "kimi-k2-tp8": (Share(384, 384, 8, 7168, 256), "int4_32"),
    "qwen3-30b-a3b": (SHARES["qwen3-30b-a3b"], "int4_128"),
    "qwen3-235b-a22b": (Share(128, 128, 8, 4096, 1536), "int4_128"),
    "gpt-oss-120b": (replace(SHARES["gpt-oss-120b"], swiglu=triton_kernels.SWIGLU), "mxfp4"),
    "kimi-k3-tp8": (Share(896, 896, 16, 3584, 384), "mxfp4"),
    "minimax-m3-tp4": (Share(128, 128, 4, 6144, 768), "mxfp8"),
}
"""Shares with INT4, MXFP4 or MX-FP8 weights and bf16 tokens, and their quantization."""
_timed = {quantization for _, quantization in FOUR_BIT_SHARES.values()}
FOUR_BIT_SHARES |= {name: (SHARES["qwen3-30b-a3b"], name) for name in CONVERTED if name not in _timed}


@dataclass(frozen=True)
class Experts(Shape):
    """Define a share of a layer with a number of tokens."""

    share: Share | None = None
    draws_on_device = True

    def sets(self, clock: Clock, arguments: tuple) -> list[tuple]:
        """Return sets that share their weights."""
        a = fused_experts.Arguments(*arguments)
        m, generator = len(a.hidden), torch.Generator(clock.device).manual_seed(1)
        sets = [arguments]
        for _ in range(
            next(calls for max_tokens, calls in CALLS.items() if m <= max_tokens or max_tokens == max(CALLS)) - 1
        ):
            weights, ids = torch.rand(m, self.share.known, generator=generator, device=clock.device).topk(
                self.share.topk
            )
            tokens = {"hidden": torch.randn_like(a.hidden), "topk_weights": _normalized(weights), "topk_ids": ids.int()}
            sets.append(a._replace(**tokens))
        return sets

    def hits(self, arguments: tuple) -> int:
        """Return how many of the rank's experts a call reads."""
        ids = fused_experts.Arguments(*arguments).topk_ids
        return len(ids[ids < self.share.routed].unique()) + self.share.shared

    def bytes_moved(self, sets: list[tuple]) -> float:
        a = fused_experts.Arguments(*sets[0])
        weights = (a.w1, a.w2, a.w1_scale, a.w2_scale, a.w1_bias, a.w2_bias)
        of_expert = sum(weight.nbytes for weight in weights if weight is not None) / self.share.experts
        return sum(map(self.hits, sets)) / len(sets) * of_expert + 2 * a.hidden.nbytes

    def baselines(self, sets: list[tuple]) -> Mapping[str, Baseline]:
        return of_experts(sets[0])

    def check(self, sets: list[tuple], device: str, baselines: Mapping[str, Baseline]) -> Check:
        """Return a check of the call with the most experts hit, as other calls may hit none of this rank.

        It reports the maximum difference from each baseline's result, relative to the largest value.
        """
        hits = [self.hits(arguments) for arguments in sets]
        arguments = sets[hits.index(max(hits))]
        results = {}
        for name, baseline in baselines.items():
            with contextlib.suppress(Exception):  # `baselines.prepare` reports why it is unavailable
                results[name] = baseline.call(*baseline.prepare(*arguments)).float()
        hit, file = round(sum(hits) / len(hits), 2), vllm_experts.tuned(sets[0])[0] if baselines else None

        def fields() -> dict[str, object]:
            own = fused_experts(*arguments).float()
            differs = {
                name: ((own - result).abs().max() / result.abs().max()).item() for name, result in results.items()
            }
            return {"experts_hit": hit, "vllm_tiles": file, "differs": differs}

        return fields


def _normalized(weights: torch.Tensor) -> torch.Tensor:
    return weights / weights.sum(1, keepdim=True)


def arguments_of(m: int, inputs: Inputs, share: Share, quantization: str) -> tuple:
    """Create the op's arguments, with weights that keep the results' scale near the tokens'; ids omit the shared expert."""
    sizes = share.known, share.experts, share.topk, share.hidden, share.intermediate
    more = (False, bool(share.swiglu), *share.swiglu)
    a = fused_experts.Arguments(*model_arguments.experts(m, inputs, *sizes, quantization, *more))
    given = {"shared_experts": int(share.shared), "topk_weights": _normalized(a.topk_weights)}
    if a.expert_map is not None:
        given["expert_map"] = torch.where(a.expert_map < share.routed, a.expert_map, -1)
    for weight, scale in ((a.w1, a.w1_scale), (a.w2, a.w2_scale)):
        factor = columns_of(weight) ** -0.5
        if numbers := EXPERTS[quantization].numbers:
            factor /= numbers(torch.arange(256, dtype=torch.uint8)).std().item()
        if scale is not None and scale.dtype in MX_SCALES:
            scale.add_(round(math.log2(factor)))
        else:
            (weight if scale is None else scale).mul_(factor)
    if quantization == TOKEN:
        given |= {"w1_scale": a.w1_scale[..., None], "w2_scale": a.w2_scale[..., None]}  # vLLM's shape
    return tuple(a._replace(**given))


def experts(tokens: Iterable[int] = TOKENS, dtype: torch.dtype = torch.float8_e4m3fn) -> Iterator[Experts]:
    """Yield the shares with weights in the architecture's e4m3 or bf16. Raises ValueError for another dtype."""
    if dtype not in (torch.float8_e4m3fn, torch.bfloat16):
        raise ValueError(f"the dtype of experts' weights must be float8_e4m3fn or bfloat16, got {dtype}")
    for name, share in SHARES.items():
        quantization = UNQUANTIZED if dtype == torch.bfloat16 else BLOCKS if share.blocks else TOKEN
        yield from _calls(name, share, quantization, "bf16" if dtype == torch.bfloat16 else "fp8", tokens)


def four_bit_experts(tokens: Iterable[int] = (1, 2, 4, 8, 16, 32, 64)) -> Iterator[Experts]:
    """Yield the shares with INT4, MXFP4 or MX-FP8 weights and bf16 tokens."""
    for name, (share, quantization) in FOUR_BIT_SHARES.items():
        yield from _calls(name, share, quantization, quantization, tokens)


def _calls(name: str, share: Share, quantization: str, kind: str, tokens: Iterable[int]) -> Iterator[Experts]:
    sizes = {"topk": share.topk, "known": share.known, "routed": share.routed, "shared": int(share.shared)}
    sizes |= {"hidden": share.hidden, "intermediate": share.intermediate}
    for m in tokens:
        case = made_case(f"{name} {m} {kind}", torch.bfloat16, arguments_of, m, share, quantization)
        yield Experts(fused_experts, case, {"m": m} | sizes, group=name, share=share)
