"""Test the command `check`: a failing part is recorded and the next one runs; the emulator replaces the GPU."""

import contextlib
import ctypes
import json
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import torch._dynamo  # a part's process imports it otherwise, each in a second or more
from marks import full

import vllm_rocm_ops
from vllm_rocm_ops import ops
from vllm_rocm_ops.core import clock, launch
from vllm_rocm_ops.models import config as model_config
from vllm_rocm_ops.models import layers as model_layers
from vllm_rocm_ops.tools import check, check_parts, check_worker, cli, smoke
from vllm_rocm_ops.tools.bench.baselines import Baseline
from vllm_rocm_ops.tools.commands import check as command

FORKS = multiprocessing.get_context("fork")


def nothing(*_):
    yield from ()


def good(arch):
    yield {"case": "first", "kernel": "one", "wrong": None}


def hangs(arch):
    yield {"case": "first", "kernel": "one", "wrong": None}
    time.sleep(60)


def hangs_and_ignores_signals(arch):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    yield from hangs(arch)


def faults(arch):
    yield {"case": "first", "kernel": "one", "wrong": None}
    os.write(2, b"Memory access fault by GPU node-1\n")
    ctypes.string_at(0)


def leaves(arch):
    yield {"case": "first", "kernel": "one", "wrong": None}
    os._exit(0)


def raises(arch):
    yield {"case": "first", "kernel": "one", "wrong": None}
    raise RuntimeError("no such kernel\nand a stack")


def is_wrong(arch):
    yield {"case": "first", "kernel": "one", "wrong": "element 3 is 1, not 2"}


def takes_long(arch):
    for _ in range(100):
        yield {"case": "first", "kernel": "one", "wrong": None}
        time.sleep(0.2)


ENDS = {
    good: "done",
    takes_long: "stopped",
    hangs: "hung: killed after 4 s",
    hangs_and_ignores_signals: "hung: killed after 4 s",
    faults: f"died: exit code {-signal.SIGSEGV}",
    leaves: "died: exit code 0",
    raises: "error: RuntimeError: no such kernel",
    is_wrong: "done",
}


SECONDS = {hangs: 4.0, hangs_and_ignores_signals: 4.0, takes_long: 5.0}  # parts begin late on a busy machine


ALSO_ENDS = hangs_and_ignores_signals, takes_long  # with --full


@pytest.mark.parametrize(
    "part",
    [pytest.param(part, marks=full if part in ALSO_ENDS else ()) for part in ENDS],
    ids=[part.__name__ for part in ENDS],
)
def test_how_parts_end(monkeypatch, part):
    """Earlier results are kept, with the process's output if it did not end well."""
    monkeypatch.setattr(check_parts, "PARTS", {"op": part})
    with contextlib.closing(check_worker.Worker(FORKS)) as worker:
        found = worker.run("op", (), None, SECONDS.get(part, 30.0))
        assert (worker.process is None) == (part not in (good, is_wrong, takes_long))
    assert found["ended"] == ENDS[part]
    assert not multiprocessing.active_children()
    assert {piece["case"] for piece in found["found"]} == {"first"}
    assert (len(found["found"]) > 1) == (part is takes_long)
    assert ("Memory access fault" in found["said"]) == (part is faults)
    wrong = check.wrong_of({"part": "op it", **found})
    assert bool(wrong) == (part not in (good, takes_long))
    ends = {good: "ok", takes_long: "ok, stopped at its time limit"}
    assert check.line_of({"part": "op it", **found}).endswith(ends[part] if part in ends else f"FAILED: {wrong[0]}")


def options(tmp_path, **changes) -> dict[str, object]:
    return {"output": tmp_path / "it.json", "op": "*", "minutes": 3.0, "emulate": "gfx942"} | changes


def says_who(arch, name):
    yield {"case": name, "process": os.getpid()}


def faults_late(arch, name):
    """Raise at the synchronization, where a GPU reports faults."""
    yield from says_who(arch, name)
    torch.cuda.is_initialized = lambda: True

    def synchronize():
        raise RuntimeError("illegal memory access")

    torch.cuda.synchronize = synchronize


FAILS = {
    "dies": lambda arch, name: faults(arch),
    "leaves": lambda arch, name: leaves(arch),
    "hangs": lambda arch, name: hangs(arch),
    "raises": lambda arch, name: raises(arch),
    "is wrong": lambda arch, name: is_wrong(arch),
    "faults late": faults_late,
}


@pytest.mark.parametrize("way", FAILS)
def test_a_part_that_fails_costs_no_other(tmp_path, monkeypatch, capsys, way):
    """Ops share a process until one fails.

    The file names each op before it starts, and keeps the results before it.
    """
    path, bad = tmp_path / "it.json", "rms_norm"

    def part(arch, name="it"):
        *before, last = json.loads(path.read_text())["parts"]
        assert (last["part"], last["ended"]) == (f"op {name}", "begun"), "so that a machine that goes down tells which"
        assert all(one["ended"] != "begun" for one in before)
        yield from FAILS[way](arch, name) if name == bad else says_who(arch, name)

    quiet = dict.fromkeys(check_parts.PARTS, nothing)
    monkeypatch.setattr(check_parts, "PARTS", quiet | {"op": part})
    monkeypatch.setattr(check, "SECONDS", check.SECONDS | {"op": 4.0 if way == "hangs" else 30.0})
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: FORKS)
    assert command.run(**options(tmp_path)) == 1
    assert not multiprocessing.active_children()
    parts = {part["part"]: part for part in json.loads(path.read_text())["parts"]}
    order = [f"op {op.name}" for op in vllm_rocm_ops.core.op.registered()]
    at = order.index(f"op {bad}")
    assert [name for name in parts if name.startswith("op ")] == order and 0 < at < len(order) - 1
    assert check.wrong_of(parts[order[at]])
    assert {part["ended"] for name, part in parts.items() if name != order[at]} == {"done"}
    before, after = ([parts[name]["found"][0] for name in names] for names in (order[:at], order[at + 1 :]))
    assert [f"op {piece['case']}" for piece in before + after] == order[:at] + order[at + 1 :]
    processes = [{piece["process"] for piece in pieces} for pieces in (before, after)]
    assert [len(of) for of in processes] == [1, 1] and processes[0] != processes[1]
    assert {f"model {name} {tp}" for name, tp in check.TINY.items()} < parts.keys()
    assert " parts, 1 failed" in capsys.readouterr().out


def test_parts_left_for_lack_of_time_are_reported(tmp_path, monkeypatch, capsys):
    now = iter(range(0, 100000, 20))
    monkeypatch.setattr(time, "monotonic", lambda: next(now))
    done, given = {"ended": "done", "seconds": 1.0, "found": [], "said": ""}, []
    monkeypatch.setattr(check.Worker, "run", lambda *arguments: given.append(arguments[-1]) or done)
    assert command.run(**options(tmp_path, minutes=2.2)) == 0
    assert min(given) > check.MIN_SECONDS, "a part that cannot start in what is left would look like one that hangs"
    ended = [part["ended"] for part in json.loads((tmp_path / "it.json").read_text())["parts"]]
    assert ended[0] == "done" and ended[-1] == "left out"
    assert f"{ended.count('left out')} skipped (time limit)" in capsys.readouterr().out


def test_models_share_the_time_that_is_left(tmp_path, monkeypatch):
    """Otherwise the first model would leave no time to the second.

    No model gets less than it needs to start.
    """
    done = {"ended": "done", "seconds": 1.0, "found": [], "said": ""}
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    for minutes, seconds in ((1.5, [45.0, 90.0]), (0.4, [check.MIN_SECONDS, 24.0])):
        given = {}
        monkeypatch.setattr(
            check.Worker,
            "run",
            lambda _, kind, rest, arch, seconds, given=given: given.setdefault((kind, *rest), seconds) and done,
        )
        command.run(**options(tmp_path, minutes=minutes))
        assert given["op", "rms_norm"] == min(check.SECONDS["op"], 60 * minutes)
        assert [given[("model", *of)] for of in check.TINY.items()] == pytest.approx(seconds)


def test_parts_on_a_gpu():
    """The file has all results of both models."""
    parts = check.planned(None, "*")
    kinds = {part[0] for part in parts}
    assert kinds >= {"smoke", "machine", "op", "bandwidth", "model"}
    assert [part[1:] for part in parts if part[0] == "model"] == [("llama-3.1-405b-fp8", 8), ("deepseek-v3", 8)]
    assert [part[1] for part in parts if part[0] == "smoke"] == list(smoke.STAGES)
    assert parts[:2] == [("smoke", "driver"), ("machine",)] and parts[7][0] == "op"  # none before the last stage
    assert check.SECONDS.keys() == check_parts.PARTS.keys() >= kinds
    with pytest.raises(ValueError, match="no op matches --op nothing"):
        check.planned(None, "nothing")


def test_without_a_gpu_it_says_so(tmp_path, monkeypatch, capsys):
    found = {"ended": "done", "seconds": 1.0, "found": [{"gpus": []}], "said": ""}
    monkeypatch.setattr(check.Worker, "run", lambda *_: found)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["check"]) == 2
    assert "no GPU found; --emulate gfx942" in capsys.readouterr().err


def test_it_says_whose_code_objects_ran(monkeypatch, capsys):
    found = [{"case": "driver", "code": "release 0.1.0"}]
    part = {"part": "smoke driver", "ended": "done", "seconds": 1.0, "found": found, "said": ""}
    monkeypatch.setattr(check, "run_parts", lambda *_: ([part], Path("it.json"), ""))
    for arguments, origin in (([], "release 0.1.0"), (["--emulate", "MI300X"], launch.origin("gfx942"))):
        assert cli.main(["check", *arguments]) == 0
        assert f"code objects: {origin}\n" in capsys.readouterr().out


@pytest.fixture
def emulator():
    pytest.importorskip("tinygrad")
    from vllm_rocm_ops.emulator import cases as emulated

    with launch.executor(emulated.emulator_of("gfx942")):
        yield


def layer(op) -> model_layers.LayerCall:
    name = "tiny-llama-fp8" if op.name in ("scaled_mm", "unquantized_gemm") else "tiny-deepseek-v3-fp8"
    return next(call for call in model_layers.calls(model_config.read(name)) if call.op is op)


@pytest.mark.parametrize(
    "op", [ops.scaled_mm, ops.block_scaled_mm, ops.unquantized_gemm, ops.fused_experts], ids=lambda op: op.name
)
def test_layers_of_models_are_checked(emulator, monkeypatch, op):
    """Emulated kernels match the reference, and are found wrong with a scale or a weight of another call."""
    call, arch = layer(op), check.archs.named("gfx942")
    sizes = (1,) if op is ops.fused_experts else (1, 17)  # fused_experts takes seconds
    arguments = call, "PyTorch's reference", Baseline(op.reference), arch, check_parts.Untimed(), sizes
    vllm_rocm_ops.reset_stats()
    found = list(check_parts.beside(*arguments))
    assert [(piece["tokens"], piece["wrong"]) for piece in found] == [(tokens, None) for tokens in sizes]
    assert all(0 < piece["error"] <= 2 * piece["other error"] and piece["us"] is None for piece in found)
    assert all(piece["predicted us"] > 0 and "fallback" not in piece["kernel"] for piece in found)
    assert not any(kernel.startswith("fallback") for kernel in vllm_rocm_ops.stats()[op.name])
    kernels = op.run_kernels

    name = {"fused_experts": "w2_scale", "unquantized_gemm": "weight"}.get(op.name, "scale_b")

    def wrong(*given):
        a = op.Arguments(*given)
        return kernels(*a._replace(**{name: getattr(a, name) * 1.25}))

    monkeypatch.setattr(op, "run_kernels", wrong)
    assert all("relative error" in piece["wrong"] for piece in check_parts.beside(*arguments[:-1], (1,)))


def test_another_kernel_that_does_not_take_a_call_is_named(emulator):
    def refuses(*arguments):
        raise RuntimeError("not this one")

    call, arch = layer(ops.unquantized_gemm), check.archs.named("gfx942")
    [found] = check_parts.beside(call, "another", Baseline(refuses), arch, check_parts.Untimed(), (1, 17))
    assert found["unavailable"] == "RuntimeError: not this one"


@pytest.mark.parametrize("wrong_replay", [0, 1, 2])
def test_cases_on_a_gpu(wrong_replay, emulator, monkeypatch):
    """Cases are checked and timed as `bench` does, on a fake GPU; the second's graph alters a result at a replay."""

    class Graph:
        def __init__(self, call, sets):
            self.call, self.sets, self.replayed, self.outputs = call, sets, 0, clock.run_all(call, sets)

        def replay(self):
            self.replayed += 1
            for output, found in zip(self.outputs, clock.run_all(self.call, self.sets)):
                output.copy_(found + (len(graphs) == 2 and self.replayed == wrong_replay))

    def capture(call, sets):
        graphs.append(Graph(call, sets))
        return graphs[-1]

    def init(self):
        self.arch, self.device = check.archs.named("gfx942"), "cpu"

    def times(graphs, calls):
        return {name: [2.0, 3.0, 4.0] for name in graphs}

    graphs, cases = [], list(ops.router_z_loss.cases())[:2]
    monkeypatch.setattr(ops.router_z_loss, "cases", lambda: cases)
    monkeypatch.setattr(clock.GpuClock, "__init__", init)
    monkeypatch.setattr(clock.GpuClock, "calls", lambda self, size: 2)
    monkeypatch.setattr(clock, "capture", capture)
    monkeypatch.setattr(clock, "replays", times)
    found = list(check_parts.op_cases(None, "router_z_loss"))
    assert [(piece["case"], piece["us"]) for piece in found] == [(case.name, 3.0) for case in cases]
    assert [graph.replayed for graph in graphs] == [2, 2]
    assert found[0]["wrong"] is None
    assert ("ROCm/clr#279" in str(found[1]["wrong"])) == (wrong_replay > 0)
    assert all(not piece["kernel"].startswith("fallback") for piece in found)


@pytest.mark.slow
def test_check_runs_a_whole_op_in_a_forked_process(tmp_path, monkeypatch):
    """A whole op runs, in a process forked from a server that has imported everything; vLLM, which takes seconds, fails."""
    pytest.importorskip("tinygrad")
    (tmp_path / "vllm.py").write_text("raise RuntimeError('not asked')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    path = tmp_path / "it.json"
    options = ["check", "--emulate", "gfx942", "--op", "rms_norm", "--output", str(path)]
    result = os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-m", "vllm_rocm_ops", *options])
    assert result == 0
    written = json.loads(path.read_text())
    parts = {part["part"]: part["found"] for part in written["parts"]}
    assert {part["ended"] for part in written["parts"]} == {"done"}
    assert list(parts) == ["smoke stamps", "machine", "smoke launch", "op rms_norm"]
    machine, cases = parts["machine"], parts["op rms_norm"]
    assert machine[0]["package"]["version"] == vllm_rocm_ops.__version__
    assert cases and all(case["wrong"] is None for case in cases)
    assert torch.__version__ == machine[0]["torch"]["version"]
