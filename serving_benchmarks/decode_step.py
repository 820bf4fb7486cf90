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

The same on both sides, so that nothing is compared: attention over a bf16 cache of `--context` tokens, which all
sequences have, by vLLM's kernels where they are, else in plain PyTorch (attention.py); quantisation that no norm or
activation does; collectives, which only torchrun starts, all ranks with the same weights; the rest. A copy stands for the
embedding, a rank's own part of the vocabulary for all of it. Tokens go to random experts, all as likely, whatever the
router chose. With `--ep` of more than `--tp` (attention for the rank's own sequences, experts for those of all ranks),
a rank alone has random tokens in place of the others'. Per-tensor scales are taken as known beforehand.

The floor is the time to read all weights, of the experts those that are hit, and the cache once, at the bandwidth of a
copy.
On the CPU (`--device cpu`) both paths run the ops' references once, without a graph, and nothing is timed.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable
from typing import NamedTuple

import torch
from attention import of_layers
from ops import capture, measure, open_results, parse
from stock import COMPILED, Stock, per_block, per_token, static
from torch import Tensor

from vllm_rocm_ops import model_layers, ops
from vllm_rocm_ops.model_layers import LayerCall
from vllm_rocm_ops.op import Op
from vllm_rocm_ops.stats import reset_stats, stats

MODELS = ("llama-3.1-405b-fp8", "deepseek-v3")
REPLACEABLE = ("norm", "linear", "activation", "routing", "moe", "lm_head")
KINDS = (*REPLACEABLE, "attention", "quantization", "collectives", "rest")
PER_TOKEN = {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"]}  # as Meta's checkpoint
WEIGHTS = ("weight", "b", "scale_b", "w1", "w2", "w1_scale", "w2_scale", "e_score_correction_bias")


def kind_of(call: LayerCall) -> str:
    """The kind of work that a call is."""
    kinds = {"router": "routing", "routing": "routing", "experts": "moe", "lm_head": "lm_head"}
    of_op = "norm" if "rms_norm" in call.op.name else "activation" if "silu_and_mul" in call.op.name else "linear"
    return kinds.get(call.layer, of_op)


# A rank and its weights


class Part(NamedTuple):
    """One call of a layer: `given` are its op's arguments, whose weights stay; each step replaces activations."""

    op: Op
    kind: str
    given: tuple

    def bytes(self) -> int:
        """Of weights, of all experts."""
        values = (getattr(self.given, name, None) for name in WEIGHTS)
        return sum(value.nbytes for value in values if isinstance(value, Tensor))


class Rank:
    """The layers of one rank: for each the parts by name, and last what follows the layers."""

    def __init__(self, config: dict, tp: int, ep: int | None, device: str, fp8_dtype: torch.dtype):
        if ep and ep % tp:
            raise ValueError(f"ep must be a multiple of tp={tp}, got {ep}")
        calls = model_layers.sequence(config, tp, ep)
        self.config, self.tp, self.device, self.dtype = config, tp, device, calls[0].dtype
        self.groups = (ep or tp) // tp  # of ranks with sequences of their own
        self.folds_shared = False
        self.generator = torch.Generator(device).manual_seed(0)
        self.layers: list[dict[str, Part]] = []
        self.absorbed: list[tuple[Tensor, Tensor]] = []  # by layer, W_UK [heads, nope, rank] and W_UV [heads, rank, v]
        for call in calls:
            if call.layer in ("input norm", "final norm"):
                self.layers.append({})
            if call.op is ops.mxfp8_scaled_mm:
                raise ValueError(f"there is no step for MX-FP8, which {call.layer} has")
            if call.count == 0:  # kv_b, which only prefill multiplies with as it is
                self.absorbed.append(self._absorbed(*call.parameters[:2]))
                continue
            given = call.op.Arguments(*call.case(1).make(device, self.generator, fp8_dtype))
            self.layers[-1][call.layer] = Part(call.op, kind_of(call), _tamed(call.op, given))

    def _absorbed(self, n: int, rank: int) -> tuple[Tensor, Tensor]:
        """The two halves of kv_b, unquantised."""
        nope, v = self.config["qk_nope_head_dim"], self.config["v_head_dim"]
        heads = n // (nope + v)
        w_uk = self.values(heads, nope, rank, scale=nope**-0.5)
        return w_uk, self.values(heads, rank, v, scale=rank**-0.5)

    @property
    def softmax_scale(self) -> float:
        """Of latent attention."""
        return (self.config["qk_nope_head_dim"] + self.config["qk_rope_head_dim"]) ** -0.5

    def sizes(self, layer: int, name: str) -> dict[str, int]:
        """Of the problem of a layer's part."""
        part = self.layers[layer][name]
        return part.op.problem(part.given)

    def values(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Normally distributed, of the model's dtype."""
        drawn = torch.empty(shape, dtype=self.dtype, device=self.device)
        return drawn.normal_(0.0, scale, generator=self.generator)

    def fold_shared(self) -> None:
        """Has the routed experts hold the shared one as their last, of which its parts are views. Raises ValueError."""
        self.folds_shared = True
        for layer in self.layers:
            if "experts" not in layer or "shared gate_up" not in layer:
                continue
            experts, folded = layer["experts"], {}
            for name, shared in (("w1", "shared gate_up"), ("w2", "shared down")):
                weight, of_shared = getattr(experts.given, name), layer[shared]
                single = of_shared.op is ops.block_scaled_mm and of_shared.given.b.shape == weight.shape[1:]
                if not single or self.groups > 1:
                    wanted = "one shared expert in FP8 blocks, as wide as the routed ones and with the same tokens"
                    raise ValueError(f"to be folded there must be {wanted}")
                rows = torch.cat((weight.view(torch.uint8), of_shared.given.b.view(torch.uint8)[None]))
                folded[name] = rows.view(weight.dtype)
                scales = getattr(experts.given, f"{name}_scale")
                folded[f"{name}_scale"] = torch.cat((scales, of_shared.given.scale_b[None]))
                of_shared = of_shared.given._replace(b=folded[name][-1], scale_b=folded[f"{name}_scale"][-1])
                layer[shared] = layer[shared]._replace(given=of_shared)
            layer["experts"] = experts._replace(given=experts.given._replace(**folded))


def _tamed(op: Op, given: tuple) -> tuple:
    """The arguments with weights that keep results about as large as activations, and experts about as likely."""
    if op is ops.unquantized_gemm:
        given.weight.mul_(given.weight.shape[1] ** -0.5)
    elif op in (ops.scaled_mm, ops.block_scaled_mm):
        given.scale_b.mul_(given.a.shape[1] ** -0.5)
    elif op is ops.fused_experts:
        for weight, scale in ((given.w1, given.w1_scale), (given.w2, given.w2_scale)):
            (weight if scale is None else scale).mul_(weight.shape[2] ** -0.5)
    elif op is ops.grouped_topk and given.e_score_correction_bias is not None:
        given.e_score_correction_bias.mul_(0.01)
    return given


# The step


class Call(NamedTuple):
    kind: str
    function: Callable
    arguments: tuple

    def __call__(self):
        return self.function(*self.arguments)


class Inputs:
    """What the two paths of a step share besides weights: hidden states, caches, and which experts tokens go to."""

    def __init__(self, rank: Rank, batch: int, context: int):
        rank.generator.manual_seed(1)  # the same on all ranks, whatever they have drawn
        self.batch, self.context, self.tokens = batch, context, batch * rank.groups
        self.attention, self.attention_by = of_layers(rank, batch, context)
        self.hidden = rank.values(batch, rank.config["hidden_size"])
        self.of_all = rank.values(self.tokens, rank.config["hidden_size"])  # the tokens of all ranks
        self.routes: dict[int, dict[str, Tensor]] = {}  # by layer
        self.bytes = sum(attention.bytes for attention in self.attention)
        for number, layer in enumerate(rank.layers):
            for part in layer.values():
                share = self._route(number, part.given, rank) if part.kind == "moe" else 1.0
                self.bytes += round(part.bytes() * share)

    def _route(self, layer: int, given, rank: Rank) -> float:
        """Sends each token to random experts. Returns which share of the rank's is hit, a folded one not counted."""
        here, topk = len(given.w1), given.topk_ids.shape[1]
        experts = here - rank.folds_shared if given.expert_map is None else len(given.expert_map)
        weights, ids = torch.rand(self.tokens, experts, generator=torch.Generator().manual_seed(layer)).topk(topk)
        weights = weights / weights.sum(1, keepdim=True)
        self.routes[layer] = {"topk_weights": weights.to(rank.device), "topk_ids": ids.int().to(rank.device)}
        hit = ids.unique() if given.expert_map is None else given.expert_map.cpu()[ids].unique()
        return int((hit >= 0).sum()) / here


class Step:
    """One path of a decode step; a call returns logits and tokens. `ours` are the kinds that our ops compute; `stock`,
    by the op's name, computes the others. Without `moe` there are no routed experts. What `take_down` calls is in
    `calls`."""

    def __init__(
        self,
        rank: Rank,
        inputs: Inputs,
        ours: frozenset[str],
        stock: dict[str, Stock],
        moe: bool = True,
        ranks: int = 1,
    ):
        self.rank, self.inputs, self.ours, self.stock, self.moe, self.ranks = rank, inputs, ours, stock, moe, ranks
        self.calls: list[Call] | None = None

    def __call__(self) -> tuple[Tensor, Tensor]:
        x = residual = self.call("rest", torch.clone, self.inputs.hidden)
        layer = latent if self.rank.absorbed else grouped
        for number in range(len(self.rank.layers) - 1):
            x = layer(self, number, x, residual)
        x = self.norm(-1, "final norm", x, residual)
        logits = self.linear(-1, "lm_head", x)
        return logits, self.call("rest", torch.argmax, logits, -1)

    def take_down(self) -> tuple[Tensor, Tensor]:
        """A call of the step, after which `calls` has all that it called, in order."""
        self.calls = []
        try:
            return self()
        finally:
            self.taken, self.calls = self.calls, None

    def call(self, kind: str, function: Callable, *arguments):
        if self.calls is not None:
            self.calls.append(Call(kind, function, arguments))
        return function(*arguments)

    def op(self, layer: int, name: str, **activations):
        """The op of a part, with these in place of its arguments."""
        part = self.rank.layers[layer][name]
        function = part.op if part.kind in self.ours else self.stock[part.op.name]
        return self.call(part.kind, function, *part.given._replace(**activations))

    def norm(self, layer: int, name: str, x: Tensor, residual: Tensor | None = None):
        """The result, with its scale if it is quantised."""
        given = self.rank.layers[layer][name].given._asdict()
        return self._quantising(
            layer, name, given, x, {"residual": residual} if given.get("residual") is not None else {}
        )

    def _quantising(self, layer: int, name: str, given: dict, x: Tensor, activations: dict):
        if "is_scale_transposed" in given:
            activations["is_scale_transposed"] = True
        result = self.op(layer, name, input=x, **activations)
        return (result, given["scale"]) if "scale" in given else result

    def linear(self, layer: int, name: str, x: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        """A product with what is quantised already, or is not and then quantised for it."""
        op, _, given = self.rank.layers[layer][name]
        if op is ops.unquantized_gemm:
            return self.op(layer, name, x=x)
        if isinstance(x, Tensor):
            dtype = given.b.dtype
            if op is ops.block_scaled_mm:
                x = self.call("quantization", per_block, x, dtype)
            elif given.scale_b.numel() > 1:
                x = self.call("quantization", per_token, x, dtype)
            else:
                x = self.call("quantization", static, x, given.scale_a, dtype)
        return self.op(layer, name, a=x[0], scale_a=x[1])

    def mlp(self, layer: int, prefix: str, x: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        x = self.linear(layer, f"{prefix}gate_up", x)
        given = self.rank.layers[layer][f"{prefix}SwiGLU"].given._asdict()
        return self.linear(layer, f"{prefix}down", self._quantising(layer, f"{prefix}SwiGLU", given, x, {}))

    def experts(self, layer: int, x: Tensor) -> Tensor:
        """Router, routed experts, the shared expert; its part of the sum over ranks of a group."""
        parts = self.rank.layers[layer]
        self.op(layer, "routing", gating_output=self.linear(layer, "router", x))
        folds = self.rank.folds_shared and "moe" in self.ours
        result = None
        if self.moe:
            given, tokens = parts["experts"].given, self._gathered(x)
            activations = {"hidden": tokens, **self.inputs.routes[layer]}
            if folds:
                activations["shared_experts"] = 1
            elif self.rank.folds_shared:
                names = ("w1", "w2", "w1_scale", "w2_scale")
                activations |= {name: getattr(given, name)[:-1] for name in names}
            result = self._scattered(self.op(layer, "experts", **activations))
        if "shared gate_up" in parts and not folds:
            shared = self.mlp(layer, "shared ", x)
            result = shared if result is None else self.call("rest", torch.add, result, shared)
        return x if result is None else result

    # Collectives, among several processes

    def summed(self, x: Tensor) -> Tensor:
        """The sum over the ranks of a group, in place."""
        if self.ranks > 1 and self.rank.tp > 1:
            self.call("collectives", torch.distributed.all_reduce, x)
        return x

    def _gathered(self, x: Tensor) -> Tensor:
        """The tokens of all groups, one after the other."""
        if self.rank.groups == 1:
            return x
        if self.ranks > 1:
            self.call("collectives", torch.distributed.all_gather_into_tensor, self.inputs.of_all, x)
        return self.inputs.of_all

    def _scattered(self, of_all: Tensor) -> Tensor:
        """The sum over all groups of this one's tokens."""
        if self.rank.groups == 1 or self.ranks == 1:
            return of_all[: self.inputs.batch]
        x = torch.empty_like(self.inputs.hidden)
        self.call("collectives", torch.distributed.reduce_scatter_tensor, x, of_all)
        return x


def grouped(step: Step, layer: int, x: Tensor, residual: Tensor) -> Tensor:
    """A layer of Llama."""
    x = step.linear(layer, "qkv", step.norm(layer, "input norm", x, residual))
    x = step.call("attention", step.inputs.attention[layer].run, x)
    x = step.summed(step.linear(layer, "o", x))
    return step.summed(step.mlp(layer, "", step.norm(layer, "post-attention norm", x, residual)))


def latent(step: Step, layer: int, x: Tensor, residual: Tensor) -> Tensor:
    """A layer of DeepSeek."""
    parts, x = step.rank.layers[layer], step.norm(layer, "input norm", x, residual)
    q_rank, kv_rank = step.rank.config["q_lora_rank"], step.rank.config["kv_lora_rank"]
    if q_rank is None:
        q, kv = step.linear(layer, "q", x), step.linear(layer, "kv_a (replicated)", x)
    else:
        both = step.linear(layer, "fused q_a+kv_a (replicated)", x)
        q, kv = step.linear(layer, "q_b", step.norm(layer, "q_a norm", both[:, :q_rank])), both[:, q_rank:]
    normed = step.norm(layer, "kv_a norm", kv[:, :kv_rank])
    x = step.call("attention", step.inputs.attention[layer].run, q, normed, kv[:, kv_rank:])
    x = step.summed(step.linear(layer, "o", x))
    if "experts" in parts:
        return step.summed(step.experts(layer, step.norm(layer, "post-attention norm", x, residual)))
    return step.summed(step.mlp(layer, "dense ", step.norm(layer, "dense post-attention norm", x, residual)))


# Timing


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
        config = model_layers.read(model)
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
    called = {part.op for layer in rank.layers for part in layer.values()}
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
        name = f"{name_of(model, options, ranks)}, batch {batch}"
        if arch is None:
            calls = ", ".join(f"{path} {len(step.taken)} calls" for path, step in steps.items())
            if speaks:
                print(f"{name}: {calls}, {inputs.bytes} bytes, finite")
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
            "ours": sorted(options.ours),
            "kernels": kernels,
            "stock": {name: chosen.used for name, chosen in stock.items() if chosen.used},
            "attention": inputs.attention_by,
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
    rows = [line["case"]]
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
    rows.append("  " + "left out: " + ", ".join(line["left_out"]) if line["left_out"] else "  nothing is left out")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
