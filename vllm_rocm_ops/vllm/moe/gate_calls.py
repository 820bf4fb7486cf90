"""Find the gate of an MoE layer: the layer's own, or one that the model's code calls before the layer, with no other use of its logits.

    router_logits, _ = self.gate(hidden_states)
    ... self.experts(hidden_states=hidden_states, router_logits=router_logits)

vLLM's compiler may write other values to the memory of logits that more code reads, so this is read from the code, and not
told by the tensors of a call.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

TOKENS, LOGITS = "hidden_states", "router_logits"
"""The arguments of an MoE layer. The tokens have 16 bits."""


class Gate(NamedTuple):
    """A gate, whether the model's code calls it, and whether that code converts 16-bit tokens to float32 first."""

    module: torch.nn.Module | None
    in_model: bool = False
    is_widened: bool = False


def gates_of(models: Iterable[torch.nn.Module], layers: Iterable[torch.nn.Module]) -> Iterator[tuple]:
    """Yield each MoE layer of the models with its `Gate`, whose module is None if none is found."""
    blocks = {child: block for model in models for block in model.modules() for child in block.children()}
    for layer in layers:
        gate = getattr(layer, "gate", None)
        yield layer, Gate(gate) if gate is not None else gate_before(blocks.get(layer), layer)


def gate_before(block: torch.nn.Module | None, layer: torch.nn.Module) -> Gate:
    """Return the gate that the code of a module calls before its MoE layer."""
    names = {child: name for name, child in block.named_children()} if block is not None else {}
    found = called_before(type(block), names[layer]) if layer in names else None
    if found is None:
        return Gate(None)
    name, is_widened = found
    return Gate(getattr(block, name, None), True, is_widened)


@functools.cache
def called_before(block: type, layer: str) -> tuple[str, bool] | None:
    """Return the name of the gate in `forward` of a module's class, and whether its tokens become float32; None without."""
    try:
        code = ast.parse(textwrap.dedent(inspect.getsource(block.forward)))
    except (OSError, SyntaxError, TypeError):
        return None
    calls = [node for node in ast.walk(code) if isinstance(node, ast.Call) and member(node.func) == layer]
    named = {keyword.arg: keyword.value for call in calls for keyword in call.keywords}
    given = [node.id for node in (named.get(LOGITS),) if isinstance(node, ast.Name)]
    if len(calls) != 1 or not given:
        return None
    uses = [node for node in ast.walk(code) if isinstance(node, ast.Name) and node.id == given[0]]
    made = [node for node in ast.walk(code) if isinstance(node, ast.Assign) and target(node) == given[0]]
    if len(uses) != 2 or len(made) != 1 or not isinstance(made[0].value, ast.Call):
        return None
    gate, arguments = member(made[0].value.func), made[0].value.args
    if gate is None or len(arguments) != 1 or made[0].value.keywords:
        return None
    if isinstance(arguments[0], ast.Name):
        return gate, False
    tokens = calls[0].args[0] if calls[0].args else named.get(TOKENS)
    return (gate, True) if isinstance(tokens, ast.Name) and is_float32(arguments[0], tokens.id) else None


def member(node: ast.expr) -> str | None:
    """Return the name in `self.name`, None of other expressions."""
    is_member = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    return node.attr if is_member else None


def target(node: ast.Assign) -> str | None:
    """Return the name that gets a value, or the first one of a pair."""
    [*_, last] = node.targets
    last = last.elts[0] if isinstance(last, ast.Tuple) and last.elts else last
    return last.id if isinstance(last, ast.Name) and len(node.targets) == 1 else None


def is_float32(node: ast.expr, name: str) -> bool:
    """True for `name.to(torch.float32)`, also with `dtype=`, and for `name.float()`."""
    if (
        not isinstance(node, ast.Call)
        or not isinstance(node.func, ast.Attribute)
        or ast.unparse(node.func.value) != name
    ):
        return False
    given = [ast.unparse(value) for value in (*node.args, *(keyword.value for keyword in node.keywords))]
    return (node.func.attr, given) in (("to", ["torch.float32"]), ("float", []))
