"""Test the trial of kernels in a child process at a machine's first start."""

import json
import multiprocessing
import os
import pathlib
import signal
import sys
import time

import on_cpu
import pytest
import torch
import torch._dynamo  # a part's process imports it otherwise, each in a second or more
from fakes import Fake
from marks import full
from process_end import ended, is_running
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.worker.worker_base import WorkerWrapperBase

import vllm_rocm_ops
from vllm_rocm_ops import ops
from vllm_rocm_ops.collectives import launches
from vllm_rocm_ops.core import tables
from vllm_rocm_ops.tools import check_worker, first_start, smoke
from vllm_rocm_ops.vllm import worker_startup
from vllm_rocm_ops.vllm.graph import all_reduce_timing, compiled_ops
from vllm_rocm_ops.vllm.selection import kernel_selection as selection
from vllm_rocm_ops.vllm.selection import kernel_trial

FORKS = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    """Start with no record, on a machine with a GPU."""
    monkeypatch.setenv("VLLM_ROCM_OPS_TABLES", str(tmp_path))
    monkeypatch.setattr(kernel_trial, "applies", lambda: True)
    monkeypatch.setattr(kernel_trial, "device_of", lambda worker: {})
    selection.invalidate()
    yield
    selection.invalidate()


def write(**changed: str) -> None:
    """Write a record of this machine, with other software."""
    machine = selection.machine() | changed
    path = selection.path_of(machine)
    path.parent.mkdir(parents=True, exist_ok=True)
    selection.write(path, selection.Record(machine, {}))


def part(how: str = ""):
    """Return a stage of a case, which dies, hangs, raises, or gives a wrong result."""

    def stage(arch, name="first"):
        yield {"case": f"{name}/m1", "begun": True}
        if how == "dies":
            os.abort()
        if how == "hangs":
            time.sleep(60)
        if how:
            raise {"memory": torch.OutOfMemoryError, "raises": ValueError}[how]("no")
        yield {"case": f"{name}/m1", "wrong": None}

    return stage


def is_wrong(arch, *_):
    yield {"case": "first/m1", "wrong": "element 3 is 1, not 2"}


def tried(monkeypatch, **stages) -> tuple[dict, selection.Record]:
    """Return the outcome and the record of a trial in which some stages are replaced."""
    monkeypatch.setattr(smoke, "STAGES", dict.fromkeys(smoke.STAGES, part()) | stages)
    monkeypatch.setattr(first_start, "SECONDS", 5.0)  # parts begin late on a busy machine
    monkeypatch.setattr(first_start, "names", lambda: ["rms_norm", "scaled_mm", "silu_and_mul"])
    worker = check_worker.Worker(FORKS)
    try:
        return first_start.run(worker, time.monotonic() + 120), selection.record_here()
    finally:
        worker.close(kill=True)


BEFORE_OPS = ["driver", "stamps", "launch", "replay"]


def test_ops_that_no_seam_calls_are_not_tried():
    """They would take time from others: compiling flash_attention's PTX took more than 20 s on an H200's host."""
    names = first_start.names()
    of_ops = [(stage, name) for name in names for stage in ("load", "ops")]
    assert [*first_start.stages()] == [*((stage,) for stage in BEFORE_OPS), *of_ops]
    assert {"scaled_mm", "fused_experts", "stream_memory"} <= set(names)
    assert not {"flash_attention", "layer_norm", "softmax"} & set(names)


WAYS = {
    "dies": "smoke stage ops: died: exit code -6, in scaled_mm/m1",
    "hangs": "smoke stage ops: hung: killed after 5 s, in scaled_mm/m1",
    "raises": "smoke stage ops: error: ValueError: no, in scaled_mm/m1",
    "memory": "",
}


@pytest.mark.parametrize("how", WAYS)
def test_an_op_that_fails_is_off_and_the_others_are_tried(monkeypatch, how):
    bad, good = part(how), part()
    outcome, record = tried(monkeypatch, ops=lambda arch, name: (bad if name == "scaled_mm" else good)(arch, name))
    assert record.off == outcome["off"] == ({"scaled_mm": WAYS[how]} if WAYS[how] else {})
    assert outcome["ran"] == len(BEFORE_OPS) + 2 * 3 and len(outcome["failed"]) == 1
    assert selection.path_of(selection.machine()).exists()


@pytest.mark.parametrize(
    ("stage", "is_off"),
    [(("stamps",), False), (("launch",), True), (("load", "scaled_mm"), False)],
    ids=lambda s: str(s),
)
def test_a_stage_that_takes_too_long_is_a_fault_after_a_launch_alone(monkeypatch, stage, is_off):
    """A stage without an op may take all the time that is left, and so may the loading of an op's kernels."""
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)

    def run(kind, arguments, arch, seconds):
        ended = f"hung: killed after {seconds:.0f} s" if arguments == stage else "done"
        return {"ended": ended, "seconds": 1.0, "found": [{"machine": selection.machine()}], "said": ""}

    outcome = first_start.run(Fake(run=run, close=lambda kill: None), 140.0)
    assert outcome["failed"] == [f"smoke stage {stage[0]}: hung: killed after 38 s"]
    assert ("scaled_mm" in outcome["off"]) == ("scaled_mm" in selection.record_here().off) == is_off


@pytest.mark.parametrize("stage", ["stamps", "launch", "replay"])
def test_a_fault_before_the_first_op_turns_all_off(monkeypatch, stage):
    outcome, record = tried(monkeypatch, **{stage: part("dies")})
    assert record.off.keys() == {"rms_norm", "scaled_mm", "silu_and_mul", *launches.NAMES}
    assert {*record.off.values()} == {f"smoke stage {stage}: died: exit code -6, in first/m1"}
    assert outcome["ran"] == BEFORE_OPS.index(stage) + 1
    kernel_trial.after_device()
    explained = ops.silu_and_mul.explain(torch.randn(2, 32).bfloat16(), arch="gfx942")
    assert explained.source == f"fallback: off on this GPU: {record.off['silu_and_mul']}"
    group = Fake(world_size=2)
    monkeypatch.setattr(all_reduce_timing.seam, "active", lambda: {"all_reduce"})
    assert all_reduce_timing.unsupported_reason(None, group, object()).startswith("off on this GPU: smoke stage")


def dies_once(arch, name):
    """A stage that dies for one op: the op's own stage meets the same fault if it is the kernels'."""
    yield from part("dies" if name == "scaled_mm" else "")(arch, name)


NO_FAULT_OF_KERNELS = {"stamps": part("raises"), "replay": is_wrong, "load": dies_once}


@pytest.mark.parametrize("stage", NO_FAULT_OF_KERNELS)
def test_what_is_no_fault_of_kernels_turns_none_off(monkeypatch, stage):
    outcome, record = tried(monkeypatch, **{stage: NO_FAULT_OF_KERNELS[stage]})
    assert (record.off, outcome["ran"]) == ({}, len(BEFORE_OPS) + 2 * 3)
    assert len(outcome["failed"]) == 1 and outcome["failed"][0].startswith(f"smoke stage {stage}: ")


def test_no_stage_starts_without_its_whole_time(monkeypatch):
    """A stage that is cut short would be taken for one that hangs."""
    monkeypatch.setattr(first_start, "SECONDS", 100.0)
    outcome = first_start.run(Fake(run=None), time.monotonic() + 101)
    assert (outcome["ran"], outcome["off"]) == (0, {}) and "left out" in outcome["failed"][0]


def test_a_trial_ends_before_the_worker_goes_on(monkeypatch, tmp_path, caplog):
    """The child is waited for, and its time is of this start. A record of this software makes another needless."""
    mark = tmp_path / "mark"
    code = f"import time; time.sleep(0.5); open({str(mark)!r}, 'w').close(); "
    outcome = {"ran": 3, "failed": ["smoke stage ops: died"], "off": {}}
    monkeypatch.setattr(kernel_trial, "CODE", code + f"print({json.dumps(json.dumps(outcome))})")
    selection.begin_recording()
    kernel_trial.before_device(None)
    assert mark.exists() and selection.session.spent == 0  # it takes no time from the comparisons
    assert "first start with this software: 3 smoke stages ran in " in caplog.text
    assert "smoke stage ops: died" in caplog.text
    mark.unlink()
    write(disabled="rms_norm")
    write(code="1")
    kernel_trial.before_device(None)
    assert mark.exists()
    mark.unlink()
    write(driver="another")
    kernel_trial.before_device(None)
    assert not mark.exists()


def test_a_hanging_trial_is_killed_with_its_children(monkeypatch, tmp_path, caplog):
    """With the processes that it has started."""
    monkeypatch.setattr(kernel_trial, "SECONDS", 1.0)
    code = f"import os, subprocess, sys; p = subprocess.Popen(['sleep', '60']); open({str(tmp_path / 'p')!r}, 'w')"
    monkeypatch.setattr(kernel_trial, "CODE", f"{code}.write(str(p.pid)); sys.stdout.flush(); p.wait()")
    begin = time.monotonic()
    kernel_trial.before_device(None)
    assert time.monotonic() - begin < 10 and "no answer within 1 s" in caplog.text
    time.sleep(0.1)
    state = pathlib.Path("/proc", (tmp_path / "p").read_text(), "stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"
    monkeypatch.setattr(kernel_trial, "CODE", "raise SystemExit('ImportError: no module')")
    kernel_trial.before_device(None)
    assert "ImportError: no module" in caplog.text


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python has no safe path")
def test_the_child_imports_nothing_of_the_current_folder(monkeypatch, tmp_path, caplog):
    (tmp_path / "vllm_rocm_ops").mkdir()
    (tmp_path / "vllm_rocm_ops" / "__init__.py").write_text("raise SystemExit('another package')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(kernel_trial, "CODE", "import vllm_rocm_ops; raise SystemExit(vllm_rocm_ops.__file__)")
    kernel_trial.before_device(None)
    assert vllm_rocm_ops.__file__ in caplog.text


def test_the_child_has_the_software_of_this_process(monkeypatch, tmp_path, caplog):
    """Also of packages that no variable names, as its record is found by their versions."""
    information = tmp_path / "amd_aiter-0.9.9.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: amd-aiter\nVersion: 0.9.9\n")
    monkeypatch.syspath_prepend(tmp_path)
    code = (
        "from vllm_rocm_ops.vllm.selection.kernel_selection import software; raise SystemExit(f'has {software(str())}')"
    )
    monkeypatch.setattr(kernel_trial, "CODE", code)
    kernel_trial.before_device(None)
    assert f"has {selection.software('')}" in caplog.text and "'amd-aiter': '0.9.9'" in caplog.text


@pytest.mark.parametrize("recorded", [False, True])
def test_other_workers_wait(monkeypatch, tmp_path, recorded):
    """They do not try the kernels themselves. A first failure may be recorded already."""
    if recorded:
        write()
    monkeypatch.setattr(kernel_trial, "CODE", f"open({str(tmp_path / 'mark')!r}, 'w')")
    lock = tmp_path / "trial.lock"

    def hold():
        with tables.locked(lock, 1.0):
            (tmp_path / "held").touch()
            time.sleep(1.0)

    holder = FORKS.Process(target=hold)
    holder.start()
    while not (tmp_path / "held").exists():
        time.sleep(0.01)
    begin = time.monotonic()
    kernel_trial.before_device(None)
    assert time.monotonic() - begin > 0.5 and not (tmp_path / "mark").exists()
    holder.join()


def test_a_front_end_begins_and_a_worker_waits(monkeypatch, tmp_path, caplog):
    """The front end goes on meanwhile. What it forks has the lock's file open, and does not keep the lock."""
    mark = tmp_path / "mark"
    code = f"import sys, time; time.sleep(1.5); open({str(mark)!r}, 'a').write('tried\\n'); print"
    monkeypatch.setattr(kernel_trial, "CODE", f"{code}({json.dumps(json.dumps({'ran': 3, 'failed': [], 'off': {}}))})")
    caplog.set_level("INFO")
    begun = time.monotonic()
    kernel_trial.begin()
    holder = FORKS.Process(target=time.sleep, args=(60,))
    holder.start()
    assert not mark.exists()
    kernel_trial.before_device(None)
    holder.kill()
    assert mark.read_text() == "tried\n" and time.monotonic() - begun < 20
    assert "until the kernels were tried" in caplog.text and "3 smoke stages ran in" in caplog.text


def test_a_front_end_begins_before_it_configures_an_engine(monkeypatch):
    happened = []
    configured = lambda self, *given, **named: happened.append((given, named))
    monkeypatch.setattr(EngineArgs, worker_startup.CONFIGURE, configured)
    for name in (worker_startup.METHOD, worker_startup.LOAD, "init_device"):
        monkeypatch.setattr(WorkerWrapperBase, name, getattr(WorkerWrapperBase, name, None), raising=False)
    monkeypatch.setattr(compiled_ops, "pattern_finders", [])
    monkeypatch.setattr(kernel_trial, "begin", lambda: happened.append("begun"))
    worker_startup.install()
    EngineArgs.create_engine_config(None, "serve", headless=True)
    assert happened == ["begun", (("serve",), {"headless": True})]


def test_the_child_ends_with_its_parent(monkeypatch, tmp_path):
    """Also the process that it started, which launches kernels, in the middle of a launch."""

    def hangs(arch):
        (tmp_path / "written").write_text(f"{os.getppid()} {os.getpid()}")
        (tmp_path / "written").rename(tmp_path / "pids")
        time.sleep(100)
        yield

    def child():
        sys.argv = ["", str(time.monotonic() + 100), str(os.getppid())]
        first_start.main()

    def parent():
        FORKS.Process(target=child).start()
        time.sleep(100)

    monkeypatch.setattr(smoke, "STAGES", {"driver": hangs})
    process = FORKS.Process(target=parent)
    process.start()
    while not (tmp_path / "pids").exists():
        assert process.is_alive()
        time.sleep(0.02)
    processes = [int(word) for word in (tmp_path / "pids").read_text().split()]
    assert all(map(is_running, processes))
    process.kill()
    process.join()
    left = [each for each in processes if not ended(each)]
    for each in left:
        os.kill(each, signal.SIGKILL)
    assert not left


def test_the_child_sees_the_gpu_of_the_rank(monkeypatch):
    monkeypatch.undo()
    name, config = current_platform.device_control_env_var, Fake(assigned_physical_gpu_ids=None)
    worker = Fake(local_rank=1, parallel_config=config)
    monkeypatch.setenv(name, "4,6")
    assert kernel_trial.device_of(worker) == {name: "6", "HIP_VISIBLE_DEVICES": "6"}
    config.assigned_physical_gpu_ids = [4, 7]
    assert kernel_trial.device_of(worker)[name] == "7"
    assert kernel_trial.device_of(None)[name] == "4"


def test_a_worker_starts_though_nothing_can_be_tried(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(kernel_trial, "device_of", lambda worker: 1 / 0)
    kernel_trial.before_device(None)
    assert "are not tried before they are used: ZeroDivisionError" in caplog.text
    (tmp_path / "a file").touch()
    monkeypatch.setenv("VLLM_ROCM_OPS_TABLES", str(tmp_path / "a file"))
    kernel_trial.before_device(None)
    assert "are not tried before they are used: NotADirectoryError" in caplog.text or "FileExistsError" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("how", ["aborts", pytest.param("sleeps", marks=full)])
def test_inside_vllm(engines, expected, tmp_path, how):
    """An op that faults or hangs in the child is off in the same start and the next, which answer as the plain model."""
    flavour = ("llama", "token")
    job = engines.job(flavour, max_tokens=4)
    before = f"import on_cpu; on_cpu.measure(); on_cpu.try_kernels('scaled_mm', {how!r})"
    answers = engines.run({"first": job, "next": job}, before=before, VLLM_ROCM_OPS_TABLES=str(tmp_path))
    for name in ("first", "next"):
        answer = answers[name]
        assert answer["tokens"] == [wanted.argmax(-1).tolist() for wanted in expected(flavour, answer["tokens"])]
        # Once it is known that the op never serves, a layer calls vLLM's kernel without counting.
        assert answer["stats"]["vllm"]["its kernel"] >= 8 and "scaled_mm" not in answer["stats"]
    [record] = on_cpu.records(tmp_path)
    why = record.off.pop("scaled_mm")
    fault = "died: exit code -6" if how == "aborts" else "hung: killed after 3 s"
    assert why.startswith(f"smoke stage ops: {fault}, in") and not record.off
    assert answers["output"].count("first start with this software: 10 smoke stages ran in ") == 1
    assert answers["output"].count("scaled_mm is off on this GPU") >= 2


HANGS = """
import time
import on_cpu
from vllm_rocm_ops import ops
from vllm_rocm_ops.vllm.selection import watchdog

on_cpu.measure()
ops.scaled_mm.run_kernels = lambda *_: time.sleep(600)
watchdog.WARN_SECONDS, watchdog.END_SECONDS = 1.0, 3.0
"""


@pytest.mark.slow
@full
def test_a_launch_that_hangs_while_it_is_timed(engines, expected, tmp_path):
    """The start ends and says so; the next one comes up with the op off."""
    flavour = ("llama", "token")
    job = engines.job(flavour, max_tokens=4)
    with pytest.raises(AssertionError, match="a launch hangs, so this process ends, .*: scaled_mm, scaled_mm"):
        engines.run({"it": job}, before=HANGS, VLLM_ROCM_OPS_TABLES=str(tmp_path))
    before = "import on_cpu; on_cpu.measure()"
    answers = engines.run({"it": job}, before=before, VLLM_ROCM_OPS_TABLES=str(tmp_path))
    answer = answers["it"]
    assert answer["tokens"] == [wanted.argmax(-1).tolist() for wanted in expected(flavour, answer["tokens"])]
    assert "scaled_mm" not in answer["stats"]
    [record] = on_cpu.records(tmp_path)
    assert record.off["scaled_mm"].startswith("its launch hung for 3 s, at scaled_mm ")
