"""The layers of a decode step (decode_step.py) in float32, from the same weights dequantised, and how far each path is off.

Nothing is rounded between the layer's input and its output. Both paths and float32 start each layer from the same values, those
that the first path has there: an error of one layer is not hidden under the errors of those before it.
"""

from __future__ import annotations

import math
import statistics

import torch
from decode_paths import Step, grouped, latent
from torch import Tensor

from vllm_rocm_ops import ops
from vllm_rocm_ops.families import weight_layout
from vllm_rocm_ops.families.gemm import BLOCK

MOST_OF_STOCK = 1.1
"""As a geometric mean of all layers."""
MOST_OF_A_LAYER = 1.3
"""The rounding of one token in one layer varies. vLLM's compiled norms leave out a rounding that its own kernel and ours have."""


def by_blocks(weight: Tensor, scale: Tensor) -> Tensor:
    """A weight [n, k] times its scales: of one element, [n], or one of 128x128."""
    if scale.dim() == 2 and scale.shape != (len(weight), 1) and scale.numel() > 1:
        rows, columns = weight.shape
        scale = scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
        return weight.float() * scale.float()
    return weight.float() * scale.float().reshape(-1, 1)


def weight_of(part) -> Tensor:
    """The weight [n, k] of a linear layer, in float32."""
    if part.op is ops.unquantized_gemm:
        return weight_layout.plain_weight(part.given.weight).float()
    b = part.given.b
    if part.op is ops.scaled_mm:
        b = b.t() if b.dim() == 2 else weight_layout.plain_weight(b)
    else:
        b = weight_layout.plain_weight(b)
    return by_blocks(b, part.given.scale_b)


def swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


class Exact:
    """Layers in float32, of the weights and caches of a path. What goes from layer to layer is the sum that norms take."""

    def __init__(self, step: Step):
        self.rank, self.inputs, self.moe = step.rank, step.inputs, step.moe
        self.attended = self.latent if self.rank.absorbed else self.grouped

    def layer(self, number: int, x: Tensor) -> Tensor:
        """The sum behind a layer, of that before it; behind the last layer logits."""
        parts = self.rank.layers[number]
        if "final norm" in parts:
            return self.linear(parts, "lm_head", self.norm(parts, "final norm", x))
        x = x + self.linear(parts, "o", self.attended(number, self.norm(parts, "input norm", x)))
        if "experts" in parts:
            return x + self.experts(number, self.norm(parts, "post-attention norm", x))
        prefix = "dense " if self.rank.absorbed else ""
        return x + self.mlp(parts, prefix, self.norm(parts, f"{prefix}post-attention norm", x))

    def norm(self, parts: dict, name: str, x: Tensor) -> Tensor:
        given = parts[name].given
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + given.epsilon) * given.weight.float()

    def linear(self, parts: dict, name: str, x: Tensor) -> Tensor:
        return x @ weight_of(parts[name]).t()

    def mlp(self, parts: dict, prefix: str, x: Tensor) -> Tensor:
        return self.linear(parts, f"{prefix}down", swiglu(self.linear(parts, f"{prefix}gate_up", x)))

    def experts(self, number: int, x: Tensor) -> Tensor:
        """The routed experts, for the tokens that the step sends them, and the shared one."""
        parts, total = self.rank.layers[number], torch.zeros_like(x)
        if self.moe:
            given, route = parts["experts"].given, self.inputs.routes[number]
            ids, tokens = route["topk_ids"].long(), x if self.rank.groups == 1 else self.inputs.of_all.float()
            if given.expert_map is not None:
                ids = given.expert_map.long()[ids]
            for expert in range(len(given.w1) - self.rank.folds_shared):
                weights = [
                    weight[expert].float() if scale is None else by_blocks(weight[expert], scale[expert])
                    for weight, scale in ((given.w1, given.w1_scale), (given.w2, given.w2_scale))
                ]
                share = (route["topk_weights"] * (ids == expert)).sum(1, keepdim=True)
                total += (share * (swiglu(tokens @ weights[0].t()) @ weights[1].t()))[: len(x)]
        if "shared gate_up" in parts:
            total += self.mlp(parts, "shared ", x)
        return total if self.moe or "shared gate_up" in parts else x

    def grouped(self, number: int, x: Tensor) -> Tensor:
        """Attention with a key and a value for some heads."""
        of, qkv = self.inputs.attention[number], self.linear(self.rank.layers[number], "qkv", x)
        rows = qkv.unflatten(1, (-1, of.head_dim))
        rotated = rows[:, : -of.kv_heads] @ of.pages.rotation.float()
        keys, values = (of.pages.of(cache)[:, :-1].float() for cache in (of.keys, of.values))
        keys = torch.cat((keys, rotated[:, None, of.heads :]), 1)
        values = torch.cat((values, rows[:, None, -of.kv_heads :]), 1)
        queries = rotated[:, : of.heads].unflatten(1, (of.kv_heads, -1))
        weights = torch.softmax(torch.einsum("mghd,mcgd->mghc", queries, keys) * of.head_dim**-0.5, -1)
        return torch.einsum("mghc,mcgd->mghd", weights, values).flatten(1)

    def latent(self, number: int, x: Tensor) -> Tensor:
        """Attention over latents."""
        of, parts, config = self.inputs.attention[number], self.rank.layers[number], self.rank.config
        q_rank, kv_rank = config["q_lora_rank"], config["kv_lora_rank"]
        if q_rank is None:
            q, kv = self.linear(parts, "q", x), self.linear(parts, "kv_a (replicated)", x)
        else:
            both = self.linear(parts, "fused q_a+kv_a (replicated)", x)
            q, kv = self.linear(parts, "q_b", self.norm(parts, "q_a norm", both[:, :q_rank])), both[:, q_rank:]
        rotation = of.pages.rotation.float()
        new = torch.cat((self.norm(parts, "kv_a norm", kv[:, :kv_rank]), kv[:, kv_rank:] @ rotation), -1)
        rows = torch.cat((of.pages.of(of.cache)[:, :-1].float(), new[:, None]), 1)
        q = q.unflatten(1, (len(of.w_uk), -1))
        queries = torch.cat(
            (torch.einsum("mhd,hdr->mhr", q[..., : of.nope], of.w_uk.float()), q[..., of.nope :] @ rotation), -1
        )
        weights = torch.softmax(torch.einsum("mhr,mcr->mhc", queries, rows) * of.softmax_scale, -1)
        found = torch.einsum("mhc,mcr->mhr", weights, rows[..., :kv_rank])
        return torch.einsum("mhr,hrv->mhv", found, of.w_uv.float()).flatten(1)


def layer_errors(steps: dict[str, Step]) -> dict[str, list[float]]:
    """By path and layer, how far a layer is off, of what it adds; for the last, of the logits."""
    first = next(iter(steps.values()))
    exact, errors = Exact(first), {path: [] for path in steps}
    run = latent if first.rank.absorbed else grouped
    x = residual = first.inputs.hidden
    for number in range(len(first.rank.layers)):
        before = x.float() if number == 0 else x.float() + residual.float()
        expected, given = exact.layer(number, before), (x, residual)
        is_last = number == len(first.rank.layers) - 1
        added = expected if is_last else expected - before
        for path, step in steps.items():
            mine, rest = (tensor.clone() for tensor in given)
            if number == 0:
                rest = mine
            if is_last:
                found = step.linear(-1, "lm_head", step.norm(-1, "final norm", mine, rest)).float()
            else:
                mine = run(step, number, mine, rest)
                found = mine.float() + rest.float()
            errors[path].append(((found - expected).norm() / added.norm()).item())
            if step is first:
                x, residual = mine, rest
    return errors


def check(errors: dict[str, list[float]]) -> None:
    """Raises RuntimeError where ours is farther off than stock, in a layer or in all, by more than rounding is."""
    ratios = [ours / stock for stock, ours in zip(errors["stock"], errors["ours"], strict=True)]
    worst = max(range(len(ratios)), key=lambda number: ratios[number] if ratios[number] == ratios[number] else math.inf)
    if not ratios[worst] <= MOST_OF_A_LAYER:
        where = "logits" if worst == len(ratios) - 1 else f"layer {worst}"
        raise RuntimeError(
            f"ours must be off by at most {MOST_OF_A_LAYER} times as much as stock, of float32's {where}, got "
            f"{errors['ours'][worst]:.4f} and {errors['stock'][worst]:.4f}"
        )
    if (mean := statistics.geometric_mean(ratios)) > MOST_OF_STOCK:
        raise RuntimeError(
            f"ours must be off by at most {MOST_OF_STOCK} times as much as stock, of float32's layers as a geometric mean, got {mean:.3f}"
        )
