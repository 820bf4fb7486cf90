"""Test the pass that puts the plugin's norms and activations into vLLM's graphs: what it replaces, leaves, updates."""

import dataclasses
import itertools

import pytest
import torch
from fakes import Fake
from keys import pattern
from torch._higher_order_ops.auto_functionalize import auto_functionalized
from torch._inductor import config
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx
from vllm.compilation.passes.inductor_pass import get_pass_context, pass_context
from vllm.config import get_current_vllm_config
from vllm.config.utils import Range
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.quantization import input_quant_fp8
from vllm.model_executor.layers.quantization.utils import quant_utils

from vllm_rocm_ops import ops
from vllm_rocm_ops.vllm.graph import compiled_ops, markers, rewrite
from vllm_rocm_ops.vllm.linear import base as linear_base
from vllm_rocm_ops.vllm.selection import kernel_selection

pytestmark = pytest.mark.usefixtures("configuration", "schemas")

ROWS, HIDDEN, EPSILON = 5, 256, 1e-6
KEYS = ("kFp8StaticTensorSym", "kFp8DynamicTokenSym", "kFp8Dynamic128Sym")
MX = "kMxfp8Dynamic"
ALL = frozenset(("norm", "activation"))


@pytest.fixture(autouse=True)
def choices(monkeypatch) -> compiled_ops.CompileChoices:
    made = compiled_ops.CompileChoices(on=ALL)
    monkeypatch.setattr(rewrite, "choices", made)
    return made


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def marked_quantization(key: str, **how):
    """Return vLLM's quantization as a model calls it while traced, and as vLLM computes it."""
    scale = getattr(quant_utils, key).scale
    how = {"use_ue8m0": False, "compile_native": False} | how
    quant = input_quant_fp8.QuantFP8(scale.static, scale.group_shape, **how)
    theirs = input_quant_fp8.QuantFP8.forward_native.__get__(quant)
    return markers.of_quantization(quant, theirs), theirs


def quantizer(key: str, **how):
    """Return both forms of a quantization, which have a static scale by default. To MX-FP8, both are vLLM's op."""
    if key == MX:
        swizzled, aligned = how.get("swizzled", False), how.get("aligned", 0)
        return (lambda x, at=None: torch.ops.vllm.mxfp8_quantize(x, swizzled, aligned),) * 2

    def quantize(form):
        def run(x, at=None):
            return form(x, torch.full((1,), 0.02) if at is None else at) if key == KEYS[0] else form(x)

        return run

    return [quantize(form) for form in marked_quantization(key, **how)]


def piece(function, *inputs: torch.Tensor, donated=(), table: dict | None = None, edit=None, **passes: bool):
    """Run vLLM's passes on a function's graph, after an `edit`, and return the graph and the names of its calls."""
    configuration, module = get_current_vllm_config(), make_fx(function, table or {}, "fake")(*inputs)
    if edit is not None:
        edit(module.graph)
    settings = configuration.compilation_config.pass_config
    settings.fuse_norm_quant = settings.fuse_act_quant = settings.fuse_allreduce_rms = False
    manager = rewrite.PassManager()
    manager.configure(configuration)
    [plugin] = [one for one in manager.passes if isinstance(one, rewrite.Fusion)]
    plugin.pass_config = dataclasses.replace(settings, **passes)
    with pass_context(Range(1, 64)):
        get_pass_context().donated_input_ids = set(donated)
        manager(module.graph)
    module.graph.lint()
    module.recompile()
    return module, [str(node.target) for node in module.graph.nodes if node.op == "call_function"]


def called(names: list[str]) -> list[str]:
    """Return the plugin's ops that a graph calls."""
    return [name.split(".")[1] for name in names if name.startswith("vllm_rocm_ops.")]


def norm(x, weight, epsilon: float = EPSILON, *size):
    return torch.ops.vllm_ir.rms_norm(x, weight, epsilon, *size)


def add_norm(x, residual, weight):
    return torch.ops.vllm_ir.fused_add_rms_norm(x, residual, weight, EPSILON)


def expected(key: str, x, weight, residual=None, **more):
    """Return the results of the plugin's ops: values, scales and the residual."""
    fp8, scale = torch.float8_e4m3fn, torch.tensor([0.02])
    if key == KEYS[0]:
        if residual is None:
            return ops.rms_norm_static_fp8_quant(x, weight, scale, EPSILON, fp8, **more), scale
        return ops.fused_add_rms_norm_static_fp8_quant(x, residual, weight, scale, EPSILON, fp8, **more), scale
    if key == MX:
        return ops.rms_norm_mxfp8_quant(x, weight, EPSILON, residual=residual, **more)
    op = ops.rms_norm_dynamic_per_token_quant if key == KEYS[1] else ops.rms_norm_per_block_quant
    return op(x, weight, EPSILON, fp8, residual=residual, **more)


def same(found, wanted) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def parts_of_a_sum(hidden: int = HIDDEN):
    """Return what a model adds: shared and routed experts' results, a residual and a weight."""
    return [random(ROWS, hidden, seed=seed) for seed in range(3)] + [random(hidden, seed=3)]


@pytest.mark.parametrize(("first", "second"), [(1.0, 1.0), (1.0, 2.5), (0.4, 1.0)])
@pytest.mark.parametrize("key", [*KEYS, MX, None])
def test_a_sum_before_a_norm(key, first, second):
    """The norm's op adds, and multiplies the part that has a factor, as routed experts or in fp16 shared ones have."""
    marked, _ = quantizer(key) if key else (None, None)

    def times(x, factor):
        return x if factor == 1.0 else x * factor

    def function(shared, routed, held, weight):
        y, added = add_norm(times(shared, first) + times(routed, second), held, weight)
        return *(marked(y, torch.full((1,), 0.02)) if key else (y,)), added

    shared, routed, held, weight = parts_of_a_sum()
    module, names = piece(function, shared, routed, held, weight, donated={2})
    assert len(called(names)) == 1 and not {"aten.add.Tensor", "aten.mul.Tensor"} & {*names}
    given, wanted = held.clone(), held.clone()
    found, total = module(shared, routed, given, weight), (first * shared.float() + second * routed.float()).bfloat16()
    theirs = expected(key, total, weight, wanted) if key else ops.fused_add_rms_norm(total, wanted, weight, EPSILON)
    same(found, (*(theirs if isinstance(theirs, tuple) else (theirs,)), wanted))


@pytest.mark.parametrize(
    "sums",
    ["scaled", "two factors", "computed", "read twice", "broadcast", "residual", "without residual", "long", "odd"],
)
def test_some_sums_are_not_replaced(sums):
    """Their kernel computes more than a sum of two tensors, they have another reader, or no vector kernel fits the rows."""

    def function(shared, routed, held, weight):
        if sums == "scaled":
            total = torch.add(shared, routed, alpha=2)
        elif sums == "two factors":
            total = shared * 0.5 + routed * 2.5
        elif sums == "computed":
            total = shared + routed.sigmoid()
        elif sums == "broadcast":
            total = shared + routed[:1]
        else:
            total = shared + (held if sums == "residual" else routed)
        y, added = (norm(total, weight), held) if sums == "without residual" else add_norm(total, held, weight)
        return y, added, *([total] if sums == "read twice" else [])

    given = parts_of_a_sum({"long": 8200, "odd": 252}.get(sums, HIDDEN))
    module, names = piece(function, *given, donated={2})
    assert "aten.add.Tensor" in names and not any(node.kwargs.get("addend") for node in module.graph.nodes)
    if sums != "without residual":
        shared, routed, held, weight = given
        total = {"scaled": torch.add(shared, routed, alpha=2), "two factors": shared * 0.5 + routed * 2.5}.get(sums)
        parts = {"computed": routed.sigmoid(), "broadcast": routed[:1], "residual": held}
        total, added = shared + parts.get(sums, routed) if total is None else total, held.clone()
        wanted = ops.fused_add_rms_norm(total, added, weight, EPSILON), added
        same(module(shared, routed, held.clone(), weight)[:2], wanted)


@pytest.mark.parametrize("key", [*KEYS, MX])
@pytest.mark.parametrize("times", [1, 2])
def test_a_norm_that_only_a_quantization_reads(key, times):
    """Two equal quantizations, of two linears, count as one."""
    marked, _ = quantizer(key)
    x, weight = random(ROWS, HIDDEN), random(HIDDEN, seed=1)

    def function(x, weight):
        y, scale = norm(x, weight), torch.full((1,), 0.02)
        return [part for _ in range(times) for part in marked(y, scale)]

    module, names = piece(function, x, weight)
    assert len(called(names)) == 1 and not [name for name in names if "vllm_ir" in name]
    same(module(x, weight), expected(key, x, weight) * times)


@pytest.mark.parametrize("key", [*KEYS, MX])
def test_a_norm_with_a_residual(key):
    """It updates the given residual, and readers of the sum read that."""
    marked, _ = quantizer(key)
    x, residual, weight = random(ROWS, HIDDEN), random(ROWS, HIDDEN, seed=2), random(HIDDEN, seed=1)

    def function(x, residual, weight):
        y, added = add_norm(x, residual, weight)
        return *marked(y), added

    module, names = piece(function, x, residual, weight, donated=[1])
    assert len(called(names)) == 1 and "aten.clone.default" not in names
    assert str(auto_functionalized) not in names
    given, wanted = residual.clone(), residual.clone()
    *found, added = module(x, given, weight)
    assert added.data_ptr() == given.data_ptr()
    same([*found, added], [*expected(key, x, weight, wanted), wanted])


def layers(count: int, marked):
    """Return a chain of layers, each a norm with a residual and a GEMM."""

    def function(x, residual, weight, product):
        for _ in range(count):
            y, residual = add_norm(x, residual, weight)
            values, scale = marked(y)
            x = (values.bfloat16() * scale.bfloat16()) @ product
        return x, residual

    return function


def test_residuals_are_updated_in_place_through_all_layers():
    marked, _ = quantizer(KEYS[1])
    x, residual, weight = random(ROWS, HIDDEN), random(ROWS, HIDDEN, seed=2), random(HIDDEN, seed=1)
    product = random(HIDDEN, HIDDEN, seed=3) / 16
    function = layers(3, marked)
    module, names = piece(function, x, residual, weight, product, donated=[1])
    assert called(names) == ["rms_norm_dynamic_per_token_quant"] * 3 and "aten.clone.default" not in names
    given = residual.clone()
    result, added = module(x, given, weight, product)
    assert added.data_ptr() == given.data_ptr()
    wanted, now = x, residual.clone()
    for _ in range(3):
        values, scale = expected(KEYS[1], wanted, weight, now)
        wanted = (values.bfloat16() * scale.bfloat16()) @ product
    same([result, added], [wanted, now])


READ_LATER = {
    "read again": lambda y, added, residual, marked: (*marked(y), added, residual + 1),
    "a view": lambda y, added, residual, marked: (*marked(y), added),
    "not given": lambda y, added, residual, marked: (*marked(y), added),
}


@pytest.mark.parametrize("why", READ_LATER)
def test_a_residual_that_is_not_ours_to_update(why):
    """It is read again, shares memory, or is an input that somebody holds: vLLM's norm serves."""
    marked, theirs = quantizer(KEYS[1])
    x, residual, weight = random(ROWS, HIDDEN), random(ROWS, 2 * HIDDEN, seed=2), random(HIDDEN, seed=1)

    def of(marked):
        def function(x, wide, weight):
            residual = wide[:, :HIDDEN] if why == "a view" else wide
            y, added = add_norm(x, residual, weight)
            return READ_LATER[why](y, added, residual, marked)

        return function

    residual = residual if why == "a view" else residual[:, :HIDDEN].contiguous()
    module, names = piece(of(marked), x, residual, weight, donated=[] if why == "not given" else [1])
    assert called(names) == []
    before = residual.clone()
    same(module(x, residual, weight), of(theirs)(x, residual, weight))
    assert torch.equal(residual, before)


def test_a_residual_that_was_read_before():
    """A model's first layer reads it in its first norm."""
    marked, _ = quantizer(KEYS[1])
    x, weight = random(ROWS, HIDDEN), random(HIDDEN, seed=1)

    def function(x, weight):
        x = x @ torch.eye(HIDDEN, dtype=x.dtype)
        first, scale = marked(norm(x, weight))
        y, added = add_norm(first.bfloat16() * scale.bfloat16(), x, weight)
        return *marked(y), added

    module, names = piece(function, x, weight)
    assert called(names) == ["rms_norm_dynamic_per_token_quant"] * 2
    values, scale = expected(KEYS[1], x, weight)
    now = x.clone()
    same(module(x, weight), [*expected(KEYS[1], values.bfloat16() * scale.bfloat16(), weight, now), now])


def readers(marked, other):
    """Return other readers of a norm, by the reason that leaves the norm to vLLM."""
    return {
        "another reader": lambda y: (*marked(y), y + 1),
        "its caller": lambda y: (*marked(y), y),
        "two quantizations": lambda y: (*marked(y), *other(y)),
        "pointwise": lambda y: (y * 2,),
    }


@pytest.mark.parametrize("what", readers(None, None))
def test_a_norm_that_others_read_is_vllms(what):
    """The quantizations are vLLM's as well, as traced without the plugin."""
    (marked, theirs), (other, others) = quantizer(KEYS[1]), quantizer(KEYS[0])
    x, weight = random(ROWS, HIDDEN), random(HIDDEN, seed=1)
    table = select_decomp_table()
    module, names = piece(lambda x, weight: readers(marked, other)[what](norm(x, weight)), x, weight, table=table)
    _, wanted = piece(lambda x, weight: readers(theirs, others)[what](norm(x, weight)), x, weight, table=table)
    assert called(names) == [] and sorted(names) == sorted(wanted)
    same(module(x, weight), readers(theirs, others)[what](norm(x, weight)))


@pytest.mark.parametrize("reads", ["product", "caller", "cast"])
def test_an_unquantized_norm_is_replaced_before_an_opaque_reader(reads):
    """It is the plugin's if its reader is opaque to the compiler."""
    x, weight, product = random(ROWS, HIDDEN), random(HIDDEN, seed=1), random(HIDDEN, 8, seed=3)
    how = {"product": lambda y, p: y @ p, "caller": lambda y, p: y, "cast": lambda y, p: y.float() @ p.float()}
    module, names = piece(lambda x, w, p: how[reads](norm(x, w), p), x, weight, product)
    assert called(names) == ([] if reads == "cast" else ["rms_norm"])
    torch.testing.assert_close(module(x, weight, product), how[reads](norm(x, weight), product), atol=0.3, rtol=0.02)


@pytest.mark.parametrize("gates", ["product", "quantized", "mx", "pointwise"])
def test_activations_are_replaced_before_gemms_and_quantizations(gates):
    """It is replaced alone before a GEMM, and with its quantization, and left if the compiler fuses it."""
    (marked, _), act = quantizer(MX if gates == "mx" else KEYS[2]), markers.of_activation(SiluAndMul.forward_native)
    x, product = random(ROWS, 2 * HIDDEN), random(HIDDEN, 8, seed=3)
    how = {"product": lambda y, p: (y @ p,), "pointwise": lambda y, p: (y + 1,)}
    how |= dict.fromkeys(("quantized", "mx"), lambda y, p: marked(y))
    module, names = piece(lambda x, p: how[gates](act(x), p), x, product)
    plugin = {"product": "silu_and_mul", "quantized": "silu_and_mul_per_block_quant", "mx": "silu_and_mul_mxfp8_quant"}
    assert called(names) == ([] if gates == "pointwise" else [plugin[gates]])
    exact = {
        "product": lambda: (ops.silu_and_mul(x) @ product,),
        "quantized": lambda: ops.silu_and_mul_per_block_quant(x, torch.float8_e4m3fn, 128),
        "mx": lambda: ops.silu_and_mul_mxfp8_quant(x),
        "pointwise": lambda: (SiluAndMul.forward_native(x) + 1,),
    }
    same(module(x, product), exact[gates]())


GATED = {"alone": True, "read again": False, "with a bias": False, "another quantization": False, "switched off": False}


@pytest.mark.parametrize("how", GATED)
def test_a_linear_whose_result_an_activation_alone_reads(how, monkeypatch, choices):
    """One op replaces three, and is served as the two that it replaces."""

    class Baseline:
        config, quant_fp8 = "of a test", Fake(static=False)
        apply_scaled_mm = staticmethod(lambda *, A, B, out_dtype, As, Bs, bias, output_shape: wanted(A, B, bias))

    def wanted(a, b, bias):
        return ops.scaled_mm.reference(a, b, one, one, torch.bfloat16, bias)

    monkeypatch.setattr(linear_base, "_kernels", {})
    monkeypatch.setattr(kernel_selection, "choices", {})
    name, one, at = linear_base.register_baseline(Baseline()), torch.ones(1), torch.full((1,), 0.5)
    (marked, _), act = quantizer(KEYS[how == "another quantization"]), markers.of_activation(SiluAndMul.forward_native)
    a, weight = (random(rows, HIDDEN, seed=rows).to(torch.float8_e4m3fn) for rows in (ROWS, 128))
    bias = random(128)
    if how == "switched off":
        choices.on = frozenset(("norm",))

    def function(a, weight, scale, one, bias):
        bias = bias if how == "with a bias" else None
        both = torch.ops.vllm_rocm_ops.scaled_linear(a, weight.t(), one, one, bias, torch.bfloat16, False, name)
        return *marked(act(both), scale), *([both] if how == "read again" else [])

    module, names = piece(function, a, weight, at, one, bias)
    assert ("gated_linear" in called(names)) is GATED[how] and ("scaled_linear" in called(names)) is not GATED[how]
    both = wanted(a, weight.t(), bias if how == "with a bias" else None)
    values = module(a, weight, at, one, bias)[0]
    if how != "another quantization":
        same([values], [ops.silu_and_mul_quant(both, at, torch.float8_e4m3fn)])


@pytest.mark.parametrize("key", [*KEYS, MX])
def test_a_weight_of_one_plus(key):
    """Gemma has such weights, which vLLM's graph computes in float32."""
    marked, _ = quantizer(key)
    x, weight = random(ROWS, HIDDEN), random(HIDDEN, seed=1)
    module, names = piece(lambda x, weight: marked(norm(x, weight.float() + 1.0)), x, weight)
    assert len(called(names)) == 1 and "aten.add.Tensor" not in names
    same(module(x, weight), expected(key, x, weight, one_plus_weight=True))


PATTERNS = {
    "a norm": lambda x, held, w, marked: marked(norm(x, w)),
    "a norm alone": lambda x, held, w, marked: norm(x, w) @ w[:, None],
    "a residual": lambda x, held, w, marked: marked(add_norm(x, held, w)[0]),
    "one plus": lambda x, held, w, marked: marked(norm(x, w.float() + 1.0)),
    "one plus and a residual": lambda x, held, w, marked: marked(add_norm(x, held, w.float() + 1.0)[0]),
    "a sum": lambda x, held, w, marked: marked(add_norm(x * 2.5 + x.flip(0), held, w)[0]),
    "a plain sum": lambda x, held, w, marked: marked(add_norm(x + x.flip(0), held, w)[0]),
    "an activation": lambda x, held, w, marked: marked(silu_and_mul(x)),
}
"""A function for each pattern of the pass, with its constants."""


def silu_and_mul(x):
    return markers.of_activation(SiluAndMul.forward_native)(torch.cat((x, x.flip(1)), 1))


def constants(graph: torch.fx.Graph):
    """Yield what changes a constant of a graph's calls: the call's place, an argument's place or name, and a value."""
    for place, node in enumerate(graph.nodes):
        if node.op == "call_function" and "vllm" not in str(node.target) or "norm" in str(node.target):
            for at, value in enumerate(node.args):
                if isinstance(value, int | float) and not isinstance(value, bool):
                    yield place, at, value * 3 + 1
            if node.target is torch.ops.aten.add.Tensor:
                yield place, "alpha", 3.0


def values_of(results) -> torch.Tensor:
    """Return what results represent: values, or quantized ones times their scales."""
    first, *rest = results if isinstance(results, tuple | list) else (results,)
    return first.float() * rest[0].float().repeat_interleave(first.shape[1] // rest[0].shape[-1], -1) if rest else first


@pytest.mark.parametrize("what", PATTERNS)
def test_a_pattern_with_another_constant_is_another(what):
    """With each constant of a pattern changed, the graph computes what it then says: it does not match, or takes the value."""
    marked, _ = quantizer(KEYS[1])
    given = random(ROWS, HIDDEN), random(ROWS, HIDDEN, seed=2), random(HIDDEN, seed=1)

    def function(x, held, weight):
        return PATTERNS[what](x, held, weight, marked)

    traced, changes, plain = make_fx(function, {}, "fake")(*given), [None], []
    changes += constants(traced.graph)
    for change in changes:

        def edit(graph, change=change):
            if change is not None:
                place, at, value = change
                node = [*graph.nodes][place]
                if isinstance(at, str):
                    node.kwargs = {**node.kwargs, at: value}
                else:
                    node.update_arg(at, value)
            copy = torch.fx.Graph()
            copy.output(copy.graph_copy(graph, {}))
            plain.append(torch.fx.GraphModule(traced, copy))

        try:
            module, names = piece(function, *given, donated={1}, edit=edit)
            wanted = values_of(plain[-1](*(x.clone() for x in given)))
        except (IndexError, RuntimeError):
            continue  # a constant that makes no valid call, as another dimension
        assert called(names) or change is not None
        found = values_of(module(*(x.clone() for x in given)))
        assert (found - wanted).abs().mean() < 0.03 * wanted.abs().mean(), change


VLLMS = {
    "a part of the row": lambda x, w: norm(x, w, EPSILON, HIDDEN // 2),
    "no weight": lambda x, w: norm(x, None),
    "another type": lambda x, w: norm(x, w.half()),
    "columns apart": lambda x, w: norm(torch.cat((x, x), 1)[:, ::2], w),
    "behind a norm": lambda x, w: norm(norm(x, w) * 2, w),
}
QUANTIZATIONS = {
    "scales of powers of two": (KEYS[2], {"use_ue8m0": True}),
    "more rows than the input": (KEYS[0], {"num_token_padding": 3}),
    "aligned scales": (KEYS[2], {"tma_aligned_scales": True}),
}


@pytest.mark.parametrize("what", [*VLLMS, *QUANTIZATIONS])
def test_norms_and_quantizations_that_are_vllms(what):
    key, how = QUANTIZATIONS.get(what, (KEYS[1], {}))
    (marked, theirs), normed = quantizer(key, **how), VLLMS.get(what, norm)
    x, weight = random(ROWS, HIDDEN), random(HIDDEN, seed=1)
    module, names = piece(lambda x, weight: marked(normed(x, weight)), x, weight)
    assert called(names) == []
    same(module(x, weight), theirs(normed(x, weight)))


def test_mx_bits_are_those_of_vllms_quantization():
    """They equal vLLM's quantization after the plugin's norm, also for groups of zeros and of the smallest numbers."""
    (quantize, _), x, weight = quantizer(MX), random(ROWS, HIDDEN), random(HIDDEN, seed=1)
    weight[:32], weight[32:64] = 0.0, 1e-38
    same(ops.rms_norm_mxfp8_quant(x, weight, EPSILON), quantize(ops.rms_norm(x, weight, EPSILON)))
    exact = torch.tensor([448 / 8, 450 * 8, 1.75]).repeat_interleave(32).bfloat16().expand(2, -1)
    gate = torch.full_like(exact, 100.0)  # its silu is itself
    same(ops.silu_and_mul_mxfp8_quant(torch.cat((gate, exact), 1)), quantize(exact * gate))


@pytest.mark.parametrize("how", [{"swizzled": True}, {"aligned": 64}], ids=str)
def test_mx_scales_in_another_order_are_vllms(how):
    """Only the norm is the plugin's before vLLM's quantization, as before any op that is opaque to the compiler."""
    (quantize, _), x, weight = quantizer(MX, **how), random(ROWS, HIDDEN), random(HIDDEN, seed=1)
    module, names = piece(lambda x, weight: quantize(norm(x, weight)), x, weight)
    assert called(names) == ["rms_norm"] and "vllm.mxfp8_quantize.default" in names
    same(module(x, weight), quantize(ops.rms_norm(x, weight, EPSILON)))


@pytest.mark.parametrize("made", [{"off": frozenset({"rms_norm_mxfp8_quant"})}, {"on": frozenset({"activation"})}])
def test_mx_norms_that_are_off(choices, made):
    """vLLM's passes do not fuse MX-FP8, so the plugin's is on by default, unless it is wrong here or its seam is off."""
    quantize, _ = quantizer(MX)
    x, weight = random(ROWS, HIDDEN), random(HIDDEN, seed=1)

    def function(x, weight):
        return quantize(norm(x, weight))

    _, names = piece(function, x, weight, fuse_norm_quant=True, fuse_act_quant=True)
    assert called(names) == ["rms_norm_mxfp8_quant"]
    vars(choices).update(made)
    _, names = piece(function, x, weight)
    assert called(names) == (["rms_norm"] if "off" in made else []) and "vllm.mxfp8_quantize.default" in names


@pytest.mark.parametrize("reads", ["product", "pointwise", "another quantization"])
def test_an_mx_norm_with_other_readers(reads):
    """The plugin's plain norm serves if all readers are opaque to the compiler, else vLLM's."""
    (quantize, _), (marked, _) = quantizer(MX), quantizer(KEYS[1])
    how = {"product": lambda y, p: (y @ p,), "pointwise": lambda y, p: (y * 2,)}
    how["another quantization"] = lambda y, p: marked(y)

    def function(x, weight, product):
        y = norm(x, weight)
        return *quantize(y), *how[reads](y, product)

    x, weight, product = random(ROWS, HIDDEN), random(HIDDEN, seed=1), random(HIDDEN, 8, seed=3)
    module, names = piece(function, x, weight, product)
    assert called(names) == (["rms_norm"] if reads == "product" else [])
    assert names.count("vllm.mxfp8_quantize.default") == 1
    module(x, weight, product)


PATTERN, RESIDUAL = (pattern(f"rms_norm_dynamic_per_token_quant {HIDDEN} bfloat16{adds}") for adds in ("", " residual"))


@pytest.mark.parametrize(
    ("made", "passes", "plugin"),
    [
        ({}, {}, True),
        ({}, {"fuse_norm_quant": True}, False),
        ({}, {"fuse_act_quant": True}, True),
        ({"decisions": {PATTERN: True}}, {"fuse_norm_quant": True}, True),
        ({"decisions": {PATTERN: False}}, {}, False),
        ({"decisions": {RESIDUAL: False}}, {}, False),
        ({"decisions": {PATTERN: True, RESIDUAL: False}}, {}, True),
        ({"off": frozenset({"rms_norm_dynamic_per_token_quant"})}, {}, False),
        ({"off": frozenset({"rms_norm_per_block_quant"})}, {}, True),
        ({"on": frozenset({"activation"})}, {}, False),
    ],
)
def test_patterns_are_replaced_as_decided(choices, made, passes, plugin):
    """Choices are by pattern; a first norm follows those with a residual. The compile cache tells choices apart."""
    before = rewrite.Fusion(get_current_vllm_config()).uuid()
    vars(choices).update(made)
    (marked, theirs), x, weight = quantizer(KEYS[1]), random(ROWS, HIDDEN), random(HIDDEN, seed=1)
    module, names = piece(lambda x, weight: marked(norm(x, weight)), x, weight, **passes)
    assert bool(called(names)) is plugin
    same(module(x, weight), expected(KEYS[1], x, weight) if plugin else theirs(norm(x, weight)))
    assert (rewrite.Fusion(get_current_vllm_config()).uuid() == before) is (made == {})


@pytest.mark.parametrize(("epsilon", "reduced"), itertools.product((1e-6, 1e-4), (True, False)))
@pytest.mark.parametrize("key", [None, *KEYS])
def test_what_vllm_fuses_with_an_all_reduce_is_vllms(choices, key, epsilon, reduced):
    """It is a norm after an all-reduce, with an epsilon of vLLM's patterns, alone or with one of their quantizations."""
    choices.all_reduced = frozenset((None, quant_utils.kFp8Dynamic128Sym))
    marked = (lambda y: (y,)) if key is None else quantizer(key)[0]
    x, weight = random(ROWS, HIDDEN), random(HIDDEN, seed=1)

    def function(x, weight):
        x = torch.ops.vllm_rocm_ops_tests.all_reduce(x) if reduced else x
        return marked(norm(x, weight, epsilon))

    _, names = piece(function, x, weight)
    names = [name for name in names if "all_reduce" not in name]
    theirs = reduced and epsilon == 1e-6 and key in (None, KEYS[2])
    assert (called(names) == []) is theirs


LIBRARY = torch.library.Library("vllm_rocm_ops_tests", "FRAGMENT")
LIBRARY.define("all_reduce(Tensor x) -> Tensor")
LIBRARY.impl("all_reduce", torch.clone, "CompositeExplicitAutograd")
LIBRARY.define("quantize(Tensor x, Tensor! out) -> ()")
LIBRARY.impl("quantize", lambda x, out: (out.copy_(x.clamp(-448, 448).to(out.dtype)), None)[1], "CPU")
LIBRARY.impl("quantize", lambda x, out: None, "Meta")


def test_equal_markers_are_traced_once(monkeypatch):
    """A model has them in every layer."""
    traced, trace = [], markers.trace
    monkeypatch.setattr(markers, "trace", lambda *given: traced.append(given) or trace(*given))
    (marked, theirs), (other, others), x = quantizer(KEYS[1]), quantizer(KEYS[2]), random(ROWS, HIDDEN)

    def function(marked, other):
        return lambda x: [part for n in range(3) for part in (*marked(x + n), *other(x + n), *marked((x + n)[:2]))]

    module, names = piece(function(marked, other), x)
    assert called(names) == [] and len(traced) == 3
    same(module(x), function(theirs, others)(x))


def test_a_scale_that_is_computed_behind_the_norm():
    """The plugin's op runs after both, unless something reads the residual between them."""
    x, residual, weight = random(ROWS, HIDDEN), random(ROWS, HIDDEN, seed=2), random(HIDDEN, seed=1)
    (marked, _), scale = quantizer(KEYS[0]), torch.ones(1)

    def function(x, residual, weight, scale):
        y, added = add_norm(x, residual, weight)
        return *marked(y, scale * 0.02), added

    def reads(x, residual, weight, scale):
        y, added = add_norm(x, residual, weight)
        return added * 2, *marked(y, scale * 0.02), added

    for one, plugin in ((function, ["fused_add_rms_norm_static_fp8_quant"]), (reads, [])):
        module, names = piece(one, x, residual, weight, scale, donated=[1])
        assert called(names) == plugin
        module(x, residual.clone(), weight, scale)


def test_a_kernel_that_writes_its_argument_is_functional_again():
    """vLLM's passes expect such a graph."""

    def theirs(x, scale, bound=None):
        out = torch.empty_like(x, dtype=torch.float8_e4m3fn)
        torch.ops.vllm_rocm_ops_tests.quantize(x, out)
        return out, scale

    quant = input_quant_fp8.QuantFP8(True, quant_utils.GroupShape.PER_TENSOR, compile_native=False, num_token_padding=3)
    marked = markers.of_quantization(quant, theirs)
    x, scale = random(ROWS, HIDDEN), torch.ones(1)
    module = make_fx(lambda x, scale: marked(x, scale)[0], tracing_mode="fake")(x, scale)
    [marker] = module.graph.find_nodes(op="call_function", target=markers.QUANTIZATION)
    with config.patch(enable_auto_functionalized_v2=False):  # as vLLM has it
        markers.lower(marker, {})
    [node] = module.graph.find_nodes(op="call_function", target=auto_functionalized)
    assert node.args[0] == torch.ops.vllm_rocm_ops_tests.quantize.default
    module.recompile()
    assert torch.equal(module(x, scale).float(), theirs(x, scale)[0].float())
