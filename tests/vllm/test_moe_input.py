"""Test experts' hidden states that the norm before quantizes: in a graph, in a layer's call, and in engines."""

import json

import checkpoints
import pytest
import torch
from engines import LOADED, STEPS, prompts_of
from fakes import Fake, check_and_time
from keys import pattern
from marks import full
from test_graph import EPSILON, add_norm, called, choices, piece, quantizer, random  # noqa: F401
from torch._higher_order_ops.auto_functionalize import auto_functionalized
from torch._library.utils import get_layout_constraint_tag
from torch.fx.operator_schemas import normalize_function
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel
from vllm.model_executor.layers.fused_moe.runner import moe_runner
from vllm.model_executor.layers.layernorm import RMSNorm

from vllm_rocm_ops import ops
from vllm_rocm_ops.core import quantization
from vllm_rocm_ops.vllm.graph import compiled_ops, fused_quant, moe_side_channel
from vllm_rocm_ops.vllm.moe import base, quantized_input
from vllm_rocm_ops.vllm.selection import kernel_timing
from vllm_rocm_ops.vllm.selection.kernel_selection import Measured, Record
from vllm_rocm_ops.vllm.selection.key import SEPARATE

pytestmark = pytest.mark.usefixtures("configuration", "schemas")

ROWS, HIDDEN, FP8 = 5, 256, torch.float8_e4m3fn
BOTH = "rms_norm_and_per_block_quant"
PATTERNS = {pattern(f"{BOTH} {HIDDEN} bfloat16{kind}"): True for kind in ("", " residual")}


@pytest.fixture
def runner(configuration, monkeypatch):
    """Make vLLM's ops of a layer record what the layer is given, and return the record."""
    seen = []

    def forward(hidden, logits, shared, ids):
        seen.append((hidden, logits, shared, moe_side_channel.quantized(hidden)))
        return hidden + 1 if shared is None else (hidden + 2, hidden + 3)

    def tag(op, **options):
        """Return the layout tag, for ops of MoE layers the one in vLLM's wheels for GPUs."""
        is_layer = "moe_forward" in str(op)
        return torch.Tag.needs_exact_strides if is_layer else get_layout_constraint_tag(op, **options)

    monkeypatch.setattr(torch._library.utils, "get_layout_constraint_tag", tag)
    monkeypatch.setattr(moe_runner, "get_layer_from_name", lambda name: Fake(_forward_impl=forward))
    quantized_input.ops_beside()
    return seen


def experts(x, shared: bool):
    """Call vLLM's op of a layer of experts, as a graph has it."""
    from vllm.utils.torch_utils import _USE_LAYERNAME, LayerName

    name = LayerName("experts") if _USE_LAYERNAME else "experts"
    given = {"router_logits": x, "shared_experts_input": x if shared else None, "input_ids": None}
    given |= {"layer_name": name, "hidden_dim_unpadded": 0}
    if shared:
        return torch.ops.vllm.moe_forward_shared(x, **given)
    return auto_functionalized(torch.ops.vllm.moe_forward.default, hidden_states=x, **given)[:1]


def layer(shared: bool, reads_more=lambda y, product: ()):
    def function(x, residual, weight, product):
        y, added = add_norm(x, residual, weight)
        return *experts(y, shared), added, *reads_more(y, product)

    return function


def assert_strides_are_known(graph: torch.fx.Graph):
    """Assert that Inductor finds the strides of an MoE layer's inputs, as it needs them for needs_exact_strides."""
    [node] = [node for node in graph.nodes if "values" in node.kwargs]
    (args, kwargs), op = node.meta["eager_input_vals"], node.target
    if op is auto_functionalized:
        assert args == node.args and kwargs.keys() == node.kwargs.keys()
    else:
        known = normalize_function(op, args, kwargs)
        shapes = [x.shape for x in list(known.kwargs.values())[-2:]]
        assert shapes == [(ROWS, HIDDEN), (ROWS, HIDDEN // 128)]


def inputs():
    return random(ROWS, HIDDEN), random(ROWS, HIDDEN, seed=2), random(HIDDEN, seed=1), random(HIDDEN, 8, seed=3)


@pytest.mark.parametrize("shared", [False, True])
def test_a_norm_that_experts_read(choices, runner, shared):  # noqa: F811
    """Its op also quantizes, and updates the residual; the layer gets both, and vLLM's op its usual arguments."""
    choices.decisions = PATTERNS
    x, residual, weight, product = inputs()
    module, names = piece(layer(shared), x, residual, weight, product, donated=[1])
    assert called(names)[0] == BOTH and not [name for name in names if "vllm.moe_forward" in name]
    assert_strides_are_known(module.graph)
    given, wanted = residual.clone(), residual.clone()
    *results, added = module(x, given, weight, product)
    out, values, scales = ops.rms_norm_and_per_block_quant(x, weight, EPSILON, FP8, wanted)
    assert added.data_ptr() == given.data_ptr() and torch.equal(added, wanted)
    (hidden, logits, its_shared, (its_values, its_scales)) = runner[-1]
    assert torch.equal(hidden, out) and torch.equal(logits, out) and (its_shared is not None) is shared
    assert torch.equal(its_values.view(torch.uint8), values.view(torch.uint8)) and torch.equal(its_scales, scales)
    for found, more in zip(results, (2, 3) if shared else (1,), strict=True):
        assert torch.equal(found, out + more)
    assert moe_side_channel.current.given is None


def test_a_schema_is_vllms_and_two_more(runner):
    """The op writes the arguments that vLLM's op writes, and has its tags."""
    for theirs, plugin in quantized_input.ops_beside().items():
        *arguments, _, _ = plugin._schema.arguments
        wanted = str(theirs._schema).replace(theirs.name(), plugin.name())
        assert str(plugin._schema) == wanted.replace(") ->", ", Tensor values, Tensor scales) ->")
        assert len(arguments) == len(theirs._schema.arguments) and plugin.tags == theirs.tags
        written = [[one.name for one in op._schema.arguments if one.alias_info] for op in (plugin, theirs)]
        assert written[0] == written[1]


WHY = {
    "not measured to win": {"decisions": dict.fromkeys(PATTERNS, False)},
    "not a model whose experts take it": {"decisions": {}},
    "off": {"decisions": PATTERNS, "off": frozenset({BOTH})},
}


@pytest.mark.parametrize("why", WHY)
def test_some_norms_of_experts_are_not_replaced(choices, runner, why):  # noqa: F811
    """The layer's op stays vLLM's, too."""
    vars(choices).update(WHY[why])
    x, residual, weight, product = inputs()
    _, names = piece(layer(True), x, residual, weight, product, donated=[1])
    assert BOTH not in called(names) and "vllm.moe_forward_shared.default" in names


def test_readers_beside_experts(choices, runner):  # noqa: F811
    """A GEMM may read the 16-bit result, too. With a quantization or a fused reader, the norm is vLLM's."""
    choices.decisions = PATTERNS
    x, residual, weight, product = inputs()
    marked, _ = quantizer("kFp8Dynamic128Sym")
    for more, serves in (
        (lambda y, product: (y @ product,), True),
        (lambda y, product: marked(y), False),
        (lambda y, product: (y * 2,), False),
    ):
        _, names = piece(layer(True, more), x, residual, weight, product, donated=[1])
        assert (BOTH in called(names)) is serves


def test_experts_take_what_they_were_handed(monkeypatch):
    """They do not quantize them then. Other tokens or weights, or router weights on the input, are not taken."""
    asked = []
    op = Fake(fused_experts=lambda *arguments: asked.append(arguments))
    monkeypatch.setattr(torch.ops, "vllm_rocm_ops", op, raising=False)
    hidden, w1, w2 = random(3, HIDDEN), random(4, 2 * 128, HIDDEN).to(FP8), random(4, HIDDEN, 128).to(FP8)
    values, scales = random(3, HIDDEN, seed=9).to(FP8), torch.rand(3, 2)
    kept = {"w2_scale": torch.ones(4, 2, 1), "a1_scale": None, "a2_scale": None, "shuffled": False}
    kept |= {"w1_bias": None, "w2_bias": None, "weight_only": False}
    block, channel = (Fake(**kept, w1_scale=torch.ones(shape)) for shape in ((4, 2, 2), (4, 256)))
    routing = torch.ones(3, 1), torch.zeros(3, 1, dtype=torch.int32)

    def takes(kept, x, on_input=False) -> bool:
        base.run(kept, None, (x, w1, w2, *routing), (None, on_input, (None, 1.0, 0.0, False), 4))
        first, scale, dtype = asked[-1][0], asked[-1][8], asked[-1][5]
        assert dtype == torch.bfloat16 and (scale is scales) is (first is values)
        return first is values

    with moe_side_channel.beside(hidden, values, scales):
        assert takes(block, hidden) and takes(block, hidden.view(3, HIDDEN))
        assert not takes(block, hidden.clone()) and not takes(block, hidden[:2]) and not takes(channel, hidden)
        assert not takes(block, hidden, on_input=True)
    assert not takes(block, hidden)


@pytest.mark.parametrize("kind", ["rows", "columns", "either", "powers of two"])
def test_shared_experts_take_it_in_rows(configuration, kind):
    """A block-scaled kernel takes values and scales if it accepts this layout of scales; others quantize their input."""
    got = []

    class Kernel(Fp8BlockScaledMMLinearKernel):
        is_supported = can_implement = classmethod(lambda cls, *_: (True, None))
        takes_either_order = kind == "either"

        def __init__(self):
            self.rocm_ops_input_key, self.use_triton = fused_quant.kFp8Dynamic128Sym, False
            self.config, self.quant_fp8 = Fake(out_dtype=torch.bfloat16), Quantize()

        def _get_layer_params(self, layer):
            names = "weight_scale", "weight_scale_inv", "block_scale", "input_scale", "input_scale_ub"
            absent = dict.fromkeys(names, None)
            return Fake(weight=torch.zeros(128, HIDDEN).to(FP8), block_scale_attr="weight_scale", **absent)

        def apply_block_scaled_mm(self, A, B, As, Bs):
            got.append((A, As))
            return torch.zeros(len(A), len(B), dtype=torch.bfloat16)

    class Quantize:
        column_major_scales, use_ue8m0 = kind in ("columns", "either"), kind == "powers of two"

        def __call__(self, x, *_, **__):
            return quantization.per_token(x.float(), FP8, None)

    x, values, scales = random(3, HIDDEN), random(3, HIDDEN, seed=9).to(FP8), torch.rand(3, 2)
    kernel = Kernel()
    with moe_side_channel.beside(x, values, scales):
        kernel.apply_weights(None, x)
        kernel.apply_weights(None, x.clone())
    kernel.apply_weights(None, x)
    takes = kind in ("rows", "either")
    assert [As is scales for _, As in got] == [takes, False, False]
    assert (got[0][0].data_ptr() == values.data_ptr()) is takes


SEEDS = {"deepseek": (4, 5, 8), "qwen3_moe": (470, 472, 794)}
"""Found like engines.py's: no rounding changes a token."""
QUANTIZED_ONLY = "lambda exact: lambda hidden, *rest: exact(hidden, *rest) if hidden.dtype.itemsize == 1 else 1 / 0"
OTHER_SCALES = "lambda exact: lambda *given: (lambda out, values, scales: (out, values, 4 * scales))(*exact(*given))"


@pytest.fixture(scope="module")
def job(engines):
    """Return jobs of models with routers of 16 bits."""

    def job(model: str, **options) -> dict:
        folder = engines.folder / f"{model}-router"
        if not folder.exists():
            gates = [f"model.layers.{i}.mlp.gate" for i in range(3)]
            checkpoints.build(folder, model, "block")
            config = json.loads((folder / "config.json").read_text())
            config["quantization_config"]["ignored_layers"] += gates
            (folder / "config.json").write_text(json.dumps(config))
        given = {"model": str(folder), "prompts": prompts_of(SEEDS[model])} | options
        return engines.job((model, "block"), compiled=True, **given)

    return job


@full
@pytest.mark.slow
@pytest.mark.parametrize("model", ["deepseek", "qwen3_moe"])
def test_in_an_engine(engines, job, model):
    """Experts get no 16-bit hidden states; tokens equal an eager run's separate launches, and wrong scales change them."""
    jobs = {
        "with": job(model, fault={"op": "fused_experts", "make": QUANTIZED_ONLY}),
        "planted": job(model, fault={"op": BOTH, "make": OTHER_SCALES}),
        "apart": job(model),
    }
    jobs["apart"]["engine"] |= {"enforce_eager": True}
    found = engines.run(jobs)
    layers = 2 if model == "deepseek" else 1
    assert sum(found["with"]["stats"][BOTH].values()) == layers * STEPS
    assert BOTH not in found["apart"]["stats"]
    assert found["with"]["tokens"] == found["apart"]["tokens"] != found["planted"]["tokens"]


@full
@pytest.mark.slow
@pytest.mark.parametrize("model", ["qwen3_moe", "deepseek"])
def test_a_start_with_code_of_an_earlier_one(engines, job, model):
    """It has no graph to change, and needs the plugin's ops all the same."""
    jobs = {"one": job(model, environment={"VLLM_ROCM_OPS_ATTENTION": "1"})}
    first, later = (engines.run(jobs, generates=True, cache="kept") for _ in range(2))
    assert LOADED not in first["output"] and LOADED in later["output"]
    assert later["one"]["tokens"] == first["one"]["tokens"] and later["one"]["stats"] == first["one"]["stats"]
    assert BOTH in later["one"]["stats"]


class Model(torch.nn.Module):
    """A norm and a vLLM layer with the plugin's experts."""

    def __init__(self, scales=(4, 2, 2), **changed):
        super().__init__()
        self.norm, self.layer = RMSNorm(HIDDEN, dtype=torch.bfloat16), torch.nn.Module()
        self.norm.weight.data = torch.linspace(0.5, 2, HIDDEN).bfloat16()
        plugin = type("Ours", (base.Predicates,), {"w1_scale": torch.ones(scales), "a1_scale": None})()
        kernel = Fake(fused_experts=changed.pop("experts", plugin))
        self.layer._forward_impl, self.layer.routed_input_transform = None, changed.pop("transform", None)
        config = {"dp_size": 1, "pcp_size": 1, "is_sequence_parallel": False} | changed
        self.layer.moe_config, self.layer.routed_experts = Fake(**config), torch.nn.Module()
        self.layer.routed_experts.quant_method = Fake(moe_kernel=kernel)
        self.layer.routed_experts.w13_weight = torch.zeros(4, 256, HIDDEN).to(FP8)


OTHERS = {
    "vLLM's experts": {"experts": object()},
    "scales per channel": {"scales": (4, 256)},
    "tokens of other ranks": {"dp_size": 2},
    "tokens divided over ranks": {"is_sequence_parallel": True},
    "another input": {"transform": object()},
}


def test_a_model_whose_experts_take_it(monkeypatch):
    model, defined = Model(), []
    assert quantized_input.hidden_of(model) == HIDDEN
    monkeypatch.setattr(quantized_input, "ops_beside", lambda: defined.append(True))
    [pair] = quantized_input.norms_before_experts(model, True)
    assert defined, "code of an earlier start calls them"
    assert str(pair.key) == f"{BOTH} {HIDDEN} bfloat16 residual separate-eager"
    assert not list(quantized_input.norms_before_experts(model, False))
    for changed in OTHERS.values():
        assert quantized_input.hidden_of(Model(**changed)) == 0
        assert quantized_input.hidden_of(torch.nn.ModuleList([model, Model(**changed)])) == 0


FAULTS = {
    "": lambda out, values, scales, residual: None,
    "result": lambda out, values, scales, residual: out.mul_(1.05),
    "values": lambda out, values, scales, residual: scales.mul_(1.5),
    "residual": lambda out, values, scales, residual: residual.mul_(1.05),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_it_is_checked_and_timed_beside_two_launches(monkeypatch, fault):
    def run(*arguments):
        made, residual = quantized_input.OP.reference(*arguments), arguments[4]
        FAULTS[fault](*made, residual)
        return made

    monkeypatch.setattr(quantized_input.OP, "run_kernels", run)
    [pair] = quantized_input.norms_before_experts(Model(), True)
    if fault:
        with pytest.raises(kernel_timing.Mismatch):
            check_and_time(pair, 5)
    else:
        assert check_and_time(pair, 5)[:2] == (1.0, 2.0)


@pytest.mark.parametrize("baseline", [8.0, 5.0])
def test_it_runs_where_it_won(baseline):
    """A record of times decides it, for all token counts."""
    [pair] = quantized_input.norms_before_experts(Model(), True)
    record = Record({}, {}, {pair.key: {tokens: Measured(5.0, baseline) for tokens in compiled_ops.TOKENS}})
    assert compiled_ops.decide([pair], record.decided()) == {pair.pattern: baseline == 8.0}


def test_a_key_that_has_a_choice_per_token_count_is_an_error(monkeypatch):
    monkeypatch.setattr(quantized_input, "BESIDE", SEPARATE)
    with pytest.raises(ValueError, match=r"one choice for all token counts, got .* separate"):
        compiled_ops.decide([*quantized_input.norms_before_experts(Model(), True)], Record({}).decided())
