"""The two paths of a decode step (decode_step.py): what they share besides weights, and what each calls, layer by layer."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from attention import of_layers
from decode_rank import Rank
from stock import Stock, per_block, per_token, static
from torch import Tensor

from vllm_rocm_ops import ops
from vllm_rocm_ops.op import Op

MOST_BESIDE = 256
"""Tokens up to which vLLM computes the shared expert on a stream of its own, VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD's default."""


@functools.cache
def second_stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@contextlib.contextmanager
def beside() -> Iterator[torch.cuda.Stream]:
    """Has the GPU compute what is called here beside what is called next, until the stream that this gives is waited for."""
    stream = second_stream(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield stream


class Call(NamedTuple):
    kind: str
    function: Callable
    arguments: tuple

    def __call__(self):
        return self.function(*self.arguments)


class Inputs:
    """What the two paths of a step share besides weights: hidden states, caches, and which experts tokens go to."""

    def __init__(self, rank: Rank, batch: int, context: int):
        rank.generator.manual_seed(1)  # the same on all ranks, whatever they have drawn
        self.batch, self.context, self.tokens = batch, context, batch * rank.groups
        self.attention = of_layers(rank, batch, context)
        self.hidden = rank.values(batch, rank.config["hidden_size"])
        self.of_all = rank.values(self.tokens, rank.config["hidden_size"])  # the tokens of all ranks
        self.routes: dict[int, dict[str, Tensor]] = {}  # by layer
        self.bytes = sum(attention.bytes for attention in self.attention)
        for number, layer in enumerate(rank.layers):
            for part in layer.values():
                share = self._route(number, part.given, rank) if part.kind == "moe" else 1.0
                self.bytes += round(part.bytes() * share)

    def _route(self, layer: int, given, rank: Rank) -> float:
        """Sends each token to random experts. Returns which share of the rank's is hit, a folded one not counted."""
        here, topk = len(given.w1), given.topk_ids.shape[1]
        experts = here - rank.folds_shared if given.expert_map is None else len(given.expert_map)
        weights, ids = torch.rand(self.tokens, experts, generator=torch.Generator().manual_seed(layer)).topk(topk)
        weights = weights / weights.sum(1, keepdim=True)
        self.routes[layer] = {"topk_weights": weights.to(rank.device), "topk_ids": ids.int().to(rank.device)}
        hit = ids.unique() if given.expert_map is None else given.expert_map.cpu()[ids].unique()
        return int((hit >= 0).sum()) / here


class Step:
    """One path of a decode step; a call returns logits and tokens. `ours` are the kinds that our ops compute; `stock`,
    by the op's name, computes the others. Without `moe` there are no routed experts. What `take_down` calls is in
    `calls`."""

    def __init__(
        self,
        rank: Rank,
        inputs: Inputs,
        ours: frozenset[str],
        stock: dict[str, Stock],
        moe: bool = True,
        ranks: int = 1,
    ):
        self.rank, self.inputs, self.ours, self.stock, self.moe, self.ranks = rank, inputs, ours, stock, moe, ranks
        self.calls: list[Call] | None = None

    def __call__(self) -> tuple[Tensor, Tensor]:
        x = residual = self.call("rest", torch.clone, self.inputs.hidden)
        layer = latent if self.rank.absorbed else grouped
        for number in range(len(self.rank.layers) - 1):
            x = layer(self, number, x, residual)
        x = self.norm(-1, "final norm", x, residual)
        logits = self.linear(-1, "lm_head", x)
        return logits, self.call("rest", torch.argmax, logits, -1)

    def take_down(self) -> tuple[Tensor, Tensor]:
        """A call of the step, after which `calls` has all that it called, in order."""
        self.calls = []
        try:
            return self()
        finally:
            self.taken, self.calls = self.calls, None

    def call(self, kind: str, function: Callable, *arguments):
        if self.calls is not None:
            self.calls.append(Call(kind, function, arguments))
        return function(*arguments)

    def op(self, layer: int, name: str, **activations):
        """The op of a part, with these in place of its arguments."""
        part = self.rank.layers[layer][name]
        function = part.op if part.kind in self.ours else self.stock[part.op.name]
        return self.call(part.kind, function, *part.given._replace(**activations))

    def attend(self, kind: str, op: Op, *arguments) -> Tensor | None:
        """The first result of an op of attention."""
        result = self.call(kind, op if kind in self.ours else self.stock[op.name], *arguments)
        return result[0] if isinstance(result, tuple) else result

    def norm(self, layer: int, name: str, x: Tensor, residual: Tensor | None = None):
        """The result, with its scale if it is quantised."""
        given = self.rank.layers[layer][name].given._asdict()
        return self._quantising(
            layer, name, given, x, {"residual": residual} if given.get("residual") is not None else {}
        )

    def _quantising(self, layer: int, name: str, given: dict, x: Tensor, activations: dict):
        if "is_scale_transposed" in given:
            activations["is_scale_transposed"] = True
        result = self.op(layer, name, input=x, **activations)
        return (result, given["scale"]) if "scale" in given else result

    def linear(self, layer: int, name: str, x: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        """A product with what is quantised already, or is not and then quantised for it."""
        op, _, given = self.rank.layers[layer][name]
        if op is ops.unquantized_gemm:
            return self.op(layer, name, x=x)
        if isinstance(x, Tensor):
            dtype = given.b.dtype
            if op is ops.block_scaled_mm:
                x = self.call("quantization", per_block, x, dtype)
            elif given.scale_b.numel() > 1:
                x = self.call("quantization", per_token, x, dtype)
            else:
                x = self.call("quantization", static, x, given.scale_a, dtype)
        return self.op(layer, name, a=x[0], scale_a=x[1])

    def mlp(self, layer: int, prefix: str, x: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        x = self.linear(layer, f"{prefix}gate_up", x)
        given = self.rank.layers[layer][f"{prefix}SwiGLU"].given._asdict()
        return self.linear(layer, f"{prefix}down", self._quantising(layer, f"{prefix}SwiGLU", given, x, {}))

    def experts(self, layer: int, x: Tensor) -> Tensor:
        """Router, routed experts, the shared expert; its part of the sum over ranks of a group. As in vLLM the shared expert of few
        tokens runs beside the others."""
        parts = self.rank.layers[layer]
        folds = self.rank.folds_shared and "moe" in self.ours
        has_shared = "shared gate_up" in parts and not folds
        stream = shared = result = None
        if has_shared and x.is_cuda and len(x) <= MOST_BESIDE:
            with beside() as stream:
                shared = self.mlp(layer, "shared ", x)
        self.op(layer, "routing", gating_output=self.linear(layer, "router", x))
        if self.moe:
            given, tokens = parts["experts"].given, self._gathered(x)
            activations = {"hidden": tokens, **self.inputs.routes[layer]}
            if folds:
                activations["shared_experts"] = 1
            elif self.rank.folds_shared:
                names = ("w1", "w2", "w1_scale", "w2_scale")
                activations |= {name: getattr(given, name)[:-1] for name in names}
            result = self._scattered(self.op(layer, "experts", **activations))
        if stream is not None:
            torch.cuda.current_stream().wait_stream(stream)
        elif has_shared:
            shared = self.mlp(layer, "shared ", x)
        if result is None or shared is None:
            return next((part for part in (result, shared) if part is not None), x)
        return self.call("rest", torch.add, result, shared)

    # Collectives, among several processes

    def summed(self, x: Tensor) -> Tensor:
        """The sum over the ranks of a group, in place."""
        if self.ranks > 1 and self.rank.tp > 1:
            self.call("collectives", torch.distributed.all_reduce, x)
        return x

    def _gathered(self, x: Tensor) -> Tensor:
        """The tokens of all groups, one after the other."""
        if self.rank.groups == 1:
            return x
        if self.ranks > 1:
            self.call("collectives", torch.distributed.all_gather_into_tensor, self.inputs.of_all, x)
        return self.inputs.of_all

    def _scattered(self, of_all: Tensor) -> Tensor:
        """The sum over all groups of this one's tokens."""
        if self.rank.groups == 1 or self.ranks == 1:
            return of_all[: self.inputs.batch]
        x = torch.empty_like(self.inputs.hidden)
        self.call("collectives", torch.distributed.reduce_scatter_tensor, x, of_all)
        return x


def grouped(step: Step, layer: int, x: Tensor, residual: Tensor) -> Tensor:
    """A layer of Llama."""
    x = step.linear(layer, "qkv", step.norm(layer, "input norm", x, residual))
    x = step.inputs.attention[layer].run(step.attend, x)
    x = step.summed(step.linear(layer, "o", x))
    return step.summed(step.mlp(layer, "", step.norm(layer, "post-attention norm", x, residual)))


def latent(step: Step, layer: int, x: Tensor, residual: Tensor) -> Tensor:
    """A layer of DeepSeek."""
    parts, x = step.rank.layers[layer], step.norm(layer, "input norm", x, residual)
    q_rank, kv_rank = step.rank.config["q_lora_rank"], step.rank.config["kv_lora_rank"]
    if q_rank is None:
        q, kv = step.linear(layer, "q", x), step.linear(layer, "kv_a (replicated)", x)
    else:
        both = step.linear(layer, "fused q_a+kv_a (replicated)", x)
        q, kv = step.linear(layer, "q_b", step.norm(layer, "q_a norm", both[:, :q_rank])), both[:, q_rank:]
    normed = step.norm(layer, "kv_a norm", kv[:, :kv_rank])
    x = step.inputs.attention[layer].run(step.attend, q, normed, kv[:, kv_rank:])
    x = step.summed(step.linear(layer, "o", x))
    if "experts" in parts:
        return step.summed(step.experts(layer, step.norm(layer, "post-attention norm", x, residual)))
    return step.summed(step.mlp(layer, "dense ", step.norm(layer, "dense post-attention norm", x, residual)))
