"""Test the baselines of ops without a GPU: their arguments and names."""

import functools
import importlib.util
import itertools
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from vllm_rocm_ops import ops
from vllm_rocm_ops.core import op
from vllm_rocm_ops.core.correctness import as_tuple, clone
from vllm_rocm_ops.models import config as model_config
from vllm_rocm_ops.models import layers as model_layers
from vllm_rocm_ops.tools.bench import decode_attention, experts, gemm_dtypes
from vllm_rocm_ops.tools.bench import gated_delta_net as gated_delta_net_list
from vllm_rocm_ops.tools.bench.baselines import (
    BASELINES,
    Baseline,
    attention,
    baselines,
    gated_delta_net,
    installed,
    prepare,
)
from vllm_rocm_ops.tools.bench.baselines import experts as vllm_experts
from vllm_rocm_ops.vllm.graph.vllm_row_kernels import COMPILED

TINY = ("tiny-llama", "tiny-llama-fp8", "tiny-deepseek-v3-fp8")
CALLS = [call for model in TINY for call in model_layers.calls(model_config.read(model)) if call.count]
ON_GPUS = (ops.block_scaled_mm, ops.fused_experts)  # without them PyTorch multiplies so, or not at all
DECODES = ops.paged_attention_decode, ops.mla_decode
KERNELS = ("flash_attn_varlen_func", "get_scheduler_metadata", "unified_attention", "get_mla_metadata")
KERNELS += "flash_mla_with_kvcache", "decode_attention_fwd"
OF_OTHERS = (
    r"torch\.ops\._C\.|_custom_ops\.(rms|fused)|vllm_flash_attn|unified_attention|flashmla|w8a8_triton|gemm_a8w8"
)
WORKERS = "graph/vllm_row_kernels", "attention/mla_v_up", "attention/split", "meta/simulated"
GENERATOR = torch.Generator().manual_seed(0)


def test_baselines_are_named_after_ops():
    names = {o.name for o in op.registered()}
    assert set(BASELINES) <= names


@pytest.mark.parametrize(
    "call", [c for c in CALLS if c.op not in ON_GPUS], ids=lambda call: f"{call.op.name}-{call.layer}"
)
def test_every_op_has_pytorch_as_a_baseline_that_computes_the_same(call):
    arguments = call.case(4).make("cpu", GENERATOR, torch.float8_e4m3fn)
    baseline = baselines(call.op)["torch"]
    theirs = baseline.call(*baseline.prepare(*map(clone, arguments)))
    ours = call.op.reference(*map(clone, arguments))
    for mine, other in zip(as_tuple(ours), as_tuple(theirs), strict=True):
        torch.testing.assert_close(mine.float(), other.float(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("the_op", [o for o in op.registered() if o.baseline], ids=lambda o: o.name)
def test_the_baseline_that_an_op_names_takes_its_arguments_and_computes_the_same(the_op):
    made = (case.make("cpu", GENERATOR, torch.float8_e4m3fn) for case in the_op.cases())
    for arguments in itertools.islice((a for a in made if getattr(the_op.Arguments(*a), "out", None) is None), 3):
        theirs, ours = the_op.baseline(*arguments), the_op.reference(*arguments)
        torch.testing.assert_close(theirs, ours, rtol=2e-2, atol=2e-2, equal_nan=True)


def test_two_launches_are_the_baseline_of_one():
    op = ops.scaled_mm_silu_and_mul_quant
    for case in itertools.islice(op.cases(), 3):
        arguments = case.make("cpu", GENERATOR, torch.float8_e4m3fn)
        theirs = baselines(op)["two launches"].call(*arguments)
        assert torch.equal(theirs.view(torch.uint8), op.reference(*arguments).view(torch.uint8))


@pytest.mark.parametrize("kind", ["int8", "e4m3", "bf16"])
def test_the_baseline_of_products_takes_the_arguments_that_are_timed(kind, monkeypatch):
    monkeypatch.setattr(gemm_dtypes, "LARGE", ((32, 16, 48),))
    [shape] = [shape for shape in gemm_dtypes.gemm_dtypes(()) if shape.case.name == f"32x16x48 {kind}"]
    arguments = shape.arguments("cpu", torch.float8_e4m3fn)
    baseline = shape.baselines([arguments])["torch"]
    theirs = baseline.call(*baseline.prepare(*arguments))
    torch.testing.assert_close(theirs, ops.gemm.reference(*arguments), rtol=2e-2, atol=2e-2)


def test_block_baselines_get_whole_fours_of_tokens_and_their_layout_of_scales():
    arguments = (torch.ones(3, 256).to(torch.float8_e4m3fn), torch.ones(128, 256).to(torch.float8_e4m3fn))
    arguments += (torch.rand(3, 2), torch.rand(1, 2), torch.bfloat16)
    cutlass = BASELINES["block_scaled_mm"]["vllm"]
    a, b, scale_a, *_ = cutlass.prepare(*arguments)
    assert a.shape == (4, 256) and not a[3].float().any() and torch.equal(a[:3].float(), arguments[0].float())
    assert scale_a.shape == (4, 2) and scale_a.stride() == (1, 4) and torch.equal(scale_a[:3], arguments[2])
    assert b is arguments[1]


def test_caches_have_scales_of_one_where_triton_multiplies_by_them_alone(monkeypatch):
    """PyTorch's and FlashAttention's attention kernels are baselines for bench's lists only, not for other arguments."""
    given = {}

    def call(baseline: str, *_, **options) -> tuple:
        given[baseline] = options
        return (None,)

    def kernels_of(baseline: str):
        return SimpleNamespace(**dict.fromkeys(KERNELS, functools.partial(call, baseline)))

    installed.load()  # once in a process, with the real modules
    sizes = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: sizes)
    for the_op in DECODES:
        shape = next(shape for shape in decode_attention.decode_attention() if shape.op is the_op)
        assert list(baselines(the_op)) == ["torch"]
        arguments = shape.arguments("cpu", torch.float8_e4m3fn)
        for name, baseline in shape.baselines([arguments]).items():
            kernels = kernels_of(f"{the_op.name} {name}")
            monkeypatch.setattr(attention.importlib, "import_module", lambda _, kernels=kernels: kernels)
            baseline.call(*baseline.prepare(*arguments))
    scales = {
        which: {name: value.tolist() for name, value in options.items() if "scale" in name and torch.is_tensor(value)}
        for which, options in given.items()
    }
    assert scales == {
        "paged_attention_decode flash-attn 3": {},
        "paged_attention_decode vllm triton": {"k_descale": [[1.0]], "v_descale": [[1.0]]},
        "mla_decode flash-attn 3": {},
        "mla_decode flashmla": {},
        "mla_decode vllm triton": {"k_scale": [1.0], "v_scale": [1.0]},
    }


@pytest.mark.parametrize("name", ["next", "bf16-plain", "drafts"])
def test_vllms_kernels_of_gated_delta_net_get_the_parts_of_rows_apart(name, monkeypatch):
    case = next(case for case in ops.gated_delta_net_decode.cases() if case.name == name)
    a = ops.gated_delta_net_decode.Arguments(*case.make("cpu", GENERATOR, torch.float8_e4m3fn))
    given = {}

    def keeps(kernel: str, result):
        return lambda *positional, **named: given.update({kernel: (positional, named)}) or result(*positional)

    kernels = SimpleNamespace(
        causal_conv1d_update=keeps("convolution", lambda x, *_: x),
        fused_recurrent_gated_delta_rule_packed_decode=keeps("recurrence", lambda *_: None),
        fused_sigmoid_gating_delta_rule_update=lambda **named: (
            given.update(recurrence=((), named)) or (named["v"], None)
        ),
        rmsnorm_fn=keeps("norm", lambda x, *_: x),
    )
    monkeypatch.setattr(gated_delta_net.importlib, "import_module", lambda _: kernels)
    baseline = BASELINES["gated_delta_net_decode"]["vllm triton"]
    baseline.call(*baseline.prepare(*a))
    mixed, z, b, alpha = gated_delta_net.gated_delta_net.parts(a, torch.bfloat16)
    assert torch.equal(given["convolution"][0][0], mixed) and given["convolution"][0][1] is a.conv_state
    of_rule = given["recurrence"][1]
    assert all(torch.equal(of_rule[name], wanted) for name, wanted in (("a", alpha), ("b", b)))
    assert of_rule["initial_state"] is a.state
    if a.row_starts is None:
        assert of_rule["out"].shape == (len(z), 1, *z.shape[1:])
    else:
        parts = torch.cat([of_rule[part].flatten(2)[0] for part in "qkv"], 1)
        assert torch.equal(parts, mixed) and of_rule["v"].shape == (1, *z.shape)
        assert torch.equal(given["norm"][0][0], of_rule["v"][0].flatten(0, 1))
        assert given["convolution"][1]["max_query_len"] == a.indices.shape[1]
        for named, wanted in (("num_accepted_tokens", a.accepted), ("query_start_loc", a.row_starts)):
            assert given["convolution"][1][named] is wanted
        assert of_rule["num_accepted_tokens"] is a.accepted and of_rule["cu_seqlens"] is a.row_starts
    assert torch.equal(given["norm"][0][3], z.flatten(0, 1)) and given["norm"][0][4] == a.epsilon
    with pytest.raises(ValueError, match="a result that is not quantized"):
        baseline.prepare(*a._replace(out=a.out.to(torch.float8_e4m3fn)))


def test_what_vllm_runs_is_written_in_one_package():
    """Only the files of rows and of attention's quantization, to which a worker falls back, of the split, and of a simulated GPU name them as well."""
    root = Path(__file__).resolve().parents[2]
    paths = [*root.glob("vllm_rocm_ops/**/*.py"), *root.glob("serving_benchmarks/**/*.py")]
    found = {path.relative_to(root) for path in paths if re.search(OF_OTHERS, path.read_text())}
    named = {str(path) for path in found if path.parent.name != "baselines"}
    assert (
        named - {"serving_benchmarks/launches.py"}  # has names of kernels in profiles
        == {f"vllm_rocm_ops/vllm/{at}.py" for at in WORKERS}
        and len(found) > 3
    )


def test_baselines_say_what_they_do_not_take():
    per_tensor = (None, None, None, torch.ones(1, 1), torch.bfloat16)
    per_row = ("torch tensorwise", "vllm tensorwise", "aiter", "aiter shuffled")
    for baseline in map(BASELINES["scaled_mm"].get, per_row):
        with pytest.raises(ValueError, match="it needs scales per token and channel"):
            baseline.call(*per_tensor)
    for tokens, blocks in ((4, 3), (3, 4)):
        with pytest.raises(ValueError, match="it needs K to be a multiple of 512 and M of 4"):
            a, scale_b = torch.ones(tokens, 128 * blocks), torch.ones(1, blocks)
            BASELINES["block_scaled_mm"]["torch"].call(a, None, None, scale_b, torch.bfloat16)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_vllms_own_ops_on_cpu_compute_the_same():
    """vLLM for CPU has a few of them: their arguments are in the right order."""
    tried = []
    for call in CALLS:
        vllm = baselines(call.op).get("vllm")
        if vllm is None or call.op.name not in COMPILED:
            continue
        arguments = call.case(4).make("cpu", GENERATOR, torch.float8_e4m3fn)
        ours, theirs = list(map(clone, arguments)), list(map(clone, arguments))
        outputs, a = vllm.prepare(*theirs)
        vllm.call(outputs, a)
        if call.op is ops.fused_add_rms_norm:
            outputs = theirs[0]
        for mine, other in zip(as_tuple(call.op.reference(*ours)), as_tuple(outputs), strict=True):
            torch.testing.assert_close(mine.float(), other.float(), rtol=2e-2, atol=2e-2)
        tried.append(call.op.name)
    assert {"rms_norm", "fused_add_rms_norm", "silu_and_mul"} <= set(tried), tried


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_vllms_routing_is_the_same():
    call = next(call for call in CALLS if call.op is ops.grouped_topk)
    logits, *how = call.case(16).make("cpu", GENERATOR, torch.float8_e4m3fn)
    arguments = logits.float(), *how  # for bf16, vLLM's plain PyTorch returns bf16
    ours = call.op(*arguments)
    baseline = baselines(call.op)["vllm"]
    theirs = baseline.call(*baseline.prepare(*arguments))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.sort(1).values, other.sort(1).values.to(mine.dtype), rtol=1e-3, atol=1e-3)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.parametrize("model", ["tiny-deepseek-v3", "tiny-deepseek-v3-fp8"])
def test_vllms_experts_get_what_they_take(model):
    call = next(call for call in model_layers.calls(model_config.read(model), 1, 4) if call.op is ops.fused_experts)
    arguments = call.case(5).make("cpu", GENERATOR, torch.float8_e4m3fn)
    tensors, how = baselines(call.op)["vllm"].prepare(*arguments)
    assert tensors[0].shape == (5, 512) and how["global_num_experts"] == 16 and how["expert_map"] is arguments[10]
    assert how["quant_config"].block_shape == ([128, 128] if model.endswith("fp8") else None)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.parametrize("routed", [8, 4])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16])
def test_vllms_experts_compute_a_share_in_the_tiles_that_are_named(routed, shared, dtype, monkeypatch):
    """Its kernels are Triton's: the plugin's reference replaces them, with the shared expert as in vLLM."""
    fused_moe = importlib.import_module("vllm.model_executor.layers.fused_moe.fused_moe")
    override = importlib.import_module("vllm.model_executor.layers.fused_moe")
    ran_in = []

    def stands_in(hidden, w1, w2, topk_weights, topk_ids, quant_config, expert_map, global_num_experts, **_):
        ran_in.append(override.get_config())
        assert global_num_experts == 8 + shared and (expert_map is None or len(expert_map) == global_num_experts)
        scales = quant_config.w1_scale, quant_config.w2_scale
        how = topk_weights, topk_ids, torch.bfloat16, *scales, None, None, expert_map
        return ops.fused_experts.reference(hidden, w1, w2, *how)

    tuned = {1: {"BLOCK_SIZE_M": 1}, 4: {"BLOCK_SIZE_M": 4}}
    shipped = routed  # without the shared expert
    monkeypatch.setattr(fused_moe, "fused_experts", stands_in)
    monkeypatch.setattr(fused_moe, "get_moe_configs", lambda count, *_: tuned if count == shipped else None)
    share = experts.Share(8, routed, 2, 128, 128, shared=shared)
    [shape] = (s for s in _shapes_of(share, dtype, monkeypatch) if s.case.name.startswith("one 3 "))
    sets = [shape.arguments("cpu", torch.float8_e4m3fn)]
    found = shape.baselines(sets)
    assert {"vllm fused_experts", "vllm fused_experts, default tiles"} < set(found) and len(found) == 4
    assert f"E={routed},N=128," in vllm_experts.tuned(sets[0])[0]
    line = shape.check(sets, "cpu", {name: baseline for name, baseline in found.items() if "Triton" not in name})()
    assert len(line["differs"]) == 2 and max(line["differs"].values()) < 1e-2 and line["experts_hit"] >= 1
    assert tuned[4] in ran_in and len(ran_in) == 2


def test_an_error_without_a_text_names_its_place():
    """Many of vLLM's are assertions alone."""

    def fails(*_):
        raise AssertionError

    _, unavailable = prepare({"one": Baseline(fails, fails)}, SimpleNamespace(prepare=None), [()])
    assert re.fullmatch(r"AssertionError: test_baselines\.py:\d+: raise AssertionError", unavailable["one"])


def _shapes_of(share: experts.Share, dtype: torch.dtype, monkeypatch) -> list[experts.Experts]:
    monkeypatch.setattr(experts, "SHARES", {"one": share})
    return list(experts.experts((1, 3), dtype))


def test_two_launches_leave_what_one_does_that_projects_b_and_a():
    """The baseline takes only calls with tokens."""
    op, baseline = ops.gated_delta_net_decode, BASELINES["gated_delta_net_decode"]["two launches"]
    make = functools.partial(
        gated_delta_net_list.make, 2, heads=(1, 2), is_interleaved=True, dtype=torch.bfloat16, columns=64
    )
    found, wanted = (
        op.Arguments(*make("cpu", torch.Generator().manual_seed(0), torch.float8_e4m3fn)) for _ in range(2)
    )
    baseline.call(*baseline.prepare(*found))
    op(*wanted)
    assert (found.out - wanted.out).float().norm() < 0.02 * wanted.out.float().norm()
    with pytest.raises(ValueError, match="tokens in place of b and a"):
        baseline.prepare(*found._replace(ba=found.out, tokens=None))


def test_four_launches_make_a_gated_activation():
    """The activation times the sigmoid is the op's result."""
    case = next(case for case in ops.silu_and_mul_with_expert_gate.cases() if case.name == "qwen3-next")
    given = case.make("cpu", torch.Generator().manual_seed(0), torch.float8_e4m3fn)
    activation, gated = BASELINES["silu_and_mul_with_expert_gate"]["four launches"].call(*given)
    product = activation.float() * (gated.float() / given[1].float()).nanmean(1, keepdim=True)
    assert (product - ops.silu_and_mul_with_expert_gate(*given).float()).norm() < 0.02 * product.norm()
