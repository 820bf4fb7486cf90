"""Find the layers whose result a linear may read quantized: norms, and activations before `down_proj`."""

import types
from collections.abc import Iterator

import torch

MARKED = "rocm_ops_marked"
"""The attribute of norms that are marked while vLLM traces their model (markers.py)."""


def norms(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the norms of a model that the plugin's ops serve."""
    for layer in model.modules():
        if hasattr(layer, "variance_epsilon") and hasattr(layer, "rocm_ops_forward"):
            yield layer


def gated(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the layers of a model whose `down_proj` reads the result of `act_fn`, if the plugin covers that."""
    for layer in model.modules():
        if hasattr(getattr(layer, "act_fn", None), "consumer") and feeds(layer):
            yield layer


def opaque(model: torch.nn.Module) -> set[torch.nn.Module]:
    """Return the layers that the compiler and its passes do not see: shared experts run inside an op of vLLM's."""
    return {part for shared in model.modules() if type(shared).__name__ == "SharedExperts" for part in shared.modules()}


def feeds(layer: torch.nn.Module) -> bool:
    """True if a layer passes the result of `act_fn` to `down_proj` unchanged.

    Runs the layer's forward with stand-ins that record it.
    """
    made, got = object(), []

    def down_proj(x):
        got.append(x)
        return x, None

    parts = {"gate_up_proj": lambda x: (x, None), "act_fn": lambda x: made, "down_proj": down_proj, "expert_gate": None}
    try:
        type(layer).forward(types.SimpleNamespace(**parts), torch.empty(1, device="meta"))
    except Exception:  # noqa: BLE001  a forward that changes the result fails on a stand-in
        return False
    return got == [made]


def is_gated(layer: torch.nn.Module) -> bool:
    """True if a layer returns `down_proj`'s result times the sigmoid of what `expert_gate` returns, and without that the result.

    Runs the layer's forward with stand-ins, on numbers that tell.
    """
    given, logits = torch.tensor([[1.0, -3.0], [2.0, 0.5]], device="cpu"), torch.tensor([[-1.0], [2.0]], device="cpu")
    parts = {name: lambda x: (x, None) for name in ("gate_up_proj", "down_proj")} | {"act_fn": lambda x: 5.0 * x}
    made = []
    try:
        for gate in (lambda x: (logits, None), None):
            made.append(type(layer).forward(types.SimpleNamespace(**parts, expert_gate=gate), given))
        return torch.allclose(made[0], 5.0 * given * torch.sigmoid(logits)) and torch.equal(made[1], 5.0 * given)
    except Exception:  # noqa: BLE001  a forward that reads something else
        return False


def width(linear: torch.nn.Module) -> int:
    """Return the columns of a linear's input on this rank. Replicated layers have only `input_size`."""
    return linear.input_size_per_partition if hasattr(linear, "input_size_per_partition") else linear.input_size
