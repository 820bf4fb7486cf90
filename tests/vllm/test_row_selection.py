"""Whether our ops or vLLM's compiled graph serve a model's norms and activations: what is timed, checked, decided and undone."""

import logging
import types

import pytest
import torch

from vllm_rocm_ops import ops
from vllm_rocm_ops.vllm import kernel_selection, kernel_timing, row_selection, seam

HIDDEN, INNER, LATENT, MOST = 512, 256, 128, 96
KEYS = ("kFp8DynamicTokenSym", "kFp8StaticTensorSym", "kFp8Dynamic128Sym")
OPS = (
    *("rms_norm_dynamic_per_token_quant", "rms_norm_static_fp8_quant", "fused_add_rms_norm_static_fp8_quant"),
    *("rms_norm_per_block_quant", "silu_and_mul_per_token_quant", "silu_and_mul_quant", "silu_and_mul_per_block_quant"),
)

pytestmark = pytest.mark.usefixtures("configuration")


class Linear(torch.nn.Module):
    """A linear as a producer of its input sees it, with how vLLM quantises that."""

    def __init__(self, key: str, columns: int):
        from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
        from vllm.model_executor.layers.quantization.utils import quant_utils

        super().__init__()
        self._input_quant_key = getattr(quant_utils, key)
        self.weight = torch.nn.Parameter(torch.zeros(1), requires_grad=False)
        self.input_size_per_partition, self.input_scale = columns, torch.tensor([0.02])
        scale = self._input_quant_key.scale
        quant = QuantFP8(scale.static, scale.group_shape, compile_native=False)
        given = self.input_scale if scale.static else None
        self.vllm_rocm_ops_quantize = lambda x: quant.forward_native(x, given)
        self.vllm_rocm_ops_column_major_scales = False


class Layer(torch.nn.Module):
    """A norm with a residual and one without, and an activation, each with its linear."""

    def __init__(self, key: str):
        from vllm.model_executor.layers.activation import SiluAndMul
        from vllm.model_executor.layers.layernorm import RMSNorm

        super().__init__()
        self.input_layernorm, self.q_norm = (RMSNorm(n, dtype=torch.bfloat16) for n in (HIDDEN, LATENT))
        self.qkv_proj, self.q_b_proj = Linear(key, HIDDEN), Linear(key, LATENT)
        self.act_fn, self.down_proj = SiluAndMul(), Linear(key, INNER)
        self.act_fn.vllm_forward = self.act_fn.forward_native  # which compiles nothing
        for norm, name in ((self.input_layernorm, "qkv_proj"), (self.q_norm, "q_b_proj")):
            norm.weight.data = torch.linspace(0.5, 2, len(norm.weight)).bfloat16()
            norm.consumer = (self, name)


class Clock:
    """Times ours by a function of the number of tokens; vLLM's takes 10."""

    def __init__(self, us=lambda tokens: 5.0):
        self.us, self.asked = us, []

    def times(self, calls, sets):
        tokens = len(sets[0][0])
        self.asked.append((tokens, sets[0][0].shape[1], sets[0][1] is not None, len(sets)))
        for call in calls.values():
            call(*sets[0])
        return {"ours": [self.us(tokens)] * 3, "native": [10.0, 10.0, 99.0]}

    def finish(self):
        pass


@pytest.fixture
def kernels(tmp_path, monkeypatch):
    """Has the ops' references be their kernels, and this be one machine on which nothing was measured."""
    monkeypatch.setenv("VLLM_ROCM_OPS_TABLES", str(tmp_path))
    monkeypatch.setattr(kernel_selection, "machine", lambda: {"arch": "gfx942", "gpu": "MI300X", "code": "1"})
    monkeypatch.setattr(row_selection, "_stay", set())
    monkeypatch.setattr(kernel_timing, "MOST_SECONDS", 1000.0)
    for name in OPS:
        op = getattr(ops, name)
        monkeypatch.setattr(op, "run_kernels", lambda *a, op=op: op.reference(*a, *op._defaults[len(a) :]))


def worker(model, compiled: list | None = None, **passes):
    """A worker that has loaded a model."""
    off = dict.fromkeys(("fuse_norm_quant", "fuse_act_quant", "fuse_allreduce_rms"), False)
    settings = types.SimpleNamespace(
        pass_config=types.SimpleNamespace(**off | passes), mode=compiled, backend="inductor"
    )
    model_config = types.SimpleNamespace(get_hidden_size=lambda: HIDDEN, dtype=torch.bfloat16)
    config = types.SimpleNamespace(
        compilation_config=settings,
        model_config=model_config,
        scheduler_config=types.SimpleNamespace(max_num_batched_tokens=MOST),
        additional_config={},
    )
    return types.SimpleNamespace(vllm_config=config, model_runner=types.SimpleNamespace(get_model=lambda: model))


def decide(model, clock, gather=lambda mine: [mine], says=True, **passes) -> dict[str, bool]:
    """Which of a layer's three are ours afterwards."""
    row_selection.before_compiling(worker(model, **passes), clock, gather, says)
    x, residual = torch.ones(3, HIDDEN, dtype=torch.bfloat16), torch.ones(3, HIDDEN, dtype=torch.bfloat16)
    results = {
        "norm": model.input_layernorm(x, residual)[0],
        "q": model.q_norm(x[:, :LATENT].contiguous()),
        "act": model.act_fn(x),
    }
    linears = {"norm": model.qkv_proj, "q": model.q_b_proj, "act": model.down_proj}
    ours = {}
    for name, result in results.items():
        key = linears[name]._input_quant_key
        if name == "act":  # whose linear is known to vLLM's model, not to the activation
            ours[name] = key is not None
            assert (model.act_fn._forward_method == model.act_fn.rocm_ops_forward) == ours[name]
            continue
        ours[name] = not isinstance(result, torch.Tensor)
        assert ours[name] == (key is not None)
    return ours


ALL = {"norm": True, "q": True, "act": True}
NONE = dict.fromkeys(ALL, False)


@pytest.mark.parametrize("key", KEYS)
def test_the_faster_serves(kernels, key, caplog):
    """Ours where it is the faster over all and nowhere the slower, else vLLM's forward, which the compiler sees; written to this
    machine's file, and read by the next process."""
    assert decide(Layer(key), clock := Clock()) == ALL
    shapes = [(HIDDEN, True), (2 * INNER, False), (LATENT, False)]
    assert [(t, *shape) for t, *shape, _ in clock.asked] == [(t, *s) for s in shapes for t in (2, 8, 64, MOST)]
    assert all(1 <= sets <= row_selection.SETS for *_, sets in clock.asked)
    assert row_selection.stay() == []
    assert decide(Layer(key), again := Clock()) == ALL and again.asked == []
    [path] = kernel_selection.envs.tables().glob("*/measured-*.json")
    record = kernel_selection.read(path)
    assert len(record.shapes) == 3 and all(name.endswith(" compiled") for name in record.shapes)
    for by_tokens in record.shapes.values():
        assert all(
            one.error <= 2 * one.native_error + 1e-5 and 1e-3 < one.native_error < 0.1 for one in by_tokens.values()
        )
    path.unlink()
    with caplog.at_level(logging.INFO):
        assert decide(Layer(key), Clock(lambda tokens: 20.0)) == NONE
    assert len(row_selection.stay()) == 3
    assert "compiled" in caplog.text and "vLLM's" in caplog.text


def test_scales_may_be_negative(kernels, caplog):
    """As half of the random ones are that vLLM has for `load_format="dummy"`."""
    layer = Layer(KEYS[1])
    layer.down_proj.input_scale.neg_()
    assert decide(layer, Clock()) == ALL
    assert "not measured" not in caplog.text


@pytest.mark.parametrize(
    ("us", "wins"),
    [
        (lambda tokens: 9.7, True),
        (lambda tokens: 9.9, False),
        (lambda tokens: 5.0 if tokens < MOST else 10.1, True),
        (lambda tokens: 5.0 if tokens < MOST else 10.3, False),
        (lambda tokens: 10.1 if tokens < MOST else 9.0, False),
    ],
)
def test_ours_may_nowhere_be_the_slower(kernels, us, wins):
    """One graph serves every number of tokens. What disturbs a sample changes nothing."""
    assert decide(Layer(KEYS[0]), Clock(us)) == (ALL if wins else NONE)
    [*lines] = kernel_selection.rows(
        kernel_selection.read(next(kernel_selection.envs.tables().glob("*/measured-*.json")))
    )
    assert {line[5] for line in lines} == {"ours" if wins else "vLLM's"}


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
    """And only that op; said once, and by later processes too."""
    op = ops.silu_and_mul_per_block_quant
    monkeypatch.setattr(op, "run_kernels", lambda *a: WRONG[fault](*op.reference(*a, *op._defaults[len(a) :])))
    for clock in (Clock(), None):
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
    assert decide(Layer(KEYS[2]), Clock()) == {"norm": False, "q": False, "act": True}


def test_what_kernels_do_not_take_stays_vllms(kernels, monkeypatch):
    monkeypatch.setattr(ops.silu_and_mul_per_token_quant, "run_kernels", lambda *a: None)
    assert decide(Layer(KEYS[0]), Clock()) == {"norm": True, "q": True, "act": False}


@pytest.mark.parametrize("measures", ["0", "1"])
def test_unmeasured_vllms_stays_where_it_fuses(kernels, monkeypatch, measures):
    """Without a clock, and with the switch off, whatever a table says. Where no pass runs, as in eager mode, ours does."""
    assert decide(Layer(KEYS[0]), None, fuse_norm_quant=True, fuse_act_quant=True) == ALL
    monkeypatch.setattr(row_selection, "has_passes", lambda config: True)
    if measures == "0":
        decide(Layer(KEYS[0]), Clock(lambda tokens: 99.0))
    monkeypatch.setenv("VLLM_ROCM_OPS_MEASURE", measures)
    assert decide(Layer(KEYS[0]), None) == ALL
    assert decide(Layer(KEYS[0]), None, fuse_norm_quant=True) == {"norm": False, "q": False, "act": True}
    assert decide(Layer(KEYS[0]), None, fuse_act_quant=True) == {"norm": True, "q": True, "act": False}
    if measures == "1":  # what was measured counts
        assert decide(Layer(KEYS[0]), Clock(), fuse_norm_quant=True, fuse_act_quant=True) == ALL


def test_ranks_agree(kernels):
    """Ours runs where it does for all ranks."""
    [layer] = [Layer(KEYS[0])]
    found = row_selection.fused_in([layer], HIDDEN, torch.bfloat16)
    slow = kernel_selection.Decided({}, {found[0].key: bytes([0]), found[1].key: bytes([1])})
    wrong = kernel_selection.Decided({found[2].op.name: "wrong there"}, {})
    assert decide(layer, Clock(), lambda mine: [mine, slow, wrong]) == {"norm": False, "q": True, "act": False}


@pytest.mark.parametrize(("switch", "platform"), [("all", "rocm"), ("norm,all", "rocm"), ("all", "cuda")])
def test_norms_stay_vllms_where_it_fuses_them_with_aiters_all_reduce(kernels, monkeypatch, caplog, switch, platform):
    """All of them, also those with no linear behind; the user can have ours."""
    monkeypatch.setenv("VLLM_ROCM_OPS_SEAMS", switch)
    monkeypatch.setattr(seam, "served_platform", lambda: platform)
    monkeypatch.setattr(seam, "arch_here", lambda _: None)
    layer = Layer(KEYS[0])
    layer.norm = type(layer.q_norm)(HIDDEN, dtype=torch.bfloat16)
    stays = (switch, platform) == ("all", "rocm")
    with caplog.at_level(logging.INFO):
        assert decide(layer, None, fuse_allreduce_rms=True) == {"norm": not stays, "q": not stays, "act": True}
    assert (layer.norm._forward_method == layer.norm.vllm_forward) == stays
    assert ("3 norms stay vLLM's" in caplog.text) == stays


def test_the_compile_cache_knows_what_stays(kernels, monkeypatch):
    """In the worker's configuration, and in the one that a compiled part of the model holds."""
    from vllm_rocm_ops.vllm.seams import compile_cache

    layer = Layer(KEYS[0])
    held = types.SimpleNamespace(additional_config={})
    layer.vllm_config = held
    before = compile_cache.fingerprint()
    one = worker(layer)
    row_selection.before_compiling(one, Clock(lambda tokens: 20.0), lambda mine: [mine], False)
    compile_cache.mark_again(one)
    after = compile_cache.fingerprint()
    assert after != before
    assert one.vllm_config.additional_config == held.additional_config == {"vllm_rocm_ops": after}
    assert decide(Layer(KEYS[0]), None) == NONE  # the next process reads the same


def test_a_linear_that_is_left_stays_left(kernels):
    """Also when weights are loaded again, which tells the layers again what their linears take."""
    from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import FP8ScaledMMLinearKernel

    quant = types.SimpleNamespace(column_major_scales=False)
    kernel = types.SimpleNamespace(input_quant_key=lambda: "a key", quant_fp8=quant)
    layer, other = Layer(KEYS[0]), Layer(KEYS[0])
    decide(layer, Clock(lambda tokens: 20.0))
    for linear, key in ((layer.down_proj, None), (other.down_proj, "a key")):
        FP8ScaledMMLinearKernel.process_weights_after_loading(kernel, linear)
        assert linear._input_quant_key == key


def test_a_worker_that_fails_starts(caplog):
    from vllm_rocm_ops.vllm.seams import measured_selection

    measured_selection.before_compiling(types.SimpleNamespace())
    assert "norms and activations are not chosen: " in caplog.text
