"""Analyze the decode layers' kernels on gfx942 and gfx950 without such a GPU. Results are static and emulated, never times.

    python serving_benchmarks/kernel_statistics.py [--arch gfx942 gfx950] [--m 1 8 16 64] [--weights plain mxfp8] [--blocks 64]

Lines go to serving_benchmarks/results/<arch>/<date>-<commit>-static.jsonl:
- one per FP8 layer of Llama-3.1-405B and DeepSeek-V3 at TP 8, weight format and M;
- one per GEMM of DeepSeek-V3's routed experts at TP 8 and EP 8, where only the experts hit by random tokens count as bytes to move;
- one per attention with M sequences, for each KV cache dtype and number of keys. There the cache is the weight, N the keys, and K the
  elements of a token in the cache.
Weights are as in the checkpoint (plain), as if it were MXFP8, if the arch supports that, or, on request, in fragment order (shuffled).
The code objects are the shipped ones.

Static, from the code object and the launch: registers, spills, LDS, the waves that fit a compute unit (`occupancy`: whole blocks,
limited by registers and LDS), and the average waves per compute unit of this launch.

Emulated: the launch has its real shape, on zero tensors, as no count depends on values. A sample of blocks runs, in runs of neighbors,
which share tiles, from all over the grid; sums are scaled to all blocks.
- Bytes in flight per compute unit: a wave's outstanding bytes of the weight while it waits for memory (the mean of before and after),
  averaged over its waits and summed over the waves of a compute unit.
- HBM bytes over minimum: of the weight, the 128-byte lines that each block loads, once per block; of the partial sums in the workspace,
  the stored bytes twice, as they are loaded once. The minimum is every input and output once, and all but the weight are assumed to take
  just that: many blocks read the activations, from caches.
- LDS conflicts: cycles lost to bank conflicts, as a fraction of all LDS cycles.
- Issue cycles and matrix cycles: of all SIMDs, per loaded byte of the weight. `cycles_per_byte_at_bandwidth` is the chip's budget: with
  more issue cycles, HBM waits for instructions.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from decode_shapes import MODELS, DecodeShape

from vllm_rocm_ops import ops
from vllm_rocm_ops.core import archs, launch
from vllm_rocm_ops.core.arch import Arch
from vllm_rocm_ops.core.launch import Launch, Workspace
from vllm_rocm_ops.core.op import Op
from vllm_rocm_ops.emulator import Emulator
from vllm_rocm_ops.emulator.cases import executable, run
from vllm_rocm_ops.ops.shared.gemm import BLOCK
from vllm_rocm_ops.ops.shared.weight_layout import shuffle_weight
from vllm_rocm_ops.tools.bench import report
from vllm_rocm_ops.tools.bench.shapes import linear_layers

RESULTS = Path(__file__).parent / "results"
SHOWN = ("llama405b_tp8", "dsv3_tp8")
PLAIN, MXFP8, SHUFFLED = WEIGHTS = ("plain", "mxfp8", "shuffled")
EXPERTS = {"dsv3_tp8": (256, 256, 7168, 256), "dsv3_ep8": (32, 256, 7168, 2048)}  # local, total, hidden, intermediate
TOPK = 8
CONTEXTS, PAGE = (1024, 8192), 16  # keys per sequence; tokens per page
LINE_BYTES = 128
SIMDS = 4  # per compute unit
AMD = [name for name, arch in archs.ARCHS.items() if arch.vendor == "amd"]


def shapes(weights: str, options) -> list[DecodeShape]:
    """Return the FP8 layers of decode at each number of tokens."""
    changes = {"quantization_config": {"quant_method": "mxfp8"}} if weights == MXFP8 else {}
    return [
        DecodeShape(model, call, m, n, k)
        for model in SHOWN
        for call, n, k in linear_layers(*MODELS[model], **changes)
        if call.op is not ops.unquantized_gemm and call.count and (not options.layers or call.layer in options.layers)
        for m in options.m
    ]


class Study(NamedTuple):
    """A launch of an op, its weight arguments, and the bytes of the weight that a call needs."""

    op: Op
    case: str
    shape: dict[str, int]  # m, n, k
    config: object
    planned: Launch
    inputs: tuple[torch.Tensor, ...]
    weights: tuple[torch.Tensor, ...]
    needed: int


def linear(shape: DecodeShape, weights: str, arch: Arch) -> Study:
    """Return the study of a linear layer; its op must plan a single launch."""
    op, arguments = shape.call.op, shape.arguments("cpu", arch.fp8_dtype)
    place = max((i for i, v in enumerate(arguments) if isinstance(v, torch.Tensor)), key=lambda i: arguments[i].nbytes)
    weight = arguments[place]
    if weights == SHUFFLED:
        weight = shuffle_weight(weight if weight.is_contiguous() else weight.t())
        arguments = (*arguments[:place], weight, *arguments[place + 1 :])
    explained = op.explain(*arguments, arch=arch)
    (planned,) = explained.launches
    inputs = tuple(tensor for tensor in arguments if isinstance(tensor, torch.Tensor))
    case = f"{shape.model} {shape.layer}{f', {weights}' * (weights != PLAIN)} {shape.m}x{shape.n}x{shape.k}"
    sizes = {"m": shape.m, "n": shape.n, "k": shape.k}
    return Study(op, case, sizes, explained.config, planned, inputs, (weight,), weight.nbytes)


def attention(m: int, arch: Arch) -> Iterator[Study]:
    """Yield the launch that reads the cache, for m sequences of equal length."""
    for keys, dtype in itertools.product(CONTEXTS, (torch.bfloat16, arch.fp8_dtype)):
        pages, x, kind = m * keys // PAGE, 16 // dtype.itemsize, "bf16" if dtype == torch.bfloat16 else "e4m3"

        def cache(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.uint8 if dtype.itemsize == 1 else dtype).view(dtype)

        def tokens(*shape: int) -> torch.Tensor:
            return torch.zeros(m, *shape, dtype=torch.bfloat16)

        where = torch.arange(pages, dtype=torch.int32).view(m, -1), torch.full((m,), keys, dtype=torch.int32)
        of_llama = cache(pages, 1, 128 // x, PAGE, x), cache(pages, 1, 128, PAGE)  # native
        of_deepseek = (cache(pages, PAGE, 576),)
        for model, op, queries, caches in (
            ("llama405b_tp8", ops.paged_attention_decode, (tokens(16, 128),), of_llama),
            ("dsv3_tp8", ops.mla_decode, (tokens(16, 512), tokens(16, 64)), of_deepseek),
        ):
            explained = op.explain(*queries, *caches, *where, 0.1, arch=arch)
            elements, inputs = sum(c.numel() for c in caches) // (m * keys), (*queries, *caches, *where)
            case, sizes = f"{model} attention {kind} {m}x{keys}x{elements}", {"m": m, "n": keys, "k": elements}
            needed, planned = sum(c.nbytes for c in caches), explained.launches[0]
            yield Study(op, case, sizes, explained.config, planned, inputs, caches, needed)


def experts(m: int, arch: Arch) -> Iterator[Study]:
    """Yield the two GEMMs of DeepSeek-V3's experts on a rank of `EXPERTS`, with m tokens routed at random.

    Only streamed GEMMs are studied: tiled ones need the sort of an earlier launch.
    """
    for model, (local, of_all, hidden, inner) in EXPERTS.items():
        generator = torch.Generator().manual_seed(m)
        ids = torch.rand(m, of_all, generator=generator).topk(TOPK).indices.int()
        expert_map = torch.where(torch.arange(of_all) < local, torch.arange(of_all), -1).int()
        hit = len(set(ids.flatten().tolist()) & set(range(local)))
        w1, w2 = (torch.zeros(local, *size, dtype=arch.fp8_dtype) for size in ((2 * inner, hidden), (hidden, inner)))
        scales = [torch.zeros(local, w.shape[1] // BLOCK, w.shape[2] // BLOCK) for w in (w1, w2)]
        tokens = torch.zeros(m, hidden, dtype=torch.bfloat16)
        weights = torch.zeros(m, TOPK)
        arguments = (tokens, w1, w2, weights, ids, torch.bfloat16, *scales, None, None, expert_map)
        explained = ops.fused_experts.explain(*arguments, arch=arch)
        products = [l for l in explained.launches if any(arg is w for arg in l.named.values() for w in (w1, w2))]
        if not hit or products[0].module != ops.fused_experts.name:
            continue
        inputs = tuple(tensor for tensor in arguments if isinstance(tensor, torch.Tensor))
        others = tuple(tensor for tensor in inputs if tensor is not w1 and tensor is not w2)
        for name, weight, planned in zip(("gate_up", "down"), (w1, w2), in_order(products, arch), strict=True):
            _, n, k = weight.shape
            case, sizes = f"{model} experts {name} {m}x{n}x{k}", {"m": m, "n": n, "k": k}
            found = ops.fused_experts, case, sizes, explained.config, planned, (*others, weight), (weight,)
            yield Study(*found, hit * n * k)


def in_order(products: list[Launch], arch: Arch) -> list[Launch]:
    """Return the two launches with the order of pairs, which gate_up's first block leaves for down, in place of its workspace."""
    gate_up, down = products
    taken = list(down.named.values())
    [order] = (v for v in gate_up.named.values() if isinstance(v, Workspace) and any(v is other for other in taken))
    memory = torch.empty(order, dtype=torch.uint8)
    first, *_ = filled = [l.with_each(lambda arg: memory if arg is order else arg) for l in products]
    [whole] = executable([first])
    Emulator(arch.name).run(launch.code_object(first.module, arch.name), whole, (), [0])
    return filled


def study(of: Study, emulator: Emulator, options) -> dict:
    """Return the line of one launch."""
    arch, planned = emulator.arch, of.planned
    names = {
        id(weight): [f"argument {n}" for n, arg in planned.named.items() if arg is weight] for weight in of.weights
    }
    regions = [" and ".join(of_weight) for of_weight in names.values()]
    workspaces = [f"argument {name}" for name, arg in planned.named.items() if isinstance(arg, Workspace)]
    [whole] = executable([planned])
    ran = run(emulator, whole, options.blocks)
    kernel, counters, grid, blocks = ran.kernel, ran.counters, ran.grid, ran.blocks

    blocks_per_unit = min(ran.held, grid / arch.compute_units)
    in_flight = sum(map(counters.traffic.bytes_in_flight, regions)) / len(blocks) * blocks_per_unit
    tensors = [arg for arg in planned.named.values() if isinstance(arg, torch.Tensor)]
    outputs = [tensor for tensor in tensors if all(tensor is not i for i in of.inputs)]
    others = sum(tensor.nbytes for tensor in (*of.inputs, *outputs)) - sum(weight.nbytes for weight in of.weights)
    weight_bytes = sum(map(counters.traffic.lines_loaded, regions)) * LINE_BYTES
    partial_bytes = sum(counters.traffic.bytes_stored[workspace] for workspace in workspaces)
    hbm = others + (weight_bytes + 2 * partial_bytes) * grid / len(blocks)
    return {
        "op": of.op.name,
        "case": of.case,
        "shape": of.shape,
        "arch": arch.name,
        "evidence": "static and emulated, never a time",
        "kernel": planned.symbol,
        "config": str(of.config),
        "blocks": grid,
        "blocks_emulated": len(blocks),
        "waves_per_block": ran.waves,
        **{name: value for name, value in kernel.statistics.items() if name not in ("kernarg", "max_block")},
        "lds": ran.lds,
        "occupancy": ran.held * ran.waves,
        "waves_per_compute_unit": round(blocks_per_unit * ran.waves, 2),
        "bytes_in_flight_per_compute_unit": round(in_flight),
        "weight_bytes": of.needed,
        "hbm_bytes_over_minimum": round(hbm / (others + of.needed), 4),
        "lds_conflicts": round(counters.lds_conflict_cycles / max(counters.lds_cycles, 1), 4),
        "issue_cycles_per_byte": round(counters.issue_cycles / weight_bytes, 4),
        "matrix_cycles_per_byte": round(counters.matrix_cycles / weight_bytes, 4),
        "cycles_per_byte_at_bandwidth": round(SIMDS * arch.compute_units * arch.clock_ghz / arch.bandwidth_gb_s, 4),
        "compiler": launch.stamps(arch.name)[planned.module].get("compiler"),
        "commit": options.commit,
    }


def main() -> None:
    """Write the lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", nargs="+", choices=AMD, default=AMD, help="architectures (default: all of AMD)")
    parser.add_argument(
        "--m", nargs="+", type=int, default=[1, 8, 16, 64], help="numbers of tokens (default: %(default)s)"
    )
    parser.add_argument("--layers", nargs="+", help="layer names (default: all)")
    parser.add_argument(
        "--weights", nargs="+", choices=WEIGHTS, default=(PLAIN, MXFP8), help="weight formats (default: plain mxfp8)"
    )
    parser.add_argument(
        "--blocks", type=int, default=64, help="emulated blocks per launch, approximately (default: 64)"
    )
    parser.add_argument("--commit", default=report.commit(), help="commit of the code (default: the checkout's)")
    parser.add_argument(
        "--output", type=Path, default=RESULTS, help="results folder (default: serving_benchmarks/results)"
    )
    options = parser.parse_args()
    for arch in options.arch:
        emulator = Emulator(arch, races=False, traffic=True)
        path = options.output / arch / f"{datetime.date.today()}-{options.commit}-static.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w") as file:
            studied = [w for w in options.weights if w != MXFP8 or emulator.arch.block_scales]
            layers = (linear(shape, w, emulator.arch) for w in studied for shape in shapes(w, options))
            with_experts = not options.layers or "experts" in options.layers
            of_experts = (found for m in options.m if with_experts for found in experts(m, emulator.arch))
            with_attention = not options.layers or "attention" in options.layers
            of_attention = (found for m in options.m if with_attention for found in attention(m, emulator.arch))
            for of in itertools.chain(layers, of_experts, of_attention):
                line = study(of, emulator, options)
                file.write(json.dumps(line) + "\n")
                print(
                    f"{arch} {line['case']:62} {line['kernel']:28}"
                    f" {line['bytes_in_flight_per_compute_unit'] / 1024:5.1f} KB in flight,"
                    f" {line['hbm_bytes_over_minimum']:.3f} of the bytes, {line['issue_cycles_per_byte']:.3f} issue and"
                    f" {line['matrix_cycles_per_byte']:.3f} matrix cycles per byte",
                    flush=True,
                )


if __name__ == "__main__":
    main()
