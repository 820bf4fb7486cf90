"""Run an all-reduce of a decode step's rows, optionally fused with the RMSNorm and quantization that follow.

    reduce = collectives.create(cpu_group, device, all_reduce=other)    # on all ranks
    x = reduce.sum(partial)
    y, scale = reduce(ops.rms_norm_dynamic_per_token_quant, partial, weight, 1e-6, torch.float8_e4m3fnuz, None, residual)
    reduce.check()    # after a synchronization of the step
    reduce.close()    # on all ranks

`reduce(op, input, ...)` has the bits of `op(reduce.sum(input), ...)`, equal on all ranks. An op's addend is added to this rank's input
before the sum. Few rows are summed in one shot (launches.py), more in one or two stages (flagged.py): the protocol with the lowest
predicted cost runs. Whether a call is supported depends on shapes, strides, dtypes and alignment, so that ranks agree: an unsupported
call runs `other` and then the op. Every rank makes the same calls in the same order, on one stream at a time. Calls may be captured.

A rank that waits longer than $VLLM_ROCM_OPS_ALL_REDUCE_LIMIT seconds gives up: its launch and all later launches on all ranks end, with
NaN for missing values. The kernel stores an error in host memory, where `check` reads it without a synchronization. Each eager call
checks, and so should users of a replayed graph's results.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from vllm_rocm_ops.collectives import flagged, launches, qk_norm
from vllm_rocm_ops.collectives import wire as wires
from vllm_rocm_ops.collectives.launches import Group, Sum
from vllm_rocm_ops.core import arguments, envs, kernel_arguments
from vllm_rocm_ops.core import launch as core
from vllm_rocm_ops.core.arch import Arch
from vllm_rocm_ops.core.execution import Execution, bind_device, bind_executor
from vllm_rocm_ops.core.op import Op
from vllm_rocm_ops.core.stats import FALLBACK
from vllm_rocm_ops.core.tensors import rows_of

MAX_SECONDS = (2**32 - 1) // 10**6
REMEMBERED_SIGNATURES = 1024
ADVICE = "All ranks must make the same calls of an all-reduce"


class RankMissing(RuntimeError):
    """A rank did not come within the time limit: results since then are NaN, and the group is unusable."""


class AllReduce:
    """A rank's all-reduce, by the protocols of launches.py and flagged.py.

    Args:
        group: This rank's view of the group.
        arch: The architecture of its GPU.
        report: int64 [1] in host memory, which receives errors of kernels.
        executor: Runs launches in place of a GPU.
        all_reduce: Returns the sum of all ranks' inputs, for calls that no kernel supports.
        release: Frees the group's memory.
    """

    def __init__(
        self,
        group: Group,
        arch: Arch,
        report: Tensor,
        *,
        executor: core.Executor | None = None,
        all_reduce: Callable[[Tensor], Tensor] | None = None,
        release: Callable[[], None] = lambda: None,
    ):
        self.group, self.arch, self.executor, self._release = group, arch, executor, release
        self._fallback = all_reduce
        self._report = report.numpy()
        self._executions: dict[tuple, Execution] = {}
        self.is_closed = False

    def check(self) -> None:
        """Raise RankMissing if a rank missed the time limit. Reads one word of host memory."""
        report = int(self._report[0])
        if report:
            raise RankMissing(missing_rank_message(report & (1 << 64) - 1, self.group))

    def unsupported(self, op: Op | None, *args) -> str:
        """Return why no kernel supports a call, from shapes, dtypes, strides and alignment.

        Args:
            op: The norm that follows, or None for the sum.
            args: The op's arguments, or the input alone.

        Returns:
            The reason, empty if a kernel supports the call.

        Raises:
            ValueError: The op's contract is broken.
        """
        return choose_protocol(op, self._arguments(op, args), self.arch, self.group)[1]

    def wire(self, op: Op | None, *args) -> str:
        """Return the wire format of a call (wire.py), bf16 if no kernel supports it."""
        a = self._arguments(op, args)
        planner, _ = choose_protocol(op, a, self.arch, self.group)
        return planner.default(a, self.arch, self.group).wire if planner else wires.BF16

    def sum(self, input: Tensor) -> Tensor:
        """Return the sum [..., hidden] of all ranks' inputs [..., hidden], bf16 or fp16, in float32 and rounded once."""
        return self._execution(None, False, (input,))((input,))

    def __call__(self, op: Op, *args, with_norm: bool = False):
        """Return `op` of the sum of all ranks' inputs.

        Args:
            op: A norm of ops/rms_norm.py, or `qk_norm_rope_and_cache`, whose norms are then over the heads of all ranks.
            args: Its arguments, with this rank's input first, or its heads. An addend is added to input, not to the sum.
            with_norm: Return the norm before its quantization as well, after the op's results. False for
                `rms_norm_and_per_block_quant`, which returns both.

        Returns:
            The op's results, equal on all ranks.

        Raises:
            RankMissing: A rank missed the time limit.
            ValueError: The op's contract is broken, or no kernel supports the call and there is no other all-reduce.
        """
        if with_norm and op is launches.NORM_AND_QUANT:
            raise ValueError(f"all_reduce_{op.name}: with_norm must be False, as the op returns the norm, got True")
        args += op._defaults[len(args) :]
        return self._execution(op, with_norm, args)(args)

    def limit(self, seconds: float | None = None) -> None:
        """Set the time limit of later calls, by default $VLLM_ROCM_OPS_ALL_REDUCE_LIMIT. Equal on all ranks."""
        self.group = dataclasses.replace(self.group, limit_us=limit_us(seconds))
        self._executions.clear()

    def close(self) -> None:
        """Free the group's memory. Collective. No launch may run on any rank."""
        if not self.is_closed:
            self.is_closed = True
            self._release()

    def _arguments(self, op: Op | None, args: tuple):
        return Sum(*args) if op is None else arguments.checked(op, op.Arguments(*args))

    def _execution(self, op: Op | None, with_norm: bool, args: tuple) -> Execution:
        self.check()
        if self.is_closed:
            raise RuntimeError("all_reduce: the group was closed")
        input = args[0]
        signature = (
            (input.shape, input.stride(), input.dtype, input.data_ptr() & 15)
            if op is None
            else op._signature(None, *args)
        )
        key = op and op.name, with_norm, signature
        execution = self._executions.get(key)
        if execution is None:
            if len(self._executions) >= REMEMBERED_SIGNATURES:
                del self._executions[next(iter(self._executions))]
            execution = self._executions[key] = self._decide(op, with_norm, args)
            execution.apart = arguments.apart(op, op.Arguments(*args)) if op else ()
        for updated, other, before, behind in execution.apart:
            distance = args[updated].data_ptr() - args[other].data_ptr()
            if -before < distance < behind:
                arguments.refuse_overlap(op, args, updated, other, distance)
        return execution

    def _decide(self, op: Op | None, with_norm: bool, args: tuple) -> Execution:
        a = self._arguments(op, args)
        name, input = "all_reduce" if op is None else f"all_reduce_{op.name}", a[0]

        def fallback(all_reduce: Callable) -> Callable[[tuple], object]:
            if op is qk_norm.OP:
                return functools.partial(qk_norm.run_fallback, all_reduce, self.group.ranks)
            return functools.partial(run_fallback, op, with_norm, all_reduce)

        if rows_of(input) == 0:
            return Execution(name, "nothing to do", fallback(torch.clone))
        planner, why = choose_protocol(op, a, self.arch, self.group)
        if planner is None:
            if self._fallback is None:
                raise ValueError(f"{name}: {why}; for calls without a kernel, `all_reduce` must be given, got None")
            return Execution(name, FALLBACK + why, fallback(self._fallback), is_fallback=True)
        outputs = torch.empty_like(input, memory_format=torch.contiguous_format) if op is None else op.allocate(a)
        normed = input.new_empty(input.shape) if with_norm else None
        config = planner.default(a, self.arch, self.group)
        plan = qk_norm.plan if planner is qk_norm else launches.plan
        planned = plan(op, a, outputs, normed, config, self.group)
        if with_norm:
            outputs = (*(outputs if isinstance(outputs, tuple) else (outputs,)), normed)
        code = core.built(planned.module, self.arch.name)
        packers = [kernel_arguments.packer(planned, kernel_arguments.parameters(code, planned.symbol))]
        if self.executor:
            return Execution(name, planned.symbol, bind_executor(self.executor, (planned,), outputs, a))
        runtime, why = core.runtime()
        if why:
            raise RuntimeError(f"{name}: {why}")
        device = input.device
        handles = [runtime.load(str(code), planned.symbol, device.index)]
        run = bind_device(runtime, device, (planned,), handles, packers, outputs, a, ADVICE)
        return Execution(name, planned.symbol, run)


def choose_protocol(op: Op | None, a, arch: Arch, group: Group):
    """Return (module, ""): launches or flagged, whichever predicts the lower cost; (None, reason) if none supports the call.

    Norms of queries and keys have one protocol, qk_norm.
    """
    supporting = []
    for module in (qk_norm,) if op is qk_norm.OP else (launches, flagged) if group.payload else (launches,):
        broken = [rule for rule, holds in module.rules(op, a, arch, group) if not holds]
        if not broken:
            supporting.append(module)
    if not supporting:
        return None, f"the kernels require that {'; '.join(broken)}"
    if len(supporting) == 1 or rows_of(a[0]) == 0:
        return supporting[0], ""
    return min(supporting, key=lambda module: module.cost(module.default(a, arch, group), a, arch, group)), ""


def run_fallback(op: Op | None, with_norm: bool, all_reduce: Callable[[Tensor], Tensor], args: tuple):
    """Return the results of a call by `all_reduce`, followed by the op."""
    args = launches.with_addend(op, args)
    total = all_reduce(args[0])
    if op is None:
        return total
    if not with_norm:
        return op.call(total, *args[1:])
    residual = dict(zip(op.Arguments._fields, args)).get("residual")
    before = None if residual is None else residual.clone()
    results = op.call(total, *args[1:])
    a = op.Arguments(total, *args[1:])
    norm = launches.NORMS["rms_norm" if before is None else "fused_add_rms_norm"]
    normed = norm.call(total, *(() if before is None else (before,)), a.weight, a.epsilon, a.one_plus_weight)
    return (*(results if isinstance(results, tuple) else (results,)), normed)


def missing_rank_message(report: int, group: Group) -> str:
    """Return the message of a kernel's report (csrc/collectives/one_shot.h): its error, and the epoch that saw it."""
    seen_in, error = report >> 32, report & 0xFFFFFFFF
    missing = [rank for rank in range(group.ranks) if error >> rank & 1]
    behind = (seen_in - (error >> 11)) & 0xFFFFF  # epochs since the error, which has the lowest 20 bits of its own
    epoch = (seen_in - behind if behind < 1 << 19 else seen_in + (1 << 20) - behind) & 0xFFFFFFFF
    ranks = f"rank {missing[0]}" if len(missing) == 1 else "ranks " + ", ".join(map(str, missing))
    is_default = group.limit_us == limit_us(None)
    advice = ". VLLM_ROCM_OPS_ALL_REDUCE_LIMIT sets a longer limit, in seconds" if is_default else ""
    return (
        f"all_reduce: {ranks} of {group.ranks} did not come in epoch {epoch}: rank {error >> 8 & 7} waited for more than "
        f"{group.limit_us / 1e6:g} s. Results since then are NaN on all ranks{advice}"
    )


def limit_us(seconds: float | None) -> int:
    """Return the kernels' time limit in microseconds, by default $VLLM_ROCM_OPS_ALL_REDUCE_LIMIT."""
    text = envs.VLLM_ROCM_OPS_ALL_REDUCE_LIMIT if seconds is None else seconds
    try:
        limit = float(text)
    except ValueError:
        limit = 0.0
    if not 0 < limit <= MAX_SECONDS:
        raise ValueError(
            f"VLLM_ROCM_OPS_ALL_REDUCE_LIMIT must be above 0 and at most {MAX_SECONDS} seconds, got {text}"
        )
    return max(1, round(limit * 1e6))
