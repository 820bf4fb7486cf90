"""Call vLLM's fused MoE with the arguments of `fused_experts`.

The forms are its functional `fused_experts` and the engine's modular kernel with `TritonExperts` (`TritonWNA16Experts` for INT4
weights), all launches included. Both run with the tuned tile sizes that vLLM ships for this number of experts or one less, and with
vLLM's defaults. INT4 weights run with Marlin, too, which reads a copy in its order. A shared expert becomes one more global expert that
every token lists with weight 1.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable

import torch

from vllm_rocm_ops.core.quantization import MX_SCALES
from vllm_rocm_ops.ops import fused_experts
from vllm_rocm_ops.ops.shared.experts import columns_of, is_packed, is_plain, scheme_of


def _moe(module: str = ""):
    """Return vLLM's fused MoE module."""
    return importlib.import_module("vllm.model_executor.layers.fused_moe" + module)


def _quantization(a):
    """Return vLLM's quantization config for weights and tokens."""
    config, kind = _moe(".config"), scheme_of(a.w1, a.w1_scale)
    workspace = importlib.import_module("vllm.v1.worker.workspace")
    if not workspace.is_workspace_manager_initialized():
        workspace.init_workspace_manager(a.w1.device)
    if is_int4(a):
        return config.int4_w4a16_moe_quant_config(
            a.w1_scale, a.w2_scale, w1_zp=None, w2_zp=None, block_shape=[0, kind.group]
        )
    if torch.float32 not in kind.scales:
        raise ValueError("it supports float32 scales, and INT4 weights, only")
    if not kind.scaled:
        return config.FUSED_MOE_UNQUANTIZED_CONFIG
    scaling = dict.fromkeys(("per_act_token_quant", "per_out_ch_quant"), kind.rows == 1)
    scaling["block_shape"] = [kind.rows, kind.group] if kind.group else None
    return config.fp8_w8a8_moe_quant_config(a.w1_scale, a.w2_scale, a.hidden_scale, a.act_scale, **scaling)


def prepare(*arguments) -> tuple[tuple, dict]:
    """Return the tensors and keyword arguments of vLLM's call."""
    a = fused_experts.Arguments(*arguments)
    if not is_plain(a) or a.w2_bias is not None:
        raise ValueError("it is called with SwiGLU and without biases only")
    weights, ids, expert_map, routed = a.topk_weights, a.topk_ids, a.expert_map, len(a.w1) - a.shared_experts
    known = routed if expert_map is None else len(expert_map)
    if a.shared_experts:
        others = torch.arange(a.shared_experts, dtype=torch.int32, device=ids.device)
        weights = torch.cat((weights, weights.new_ones(len(ids), a.shared_experts)), 1)
        ids = torch.cat((ids, (known + others).to(ids.dtype).expand(len(ids), -1)), 1)
        expert_map = None if expert_map is None else torch.cat((expert_map, routed + others))
    options = {
        "quant_config": _quantization(a),
        "expert_map": expert_map,
        "global_num_experts": known + a.shared_experts,
    }
    options["apply_router_weight_on_input"] = a.apply_router_weight_on_input
    return (a.hidden, a.w1, a.w2, weights, ids), options


def call(tensors: tuple, options: dict, tiles: dict[str, int] | None = None):
    """Call the functional form, with these tile sizes or its own choice."""
    with _moe().override_config(tiles):
        return _moe(".fused_moe").fused_experts(*tensors, **options)


def _modular(tensors: tuple, options: dict, tiles: dict[str, int], kernel):
    options = {name: value for name, value in options.items() if name != "quant_config"}
    with _moe().override_config(tiles):
        return kernel.apply(*tensors, activation=_moe(".activation").MoEActivation.SILU, **options)


def aiter_prepare(*arguments) -> tuple[tuple, dict]:
    """Return the tensors and keyword arguments of vLLM's call of AITER, with weights in its order."""
    tensors, options = prepare(*arguments)
    hidden, w1, w2, *routing = tensors
    if options["expert_map"] is not None:
        raise ValueError("it needs all experts on one GPU")
    shuffled = importlib.import_module("vllm._aiter_ops").rocm_aiter_ops.shuffle_weights(w1, w2)
    given = {name: options[name] for name in ("quant_config", "apply_router_weight_on_input")}
    return (hidden, *shuffled, *routing), {"moe_config": _settings(tensors, options), **given}


def aiter(tensors: tuple, options: dict):
    """Call AITER's fused MoE as vLLM does."""
    return _moe(".experts.rocm_aiter_moe").rocm_aiter_fused_experts(*tensors, **options)


@functools.lru_cache(2)
def _in_marlin_order(weight: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return INT4 weights [E, N, K / 2] and their scales [E, N, K / group] as Marlin reads them."""
    marlin = importlib.import_module("vllm.model_executor.layers.quantization.utils.marlin_utils")
    n, k = weight.shape[1], columns_of(weight)
    words = weight.view(torch.int32).transpose(1, 2).contiguous()
    repacked = importlib.import_module("vllm._custom_ops").gptq_marlin_moe_repack(words, k, n, 4)
    return repacked, marlin.marlin_moe_permute_scales(scale.transpose(1, 2).contiguous(), k, n, k // scale.shape[2])


def marlin_prepare(*arguments) -> tuple[tuple, dict]:
    """Return the tensors and keyword arguments of vLLM's call of Marlin for INT4 weights."""
    (hidden, w1, w2, weights, ids), options = prepare(*arguments)
    a = fused_experts.Arguments(*arguments)
    if not is_int4(arguments) or options["expert_map"] is not None:
        raise ValueError("it is called with INT4 weights and all experts on one GPU only")
    marlin = importlib.import_module("vllm.model_executor.layers.quantization.utils.marlin_utils")
    (w1, w1_scale), (w2, w2_scale) = _in_marlin_order(w1, a.w1_scale), _in_marlin_order(w2, a.w2_scale)
    kind = importlib.import_module("vllm.scalar_type").scalar_types.uint4b8
    given = {"workspace": marlin.marlin_make_workspace_new(hidden.device, 4)}
    return (hidden, w1, w2, None, None, w1_scale, w2_scale, weights.float(), ids, kind.id), given


def marlin(tensors: tuple, options: dict):
    """Call vLLM's fused MoE with Marlin's GEMMs."""
    return _moe(".experts.marlin_moe").fused_marlin_moe(*tensors, **options)


def is_four_bit(arguments: tuple) -> bool:
    """True if weights are INT4 or MXFP4."""
    return is_packed(fused_experts.Arguments(*arguments).w1)


def has_mx_scales(arguments: tuple) -> bool:
    """True if weights have a power of two per 32 columns, as MXFP4 and MXFP8 ones have."""
    a = fused_experts.Arguments(*arguments)
    return scheme_of(a.w1, a.w1_scale).scales == MX_SCALES


def is_int4(arguments: tuple) -> bool:
    """True if weights are INT4, with scales that are no powers of two."""
    return is_four_bit(arguments) and not has_mx_scales(arguments)


def _settings(tensors: tuple, options: dict):
    """Return vLLM's configuration of a layer."""
    (hidden, w1, w2, _, ids), config = tensors, _moe(".config")
    return config.FusedMoEConfig(
        num_experts=options["global_num_experts"],
        experts_per_token=ids.shape[1],
        hidden_dim=hidden.shape[1],
        intermediate_size=columns_of(w2),
        num_local_experts=len(w1),
        num_logical_experts=options["global_num_experts"],
        activation=_moe(".activation").MoEActivation.SILU,
        device=w1.device,
        routing_method=config.RoutingMethodType.DeepSeekV3,
        moe_parallel_config=config.FusedMoEParallelConfig.make_no_parallel(),
        in_dtype=hidden.dtype,
    )


def _kernel(tensors: tuple, options: dict):
    """Create vLLM's modular kernel."""
    without_ranks = _moe(".prepare_finalize").make_moe_prepare_and_finalize_no_dp_ep(use_monolithic=False)
    name = "TritonWNA16Experts" if is_packed(tensors[1]) else "TritonExperts"
    experts = getattr(_moe(".experts.triton_moe"), name)(_settings(tensors, options), options["quant_config"])
    return _moe(".modular_kernel").FusedMoEKernel(without_ranks, experts)


def tuned(arguments: tuple) -> tuple[str | None, dict[int, dict[str, int]]]:
    """Return the name of vLLM's tuned file for a call and its tile sizes by tokens, or None and {} if vLLM ships none."""
    if has_mx_scales(arguments):
        return None, {}
    a = fused_experts.Arguments(*arguments)
    fused_moe, quantization = _moe(".fused_moe"), _quantization(a)
    for experts in dict.fromkeys((len(a.w1), len(a.w1) - a.shared_experts)):
        of_file = experts, columns_of(a.w2), quantization.config_name(torch.bfloat16)
        configs = fused_moe.get_moe_configs(*of_file, *(quantization.block_shape or (None, None)))
        if configs:
            return fused_moe.get_config_file_name(*of_file, quantization.block_shape), configs
    return None, {}


def variants(arguments: tuple) -> dict[str, Callable]:
    """Return all forms in all tile sizes, by name, for the number of tokens and the weights in `arguments`.

    They take the result of `prepare`.
    """
    tensors, options = prepare(*arguments)
    (hidden, w1, w2, _, ids), quantization = tensors, options["quant_config"]
    sizes = {"E": len(w1), "N": columns_of(w2), "K": hidden.shape[1], "topk": ids.shape[1]}
    sizes |= {"dtype": quantization.config_name(torch.bfloat16), "block_shape": quantization.block_shape}
    tiles = {", default tiles": _moe(".fused_moe").get_default_config(len(hidden), **sizes)}
    by_tokens = tuned(arguments)[1]
    if by_tokens:
        tiles[""] = by_tokens[min(by_tokens, key=lambda tokens: abs(tokens - len(hidden)))]
    forms = {"fused_experts": call, "TritonExperts": functools.partial(_modular, kernel=_kernel(tensors, options))}
    return {
        f"vllm {form}{which}": functools.partial(run, tiles=chosen)
        for form, run in forms.items()
        for which, chosen in tiles.items()
    }
