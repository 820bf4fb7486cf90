"""Test the stages that `check` runs before it times anything: the file names each before it starts.

The emulator launches, and a driver and a graph stand in for a GPU's.
"""

import ctypes
import json
import multiprocessing
import os
import signal
import time

import pytest
import torch

from vllm_rocm_ops import ops
from vllm_rocm_ops.core import archs, clock, launch
from vllm_rocm_ops.tools import check, check_parts, check_worker, smoke
from vllm_rocm_ops.tools.commands import check as command

ARCH = archs.ARCHS["gfx942"]
PATTERN = "silu_and_mul"
FORKS = multiprocessing.get_context("fork")


class Driver:
    """A driver that loads everything, and records it."""

    def __init__(self):
        self.loaded = []

    def status(self):
        return "stands in"

    def versions(self):
        return {"driver": "1"}

    def load(self, path: str, symbol: str, device: int) -> int:
        self.loaded.append((path, symbol, device))
        return len(self.loaded)


class Graph:
    """A graph that repeats the captured calls."""

    def __init__(self, call, sets):
        self.call, self.sets = call, sets
        self.outputs = clock.run_all(call, sets)

    def replay(self):
        for output, found in zip(self.outputs, clock.run_all(self.call, self.sets)):
            output.copy_(found)


@pytest.fixture
def gpu(monkeypatch) -> Driver:
    """Make the stages see one GPU, and return its driver."""
    pytest.importorskip("tinygrad")
    from vllm_rocm_ops.emulator import cases as emulated

    found = Driver()
    monkeypatch.setattr(smoke.torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(smoke.archs, "product_of", lambda index: "MI300X")
    monkeypatch.setattr(smoke.archs, "of_device", lambda index: ARCH)
    monkeypatch.setattr(smoke.launch, "runtime", lambda: (found, ""))
    monkeypatch.setattr(smoke.clock, "capture", Graph)
    for name, value in {"ROUNDS": 1, "REPLAYS": 1, "TOKENS": 1, "COLUMNS": 64}.items():
        monkeypatch.setattr(smoke, name, value)
    with launch.executor(emulated.emulator_of("gfx942")):
        yield found


def run(stage: str, *arguments) -> list[dict]:
    return list(smoke.STAGES[stage](None, *arguments))


def test_stages_of_a_sound_machine(gpu):
    assert run("driver")[1]["arch"] == str(ARCH)
    assert run("driver")[1]["code"] == launch.origin("gfx942")
    assert {piece["case"] for piece in run("stamps")} == {path.stem for path in (launch.CODE / "gfx942").glob("*.co")}
    assert [piece["case"] for piece in run("load")] == [piece["case"] for piece in run("stamps")]
    assert len(gpu.loaded) == len(set(gpu.loaded)) == sum(piece["symbols"] for piece in run("stamps"))
    (begun, launched), (begun_too, replayed) = run("launch"), run("replay")
    assert begun == {"case": launched["case"], "begun": True} and launched["wrong"] is None
    assert launched["kernel"].startswith("silu_and_mul_")
    assert begun_too == {"case": "a graph of 3 launches", "begun": True}
    assert replayed == {"case": "a graph of 3 launches", "wrong": None}
    gpu.loaded.clear()
    [loaded] = run("load", "rms_norm")
    begun, checked = run("ops", "rms_norm")
    assert loaded == {"case": "rms_norm", "begun": True}
    assert [symbol for _, symbol, _ in gpu.loaded] == [checked["kernel"]]
    assert begun == {"case": checked["case"], "begun": True}
    assert checked["wrong"] is None and checked["kernel"].startswith("rms_norm_")


@pytest.mark.parametrize("arch", [arch for arch in archs.ARCHS.values() if arch.vendor == "amd"], ids=str)
def test_a_chain_on_a_gpu_has_counters(arch):
    a = ops.unquantized_gemm.Arguments(
        *(torch.empty(rows, smoke.COLUMNS, dtype=torch.bfloat16, device="meta") for rows in (smoke.TOKENS, 2048)), None
    )
    configs = ops.unquantized_gemm.configs(a, arch)
    assert any(smoke.has_counters(ops.unquantized_gemm, config, a, arch) for config in configs)
    assert 3 * smoke.ROUNDS > 100 and smoke.REPLAYS == 20


def test_the_smallest_case_is_one_that_kernels_take():
    for op in (ops.silu_and_mul, ops.mxfp8_scaled_mm):
        given = smoke.smallest(op, archs.ARCHS["gfx950"]).make("meta", None, archs.ARCHS["gfx950"].fp8_dtype)
        assert op.explain(*given, arch="gfx950").launches


def test_each_stage_finds_its_fault(gpu, monkeypatch, tmp_path):
    wrong_graph = type("Wrong", (Graph,), {"replay": lambda self: None})
    monkeypatch.setattr(smoke.clock, "capture", wrong_graph)
    assert "differ" in run("replay")[1]["wrong"]
    monkeypatch.setattr(ops.silu_and_mul, "_dispatch", None)
    reference = ops.silu_and_mul.reference
    monkeypatch.setattr(type(ops.silu_and_mul), "__call__", lambda self, *given: 1.5 * reference(*given))
    assert run("launch")[1]["wrong"] and run("ops", "silu_and_mul")[1]["wrong"]
    monkeypatch.setenv("VLLM_ROCM_OPS_DISABLE", "silu_and_mul")
    with pytest.raises(RuntimeError, match="silu_and_mul has no kernel on this GPU: fallback: switched off"):
        run("launch")
    monkeypatch.setattr(launch, "CODE", tmp_path)
    with pytest.raises(RuntimeError, match="no code objects for gfx942"):
        run("stamps")
    (tmp_path / "gfx942").mkdir()
    (tmp_path / "gfx942" / "rms_norm.co").write_bytes(b"another")
    (tmp_path / "gfx942" / "rms_norm.json").write_text('{"sha256": "0", "kernels": {}}')
    with pytest.raises(RuntimeError, match="rms_norm for gfx942 is damaged"):
        run("load")
    monkeypatch.setattr(launch, "runtime", lambda: (None, "there is no libamdhip64"))
    for stage in ("driver", "load"):
        with pytest.raises(RuntimeError, match="there is no libamdhip64"):
            run(stage)
    monkeypatch.setattr(archs, "of_device", lambda index: None)
    with pytest.raises(RuntimeError, match="no kernels for MI300X"):
        run("stamps")


def nothing(*_):
    yield from ()


def dies(*_):
    os.write(2, b"Memory access fault by GPU node-1\n" + b"frame\n" * check_worker.SAID)
    ctypes.string_at(0)


def hangs(*_):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(60)


PLACES = {
    "driver": (Driver, "status"),
    "stamps": (launch, "built"),
    "load": (Driver, "load"),
    "launch": (smoke, "checked"),
    "replay": (Graph, "replay"),
    "ops": (smoke, "smallest"),
}
"""The function that each stage is the first to call."""


@pytest.mark.parametrize(
    ("stage", "fault"), [*((stage, dies) for stage in smoke.STAGES), ("driver", hangs), ("launch", hangs)]
)
def test_a_fault_names_its_stage(gpu, monkeypatch, tmp_path, capsys, stage, fault):
    """The file names it during the run and afterwards; nothing runs on the GPU after the fault."""
    path, seen = tmp_path / "it.json", tmp_path / "seen.json"

    def at(name: str, function):
        def stage_of(*arguments):
            if name == stage:
                seen.write_text(path.read_text() if path.exists() else "")
                owner, attribute = PLACES[name]
                monkeypatch.setattr(owner, attribute, fault)  # in this forked process
            yield from function(*arguments)

        return stage_of

    stages = {name: at(name, function) for name, function in smoke.STAGES.items()}
    monkeypatch.setattr(smoke, "STAGES", stages)
    quiet = dict.fromkeys(check_parts.PARTS, nothing)
    monkeypatch.setattr(check_parts, "PARTS", quiet | {"smoke": check_parts.smoke})
    run = check.Worker.run

    def in_time(worker, kind, arguments, arch, seconds):
        return run(worker, kind, arguments, arch, 5.0 if (arguments[:1], fault) == ((stage,), hangs) else 60.0)

    monkeypatch.setattr(check.Worker, "run", in_time)
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: FORKS)
    assert command.run(output=path, op=PATTERN, minutes=3.0, emulate=None) == 1
    parts = {part["part"]: part for part in json.loads(path.read_text())["parts"]}
    order = [name for name in parts if name.startswith("smoke")]
    assert [name.split()[1] for name in order] == list(smoke.STAGES)
    name = next(name for name in order if name.split()[1] == stage)
    ended = [parts[one]["ended"] for one in order]
    at = order.index(name)
    assert ended[:at] == ["done"] * at and ended[at + 1 :] == ["left out"] * (len(order) - at - 1)
    assert ended[at] == ("hung: killed after 5 s" if fault is hangs else f"died: exit code {-signal.SIGSEGV}")
    assert parts[f"op {PATTERN}"]["ended"] == "left out" and parts[f"op {PATTERN}"]["said"] == f"{name} failed"
    assert ("Memory access fault" in parts[name]["said"]) == (fault is dies)
    *before, last = json.loads(seen.read_text())["parts"]
    assert (last["part"], last["ended"]) == (name, "begun") and len(before) == list(parts).index(name)
    assert f"skipped ({name} failed)" in capsys.readouterr().out
    if stage == "load":
        assert f"in {min((launch.CODE / 'gfx942').glob('*.co')).stem}" in check.wrong_of(parts[name])[0]
