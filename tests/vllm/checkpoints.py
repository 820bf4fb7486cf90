"""Tiny random checkpoints of real architectures: they load at once, and are wide enough for 128x128 blocks.

The lm_head's rows have very different lengths, so that greedy decoding has few near-ties: rounding noise then seldom
changes a token, while a wrong op does.
"""

import copy
import json
import pathlib
import re

import torch
from safetensors.torch import save_file

LIMIT = 448.0
BLOCK = 128
GROUP = 32

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", "hidden_act": "silu"}
LLAMA |= {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 512}
LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "rms_norm_eps": 1e-5}
LLAMA |= {"max_position_embeddings": 512, "rope_theta": 10000.0, "tie_word_embeddings": False}
LLAMA |= {"bos_token_id": 1, "eos_token_id": 2}
DEEPSEEK = {**LLAMA, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "rms_norm_eps": 1e-6}
DEEPSEEK |= {"num_hidden_layers": 3, "first_k_dense_replace": 1, "moe_layer_freq": 1, "num_nextn_predict_layers": 0}
DEEPSEEK |= {"moe_intermediate_size": 128, "n_routed_experts": 16, "n_shared_experts": 1, "num_experts_per_tok": 4}
DEEPSEEK |= {"n_group": 4, "topk_group": 2, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
DEEPSEEK |= {"norm_topk_prob": True, "routed_scaling_factor": 1.5, "attention_bias": False, "num_key_value_heads": 4}
DEEPSEEK |= {"q_lora_rank": 128, "kv_lora_rank": 512, "v_head_dim": 128}
DEEPSEEK |= {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
del DEEPSEEK["head_dim"]

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}
LOCAL_EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2}
QWEN_EXPERTS = {**EXPERTS, "decoder_sparse_step": 1, "mlp_only_layers": [0]}
GLM = {"routed_scaling_factor": 1.5, "use_qk_norm": True, "attention_bias": False, "partial_rotary_factor": 0.5}
GLM_EXPERTS = {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
GEMMA_LAYERS = {"layer_types": ["full_attention"] * 2, "sliding_window": 256, "query_pre_attn_scalar": 64}
GPT_OSS = {"sliding_window": 128, "attention_bias": True, "layer_types": ["sliding_attention", "full_attention"]}
GPT_OSS["rope_parameters"] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
GPT_OSS["rope_parameters"] |= {"original_max_position_embeddings": 128, "truncate": False}
KIMI = {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827}
V2_LITE = {"q_lora_rank": None, "topk_method": "greedy", "scoring_func": "softmax", "n_group": 1, "topk_group": 1}
DELTA = {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_hidden_layers": 3}
DELTA |= {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_key_value_heads": 4,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-6,
}
DELTA |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "partial_rotary_factor": 0.5}
DELTA_EXPERTS = {**EXPERTS, "decoder_sparse_step": 1, "mlp_only_layers": [], "shared_expert_intermediate_size": 128}
FAMILIES = {
    # name -> the changes to the configuration of a Llama or DeepSeek
    "mistral": {"architectures": ["MistralForCausalLM"]},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"]},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"]},
    "qwen2_moe": {"architectures": ["Qwen2MoeForCausalLM"], "shared_expert_intermediate_size": 256, **QWEN_EXPERTS},
    "qwen3_moe": {"architectures": ["Qwen3MoeForCausalLM"], **QWEN_EXPERTS},
    "glm4_moe": {"architectures": ["Glm4MoeForCausalLM"], **GLM, **EXPERTS, **GLM_EXPERTS},
    "mixtral": {"architectures": ["MixtralForCausalLM"], **LOCAL_EXPERTS},
    # vLLM's CPU build has no sigmoid without groups
    "minimax_m2": {
        "architectures": ["MiniMaxM2ForCausalLM"],
        "scoring_func": "softmax",
        "rotary_dim": 32,
        **LOCAL_EXPERTS,
    },
    "gpt_oss": {"architectures": ["GptOssForCausalLM"], **LOCAL_EXPERTS, **GPT_OSS},
    "gemma3_text": {"architectures": ["Gemma3ForCausalLM"], "hidden_activation": "gelu_pytorch_tanh", **GEMMA_LAYERS},
    "deepseek_v2": {**DEEPSEEK, "architectures": ["DeepseekV2ForCausalLM"], **V2_LITE},
    "kimi_k2": {**DEEPSEEK, **KIMI},
    "deepseek_v3": {**DEEPSEEK, "num_nextn_predict_layers": 1},
    "qwen3_next": {"architectures": ["Qwen3NextForCausalLM"], **DELTA, **DELTA_EXPERTS},
    "qwen3_5_text": {"architectures": ["Qwen3_5ForCausalLM"], **DELTA},
    "qwen3_5_moe_text": {"architectures": ["Qwen3_5MoeForCausalLM"], **DELTA, **DELTA_EXPERTS},
}
"""Other models, by vLLM's name of their configuration."""
EXPERT = r"[.]experts[.]\d+[.]"
"""The part of a weight's name that names its expert."""
GATES = r"in_proj_(ba|b|a)[.]"
"""Weights of b and a in Gated DeltaNet, which real checkpoints leave in 16 bits."""
DELTA_NETS = tuple(name for name, config in FAMILIES.items() if "linear_num_key_heads" in config)
"""Families with layers of Gated DeltaNet."""
SPARSE_BLOCKS = ("mixtral", "minimax_m2")
"""Families whose checkpoints name experts like Mixtral's."""

ARGUMENTS = {"num_bits": 8, "type": "float", "symmetric": True}
MX_ARGUMENTS = {**ARGUMENTS, "strategy": "group", "group_size": GROUP, "scale_dtype": "torch.uint8"}
INT4_ARGUMENTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}


def compressed(kind: str, weights: dict, inputs: dict | None) -> dict:
    """Return the configuration of a checkpoint by compressed-tensors."""
    dynamic = None if inputs is None else {**inputs, "dynamic": True}
    both = {"weights": {**weights, "dynamic": False}, "input_activations": dynamic}
    groups = {"group_0": {"targets": ["Linear"], **both, "output_activations": None}}
    found = {"quant_method": "compressed-tensors", "format": kind, "quantization_status": "compressed"}
    return {**found, "ignore": ["lm_head"], "config_groups": groups}


TOKEN = compressed("float-quantized", {**ARGUMENTS, "strategy": "channel"}, {**ARGUMENTS, "strategy": "token"})
INT4 = compressed("pack-quantized", INT4_ARGUMENTS, None)
NO_EXPERTS = r"re:.*(self_attn|shared_expert|[.]gate$|mlp[.](gate|up|gate_up|down)_proj).*"
BLOCKS = {"activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}
QUANTIZATION = {
    "bf16": None,
    "static": {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
    "token": TOKEN,
    "mixed": {**TOKEN, "ignore": ["lm_head", "re:.*gate$", "re:.*[.]experts.*"]},
    "bounded": {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1.5, "modules_to_not_convert": ["lm_head"]},
    "block": {"quant_method": "fp8", **BLOCKS, "ignored_layers": ["lm_head"]},
    "mxfp8": compressed("mxfp8-quantized", MX_ARGUMENTS, MX_ARGUMENTS),
    "int4": INT4,
    "int4_experts": {**INT4, "ignore": ["lm_head", NO_EXPERTS]},
    "int4_experts_plain": None,
    "mxfp4_experts": {"quant_method": "mxfp4"},
    "mxfp4_experts_plain": None,
}
"""Quantization flavor -> quantization_config.

`bounded` is per token with an upper bound on the scale, `mixed` per token with experts in bf16, which vLLM's CPU build
runs. `int4` has groups of 32; `int4_experts` has it in experts only, and `int4_experts_plain` the same ones as exact bf16;
so do `mxfp4_experts`.
"""

STATIC_INPUT_SCALE = {
    "in_proj": 0.012,
    "out_proj": 0.006,
    "qkv": 0.012,
    "o_proj": 0.006,
    "gate_up": 0.011,
    "down_proj": 0.02,
}


def linear(generator: torch.Generator, rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
    return (torch.randn(rows, columns, generator=generator) * gain / columns**0.5).bfloat16()


def norm(generator: torch.Generator, columns: int) -> torch.Tensor:
    return (1 + 0.2 * torch.randn(columns, generator=generator)).bfloat16()


def lm_head(generator: torch.Generator, rows: int, columns: int) -> torch.Tensor:
    """Return rows of lognormal length: the highest logit usually leads by far."""
    lengths = torch.exp(0.6 * torch.randn(rows, 1, generator=generator))
    return (linear(generator, rows, columns, 4.0).float() * lengths).bfloat16()


def outer_weights(generator: torch.Generator, words: int, hidden: int) -> dict[str, torch.Tensor]:
    return {
        "model.embed_tokens.weight": torch.randn(words, hidden, generator=generator).bfloat16(),
        "model.norm.weight": norm(generator, hidden),
        "lm_head.weight": lm_head(generator, words, hidden),
    }


def mlp(generator: torch.Generator, prefix: str, hidden: int, inner: int, gain: float = 1.0) -> dict[str, torch.Tensor]:
    return {
        f"{prefix}.gate_proj.weight": linear(generator, inner, hidden),
        f"{prefix}.up_proj.weight": linear(generator, inner, hidden),
        f"{prefix}.down_proj.weight": linear(generator, hidden, inner, gain),
    }


def of_drafts(generator: torch.Generator, prefix: str, hidden: int, weights: dict) -> dict[str, torch.Tensor]:
    """Return what a layer for multi-token prediction has besides a decoder layer's weights."""
    return {
        f"{prefix}.embed_tokens.weight": weights["model.embed_tokens.weight"],
        f"{prefix}.enorm.weight": norm(generator, hidden),
        f"{prefix}.hnorm.weight": norm(generator, hidden),
        f"{prefix}.eh_proj.weight": linear(generator, hidden, 2 * hidden),
        f"{prefix}.shared_head.norm.weight": norm(generator, hidden),
        f"{prefix}.shared_head.head.weight": weights["lm_head.weight"],
    }


def llama_weights(config: dict) -> dict[str, torch.Tensor]:
    """Return the bf16 weights of a Llama."""
    generator = torch.Generator().manual_seed(0)
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    weights = outer_weights(generator, config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        weights |= {
            f"{prefix}.self_attn.q_proj.weight": linear(generator, queries, hidden),
            f"{prefix}.self_attn.k_proj.weight": linear(generator, keys, hidden),
            f"{prefix}.self_attn.v_proj.weight": linear(generator, keys, hidden),
            f"{prefix}.self_attn.o_proj.weight": linear(generator, hidden, queries, 0.7),
            f"{prefix}.input_layernorm.weight": norm(generator, hidden),
            f"{prefix}.post_attention_layernorm.weight": norm(generator, hidden),
            **mlp(generator, f"{prefix}.mlp", hidden, config["intermediate_size"]),
        }
    return weights


def family_weights(config: dict) -> dict[str, torch.Tensor]:
    """Return the bf16 weights of one of FAMILIES: a Llama's, and the family's additional ones."""
    if "kv_lora_rank" in config:
        return deepseek_weights(config)
    family, generator = config["model_type"], torch.Generator().manual_seed(3)
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    layers = config["num_hidden_layers"] + config.get("num_nextn_predict_layers", 0)
    weights = llama_weights({**config, "num_hidden_layers": layers})
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        if layer >= config["num_hidden_layers"]:
            weights |= of_drafts(generator, prefix, hidden, weights)
        if family in ("qwen2", "qwen2_moe", "gpt_oss"):
            for name in "qkv":
                heads = config["num_attention_heads" if name == "q" else "num_key_value_heads"]
                bias = 0.1 * torch.randn(heads * head_dim, generator=generator)
                weights[f"{prefix}.self_attn.{name}_proj.bias"] = bias.bfloat16()
        if family in ("qwen3", "qwen3_moe", "glm4_moe", "gemma3_text", *DELTA_NETS):
            for name in ("q_norm", "k_norm"):
                weights[f"{prefix}.self_attn.{name}.weight"] = norm(generator, head_dim)
        if family in DELTA_NETS:
            weights = with_delta_net(generator, weights, config, layer)
        if family == "minimax_m2":  # one norm for all heads
            for name, heads in (("q_norm", "num_attention_heads"), ("k_norm", "num_key_value_heads")):
                weights[f"{prefix}.self_attn.{name}.weight"] = norm(generator, config[heads] * head_dim)
        if family == "gemma3_text":
            for name in ("pre_feedforward_layernorm", "post_feedforward_layernorm"):
                weights[f"{prefix}.{name}.weight"] = norm(generator, hidden)
        if not has_experts(config, layer):
            continue
        for name in ("gate_proj", "up_proj", "down_proj"):
            del weights[f"{prefix}.mlp.{name}.weight"]
        experts = config.get("num_local_experts") or config["num_experts"]
        inner = config.get("moe_intermediate_size", config["intermediate_size"])
        block = f"{prefix}.block_sparse_moe" if family in SPARSE_BLOCKS else f"{prefix}.mlp"
        weights[f"{block}.gate.weight"] = linear(generator, experts, hidden)
        for expert in range(experts):
            weights |= mlp(generator, f"{block}.experts.{expert}", hidden, inner, 0.5)
        if family == "gpt_oss":
            biases = {"mlp.router.bias": experts, "self_attn.sinks": config["num_attention_heads"]}
            biases |= {"self_attn.o_proj.bias": hidden}
            for name, size in biases.items():
                weights[f"{prefix}.{name}"] = (0.1 * torch.randn(size, generator=generator)).bfloat16()
            weights[f"{prefix}.mlp.router.weight"] = weights.pop(f"{block}.gate.weight")
            for name, size in (("gate_up_proj", 2 * inner), ("down_proj", hidden)):
                bias = 0.1 * torch.randn(experts, size, generator=generator)
                weights[f"{block}.experts.{name}_bias"] = bias.bfloat16()
        if family == "glm4_moe":
            weights[f"{block}.gate.e_score_correction_bias"] = 0.3 * torch.randn(experts, generator=generator)
            weights |= mlp(generator, f"{block}.shared_experts", hidden, inner)
        if family in ("qwen2_moe", *DELTA_NETS):
            weights |= mlp(generator, f"{block}.shared_expert", hidden, config["shared_expert_intermediate_size"])
            weights[f"{block}.shared_expert_gate.weight"] = linear(generator, 1, hidden)
    if family in DELTA_NETS and layers > config["num_hidden_layers"]:
        weights = with_drafts_of_qwen(weights, layers - 1)
    if family in SPARSE_BLOCKS:
        named = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
        for name in [name for name in weights if ".experts." in name]:
            stem, part, _ = name.rsplit(".", 2)
            weights[f"{stem}.{named[part]}.weight"] = weights.pop(name)
    if family == "gemma3_text" or family in DELTA_NETS:  # norms with 1 + weight
        plain = ".linear_attn."
        weights |= {name: weight - 1 for name, weight in weights.items() if "norm" in name and plain not in name}
    return weights


def with_delta_net(generator: torch.Generator, weights: dict, config: dict, layer: int) -> dict[str, torch.Tensor]:
    """Return weights in which a layer has Gated DeltaNet, or attention whose queries have gates."""
    hidden, prefix = config["hidden_size"], f"model.layers.{layer}"
    if layer >= config["num_hidden_layers"] or config["layer_types"][layer] == "full_attention":
        name = f"{prefix}.self_attn.q_proj.weight"
        return weights | {name: linear(generator, 2 * len(weights[name]), hidden)}
    weights = {name: weight for name, weight in weights.items() if not name.startswith(f"{prefix}.self_attn.")}
    heads, size = config["linear_num_value_heads"], config["linear_value_head_dim"]
    key, value = config["linear_num_key_heads"] * config["linear_key_head_dim"], heads * size
    is_packed = config["model_type"] == "qwen3_next"
    projections = {"qkvz": 2 * key + 2 * value, "ba": 2 * heads}
    apart = {"qkv": 2 * key + value, "z": value, "b": heads, "a": heads}
    stem = f"{prefix}.linear_attn"
    for name, rows in (projections if is_packed else apart).items():
        weights[f"{stem}.in_proj_{name}.weight"] = linear(generator, rows, hidden)
    return weights | {
        f"{stem}.conv1d.weight": (torch.randn(2 * key + value, 1, 4, generator=generator) * 0.5).bfloat16(),
        f"{stem}.A_log": torch.rand(heads, generator=generator) - 2,
        f"{stem}.dt_bias": torch.randn(heads, generator=generator).bfloat16(),
        f"{stem}.norm.weight": norm(generator, size),
        f"{stem}.out_proj.weight": linear(generator, hidden, value, 0.7),
    }


def with_drafts_of_qwen(weights: dict, layer: int) -> dict[str, torch.Tensor]:
    """Return weights in which a layer for multi-token prediction has the names of Qwen3-Next and Qwen3.5."""
    names = {
        "enorm.": "pre_fc_norm_embedding.",
        "hnorm.": "pre_fc_norm_hidden.",
        "eh_proj.": "fc.",
        "shared_head.norm.": "norm.",
        **dict.fromkeys(("embed_tokens.", "shared_head.head."), None),  # of the model
    }
    result, prefix = {}, f"model.layers.{layer}."
    for name, weight in weights.items():
        stem, part = name.partition(prefix)[1:]
        found = next((of for of in names if part.startswith(of)), "")
        if not stem:
            result[name] = weight
        elif not found:
            result[f"mtp.layers.0.{part}"] = weight
        elif names[found]:
            result["mtp." + names[found] + part.removeprefix(found)] = weight
    return result


def has_experts(config: dict, layer: int) -> bool:
    dense = config.get("mlp_only_layers", range(config.get("first_k_dense_replace", 0)))
    return "num_experts_per_tok" in config and layer not in dense


def deepseek_weights(config: dict) -> dict[str, torch.Tensor]:
    """Return the bf16 weights of a DeepSeek V3."""
    generator = torch.Generator().manual_seed(1)
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    query_rank, latent, experts = config["q_lora_rank"], config["kv_lora_rank"], config["n_routed_experts"]
    weights = outer_weights(generator, config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"] + config["num_nextn_predict_layers"]):
        prefix = f"model.layers.{layer}"
        if layer == config["num_hidden_layers"]:  # multi-token prediction
            weights |= of_drafts(generator, prefix, hidden, weights)
        if query_rank is None:
            weights[f"{prefix}.self_attn.q_proj.weight"] = linear(generator, heads * (nope + rope), hidden)
        else:
            weights |= {
                f"{prefix}.self_attn.q_a_proj.weight": linear(generator, query_rank, hidden),
                f"{prefix}.self_attn.q_a_layernorm.weight": norm(generator, query_rank),
                f"{prefix}.self_attn.q_b_proj.weight": linear(generator, heads * (nope + rope), query_rank),
            }
        weights |= {
            f"{prefix}.self_attn.kv_a_proj_with_mqa.weight": linear(generator, latent + rope, hidden),
            f"{prefix}.self_attn.kv_a_layernorm.weight": norm(generator, latent),
            f"{prefix}.self_attn.kv_b_proj.weight": linear(generator, heads * (nope + value), latent),
            f"{prefix}.self_attn.o_proj.weight": linear(generator, hidden, heads * value, 0.7),
            f"{prefix}.input_layernorm.weight": norm(generator, hidden),
            f"{prefix}.post_attention_layernorm.weight": norm(generator, hidden),
        }
        if layer < config["first_k_dense_replace"]:
            weights |= mlp(generator, f"{prefix}.mlp", hidden, config["intermediate_size"])
            continue
        inner = config["moe_intermediate_size"]
        weights[f"{prefix}.mlp.gate.weight"] = linear(generator, experts, hidden)
        if config["topk_method"] == "noaux_tc":
            weights[f"{prefix}.mlp.gate.e_score_correction_bias"] = 0.3 * torch.randn(experts, generator=generator)
        for expert in range(experts):
            weights |= mlp(generator, f"{prefix}.mlp.experts.{expert}", hidden, inner, 0.5)
        weights |= mlp(generator, f"{prefix}.mlp.shared_experts", hidden, inner * config["n_shared_experts"])
    return weights


def quantize_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight [n, k] as e4m3fn with one scale per 128x128 block; partial blocks at the ends."""
    rows, columns = weight.shape
    blocks = -(-rows // BLOCK), -(-columns // BLOCK)
    padded = torch.zeros(blocks[0] * BLOCK, blocks[1] * BLOCK)
    padded[:rows, :columns] = weight.float()
    tiles = padded.view(blocks[0], BLOCK, blocks[1], BLOCK)
    scale = tiles.abs().amax((1, 3)) / LIMIT
    data = (tiles / scale[:, None, :, None].clamp(min=1e-12)).to(torch.float8_e4m3fn)
    return data.view(padded.shape)[:rows, :columns].contiguous(), scale


def spread_blocks(weight: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return a weight whose 128x128 blocks are multiplied by factors over a decade, of mean square 1."""
    blocks = [-(-size // BLOCK) for size in weight.shape]
    factors = 10 ** torch.rand(*blocks, generator=generator)
    factors = (factors / factors.square().mean().sqrt()).repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return weight * factors[: weight.shape[0], : weight.shape[1]]


def quantize_groups(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight [n, k] as e4m3fn with one e8m0 scale per 32 of k, the smallest power of two that clamps nothing."""
    groups = weight.float().unflatten(1, (-1, GROUP))
    exponent = torch.ceil(torch.log2(groups.abs().amax(-1, keepdim=True) / LIMIT))
    data = (groups / torch.exp2(exponent)).to(torch.float8_e4m3fn)
    return data.flatten(1), (exponent.squeeze(-1) + 127).to(torch.uint8)


def quantize_int4(weight: torch.Tensor, powers: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight [n, k] as -8 to 7 [n, k / 32, 32] and scales. With powers of two bf16 holds the products."""
    groups = weight.float().unflatten(1, (-1, GROUP))
    scale = groups.abs().amax(-1) / 7
    scale = torch.exp2(torch.ceil(torch.log2(scale))) if powers else scale.bfloat16().float()
    return (groups / scale[..., None]).round().clamp(-8, 7), scale.bfloat16()


def pack(values: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return an int4 weight's values of `quantize_int4` as words of eight, with its scales and its shape."""
    bits = (values.flatten(1) + 8).to(torch.int32).unflatten(1, (-1, 8))
    words = (bits << torch.arange(0, 32, 4, dtype=torch.int32)).sum(-1, dtype=torch.int32)
    return {"weight_packed": words, "weight_scale": scale, "weight_shape": torch.tensor(values.flatten(1).shape)}


def quantize_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a weight [n, k] as pairs of e2m1 [n, k / 2] and e8m0 scales [n, k / 32], and its numbers in bf16."""
    numbers = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    groups = weight.float().unflatten(1, (-1, GROUP))
    exponent = (groups.abs().amax(-1, keepdim=True) / 4).log2().floor()
    bits = ((groups / exponent.exp2()).abs()[..., None] - numbers).abs().argmin(-1)
    exact = (numbers[bits] * groups.sign() * exponent.exp2()).flatten(1).bfloat16()
    bits = (bits + 8 * (groups < 0)).flatten(1).to(torch.uint8)
    return bits[:, 0::2] | bits[:, 1::2] << 4, (exponent.squeeze(-1) + 127).to(torch.uint8), exact


def as_gpt_oss(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return weights whose experts are stacked, rows of gate and up alternating: quantized in blocks, bf16 transposed."""
    result = {
        name: weight for name, weight in weights.items() if ".experts.0." not in name and not re.search(EXPERT, name)
    }
    for first in [name for name in weights if ".experts.0." in name and "up_proj" not in name]:
        experts, part = first.split(".experts.0.")
        stacked = [
            torch.stack([value for name, value in weights.items() if re.fullmatch(rf"{experts}{EXPERT}{of}", name)])
            for of in ((part, part.replace("gate_", "up_")) if "gate" in part else (part,))
        ]
        made = torch.stack(stacked, 2).flatten(1, 2)
        name, _, kind = part.replace("gate_", "gate_up_").rpartition(".")
        if kind == "weight_scale":
            result[f"{experts}.experts.{name}_scales"] = made
        elif made.dtype == torch.uint8:
            result[f"{experts}.experts.{name}_blocks"] = made.unflatten(2, (-1, GROUP // 2))
        else:
            result[f"{experts}.experts.{name}"] = made.transpose(1, 2)
    return result


def quantize(weights: dict[str, torch.Tensor], flavour: str) -> dict[str, torch.Tensor]:
    """Return the linear layers' weights as e4m3fn or int4, with the scales of the flavor's checkpoints."""
    if flavour == "bf16":
        return weights
    result, generator = {}, torch.Generator().manual_seed(2)
    for name, weight in weights.items():
        is_linear = "_proj" in name and not re.search(f"eh_proj|bias|{GATES}", name) and weight.dim() > 1
        is_bf16 = flavour == "mixed" if ".experts." in name else "4_experts" in flavour
        if not is_linear or is_bf16:
            result[name] = weight
            continue
        stem = name.removesuffix(".weight")
        if flavour.startswith("mxfp4"):
            values, scale, exact = quantize_mxfp4(weight)
            plain = flavour == "mxfp4_experts_plain"
            result |= {name: exact} if plain else {name: values, f"{stem}.weight_scale": scale}
            continue
        if flavour.startswith("int4"):
            values, scale = quantize_int4(weight, powers=flavour != "int4")
            if flavour == "int4_experts_plain":
                result[name] = (values * scale.float()[..., None]).flatten(1).bfloat16()
            else:
                result |= {f"{stem}.{of}": value for of, value in pack(values, scale).items()}
            continue
        if flavour == "block":
            result[name], result[f"{stem}.weight_scale_inv"] = quantize_blocks(spread_blocks(weight, generator))
            continue
        if flavour == "mxfp8":
            result[name], result[f"{stem}.weight_scale"] = quantize_groups(weight)
            continue
        per_row = flavour in ("token", "mixed", "bounded")
        largest = weight.float().abs().amax(1, keepdim=True) if per_row else weight.float().abs().amax()
        scale = largest / LIMIT
        result[name], result[f"{stem}.weight_scale"] = (weight.float() / scale).to(torch.float8_e4m3fn), scale
        if flavour == "static":
            part = stem.rsplit(".", 1)[-1]
            merged = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}
            part = "in_proj" if part.startswith("in_proj") else merged.get(part, part)
            result[f"{stem}.input_scale"] = torch.tensor(STATIC_INPUT_SCALE[part])
    return result


def quantization(settings: dict | None, config: dict, weights: dict[str, torch.Tensor]) -> dict | None:
    """Return a copy of a checkpoint's quantization, which leaves Gated DeltaNet's gates and MTP's `fc` in 16 bits."""
    settings = copy.deepcopy(settings)
    if settings and config.get("model_type") in DELTA_NETS:
        left = settings.setdefault("ignored_layers" if settings["quant_method"] == "fp8" else "ignore", [])
        left += [name.removesuffix(".weight") for name in weights if re.search(rf"{GATES}|^mtp[.]fc[.]", name)]
    return settings


def build(folder: pathlib.Path, model: str, flavour: str, **overrides) -> pathlib.Path:
    """Write the checkpoint `model`, "llama", "deepseek" or one of FAMILIES, in a flavor; return its folder."""
    if model in FAMILIES:
        config, make = {**LLAMA, **FAMILIES[model], "model_type": model}, family_weights
    else:
        config, make = {"llama": (LLAMA, llama_weights), "deepseek": (DEEPSEEK, deepseek_weights)}[model]
    config = {**config, **overrides}
    weights = quantize(make(config), flavour)
    if model == "gpt_oss":
        weights = as_gpt_oss(weights)
    if settings := quantization(QUANTIZATION[flavour], config, weights):
        config["quantization_config"] = settings
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}))
    contiguous = {name: weight.clone(memory_format=torch.contiguous_format) for name, weight in weights.items()}
    save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def build_draft(folder: pathlib.Path, target: dict) -> pathlib.Path:
    """Write an EAGLE3 draft model in bf16 for a Llama of two layers; return its folder."""
    aux = [0, 1, 2]
    """The target's hidden states that it reads, before each layer and after the last."""
    config = {**target, "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1}
    config |= {"draft_vocab_size": target["vocab_size"], "eagle_aux_hidden_state_layer_ids": aux}
    generator, hidden = torch.Generator().manual_seed(4), target["hidden_size"]
    of_target = llama_weights(config)
    weights = {
        "fc.weight": linear(generator, hidden, len(aux) * hidden),
        "midlayer.hidden_norm.weight": norm(generator, hidden),
        "norm.weight": of_target["model.norm.weight"],
        "lm_head.weight": of_target["lm_head.weight"],
    }
    for name, weight in of_target.items():
        if (prefix := "model.layers.0.") in name:
            doubled = name.removesuffix("_proj.weight").endswith((".q", ".k", ".v"))
            weights[name.replace(prefix, "midlayer.")] = torch.cat([weight, weight], 1) if doubled else weight
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def build_adapter(folder: pathlib.Path, config: dict, rank: int = 8) -> pathlib.Path:
    """Write a LoRA adapter for every linear layer of a Llama; return its folder."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    q, kv = (config[heads] * config["head_dim"] for heads in ("num_attention_heads", "num_key_value_heads"))
    generator, weights = torch.Generator().manual_seed(1), {}
    sizes = {"q_proj": (hidden, q), "k_proj": (hidden, kv), "v_proj": (hidden, kv), "o_proj": (q, hidden)}
    sizes |= {"gate_proj": (hidden, inner), "up_proj": (hidden, inner), "down_proj": (inner, hidden)}
    for layer in range(config["num_hidden_layers"]):
        for name, (k, n) in sizes.items():
            block = "self_attn" if name[0] in "qkvo" else "mlp"
            stem = f"base_model.model.model.layers.{layer}.{block}.{name}"
            weights[f"{stem}.lora_A.weight"] = 0.05 * torch.randn(rank, k, generator=generator)
            weights[f"{stem}.lora_B.weight"] = 0.05 * torch.randn(n, rank, generator=generator)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    described = {"r": rank, "lora_alpha": rank, "target_modules": [*sizes], "peft_type": "LORA", "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(described))
    return folder
