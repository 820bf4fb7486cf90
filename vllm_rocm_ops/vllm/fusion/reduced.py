"""An all-reduce with the norm of ours behind it in one launch, and an all-reduce alone, where the ranks of a tensor-parallel group have
agreed on that: measured_all_reduce.py.

A compiled graph holds one torch op for all norms, which graph.py puts in the place of `torch.ops.vllm.all_reduce` and a norm. It chooses
at a call, by the number of tokens: one launch where that was measured to be the faster, else vLLM's all-reduce and our norm. All ranks
choose alike, as they have the same table and the same tokens.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from vllm_rocm_ops import ops
from vllm_rocm_ops.core.correctness import as_tuple
from vllm_rocm_ops.core.op import Op, define
from vllm_rocm_ops.vllm.selection import kernel_selection
from vllm_rocm_ops.vllm.selection.kernel_selection import Choice

NAME = "all_reduce"
HELPERS = {"fused_allreduce_rms_norm": False, "fused_allreduce_gemma_rms_norm": True}
"""vLLM's functions for models that it does not compile -> whether 1 + weight takes the weight's place, and the residual is left as is."""


@dataclasses.dataclass(frozen=True)
class Call:
    """What may be one launch: `norm` names an op of ops/rms_norm.py, and is empty for an all-reduce alone; `helper` names vLLM's function
    whose place that takes."""

    norm: str
    hidden: int
    dtype: torch.dtype
    has_residual: bool = False
    is_column_major: bool = False
    helper: str = ""

    @property
    def op(self) -> types.SimpleNamespace:
        """The name of the launch, as `kernel_selection.Kernels` has it."""
        return types.SimpleNamespace(name=f"{NAME}_{self.norm}" if self.norm else NAME)

    def describe(self, _: tuple = ()) -> str:
        """Return what tells the shapes apart."""
        traits = " residual" * self.has_residual + " column-major" * self.is_column_major
        return f"{self.hidden} {kernel_selection.types(self.dtype)}{traits}{' ' * bool(self.helper)}{self.helper}"

    def most_tokens(self) -> int:
        """Return 0: nothing is ours where nothing was measured."""
        return 0


@dataclasses.dataclass
class Shared:
    """The all-reduce of a group, and where a launch of ours serves. `native` is what each call was measured beside."""

    reduce: Callable
    choices: dict[Call, Choice]

    def serves(self, call: Call, tokens: int) -> bool:
        """Return whether a launch of ours serves a call of so many tokens."""
        choice = self.choices.get(call)
        return choice is not None and choice.is_ours(tokens)

    def wins(self, call: Call, everywhere: bool) -> bool:
        """Return whether a launch of ours serves some number of tokens, or all that it may serve."""
        choice = self.choices.get(call)
        ours = choice.ours[1:] if choice is not None else b""
        return bool(ours) and (all(ours) if everywhere else any(ours))


groups: dict[str, Shared] = {}
"""By vLLM's name of the group."""


def state() -> list[str]:
    """Return what decides which graphs hold an all-reduce of ours."""
    return sorted(
        f"{name} {choice.key} {'all' if all(choice.ours[1:]) else 'some'}"
        for name, shared in groups.items()
        for choice in shared.choices.values()
        if any(choice.ours)
    )


def wins(name: str, op: Op, given: dict[str, object], everywhere: bool) -> bool:
    """Return whether a norm with these arguments is to be one launch with the all-reduce of a group in front of it."""
    return name in groups and groups[name].wins(call_of(op, given), everywhere)


def call_of(op: Op, given: dict[str, object]) -> Call:
    """Return what a norm's arguments, or the nodes of them, make a call."""
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
    norm: str,
    group: str,
) -> tuple[Tensor, Tensor]:
    """Return what the op `norm` returns for the sum of all ranks' inputs, with an empty tensor behind it where that is one."""


FIELDS = tuple(all_reduce_norm.__annotations__)[:-1]


def _arguments(values: tuple) -> tuple[Op, tuple, str]:
    given = dict(zip(FIELDS, values, strict=True))
    op = getattr(ops, given["norm"])
    return op, tuple(given[name] for name in op.Arguments._fields), given["group"]


def pair(values: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return two results: PyTorch takes no list from an op that updates an argument."""
    return values, values.new_empty(0) if scale is None else scale


def _run(*values) -> tuple[Tensor, Tensor]:
    op, args, group = _arguments(values)
    shared = groups.get(group)
    if shared is not None and shared.serves(call_of(op, op.Arguments(*args)._asdict()), len(args[0])):
        found = shared.reduce(op, *args)
    else:
        from vllm.distributed import parallel_state

        from vllm_rocm_ops.collectives.one_shot import without_kernel

        found = without_kernel(op, False, lambda x: parallel_state.all_reduce(x, group), args)
    return pair(*as_tuple(found))


def _fake(*values) -> tuple[Tensor, Tensor]:
    op, args, _ = _arguments(values)
    return pair(*as_tuple(op.allocate(op.Arguments(*args))))


OP = define(_run, _fake, like=all_reduce_norm, mutates=("residual",))


def group_of(all_reduce: torch.fx.Node) -> str:
    """Return vLLM's name of the group of an all-reduce in a graph."""
    return (*all_reduce.args[1:], *all_reduce.kwargs.values())[0]


def node_arguments(op: Op, given: dict[str, object], summed: torch.fx.Node) -> dict[str, object]:
    """Return the torch op's arguments, by name, for those of a norm behind an all-reduce."""
    known = dict.fromkeys(FIELDS) | {"quant_dtype": torch.uint8, "group_size": 0, "is_scale_transposed": False}
    known |= {name: given[name] for name in op.Arguments._fields}
    return known | {"input": summed.args[0], "norm": op.name, "group": group_of(summed)}


# Where vLLM calls an all-reduce by itself


def communicator(theirs: Callable[[Tensor], Tensor], shared: Shared, call: Call) -> Callable[[Tensor], Tensor]:
    """Return what a communicator's `all_reduce` becomes."""

    def all_reduce(input_: Tensor) -> Tensor:
        is_alike = input_.dim() == 2 and input_.shape[1] == call.hidden and input_.dtype == call.dtype
        return shared.reduce.sum(input_) if is_alike and shared.serves(call, len(input_)) else theirs(input_)

    return all_reduce


def helper(theirs: Callable, shared: Shared, call: Call) -> Callable:
    """Return what one of `HELPERS` becomes."""
    one_plus = HELPERS[call.helper]

    def fused(hidden_states: Tensor, residual: Tensor, norm: torch.nn.Module) -> tuple[Tensor, Tensor]:
        x, weight = hidden_states, norm.weight
        is_alike = x.dim() == 2 and x.shape == residual.shape and x.shape[1] == call.hidden
        is_alike = is_alike and {x.dtype, residual.dtype, weight.dtype} == {call.dtype}
        if not (is_alike and shared.serves(call, len(x))):
            return theirs(hidden_states, residual, norm)
        return run_helper(shared.reduce, one_plus, x, residual, weight.data, norm.variance_epsilon)

    fused.vllms = theirs
    return fused


def run_helper(reduce: Callable, one_plus: bool, x: Tensor, residual: Tensor, weight: Tensor, epsilon: float):
    """Return the norm and the residual as one of `HELPERS` does."""
    residual = residual.clone() if one_plus else residual
    return reduce(ops.fused_add_rms_norm, x, residual, weight, epsilon, one_plus), residual


def replace_everywhere(modules: Iterable[types.ModuleType], name: str, theirs: Callable, ours: Callable) -> None:
    """Put ours in the place of a function of vLLM's in all modules that have imported it by name."""
    for module in modules:
        if getattr(module, name, None) is theirs:
            setattr(module, name, ours)
