"""Define an op: its reference, contract, kernels and dispatch.

The reference is one plain PyTorch function: the schema of the torch op, its implementation on CPU, the fallback on a GPU and, given
float64, the oracle of its tests. An `Op` adds the functions that run kernels:

    contract(a)             yields (argument, wanted, got, holds): rules for callers, else ValueError; all tensors must also be on
                            one device
    allocate(a)             returns the outputs, unwritten, or None; also the fake (meta) implementation
    can_implement(a, arch)  yields (rule, holds): requirements of the kernels; if one fails, the reference runs and reports why
    configs(a, arch)        returns all configurations that fit
    cost(config, a, arch)   returns the predicted microseconds by term
    default(a, arch)        returns the configuration to use, unless the user's tuned table <arch>/<op>.csv has a row; an op without a
                            default uses the lowest cost
    plan(config, outputs, a, arch)  returns the launches
    problem(a)              returns the sizes that key tuned rows and benchmark lines
    cases()                 yields example inputs, shared by tests, emulator and benchmarks

`a` is the named tuple of the op's arguments. All but `reference` depend on shapes, strides, dtypes and alignment only, so that
`explain()` works on meta tensors without a GPU. Decisions are cached by this signature: a repeated call binds pointers and launches.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import inspect
import re
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch._ops import OpOverload

from vllm_rocm_ops.core import archs, arguments, envs, kernel_arguments, tables
from vllm_rocm_ops.core import launch as launches
from vllm_rocm_ops.core.arch import Arch
from vllm_rocm_ops.core.execution import Execution, bind_device, bind_executor, signature
from vllm_rocm_ops.core.explanation import Explanation
from vllm_rocm_ops.core.launch import NotLaunched
from vllm_rocm_ops.core.stats import FALLBACK, NO_GPU, counter, warn_once

NAMESPACE = "vllm_rocm_ops"
REMEMBERED_SIGNATURES = 4096  # per op, the newest; every prefill length is one

_library = torch.library.Library(NAMESPACE, "DEF")
_registered: list[Op] = []


def define(
    function: Callable, fake: Callable, like: Callable | None = None, mutates: tuple[str, ...] = ()
) -> OpOverload:
    """Register a function as a torch op for CPU and GPU, and return the op.

    Args:
        function: The implementation, called with positional arguments.
        fake: The implementation for tensors without data.
        like: The function whose name and parameters the op has; by default `function`.
        mutates: The parameters that the op updates.
    """
    like = like or function
    schema = torch.library.infer_schema(like, mutates_args=mutates)
    _library.define(like.__name__ + schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order))
    for key in ("CPU", "CUDA"):
        _library.impl(like.__name__, function, key)
    torch.library.register_fake(f"{NAMESPACE}::{like.__name__}", fake, lib=_library)
    return getattr(getattr(torch.ops, NAMESPACE), like.__name__).default


def documented(function: Callable, meanings: Mapping[str, str]) -> str:
    """Return a docstring with all arguments and results, those that it leaves out from `meanings`, and every op's error."""
    intro, *rest = re.split(r"^(Args|Returns|Source):\n", inspect.getdoc(function) or "", flags=re.MULTILINE)
    sections = dict(zip(rest[::2], rest[1::2]))
    own = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", sections.get("Args", ""), re.MULTILINE)
    texts = {**meanings, **dict(own)}
    given = [name for name in inspect.signature(function).parameters if name in texts]
    sections["Args"] = "".join(f"    {name}: {texts[name]}\n" for name in given)
    if "Returns" not in sections and "return" in meanings:
        sections["Returns"] = f"    {meanings['return']}"
    sections["Raises"] = "    ValueError: An argument breaks the contract; nothing is written.\n"
    titles = [title for title in ("Args", "Returns", "Raises", "Source") if title in sections]
    return "\n\n".join((intro.rstrip(), *(f"{title}:\n{sections[title].rstrip()}" for title in titles)))


@dataclass(frozen=True)
class Case:
    """One set of inputs: `make(device, generator, fp8_dtype)` returns the op's arguments in order."""

    name: str
    make: Callable[[str, torch.Generator, torch.dtype], tuple]


def case_maker(inputs: Callable[..., tuple]) -> Callable[..., Case]:
    """Return a function (name, *sizes, **given) -> case with inputs(*sizes, given, device, generator, fp8_dtype) as arguments."""
    return lambda name, *sizes, **given: Case(name, functools.partial(inputs, *sizes, given))


@dataclass(eq=False)
class Op:
    """One op; the module's docstring describes the functions.

    Attributes:
        mutates: Arguments that the op updates in place.
        sums: Whether results are long sums, which may cancel, so that errors exceed a rounding step of a result.
        product: Whether results are linear in each operand.
        linear: Makes the arguments of a linear layer's call (ops/shared/inputs.py): `linear(tokens, inputs, n, k, *traits)`, a bias last.
        writes: Arguments that receive a result in place of a returned tensor, and share no memory with others.
        inexact: Members of `mutates` that receive results, with the tolerance of returned ones; the others match the
            reference bit for bit.
        baseline: PyTorch's own function for the op's arguments, a baseline to time; the reference by default.
        native: A faster equivalent of the reference on a GPU, which a caller may set.
        meanings: Texts of the arguments and the results ("return") that the reference's docstring leaves out, as ops of a
            family share them.
    """

    reference: Callable
    allocate: Callable
    contract: Callable
    can_implement: Callable
    configs: Callable
    plan: Callable
    problem: Callable
    cases: Callable[[], Iterable[Case]]
    default: Callable | None = None
    cost: Callable | None = None
    mutates: tuple[str, ...] = ()
    sums: bool = False
    product: bool = False
    linear: Callable[..., tuple] | None = None
    writes: tuple[str, ...] = ()
    inexact: tuple[str, ...] = ()
    baseline: Callable | None = None
    native: Callable | None = None
    meanings: Mapping[str, str] = field(default_factory=dict)
    name: str = field(init=False)

    @property
    def is_standalone(self) -> bool:
        """True if no seam calls the op: its file is in ops/standalone."""
        return ".standalone." in self.reference.__module__

    def __post_init__(self) -> None:
        self.name = self.reference.__name__
        self.__doc__ = documented(self.reference, self.meanings)
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
        """Call the torch op."""
        return self.torch_op(*args, **kwargs)

    def call(self, *args):
        """Call the torch op while a graph is traced, else its function, which avoids PyTorch's dispatcher; for seams."""
        return self.torch_op(*args) if torch.compiler.is_compiling() else self._dispatch(*args)

    def explain(self, *args, arch: str | Arch | None = None, require_code: bool = False, **kwargs) -> Explanation:
        """Return which kernels a call runs, and why.

        Args:
            args: The op's arguments; tensors may be on the meta device.
            arch: An architecture or a name for `arch.named`; by default the arguments' device.
            require_code: Fall back if the kernels are not built.
            kwargs: The op's arguments by name.

        Returns:
            The launches, the configuration and its source, and every rule with its outcome.

        Raises:
            ValueError: The arguments break the contract, or the architecture is unknown.
        """
        a = arguments.checked(self, self.Arguments(*args, **kwargs))
        if arch is None:
            device = next(v.device for v in a if isinstance(v, torch.Tensor))
            arch = archs.of_device(device.index) if device.type == "cuda" else None
        elif isinstance(arch, str):
            arch = archs.named(arch)
        chosen = self._choose(a, arch, self.allocate(a), require_code)
        return dataclasses.replace(chosen, considered=self.considered(a, arch)) if chosen.config else chosen

    def tuned_row(self, a, arch: Arch) -> tables.TunedRow | None:
        """Return the tuned row of this problem and arch, if its configuration fits, or None."""
        key = {"compute_units": arch.compute_units, **self.problem(a)}
        values = tuple(str(v) for v in key.values())
        path = envs.tables() / arch.name / f"{self.name}.csv"
        row = tables.table(path, tuple(key)).get(values)
        for config in self.configs(a, arch) if row else ():
            if tables.is_stored(config, row.fields):
                return tables.TunedRow(config, row.source, path)
        return None

    def tuned(self, a, arch: Arch):
        """Return the configuration of the tuned row, or None."""
        row = self.tuned_row(a, arch)
        return row and row.config

    def invalidate(self) -> None:
        """Invalidate cached decisions."""
        self._executions.clear()

    @contextlib.contextmanager
    def running(self, config) -> Iterator[None]:
        """Run supported calls with this configuration, whatever tables and default say."""
        self.tuned = lambda a, arch: config
        self.invalidate()
        try:
            yield
        finally:
            del self.tuned
            self.invalidate()

    def considered(self, a, arch: Arch) -> tuple[tuple[object, dict[str, float]], ...]:
        """Return all configurations with their costs, cheapest first; empty without a cost model."""
        if self.cost is None:
            return ()
        costs = [(config, self.cost(config, a, arch)) for config in self.configs(a, arch)]
        return tuple(sorted(costs, key=lambda entry: sum(entry[1].values())))

    def cheapest(self, a, arch: Arch):
        """Return the configuration with the lowest cost, the first among equals."""
        return self.considered(a, arch)[0][0]

    def _choose(self, a, arch: Arch | None, outputs, require_code: bool) -> Explanation:
        def fallback(why: str, rules=()) -> Explanation:
            return Explanation(self.name, arch and str(arch), (), None, FALLBACK + why, tuple(rules))

        if self.name in disabled():
            return fallback("switched off by VLLM_ROCM_OPS_DISABLE")
        if self.name in off:
            return fallback(f"off on this GPU: {off[self.name]}")
        if arch is None:
            return fallback(NO_GPU)
        rules = list(self.can_implement(a, arch))
        broken = [rule for rule, holds in rules if not holds]
        if broken:
            return fallback("the kernels require that " + "; ".join(broken), rules)
        config = self.tuned(a, arch)
        source = "tuned" if config is not None else "default"
        if config is None:
            config = self.default(a, arch)
        planned = tuple(self.plan(config, outputs, a, arch))
        if rule := launches.too_large(planned):
            return fallback("the kernels require that " + rule, [*rules, (rule, False)])
        try:
            for l in planned if require_code else ():
                kernel_arguments.parameters(launches.built(l.module, arch.name), l.symbol)
        except RuntimeError as error:
            return fallback(str(error), rules)
        return Explanation(self.name, str(arch), planned, config, f"{source} {config}", tuple(rules))

    def run_kernels(self, *args):
        """Run the op if kernels support the arguments, for callers with a better fallback than the reference.

        Returns:
            The results, or True for an op without results. None, with nothing run, if the reference would run or the arguments
            break the contract.
        """
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
                results = execution(args)
                return True if results is None else results
            except NotLaunched as error:
                self._do_without(execution, str(error))
        if not self._is_trial and execution.count is not counter(self.name, FALLBACK + NO_GPU):
            execution.count.calls += 1
        return None

    @contextlib.contextmanager
    def trial(self) -> Iterator[None]:
        """Probe support by `run_kernels`: unsupported calls are neither counted nor warned about."""
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
        """Fall back permanently for this signature, after a call's first launch failed."""
        execution.count.calls -= 1
        why = why.removesuffix(f". {self._advice()}")
        self.warn("launch", why)
        execution.become(self.name, FALLBACK + why, self._without_kernels(on_gpu=True), is_fallback=True)

    def _without_kernels(self, on_gpu: bool) -> Callable[[tuple], object]:
        """Return the fallback: `native` on a GPU, if set, else the reference."""
        if on_gpu and self.native is not None:
            return lambda args: self.native(*args)
        return lambda args: self.reference(*args)

    def warn(self, subject: str, why: str) -> None:
        """Warn once per subject that the op runs without its kernels."""
        warn_once(f"{self.name}: {subject}", f"{self.name} runs without its kernels: {why}. {self._advice()}")

    def _execution(self, args: tuple) -> Execution:
        """Return the execution of this signature, decided at its first call."""
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
        """Check the arguments once, choose kernels, and bind the execution of this signature."""
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
            taken = [kernel_arguments.parameters(path, symbol) for path, symbol in code]
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
        # The emulator, too, rejects wrong arguments before any launch.
        packers = [kernel_arguments.packer(l, takes) for l, takes in zip(chosen.launches, taken)]
        if on_gpu:
            run = bind_device(runtime, device, chosen.launches, handles, packers, outputs, a, self._advice())
        else:
            run = bind_executor(executor, chosen.launches, outputs, a)
        return Execution(self.name, kernel, run)

    def _advice(self) -> str:
        return f"To run without its kernels, set VLLM_ROCM_OPS_DISABLE={self.name}"


def invalidate_tables() -> None:
    """Reload changed tables, for known signatures too."""
    tables.table.cache_clear()
    for op in registered():
        op.invalidate()


def registered() -> Iterator[Op]:
    """Return all ops in the order of definition."""
    return iter(_registered)


off: dict[str, str] = {}
"""Ops that are off on this GPU, and why. Set when a worker starts, before any call."""


def disabled() -> set[str]:
    """Return the ops, or `all_reduce`, that VLLM_ROCM_OPS_DISABLE names. Warns about unknown names."""
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
