"""Time the routed experts of public models' layers on this GPU beside vLLM's fused MoE.

    python serving_benchmarks/moe.py [--models NAME ...] [--m M ...] [--dtype bf16] [--vllm-path DIR] [--sweep]

Each of `MODELS` is one rank's share of a layer: with `tp8` every expert and an eighth of each, with `ep8` an eighth of the
experts and the tokens of all ranks; with `+shared` the shared expert is one more that every token goes to. All experts are
as likely. Weights are larger than the cache, and each call of a graph has tokens and experts of its own; otherwise as
ops.py, whose options and output this shares. The floor is the time to move the weights of the experts that are hit, with
tokens in and out, averaged over the calls. The peers are vLLM's functional `fused_experts` and the modular kernel with
`TritonExperts` that its engine runs, with all their launches, in the tiles of the tuned file that `vllm_tiles` names, where
one is shipped for so many experts or for one less, and in those that vLLM takes without a file. Without vLLM only ours is
timed.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from ops import capture, measure, open_results, parse
from torch import Tensor

from vllm_rocm_ops.families.gemm import BLOCK
from vllm_rocm_ops.ops import fused_experts

CALLS = {16: 32, 256: 16, 1024: 4}  # of a graph, by the most tokens


@dataclass(frozen=True)
class Case:
    """One rank's share of a layer: `routed` of `known` experts, `topk` of which a token goes to, `intermediate` columns of each;
    the shared expert or not; FP8 weights with a scale per block of 128x128, or per row, with tokens quantised likewise."""

    known: int
    routed: int
    topk: int
    hidden: int
    intermediate: int
    shared: bool = False
    blocks: bool = True

    @property
    def experts(self) -> int:
        return self.routed + self.shared


MODELS = {
    "deepseek-v3-tp8": Case(256, 256, 8, 7168, 256),
    "deepseek-v3-tp8+shared": Case(256, 256, 8, 7168, 256, shared=True),
    "deepseek-v3-ep8": Case(256, 32, 8, 7168, 2048),
    "deepseek-v3-ep8+shared": Case(256, 32, 8, 7168, 2048, shared=True),
    "kimi-k2-ep8": Case(384, 48, 8, 7168, 2048),
    "qwen3-30b-a3b": Case(128, 128, 8, 2048, 768),
    "qwen3-235b-a22b-tp4": Case(128, 128, 8, 4096, 384),
    "mixtral-8x7b-tp2": Case(8, 8, 2, 4096, 7168),
    "mixtral-8x22b-tp8": Case(8, 8, 2, 6144, 2048),
    "glm-4.5-air": Case(128, 128, 8, 4096, 1408),
    "llama-4-maverick-tp8": Case(128, 128, 1, 5120, 1024),
    "gpt-oss-120b": Case(128, 128, 4, 2880, 2880, blocks=False),
    "deepseek-v2-lite": Case(64, 64, 6, 2048, 1408),
}


class Weights(NamedTuple):
    """w1 [E, 2 I, H] and w2 [E, H, I] with their scales, None for bf16; expert_map [known] if not all are here."""

    w1: Tensor
    w2: Tensor
    w1_scale: Tensor | None
    w2_scale: Tensor | None
    expert_map: Tensor | None


def make_weights(case: Case, dtype: torch.dtype, device: str = "cuda") -> Weights:
    def weight(rows: int, columns: int) -> Tensor:
        weight = torch.empty(case.experts, rows, columns, dtype=dtype, device=device)
        for expert in weight:
            values = torch.randn(rows, columns, device=device)
            expert.copy_(values * columns**-0.5 if dtype == torch.bfloat16 else values)
        return weight

    def scale(rows: int, columns: int) -> Tensor | None:
        if dtype == torch.bfloat16:
            return None
        shape = (-(-rows // BLOCK), -(-columns // BLOCK)) if case.blocks else (rows, 1)
        return (torch.rand((case.experts, *shape), device=device) + 0.5) * columns**-0.5

    expert_map = None
    if case.routed < case.known:
        expert_map = torch.full((case.known,), -1, dtype=torch.int32, device=device)
        expert_map[: case.routed] = torch.arange(case.routed)
    gate_up, down = (2 * case.intermediate, case.hidden), (case.hidden, case.intermediate)
    return Weights(weight(*gate_up), weight(*down), scale(*gate_up), scale(*down), expert_map)


class Tokens(NamedTuple):
    """hidden [M, H] bf16, topk_weights float32 and topk_ids int32 [M, topk]."""

    hidden: Tensor
    topk_weights: Tensor
    topk_ids: Tensor


def make_tokens(case: Case, m: int, generator: torch.Generator, device: str = "cuda") -> Tokens:
    scores, ids = torch.rand(m, case.known, generator=generator).topk(case.topk)
    hidden = torch.randn(m, case.hidden, generator=generator).to(torch.bfloat16)
    return Tokens(*(t.to(device) for t in (hidden, scores / scores.sum(1, keepdim=True), ids.to(torch.int32))))


def experts_hit(case: Case, tokens: Tokens) -> int:
    return len(tokens.topk_ids[tokens.topk_ids < case.routed].unique()) + case.shared


def arguments(case: Case, weights: Weights, tokens: Tokens) -> tuple:
    """What our op takes; shared experts are not in ids."""
    w1, w2, w1_scale, w2_scale, expert_map = weights
    settings = None, None, expert_map, int(case.shared)
    return tokens.hidden, w1, w2, tokens.topk_weights, tokens.topk_ids, torch.bfloat16, w1_scale, w2_scale, *settings


def with_shared(case: Case, weights: Weights, tokens: Tokens) -> tuple[Weights, Tokens]:
    """The same for vLLM: a shared expert is one more global expert, which every token lists with weight 1."""
    if not case.shared:
        return weights, tokens
    hidden, topk_weights, topk_ids = tokens
    one = topk_weights.new_ones(len(hidden), 1)
    tokens = Tokens(hidden, torch.cat((topk_weights, one), 1), torch.cat((topk_ids, one.int() * case.known), 1))
    if weights.expert_map is not None:
        weights = weights._replace(expert_map=torch.cat((weights.expert_map, one[:1, 0].int() * case.routed)))
    return weights, tokens


class VllmMoe:
    """vLLM's fused MoE for one case; `calls` take (hidden, topk_weights, topk_ids)."""

    def __init__(self, case: Case, weights: Weights):
        from vllm.model_executor.layers.fused_moe import config, fused_moe, modular_kernel
        from vllm.model_executor.layers.fused_moe.activation import MoEActivation
        from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
        from vllm.model_executor.layers.fused_moe.prepare_finalize import make_moe_prepare_and_finalize_no_dp_ep
        from vllm.v1.worker.workspace import init_workspace_manager, is_workspace_manager_initialized

        device, global_experts = weights.w1.device, case.known + case.shared
        if not is_workspace_manager_initialized():
            init_workspace_manager(device)
        if weights.w1_scale is None:
            quantization = config.FUSED_MOE_UNQUANTIZED_CONFIG
        else:
            rows = {"per_act_token_quant": True, "per_out_ch_quant": True}
            settings = {"block_shape": [BLOCK, BLOCK]} if case.blocks else rows
            quantization = config.fp8_w8a8_moe_quant_config(weights.w1_scale, weights.w2_scale, **settings)
        settings = config.FusedMoEConfig(
            num_experts=global_experts,
            experts_per_token=case.topk + case.shared,
            hidden_dim=case.hidden,
            intermediate_size=case.intermediate,
            num_local_experts=case.experts,
            num_logical_experts=global_experts,
            activation=MoEActivation.SILU,
            device=device,
            routing_method=config.RoutingMethodType.DeepSeekV3,
            moe_parallel_config=config.FusedMoEParallelConfig.make_no_parallel(),
            in_dtype=torch.bfloat16,
        )
        prepare = make_moe_prepare_and_finalize_no_dp_ep(use_monolithic=False)
        kernel = modular_kernel.FusedMoEKernel(prepare, TritonExperts(settings, quantization))
        self.default_tiles = functools.partial(
            fused_moe.get_default_config,
            E=case.experts,
            N=case.intermediate,
            K=case.hidden,
            topk=case.topk + case.shared,
            dtype=quantization.config_name(torch.bfloat16),
            block_shape=quantization.block_shape,
        )
        self.file, self.tiles = None, {}
        for experts in (case.experts, case.routed):
            of_file = experts, case.intermediate, quantization.config_name(torch.bfloat16)
            found = fused_moe.get_moe_configs(*of_file, *(quantization.block_shape or (None, None)))
            if found and not self.file:
                self.file, self.tiles = fused_moe.get_config_file_name(*of_file, quantization.block_shape), found
        common = {
            "activation": MoEActivation.SILU,
            "global_num_experts": global_experts,
            "expert_map": weights.expert_map,
            "apply_router_weight_on_input": False,
        }
        self.calls: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
            "fused_experts": lambda hidden, topk_weights, topk_ids: fused_moe.fused_experts(
                hidden, weights.w1, weights.w2, topk_weights, topk_ids, quant_config=quantization, **common
            ),
            "TritonExperts": lambda hidden, topk_weights, topk_ids: kernel.apply(
                hidden, weights.w1, weights.w2, topk_weights, topk_ids, **common
            ),
        }

    def peers(self, m: int) -> Iterator[tuple[str, Callable, dict[str, int]]]:
        """The name of a peer, its call, and the tiles that it takes with m tokens."""
        for name, call in self.calls.items():
            yield f"vllm {name}, default tiles", call, self.default_tiles(m)
            if self.tiles:
                yield f"vllm {name}", call, self.tiles[min(self.tiles, key=lambda tokens: abs(tokens - m))]


def time_case(name: str, case: Case, weights: Weights, m: int, vllm: VllmMoe | None, arch, options) -> list[dict]:
    """A line per configuration of ours: the default, or all of them in a sweep; one without a time if no kernel runs."""
    op, generator = fused_experts, torch.Generator().manual_seed(m)
    calls = next(calls for most, calls in CALLS.items() if m <= most or most == max(CALLS))
    sets = [make_tokens(case, m, generator) for _ in range(calls)]
    hits = [experts_hit(case, tokens) for tokens in sets]
    compared = hits.index(max(hits))  # a call may hit no expert of this rank
    ours = [arguments(case, weights, tokens) for tokens in sets]
    explained = op.explain(*ours[0])
    configs = [explained.config] if explained.launches else []
    if options.sweep and configs:
        configs = list(op.configs(op.Arguments(*ours[0]), arch))
    graphs, results, broken = {}, {}, {}
    for config in configs:
        with op.running(config):
            graphs[str(config)] = capture(op, ours)
            results[str(config)] = op(*ours[compared])
    differs: dict[str, dict[str, float]] = {config: {} for config in results}
    if vllm:
        from vllm.model_executor.layers.fused_moe import override_config

        theirs = [with_shared(case, weights, tokens)[1] for tokens in sets]
        for peer, call, tiles in vllm.peers(m):
            with override_config(tiles):
                try:
                    result = call(*theirs[compared]).float()
                    graphs[peer] = capture(call, theirs)
                except (RuntimeError, ValueError, AssertionError) as error:
                    broken[peer] = (str(error).splitlines() or [repr(error)])[0]
                    continue
            for config, own in results.items():
                differs[config][peer] = ((own.float() - result).abs().max() / result.abs().max()).item()
    times = measure(graphs, calls)
    hit = sum(hits) / calls
    expert_bytes = sum(t.nbytes for t in weights[:4] if t is not None) / case.experts
    bytes_of_call = hit * expert_bytes + sets[0].hidden.nbytes * 2
    floor_us = bytes_of_call / options.bandwidth / 1000
    peers = {peer: round(us, 3) for peer, us in times.items() if peer not in results}

    def line(config: str, us: float | None) -> dict:
        return {
            "op": op.name,
            "case": f"{name} {m} {options.dtype}",
            "shape": {
                "m": m,
                "topk": case.topk,
                "known": case.known,
                "routed": case.routed,
                "shared": int(case.shared),
                "hidden": case.hidden,
                "intermediate": case.intermediate,
            },
            "gpu": torch.cuda.get_device_name(),
            "us": us and round(us, 3),
            "peers": peers,
            "unavailable": broken,
            "experts_hit": round(hit, 2),
            "floor_us": round(floor_us, 3),
            "share_of_floor": us and round(floor_us / us, 3),
            "copy_gb_s": round(options.bandwidth, 1),
            "kernel": config,
            "chosen": us is None or config == str(explained.config),
            "vllm_tiles": vllm and vllm.file,
            "differs": differs.get(config, {}),  # the largest difference, relative to the largest result
            "versions": options.versions,
            "commit": options.commit,
        }

    return [line(c, times[c]) for c in results] or [line(f"none: {explained.source}", None)]


def main() -> None:
    def add_arguments(parser) -> None:
        parser.add_argument("--models", nargs="*", choices=list(MODELS), default=list(MODELS))
        parser.add_argument("--m", nargs="*", type=int, default=[2**i for i in range(11)])
        parser.add_argument("--dtype", choices=("fp8", "bf16"), default="fp8", help="of weights; default: %(default)s")

    options, arch = parse(__doc__, add_arguments)
    dtype = arch.fp8_dtype if options.dtype == "fp8" else torch.bfloat16
    with open_results(options, "moe") as file, torch.inference_mode():
        for name in options.models:
            case, ratios = MODELS[name], []
            weights = make_weights(case, dtype)
            vllm = None
            if options.vllm and not options.vllm_library:
                vllm = VllmMoe(case, with_shared(case, weights, make_tokens(case, 1, torch.Generator()))[0])
            for m in options.m:
                lines = time_case(name, case, weights, m, vllm, arch, options)
                file.writelines(json.dumps(line) + "\n" for line in lines)
                file.flush()
                for line in sorted(lines, key=lambda line: line["us"] or math.inf)[:3]:
                    us, peers = line["us"] or math.nan, line["peers"]
                    print(
                        f"{line['case']:20} {us:8.2f}  {'  '.join(f'{k} {v:8.2f}' for k, v in peers.items())}  "
                        f"floor {line['floor_us']:7.2f} ({line['experts_hit']} experts)  {line['kernel']}  "
                        f"differs {', '.join(f'{v:.1e}' for v in line['differs'].values())}",
                        flush=True,
                    )
                    for peer, why in line["unavailable"].items():
                        print(f"  no {peer}: {why}")
                best = min(lines, key=lambda line: line["us"] or math.inf)
                if best["us"] and best["peers"]:
                    ratios.append((m, min(best["peers"].values()) / best["us"]))
            if vllm:
                print(f"vLLM {options.vllm}: tiles of {vllm.file or 'its default'}")
            for low, high in ((1, 64), (128, 1024)):
                of_range = [ratio for m, ratio in ratios if low <= m <= high]
                if of_range:
                    mean = math.exp(sum(map(math.log, of_range)) / len(of_range))
                    print(f"{name} M {low}..{high}: {mean:.2f}x the best peer, least {min(of_range):.2f}x", flush=True)
            del weights, vllm
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
