"""Test the plugin's experts in vLLM's layers: results, calls left to the baseline, and the layers they serve."""

import collections
import inspect
import itertools
import pathlib
import typing

import frames
import pytest
import selection
import torch
from compressed_tensors.quantization import QuantizationArgs
from engines import counted
from fakes import Fake, by_reference, decide, plugin_wins_up_to, time_choices
from linears import ask_for_aiter, random
from torch import Tensor
from vllm._aiter_ops import rocm_aiter_ops
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers import activation
from vllm.model_executor.layers.fused_moe import config as moe_config
from vllm.model_executor.layers.fused_moe import modular_kernel, unquantized_fused_moe_method
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts import (
    aiter_mxfp8_moe,
    cpu_moe,
    marlin_moe,
    mxfp8_native_moe,
    triton_moe,
)
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.oracle import int_wna16, mxfp4
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.model_executor.layers.fused_moe.utils import moe_kernel_quantize_input
from vllm.model_executor.layers.quantization import fp8
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_wna16,
)
from vllm.model_executor.layers.quantization.online import mxfp8
from vllm.model_executor.layers.quantization.quark import quark, quark_moe
from vllm.model_executor.layers.quantization.utils import quant_utils

import vllm_rocm_ops
from vllm_rocm_ops import ops
from vllm_rocm_ops.core import launch
from vllm_rocm_ops.emulator import Emulator
from vllm_rocm_ops.vllm import seam
from vllm_rocm_ops.vllm.linear import base as linear_base
from vllm_rocm_ops.vllm.moe import base as experts
from vllm_rocm_ops.vllm.moe import (
    fp8_experts,
    mxfp4_experts,
    mxfp8_experts,
    routing_experts,
    unquantized_experts,
    wna16_experts,
)
from vllm_rocm_ops.vllm.selection import comparison, kernel_selection

EXPERTS, TOPK, HIDDEN, INNER, TOKENS = 8, 3, 256, 128, 5
GROUPS, TOPK_GROUP, SCALE = 4, 2, 1.5
LIMIT, BLOCK = 448.0, 128
KINDS = {
    "block": ("kFp8Static128BlockSym", "kFp8Dynamic128Sym"),
    "channel": ("kFp8StaticChannelSym", "kFp8DynamicTokenSym"),
    "tensor": ("kFp8StaticTensorSym", "kFp8DynamicTensorSym"),
    "static": ("kFp8StaticTensorSym", "kFp8StaticTensorSym"),
    "mx": mxfp8_experts.SCHEME,
    "bf16": (None, None),
    "int4_32": ("kInt4Static32", None),
    "int4_128": ("kInt4Static", None),
    "mxfp4": mxfp4_experts.SCHEME,
    "mx alone": mxfp8_experts.SCHEME,
}
INT4 = "int4_32", "int4_128"
MX = "mx", "mx alone"
ROUTING = [kind for kind in KINDS if kind not in (*MX, *INT4, "mxfp4")]
SEAMS = {"bf16": unquantized_experts} | dict.fromkeys(MX, mxfp8_experts)  # the others are fp8_experts
SEAMS |= dict.fromkeys(INT4, wna16_experts) | {"mxfp4": mxfp4_experts}

pytestmark = pytest.mark.usefixtures("configuration")


def config(**options):
    """Return a small layer's configuration."""
    sizes = {"num_experts": EXPERTS, "num_local_experts": EXPERTS, "num_logical_experts": EXPERTS}
    sizes |= {"experts_per_token": TOPK, "hidden_dim": HIDDEN, "intermediate_size": INNER}
    return selection.moe_config(torch, **{**sizes, **options})


def scheme(kind: str) -> tuple:
    """Return vLLM's keys for the weights and the inputs of a quantization."""
    return tuple(name and getattr(quant_utils, name) for name in KINDS[kind])


def select(kind: str, **options) -> type:
    if kind == "bf16":
        return unquantized_fused_moe_method.select_unquantized_moe_backend(moe_config=config(**options))[1]
    if kind == "mx":
        return mxfp8.select_mxfp8_moe_backend(config=config(**options))[1]
    if kind in INT4:
        return select_int4(kind, **options)[1]
    if kind == "mxfp4":
        return mxfp4.select_mxfp4_moe_backend(config(**options))[1]
    return fp8.select_fp8_moe_backend(config(**options), *scheme(kind))[1]


def select_int4(kind: str, group: int | None = None, zero_points: bool = False, order: str | None = None, **options):
    """Return the backend and the experts that vLLM selects for a layer of compressed-tensors."""
    quant = QuantizationArgs(num_bits=4, strategy="group", group_size=group or group_of(kind), actorder=order)
    select = compressed_tensors_moe_wna16.select_wna16_moe_backend
    return select(config(**options), scheme(kind)[0], quant, zero_points, False, allow_tile_padding=True)


def group_of(kind: str) -> int:
    return int(kind.removeprefix("int4_"))


def supports(monkeypatch, experts_class: type, answer: bool = True) -> None:
    """Make a class of experts support any configuration, or none."""
    monkeypatch.setattr(experts_class, "is_supported_config", staticmethod(lambda *_: (answer, None)))


REST = {
    "": {},
    "limit": {"swiglu_limit": 0.7},
    "bias": {"has_bias": True},
    "oai": {"swiglu_limit": 0.7, "swiglu_alpha": 1.702, "swiglu_beta": 1.0, "has_bias": True}
    | {"activation": MoEActivation.SWIGLUOAI_UNINTERLEAVE},
    "interleaved": {"activation": MoEActivation.SWIGLUOAI, "has_bias": True},
}
"""Options of vLLM's configuration for layers with biases or another activation."""


class Layer:
    """The weights of a layer in a quantization, vLLM's form of them, and their exact values."""

    def __init__(self, kind: str, rest: str = ""):
        self.kind, self.rest = kind, REST[rest]
        self.quantize(kind)
        if rest and rest != "limit":
            for name, columns in (("_w1", 2 * INNER), ("_w2", HIDDEN)):
                getattr(self.quant_config, name).bias = random(EXPERTS, columns).bfloat16()
        self.quant_config.gemm1_clamp_limit = self.rest.get("swiglu_limit")
        self.quant_config.gemm1_alpha, self.quant_config.gemm1_beta = map(
            self.rest.get, ("swiglu_alpha", "swiglu_beta")
        )

    @staticmethod
    def in_softmax(logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return what gpt-oss's router does: the softmax of the largest logits, and their experts."""
        largest, ids = logits.float().topk(TOPK, 1)
        return largest.softmax(1), ids

    def activated(self, gate_up: Tensor) -> Tensor:
        """Return vLLM's activation of a row of gate and up."""
        if self.rest.get("activation") is MoEActivation.SWIGLUOAI:
            return activation.SwigluOAIAndMul.forward_native(Fake(alpha=1.702, limit=7.0), gate_up)
        gate, up = gate_up.chunk(2)
        if "swiglu_limit" not in self.rest:
            return torch.nn.functional.silu(gate) * up
        clamps = {name: self.rest.get(f"swiglu_{name}", default) for name, default in (("alpha", 1.0), ("beta", 0.0))}
        layer = Fake(swiglu_limit=self.rest["swiglu_limit"], **clamps)
        return activation.SiluAndMulWithClamp.forward_native(layer, gate_up)

    def quantize(self, kind: str) -> None:
        self.w1, w1_scale, self.exact1 = self.quantized(random(EXPERTS, 2 * INNER, HIDDEN) * HIDDEN**-0.5)
        self.w2, w2_scale, self.exact2 = self.quantized(random(EXPERTS, HIDDEN, INNER) * INNER**-0.5)
        if kind == "bf16":
            self.quant_config = moe_config.FusedMoEQuantConfig.make()
            return
        if kind in INT4:
            make = int_wna16.make_wna16_moe_quant_config
            self.quant_config = make(w1_scale, w2_scale, group_size=group_of(kind), num_bits=4)
            return
        if kind == "mxfp4":
            make = mxfp4.make_mxfp4_moe_quant_config
            self.quant_config = make(mxfp4.Mxfp4MoeBackend.EMULATION, w1_scale, w2_scale)
            return
        if kind in MX:
            scales = {"w1_scale": w1_scale, "w2_scale": w2_scale, "is_scale_swizzled": False}
            self.quant_config = moe_config.FusedMoEQuantConfig.make("mxfp8", **scales, block_shape=[1, 32])
            return
        self.static = (torch.tensor(0.01), torch.tensor(0.005)) if kind == "static" else (None, None)
        given = dict.fromkeys(("per_act_token_quant", "per_out_ch_quant"), kind == "channel")
        given["block_shape"] = [BLOCK, BLOCK] if kind == "block" else None
        self.quant_config = moe_config.fp8_w8a8_moe_quant_config(w1_scale, w2_scale, *self.static, **given)

    def quantized(self, weight: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return a weight's values, their scales as vLLM keeps them, and both in fp32."""
        if self.kind == "bf16":
            return weight.bfloat16(), None, weight.bfloat16().float()
        if self.kind in MX:
            values, scale = torch.ops.vllm.mxfp8_quantize(weight, False, 0)
            return values, scale, values.float() * torch.exp2(scale.float() - 127).repeat_interleave(32, -1)
        if self.kind == "mxfp4":
            groups = weight.unflatten(2, (-1, 32))
            scale = (groups.abs().amax(-1) / 4).log2().floor()
            numbers = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
            bits = ((groups.abs() / scale.exp2()[..., None])[..., None] - numbers).abs().argmin(-1)
            exact = (numbers[bits] * groups.sign() * scale.exp2()[..., None]).flatten(2)
            bits = (bits + 8 * (groups < 0)).flatten(2).to(torch.uint8)
            return bits[..., 0::2] | bits[..., 1::2] << 4, (scale + 127).to(torch.uint8), exact
        if self.kind in INT4:
            groups = weight.unflatten(2, (-1, group_of(self.kind)))
            scale = (groups.abs().amax(-1) / 7).bfloat16()
            values = (groups / scale.float()[..., None]).round().clamp(-8, 7)
            bits = (values + 8).flatten(2).to(torch.uint8)
            exact = (values * scale.float()[..., None]).flatten(2)
            return bits[..., 0::2] | bits[..., 1::2] << 4, scale, exact
        tiles = {"block": (BLOCK, BLOCK), "channel": (1, weight.shape[2])}.get(self.kind, weight.shape[1:])
        split = weight.unflatten(2, (-1, tiles[1])).unflatten(1, (-1, tiles[0]))
        scale = split.abs().amax((2, 4)) / LIMIT
        values = (split / scale[:, :, None, :, None]).to(torch.float8_e4m3fn)
        exact = (values.float() * scale[:, :, None, :, None]).reshape(weight.shape)
        return values.reshape(weight.shape), scale.flatten() if tiles == weight.shape[1:] else scale, exact

    def rounded(self, x: Tensor, which: int) -> Tensor:
        """Return an input of the first or the second GEMM, rounded as it is quantized."""
        if self.kind in ("bf16", "mxfp4", "mx alone", *INT4):
            return x
        if self.kind == "mx":
            values, scale = torch.ops.vllm.mxfp8_quantize(x[None], False, 0)
            return (values.float() * torch.exp2(scale.float() - 127).repeat_interleave(32, -1))[0]
        groups = x.unflatten(-1, (-1, BLOCK if self.kind == "block" else x.shape[-1]))
        scale = self.static[which] if self.kind == "static" else groups.abs().amax(-1, keepdim=True) / LIMIT
        return ((groups / scale).clamp(-LIMIT, LIMIT).to(torch.float8_e4m3fn).float() * scale).flatten(-2)

    def plain(self, hidden: Tensor, weights: Tensor, ids: Tensor, on_input: bool = False, within=range(EXPERTS)):
        """Return the sum of the experts in `within`, computed one token and expert after the other."""
        total = torch.zeros(len(hidden), HIDDEN)
        for token, slot in torch.cartesian_prod(torch.arange(len(hidden)), torch.arange(ids.shape[1])).tolist():
            expert, weight = int(ids[token, slot]), float(weights[token, slot])
            if expert not in within:
                continue
            x = hidden[token].float() * (weight if on_input else 1.0)
            weights_of = self.quant_config._w1, self.quant_config._w2
            bias1, bias2 = (0.0 if of.bias is None else of.bias[expert] for of in weights_of)
            inner = self.activated(self.exact1[expert] @ self.rounded(x, 0) + bias1).bfloat16().float()
            total[token] += (self.exact2[expert] @ self.rounded(inner, 1) + bias2) * (1.0 if on_input else weight)
        return total


def kernel(layer: Layer, experts_class: type, **options):
    """Return vLLM's kernel around experts, as its quantization methods make it."""
    from vllm.model_executor.layers.fused_moe.oracle import fp8, unquantized

    if layer.kind == "bf16":
        backend = unquantized.UnquantizedMoeBackend.TRITON
        return unquantized.make_unquantized_moe_kernel(layer.quant_config, config(**options), backend, experts_class)
    if layer.kind in INT4:
        backend = int_wna16.WNA16MoEBackend.TRITON
        return int_wna16.make_wna16_moe_kernel(layer.quant_config, config(**options), experts_class, backend)
    if layer.kind == "mxfp4":
        backend = mxfp4.Mxfp4MoeBackend.EMULATION
        return mxfp4.make_mxfp4_moe_kernel(layer.quant_config, config(**options), experts_class, backend)
    backend = fp8.Fp8MoeBackend.TRITON_MXFP8 if layer.kind in MX else fp8.Fp8MoeBackend.TRITON
    return fp8.make_fp8_moe_kernel(layer.quant_config, config(**options), experts_class, backend)


def modular(kind: str) -> type:
    """Return the plugin's class without routing."""
    return SEAMS.get(kind, fp8_experts).PLUGIN_EXPERTS[0 if kind == "mx" else -1]


def call(layer: Layer, made, weights: Tensor, ids: Tensor, hidden: Tensor, **options) -> Tensor:
    """Call experts as vLLM's layer does after its router."""
    common = {"activation": MoEActivation.SILU, "global_num_experts": EXPERTS, "expert_map": None}
    common |= {"apply_router_weight_on_input": False}
    arguments = {"w1": layer.w1, "w2": layer.w2, "topk_weights": weights, "topk_ids": ids}
    return made.apply(hidden_states=hidden, **(arguments | common | options))


def call_with_logits(layer: Layer, made, logits: Tensor, bias: Tensor, hidden: Tensor, **options) -> Tensor:
    """Call experts that route, as vLLM's layer does."""
    common = {"activation": MoEActivation.SILU, "global_num_experts": EXPERTS, "expert_map": None}
    common |= {"apply_router_weight_on_input": False, "num_expert_group": GROUPS, "topk_group": TOPK_GROUP}
    common |= {"routed_scaling_factor": SCALE, "e_score_correction_bias": bias, "routing_sink": None}
    return made.apply_monolithic(hidden, layer.w1, layer.w2, logits, **(common | options))


def routed(topk: int = TOPK, tokens: int = TOKENS) -> tuple[Tensor, Tensor]:
    """Return weights and ids for some tokens."""
    ids = random(tokens, EXPERTS).topk(topk).indices.int()
    return random(tokens, topk).abs() + 0.5, ids


def inputs(tokens: int = TOKENS) -> Tensor:
    return random(tokens, HIDDEN).bfloat16()


def vllm_routes(logits: Tensor, bias: Tensor | None, **options) -> tuple[Tensor, Tensor]:
    """Return the weights and ids of vLLM's own router, in order of experts."""
    return in_order(*vllm_router(bias=bias, **options).select_experts(logits, logits))


def vllm_router(topk: int = TOPK, bias: Tensor | None = None, **options):
    groups = {"use_grouped_topk": True, "num_expert_group": GROUPS, "topk_group": TOPK_GROUP, "scoring_func": "sigmoid"}
    scale = {"routed_scaling_factor": SCALE, "e_score_correction_bias": bias}
    return CPURouter(topk, EXPERTS, **(groups | scale | options))


def in_order(weights: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    order = ids.argsort(1)
    return weights.gather(1, order), ids.gather(1, order)


def close(result: Tensor, wanted: Tensor) -> None:
    """Raise unless a bf16 result equals fp32's up to e4m3 roundings in the other direction."""
    assert result.dtype == torch.bfloat16
    error = (result.float() - wanted).abs().max() / wanted.abs().max()
    assert error < 0.02, error


def keep(monkeypatch, theirs: type, plugin: type, layer: Layer) -> list[tuple[Tensor, Tensor]]:
    """Make the plugin's experts keep some of vLLM's, which compute plainly, and return the weights of their calls."""
    calls = []

    class Kept(theirs):
        def apply(self, *given, **named):
            given = inspect.signature(theirs.apply).bind(self, *given, **named).arguments
            calls.append((given["w1"], given["w2"]))
            if "router_logits" in given:
                return layer.plain(given["hidden_states"], *layer.in_softmax(given["router_logits"])).bfloat16()
            return given["output"].copy_(layer.plain(given["hidden_states"], given["topk_weights"], given["topk_ids"]))

    supports(monkeypatch, Kept)
    monkeypatch.setattr(plugin, "baseline_class", staticmethod(lambda: Kept))
    monkeypatch.setattr(comparison, "LARGEST_ERROR", 5.0)
    kernel_selection.begin_recording()
    return calls


@pytest.mark.parametrize("kind", KINDS)
def test_routed_tokens(kind):
    """A layer whose tokens vLLM has routed equals the plain computation, in every quantization."""
    layer, (weights, ids), hidden = Layer(kind), routed(), inputs()
    close(call(layer, kernel(layer, modular(kind)), weights, ids, hidden), layer.plain(hidden, weights, ids))
    assert counted(vllm_rocm_ops.stats()) == {"fused_experts": 1}


@pytest.mark.parametrize("kind", ROUTING)
def test_routing_too(kind):
    """Experts that route equal vLLM's router with the plugin's other experts."""
    layer, hidden, logits, bias = Layer(kind), inputs(), random(TOKENS, EXPERTS), random(EXPERTS) * 0.1
    result = call_with_logits(layer, kernel(layer, select(kind)), logits, bias, hidden)
    close(result, layer.plain(hidden, *vllm_routes(logits, bias)))
    assert vllm_rocm_ops.stats().keys() == {"grouped_topk", "fused_experts"}


@pytest.mark.parametrize("rest", [rest for rest in REST if rest])
@pytest.mark.parametrize("kind", ["block", "channel", "mx", "bf16", "int4_32", "mxfp4"])
def test_other_activations_and_biases(kind, rest):
    """A layer with biases or another activation equals vLLM's formulas, in experts that route and others."""
    layer, (weights, ids), hidden = Layer(kind, rest), routed(), inputs()
    shape, given = layer.rest, {"activation": layer.rest.get("activation", MoEActivation.SILU)}
    if (kind, rest) == ("mx", "interleaved"):
        assert not modular(kind).is_supported_config(modular(kind), config(**shape), *scheme(kind), STANDARD)[0]
        return
    result = call(layer, kernel(layer, modular(kind), **shape), weights, ids, hidden, **given)
    close(result, layer.plain(hidden, weights, ids))
    if kind in ROUTING:
        logits, bias = random(TOKENS, EXPERTS), random(EXPERTS) * 0.1
        result = call_with_logits(layer, kernel(layer, select(kind, **shape), **shape), logits, bias, hidden, **given)
        close(result, layer.plain(hidden, *vllm_routes(logits, bias)))
        assert vllm_rocm_ops.stats().keys() == {"grouped_topk", "fused_experts"}


@pytest.mark.parametrize("fault", ["", "w1_bias", "w2_bias", "swiglu_limit"])
def test_other_activations_are_compared_and_keyed(baseline, fault, monkeypatch):
    """A limit or a bias that the plugin leaves out turns it off. Layers that differ in one have choices of their own."""
    layer, reference = Layer("bf16", "oai"), ops.fused_experts.reference
    arguments = ops.fused_experts.Arguments

    def plugin(*given):
        return reference(*arguments(*given)._replace(**{fault: None} if fault else {}))

    monkeypatch.setattr(ops.fused_experts, "run_kernels", plugin)
    compute(baseline, layer, monkeypatch)
    made, how = kernel(layer, modular("bf16"), **layer.rest), {"activation": layer.rest["activation"]}
    call(layer, made, *routed(), inputs(), **how)
    for _ in range(2):  # the second has the choice of the first
        other = Layer("bf16", "limit")
        call(other, kernel(other, modular("bf16"), **other.rest), *routed(), inputs())
    shapes = [choice.key.shape for choice in kernel_selection.all_choices()]
    wanted = [" bias swiglu 0.7 1.702 1.0", " swiglu 0.7 1.0 0.0"]
    assert [shape.partition(" scales none")[2] for shape in shapes] == wanted
    choice, _ = time_choices((1, 2), 64, plugin_wins_up_to(4, place=1))
    assert choice.state == ("off" if fault else "measured"), choice.why


STANDARD = modular_kernel.FusedMoEActivationFormat.Standard


@pytest.mark.parametrize(
    ("kind", "options", "why"),
    [
        ("block", {"swiglu_limit": 0.0}, "swiglu_limit=0.0"),
        ("block", {"swiglu_alpha": 1.702}, "swiglu_alpha and swiglu_beta with SILU"),
        ("block", {"activation": MoEActivation.SWIGLUOAI_UNINTERLEAVE}, "SWIGLUOAI_UNINTERLEAVE without swiglu_limit"),
        ("mx", REST["interleaved"], "alternating gate and up rows in MX-FP8"),
        ("aiter", REST["bias"], "biases beside AITER's experts, which ignore them"),
        ("aiter", {"activation": MoEActivation.SWIGLUOAI}, "alternating gate and up rows beside AITER's experts"),
    ],
)
def test_layers_are_refused_with_a_reason(kind, options, why):
    refusing = aiter("block") if kind == "aiter" else modular(kind)
    keys = refusing.schemes[0]
    supported, said = refusing.is_supported_config(refusing, config(**options), *keys, STANDARD)
    assert not supported and why in said


@pytest.mark.parametrize("takes", [False, True])
def test_mx_weights_in_aiters_order_stay_its_own(baseline, takes, monkeypatch):
    """A layer that vLLM gives to AITER is not the plugin's, unless the user names Triton's experts."""
    supports(monkeypatch, baseline)
    supports(monkeypatch, aiter_mxfp8_moe.AiterMxfp8Experts, takes)
    assert select("mx") is (aiter_mxfp8_moe.AiterMxfp8Experts if takes else modular("mx"))
    supported, why = modular("mx").is_supported_config(modular("mx"), config(), *scheme("mx"), STANDARD)
    assert supported is not takes and (supported or "does not read its order of MX-FP8 weights" in why)
    named = config(moe_backend="triton")
    assert modular("mx").is_supported_config(modular("mx"), named, *scheme("mx"), STANDARD)[0]


@pytest.mark.parametrize("kind", ["block", "bf16", "int4_32", "mxfp4", "mx alone"])
def test_experts_of_other_ranks(kind):
    """Each rank adds up its own experts, given which are local; together they are all."""
    layer, (weights, ids), hidden = Layer(kind), routed(), inputs()
    logits, bias = random(TOKENS, EXPERTS), random(EXPERTS) * 0.1
    routes = vllm_routes(logits, bias)
    for here in (range(0, EXPERTS, 2), range(1, EXPERTS, 2)):
        expert_map = torch.full((EXPERTS,), -1, dtype=torch.int32)
        expert_map[list(here)] = torch.arange(EXPERTS // 2, dtype=torch.int32)
        share = Layer(kind)
        share.w1, share.w2 = layer.w1[list(here)], layer.w2[list(here)]
        for weight in (share.quant_config._w1, share.quant_config._w2) if kind != "bf16" else ():
            weight.scale = weight.scale[list(here)]
        result = call(share, kernel(share, modular(kind)), weights, ids, hidden, expert_map=expert_map)
        close(result, layer.plain(hidden, weights, ids, within=here))
        if kind not in ROUTING:
            continue
        result = call_with_logits(share, kernel(share, select(kind)), logits, bias, hidden, expert_map=expert_map)
        close(result, layer.plain(hidden, *routes, within=here))


@pytest.mark.parametrize("kind", ["int4_32", "int4_128", "mxfp4", "mx alone"])
def test_load_balancing_moves_experts_in_place(kind):
    """The op reads the parameters themselves, which vLLM's load balancing writes, and ids that it has mapped."""
    layer, (weights, ids), hidden = Layer(kind), routed(), inputs()
    made = kernel(layer, modular(kind))
    assert modular(kind)._supports_parallel_config(parallel(enable_eplb=True)["moe_parallel_config"])
    wanted = layer.plain(hidden, weights, ids)
    close(call(layer, made, weights, ids, hidden), wanted)
    order = random(EXPERTS).argsort()
    for moved in (layer.w1, layer.w2, layer.quant_config.w1_scale, layer.quant_config.w2_scale):
        moved.copy_(moved[order])
    close(call(layer, made, weights, order.argsort()[ids.long()].int(), hidden), wanted)


@pytest.mark.parametrize("kind", ["channel", "bf16"])
def test_weights_on_the_input(kind):
    """vLLM weights the input of experts that do not route; those that do weight it themselves."""
    layer, (weights, ids), hidden = Layer(kind), routed(topk=1), inputs()
    on_input = {"apply_router_weight_on_input": True}
    result = call(layer, kernel(layer, modular(kind)), weights, ids, hidden, **on_input)
    close(result, layer.plain(hidden, weights, ids, on_input=True))
    logits, bias = random(TOKENS, EXPERTS), random(EXPERTS) * 0.1
    made = kernel(layer, select(kind, experts_per_token=1), experts_per_token=1)
    weights, ids = ops.grouped_topk(logits, 1, True, GROUPS, TOPK_GROUP, "sigmoid", SCALE, bias)
    result = call_with_logits(layer, made, logits, bias, hidden, **on_input)
    close(result, layer.plain(hidden, weights, ids, on_input=True))


ROUTERS = {
    "DeepSeekV3": {"renormalize": True},
    "RenormalizeNaive": {"scoring_func": "softmax", "renormalize": True},
    "Default": {"scoring_func": "softmax", "renormalize": False},
    "RenormalizeNaive without groups": {"scoring_func": "softmax", "renormalize": True, "use_grouped_topk": False},
    "Default without groups": {"scoring_func": "softmax", "renormalize": False, "use_grouped_topk": False},
}


def test_routes():
    """Tokens go where vLLM's routers send them, with the same weights, for all combinations that vLLM gives a method."""
    logits, tried = random(TOKENS, EXPERTS), collections.Counter()
    for method, groups, bias, scale in itertools.product(
        routing_experts.METHODS,
        ((None, None), (1, 1), (GROUPS, TOPK_GROUP)),
        (None, random(EXPERTS) * 0.1),
        (1.0, SCALE),
    ):
        scoring_func, renormalize = routing_experts.METHODS[method]
        how = {"num_expert_group": groups[0], "topk_group": groups[1], "use_grouped_topk": bool(groups[0])}
        how |= {"scoring_func": scoring_func, "renormalize": renormalize, "routed_scaling_factor": scale}
        router = vllm_router(bias=bias, **how)
        if router.routing_method_type.name != method:
            continue
        tried[method] += 1
        if method == "MiniMax2":  # which vLLM's router for CPU takes as one group
            router = vllm_router(bias=bias, **how | {"num_expert_group": 1, "topk_group": 1, "use_grouped_topk": True})
        wanted = in_order(*router.select_experts(logits, logits))
        found = in_order(*routing_experts.route(routing_experts.METHODS[method], TOPK, logits, *groups, bias, scale))
        assert torch.equal(found[1], wanted[1])
        torch.testing.assert_close(found[0], wanted[0], msg=f"{method} {groups} {scale}")
    assert tried == {"DeepSeekV3": 4, "MiniMax2": 2, "RenormalizeNaive": 6, "Default": 6}


@pytest.fixture
def baseline(monkeypatch):
    """Make the plugin's classes keep baseline experts that return ones and record their calls."""

    class Baseline(experts.Predicates, modular_kernel.FusedMoEExpertsModular):
        calls: typing.ClassVar = []
        expects_unquantized_inputs = False
        schemes = ()

        def __init__(self, moe_config, quant_config):
            super().__init__(moe_config, quant_config)
            if quant_config.quant_dtype == "mxfp8":  # vLLM's experts for it do so
                quant_config._w1.scale = quant_config._w2.scale = None

        def workspace_shapes(self, M, N, K, topk, *others, **more):
            return (M, topk, N), (M, topk, K), (M, K)

        def finalize_weight_and_reduce_impl(self):
            return TopKWeightAndReduceNoOP()

        def apply(self, output, *arguments, **keywords):
            names = experts.APPLY[1:]
            self.calls.append(dict(zip(names, arguments)) | keywords)
            output.fill_(1.0)

    for plugin in itertools.chain(*(of.PLUGIN_EXPERTS for of in (fp8_experts, *{*SEAMS.values()}))):
        monkeypatch.setattr(plugin, "baseline_class", staticmethod(lambda: Baseline))
    return Baseline


def compute(baseline, layer: Layer, monkeypatch, within=range(EXPERTS)) -> None:
    """Make the baseline experts compute a layer's own in `within`, from unquantized inputs, and note calls from now on."""

    def apply(self, *arguments, **keywords):
        asked = dict(zip(experts.APPLY, arguments)) | keywords
        self.calls.append(asked)
        routes = asked["topk_weights"], asked["topk_ids"]
        asked["output"].copy_(layer.plain(asked["hidden_states"], *routes, within=within))

    monkeypatch.setattr(baseline, "apply", apply)
    monkeypatch.setattr(baseline, "expects_unquantized_inputs", True)  # the CPU has no quantization in groups
    monkeypatch.setattr(comparison, "LARGEST_ERROR", 5.0)  # plain rounds tokens in its own way
    kernel_selection.begin_recording()
    baseline.calls.clear()


FORMS = ("modular", "monolithic")


def calls_of(
    form: str, kind: str, baseline, tokens: int = TOKENS, on_input: bool = False
) -> tuple[Tensor, list, Layer, tuple]:
    """Call a layer with baseline experts, and return the result, the baseline's calls, the layer, and the routes."""
    layer, hidden, topk = Layer(kind), inputs(tokens), 1 if on_input else TOPK
    options = {"apply_router_weight_on_input": on_input}
    if form == "modular":
        weights, ids = routed(topk, tokens)
        result = call(layer, kernel(layer, modular(kind)), weights, ids, hidden, **options)
    else:
        logits, bias = random(tokens, EXPERTS), random(EXPERTS) * 0.1
        plugin = (unquantized_experts if kind == "bf16" else fp8_experts).PLUGIN_EXPERTS[0]
        made = kernel(layer, plugin, experts_per_token=topk)
        result = call_with_logits(layer, made, logits, bias, hidden, **options)
        weights, ids = vllm_router(topk=topk, bias=bias).select_experts(logits, logits)
    return result, baseline.calls, layer, (hidden, weights, ids)


@pytest.mark.parametrize("on_input", [False, True])
@pytest.mark.parametrize("kind", ["channel", "static", "bf16"])
@pytest.mark.parametrize("form", FORMS)
def test_what_no_kernel_takes_is_vllms(baseline, form, kind, on_input):
    """On CPU the baseline experts get the call as vLLM would have made it. vLLM cannot quantize in groups there."""
    result, [made], layer, (hidden, weights, ids) = calls_of(form, kind, baseline, on_input=on_input)
    assert torch.equal(result, torch.ones_like(hidden))
    if on_input:
        hidden = hidden * weights.bfloat16()
    quant = layer.quant_config
    how = quant.quant_dtype, quant.per_act_token_quant, quant.block_shape
    values, scale = moe_kernel_quantize_input(hidden, quant.a1_scale, *how)
    assert made["hidden_states"].dtype == values.dtype
    assert torch.equal(made["hidden_states"].float(), values.float())
    assert scale is made["a1q_scale"] is None or torch.equal(made["a1q_scale"], scale)
    assert made["w1"] is layer.w1
    assert made["w2"] is layer.w2
    assert torch.equal(made["topk_weights"], weights)
    assert torch.equal(made["topk_ids"], ids)
    assert made["a2_scale"] is quant.a2_scale
    assert made["workspace13"].shape == (TOKENS, ids.shape[1], 2 * INNER)
    assert made["workspace2"].shape == (TOKENS, ids.shape[1], HIDDEN)
    assert made["apply_router_weight_on_input"] is on_input
    assert vllm_rocm_ops.stats() == {}


@pytest.mark.parametrize("tokens", [1, experts.MAX_TOKENS, experts.MAX_TOKENS + 1])
@pytest.mark.parametrize(
    "form, kind", [*((form, "channel") for form in FORMS), ("modular", "mx"), ("modular", "int4_32")]
)
def test_few_tokens_are_served(baseline, monkeypatch, form, kind, tokens):
    """The plugin serves this many tokens where its kernels support them; more go to the baseline experts."""
    by_reference(monkeypatch, ops.fused_experts)
    result, left, layer, routes = calls_of(form, kind, baseline, tokens)
    assert len(left) == (tokens > experts.MAX_TOKENS)
    if not left:
        close(result, layer.plain(*routes))


def parallel(**options):
    kind = moe_config.FusedMoEParallelConfig
    return {"moe_parallel_config": kind(**vars(kind.make_no_parallel()) | options)}


def method(name: str):
    return {"routing_method": moe_config.RoutingMethodType[name]}


@pytest.mark.parametrize("kind", ["block", "bf16"])
def test_layers_of_known_routing_route_themselves(kind):
    """A layer routes itself, unless its routing is another or changes at run time."""
    spread = {"use_ep": True, "ep_size": 2}
    for options in ({}, parallel(tp_size=2), parallel(**spread), {"router_logits_dtype": torch.float32}):
        assert select(kind, **options).__name__.startswith("RocmOpsRouting")
    others = [method("Custom"), method("Simulated"), method("Unspecified"), parallel(enable_eplb=True, **spread)]
    for options in others:
        assert select(kind, **options) is modular(kind)


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_kernels_take_all_that_route(arch, monkeypatch):
    """On a GPU a layer routes itself only if available kernels for that GPU support its routing."""
    monkeypatch.setattr(seam, "arch_here", lambda _: arch)
    most = {"num_experts": 512, "experts_per_token": 32}
    for options in ({}, most, method("Default"), *({"router_logits_dtype": dtype} for dtype in TYPES)):
        assert select("block", **options) is not modular("block"), options
    refused = {"num_experts": 513}, {"experts_per_token": 33, "num_experts": 64}, {"router_logits_dtype": torch.float64}
    for options in refused:
        assert select("block", **options) is modular("block"), options
    for op, name in (("grouped_topk", "DeepSeekV3"), ("topk_softmax", "Default"), ("topk_sigmoid", "MiniMax2")):
        monkeypatch.setenv("VLLM_ROCM_OPS_DISABLE", op)
        assert select("block", **method(name)) is modular("block")
    monkeypatch.delenv("VLLM_ROCM_OPS_DISABLE")
    monkeypatch.setattr(launch, "CODE", pathlib.Path("/nowhere"))
    assert select("block") is modular("block")


TYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("dtype", TYPES)
def test_biases_of_any_type(baseline, arch, dtype):
    """With AITER, vLLM's DeepSeek logits and biases are in bf16."""
    logits, bias = random(TOKENS, EXPERTS).to(dtype), (random(EXPERTS) * 0.1).to(dtype)
    arguments = routing_experts.METHODS["DeepSeekV3"], TOPK, logits, GROUPS, TOPK_GROUP, bias, SCALE
    wanted = routing_experts.route(*arguments)
    vllm_rocm_ops.reset_stats()
    with launch.executor(Emulator(arch)):
        found = routing_experts.route(*arguments, has_baseline=True)
    [kernel] = vllm_rocm_ops.stats()["grouped_topk"]
    assert kernel.startswith("moe_topk_")
    assert torch.equal(found[1], wanted[1])
    torch.testing.assert_close(found[0], wanted[0])


@pytest.mark.parametrize("router", ROUTERS)
def test_what_no_kernel_routes_is_vllms(router):
    """vLLM's own router then gives the weights and ids, and no reference of the plugin runs."""
    options, logits = dict(ROUTERS[router]), random(TOKENS, EXPERTS).bfloat16()
    name, grouped = router.split()[0], "groups" not in router
    bias = (random(EXPERTS) * 0.1).bfloat16() if name == "DeepSeekV3" else None
    if not grouped:
        options |= {"routed_scaling_factor": 1.0}
    groups = (GROUPS, TOPK_GROUP) if grouped else (None, None)
    wanted = vllm_routes(logits, bias, **options)
    scale = SCALE if grouped else 1.0
    found = routing_experts.route(routing_experts.METHODS[name], TOPK, logits, *groups, bias, scale, has_baseline=True)
    assert vllm_rocm_ops.stats() == {}
    for plugin, theirs in zip(in_order(*found), wanted):
        assert torch.equal(plugin, theirs)


@pytest.mark.parametrize("method", ["Default", "MiniMax2"])
def test_padding_goes_to_no_expert(method, monkeypatch):
    """Like vLLM's routers without groups, it routes tokens that only pad a captured graph nowhere."""
    padding = torch.arange(TOKENS) > 2
    monkeypatch.setattr(routing_experts, "is_padding", lambda tokens: padding[:tokens])
    bias = random(EXPERTS) if method == "MiniMax2" else None
    arguments = routing_experts.METHODS[method], TOPK, random(TOKENS, EXPERTS), None, None, bias, SCALE
    with launch.executor(Emulator("gfx942")):
        _, ids = routing_experts.route(*arguments, has_baseline=True)
    assert torch.equal((ids == -1).all(1), padding)
    assert torch.equal((ids == -1).any(1), padding)


def test_what_keeps_routing_with_vllm():
    """vLLM's router reports where tokens went, and Quark's layers call no experts that route."""
    current, base = get_current_vllm_config(), FusedMoEMethodBase.apply_monolithic
    assert quark_moe.QuarkW8A8Fp8MoEMethod.apply_monolithic is base, "it does now: that rule can go"
    current.quant_config = quark.QuarkConfig({}, None)
    assert select("block") is modular("block")
    current.quant_config = None
    assert select("block") is not modular("block")
    current.aux_output_config.enable_return_routed_experts = True
    assert select("block") is modular("block")


def test_unsupported_layers_stay_vllms(monkeypatch):
    """The user's choice, unsupported layers, and tokens that move between ranks are vLLM's."""
    spread = {"dp_size": 2, "use_ep": True, "ep_size": 2}
    backends = "deepep_low_latency", "nixl_ep", "deepep_high_throughput"
    moved = parallel(pcp_size=2), *(parallel(all2all_backend=name, **spread) for name in backends)
    refused = [
        {"activation": MoEActivation.GELU},
        {"swiglu_limit": -1.0},
        {"in_dtype": torch.float32},
        {"is_lora_enabled": True},
        *moved,
    ]

    def plugin_serves(shared_by_aiter: bool = False, **options) -> bool:
        asked = config(**options)
        asked.aiter_fmoe_shared_expert_enabled = shared_by_aiter  # vLLM sets it from its environment
        return experts.first_supported(fp8_experts.PLUGIN_EXPERTS, asked, *scheme("block")) is not None

    assert plugin_serves()
    assert not plugin_serves(shared_by_aiter=True)
    assert [options for options in refused if plugin_serves(**options)] == []
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert not plugin_serves()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("mxfp4", "mx alone")])
def test_experts_of_a_named_backend_are_the_baseline(kind, monkeypatch):
    """The plugin keeps those that vLLM selects for it, whatever AITER's switch says. Other backends are vLLM's."""
    holder = mxfp8_native_moe.Mxfp8NativeTritonExperts if kind == "mx" else triton_moe.TritonExperts
    holder = triton_moe.TritonWNA16Experts if kind in INT4 else holder
    monkeypatch.setattr(holder, "_supports_current_device", staticmethod(lambda: True))
    monkeypatch.setattr(holder, "_supports_quant_scheme", staticmethod(lambda *_: True))
    ask_for_aiter(monkeypatch)
    served = select(kind, moe_backend="triton")
    assert served is SEAMS.get(kind, fp8_experts).PLUGIN_EXPERTS[0] and not served.shuffled
    other = experts.select([served], lambda: ("EMULATION", holder), config(moe_backend="emulation"), *scheme(kind))
    assert other == ("EMULATION", holder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(served, "baseline_class", staticmethod(lambda: experts.Predicates))
        assert select(kind, moe_backend="triton") is not served, "it keeps others than vLLM selects"
        patch.setattr(holder, "_supports_current_device", staticmethod(lambda: False))
        with pytest.raises(ValueError, match="support"):
            select(kind, moe_backend="triton")
    for variable, value in (("VLLM_ROCM_OPS_NAMED_BACKEND", "keep"), ("VLLM_BATCH_INVARIANT", "1")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(holder, "_supports_batch_invariance", staticmethod(lambda: True))
            patch.setenv(variable, value)
            assert select(kind, moe_backend="triton") is holder


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"group": 64}, "INT4 in groups of 64"),
        ({"intermediate_size": 144}, "256 and 144 columns in groups of 32"),
        ({"zero_points": True}, "INT4 with zero points"),
        ({"in_dtype": torch.float16}, "INT4 weights with torch.float16"),
        ({"order": "group"}, "group activation ordering is not supported"),
        ({"is_lora_enabled": True}, None),
    ],
)
def test_int4_layers_are_refused_with_a_reason(options, why, monkeypatch):
    """They stay vLLM's, which here is asked without its probe of the CPU."""
    said, cpu = [], cpu_moe.CPUExpertsInt4
    supports(monkeypatch, cpu)
    monkeypatch.setattr(wna16_experts, "log_unsupported", said.append)
    assert select_int4("int4_32")[1] is wna16_experts.PLUGIN_EXPERTS[0]
    assert select_int4("int4_32", **options)[1] is not wna16_experts.PLUGIN_EXPERTS[0]
    assert said == ([why] if why else [])  # LoRA is vLLM's own rule


def test_quarks_int4_experts_are_served(monkeypatch):
    """The plugin takes them if all layers of its configuration have groups of one size."""
    of = {group: {"weight": {"dtype": "int4", "group_size": group, "symmetric": True}} for group in (64, 128)}
    said, cpu = [], cpu_moe.CPUExpertsInt4
    supports(monkeypatch, cpu)
    monkeypatch.setattr(wna16_experts, "log_unsupported", said.append)

    def chosen(group: int, **layers):
        written = {"global_quant_config": of[group], "layer_quant_config": layers, "layer_type_quant_config": {}}
        quant = quark.QuarkConfig(written | {"export": {"pack_method": "reorder"}, "exclude": []}, [])
        return int_wna16.select_wna16_moe_backend(config(), scheme("int4_128")[0], quant, False, False)[1]

    assert chosen(128) is chosen(128, some=of[128]) is wna16_experts.PLUGIN_EXPERTS[0]
    assert cpu not in (chosen(128), chosen(128, some={"weight": None})) and said == []
    assert chosen(64) is chosen(128, some=of[64]) is cpu
    assert said == ["INT4 in groups of 64", "INT4 in groups that differ by layer"]


def test_int4_layers_of_another_backend_stay_there(monkeypatch):
    """On a GPU the plugin's experts keep vLLM's Triton experts; a layer that vLLM gives to another backend stays there."""
    supports(monkeypatch, triton_moe.TritonWNA16Experts)
    supports(monkeypatch, marlin_moe.MarlinExperts, answer=False)
    monkeypatch.setattr(int_wna16, "_get_priority_backends", lambda: [backends.MARLIN, backends.TRITON])
    monkeypatch.setattr(int_wna16, "check_moe_marlin_supports_config", lambda *_: True)
    monkeypatch.setattr(seam, "served_platform", lambda: "rocm")
    backends = int_wna16.WNA16MoEBackend
    assert select_int4("int4_32") == (backends.TRITON, wna16_experts.PLUGIN_EXPERTS[0])
    supports(monkeypatch, marlin_moe.MarlinExperts)
    assert select_int4("int4_32") == (backends.MARLIN, marlin_moe.MarlinExperts)


@pytest.mark.parametrize("kind", ["block", "bf16", "int4_32"])
def test_experts_beside_a_named_backend_serve_what_they_won(baseline, kind, monkeypatch):
    """Before timing all tokens are the named backend's."""
    layer = Layer(kind)
    by_reference(monkeypatch, ops.fused_experts)
    compute(baseline, layer, monkeypatch)
    made = kernel(layer, modular(kind), moe_backend="triton")

    def serve() -> int:
        baseline.calls.clear()
        call(layer, made, *routed(), inputs())
        return len(baseline.calls)

    assert serve() == 1
    [choice] = time_choices((1, 2), 64, plugin_wins_up_to(TOKENS, place=1))
    assert choice.key.baseline.named == "--moe-backend triton"
    assert str(choice.key).endswith(" (--moe-backend triton)")
    assert serve() == 0


@pytest.mark.parametrize("backend", [None, "allgather_reducescatter"])
def test_tokens_that_move_between_ranks_are_served(backend):
    """Experts that do not route serve them, also with load balancing. Without expert parallelism vLLM gathers, too."""
    spread = {"dp_size": 2} if backend is None else SPREAD
    for options in (spread, *([spread | {"enable_eplb": True}] if backend else [])):
        for kind in ("block", "bf16"):
            assert select(kind, **parallel(**options)) is modular(kind)


def test_tokens_that_mori_moves_are_served(baseline, monkeypatch):
    """AITER's experts, which vLLM requires there, are the baseline."""
    ask_for_aiter(monkeypatch)
    supports(monkeypatch, baseline)
    for backend in ("mori_high_throughput", "mori_low_latency"):
        for eplb in (False, True):
            options = parallel(**SPREAD | {"all2all_backend": backend, "enable_eplb": eplb})
            assert select("block", **options) is aiter("block")


@pytest.mark.parametrize("backend", ["deepep_low_latency", "nixl_ep"])
def test_batches_of_an_experts_tokens_are_refused_with_a_reason(backend, caplog):
    options = parallel(dp_size=2, use_ep=True, ep_size=2, all2all_backend=backend)
    asked = config(**options), *scheme("block"), modular("block").activation_format()
    supported, why = modular("block").is_supported_config(modular("block"), *asked)
    assert not supported and f"the batched activation format of {backend}" in why
    experts.log_unsupported.cache_clear()
    with caplog.at_level("INFO"):
        for _ in range(2):
            assert experts.first_supported(fp8_experts.PLUGIN_EXPERTS, *asked[:3]) is None
    assert caplog.text.count("experts stay on vLLM's kernels") == 1


def applied(made, layer: Layer, hidden: Tensor, scale: Tensor | None, weights: Tensor, ids: Tensor, meta=None, **more):
    """Return the output buffer of experts, for tokens that vLLM has moved."""
    output = torch.full((len(hidden), HIDDEN), torch.nan, dtype=torch.bfloat16)
    given = {"hidden_states": hidden, "w1": layer.w1, "w2": layer.w2, "topk_weights": weights, "topk_ids": ids}
    given |= {"activation": MoEActivation.SILU, "global_num_experts": EXPERTS, "expert_map": None, "a1q_scale": scale}
    given |= {"workspace13": None, "workspace2": None, "expert_tokens_meta": meta, "a2_scale": None}
    made.apply(output, **given | {"apply_router_weight_on_input": False} | more)
    return output


SPREAD = {"dp_size": 2, "use_ep": True, "ep_size": 2, "all2all_backend": "allgather_reducescatter"}


@pytest.mark.parametrize("plugin", [False, True])
@pytest.mark.parametrize("kind", ["block", "channel"])
def test_tokens_come_quantized_where_the_baseline_wants_them_so(baseline, kind, plugin, monkeypatch):
    """They are quantized only once: the plugin's and the baseline experts get the received values and scales."""
    layer, (weights, ids), hidden = Layer(kind), routed(), inputs()
    monkeypatch.setattr(ops.fused_experts, "run_kernels", ops.fused_experts.reference if plugin else lambda *_: None)
    made = modular(kind)(config(**parallel(**SPREAD)), layer.quant_config)
    assert not made.expects_unquantized_inputs
    without_ep = parallel(dp_size=2, use_ep=False, ep_size=1, all2all_backend="allgather_reducescatter")
    assert not modular(kind)(config(**without_ep), layer.quant_config).expects_unquantized_inputs
    groups = hidden.float().unflatten(-1, (-1, BLOCK if kind == "block" else HIDDEN))
    scale = groups.abs().amax(-1, keepdim=True) / LIMIT
    values = (groups / scale).to(torch.float8_e4m3fn).flatten(-2)
    output = applied(made, layer, values, scale.squeeze(-1), weights, ids)
    if plugin:
        assert baseline.calls == []
        close(output, layer.plain(hidden, weights, ids))
    else:
        [made] = baseline.calls
        assert made["hidden_states"] is values and torch.equal(made["a1q_scale"], scale.squeeze(-1))
    baseline.calls.clear()
    monkeypatch.setattr(baseline, "expects_unquantized_inputs", True)
    assert modular(kind)(config(**parallel(**SPREAD)), layer.quant_config).expects_unquantized_inputs


def test_room_for_more_tokens_goes_to_no_expert(baseline, monkeypatch):
    """MoRI's buffers have garbage after the received tokens, which must not count."""
    ask_for_aiter(monkeypatch)
    layer, (weights, ids), hidden, asked = Layer("bf16"), routed(), inputs(), []
    run = ops.fused_experts.reference
    monkeypatch.setattr(ops.fused_experts, "run_kernels", lambda *a: asked.append(a[4]) or run(*a))
    moved = config(**parallel(**SPREAD | {"all2all_backend": "mori_high_throughput"}))
    made = modular("bf16")(moved, layer.quant_config)
    came = Fake(expert_num_tokens=torch.tensor([2], dtype=torch.int32))
    monkeypatch.setattr(linear_base, "asks_for_aiter", lambda kind: False)
    output = applied(made, layer, hidden, None, weights, ids, came)
    assert torch.equal(asked[0][:2], ids[:2]) and (asked[0][2:] == -1).all()
    close(output[:2], layer.plain(hidden, weights, ids)[:2])


def aiter(kind: str) -> type:
    """Return the plugin's class around AITER's experts."""
    if kind == "bf16":
        return next(plugin for plugin in unquantized_experts.PLUGIN_EXPERTS if plugin.shuffled)
    aiters = (plugin for plugin in fp8_experts.PLUGIN_EXPERTS if plugin.shuffled)
    return next(plugin for plugin in aiters if plugin.schemes == (scheme(kind),))


@pytest.mark.parametrize("kind", ROUTING)
def test_with_aiter_asked_for_its_experts_are_the_baseline(baseline, kind, monkeypatch):
    """Weights are then prepared for AITER, and vLLM routes, unless the shuffled layout does not support a size."""
    select_from = unquantized_experts if kind == "bf16" else fp8_experts
    supports(monkeypatch, baseline)
    assert select(kind) is not aiter(kind)
    ask_for_aiter(monkeypatch)
    assert select(kind) is aiter(kind)
    assert aiter(kind).backend.name == "AITER" and select_from.PLUGIN_EXPERTS[0] is not aiter(kind)
    keys = aiter(kind).schemes[0]
    if kind != "bf16":
        from vllm.model_executor.layers.fused_moe.oracle import fp8

        assert fp8.select_fp8_moe_backend(config(), *keys)[0].name == "AITER"
    unaligned = config(intermediate_size=48 if kind != "bf16" else 24)
    assert experts.first_supported(select_from.PLUGIN_EXPERTS, unaligned, *keys) is None
    monkeypatch.setattr(rocm_aiter_ops, "is_fused_moe_enabled", lambda: False)
    assert select(kind) is not aiter(kind)


def shuffled(weights: Tensor) -> Tensor:
    """Return experts' weights as AITER's shuffle_weight(weights, layout=(16, 16)) leaves them, by AITER's formula."""
    (n, k), step, vector = weights.shape[1:], 32, 16 // weights.element_size()
    parts = weights.view(torch.int16 if weights.element_size() == 2 else torch.uint8)
    parts = parts.view(-1, n // 16, 16, k // step, step // vector, vector).permute(0, 1, 3, 4, 2, 5).contiguous()
    return parts.view(weights.shape).view(weights.dtype)


@pytest.mark.parametrize("fault", [False, True])
@pytest.mark.parametrize("kind", ["block", "channel", "bf16"])
def test_aiters_weights_are_read_as_they_are(baseline, kind, fault, monkeypatch):
    """The plugin serves nothing before it is measured. AITER's experts get this rank's mask in place of the map."""
    ask_for_aiter(monkeypatch)
    layer, reference = Layer(kind), ops.fused_experts.reference
    here = EXPERTS // 2
    expert_map = torch.full((EXPERTS,), -1, dtype=torch.int32)
    expert_map[:here] = torch.arange(here, dtype=torch.int32)

    def plugin(*arguments):
        a = ops.fused_experts.Arguments(*arguments)
        return reference(*a._replace(shuffled=a.shuffled != fault))

    monkeypatch.setattr(ops.fused_experts, "run_kernels", plugin)
    compute(baseline, layer, monkeypatch, range(here))
    monkeypatch.setattr(baseline, "consumes_expert_mask", True)
    quant = layer.quant_config
    if kind != "bf16":
        for weight in (quant._w1, quant._w2):
            weight.scale = weight.scale[:here]
    made = aiter(kind)(config(), quant)
    layer.w1, layer.w2 = shuffled(layer.w1[:here]), shuffled(layer.w2[:here])
    hidden = inputs(9)

    def serve(tokens: int) -> int:
        baseline.calls.clear()
        weights, ids = routed(tokens=tokens)
        output = applied(made, layer, hidden[:tokens], None, weights, ids, expert_map=expert_map)
        close(output, layer.plain(hidden[:tokens], weights, ids, within=range(here)))
        return len(baseline.calls)

    assert [serve(tokens) for tokens in (1, 9)] == [1, 1]
    mask = baseline.calls[0]["expert_map"]
    assert mask.tolist() == [1] * here + [0] * (EXPERTS - here + 1) and mask.dtype == torch.int32
    [choice] = time_choices((1, 2), 64, plugin_wins_up_to(4, place=1))
    assert choice.state == ("off" if fault else "measured"), choice.why
    assert choice.key.shape.endswith(" shuffled")
    assert [serve(tokens) for tokens in (1, 4, 5, 9)] == ([1] * 4 if fault else [0, 0, 1, 1])
    assert baseline.calls[0]["expert_map"].tolist() == mask.tolist()


@pytest.mark.parametrize("kind", ["block", "channel"])
def test_shared_experts_that_aiter_fuses(baseline, kind, monkeypatch):
    """They are the last experts, of all tokens, by the sigmoid of a gate in Qwen3-Next. With expert parallelism the layer stays AITER's."""
    supports(monkeypatch, baseline)
    ask_for_aiter(monkeypatch)
    monkeypatch.setattr(rocm_aiter_ops, "is_fusion_moe_shared_experts_enabled", lambda: True)
    assert config().aiter_fmoe_shared_expert_enabled
    assert select(kind) is aiter(kind)
    spread = config(**parallel(use_ep=True, ep_size=2))
    assert experts.first_supported(fp8_experts.PLUGIN_EXPERTS, spread, *scheme(kind)) is None
    _, why = aiter(kind).is_supported_config(aiter(kind), spread, *scheme(kind), STANDARD)
    assert "shared experts that AITER fuses, with expert parallelism: each rank adds them for its part" in why
    layer, routed_experts = Layer(kind), EXPERTS - 1
    by_reference(monkeypatch, ops.fused_experts)
    compute(baseline, layer, monkeypatch)
    made = aiter(kind)(config(num_experts=routed_experts, num_local_experts=EXPERTS), layer.quant_config)
    layer.w1, layer.w2 = shuffled(layer.w1), shuffled(layer.w2)
    weights, ids = routed(TOPK - 1)
    ids = torch.cat([ids.clamp(max=routed_experts - 1), torch.full((TOKENS, 1), routed_experts, dtype=ids.dtype)], 1)
    weights, hidden = torch.cat([weights, torch.linspace(-2, 2, TOKENS).sigmoid()[:, None]], 1), inputs()

    def serve() -> int:
        baseline.calls.clear()
        output = applied(made, layer, hidden, None, weights, ids, global_num_experts=routed_experts)
        close(output, layer.plain(hidden, weights, ids))
        return len(baseline.calls)

    assert serve() == 1
    [choice] = kernel_selection.all_choices()
    [described] = choice.layers.values()
    chosen = experts.COMPARISON.arguments(described, hidden, 1)[-1]
    assert (chosen == routed_experts).any(1).all() and chosen.shape[1] == TOPK
    [choice] = time_choices((1, 2), 64, plugin_wins_up_to(TOKENS, place=1))
    assert choice.state == "measured", choice.why
    assert serve() == 0


@pytest.mark.parametrize("fault", [False, True])
@pytest.mark.parametrize(("form", "kind"), [*((form, kind) for form in FORMS for kind in ROUTING), ("modular", "mx")])
def test_kernels_serve_the_sizes_they_won(baseline, form, kind, fault, monkeypatch):
    """Right experts pass the check, and serve where they are faster; experts that mix up experts fail it."""
    layer, reference = Layer(kind), ops.fused_experts.reference

    def plugin(hidden, w1, w2, *others):
        return reference(hidden, w1, w2.roll(1, 0) if fault else w2, *others)

    monkeypatch.setattr(ops.fused_experts, "run_kernels", plugin)
    compute(baseline, layer, monkeypatch)
    hidden, logits, bias = inputs(9), random(9, EXPERTS), random(EXPERTS) * 0.1

    def serve(tokens: int) -> int:
        baseline.calls.clear()
        if form == "modular":
            call(layer, made, *routed(tokens=tokens), hidden[:tokens])
        else:
            call_with_logits(layer, made, logits[:tokens], bias, hidden[:tokens])
        return len(baseline.calls)

    plugin_class = modular(kind) if form == "modular" else (SEAMS.get(kind, fp8_experts).PLUGIN_EXPERTS[0])
    made = kernel(layer, plugin_class)
    serve(9)
    [choice] = time_choices((1, 2), 64, plugin_wins_up_to(4, place=1))
    assert choice.state == ("off" if fault else "measured"), choice.why
    assert [serve(tokens) for tokens in (1, 4, 5, 9)] == ([1] * 4 if fault else [0, 0, 1, 1])


@pytest.mark.parametrize("wins", [False, True])
def test_experts_that_the_plugin_never_serves_are_vllms_own(baseline, wins, monkeypatch):
    """vLLM still asks the plugin's experts for their support and workspaces, and nothing else."""
    layer = Layer("block")

    by_reference(monkeypatch, ops.fused_experts)
    compute(baseline, layer, monkeypatch)
    made, hidden = kernel(layer, modular("block")), inputs(4)

    def serve():
        call(layer, made, *routed(tokens=4), hidden)

    serve()
    assert not baseline.calls
    decide(bytes([0, 0, 0, 0, wins]))
    serve()
    entered = {name.rpartition(".")[2] for name in frames.entered(serve)}
    asked = {"workspace_shapes", "finalize_weight_and_reduce_impl", "expects_unquantized_inputs", "activation_format"}
    assert (entered <= asked) is not wins, entered
    assert len(baseline.calls) == (0 if wins else 2)
    monkeypatch.setattr(baseline, "expects_unquantized_inputs", False)  # vLLM then quantizes before it calls them
    assert modular("block").expects_unquantized_inputs.fget(made.fused_experts) is wins


def test_measured_routes_are_uniform_over_all_ranks():
    """Half of the experts are another rank's, and get half of the tokens."""
    expert_map = torch.arange(EXPERTS, dtype=torch.int32).where(torch.arange(EXPERTS) < EXPERTS // 2, -1)
    layer, here = Layer("bf16"), EXPERTS // 2
    kept = (layer.w1[:here], layer.w2[:here], torch.bfloat16, None, TOPK, torch.int32, expert_map, False, None, EXPERTS)
    _, x, weights, ids = experts.COMPARISON.arguments(kept, random(4000, HIDDEN), 0)
    counts = ids.flatten().bincount(minlength=EXPERTS)
    assert ids.dtype == torch.int32 and counts.sum() == 4000 * TOPK
    assert (counts / counts.float().mean() - 1).abs().max() < 0.1
    assert all(len(set(row)) == TOPK for row in ids.tolist())
    torch.testing.assert_close(weights.sum(1), torch.ones(4000))
    assert torch.equal(experts.COMPARISON.arguments(kept, x, 0)[3], ids)
    assert not torch.equal(experts.COMPARISON.arguments(kept, x, 1)[3], ids)
    moved, operations = experts.COMPARISON.work(kept, 1)
    assert operations == 2 * 1.5 * 3 * HIDDEN * INNER and moved == 1.5 * 3 * HIDDEN * INNER * 2
