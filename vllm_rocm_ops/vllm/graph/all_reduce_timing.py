"""Select the all-reduces that run in one launch with the norm after them, or alone, before vLLM compiles a model.

All ranks of a tensor-parallel group time them together. Before that, and wherever the plugin does not win, vLLM's
all-reduce runs. Every rank takes part in every step, and a failure on one rank ends the step on all, by
`collectives.agree` over the group's CPU group. All ranks must get the same bits, within the allowed error, and the
slowest rank's time counts. The first rank reads and writes the results in the machine's file.

Baseline in a model that vLLM compiles: vLLM's all-reduce and the plugin's norm, selected before (compiled_ops.py), or
AITER's fused kernel where a pass uses it. Baseline in other models: the function of vLLM's that they call.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from vllm_rocm_ops import collectives, ops
from vllm_rocm_ops.collectives import flagged, launches, wire
from vllm_rocm_ops.core import op as op_module
from vllm_rocm_ops.core import tables
from vllm_rocm_ops.core.correctness import as_tuple
from vllm_rocm_ops.core.op import disabled
from vllm_rocm_ops.core.quantization import LIMIT
from vllm_rocm_ops.vllm import seam
from vllm_rocm_ops.vllm.graph import all_reduce_norm, compilation, compiled_ops
from vllm_rocm_ops.vllm.graph.all_reduce_norm import Call, GroupAllReduce
from vllm_rocm_ops.vllm.selection import comparison, kernel_selection, kernel_timing, watchdog
from vllm_rocm_ops.vllm.selection.group_clock import GraphClock
from vllm_rocm_ops.vllm.selection.kernel_selection import Choice, Decided, Measured, Record
from vllm_rocm_ops.vllm.selection.key import FP8_SUMS, Baseline, Key
from vllm_rocm_ops.vllm.selection.replays import BrokenGraph, Mismatch, Replays, copies, warn_broken

logger = logging.getLogger("vllm.vllm_rocm_ops")

SHARE = 0.5  # of a start's timing limit
TRIAL_SECONDS = 2.0  # that a rank waits for another before the all-reduce serves
SETS, CALLS = 4, 16  # sets of inputs, calls per graph
EPSILON, SCALE, GROUP = 1e-6, 0.05, 128
AITER = "AITER"
"""The end of a key whose baseline is AITER's fused launch."""
finders: list[Callable] = []
"""Functions (config, model, group, reduce) that yield further comparisons like `AllReduceComparison`, of a worker's model."""


# Candidates


def calls_of(config, models: list[torch.nn.Module]) -> dict[Call, torch.nn.Module | None]:
    """Return the calls of a worker's models, each with a norm if a function of vLLM's gets one."""
    hidden, dtype = config.model_config.get_hidden_size(), config.model_config.dtype
    calls: dict[Call, torch.nn.Module | None] = {Call("", hidden, dtype): None}
    choices = compiled_ops.choices
    if (
        "norm" in choices.on
        and "fusion" in seam.active()
        and any(compilation.is_compiled(config, model) for model in models)
    ):
        calls[Call("fused_add_rms_norm", hidden, dtype, True)] = None
        for pattern, runs in choices.decisions.items():
            if runs and pattern.op in launches.NORMS and pattern.columns == hidden:
                calls[Call(pattern.op, hidden, dtype, pattern.has_residual, pattern.is_column_major)] = None
    for model in models:
        homes = {type(module).__module__ for module in model.modules()}
        norms = [m for m in model.modules() if hasattr(m, "variance_epsilon") and m.weight.shape == (hidden,)]
        for name in all_reduce_norm.HELPERS:
            if norms and any(hasattr(sys.modules.get(home), name) for home in homes):
                calls[Call("fused_add_rms_norm", hidden, dtype, True, helper=name)] = norms[0]
    return {call: norm for call, norm in calls.items() if call.dtype in (torch.bfloat16, torch.float16)}


def is_aiters(call: Call) -> bool:
    """True if a vLLM pass fuses AITER's all-reduce with this norm, which has no quantization."""
    return call.norm == "fused_add_rms_norm" and not call.helper and None in compiled_ops.choices.all_reduced


def sizes(call: Call, group: launches.Group) -> list[int]:
    """Return the token counts to time: powers of two, and the largest that a launch in one shot and in stages support."""
    largest = {min(launches.CAPACITY * launches.VALUES_IN_WORD // call.hidden, group.blocks)}
    if group.payload:
        largest.add(flagged.MAX_VALUES // call.hidden)
    return sorted(({1 << power for power in range(max(largest).bit_length())} | largest) - {0})


class AllReduceComparison:
    """Plugin and baseline for one all-reduce and norm. Inputs differ per rank, other arguments are equal."""

    is_equal_on_ranks = True
    """All ranks must have the same bits."""

    def __init__(self, call: Call, norm: torch.nn.Module | None, group, reduce: Callable):
        self.call, self.norm, self.group, self.reduce, self.device = call, norm, group, reduce, group.device
        self.op = getattr(ops, call.norm) if call.norm else None
        name = f"{group.world_size}-ranks" + f"-{AITER}" * is_aiters(call)
        name += FP8_SUMS * (wire.FP8 in reduce.group.wires)
        self.key = Key(call.op.name, call.describe(), Baseline(name))

    def token_counts(self) -> list[int]:
        """Return the token counts to time."""
        return sizes(self.call, self.reduce.group)

    def inputs(self, tokens: int, seed: int) -> tuple[list[Tensor], tuple]:
        """Return the inputs of all ranks, and the further arguments."""
        generator = torch.Generator(self.device).manual_seed(seed)
        hidden, dtype = self.call.hidden, self.call.dtype

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=self.device).to(dtype)

        every = [random(tokens, hidden) for _ in range(self.group.world_size)]
        if self.op is None:
            return every, ()
        from vllm_rocm_ops.vllm.graph import fused_quant

        values = self.op.Arguments._field_defaults | {
            "residual": random(tokens, hidden) if self.call.has_residual else None,
            "weight": self.norm.weight.data if self.norm else 1 + random(hidden) / 8,
            "scale": torch.full((1,), SCALE, device=self.device),
            "epsilon": self.norm.variance_epsilon if self.norm else EPSILON,
            "quant_dtype": fused_quant.QUANT_DTYPE,
            "group_size": GROUP,
            "is_scale_transposed": self.call.is_column_major,
            "one_plus_weight": self.one_plus,
        }
        return every, tuple(values[name] for name in self.op.Arguments._fields[1:])

    @property
    def one_plus(self) -> bool:
        return all_reduce_norm.HELPERS.get(self.call.helper, False)

    def plugin(self, x: Tensor, *args) -> tuple:
        """Return the results of the plugin's launch, then the residual."""
        if self.op is None:
            return (self.reduce.sum(x),)
        if self.call.helper:
            residual, weight, epsilon, one_plus = args
            return all_reduce_norm.run_helper(self.reduce, one_plus, x, residual, weight, epsilon)
        return (*as_tuple(self.reduce(self.op, x, *args)), *self._residual(args))

    def baseline(self, x: Tensor, *args) -> tuple:
        """Return the same by vLLM's all-reduce and the plugin's norm, or vLLM's if fused."""
        if self.call.helper:
            return helper_of(self.call)(x, args[0], self.norm)
        if is_aiters(self.call):
            from vllm._aiter_ops import rocm_aiter_ops

            residual, weight, epsilon, _ = args
            return rocm_aiter_ops.get_fused_allreduce_rmsnorm_op()(x, residual, weight, epsilon)
        total = self.group._all_reduce_out_place(x)
        return (total,) if self.op is None else (*as_tuple(self.op.call(total, *args)), *self._residual(args))

    def _residual(self, args: tuple) -> tuple:
        return (args[self.op.Arguments._fields.index("residual") - 1],) if self.call.has_residual else ()

    def results(self, outputs: tuple, args: list) -> list[Tensor]:
        outputs, residual = (outputs[:-1], outputs[-1:]) if self.call.has_residual else (outputs, ())
        if self.op is not None and "scale" in self.op.Arguments._fields:
            outputs = (*outputs, args[self.op.Arguments._fields.index("scale") - 1])
        *plain, values, scale = outputs if len(outputs) > 1 else (*outputs, None)
        return [*plain, values if scale is None else compiled_ops.dequantized(values, scale), *residual]

    def with_fp8(self, every: list[Tensor], args: tuple) -> tuple[list[Tensor], list[Tensor]] | None:
        """Return the results of `baseline` and `exact` with FP8 on the wire, None where the plugin's launch sends none."""
        if self.reduce.wire(self.op, every[0], *args) != wire.FP8:
            return None
        total, given = wire.fp8_sum(every, self.reduce.arch.fp8_dtype), list(copies(args))
        outputs = (total,) if self.op is None else (*as_tuple(self.op.call(total, *given)), *self._residual(given))
        return self.results(outputs, given), self.exact([total], args)

    def exact(self, every: list[Tensor], args: tuple) -> list[Tensor]:
        """Return the reference result in float32, in the order of `results`."""
        x = sum(each.float() for each in every)
        if self.op is None:
            return [x]
        a = self.op.Arguments(every[0], *args)
        residual = getattr(a, "residual", None)
        x = x if residual is None else x + residual.float()
        y = ops.rms_norm.reference(x, a.weight, a.epsilon, a.one_plus_weight)
        if "scale" in self.op.Arguments._fields:
            limit = SCALE * LIMIT[a.quant_dtype]
            y = y.clamp(-limit, limit)
        normed = [y] * (2 if self.op is launches.NORM_AND_QUANT else 1)
        return [*normed, *([] if residual is None else [x])]

    def apply(self, shared: GroupAllReduce, communicator) -> None:
        """Replace vLLM's functions outside of compiled graphs where the launch serves."""
        call = self.call
        if not shared.wins(call, everywhere=is_aiters(call)):
            return
        if not call.norm:
            communicator.all_reduce = all_reduce_norm.communicator(communicator.all_reduce, shared, call)
        elif call.helper:
            vllms = helper_of(call)
            seam.replace_function(call.helper, vllms, all_reduce_norm.helper(vllms, shared, call))


def helper_of(call: Call) -> Callable:
    """Return vLLM's function of that name."""
    function = next(f for m in list(sys.modules.values()) if (f := getattr(m, call.helper, None)) and callable(f))
    return getattr(function, "vllms", function)


# Timing


def digest(tensors: tuple[Tensor, ...]) -> str:
    """Return a hash of the tensors' bits."""
    return hashlib.sha256(b"".join(x.contiguous().view(torch.uint8).cpu().numpy() for x in tensors)).hexdigest()


def measure(both: AllReduceComparison, tokens: int, clock: GraphClock, agree: Callable) -> Measured:
    """Check and time a call on all ranks. Raise `Mismatch` on all if the result is wrong on one."""
    rank, sets = both.group.rank_in_group, [both.inputs(tokens, seed) for seed in range(SETS)]

    def run(function: Callable) -> tuple[list[Tensor], tuple]:
        every, args = sets[0]
        x, *args = copies((every[rank], *args))
        outputs = function(x, *args)
        clock.finish()
        return both.results(outputs, args), outputs

    baseline, _ = agree(lambda: run(both.baseline), keep=True)
    plugin, raw = agree(lambda: run(both.plugin), keep=True)

    def judge() -> tuple[str, str, float, float]:
        both.reduce.check()
        errors = [0.0, 0.0]
        try:
            exact = both.exact(*sets[0])
            beside = both.with_fp8(*sets[0])  # its errors are known, and no others are allowed
            each = zip(plugin, *(beside or (baseline, exact)), strict=True)
            errors, *_ = [
                comparison.check(x, *of, *(torch.arange(n, device=x.device) for n in x.shape)) for x, *of in each
            ]
            if beside:
                errors = [comparison.relative(one[0].float() - exact[0], exact[0]) for one in (plugin, baseline)]
        except Mismatch as error:
            return str(error), "", *errors
        return "", digest(raw) if both.is_equal_on_ranks else "", *errors

    judged = agree(judge)
    wrong = [f"rank {number}: {why}" for number, (why, *_) in enumerate(judged) if why]
    if not wrong and len({bits for _, bits, *_ in judged}) > 1:
        wrong = ["the ranks have different bits"]
    if wrong:
        raise Mismatch("; ".join(wrong))
    on_rank = [(every[rank], *args) for every, args in sets] * (CALLS // SETS)
    calls = {"plugin": both.plugin, "baseline": both.baseline}
    replays = Replays(calls, on_rank, comparison.allowed(judged[0][3]), copies)
    times = clock.times(both.group, agree, calls, on_rank, replays)
    agree(both.reduce.check)
    of_ranks = agree(lambda: tuple(statistics.median(times[name]) for name in ("plugin", "baseline")))
    return Measured(*map(max, zip(*of_ranks)), *judged[0][2:])


def measure_all(
    every: list[AllReduceComparison], clock: GraphClock, agree: Callable, path, here: dict, end: float
) -> Record:
    """Time what the first rank's record lacks until `end`, and return the record, equal on all ranks."""
    is_first = every[0].group.rank_in_group == 0
    record = agree(lambda: kernel_selection.read(path, here))[0]
    running = path.with_name(f"{path.stem}-{all_reduce_norm.NAME}.running")

    def keep(keys: list[Key]) -> None:
        try:
            with tables.locked(path.with_suffix(".lock"), 1.0):
                kept = kernel_selection.read(path, here)
                for key in keys:
                    kept.shapes[key] = record.shapes[key]
                kept.off |= {name: why for name, why in record.off.items() if name.startswith(all_reduce_norm.NAME)}
                others = {op: n for op, n in kept.ended.items() if not op.startswith(all_reduce_norm.NAME)}
                kept.ended = others | {op: n for op, n in record.ended.items() if op.startswith(all_reduce_norm.NAME)}
                kernel_selection.write(path, kept)
        except OSError as error:
            logger.warning("vllm-rocm-ops: all-reduce results are not saved: %s", error)

    def after_crashes() -> Record:
        if is_first:
            path.parent.mkdir(parents=True, exist_ok=True)
            watchdog.take_marker(running, record.off, record.ended, lambda: keep([]))
        return record

    record = agree(after_crashes)[0]
    todo = [(both, tokens) for both in every for tokens in both.token_counts()]
    done = []
    for both, tokens in sorted(todo, key=lambda item: (kernel_timing.priority(item[1]), item[1])):
        name = both.call.op.name
        key = both.key
        if name in record.off or tokens in record.shapes.get(key, {}):
            continue
        if agree(lambda: time.monotonic() > end)[0]:
            break
        what = f"{name}\n{key} at {tokens} tokens"
        with watchdog.marker(running, what) if is_first else contextlib.nullcontext():
            try:
                record.shapes.setdefault(key, {})[tokens] = measure(both, tokens, clock, agree)
                done.append(key)
            except BrokenGraph as error:
                warn_broken(f"{both.call.describe()}, {tokens} tokens", error)
            except Mismatch as error:
                record.off[name] = f"{error} ({both.call.describe()}, {tokens} tokens)"
    if is_first and (done or record.off or record.ended):
        record.ended = {op: n for op, n in record.ended.items() if not op.startswith(all_reduce_norm.NAME)}
        keep(sorted(set(done)))
    return record


# A start


def unsupported_reason(config, group, clock: GraphClock | None) -> str:
    """Return why a group does not use the plugin's all-reduce, before any attempt. Empty if it may."""
    if all_reduce_norm.NAME not in seam.active():
        return "the seam all_reduce is off"
    if all_reduce_norm.NAME in disabled():
        return "VLLM_ROCM_OPS_DISABLE"
    if op_module.off.keys() >= {*launches.NAMES}:
        return f"off on this GPU: {op_module.off[all_reduce_norm.NAME]}"
    if clock is None:
        return "kernels are not timed here"
    if group.world_size not in launches.RANKS:
        return f"{group.world_size} ranks are not supported"
    if getattr(config.parallel_config, "use_ubatching", False):
        return "microbatching (use_ubatching)"
    from vllm import envs as vllms

    return "VLLM_BATCH_INVARIANT" if vllms.VLLM_BATCH_INVARIANT else ""


def before_compiling(worker, group, clock: GraphClock | None, create: Callable = collectives.create) -> None:
    """Select for the group of a worker that has loaded its model. All ranks call it. A failure on one disables all."""
    all_reduce_norm.groups.pop(group.unique_name, None)
    if group.world_size == 1:
        return
    is_logging_rank = group.rank_in_group == 0

    def agree(act: Callable[[], object], keep: bool = False):
        """Return an action's results by rank, or with `keep` this rank's alone."""
        mine = []
        by_rank = collectives.agree(group.cpu_group, lambda: mine.append(act()) if keep else act(), "off")
        return mine[0] if keep else by_rank

    try:
        config = worker.vllm_config
        reasons = [why for why in agree(lambda: unsupported_reason(config, group, clock)) if why]
        if reasons:
            logger.debug("vllm-rocm-ops: all-reduce stays vLLM's: %s", reasons[0])
            return
        start = time.monotonic()
        with torch.inference_mode():
            turn_on(worker, group, clock, agree, create, start + SHARE * kernel_timing.limit_s())
        kernel_selection.session.spent += time.monotonic() - start
    except RuntimeError as error:
        all_reduce_norm.groups.pop(group.unique_name, None)
        if is_logging_rank:
            logger.warning("vllm-rocm-ops: all-reduce stays vLLM's: %s", error)


def turn_on(worker, group, clock: GraphClock, agree: Callable, create: Callable, end: float) -> None:
    """Time, and put the plugin's launches in place where they win."""
    communicator = group.device_communicator
    vllm_all_reduce = communicator.all_reduce
    try:
        reduce = create(group.cpu_group, group.device, all_reduce=vllm_all_reduce, seconds=TRIAL_SECONDS)
    except RuntimeError as error:  # on all ranks
        logger.info("vllm-rocm-ops: all-reduce stays vLLM's: %s", error)
        return
    config, models = worker.vllm_config, compilation.models_of(worker)

    def found() -> list[AllReduceComparison]:
        calls = calls_of(config, models).items()
        others = [find(config, model, group, reduce) for find in finders for model in models]
        return [*(AllReduceComparison(*call, group, reduce) for call in calls), *itertools.chain(*others)]

    every = agree(found, keep=True)
    here = kernel_selection.machine()
    path = kernel_selection.path_of(here)
    known = agree(lambda: [both.key for both in every])
    if any(keys != known[0] for keys in known):
        raise RuntimeError(f"{all_reduce_norm.NAME}: off: the ranks have different calls")
    record = measure_all(every, clock, agree, path, here, end)
    reduce.limit()
    decided = record.decided()
    choices = {both.call: made_choice(both, decided) for both in every}
    if group.rank_in_group == 0:
        off = {op: why for op, why in record.off.items() if op.startswith(all_reduce_norm.NAME)}
        kernel_timing.log_results(record, Decided(off, {}), set(known[0]))
    shared = GroupAllReduce(reduce, choices)
    if not any(any(choice.plugin_by_tokens) for choice in choices.values()):
        reduce.close()
        return
    all_reduce_norm.groups[group.unique_name] = shared
    for both in every:
        both.apply(shared, communicator)
    for name in ("execute_model", "sample_tokens"):
        if hasattr(worker, name):
            setattr(worker, name, all_reduce_norm.checked(getattr(worker, name), reduce.check))


def made_choice(both: AllReduceComparison, decided: Decided) -> Choice:
    """Return the choice of a call, equal on all ranks."""
    choice = kernel_selection.new_choice((all_reduce_norm.NAME, both.call), both.call, both.key.baseline, ())
    choice.state, choice.plugin_by_tokens = "unmeasured", bytes(1)
    choice.decide(decided)
    return choice
