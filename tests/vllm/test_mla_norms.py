"""Test the fused launch between MLA's first projection and its scores: its layers, when it serves, and its results."""

import checkpoints
import on_cpu
import pytest
import torch
from engines import STEPS
from fakes import Fake, change, check_and_time, fake_decoder, require_near, set_config, spoil
from marks import FULL, full
from test_row_selection import Linear
from vllm.config import CompilationConfig
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.layernorm import RMSNorm

from vllm_rocm_ops import ops
from vllm_rocm_ops.core import archs
from vllm_rocm_ops.ops.shared import rotation
from vllm_rocm_ops.vllm import seam
from vllm_rocm_ops.vllm.attention import mla_norms, mla_pre_attention
from vllm_rocm_ops.vllm.graph import compilation, compiled_ops
from vllm_rocm_ops.vllm.selection import kernel_timing
from vllm_rocm_ops.vllm.selection.key import COMPILED, EAGER

OP = ops.mla_norm_rope_and_cache
Q, KV, ROPE, NOPE, HEADS = 256, 128, 32, 64, 2
LAYERS, DENSE = checkpoints.DEEPSEEK["num_hidden_layers"], 2

# In the engine

MODELS = {"with a latent of queries": ("deepseek", "block")} | ({"without": ("deepseek_v2", "mixed")} if FULL else {})
"""DeepSeek-V3's layers, as R1's, and, with --full only, DeepSeek-V2-Lite's."""


@pytest.fixture(scope="module")
def generated(engines) -> dict[str, dict]:
    """Return models with the plugin's launch and without, which generate, then again with weights loaded again."""
    jobs = {}
    for whose, switch in {"plugin": "1", "stock": "0"}.items():
        for name, flavour in {**MODELS, "eager": ("deepseek", "bf16")}.items():
            given = {"environment": {"VLLM_ROCM_OPS_ATTENTION": switch}, "then": ["again"]}
            jobs[f"{name} {whose}"] = engines.job(flavour, compiled=name != "eager", **given)
    jobs["eager plugin"]["then"].append("reload")
    jobs["eager stock"]["then"].append("reload")
    return engines.run(jobs)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*MODELS, "eager"])
def test_tokens_equal_baseline_vllms(generated, name):
    """One launch per layer and step replaces its norms; the counts of other norms and quantizations stay."""
    plugin, baseline = generated[f"{name} plugin"], generated[f"{name} stock"]
    assert plugin["tokens"] == baseline["tokens"] and plugin["then"] == baseline["then"]

    def calls(answer: dict, part: str) -> int:
        return sum(sum(kernels.values()) for op, kernels in answer["stats"].items() if part in op)

    for op in (OP.name, "batched_gemm_rope"):
        assert calls(plugin, op) == LAYERS * STEPS and calls(baseline, op) == 0
    in_place = LAYERS * STEPS * (1 if name == "without" else 2)
    assert calls(baseline, "rms_norm") - calls(plugin, "rms_norm") == in_place
    assert calls(baseline, "scaled_mm") == calls(plugin, "scaled_mm")


MEASURED = """
import on_cpu
on_cpu.time_launches(mla_norm_rope_and_cache="k_pe_out", batched_gemm_rope="q_pe")
"""


@pytest.fixture(scope="module")
def measured(engines, tmp_path_factory) -> tuple[dict, dict]:
    """Return answers and records of layers without experts."""
    checkpoint, flavour = engines.folder / "deepseek-dense", MODELS["with a latent of queries"]
    checkpoints.build(checkpoint, *flavour, num_hidden_layers=DENSE, first_k_dense_replace=DENSE)
    folder = tmp_path_factory.mktemp("measured")
    return on_cpu.measured(engines, flavour, folder, MEASURED, model=str(checkpoint))


@full
@pytest.mark.slow
@pytest.mark.parametrize("what", on_cpu.WHAT)
def test_what_was_measured_to_be_faster_serves(measured, what):
    answers, records = measured
    shapes = {OP.name: "128+512+64 bfloat16 auto block", "batched_gemm_rope": "4x512x128+64 bfloat16"}
    on_cpu.check_measured(what, answers[what], *records[what], DENSE * STEPS, shapes)


# A layer


class Layer(torch.nn.Module):
    """The parts of vLLM's layer that the plugin uses."""

    rocm_ops_pre_attention = indexer = None
    fuse_qkv_rmsnorm = is_sparse = False
    kv_lora_rank, qk_rope_head_dim, qk_nope_head_dim, qk_head_dim, num_heads = KV, ROPE, NOPE, NOPE + ROPE, HEADS

    def __init__(self, key: str | None = "kFp8Dynamic128Sym", q: int | None = Q, fp8: bool = False):
        super().__init__()
        self.q_lora_rank = q
        self.kv_a_layernorm = RMSNorm(KV, dtype=torch.bfloat16)
        self.q_a_layernorm = RMSNorm(q, dtype=torch.bfloat16) if q else None
        self.q_b_proj = (Linear(key, q) if key else torch.nn.Linear(q, 8)) if q else None
        for norm in filter(None, (self.q_a_layernorm, self.kv_a_layernorm)):
            norm.weight.data = torch.linspace(0.5, 2, len(norm.weight)).bfloat16()
            norm.vllm_forward = norm.forward_native  # it compiles nothing
        table = rotation.cos_sin(64, ROPE, torch.bfloat16, torch.Generator().manual_seed(0))
        self.rotary_emb = Fake(cos_sin_cache=table, is_neox_style=False, forward_native=self.rotate)
        view = lambda cache: cache.view(torch.float8_e4m3fn) if fp8 else cache
        scale = lambda layer: layer._k_scale.reshape(1) if fp8 else None
        rocm_ops = fake_decoder(is_fp8=fp8, cache=view, scale=scale)
        self.mla_attn = Fake(impl=Fake(do_kv_cache_update=self.write, rocm_ops=rocm_ops), use_direct_call=False)
        self.mla_attn.kv_cache_dtype, self.mla_attn.use_pcp = "fp8" if fp8 else "auto", False
        self.mla_attn._k_scale = torch.tensor(0.02 if fp8 else 1.0)

    def rotate(self, positions, query, key):
        key = key.clone()
        rotation.rotate(key, positions, self.rotary_emb.cos_sin_cache, False)
        return query, key

    def write(self, kv, k_pe, cache, slots, dtype, scale):
        rows = torch.cat([kv, k_pe.squeeze(1)], 1)
        if dtype == "fp8":
            rows = (rows.float() / scale).to(torch.float8_e4m3fn).view(torch.uint8)
        cache[slots, 0] = rows


KEYS = {"": None, "static": "kFp8StaticTensorSym", "token": "kFp8DynamicTokenSym", "block": "kFp8Dynamic128Sym"}


@pytest.mark.usefixtures("configuration")
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("kind", [*KEYS, "none"])
def test_a_kernel_is_measured_beside_vllms_layers(kind, fp8):
    """The emulated kernel is as close to exact q, kv, k_pe and cache as vLLM's, with scales in both orders."""
    layer = Layer(KEYS.get(kind), None if kind == "none" else Q, fp8)
    for is_column_major in (False, True) if kind == "block" else (False,):
        if layer.q_b_proj is not None:
            layer.q_b_proj.vllm_rocm_ops_column_major_scales = is_column_major
        pre_attention = mla_pre_attention.MlaPreAttention(layer, COMPILED)
        traits = f" {kind}" * (kind not in ("", "none")) + " column-major" * is_column_major
        sizes, cache = f"{0 if kind == 'none' else Q}+{KV}+{ROPE}", "fp8" if fp8 else "auto"
        assert str(pre_attention.key) == f"{OP.name} {sizes} bfloat16 {cache}{traits} compiled"
        parameters = (pre_attention.sizes[0], KV), ROPE, kind or "none"
        assert pre_attention.key.shape in mla_pre_attention.shapes_of(parameters, torch.bfloat16)
        require_near(pre_attention)


@pytest.mark.usefixtures("configuration")
@pytest.mark.parametrize("part", ["scales_out", "kv_out", "k_pe_out", "kv_cache"])
def test_each_result_is_checked(part, monkeypatch):
    spoil(monkeypatch, OP, part)
    with pytest.raises(kernel_timing.Mismatch):
        check_and_time(mla_pre_attention.MlaPreAttention(Layer(), COMPILED))


UNSUPPORTED = {
    "no rotation": ("rotary_emb", None),
    "norms that vLLM fuses": ("fuse_qkv_rmsnorm", True),
    "a backend": ("mla_attn.impl.rocm_ops",),
    "an index": ("indexer", object()),
    "sparse": ("is_sparse", True),
    "heads of other GPUs": ("dcp_q_replicate", True),
    "a cache that is written elsewhere": ("mla_attn.use_pcp", True),
    "a cache called directly": ("mla_attn.use_direct_call", True),
    "hisparse": ("mla_attn.hisparse_cache", object()),
    "a cache of": ("mla_attn.kv_cache_dtype", "fp8_ds_mla"),
    "rows that must not": ("mla_attn.impl.rocm_ops.is_batch_invariant", True),
    "queries in MX-FP8": ("q_b_proj.vllm_rocm_ops_is_mx", True),
    "norms that are not supported": ("kv_a_layernorm", torch.nn.LayerNorm(KV)),
    "two epsilons": ("q_a_layernorm.variance_epsilon", 1e-3),
    "a rotation without a table": ("qk_rope_head_dim", 64),
}


@pytest.mark.usefixtures("configuration")
@pytest.mark.parametrize("what", UNSUPPORTED)
def test_unsupported_layers_are_not_served(what):
    layer = Layer()
    assert [*mla_norms.unsupported_features(layer)] == []
    change(layer, *UNSUPPORTED[what])
    assert len([*mla_norms.unsupported_features(layer)]) == 1


@pytest.fixture
def found(configuration, monkeypatch):
    """Return a function for the launches in a model, or for whether its layer is left to vLLM."""

    def fronts(layer: Layer, compiles: bool = True, splits: bool = True, fused: bool = False) -> list:
        passes = Fake(fuse_rope_kvcache_cat_mla=fused, fuse_norm_quant=False)
        settings = Fake(pass_config=passes, splitting_ops=[mla_norms.UPDATE] if splits else [])
        set_config(monkeypatch, compilation_config=settings, model_config=Fake(dtype=torch.bfloat16))
        monkeypatch.setattr(compilation, "is_compiled", lambda config, model: compiles)
        return [*mla_norms.pre_attentions(torch.nn.ModuleList([layer, torch.nn.Linear(2, 2)]), compiles)]

    return fronts


def test_it_serves_compiled_models_that_vllm_does_not_fuse(found):
    """It serves these, or if forced, unless vLLM's pass fuses rotation and write. Kernels must support the sizes."""
    [pre_attention] = found(layer := Layer())
    assert str(pre_attention.key).endswith(" block compiled") and not pre_attention.runs_unmeasured()
    for takes in (True, False):
        pre_attention.apply_decision(takes)
        assert layer.rocm_ops_pre_attention is (pre_attention if takes else None)
    assert found(Layer(), compiles=False) == []
    forced = Layer()
    forced.mla_attn.impl.rocm_ops.is_forced = True
    [pre_attention] = found(forced, compiles=False)
    assert str(pre_attention.key).endswith(" block eager") and pre_attention.runs_unmeasured()
    pre_attention.apply_decision(False)
    assert forced.rocm_ops_pre_attention is pre_attention
    assert found(Layer(), splits=False, fused=True) == [] and len(found(Layer(), splits=False)) == 1
    assert len(found(Layer(), fused=True)) == 1


def test_kernels_must_take_the_sizes(found, monkeypatch):
    """On a GPU, the kernels are asked."""
    arch = archs.named("gfx942")
    monkeypatch.setattr(seam, "arch_here", lambda platform: arch.name)
    monkeypatch.setattr("vllm_rocm_ops.vllm.linear.base.launches.not_loaded", lambda *_: "")
    monkeypatch.setattr("vllm_rocm_ops.vllm.graph.fused_quant.QUANT_DTYPE", arch.fp8_dtype)
    assert len(found(Layer())) == 1
    odd = Layer(None, 132)
    assert found(odd) == []


class Projection(torch.nn.Module):
    """A linear of vLLM's, which keeps its input."""

    def __init__(self, columns: int, rows: int):
        super().__init__()
        self.weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).bfloat16() / 8

    def forward(self, x):
        self.given = x
        return getattr(x, "data", x).to(torch.bfloat16) @ self.weight.t(), None


class Whole(Layer):
    """A layer with its projections, as wrapper_class expects it."""

    v_head_dim, g_proj = 8, None

    def __init__(self, kind: str, fp8: bool):
        super().__init__(KEYS.get(kind), None if kind == "none" else Q, fp8)
        self.mla_attn.layer_name = "attention"
        self.o_proj = Projection(HEADS * 8, 4)
        self.fused_qkv_a_proj = self.kv_a_proj_with_mqa = Projection(32, sum((self.q_lora_rank or 0, KV, ROPE)))
        last = Projection(self.q_lora_rank or 32, HEADS * (NOPE + ROPE))
        self.q_proj = last
        if self.q_lora_rank:
            known = vars(self.q_b_proj).items()
            last.__dict__ |= {name: value for name, value in known if "rocm" in name or "key" in name}
            self.q_b_proj = last
        angles = vars(self.rotary_emb)
        self.rotary_emb = lambda positions, query, key: (self.rotate(positions, None, query)[1], key)
        vars(self.rotary_emb).update(angles)

    def forward(self, positions, hidden_states, llama_4_scaling=None):
        return "vLLM's"


@pytest.mark.parametrize(("kind", "fp8"), [("", False), ("block", True), ("none", False)])
def test_attention_gets_the_results_of_the_fused_launch(configuration, monkeypatch, kind, fp8):
    """Attention gets rotated queries and the op's results, and q_b_proj its quantized result."""
    generator, seen = torch.Generator().manual_seed(1), {}
    layer = mla_norms.wrapper_class(type("Theirs", (Whole,), {}))(kind, fp8)
    layer.rocm_ops_pre_attention = one = mla_pre_attention.MlaPreAttention(layer, EAGER)
    x = torch.randn(3, 32, generator=generator).bfloat16()
    positions, slots = torch.tensor([5, 0, 9]), torch.tensor([2, 4])  # of a batch that is padded
    cache = torch.zeros(2, 3, KV + ROPE, dtype=torch.uint8 if fp8 else torch.bfloat16)
    context = lambda name: (None, layer.mla_attn, cache, slots)
    monkeypatch.setattr("vllm.model_executor.layers.attention.attention.get_attention_context", context)

    def attention(q, kv, k_pe, output, name, kv_cache_dummy_dep):
        seen.update(q=q, kv=kv, k_pe=k_pe, after=kv_cache_dummy_dep)
        output.fill_(1)

    monkeypatch.setattr(torch.ops.vllm, "unified_mla_attention_with_output", attention)
    result = layer(positions, x)
    assert torch.equal(result, torch.ones(3, HEADS * 8).bfloat16() @ layer.o_proj.weight.t())
    qkv = x @ layer.fused_qkv_a_proj.weight.t()
    made, scale, kv, k_pe = one.graph_outputs(qkv, positions)
    assert seen["after"] is seen["kv"]
    torch.testing.assert_close(seen["kv"], kv, rtol=2**-6, atol=1e-3)
    torch.testing.assert_close(seen["k_pe"].squeeze(1), k_pe, rtol=2**-6, atol=2**-6)
    rows = torch.cat([seen["kv"], seen["k_pe"].squeeze(1)], 1)
    wanted = torch.zeros_like(cache)
    written = rows[:2, :KV], rows[:2, None, KV:], wanted.view(6, 1, -1)
    layer.write(*written, slots, layer.mla_attn.kv_cache_dtype, layer.mla_attn._k_scale)
    assert torch.equal(cache, wanted)
    last = layer.q_proj if kind == "none" else layer.q_b_proj
    if kind == "none":
        assert last.given is x
    elif kind == "block":
        assert last.given.scale.shape == (3, Q // 128) and last.given.quant_key == one.input_key
        found, wanted = (compiled_ops.dequantized(*of) for of in ((last.given.data, last.given.scale), (made, scale)))
        torch.testing.assert_close(found, wanted, rtol=0.07, atol=1e-2)
    else:
        torch.testing.assert_close(last.given, made, rtol=2**-6, atol=1e-3)
    q = last.forward(last.given)[0].view(3, HEADS, NOPE + ROPE)
    q[..., NOPE:] = layer.rotate(positions, None, q[..., NOPE:].clone())[1]
    assert torch.equal(seen["q"], q)
    one.decoder.rotation = queries = Fake()
    layer(positions, x)
    assert torch.equal(seen["q"], last.forward(last.given)[0].view(3, HEADS, NOPE + ROPE)), "attention rotates them"
    assert queries.angles == (positions, *one.angles())
    assert layer(positions, x, torch.ones(1)) == "vLLM's"
    layer.rocm_ops_pre_attention = None
    assert layer(positions, x) == "vLLM's"


@pytest.mark.usefixtures("configuration")
def test_a_run_without_a_cache_writes_none():
    """vLLM's profile run has no slots."""
    one = mla_pre_attention.MlaPreAttention(layer := Layer(), COMPILED)
    qkv, *_ = one.inputs(3, 0)
    _, kv, k_pe, _ = one.outputs(qkv)
    for slots, cache in ((None, torch.empty(1, 1, KV + ROPE)), (torch.zeros(3, dtype=torch.int64), torch.empty(0))):
        got, none, scale = mla_norms.step_cache(layer.mla_attn, cache, slots, qkv, kv, k_pe)
        assert got.shape == (1, 1, KV + ROPE) and len(none) == 0 and scale is None
    cache = torch.empty(4, 16, KV + ROPE, dtype=torch.bfloat16)
    slots = torch.arange(8)  # of a batch that is padded
    assert mla_norms.step_cache(layer.mla_attn, cache, slots, qkv, kv, k_pe)[1].tolist() == [0, 1, 2]


@pytest.mark.usefixtures("configuration")
def test_vllm_splits_a_model_at_our_op():
    """It splits once, where it would at its own cache write."""
    assert "mla_norms" in seam.active()
    split = CompilationConfig(mode=3)
    for _ in range(2):
        split.set_splitting_ops_for_v1(all2all_backend="naive")
        assert split.splitting_ops.count(mla_norms.TORCH_OP) == 1 and mla_norms.UPDATE in split.splitting_ops
    whole = CompilationConfig(mode=3, splitting_ops=[])
    whole.set_splitting_ops_for_v1(all2all_backend="naive")
    assert mla_norms.TORCH_OP not in whole.splitting_ops


def test_another_layer_is_not_replaced(monkeypatch):
    """The seam is off, and says so, if vLLM's layer or its cache write is another."""
    monkeypatch.delitem(op_registry_oot, "MultiHeadLatentAttentionWrapper", raising=False)
    mla_norms.probe()
    real, other = mla_norms.backends.methods, {"do_kv_cache_update": None}
    monkeypatch.setattr(mla_norms.backends, "methods", lambda path: real(path) | (other if "Triton" in path else {}))
    with pytest.raises(seam.Unavailable, match="TritonMLAImpl with the common write"):
        mla_norms.probe()
