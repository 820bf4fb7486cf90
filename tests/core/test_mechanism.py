"""Test the op mechanism: schemas, fakes, errors, fallbacks, explain, stats, tuned tables, arguments, graphs, compile."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
import os
import struct
import subprocess
import sys
import types
import warnings

import pytest
import torch
from marks import BUILT
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.optests.generate_tests import DEFAULT_TEST_UTILS

import vllm_rocm_ops
from vllm_rocm_ops import ops
from vllm_rocm_ops.core import archs, envs, execution, launch, op
from vllm_rocm_ops.core import tables as tuned_tables
from vllm_rocm_ops.core.explanation import EXPLAINED_CONFIGS
from vllm_rocm_ops.core.kernel_arguments import Parameters, packer
from vllm_rocm_ops.core.launch import Launch
from vllm_rocm_ops.core.stats import fallbacks, reset_stats, stats, warned
from vllm_rocm_ops.vllm.graph import compiled_ops
from vllm_rocm_ops.vllm.guards import compile_cache
from vllm_rocm_ops.vllm.linear import base as linear_base

DEVICE = "cuda" if torch.cuda.is_available() and archs.of_device(0) is not None else "cpu"
FP8 = archs.of_device(0).fp8_dtype if DEVICE == "cuda" else torch.float8_e4m3fn
OPS = list(op.registered())
each_op = pytest.mark.parametrize("the_op", OPS, ids=lambda o: o.name)


class Recorder:
    """An executor that keeps its launches and runs nothing."""

    def __init__(self, name: str = "gfx942"):
        self.arch, self.launches = archs.ARCHS[name], []

    def launch(self, launch, uninitialized):
        self.launches.append((launch, uninitialized))


@pytest.fixture
def recorder(tmp_path, monkeypatch):
    """Yield a recorder for an arch whose code objects appear to exist."""
    executor, built = Recorder(), launch.CODE
    (tmp_path / executor.arch.name).mkdir()
    monkeypatch.setattr(launch, "CODE", tmp_path)
    for module in ("rms_norm", "silu_and_mul"):
        kernels = launch.stamp(built / executor.arch.name / f"{module}.co")["kernels"]
        path = launch.code_object(module, executor.arch.name)
        path.touch()
        path.with_suffix(".json").write_text(json.dumps({"kernels": kernels}))
    with launch.executor(executor):
        yield executor


@pytest.fixture(autouse=True)
def fresh_counts():
    reset_stats()
    warned.clear()


def example(the_op, device=DEVICE, fp8=FP8, case=0):
    return list(the_op.cases())[case].make(device, torch.Generator().manual_seed(1), fp8)


def norm_arguments(rows=4, hidden=256, dtype=torch.bfloat16, device="cpu"):
    return torch.randn(rows, hidden, device=device).to(dtype), torch.ones(hidden, device=device, dtype=dtype), 1e-5


# torch integration


@each_op
def test_opcheck(the_op):
    arguments = example(the_op)
    checks = list(DEFAULT_TEST_UTILS)
    if any(isinstance(v, torch.Tensor) and v.element_size() == 1 for v in arguments):
        checks.remove("test_schema")  # torch cannot compare float8 inputs before and after
    torch.library.opcheck(the_op.torch_op, arguments, test_utils=checks)


@each_op
def test_schema_declares_what_it_mutates(the_op):
    written = [a.name for a in the_op.torch_op._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    updated = {"residual", "q_pe", "k_pe", "kv_cache", "key_cache", "value_cache", "conv_state", "state"}
    updated |= {"query", "key"} if the_op.name == "rope_and_cache" else set()
    assert written == [
        name for name in the_op.Arguments._fields if name in updated and the_op.mutates or name in the_op.writes
    ]


@each_op
def test_compile_fullgraph(the_op):
    arguments, expected_arguments = example(the_op), example(the_op)
    expected = the_op(*expected_arguments)
    torch._dynamo.reset()
    compiled = torch.compile(lambda *a: the_op.torch_op(*a), fullgraph=True, backend="aot_eager")
    got = compiled(*arguments)
    for one, other in ((got, expected), (arguments, expected_arguments)):
        torch.testing.assert_close(as_floats(one), as_floats(other), rtol=0, atol=0, equal_nan=True)


def as_floats(values):
    return [v.float() for v in (values if isinstance(values, tuple) else (values,)) if isinstance(v, torch.Tensor)]


if DEVICE == "cuda":

    @each_op
    def test_graph_replay_follows_its_inputs(the_op):
        arguments = example(the_op)
        the_op(*arguments)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            captured = the_op(*arguments)
        arguments[0].copy_(torch.randn(arguments[0].shape))
        eager_arguments = [v.clone() if isinstance(v, torch.Tensor) else v for v in arguments]
        graph.replay()
        expected = the_op(*eager_arguments)
        torch.testing.assert_close(as_floats(captured), as_floats(expected), rtol=0, atol=0)

    def test_a_kernel_that_the_driver_refuses_falls_back(tmp_path, monkeypatch):
        monkeypatch.setattr(launch, "CODE", tmp_path)
        path = launch.code_object("rms_norm", archs.of_device(0).name)
        path.parent.mkdir()
        path.write_text("nonsense")
        x, weight, epsilon = norm_arguments(hidden=296, device="cuda")
        with pytest.warns(UserWarning, match="rms_norm runs without its kernels: .*DISABLE=rms_norm"):
            assert ops.rms_norm.run_kernels(x, weight, epsilon) is None
        assert torch.equal(ops.rms_norm(x, weight, epsilon), ops.rms_norm.reference(x, weight, epsilon))
        ops.rms_norm.invalidate()

    @each_op
    def test_same_bits_every_run(the_op):
        results = set()
        for _ in range(50):
            results.add(tuple(v.cpu().numpy().tobytes() for v in as_floats(the_op(*example(the_op)))))
        assert len(results) == 1


# errors


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda x, w, e: ops.rms_norm(x, w[:-1], e),
            r"rms_norm: weight must be bfloat16\[hidden=256\], got bfloat16\[255\]",
        ),
        (lambda x, w, e: ops.rms_norm(x, w.half(), e), r"rms_norm: weight must be bfloat16.*got float16\[256\]"),
        (
            lambda x, w, e: ops.fused_add_rms_norm(x, x[:2], w, e),
            r"residual must be bfloat16\[4, 256\].*got bfloat16\[2, 256\]",
        ),
        (lambda x, w, e: ops.fused_add_rms_norm(x, x.float(), w, e), "residual must be bfloat16.*got float32"),
        (
            lambda x, w, e: ops.rms_norm_static_fp8_quant(x, w, torch.ones(2), e, FP8),
            r"scale must be float32 with one element, got float32\[2\]",
        ),
        (
            lambda x, w, e: ops.rms_norm_dynamic_per_token_quant(x, w, e, torch.int8),
            "quant_dtype must be float8_e4m3fn or float8_e4m3fnuz, got int8",
        ),
        (
            lambda x, w, e: ops.rms_norm_per_block_quant(x, w, e, FP8, 96),
            "input must be a multiple of group_size=96 in its last output dimension, got 256",
        ),
        (lambda x, w, e: ops.rms_norm_per_block_quant(x, w, e, FP8, 0), "group_size must be positive, got 0"),
        (
            lambda x, w, e: ops.silu_and_mul(x[:, :255]),
            r"silu_and_mul: input must be \[..., 2 \* hidden\], got \[4, 255\]",
        ),
    ],
)
def test_bad_input_names_op_argument_wanted_and_got(call, message):
    with pytest.raises(ValueError, match=message):
        call(*norm_arguments())


def test_nothing_is_written_before_an_error():
    x, weight, epsilon = norm_arguments()
    residual = x.clone()
    with pytest.raises(ValueError):
        ops.fused_add_rms_norm(x, residual, weight[:-1], epsilon)
    assert torch.equal(residual, x)


# fallbacks, explain and stats


def test_can_implement_rules_fall_back_and_say_why(recorder):
    x, weight, epsilon = norm_arguments()
    ops.rms_norm(x, weight, epsilon)
    ops.rms_norm(x.float(), weight.float(), epsilon)
    ops.rms_norm(x.t().contiguous().t(), weight, epsilon)
    ops.rms_norm_static_fp8_quant(x, weight, torch.ones(1), epsilon, torch.float8_e4m3fn)
    assert vllm_rocm_ops.stats() == {
        "rms_norm": {
            "rms_norm_bf16_x1": 1,
            "fallback: the kernels require that input is bfloat16 or float16": 1,
            "fallback: the kernels require that input's rows have one stride, or two as heads of wider rows, and "
            "contiguous elements": 1,
        },
        "rms_norm_static_fp8_quant": {
            "fallback: the kernels require that quant_dtype is float8_e4m3fnuz, the FP8 dtype of gfx942": 1
        },
    }
    assert [l.symbol for l, _ in recorder.launches] == ["rms_norm_bf16_x1"]


def broken_norms(why: str) -> None:
    """Check that calls of two signatures fall back for this reason, with one warning that names the switch.

    vLLM's kernel can run instead.
    """
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for hidden in (264, 280):
            x, weight, epsilon = norm_arguments(hidden=hidden)
            out = ops.rms_norm(x, weight, epsilon)
            assert ops.rms_norm.run_kernels(x, weight, epsilon) is None
            assert torch.equal(out, ops.rms_norm.reference(x, weight, epsilon))
    (message,) = [str(w.message) for w in warned]
    assert message.startswith(f"rms_norm runs without its kernels: {why}")
    assert message.endswith(". To run without its kernels, set VLLM_ROCM_OPS_DISABLE=rms_norm")
    assert [name.partition(why)[1] for name in stats()["rms_norm"]] == [why]


def test_missing_code_object_falls_back(recorder):
    launch.code_object("rms_norm", recorder.arch.name).unlink()
    broken_norms("no code object of rms_norm for gfx942")


def test_damaged_code_object_falls_back(recorder):
    """A stamp has its object's hash. Without one, the object is accepted as it is."""
    path = launch.code_object("rms_norm", recorder.arch.name)
    ops.rms_norm(*norm_arguments(hidden=248))
    stamp = launch.stamp(path)
    path.with_suffix(".json").write_text(json.dumps(stamp | {"sha256": hashlib.sha256(b"").hexdigest()}))
    ops.rms_norm(*norm_arguments(hidden=240))
    assert stats()["rms_norm"] == {"rms_norm_bf16_x1": 2}
    reset_stats()
    path.write_bytes(b"cut off")
    broken_norms("the code object of rms_norm for gfx942 is damaged")
    explanation = ops.rms_norm.explain(*norm_arguments(hidden=256), arch="gfx942", require_code=True)
    assert "damaged" in explanation.source and not explanation.launches


@pytest.mark.parametrize("stamp", ["{}", "no stamp", '{"kernels": {}}'])
def test_a_code_object_whose_arguments_are_not_known_falls_back(recorder, stamp):
    path = launch.code_object("rms_norm", recorder.arch.name)
    path.with_suffix(".json").write_text(stamp)
    broken_norms(f"the stamp of {path} does not have the arguments of rms_norm_bf16_x1")
    explanation = ops.rms_norm.explain(*norm_arguments(hidden=256), arch="gfx942", require_code=True)
    assert "does not have the arguments" in explanation.source and not explanation.launches
    assert not recorder.launches


def test_wrong_arguments_are_found_before_anything_is_launched(recorder, monkeypatch):
    """The second of two launches has the wrong arguments."""
    plan = ops.rms_norm.plan

    def misspelt(*given):
        (planned,) = plan(*given)
        args = {name.replace("epsilon", "epsilion"): value for name, value in planned.args.items()}
        return [planned, planned._replace(args=args)]

    monkeypatch.setattr(ops.rms_norm, "plan", misspelt)
    with pytest.raises(
        TypeError, match="^rms_norm_bf16_x1: arguments must be input, .*got no epsilon and also epsilion$"
    ):
        ops.rms_norm(*norm_arguments(hidden=232))
    assert not recorder.launches


def warnings_of(calls) -> list[str]:
    """Return the warnings of a function."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        calls()
    return [str(one.message) for one in found]


def test_one_warning_for_each_reason_of_an_op(recorder, monkeypatch):
    """The warning names the switch. An op that the user switched off, and a machine without a GPU, cause no warning."""

    def calls():
        for rows in (2, 3):
            x, weight, epsilon = norm_arguments(rows=rows, hidden=224)
            ops.rms_norm(x.float(), weight.float(), epsilon)
            assert ops.rms_norm.run_kernels(x.t().contiguous().t(), weight, epsilon) is None

    advice = ". To run without its kernels, set VLLM_ROCM_OPS_DISABLE=rms_norm"
    given = warnings_of(calls)
    needs = list(fallbacks()["rms_norm"])
    assert [why.partition(" input")[0] for why in needs] == ["the kernels require that"] * 2
    assert given == [f"rms_norm runs without its kernels: {why}{advice}" for why in needs]
    assert fallbacks() == {"rms_norm": dict.fromkeys(needs, 2)}
    monkeypatch.setenv("VLLM_ROCM_OPS_DISABLE", "rms_norm")
    with launch.executor(None):
        ops.silu_and_mul(norm_arguments()[0])
    ops.rms_norm.invalidate()
    warned.clear()
    reset_stats()
    assert warnings_of(calls) == []
    assert fallbacks() == {"rms_norm": {"switched off by VLLM_ROCM_OPS_DISABLE": 4}}


def test_arguments_that_break_the_contract_are_counted(recorder):
    """The caller has a faster kernel than the reference, which would raise."""
    x, weight, epsilon = norm_arguments(hidden=208)

    def calls():
        for rows in (1, 2):
            assert ops.rms_norm.run_kernels(x[:rows], weight[:-1], epsilon) is None

    (message,) = warnings_of(calls)
    assert message.startswith("rms_norm runs without its kernels: rms_norm: weight must be ")
    assert fallbacks() == {"rms_norm": {"the arguments break the op's contract": 2}}


def test_trials_are_no_fallbacks(recorder):
    """The caller asks which arguments kernels accept. Code that does not load still causes a warning."""
    x, weight, epsilon = norm_arguments(hidden=160)

    def calls():
        with ops.rms_norm.trial():
            assert ops.rms_norm.run_kernels(x.float(), weight.float(), epsilon) is None
            launch.code_object("rms_norm", recorder.arch.name).unlink()
            assert ops.rms_norm.run_kernels(x, weight, epsilon) is None

    (message,) = warnings_of(calls)
    assert "no code object of rms_norm" in message
    assert fallbacks() == {}
    assert ops.rms_norm.run_kernels(x, weight, epsilon) is None
    assert sum(fallbacks()["rms_norm"].values()) == 1


def test_on_a_gpu_what_is_native_comes_before_the_reference(recorder, monkeypatch):
    x, weight, epsilon = norm_arguments(hidden=192)
    native = []
    monkeypatch.setattr(ops.rms_norm, "native", lambda *args: native.append(args) or torch.zeros_like(x))
    ops.rms_norm(x, weight, epsilon)
    assert [l.symbol for l, _ in recorder.launches] == ["rms_norm_bf16_x1"] and not native
    monkeypatch.setenv("VLLM_ROCM_OPS_DISABLE", "rms_norm")
    ops.rms_norm.invalidate()
    assert not ops.rms_norm(x, weight, epsilon).any()
    assert len(native) == 1 and native[0][0].shape == x.shape
    with launch.executor(None):
        assert torch.equal(ops.rms_norm(x, weight, epsilon), ops.rms_norm.reference(x, weight, epsilon))
    ops.rms_norm.invalidate()


def test_a_call_whose_launch_fails_is_done_without(recorder, monkeypatch):
    """Nothing ran, so the residual is added only once. Later calls of the signature launch nothing."""
    tried = []

    def fail(launch_, uninitialized):
        tried.append(launch_.symbol)
        raise launch.NotLaunched(f"out of registers. To run without its kernels, set {switch}")

    monkeypatch.setattr(recorder, "launch", fail)
    switch = "VLLM_ROCM_OPS_DISABLE=fused_add_rms_norm"
    x, weight, epsilon = norm_arguments(hidden=176)
    residual, wanted = x.clone(), 2 * x

    def calls():
        for _ in range(2):
            out = ops.fused_add_rms_norm(x, residual, weight, epsilon)
            assert torch.equal(residual, wanted)
            assert torch.equal(out, ops.rms_norm.reference(wanted, weight, epsilon))
            residual.copy_(x)
        assert ops.fused_add_rms_norm.run_kernels(x, residual, weight, epsilon) is None
        assert ops.fused_add_rms_norm.run_kernels(x[:2], residual[:2], weight, epsilon) is None
        assert torch.equal(residual, x)

    why = "out of registers"
    assert warnings_of(calls) == [
        f"fused_add_rms_norm runs without its kernels: {why}. To run without its kernels, set {switch}"
    ]
    assert len(tried) == 2
    assert stats() == {"fused_add_rms_norm": {f"fallback: {why}": 4}}


def test_old_signatures_are_forgotten(recorder, monkeypatch):
    """They are evicted one by one, and those in use stay."""
    monkeypatch.setattr(op, "REMEMBERED_SIGNATURES", 2)
    ops.rms_norm.invalidate()
    _, weight, epsilon = norm_arguments()
    decided = []
    monkeypatch.setattr(ops.rms_norm, "_decide", lambda a: decided.append(len(a.input)) or decide(a))
    decide = op.Op._decide.__get__(ops.rms_norm)
    for rows in (1, 2, 3, 2, 3, 1):
        ops.rms_norm(torch.ones(rows, 256, dtype=torch.bfloat16), weight, epsilon)
    assert decided == [1, 2, 3, 1]


class Driver:
    """A runtime that fails where told to, and records the requests for counters."""

    def __init__(self, fails_at: str = ""):
        self.fails_at, self.asked, self.launched = fails_at, [], []

    def load(self, path, symbol, device):
        if self.fails_at == "load":
            raise RuntimeError(f"{symbol} of {path}: device kernel image is invalid")
        return 5

    def counters(self, device, stream, size):
        self.asked.append((device, stream, size))
        return 0xC0C0

    def launch(self, *arguments):
        if self.fails_at == f"launch {len(self.launched)}":
            raise RuntimeError("launch: out of registers")
        self.launched.append(arguments)


def test_a_kernel_that_does_not_load_falls_back(monkeypatch):
    monkeypatch.setattr(launch, "runtime", lambda: (Driver("load"), ""))
    monkeypatch.setattr(archs, "of_device", lambda index: archs.ARCHS["gfx942"])
    the_op = ops.topk_softmax
    with (
        FakeTensorMode(),
        pytest.warns(UserWarning, match="^topk_softmax runs without .* invalid. .*DISABLE=topk_soft"),
    ):
        execution = the_op._decide(the_op.Arguments(torch.empty(3, 64, device="cuda:0"), 4))
    assert execution.is_fallback


@pytest.fixture
def gpu_of_cpu(monkeypatch):
    """Make the binding of launches for a GPU accept the CPU, with 7 as the current stream."""
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)


def bind(driver: Driver, kernel: Launch, x: torch.Tensor, launches: int = 1):
    named, device = collections.namedtuple("arguments", "x")(x), torch.device("cpu")
    packed = packer(kernel, Parameters(20, {"x": (0, "pointer"), "counters": (8, "pointer"), "n": (16, "i32")}))
    many = (kernel,) * launches, [5] * launches, [packed] * launches
    return execution.bind_device(driver, device, *many, torch.empty(2), named, "Set SWITCH=op")


def test_each_launch_asks_for_its_counters(gpu_of_cpu):
    x, driver = torch.ones(2), Driver()
    run = bind(driver, Launch("m", "k", (3, 1, 1), (64, 1, 1), {"n": 8, "counters": launch.Counters(36), "x": x}), x)
    for _ in range(2):
        run((x,))
    assert driver.asked == [(None, 7, 144)] * 2
    assert [how[:-1] for how in driver.launched] == [(5, 3, 1, 1, 64, 1, 1, 0, 7)] * 2
    assert driver.launched[0][-1] == struct.pack("<QQi", x.data_ptr(), 0xC0C0, 8)
    two = {"x": launch.Counters(1), "counters": launch.Counters(1), "n": 1}
    with pytest.raises(TypeError, match="k must have one Counters, got 2"):
        bind(driver, Launch("m", "k", (3, 1, 1), (64, 1, 1), two), x)


@pytest.mark.parametrize(("fails", "error"), [(0, launch.NotLaunched), (1, RuntimeError)])
def test_a_launch_that_fails_names_the_switch(gpu_of_cpu, fails, error):
    """Another kernel may take the call only if no launch ran before."""
    x = torch.ones(2)
    kernel = Launch("m", "k", (3, 1, 1), (64, 1, 1), {"x": x, "counters": None, "n": 1})
    run = bind(Driver(f"launch {fails}"), kernel, x, launches=2)
    with pytest.raises(RuntimeError, match="^launch: out of registers. Set SWITCH=op$") as raised:
        run((x,))
    assert raised.type is error


@pytest.mark.parametrize(
    "switch", ["silu_and_mul,rms_norm", " rms_norm , silu_and_mul", "all", "ALL", "topk_softmax, All"]
)
def test_an_op_can_be_switched_off(recorder, monkeypatch, switch):
    monkeypatch.setenv("VLLM_ROCM_OPS_DISABLE", switch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ops.rms_norm(*norm_arguments(hidden=272))
    assert list(stats()["rms_norm"]) == ["fallback: switched off by VLLM_ROCM_OPS_DISABLE"]


@pytest.mark.parametrize("switch", ["", " ", "silu_and_mul,", "rmsnorm, silu_and_mul"])
def test_other_ops_are_not_switched_off(recorder, monkeypatch, switch):
    """A value that names no op is reported once, with the known names."""
    monkeypatch.setenv("VLLM_ROCM_OPS_DISABLE", switch)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for hidden in (272, 288):
            ops.rms_norm(*norm_arguments(hidden=hidden))
    assert list(stats()["rms_norm"]) == ["rms_norm_bf16_x1"]
    if "rmsnorm" in switch:
        (message,) = [str(w.message) for w in warned]
        assert "comma list of all, all_reduce, batched_gemm, " in message and "got rmsnorm too" in message
    else:
        assert not warned


def test_no_rows_launch_nothing(recorder):
    out = ops.rms_norm(*norm_arguments(rows=0))
    assert out.shape == (0, 256) and not recorder.launches
    assert stats()["rms_norm"] == {"nothing to do": 1}


def test_a_repeated_signature_binds_new_pointers(recorder):
    first, second = norm_arguments(), norm_arguments()
    outs = [ops.rms_norm(*first), ops.rms_norm(*second)]
    for (launched, unwritten), arguments, out in zip(recorder.launches, (first, second), outs):
        x, weight, _ = arguments
        tensors = {name: id(arg) for name, arg in launched.args.items() if isinstance(arg, torch.Tensor)}
        assert tensors == {"input": id(x), "weight": id(weight), "out": id(out)}
        assert unwritten == (out,)
    assert stats()["rms_norm"] == {"rms_norm_bf16_x1": 2}


def test_alignment_is_part_of_the_signature(recorder):
    storage = torch.randn(1, 264).bfloat16()
    for start in (0, 1):
        ops.rms_norm(storage[:, start : start + 256], torch.ones(256).bfloat16(), 1e-5)
    assert [l.symbol for l, _ in recorder.launches] == ["rms_norm_bf16_x1", "rms_norm_bf16_general"]


@each_op
def test_explain_on_meta_tensors(the_op):
    """Every op has kernels for an arch; for another arch it names the broken rule."""
    explanations = []
    for arch in archs.ARCHS.values():
        meta = [v.to("meta") if isinstance(v, torch.Tensor) else v for v in example(the_op, "cpu", arch.fp8_dtype)]
        explanations.append(the_op.explain(*meta, arch=arch.name))
    for explanation in explanations:
        text = str(explanation)
        if explanation.launches:
            assert explanation.launches[0].symbol in text and "default" in text and "NO " not in text
        else:
            assert "fallback: the kernels require" in text and "NO " in text
    assert any(explanation.launches for explanation in explanations)


def test_explain_shows_the_rejected_rule():
    explanation = ops.rms_norm.explain(torch.empty(2, 8), torch.empty(8), 1e-6, arch="gfx950")
    assert not explanation.launches and "NO  input is bfloat16 or float16" in str(explanation)


@pytest.mark.parametrize("the_op", [ops.rms_norm, ops.layer_norm], ids=lambda o: o.name)
def test_rows_at_two_strides_are_taken_by_rms_norm_and_at_three_by_none(the_op):
    qkv = torch.empty(2, 5, 9216, dtype=torch.bfloat16, device="meta")
    one = qkv[:, :, :128], None, *(None,) * (the_op is ops.layer_norm), 1e-6
    two, three = ((x.unflatten(-1, (4, 128)), *one[1:]) for x in (qkv[:, :, :512], qkv[:, :3, :512]))
    assert not the_op.explain(*one, arch="gfx942").is_fallback
    assert the_op.explain(*two, arch="gfx942").is_fallback == (the_op is ops.layer_norm)
    assert "NO  input's rows have one stride" in str(the_op.explain(*three, arch="gfx942"))


@pytest.mark.parametrize(
    "name, compute_units",
    [
        ("gfx942", 304),
        ("MI300X", 304),
        ("MI325X", 304),
        ("mi300x", 304),
        ("GFX942", 304),
        ("MI308X", 80),
        ("gfx942:80", 80),
        ("MI350X", 256),
        ("MI355X", 256),
    ],
)
def test_archs_and_products_are_known_by_name(name, compute_units):
    arch = archs.named(name)
    assert arch.compute_units == compute_units and archs.named(str(arch)) == arch
    assert arch == dataclasses.replace(archs.ARCHS[arch.name], compute_units=compute_units)
    assert ops.rms_norm.explain(*norm_arguments(), arch=name).arch == str(arch)


@pytest.mark.parametrize(
    "name", ["gfx90a", "gfx942:", "gfx942:0", "gfx942:12345", "gfx942:80:1", "MI300", "MI308X:80", ""]
)
def test_unknown_archs_are_refused(name):
    known = ", ".join((*archs.ARCHS, *archs.PRODUCTS))
    with pytest.raises(ValueError, match=rf"^arch must be one of {known} or like \w+:80, got {name}$"):
        archs.named(name)


@pytest.fixture
def tables(tmp_path, monkeypatch):
    """Replace the user's tuned tables by an empty folder."""
    monkeypatch.setenv("VLLM_ROCM_OPS_TABLES", str(tmp_path))
    tuned_tables.table.cache_clear()
    (tmp_path / "gfx942").mkdir()
    yield tmp_path / "gfx942"
    tuned_tables.table.cache_clear()


def test_tuned_row_replaces_the_default(tables):
    rows = "dtype,rows,hidden,compute_units,config.threads,config.vectors_per_thread,source\nbf16,4,4096,304,256,2,a measurement\n"
    (tables / "rms_norm.csv").write_text(rows)
    tuned = ops.rms_norm.explain(*norm_arguments(4, 4096), arch="gfx942")
    others = [
        ops.rms_norm.explain(*norm_arguments(5, 4096), arch="gfx942"),
        ops.rms_norm.explain(*norm_arguments(4, 4096), arch="MI308X"),
        ops.rms_norm.explain(*norm_arguments(4, 4096), arch="gfx950"),
    ]
    assert tuned.launches[0].symbol == "rms_norm_bf16_x2" and tuned.source.startswith("tuned")
    for other in others:
        assert other.launches[0].symbol == "rms_norm_bf16_x1" and other.source.startswith("default")


def test_a_folder_of_tables_that_may_not_be_searched(tmp_path):
    """A server may run with another user's HOME: one warning for all ops, and the defaults."""
    tmp_path.chmod(0o755)
    home = tmp_path / "home"
    home.mkdir(0o000)
    code = """
import os, sys, torch, warnings
from vllm_rocm_ops import ops
if os.geteuid() == 0:
    os.seteuid(65534)
x, weight = torch.empty(2, 256, dtype=torch.bfloat16, device="meta"), torch.empty(256, dtype=torch.bfloat16, device="meta")
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    for explained in (ops.rms_norm.explain(x, weight, 1e-6, arch="gfx942"), ops.silu_and_mul.explain(x, arch="gfx942")):
        print(explained.source.split()[0])
print(*[w.message for w in warned], sep="\\n")
"""
    environment = {k: v for k, v in os.environ.items() if k not in ("VLLM_ROCM_OPS_TABLES", "XDG_CONFIG_HOME")}
    environment |= {"HOME": str(home)}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, check=False, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    folder = home / ".config" / "vllm-rocm-ops" / "tables" / "gfx942"
    warned = f"the tuned tables in {folder} are not used: this user may not read them"
    assert result.stdout.splitlines() == ["default", "default", warned]


NORM_HEADER = "compute_units,dtype,rows,hidden,config.threads,config.vectors_per_thread,source\n"


def explained_norm() -> op.Explanation:
    tuned_tables.table.cache_clear()
    return ops.rms_norm.explain(*norm_arguments(4, 4096), arch="gfx942")


@pytest.mark.parametrize("row", [",,nothing is better", "100,7,made by another version"])
def test_a_row_without_a_configuration_that_fits_leaves_the_default(tables, row):
    (tables / "rms_norm.csv").write_text(NORM_HEADER + f"304,bf16,4,4096,{row}\n")
    assert explained_norm().source.startswith("default")


@pytest.mark.parametrize(
    "text", ["compute_units,source\n304,old\n", NORM_HEADER.replace(",rows", "") + "304,bf16\n", "nonsense\n1\n"]
)
def test_a_users_table_that_is_not_one_is_left_out_with_a_warning(tables, text):
    (tables / "rms_norm.csv").write_text(text)
    with pytest.warns(UserWarning, match="rms_norm.csv is not used"):
        assert explained_norm().source.startswith("default")


def test_the_users_tables_are_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.delenv("VLLM_ROCM_OPS_TABLES", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert envs.tables() == tmp_path / "vllm-rocm-ops" / "tables"
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert envs.tables() == tmp_path / ".config" / "vllm-rocm-ops" / "tables"
    monkeypatch.setenv("VLLM_ROCM_OPS_TABLES", str(tmp_path / "mine"))
    assert envs.tables() == tmp_path / "mine"


def test_running_a_configuration_wins_over_rows_and_default(tables):
    (tables / "rms_norm.csv").write_text(NORM_HEADER + "304,bf16,4,4096,256,2,mine\n")
    config = explained_norm().config
    with ops.rms_norm.running(dataclasses.replace(config, threads=128, vectors_per_thread=4)):
        assert explained_norm().launches[0].symbol == "rms_norm_bf16_x4"
    assert explained_norm().config == config


def test_a_stamp_that_cannot_be_read_is_in_the_fingerprint(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "CODE", tmp_path)
    monkeypatch.setattr(linear_base, "shuffled", set())
    monkeypatch.setattr(compiled_ops, "choices", compiled_ops.CompileChoices())
    (tmp_path / "gfx942").mkdir()
    for module in ("rms_norm", "silu_and_mul"):
        (tmp_path / "gfx942" / f"{module}.json").write_text("{}")
    whole = compile_cache.fingerprint()
    (tmp_path / "gfx942" / "rms_norm.json").unlink()
    (tmp_path / "gfx942" / "rms_norm.json").symlink_to("absent")
    config = types.SimpleNamespace(additional_config={"others": 1})
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(2):
            compile_cache.mark(config)
    (message,) = [str(w.message) for w in warned]
    assert "rms_norm.json cannot be read: " in message and message.endswith("clear vLLM's compile cache.")
    marked = config.additional_config["vllm_rocm_ops"]
    assert marked != whole and marked.endswith("; unreadable gfx942/rms_norm.json")


def test_registered_are_the_ops_of_the_package():
    """Each is registered once."""
    found = list(op.registered())
    assert len(found) == len(set(found)) and set(found) == {o for o in vars(ops).values() if isinstance(o, op.Op)}


def test_only_the_reference_is_a_fallback():
    """A call without rows launches no kernel, and is not a fallback."""
    x, weight = torch.empty(0, 64, dtype=torch.bfloat16, device="meta"), torch.empty(64, device="meta")
    nothing = ops.rms_norm.explain(x, weight.bfloat16(), 1e-6, arch="gfx942")
    assert nothing.launches == () and not nothing.is_fallback
    assert ops.rms_norm.explain(x.double(), weight.double(), 1e-6, arch="gfx942").is_fallback


# costs


@dataclasses.dataclass(frozen=True)
class Split:
    parts: int


def split_configs(a, arch) -> list[Split]:
    return [Split(parts) for parts in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)]


def split_cost(config: Split, a, arch) -> dict[str, float]:
    waves = -(-config.parts // arch.compute_units)
    return {"read": waves * a.input.numel() / config.parts, "combine": 2.0 * config.parts}


@pytest.fixture(scope="session")  # torch registers an op once per process, and a module's fixtures may start again
def split_op():
    """Yield an op with a cost and no default."""

    def split_sum(input: torch.Tensor) -> torch.Tensor:
        return input.sum(-1)

    made = op.Op(
        split_sum,
        allocate=lambda a: a.input.new_empty(a.input.shape[:-1]),
        contract=lambda a: (),
        can_implement=lambda a, arch: (("input has a row", a.input.dim() > 0),),
        configs=split_configs,
        plan=lambda config, out, a, arch: [
            Launch("m", f"split_sum_{config.parts}", (1, 1, 1), (64, 1, 1), {"input": a.input, "out": out})
        ],
        problem=lambda a: {"elements": a.input.numel()},
        cases=lambda: (),
        cost=split_cost,
    )
    op._registered.remove(made)  # other tests ask for all ops
    return made


def test_the_cheapest_configuration_is_the_default(split_op):
    explanation = split_op.explain(torch.empty(1, 1 << 15, device="meta"), arch="gfx942")
    assert explanation.config == Split(128) and explanation.launches[0].symbol == "split_sum_128"
    assert explanation.considered[0] == (Split(128), {"read": 256.0, "combine": 256.0})
    costs = [sum(terms.values()) for _, terms in explanation.considered]
    assert costs == sorted(costs) and len(costs) == 10
    assert split_op.explain(torch.empty(1, 1 << 15, device="meta"), arch="MI308X").config == Split(64)


def test_explain_shows_the_configurations_considered(split_op, tables):
    x = torch.empty(1, 1 << 15, device="meta")
    lines = str(split_op.explain(x, arch="gfx942")).splitlines()
    assert lines[2:6] == [
        "  split_sum_128 grid (1, 1, 1) block (64, 1, 1)",
        "  of 10 configurations, by predicted microseconds:",
        "  *   512.00  Split(parts=128): read 256.00 + combine 256.00",
        "      640.00  Split(parts=64): read 512.00 + combine 128.00",
    ]
    assert len(lines) == 4 + EXPLAINED_CONFIGS
    (tables / "split_sum.csv").write_text("compute_units,elements,config.parts,source\n304,32768,1,a measurement\n")
    tuned_tables.table.cache_clear()
    tuned = split_op.explain(x, arch="gfx942")
    lines = str(tuned).splitlines()
    assert tuned.source == "tuned Split(parts=1)" and len(lines) == 5 + EXPLAINED_CONFIGS
    assert lines[-1] == "  * 32770.00  Split(parts=1): read 32768.00 + combine 2.00"


def test_a_default_of_its_own_wins_over_the_cost(split_op, monkeypatch):
    monkeypatch.setattr(split_op, "default", lambda a, arch: Split(2))
    explanation = split_op.explain(torch.empty(1, 1 << 15, device="meta"), arch="gfx942")
    assert explanation.config == Split(2) and explanation.considered[0][0] == Split(128)


def test_an_op_without_cost_shows_none():
    explanation = ops.rms_norm.explain(*norm_arguments(), arch="gfx942")
    assert explanation.considered == () and "microseconds" not in str(explanation)


def test_nothing_is_considered_where_the_reference_runs(split_op):
    assert split_op.explain(torch.empty((), device="meta"), arch="gfx942").considered == ()


def test_an_op_needs_a_default_or_a_cost():
    parts = dict.fromkeys(("allocate", "contract", "can_implement", "configs", "plan", "problem", "cases"))
    with pytest.raises(TypeError, match="norm_arguments must have a default or a cost"):
        op.Op(norm_arguments, **parts)


# launches


def test_executors_nest():
    outer, inner = Recorder(), Recorder("gfx950")
    with launch.executor(outer):
        with launch.executor(inner):
            assert launch.cpu_executor() is inner
        assert launch.cpu_executor() is outer
    assert launch.cpu_executor() is None


@each_op
@pytest.mark.parametrize("arch_name", BUILT)
def test_plans_fit_the_arch(the_op, arch_name):
    """Every case and configuration has whole waves, at most 1024 threads and grids within limits."""
    arch = archs.ARCHS[arch_name]
    for case in the_op.cases():
        a = the_op.Arguments(*case.make("meta", torch.Generator(), arch.fp8_dtype))
        for config in the_op.configs(a, arch):
            for l in the_op.plan(config, the_op.allocate(a), a, arch):
                assert isinstance(l, Launch) and l.block[0] % arch.wave_lanes == 0 and l.block[0] <= 1024
                assert l.grid[0] < 2**31 and l.grid[1] < 2**16 and l.grid[2] < 2**16 and l.lds <= arch.lds_bytes


def test_import_initialises_no_gpu_and_imports_no_vllm():
    code = "import sys, torch, vllm_rocm_ops; assert not torch.cuda.is_initialized() and 'vllm' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_tensors_on_two_devices_are_refused():
    x, weight = torch.ones(2, 256, dtype=torch.bfloat16), torch.ones(256, dtype=torch.bfloat16, device="meta")
    with pytest.raises(ValueError, match="rms_norm: weight must be on cpu, got on meta"):
        ops.rms_norm.explain(x, weight, 1e-6, arch="gfx942")
