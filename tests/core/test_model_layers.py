"""Test the calls of a model's step, from its config.json."""

import dataclasses
import json

import pytest
import torch
from compressed import compressed, number
from keys import key

from vllm_rocm_ops import ops
from vllm_rocm_ops.core import archs
from vllm_rocm_ops.core.op import Op
from vllm_rocm_ops.models import config as model_config
from vllm_rocm_ops.models import fused_calls
from vllm_rocm_ops.models import layers as model_layers
from vllm_rocm_ops.models.config import read
from vllm_rocm_ops.models.fused_calls import FusedCall, Fusion
from vllm_rocm_ops.models.layers import Launch, LayerCall, calls
from vllm_rocm_ops.tools import cli, explain
from vllm_rocm_ops.vllm import comparisons
from vllm_rocm_ops.vllm.selection import kernel_selection

LLAMA = "llama-3.1-405b-fp8"


def found(config: dict, tp: int = 1) -> dict[str, list[tuple]]:
    """Return, by layer, the op's name, its problem without tokens, and the calls per step, for each kind of call."""
    layers: dict[str, list[tuple]] = {}
    for call in calls(config, tp):
        arguments = call.case(1).make("meta", torch.Generator(), torch.float8_e4m3fn)
        _, *sizes = [v for v in call.op.problem(call.op.Arguments(*arguments)).values() if isinstance(v, int)]
        layers.setdefault(call.layer, []).append((call.op.name, *sizes, call.count))
    return layers


def fused(config: dict, *of: Op, tp: int = 1) -> list[FusedCall]:
    """Return a model's fused calls of some ops."""
    return [call for call in fused_calls.calls(config, tp) if call.op in of]


def given(call, tokens: int = 3, fp8: torch.dtype = torch.float8_e4m3fn, device: str = "meta") -> tuple:
    """Return a call's arguments."""
    return call.op.Arguments(*call.case(tokens).make(device, torch.Generator().manual_seed(0), fp8))


def joins(fusion: Fusion, *sequence: LayerCall) -> bool:
    """True if a fusion replaces launches of a step, or these and a rotation, a cache write and MLA after them."""
    attention = model_layers.attention(read("deepseek-v3"))
    return any(fusion.find([*sequence, Launch("rotation", (64,)), Launch("cache write"), *attention]))


def test_llama_at_tp8():
    static = "fused_add_rms_norm_static_fp8_quant"
    assert found(read(LLAMA), 8) == {
        "input norm": [("rms_norm_static_fp8_quant", 16384, 1), (static, 16384, 125)],
        "qkv": [("scaled_mm", 2304, 16384, 126)],
        "o": [("scaled_mm", 16384, 2048, 126)],
        "post-attention norm": [(static, 16384, 126)],
        "gate_up": [("scaled_mm", 13312, 16384, 126)],
        "SwiGLU": [("silu_and_mul_quant", 6656, 126)],
        "down": [("scaled_mm", 16384, 6656, 126)],
        "final norm": [("fused_add_rms_norm", 16384, 1)],
        "lm_head": [("unquantized_gemm", 16032, 16384, 1)],
    }


def test_deepseek_at_tp8():
    layers = found(read("deepseek-v3"), 8)
    assert layers["input norm"] == [("rms_norm_per_block_quant", 7168, 1), ("rms_norm_per_block_quant", 7168, 60)]
    assert layers["kv_b (prefill)"] == [("block_scaled_mm", 4096, 512, 0)]
    assert layers["post-attention norm"] == [("fused_add_rms_norm", 7168, 58)]  # two readers: not quantized
    assert layers["dense post-attention norm"] == [("rms_norm_per_block_quant", 7168, 3)]
    assert layers["router"] == [("unquantized_gemm", 256, 7168, 58)]
    assert layers["shared SwiGLU"] == [("silu_and_mul_per_block_quant", 256, 58)]
    assert layers["q_a norm"] == [("rms_norm_per_block_quant", 1536, 61)]


def test_experts_whose_hidden_states_the_norm_quantizes():
    """It has the quantization of experts; other models have none."""
    norm, experts = fused_calls.quantized_hidden(read("deepseek-v3"), 8)
    assert (norm.layer, norm.op, norm.count) == ("post-attention norm", ops.rms_norm_and_per_block_quant, 58)
    fp8 = torch.float8_e4m3fnuz
    a = given(norm, fp8=fp8)
    _, values, scales = norm.op.allocate(a)
    b = given(experts, fp8=fp8)
    assert (b.hidden.shape, b.hidden.dtype, b.out_dtype) == (values.shape, values.dtype, torch.bfloat16)
    assert (b.hidden_scale.shape, b.hidden_scale.stride()) == (scales.shape, scales.stride()) and experts.count == 58
    launched = [launch.symbol for launch in experts.op.explain(*b, arch=archs.named("gfx942")).launches]
    assert launched == ["fused_experts_gate_up_block", "fused_experts_down_quant_block_bf16"]
    assert [call.count for call in fused_calls.quantized_hidden(read("qwen3-30b-a3b-fp8"))] == [48, 48]
    for model in (GLM, LLAMA, "tiny-deepseek-v3"):  # a norm that is vLLM's, no experts, experts in bf16
        assert fused_calls.quantized_hidden(read(model)) == []


def test_gate_up_and_swiglu_in_one_launch():
    """One launch does the work of two calls of the step, equally often, for static scales only."""
    op = ops.scaled_mm_silu_and_mul_quant
    [call] = fused(read(LLAMA), op, tp=8)
    assert (call.layer, call.count) == ("gate_up + SwiGLU", 126)
    a = given(call)
    assert a.a.shape == (3, 16384) and a.b.shape == (16384, 13312) and call.op.allocate(a).shape == (3, 6656)
    assert a.scale_a.numel() == a.scale_b.numel() == a.scale.numel() == 1
    product, activation = call.parts
    assert {product, activation} < set(calls(read(LLAMA), 8)) and joins(call.fusion, product, activation)
    for parameters in ((13312, 16384, True), (13312, 16384, False, True)):  # scales per token, a bias
        assert not joins(call.fusion, dataclasses.replace(product, parameters=parameters), activation)
    for model in ("deepseek-v3", GLM, "qwen3-8b-fp8", "tiny-llama"):
        assert fused(read(model), op) == []


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({}, "block"),
        ({"quantization_config": None, "num_hidden_layers": 5}, "none"),
        ({"q_lora_rank": None, "num_hidden_layers": 5}, "none"),
    ],
)
def test_mla_attentions_norms_and_cache_write_in_one_launch(change, kind):
    """One launch does the work of a layer's norms and cache write, equally often; DeepSeek-V2-Lite has one norm."""
    config = {
        name: value
        for name, value in (read("deepseek-v3") | change).items()
        if value is not None or name in ("q_lora_rank",)
    }
    [call] = fused(config, ops.mla_norm_rope_and_cache, tp=8)
    latents = (1536 if config["q_lora_rank"] else 0), 512
    names = ["q_a norm", "kv_a norm", "cache write"][latents[0] == 0 :]
    assert (call.layer, call.parameters, call.count) == (
        " + ".join(names),
        (latents, 64, kind, 1e-6),
        config["num_hidden_layers"],
    )
    assert {*call.parts} == {one for one in calls(config, 8) if one.layer in names}
    a = given(call)
    assert a.qkv.shape == (3, sum(latents) + 64) and a.kv_out.shape == (3, 512) and a.kv_cache.shape == (3, 16, 576)
    assert (a.q_out is None) == (a.q_weight is None) == (not latents[0])
    assert (a.scales_out is not None and a.scales_out.shape == (3, 12)) == (kind == "block")
    assert not call.op.explain(*a, arch="gfx950").is_fallback
    kept = model_layers.sequence(config, 8)
    assert [one.layer for one in kept if one.op is call.op] == []


def test_no_other_model_has_latents():
    for model in (LLAMA, GLM, "qwen3-8b-fp8", "tiny-llama"):
        assert fused(read(model), ops.mla_norm_rope_and_cache) == []
    [call] = fused(read("deepseek-v3"), ops.mla_norm_rope_and_cache)
    q, kv = call.parts
    assert joins(call.fusion, q, kv)
    mx = dataclasses.replace(q, op=ops.rms_norm_mxfp8_quant)
    assert not joins(call.fusion, mx, kv), "queries in MX-FP8 are quantized by a launch of their own"


@pytest.mark.parametrize(
    ("model", "tp", "wanted"),
    [
        (LLAMA, 8, ("paged_attention_decode", [16, 128], [8192, 1, 16, 16, 8], 128**-0.5, 126)),
        ("qwen3-8b-fp8", 16, ("paged_attention_decode", [2, 128], [2560, 1, 16, 16, 8], 128**-0.5, 36)),
        ("deepseek-v3", 8, ("mla_decode", [16, 512], [10240, 16, 576], 192**-0.5, 61)),
    ],
)
def test_attention_of_decode(model, tp, wanted):
    """Query and cache are those for one request at the model's maximum length."""
    [call] = model_layers.attention(read(model), tp)
    arguments = given(call, 1)
    cache = getattr(arguments, "kv_cache", None)
    cache = arguments.key_cache if cache is None else cache
    found = call.op.name, list(arguments[0].shape[1:]), list(cache.shape), arguments.scale, call.count
    assert found == wanted
    assert arguments.block_table.numel() == len(cache)


def test_launches_around_attention_in_one():
    """Each joined launch replaces the right launches of a model's decode, with arguments that the ops accept."""

    def made(model: str, tp: int, **changed) -> dict[str, tuple]:
        result = {}
        for call in fused(read(model) | changed, ops.rope_and_cache, ops.qk_norm_rope_and_cache, tp=tp):
            a = given(call, fp8=torch.float8_e4m3fnuz)
            assert call.op.explain(*a, arch="gfx942").launches
            result[call.layer] = call.op.name, call.count, a
            assert not call.parts
        return result

    rotated, normed = "rotation + cache write", "norms of q and k + rotation + cache write"
    for model, tp, layer, op, count in (
        (LLAMA, 8, rotated, "rope_and_cache", 126),
        ("qwen3-8b-fp8", 2, normed, "qk_norm_rope_and_cache", 36),
    ):
        assert {name: each[:2] for name, each in made(model, tp).items()} == {layer: (op, count)}
    a = made(LLAMA, 8)[rotated][2]
    assert a.query.shape == (3, 16 * 128) and a.key.shape == a.value.shape == (3, 128)
    assert a.query.stride(0) == 18 * 128 and a.cos_sin_cache.shape[1] == 128
    glm = made(GLM, 4)
    assert list(glm) == [rotated] and glm[rotated][2].cos_sin_cache.shape[1] == 64, "half of a head is rotated"
    assert list(made(GLM, 4, use_qk_norm=True, num_hidden_layers=4)) == [normed]
    assert list(made("tiny-llama", 1)) == [rotated] and made("deepseek-v3", 8) == {}


def test_products_that_mla_attention_absorbs():
    """Each head's two weights, which are [K, N], have vLLM's layout."""
    assert model_layers.absorbed(read(LLAMA), 8) == []
    found = {}
    for call in model_layers.absorbed(read("deepseek-v3"), 8):
        x, weights = call.case(3).make("meta", torch.Generator(), torch.float8_e4m3fn)
        found[call.layer] = call.op.name, [*x.shape], [*weights.shape], weights.stride().index(1), call.count
    assert found == {
        "W_UK": ("batched_gemm", [3, 16, 128], [16, 128, 512], 2, 61),
        "W_UV": ("batched_gemm", [3, 16, 512], [16, 512, 128], 1, 61),
    }


def test_qwen3_8b_at_tp2():
    norm = "rms_norm_per_block_quant"
    assert found(read("qwen3-8b-fp8"), 2) == {
        "input norm": [(norm, 4096, 1), (norm, 4096, 35)],
        "qkv": [("block_scaled_mm", 3072, 4096, 36)],
        "o": [("block_scaled_mm", 4096, 2048, 36)],
        "post-attention norm": [(norm, 4096, 36)],
        "gate_up": [("block_scaled_mm", 12288, 4096, 36)],
        "SwiGLU": [("silu_and_mul_per_block_quant", 6144, 36)],
        "down": [("block_scaled_mm", 4096, 6144, 36)],
        "final norm": [("fused_add_rms_norm", 4096, 1)],
        "lm_head": [("unquantized_gemm", 75968, 4096, 1)],
    }


def test_qwen3_30b():
    layers = found(read("qwen3-30b-a3b-fp8"))
    assert layers["qkv"] == [("block_scaled_mm", 5120, 2048, 48)]
    assert layers["o"] == [("block_scaled_mm", 2048, 4096, 48)]
    assert layers["router"] == [("unquantized_gemm", 128, 2048, 48)]
    assert layers["routing"] == [("topk_softmax", 128, 8, 48)]
    by_layer = {call.layer: call for call in calls(read("qwen3-30b-a3b-fp8"), 4, 4)}
    a = given(by_layer["routing"])
    assert a.renormalize and a.e_score_correction_bias is None
    a = given(by_layer["experts"])
    assert a.w1.shape == (32, 1536, 2048) and a.w2.shape == (32, 2048, 768) and a.w2_scale.shape == (32, 16, 6)


def test_layers_of_qwen3_without_experts():
    config = read("qwen3-30b-a3b-fp8") | {"mlp_only_layers": [1], "decoder_sparse_step": 2, "num_hidden_layers": 8}
    layers = found(config, 2)
    assert layers["experts"][0][-1] == 3 and layers["dense down"] == [("block_scaled_mm", 2048, 3072, 5)]


GLM = "glm-4.5-air-fp8"


def test_glm_at_tp4():
    """The norm before experts quantizes nothing: the router reads its result, too."""
    norm, activation = "rms_norm_dynamic_per_token_quant", "silu_and_mul_per_token_quant"
    assert found(read(GLM), 4) == {
        "input norm": [(norm, 4096, 1), (norm, 4096, 45)],
        "qkv": [("scaled_mm", 3584, 4096, 46)],
        "o": [("scaled_mm", 4096, 3072, 46)],
        "post-attention norm": [("fused_add_rms_norm", 4096, 45)],
        "dense post-attention norm": [(norm, 4096, 1)],
        "dense gate_up": [("scaled_mm", 5472, 4096, 1)],
        "dense SwiGLU": [(activation, 2736, 1)],
        "dense down": [("scaled_mm", 4096, 2736, 1)],
        "routing": [("grouped_topk", 128, 8, 45)],
        "experts": [("fused_experts", 8, 128, 4096, 352, 45)],
        "shared gate_up": [("scaled_mm", 704, 4096, 45)],
        "shared SwiGLU": [(activation, 352, 45)],
        "shared down": [("scaled_mm", 4096, 352, 45)],
        "final norm": [("fused_add_rms_norm", 4096, 1)],
        "lm_head": [("unquantized_gemm", 37888, 4096, 1)],
    }


def test_arguments_of_glm():
    """The router's logits and its bias are in float32, and only qkv has a bias."""
    made = {call.layer: given(call) for call in calls(read(GLM), 4)}
    routing, experts = made["routing"], made["experts"]
    assert routing.gating_output.dtype == routing.e_score_correction_bias.dtype == torch.float32
    assert routing.gating_output.shape == (3, 128) and routing.e_score_correction_bias.shape == (128,)
    assert (routing.topk, routing.renormalize, routing.num_expert_group, routing.topk_group) == (8, True, 1, 1)
    assert (routing.scoring_func, routing.routed_scaling_factor) == ("sigmoid", 1.0)
    assert experts.hidden.dtype == torch.bfloat16 and experts.topk_ids.shape == (3, 8)
    assert experts.w1.shape == (128, 704, 4096) and experts.w2.shape == (128, 4096, 352)
    assert experts.w1_scale.shape == (128, 704) and experts.w2_scale.shape == (128, 4096)
    biased = {layer: a.bias.shape for layer, a in made.items() if getattr(a, "bias", None) is not None}
    assert biased == {"qkv": (3584,)} and made["qkv"].bias.dtype == torch.bfloat16
    assert made["qkv"].scale_a.shape == (3, 1) and made["qkv"].scale_b.shape == (3584, 1)


def test_glm_without_a_bias_or_most_experts():
    small = read(GLM) | {"num_hidden_layers": 4}
    assert found(small | {"first_k_dense_replace": 3})["dense down"] == [("scaled_mm", 4096, 10944, 3)]
    assert found(small | {"use_qk_norm": True}) == found(small), "the compiler fuses these norms with their rotation"
    [qkv] = [call for call in calls(small | {"attention_bias": False}) if call.layer == "qkv"]
    assert given(qkv).bias is None
    layers = found(small | {"quantization_config": int8()})
    assert layers["qkv"][0][0] == "gemm" and layers.keys().isdisjoint({"routing", "experts"})


@pytest.mark.parametrize("quantization", ["none", "int8", "block", "mx", "static", "token"])
def test_a_bias_is_an_argument_of_every_linear_but_block_scaled_ones(quantization):
    """vLLM adds the bias to block-scaled ones."""
    formats = {
        "int8": int8(),
        "block": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        "mx": MXFP8["mxfp8"],
        "static": QUANTIZED["fp8 static"][0],
        "token": CHANNEL,
    }
    config = read("tiny-llama") | {"num_hidden_layers": 1}
    config |= {"quantization_config": formats[quantization]} if quantization in formats else {}
    plain, biased = (
        next(call for call in calls(config | {"attention_bias": bias}) if call.layer == "qkv") for bias in (False, True)
    )
    arguments = given(biased, device="cpu")
    if quantization == "block":
        assert biased == plain
        return
    assert biased != plain and arguments.bias.shape == (768,)
    result = biased.op(*arguments)
    assert not torch.equal(result, biased.op(*arguments._replace(bias=None)))


@pytest.mark.parametrize(
    ("groups", "scale", "op"), [(1, 1.0, "topk_softmax"), (1, 16.0, "topk_softmax"), (8, 1.0, None)]
)
def test_softmax_without_groups_is_routed_by_the_simpler_op(groups, scale, op):
    """The seam routes it so, too. vLLM scales the experts' result, not their weights."""
    change = {"scoring_func": "softmax", "topk_method": "greedy", "n_group": groups, "routed_scaling_factor": scale}
    [(name, *_)] = found(read("tiny-deepseek-v3") | change)["routing"]
    assert name == (op or "grouped_topk")


@pytest.mark.parametrize(
    ("tp", "ep", "here", "intermediate"),
    [(8, None, 256, 256), (8, 0, 32, 2048), (1, None, 256, 2048)],
)
def test_experts_are_divided_or_stay_whole(tp, ep, here, intermediate):
    by_layer = {call.layer: call for call in calls(read("deepseek-v3"), tp, ep)}
    experts, routing = by_layer["experts"], by_layer["routing"]
    a = given(experts)
    assert experts.count == routing.count == 58 and a.topk_ids.shape == (3, 8)
    assert a.w1.shape == (here, 2 * intermediate, 7168) and a.w2.shape == (here, 7168, intermediate)
    assert a.w1_scale.shape == (here, 2 * intermediate // 128, 56) and (a.expert_map is None) == (here == 256)
    a = given(routing)
    assert (a.topk, a.renormalize, a.num_expert_group, a.topk_group) == (8, True, 8, 4)
    assert (a.scoring_func, a.routed_scaling_factor) == ("sigmoid", 1.0) and a.e_score_correction_bias.shape == (256,)


def test_ranks_with_tokens_of_their_own_route_in_vllm():
    """8 ranks of data parallel attention divide the experts, and move tokens between them after routing."""
    layers = found(read("deepseek-v3") | {"num_hidden_layers": 4}, 1)
    whole = {call.layer: call for call in calls(read("deepseek-v3"), 1, 8)}
    assert "routing" in layers and "routing" not in whole
    assert whole["experts"].parameters[:2] == (256, 32) and whole["o"].parameters == (7168, 16384)
    assert ("routing", "GroupedTopKRouter", 58) in [
        (launch.layer, launch.runs, count) for launch, count in model_layers.unserved(read("deepseek-v3"), 1, 8)
    ]


def test_an_fp8_cache_changes_no_call():
    assert calls(read("llama-3.1-405b-fp8-kv"), 8) == calls(read(LLAMA), 8)


def test_each_token_goes_to_experts_of_its_own():
    experts = next(call for call in calls(read("tiny-deepseek-v3-fp8"), 1, 4) if call.layer == "experts")
    a = given(experts, 50, device="cpu")
    assert all(len(set(row)) == len(row) for row in a.topk_ids.tolist())
    assert a.expert_map.tolist() == [0, 1, 2, 3] + 12 * [-1] and {*a.topk_ids.flatten().tolist()} == set(range(16))


def test_weights_add_up_to_the_model():
    """405.85 billion parameters less the embedding's 2.10, and 8.19 less 0.62; the ranks of TP8 have an eighth each."""
    for model, tp, parameters in ((LLAMA, 1, 403.75e9), (LLAMA, 8, 403.75e9), ("qwen3-8b-fp8", 1, 7.568e9)):
        products = [
            layer for kinds in found(read(model), tp).values() for layer in kinds if layer[0].endswith(("mm", "gemm"))
        ]
        assert sum(n * k * count for _, n, k, count in products) * tp == pytest.approx(parameters, rel=1e-4)


KV_CACHE_LAYERS = ["*k_proj", "*v_proj"]


def quark(weight: dict, **inputs) -> dict:
    """Return Quark's configuration of weights, and of inputs with these changes."""
    both = {"weight": weight, "input_tensors": weight | inputs, "output_tensors": None, "bias": None}
    more = {"layer_quant_config": {}, "layer_type_quant_config": {}, "exclude": ["lm_head"]}
    export = {"kv_cache_group": [], "pack_method": "reorder"}
    return {"quant_method": "quark", "global_quant_config": both, "export": export, **more}


QUANTIZED = {
    "fp8 static": ({"quant_method": "fp8", "activation_scheme": "static"}, "static_fp8_quant", 1),
    "fp8 dynamic": ({"quant_method": "fp8", "activation_scheme": "dynamic"}, "fused_add_rms_norm", 1),
    "fbgemm": (
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
        "dynamic_per_token_quant",
        4,
    ),
    "compressed-tensors": (
        compressed("float-quantized", number("float", 8, "channel"), number("float", 8, "token")),
        *("dynamic_per_token_quant", 4),
    ),
    "quark": (
        quark({"dtype": "fp8_e4m3", "qscheme": "per_tensor", "symmetric": True, "is_dynamic": False}),
        "static_fp8_quant",
        1,
    ),
}
QUANTIZED["quark with an fp8 cache"] = (
    QUANTIZED["quark"][0]
    | {
        "layer_quant_config": {
            name: QUANTIZED["quark"][0]["global_quant_config"]
            | {"output_tensors": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}}
            for name in KV_CACHE_LAYERS
        },
        "export": {"kv_cache_group": KV_CACHE_LAYERS, "pack_method": "reorder"},
    },
    "static_fp8_quant",
    1,
)


MX_NUMBERS = number("float", 8, "group", group_size=32, scale_dtype="torch.uint8")
MXFP8 = {
    "mxfp8": {"quant_method": "mxfp8", "ignored_layers": ["lm_head"]},
    "modelopt": {"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": ["lm_head"]},
    "compressed-tensors": compressed("mxfp8-quantized", MX_NUMBERS, MX_NUMBERS),
}


FP4 = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0", "symmetric": None}


@pytest.mark.parametrize(
    ("form", "written"),
    [("fp8", MXFP8["mxfp8"]), ("fp4", quark(FP4 | {"is_dynamic": False}, is_dynamic=True))],
)
def test_gfx942_multiplies_bf16_by_mx_weights(form, written):
    """It has no matrix instructions for MX formats."""
    config = read("tiny-llama") | {"quantization_config": written}
    by_layer = {call.layer: call for call in calls(config, arch="gfx942")}
    assert by_layer["input norm"].op.name.endswith("rms_norm")
    for layer in ("qkv", "o", "gate_up", "down"):
        assert by_layer[layer].op is ops.mx_gemm and by_layer[layer].parameters[2] == form


def test_gfx942s_experts_multiply_bf16_by_mx_weights():
    config = read("tiny-deepseek-v3") | {"quantization_config": MXFP8["mxfp8"]}
    by_layer = {call.layer: call for call in calls(config, arch="gfx942")}
    call = by_layer["experts"]
    assert call.op is ops.fused_experts and call.parameters[5] == "mxfp8"
    a = given(call, fp8=torch.float8_e4m3fnuz)
    assert a.weight_only and a.w1.dtype == torch.float8_e4m3fn and a.w1_scale.shape[2] == a.w1.shape[2] // 32
    assert "mxfp8" in call.op.explain(*a, arch="gfx942").launches[0].symbol


@pytest.mark.parametrize("name", MXFP8)
def test_mx_fp8(name):
    by_layer = {call.layer: call for call in calls(read("tiny-llama") | {"quantization_config": MXFP8[name]})}
    assert by_layer["input norm"].op is ops.rms_norm_mxfp8_quant and by_layer["lm_head"].op is ops.unquantized_gemm
    down = by_layer["down"]
    assert down.op is ops.mxfp8_scaled_mm
    generator = torch.Generator().manual_seed(0)
    for layer, width in (("input norm", 512), ("SwiGLU", down.case(1).make("meta", generator, None)[0].shape[1])):
        values, scale = by_layer[layer].op(*by_layer[layer].case(3).make("cpu", generator, torch.float8_e4m3fnuz))
        assert values.shape == (3, width) and scale.shape == (3, width // 32)
    result = down.op(*down.case(3).make("cpu", generator, torch.float8_e4m3fnuz))
    assert result.shape == (3, 512) and result.isfinite().all()
    explained = down.op.explain(*down.case(3).make("meta", generator, torch.float8_e4m3fn), arch="gfx950")
    assert explained.launches


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantization_decides_ops_and_scales(name):
    quantization, norm, scales = QUANTIZED[name]
    config = read(LLAMA) | {"quantization_config": quantization, "num_hidden_layers": 2}
    by_layer = {call.layer: call for call in calls(config, 8)}
    assert by_layer["input norm"].op.name.endswith(norm)
    gate_up = by_layer["gate_up"]
    a = given(gate_up, 4)
    assert gate_up.op is ops.scaled_mm and a.scale_a.shape == (scales, 1)


def int8(**changes) -> dict:
    """Return a configuration of INT8 W8A8, with changes of its inputs."""
    return compressed("int-quantized", number("int", 8, "channel"), number("int", 8, "token") | changes)


@pytest.mark.parametrize(("changes", "scales"), [({}, 3), ({"dynamic": False, "strategy": "tensor"}, 1)])
def test_int8_layers_are_calls_of_the_seam(changes, scales, capsys, tmp_path):
    """Their input comes from norms and activations that do not quantize.

    vLLM's kernels run where the plugin's were not measured.
    """
    config = read("tiny-llama") | {"quantization_config": int8(**changes)}
    by_layer = {call.layer: call for call in calls(config)}
    assert by_layer["post-attention norm"].op is ops.fused_add_rms_norm and by_layer["SwiGLU"].op is ops.silu_and_mul
    assert by_layer["lm_head"].op is ops.unquantized_gemm
    down = by_layer["down"]
    a = given(down, device="cpu")
    assert down.op is ops.gemm and a.a.dtype == a.b.dtype == torch.int8 and a.a.float().std() > 20
    assert (a.scale_a.numel(), a.scale_b.numel(), a.b.stride(0)) == (scales, 512, 1)
    assert ops.gemm(*a).isfinite().all()
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert cli.main(["explain", "--model", str(path), "--arch", "gfx942", "--batch", "1,64", "--verbose"]) == 0
    [line] = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("gate_up ")]
    assert line[2:6] == ["gemm", "1,64", "vLLM's", "kernel"] and line[-1] == "faster"


@pytest.mark.parametrize(("dynamic", "scales"), [(True, 4), (False, 1)])
def test_int8_as_quark_writes_it(dynamic, scales):
    weights = {"dtype": "int8", "qscheme": "per_channel", "symmetric": True, "is_dynamic": False, "ch_axis": 0}
    config = quark(weights, qscheme="per_channel" if dynamic else "per_tensor", is_dynamic=dynamic)
    by_layer = {call.layer: call for call in calls(read("tiny-llama") | {"quantization_config": config})}
    a = given(by_layer["o"], 4)
    assert by_layer["o"].op is ops.gemm and a.scale_a.shape == (scales, 1)


def test_measured_int8_layers_are_served():
    [down] = [call for call in calls(read("tiny-llama") | {"quantization_config": int8()}) if call.layer == "down"]
    [shape] = comparisons.shapes_of(down, archs.ARCHS["gfx942"])
    of = key(f"gemm {shape} VllmKernel")
    times = {8: kernel_selection.Measured(1.0, 2.0), 64: kernel_selection.Measured(3.0, 2.0)}
    record = kernel_selection.Record({}, shapes={of: times})
    assert comparisons.keys_of(down, archs.ARCHS["gfx942"], record) == [of]
    assert comparisons.decision(down, [of], record, 8) == (True, "measured: plugin 1.0 us, vLLM 2.0 us")
    assert not comparisons.decision(down, [of], record, 64)[0]


def test_layers_that_a_checkpoint_leaves_unquantized():
    """Meta's own FP8 checkpoint has no quantized attention, nor a quantized MLP in its first and last layer."""
    ignored = [f"model.layers.{i}.self_attn.{name}_proj" for i in range(126) for name in "qkvo"]
    ignored += [f"model.layers.{i}.mlp.{name}_proj" for i in (0, 125) for name in ("gate", "up", "down")]
    config = read(LLAMA) | {
        "quantization_config": QUANTIZED["fbgemm"][0] | {"modules_to_not_convert": ["lm_head", *ignored]}
    }
    layers = found(config, 8)
    assert layers["qkv"] == [("unquantized_gemm", 2304, 16384, 126)]
    assert layers["gate_up"] == [("unquantized_gemm", 13312, 16384, 2), ("scaled_mm", 13312, 16384, 124)]
    assert layers["SwiGLU"] == [("silu_and_mul", 6656, 2), ("silu_and_mul_per_token_quant", 6656, 124)]


IGNORED = [
    [],
    ["model.layers.0.self_attn.qkv_proj", "model.layers.1.mlp.gate_up_proj"],
    [f"model.layers.0.self_attn.{name}_proj" for name in "qkvo"],
    ["self_attn.o_proj"],
    ["down_proj"],
    ["model.layers.0"],
    ["model.layers.0.self_attn.q_proj"],
    ["model.layers.*.mlp.down_proj"],
    ["re:.*down_proj"],
]
MODULES = {"qkv": "self_attn.qkv_proj", "o": "self_attn.o_proj", "gate_up": "mlp.gate_up_proj", "down": "mlp.down_proj"}
FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


def skipped_by_vllm(ignored: list[str], of: dict) -> set[tuple[int, str]] | None:
    """Return the layers that vLLM's own function leaves unquantized, None if it refuses the list."""
    from vllm.model_executor.layers.quantization.compressed_tensors.utils import should_ignore_layer
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config
    from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped

    fp8 = Fp8Config.from_config(of) if of["quant_method"] == "fp8" else None

    def skips(module: str) -> bool:
        if fp8 is None:
            return should_ignore_layer(module, ignored, FUSED)
        return is_layer_skipped(module, fp8.ignored_layers, FUSED, match_mode=fp8.ignored_layers_match_mode)

    try:
        return {(i, name) for i in range(2) for name, path in MODULES.items() if skips(f"model.layers.{i}.{path}")}
    except ValueError:
        return None


@pytest.mark.parametrize("method", ["fp8", "compressed-tensors"])
@pytest.mark.parametrize("ignored", IGNORED, ids=lambda ignored: ignored[0] if ignored else "none")
def test_ignored_layers_are_those_that_vllm_ignores(method, ignored):
    ignored = ["lm_head", *ignored]
    of = {
        "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic", "modules_to_not_convert": ignored},
        "compressed-tensors": CHANNEL | {"ignore": ignored},
    }[method]
    config = read("tiny-llama") | {"num_hidden_layers": 2, "quantization_config": of}
    wanted = skipped_by_vllm(ignored, of)
    if wanted is None:
        with pytest.raises(ValueError, match="cannot build it"):
            model_layers.sequence(config)
        return
    unquantized, seen = set(), dict.fromkeys(MODULES, 0)
    for call in model_layers.sequence(config):
        if call.layer in MODULES:
            if call.op is ops.unquantized_gemm:
                unquantized.add((seen[call.layer], call.layer))
            seen[call.layer] += 1
    assert unquantized == wanted and set(seen.values()) == {2}


def test_the_older_key_of_quantization_and_other_spellings():
    """vLLM reads compression_config where quantization_config is missing; unknown spellings are refused or FP8, not bf16."""
    wanted = found(read("tiny-llama") | {"quantization_config": CHANNEL})
    assert found(read("tiny-llama") | {"compression_config": CHANNEL}) == wanted and wanted["qkv"][0][0] == "scaled_mm"
    spelled = CHANNEL | {"quant_method": "compressed_tensors"}, {"quant_method": "FP8", "activation_scheme": "dynamic"}
    for quantization in spelled:
        try:
            layers = found(read("tiny-llama") | {"quantization_config": quantization})
        except ValueError as error:
            assert "cannot build it" in str(error)
        else:
            assert layers["qkv"][0][0] == "scaled_mm"


def test_blocks_that_tensor_parallelism_cuts():
    """vLLM refuses linears whose blocks TP cuts, and gives experts smaller blocks, which the plugin's do not take."""
    qwen = read("qwen3-30b-a3b-fp8")
    layers = found(qwen, 8)
    assert "experts" not in layers and layers["qkv"][0][0] == "block_scaled_mm"
    experts = {launch.layer: launch.runs for launch, _ in model_layers.unserved(qwen, 8)}["experts"]
    assert experts == "TritonExperts"
    assert "experts" in found(qwen, 2)
    assert any(call.layer == "experts" for call in calls(qwen, 8, 0)), "expert parallelism cuts none"
    with pytest.raises(ValueError, match="cannot build it: ValueError: .*1216"):
        calls(read("qwen3-8b-fp8") | {"intermediate_size": 9728, "hidden_size": 2560}, 8)
    assert calls(read("deepseek-v3"), 16)
    with pytest.raises(ValueError, match="cannot build it"):
        calls(read("deepseek-v3"), 32)


@pytest.mark.parametrize("arch", archs.ARCHS)
@pytest.mark.parametrize("model", model_config.shipped())
def test_every_call_has_arguments_that_its_op_takes(model, arch):
    for call in [*calls(read(model)), *explain.around(read(model), 1, None, archs.ARCHS[arch])]:
        arguments = call.case(3).make("meta", torch.Generator(), archs.ARCHS[arch].fp8_dtype)
        assert call.op.explain(*arguments, arch=arch).launches, call.layer


def test_random_arguments_run_through_the_references():
    for model in ("tiny-llama", "tiny-llama-fp8", "tiny-deepseek-v3-fp8"):
        for call in [*calls(read(model)), *explain.around(read(model), 1, None, archs.ARCHS["gfx942"])]:
            generator = torch.Generator().manual_seed(0)
            given = call.op.Arguments(*call.case(2).make("cpu", generator, torch.float8_e4m3fn))
            result = call.op(*given)
            if result is None or getattr(given, "out", None) is not None:
                result = [getattr(given, name) for name in call.op.writes or call.op.mutates]
            first = result[0] if isinstance(result, (tuple, list)) else result
            assert first.shape[0] == 2 and not first.float().isnan().any(), call.layer


def test_a_model_is_a_file_a_folder_or_a_name(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(read("tiny-llama")))
    assert read(str(path)) == read(str(tmp_path)) == read("tiny-llama")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "config.json is not JSON"),
        ("{}", "config.json is not a model's configuration: it has no architectures"),
        ("[]", "config.json is not a model's configuration"),
        ("[" * 10**5, "config.json is not JSON"),
    ],
)
def test_bad_files_are_refused(tmp_path, text, message):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        read(str(tmp_path))


def test_unknown_models_are_refused(tmp_path):
    with pytest.raises(ValueError, match="model must be a config.json, a folder with one, or one of deepseek-v3, glm"):
        read(str(tmp_path))


CHANNEL = QUANTIZED["compressed-tensors"][0]


@pytest.mark.parametrize(
    ("change", "tp", "message"),
    [
        ({"architectures": ["NoSuchModel"]}, 1, "NoSuchModel"),
        ({}, 3, "3"),
        ({}, 0, "tp must be positive, got 0"),
        ({"num_key_value_heads": 6}, 4, ""),
        ({"quantization_config": {"quant_method": "no such method"}}, 1, "no such method"),
        ({"num_hidden_layers": 10**12}, 1, "num_hidden_layers must be at most 1024, got 1000000000000"),
        ({"hidden_size": 2**40}, 1, "hidden_size must be at most 16777216"),
        ({"hidden_size": "x"}, 1, "hidden_size"),
        ({"num_attention_heads": True}, 1, "num_attention_heads"),
        ({"vocab_size": -1}, 1, ""),
        ({"rms_norm_eps": "small"}, 1, "rms_norm_eps"),
        ({"architectures": 5}, 1, "valid list"),
        ({"quantization_config": "x"}, 1, ""),
        ({"quantization_config": CHANNEL | {"config_groups": []}}, 1, ""),
        ({"quantization_config": {"quant_method": "quark"}}, 1, "export"),
    ],
)
def test_what_vllm_cannot_build_is_refused_with_its_words(change, tp, message):
    with pytest.raises(ValueError, match="tp must|at most|cannot build it") as refused:
        calls(read("tiny-llama") | change, tp)
    assert message in str(refused.value)


def test_layers_in_formats_without_kernels_run_in_vllm():
    """They are named, with what vLLM runs."""
    blocks = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [64, 64]}
    config = read("tiny-llama") | {"quantization_config": blocks | {"ignored_layers": ["lm_head"]}}
    assert "qkv" not in found(config)
    unserved = {launch.layer: (launch.runs, count) for launch, count in model_layers.unserved(config)}
    assert unserved == dict.fromkeys(("qkv", "o", "gate_up", "down"), ("Fp8LinearMethod of float8_e4m3fn weights", 4))


def test_experts_that_cannot_be_divided_so_are_refused():
    with pytest.raises(ValueError, match="ep must be a multiple of tp=2, got 3"):
        calls(read("deepseek-v3"), 2, 3)
    with pytest.raises(ValueError, match="3 experts per token of 2"):
        calls(
            read("tiny-deepseek-v3") | {"n_routed_experts": 2, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 3}
        )
