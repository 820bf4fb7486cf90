"""Run an all-reduce, alone or with the norm after it, in one launch, where the ranks of a group agreed on it.

all_reduce_timing.py decides. A compiled graph holds one torch op for all norms, which rewrite.py puts in place of
`torch.ops.vllm.all_reduce` and a norm. The op chooses at each call by token count: one launch where that was timed to
be faster, else vLLM's all-reduce and the plugin's norm. All ranks choose alike, because they have the same table and
token count.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable

import torch
from torch import Tensor

from vllm_rocm_ops import ops
from vllm_rocm_ops.core.correctness import as_tuple
from vllm_rocm_ops.core.op import Op, define
from vllm_rocm_ops.vllm.selection import kernel_selection
from vllm_rocm_ops.vllm.selection.kernel_selection import Choice

NAME = "all_reduce"
HELPERS = {"fused_allreduce_rms_norm": False, "fused_allreduce_gemma_rms_norm": True}
"""vLLM's functions for eager models -> whether they multiply by 1 + weight and do not update the residual."""


@dataclasses.dataclass(frozen=True)
class Call:
    """A candidate for one launch.

    Attributes:
        norm: The name of an op of ops/rms_norm.py, empty for an all-reduce alone.
        hidden: The columns.
        helper: The replaced function of vLLM's, of `HELPERS`, or "".
    """

    norm: str
    hidden: int
    dtype: torch.dtype
    has_residual: bool = False
    is_column_major: bool = False
    helper: str = ""

    @property
    def op(self) -> types.SimpleNamespace:
        """Return the name of the launch, as `kernel_selection.Comparison` has it."""
        return types.SimpleNamespace(name=f"{NAME}_{self.norm}" if self.norm else NAME)

    def describe(self, _: tuple = ()) -> str:
        traits = " residual" * self.has_residual + " column-major" * self.is_column_major
        return f"{self.hidden} {kernel_selection.types(self.dtype)}{traits}{' ' * bool(self.helper)}{self.helper}"

    def max_tokens(self) -> int:
        return 0


@dataclasses.dataclass
class GroupAllReduce:
    """The all-reduce of a group, and the choice of each call."""

    reduce: Callable
    choices: dict[Call, Choice]

    def serves(self, call: Call, tokens: int) -> bool:
        choice = self.choices.get(call)
        return choice is not None and choice.plugin_serves(tokens)

    def wins(self, call: Call, everywhere: bool) -> bool:
        """True if the plugin's launch serves some token count, or with `everywhere` all that it supports."""
        choice = self.choices.get(call)
        served = choice.plugin_by_tokens[1:] if choice is not None else b""
        return bool(served) and (all(served) if everywhere else any(served))


groups: dict[str, GroupAllReduce] = {}
"""By vLLM's name of the group."""


def state() -> list[str]:
    """Return what decides which graphs hold the plugin's all-reduce."""
    return sorted(
        f"{name} {choice.key} {'all' if all(choice.plugin_by_tokens[1:]) else 'some'}"
        for name, shared in groups.items()
        for choice in shared.choices.values()
        if any(choice.plugin_by_tokens)
    )


def wins(name: str, op: Op, given: dict[str, object], everywhere: bool) -> bool:
    """True if a norm with these arguments is to be one launch with the all-reduce of a group before it."""
    return name in groups and groups[name].wins(call_of(op, given), everywhere)


def call_of(op: Op, given: dict[str, object]) -> Call:
    """Return the `Call` of a norm, from its argument values or nodes."""
    x = given["input"]
    x = x if isinstance(x, Tensor) else x.meta["val"]
    residual, is_column_major = given.get("residual") is not None, bool(given.get("is_scale_transposed", False))
    return Call(op.name, x.shape[-1], x.dtype, residual, is_column_major)


# The torch op


def all_reduce_norm(
    input: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    scale: Tensor | None,
    scale_ub: Tensor | None,
    epsilon: float,
    quant_dtype: torch.dtype,
    group_size: int,
    is_scale_transposed: bool,
    one_plus_weight: bool,
    addend: Tensor | None,
    addend_factor: float,
    norm: str,
    group: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the op `norm` of the sum of all ranks' inputs, padded by empty tensors to three results."""


FIELDS = tuple(all_reduce_norm.__annotations__)[:-1]


def _arguments(values: tuple) -> tuple[Op, tuple, str]:
    given = dict(zip(FIELDS, values, strict=True))
    op = getattr(ops, given["norm"])
    return op, tuple(given[name] for name in op.Arguments._fields), given["group"]


def padded(*results: Tensor) -> tuple[Tensor, ...]:
    """Return three results: PyTorch supports no list from an op that mutates an argument."""
    return *results, *(results[0].new_empty(0) for _ in range(3 - len(results)))


def _run(*values) -> tuple[Tensor, ...]:
    op, args, group = _arguments(values)
    shared = groups.get(group)
    if shared is not None and shared.serves(call_of(op, op.Arguments(*args)._asdict()), len(args[0])):
        outputs = shared.reduce(op, *args)
    else:
        from vllm.distributed import parallel_state

        from vllm_rocm_ops.collectives.all_reduce import run_fallback

        outputs = run_fallback(op, False, lambda x: parallel_state.all_reduce(x, group), args)
    return padded(*as_tuple(outputs))


def _fake(*values) -> tuple[Tensor, ...]:
    op, args, _ = _arguments(values)
    return padded(*as_tuple(op.allocate(op.Arguments(*args))))


OP = define(_run, _fake, like=all_reduce_norm, mutates=("residual",))


def group_of(all_reduce: torch.fx.Node) -> str:
    """Return vLLM's name of the group of an all-reduce in a graph."""
    return (*all_reduce.args[1:], *all_reduce.kwargs.values())[0]


def node_arguments(op: Op, given: dict[str, object], summed: torch.fx.Node) -> dict[str, object]:
    """Return the torch op's arguments, by name, for a norm after an all-reduce."""
    known = dict.fromkeys(FIELDS) | {
        "quant_dtype": torch.uint8,
        "group_size": 0,
        "is_scale_transposed": False,
        "addend_factor": 1.0,
    }
    known |= {name: given[name] for name in op.Arguments._fields}
    return known | {"norm": op.name, "group": group_of(summed)}


# All-reduces outside of compiled graphs


def communicator(vllms: Callable[[Tensor], Tensor], shared: GroupAllReduce, call: Call) -> Callable[[Tensor], Tensor]:
    """Return the replacement of a communicator's `all_reduce`."""

    def all_reduce(input_: Tensor) -> Tensor:
        is_alike = input_.dim() == 2 and input_.shape[1] == call.hidden and input_.dtype == call.dtype
        return shared.reduce.sum(input_) if is_alike and shared.serves(call, len(input_)) else vllms(input_)

    return all_reduce


def helper(vllms: Callable, shared: GroupAllReduce, call: Call) -> Callable:
    """Return the replacement of a function of `HELPERS`."""
    one_plus = HELPERS[call.helper]

    def fused(hidden_states: Tensor, residual: Tensor, norm: torch.nn.Module) -> tuple[Tensor, Tensor]:
        x, weight = hidden_states, norm.weight
        is_alike = x.dim() == 2 and x.shape == residual.shape and x.shape[1] == call.hidden
        is_alike = is_alike and {x.dtype, residual.dtype, weight.dtype} == {call.dtype}
        if not (is_alike and shared.serves(call, len(x))):
            return vllms(hidden_states, residual, norm)
        return run_helper(shared.reduce, one_plus, x, residual, weight.data, norm.variance_epsilon)

    fused.vllms = vllms
    return fused


def run_helper(reduce: Callable, one_plus: bool, x: Tensor, residual: Tensor, weight: Tensor, epsilon: float):
    """Return the norm and the residual as a function of `HELPERS` does."""
    residual = residual.clone() if one_plus else residual
    return reduce(ops.fused_add_rms_norm, x, residual, weight, epsilon, one_plus), residual


def checked(run: Callable, check: Callable[[], None]) -> Callable:
    """Wrap a worker's function to raise if a rank was missing in its step, once results are there."""

    @functools.wraps(run)
    def call(*arguments, **keywords):
        result = run(*arguments, **keywords)
        later = getattr(result, "get_output", None)
        if later is None:
            check()
            return result

        def get_output():
            output = later()
            check()
            return output

        result.get_output = get_output
        return result

    return call
