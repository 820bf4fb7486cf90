"""Compare random calls of every op with float64 (formulas.py), and check that malformed calls raise.

    python tests/ops/fuzz.py [--calls 13000] [--malformed 1000] [--seed 0] [--op PATTERN] [--workers N] [--emulate ARCH ...]

A call has the kinds of arguments of one of the op's cases, with random values and, if the case has sizes as parameters,
random sizes. It runs in a random configuration, or in one whose kernels have not run yet, if there is one. Kernels run
on a GPU if there is one, else in the emulator of --emulate. A malformed call is a valid one with one wrong argument. It
must raise, and leave every tensor unchanged.

It prints how many combinations of op, type, kernels and configuration ran, and the kernels that did not. It fails for a
wrong result, for an accepted malformed call and, after 10,000 calls, for a kernel that never ran. The same seed makes
the same calls, for any number of workers. Each worker is a process of one thread.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import dataclasses
import fnmatch
import functools
import inspect
import json
import multiprocessing
import random
import sys
import time
import warnings
from collections.abc import Callable

import formulas
import torch
from marks import AMD

from vllm_rocm_ops import collectives
from vllm_rocm_ops.core import archs, launch
from vllm_rocm_ops.core import op as op_module
from vllm_rocm_ops.core.correctness import as_tuple, clone, unwritten_is_nan
from vllm_rocm_ops.core.op import Case, Op
from vllm_rocm_ops.core.stats import reset_stats, stats
from vllm_rocm_ops.ops.shared import rowwise

REFUSALS = (ValueError, TypeError, RuntimeError)
WHOLE = 10000  # calls after which every kernel must have run


class Wrong(AssertionError):
    """A result that differs from the formula's."""


# Valid calls


TOKENS: list[int] = []  # the least and the most of --tokens


def tokens(rng: random.Random) -> int:
    if TOKENS:
        return rng.randint(*TOKENS)
    return rng.choice((1, 2, rng.randint(1, 20), rng.choice((15, 16, 17, 31, 33, 63, 64, 65, 70, 97, 129))))


def row_shape(rng: random.Random, of_case: dict) -> tuple[int, ...]:
    shape, group = of_case["shape"], of_case["given"].get("group_size", 128 if of_case["grouped"] else 1)
    plain = of_case["fill"] is rowwise.normal and len(shape) == 2 and not of_case["apart"][1]
    if not plain or any(callable(value) for value in of_case["given"].values()):
        return shape
    columns = rng.choice((rng.randint(1, 40), 8 * rng.randint(1, 300), rng.randint(1, 3000)))
    return rng.randint(0, 6), group * max(columns // group, 1)


SIZES: dict[str, Callable[[random.Random, dict], object]] = {
    "m": lambda rng, of: tokens(rng),
    "n": lambda rng, of: 16 * rng.randint(1, 12) if of["given"].get("shuffled") else rng.randint(1, 170),
    "k": lambda rng, of: rng.choice((64, 128)) * rng.randint(1, 8),
    "topk": lambda rng, of: rng.randint(1, 4),
    "hidden": lambda rng, of: 64 * rng.randint(1, 5),
    "intermediate": lambda rng, of: 32 * rng.randint(1, 5),
    "shape": row_shape,
    "lens": lambda rng, of: tuple(rng.randint(0, 150) for _ in range(rng.randint(1, 4))),
    "tokens": lambda rng, of: rng.randint(4, 12),
}
"""Functions that draw a size of a case, by the parameter's name in the op's file."""


def resized(case: Case, the_op: Op, rng: random.Random) -> Callable:
    """Return a case's maker with random sizes, if it has sizes as parameters."""
    make = case.make
    if not isinstance(make, functools.partial):
        return make
    names = [name for name in inspect.signature(make.func).parameters][: len(make.args)]
    of_case = dict(zip(names, make.args)) | {"grouped": "group_size" in the_op.Arguments._fields}
    of_case.setdefault("given", {})
    drawn = [SIZES[name](rng, of_case) if name in SIZES else value for name, value in zip(names, make.args)]
    return functools.partial(make.func, *drawn)


def arguments(the_op: Op, case: Case, rng: random.Random, fp8_dtype: torch.dtype, resizes: bool) -> tuple:
    """Return the arguments of a valid call: a case's, with random sizes if these are valid."""
    seed = rng.getrandbits(40)
    for make in (resized(case, the_op, rng), case.make) if resizes else (case.make,):
        with contextlib.suppress(ValueError, RuntimeError, IndexError):
            found = make("cpu", torch.Generator().manual_seed(seed), fp8_dtype)
            the_op.explain(*(value.to("meta") if isinstance(value, torch.Tensor) else value for value in found))
            return found
    raise RuntimeError(f"{the_op.name}: {case.name} makes no valid call")


def configurations(the_op: Op, a, arch) -> list:
    """Return the configurations in which kernels accept a call."""
    return the_op.configs(a, arch) if all(holds for _, holds in the_op.can_implement(a, arch)) else []


class Cover:
    """Find the calls that run kernels that no earlier call runs.

    The cases' own sizes determine them without a run, and equally in each worker.
    """

    def __init__(self, cases: list[tuple[Op, Case]], arch):
        self.cases, self.arch = cases, arch
        self.kernels: set[str] = set()
        self.number = self.last = -1

    def config(self, number: int):
        """Return the configuration with which a call runs unseen kernels, or None.

        Numbers must grow from call to call.
        """
        found = None
        while self.number < number and self.number - self.last <= len(self.cases):
            self.number += 1
            found = self.unseen(*self.cases[self.number % len(self.cases)])
            self.last = self.number if found is not None else self.last
        return found if self.number == number else None

    def unseen(self, the_op: Op, case: Case):
        a = the_op.Arguments(*case.make("meta", torch.Generator(), self.arch.fp8_dtype))
        for config in configurations(the_op, a, self.arch):
            kernels = {one.symbol for one in the_op.plan(config, the_op.allocate(a), a, self.arch)}
            if not kernels <= self.kernels:
                self.kernels |= kernels
                return config
        return None


def check(the_op: Op, before, after, outputs: tuple) -> None:
    """Raise Wrong for a result that differs from the op's formula."""
    outputs = tuple(output.cpu() for output in outputs)
    for name, found, wanted, allowed in formulas.FORMULAS[the_op.name](before, after, outputs):
        if found.shape != wanted.shape:
            raise Wrong(f"{name} is {list(found.shape)}, not {list(wanted.shape)}")
        known = wanted.isfinite() & ~(found.isinf() & (wanted.abs() > 65000))
        off = ((found - wanted).abs() > allowed) | found.isnan()
        off &= known
        if off.any():
            place = int(off.flatten().int().argmax())
            got, exact = (value.expand(wanted.shape).flatten()[place].item() for value in (found, wanted))
            by = allowed.expand(wanted.shape).flatten()[place].item()
            raise Wrong(
                f"{name}: {int(off.sum())} of {off.numel()} are off, element {place} is {got}, not {exact} +- {by:.3g}"
            )


def run(the_op: Op, given: tuple, config, device: str) -> str:
    """Run and check a call, and return the names of its kernels."""
    before = the_op.Arguments(*(clone(value) for value in given))
    ours = the_op.Arguments(*(clone(value, device) for value in given))
    reset_stats()
    with unwritten_is_nan(), the_op.running(config) if config else contextlib.nullcontext():
        outputs = as_tuple(the_op(*ours))
    after = the_op.Arguments(*(value.cpu() if isinstance(value, torch.Tensor) else value for value in ours))
    for name, value in before._asdict().items():
        kept = isinstance(value, torch.Tensor) and name not in (*the_op.mutates, *the_op.writes)
        if kept and not same(value, getattr(after, name)):
            raise Wrong(f"it changes {name}")
    check(the_op, before, after, outputs)
    return next(iter(stats()[the_op.name]))


def same(x: torch.Tensor, y: torch.Tensor) -> bool:
    """True if two tensors have the same bits, whatever their strides."""
    bits = (torch.empty(of.shape, dtype=of.dtype).copy_(of).reshape(-1).view(torch.uint8) for of in (x, y))
    return torch.equal(*bits)


# Malformed calls


TIED = {
    "weight": (-1,),
    "bias": (0,),
    "residual": (-1, 0),
    "addend": (-1, 0),
    "a": (-1,),
    "scale_b": (-1,),
    "w1": (1, 2),
    "w2": (1, 2),
    "topk_weights": (0, 1),
    "topk_ids": (0,),
    "e_score_correction_bias": (0,),
    "is_padding": (0,),
    "positions": (0,),
    "value": (0, -1),
    "k_pe": (0, -1),
    "kv_c": (0, -1),
    "seq_lens": (0,),
    "block_table": (0,),
    "sinks": (0,),
    "out": (0, -1),
    "query_out": (0, -1),
    "key_out": (0, -1),
    "q_weight": (0,),
    "k_weight": (0,),
    "x": (-1,),
    "weights": (0, 1),
    "w1_bias": (0, 1),
    "w2_bias": (0, 1),
}
"""Dimensions whose sizes other arguments fix."""
NUMBERS = {
    "topk": (0, -1, 10**6),
    "group_size": (0, -128, 10**6),
    "num_expert_group": (0, -1, 7919),
    "topk_group": (0, -1, 7919),
    "query_len": (0, -1),
    "groups": (0, -1, 10**6),
    "window": (-1,),
    "fixed_split_size": (-7,),
    "shared_experts": (-1, 10**6),
    "swiglu_limit": (0.0, -7.0),
    "height_pairs": (-1, 10**6),
    "width_pairs": (-1, 10**6),
}
E5M2 = torch.float8_e5m2
ANY_TYPE = ("gemm",)
"""Ops that accept and return types that others do not."""


def other_type(value: torch.Tensor) -> torch.dtype:
    """Return a type that no argument may have in place of a tensor's."""
    return torch.complex64 if value.is_floating_point() and value.element_size() > 1 else torch.int16


def longer(value: torch.Tensor, dimension: int) -> torch.Tensor:
    """Return a tensor with one more element in a dimension."""
    bits = value.view(torch.uint8) if value.element_size() == 1 else value
    size = value.shape[dimension]
    places = torch.arange(size + 1).clamp(max=size - 1)
    return bits.index_select(dimension, places).view(value.dtype)


def malformed(the_op: Op, given: tuple, rng: random.Random) -> tuple[str, tuple]:
    """Return what is wrong, and the arguments with one wrong one."""
    a = the_op.Arguments(*given)
    choices: list[tuple[str, str, Callable]] = []
    for name, value in a._asdict().items():
        if isinstance(value, torch.Tensor):
            choices.append((name, f"of {other_type(value)}", lambda v: v.float().to(other_type(v))))
            choices.append((name, "a number", lambda v: 1.0))
            if value.dtype in formulas.LIMIT and the_op.name not in ANY_TYPE:
                choices.append((name, f"of {E5M2}", lambda v: v.float().to(E5M2)))
            if name in the_op.reference.__annotations__ and "None" not in str(the_op.reference.__annotations__[name]):
                choices.append((name, "None", lambda v: None))
            for dimension in TIED.get(name, ()):
                if value.dim() and 0 < value.shape[dimension] and value.numel() > 1:
                    made = functools.partial(longer, dimension=dimension)
                    choices.append((name, f"longer in dimension {dimension}", made))
        elif isinstance(value, torch.dtype):
            others = (E5M2, torch.bool) if the_op.name in ANY_TYPE else (E5M2, torch.int32, torch.bool)
            choices += [(name, str(wrong), lambda v, wrong=wrong: wrong) for wrong in others]
        choices += [(name, str(wrong), lambda v, wrong=wrong: wrong) for wrong in NUMBERS.get(name, ())]
    name, what, change = rng.choice(choices)
    return f"{name} {what}", tuple(a._replace(**{name: change(getattr(a, name))}))


def taken(the_op: Op, given: tuple, device: str) -> str:
    """Return why a malformed call is not handled well, or "".

    It must be refused with the op's name in the error, and change no tensor.
    """
    ours = tuple(clone(value, device) for value in given)
    try:
        the_op(*ours)
    except REFUSALS as error:
        if the_op.name not in str(error):
            return f"raises {type(error).__name__}: {error}"
        kept = (same(value, mine.cpu()) for value, mine in zip(given, ours) if isinstance(value, torch.Tensor))
        return "" if all(kept) else "changes a tensor"
    return "is taken"


# The command


@dataclasses.dataclass
class Found:
    """Findings of calls."""

    calls: int = 0
    refused: int = 0
    wrong: list[str] = dataclasses.field(default_factory=list)
    covered: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    launched: dict[str, set[str]] = dataclasses.field(default_factory=dict)

    def add(self, other: Found) -> None:
        self.calls += other.calls
        self.refused += other.refused
        self.wrong += other.wrong
        self.covered += other.covered
        for arch, kernels in other.launched.items():
            self.launched.setdefault(arch, set()).update(kernels)

    def kernels_that_did_not_run(self, arch: str) -> list[str]:
        """Return the kernels of one device that no call launched."""
        stamps = (launch.CODE / arch).glob("*.json")
        every = {symbol for stamp in stamps for symbol in json.loads(stamp.read_text())["kernels"]}
        return sorted(every.difference(self.launched.get(arch, set()), *collectives.kernels().values()))

    def table(self) -> str:
        """Return a line per op with the number of combinations that ran."""
        ops = sorted({key[0] for key in self.covered})
        rows = []
        for op in ops:
            keys = [key for key in self.covered if key[0] == op]
            _, types, _, kernels, configs = (len(set(of)) for of in zip(*keys))
            calls = sum(self.covered[key] for key in keys)
            rows.append(f"{op:40} {calls:6} calls {types} types {kernels:4} kernels {configs:4} configurations")
        return "\n".join(rows)


class Fuzz:
    """A sequence of random calls."""

    def __init__(self, pattern: str, seed: int):
        self.ops = [op for op in op_module.registered() if fnmatch.fnmatchcase(op.name, pattern)]
        if not self.ops:
            raise SystemExit(f"no op matches --op {pattern}")
        self.cases = [(op, case) for op in self.ops for case in op.cases()]
        random.Random(seed).shuffle(self.cases)
        self.seed, self.found = seed, Found()
        self.covers: dict[str, Cover] = {}

    def drawn(self, number: int, what: str) -> tuple[Op, Case, random.Random]:
        """Return the op and case of a call, cycling through the cases."""
        return *self.cases[number % len(self.cases)], random.Random(f"{self.seed} {what} {number}")

    def call(self, number: int, arch) -> tuple[Op, Case, tuple, object]:
        """Return the op, case, arguments and configuration of a valid call."""
        the_op, case, rng = self.drawn(number, f"valid {arch.name}")
        config = self.covers.setdefault(arch.name, Cover(self.cases, arch)).config(number)
        given = arguments(the_op, case, rng, arch.fp8_dtype, resizes=config is None)
        if config is None and (found := configurations(the_op, the_op.Arguments(*given), arch)):
            config = rng.choice(found)
        return the_op, case, given, config

    def valid(self, number: int, device: str, arch) -> None:
        the_op, case, given, config = self.call(number, arch)
        self.found.calls += 1
        try:
            ran = run(the_op, given, config, device)
        except Exception as error:  # noqa: BLE001  each is a finding
            what = f"{the_op.name} {case.name} {config}"
            self.found.wrong.append(f"call {number} on {arch.name}, {what}: {type(error).__name__}: {error}")
            return
        self.found.launched.setdefault(arch.name, set()).update(ran.split(" + "))
        dtype = next(value.dtype for value in given if isinstance(value, torch.Tensor))
        self.found.covered[the_op.name, str(dtype), arch.name, ran, str(config)] += 1

    def malformed(self, number: int, device: str, arch) -> None:
        the_op, case, rng = self.drawn(number, f"malformed {arch.name}")
        what, given = malformed(the_op, arguments(the_op, case, rng, arch.fp8_dtype, resizes=True), rng)
        self.found.refused += 1
        if found := taken(the_op, given, device):
            what = f"{the_op.name} {case.name} with {what}"
            self.found.wrong.append(f"malformed call {number} on {arch.name}, {what}: {found}")


def executors(emulate: list[str]):
    """Yield each machine's device, arch, and the context in which kernels run on it."""
    if torch.cuda.is_available() and archs.of_device(0) is not None and not emulate:
        yield "cuda", archs.of_device(0), contextlib.nullcontext
        return
    from vllm_rocm_ops.emulator import Emulator

    for name in emulate or AMD:
        emulator = Emulator(name)
        yield "cpu", emulator.arch, functools.partial(launch.executor, emulator)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--calls", type=int, default=13000, help="valid ones, of all machines together; default: %(default)s")
    add("--malformed", type=int, default=1000, help="default: %(default)s")
    add("--seed", type=int, default=0)
    add("--op", default="*", metavar="PATTERN", help="ops of such names only")
    add("--seconds", type=float, default=float("inf"), help="of a worker's processor time, after which no call begins")
    add("--tokens", type=int, nargs=2, default=[], metavar=("LEAST", "MOST"), help="of each GEMM")
    add("--workers", type=int, default=1, help="processes, on all visible GPUs in turn; default: %(default)s")
    add("--emulate", nargs="+", default=[], metavar="ARCH", help="default, without a GPU: gfx942 gfx950")
    options = parser.parse_args(argv)
    if options.workers < 1:
        parser.error(f"--workers must be at least 1, got {options.workers}")
    return options


def work(options: argparse.Namespace, worker: int) -> Found:
    """Run the calls of a worker, and return its findings."""
    warnings.filterwarnings("ignore", ".*runs without its kernels")
    torch.set_num_threads(1)  # the formulas' tensors are small
    TOKENS[:] = options.tokens
    machines, fuzz = list(executors(options.emulate)), Fuzz(options.op, options.seed)
    if machines[0][0] == "cuda":
        formulas.OF_TERMS = max(formulas.OF_TERMS, machines[0][1].sum_rounding)
        torch.cuda.set_device(worker % torch.cuda.device_count())
    start = time.process_time()
    for kind, count in (("malformed", options.malformed), ("valid", options.calls)):
        for number in range(worker, count, options.workers):
            if time.process_time() - start > options.seconds:
                break
            device, arch, within = machines[number % len(machines)]
            with within():
                getattr(fuzz, kind)(number // len(machines), device, arch)
    return fuzz.found


def main(argv: list[str] | None = None) -> int:
    options, found = parse(argv), Found()
    if options.workers == 1:
        found.add(work(options, 0))
    else:
        spawn = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(options.workers, spawn) as pool:
            for part in pool.map(work, [options] * options.workers, range(options.workers)):
                found.add(part)
    if found.calls:
        print(found.table())
    print(*found.wrong, sep="\n", end="\n" * bool(found.wrong))
    missing = {arch.name: found.kernels_that_did_not_run(arch.name) for _, arch, _ in executors(options.emulate)}
    for arch, symbols in missing.items():
        print(f"{arch}: {len(symbols)} kernels did not run")
    must_be_all = options.op == "*" and found.calls >= WHOLE
    if must_be_all and any(missing.values()):
        print("never ran:", *(symbol for symbols in missing.values() for symbol in symbols))
    what = f"{found.calls} calls, {len(found.covered)} combinations, {found.refused} malformed calls"
    print(f"seed {options.seed}: {what}, {len(found.wrong)} wrong")
    return int(bool(found.wrong) or must_be_all and any(missing.values()))


if __name__ == "__main__":
    sys.exit(main())
