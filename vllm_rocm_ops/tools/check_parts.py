"""Define the parts of `vllm-rocm-ops check` and `advise`, each a generator of results."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import torch

from vllm_rocm_ops import ops
from vllm_rocm_ops.core import archs, launch
from vllm_rocm_ops.core.clock import GpuClock
from vllm_rocm_ops.models import config as model_config
from vllm_rocm_ops.models import layers as model_layers
from vllm_rocm_ops.timing import frozen
from vllm_rocm_ops.tools import doctor, explain, options
from vllm_rocm_ops.tools import smoke as smoke_stages
from vllm_rocm_ops.tools.bench import run as bench
from vllm_rocm_ops.tools.bench.baselines import ADVICE, Baseline, baselines
from vllm_rocm_ops.tools.bench.shapes import Shape
from vllm_rocm_ops.vllm import comparisons
from vllm_rocm_ops.vllm.selection import kernel_selection, kernel_timing, replays
from vllm_rocm_ops.vllm.selection.comparison import LayerComparison, WrongBaseline

TOKENS = (1, 8, 16, 32, 64, 128, 256, 1024, 4096)
TINY_TOKENS = (1, 17)
EMULATED_SECONDS = 0.5  # CPU time per op


def smoke(arch: str | None, stage: str, *arguments) -> Iterator[dict]:
    """Run a stage of smoke.py. The first also yields what its results are valid for."""
    if stage == "driver":
        yield {"machine": kernel_selection.machine()}
    yield from smoke_stages.STAGES[stage](arch, *arguments)


def machine(arch: str | None) -> Iterator[dict]:
    """Yield the `doctor` report."""
    yield doctor.find()


def op_cases(arch: str | None, name: str) -> Iterator[dict]:
    """Check and time an op's cases. In the emulator, check the smallest ones for `EMULATED_SECONDS`."""
    op = getattr(ops, name)
    if arch is None:
        clock = ComparingClock()
        with torch.inference_mode():
            for [line] in bench.run([Shape(op, case) for case in op.cases()], clock):
                differs = clock.take_wrong()
                yield {
                    "case": line.case,
                    "kernel": line.kernel,
                    "wrong": line.wrong or differs or None,
                    "bytes": line.bytes_moved,
                    "us": line.median if line.samples else None,
                }
        return
    from vllm_rocm_ops.emulator import cases as emulated  # an extra

    known = archs.named(arch)

    start = time.process_time()
    for task in emulated.tasks([(op, case) for case in smoke_stages.smallest_first(op, known)], known):
        done = emulated.check(task, arch)
        kernels = " + ".join(sorted(done.kernels)) or "fallback"
        yield {"case": task.case.name, "kernel": kernels, "wrong": done.wrong or None, "us": None}
        if done.kernels and time.process_time() - start > EMULATED_SECONDS:
            return


class ComparingClock(GpuClock):
    """Compares replays with eager calls as well, before and after they are timed."""

    def __init__(self):
        super().__init__()
        self._compared: list[tuple[replays.Replays, object]] = []
        self._wrong = ""

    def prepare(self, call, sets):
        prepared = super().prepare(call, sets)
        self._compared.append((replays.Replays({"plugin": call}, sets, fresh=replays.copies), prepared[0]))
        self._compare()
        return prepared

    def samples(self, prepared):
        samples = super().samples(prepared)
        self._compare()
        self._compared.clear()
        return samples

    def _compare(self) -> None:
        for of_graph, graph in self._compared:
            try:
                of_graph.check({"plugin": graph})
            except replays.Mismatch as error:
                self._wrong = str(error)

    def take_wrong(self) -> str:
        """Return what differed since the last call, if anything."""
        wrong, self._wrong = self._wrong, ""
        return wrong


def bandwidth(arch: str | None) -> Iterator[dict]:
    """Measure HBM bandwidth."""
    for line in bench.hbm(GpuClock(), ops.unquantized_gemm):
        yield {"line": line}


def model(arch: str | None, name: str, tp: int) -> Iterator[dict]:
    """Check and time the linear layers and experts of one rank against other kernels."""
    known = archs.named(arch) if arch else GpuClock().arch
    clock = Untimed() if arch else kernel_timing.GraphClock()
    product = None if arch else archs.product_of(0)
    with torch.inference_mode():
        for call in model_layers.calls(model_config.read(name), tp, None, model_layers.built_for(known)):
            if call.op not in comparisons.COMPARISONS:
                continue
            others = {"PyTorch's reference": Baseline(call.op.reference)} if arch else baselines(call.op)
            for other, baseline in others.items():
                if "tensorwise" not in other:  # it computes another GEMM
                    yield from beside(call, other, baseline, known, clock, TINY_TOKENS if arch else TOKENS, product)


def survey(
    arch: str | None, model: str, tp: int | None, ep: int | None, place: int, other: str, sizes: tuple[int, ...]
) -> Iterator[dict]:
    """Check and time one of a model's calls against one kernel, which vLLM may run under another flag."""
    known, clock = (archs.named(arch), Untimed()) if arch else (GpuClock().arch, kernel_timing.GraphClock())
    call = options.calls_of(model, tp, ep, known)[place]
    baseline = (baselines(call.op) | baselines(call.op, ADVICE))[other]
    with torch.inference_mode():
        yield from beside(call, other, baseline, known, clock, sizes)


def beside(
    call, other: str, baseline: Baseline, arch: archs.Arch, clock, sizes: tuple[int, ...], product: str | None = None
) -> Iterator[dict]:
    """Compare the plugin's kernels with another kernel for one call of a model, at each number of tokens.

    Results carry the frozen predictions, if `product` has them.
    """
    of_call = ModelCall(call, baseline, arch)
    layer = torch.empty(0, device=of_call.device), call.dtype  # weights are created at each size
    for tokens in sizes:
        result = {
            "layer": call.layer,
            "op": call.op.name,
            "beside": other,
            "tokens": tokens,
            **of_call.predicted(tokens),
            "frozen": frozen.find(product, call, tokens, arch),
        }
        calls = kernel_timing.estimate(of_call, layer, max(call.count, 1), tokens, arch.bandwidth_gb_s)[0]
        try:
            measured = kernel_timing.check_and_time(of_call, [layer] * calls, tokens, clock, contextlib.nullcontext())
            timed = {"us": measured.plugin_us, "other us": measured.baseline_us}
            timed = dict.fromkeys(timed) if isinstance(clock, Untimed) else timed
            errors = {"error": measured.error, "other error": measured.baseline_error}
            yield {**result, **timed, **errors, "wins": measured.wins, "wrong": None}
        except kernel_timing.Mismatch as error:
            yield {**result, "wrong": str(error)}
        except WrongBaseline as error:
            errors = dict(zip(("error", "other error"), error.errors))
            yield {**result, "us": None, "other us": None, **errors, "wrong": None, "unavailable": str(error)}
        except Exception as error:  # noqa: BLE001  any failure of the other kernel makes it unavailable
            yield {**result, "wrong": None, "unavailable": f"{type(error).__name__}: {error}".splitlines()[0]}
            return


class Untimed:
    """Run calls once without timing them, for the emulator."""

    def times(self, calls, sets, replays):
        return {name: [0.0] for name in calls}

    def finish(self):
        pass


class ModelCall(LayerComparison):
    """Adapt a call of a model to `kernel_timing`: arguments are the op's, then the other kernel's."""

    def __init__(self, call, baseline: Baseline, arch: archs.Arch):
        self.call, self.op, self.against, self.arch = call, call.op, baseline, arch
        self.device = "cpu" if launch.cpu_executor() else "cuda"
        self.in_vllm = comparisons.COMPARISONS[self.op]
        self.sampled_rows = self.in_vllm.sampled_rows

    def on_meta(self, tokens: int):
        return self.op.Arguments(*self.call.case(tokens).make("meta", torch.Generator(), self.arch.fp8_dtype))

    def predicted(self, tokens: int) -> dict:
        """Return the plugin's kernel and its time by the cost model, in microseconds."""
        explained = self.op.explain(*self.on_meta(tokens), arch=self.arch, require_code=True)
        cost = next((terms for config, terms in explained.considered if config == explained.config), None)
        kernel = " + ".join(launch.symbol for launch in explained.launches) or explained.source
        return {"kernel": kernel, "predicted us": cost and sum(cost.values())}

    def columns(self, layer):
        return self.in_vllm.columns(self.in_vllm.layers_of(self.on_meta(1))[0])

    def work(self, layer, tokens):
        return self.in_vllm.work(self.in_vllm.layers_of(self.on_meta(tokens))[0], tokens)

    def arguments(self, layer, x, seed):
        generator = torch.Generator(self.device).manual_seed(seed)
        given = self.call.case(len(x)).make(self.device, generator, self.arch.fp8_dtype)
        return given, self.against.prepare(*given)

    def plugin(self, given, prepared):
        return self.op.run_kernels(*given)

    def baseline(self, given, prepared):
        return self.against.call(*prepared)[: len(given[0])]

    def exact(self, arguments, x, rows, columns):
        return self.in_vllm.exact_of(self.op.Arguments(*arguments[0]), rows, columns)


def counted(arch: str | None, name: str) -> Iterator[dict]:
    """Yield the emulator's counters for the kernels of an op's first case."""
    from vllm_rocm_ops.emulator import cases as emulated  # an extra

    op = getattr(ops, name)
    case = next(iter(op.cases()))
    here = archs.named(arch or explain.usual_arch())
    known = here if here.vendor == "amd" else next(iter(archs.ARCHS.values()))
    arguments = case.make("meta", torch.Generator(), known.fp8_dtype)
    for line in emulated.describe(op, arguments, case, str(known)):
        yield {"case": case.name, "arch": str(known), "line": line}


PARTS: dict[str, Callable[..., Iterator[dict]]] = {
    "smoke": smoke,
    "machine": machine,
    "op": op_cases,
    "bandwidth": bandwidth,
    "model": model,
    "survey": survey,
    "emulator": counted,
}
