"""Define the contest moe: a layer of routed and shared experts in fp16, as in DeepSeek.

The data are tokens [batch, length, hidden], weights by name, and a configuration. An expert's weights are stored as [inputs, outputs], so
the plugin's solution transposes and concatenates them first, which is timed. A router's scores are the softmax of its fp16 logits, rounded
to fp16, with ties: torch.topk breaks them, in the reference and in the solution, because the judge rejects results of another choice. The
top scores are the weights, unchanged.

The contest's template and the Triton wrapper built on it also return the router's losses. The solution does so if the configuration has one
of their coefficients, as (output, aux_data).
"""

from __future__ import annotations

import math

import torch
from torch.nn.functional import linear, silu

from contests.contest import Contest, Sizes, Stage, normal, problems
from vllm_rocm_ops import ops

NAMES = "dhidden dexpert nroutedexperts nsharedexperts nexpertspertoken bs seqlen seed"
CONFIG = "d_hidden d_expert n_routed_experts n_shared_experts n_experts_per_token batch_size seq_len"
TESTS = "7168 2048 4 1 4 1 512 9371, 7168 2048 8 1 4 2 512 2291, 7168 2048 8 1 4 1 8192 81934"
BENCHMARKS = "7168 2048 32 1 4 1 2048 9371, 7168 2048 32 1 4 1 8192 1212"
REDUCED = "128 64 8 2 4 2 40 2291, 128 64 4 1 4 1 8 9371"
Data = tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, int]]


def _make(sizes: Sizes, seed: int, device: str, fp8_dtype: torch.dtype) -> Data:
    config = dict(zip(CONFIG.split(), sizes.values()))
    hidden, expert, shared = sizes["dhidden"], sizes["dexpert"], sizes["dexpert"] * sizes["nsharedexperts"]
    drawn = normal(seed, device, torch.float16)
    x = drawn(sizes["bs"], sizes["seqlen"], hidden)
    weights = {"router.weight": drawn(sizes["nroutedexperts"], hidden) / math.sqrt(hidden)}
    widths = {f"experts.{i}": expert for i in range(sizes["nroutedexperts"])} | {"shared_experts": shared}
    for name, width in widths.items():
        for place in (0, 1):
            weights[f"{name}.{place}.weight"] = drawn(hidden, width) / math.sqrt(width)
        weights[f"{name}.2.weight"] = drawn(width, hidden) / math.sqrt(hidden)
    return x, weights, config


def _route(
    x: torch.Tensor, weights: dict[str, torch.Tensor], config: dict[str, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scores and the ids of each token's experts, [tokens, topk]."""
    scores = linear(x, weights["router.weight"]).softmax(-1)
    best, ids = scores.topk(config["n_experts_per_token"], dim=-1, sorted=False)
    return best.flatten(0, -2), ids.flatten(0, -2)


COEFFICIENTS = {"router_z_loss_coef": 0.001, "load_balance_loss_coef": 0.01}


def aux_data(x: torch.Tensor, router: torch.Tensor, ids: torch.Tensor, config: dict) -> dict[str, torch.Tensor]:
    """Return the losses and statistics of a router [experts, hidden] that sends tokens x [..., hidden] to ids [tokens, topk].

    Names are the wrapper's, losses have x's dtype. Coefficients missing in the configuration are the wrapper's defaults.
    """
    logits, experts = linear(x, router).flatten(0, -2), len(router)
    z, balance = (float(config.get(name, usual)) for name, usual in COEFFICIENTS.items())
    counts = ids.flatten().bincount(minlength=experts)
    return {
        "router_z_loss": ops.router_z_loss(logits, z).to(x.dtype),
        "load_balancing_loss": ops.load_balancing_loss(logits, ids.int(), balance).to(x.dtype),
        "expert_assignment_counts": counts,
        "avg_router_probs_per_expert_stat": logits.softmax(-1).mean(0),
        "fraction_tokens_per_expert_stat": counts.float() / max(ids.numel(), 1),
    }


def _expert(x: torch.Tensor, weights: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    gate, up, down = (weights[f"{name}.{place}.weight"] for place in range(3))
    return linear(silu(linear(x, gate.t())) * linear(x, up.t()), down.t())


def _reference(data: Data) -> tuple[torch.Tensor]:
    x, weights, config = data
    scores, ids = _route(x, weights, config)
    tokens = x.flatten(0, 1)
    total = torch.zeros_like(tokens)
    for expert in range(config["n_routed_experts"]):
        rows, places = (ids == expert).nonzero(as_tuple=True)
        if len(rows):
            total[rows] += _expert(tokens[rows], weights, f"experts.{expert}") * scores[rows, places, None]
    return (total.view(x.shape) + _expert(x, weights, "shared_experts"),)


def _ours(data: Data, stage: Stage) -> torch.Tensor | tuple[torch.Tensor, dict[str, torch.Tensor]]:
    x, weights, config = data
    routed, shared = config["n_routed_experts"], config["n_shared_experts"]
    width, hidden = config["d_expert"], config["d_hidden"]
    with stage("transpose weights"):
        w1 = x.new_empty(routed + shared, 2, width, hidden)
        w2 = x.new_empty(routed + shared, hidden, width)
        for expert in range(routed + shared):
            name = f"experts.{expert}" if expert < routed else "shared_experts"
            first = max(expert - routed, 0) * width
            for place in (0, 1):
                w1[expert, place].copy_(weights[f"{name}.{place}.weight"][:, first : first + width].t())
            w2[expert].copy_(weights[f"{name}.2.weight"][first : first + width].t())
    with stage("route"):
        scores, ids = _route(x, weights, config)
        scores, ids = scores.float(), ids.int()
    losses = None
    if config.keys() & COEFFICIENTS.keys():
        with stage("losses"):
            losses = aux_data(x, weights["router.weight"], ids, config)
    with stage("experts"):
        tokens = x.flatten(0, 1)
        result = ops.fused_experts(tokens, w1.flatten(1, 2), w2, scores, ids, x.dtype, shared_experts=shared)
    result = result.view(x.shape)
    return result if losses is None else (result, losses)


def _flops(sizes: Sizes) -> float:
    """Count the router and the experts hit per token."""
    of_token = sizes["nroutedexperts"] + 3 * sizes["dexpert"] * (sizes["nexpertspertoken"] + sizes["nsharedexperts"])
    return 2.0 * sizes["bs"] * sizes["seqlen"] * sizes["dhidden"] * of_token


CONTEST = Contest(
    name="moe",
    make=_make,
    reference=_reference,
    ours=_ours,
    flops=_flops,
    tests=problems(NAMES, TESTS),
    benchmarks=problems(NAMES, BENCHMARKS),
    reduced=problems(NAMES, REDUCED),
    rtol=1e-2,
    atol=1e-2,
    outputs=("output",),
)
