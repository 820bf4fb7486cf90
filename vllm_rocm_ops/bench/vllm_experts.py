"""vLLM's fused MoE as peers of `fused_experts`: its functional `fused_experts`, and the modular kernel with `TritonExperts` that
its engine runs, with all their launches.

Both run in the tiles of the tuned file that vLLM ships for so many experts or for one less, where it does, and in those that it takes
without a file. A shared expert is one more global expert, which every token lists with weight 1.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable

import torch

from vllm_rocm_ops.bench.peers import Peer, experts_quantization, has_vllm
from vllm_rocm_ops.ops import fused_experts

MOE = "vllm.model_executor.layers.fused_moe"


def _tuned(a) -> tuple[str | None, dict[int, dict]]:
    """The name of the tuned file for a call's weights, and its tiles by tokens; None and nothing where vLLM ships none."""
    fused_moe, quantization = importlib.import_module(f"{MOE}.fused_moe"), experts_quantization(a)
    for experts in (len(a.w1), len(a.w1) - a.shared_experts):
        of_file = experts, a.w1.shape[1] // 2, quantization.config_name(torch.bfloat16)
        found = fused_moe.get_moe_configs(*of_file, *(quantization.block_shape or (None, None)))
        if found:
            return fused_moe.get_config_file_name(*of_file, quantization.block_shape), found
    return None, {}


def tuned_file(arguments: tuple) -> str | None:
    """The name of the tuned file that vLLM takes for a call; None where it has none, or is not installed."""
    return _tuned(fused_experts.Arguments(*arguments))[0] if has_vllm() else None


def peers(arguments: tuple) -> dict[str, Peer]:
    """The peers for calls with the weights and the number of tokens of these arguments of our op; none without vLLM."""
    if not has_vllm():
        return {}
    a = fused_experts.Arguments(*arguments)
    fused_moe, quantization = importlib.import_module(f"{MOE}.fused_moe"), experts_quantization(a)
    silu = importlib.import_module(f"{MOE}.activation").MoEActivation.SILU
    routed = len(a.w1) - a.shared_experts
    known = routed if a.expert_map is None else len(a.expert_map)
    expert_map = a.expert_map
    if expert_map is not None and a.shared_experts:
        expert_map = torch.cat((expert_map, expert_map.new_full((1,), routed)))
    common = {"activation": silu, "global_num_experts": known + a.shared_experts, "expert_map": expert_map}
    common["apply_router_weight_on_input"] = False

    def prepare(*of_call) -> tuple:
        own = fused_experts.Arguments(*of_call)
        weights, ids = own.topk_weights, own.topk_ids
        if own.shared_experts:
            weights = torch.cat((weights, weights.new_ones(len(ids), 1)), 1)
            ids = torch.cat((ids, ids.new_full((len(ids), 1), known)), 1)
        return own.hidden, own.w1, own.w2, weights, ids

    calls = {
        "fused_experts": functools.partial(fused_moe.fused_experts, quant_config=quantization, **common),
        "TritonExperts": functools.partial(_kernel(a, known, quantization, silu).apply, **common),
    }
    _, tiles = _tuned(a)
    default = fused_moe.get_default_config(
        len(a.hidden),
        E=len(a.w1),
        N=a.w1.shape[1] // 2,
        K=a.hidden.shape[1],
        topk=a.topk_ids.shape[1] + a.shared_experts,
        dtype=quantization.config_name(torch.bfloat16),
        block_shape=quantization.block_shape,
    )
    found = {}
    for name, call in calls.items():
        found[f"vllm {name}, default tiles"] = Peer(_in_tiles(call, default), prepare)
        if tiles:
            nearest = tiles[min(tiles, key=lambda tokens: abs(tokens - len(a.hidden)))]
            found[f"vllm {name}"] = Peer(_in_tiles(call, nearest), prepare)
    return found


def _in_tiles(call: Callable, tiles: dict[str, int]) -> Callable:
    fused_moe = importlib.import_module(MOE)

    def run(*tensors):
        with fused_moe.override_config(tiles):
            return call(*tensors)

    return run


def _kernel(a, known: int, quantization, activation):
    """vLLM's modular kernel."""
    config = importlib.import_module(f"{MOE}.config")
    settings = config.FusedMoEConfig(
        num_experts=known + a.shared_experts,
        experts_per_token=a.topk_ids.shape[1] + a.shared_experts,
        hidden_dim=a.hidden.shape[1],
        intermediate_size=a.w1.shape[1] // 2,
        num_local_experts=len(a.w1),
        num_logical_experts=known + a.shared_experts,
        activation=activation,
        device=a.w1.device,
        routing_method=config.RoutingMethodType.DeepSeekV3,
        moe_parallel_config=config.FusedMoEParallelConfig.make_no_parallel(),
        in_dtype=torch.bfloat16,
    )
    prepare = importlib.import_module(f"{MOE}.prepare_finalize").make_moe_prepare_and_finalize_no_dp_ep
    experts = importlib.import_module(f"{MOE}.experts.triton_moe").TritonExperts(settings, quantization)
    return importlib.import_module(f"{MOE}.modular_kernel").FusedMoEKernel(prepare(use_monolithic=False), experts)
