"""Test what the plugin replaces in attention layers of Qwen3-Next and Qwen3.5, as vLLM traces and splits them."""

import gated_attention as tiny
import pytest
import torch
from fakes import change, check_and_time, graph_of, require_near, spoil
from test_graph import called, choices, piece  # noqa: F401
from test_rope_and_cache_seam import dynamo  # noqa: F401
from vllm.compilation.passes.inductor_pass import get_pass_context, pass_context
from vllm.compilation.passes.ir.inplace_functionalization import VllmIRInplaceFunctionalizationPass
from vllm.config import get_current_vllm_config
from vllm.config.utils import Range

from vllm_rocm_ops import ops
from vllm_rocm_ops.ops.shared import rotation
from vllm_rocm_ops.ops.shared.attention import CacheLayout
from vllm_rocm_ops.vllm.attention import norm_residuals, rope_and_cache, split
from vllm_rocm_ops.vllm.graph import compiled_ops, norm_outputs, output_gate
from vllm_rocm_ops.vllm.selection import kernel_timing
from vllm_rocm_ops.vllm.selection.key import COMPILED

pytestmark = pytest.mark.usefixtures("schemas")

KEYS = ("kFp8StaticTensorSym", "kFp8DynamicTokenSym", "kFp8Dynamic128Sym")
GATES = "sigmoid_and_mul_quant", "sigmoid_and_mul_per_token_quant", "sigmoid_and_mul_per_block_quant"


@pytest.fixture
def made(dynamo, monkeypatch, tmp_path):  # noqa: F811
    """Return a function that makes a block with its layer."""

    def make(**how) -> tiny.Block:
        block = tiny.Block(tiny.attention_of(monkeypatch, **how))
        with torch.no_grad():
            for norm in (block.before, block.after, block.attention.q_norm, block.attention.k_norm):
                norm.weight.copy_(torch.linspace(-0.5, 1, len(norm.weight)))
        return block

    with tiny.one_rank(tmp_path):
        yield make


def rewritten(monkeypatch, block: tiny.Block, sections: bool = False, takes: bool = True) -> torch.fx.GraphModule:
    """Return the block's graph after the seams' changes, before vLLM splits it."""
    if takes:
        tiny.front(monkeypatch, block, sections).apply_decision(True)
    module = tiny.traced(block, torch.zeros((3, 5) if sections else 5).long())
    for rewrite_graph in (rope_and_cache.rewrite, norm_residuals.donate):
        rewrite_graph(module.graph, [rope_and_cache.TORCH_OP])
    module.graph.lint()
    module.recompile()
    return module


def through_passes(one: torch.fx.GraphModule):
    """Return a piece after vLLM's passes and the plugin's, the plugin's calls in it, and inputs."""
    inputs = tiny.inputs_of(one)
    with pass_context(Range(1, 64)):
        VllmIRInplaceFunctionalizationPass(get_current_vllm_config())(one.graph)
        donated = set(get_pass_context().donated_input_ids)
    one.recompile()
    module, names = piece(one, *inputs, donated=donated)
    return module, called(names), inputs


# Norms of heads, rotation, cache write


@pytest.mark.parametrize("sections", [False, True])
def test_one_op_takes_head_norms_rotation_and_cache_write(made, monkeypatch, sections):
    """It reads queries between the gates, and what copies the gates moves behind attention."""
    module = rewritten(monkeypatch, made(sections=sections), sections)
    nodes = list(module.graph.nodes)
    [node] = (node for node in nodes if split.op_of(node) == rope_and_cache.TORCH_OP)
    q, _, _, q_weight, k_weight, epsilon, _, _, is_neox, q_out, k_out, *traits, _ = node.args
    assert q.args[0].args[0].target is torch.chunk and q.args[1:] == (-1, tiny.HEADS, tiny.SIZE)
    assert "q_norm" in q_weight.name and "k_norm" in k_weight.name and epsilon == 1e-6 and is_neox
    assert traits == [True, *((2, 2) if sections else (0, 0))]
    assert not [node for node in nodes if "rms_norm.default" in str(node.target) and "add" not in str(node.target)]
    attention = next(node for node in nodes if split.op_of(node) == split.ATTENTION)
    [gate] = (node for node in nodes if node.target == "reshape")
    assert attention.args[:2] == (q_out, k_out) and nodes.index(gate) > nodes.index(attention)


def test_layers_that_lose_keep_vllms_kernel(made, monkeypatch):
    """On CUDA vLLM has one for norms and rotation, which hides the rotation. A layer that is taken calls its modules."""
    block = made()
    layer = block.attention
    layer.use_fused_qk_norm_rope_gate = True
    one = tiny.front(monkeypatch, block)
    for serves in (True, False, True):
        one.apply_decision(serves)
        assert layer.use_fused_qk_norm_rope_gate is not serves
        assert (layer.rotary_emb._forward_method.__name__ == "marked") is serves
    asked = []
    monkeypatch.setattr(layer, "_project_qkv_gate", lambda *given: asked.append(given) or (1, 2, 3, 4), raising=False)
    assert one.graph_outputs(torch.zeros(2, one.columns), torch.zeros(2)) == (1, 2, 4) and len(asked) == 1


def test_nothing_moves_where_the_rotation_stays_vllms(made, monkeypatch):
    module = rewritten(monkeypatch, made(), takes=False)
    targets = [node.target for node in module.graph.nodes]
    attention = next(place for place, node in enumerate(module.graph.nodes) if split.op_of(node) == split.ATTENTION)
    assert targets.index("reshape") < attention
    assert rope_and_cache.TORCH_OP not in map(split.op_of, module.graph.nodes)


def test_another_rotation_is_lowered_to_vllms(made):
    """A marked rotation by sections that no op takes computes what vLLM's module does."""
    from vllm_rocm_ops.vllm.graph import markers

    rotary = made(sections=True).attention.rotary_emb
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(5, heads * tiny.SIZE, generator=generator).bfloat16() for heads in (4, 2))
    positions = torch.randint(0, 100, (3, 5), generator=generator)
    marked, sizes = markers.of_rotation(rotary, True), [tiny.SIZE, tiny.ROTARY, *tiny.SECTIONS]
    wanted = rotary.forward_native(positions, q, k)
    found = markers.ROTATION(positions, q, k, rotary.cos_sin_cache, sizes, True, True)
    for results in (found, marked(positions, q, k)):
        assert all(map(torch.equal, results, wanted))
    assert not torch.equal(wanted[0], rotary.forward_native(positions[:1].expand(3, 5), q, k)[0])


UNSUPPORTED = {
    "sections one after the other": [("rotary_emb.mrope_interleaved", False)],
    "two sections": [("rotary_emb.mrope_section", [4, 4])],
    "a module without what vLLM's rotation reads": [("rotary_emb.apply_rotary_emb",)],
}


@pytest.mark.parametrize("what", UNSUPPORTED)
def test_other_sections_stay_vllms(made, what):
    layer = made(sections=True).attention
    assert not [*rope_and_cache.unsupported_features(layer.attn, layer.rotary_emb, torch.bfloat16)]
    for changed in UNSUPPORTED[what]:
        change(layer, *changed)
    [why] = rope_and_cache.unsupported_features(layer.attn, layer.rotary_emb, torch.bfloat16)
    assert "interleaved" in why


def test_sections_need_norms(made, monkeypatch):
    """Only the op with norms rotates by sections."""
    block = made(sections=True)
    block.attention.q_norm = torch.nn.Identity()
    assert tiny.front(monkeypatch, block, True) is None
    assert tiny.front(monkeypatch, block, False).op is ops.rope_and_cache
    block.attention.use_fused_qk_norm_rope_gate = True  # vLLM's kernel has the norms
    assert tiny.front(monkeypatch, block, False) is None


@pytest.mark.parametrize("sections", [False, True])
def test_a_layer_is_measured_beside_vllms(made, monkeypatch, sections):
    """The emulated kernel is as close to exact q, k and cache rows as vLLM's layers. The key has the layer's traits."""
    block = made(sections=sections)
    one = tiny.front(monkeypatch, block, sections)
    write = lambda attn, k, v, cache, slots: rotation.write(
        CacheLayout(*attn.impl.rocm_ops.caches(attn, cache)), k, v, slots, (None, None)
    )
    block.attention.attn.impl.do_kv_cache_update = write
    by = " sections 2+2" * sections
    assert str(one.key) == f"qk_norm_rope_and_cache 4:2x64/16 bfloat16 auto one-plus gate{by} compiled"
    require_near(one, tokens=4)
    spoil(monkeypatch, ops.qk_norm_rope_and_cache, "key_out")
    with pytest.raises(kernel_timing.Mismatch):
        check_and_time(one, 4)


@pytest.mark.parametrize("served", [True, False])
@pytest.mark.parametrize("sections", [False, True])
def test_the_op_writes_what_vllms_layers_do(made, monkeypatch, sections, served):
    """It also does where no kernel supports the cache, in PyTorch."""
    block = made(sections=sections)
    attn, one = block.attention.attn, tiny.front(monkeypatch, block, sections)
    caches = attn.impl.rocm_ops.caches
    attn.impl.do_kv_cache_update = lambda attn, k, v, cache, slots: rotation.write(
        CacheLayout(*caches(attn, cache)), k, v, slots, (None, None)
    )
    qkv, positions, slots, cache = one.inputs(4, 0)
    wanted = one.baseline_outputs(one.graph_outputs(qkv, positions), qkv, slots, cache.clone())
    if not served:
        attn.impl.rocm_ops.caches = lambda *_: None
    context = "vllm.model_executor.layers.attention.attention.get_attention_context"
    monkeypatch.setattr(context, lambda name: (None, attn, cache, slots))
    q, k, v = one.parts(qkv)
    outs = [torch.full_like(x, torch.nan, memory_format=torch.contiguous_format) for x in (q, k)]
    rotary = block.attention.rotary_emb
    angles = one.model_positions(positions), rotary.cos_sin_cache, rotary.is_neox_style
    rope_and_cache.attention_front(q, k, v, *one.weights(), *angles, *outs, *one.traits[:1], *one.traits.sections, "a")
    for ours, theirs in zip((*outs, cache), wanted):
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=2**-6, atol=2**-6)
    assert wanted[2].any()


# The output gate, and norms around the layer


@pytest.mark.parametrize(("key", "gate"), zip(KEYS, GATES))
def test_the_gate_and_the_norms_are_one_launch_each(made, monkeypatch, key, gate):
    """The piece behind attention: gate with quantization, and a norm whose residual is another piece's.

    The first piece has a norm with quantization, and no copy of the gate.
    """
    first, last = map(through_passes, tiny.pieces(rewritten(monkeypatch, made(key=key))))
    norm = {KEYS[0]: "fused_add_rms_norm_static_fp8_quant", KEYS[1]: "rms_norm_dynamic_per_token_quant"}
    assert first[1] == [norm.get(key, "rms_norm_per_block_quant")]
    assert last[1] == [gate, "fused_add_rms_norm"]
    left = "aten.sigmoid.default", "vllm_ir.fused_add_rms_norm.default"
    names = [{str(node.target) for node in module.graph.nodes} for module, *_ in (first, last)]
    assert not names[0] & {*left} and not names[1] & {*left, "aten._unsafe_view.default"}


@pytest.mark.parametrize("key", KEYS)
def test_the_piece_behind_attention_computes_what_vllms_does(made, monkeypatch, key):
    """With the rounding of a quantization."""
    *_, original = tiny.pieces(rewritten(monkeypatch, made(key=key)))
    fresh = tiny.inputs_of(original)
    wanted = original(*[x.clone() if isinstance(x, torch.Tensor) else x for x in fresh])
    module, _, inputs = through_passes(original)
    for ours, theirs in zip(module(*inputs), wanted):
        assert (ours - theirs).float().norm() < 0.02 * theirs.float().norm()


def gated(x, gate, marked):
    return marked(x * torch.sigmoid(gate.reshape(x.shape)))


def gated_and_read(x, gate, marked, reads: str):
    by = torch.sigmoid(gate.reshape(x.shape))
    y = x * by
    return *marked(y), {"sigmoid": by, "product": y}[reads] + 1


OTHERS = {
    "a gate of one column": lambda x, gate, marked: marked(x * torch.sigmoid(gate[:, :1, 0])),
    "inputs that something else reads": lambda x, gate, marked: (*gated(x, gate, marked), x * gate.reshape(x.shape)),
    "a sigmoid that something else reads": lambda *given: gated_and_read(*given, "sigmoid"),
    "a product that something else reads": lambda *given: gated_and_read(*given, "product"),
}


@pytest.mark.parametrize("what", ["", *OTHERS])
def test_other_products_stay_the_compilers(dynamo, what):  # noqa: F811
    from test_graph import quantizer

    marked, _ = quantizer(KEYS[2])
    generator = torch.Generator().manual_seed(0)
    both = torch.randn(5, 2, 512, generator=generator).bfloat16()
    x, gate = torch.randn(5, 512, generator=generator).bfloat16(), both[..., 256:]
    _, names = piece(lambda x, gate: OTHERS.get(what, gated)(x, gate, marked), x, gate)
    wanted = [GATES[2]] if what in ("", "inputs that something else reads") else []
    assert called(names) == wanted


@pytest.mark.parametrize("decided", [True, False])
def test_a_gate_that_loses_stays_the_compilers(made, monkeypatch, choices, decided):  # noqa: F811
    layer = made().attention
    layer.o_proj.vllm_rocm_ops_quantize = layer.o_proj.quant_method.quantize
    one = output_gate.GateComparison(ops.sigmoid_and_mul_per_block_quant, layer, 256, torch.bfloat16, COMPILED)
    choices.decisions = {one.pattern: decided}
    _, names, _ = through_passes(tiny.pieces(rewritten(monkeypatch, tiny.Block(layer)))[-1])
    assert (GATES[2] in names) is decided


@pytest.mark.parametrize(("key", "gate"), zip(KEYS, GATES))
def test_a_gate_is_measured_beside_vllms(made, monkeypatch, key, gate):
    """The emulated kernel is as close to the exact product as vLLM's two launches."""
    layer = made(key=key).attention
    quantize, layer.o_proj.input_scale = layer.o_proj.quant_method.quantize, layer.o_proj.quant_method.scale
    layer.o_proj.vllm_rocm_ops_quantize = lambda x: quantize(x, layer.o_proj.input_scale)
    one = output_gate.GateComparison(getattr(ops, gate), layer, 256, torch.bfloat16, COMPILED)
    assert str(one.key) == f"{gate} 256 bfloat16 compiled" and one.runs_unmeasured()
    require_near(one)
    monkeypatch.setattr(one.op, "run_kernels", lambda *given: one.op.reference(given[0] * 1.1, *given[1:]))
    with pytest.raises(kernel_timing.Mismatch):
        check_and_time(one)


def test_a_norm_of_one_plus_weight_is_measured_right(made):
    """The comparison knew no 1 + weight: vLLM's norm looked wrong, and kept the pattern without a time."""
    block = made()
    linear = block.attention.qkv_proj
    linear.vllm_rocm_ops_quantize = linear.quant_method.quantize
    block.before.vllm_forward = block.before.forward_native
    given = block.before, linear, tiny.HIDDEN, torch.bfloat16, True, COMPILED
    one = compiled_ops.QuantComparison(ops.rms_norm_per_block_quant, *given)
    assert str(one.key) == "rms_norm_per_block_quant 256 bfloat16 residual one-plus compiled"
    require_near(one)


# Residuals


def add_norms(change: str = "", **how):
    """Return the forms of the residual adds in a graph of two norms with attention between them."""

    class Norms(torch.nn.Module):
        def forward(self, x, residual, weight):
            x = torch.nn.functional.embedding(torch.zeros(5).long(), x)
            x, given = x * 2, x if change == "a view" else residual if change == "a graph's input" else residual * 2
            given = given[:] if change == "a view" else given
            norm = torch.ops.vllm_ir.fused_add_rms_norm.default
            y, added = norm(x, given, weight + 1.0, 1e-6)
            z = y.view(y.shape) if change == "a view of the input" else y
            late = (added + 1,) if change == "a result" else ()
            y, last = norm(z * 2, added, weight + 1.0, 1e-6)
            if change == "a reader behind":
                late = (added + 1,)
            return y, last, *late

    x, weight = torch.randn(5, 64).bfloat16(), torch.randn(64).bfloat16()
    graph = graph_of(Norms(), x, x.clone(), weight)
    norm_residuals.donate(graph, [])
    return [str(n.target).rpartition(".")[2] for n in graph.nodes if "fused_add_rms_norm" in str(n.target)]


BOTH = ["maybe_inplace"] * 2
FORMS = {
    "": BOTH,
    "a view of the input": BOTH,
    "a result": BOTH,  # read before the second norm
    "a graph's input": ["default", "maybe_inplace"],
    "a view": ["default", "maybe_inplace"],
    "a reader behind": ["maybe_inplace", "default"],
}


@pytest.mark.parametrize("what", FORMS)
def test_which_residuals_are_donated(dynamo, what):  # noqa: F811
    assert add_norms(what) == FORMS[what]


# Norms with two readers


@pytest.mark.parametrize(("decided", "leaves"), [(True, False), (True, True), (False, False), (None, False)])
def test_a_norm_before_two_projections_is_one_launch(dynamo, choices, decided, leaves):  # noqa: F811
    """One reads it quantized, one in 16 bits, as before a Gated DeltaNet layer, or the launch of the layer in the next piece."""
    from test_graph import add_norm, quantizer

    marked, theirs = quantizer(KEYS[2])
    generator = torch.Generator().manual_seed(0)
    x, held, product = (torch.randn(n, 256, generator=generator).bfloat16() for n in (5, 5, 256))
    weight = torch.randn(256, generator=generator).bfloat16()

    def function(x, held, weight, product):
        y, added = add_norm(x, held, weight.float() + 1.0)
        return *marked(y), y if leaves else y @ product, added

    pattern = norm_outputs.pattern(256, torch.bfloat16, True)
    choices.decisions = {} if decided is None else {pattern: decided}
    module, names = piece(function, x, held, weight, product, donated=[1])
    assert called(names) == ["rms_norm_and_per_block_quant"] * bool(decided)
    given = held.clone()
    values, scales, other, added = module(x, given, weight, product)
    y = ops.fused_add_rms_norm(x, wanted := held.clone(), weight, 1e-6, True)
    for found, exact in zip((values, scales, other, added), (*theirs(y), y if leaves else y @ product, wanted)):
        assert (found.float() - exact.float()).norm() < 0.02 * exact.float().norm()


@pytest.mark.parametrize("readers", [("block_scaled_linear",), ("block_scaled_linear", "add"), ()])
def test_scales_of_either_order_where_the_plugins_linear_op_reads_them(dynamo, choices, readers):  # noqa: F811
    """The baseline's kernel wants them column-major, and has them reordered (test_linear.py)."""
    from test_graph import add_norm, quantizer

    marked, _ = quantizer(KEYS[2], column_major_scales=True)
    weight, b = torch.ones(256).bfloat16(), torch.zeros(128, 256).to(torch.float8_e4m3fn)

    def function(x, held, weight, b, scale_b, product):
        y, added = add_norm(x, held, weight.float() + 1.0)
        values, scales = marked(y)
        results = [y @ product, added]
        if "block_scaled_linear" in readers:
            linear = torch.ops.vllm_rocm_ops.block_scaled_linear
            results.append(linear(values, b, scales, scale_b, torch.bfloat16, "none"))
        return *results, *((values, scales + 1) if readers != ("block_scaled_linear",) else ())

    choices.decisions = {norm_outputs.pattern(256, torch.bfloat16, True): True}
    x, held, product = (torch.zeros(n, 256).bfloat16() for n in (5, 5, 256))
    _, names = piece(function, x, held, weight, b, torch.ones(1, 2), product, donated=[1])
    assert ("rms_norm_and_per_block_quant" in called(names)) is (readers == ("block_scaled_linear",))


def test_the_norm_before_two_projections_is_measured(made, monkeypatch):
    block = made()
    layer = torch.nn.Module()
    layer.in_proj_qkvz, layer.in_proj_ba = block.attention.qkv_proj, torch.nn.Linear(256, 8)
    layer.norm, linear = block.before, layer.in_proj_qkvz
    linear.vllm_rocm_ops_quantize, linear.vllm_rocm_ops_takes_rows = linear.quant_method.quantize, True
    linear.input_size_per_partition = 256
    from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8Dynamic128Sym

    from vllm_rocm_ops.vllm.graph import compilation, fused_quant

    monkeypatch.setattr(fused_quant, "input_quant_key", lambda linear: kFp8Dynamic128Sym)
    monkeypatch.setattr(compilation, "baseline_of", lambda *_: lambda *_, **__: COMPILED)
    assert [*norm_outputs.norms_before_two(layer, False)] == []
    [one] = norm_outputs.norms_before_two(layer, True)
    one.producer.vllm_forward = one.producer.forward_native
    assert str(one.key) == "rms_norm_and_per_block_quant 256 bfloat16 residual one-plus beside a linear layer compiled"
    require_near(one)
    linear.vllm_rocm_ops_takes_rows = False
    assert [*norm_outputs.norms_before_two(layer, True)] == []
