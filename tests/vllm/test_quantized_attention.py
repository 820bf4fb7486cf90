"""Test attention that quantizes its own result: graphs, decisions, calls of vLLM's implementation, and tokens."""

import functools
from pathlib import Path

import checkpoints
import pytest
import torch
from fakes import Fake, fake_decoder
from keys import key
from marks import FULL, full
from on_cpu import records
from test_graph import marked_quantization
from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8Dynamic128Sym, kFp8StaticTensorSym

from vllm_rocm_ops import ops
from vllm_rocm_ops.core import quantization
from vllm_rocm_ops.core.quantization import OUTPUTS
from vllm_rocm_ops.vllm import seam
from vllm_rocm_ops.vllm.attention import decoder as attention
from vllm_rocm_ops.vllm.attention import mla_v_up, quantized_attention, timing
from vllm_rocm_ops.vllm.graph import compiled_ops
from vllm_rocm_ops.vllm.guards import compile_cache
from vllm_rocm_ops.vllm.selection import kernel_selection

FP8 = torch.float8_e4m3fn
HEADS, SIZE, GROUP = 2, 128, 128
COLUMNS = HEADS * SIZE
BOTH = frozenset(("static", "groups"))
ON_GPU = torch.cuda.is_available()
without_gpu = pytest.mark.skipif(ON_GPU, reason="vLLM's op has no CPU kernel in builds for GPUs")
KEYS = {"static": "kFp8StaticTensorSym", "groups": "kFp8Dynamic128Sym"}


# Graphs


class Impl:
    """An implementation that doubles queries, and quantizes the result on request."""

    def __init__(self):
        self.calls = []

    def forward(self, layer, query, key, value, cache, metadata, output, output_scale, output_block_scale):
        self.calls.append(timing.kind(output_scale, output_block_scale))
        if self.calls[-1]:
            rows = (query * 2).flatten(1)
            mla_v_up.quantize(rows, output.flatten(1), output_scale, output_block_scale)
        else:
            output.copy_(query * 2)


@pytest.fixture
def impl(configuration, monkeypatch) -> Impl:
    """Return what vLLM's op finds for the layer `layer`, where both kinds are decided."""
    import vllm.model_executor.layers.attention.attention as module

    made = Impl()
    monkeypatch.setattr(module, "get_attention_context", lambda name: (None, Fake(impl=made), None, None))
    monkeypatch.setattr(quantized_attention, "_fused", {"layer": BOTH})
    return made


def quantizer(kind: str, **how):
    """Return vLLM's quantization as a model calls it while it is traced."""
    marked, _ = marked_quantization(KEYS.get(kind, kind), **how)
    return (lambda x, scale=SCALE: marked(x, scale)) if kind == "static" else marked


def attend(query: torch.Tensor, name: str = "layer") -> torch.Tensor:
    """Call attention as vLLM's layer does."""
    from vllm.utils.torch_utils import _encode_layer_name

    output = torch.empty(torch.Size((query.shape[0], COLUMNS)), dtype=query.dtype, device=query.device)
    heads = [x.view(-1, HEADS, SIZE) for x in (query, query, query, output)]
    torch.ops.vllm.unified_attention_with_output(*heads, _encode_layer_name(name))
    return heads[-1].view(-1, COLUMNS)


def results(function, *inputs: torch.Tensor) -> tuple[int, tuple, tuple, torch.fx.GraphModule]:
    """Return the fusions in a function's graph, its results without and with them, and the graph."""
    found = []

    def backend(module, _):
        def run(*given):
            before = module(*given)
            count = quantized_attention.fuse(module.graph, [])
            module.graph.lint()
            module.recompile()
            found.append((count, before, module(*given), module))
            return found[0][2]

        return run

    torch._dynamo.reset()
    for x in inputs:
        torch._dynamo.mark_dynamic(x, 0)
    torch.compile(function, backend=backend, fullgraph=True, dynamic=False)(*inputs)
    [one] = found
    return one


def rows(seed: int = 0, tokens: int = 5) -> torch.Tensor:
    return torch.randn(tokens, COLUMNS, generator=torch.Generator().manual_seed(seed)).bfloat16()


SCALE = torch.full((1,), 0.02)


def assert_same(before: tuple, after: tuple) -> None:
    """Check for equal bits and the same order in memory."""
    assert len(before) == len(after)
    for one, other in zip(before, after):
        assert one.dtype == other.dtype and torch.equal(one.float(), other.float())
        assert one.shape[0] == 1 or one.stride() == other.stride()


@without_gpu
@pytest.mark.parametrize(("kind", "column_major"), [("static", False), ("groups", False), ("groups", True)])
def test_attention_quantizes_what_a_linear_alone_reads(impl, kind, column_major):
    """The bits equal a separate quantization's, and scales are in the order that the linear reads."""
    quant = quantizer(kind, column_major_scales=column_major)

    count, before, after, module = results(lambda x: quant(attend(x)), rows())
    assert count == 1 and impl.calls == ["", kind]
    assert_same(before, after)
    assert before[0].dtype == FP8 and before[1].shape == ((1,) if kind == "static" else (5, HEADS))
    assert "marked_quant" not in module.code


@without_gpu
def test_linears_that_quantize_equally_share_it(impl):
    """This holds if two linears read the same result."""
    quant = quantizer("groups")

    def function(x):
        y = attend(x)
        return (*quant(y), *quant(y))

    count, before, after, _ = results(function, rows())
    assert count == 1 and impl.calls == ["", "groups"]
    assert_same(before, after)


@without_gpu
@pytest.mark.parametrize("column_major", [False, True])
def test_mla_quantizes_by_groups_alone(configuration, monkeypatch, column_major):
    """Its op has other arguments. The layer writes values and scales, without the group's size of vLLM's own pass."""
    import vllm.model_executor.layers.attention.mla_attention as module

    called = []

    def forward_impl(q, *_, output, output_scale, output_block_scale, **rest):
        called.append((timing.kind(output_scale, output_block_scale), rest["quant_group_size"]))
        if output_block_scale is None:
            output.copy_(q.flatten(1) * 2)
        else:
            mla_v_up.quantize(q.flatten(1) * 2, output, None, output_block_scale)

    layer = Fake(forward_impl=forward_impl, hisparse_cache=None)
    monkeypatch.setattr(module, "get_attention_context", lambda name: (None, layer, None, None))
    monkeypatch.setattr(quantized_attention, "_fused", {"layer": frozenset(("groups",))})

    def attended(x):
        from vllm.utils.torch_utils import _encode_layer_name

        output, q = torch.empty((x.shape[0], COLUMNS), dtype=x.dtype, device=x.device), x.view(-1, HEADS, SIZE)
        torch.ops.vllm.unified_mla_attention_with_output(q, x, x, output, _encode_layer_name("layer"))
        return output

    groups, static = quantizer("groups", column_major_scales=column_major), quantizer("static")
    count, before, after, module = results(lambda x: groups(attended(x)), rows())
    assert count == 1 and called == [("", None), ("groups", None)]
    assert_same(before, after)
    assert results(lambda x: static(attended(x), SCALE), rows())[0] == 0
    assert results(lambda x: (*groups(y := attended(x)), y + 1), rows())[0] == 0


LEFT = {
    "also read as it is": lambda y, x, static, groups: (*static(y), y + 1),
    "a view of it read as it is": lambda y, x, static, groups: (*static(y), y.view(-1, HEADS, SIZE) * 2),
    "quantized in two ways": lambda y, x, static, groups: (*static(y), *groups(y)),
    "two scales": lambda y, x, static, groups: (*static(y, SCALE), *static(y, SCALE * 2)),
    "a scale that comes later": lambda y, x, static, groups: static(y, (x[0, :1] * 0 + 1).float()),
    "a bound": lambda y, x, static, groups: groups(y, None, SCALE),
    "heads in rows": lambda y, x, static, groups: groups(y.view(-1, HEADS, SIZE)),
    "another layer": lambda y, x, static, groups: static(attend(x, "other")),
    "an input": lambda y, x, static, groups: static(x),
}


@without_gpu
@pytest.mark.parametrize("what", LEFT)
def test_quantizations_that_attention_cannot_do_stay(impl, what):
    """Other readers need the 16-bit result, and a scale must be known before."""
    both = quantizer("static"), quantizer("groups")
    count, before, after, _ = results(lambda x: LEFT[what](attend(x), x, *both), rows())
    assert count == 0 and set(impl.calls) <= {""}
    assert_same(before, after)


@without_gpu
@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("kFp8DynamicTokenSym", {}),
        ("kFp8Dynamic64Sym", {}),
        ("groups", {"use_ue8m0": True}),
        ("static", {"num_token_padding": 17}),
    ],
    ids=["per token", "groups of 64", "powers of two", "padded rows"],
)
def test_other_quantizations_are_left(impl, kind, how):
    quant = quantizer(kind, **how)
    count, *_ = results(lambda x: quant(attend(x)), rows())
    assert count == 0


@without_gpu
def test_a_kind_that_was_not_decided_is_left(impl, monkeypatch):
    quant = quantizer("static")
    monkeypatch.setattr(quantized_attention, "_fused", {"layer": frozenset(("groups",))})
    assert results(lambda x: quant(attend(x), SCALE), rows())[0] == 0
    monkeypatch.setattr(quantized_attention, "_fused", {"layer": BOTH})
    assert results(lambda x: quant(attend(x), SCALE), rows())[0] == 1


@without_gpu
def test_layers_are_told_apart(impl, monkeypatch):
    """This holds if PyTorch makes layer names inputs of a graph, too."""
    quant = quantizer("static")

    def function(x):
        return (*quant(attend(x), SCALE), *quant(attend(x + 1, "other"), SCALE))

    for kinds, count in ((frozenset(), 1), (BOTH, 2)):
        monkeypatch.setattr(quantized_attention, "_fused", {"layer": BOTH, "other": kinds})
        impl.calls.clear()
        found, before, after, _ = results(function, rows())
        assert found == count and impl.calls == ["", "", "static", "static" if count == 2 else ""]
        assert_same(before, after)


def test_layers_without_names_have_what_all_have(monkeypatch):
    monkeypatch.setattr(quantized_attention, "_fused", {"a": BOTH, "b": frozenset(("static",))})
    assert quantized_attention.kinds_of("a") == BOTH and quantized_attention.kinds_of("c") == frozenset()
    assert quantized_attention.kinds_of(object()) == {"static"}
    monkeypatch.setattr(quantized_attention, "_fused", {})
    assert quantized_attention.kinds_of(object()) == frozenset()


# Decisions

SHAPE, LONGEST = "32:8x128 auto", 8192  # a `fake_decoder`'s
OP = ops.paged_attention_decode.name


def decided(off: tuple = (), **plugin: tuple[bytes, ...]) -> kernel_selection.Decided:
    """Return what was decided at two lengths, versus vLLM's kernel, and for names with `_` versus two launches."""
    shapes = {}
    for name, found in plugin.items():
        kind, _, separate = name.partition("_")
        beside = "separate" if separate else "Backend"
        for keys, by_requests in zip((128, 1024), found):
            quantized = OUTPUTS.get(kind, "")
            shapes[key(f"{OP} {SHAPE}{quantized} page 16 {keys} of {LONGEST} keys {beside}")] = by_requests
    return kernel_selection.Decided(dict.fromkeys(off, "wrong"), shapes)


WINS, LOSES, FEW, MANY = (b"\0\1\1",) * 2, (b"\0\0\0",) * 2, b"\0\1\0", b"\0\0\1"


@pytest.mark.parametrize(
    ("measured", "changed", "fuses"),
    [
        (decided(), {}, False),
        (decided(plain=WINS), {}, True),
        (decided(plain=(FEW, FEW)), {}, True),
        (decided(plain=(FEW, MANY)), {}, False),
        (decided(plain=LOSES), {}, False),
        (decided(plain=WINS, static=WINS), {}, True),
        (decided(plain=WINS, static=LOSES), {}, False),
        (decided(plain=LOSES, static=WINS), {}, True),
        (decided(plain=WINS, groups=LOSES), {}, True),
        (decided(plain=WINS, static=WINS, static_separate=WINS), {}, True),
        (decided(plain=WINS, static=WINS, static_separate=LOSES), {}, False),
        (decided(plain=WINS, static=WINS, static_separate=(FEW, MANY)), {}, False),
        (decided((OP,), plain=WINS), {}, False),
        (decided(plain=WINS), {"unsupported_reason": "ALiBi is not supported"}, False),
        (decided(), {"is_forced": True}, True),
        (decided(), {"is_forced": True, "unsupported_reason": "ALiBi is not supported"}, False),
    ],
)
def test_records_decide_whether_the_result_is_quantized(measured, changed, fuses):
    """The first start measures plain attention, later ones its quantization versus vLLM's kernels and two launches."""
    assert quantized_attention.may_quantize(fake_decoder(**changed), "static", measured) is fuses


def test_only_heads_of_a_groups_size_have_group_scales():
    """Heads of 64 therefore have no group scales."""
    decoder = fake_decoder(is_forced=True, impl=Fake(head_size=64))
    assert not quantized_attention.may_quantize(decoder, "groups", decided())
    assert quantized_attention.may_quantize(decoder, "static", decided())


def test_layers_are_decided_from_the_model(monkeypatch):
    """A layer that is not the plugin's keeps its quantization, and MLA's decides itself. The compile cache key has it."""
    changed, writes = [], True
    monkeypatch.setattr(quantized_attention.split, "before", changed.append)
    monkeypatch.setattr(quantized_attention.Producer, "writes_scales", lambda *_: writes)
    monkeypatch.setattr(quantized_attention, "_fused", {"old": BOTH})
    monkeypatch.setattr(compiled_ops.choices, "others", ())
    of_mla = quantized_attention.PRODUCERS[ops.mla_decode]
    of_mla = of_mla._replace(kinds=lambda decoder, layer, _: frozenset(("groups",)))
    monkeypatch.setitem(quantized_attention.PRODUCERS, ops.mla_decode, of_mla)

    plugin, latent = (made(False, quantizes=False)[0] for _ in range(2))
    plugin.rocm_ops = fake_decoder(is_forced=True, impl=plugin)
    plugin.head_size, latent.rocm_ops.op = SIZE, ops.mla_decode
    impls = {"served": plugin, "stock": object(), "latent": latent}
    layers = {name: Fake(attn_backend=None, impl=impl) for name, impl in impls.items()} | {"experts": Fake()}
    config = Fake(compilation_config=Fake(static_forward_context=layers))

    assert "attention to e4m3" not in compile_cache.fingerprint()
    for _ in range(2):
        said = quantized_attention.decide(config, decided())
        assert said == "attention to e4m3 in latent groups, served groups/static"
        assert quantized_attention._fused == {"served": BOTH, "stock": frozenset(), "latent": {"groups"}}
        assert type(plugin).__bases__[0] is quantized_attention.QuantizingImpl and plugin.rocm_ops_kinds == BOTH
    assert changed == [quantized_attention.fuse] * 2
    compiled_ops.choices.others = (said,)
    assert compile_cache.fingerprint().endswith(f"; {said}")
    plugin.rocm_ops.is_forced = False
    assert quantized_attention.decide(config, decided()) == "attention to e4m3 in latent groups"
    assert plugin.rocm_ops_kinds == frozenset()
    writes = False
    assert quantized_attention.decide(config, decided()) == "" and not quantized_attention._fused


# Calls of vLLM's implementation


def made(takes_scale: bool, baseline_always_serves: bool = False, quantizes: bool = True):
    """Return an implementation around one of vLLM's that writes 3, and may take a scale, and that one's calls."""
    calls = []

    class Baseline:
        def fused_output_quant_supported(self, key):
            return takes_scale and key == quantized_attention.static_key()

        def forward(
            self, layer, query, key, value, cache, metadata, output, output_scale=None, output_block_scale=None
        ):
            calls.append((output.dtype, output_scale, output_block_scale))
            output.fill_(3.0)
            return output

    plain = type("Impl", (attention.DecodeImpl, Baseline), {"__init__": lambda self: None})
    impl = (seam.mixed(quantized_attention.QuantizingImpl, plain) if quantizes else plain)()
    impl.rocm_ops = fake_decoder(serve=lambda *_: False, baseline_always_serves=lambda: baseline_always_serves)
    impl.rocm_ops.quantized = "?"
    return impl, calls


def call(impl, kind: str, metadata: object = "a batch", query_dtype: torch.dtype = torch.bfloat16):
    query = torch.zeros(4, HEADS, SIZE, dtype=query_dtype)
    output = torch.zeros(4, HEADS, SIZE, dtype=FP8 if kind else torch.bfloat16)
    groups = torch.zeros(4, HEADS) if kind == "groups" else None
    scale = torch.tensor([0.5]) if kind == "static" else None
    scales = {"output_scale": scale, "output_block_scale": groups}  # as vLLM's op calls it
    assert impl.forward(None, query, query, query, None, metadata, output=output, **scales) is output
    return output, scale, groups


@pytest.mark.parametrize("baseline_always_serves", [False, True])
@pytest.mark.parametrize("query_dtype", [torch.bfloat16, FP8])
def test_vllms_implementation_is_quantized_behind(baseline_always_serves, query_dtype):
    """It is, if it takes no such scale, also where the plugin serves nothing. All rows are, as in a graph."""
    for kind, takes_scale in (("static", False), ("groups", False), ("groups", True)):
        impl, calls = made(takes_scale, baseline_always_serves)
        for _ in range(2):
            output, _, groups = call(impl, kind, query_dtype=query_dtype)
            wanted = 3.0 / 0.5 if kind == "static" else quantization.LIMIT[FP8]
            assert (output.float() == wanted).all()
            assert groups is None or (groups == 3.0 / quantization.LIMIT[FP8]).all()
        assert calls == [(torch.bfloat16, None, None)] * 2


@pytest.mark.parametrize("baseline_always_serves", [False, True])
def test_vllms_implementation_quantizes_where_it_can(baseline_always_serves):
    impl, calls = made(True, baseline_always_serves)
    for _ in range(2):
        _, scale, _ = call(impl, "static")
    assert calls == [(FP8, scale, None)] * 2
    impl, calls = made(False, baseline_always_serves)
    call(impl, "")
    assert calls == [(torch.bfloat16, None, None)]


@pytest.mark.parametrize("kind", ["", *KEYS])
def test_the_profile_run_says_what_the_graph_has(kind):
    """Attention is measured with it. Its scales are numbers that a linear can multiply by."""
    impl, calls = made(False)
    output, _, groups = call(impl, kind, metadata=None)
    assert impl.rocm_ops.quantized == kind
    assert calls == [(output.dtype, None, None)]
    assert groups is None or (groups == 1).all()


def test_vllms_fusion_pass_is_told_of_static_scales(configuration):
    """It knows static scales in layers that are decided."""
    impl, _ = made(False)
    for fuses in (False, True):
        impl.rocm_ops_kinds = BOTH if fuses else frozenset(("groups",))
        assert impl.fused_output_quant_supported(kFp8StaticTensorSym) is fuses
        assert not impl.fused_output_quant_supported(kFp8Dynamic128Sym)
    assert made(True)[0].fused_output_quant_supported(kFp8StaticTensorSym)


@pytest.mark.parametrize("kind", KEYS)
def test_quantized_results_are_compared_dequantized(kind):
    query = rows(1).view(5, HEADS, SIZE)
    output, scale, groups = timing.outputs(kind, query)
    mla_v_up.quantize(query.flatten(1), output.flatten(1), scale, groups)
    shown = timing.dequantized(output, scale, groups)
    assert output.shape == query.shape and output.dtype == FP8
    assert ((shown - query.flatten(1).float()).abs() <= query.flatten(1).float().abs() / 16 + 0.01).all()
    plain = timing.outputs("", query)
    assert plain[0].dtype == query.dtype and plain[1:] == (None, None)
    assert torch.equal(timing.dequantized(query, None, None), query.flatten(1))


# The seam


def test_the_seam_needs_vllms_arguments(configuration, monkeypatch):
    quantized_attention.SEAM.probe()
    monkeypatch.setattr(quantized_attention.split, "ARGUMENTS", ("query", "output"))
    with pytest.raises(seam.Unavailable, match="lacks unified_attention_with_output.query, output., got .query, key,"):
        quantized_attention.SEAM.probe()


def test_vllms_op_writes_what_it_is_given(configuration):
    import vllm.model_executor.layers.attention.attention
    import vllm.model_executor.layers.attention.mla_attention  # noqa: F401  defines them

    assert all(producer.writes_scales() for producer in quantized_attention.PRODUCERS.values())


# In the engine

MODELS = {"llama": "static", "deepseek": "block"} | ({"qwen3": "block", "glm4_moe": "block"} if FULL else {})
"""Group scales with heads of 128."""
LATENT = "deepseek"
SIDES = {"fused": "all", "separate": "all,-quantized_attention"}
EXACT = """
import torch
from vllm.platforms import current_platform
from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl

current_platform.import_kernels()
library = torch.library.Library("_C", "IMPL")

def divide(x, out, scales, size, eps, low, high, *rest):
    groups = x.float().unflatten(-1, (-1, size))
    largest = groups.abs().amax(-1).clamp(min=eps)
    scales.copy_(largest / torch.full_like(largest, high))  # by a number PyTorch would multiply with the inverse
    out.copy_((groups / scales[..., None]).clamp(low, high).flatten(-2))

library.impl("per_token_group_fp8_quant", divide, "CUDA", allow_override=True)
TritonAttentionImpl.fused_output_quant_supported = lambda self, key: False
"""
"""Round on a GPU as the plugin does.

vLLM's kernel multiplies by the inverse of a group's scale: on an H100 1,037 of 2,097,152 normally distributed values
differ from the division by one step of e4m3. In a prefill Triton's attention quantizes float32 without rounding to bf16.
"""


@pytest.fixture(scope="module")
def generated(engines) -> dict[str, dict]:
    """Return what compiled models generate if attention quantizes its result, and if a separate quantization does."""
    folders = {name: engines.folder / f"quantized-{name}" for name in MODELS}
    for name, flavour in MODELS.items():
        checkpoints.build(folders[name], name, flavour, **({"head_dim": SIZE} if name in ("qwen3", "glm4_moe") else {}))

    def run(side: str) -> dict[str, dict]:
        jobs = {name: job(engines, flavour, folders[name]) for name, flavour in MODELS.items()}
        environment = {"VLLM_ROCM_OPS_ATTENTION": "1", "VLLM_ROCM_OPS_MEASURE": "0", "TORCHINDUCTOR_DETERMINISTIC": "1"}
        return engines.run(jobs, EXACT * ON_GPU, **environment, VLLM_ROCM_OPS_SEAMS=SIDES[side])

    return {side: run(side) for side in SIDES}


def job(engines, flavour: str, folder: Path) -> dict:
    made = engines.job(("llama", flavour), compiled=True, model=str(folder), logprobs=1)
    backend = "TRITON_MLA" if LATENT in folder.name else "TRITON_ATTN"
    if not ON_GPU:
        return made
    kernel = {"custom_ops": [*made["engine"]["compilation_config"]["custom_ops"], "+quant_fp8"]}  # as with fusion
    return made | {"engine": {"compilation_config": kernel, "attention_backend": backend}}


@full
@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_tokens_have_the_bits_of_separate_launches(generated, model):
    """The models are a Llama with static scales, and Qwen3, DeepSeek and GLM with group scales."""
    fused, separate = (generated[side][model] for side in SIDES)
    assert fused["seams"]["quantized_attention"] == "on" != separate["seams"]["quantized_attention"]
    assert (fused["tokens"], fused["logprobs"]) == (separate["tokens"], separate["logprobs"])
    assert fused["stats"] == separate["stats"]
    op = ops.batched_gemm.name if model == LATENT else OP
    assert op in (fused["captured"][0] if ON_GPU else fused["stats"])  # a replayed graph calls no op
    said = "output quantization is fused into attention in "
    assert [generated[side]["output"].count(said) for side in SIDES] == [len(MODELS), 0]


MEASURED = """
import os
import on_cpu
from fakes import FakeClock
from vllm_rocm_ops.vllm.attention import timing as attention_timing
from vllm_rocm_ops.vllm import worker_startup
from vllm_rocm_ops.vllm.selection import kernel_timing

class Clock(FakeClock):
    def times(self, calls, sets, replays):
        beside = getattr(calls["baseline"], "__self__", None)
        slow = str(getattr(beside, "beside", "")) == os.environ["SLOW"]
        return {"plugin": [3.0 if slow else 1.0], "baseline": [2.0]}

on_cpu.profile_first()
worker_startup.clock, attention_timing.LENGTHS = Clock, (32,)
kernel_timing.limit_s = lambda: 1000.0
"""


MEASURED_MODELS = {"llama": "static", LATENT: "block"}


@pytest.fixture(scope="module")
def starts(engines, tmp_path_factory):
    """Return a function that returns the logs and records of three starts on a machine, by model and what is faster."""

    @functools.cache
    def found(model: str, slow: str) -> list[tuple]:
        folder, flavour = engines.folder / f"measured-{model}", MEASURED_MODELS[model]
        dense = {"num_hidden_layers": 2, "first_k_dense_replace": 2} if model == LATENT else {}
        checkpoints.build(folder, model, flavour, **dense)
        tables, answers = tmp_path_factory.mktemp("measured"), []
        for _ in range(3):
            environment = {"VLLM_ROCM_OPS_TABLES": str(tables), "SLOW": slow}
            environment["VLLM_ROCM_OPS_SEAMS"] = "all,-norm,-activation"
            answer = engines.run_one(job(engines, flavour, folder), before=MEASURED, **environment)
            answers.append((answer, answer["output"], *records(tables)))
        return answers

    return found


@full
@pytest.mark.slow
@pytest.mark.skipif(ON_GPU, reason="replaces the clock of vLLM's CPU worker")
@pytest.mark.parametrize(("slow", "fuses"), [("nothing", [False, True, True]), ("separate", [False, True, False])])
def test_a_start_measures_and_the_next_decides(starts, slow, fuses):
    """It is taken back if two launches are faster."""
    found = starts("llama", slow)
    assert ["output quantization is fused into attention in 2 layers" in output for _, output, _ in found] == fuses
    shape = "page 128 32 of 256 keys"
    plain = f"{OP} 4:2x64 auto {shape} CPUAttentionBackend"
    beside = [f"{OP} 4:2x64 auto to e4m3 {shape} {name}" for name in ("CPUAttentionBackend", "separate")]
    keys = [sorted(str(key) for key in record.shapes if key.op == OP) for *_, record in found]
    assert keys == [[plain], [plain, *beside], [plain, *beside]]
    measured = found[-1][-1].shapes
    assert all(0 < one.error < 0.05 for name in beside for one in measured[key(name)].values())
    assert not found[-1][-1].off
    assert all(answer["stats"].get(OP) for answer, *_ in found)


@full
@pytest.mark.slow
@pytest.mark.skipif(ON_GPU, reason="replaces the clock of vLLM's CPU worker")
def test_w_uv_is_measured_and_decided_likewise(starts):
    """Its plain GEMM decides first, then its quantization, which is taken back if two launches are faster."""
    found = starts(LATENT, "separate")
    said = ["output quantization is fused into attention in 2 layers" in output for _, output, _ in found]
    assert said == [False, True, False]
    start = "batched_gemm 4x128x512 bfloat16"
    both = [f"{start} to e4m3 by 128 bmm", f"{start} to e4m3 by 128 separate"]
    keys = [sorted(str(key) for key in record.shapes if str(key).startswith(start)) for *_, record in found]
    assert keys == [[f"{start} bmm"], [f"{start} bmm", *both], [f"{start} bmm", *both]]
    measured = found[-1][-1].shapes
    assert all(0 < one.error < 0.05 for name in both for one in measured[key(name)].values())
    assert not found[-1][-1].off
    assert len({str(answer["tokens"]) for answer, *_ in found}) == 1
