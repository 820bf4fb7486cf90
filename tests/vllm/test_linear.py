"""Test the plugin's linear kernels in vLLM: their results, and the calls they leave to the baseline."""

import pathlib
import re

import frames
import pytest
import torch
from fakes import Fake, by_reference, decide, parameter, plugin_wins_up_to, time_choices
from formats import CHANNEL, LINEARS, TENSOR
from linears import CHOOSE, FEW, MANY, TABLES, ask_for_aiter, close, hold, random, require_products, require_sizes_won
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode
from vllm import _aiter_ops
from vllm.config import get_current_vllm_config
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear.mxfp8 import rocm_native
from vllm.model_executor.kernels.linear.mxfp8.emulation import EmulationMxfp8LinearKernel
from vllm.model_executor.kernels.linear.mxfp8.rocm_native import RocmDotScaledMxfp8LinearKernel
from vllm.model_executor.kernels.linear.scaled_mm import Fp8BlockScaledMMLinearKernel, FP8ScaledMMLinearKernel
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.fusion.quant_activation import get_input_quant_key
from vllm.model_executor.layers.quantization.fp8 import Fp8LinearMethod
from vllm.model_executor.utils import weights_already_processed
from vllm.platforms import current_platform

import vllm_rocm_ops
from vllm_rocm_ops import ops
from vllm_rocm_ops.core import archs, launch
from vllm_rocm_ops.core.stats import fallbacks
from vllm_rocm_ops.emulator import Emulator
from vllm_rocm_ops.ops.shared.weight_layout import plain_weight, shuffle_weight
from vllm_rocm_ops.vllm import seam
from vllm_rocm_ops.vllm.graph import fused_quant
from vllm_rocm_ops.vllm.guards import compile_cache
from vllm_rocm_ops.vllm.linear import base as linear_base
from vllm_rocm_ops.vllm.linear import block_scaled_linear, mxfp8_linear, scaled_linear, unquantized_linear, weight_order
from vllm_rocm_ops.vllm.selection import kernel_selection, kernel_timing

N, K = 256, 256
FP8 = torch.float8_e4m3fn


pytestmark = pytest.mark.usefixtures("configuration")


class Baseline:
    """The base of vLLM's kernels here: results are zeros, calls are in `calls`, weights prepared as in vLLM's."""

    def apply_scaled_mm(self, **arguments):
        self.calls.append(arguments)
        return torch.zeros(arguments["output_shape"], dtype=arguments["out_dtype"])

    def apply_block_scaled_mm(self, **arguments):
        self.calls.append(arguments)
        return torch.zeros(arguments["A"].shape[0], N, dtype=self.config.out_dtype)


class MxBaseline(Baseline):
    """A kernel that merges scales, as vLLM's kernel for gfx950 does when 32 rows share one."""

    def process_weights_after_loading(self, layer):
        layer.weight_scale = parameter(layer.weight_scale.data[::32].contiguous())

    def apply_weights(self, layer, x, bias=None):
        self.calls.append({"B": layer.weight, "bias": bias})
        return torch.zeros(x.shape[0], N, dtype=x.dtype)


KINDS = {
    **{kind: LINEARS[kind] for kind in ("static", "dynamic", "fbgemm", "block", "mxfp8")},
    "channel": LINEARS["per token"],
    "channel-static": LINEARS["per token"]._replace(keys=(CHANNEL, TENSOR)),
}
OPS = {kind: one.op for kind, one in KINDS.items()}


@pytest.fixture
def make(monkeypatch):
    """Return a function that makes a layer with its kernel, which may keep a baseline, and the exact weight in fp32."""
    bases = {"block": Fp8BlockScaledMMLinearKernel, "mxfp8": RocmDotScaledMxfp8LinearKernel}
    monkeypatch.setattr(linear_base, "_kernels", {})
    monkeypatch.setenv("VLLM_ROCM_OPS_MEASURE", "1000")  # the references of a busy CPU take their time

    def make(kind: str, baseline: type | None = None, k: int = K, marks: tuple[str, ...] = ()):
        stand_in = MxBaseline if baseline and kind == "mxfp8" else baseline
        hold(monkeypatch, stand_in, bases.get(kind, FP8ScaledMMLinearKernel))
        layer, weight = torch.nn.Module(), random(N, k).to(FP8)
        vars(layer).update(dict.fromkeys(marks, True))
        layer.input_scale = torch.tensor(0.02) if "static" in kind else None
        layer.input_scale_ub = None
        layer.weight = parameter(weight if kind in bases else weight.t())
        if kind == "mxfp8":
            scale = (120 + torch.arange(N // 32 * k // 32) % 5).view(N // 32, -1).repeat_interleave(32, 0)
            layer.weight_scale = parameter(scale.byte())
            scale = torch.exp2(layer.weight_scale.float() - 127).repeat_interleave(32, 1)
        elif kind == "block":
            layer.weight_scale_inv = parameter(random(N // 128, -(-k // 128)).abs() / 8)
            scale = layer.weight_scale_inv.repeat_interleave(128, 0).repeat_interleave(128, 1)[:, :k]
        else:
            per_tensor = KINDS[kind].keys[0] == TENSOR
            layer.weight_scale = scale = parameter(torch.tensor(0.01) if per_tensor else random(N, 1).abs() / 8)
        kernel, exact = KINDS[kind].kernel(N, k), weight.float() * scale
        assert type(kernel).__name__.startswith("RocmOps")
        kernel.process_weights_after_loading(layer)
        return layer, kernel, exact

    return make


@pytest.fixture
def shuffles(monkeypatch):
    """Have the plugin shuffle every weight, as if it had won everywhere."""
    monkeypatch.setenv("VLLM_ROCM_OPS_SHUFFLE", "1")
    monkeypatch.setattr(linear_base, "won_everywhere", lambda key: True)


def emulate(layer, kernel, tokens: int = FEW, exact: torch.Tensor | None = None, bias=None) -> torch.Tensor:
    """Return a kernel's output for some tokens on an emulated gfx950, `close` to the exact weight's, if given."""
    x = random(tokens, K).bfloat16()
    with launch.executor(Emulator("gfx950")):
        output = kernel.apply_weights(layer, x, bias)
    if exact is not None:
        close(output, x, exact)
    return output


@pytest.mark.parametrize("kind", KINDS)
def test_products(make, kind):
    """Without a kernel of vLLM's, the op serves any number of tokens, in any number of dimensions, with a bias."""
    require_products(*make(kind), OPS[kind], close)


@pytest.mark.parametrize("kind", KINDS)
def test_few_tokens_are_served_and_many_are_vllms(make, kind):
    """The baseline gets the arguments it would get without the plugin, of which nothing else runs."""
    layer, kernel, exact = make(kind, Baseline)
    emulate(layer, kernel, exact=exact)
    assert list(vllm_rocm_ops.stats()) == [OPS[kind]] and not kernel.baseline.calls
    vllm_rocm_ops.reset_stats()
    output = emulate(layer, kernel, MANY)
    assert output.shape == (MANY, N) and not output.any()
    assert vllm_rocm_ops.stats() == {}
    [call] = kernel.baseline.calls
    assert call["B"] is layer.weight


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("arch", [None, "gfx942", "gfx950"])
def test_what_our_kernels_do_not_take_is_vllms(make, kind, arch, monkeypatch):
    """No reference runs if vLLM has a kernel: without code, for e4m3fn on gfx942, or with the op off on gfx950."""
    if arch == "gfx950":
        monkeypatch.setenv("VLLM_ROCM_OPS_DISABLE", OPS[kind])
    layer, kernel, _ = make(kind, Baseline)
    with launch.executor(arch and Emulator(arch)):
        kernel.apply_weights(layer, random(FEW, K).bfloat16())
    assert len(kernel.baseline.calls) == 1
    assert {op: [*reasons.values()] for op, reasons in fallbacks().items()} == ({OPS[kind]: [1]} if arch else {})
    assert vllm_rocm_ops.stats().keys() == fallbacks().keys()


def test_what_our_op_refuses_is_vllms(make):
    """A bias of another dtype breaks the op's contract, but perhaps not the contract of vLLM's kernel."""
    layer, kernel, _ = make("channel", Baseline)
    emulate(layer, kernel, bias=torch.zeros(N))
    [call] = kernel.baseline.calls
    assert call["bias"].dtype == torch.float32
    assert fallbacks() == {"scaled_mm": {"the arguments break the op's contract": 1}}


@pytest.mark.parametrize("kind", ["static", "channel", "block"])
def test_quantized_input_is_taken(make, kind):
    """A layer states the quantized input it accepts, and such an input is not quantized again."""
    layer, kernel, exact = make(kind, Baseline)
    key = get_input_quant_key(layer)
    assert key == kernel.config.activation_quant_key
    gate_up, bias = random(FEW, 2 * K).bfloat16(), 0.25 * random(N).bfloat16()
    quantized = fused_quant.silu_and_mul(layer, key, gate_up)
    vllm_rocm_ops.reset_stats()
    with launch.executor(Emulator("gfx950")):
        output = kernel.apply_weights(layer, quantized, bias)
    assert list(vllm_rocm_ops.stats()) == [OPS[kind]]
    close(output - bias, torch.ops.vllm_rocm_ops.silu_and_mul(gate_up), exact)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("wants", ["row-major", "column-major"])
def test_vllms_kernel_reads_scales_in_its_order(make, wants, compiled):
    """The op reads either order, which its layer says, and a launch before may have written rows for it."""
    layer, kernel, _ = make("block", Baseline)
    kernel.quant_fp8.column_major_scales = wants == "column-major"
    kernel.process_weights_after_loading(layer)
    assert layer.vllm_rocm_ops_takes_rows
    assert block_scaled_linear.takes_rows(kernel.baseline) is (wants == "row-major")
    values, rows = random(MANY, K).to(FP8), random(MANY, K // 128).abs()
    for scales in (rows, rows.t().contiguous().t())[: 1 + (wants == "column-major")]:
        given = values, layer.weight, scales, layer.weight_scale_inv
        if compiled:
            torch.ops.vllm_rocm_ops.block_scaled_linear(*given, torch.bfloat16, kernel.baseline_name)
        else:
            kernel.apply_block_scaled_mm(*given)
        read = kernel.baseline.calls[-1]["As"]
        assert read.equal(rows) and read.stride(0 if wants == "column-major" else 1) == 1
        assert (read.data_ptr() == scales.data_ptr()) is (scales.stride() == read.stride())


@pytest.mark.parametrize("kind", ["channel", "block"])
def test_batch_invariant_layers_take_no_quantized_input(make, kind, monkeypatch):
    """vLLM's path through them reads the input as a tensor."""
    layer, kernel, _ = make(kind, Baseline)
    del layer._input_quant_key
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    kernel.process_weights_after_loading(layer)
    assert get_input_quant_key(layer) is None


def leaves(change, in_place: bool = False) -> type:
    """Return a kernel that changes the weight, whose rows are the columns of the parameter, when it prepares it."""

    class Leaving(Baseline):
        def process_weights_after_loading(self, layer):
            if in_place:
                layer.weight.data.copy_(change(layer.weight.data))
            else:
                layer.weight = parameter(change(layer.weight.data))

    return Leaving


def in_fragments(weight: torch.Tensor) -> torch.Tensor:
    return shuffle_weight(weight.t()).view(weight.t().shape)


Shuffling = leaves(in_fragments)  # as AITER's kernels for tuned shapes
ShufflingInPlace = leaves(lambda weight: in_fragments(weight).t(), in_place=True)
"""As AITER's kernel for hipBLASLt: vLLM 0.33's `replace_parameter` copies what has the parameter's shape and strides."""
Untransposing = leaves(torch.Tensor.t)  # as AITER's kernel for any shape
Repacking = leaves(lambda weight: weight.t().flip(0))  # in an unknown order
RepackingInPlace = leaves(lambda weight: weight.flip(1), in_place=True)


@pytest.mark.parametrize("baseline", [Shuffling, ShufflingInPlace, Untransposing, Repacking, RepackingInPlace])
def test_the_weight_is_read_as_vllms_kernel_left_it(make, baseline):
    """It is read in rows, in fragments or, in any other order, not at all."""
    layer, kernel, exact = make("channel", baseline)
    is_unknown = baseline in (Repacking, RepackingInPlace)
    emulate(layer, kernel, exact=None if is_unknown else exact)
    assert len(kernel.baseline.calls) == is_unknown
    emulate(layer, kernel, MANY)
    assert all(call["B"] is layer.weight or call["B"].equal(layer.weight) for call in kernel.baseline.calls)


@pytest.mark.parametrize("kind", ["static", "channel", "block"])
@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_weights_are_shuffled_only_for_kernels_that_are_there(make, kind, arch, shuffles, monkeypatch):
    """vLLM's kernels could not serve in their place."""
    monkeypatch.setattr(seam, "arch_here", lambda _: arch)
    monkeypatch.setattr(f"{__name__}.FP8", archs.named(arch).fp8_dtype)
    assert make(kind, Baseline)[1].baseline is None
    monkeypatch.setenv("VLLM_ROCM_OPS_DISABLE", OPS[kind])
    assert make(kind, Baseline)[1].baseline is not None


def tensors_of(thing, seen: set[int]) -> list[torch.Tensor]:
    """Yield all tensors that an object keeps, also in nested attributes."""
    if id(thing) in seen or isinstance(thing, type):
        return []
    seen.add(id(thing))
    if isinstance(thing, torch.Tensor):
        return [thing]
    parts = thing if isinstance(thing, (list, tuple)) else getattr(thing, "__dict__", thing)
    parts = parts.values() if isinstance(parts, dict) else parts if isinstance(parts, (list, tuple)) else ()
    return [tensor for part in parts for tensor in tensors_of(part, seen)]


@pytest.mark.parametrize(
    ("kind", "baseline"), [("channel", None), ("channel", Baseline), ("block", Baseline), ("mxfp8", Baseline)]
)
def test_layers_keep_nothing_but_their_weights(make, kind, baseline):
    """No copy of a weight outlives its preparation, and equal layers keep one baseline."""
    layers = [make(kind, baseline)[:2] for _ in range(3)]
    kept = [tensor for tensor in tensors_of(layers, set()) if tensor.numel() >= N * K]
    assert [id(tensor) for tensor in kept] == [id(layer.weight) for layer, _ in layers]
    assert len(linear_base._kernels) == (baseline is not None)


class Storages(TorchDispatchMode):
    """A mode that records the largest allocated storage."""

    largest = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        given = {each.untyped_storage().data_ptr() for each in arguments if isinstance(each, torch.Tensor)}
        output = function(*arguments, **(keywords or {}))
        if isinstance(output, torch.Tensor) and output.untyped_storage().data_ptr() not in given:
            self.largest = max(self.largest, output.untyped_storage().nbytes())
        return output


@pytest.mark.parametrize("padding", [0, 16])
def test_no_weight_is_held_twice(padding, monkeypatch):
    """Detecting and changing its order needs no second copy, and the weight keeps its address, without its padding."""
    monkeypatch.setattr(weight_order, "PART_BYTES", 32 * K)
    weight = torch.zeros(N, K + padding, dtype=FP8)[:, :K].copy_(random(N, K))
    wanted = shuffle_weight(weight)
    with Storages() as storages:
        before = weight_order.Digest.of(weight)
        assert weight_order.order(weight.t(), before) == "plain"
        rows = weight_order.in_fragments(weight.t())
        assert weight_order.order(rows, before) == "fragments"
    assert storages.largest < weight.nbytes
    assert rows.data_ptr() == weight.data_ptr()
    assert torch.equal(weight_order.fragments_of(rows).float(), wanted.float())


def test_one_changed_byte_is_seen():
    """The byte may be anywhere, and so may a row or a column in another's place."""
    weight = random(N, K).to(FP8)
    before = weight_order.Digest.of(weight)
    for row, column in ((0, 0), (N - 1, K - 1), (37, 101)):
        changed = weight.clone()
        changed.view(torch.uint8)[row, column] ^= 1
        assert weight_order.order(changed, before) is None
    for axis in (0, 1):
        assert weight_order.order(weight.view(torch.uint8).roll(1, axis).view(FP8), before) is None


class PowersOfTwo(Baseline):
    """A kernel that leaves scales in e8m0, like vLLM's Triton kernel, which widens them in every call."""

    def process_weights_after_loading(self, layer):
        layer.weight_scale_inv = parameter(layer.weight_scale_inv.data.to(torch.float8_e8m0fnu))


def test_e8m0_scales_of_weights_are_widened_once(make):
    """This happens before the first call, for the plugin's kernel and vLLM's."""
    layer, kernel, _ = make("block", PowersOfTwo)
    scale = layer.weight_scale_inv
    assert scale.dtype == torch.float32 and scale.equal(scale.to(torch.float8_e8m0fnu).float())
    exact = layer.weight.float() * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:, :K]
    emulate(layer, kernel, exact=exact)
    emulate(layer, kernel, MANY)
    assert list(vllm_rocm_ops.stats()) == ["block_scaled_mm"]
    [call] = kernel.baseline.calls
    assert call["Bs"] is layer.weight_scale_inv


@pytest.mark.parametrize("kind", ["channel", "block"])
def test_weights_are_shuffled_on_request(make, kind, shuffles):
    """The plugin then serves every number of tokens; a weight that MLA or DeepSeek V4 reads stays as it is."""
    layer, kernel, exact = make(kind, Baseline)
    shape = layer.weight.shape
    rows = layer.weight if kind == "block" else layer.weight.t()
    assert kernel.baseline is None
    for tokens in (FEW, MANY):
        emulate(layer, kernel, tokens, exact)
    for mark in ("_cpu_skip_gemm_dispatch", "is_bmm"):
        layer, kernel, _ = make(kind, Baseline, marks=(mark,))
        plain = (layer.weight if kind == "block" else layer.weight.t()).data
        assert kernel.baseline is not None
        assert layer.weight.shape == shape
        assert torch.equal(shuffle_weight(plain).flatten().view(torch.uint8), rows.data.flatten().view(torch.uint8))


@pytest.mark.parametrize("kind", ["channel", "block"])
def test_weights_are_shuffled_where_ours_won_at_every_size(make, kind, monkeypatch):
    """An earlier start measured all sizes of this one, and its result still holds. The graph's cache key includes it."""
    monkeypatch.setattr(linear_base, "shuffled", set())
    scheduler = get_current_vllm_config().scheduler_config
    monkeypatch.setattr(scheduler, "max_num_batched_tokens", MANY)
    by_reference(monkeypatch, getattr(ops, OPS[kind]))
    kernel_selection.begin_recording()
    layer, kernel, _ = make(kind, Right)
    kernel.apply_weights(layer, random(MANY, K).bfloat16())
    monkeypatch.setenv("VLLM_ROCM_OPS_SHUFFLE", "1")

    def is_shuffled() -> bool:
        kernel_selection.invalidate()
        return make(kind, Right)[1].baseline is None

    path, before = kernel_selection.path_of(kernel_selection.machine()), compile_cache.fingerprint()
    kernel_timing.warm_up((), MANY, plugin_wins_up_to(MANY), lambda mine: [mine])
    assert is_shuffled()
    assert compile_cache.fingerprint() != before
    record = kernel_selection.read(path)
    [by_tokens] = record.shapes.values()
    for off, shapes in (
        ({OPS[kind]: "wrong"}, record.shapes),
        ({}, {}),
        ({}, {key: by_tokens | {64: kernel_selection.UNTIMED} for key in record.shapes}),
    ):
        kernel_selection.write(path, kernel_selection.Record(record.machine, off, shapes))
        assert not is_shuffled()
    kernel_selection.write(path, record)
    assert is_shuffled()
    scheduler.max_num_batched_tokens = MANY + 1
    assert not is_shuffled()
    scheduler.max_num_batched_tokens = MANY
    monkeypatch.setenv("VLLM_ROCM_OPS_MEASURE", "0")
    assert not is_shuffled()


def handed_on(layer: torch.nn.Module, kernel, marked: bool = True) -> tuple[torch.nn.Module, object]:
    """Return a layer and its kernel in a process that got prepared tensors from another, as from vLLM's weight cache."""
    names = filter(None, [getattr(kernel, "layer_param_names", None)])
    other, made = torch.nn.Module(), type(kernel)(kernel.config, *names)
    for name, weight in layer.named_parameters():
        other.register_parameter(name, parameter(weight.detach()))
    for name, buffer in layer.named_buffers() if marked else ():
        other.register_buffer(name, buffer.detach())
    other.input_scale_ub = None
    method = Fake(fp8_linear=made, act_q_static=False, use_marlin=False)
    with weights_already_processed():
        Fp8LinearMethod.process_weights_after_loading(method, other)
    return other, made


@pytest.mark.parametrize("shuffle", ["0", "1"])
@pytest.mark.parametrize(
    ("kind", "baseline"),
    [("channel", Baseline), ("channel", ShufflingInPlace), ("channel", Repacking), ("block", Baseline)],
)
def test_weights_that_another_process_prepared(make, kind, baseline, shuffle, shuffles, monkeypatch):
    """They are read in the order they were left in, and the layer states the quantized input it accepts."""
    monkeypatch.setenv("VLLM_ROCM_OPS_SHUFFLE", shuffle)
    layer, kernel, exact = make(kind, baseline)
    monkeypatch.setenv("VLLM_ROCM_OPS_SHUFFLE", "0")
    other, made = handed_on(layer, kernel)
    assert get_input_quant_key(other) == kernel.config.activation_quant_key
    assert (made.order, made.baseline is None) == (kernel.order, kernel.baseline is None)
    emulate(other, made, exact=None if baseline is Repacking else exact)
    assert baseline is not Repacking or len(made.baseline.calls) == 1


@pytest.mark.parametrize("kind", ["channel", "block"])
def test_weights_of_unknown_order_are_vllms(make, kind):
    """A process without the plugin does not record the order; nor does one that has not prepared them."""
    layer, kernel, _ = make(kind, Baseline)
    other, made = handed_on(layer, kernel, marked=False)
    assert made.order is None
    emulate(other, made)
    assert len(made.baseline.calls) == 1


@pytest.mark.parametrize("kind", ["channel", "block"])
def test_shuffled_weights_are_refused_by_other_kernels(make, kind, shuffles):
    """An engine whose seams are off does not read weights from a cache that are shuffled for the plugin."""
    layer, _, _ = make(kind, Baseline)
    with pytest.raises(RuntimeError, match="was shuffled with VLLM_ROCM_OPS_SHUFFLE=1, which Fake cannot"):
        weight_order.recall_order(Fake(), layer)


@pytest.mark.parametrize("baseline", [Baseline, ShufflingInPlace])
def test_weights_that_are_loaded_again(make, baseline, shuffles):
    layer, kernel, exact = make("channel", baseline)
    for _ in range(2):
        emulate(layer, kernel, exact=exact)
        layer.weight = parameter(random(N, K).to(FP8).t())
        kernel.process_weights_after_loading(layer)


def test_batch_invariance_is_left_to_vllm(monkeypatch):
    """The plugin's sums depend on the number of tokens."""
    assert linear_base.HasBaseline.is_supported() == (True, None)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert linear_base.HasBaseline.is_supported() == (False, "is not batch invariant")


@pytest.mark.parametrize("kind", ["channel", "block"])
def test_a_kernel_that_quantizes_its_input_is_not_kept(make, kind):
    """It quantizes in its own `apply_weights`, or behind the inherited one."""
    _, kernel, _ = make(kind, Baseline)
    baseline, base = type(kernel.baseline), type(kernel.baseline).__bases__[-1]
    assert linear_base.can_keep(baseline, base)[0]
    for own in ({"apply_input_quant": False}, {"apply_weights": lambda self, layer, x, bias=None: x}):
        possible, why = linear_base.can_keep(type("Other", (baseline,), own), base)
        assert not possible and why == "leaves the layer to Other, which quantizes its input itself"


def test_vllm_chooses_the_baseline(make):
    """vLLM chooses from its own table, without the plugin's kernels, and the table is restored."""
    kernels = linear._POSSIBLE_FP8_KERNELS[current_platform._enum]
    before = list(kernels)
    _, kernel, _ = make("channel")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(seam, "served_platform", lambda: "rocm")
        baseline = CHOOSE(type(kernel), kernel.config)
        patch.setenv("VLLM_DISABLED_KERNELS", ",".join(other.__name__ for other in before[1:]))
        nothing = CHOOSE(type(kernel), kernel.config)
    assert baseline in before[1:]
    assert nothing is None
    assert kernels == before
    assert CHOOSE(type(kernel), kernel.config) is None  # on CPU


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("linear_backend", "torch", "--linear-backend torch"),
        ("linear_backend_per_quant", {"fp8_w8a8": "torch"}, "linear_backend_per_quant torch"),
        ("linear_backend_per_quant", {"int8_w8a8": "torch"}, ""),
        ("linear_backend", "deep_gemm", ""),  # has no kernel for these layers, so that vLLM selects one itself
    ],
)
def test_a_named_backend_is_the_baseline(make, option, value, said, monkeypatch, caplog):
    """The plugin serves nothing beside it before it is timed, and says so once where it serves then."""
    setattr(get_current_vllm_config().kernel_config, option, value)
    by_reference(monkeypatch, ops.scaled_mm)
    kernel_selection.begin_recording()
    layer, kernel, _ = make("channel", Right)
    for tokens in (1, MANY):
        kernel.apply_weights(layer, random(tokens, K).bfloat16())
    assert len(kernel.baseline.calls) == (2 if said else 1)
    [choice] = time_choices()
    assert choice.key.baseline.named == said
    lines = [record.getMessage() for record in caplog.records if " named; " in record.getMessage()]
    serves = "the plugin serves 2 of 5 sizes; VLLM_ROCM_OPS_NAMED_BACKEND=keep keeps it"
    assert lines == [f"vllm-rocm-ops: {said} named; {serves}"] * bool(said)
    assert [choice.plugin_serves(tokens) for tokens in (1, 17, MANY)] == [True, True, False]


def test_a_named_backend_without_a_kernel_is_vllms_error(make):
    """The plugin does not serve what vLLM refuses."""
    _, kernel, _ = make("channel")
    get_current_vllm_config().kernel_config.linear_backend = "torch"
    others = linear._POSSIBLE_FP8_KERNELS[current_platform._enum][1:]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(seam, "served_platform", lambda: "rocm")
        patch.setenv("VLLM_DISABLED_KERNELS", ",".join(other.__name__ for other in others))
        with pytest.raises(ValueError, match="Failed to find a kernel"):
            CHOOSE(type(kernel), kernel.config)


@pytest.mark.parametrize("keeps", [False, True])
def test_which_named_backends_have_the_plugin_beside_them(keeps, monkeypatch):
    """The plugin stands beside those with a kernel for the same layers, but never emulation, and beside none on request."""
    plugin, kernel, other = (type(name, (), {}) for name in ("Plugin", "Kernel", "Other"))
    backends = {"triton": {kernel, other}, "emulation": {kernel}, "machete": {other}}
    monkeypatch.setattr(linear, "_LINEAR_BACKEND_KERNEL_MAP", backends)
    monkeypatch.setenv("VLLM_ROCM_OPS_NAMED_BACKEND", "keep" if keeps else "")
    table = {current_platform._enum: [kernel]}
    linear_base.register_first(plugin, table)
    assert [backend for backend, members in backends.items() if plugin in members] == ["triton"] * (not keeps)
    assert table == {current_platform._enum: [plugin, kernel]}


@pytest.mark.parametrize("shape", [(FEW, K), (17, K), (2, 3, K), (K,)])
@pytest.mark.parametrize("arch", [None, "gfx942"])
def test_unquantized_layers(shape, arch, monkeypatch):
    """Up to 16 tokens are the plugin's if there are kernels; all else goes to vLLM's own op, with the same arguments."""
    x, weight, bias = random(*shape).bfloat16(), random(N, K).bfloat16(), random(N).bfloat16()
    calls = []

    def baseline(*arguments):
        calls.append(arguments)
        return torch.nn.functional.linear(*arguments)

    monkeypatch.setattr(torch.ops.vllm, "rocm_unquantized_gemm", baseline)
    with launch.executor(arch and Emulator(arch)):
        output = torch.ops.vllm_rocm_ops.unquantized_linear(x, weight, bias)
    torch.testing.assert_close(output, torch.nn.functional.linear(x, weight, bias), atol=0.1, rtol=0.02)
    plugin = arch is not None and shape != (17, K)
    assert (len(calls), list(vllm_rocm_ops.stats())) == ((0, ["unquantized_gemm"]) if plugin else (1, []))


class OnGpu(torch.Tensor):
    """A tensor that reports a GPU."""

    is_cuda = True


@pytest.fixture
def replaced(monkeypatch):
    """Return vLLM's module, with the plugin's function in place of one that notes calls, that one, and the calls."""
    calls = []

    def baseline(layer, x, weight, bias=None):
        calls.append(layer)
        return torch.nn.functional.linear(x, weight, bias)

    monkeypatch.setattr(utils, "rocm_unquantized_gemm", baseline)
    monkeypatch.setattr(unquantized_linear, "_looked_up", set())
    monkeypatch.setattr(unquantized_linear, "replaced", lambda: "rocm_unquantized_gemm")
    by_reference(monkeypatch, ops.unquantized_gemm)
    unquantized_linear.install()
    return utils, baseline, calls


def test_batch_invariant_unquantized_layers_are_vllms(replaced, monkeypatch):
    """Layers on a CPU are as well."""
    utils, _, calls = replaced
    x, weight = random(FEW, K).bfloat16(), random(N, K).bfloat16()
    utils.rocm_unquantized_gemm(None, x.as_subclass(OnGpu), weight)
    assert not calls
    utils.rocm_unquantized_gemm(None, x, weight)
    assert len(calls) == 1
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    utils.rocm_unquantized_gemm(None, x.as_subclass(OnGpu), weight)
    assert len(calls) == 2


@pytest.mark.parametrize("name", ["fuse_act_padding", "fuse_allreduce_rms", "fuse_norm_quant"])
def test_graphs_keep_the_op_that_a_pass_looks_for(replaced, name, monkeypatch):
    """They match it after AITER's norm with padding of gpt-oss, and after its all-reduce with a projection."""
    utils, _, calls = replaced
    monkeypatch.setattr(type(current_platform), "is_rocm", lambda _: True)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(get_current_vllm_config().compilation_config.pass_config, name, True)
    x, weight = random(FEW, K).bfloat16().as_subclass(OnGpu), random(N, K).bfloat16()
    monkeypatch.setattr(torch.ops.vllm_rocm_ops, "unquantized_linear", lambda *_: "plugin")
    output = utils.rocm_unquantized_gemm(None, x, weight)
    assert (output == "plugin" if isinstance(output, str) else False) is (name == "fuse_norm_quant")
    assert len(calls) == (name != "fuse_norm_quant")


@pytest.mark.parametrize("wins", [False, True])
@pytest.mark.parametrize("binds", [False, True])
def test_an_unquantized_layer_that_ours_never_serves_is_vllms_own(replaced, wins, binds):
    """A linear method binds vLLM's function when it is made; embeddings, such as lm_head, look it up at each call."""
    utils, baseline, calls = replaced
    kernel_selection.begin_recording()
    method = Fake(_gemm_impl=utils.rocm_unquantized_gemm) if binds else Fake()
    layer = Fake(quant_method=method)
    x, weight = random(FEW, K).bfloat16().as_subclass(OnGpu), random(N, K).bfloat16()

    def call():
        return (method._gemm_impl if binds else utils.rocm_unquantized_gemm)(layer, x, weight)

    call()  # while layers are noted nothing is given back
    assert frames.entered(call) and not calls
    decide(bytes([0] * FEW + [wins]))
    call()
    assert bool(frames.entered(call)) is wins
    assert len(calls) == (0 if wins else 2)
    assert (utils.rocm_unquantized_gemm is baseline) is not (wins or binds)


def test_one_embedding_that_ours_serves_keeps_the_function_for_all(replaced):
    """A draft model computes logits as well as the model."""
    utils, baseline, calls = replaced
    kernel_selection.begin_recording()
    layers = [(random(FEW, K).bfloat16().as_subclass(OnGpu), random(rows, K).bfloat16()) for rows in (N, 2 * N)]
    for serves in (None, (bytes(FEW + 1), bytes([0] * FEW + [1]))):
        if serves:
            decide(*serves)
        for x, weight in layers:
            utils.rocm_unquantized_gemm(None, x, weight)
    assert utils.rocm_unquantized_gemm is not baseline and len(calls) == 1


@pytest.mark.parametrize("wins", [False, True])
@pytest.mark.parametrize("kind", ["channel", "block", "mxfp8"])
def test_a_layer_that_ours_never_serves_is_vllms_own(make, kind, wins, monkeypatch):
    """From the second call after measuring, eager calls run nothing of the plugin but a check for quantized input."""
    kernel_selection.begin_recording()
    layer, kernel, _ = make(kind, Baseline)
    by_reference(monkeypatch, getattr(ops, OPS[kind]))
    x = random(FEW, K).bfloat16()

    def call():
        return kernel.apply_weights(layer, x)

    call()
    assert frames.entered(call) and not kernel.baseline.calls
    decide(bytes([0] * FEW + [wins]))
    call()
    entered = {name for name in frames.entered(call) if "input_quantization." not in name}
    assert bool(entered) is wins, entered
    assert len(kernel.baseline.calls) == (0 if wins else 2)


@pytest.mark.parametrize("kind", ["channel", "block", "mxfp8"])
def test_a_call_that_ours_leaves_asks_once(make, kind):
    """If the plugin serves other sizes, a call of vLLM's kernel costs one lookup of the choice."""
    kernel_selection.begin_recording()
    layer, kernel, _ = make(kind, Baseline)
    x = random(FEW, K).bfloat16()
    kernel.apply_weights(layer, x)
    before = len(kernel.baseline.calls)
    decide(bytes([0] * (FEW + 1) + [1]))
    entered = frames.entered(lambda: kernel.apply_weights(layer, x))
    asked = {name.rpartition(".")[2] for name in entered if "input_quantization." not in name}
    assert {"baseline_serves", "plugin_serves", "baseline_always_serves"} < asked and len(asked) == 4, entered
    assert len(kernel.baseline.calls) == before + 1


def test_an_unquantized_layer_keeps_its_choice(replaced, monkeypatch):
    """Making a key takes as long as launching an op."""
    utils, _, calls = replaced
    kernel_selection.begin_recording()
    layer, weight = Fake(quant_method=None), random(N, K).bfloat16()
    few, more = (random(tokens, K).bfloat16().as_subclass(OnGpu) for tokens in (FEW, FEW + 1))
    utils.rocm_unquantized_gemm(layer, few, weight)
    decide(bytes([0] * (FEW + 1) + [1]))
    utils.rocm_unquantized_gemm(layer, few, weight)
    assert len(calls) == 1
    entered = frames.entered(lambda: utils.rocm_unquantized_gemm(layer, few, weight))
    assert len(calls) == 2 and not any("_noted" in name or "_choice" in name for name in entered), entered
    monkeypatch.setattr(ops.unquantized_gemm, "run_kernels", lambda *_: "plugin")
    assert utils.rocm_unquantized_gemm(layer, more, weight) == "plugin"


@pytest.mark.parametrize("kind", ["channel", "block", "mxfp8"])
def test_one_graph_serves_every_number_of_tokens(make, kind):
    """The kernel is chosen inside one op, from the tokens of the call, not when a graph is compiled."""
    layer, kernel, exact = make(kind, Baseline)
    torch._dynamo.reset()
    counter = CompileCounter()
    run = torch.compile(lambda x: kernel.apply_weights(layer, x), backend=counter, dynamic=True, fullgraph=True)
    with launch.executor(Emulator("gfx950")):
        for tokens in (MANY, FEW, 64):
            x = random(tokens, K).bfloat16()
            torch._dynamo.mark_dynamic(x, 0)
            output = run(x)
            if tokens != MANY:
                close(output, x, exact)
    assert len(kernel.baseline.calls) == counter.frame_count == 1


@pytest.mark.parametrize(("cuda", "tokens", "calls"), [(None, 64, 0), ("13.0", 32, 0), ("13.0", 33, 1)])
def test_cutlass_has_what_it_is_faster_at(make, cuda, tokens, calls, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    layer, kernel, _ = make("channel", Baseline)
    emulate(layer, kernel, tokens)
    assert len(kernel.baseline.calls) == calls


@pytest.mark.parametrize("kind", ["channel", "block", "mxfp8"])
def test_fake_results_are_like_real_ones(make, kind):
    layer, kernel, _ = make(kind, Baseline)
    for tokens in (FEW, MANY):
        x = random(tokens, K).bfloat16()
        if kind == "mxfp8":
            quantized = torch.ops.vllm.mxfp8_quantize(x, False, 0)
            name, arguments = "mxfp8_linear", (*quantized, layer.weight, layer.weight_scale, None, torch.bfloat16)
        else:
            data, scale = kernel.quant_fp8(x)
            weight_scale = layer.weight_scale if kind == "channel" else layer.weight_scale_inv
            options = (None, torch.bfloat16, False) if kind == "channel" else (torch.bfloat16,)
            name, arguments = OPS[kind].replace("_mm", "_linear"), (data, layer.weight, scale, weight_scale, *options)
        op = getattr(torch.ops.vllm_rocm_ops, name).default
        torch.library.opcheck(op, (*arguments, kernel.baseline_name), test_utils="test_faketensor")


@pytest.mark.parametrize("name", TABLES)
def test_a_probe_notices_other_tables_and_signatures(name, monkeypatch):
    """The seam is then off, and says what is missing."""
    one, table = seam.load(name), TABLES[name]
    one.probe()
    with monkeypatch.context() as patch:
        patch.delattr(linear, table.name)
        with pytest.raises(seam.Unavailable, match=f"this vLLM lacks {table.name}"):
            one.probe()
    chooser, parameters = table.chooser
    monkeypatch.setattr(linear, chooser, lambda kernels: None)
    with pytest.raises(seam.Unavailable, match=re.escape(f"({', '.join(parameters)}), got (kernels)")):
        one.probe()


def test_the_probe_for_unquantized_layers_notices_another_dispatch(monkeypatch):
    """On CPU vLLM's dispatch gives layers another function, like a vLLM that no longer looks up the plugin's."""
    with pytest.raises(seam.Unavailable, match="this vLLM lacks rocm_unquantized_gemm in its dispatch"):
        unquantized_linear.probe()
    monkeypatch.setattr(utils, "dispatch_unquantized_gemm", lambda: utils.rocm_unquantized_gemm)
    unquantized_linear.probe()


@pytest.mark.parametrize("what", ["order of weights", "code objects"])
def test_a_graph_that_was_compiled_for_others_is_not_loaded(tmp_path, monkeypatch, what):
    """The order of weights and the code objects are in the fingerprint."""
    monkeypatch.setattr(vllm_rocm_ops, "__file__", str(tmp_path / "__init__.py"))
    monkeypatch.setattr(launch, "CODE", tmp_path / "code")
    stamp = tmp_path / "code" / "gfx942" / "rms_norm.json"
    stamp.parent.mkdir(parents=True)
    stamp.write_text("{}")
    before = compile_cache.fingerprint()
    assert compile_cache.fingerprint() == before
    if what == "code objects":
        stamp.write_text('{"sources": "others"}')
    else:
        monkeypatch.setenv("VLLM_ROCM_OPS_SHUFFLE", "1")
    assert compile_cache.fingerprint() != before


# Measured selection


class Right(Baseline):
    """A kernel with the results of the plugin's references."""

    def apply_scaled_mm(self, *, A, B, out_dtype, As, Bs, bias, output_shape):
        self.calls.append(len(A))
        weight = B if B.shape[0] == A.shape[1] else B.t()
        return ops.scaled_mm.reference(A, weight, As, Bs, out_dtype, bias)

    def apply_block_scaled_mm(self, *, A, B, As, Bs):
        self.calls.append(len(A))
        return ops.block_scaled_mm.reference(A, B, As, Bs, self.config.out_dtype)


class RightInFragments(Right):
    """A kernel with the same results from a weight that it shuffled."""

    process_weights_after_loading = Shuffling.process_weights_after_loading

    def apply_scaled_mm(self, *, B, **arguments):
        return super().apply_scaled_mm(B=plain_weight(weight_order.fragments_of(B)).t(), **arguments)


@pytest.mark.parametrize(
    ("kind", "baseline", "fault"),
    [
        *(
            (kind, Right, fault)
            for kind in ("static", "dynamic", "channel-static", "fbgemm")
            for fault in (None, "scale_b")
        ),
        *(
            ("channel", baseline, fault)
            for baseline in (Right, RightInFragments)
            for fault in (None, "scale_b", "bias")
        ),
        *(("block", Right, fault) for fault in (None, "scale_b")),
    ],
)
def test_kernels_serve_the_sizes_they_won(make, kind, baseline, fault, monkeypatch):
    """A right kernel passes the check, and serves where it is faster; with another scale or no bias it fails."""
    kernel_selection.begin_recording()
    layer, kernel, exact = make(kind, baseline, k=K if kind != "block" else K + 64)
    require_sizes_won(layer, kernel, exact, getattr(ops, OPS[kind]), fault, monkeypatch, has_bias=kind != "block")


@pytest.mark.parametrize("fault", [None, "scale_b", "scale", "halves"])
@pytest.mark.parametrize(("kind", "baseline"), [("static", Right), ("channel", Right), ("channel", RightInFragments)])
def test_a_linear_with_its_activation_is_measured(make, kind, baseline, fault, monkeypatch):
    """It is compared with two launches, which serve where it is slower, or wrong."""
    kernel_selection.begin_recording()
    (layer, kernel, _), op, ran = make(kind, baseline), ops.scaled_mm_silu_and_mul_quant, []

    def plugin(*arguments):
        a = op.Arguments(*arguments)
        ran.append(len(a.a))
        if fault == "halves":
            return op.reference(
                a.a, plain_weight(a.b).t().roll(N // 2, 1) if a.b.dim() == 5 else a.b.roll(N // 2, 1), *a[2:]
            )
        return op.reference(*(a._replace(**{fault: 1.05 * getattr(a, fault)}) if fault else a))

    monkeypatch.setattr(op, "run_kernels", plugin)
    by_reference(monkeypatch, ops.scaled_mm)
    scale_b, scale = layer.weight_scale.data.float(), torch.tensor([0.3])

    def call(tokens: int) -> torch.Tensor:
        a, scale_a = kernel.quant_fp8(random(tokens, K).bfloat16(), layer.input_scale)
        further = scale_a, scale_b, scale, torch.bfloat16, kernel.order == "fragments", kernel.baseline_name
        return torch.ops.vllm_rocm_ops.gated_linear(a, layer.weight, *further)

    assert call(MANY).shape == (MANY, N // 2)
    [choice] = [choice for choice in time_choices() if choice.kernels.op is op]
    assert choice.state == ("off" if fault else "measured"), choice.why
    assert not fault or "relative error" in choice.why
    ran.clear()
    results = [call(tokens) for tokens in (1, 17, 18, MANY)]
    assert ran == ([] if fault else [1, 17])
    won = {choice.key: choice.plugin_by_tokens}
    for off in (op, ops.scaled_mm):  # two launches serve
        kernel_selection.apply_decisions(kernel_selection.Decided({off.name: "of a test"}, won))
        assert torch.equal(call(17).view(torch.uint8), results[1].view(torch.uint8))
    assert ran == ([] if fault else [1, 17])


def test_prompts_run_kernels_where_these_won(make):
    """The plugin then serves prompts, too."""
    layer, kernel, exact = make("channel", Right)
    emulate(layer, kernel, MANY)
    assert len(kernel.baseline.calls) == 1 and vllm_rocm_ops.stats() == {}
    decide(bytes([0]) + bytes([1]) * MANY)
    emulate(layer, kernel, MANY, exact)
    [symbol] = vllm_rocm_ops.stats()["scaled_mm"]
    assert symbol.startswith("scaled_mm_")
    assert len(kernel.baseline.calls) == 1


def test_mx_layers_are_measured(make, monkeypatch):
    """Scales may be shared by 32 rows, as vLLM's kernel leaves them, or not."""
    kernel_selection.begin_recording()
    layer, kernel, exact = make("mxfp8", Baseline)

    def baseline(self, layer, x, bias=None):
        is_quantized = isinstance(x, mxfp8_linear.QuantizedRows)
        self.calls.append(len(x.values if is_quantized else x))
        values = x.values.float() * torch.exp2(x.scale.float() - 127).repeat_interleave(32, 1) if is_quantized else x
        return (values.float() @ exact.t()).to(x.dtype)

    monkeypatch.setattr(type(kernel.baseline), "apply_weights", baseline)
    require_sizes_won(layer, kernel, exact, ops.mxfp8_scaled_mm, None, monkeypatch, has_bias=False)


@pytest.mark.parametrize("shared", [False, True])
def test_vllms_mx_kernel_takes_what_is_quantized(make, shared, monkeypatch):
    """vLLM passes the plugin's values and scales to its GEMM, and quantizes other inputs. 32 rows may share a scale."""

    def product(a, scale_a, weight, scale, dtype):
        assert len(scale) == len(weight) // (32 if shared else 1)
        return ops.mxfp8_scaled_mm(a, weight, scale_a, scale, dtype)

    class Kernel:
        def __getitem__(self, grid):
            return lambda a, scale_a, w, scale, out, *_, **__: out.copy_(product(a, scale_a, w, scale, out.dtype))

    monkeypatch.setattr(rocm_native, "rocm_mxfp8_block32_gemm", product)
    monkeypatch.setattr(rocm_native, "_mxfp8_linear_kernel", Kernel())
    monkeypatch.setattr(rocm_native, "triton", Fake(cdiv=lambda one, other: -(-one // other)))
    layer, kernel, _ = make("mxfp8", Baseline)
    if not shared:
        layer.weight_scale.data = layer.weight_scale.data.repeat_interleave(32, 0)
        layer.weight_scale.data[0] += 1
    theirs = rocm_native.RocmDotScaledMxfp8LinearKernel.apply_weights
    monkeypatch.setattr(type(kernel.baseline), "apply_weights", theirs)
    x, bias = random(MANY, K).bfloat16(), random(N).bfloat16()
    wanted = theirs(kernel.baseline, layer, x, bias)
    assert torch.equal(kernel.apply_weights(layer, x, bias), wanted)
    given = mxfp8_linear.QuantizedRows(*torch.ops.vllm.mxfp8_quantize(x, False, 0), x.dtype)
    assert torch.equal(kernel.apply_weights(layer, given, bias), wanted)
    rows = mxfp8_linear.QuantizedRows(*torch.ops.vllm.mxfp8_quantize(x / 2, False, 0), x.dtype)
    torch.testing.assert_close(theirs(kernel.baseline, layer, rows) * 2 + bias, wanted, atol=0.3, rtol=0.02)


def test_an_emulated_mx_product_reads_what_is_not_quantized(make):
    """vLLM emulates it if the user has asked to keep 8-bit weights."""
    layer, kernel, _ = make("mxfp8", Baseline)
    kernel.baseline, kernel.hands_rows = EmulationMxfp8LinearKernel(kernel.config), False
    layer.weight_scale.data = layer.weight_scale.data.repeat_interleave(32, 0)
    x = random(FEW, K).bfloat16()
    assert torch.equal(kernel.apply_weights(layer, x), kernel.baseline.apply_weights(layer, x))
    assert vllm_rocm_ops.stats() == {}


def test_unquantized_layers_are_measured(monkeypatch):
    """They are measured at the sizes that vLLM calls: logits have one token per request."""
    kernel_selection.begin_recording()
    weight, left = random(N, K).bfloat16(), []
    monkeypatch.setattr(
        ops.unquantized_gemm, "run_kernels", lambda x, weight, bias: (x.float() @ weight.t().float()).to(x)
    )
    monkeypatch.setattr(unquantized_linear, "replaced", lambda: "default_unquantized_gemm")
    linear = torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *arguments: left.append(1) or linear(*arguments))
    unquantized_linear.unquantized_linear(random(40, K).bfloat16(), weight, None)
    [choice] = time_choices(most=8192)
    left.clear()
    for tokens in (1, 17, 18, 40, 41):
        unquantized_linear.unquantized_linear(random(tokens, K).bfloat16(), weight, None)
    assert len(left) == 3
    assert len(choice.plugin_by_tokens) == 41


@pytest.mark.parametrize("is_found", [False, True])
@pytest.mark.parametrize("is_on", [False, True])
def test_vllm_is_asked_whether_it_uses_aiter(is_on, is_found, monkeypatch):
    """A vLLM with AITER on by default runs its kernels whatever the variable says, but not without the library."""
    monkeypatch.setenv("VLLM_ROCM_USE_AITER", str(int(not is_on)))
    monkeypatch.setattr(_aiter_ops.rocm_aiter_ops, "_AITER_ENABLED", is_on)
    monkeypatch.setattr(_aiter_ops, "is_aiter_found_and_supported", lambda: is_found)
    assert [linear_base.asks_for_aiter(kind) for kind in ("linear", "fused_moe")] == [is_on and is_found] * 2
    assert scaled_linear.COMPARISON.max_tokens() == (0 if is_on and is_found else 64)


def test_an_aiter_switch_is_undone_by_a_measurement_only(make, monkeypatch):
    """Before that, all tokens are AITER's."""
    ask_for_aiter(monkeypatch)
    by_reference(monkeypatch, ops.scaled_mm)
    kernel_selection.begin_recording()
    layer, kernel, _ = make("channel", Right)
    for tokens in (1, MANY):
        kernel.apply_weights(layer, random(tokens, K).bfloat16())
    assert len(kernel.baseline.calls) == 2
    time_choices()
    kernel.baseline.calls.clear()
    kernel.apply_weights(layer, random(1, K).bfloat16())
    assert not kernel.baseline.calls
    monkeypatch.setattr(_aiter_ops.rocm_aiter_ops, "is_linear_enabled", lambda: False)
    assert scaled_linear.COMPARISON.max_tokens() == 64


@pytest.mark.parametrize(
    ("name", "method"), [(name, method) for name, table in TABLES.items() for method in table.all_methods()]
)
def test_a_probe_sees_a_method_with_other_parameters(monkeypatch, name, method):
    seam.load(name).probe()
    monkeypatch.setattr(TABLES[name].base_class(), method, lambda self, other: None)
    with pytest.raises(seam.Unavailable, match=r"this vLLM lacks .*<lambda>"):
        seam.load(name).probe()


@pytest.mark.parametrize("name", TABLES)
def test_a_seam_installs_the_kernel_of_its_table(name):
    """Its class has the table, the seam's first comparison, and vLLM's base class."""
    one, table = seam.load(name), TABLES[name]
    plugin = table.kernels()[current_platform._enum][0]
    assert (plugin.table, plugin.comparison) == (table, one.comparisons[0])
    assert plugin.__mro__[1:3] == (linear_base.HasBaseline, table.base_class())


def test_every_table_has_tests():
    """They are here, for the layers that `make` makes, or in a file of the seam's name."""
    here = pathlib.Path(__file__).parent
    others = {name for name in TABLES if not {*seam.load(name).ops} & {*OPS.values()}}
    assert others and others <= {path.stem.removeprefix("test_") for path in here.glob("test_*_linear.py")}
