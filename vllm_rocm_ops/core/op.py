"""What an op is.

An op is one plain PyTorch function, its reference: that is the schema of the torch op, its implementation on CPU, the
fallback on a GPU and, given float64, the oracle of its tests. Around it an `Op` holds what it takes to run kernels:

    contract(a)             yields (argument, wanted, got, holds): what every caller must respect, else ValueError; that all
                            tensors are on one device goes without saying
    allocate(a)             the outputs, unwritten, None without; also the fake (meta) implementation
    envelope(a, arch)       yields (rule, holds): what the kernels need; where one fails the reference runs, and says why
    configs(a, arch)        all configurations that fit
    cost(config, a, arch)   what one is expected to take: terms by name, in microseconds of a model of the GPU
    default(a, arch)        the one to use, unless a row of a tuned table <arch>/<op>.csv, the user's or a shipped one, says better;
                            where an op has none, the one of the least cost
    plan(config, outputs, a, arch)  the launches
    problem(a)              the sizes that a tuned row and a benchmark line are keyed by
    cases()                 example inputs: tests, emulator and benchmarks draw from the same ones

`a` is the named tuple of the op's arguments. All but `reference` see only shapes, strides, dtypes and alignment, so that
`explain()` works on meta tensors without a GPU. What was decided for one such signature is kept: a repeated call binds
pointers and launches.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import inspect
import typing
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch._ops import OpOverload

from vllm_rocm_ops.core import arch as archs
from vllm_rocm_ops.core import arguments, envs, kernel_arguments, tables
from vllm_rocm_ops.core import launch as launches
from vllm_rocm_ops.core.arch import Arch
from vllm_rocm_ops.core.execution import Execution, bind_device, bind_executor, signature
from vllm_rocm_ops.core.explanation import Explanation
from vllm_rocm_ops.core.launch import NotLaunched
from vllm_rocm_ops.core.stats import FALLBACK, NO_GPU, counter, warn_once

NAMESPACE = "vllm_rocm_ops"
REMEMBERED_SIGNATURES = 4096  # per op, the newest; each number of tokens of a prefill is one

_library = torch.library.Library(NAMESPACE, "DEF")
_registered: list[Op] = []


def define(
    function: Callable, fake: Callable, like: Callable | None = None, mutates: tuple[str, ...] = ()
) -> OpOverload:
    """Register a function as a torch op for CPU and GPU, and return the op.

    Args:
        function: What the op runs. It takes its arguments by position.
        fake: What the op returns for tensors without data.
        like: The function whose name and parameters are the op's; by default the function itself.
        mutates: The parameters that the op updates.
    """
    like = like or function
    schema = torch.library.infer_schema(like, mutates_args=mutates)
    _library.define(like.__name__ + schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order))
    for key in ("CPU", "CUDA"):
        _library.impl(like.__name__, function, key)
    torch.library.register_fake(f"{NAMESPACE}::{like.__name__}", fake, lib=_library)
    return getattr(getattr(torch.ops, NAMESPACE), like.__name__).default


@dataclass(frozen=True)
class Case:
    """One set of inputs: `make(device, generator, fp8_dtype)` gives the op's arguments in order."""

    name: str
    make: Callable[[str, torch.Generator, torch.dtype], tuple]


@dataclass(eq=False)
class Op:
    """One op; see the module's text for the parts. `mutates` names the arguments that it updates in place, `inexact` those of them
    that take results, which may be as far off as returned ones, where the others have the reference's bits; `sums` says
    that results are long sums, which may cancel, so that their rounding errors are not a step or so of each result; `writes` names
    the arguments that may hold a result, in place of a tensor that the op returns, and shares no memory with others. `peer` is what
    PyTorch itself has for the op's arguments, to be timed beside it: the reference unless it is named. `native`, which a caller
    may set, computes what the reference computes, faster, and runs in its place on a GPU."""

    reference: Callable
    allocate: Callable
    contract: Callable
    envelope: Callable
    configs: Callable
    plan: Callable
    problem: Callable
    cases: Callable[[], Iterable[Case]]
    default: Callable | None = None
    cost: Callable | None = None
    mutates: tuple[str, ...] = ()
    sums: bool = False
    writes: tuple[str, ...] = ()
    inexact: tuple[str, ...] = ()
    peer: Callable | None = None
    native: Callable | None = None
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.name = self.reference.__name__
        self.__doc__ = self.reference.__doc__
        if self.default is None and self.cost is None:
            raise TypeError(f"{self.name} must have a default or a cost")
        self.default = self.default or self.cheapest
        parameters = inspect.signature(self.reference).parameters.values()
        defaults = [p.default for p in parameters if p.default is not inspect.Parameter.empty]
        self.Arguments = collections.namedtuple(
            f"{self.name}_arguments", [p.name for p in parameters], defaults=defaults
        )
        self._defaults = (inspect.Parameter.empty,) * (len(parameters) - len(defaults)) + tuple(defaults)
        self._executions: dict[tuple, Execution] = {}
        self._is_trial = False
        self.hints = typing.get_type_hints(self.reference)
        self._signature = signature(self.Arguments._fields, self.hints)
        fake = lambda *a, **k: self.allocate(self.Arguments(*a, **k))
        updated = (*self.mutates, *self.writes)
        self.torch_op = define(self._dispatch, fake, like=self.reference, mutates=updated)
        _registered.append(self)

    def __call__(self, *args, **kwargs):
        return self.torch_op(*args, **kwargs)

    def call(self, *args):
        """Call the torch op where a graph is traced, else its function: without the cost of PyTorch's dispatcher, for seams."""
        return self.torch_op(*args) if torch.compiler.is_compiling() else self._dispatch(*args)

    def explain(self, *args, arch: str | Arch | None = None, require_code: bool = False, **kwargs) -> Explanation:
        """What a call with these arguments runs on `arch` (a name that arch.named takes; by default the arguments' device),
        and why. The tensors may be on the meta device. With `require_code`, kernels must have been built too."""
        a = arguments.checked(self, self.Arguments(*args, **kwargs))
        if arch is None:
            device = next(v.device for v in a if isinstance(v, torch.Tensor))
            arch = archs.of_device(device.index) if device.type == "cuda" else None
        elif isinstance(arch, str):
            arch = archs.named(arch)
        chosen = self._choose(a, arch, self.allocate(a), require_code)
        return dataclasses.replace(chosen, considered=self.considered(a, arch)) if chosen.config else chosen

    def tuned_row(self, a, arch: Arch, folders: tuple[Path, ...] | None = None) -> tables.TunedRow | None:
        """The row that the tuned tables hold for this problem on so many compute units, of the first folder (the user's, then
        the shipped one) that has one whose configuration fits."""
        key = {"compute_units": arch.compute_units, **self.problem(a)}
        values = tuple(str(v) for v in key.values())
        for folder in (envs.tables(), tables.TABLES) if folders is None else folders:
            path = folder / arch.name / f"{self.name}.csv"
            row = tables.table(path, tuple(key)).get(values)
            for config in self.configs(a, arch) if row else ():
                if tables.config_fields(config) == row.fields:
                    return tables.TunedRow(config, row.source, path)
        return None

    def tuned(self, a, arch: Arch):
        """The configuration of the tuned row, if there is one."""
        row = self.tuned_row(a, arch)
        return row and row.config

    def forget(self) -> None:
        """Has what was decided for calls already seen decided again."""
        self._executions.clear()

    @contextlib.contextmanager
    def running(self, config) -> Iterator[None]:
        """Within it, calls that kernels take run this configuration, whatever tables and default say."""
        self.tuned = lambda a, arch: config
        self.forget()
        try:
            yield
        finally:
            del self.tuned
            self.forget()

    def considered(self, a, arch: Arch) -> tuple[tuple[object, dict[str, float]], ...]:
        """All configurations with their costs, the cheapest first; nothing where the op has no cost."""
        if self.cost is None:
            return ()
        costs = [(config, self.cost(config, a, arch)) for config in self.configs(a, arch)]
        return tuple(sorted(costs, key=lambda entry: sum(entry[1].values())))

    def cheapest(self, a, arch: Arch):
        """The configuration of the least cost, the first of equals."""
        return self.considered(a, arch)[0][0]

    def _choose(self, a, arch: Arch | None, outputs, require_code: bool) -> Explanation:
        def fallback(why: str, rules=()) -> Explanation:
            return Explanation(self.name, arch and str(arch), (), None, FALLBACK + why, tuple(rules))

        if self.name in disabled():
            return fallback("switched off by VLLM_ROCM_OPS_DISABLE")
        if arch is None:
            return fallback(NO_GPU)
        rules = list(self.envelope(a, arch))
        broken = [rule for rule, holds in rules if not holds]
        if broken:
            return fallback("the kernels require that " + "; ".join(broken), rules)
        config = self.tuned(a, arch)
        source = "tuned" if config is not None else "default"
        if config is None:
            config = self.default(a, arch)
        planned = tuple(self.plan(config, outputs, a, arch))
        try:
            for l in planned if require_code else ():
                kernel_arguments.parameters(launches.built(l.module, arch.name), l.symbol)
        except RuntimeError as error:
            return fallback(str(error), rules)
        return Explanation(self.name, str(arch), planned, config, f"{source} {config}", tuple(rules))

    def run_kernels(self, *args):
        """What a call returns where kernels take these arguments, True if that is nothing. None, with nothing done, where the
        reference would run or the arguments break the contract: for callers that then have something better than the reference."""
        args += self._defaults[len(args) :]
        try:
            execution = self._execution(args)
        except ValueError as error:
            why = "the arguments break the op's contract"
            counter(self.name, FALLBACK + why).calls += 1
            self.warn(why, str(error))
            return None
        if not execution.is_fallback:
            try:
                found = execution(args)
                return True if found is None else found
            except NotLaunched as error:
                self._do_without(execution, str(error))
        if not self._is_trial and execution.count is not counter(self.name, FALLBACK + NO_GPU):
            execution.count.calls += 1
        return None

    @contextlib.contextmanager
    def trial(self) -> Iterator[None]:
        """Within it `run_kernels` finds out what kernels take: calls that they do not take are not counted or warned of."""
        self._is_trial = True
        try:
            yield
        finally:
            self._is_trial = False

    def _dispatch(self, *args):
        args += self._defaults[len(args) :]
        execution = self._execution(args)
        try:
            return execution(args)
        except NotLaunched as error:
            self._do_without(execution, str(error))
            return execution(args)

    def _do_without(self, execution: Execution, why: str) -> None:
        """Has the fallback run what a call's first launch failed for, now and later."""
        execution.count.calls -= 1
        why = why.removesuffix(f". {self._advice()}")
        self.warn("launch", why)
        execution.become(self.name, FALLBACK + why, self._without_kernels(on_gpu=True), is_fallback=True)

    def _without_kernels(self, on_gpu: bool) -> Callable[[tuple], object]:
        """What runs where kernels do not: on a GPU `native`, if there is one."""
        if on_gpu and self.native is not None:
            return lambda args: self.native(*args)
        return lambda args: self.reference(*args)

    def warn(self, subject: str, why: str) -> None:
        """Warn, once of a subject, that the op runs without its kernels."""
        warn_once(f"{self.name}: {subject}", f"{self.name} runs without its kernels: {why}. {self._advice()}")

    def _execution(self, args: tuple) -> Execution:
        """What a call with this signature runs; decided the first time."""
        if torch.is_grad_enabled():
            arguments.refuse_gradients(self, args)
        try:
            key = self._signature(launches.cpu_executor(), *args)
        except AttributeError:
            arguments.checked(self, self.Arguments(*args))
            raise
        execution = self._executions.get(key)
        if execution is None:
            if len(self._executions) >= REMEMBERED_SIGNATURES:
                del self._executions[next(iter(self._executions))]
            a = self.Arguments(*args)
            execution = self._executions[key] = self._decide(a)
            execution.apart = arguments.apart(self, a)
        for updated, other, before, behind in execution.apart:
            distance = args[updated].data_ptr() - args[other].data_ptr()
            if -before < distance < behind:
                arguments.refuse_overlap(self, args, updated, other, distance)
        return execution

    def _decide(self, a) -> Execution:
        """Checks the arguments once and binds what a call with this signature runs."""
        a = arguments.checked(self, a)
        device = next(v.device for v in a if isinstance(v, torch.Tensor))
        outputs, executor = self.allocate(a), launches.cpu_executor()
        on_gpu = device.type == "cuda"
        arch = archs.of_device(device.index) if on_gpu else executor and executor.arch
        chosen = self._choose(a, arch, outputs, require_code=False)
        runtime, why = launches.runtime() if on_gpu and chosen.launches else (None, "")
        if why:
            warn_once("runtime", f"the ops run without their kernels: {why}")
        try:
            code = [(launches.built(l.module, arch.name), l.symbol) for l in chosen.launches if not why]
            taken = [kernel_arguments.parameters(*of) for of in code]
            handles = [runtime.load(str(path), symbol, device.index) for path, symbol in code if on_gpu]
        except RuntimeError as error:
            why = str(error)
            self.warn("load", why)
        if why:
            chosen = Explanation(self.name, chosen.arch, (), None, FALLBACK + why, chosen.rules)
        elif chosen.is_fallback and chosen.rules and not self._is_trial:
            self.warn(chosen.source, chosen.source.removeprefix(FALLBACK))
        if not chosen.launches and not chosen.is_fallback:
            return Execution(self.name, "nothing to do", lambda args: self.allocate(self.Arguments(*args)))
        if not chosen.launches:
            return Execution(self.name, chosen.source, self._without_kernels(arch is not None), is_fallback=True)
        kernel = " + ".join(launch.symbol for launch in chosen.launches)
        # In the emulator, too, wrong arguments are found before anything is launched.
        packers = [kernel_arguments.packer(l, takes) for l, takes in zip(chosen.launches, taken)]
        if on_gpu:
            run = bind_device(runtime, device, chosen.launches, handles, packers, outputs, a, self._advice())
        else:
            run = bind_executor(executor, chosen.launches, outputs, a)
        return Execution(self.name, kernel, run)

    def _advice(self) -> str:
        return f"To do without its kernels, set VLLM_ROCM_OPS_DISABLE={self.name}"


def forget_tables() -> None:
    """Has tables that have changed read again, for calls already seen too."""
    tables.table.cache_clear()
    for op in registered():
        op.forget()


def registered() -> Iterator[Op]:
    """All ops, in the order of their definition."""
    return iter(_registered)


def disabled() -> set[str]:
    """The ops that VLLM_ROCM_OPS_DISABLE names, and the all-reduce of collectives/. What it names that is no op is warned of."""
    words = {word.strip() for word in envs.VLLM_ROCM_OPS_DISABLE.split(",")} - {""}
    names = {op.name for op in registered()} | {"all_reduce"} if words else set()
    is_all = {word for word in words if word.lower() == "all"}
    if unknown := words - names - is_all:
        known = ", ".join(("all", *sorted(names)))
        warn_once(
            f"VLLM_ROCM_OPS_DISABLE={envs.VLLM_ROCM_OPS_DISABLE}",
            f"VLLM_ROCM_OPS_DISABLE must be a comma list of {known}, got {', '.join(sorted(unknown))} too, which is ignored",
        )
    return names if is_all else words
