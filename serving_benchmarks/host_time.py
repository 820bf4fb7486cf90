"""Benchmark the host time of calls: ops against a PyTorch call, or each seam of a model against vLLM's own path.

    python serving_benchmarks/host_time.py                                                     # ops
    python serving_benchmarks/host_time.py --model llama-3.1-405b-fp8 --num-layers 2 --rank-of 8   # seams

GPU launches are asynchronous, so the measured time is the host's. Without a GPU the ops' launches are discarded. Captured graphs have no
such cost: it matters in eager mode, for layers outside graphs such as lm_head, and between piecewise graphs.

With a model, vLLM's engine runs in this process, eagerly, with random weights. One decode call of each kind of layer is repeated on three
paths in turn: vLLM's own; the plugin serving the call; and the plugin leaving the call to vLLM's kernel, because it serves other numbers
of tokens. The report has the median of each path, and the median over rounds of its difference from vLLM's. On an NVIDIA GPU the seams
need VLLM_ROCM_OPS_ON_NVIDIA=1.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import latency_report
import torch

from vllm_rocm_ops.core import archs, launch

CALLS, ROUNDS = 20, 60
ALLOWED_US = 10.0  # maximum host time of the plugin above vLLM's
VLLMS, SERVES, LEAVES = "vLLM's own", "ours serves", "ours leaves"
PLUGIN = SERVES, LEAVES


class Discard:
    """Execute nothing."""

    arch = archs.ARCHS["gfx950"]

    def launch(self, launch, uninitialized) -> None:
        pass


class Timed(NamedTuple):
    """Pair a call with a function to run before each round of it."""

    call: Callable
    before: Callable[[], None] = lambda: None


def host_times(calls: dict[str, Timed], synchronize: Callable) -> dict[str, list[float]]:
    """Return the host microseconds per call of each function, in each round."""
    times = {name: [] for name in calls}
    for round_ in range(ROUNDS + 1):  # the first is dropped
        for name, (call, before) in calls.items():
            before()
            synchronize()
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            if round_:
                times[name].append((time.perf_counter() - start) / CALLS * 1e6)
    synchronize()
    return times


# Ops


def op_calls(device: str, fp8: torch.dtype) -> dict[str, Timed]:
    """Return calls of some ops, after a PyTorch call."""
    x, residual = (torch.randn(1, 4096, device=device).bfloat16() for _ in range(2))
    weight, scale = torch.ones(4096, device=device).bfloat16(), torch.ones(1, device=device)
    tokens, weights = (torch.zeros(rows, 16384, device=device).to(fp8) for rows in (1, 2304))
    out, two, ops = torch.empty_like(x), torch.randn(1, 8192, device=device).bfloat16(), torch.ops.vllm_rocm_ops
    static = x, residual, weight, scale, 1e-6, fp8
    by_block = x, weight, 1e-6, fp8, 128, False, None, residual
    calls = {
        "torch.add, out given": lambda: torch.add(x, residual, out=out),
        "rms_norm": lambda: ops.rms_norm(x, weight, 1e-6),
        "silu_and_mul": lambda: ops.silu_and_mul(two),
        "fused_add_rms_norm_static_fp8_quant": lambda: ops.fused_add_rms_norm_static_fp8_quant(*static),
        "rms_norm_per_block_quant": lambda: ops.rms_norm_per_block_quant(*by_block),
        "scaled_mm, with counters": lambda: ops.scaled_mm(tokens, weights.t(), scale, scale, torch.bfloat16),
    }
    return {name: Timed(call) for name, call in calls.items()}


def time_ops() -> None:
    """Print the host time of ops."""
    gpu = torch.cuda.is_available()
    device, synchronize = ("cuda", torch.cuda.synchronize) if gpu else ("cpu", lambda: None)
    fp8 = archs.of_device(0).fp8_dtype if gpu else Discard.arch.fp8_dtype
    print(f"host time per call on {torch.cuda.get_device_name() if gpu else 'CPU, launches discarded'}")
    with torch.inference_mode(), contextlib.nullcontext() if gpu else launch.executor(Discard()):
        for name, times in host_times(op_calls(device, fp8), synchronize).items():
            print(f"{name:40} {statistics.median(times):6.2f} us")


# Seams

Found = Iterator[tuple[str, str, dict[str, Timed]]]
"""Per layer of a kind: its seam, its name, and the call on each path."""


def chosen(serves: bool) -> Callable[[], None]:
    """Return a function that forces every choice of the process for a decode step.

    Where the plugin leaves the call, it still serves another number of tokens, so that nothing is given back permanently.
    """
    from vllm_rocm_ops.vllm.selection import kernel_selection

    plugin = bytes([1]) * (1 << 16) if serves else bytes(1 << 16) + bytes([1])

    def choose() -> None:
        for choice in kernel_selection.all_choices():
            choice.plugin_by_tokens = plugin

    return choose


def paths(vllms: Callable, plugin: Callable, leaves: bool = True) -> dict[str, Timed]:
    """Return the paths of a call. Only a call that asks a choice can leave it to vLLM's kernel."""
    served = {VLLMS: Timed(vllms), SERVES: Timed(plugin, chosen(True))}
    return served | ({LEAVES: Timed(plugin, chosen(False))} if leaves else {})


def linears(model: torch.nn.Module, dtype: torch.dtype) -> Found:
    """Yield each shape of the quantized linear layers."""
    from vllm_rocm_ops.vllm import coverage

    seen = set()
    for name, module in model.named_modules():
        for kernel in coverage.kernels_of(module) if hasattr(module, "input_size_per_partition") else ():
            kind = type(kernel).__name__, module.weight.shape
            if kernel.baseline is None or kind in seen:
                continue
            seen.add(kind)
            x = torch.randn(1, module.input_size_per_partition, device=module.weight.device).to(dtype)
            given, plugin = (module, x, getattr(module, "bias", None)), type(kernel).apply_weights
            vllms = functools.partial(kernel.baseline.apply_weights, *given)
            yield seam_of(type(kernel)), name, paths(vllms, functools.partial(plugin, kernel, *given))


def unquantized(model: torch.nn.Module, dtype: torch.dtype, replaced: Callable) -> Found:
    """Yield lm_head, through vLLM's function and its replacement."""
    head = getattr(model, "lm_head", None)
    if head is not None and hasattr(replaced, "__wrapped__"):
        x = torch.randn(1, head.weight.shape[1], device=head.weight.device).to(dtype)
        given = head, x, head.weight
        calls = functools.partial(replaced.__wrapped__, *given), functools.partial(replaced, *given)
        yield "unquantized_linear", "lm_head", paths(*calls)


def rows(model: torch.nn.Module, dtype: torch.dtype) -> Found:
    """Yield norms, and activations with the quantized input of the following linear layer, as in eager mode."""
    from vllm_rocm_ops.vllm.graph import model_queries

    device, seen = next(model.parameters()).device, set()
    producers = [(norm, None, norm.weight.shape[0]) for norm in model_queries.norms(model)]
    for layer in model_queries.gated(model):
        quantize = layer.act_fn.consumer and getattr(layer.down_proj, "vllm_rocm_ops_quantize", None)
        producers.append((layer.act_fn, quantize, model_queries.width(layer.down_proj)))
    for producer, quantize, columns in producers:
        kind = type(producer), columns, quantize is not None
        if kind in seen:
            continue
        seen.add(kind)
        is_norm = hasattr(producer, "variance_epsilon")
        x = torch.randn(1, columns * (1 if is_norm else 2), device=device).to(dtype)
        given = (x, torch.zeros_like(x)) if is_norm else (x,)

        def vllms(producer=producer, given=given, quantize=quantize):
            output = producer.vllm_forward(*given)
            return quantize(output) if quantize else output

        name = f"{type(producer).__name__} of {columns}" + " and quantization" * bool(quantize)
        plugin = functools.partial(producer.rocm_ops_forward, *given)
        yield "norm" if is_norm else "activation", name, paths(vllms, plugin, leaves=False)


class Recorded(NamedTuple):
    """The recorded call of one of the plugin's classes in a decode step."""

    plugin: object
    method: str
    given: tuple
    named: dict


def attention(recorded: dict[type, Recorded]) -> Found:
    """Yield the attention implementations that a decode step called."""
    for front, (impl, method, given, named) in recorded.items():
        if method == "apply":
            continue
        name = "mla_attention" if method == "forward_mqa" else "decode_attention"
        calls = (getattr(super(front, impl), method), functools.partial(getattr(front, method), impl))
        yield name, type(impl).__name__, paths(*(functools.partial(call, *given, **named) for call in calls))


def absorbed(model: torch.nn.Module, dtype: torch.dtype) -> Found:
    """Yield the batched GEMMs of MLA's absorbed projections."""
    from vllm_rocm_ops.vllm.attention import mla_absorb

    for name, module in model.named_modules():
        for weight in mla_absorb.WEIGHTS:
            absorbed_weight = getattr(module, weight, None)
            if not isinstance(absorbed_weight, mla_absorb.Absorbed):
                continue
            heads, k, n = absorbed_weight.shape
            x, out = (torch.zeros(heads, 1, width, device=absorbed_weight.device, dtype=dtype) for width in (k, n))
            both = absorbed_weight.as_subclass(torch.Tensor), absorbed_weight
            yield (
                "mla_attention",
                f"{name}.{weight}",
                paths(*(functools.partial(torch.bmm, x, w, out=out) for w in both)),
            )
        if hasattr(module, mla_absorb.WEIGHTS[0]):
            return


def experts(recorded: dict[type, Recorded]) -> Found:
    """Yield the experts that a decode step called. vLLM's own path uses the router that vLLM would have created."""
    from vllm_rocm_ops.vllm.moe import base as in_vllm
    from vllm_rocm_ops.vllm.moe import routing_experts

    for kind, (plugin, method, _, named) in recorded.items():
        if method != "apply" or plugin.baseline is None:
            continue
        tokens = named["hidden_states"], named["w1"], named["w2"]
        names = "activation", "global_num_experts", "expert_map", "apply_router_weight_on_input"
        settings = tuple(named[name] for name in names)
        if "router_logits" not in named:
            given = *tokens, named["topk_weights"], named["topk_ids"], *settings
            calls = (
                functools.partial(kernel.apply, *given) for kernel in (plugin.kernel, in_vllm.modular_kernel_of(plugin))
            )
            yield "experts", kind.__name__, paths(*calls)
            continue
        logits, groups, (scoring_func, renormalize) = named["router_logits"], named["num_expert_group"], plugin.method
        router = routing_experts.router_factory().create_fused_moe_router(
            plugin.topk,
            logits.shape[-1],
            renormalize,
            use_grouped_topk=bool(groups),
            num_expert_group=groups,
            topk_group=named["topk_group"],
            scoring_func=scoring_func,
            routed_scaling_factor=named["routed_scaling_factor"] or 1.0,
            e_score_correction_bias=named["e_score_correction_bias"],
        )

        def vllms(router=router, tokens=tokens, logits=logits, plugin=plugin, settings=settings):
            return plugin.baseline.apply(*tokens, *router.select_experts(tokens[0], logits), *settings)

        yield "routing_experts", kind.__name__, paths(vllms, functools.partial(kind.apply, plugin, **named))


@contextlib.contextmanager
def recording(model: torch.nn.Module) -> Iterator[dict[type, Recorded]]:
    """Record the last call of each of the plugin's attention and experts classes, with its arguments."""
    from vllm_rocm_ops.vllm import coverage
    from vllm_rocm_ops.vllm.attention.decoder import DecodeImpl
    from vllm_rocm_ops.vllm.attention.mla import MlaImpl

    calls: dict[type, Recorded] = {}
    kernels = [kernel for module in model.modules() for kernel in coverage.kernels_of(module)]
    kinds = {front: front.METHOD[0] for front in (DecodeImpl, MlaImpl)}
    kinds |= {type(kernel): "apply" for kernel in kernels if hasattr(kernel, "whole")}

    def recorder(kind: type, method: str) -> Callable:
        plugin = getattr(kind, method)

        def record_layer(self, *given, **named):
            calls[kind] = Recorded(self, method, given, named)
            return plugin(self, *given, **named)

        return record_layer

    with contextlib.ExitStack() as stack:
        for kind, method in kinds.items():
            stack.enter_context(mock.patch.object(kind, method, recorder(kind, method)))
        for layer in (*(getattr(module, "impl", None) for module in model.modules()), *kernels):
            for method in kinds.values():  # recorded once more, even if the layer was given back
                getattr(layer, "__dict__", {}).pop(method, None)
        yield calls


def seams(options: argparse.Namespace) -> list[dict]:
    """Return a line for each layer of a model that a seam serves."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from latency import find_model, merged, overrides
    from latency_worker import hardware, versions
    from vllm import LLM, SamplingParams
    from vllm.config import set_current_vllm_config
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.layers import utils

    from vllm_rocm_ops.vllm import register
    from vllm_rocm_ops.vllm.linear import unquantized_linear

    register()
    of_linears = getattr(utils, unquantized_linear.replaced())
    path = find_model(options.model)
    settings = {"model": str(path), "load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 256}
    settings |= {"max_num_seqs": 4, "max_num_batched_tokens": 256, "enforce_eager": True, "seed": 0}
    settings |= {"distributed_executor_backend": "uni", "enable_prefix_caching": False} | options.engine_args
    changes = overrides(path, options.num_layers, options.rank_of)
    settings["hf_overrides"] = merged(changes, settings.get("hf_overrides", {}))
    llm = LLM(**settings)
    worker = llm.llm_engine.model_executor.driver_worker.worker
    model, config = worker.model_runner.get_model(), worker.vllm_config
    dtype, on_gpu = config.model_config.dtype, torch.cuda.is_available()
    synchronize = torch.cuda.synchronize if on_gpu else lambda: None
    sampling = SamplingParams(max_tokens=3, ignore_eos=True, detokenize=False)
    with recording(model) as recorded:
        llm.generate([{"prompt_token_ids": [3]}], sampling, use_tqdm=False)
    lines, context = [], set_forward_context(None, config, num_tokens=1)
    with torch.inference_mode(), set_current_vllm_config(config), context:
        parts = (linears(model, dtype), unquantized(model, dtype, of_linears), rows(model, dtype))
        for part in (*parts, attention(recorded), absorbed(model, dtype), experts(recorded)):
            for seam, layer, calls in part:
                lines.append({"seam": seam, "layer": layer} | summary(host_times(calls, synchronize)))
                print(row(lines[-1]), flush=True)
    origin = {"model": path.name, "layers": options.num_layers, "rank_of": options.rank_of, "hardware": hardware()}
    return [line | origin | {"versions": versions(), "commit": options.commit} for line in lines]


def summary(times: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Return the median of each path, and the median over rounds of its difference from vLLM's."""
    apart = {name: [us - vllms for us, vllms in zip(times[name], times[VLLMS])] for name in times if name != VLLMS}
    medians = (
        {name: round(statistics.median(values), 2) for name, values in by_path.items()} for by_path in (times, apart)
    )
    return dict(zip(("us", "apart_us"), medians))


def row(line: dict) -> str:
    """Format a line of the table."""
    plugin = "  ".join(f"{name} {line['us'][name]:7.2f} us ({apart:+.2f})" for name, apart in line["apart_us"].items())
    over = "  above the limit" * (max(line["apart_us"].values()) > ALLOWED_US)
    return f"{line['seam']:20} {line['layer']:44.44}  {VLLMS} {line['us'][VLLMS]:7.2f} us  {plugin}{over}"


def seam_of(kind: type) -> str:
    """Return the name of the seam that defines a class."""
    return kind.__module__.rpartition(".")[2]


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", help="folder with a config.json, or a shipped model (default: benchmark ops, without vLLM)")
    add("--num-layers", type=int, help="number of layers to keep (default: all)")
    add("--rank-of", type=int, default=1, help="tensor parallel size of which to run one rank (default: %(default)s)")
    add("--engine-args", type=json.loads, default={}, metavar="JSON", help="further arguments for vllm.LLM")
    add("--commit", default="", help="commit of the measured code, outside a checkout")
    add("--output", type=Path, help="file to append result lines to")
    options = parser.parse_args()
    if options.model is None:
        time_ops()
        return
    for line in seams(options):
        if options.output:
            latency_report.append(options.output, line)


if __name__ == "__main__":
    main()
