"""Which layers of a model the seams have taken. A probe finds a name that vLLM no longer has, not a model with layers of its own, whose
norms, for instance, are a class that no seam replaces."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator

import torch

import vllm_rocm_ops
from vllm_rocm_ops.vllm import row_selection, seam

logger = logging.getLogger("vllm.vllm_rocm_ops")

SEAMS = {
    "norms": ("norm",),
    "activations": ("activation",),
    "linear layers": ("scaled_linear", "block_scaled_linear", "int8_linear", "mxfp8_linear"),
    "layers of experts": ("fp8_experts", "mxfp8_experts", "unquantized_experts", "routing_experts"),
    "layers of attention": ("decode_attention", "latent_attention"),
}
"""Kinds of layers, and the seams that take them."""


@dataclasses.dataclass
class Reach:
    """Layers of a kind: how many run through a seam, and those that no seam took, by class."""

    taken: int = 0
    missed: dict[str, int] = dataclasses.field(default_factory=dict)


def kernels_of(module: torch.nn.Module) -> Iterator[object]:
    """Yield the linear kernels and experts of ours that a layer holds."""
    method = getattr(module, "quant_method", None)
    moe = getattr(method, "moe_kernel", None)
    holders = [vars(one) for one in (method, getattr(module, "scheme", None), moe) if hasattr(one, "__dict__")]
    held = [value for holder in holders for value in holder.values()] + [getattr(moe, "fused_experts", None)]
    yield from {id(one): one for one in held if type(one).__name__.startswith("RocmOps")}.values()


def kind_of(module: torch.nn.Module) -> str | None:
    """Return the kind of a layer that a seam may take. A linear layer is one with a weight of 8 bits."""
    name, weight = type(module).__name__, getattr(module, "weight", None)
    if "RMSNorm" in name:
        return "norms"
    if "SiluAndMul" in name:
        return "activations"
    if hasattr(module, "w13_weight"):
        return "layers of experts"
    if hasattr(module, "input_size_per_partition") and getattr(weight, "dtype", torch.float32).itemsize == 1:
        return "linear layers"
    return None


def layers(model: torch.nn.Module) -> Iterator[tuple[str, bool, str]]:
    """Yield the kind of each layer, whether a seam has taken it, and what it is."""
    for module in model.modules():
        kind = kind_of(module)
        if kind in ("norms", "activations"):
            yield kind, hasattr(module, "rocm_ops_forward"), type(module).__name__
        elif kind is not None:
            method = type(getattr(module, "quant_method", module)).__name__
            yield kind, next(kernels_of(module), None) is not None, method


def attention(config) -> Iterator[tuple[str, bool, str]]:
    """Yield the same of the layers of attention, which a model's configuration lists."""
    for layer in config.compilation_config.static_forward_context.values():
        if impl := getattr(layer, "impl", None):
            what, ours = type(impl).__name__, getattr(impl, "rocm_ops", None)
            taken = ours is not None and not ours.lacks
            yield "layers of attention", taken, f"{what}, {ours.lacks}" if ours and ours.lacks else what


def found(worker) -> dict[str, Reach]:
    """Return what the seams have taken of the models that a worker has loaded, by kind of layer. Kinds whose seams are all off are not
    in it."""
    on, result = set(seam.active()), {}
    every = [one for model in row_selection.models_of(worker) for one in layers(model)]
    for kind, taken, what in (*every, *attention(worker.vllm_config)):
        if on.isdisjoint(SEAMS[kind]):
            continue
        reach = result.setdefault(kind, Reach())
        reach.taken += taken
        if not taken:
            reach.missed[what] = reach.missed.get(what, 0) + 1
    return result


def say(reached: dict[str, Reach]) -> None:
    """Log what was taken, and warn of what was not."""
    counts = [f"{one.taken} {kind}" for kind, one in reached.items() if one.taken]
    if counts:
        logger.info("vllm-rocm-ops: takes %s", ", ".join(counts))
    missed = [
        f"{sum(one.missed.values())} {kind} ({', '.join(f'{count} {what}' for what, count in sorted(one.missed.items()))})"
        for kind, one in reached.items()
        if one.missed
    ]
    if missed:
        logger.warning("vllm-rocm-ops: vLLM's own code runs %s", "; ".join(missed))


def say_calls(ours: dict[str, bool]) -> None:
    """Log how often a worker has called each op when it has warmed up and captured its graphs, and warn of patterns that were chosen
    and that no graph holds (`row_selection.choices`)."""
    calls = {op: sum(kernels.values()) for op, kernels in vllm_rocm_ops.stats().items()}
    if calls:
        text = ", ".join(f"{op} {count}" for op, count in sorted(calls.items()))
        logger.info("vllm-rocm-ops: calls up to the end of the warm-up: %s", text)
    unreached = sorted(pattern for pattern, runs in ours.items() if runs and pattern.partition(" ")[0] not in calls)
    if unreached:
        logger.warning("vllm-rocm-ops: chosen, but in no graph of this model: %s", ", ".join(unreached))
