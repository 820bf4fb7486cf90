"""Run the smoke stages of `vllm-rocm-ops check`, which precede any other use of the GPU, from least to most risky.

The report names each stage before it starts, so a hang, a fault or a crashed machine identifies its stage. Nothing runs on the GPU
after a failed stage.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
from collections.abc import Callable, Iterator

import torch

from vllm_rocm_ops import ops
from vllm_rocm_ops.core import archs, clock, correctness, launch
from vllm_rocm_ops.core import op as op_module
from vllm_rocm_ops.core.clock import tensor_bytes

ROUNDS, REPLAYS = 34, 20  # of three launches in a graph, and of the graph
TOKENS, COLUMNS = 4, 1024

FIRST = ops.silu_and_mul
"""The first op to launch."""


def smallest_first(op: op_module.Op, arch: archs.Arch) -> list:
    """Return the cases of an op, sorted by the bytes of their arguments."""
    return sorted(op.cases(), key=lambda case: tensor_bytes(*case.make("meta", torch.Generator(), arch.fp8_dtype)))


@functools.cache
def smallest(op: op_module.Op, arch: archs.Arch):
    """Return an op's smallest case that launches a kernel, or its smallest case if none does."""
    cases = smallest_first(op, arch)
    given = ((case, case.make("meta", torch.Generator(), arch.fp8_dtype)) for case in cases)
    return next(
        (case for case, arguments in given if op.explain(*arguments, arch=arch, require_code=True).launches), cases[0]
    )


def here(arch: str | None) -> archs.Arch:
    """Return the emulated architecture, or the first GPU's. Raises RuntimeError if no kernels exist for it."""
    known = archs.named(arch) if arch else archs.of_device(0)
    if known is None:
        raise RuntimeError(f"no kernels for {archs.product_of(0)}")
    return known


def driver(arch: str | None) -> Iterator[dict]:
    """Load the driver and list the GPUs, without a launch."""
    yield {"gpus": [{"name": archs.product_of(index)} for index in range(torch.cuda.device_count())]}
    runtime, why = launch.runtime()
    if runtime is None:
        raise RuntimeError(why)
    known = here(arch)
    code = launch.origin(known.name)
    yield {
        "case": "driver",
        "status": runtime.status(),
        "versions": runtime.versions(),
        "arch": str(known),
        "code": code,
    }


def modules(name: str) -> dict[str, list[str]]:
    """Return the symbols in each code object's stamp, for one architecture.

    Raises RuntimeError if a code object is damaged or none exists.
    """
    by_module = launch.stamps(name)
    if not by_module:
        raise RuntimeError(f"no code objects for {name} in {launch.CODE}")
    for module in by_module:
        launch.built(module, name)
    return {module: list(stamp["kernels"]) for module, stamp in by_module.items()}


def stamps(arch: str | None) -> Iterator[dict]:
    """Verify each code object against its stamp."""
    for module, symbols in modules(here(arch).name).items():
        yield {"case": module, "symbols": len(symbols)}


def matching(pattern: str) -> Iterator[op_module.Op]:
    """Yield the registered ops whose name matches."""
    return (op for op in op_module.registered() if fnmatch.fnmatchcase(op.name, pattern))


def launched(pattern: str, arch: archs.Arch) -> dict[str, list[str]]:
    """Return by code object the symbols that the smallest cases of matching ops launch."""
    by_module: dict[str, list[str]] = {}
    for op in matching(pattern):
        given = smallest(op, arch).make("meta", torch.Generator(), arch.fp8_dtype)
        for entry in op.explain(*given, arch=arch, require_code=True).launches:
            by_module.setdefault(entry.module, []).append(entry.symbol)
    return by_module


def load(arch: str | None, pattern: str | None = None) -> Iterator[dict]:
    """Load each kernel without launching it, or those that the smallest cases of matching ops launch."""
    known = here(arch)
    loader, why = launch.runtime()
    if loader is None:
        raise RuntimeError(why)
    by_module = launched(pattern, known) if pattern else modules(known.name)
    for module, symbols in by_module.items():
        yield {"case": module, "begun": True}
        for symbol in symbols:
            loader.load(str(launch.code_object(module, known.name)), symbol, 0)


def checked(op: op_module.Op, case, known: archs.Arch) -> dict:
    """Run one call of a case and return its kernel and what is wrong with its result."""
    device = "cpu" if launch.cpu_executor() else "cuda"
    given = case.make("cpu", correctness.generator_of(case.name), known.fp8_dtype)
    explained = op.explain(*given, arch=known, require_code=True)
    wrong = None
    try:
        with torch.inference_mode(), correctness.unwritten_is_nan():
            correctness.run_and_check(op, given, device)
    except correctness.Wrong as error:
        wrong = str(error)
    kernel = " + ".join(entry.symbol for entry in explained.launches) or explained.source
    return {"case": f"{op.name}/{case.name}", "kernel": kernel, "launches": len(explained.launches), "wrong": wrong}


def first_launch(arch: str | None) -> Iterator[dict]:
    """Launch one kernel once."""
    known = here(arch)
    case = smallest(FIRST, known)
    yield {"case": f"{FIRST.name}/{case.name}", "begun": True}
    result = checked(FIRST, case, known)
    if not result["launches"]:
        raise RuntimeError(f"{FIRST.name} has no kernel on this GPU: {result['kernel']}")
    yield result


def chain(known: archs.Arch, device: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that runs three ops `ROUNDS` times in a row, of which the GEMM has counters where a kernel has."""
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(2 * COLUMNS, COLUMNS, generator=generator) / COLUMNS**0.5).bfloat16().to(device)
    ones, gemm = torch.ones(COLUMNS, dtype=torch.bfloat16, device=device), ops.unquantized_gemm
    a = gemm.Arguments(torch.empty(TOKENS, COLUMNS, dtype=torch.bfloat16, device="meta"), weight.to("meta"), None)
    config = next(filter(lambda config: has_counters(gemm, config, a, known), gemm.configs(a, known)), None)

    def run(x: torch.Tensor) -> torch.Tensor:
        with gemm.running(config) if config else contextlib.nullcontext():
            for _ in range(ROUNDS):
                x = ops.silu_and_mul(gemm(ops.rms_norm(x, ones, 1e-6), weight, None))
        return x

    return run


def has_counters(op: op_module.Op, config, a, known: archs.Arch) -> bool:
    """True if launches of a configuration share counters."""
    planned = op.plan(config, op.allocate(a), a, known)
    return any(isinstance(value, launch.Counters) for entry in planned for value in entry.named.values())


def replay(arch: str | None) -> Iterator[dict]:
    """Capture a chain of launches in a graph, and replay it on new values. HIP 7.2.0 to 7.2.3 corrupts graphs (ROCm/clr#279)."""
    device = "cpu" if launch.cpu_executor() else "cuda"
    run, generator = chain(here(arch), device), torch.Generator().manual_seed(1)
    what = f"a graph of {3 * ROUNDS} launches"
    yield {"case": what, "begun": True}
    x, wrong = torch.empty(TOKENS, COLUMNS, dtype=torch.bfloat16, device=device), None
    with torch.inference_mode():
        graph = clock.capture(run, [(x.fill_(1),)])
        for number in range(REPLAYS):
            x.copy_(torch.randn(TOKENS, COLUMNS, generator=generator).bfloat16())
            graph.replay()
            if not torch.equal(graph.outputs[0], run(x)):  # synchronizes
                wrong = f"replay {number + 1} of {REPLAYS} and eager calls differ"
                break
    yield {"case": what, "wrong": wrong}


def every_op(arch: str | None, pattern: str) -> Iterator[dict]:
    """Check the smallest case of each op."""
    known = here(arch)
    for op in matching(pattern):
        case = smallest(op, known)
        yield {"case": f"{op.name}/{case.name}", "begun": True}
        yield checked(op, case, known)


STAGES: dict[str, Callable[..., Iterator[dict]]] = {
    "driver": driver,
    "stamps": stamps,
    "load": load,
    "launch": first_launch,
    "replay": replay,
    "ops": every_op,
}
EMULATED = "stamps", "launch"
"""Stages that also run in the emulator."""
