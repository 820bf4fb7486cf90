"""serving_benchmarks/decode_step.py and figures.py: tiny models on the CPU, and what is written of made-up times."""

import argparse
import importlib
import itertools
import json
import pathlib
import re
import subprocess
import sys
from xml.etree import ElementTree

import measurements
import pytest
import torch
from marks import few_of

from vllm_rocm_ops import arch as archs
from vllm_rocm_ops import correctness, model_config, model_layers, op, ops, quantization

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "serving_benchmarks"
sys.path.append(str(SCRIPTS))
attention, decode_step, figures, stock = map(importlib.import_module, ("attention", "decode_step", "figures", "stock"))
sys.path.remove(str(SCRIPTS))

E4M3 = torch.float8_e4m3fn
LLAMA, DEEPSEEK = "tiny-llama-fp8", "tiny-deepseek-v3-fp8"
TOKEN_LLAMA = model_config.read(LLAMA) | {"quantization_config": decode_step.PER_TOKEN}


def options(**given) -> argparse.Namespace:
    defaults = {
        "tp": 1,
        "ep": None,
        "batch": [3],
        "context": 8,
        "layers": None,
        "quantization": "token",
        "ours": frozenset(decode_step.REPLACEABLE),
        "fold_shared": False,
        "device": "cpu",
    }
    return argparse.Namespace(**(defaults | given))


def steps(model: str, batch: int = 3, **given) -> dict:
    """Both paths of a step of a model, run once; the references compute both."""
    chosen = options(**given)
    rank = decode_step.build(model, chosen, E4M3)
    inputs = decode_step.Inputs(rank, batch, chosen.context)
    references = {o.name: stock.Stock(o, "cpu") for o in op.registered()}
    found = {"stock": decode_step.Step(rank, inputs, frozenset(), references)}
    found["ours"] = decode_step.Step(rank, inputs, chosen.ours, references)
    return found


@pytest.mark.parametrize(
    ("model", "given"),
    [
        (LLAMA, {}),
        (LLAMA, {"tp": 4, "quantization": "config"}),
        ("tiny-llama", {}),
        (DEEPSEEK, {"tp": 2}),
        (DEEPSEEK, {"tp": 2, "ep": 0, "layers": 2}),
        (DEEPSEEK, {"ep": 4, "layers": 2}),
        ("tiny-deepseek-v3", {"layers": 2}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(f"{k}{v}" for k, v in value.items()),
)
def test_both_paths_run_and_are_the_same_without_kernels(model, given):
    both = {}
    for path, step in steps(model, **given).items():
        logits, tokens = step.take_down()
        assert logits.shape == (3, 2048 // given.get("tp", 1)) and logits.isfinite().all() and logits.abs().max() < 100
        assert torch.equal(tokens, logits.argmax(-1))
        assert step.calls is None and {call.kind for call in step.taken} <= set(decode_step.KINDS)
        both[path] = logits
    assert torch.equal(*both.values())
    decode_step.check(both)
    with pytest.raises(RuntimeError, match="ours has logits that are not finite"):
        decode_step.check(both | {"ours": both["ours"] / 0})


def test_a_step_changes_nothing_that_the_next_one_reads():
    for step in steps(DEEPSEEK, ep=4, layers=2).values():
        first = step()[0]
        assert torch.equal(first, step()[0])


# What is computed


def plain_llama(step) -> torch.Tensor:
    """The logits of a step of Llama from its formula, in float32, with activations rounded as products take them."""
    rank, inputs = step.rank, step.inputs
    config = rank.config

    def norm(x, part):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + config["rms_norm_eps"]) * part.given.weight.float()

    def linear(part, x, scale=None):
        g = part.given
        if part.op is ops.unquantized_gemm:
            return x @ g.weight.float().T
        if scale is not None or g.scale_b.numel() == 1:
            scale = g.scale_a if scale is None else scale
            values = quantization.static(x, scale, E4M3)
        else:
            values, scale = quantization.per_token(x, E4M3, None)
        return (values.float() * scale) @ (g.b.float() * g.scale_b.reshape(1, -1))

    def scale_of(part):
        return getattr(part.given, "scale", None)

    def rotate(x, position):
        half = x.shape[-1] // 2
        angles = position * config["rope_theta"] ** (-torch.arange(half) / half)
        first, second = x[..., :half], x[..., half:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    def attended(qkv, layer):
        heads, kv_heads = config["num_attention_heads"] // rank.tp, config["num_key_value_heads"] // rank.tp
        size, cache = config["head_dim"], inputs.attention[layer]
        q, k, v = qkv.unflatten(1, (-1, size)).split((heads, kv_heads, kv_heads), 1)
        q, k = (rotate(rows, inputs.context - 1) for rows in (q, k))
        keys, values = (cache.pages.of(c).transpose(1, 2).float() for c in (cache.keys, cache.values))
        keys, values = (torch.cat((old[:, :, :-1], new[:, :, None]), 2) for old, new in ((keys, k), (values, v)))
        keys, values = (rows.repeat_interleave(heads // kv_heads, 1) for rows in (keys, values))
        weights = torch.softmax(torch.einsum("mhd,mhcd->mhc", q, keys) * size**-0.5, -1)
        return torch.einsum("mhc,mhcd->mhd", weights, values).flatten(1)

    x = inputs.hidden.float()
    for number, layer in enumerate(rank.layers[:-1]):
        normed = norm(x, layer["input norm"])
        qkv = linear(layer["qkv"], normed, scale_of(layer["input norm"]))
        x = x + linear(layer["o"], attended(qkv, number))
        normed = norm(x, layer["post-attention norm"])
        gate, up = linear(layer["gate_up"], normed, scale_of(layer["post-attention norm"])).chunk(2, -1)
        x = x + linear(layer["down"], torch.nn.functional.silu(gate) * up, scale_of(layer["SwiGLU"]))
    return linear(rank.layers[-1]["lm_head"], norm(x, rank.layers[-1]["final norm"]))


@pytest.mark.parametrize(
    ("model", "quantization", "layers", "most"),
    [
        ("tiny-llama", "token", None, 0.02),
        (LLAMA, "token", 1, 0.05),  # roundings to e4m3 that fall the other way
        (LLAMA, "config", 1, 0.08),
        (LLAMA, "token", None, 0.1),  # add up
    ],
)
def test_llama_is_what_its_formula_says(model, quantization, layers, most):
    step = steps(model, tp=2, quantization=quantization, layers=layers)["ours"]
    expected, logits = plain_llama(step), step()[0].float()
    assert (logits - expected).norm() < most * expected.norm()


def test_absorbed_latent_attention_is_that_over_keys_and_values():
    rank = steps("tiny-deepseek-v3")["ours"].rank
    layer = attention.LatentAttention(rank, 0, attention.Pages(rank, 64, False, 3, 5, 4))
    heads, nope, rope = 16, 128, 64
    q, kv, k_pe = (torch.randn(3, size).bfloat16() for size in (heads * (nope + rope), 512, rope))
    before = layer.pages.of(layer.cache)[:, :-1]
    rows = torch.cat((before, torch.cat((kv, k_pe @ layer.pages.rotation), -1)[:, None]), 1).float()
    latent = rows[..., :512]
    w_uk, w_uv = (weight.float() for weight in rank.absorbed[0])
    keys = torch.einsum("mcr,hdr->mhcd", latent, w_uk)
    values = torch.einsum("mcr,hrv->mhcv", latent, w_uv)
    by_head = q.float().view(3, heads, nope + rope)
    scores = torch.einsum("mhd,mhcd->mhc", by_head[..., :nope], keys)
    scores += torch.einsum("mhd,mcd->mhc", by_head[..., nope:] @ layer.pages.rotation.float(), rows[..., 512:])
    weights = torch.softmax(scores * (nope + rope) ** -0.5, -1)
    expected = torch.einsum("mhc,mhcv->mhv", weights, values).flatten(1)
    found = layer.run(first_of, q.clone(), kv, k_pe.clone()).float()
    assert (found - expected).norm() < 0.02 * expected.norm()


def first_of(kind, op_, *arguments):
    result = op_(*arguments)
    return result[0] if isinstance(result, tuple) else result


def test_the_shared_expert_may_be_folded_into_ours():
    both = steps(DEEPSEEK, fold_shared=True, layers=2)
    logits = {path: step.take_down()[0] for path, step in both.items()}
    assert 0 < off(logits["ours"], logits["stock"]) < 0.1
    unfolded = steps(DEEPSEEK, layers=2)["stock"]()[0]
    assert torch.equal(logits["stock"], unfolded)
    kinds = {path: [call.kind for call in step.taken] for path, step in both.items()}
    assert kinds["stock"].count("activation") == 2 and kinds["ours"].count("activation") == 1
    with pytest.raises(SystemExit, match="to be folded there must be one shared expert"):
        steps(DEEPSEEK, tp=2, ep=0, fold_shared=True)


def test_kinds_are_replaceable_one_by_one():
    """What is not ours is stock's; what is the same on both sides is neither."""
    grouped = steps(LLAMA, ours=frozenset(("attention",)), layers=1)["ours"]
    grouped.take_down()
    called = [call.function for call in grouped.taken if call.kind in decode_step.OF_ATTENTION]
    assert called == [grouped.stock["rope_and_cache"], ops.paged_attention_decode]
    step = steps(DEEPSEEK, ep=8, layers=2)["ours"]
    for kind in decode_step.REPLACEABLE:
        step.ours = frozenset((kind,))
        step.take_down()
        by_ours = {call.kind for call in step.taken if isinstance(call.function, op.Op)}
        by_stock = {call.kind for call in step.taken if isinstance(call.function, stock.Stock)}
        assert by_ours == {kind} and by_stock == {*decode_step.REPLACEABLE} - {kind}


def test_calls_of_a_kind_alone_are_those_of_the_step():
    step = steps(LLAMA)["ours"]
    step.take_down()
    ran = []
    calls = [call._replace(function=lambda *_, kind=call.kind: ran.append(kind)) for call in step.taken]
    decode_step.run_kind(calls, "norm")
    assert ran == ["norm"] * (2 * 4 + 1)


def test_experts_get_the_tokens_of_all_ranks():
    step = steps(DEEPSEEK, ep=4, layers=2)["ours"]
    step.take_down()
    [*_, call] = [call for call in step.taken if call.kind == "moe"]
    a = ops.fused_experts.Arguments(*call.arguments)
    assert a.hidden.shape == (12, 512) and a.topk_ids.shape == (12, 4) and len(a.w1) == 4
    assert a.expert_map.tolist() == [0, 1, 2, 3] + 12 * [-1]
    step.moe = False
    step.take_down()
    assert "moe" not in {call.kind for call in step.taken}


def test_bad_divisions_are_refused():
    with pytest.raises(SystemExit, match="ep must be a multiple of tp=4, got 2"):
        steps(DEEPSEEK, tp=4, ep=2)
    with pytest.raises(SystemExit, match="model must be"):
        steps("no-such-model")


def off(found: torch.Tensor, expected: torch.Tensor) -> float:
    """How far the one is from the other, relative to the other."""
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


# The floor


def weight_bytes(config: dict, tp: int, experts_hit: int) -> int:
    """From the shapes of the calls: e4m3 or bf16 weights, their scales, norms' weights and the router's bias."""
    total = 0
    for call in model_layers.calls(config, tp):
        a = call.op.Arguments(*call.case(1).make("meta", torch.Generator(), E4M3))
        if call.op is ops.fused_experts:
            n, h = a.w1.shape[1:]
            blocks = (n // 128) * (h // 128) + (h // 128) * (n // 2 // 128)
            total += call.count * experts_hit * (n * h + h * n // 2 + 4 * blocks)
        elif call.op is ops.block_scaled_mm:
            total += call.count * (a.b.numel() + 4 * a.scale_b.numel())
        elif call.op is ops.scaled_mm:
            total += call.count * (a.b.numel() + 4 * a.b.shape[1])
        elif call.op is ops.unquantized_gemm:
            total += call.count * 2 * a.weight.numel()
        elif "rms_norm" in call.op.name:
            total += call.count * 2 * a.input.shape[1]
        elif call.op is ops.grouped_topk:
            total += call.count * 4 * a.gating_output.shape[1]
    return total


def test_the_floor_is_all_weights_and_the_cache():
    inputs = steps(LLAMA, batch=3, tp=2, context=8)["ours"].inputs
    assert (
        inputs.bytes == weight_bytes(TOKEN_LLAMA, 2, 0) + 4 * 2 * 3 * 8 * 64 * 2
    )  # layers, k and v, batch, context, head

    inputs = steps(DEEPSEEK, batch=40, tp=2, context=8)["ours"].inputs  # 160 pairs: no expert of 16 without a token
    latent = 4 * (2 * 40 * 8 * 576 + 2 * 8 * 2 * 128 * 512)  # layers: cache; W_UK and W_UV
    assert inputs.bytes == weight_bytes(model_config.read(DEEPSEEK), 2, 16) + latent

    inputs = steps(DEEPSEEK, batch=1, tp=2, context=8)["ours"].inputs
    latent = 4 * (2 * 1 * 8 * 576 + 2 * 8 * 2 * 128 * 512)
    assert inputs.bytes == weight_bytes(model_config.read(DEEPSEEK), 2, 4) + latent


# Stock


def test_stock_takes_the_first_that_computes_the_op():
    def refuses(x):
        raise ValueError("it takes\nnothing")

    chosen = stock.Stock(ops.silu_and_mul, "cpu")
    right = ("right", lambda x: ops.silu_and_mul.reference(x))
    chosen.candidates = [("refuses", refuses), ("doubles", lambda x: 2 * ops.silu_and_mul(x)), right]
    x = torch.rand(2, 4).bfloat16() + 1
    assert torch.equal(chosen(x), ops.silu_and_mul(x))
    refused = ["refuses: ValueError it takes", "doubles: ValueError its result is off by 1.00 of the reference's"]
    assert chosen.used == {"right": refused}
    chosen.candidates = chosen.candidates[:2]
    assert torch.equal(chosen(x), ops.silu_and_mul(x))  # known by its layout
    with pytest.raises(RuntimeError, match="nothing computes silu_and_mul: refuses: ValueError it takes; doubles: "):
        chosen(x[:1])


def test_choosing_updates_nothing():
    chosen = stock.Stock(ops.fused_add_rms_norm, "cpu")
    chosen.candidates = [("right", lambda *a: ops.fused_add_rms_norm.reference(*a))]
    x, residual, weight = (torch.ones(shape).bfloat16() for shape in ((2, 8), (2, 8), (8,)))
    chosen(x, residual, weight, 1e-6)
    assert (residual == 2).all()


@pytest.mark.parametrize("model", [LLAMA, "tiny-llama", DEEPSEEK])
def test_stock_on_a_gpu_computes_the_same_as_far_as_a_cpu_can(model, traced):
    """What vLLM compiles, and PyTorch's products."""
    step = steps(model, layers=2)["stock"]
    expected = step()[0]
    there = (ops.rms_norm, ops.fused_add_rms_norm, ops.silu_and_mul, ops.scaled_mm, ops.unquantized_gemm)
    of_gpu = {o.name: stock.Stock(o, "cuda") for o in there}
    step.stock = step.stock | of_gpu
    assert off(step()[0], expected) < 0.1
    assert of_gpu["fused_add_rms_norm"].used == {"vllm compiled": []}
    assert of_gpu["unquantized_gemm"].used == {"torch": []}
    assert (model == LLAMA) != bool(of_gpu["rms_norm"].used)


# What vLLM compiles


@pytest.fixture
def traced(monkeypatch) -> list[list]:
    """Graphs are run as they were traced, uncompiled: the sizes of the inputs of each, in order."""
    graphs = []

    def backend(module, inputs):
        graphs.append([[int(size) for size in value.shape] for value in inputs if isinstance(value, torch.Tensor)])
        return module.forward

    monkeypatch.setattr(stock, "BACKEND", backend)
    monkeypatch.setattr(stock, "MOST_TOKENS", 32)
    yield graphs
    torch._dynamo.reset()


ROW_CASES = ("bf16", "fp16-no-residual", "one-row", "strided", "scale_ub", "bf16-one-plus")


@pytest.mark.parametrize(
    ("name", "case"),
    [(name, case) for name in stock.NATIVE for case in ops.__dict__[name].cases() if case.name in ROW_CASES],
)
def test_what_vllm_compiles_is_what_the_op_computes(name, case, traced):
    op_, arguments = ops.__dict__[name], case.make("cpu", torch.Generator().manual_seed(0), E4M3)
    mine, references = ([correctness.clone(value) for value in arguments] for _ in range(2))
    found, expected = stock.compiled(stock.NATIVE[name], stock.BACKEND)(*mine), op_.reference(*references)
    found, expected = map(correctness.as_tuple, (found, expected))
    assert [(f.shape, f.dtype) for f in found] == [(e.shape, e.dtype) for e in expected]
    assert off(found[0], expected[0]) < 0.02  # e4m3 is rounded the other way where bf16 was
    assert len(found) == 1 or torch.allclose(found[1], expected[1], rtol=0.01)
    for before, f, e in zip(arguments, mine, references, strict=True):
        assert not isinstance(before, torch.Tensor) or torch.equal(f, e)
    assert len(traced) == 1


def test_a_width_is_compiled_once_with_the_most_rows_for_any_number_of_them(traced):
    norm = stock.compiled(stock.NATIVE["rms_norm"], stock.BACKEND)
    for width in (64, 128):
        for rows in (1, 3, 1, 17):
            assert norm(torch.randn(rows, width).bfloat16(), torch.ones(width).bfloat16(), 1e-6).shape == (rows, width)
    assert traced == [[[stock.MOST_TOKENS, 64], [64]], [[stock.MOST_TOKENS, 128], [128]]]


def test_nothing_is_compiled_for_the_rows_of_a_call(traced, monkeypatch):
    monkeypatch.setattr(stock, "_with_most_rows", lambda value: value)
    norm = stock.compiled(stock.NATIVE["rms_norm"], stock.BACKEND)
    assert norm(torch.ones(1, 64), torch.ones(64), 1e-6).shape == (1, 64)
    with pytest.raises(RuntimeError, match="recompile"):
        norm(torch.ones(3, 64), torch.ones(64), 1e-6)


@pytest.mark.parametrize(
    ("hip", "method", "name", "first"),
    [
        *((None, "fbgemm_fp8", name, "vllm compiled") for name in stock.NATIVE),
        *(("7.0", "fbgemm_fp8", name, "vllm compiled") for name in stock.NATIVE),
        (None, "quark", "silu_and_mul_quant", "vllm"),
        (None, "quark", "fused_add_rms_norm_static_fp8_quant", "vllm compiled"),
        ("7.0", "quark", "silu_and_mul_quant", "vllm compiled"),
        (None, "fp8", "silu_and_mul_quant", "vllm compiled"),
        (None, "fp8", "rms_norm_per_block_quant", "vllm"),
        (None, "fp8", "silu_and_mul_per_block_quant", "vllm"),
        ("7.0", "fp8", "rms_norm_per_block_quant", "vllm"),
        ("7.0", "fp8", "silu_and_mul_per_block_quant", "vllm compiled silu_and_mul + per_token_group_fp8_quant"),
    ],
)
def test_vllm_compiles_what_it_has_no_kernel_for_by_default(hip, method, name, first, traced, monkeypatch):
    monkeypatch.setattr(stock.torch.version, "hip", hip)
    monkeypatch.setattr(stock.peers, "vllm_call", lambda op: lambda outputs, arguments: None)
    names = [candidate for candidate, _ in stock.candidates(ops.__dict__[name], method)]
    assert names[0] == first and "vllm" in names and "torch" in names


def test_an_activation_is_compiled_and_then_quantised_per_block_on_rocm(traced, monkeypatch):
    monkeypatch.setattr(stock.torch.version, "hip", "7.0")
    chosen = stock.Stock(ops.silu_and_mul_per_block_quant, "cuda", "fp8")
    x = torch.randn(3, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    values, scale = chosen(x, E4M3, 128, True)
    assert off(values, ops.silu_and_mul_per_block_quant.reference(x, E4M3)[0]) < 0.02 and scale.stride() == (1, 3)
    assert [*chosen.used] == ["vllm compiled silu_and_mul + per_token_group_fp8_quant"] and len(traced) == 1


def test_what_does_not_compile_is_left_out_and_said(monkeypatch):
    def backend(module, inputs):
        raise ImportError("there is no Triton")

    monkeypatch.setattr(stock, "BACKEND", backend)
    chosen = stock.Stock(ops.rms_norm, "cuda")
    chosen(torch.ones(2, 64).bfloat16(), torch.ones(64).bfloat16(), 1e-6)
    [[name, [refused]]] = chosen.used.items()
    assert name in ("vllm", "torch") and refused == "vllm compiled: ImportError there is no Triton"


@pytest.mark.parametrize(("quantization", "method"), [("token", "fbgemm_fp8"), ("config", "fp8")])
def test_stock_knows_how_the_model_is_quantised(quantization, method, monkeypatch):
    methods = set()

    def known(op_, device, method):
        methods.add(method)
        return stock.Stock(op_, device, method)

    monkeypatch.setattr(decode_step, "Stock", known)
    decode_step.run_model(LLAMA, options(quantization=quantization, layers=1), None, 1)
    assert methods == {method}


def test_launches_are_what_the_gpu_runs(monkeypatch):
    """Not what runs on the CPU, and not the annotation that a compiled function puts around its kernels."""

    class Profiler:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def events(self):
            on_gpu, on_cpu = torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU
            found = [(on_gpu, False), (on_cpu, False), (on_gpu, True), (on_gpu, False)]
            return [argparse.Namespace(device_type=device, is_user_annotation=is_one) for device, is_one in found]

    monkeypatch.setattr(torch.profiler, "profile", lambda **_: Profiler())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert decode_step.launches(lambda: None) == 2


def test_what_no_op_quantises_is_quantised_as_ops_do():
    x = torch.randn(3, 256).bfloat16()
    values, scale = stock.per_block(x, E4M3)
    expected = x.float().view(3, 2, 128).abs().amax(-1) / 448
    assert values.shape == (3, 256) and scale.stride() == (1, 3) and torch.allclose(scale, expected)
    values, scale = stock.per_token(x, E4M3)
    assert torch.allclose(values.float() * scale, x.float(), atol=0.2) and scale.shape == (3, 1)


# Results and figures


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> pathlib.Path:
    """A file of results of both models, with times that count up."""
    count = itertools.count(1)
    output = tmp_path_factory.mktemp("results") / "2026-01-01-abc-decode_step.jsonl"
    measured = {"bandwidth": 4000.0, "commit": "abc", "output": output}
    measured["versions"] = {"torch": "2.11.0", "vllm": "0.33.0", "vllm_rocm_ops": "0.1.0"}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(decode_step, "capture", lambda call, sets: call(*sets[0]))
        patched.setattr(decode_step, "measure", lambda graphs, calls: {name: 10.0 * next(count) for name in graphs})
        patched.setattr(decode_step, "launches", lambda step: len(step.taken))
        patched.setattr(torch.cuda, "get_device_name", lambda: "Made-up GPU")
        for model, given in ((LLAMA, {"tp": 2}), (DEEPSEEK, {"ep": 4, "layers": 2, "ours": frozenset(("norm",))})):
            decode_step.run_model(model, options(batch=[1, 2], **measured, **given), archs.ARCHS["sm_90"], 1)
    return output


def test_a_line_says_what_was_measured(results):
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    assert [line["case"] for line in lines] == [
        "tiny-llama-fp8 tp2, context 8, batch 1",
        "tiny-llama-fp8 tp2, context 8, batch 2",
        "tiny-deepseek-v3-fp8 tp1 ep4, context 8, 2 layers, ours norm, batch 1",
        "tiny-deepseek-v3-fp8 tp1 ep4, context 8, 2 layers, ours norm, batch 2",
    ]
    line = lines[1]
    assert line["peers"]["stock"] and line["tokens_per_s"]["ours"] == pytest.approx(2e6 / line["us"], rel=1e-3)
    assert line["floor_us"] == pytest.approx(line["bytes"] / 4000e3, abs=1e-3)
    assert line["share_of_floor"]["ours"] == pytest.approx(line["floor_us"] / line["us"], abs=1e-3)
    assert line["left_out"] == ["collectives"] and "differs" not in line
    assert set(line["kinds_alone_us"]["ours"]) == {*decode_step.KINDS} - {"routing", "moe", "collectives", "absorbed"}
    assert line["launches"] == line["calls"] == {"stock": 44, "ours": 44}
    assert line["stock"]["scaled_mm"] == {"reference": []}
    of_attention = {"rope_and_cache", "paged_attention_decode"}
    assert set(line["kernels"]) == {call.op.name for call in model_layers.calls(TOKEN_LLAMA)} | of_attention
    assert set(lines[3]["kernels"]) == {"fused_add_rms_norm", "rms_norm", "rms_norm_per_block_quant"}
    text = decode_step.table(line)
    assert "scaled_mm fallback: PyTorch reference on this device, 16 calls" in text
    assert f"{line['peers']['stock'] / line['us']:.2f}x" in text and "left out: collectives" in text
    refused = {"vllm": ["vllm compiled: ImportError no Triton", "other: ValueError"]}
    text = decode_step.table(line | {"stock": {"rms_norm": refused}})
    assert "stock rms_norm as it is not compiled: vllm compiled: ImportError no Triton" in text and "other" not in text
    text = decode_step.table(line | {"stock": {"mla_decode": {"vllm Triton MLA": ["vllm FlashMLA: RuntimeError no"]}}})
    assert "stock mla_decode by vllm Triton MLA, as vllm FlashMLA: RuntimeError no" in text


def numbers_in(figure: pathlib.Path) -> set[str]:
    """The labels of a figure that are numbers with two decimals."""
    return set(re.findall(r">(\d+\.\d\d)</text>", figure.read_text()))


def test_a_stack_is_as_high_as_its_times(results):
    lines = figures.read([results])["tiny-llama-fp8 tp2, context 8"]
    figure = ElementTree.fromstring(figures.batches("", lines))
    bars: dict[str, float] = {}
    for part in figure.iter("{http://www.w3.org/2000/svg}rect"):
        if part.get("width") == "42.0":
            bars[part.get("x")] = bars.get(part.get("x"), 0.0) + float(part.get("height"))
    times = [sum(of.values()) for line in lines.values() for of in figures.stacks(line).values()]
    highest = max(*times, *(us for line in lines.values() for us in (line["us"], line["peers"]["stock"])))
    assert list(bars.values()) == pytest.approx([300 * us / highest for us in times], abs=1.0)


@pytest.mark.parametrize(("largest", "step"), [(26.3, 5), (41.7, 5), (1.9, 0.2), (10.0, 1), (0.11, 0.02)])
def test_an_axis_has_at_most_ten_ticks(largest, step):
    assert figures.tick_step(largest) == pytest.approx(step)


def test_figures_are_drawn(results, tmp_path, capsys):
    assert set(figures.FILLS) == set(decode_step.KINDS)
    assert len(set(figures.FILLS.values())) == len(figures.FILLS)
    figures.main([str(results), "--output", str(tmp_path / "figures")])
    written = [pathlib.Path(line) for line in capsys.readouterr().out.splitlines() if "figures" in line]
    assert len(written) == 4 and {path.suffix for path in written} == {".svg"}
    for path in written:
        kinds = {part.get("fill") for part in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}rect")}
        assert {"url(#linear)", "url(#norm)"} <= kinds and len(path.read_bytes()) < 10_000
    deepseek = next(path for path in written if path.name.startswith("tiny-deepseek") and path.stem.endswith("batches"))
    line = json.loads(results.read_text().splitlines()[-1])
    assert {f"{line['us'] / 1000:.2f}", f"{line['peers']['stock'] / 1000:.2f}"} <= numbers_in(deepseek)
    with pytest.raises(SystemExit, match="has batch sizes 1, 2, not 7"):
        figures.main([str(results), "--output", str(tmp_path), "--batch", "7"])
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(SystemExit, match="there is no decode step in"):
        figures.main([str(tmp_path / "empty.jsonl")])


def test_a_figure_is_as_high_as_its_kinds(results):
    for lines in figures.read([results]).values():
        for line in lines.values():
            for path, of in figures.stacks(line).items():
                assert sum(of.values()) == pytest.approx(sum(line["kinds_alone_us"][path].values()))


def test_the_page_has_a_table_where_there_are_results(results, tmp_path, monkeypatch):
    monkeypatch.setattr(measurements, "ROOT", tmp_path)
    monkeypatch.setattr(measurements, "RESULTS", tmp_path)
    monkeypatch.setattr(measurements, "committed", lambda path: 0)
    assert measurements.decode() == ""
    (tmp_path / "made-up-gpu").mkdir()
    (tmp_path / "made-up-gpu" / results.name).write_text(results.read_text())
    rows = measurements.decode().splitlines()
    assert "**Made-up GPU**, torch 2.11.0, vllm 0.33.0: " in rows[1] and results.name in rows[1]
    line = json.loads(results.read_text().splitlines()[1])
    assert rows[-1].startswith("| tiny-llama-fp8 tp2, context 8 | 2 | ")
    assert f"| {line['peers']['stock'] / line['us']:.2f}x | 44 / 44 | collectives |" in rows[-1]


@pytest.mark.skipif(not measurements.in_git(), reason="git alone knows which of a day's results are the newest")
def test_committed_figures_are_of_the_newest_results():
    for path in measurements.RESULTS.glob("*/*-batches.svg"):
        newest = measurements.newest_lines(path.parent, ["decode_step"]).values()
        lines = [
            line
            for line, _ in newest
            if path.name == f"{figures.stem(line['case'].rpartition(', batch ')[0])}-batches.svg"
        ]
        shown = {f"{us / 1000:.2f}" for line in lines for us in (line["us"], line["peers"]["stock"])}
        assert shown and shown == numbers_in(path), "run figures.py"


@pytest.mark.parametrize("script", few_of(["decode_step.py", "compare.py", "host_time.py", "figures.py"]))
def test_help(script):
    command = [sys.executable, str(SCRIPTS / script), "--help"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0 and result.stdout.startswith("usage: " + script), result.stderr


def test_the_command_runs_on_the_cpu():
    command = [sys.executable, str(SCRIPTS / "decode_step.py"), "--device", "cpu", "--model", LLAMA, DEEPSEEK]
    command += ["--tp", "2", "--batch", "1", "--context", "4", "--layers", "2", "--stock", "norm,moe"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0 and result.stdout.count("finite") == 2, result.stderr


RUN_AND_LIST_THREADS = """
import pathlib, runpy, sys
sys.path.insert(0, str(pathlib.Path(sys.argv[1]).parent))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
names = [path.read_text().strip() for path in pathlib.Path("/proc/self/task").glob("*/comm")]
sys.stdout.write(f"threads: {names}\\n")
"""


@pytest.mark.parametrize(("model", "ranks"), [(LLAMA, ["--tp", "2"]), (DEEPSEEK, ["--tp", "1", "--ep", "2"])])
def test_two_processes_are_the_ranks_and_end_their_threads(model, ranks, tmp_path):
    """A thread of gloo that outlives the process group may end the process with SIGABRT."""
    (tmp_path / "run.py").write_text(RUN_AND_LIST_THREADS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(tmp_path / "run.py"), str(SCRIPTS / "decode_step.py"), "--device", "cpu", "--model", model, *ranks]
    result = subprocess.run([*command, "--batch", "2", "--context", "4"], capture_output=True, text=True, check=False)
    assert result.returncode == 0 and result.stdout.count("2 ranks, batch 2") == 1, result.stderr
    assert result.stdout.count("threads: ") == 2 and "gloo" not in result.stdout, result.stdout
