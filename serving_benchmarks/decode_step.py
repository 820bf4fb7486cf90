"""Time a whole decode step of Llama-3.1-405B-FP8 and DeepSeek-V3, one rank's shard with random weights, on this GPU.

    python serving_benchmarks/decode_step.py [--model NAME ...] [--tp N] [--ep N] [--batch M ...] [--context N]
        [--layers N] [--ours KINDS | --stock KINDS] [--vllm-library PATH ...] [--vllm-path DIR]
    torchrun --nproc-per-node N serving_benchmarks/decode_step.py --tp N        # with real collectives

Two paths of the same step with the same weights: `stock`, what vLLM's engine runs by default, compiled (stock.py), and
`ours`, which takes our ops for the kinds that `--ours` names, or for all but those of `--stock`. Each is one captured
graph of all layers, every layer with weights of its own; graphs are replayed in turn, caches cold at the start of a step,
and the median counts. Experts are left out of both paths where there is no vLLM to compute them.

The time of a kind is that of a graph of its calls alone, of all layers, on the inputs that they have in the step. Alone
it finds its inputs less often in a cache and its neighbours do not overlap with it, so the kinds do not add up to the
step exactly; leaving a kind out of the step would change what its neighbours find as well, and gives differences of
large numbers.

Attention goes over a bf16 cache of `--context` tokens, which all sequences have (attention.py). Its kinds are `rotation`, which also
writes the cache, `attention` itself and the products that DeepSeek has `absorbed`. `--stock rotation,attention,absorbed` leaves it to
vLLM's kernels on both sides. Without vLLM stock's attention is plain PyTorch, and the result says so.

The same on both sides, so that nothing is compared: quantisation that no norm or activation does; collectives, which only
torchrun starts, all ranks with the same weights; the rest. A copy stands for the
embedding, a rank's own part of the vocabulary for all of it. Tokens go to random experts, all as likely, whatever the
router chose. With `--ep` of more than `--tp` (attention for the rank's own sequences, experts for those of all ranks),
a rank alone has random tokens in place of the others'. Per-tensor scales are taken as known beforehand.

Before a batch is timed, each layer of both paths is compared with float32 (decode_exact.py): ours may be off by at most 1.1 times
as much as stock as a geometric mean of layers, else the benchmark ends. Ranks that exchange values are not compared.

The floor is the time to read all weights, of the experts those that are hit, and the cache once, at the bandwidth of a
copy.
On the CPU (`--device cpu`) both paths run the ops' references once, without a graph, and nothing is timed.
"""

from __future__ import annotations

import importlib
import json
import os
import statistics

import decode_exact
import stock_attention
import torch
from attention import family
from decode_paths import Call, Inputs, Step
from decode_rank import Rank
from options import open_results, parse
from stock import COMPILED, Stock
from torch import Tensor

from vllm_rocm_ops import model_config, ops
from vllm_rocm_ops.bench.clock import capture, measure
from vllm_rocm_ops.stats import reset_stats, stats

MODELS = ("llama-3.1-405b-fp8", "deepseek-v3")
OF_ATTENTION = ("rotation", "attention", "absorbed")
REPLACEABLE = ("norm", "linear", "activation", "routing", "moe", "lm_head", *OF_ATTENTION)
KINDS = (*REPLACEABLE, "quantization", "collectives", "rest")
PER_TOKEN = {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"]}  # as Meta's checkpoint


def launches(step: Step) -> int | None:
    """How many kernels and copies a step starts on the GPU, counted by the profiler; None where that sees none."""
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            step()
            torch.cuda.synchronize()
    except RuntimeError:
        return None
    on_gpu = (event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA)
    return sum(not event.is_user_annotation for event in on_gpu) or None  # compiled functions annotate what they start


def check(logits: dict[str, Tensor]) -> None:
    """Raises RuntimeError for a path with values that are not finite."""
    for path, values in logits.items():
        if not values.isfinite().all():
            raise RuntimeError(f"{path} has logits that are not finite")


def said(errors: dict[str, list[float]]) -> str:
    """What layers are off by, as text."""
    found = ", ".join(f"{path} {statistics.median(of):.2%} to {max(of):.2%}" for path, of in errors.items())
    return f"; layers off float32's by {found}, as median and at most" if found else ""


def run_kind(calls: list[Call], kind: str) -> None:
    """The calls of a kind, in order."""
    for call in calls:
        if call.kind == kind:
            call()


def time_step(steps: dict[str, Step]) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Microseconds of each path, and of each kind of its calls alone. The paths have been taken down."""
    graphs = {}
    for path, step in steps.items():
        graphs[path, None] = capture(step, [()])
        for kind in KINDS:
            if any(call.kind == kind for call in step.taken):
                graphs[path, kind] = capture(run_kind, [(step.taken, kind)])
    times = measure(graphs, 1)
    alone = {path: {kind: us for (of, kind), us in times.items() if of == path and kind} for path in steps}
    return {path: times[path, None] for path in steps}, alone


def main() -> None:
    def kinds(text: str) -> frozenset[str]:
        named = frozenset(text.split(","))
        if not named <= set(REPLACEABLE):
            raise ValueError
        return named

    def add_arguments(parser) -> None:
        parser.add_argument("--model", nargs="*", default=MODELS, help="shipped names or paths of config.json")
        parser.add_argument("--tp", type=int, default=8)
        parser.add_argument(
            "--ep", type=int, help="ranks of whole experts, 0 for those of --tp; without, experts are cut"
        )
        parser.add_argument(
            "--batch", nargs="*", type=int, default=[1, 8, 32, 64], help="sequences of the rank's group"
        )
        parser.add_argument("--context", type=int, default=1024, help="tokens of a sequence; default: %(default)s")
        parser.add_argument("--layers", type=int, help="the first so many, and what follows all layers")
        parser.add_argument(
            "--quantization",
            choices=("token", "config"),
            default="token",
            help="of a model with scales per tensor: per token and channel as Meta's, or as its config.json has it",
        )
        which = parser.add_mutually_exclusive_group()
        which.add_argument(
            "--ours", type=kinds, help=f"kinds that ours computes: {','.join(REPLACEABLE)}; default: all"
        )
        which.add_argument("--stock", type=kinds, help="kinds that ours leaves to stock")
        parser.add_argument(
            "--fold-shared", action="store_true", help="ours has the shared expert among the routed ones"
        )
        parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")

    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1 and torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    options, arch = parse(__doc__, add_arguments)
    if ranks > 1 and ranks not in (options.tp, options.ep if options.tp == 1 else None):
        raise SystemExit(f"{ranks} processes must be those of --tp, or of --ep with --tp 1")
    if ranks > 1:
        # torch.compile imports it. Imported once there is a group, the defaults of its functions keep that and its threads.
        importlib.import_module("torch.distributed.nn.functional")
        torch.distributed.init_process_group("nccl" if options.device == "cuda" else "gloo")
    if options.ours is None:
        options.ours = frozenset(REPLACEABLE) - (options.stock or frozenset())
    with torch.inference_mode():
        for model in options.model:
            run_model(model, options, arch, ranks)
    if ranks > 1:
        torch.distributed.destroy_process_group()


def build(model: str, options, fp8_dtype: torch.dtype) -> Rank:
    """One rank's layers, as the options divide and shorten the model. Raises SystemExit."""
    try:
        config = model_config.read(model)
        if options.quantization == "token" and "LlamaForCausalLM" in config["architectures"]:
            config |= {"quantization_config": PER_TOKEN} if "quantization_config" in config else {}
        if options.layers:
            config |= {"num_hidden_layers": options.layers}
        rank = Rank(config, options.tp, options.ep, options.device, fp8_dtype)
        if options.fold_shared:
            rank.fold_shared()
    except ValueError as error:
        raise SystemExit(f"decode_step.py: {error}") from None
    return rank


def name_of(model: str, options, ranks: int) -> str:
    """What is timed, but for the batch size: what differs from the defaults is said."""
    parts = {
        f"{model} tp{options.tp}" + f" ep{options.ep}" * (options.ep is not None): True,
        f"context {options.context}": True,
        f"{options.layers} layers": options.layers,
        "quantised as its config.json": options.quantization == "config",
        f"ours {','.join(sorted(options.ours))}": options.ours != frozenset(REPLACEABLE),
        "shared expert folded": options.fold_shared,
        f"{ranks} ranks": ranks > 1,
    }
    return ", ".join(part for part, is_said in parts.items() if is_said)


def run_model(model: str, options, arch, ranks: int) -> None:
    """Appends a line of results per batch; without an arch, where nothing is timed, prints one."""
    torch.cuda.empty_cache()  # of what was before, as there is little room
    rank = build(model, options, arch.fp8_dtype if arch else torch.float8_e4m3fn)
    called = {*family(rank).OPS, *(part.op for layer in rank.layers for part in layer.values())}
    method = rank.config.get("quantization_config", {}).get("quant_method")
    stock = {op.name: Stock(op, options.device, method) for op in called}
    moe = bool(stock.get(ops.fused_experts.name, True))
    left_out = [] if moe else ["moe"]
    if ranks == 1 and options.tp * rank.groups > 1:
        left_out.append("collectives")
    speaks = ranks == 1 or torch.distributed.get_rank() == 0
    for batch in options.batch:
        inputs = Inputs(rank, batch, options.context)
        paths = {"stock": frozenset(), "ours": options.ours}
        steps = {path: Step(rank, inputs, ours, stock, moe, ranks) for path, ours in paths.items()}
        reset_stats()
        logits = {path: step.take_down()[0] for path, step in steps.items()}
        kernels = stats()
        check(logits)
        errors = decode_exact.layer_errors(steps) if ranks == 1 else {}
        if errors:
            decode_exact.check(errors)
        name = f"{name_of(model, options, ranks)}, batch {batch}"
        if arch is None:
            calls = ", ".join(f"{path} {len(step.taken)} calls" for path, step in steps.items())
            if speaks:
                print(f"{name}: {calls}, {inputs.bytes} bytes, finite{said(errors)}")
            continue
        times, alone = time_step(steps)
        counted = {path: launches(step) for path, step in steps.items()}
        line = {
            "op": "decode_step",
            "case": name,
            "shape": {
                "model": model,
                "tp": options.tp,
                "ep": options.ep,
                "batch": batch,
                "context": options.context,
                "layers": len(rank.layers) - 1,
            },
            "gpu": torch.cuda.get_device_name(),
            "us": round(times["ours"], 3),
            "peers": {"stock": round(times["stock"], 3)},
            "tokens_per_s": {path: round(batch / us * 1e6, 1) for path, us in times.items()},
            "launches": counted,
            "calls": {path: len(step.taken) for path, step in steps.items()},
            "bytes": inputs.bytes,
            "floor_us": round(inputs.bytes / options.bandwidth / 1000, 3),
            "share_of_floor": {
                path: round(inputs.bytes / options.bandwidth / 1000 / us, 3) for path, us in times.items()
            },
            "copy_gb_s": round(options.bandwidth, 1),
            "kinds_alone_us": {path: {kind: round(us, 3) for kind, us in of.items()} for path, of in alone.items()},
            "layer_errors": {path: [float(f"{error:.3g}") for error in of] for path, of in errors.items()},
            "ours": sorted(options.ours),
            "kernels": kernels,
            "stock": {name: chosen.used for name, chosen in stock.items() if chosen.used},
            "left_out": left_out,
            "fold_shared": options.fold_shared,
            "quantization": options.quantization,
            "ranks": ranks,
            "versions": options.versions,
            "commit": options.commit,
        }
        if speaks:
            with open_results(options, "decode_step") as file:
                file.write(json.dumps(line) + "\n")
            print(table(line), flush=True)
        del inputs, steps, logits
        torch.cuda.empty_cache()


def table(line: dict) -> str:
    """A line of results, as text."""
    times = {"stock": line["peers"]["stock"], "ours": line["us"]}
    rows = [line["case"] + said(line.get("layer_errors", {}))]
    for path, us in times.items():
        launched, share = line["launches"][path] or "?", 100 * line["share_of_floor"][path]
        rows.append(
            f"  {path:6} {us:10.1f} us  {line['tokens_per_s'][path]:9.1f} tokens/s  {launched} launches  "
            f"{share:5.1f} % of the floor's speed"
        )
    rows.append(f"  {times['stock'] / times['ours']:.2f}x; floor {line['floor_us']:.1f} us")
    alone = line["kinds_alone_us"]
    for kind in KINDS:
        if kind in alone["stock"] or kind in alone["ours"]:
            both = (alone[path].get(kind, 0.0) for path in times)
            rows.append(f"  {kind:14}" + "".join(f"{us:10.1f}" for us in both))
    for op, kernels in line["kernels"].items():
        rows += [
            f"  {op} {kernel}, {calls} calls" for kernel, calls in kernels.items() if kernel.startswith("fallback")
        ]
    for op, used in line["stock"].items():
        refusals = [reason for refused in used.values() for reason in refused if reason.startswith(COMPILED)]
        rows += [f"  stock {op} as it is not compiled: {reason}" for reason in refusals]
        if op in stock_attention.KINDS:
            rows += [f"  stock {op} by {name}" + f", as {'; '.join(no)}" * bool(no) for name, no in used.items()]
    rows.append("  " + "left out: " + ", ".join(line["left_out"]) if line["left_out"] else "  nothing is left out")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
