"""Test the command `advise`: which pairs it times, what it keeps, and what the record's times say of AITER's switch."""

import importlib.util
import inspect
import json
import os
import time

import pytest
import torch

from vllm_rocm_ops import ops
from vllm_rocm_ops.core import archs
from vllm_rocm_ops.tools import advise, check_parts, cli, doctor, options
from vllm_rocm_ops.tools.bench.baselines import ADVICE, Baseline, experts
from vllm_rocm_ops.vllm import comparisons
from vllm_rocm_ops.vllm.selection import kernel_selection, report
from vllm_rocm_ops.vllm.selection.kernel_selection import Measured, Record
from vllm_rocm_ops.vllm.selection.key import AITER_OFF, AITER_ON, Key
from vllm_rocm_ops.vllm.selection.key import Baseline as Kernel

MODEL, ARCH = "tiny-deepseek-v3-fp8", archs.ARCHS["gfx942"]
MACHINE = {"gpu": "MI300X", "arch": "gfx942", "code": "1"}
CALLS = options.calls_of(MODEL, 1, None)
SERVED = "block_scaled_mm", "fused_experts"


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """Install all kernels of `FLAGS`, AITER's experts for advice alone."""

    def found(op, shapes=""):
        names = {kernels.get(op.name) for kernels in advise.FLAGS.values()} - {None}
        for_advice = {"aiter"} if op.name == "fused_experts" else set()
        return {name: Baseline(op.reference) for name in names if (name in for_advice) == (shapes == ADVICE)}

    for module in (advise, check_parts):
        monkeypatch.setattr(module, "baselines", found)


def shapes_of(call) -> list[str]:
    return comparisons.shapes_of(call, ARCH)


def asked(record: Record, sizes=(1, 8)) -> list[tuple]:
    """Return what a survey would time: op, shape, kernel, flag and token counts."""
    found = advise.pairs(CALLS, ARCH, record, sizes)
    return [(key.op, key.shape, key.baseline.name, key.baseline.flag, lacking) for _, key, lacking in found]


def test_all_calls_that_a_flag_changes_are_timed_under_both_flags():
    served = [call for call in CALLS if call.op.name in SERVED and call.count]
    assert {call.op.name for call in served} == {*SERVED}
    wanted = [
        (call.op.name, shapes_of(call)[0], kernels[call.op.name], flag, (1, 8))
        for call in served
        for flag, kernels in advise.FLAGS.items()
    ]
    assert asked(Record({})) == wanted


@pytest.mark.parametrize("baseline", [Kernel("AiterExperts"), Kernel("TritonExperts"), Kernel("aiter", flag=AITER_ON)])
def test_what_a_start_or_a_survey_timed_is_not_timed_again(baseline):
    """A start may have loaded the experts in another order of their weights."""
    [call] = [call for call in CALLS if call.op is ops.fused_experts]
    key = Key(call.op.name, shapes_of(call)[-1], baseline)
    flag = AITER_OFF if baseline.name == "TritonExperts" else AITER_ON
    before, after = (asked(Record({}, {}, {key: {1: Measured(1.0, 2.0)}} if timed else {})) for timed in (False, True))
    assert [what[:4] for what in before] == [what[:4] for what in after]
    assert [lacking for op, _, _, at, lacking in after if (op, at) == (call.op.name, flag)] == [(8,)]
    assert {lacking for op, _, _, at, lacking in after if (op, at) != (call.op.name, flag)} == {(1, 8)}


class Worker:
    """Answer parts: AITER's kernels take 30 us, others 50, the plugin's 40; AITER's experts hang, or are wrong."""

    def __init__(self, experts: str = "hang"):
        self.experts, self.ran, self.closed = experts, [], 0

    def run(self, kind, arguments, arch, seconds):
        answer = {"ended": "done", "seconds": 1.0, "found": [], "said": ""}
        if kind == "smoke":
            return answer | {"found": [{"machine": MACHINE}]}
        *_, place, other, sizes = arguments
        op = CALLS[place].op.name
        self.ran.append((op, other, sizes))
        times = {"us": 40.0, "other us": 30.0 if other == "aiter" else 50.0, "error": 0.01, "other error": 0.02}
        if (op, other) == ("fused_experts", "aiter"):
            if self.experts == "hang":
                return answer | {"ended": "hung: killed after 60 s"}
            times |= {"us": None, "other us": None, "other error": 0.9}
        about = {"layer": "it", "beside": other, "wrong": None}
        return answer | {"found": [about | times | {"tokens": tokens} for tokens in sizes]}

    def close(self, kill=False):
        self.closed += 1


@pytest.fixture
def survey(monkeypatch, tmp_path):
    """Return a function that surveys by a worker, and the record's file."""
    monkeypatch.setenv("VLLM_ROCM_OPS_TABLES", str(tmp_path))
    end = time.monotonic() + 300

    def run(worker: Worker, sizes=(1, 8), until=end) -> Record:
        return advise.survey(worker, MODEL, 1, None, sizes, until)

    return run


def test_results_go_to_the_machines_record(survey, capsys):
    """A pair that hangs costs no other, and is tried again. Nothing that a survey timed is selected."""
    record = survey(worker := Worker())
    assert record == kernel_selection.read(kernel_selection.path_of(MACHINE), MACHINE)
    assert len(worker.ran) == len(asked(Record({}))) and worker.closed == 1
    flags = {(key.op, key.baseline.flag) for key in record.shapes}
    assert flags == {("block_scaled_mm", AITER_OFF), ("block_scaled_mm", AITER_ON), ("fused_experts", AITER_OFF)}
    assert {tuple(timed) for timed in record.shapes.values()} == {(1, 8)}
    assert record.decided().shapes == {} and report.summary(record) == []
    assert not any(comparisons.keys_of(call, ARCH, record) for call in CALLS)
    printed = capsys.readouterr().out
    assert "FAILED: hung: killed after 60 s" in printed and "aiter with VLLM_ROCM_USE_AITER=1" in printed
    survey(again := Worker())
    assert again.ran == [("fused_experts", "aiter", (1, 8))]
    survey(none := Worker(), until=time.monotonic() + 1)
    assert none.ran == [] and "left out for lack of time" in capsys.readouterr().out


def test_a_start_reads_the_record_with_a_survey(survey):
    """Its own times take the place of a survey's for the same flag."""
    record, step = survey(Worker()), {}
    for call in CALLS:
        if call.op is ops.block_scaled_mm and call.count:
            key = Key(call.op.name, shapes_of(call)[0], Kernel("TritonFp8BlockScaledMMKernel"))
            step[key] = {1: Measured(20.0, 25.0), 8: Measured(30.0, 25.0)}
    record.shapes |= step
    count = sum(call.count for call in CALLS if call.op is ops.block_scaled_mm)
    found = {(kind, tokens): by_flag for _, kind, tokens, by_flag in report.steps(record)}
    # the plugin's times serve where they win, also with AITER's kernel beside them
    assert found == {
        ("linear layers", 1): {AITER_OFF: count * 20.0, AITER_ON: count * 30.0},
        ("linear layers", 8): {AITER_OFF: count * 25.0, AITER_ON: count * 30.0},
    }
    assert record.decided().shapes.keys() == step.keys()
    assert [line[:3] for line in report.summary(record)] == [
        (
            "linear layers",
            "block_scaled_mm",
            f"serves {len(step)} of {2 * len(step)} sizes, 1.25x as fast as vLLM's kernel",
        )
    ]


def test_the_faster_flag_is_named_with_its_gain(survey):
    record = survey(Worker())
    count = sum(call.count for call in CALLS if call.op is ops.block_scaled_mm)
    gain, both = (
        f"{AITER_ON} is faster by {10 * count} us per step",
        f"{AITER_OFF} {40 * count} us, {AITER_ON} {30 * count} us",
    )
    assert report.advice(record) == [
        (f"{MODEL}, TP 1", "linear layers", f"{tokens} tokens", gain, both) for tokens in (1, 8)
    ]
    equal = {key: dict.fromkeys(timed, Measured(10.0, 40.0)) for key, timed in record.shapes.items()}
    said = {line[3] for line in report.advice(Record(MACHINE, {}, equal, {}, record.steps))}
    assert said == {"both flags are equal within 2%"}  # the plugin serves under both
    off = Record(MACHINE, {"block_scaled_mm": "wrong"}, record.shapes, {}, record.steps)
    assert f"{20 * count} us per step" in report.advice(off)[0][3]  # its time counts no more
    lines = doctor.measured_lines([{"path": "it", **vars(record), "shapes": [*record.shapes.items()]}], MACHINE, False)
    assert sum(gain in line for line in lines) == sum(gain in line for line in advise.lines(record)) == 2
    assert advise.lines(record)[-1] == "no flag was changed"
    assert "is AITER installed" in advise.lines(Record(MACHINE))[0]


def test_a_wrong_kernel_of_aiter_is_named_and_not_advised(survey):
    record = survey(Worker(experts="wrong"))
    [line] = report.wrong_baselines(record)
    assert line.startswith(
        "aiter with VLLM_ROCM_USE_AITER=1, vLLM's kernel for fused_experts, is wrong on this GPU: 0.9 from"
    )
    assert line.endswith("and 1 more sizes; VLLM_ROCM_USE_AITER=0 avoids it") and line in advise.lines(record)
    assert {kind for _, kind, *_ in report.advice(record)} == {"linear layers"}
    json.dumps(vars(record) | {"shapes": [*record.shapes.items()]}, allow_nan=False)


@pytest.mark.parametrize("wrong", [False, True])
def test_a_pair_is_checked_against_float32(monkeypatch, wrong):
    """In the emulator; a wrong kernel is told from a wrong plugin."""
    from vllm_rocm_ops.core import launch
    from vllm_rocm_ops.emulator import Emulator

    place, call = next((i, call) for i, call in enumerate(CALLS) if call.op is ops.block_scaled_mm)
    other = Baseline(lambda *given: call.op.reference(*given) * (-1 if wrong else 1))
    monkeypatch.setattr(check_parts, "baselines", lambda op, shapes="": {"aiter": other})
    with launch.executor(Emulator("gfx942", races=False)):
        found = [*check_parts.survey("gfx942", MODEL, 1, None, place, "aiter", (1, 3))]
    timed = advise.measured({"found": found})
    assert [*timed] == [1, 3] and all(each.baseline_is_wrong is wrong for each in timed.values())
    assert all(each.error < 0.05 and (each.baseline_error > 1.5) is wrong for each in timed.values())


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_vllms_call_of_aiters_experts_takes_the_arguments(monkeypatch):
    """Its weights are shuffled; experts that are elsewhere are refused."""
    from vllm._aiter_ops import rocm_aiter_ops
    from vllm.model_executor.layers.fused_moe.experts import rocm_aiter_moe

    given, takes = [], inspect.signature(rocm_aiter_moe.rocm_aiter_fused_experts)
    monkeypatch.setattr(
        rocm_aiter_ops, "shuffle_weights", lambda *weights: tuple(-weight.float() for weight in weights)
    )
    note = lambda *arguments, **options: given.append(takes.bind(*arguments, **options).arguments)
    monkeypatch.setattr(rocm_aiter_moe, "rocm_aiter_fused_experts", note)
    [call] = [call for call in CALLS if call.op is ops.fused_experts]
    arguments = call.case(3).make("cpu", torch.Generator().manual_seed(0), torch.float8_e4m3fn)
    experts.aiter(*experts.aiter_prepare(*arguments))
    a = ops.fused_experts.Arguments(*arguments)
    assert torch.equal(given[0]["w1"], -a.w1.float()) and torch.equal(given[0]["w2"], -a.w2.float())
    assert given[0]["moe_config"].num_experts == len(a.w1) and given[0]["hidden_states"] is a.hidden
    assert given[0]["quant_config"].block_shape == [128, 128]
    elsewhere = torch.arange(len(a.w1) - a.shared_experts, dtype=torch.int32)
    with pytest.raises(ValueError, match="all experts on one GPU"):
        experts.aiter_prepare(*a._replace(expert_map=elsewhere))


def test_without_a_gpu_the_command_says_so(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("VLLM_ROCM_OPS_TABLES", str(tmp_path))
    monkeypatch.setenv("VLLM_ROCM_USE_AITER", "0")
    assert cli.main(["advise", "--model", MODEL, "--minutes", "0"]) == 2
    assert "--minutes must be positive" in capsys.readouterr().err
    answer = {"ended": "error: no driver", "seconds": 1.0, "found": [], "said": ""}
    monkeypatch.setattr(advise.Worker, "run", lambda *_: answer)
    assert cli.main(["advise", "--model", MODEL]) == 2
    assert "advise: error: no driver" in capsys.readouterr().err
    assert os.environ["VLLM_ROCM_USE_AITER"] == "1"  # in the processes that time
