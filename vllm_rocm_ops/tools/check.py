"""`vllm-rocm-ops check`: everything that can be found out about the ops on one machine, in one file to send.

Each part runs in a process of its own, within a time: one that hangs or faults the GPU is written down, with the end of what it
said, and the next one runs. The process that starts them touches no GPU. The parts:

    smoke ...    stages from loading the driver to the smallest case of each op (smoke.py); after one that fails, nothing else runs
    machine      what `doctor` finds
    op ...       each op's cases, checked and timed as `bench` does
    bandwidth    of the GPU's memory
    model ...    linear layers and experts of a model's rank, as vLLM's workers would measure them (vllm/kernel_timing.py), beside
                 each of PyTorch's, vLLM's and AITER's kernels that is installed, with what our cost model predicts
    emulator ... what the emulator counts for an op's first case, where its extra is installed

With `--emulate` the emulator stands in for a GPU: some small cases of each op, tiny models, and no times.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import faulthandler
import fnmatch
import importlib.util
import json
import math
import multiprocessing
import os
import re
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from vllm_rocm_ops import ops
from vllm_rocm_ops.core import arch as archs
from vllm_rocm_ops.core import launch, tables
from vllm_rocm_ops.core import op as op_module
from vllm_rocm_ops.core.clock import GpuClock, tensor_bytes
from vllm_rocm_ops.models import config as model_config
from vllm_rocm_ops.models import layers as model_layers
from vllm_rocm_ops.timing import frozen
from vllm_rocm_ops.tools import doctor, explain
from vllm_rocm_ops.tools import smoke as smoke_stages
from vllm_rocm_ops.tools.bench import run as bench
from vllm_rocm_ops.tools.bench.peers import Peer, peers
from vllm_rocm_ops.tools.bench.shapes import Shape
from vllm_rocm_ops.vllm.experts import base as experts
from vllm_rocm_ops.vllm.linear import block_scaled_linear, mxfp8_linear, scaled_linear, unquantized_linear
from vllm_rocm_ops.vllm.selection import kernel_selection, kernel_timing

MODELS = {"llama-3.1-405b-fp8": 8, "deepseek-v3": 8}  # with so many ranks
TINY = {"tiny-llama-fp8": 1, "tiny-deepseek-v3-fp8": 1}
TOKENS = (1, 8, 16, 32, 64, 128, 256, 1024, 4096)
TINY_TOKENS = (1, 17)
SECONDS = {"smoke": 60, "machine": 60, "op": 60, "bandwidth": 60, "model": 90, "emulator": 60}  # of a part, at most
MINUTES = 5.0
LEAST_SECONDS = 15.0  # that must be left for a part to be begun: one of an op takes 5 on an H200
EMULATED_SECONDS = 0.5  # of processor time for an op's cases
SOFT = 0.8  # of these: then a part stops by itself, between two pieces
GOOD = ("done", "stopped", "left out")  # ways to end
GRACE_SECONDS = 10.0  # for a process that was killed
SAID = 16000  # characters of a part's output that are kept, from its start and its end
OPS = ("scaled_mm", "block_scaled_mm", "mxfp8_scaled_mm", "unquantized_gemm", "fused_experts")


# The parts, each a function that yields what it finds, piece by piece


def smoke(arch: str | None, stage: str, *arguments) -> Iterator[dict]:
    """A stage of smoke.py."""
    yield from smoke_stages.STAGES[stage](arch, *arguments)


def machine(arch: str | None) -> Iterator[dict]:
    """What `doctor` finds."""
    yield doctor.find()


def op_cases(arch: str | None, name: str) -> Iterator[dict]:
    """An op's cases. In the emulator the smallest, for some time."""
    op = getattr(ops, name)
    if arch is None:
        clock = GpuClock()
        with torch.inference_mode():
            for [line] in bench.run([Shape(op, case) for case in op.cases()], clock):
                yield {
                    "case": line.case,
                    "kernel": line.kernel,
                    "wrong": line.wrong,
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


def bandwidth(arch: str | None) -> Iterator[dict]:
    """Of the GPU's memory."""
    for line in bench.hbm(GpuClock(), ops.unquantized_gemm):
        yield {"line": line}


def model(arch: str | None, name: str, tp: int) -> Iterator[dict]:
    """Our kernels beside others, for the linear layers and experts of a model's rank."""
    known = archs.named(arch) if arch else GpuClock().arch
    clock = Untimed() if arch else kernel_timing.GraphClock()
    product = None if arch else frozen.product_of(torch.cuda.get_device_name(0))
    with torch.inference_mode():
        for call in model_layers.calls(model_config.read(name), tp):
            if call.op.name not in OPS:
                continue
            others = {"PyTorch's reference": Peer(call.op.reference)} if arch else peers(call.op)
            for other, peer in others.items():
                if "tensorwise" not in other:  # another product
                    yield from beside(call, other, peer, known, clock, TINY_TOKENS if arch else TOKENS, product)


def beside(
    call, other: str, peer: Peer, arch: archs.Arch, clock, sizes: tuple[int, ...], product: str | None = None
) -> Iterator[dict]:
    """Yield our kernels beside another for one call of a model, by tokens; on a product that has frozen predictions, beside these too."""
    kernels = ModelCall(call, peer, arch)
    layer = torch.empty(0, device=kernels.device), call.dtype  # weights are made for each size
    choice = kernel_selection.Choice(kernels, other, layer)
    for tokens in sizes:
        found = {
            "layer": call.layer,
            "op": call.op.name,
            "beside": other,
            "tokens": tokens,
            **kernels.predicted(tokens),
            "frozen": frozen.find(product, call, tokens, arch),
        }
        calls = kernel_timing.estimate(kernels, layer, max(call.count, 1), tokens, arch.bandwidth_gb_s)[0]
        try:
            measured = kernel_timing.measure_pair(choice, [layer] * calls, tokens, clock, contextlib.nullcontext())
            timed = {"us": measured.ours, "other us": measured.native}
            timed = dict.fromkeys(timed) if isinstance(clock, Untimed) else timed
            errors = {"error": measured.error, "other error": measured.native_error}
            yield {**found, **timed, **errors, "wins": measured.wins, "wrong": None}
        except kernel_timing.Mismatch as error:
            yield {**found, "wrong": str(error)}
        except Exception as error:  # noqa: BLE001  whatever the other kernel says, it is not available
            yield {**found, "wrong": None, "unavailable": f"{type(error).__name__}: {error}".splitlines()[0]}
            return


class Untimed:
    """Runs calls once and gives no times, for the emulator."""

    def times(self, calls, sets):
        return {name: [0.0] for name in calls}

    def finish(self):
        pass


class ModelCall:
    """A call of a model as `kernel_timing` measures it: arguments are an op's, then those of the other kernel."""

    def __init__(self, call, peer: Peer, arch: archs.Arch):
        self.call, self.op, self.peer, self.arch = call, call.op, peer, arch
        self.device = "cpu" if launch.cpu_executor() else "cuda"
        self.sampled_rows = experts.KERNELS.sampled_rows if self.op.name == "fused_experts" else 8

    def on_meta(self, tokens: int):
        return self.op.Arguments(*self.call.case(tokens).make("meta", torch.Generator(), self.arch.fp8_dtype))

    def predicted(self, tokens: int) -> dict:
        """Our kernel, and the microseconds of our cost model for it."""
        explained = self.op.explain(*self.on_meta(tokens), arch=self.arch, require_code=True)
        cost = next((terms for config, terms in explained.considered if config == explained.config), None)
        kernel = " + ".join(one.symbol for one in explained.launches) or explained.source
        return {"kernel": kernel, "predicted us": cost and sum(cost.values())}

    def most_tokens(self):
        return 0

    def describe(self, layer):
        return self.call.layer

    def columns(self, layer):
        a = self.on_meta(1)
        return a[0].shape[-1], self.op.allocate(a).shape[-1]

    def work(self, layer, tokens):
        a = self.on_meta(tokens)
        if self.op.name == "fused_experts":
            among = len(a.w1) if a.expert_map is None else len(a.expert_map)
            return tensor_bytes(*a), 2.0 * a.topk_ids.numel() * len(a.w1) / among * (a.w1[0].numel() + a.w2[0].numel())
        k, n = self.columns(layer)
        return tensor_bytes(*a), 2.0 * tokens * n * k

    def arguments(self, layer, x, seed):
        generator = torch.Generator(self.device).manual_seed(seed)
        given = self.call.case(len(x)).make(self.device, generator, self.arch.fp8_dtype)
        return given, self.peer.prepare(*given)

    def ours(self, given, prepared):
        return self.op.run_kernels(*given)

    def theirs(self, given, prepared):
        return self.peer.call(*prepared)[: len(given[0])]

    def exact(self, arguments, x, rows, columns):
        a = self.op.Arguments(*arguments[0])
        if self.op.name == "scaled_mm":
            given = a.a, a.b, a.scale_a, a.scale_b, a.bias, None, False, None
            return scaled_linear.KERNELS.exact(given, x, rows, columns)
        if self.op.name == "block_scaled_mm":
            return block_scaled_linear.KERNELS.exact(a, x, rows, columns)
        if self.op.name == "unquantized_gemm":
            return unquantized_linear.KERNELS.exact(tuple(a), a[0], rows, columns)
        if self.op.name == "mxfp8_scaled_mm":
            _, weight, scale_a, scale_b, *_ = a
            tokens = a[0].float() * torch.exp2(scale_a.view(torch.uint8).float() - 127).repeat_interleave(32, 1)
            return mxfp8_linear.KERNELS.exact((None, None, weight, scale_b, None), tokens, rows, columns)
        scales = argparse.Namespace(
            w1_scale=a.w1_scale, w2_scale=a.w2_scale, a1_scale=None, a2_scale=None, shuffled=a.shuffled
        )
        layer = a.w1, a.w2, None, scales, None, None, a.expert_map, a.apply_router_weight_on_input, None, None
        return experts.KERNELS.exact((layer, None, a.topk_weights, a.topk_ids), a.hidden, rows, columns)


def counted(arch: str | None, name: str) -> Iterator[dict]:
    """What the emulator counts for the kernels of an op's first case."""
    from vllm_rocm_ops.emulator import cases as emulated  # an extra

    op = getattr(ops, name)
    case = next(iter(op.cases()))
    here = archs.named(arch or explain.usual_arch())
    known = here if here.code_suffix == ".co" else next(iter(archs.ARCHS.values()))
    arguments = case.make("meta", torch.Generator(), known.fp8_dtype)
    for line in emulated.describe(op, arguments, case, str(known)):
        yield {"case": case.name, "arch": str(known), "line": line}


PARTS: dict[str, Callable[..., Iterator[dict]]] = {
    "smoke": smoke,
    "machine": machine,
    "op": op_cases,
    "bandwidth": bandwidth,
    "model": model,
    "emulator": counted,
}


def planned(arch: str | None, pattern: str) -> list[tuple]:
    """The parts to run: a name, and arguments."""
    names = [op.name for op in op_module.registered() if fnmatch.fnmatchcase(op.name, pattern)]
    if not names:
        raise ValueError(f"check: no op matches --op {pattern}")
    stages = [("smoke", stage, *[pattern] * (stage == "ops")) for stage in smoke_stages.STAGES]
    stages = [stage for stage in stages if not arch or stage[1] in smoke_stages.EMULATED]
    found: list[tuple] = [*stages[:1], ("machine",), *stages[1:], *(("op", name) for name in names)]
    if pattern == "*":
        found += [] if arch else [("bandwidth",)]
        found += [("model", name, tp) for name, tp in (TINY if arch else MODELS).items()]
    if importlib.util.find_spec("tinygrad") and not arch:
        found += [("emulator", name) for name in names]
    return found


# Processes


def work(part: Callable, arguments: tuple, arch: str | None, seconds: float, results: str, said: str) -> None:
    """What the process of a part does: a line of JSON for each piece, as soon as it is found, for so many seconds."""
    start = time.monotonic()
    with open(said, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.enable(2)
    with open(results, "w") as file:

        def write(kind: str, found) -> None:
            file.write(json.dumps({kind: found}, default=str) + "\n")
            file.flush()

        try:
            device = contextlib.nullcontext()
            if arch:
                from vllm_rocm_ops.emulator import cases as emulated  # an extra

                torch.set_num_threads(1)
                device = launch.executor(emulated.emulator_of(arch))
            with device:
                for piece in part(arch, *arguments):
                    write("found", piece)
                    if time.monotonic() - start > seconds:
                        write("stopped", True)
                        break
        except Exception as error:  # noqa: BLE001  it is a finding
            traceback.print_exc()
            write("error", f"{type(error).__name__}: {error}".splitlines()[0])
        write("end", True)


def supervise(context, part: Callable, arguments: tuple, arch: str | None, seconds: float) -> dict:
    """Run a part in a process of its own. Says how it ended: "done", "stopped" in time, "error: why", "hung" after so many
    seconds, or "died"."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        results, said = os.path.join(folder, "results"), os.path.join(folder, "said")
        process = context.Process(target=work, args=(part, arguments, arch, SOFT * seconds, results, said))
        process.start()
        process.join(seconds)
        hung = process.is_alive()
        if hung:
            process.kill()
            process.join(GRACE_SECONDS)  # a process that waits for a GPU may stay for ever
        found = _lines(results)
        pieces = [line["found"] for line in found if "found" in line]
        errors = [line["error"] for line in found if "error" in line]
        whole = "stopped" if any("stopped" in line for line in found) else "done"
        ended = "error: " + errors[0] if errors else whole
        if hung:
            ended = f"hung: killed after {seconds:.0f} s"
        elif not any("end" in line for line in found):
            ended = f"died: exit code {process.exitcode}"
        text = Path(said).read_text(errors="replace") if os.path.exists(said) else ""
        text = text if len(text) <= SAID else f"{text[: SAID // 2]}\n[...]\n{text[-SAID // 2 :]}"
    took = round(time.monotonic() - start, 1)
    return {"ended": ended, "seconds": took, "found": pieces, "said": "" if ended in GOOD else text}


def _lines(path: str) -> list[dict]:
    """Whole lines of a file."""
    found = []
    for line in Path(path).read_text().splitlines() if os.path.exists(path) else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found


# The command


def add_command(commands) -> None:
    """Adds the command to a parser's commands."""
    meaning = "check every op on this GPU, benchmark it against other kernels, and write one file to send; five minutes"
    command = commands.add_parser("check", help=meaning)
    command.add_argument(
        "--output", type=Path, metavar="FILE", help="default: vllm-rocm-ops-check-<GPU>-<time>.json here"
    )
    command.add_argument("--op", default="*", metavar="PATTERN", help="ops of such names only, and no models")
    command.add_argument(
        "--minutes", type=float, default=MINUTES, help=f"default: {MINUTES:.0f}; parts beyond are left out"
    )
    meaning = "the emulator of this architecture stands in for a GPU; needs the extra [emulator]"
    command.add_argument("--emulate", metavar="ARCH", help=meaning)


def wrong_of(part: dict) -> list[str]:
    """What is wrong in a part."""
    wrong = [
        f"{piece.get('case') or '{layer} {tokens} tokens beside {beside}'.format(**piece)}: {piece['wrong']}"
        for piece in part["found"]
        if piece.get("wrong")
    ]
    begun = part["found"][-1]["case"] if part["found"] and part["found"][-1].get("begun") else ""
    return wrong + ([] if part["ended"] in GOOD else [part["ended"] + f", in {begun}" * bool(begun)])


def line_of(part: dict) -> str:
    """One line about a part."""
    pieces, wrong = part["found"], wrong_of(part)
    kernels = {piece["kernel"] for piece in pieces if "kernel" in piece and not piece["kernel"].startswith("fallback")}
    what = f"{len(pieces)} results" + (f", {len(kernels)} kernels" if kernels else "")
    wins = [piece["us"] < piece["other us"] for piece in pieces if piece.get("us") and piece.get("other us")]
    what += f", ours the faster in {sum(wins)} of {len(wins)}" if wins else ""
    fine = {"done": "right", "stopped": "right, stopped for lack of time"}.get(part["ended"], part["ended"])
    verdict = f"WRONG: {wrong[0]}" if wrong else fine
    return f"{part['part']:44} {part['seconds']:6.1f} s  {what:40}  {verdict}"


def file_name(found: list[dict], arch: str | None) -> Path:
    """A name for the file: what ran, and when."""
    gpus = [gpu["name"] for part in found for piece in part["found"] for gpu in piece.get("gpus", ())]
    name = re.sub(r"\W+", "-", arch or (gpus[0] if gpus else "none"))
    return Path(f"vllm-rocm-ops-check-{name}-{datetime.datetime.now():%Y%m%d-%H%M%S}.json")


def run(arguments: argparse.Namespace) -> int:
    """Runs all parts and writes the file after each. 1 if something is wrong, or did not end."""
    if arguments.emulate:
        archs.named(arguments.emulate)
    if not 0 < arguments.minutes < math.inf:
        raise ValueError(f"check: --minutes must be positive, got {arguments.minutes}")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["vllm_rocm_ops.tools.check"])
    parts, end, path, failed = [], time.monotonic() + 60 * arguments.minutes, arguments.output, ""

    def write(*part: dict) -> None:
        found = {"command": "check", "emulated": arguments.emulate, "parts": [*parts, *part]}
        tables.replace(path, json.dumps(found, indent=1))

    for kind, *rest in planned(arguments.emulate, arguments.op):
        part = {"part": " ".join(map(str, (kind, *rest))), "ended": "left out", "seconds": 0.0, "found": [], "said": ""}
        left = end - time.monotonic()
        if failed:
            part["said"] = f"{failed} failed"
        elif left > LEAST_SECONDS:
            if path is not None:
                write(part | {"ended": "begun"})  # what a machine that goes down leaves
            part |= supervise(context, PARTS[kind], tuple(rest), arguments.emulate, min(SECONDS[kind], left))
        parts.append(part)
        print(line_of(part), flush=True)
        if path is None:
            path = file_name(parts, arguments.emulate)
        write()
        if not arguments.emulate and any(piece.get("gpus") == [] for piece in part["found"]):
            raise RuntimeError(
                f"there is no GPU; --emulate {next(iter(archs.ARCHS))} has the emulator stand in for one"
            )
        if kind == "smoke" and wrong_of(part):
            failed = part["part"]
    for line in frozen.beside([piece for part in parts for piece in part["found"]]):
        print(line)
    bad = sum(bool(wrong_of(part)) for part in parts)
    left_out = sum(part["ended"] == "left out" for part in parts)
    text = f"{len(parts)} parts, {f'{bad} with something wrong' if bad else 'all right'}"
    why = f"as {failed} failed" if failed else "for lack of time"
    print(text + (f", {left_out} left out {why}" if left_out else ""))
    if not (arguments.emulate or any(part["part"].startswith("emulator") for part in parts)):
        print("without the emulator's counts: they need the extra vllm-rocm-ops[emulator]")
    print(f"please send {path.resolve()}")
    return int(bad > 0)
