"""Test the commands bench, sweep, verify and profile: their reports on right and wrong results, and on times.

The clock is the emulator's cycles.
"""

import csv
import functools
import json

import pytest
import torch
from pages import measurements
from recorder import Recorder
from test_tune import EmulatorClock

from vllm_rocm_ops import ops
from vllm_rocm_ops.core import archs, clock, launch
from vllm_rocm_ops.core.op import Case
from vllm_rocm_ops.models import layers as model_layers
from vllm_rocm_ops.tools import cli, options
from vllm_rocm_ops.tools.bench import (
    attention,
    baselines,
    decode_attention,
    experts,
    gated_delta_net,
    gemm_dtypes,
    lists,
    report,
    shapes,
)
from vllm_rocm_ops.tools.bench import run as bench


@pytest.fixture
def emulated():
    found = EmulatorClock("gfx950")
    with launch.executor(found):
        yield found


def cases(op, *names: str) -> list[shapes.Shape]:
    return [shapes.Shape(op, case) for case in op.cases() if case.name in names]


def test_right_results_and_what_a_call_moves(emulated):
    [[norm]] = bench.run(cases(ops.fused_add_rms_norm, "bf16"), emulated)
    assert norm.wrong is None and norm.kernel.startswith("fused_add_rms_norm_bf16_x") and norm.median > 0
    assert norm.bytes_moved == 2 * (4 * 3 * 4096 + 4096)  # input, residual twice, output; weight
    [[product]] = bench.run(cases(ops.scaled_mm, "m4"), emulated)
    assert product.flops == 2 * 4 * 48 * 1024
    assert f"{product.flops / product.median / 1e6:.1f}" in str(product) and "ok" in str(product)
    text = report.summary([norm, product])
    assert "2 cases, all passed" in text and f"scaled_mm: {product.median:.2f} us geometric mean, 1 cases" in text


def test_a_sweeps_summary_leaves_out_cases_without_a_launch(emulated):
    found = list(bench.run(cases(ops.rms_norm, "no-rows", "hidden8"), emulated, sweep=True))
    assert [bool(line.samples) for line in found[-1]] == [False] and len(found[0]) > 1
    assert "rms_norm: chosen configurations take 1." in report.summary([line for lines in found for line in lines])


def test_wrong_results_are_said_and_counted(emulated, capsys, monkeypatch):
    with launch.executor(Recorder("gfx950")):
        [[line]] = bench.run(cases(ops.rms_norm, "bf16"), emulated, once=True)
        assert line.wrong == "rms_norm output 0: NaNs differ" and "FAILED" in str(line)
        assert "1 cases, 1 failed" in report.summary([line])
        monkeypatch.setattr(clock, "GpuClock", lambda: emulated)
        assert cli.main(["verify", "--op", "rms_norm", "--case", "bf16"]) == 1
    assert "NaNs differ" in capsys.readouterr().out


def test_once_calls_and_checks_without_timing(emulated):
    [[line]] = bench.run(cases(ops.silu_and_mul, "bf16"), emulated, once=True)
    assert line.wrong is None and not line.samples


def test_profile_only_calls(emulated, monkeypatch):
    launched = []
    monkeypatch.setattr(emulated, "launch", lambda launch, uninitialized: launched.append(launch.symbol))
    [[line]] = bench.run(cases(ops.silu_and_mul, "bf16"), emulated, profile=True)
    assert line.wrong == "" and not line.samples and launched == [line.kernel] * bench.PROFILED_CALLS
    monkeypatch.setattr(clock, "GpuClock", lambda: emulated)
    assert cli.main(["profile", "--op", "silu_and_mul", "--case", "bf16"]) == 0
    assert launched == [line.kernel] * 2 * bench.PROFILED_CALLS


def test_nothing_to_do_is_not_timed(emulated):
    [[line]] = bench.run(cases(ops.silu_and_mul, "no-rows"), emulated)
    assert line.wrong is None and not line.samples


def test_a_models_calls_are_cases_too(emulated, capsys, monkeypatch):
    monkeypatch.setattr(clock, "GpuClock", lambda: emulated)
    command = ["verify", "--model", "tiny-llama-fp8", "--batch", "1,3", "--op", "rms_norm*"]
    assert cli.main(command) == 0
    out = capsys.readouterr().out
    assert "input norm 1 " in out and "input norm 3 " in out and "2 cases, all passed" in out


@pytest.mark.skipif(torch.cuda.is_available(), reason="without one")
def test_without_a_gpu_it_says_that_the_reference_runs(capsys):
    assert cli.main(["verify", "--op", "rms_norm", "--case", "bf16-special*"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("No kernel is checked: the ops run their PyTorch reference (no GPU found).")
    assert "fallback: PyTorch reference on this device" in out and "ok" not in out.split() and "2 cases" in out


def test_no_such_case(capsys):
    assert cli.main(["bench", "--op", "rms_norm", "--case", "nonsense"]) == 2
    assert "no case matches --op rms_norm --case nonsense" in capsys.readouterr().err


def test_bandwidths_count_all_bytes_once():
    class Recorder:
        """A clock that reports one microsecond per call."""

        device, unit = "cpu", "us"

        def calls(self, bytes_of_call):
            return 2

        def prepare(self, call, sets):
            assert len(sets) == 2
            call(*sets[0])

        def samples(self, prepared):
            return {name: [1.0] for name in prepared}

    found = bench.bandwidths(Recorder(), ops.unquantized_gemm, 1 << 20)
    assert found == {"copy": 1048.576, "sum": 1048.576, "unquantized_gemm": 1048.576}


# Lists of shapes, sweeps, baselines and files


class Turns(EmulatorClock):
    """A clock that reports one microsecond more for each launch, in the order in which they are prepared."""

    unit = "us"

    def __init__(self, arch):
        super().__init__(arch)
        self.blocks, self.last = set(), None  # of the timed launch, of the last one that ran

    def launch(self, launch, uninitialized):
        super().launch(launch, uninitialized)
        self.last = launch.block

    def calls(self, bytes_of_call):
        return 2

    def prepare(self, call, sets):
        assert len(sets) >= 2
        with launch.executor(self):
            call(*sets[-1])
        self.blocks.add(self.last)
        return len(sets)

    def samples(self, prepared):
        assert len(set(prepared.values())) == 1
        return {name: [float(place)] * 3 for place, name in enumerate(prepared, start=1)}


@pytest.fixture
def turns(monkeypatch):
    found = Turns("gfx950")
    monkeypatch.setattr(clock, "GpuClock", lambda: found)
    monkeypatch.setattr(report, "COPIED", 1 << 10)
    with launch.executor(found):
        yield found


@pytest.fixture
def small(monkeypatch):
    """Use shapes of a tiny model, and tiny shares of experts."""
    monkeypatch.setattr(shapes, "MODELS", {"tiny": "tiny-llama-fp8"})
    sizes = {"known": 8, "topk": 2, "hidden": 128, "intermediate": 128}
    shares = {"all": experts.Share(routed=8, shared=True, **sizes), "half": experts.Share(routed=4, **sizes)}
    shares["half+shared"] = experts.Share(routed=4, shared=True, **sizes)
    monkeypatch.setattr(experts, "SHARES", shares)
    monkeypatch.setattr(shapes, "HIDDEN", (256,))
    for name, sizes in (("LARGE", ((3, 16, 32),)), ("FEW", ((1, 5, 7),)), ("LAYERS", ((16, 32),))):
        monkeypatch.setattr(gemm_dtypes, name, sizes)


def lines_of(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


COMMON = {"op", "case", "shape", "gpu", "us", "peers", "unavailable", "floor_us", "share_of_floor", "bandwidth_gb_s"}
COMMON |= {"copy_gb_s", "kernel", "chosen", "versions", "commit"}


@pytest.mark.parametrize(
    ("options", "count", "case", "sizes", "found"),
    [
        (["rows", "--batch", "2"], 12, "2x256 bfloat16", ["rows", "hidden"], {"differs_from_vllm"}),
        (
            ["linear", "--batch", "2", "--tp", "2", "--op", "*scaled_mm"],
            8,
            "tiny tp2 qkv 2x",
            "mnk",
            {"relative_error"},
        ),
        (["gemm-dtypes", "--batch", "2"], 8, "3x16x32 int8", "mnk", {"relative_error"}),
        (["routing", "--batch", "2"], 1, "2x256", ["tokens", "experts"], {"wrong"}),
        (
            ["moe", "--batch", "2", "--case", "half *"],
            1,
            "half 2 fp8",
            ["m", "topk", "known", "routed", "shared", "hidden", "intermediate"],
            {"experts_hit", "vllm_tiles", "differs"},
        ),
    ],
)
def test_a_list_of_shapes_gives_the_lines_that_results_have(
    turns, small, tmp_path, capsys, options, count, case, sizes, found
):
    output = tmp_path / "there" / "lines.jsonl"
    assert cli.main(["bench", *options, "--output", str(output)]) == 0, capsys.readouterr().err
    lines = lines_of(output)
    assert len(lines) == count and lines[0]["case"].startswith(case) and all(line["us"] == 1.0 for line in lines)
    for line in lines:
        assert set(line) == COMMON | found and list(line["shape"]) == list(sizes) and line["chosen"]
        assert line["floor_us"] > 0 and line["kernel"] and line["gpu"] == "cpu" and not line["peers"]
        assert line.get("relative_error", 0.0) < 0.01 and line.get("wrong") is None
    assert f"{count} cases" in capsys.readouterr().out


def test_bytes_of_experts_are_those_of_the_ones_that_are_hit(turns, small):
    for shape in experts.experts((3,)):
        arguments = shape.arguments("cpu", torch.float8_e4m3fn)
        sets = shape.sets(turns, arguments)
        expert_map = ops.fused_experts.Arguments(*arguments).expert_map
        assert expert_map is None or expert_map.tolist() == [0, 1, 2, 3, -1, -1, -1, -1]
        assert len(sets) == 32 and torch.equal(sets[0][4], arguments[4]) and not torch.equal(sets[1][4], arguments[4])
        assert all(one[1] is arguments[1] for one in sets)
        ids = [one[4] for one in sets]
        hit = sum(len({int(i) for i in of_call.flatten() if i < shape.share.routed}) for of_call in ids) / 32
        of_expert = 3 * 128 * 128 + 3 * 4  # weights, and a scale for each block of them
        expected = (hit + shape.share.shared) * of_expert + 2 * 3 * 128 * 2
        assert shape.bytes_moved(sets) == pytest.approx(expected)


def test_each_call_has_tensors_of_its_own(turns):
    [shape] = cases(ops.fused_add_rms_norm, "bf16")
    first, second = shape.sets(turns, shape.arguments("cpu", torch.float8_e4m3fn))
    for one, other in zip(first[:3], second[:3], strict=True):
        assert torch.equal(one, other) and one.data_ptr() != other.data_ptr()


def test_ours_alone_has_shuffled_weights(turns, small, tmp_path, capsys):
    command = ["bench", "linear-shuffled", "--batch", "16", "--baselines", "--op", "unquantized_gemm"]
    assert cli.main([*command, "--output", str(tmp_path / "a.jsonl")]) == 0, capsys.readouterr().err
    [line] = lines_of(tmp_path / "a.jsonl")
    assert f"  relative_error {line['relative_error']:.2g}\n" in capsys.readouterr().out
    assert line["case"].endswith(" shuffled") and line["peers"]["torch"] == 2.0 and line["relative_error"] < 0.01
    shape = next(shape for shape in shapes.gemm((2,), shuffled=True) if shape.op is ops.scaled_mm)
    given = shape.arguments("cpu", torch.float8_e4m3fn)
    assert given[1].dim() == 2 and shape.layout(*given)[1].dim() == 5


def test_baselines_are_timed_beside_a_sweep_and_the_fastest_come_first(turns, tmp_path, capsys):
    command = ["sweep", "--op", "silu_and_mul", "--case", "bf16", "--baselines"]
    assert cli.main([*command, "--output", str(tmp_path / "a.jsonl")]) == 0
    lines, out = lines_of(tmp_path / "a.jsonl"), capsys.readouterr().out
    configs = len(lines)
    assert configs > 3 and [line["us"] for line in lines] == sorted(line["us"] for line in lines)
    assert [line["chosen"] for line in lines].count(True) == 1 and lines[0]["chosen"]
    assert len({line["kernel"] for line in lines}) == configs and all(line["wrong"] is None for line in lines)
    assert len(turns.blocks) > 2 and lines[0]["peers"]["torch"] == configs + 1.0
    assert len([line for line in out.splitlines() if " bf16 " in line]) == 3  # the fastest of the sweep
    assert f"silu_and_mul, up to 64 tokens: {configs + 1:.2f}x speedup over the best baseline (geometric mean)" in out
    assert "silu_and_mul: chosen configurations take 1.000x the time of the best (geometric mean)" in out


def test_each_measurement_is_a_row_of_the_table(turns, small, tmp_path, monkeypatch):
    path = tmp_path / "there" / "times.csv"
    monkeypatch.setattr(shapes, "baselines", lambda op, listed: {"torch": baselines.Baseline(op.reference)})
    monkeypatch.setenv("VLLM_ROCM_OPS_COMMIT", "abc")
    command = ["bench", "gemm-dtypes", "--batch", "2", "--baselines", "--output", str(path)]
    assert cli.main([*command, "--case", "3x16x32 int8"]) == 0
    with path.open(newline="") as file:
        timed, theirs = csv.DictReader(file)
    assert tuple(timed) == report.COLUMNS and timed["op"] == "gemm" and timed["shape"] == "m=3 n=16 k=32"
    assert timed["by"] == "vllm_rocm_ops" and timed["kernel"] and timed["us"] == "1.0"
    assert (theirs["by"], theirs["us"], theirs["best_us"]) == ("torch", "2.0", "")
    assert float(timed["tflops"]) == round(2 * 3 * 16 * 32 / 1e6, 2) and timed["commit"] == "abc" == theirs["commit"]
    assert timed["gpu"] == "cpu"


def test_a_wrong_configuration_of_a_sweep_is_found(turns):
    with launch.executor(Recorder("gfx950")):
        [lines] = bench.run(cases(ops.silu_and_mul, "bf16"), turns, sweep=True)
    assert len(lines) > 3 and all(line.wrong for line in lines)


def test_a_refusing_baseline_is_unavailable_with_its_message(turns, monkeypatch, capsys):
    def refuses(*_):
        raise ValueError("it takes nothing\nat all")

    monkeypatch.setattr(
        shapes,
        "baselines",
        lambda op, listed: {"refuses": baselines.Baseline(refuses), "torch": baselines.Baseline(op.reference)},
    )
    [[line]] = bench.run(cases(ops.rms_norm, "bf16"), turns, baselines=True)
    assert line.baselines == {"torch": 2.0} and line.unavailable == {"refuses": "ValueError: it takes nothing"}
    assert line.ratio == 2.0 and "torch 2.00" in str(line)


def test_baselines_are_timed_where_no_kernel_runs(turns):
    case = Case("float32", lambda device, generator, fp8: (torch.ones(4, 16),))
    [[line]] = bench.run([shapes.Shape(ops.silu_and_mul, case)], turns, baselines=True)
    found = line.json(report.Origin("GPU", 1.0, {}, "abc"))
    assert found["us"] is None and found["peers"] and found["kernel"].startswith("none: fallback")
    assert found["share_of_floor"] is None


def test_differences_from_vllm_are_shares_of_elements(monkeypatch):
    def theirs(op, out, a):
        out = a.input if op is ops.fused_add_rms_norm else out
        out.copy_(op.reference(*a))
        out.view(-1)[:3] += 1

    def beside(op):
        return {
            "vllm": baselines.Baseline(
                functools.partial(theirs, op), lambda *of: (op.allocate(op.Arguments(*of)), op.Arguments(*of))
            )
        }

    monkeypatch.setattr(shapes, "baselines", beside)
    x, residual, weight = torch.randn(2, 24).bfloat16(), torch.randn(2, 12).bfloat16(), torch.ones(12).bfloat16()
    check = shapes.beside_vllm(ops.silu_and_mul, (x,))
    assert check() == {"differs_from_vllm": {"out": pytest.approx(3 / 24)}}
    check = shapes.beside_vllm(ops.fused_add_rms_norm, (x[:, :12].contiguous(), residual, weight, 1e-6))
    assert check() == check() == {"differs_from_vllm": {"out": pytest.approx(3 / 24), "residual": 0.0}}


def test_files_are_named_after_the_list_as_the_tables_want_them(turns, small, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, given in {"ops": ["rows"], "gemm": ["linear"], "moe": ["moe", "--case", "all*"]}.items():
        command = ["bench", *given, "--batch", "2", "--output", "serving_benchmarks/results"]
        assert cli.main([*command, *(["--op", "silu_and_mul"] if name == "ops" else [])]) == 0
        [path] = tmp_path.glob(f"serving_benchmarks/results/cpu/*-unknown-{name}.jsonl")
        assert measurements.kind_of(path) == name and lines_of(path)
    monkeypatch.setattr(measurements, "RESULTS", tmp_path / "serving_benchmarks" / "results")
    monkeypatch.setattr(measurements, "committed", lambda path: 0)
    assert "| `silu_and_mul` | 1 |" in measurements.single_ops() and "all, fp8" in measurements.experts()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["moe", "--tp", "8"], "the list moe does not support --tp"),
        (["attention", "--tp", "8", "--batch", "1"], "the list attention does not support --batch --tp"),
        (["rows", "--model", "tiny-llama"], "give either a list or --model, got rows and --model tiny-llama"),
        (
            ["rows", "--batch", "1", "--output", "times.txt"],
            "must be a .jsonl file, a .csv file or a folder, got times",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(turns, options, message, capsys):
    assert cli.main(["bench", *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="without one")
@pytest.mark.parametrize(
    "command", ["bench rows", "bench", "sweep", "profile", "verify rows", "bandwidth", "tune --model tiny-llama"]
)
def test_what_only_a_gpu_can_is_refused_without_one(command, capsys):
    assert cli.main(command.split()) == 2
    assert capsys.readouterr().err.startswith(f"{command.split()[0]}: no GPU found")


def test_lists_of_another_dtype_have_the_same_shapes_and_files(small):
    for name in lists.LISTS:
        kind = name
        for variant in lists.VARIANTS:
            kind = kind.removesuffix(variant)
        assert lists.kind_of(name, None) == lists.kind_of(kind, None)
        assert len(list(lists.of_list(name, None, None))) == len(list(lists.of_list(kind, None, None)))
    names = {shape.case.name for shape in lists.of_list("rows-fp16", None, (3,))}
    assert names == {"3x256 float16"}
    assert lists.kind_of(None, "tiny-llama") == "model" and lists.kind_of(None, None) == "cases"


TOKENS = (1, 8, 16, 32, 64, 128)


@pytest.mark.parametrize(
    ("name", "tokens", "count"),
    [
        *(("rows", TOKENS[:4], len(shapes.ROW_OPS) * 2 * 4), ("linear", TOKENS, 6 * 28), ("routing", TOKENS, 6)),
        *(("gates", TOKENS, 6 * 5), ("expert-gates", TOKENS, 5 * 3 * 6)),
        *(("moe", TOKENS, 6 * 14), ("attention", None, 24), ("gemm-dtypes", None, 96)),
        ("decode-attention", None, 2 * (52 + 12) + 4 * 3 + 16),
        ("gated-delta-net", TOKENS, 5 * 6),
    ],
)
def test_a_list_has_every_shape_once(name, tokens, count):
    found = [(shape.op.name, shape.case.name) for shape in lists.of_list(name, None, tokens)]
    assert len(found) == len(set(found)) == count


@pytest.mark.parametrize("what", [("linear", None, None, None), (None, None, None, "deepseek-v3")])
@pytest.mark.parametrize(("given", "built"), [(None, "gfx942"), (archs.ARCHS["gfx950"], "gfx950")])
def test_models_are_built_for_this_machine_or_the_one_asked_for(monkeypatch, what, given, built):
    asked = []
    monkeypatch.setattr(model_layers, "calls", lambda *_, **named: asked.append((*_, *named.values())[-1]) or [])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(archs, "of_device", lambda index: archs.ARCHS["gfx942"])
    with pytest.raises(ValueError, match="no case matches"):
        options.shapes_of(*what, None, None, None, given)
    assert {*asked} == {built}


@pytest.mark.parametrize("make", [shapes.rows, attention.attention, decode_attention.decode_attention])
def test_a_dtype_that_kernels_do_not_take_is_refused(make):
    with pytest.raises(ValueError, match="must be bfloat16 or float16, got torch.float8"):
        next(iter(make(dtype=torch.float8_e4m3fn)))


@pytest.mark.parametrize("rows", [1, 3])
def test_a_gated_delta_net_step_is_checked_and_counts_the_states_of_its_requests(emulated, rows):
    """A request reads one state, and writes one for each row."""
    layer = {"heads": (1, 2), "is_interleaved": True, "dtype": torch.bfloat16, "rows": rows}
    make = functools.partial(gated_delta_net.make, 1, **layer)
    shape = gated_delta_net.Step(ops.gated_delta_net_decode, Case("tiny", make), {"requests": 1})
    [[line]] = bench.run([shape], emulated, once=True)
    assert line.details["relative_error"] < 0.01
    states = 2 * ((1 + rows) * 2 * 128 * 128 + 2 * (2 + rows) * 4 * 128)
    assert shape.bytes_moved([shape.arguments("cpu", torch.float8_e4m3fn)]) == states + 2 * (6 + 2) * 128 * rows
    with launch.executor(Recorder("gfx950")):
        [[line]] = bench.run([shape], emulated, once=True)
    assert line.details["relative_error"] > 0.5


def test_decode_attention_is_checked_by_its_first_and_last_request(emulated):
    lens = [3, 40, 17]
    for heads, rows in (((4, 2, 64), 1), ((3,), 1), ((4, 2, 64), 3), ((3,), 2)):
        op = ops.mla_decode if len(heads) == 1 else ops.paged_attention_decode
        make = functools.partial(decode_attention._make, heads, lens, torch.bfloat16, query_len=rows)
        shape = decode_attention.Decode(op, Case("tiny", make), {"batch": 3}, keys=sum(lens))
        [[line]] = bench.run([shape], emulated, once=True)
        assert line.details["relative_error"] < 0.01
        of_key = 576 * 2 if len(heads) == 1 else 2 * 2 * 64 * 2
        given = shape.arguments("cpu", torch.float8_e4m3fn)
        assert 60 * of_key < shape.bytes_moved([given]) < 60 * of_key + rows * 3 * 4 * 1088 * 2
        with launch.executor(Recorder("gfx950")):
            [[line]] = bench.run([shape], emulated, once=True)
        assert not line.details["relative_error"] < 0.5
