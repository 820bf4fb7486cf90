"""Compare each op's error with the baseline's, against float64, on activations and weights of trained models.

    python serving_benchmarks/quality/arithmetic.py [--model llama deepseek] [--kind block ...] [--emulate gfx942 gfx950] [--output F.jsonl]

vLLM with the plugin decodes held-out text, one token of each of --requests at a time, and every op's arguments in the last step are
recorded by layer (on the checkpoints of quality.py, which are created if missing). Each call then runs again: on this machine's GPU, or
with --emulate or without a GPU as emulated code objects; and as the baseline. The baseline is vLLM's own kernel on a GPU, if
tools/bench/baselines has one that supports the call, else the op's reference, which rounds where vLLM does. On a CPU vLLM's KV cache is
strided; emulated calls have it contiguous, as on a GPU. bf16 GEMMs on a CPU are vLLM's; `unquantized_gemm` gets their arguments. Rotations
are the plugin's on ROCm only.

An error is the norm of the difference from the exact result (tests/ops/formulas.py, in float64), relative to the exact norm. A result is
correct if each element is within its formula's tolerance, and the error is at most 1.1 times the baseline's. gfx942's e4m3fnuz gets the
bits of e4m3fn, which stand for half the values, with doubled scales, as in vLLM.

Prints a line for each checkpoint and result of an op, with the layer of the largest error ratio. Returns 1 if a result is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import pathlib
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator

import study
import torch
import trained
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from vllm_rocm_ops import ops
from vllm_rocm_ops.core import archs, launch
from vllm_rocm_ops.core.correctness import as_tuple, clone, unwritten_is_nan
from vllm_rocm_ops.core.op import Op
from vllm_rocm_ops.core.quantization import MX_SCALES
from vllm_rocm_ops.core.stats import FALLBACK, reset_stats, stats
from vllm_rocm_ops.tools.bench import baselines

sys.path += [str(study.ROOT / "serving_benchmarks"), str(study.ROOT / "tests" / "ops")]
import formulas
import latency_report
import latency_worker

del sys.path[-2:]
MAX = 1.1  # maximum error, relative to the baseline's
FLOOR = 1e-6  # an error that is always accepted: a few fp32 roundings
MINUS_ZERO = 0x80  # in e4m3fn; it is NaN in e4m3fnuz
CPU_LINEAR = "cpu_linear"  # attribute of vLLM's layers: the bf16 GEMM on a CPU
GENERATED = 3
LONGEST = 128  # tokens of a request with its answer

Call = tuple[str, str, tuple]
"""An op, the layer that calls it, and the arguments."""

# In the capturing process


@contextlib.contextmanager
def recorded(model: torch.nn.Module, rows: int) -> Iterator[list[Call]]:
    """Record the ops' calls in the last pass of a model with `rows` tokens."""
    names, running, calls = {id(module): name for name, module in model.named_modules()}, [], []
    execution, records = Op._execution, False

    def begin(module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        nonlocal records
        records = len(next(v for v in (*args, *kwargs.values()) if isinstance(v, Tensor))) == rows
        calls.clear() if records else None

    def record(name: str, layer: str, args: tuple) -> None:
        if records:
            calls.append((name, layer, tuple(map(clone, args))))

    def kept(self: Op, args: tuple):
        if not self._is_trial:
            record(self.name, running[-1] if running else "", args)
        return execution(self, args)

    def product(layer: str, linear: Callable, *args):
        if args[0].dtype == args[1].dtype == torch.bfloat16:
            record("unquantized_gemm", layer, args)
        return linear(*args)

    def swap(target: object, name: str, value: object) -> None:
        undo.callback(setattr, target, name, getattr(target, name))
        setattr(target, name, value)

    with contextlib.ExitStack() as undo:
        for module in model.modules():
            if linear := getattr(module, CPU_LINEAR, None):
                swap(module, CPU_LINEAR, functools.partial(product, names[id(module)], linear))
        swap(Op, "_execution", kept)
        for handle in (
            register_module_forward_pre_hook(lambda module, args: running.append(names.get(id(module), ""))),
            register_module_forward_hook(lambda module, args, output: running.__delitem__(-1), always_call=True),
            model.register_forward_pre_hook(begin, with_kwargs=True),
        ):
            undo.callback(handle.remove)
        yield calls


def capture(job: dict) -> list[Call]:
    """Return the calls of a decode step."""
    from vllm import SamplingParams
    from vllm.model_executor.layers import utils
    from vllm.platforms import current_platform

    requests = job["requests"]
    if current_platform.is_cpu():
        dispatch = utils.dispatch_cpu_unquantized_gemm
        utils.dispatch_cpu_unquantized_gemm = lambda layer, remove_weight: dispatch(layer, remove_weight=False)
    llm = study.engine(
        job,
        max_model_len=LONGEST,
        max_num_batched_tokens=LONGEST * requests,
        max_num_seqs=requests,
        num_gpu_blocks_override=16 * requests,  # small, as each call copies the whole cache
        enforce_eager=True,  # hooks do not run in graphs
        async_scheduling=False,
    )
    text = study.sequences(job, requests * trained.WINDOW)
    prompts = [{"prompt_token_ids": row[: 40 + 9 * (place % 8)]} for place, row in enumerate(text)]
    sampling = SamplingParams(temperature=0, max_tokens=GENERATED, ignore_eos=True, detokenize=False)
    model = llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()
    with recorded(model, requests) as calls:
        llm.generate(prompts, sampling, use_tqdm=False)
    return calls


def worker(path: pathlib.Path) -> None:
    """Write the calls of each job."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    for job in json.loads(path.read_text()):
        torch.save(capture(job), job["calls"])
        cleanup_dist_env_and_memory()


# In the process that the user started


def captured(jobs: list[dict], folder: pathlib.Path) -> None:
    """Write the calls of each job from a vLLM process. Raises RuntimeError."""
    variables = {"VLLM_ROCM_OPS_ATTENTION": "1", "VLLM_ROCM_OPS_ON_CPU": "1"}
    status, log = study.run_worker(__file__, "with", jobs, folder / "jobs.json", **variables)
    if status:
        raise RuntimeError(f"vLLM exited with status {status}:\n{log}")


def as_on_a_gpu(the_op: Op, given: tuple) -> tuple:
    """Return a call's arguments with contiguous caches."""
    caches = ("key_cache", "value_cache")
    return tuple(v.contiguous() if name in caches else v for name, v in zip(the_op.Arguments._fields, given))


def in_type_of(fp8_dtype: torch.dtype, the_op: Op, given: tuple) -> tuple:
    """Return a call's arguments in a GPU's FP8 dtype.

    e4m3fnuz values are half as large, so scales double. MXFP8 is e4m3fn everywhere.
    """
    types = [value.dtype if isinstance(value, Tensor) else value for value in given]
    is_mx = any(dtype in types for dtype in MX_SCALES)
    if fp8_dtype == torch.float8_e4m3fn or torch.float8_e4m3fn not in types or is_mx:
        return given

    def converted(name: str, value):
        if not isinstance(value, Tensor):
            return fp8_dtype if isinstance(value, torch.dtype) and value == torch.float8_e4m3fn else value
        if value.dtype == torch.float8_e4m3fn:
            bits = clone(value).view(torch.uint8)
            return bits.masked_fill_(bits == MINUS_ZERO, 0).view(fp8_dtype)
        doubles = "scale" in name and name != "scale_ub" and value.dtype == torch.float32
        return value * 2 if doubles else value

    return tuple(converted(name, value) for name, value in zip(the_op.Arguments._fields, given))


def of_vllm(the_op: Op, a) -> tuple | None:
    """Return the results of vLLM's own kernel, or None if none supports the call. It updates the op's mutated arguments."""
    baseline = baselines.baselines(the_op).get("vllm")
    if baseline is None:
        return None
    try:
        prepared = baseline.prepare(*map(clone_here, a))
        outputs = baseline.call(*prepared)
    except Exception:  # noqa: BLE001  any failure means that it does not support the call
        return None
    if outputs is None:
        outputs, changed = prepared
        outputs = changed.input if the_op.name == "fused_add_rms_norm" else outputs
        for name in the_op.mutates:
            if getattr(a, name) is not None:
                getattr(a, name).copy_(getattr(changed, name))
    shapes = as_tuple(the_op.allocate(a))
    return tuple(
        output[: len(shape)] for output, shape in zip(as_tuple(outputs), shapes, strict=True)
    )  # without padding


def baseline(the_op: Op, a) -> tuple[tuple, str]:
    """Return the baseline's results, of vLLM's kernel on a GPU, else of the reference, and which. Both update the mutated arguments."""
    is_on_gpu = next(value for value in a if isinstance(value, Tensor)).is_cuda
    outputs = of_vllm(the_op, a) if is_on_gpu else None
    return (as_tuple(the_op.reference(*a)), "reference") if outputs is None else (outputs, "vllm")


def clone_here(value):
    """Clone a tensor on its device."""
    return clone(value, value.device) if isinstance(value, Tensor) else value


def error(output: Tensor, wanted: Tensor, allowed: Tensor) -> tuple[float, float]:
    """Return the relative error norm, and the maximum of an element's error over its tolerance."""
    known = wanted.isfinite()
    off, size = (output - wanted)[known], wanted[known]
    share = (off.abs() / allowed.expand(wanted.shape)[known]).where(off != 0, 0.0)
    return (off.norm() / size.norm().clamp(min=1e-300)).item(), share.max().item() if len(share) else 0.0


def compared(the_op: Op, given: tuple, device: str) -> Iterator[dict]:
    """Yield the plugin's and the baseline's error for each result of a call."""
    before = the_op.Arguments(*map(clone, given))
    plugins, baselines = (the_op.Arguments(*(clone(value, device) for value in given)) for _ in range(2))
    reset_stats()
    with unwritten_is_nan():
        outputs = as_tuple(the_op(*plugins))
    [ran] = stats()[the_op.name]
    if ran.startswith(FALLBACK):
        yield {"fallback": ran.removeprefix(FALLBACK)}
        return
    expected, which = baseline(the_op, baselines)
    formula = functools.partial(formulas.FORMULAS[the_op.name], before)
    sides = (
        formula(the_op.Arguments(*on_cpu(a)), on_cpu(made)) for a, made in ((plugins, outputs), (baselines, expected))
    )
    for (name, *of_plugin), (_, *of_baseline) in zip(*sides, strict=True):
        (plugin, share), (stock, _) = error(*of_plugin), error(*of_baseline)
        errors = {"ours": plugin, "stock": stock, "beside": (plugin + FLOOR) / (stock + FLOOR), "of_allowed": share}
        yield {"result": name} | {what: float(f"{value:.4g}") for what, value in errors.items()} | {"stock_is": which}


def on_cpu(values) -> tuple:
    """Return the values with tensors on the CPU."""
    return tuple(value.cpu() if isinstance(value, Tensor) else value for value in values)


def machines(emulate: list[str]) -> Iterator[tuple[str, str, archs.Arch, Callable]]:
    """Yield where the calls run: a name, the tensors' device, the architecture, and the context in which kernels run."""
    if torch.cuda.is_available() and not emulate:
        yield torch.cuda.get_device_name(0), "cuda", archs.of_device(0), contextlib.nullcontext
        return
    from vllm_rocm_ops.emulator import Emulator

    for name in emulate or [arch.name for arch in archs.ARCHS.values() if arch.vendor == "amd"]:
        emulator = Emulator(name)
        yield f"{name}, emulated", "cpu", emulator.arch, functools.partial(launch.executor, emulator)


def judged(calls: list[Call], device: str, arch: archs.Arch, within: Callable) -> dict:
    """Return the results of all calls on a machine, the fallbacks, and the faults under "wrong"."""
    results, fallbacks, wrong = [], {}, []
    for name, layer, given in calls:
        the_op = getattr(ops, name)
        if device == "cpu":
            given = in_type_of(arch.fp8_dtype, the_op, as_on_a_gpu(the_op, given))
        with within():
            for result in compared(the_op, given, device):
                if "fallback" in result:
                    fallbacks[name] = result["fallback"]
                    continue
                faults = faults_of(result)
                results.append({"op": name, "layer": layer, **result, "wrong": bool(faults)})
                wrong += [f"{layer}: {name}'s {result['result']} {fault}" for fault in faults]
    return {"results": results, "fallbacks": fallbacks, "wrong": wrong + ["no kernel ran"] * (not results)}


def faults_of(result: dict) -> list[str]:
    """Return the faults of a result."""
    faults = []
    if not result["of_allowed"] <= 1:
        faults.append(f"is off by {result['of_allowed']:.3g} times its tolerance")
    if not result["ours"] <= MAX * result["stock"] + FLOOR:
        faults.append(f"has error {result['ours']:.3g}, above {MAX} times the baseline's {result['stock']:.3g}")
    return faults


def text(line: dict) -> Iterator[str]:
    """Format a line of results."""
    yield f"{line['case']}, {line['machine']}:"
    groups: dict[tuple[str, str], list[dict]] = {}
    for call in line["results"]:
        groups.setdefault((call["op"], call["result"]), []).append(call)
    for (op, result), calls in groups.items():
        worst = max(calls, key=lambda call: call["beside"])
        errors = f"{worst['ours']:.3e} versus {worst['stock']:.3e} of {worst['stock_is']}"
        yield f"  {op:40} {result:12} {len(calls):3} calls, worst {worst['beside']:.3f}x: {errors} in {worst['layer']}"
    yield from (f"  {op}: no kernel: {why}" for op, why in line["fallbacks"].items())
    yield from (f"  FAILED: {why}" for why in line["wrong"])


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse and check the options."""
    parser = study.parser(__doc__, "; {} is replaced by the architecture")
    add, archs_default = parser.add_argument, "architectures to emulate (default without a GPU: gfx942 gfx950)"
    add("--requests", type=int, default=8, help="number of concurrent requests (default: %(default)s)")
    add("--emulate", nargs="+", default=[], metavar="ARCH", help=archs_default)
    arguments = parser.parse_args(argv)
    if arguments.requests < 1:
        parser.error(f"--requests must be at least 1, got {arguments.requests}")
    return arguments


def main(argv: list[str] | None = None) -> int:
    """Run the comparison. Returns 1 if a result is wrong."""
    arguments, wrong = parse(argv), False
    if arguments.worker:
        worker(arguments.worker)
        return 0
    warnings.filterwarnings("ignore", ".*runs without its kernels")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        jobs = study.jobs(arguments, "requests")
        captured([job | {"calls": str(folder / f"{case}.pt")} for case, job in jobs.items()], folder)
        for case in jobs:
            calls = torch.load(folder / f"{case}.pt", weights_only=False)
            for name, device, arch, within in machines(arguments.emulate):
                if device == "cuda":
                    formulas.OF_TERMS = max(formulas.OF_TERMS, arch.sum_rounding)
                line = {"op": "arithmetic", "case": case.replace("-", " "), "machine": name}
                line |= {"requests": arguments.requests}
                line |= {"gpu": name} if device == "cuda" else {}
                line |= judged(calls, device, arch, within) | {"versions": latency_worker.versions()}
                print(*text(line), sep="\n", flush=True)
                wrong |= bool(line["wrong"])
                if arguments.output:
                    path = pathlib.Path(str(arguments.output).format(arch.name))
                    latency_report.append(path, line | {"commit": arguments.commit})
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
