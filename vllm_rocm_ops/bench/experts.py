"""The routed experts of public models' layers, to be timed beside vLLM's fused MoE (vllm_experts.py).

Each of `SHARES` is one rank's share of a layer: with `tp8` every expert and an eighth of each, with `ep8` an eighth of the
experts and the tokens of all ranks; with `+shared` the shared expert is one more that every token goes to. All experts are
as likely. Weights are larger than the cache, and each call of a graph has tokens and experts of its own. The floor is the time
to move the weights of the experts that are hit, with tokens in and out, averaged over the calls.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_rocm_ops.bench import vllm_experts
from vllm_rocm_ops.bench.clock import Clock
from vllm_rocm_ops.bench.peers import Peer
from vllm_rocm_ops.bench.shapes import Check, Shape
from vllm_rocm_ops.families.gemm import BLOCK
from vllm_rocm_ops.op import Case
from vllm_rocm_ops.ops import fused_experts

TOKENS = tuple(2**i for i in range(11))
CALLS = {16: 32, 256: 16, 1024: 4}  # of a sample, by the most tokens


@dataclass(frozen=True)
class Share:
    """One rank's share of a layer: `routed` of `known` experts, `topk` of which a token goes to, `intermediate` columns of each;
    the shared expert or not; FP8 weights with a scale per block of 128x128, or per row, with tokens quantised likewise."""

    known: int
    routed: int
    topk: int
    hidden: int
    intermediate: int
    shared: bool = False
    blocks: bool = True

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
    "qwen3-235b-a22b-tp4": Share(128, 128, 8, 4096, 384),
    "mixtral-8x7b-tp2": Share(8, 8, 2, 4096, 7168),
    "mixtral-8x22b-tp8": Share(8, 8, 2, 6144, 2048),
    "glm-4.5-air": Share(128, 128, 8, 4096, 1408),
    "llama-4-maverick-tp8": Share(128, 128, 1, 5120, 1024),
    "gpt-oss-120b": Share(128, 128, 4, 2880, 2880, blocks=False),
    "deepseek-v2-lite": Share(64, 64, 6, 2048, 1408),
}


class Weights(NamedTuple):
    """w1 [E, 2 I, H] and w2 [E, H, I] with their scales, None for bf16; expert_map [known] if not all are here."""

    w1: Tensor
    w2: Tensor
    w1_scale: Tensor | None
    w2_scale: Tensor | None
    expert_map: Tensor | None


@functools.lru_cache(maxsize=1)  # of one layer there is room
def make_weights(share: Share, dtype: torch.dtype, device: str) -> Weights:
    def weight(rows: int, columns: int) -> Tensor:
        weight = torch.empty(share.experts, rows, columns, dtype=dtype, device=device)
        for expert in weight:
            values = torch.randn(rows, columns, device=device)
            expert.copy_(values * columns**-0.5 if dtype == torch.bfloat16 else values)
        return weight

    def scale(rows: int, columns: int) -> Tensor | None:
        if dtype == torch.bfloat16:
            return None
        shape = (-(-rows // BLOCK), -(-columns // BLOCK)) if share.blocks else (rows, 1)
        return (torch.rand((share.experts, *shape), device=device) + 0.5) * columns**-0.5

    expert_map = None
    if share.routed < share.known:
        expert_map = torch.full((share.known,), -1, dtype=torch.int32, device=device)
        expert_map[: share.routed] = torch.arange(share.routed)
    gate_up, down = (2 * share.intermediate, share.hidden), (share.hidden, share.intermediate)
    return Weights(weight(*gate_up), weight(*down), scale(*gate_up), scale(*down), expert_map)


def make_arguments(share: Share, weights: Weights, m: int, generator: torch.Generator, device: str) -> tuple:
    """What our op takes with m tokens; shared experts are not in ids."""
    scores, ids = torch.rand(m, share.known, generator=generator).topk(share.topk)
    hidden = torch.randn(m, share.hidden, generator=generator).to(torch.bfloat16)
    tokens = (t.to(device) for t in (hidden, scores / scores.sum(1, keepdim=True), ids.to(torch.int32)))
    hidden, topk_weights, topk_ids = tokens
    w1, w2, *scales, expert_map = weights
    return hidden, w1, w2, topk_weights, topk_ids, torch.bfloat16, *scales, None, None, expert_map, int(share.shared)


@dataclass(frozen=True)
class Experts(Shape):
    """A share of a layer with m tokens."""

    share: Share | None = None

    def sets(self, clock: Clock, arguments: tuple) -> list[tuple]:
        m = len(arguments[0])
        calls = next(calls for most, calls in CALLS.items() if m <= most or most == max(CALLS))
        generator = torch.Generator().manual_seed(m)
        weights = Weights(*(getattr(fused_experts.Arguments(*arguments), name) for name in Weights._fields))
        return [make_arguments(self.share, weights, m, generator, clock.device) for _ in range(calls)]

    def hits(self, arguments: tuple) -> int:
        """How many of the rank's experts a call reads."""
        ids = fused_experts.Arguments(*arguments).topk_ids
        return len(ids[ids < self.share.routed].unique()) + self.share.shared

    def bytes_moved(self, sets: list[tuple]) -> float:
        a = fused_experts.Arguments(*sets[0])
        weights = (a.w1, a.w2, a.w1_scale, a.w2_scale)
        of_expert = sum(weight.nbytes for weight in weights if weight is not None) / self.share.experts
        return sum(map(self.hits, sets)) / len(sets) * of_expert + 2 * a.hidden.nbytes

    def peers(self, sets: list[tuple]) -> Mapping[str, Peer]:
        return vllm_experts.peers(sets[0])

    def check(self, sets: list[tuple], device: str, peers: Mapping[str, Peer]) -> Check:
        """The largest difference from the result of each peer, relative to the largest result, for the call with most experts:
        another may hit none of this rank."""
        hits = [self.hits(arguments) for arguments in sets]
        arguments = sets[hits.index(max(hits))]
        theirs = {}
        for name, peer in peers.items():
            with contextlib.suppress(Exception):  # `peers.prepare` says why it is unavailable
                theirs[name] = peer.call(*peer.prepare(*arguments)).float()
        hit, file = round(sum(hits) / len(hits), 2), vllm_experts.tuned_file(sets[0]) if peers else None

        def found() -> dict[str, object]:
            own = fused_experts(*arguments).float()
            differs = {
                name: ((own - result).abs().max() / result.abs().max()).item() for name, result in theirs.items()
            }
            return {"experts_hit": hit, "vllm_tiles": file, "differs": differs}

        return found


def experts(tokens: Iterable[int] = TOKENS, dtype: torch.dtype = torch.float8_e4m3fn) -> Iterator[Experts]:
    """The shares, with weights in the architecture's e4m3 or in bf16. Raises ValueError for another dtype."""
    if dtype not in (torch.float8_e4m3fn, torch.bfloat16):
        raise ValueError(f"the dtype of experts' weights must be float8_e4m3fn or bfloat16, got {dtype}")
    for name, share in SHARES.items():
        sizes = {"topk": share.topk, "known": share.known, "routed": share.routed, "shared": int(share.shared)}
        sizes |= {"hidden": share.hidden, "intermediate": share.intermediate}
        for m in tokens:

            def make(device: str, generator, fp8_dtype, share=share, m=m) -> tuple:
                weights = make_weights(share, dtype if dtype == torch.bfloat16 else fp8_dtype, device)
                return make_arguments(share, weights, m, torch.Generator().manual_seed(m), device)

            case = Case(f"{name} {m} {'bf16' if dtype == torch.bfloat16 else 'fp8'}", make)
            yield Experts(fused_experts, case, {"m": m} | sizes, group=name, share=share)
