"""Layers of a model whose result a linear may take quantized: norms, and activations in front of `down_proj`."""

import types
from collections.abc import Iterator

import torch


def norms(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the norms of a model that our ops serve."""
    for layer in model.modules():
        if hasattr(layer, "variance_epsilon") and hasattr(layer, "rocm_ops_forward"):
            yield layer


def gated(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the layers of a model whose `down_proj` takes the result of their `act_fn`, which is ours."""
    for layer in model.modules():
        if hasattr(getattr(layer, "act_fn", None), "consumer") and feeds(layer):
            yield layer


def opaque(model: torch.nn.Module) -> set[torch.nn.Module]:
    """Return the layers of a model that its compiler and passes do not see: shared experts run inside an op of vLLM's."""
    return {part for shared in model.modules() if type(shared).__name__ == "SharedExperts" for part in shared.modules()}


def feeds(layer: torch.nn.Module) -> bool:
    """Return whether a layer hands the result of `act_fn` to `down_proj` as it is: its forward is run with stand-ins that tell."""
    made, got = object(), []

    def down_proj(x):
        got.append(x)
        return x, None

    parts = {"gate_up_proj": lambda x: (x, None), "act_fn": lambda x: made, "down_proj": down_proj, "expert_gate": None}
    try:
        type(layer).forward(types.SimpleNamespace(**parts), torch.empty(1, device="meta"))
    except Exception:  # noqa: BLE001  a forward that does more with the result cannot do so with a stand-in
        return False
    return got == [made]


def width(linear: torch.nn.Module) -> int:
    """Return the columns of a linear's input. Layers that every rank holds whole do not say what a rank has."""
    return linear.input_size_per_partition if hasattr(linear, "input_size_per_partition") else linear.input_size
