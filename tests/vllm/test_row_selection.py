"""Test the choice of the plugin's ops or vLLM's compiled graph for norms and activations, and its reversal."""

import logging
import types

import pytest
import torch
from fakes import Fake, FakeClock, fake_worker, parameter
from vllm import _aiter_ops
from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper
from vllm.config import CompilationMode
from vllm.distributed.device_communicators.aiter_custom_all_reduce import AiterCustomAllreduce
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
from vllm.model_executor.layers.quantization.utils import quant_utils

from vllm_rocm_ops import ops
from vllm_rocm_ops.vllm import seam, worker_startup
from vllm_rocm_ops.vllm.graph import compilation, compiled_ops, fused_quant
from vllm_rocm_ops.vllm.guards import compile_cache
from vllm_rocm_ops.vllm.selection import kernel_selection, kernel_timing, report
from vllm_rocm_ops.vllm.selection.key import COMPILED

HIDDEN, INNER, LATENT, MAX = 512, 256, 128, 96
KEYS = ("kFp8DynamicTokenSym", "kFp8StaticTensorSym", "kFp8Dynamic128Sym")
OPS = (
    *("rms_norm_dynamic_per_token_quant", "rms_norm_static_fp8_quant", "fused_add_rms_norm_static_fp8_quant"),
    *("rms_norm_per_block_quant", "silu_and_mul_per_token_quant", "silu_and_mul_quant", "silu_and_mul_per_block_quant"),
)

pytestmark = pytest.mark.usefixtures("configuration")


class Linear(torch.nn.Module):
    """A linear as its input's producer sees it, with vLLM's quantization of the input."""

    def __init__(self, key: str, columns: int):
        super().__init__()
        self._input_quant_key = getattr(quant_utils, key)
        self.weight = parameter(torch.zeros(1))
        self.input_size_per_partition, self.input_scale = columns, torch.tensor([0.02])
        scale = self._input_quant_key.scale
        quant = QuantFP8(scale.static, scale.group_shape, compile_native=False)
        given = self.input_scale if scale.static else None
        self.vllm_rocm_ops_quantize = lambda x: quant.forward_native(x, given)
        self.vllm_rocm_ops_column_major_scales = False


class Layer(torch.nn.Module):
    """A norm with a residual and one without, and an activation, each with its linear."""

    def __init__(self, key: str):
        super().__init__()
        self.input_layernorm, self.q_norm = (RMSNorm(n, dtype=torch.bfloat16) for n in (HIDDEN, LATENT))
        self.qkv_proj, self.q_b_proj = Linear(key, HIDDEN), Linear(key, LATENT)
        self.gate_up_proj, self.act_fn, self.down_proj = torch.nn.Identity(), SiluAndMul(), Linear(key, INNER)
        self.act_fn.vllm_forward = self.act_fn.forward_native  # it compiles nothing
        for norm in (self.input_layernorm, self.q_norm):
            norm.weight.data = torch.linspace(0.5, 2, len(norm.weight)).bfloat16()

    def forward(self, x):
        x, _ = self.gate_up_proj(x)
        x, _ = self.down_proj(self.act_fn(x))
        return x


def clock_of(us=lambda tokens: 5.0) -> FakeClock:
    """Return a clock of the plugin's times by a function of the number of tokens; vLLM's take 10."""
    return FakeClock(lambda side, tokens: [us(tokens)] * 3 if side == "plugin" else [10.0, 10.0, 99.0])


@pytest.fixture
def kernels(unmeasured, monkeypatch):
    """Make the ops' references their kernels, on a machine without measurements."""
    monkeypatch.setattr(compiled_ops, "left_to_vllm", set())
    monkeypatch.setattr(compiled_ops, "choices", compiled_ops.CompileChoices())
    monkeypatch.setenv("VLLM_ROCM_OPS_MEASURE", "1000")
    monkeypatch.setattr(compilation, "is_compiled", lambda config, model: True)
    monkeypatch.setattr(compilation, "compiler", lambda config: lambda function: function)
    for name in OPS:
        op = getattr(ops, name)
        monkeypatch.setattr(op, "run_kernels", lambda *a, op=op: op.reference(*a, *op._defaults[len(a) :]))


def worker(model, mode=None, **passes) -> Fake:
    off = dict.fromkeys(("fuse_norm_quant", "fuse_act_quant", "fuse_allreduce_rms"), False)
    settings = Fake(pass_config=Fake(**off | passes), mode=mode, backend="inductor", static_forward_context={})
    config = {"model_config": Fake(get_hidden_size=lambda: HIDDEN, dtype=torch.bfloat16), "additional_config": {}}
    config |= {"compilation_config": settings, "scheduler_config": Fake(max_num_batched_tokens=MAX)}
    config |= {"kernel_config": Fake(ir_op_priority=Fake(rms_norm=["native", "aiter"]))}
    return fake_worker(model, **config)


def decide(model, clock, gather=lambda mine: [mine], is_logging_rank=True, **passes) -> dict[str, bool]:
    """Return which of a layer's three are the plugin's afterwards. The activation then knows its linear."""
    worker_startup.select_compiled_ops(worker(model, **passes), clock, gather, is_logging_rank)
    kinds = {f" {HIDDEN} ": "norm", f" {LATENT} ": "q", f" {INNER} ": "act"}
    decisions = {f"{pattern} ": runs for pattern, runs in compiled_ops.choices.decisions.items()}
    plugin = {kinds[columns]: runs for text, runs in decisions.items() for columns in kinds if columns in text}
    result = model.act_fn(torch.ones(3, 2 * INNER, dtype=torch.bfloat16))
    assert isinstance(result, torch.Tensor) is not plugin["act"]
    return plugin


ALL = {"norm": True, "q": True, "act": True}
NONE = dict.fromkeys(ALL, False)


@pytest.mark.parametrize("key", KEYS)
def test_the_faster_op_serves_and_is_recorded(kernels, key, caplog):
    """The plugin serves if it is faster in total and nowhere slower. The next process reads the choice in the file."""
    clock = clock_of()
    assert decide(Layer(key), clock) == ALL
    shapes = [(HIDDEN, True), (2 * INNER, False), (LATENT, False)]
    asked = [(*x.shape, residual is not None) for (x, residual, *_), *_ in clock.asked]
    assert asked == [(t, *shape) for shape in shapes for t in (2, 8, 64, MAX)]
    assert all(1 <= len(sets) <= compiled_ops.SETS for sets in clock.asked)
    assert compiled_ops.patterns_left_to_vllm() == []
    assert decide(Layer(key), again := clock_of()) == ALL and again.asked == []
    [path] = kernel_selection.envs.tables().glob("*/measured-*.json")
    record = kernel_selection.read(path)
    assert len(record.shapes) == 3 and all(name.baseline == COMPILED for name in record.shapes)
    for measured in (measured for by_tokens in record.shapes.values() for measured in by_tokens.values()):
        assert measured.error <= 2 * measured.baseline_error + 1e-5 and 1e-3 < measured.baseline_error < 0.1
    path.unlink()
    with caplog.at_level(logging.INFO):
        assert decide(Layer(key), clock_of(lambda tokens: 20.0)) == NONE
    assert len(compiled_ops.patterns_left_to_vllm()) == 3
    assert "compiled" in caplog.text and "vLLM's" in caplog.text


@pytest.mark.parametrize("holds", [True, False])
def test_an_input_is_quantized_as_without_the_plugin(holds):
    """The kernel that the plugin's kernel holds pads and rounds in its own way: what vLLM would compile calls that one."""
    of = {name: types.SimpleNamespace(quant_fp8=lambda x, scale, bound, name=name: (name, scale)) for name in "ab"}
    of["a"]._get_layer_params = lambda layer: ("weight", "scale", layer, "bound")
    of["a"].baseline = of["b"] if holds else None
    assert compiled_ops.quantizer("input scale", of["a"])("x") == ("b" if holds else "a", "input scale")


def test_the_compilers_start_is_no_time_to_measure(kernels, monkeypatch):
    """vLLM compiles the model next, which saves these seconds. A start with nothing to measure starts no compiler."""
    now, started = [0.0], []

    def compiler(config):
        started.append(config)

        def compiled(function):
            now[0] += 100.0 if function is torch.neg else 0.0
            return function

        return compiled

    monkeypatch.setattr(kernel_timing, "time", Fake(monotonic=lambda: now[0]))
    monkeypatch.setenv("VLLM_ROCM_OPS_MEASURE", "10")
    monkeypatch.setattr(compilation, "compiler", compiler)
    for _ in range(2):
        assert decide(Layer(KEYS[1]), clock_of()) == ALL
    assert now == [100.0] and len(started) == 1 and kernel_selection.session.spent < 1.0


@pytest.mark.parametrize("fault", [None, "rms_norm_mxfp8_quant", "silu_and_mul_mxfp8_quant"])
def test_mx_patterns_are_measured(kernels, monkeypatch, fault):
    """They are measured only where vLLM compiles: no linear takes them elsewhere. A wrong op is off."""
    for name in ("rms_norm_mxfp8_quant", "silu_and_mul_mxfp8_quant"):
        op = getattr(ops, name)

        def run(*a, op=op):
            values, scale = op.reference(*a, *op._defaults[len(a) :])
            return values, scale + 1 if op.name == fault else scale

        monkeypatch.setattr(op, "run_kernels", run)

    def layer() -> Layer:
        made = Layer(KEYS[0])
        for linear in (made.qkv_proj, made.q_b_proj, made.down_proj):
            del linear._input_quant_key
            linear.vllm_rocm_ops_is_mx = True
            linear.vllm_rocm_ops_quantize = lambda x: torch.ops.vllm.mxfp8_quantize(x, False, 0)
        return made

    worker_startup.select_compiled_ops(worker(layer(), fuse_norm_quant=True), clock_of(), lambda mine: [mine], True)
    plugin = compiled_ops.choices.decisions
    assert len(plugin) == 3 and all(runs is not name.op.startswith(str(fault)) for name, runs in plugin.items())
    assert compiled_ops.choices.off == frozenset({fault} - {None})
    monkeypatch.setattr(compilation, "is_compiled", lambda config, model: False)
    worker_startup.select_compiled_ops(worker(uncompiled := layer()), clock_of(), lambda mine: [mine], True)
    assert compiled_ops.choices.decisions == {} and uncompiled.act_fn.consumer is None


def test_scales_may_be_negative(kernels, caplog):
    """Half of vLLM's random scales are negative with `load_format="dummy"`."""
    layer = Layer(KEYS[1])
    layer.down_proj.input_scale.neg_()
    assert decide(layer, clock_of()) == ALL
    assert "failed" not in caplog.text


@pytest.mark.parametrize(
    ("us", "wins"),
    [
        (lambda tokens: 9.7, True),
        (lambda tokens: 9.9, False),
        (lambda tokens: 5.0 if tokens < MAX else 10.1, True),
        (lambda tokens: 5.0 if tokens < MAX else 10.3, False),
        (lambda tokens: 10.1 if tokens < MAX else 9.0, False),
    ],
)
def test_the_plugin_serves_only_if_slower_nowhere(kernels, us, wins):
    """One graph serves every number of tokens. Outliers among the samples change nothing."""
    assert decide(Layer(KEYS[0]), clock_of(us)) == (ALL if wins else NONE)
    record = kernel_selection.read(next(kernel_selection.envs.tables().glob("*/measured-*.json")))
    assert {line[5] for line in report.rows(record)} == {"plugin" if wins else "vLLM"}


WRONG = {
    "values": lambda data, scale: (data.roll(1, 1), scale),
    "a row's scale": lambda data, scale: (
        data,
        torch.where(torch.arange(len(scale))[:, None] == len(scale) // 2, 1.1, 1.0) * scale,
    ),
    "unwritten": lambda data, scale: (data, scale * torch.nan),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_op_is_switched_off_on_this_gpu(kernels, monkeypatch, caplog, fault):
    """Only that op is off; it is logged once, and off in later processes."""
    op = ops.silu_and_mul_per_block_quant
    monkeypatch.setattr(op, "run_kernels", lambda *a: WRONG[fault](*op.reference(*a, *op._defaults[len(a) :])))
    for clock in (clock_of(), None):
        caplog.clear()
        assert decide(Layer(KEYS[2]), clock) == {"norm": True, "q": True, "act": False}
        assert caplog.text.count("silu_and_mul_per_block_quant is off on this GPU") == 1


def test_a_wrong_residual_is_noticed(kernels, monkeypatch):
    op = ops.rms_norm_per_block_quant

    def forgets(*a):
        a = list(a) + list(op._defaults[len(a) :])
        place = op.Arguments._fields.index("residual")
        a[place] = a[place] if a[place] is None else a[place].clone()
        return op.reference(*a)

    monkeypatch.setattr(op, "run_kernels", forgets)
    assert decide(Layer(KEYS[2]), clock_of()) == {"norm": False, "q": False, "act": True}


def test_what_kernels_do_not_take_stays_vllms(kernels, monkeypatch):
    monkeypatch.setattr(ops.silu_and_mul_per_token_quant, "run_kernels", lambda *a: None)
    assert decide(Layer(KEYS[0]), clock_of()) == {"norm": True, "q": True, "act": False}


@pytest.mark.parametrize("measures", ["0", "1000"])
def test_unmeasured_vllms_stays_where_it_fuses(kernels, monkeypatch, measures):
    """This holds without a clock, and with the switch off. If no pass runs, the plugin's ops serve."""
    assert decide(Layer(KEYS[0]), None, fuse_norm_quant=True, fuse_act_quant=True) == ALL
    monkeypatch.setattr(seam, "served_platform", lambda: "rocm")
    monkeypatch.setattr(seam, "arch_here", lambda _: None)
    if measures == "0":
        decide(Layer(KEYS[0]), clock_of(lambda tokens: 99.0))
    monkeypatch.setenv("VLLM_ROCM_OPS_MEASURE", measures)
    assert decide(Layer(KEYS[0]), None) == ALL
    assert decide(Layer(KEYS[0]), None, fuse_norm_quant=True) == {"norm": False, "q": False, "act": True}
    assert decide(Layer(KEYS[0]), None, fuse_act_quant=True) == {"norm": True, "q": True, "act": False}
    if measures != "0":  # measurements count
        assert decide(Layer(KEYS[0]), clock_of(), fuse_norm_quant=True, fuse_act_quant=True) == ALL


def test_ranks_agree(kernels):
    """The plugin's ops run where they do for all ranks."""
    [layer] = [Layer(KEYS[0])]
    norm, q, act = compiled_ops.fused_in(layer, HIDDEN, torch.bfloat16, lambda *_: COMPILED, True)
    slow = kernel_selection.Decided({}, {norm.key: bytes([0]), q.key: bytes([1])})
    wrong = kernel_selection.Decided({act.op.name: "wrong there"}, {})
    assert decide(layer, clock_of(), lambda mine: [mine, slow, wrong]) == {"norm": False, "q": True, "act": False}


def test_equal_layers_are_one_pair(kernels, monkeypatch):
    """A model of 200 layers has the pairs of one layer, except for activations, which know their linear."""
    asked, key_of = [], fused_quant.key_of
    monkeypatch.setattr(fused_quant, "key_of", lambda *given: asked.append(given) or key_of(*given))
    layers = torch.nn.ModuleList(Layer(KEYS[1]) for _ in range(200))
    found = list(compiled_ops.fused_in(layers, HIDDEN, torch.bfloat16, lambda *_: COMPILED, True))
    assert [pair.is_norm for pair in found] == [True] * 2 + [False] * 200
    assert len(asked) <= 3 * 200 + 2 + 200


def communicator(ranks: int, per_group: bool = True) -> Fake:
    """Return AITER's all-reduce in a group of fully connected GPUs, by vLLM's own rule for its one-stage kernel."""
    made = Fake(supports_per_group_quant=per_group, _impl=Fake(world_size=ranks, fully_connected=True))
    made.use_1stage_fused_ar_rms = types.MethodType(AiterCustomAllreduce.use_1stage_fused_ar_rms, made)
    return made


@pytest.fixture
def aiter(kernels, monkeypatch):
    """Make vLLM compile for a simulated rank with AITER's all-reduce, if there are `ranks`."""

    def of(ranks: int | None, switch: str = "all", platform: str = "rocm", **how) -> None:
        made = ranks and communicator(ranks, **how)
        monkeypatch.setattr(_aiter_ops.rocm_aiter_ops, "get_aiter_allreduce", lambda: made)
        monkeypatch.setenv("VLLM_ROCM_OPS_SEAMS", switch)
        monkeypatch.setattr(compilation, "is_compiled", lambda config, model: True)
        monkeypatch.setattr(seam, "served_platform", lambda: platform)
        monkeypatch.setattr(seam, "arch_here", lambda _: None)

    return of


@pytest.mark.parametrize(
    ("how", "left"),
    [
        ({"ranks": 8}, (None, "kFp8Dynamic128Sym")),
        ({"ranks": 8, "per_group": False}, (None,)),  # an older AITER
        ({"ranks": None}, ()),  # VLLM_ROCM_USE_AITER_CUSTOM_AR=0
        ({"ranks": 8, "switch": "norm,all"}, ()),
        ({"ranks": 8, "platform": "cuda"}, ()),
    ],
)
def test_norms_stay_vllms_where_it_fuses_them_with_aiters_all_reduce(aiter, caplog, how, left):
    """These are norms without quantization, or with one of vLLM's patterns; the user can choose the plugin's."""
    aiter(**how)
    with caplog.at_level(logging.INFO):
        assert decide(Layer(KEYS[2]), None, fuse_allreduce_rms=True) == ALL
    assert compiled_ops.choices.all_reduced == {name and getattr(quant_utils, name) for name in left}
    assert ("AITER's all-reduce stay vLLM's" in caplog.text) == bool(left)
    assert "two-stage" not in caplog.text


@pytest.mark.parametrize(
    ("hidden", "ranks", "fuses"),
    [
        (16384, 8, False),  # Llama-405B: rows of more than 1,024 packs
        (8192, 8, False),  # Llama-70B: 8 tokens are 128 KiB, which is too many
        (8192, 4, True),
        (4096, 8, True),  # Llama-8B
        (7168, 8, True),  # DeepSeek-V3
        (7168, 4, True),
    ],
)
def test_an_all_reduce_of_two_stages_is_not_fused(aiter, caplog, hidden, ranks, fuses):
    """vLLM's pass is off where a decode step would use the slower kernel, and the compile cache key includes it."""
    aiter(ranks)
    one = worker(torch.nn.Module(), fuse_allreduce_rms=True)
    one.vllm_config.model_config.get_hidden_size = lambda: hidden
    with caplog.at_level(logging.INFO):
        worker_startup.select_compiled_ops(one, None, lambda mine: [mine], True)
    assert one.vllm_config.compilation_config.pass_config.fuse_allreduce_rms is fuses
    assert compiled_ops.patterns_left_to_vllm() == [f"all-reduce with norms {'on' if fuses else 'off'}"]
    assert (f"two-stage kernel for 8 tokens of hidden size {hidden} " in caplog.text) is not fuses


def test_records_are_kept_apart_by_baseline(kernels, monkeypatch):
    """Baselines are eager or compiled, fused with the quantization or not, AITER's or not."""
    model, keys = Layer(KEYS[0]), []
    monkeypatch.setattr(seam, "served_platform", lambda: "rocm")
    for compiles, passes, aiters in [
        (False, {}, False),
        (True, {}, False),
        (True, {"fuse_norm_quant": True}, False),
        (True, {}, True),
    ]:
        monkeypatch.setattr(compilation, "is_compiled", lambda config, model, compiles=compiles: compiles)
        monkeypatch.setattr(_aiter_ops, "IS_AITER_FOUND", aiters)
        config = worker(model, **passes).vllm_config
        config.kernel_config.ir_op_priority.rms_norm[:] = ["aiter", "native"]
        name = compilation.baseline_of(config, model)
        keys.append((str(name(True)), str(name(False))))
        assert str(name(False, is_opaque=True)) == ("AITER-eager" if aiters else "eager")
    assert keys == [
        ("eager", "eager"),
        ("compiled", "compiled"),
        ("fused-compiled", "compiled"),
        ("AITER-compiled", "AITER-compiled"),
    ]


@pytest.mark.parametrize("runs", [True, False])
def test_a_model_whose_classes_are_not_compiled_is_eager(runs):
    """This holds in vLLM's compiled mode, too. A draft model may differ."""

    class Decoder(torch.nn.Module, TorchCompileWithNoGuardsWrapper):
        def __init__(self):
            torch.nn.Module.__init__(self)
            self.do_not_compile = not runs

    config, model = worker(None, CompilationMode.VLLM_COMPILE).vllm_config, torch.nn.Module()
    assert not compilation.is_compiled(config, model)
    model.model = Decoder()
    assert compilation.is_compiled(config, model) is runs
    assert not compilation.is_compiled(worker(None, CompilationMode.NONE).vllm_config, model)


@pytest.mark.parametrize("runner", ["speculator", "drafter"])
def test_norms_of_a_draft_model_are_decided(kernels, runner):
    """Model runner V2 has a speculator, V1 a drafter."""
    model, draft = Layer(KEYS[0]), Layer(KEYS[0])
    one = worker(model)
    setattr(one.model_runner, runner, Fake(model=draft))
    assert compilation.models_of(one) == [model, draft]
    draft.q_norm = type(draft.q_norm)(2 * LATENT, dtype=torch.bfloat16)
    draft.q_b_proj = Linear(KEYS[0], 2 * LATENT)
    worker_startup.select_compiled_ops(one, None, lambda mine: [mine], False)
    assert sum("rms_norm" in pattern for pattern in map(str, compiled_ops.choices.decisions)) == 3


def test_the_compile_cache_knows_what_stays(kernels, monkeypatch):
    """It is in the worker's configuration, and in the one that a compiled part of the model holds."""
    layer = Layer(KEYS[0])
    held = Fake(additional_config={})
    layer.vllm_config = held
    before = compile_cache.fingerprint()
    one = worker(layer)
    worker_startup.select_compiled_ops(one, clock_of(lambda tokens: 20.0), lambda mine: [mine], False)
    compile_cache.mark_again(one)
    after = compile_cache.fingerprint()
    assert after != before
    assert one.vllm_config.additional_config == held.additional_config == {"vllm_rocm_ops": after}
    assert decide(Layer(KEYS[0]), None) == NONE  # the next process reads the same


class Scaled(Layer):
    """A layer that does more with its activation's result than pass it on."""

    def forward(self, x):
        x, _ = self.gate_up_proj(x)
        x, _ = self.down_proj(2 * self.act_fn(x))
        return x


class Beside(Layer):
    """A layer whose linear reads another tensor."""

    def forward(self, x):
        x, _ = self.gate_up_proj(x)
        return self.act_fn(x), self.down_proj(x)


@pytest.mark.parametrize("kind", [Scaled, Beside])
def test_an_activation_whose_result_is_read_otherwise_does_not_quantize(kernels, kind):
    """This holds in eager mode. In a graph, the pass sees the readers."""
    layer = kind(KEYS[0])
    worker_startup.select_compiled_ops(worker(layer), None, lambda mine: [mine], False)
    assert not any("silu" in pattern for pattern in map(str, compiled_ops.choices.decisions))
    assert layer.act_fn.consumer is None


def test_a_linear_that_every_rank_holds_whole(kernels):
    """It has no input size of a partition. Its norm is measured nevertheless."""
    layer = Layer(KEYS[0])
    del layer.q_b_proj.input_size_per_partition
    layer.q_b_proj.input_size = LATENT
    assert decide(layer, None) == ALL
