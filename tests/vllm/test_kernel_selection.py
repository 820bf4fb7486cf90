"""Test which kernel serves a call: timing, checks, records and agreement, with a fake clock."""

import collections
import contextlib
import dataclasses
import functools
import itertools
import json
import logging
import math
import multiprocessing
import os
import re
import socket
import sys
import time
import types
import typing
from datetime import timedelta

import pytest
import torch
from fakes import Fake, FakeClock, fake_worker
from keys import key
from marks import full
from vllm.config import VllmConfig
from vllm.distributed import parallel_state
from vllm.v1.worker.worker_base import WorkerWrapperBase

from vllm_rocm_ops.core import archs, launch, tables
from vllm_rocm_ops.core.clock import tensor_bytes
from vllm_rocm_ops.models import config as model_config
from vllm_rocm_ops.models import layers as model_layers
from vllm_rocm_ops.tools import doctor
from vllm_rocm_ops.vllm import coverage, register, worker_startup
from vllm_rocm_ops.vllm.graph import compiled_ops
from vllm_rocm_ops.vllm.linear import base as linear_base
from vllm_rocm_ops.vllm.linear import weight_order
from vllm_rocm_ops.vllm.selection import comparison, kernel_timing, watchdog
from vllm_rocm_ops.vllm.selection import kernel_selection as selection
from vllm_rocm_ops.vllm.selection import replays as replays_module
from vllm_rocm_ops.vllm.selection.comparison import RowComparison
from vllm_rocm_ops.vllm.selection.key import AITER_ON, Baseline, Key
from vllm_rocm_ops.vllm.worker import Extension

N, K, LIMIT = 48, 64, 16
CAPTURED, MAX = (1, 8, 32, 64), 256


class Product(linear_base.Linear):
    """x W^T in bf16, by an op named "product" and by vLLM. Tests replace `plugin`. A layer is its weight."""

    def __init__(self, name: str = "product"):
        self.op, self.ran = Fake(name=name, run_kernels=self.kernel, trial=contextlib.nullcontext), []

    def kernel(self, x, weight):
        self.ran.append("plugin")
        return self.plugin(x, weight)

    def plugin(self, x, weight):
        return x @ weight.t()

    def vllm_kernel(self, x, weight):
        self.ran.append("baseline")
        return x @ weight.t()

    def max_tokens(self):
        return LIMIT

    def columns(self, layer):
        return layer[0].shape[1], layer[0].shape[0]

    def describe(self, layer):
        return "{1}x{0}".format(*self.columns(layer))

    def arguments(self, layer, x, seed):
        return x, *layer

    def baseline(self, x, weight):
        return self.vllm_kernel(x, weight)

    def run(self, x, weight):
        key = self.op.name, weight.shape
        choice = selection.choice_for(key, self, Baseline("VllmKernel"), lambda: (weight,), weight, len(x))
        output = self.op.run_kernels(x, weight) if choice.plugin_serves(len(x)) else None
        return self.vllm_kernel(x, weight) if output is None else output

    def exact(self, arguments, x, rows, columns):
        return x[rows].float() @ arguments[1][columns].float().t()

    def serve(self, tokens: int) -> str:
        """Return who serves a call of this many tokens."""
        self.ran.clear()
        self.run(torch.ones(tokens, K, dtype=torch.bfloat16), WEIGHTS[0])
        assert len(self.ran) == 1
        return self.ran[0]


WEIGHTS = [torch.randn(N, K, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(3)]


EQUAL = lambda side, tokens: [1.0]  # samples of a clock


def plugin_wins(at) -> FakeClock:
    """Return a clock by which the plugin is faster at these numbers of tokens, and much slower at others."""
    return FakeClock(lambda name, tokens: [10.0] * 3 if name == "baseline" else [5.0 if tokens in at else 50.0] * 3)


pytestmark = pytest.mark.usefixtures("unmeasured")


def started(*kernels: Product) -> Product:
    """Return the same kernels after the profile run of a new process."""
    selection.invalidate()
    selection.begin_recording()
    for one in kernels:
        for weight in WEIGHTS:
            one.run(torch.ones(MAX, K, dtype=torch.bfloat16), weight)
    return kernels[0]


def warm_up(clock, gather=lambda mine: [mine]) -> None:
    kernel_timing.warm_up(CAPTURED, MAX, clock, gather)


def measures(*kernels: Product) -> FakeClock:
    """Start a worker in which the plugin wins everywhere, and return its clock."""
    started(*kernels)
    warm_up(clock := plugin_wins(range(MAX + 1)))
    return clock


def file() -> "os.PathLike":
    return selection.path_of(selection.machine())


def test_unmeasured_calls_have_the_fixed_limit(monkeypatch):
    """The limit holds before the measurement, and without it."""
    for switch in ("5", "0"):
        monkeypatch.setenv("VLLM_ROCM_OPS_MEASURE", switch)
        product = started(Product())
        assert [product.serve(m) for m in (1, LIMIT, LIMIT + 1, MAX)] == ["plugin", "plugin", "baseline", "baseline"]
        assert [one.state for one in selection.all_choices()] == ["unmeasured"]
    assert selection.all_choices()[0].layers is None  # nothing is kept for a measurement that is switched off


def test_the_faster_kernel_serves():
    """This holds at measured sizes; between two, the one that is slower for the plugin decides; above all, vLLM serves."""
    product = started(Product())
    clock = plugin_wins({8, 32, 64, 256})
    warm_up(clock)
    assert [len(sets[0][0]) for sets in clock.asked] == [1, 8, 32, 64, 128, 256]
    served = {m: product.serve(m) for m in (1, 2, 7, 8, 9, 31, 32, 64, 65, 128, 129, 255, 256, 257, 5000)}
    assert {m for m in served if served[m] == "plugin"} == {8, 9, 31, 32, 64, 256}
    [one] = selection.all_choices()
    assert (one.state, one.layers) == ("measured", None)


def test_the_first_line_says_whose_code_objects_run(caplog, monkeypatch):
    monkeypatch.setattr(selection, "machine", lambda: {"arch": "gfx942"})
    started(Product())
    with caplog.at_level(logging.INFO, kernel_timing.logger.name):
        warm_up(plugin_wins({1}))
    assert caplog.messages[0].endswith(f"; code objects: {launch.origin('gfx942')}")


def test_layers_of_the_model_are_walked():
    """Each graph calls layers of the model, each with its own weight, and no weight is copied."""
    clock = plugin_wins({1})
    started(Product())
    warm_up(clock)
    assert [id(weight) for _, weight in clock.asked[0]] == [id(weight) for weight in WEIGHTS]
    assert len(clock.asked[0][0][0]) == 1


@pytest.mark.parametrize(("plugin", "winner"), [(9.9, "baseline"), (9.7, "plugin")])
def test_the_plugin_has_to_win_by_more_than_the_margin(plugin, winner):
    """Outliers among the samples change nothing."""
    samples = {"plugin": [plugin, 90.0, plugin, plugin, 0.1], "baseline": [10.0, 10.0, 0.2, 70.0, 10.0]}
    product = started(Product())
    warm_up(FakeClock(lambda side, tokens: samples[side]))
    assert product.serve(1) == product.serve(MAX) == winner


def test_what_no_kernel_takes_is_not_timed():
    product = Product()
    product.plugin = lambda x, weight: x @ weight.t() if len(x) <= 32 else None
    assert [len(sets[0][0]) for sets in measures(product).asked] == [1, 8, 32]
    product.ran.clear()
    assert [product.serve(m) for m in (32, 33, 64)] == ["plugin", "baseline", "baseline"]


WRONG = {
    "a scale": lambda x, weight: 1.05 * (x @ weight.t()),
    "a row": lambda x, weight: torch.where(torch.arange(len(x))[:, None] == len(x) // 2 + 3, 0.0, x @ weight.t()),
    "a column": lambda x, weight: torch.where(torch.arange(N) == 21, 0.0, x @ weight.t()),
    "unwritten": lambda x, weight: torch.full_like(x @ weight.t(), torch.nan),
    "a shape": lambda x, weight: (x @ weight.t())[:, 1:],
    "an error": lambda x, weight: x @ weight,
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_kernel_is_switched_off_on_this_gpu(fault, caplog, tmp_path, monkeypatch):
    """An op that is wrong at one size is off in later processes, too, but not on another GPU or for other code."""
    product, other = Product(), Product("other")
    product.plugin = lambda x, weight: (WRONG[fault] if len(x) == 64 else Product.plugin.__get__(product))(x, weight)
    with caplog.at_level(logging.WARNING):
        measures(product, other)
    [line] = caplog.messages
    assert re.match(r"vllm-rocm-ops: product is off on this GPU and vLLM's kernels run .*: .*48x64, 64 tokens", line)
    assert {product.serve(m) for m in (1, 8, 64)} == {"baseline"}
    assert other.serve(64) == "plugin"
    assert {str(one.key): one.state for one in selection.all_choices()} == {
        "product 48x64 VllmKernel": "off",
        "other 48x64 VllmKernel": "measured",
    }
    selection.invalidate()
    assert product.serve(1) == "baseline"
    records = doctor.find_measured(tmp_path)
    assert [list(record["off"]) for record in records] == [["product"]]
    text = "\n".join(doctor.measured_lines(records, selection.machine(), verbose=True))
    assert "product is off" in text and "other" in text
    header, *lines = Extension().vllm_rocm_ops_timings()
    assert header in text and {line.split()[0] for line in lines} == {"product", "other"}
    here = selection.machine()
    for elsewhere in ({"gpu": "MI325X"}, {"code": "2"}):
        monkeypatch.setattr(selection, "machine", lambda elsewhere=elsewhere: here | elsewhere)
        selection.invalidate()
        assert product.serve(1) == "plugin"
        assert Extension().vllm_rocm_ops_timings() == []


def test_doctor_names_backends_that_the_user_named():
    """With the number of sizes that the plugin serves beside each, also if an op is off."""
    wins, loses = selection.Measured(1.0, 2.0), selection.Measured(2.0, 1.0)
    keys = [
        Key("product", "64x64", Baseline(name, named=named)) for name, named in (("A", "--moe-backend a"), ("B", ""))
    ]
    record = selection.Record(selection.machine(), {}, {one: {1: wins, 2: wins, 4: loses} for one in keys})
    for off, serves in (({}, 2), ({"product": "wrong"}, 0)):
        entry = dataclasses.asdict(record) | {"off": off, "shapes": record.shapes, "path": "file"}
        text = "\n".join(doctor.measured_lines([entry], selection.machine(), verbose=False))
        line = (
            f"--moe-backend a named; the plugin serves {serves} of 3 sizes; VLLM_ROCM_OPS_NAMED_BACKEND=keep keeps it"
        )
        assert line in text and text.count(" named; ") == 1


@pytest.mark.parametrize("fails", ["baseline", "plugin"])
def test_a_kernel_that_fails_after_its_launch_is_the_one_to_blame(fails, caplog):
    """On a GPU, the error comes when the clock waits."""
    product, clock, failed = Product(), plugin_wins(range(MAX + 1)), []
    of = getattr(product, fails)
    setattr(product, fails, lambda *given: failed.append("illegal address") or of(*given))

    def finish():
        if failed:
            raise RuntimeError(failed.pop())

    clock.finish = finish
    started(product)
    failed.clear()
    warm_up(clock)
    assert list(selection.read(file()).off) == ["product"] * (fails == "plugin")
    assert ("timing of product failed: RuntimeError: illegal address" in caplog.text) == (fails == "baseline")


def test_a_baseline_that_the_sample_does_not_explain_serves(caplog):
    """The plugin's kernel cannot be judged against it, and may as well be wrong."""
    product = Product()
    product.vllm_kernel = lambda x, weight: product.ran.append("baseline") or -(x @ weight.t())
    product.plugin = lambda x, weight: -(x @ weight.t())
    measures(product)
    assert "too large for a comparison" in caplog.text and "is wrong" not in caplog.text
    assert product.serve(1) == "baseline"
    assert "product" not in selection.read(file()).off


@pytest.mark.parametrize(("factor", "error"), [(-1.0, "2 from float32"), (math.nan, "not finite")])
def test_a_baseline_that_is_wrong_is_named(factor, error, caplog, tmp_path):
    """Once in each start, and by doctor, also as JSON. It serves as without the plugin, and is not timed again."""
    product = Product()
    product.vllm_kernel = lambda x, weight: product.ran.append("baseline") or factor * (x @ weight.t())
    for _ in range(2):
        caplog.clear()
        clock = measures(product)
        [warning] = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        named = f"VllmKernel, vLLM's kernel for product, is wrong on this GPU: {error}, the plugin 0.00"
        assert named in warning and "48x64, " in warning and ", and 5 more sizes. vLLM's kernel serves" in warning
        assert product.serve(1) == "baseline" and clock.asked == [] and selection.read(file()).off == {}
    assert all(
        times.baseline_is_wrong for times in selection.read(file()).shapes[key("product 48x64 VllmKernel")].values()
    )
    found = doctor.find_measured(tmp_path)
    assert any("is wrong on this GPU" in line for line in doctor.measured_lines(found, selection.machine(), False))
    json.dumps(found, allow_nan=False)


def test_a_start_ends_with_what_serves_and_what_vllm_alone_runs(caplog):
    """It has no advice without a survey."""
    started(Product("scaled_mm"), Product("rms_norm_it"))
    with caplog.at_level(logging.INFO):
        warm_up(plugin_wins({1, 8}))
    [said] = [message for message in caplog.messages if "what serves" in message]
    lines = [re.split("  +", line) for line in said.splitlines()[1:]]
    serves = "serves 2 of 6 sizes, 2.00x as fast as vLLM's kernel", "vLLM alone: VllmKernel"
    kinds = ("linear layers", "scaled_mm"), ("norms, activations, all-reduce", "rms_norm_it")
    assert lines == [[*kind, *serves] for kind in kinds] and "advise" not in caplog.text
    record = selection.read(file())
    record.shapes[Key("scaled_mm", "48x64", Baseline("it", flag=AITER_ON))] = {1: selection.Measured(5.0, 2.0)}
    record.steps["a model"] = [["scaled_mm", ["48x64"], 10]]
    selection.write(file(), record)
    started(Product("scaled_mm"))
    with caplog.at_level(logging.INFO):
        warm_up(plugin_wins({1, 8}))
    [said] = [message for message in caplog.messages if "advise" in message]
    assert "a model  linear layers  1 tokens  VLLM_ROCM_USE_AITER=1 is faster by 30 us per step" in said


def test_out_of_memory_keeps_the_sizes_measured_before(caplog):
    """Larger sizes are left to vLLM."""
    product = Product()

    def full(x, weight):
        if len(x) > 32:
            raise torch.OutOfMemoryError("no memory")
        return x @ weight.t()

    product.plugin = full
    measures(product)
    assert "failed: OutOfMemoryError" in caplog.text
    assert [product.serve(m) for m in (32, 64)] == ["plugin", "baseline"]
    assert selection.read(file()).off == {}


def test_recorded_times_are_not_measured_again():
    """A second process measures nothing; one that captures more sizes measures those."""
    product = started(Product())
    warm_up(plugin_wins({1, 8}))
    started(product)
    clock = FakeClock(EQUAL)
    warm_up(clock)
    assert clock.asked == []
    assert [product.serve(m) for m in (8, 9)] == ["plugin", "baseline"]
    started(product)
    kernel_timing.warm_up((*CAPTURED, 4), MAX, clock := plugin_wins({4}), lambda mine: [mine])
    assert [len(sets[0][0]) for sets in clock.asked] == [4]


def test_an_unusable_record_is_measured_again():
    other = json.dumps(dataclasses.asdict(selection.Record({"gpu": "another"}, {"product": "wrong there"})))
    shapes = '{"shapes": {"a": {"x": [1]}}, "machine": {}, "off": {}}'
    for text in (other, "", "[]", '{"machine": {}, "off": {}}', shapes):
        file().parent.mkdir(exist_ok=True)
        file().write_text(text)
        measures(product := Product())
        assert product.serve(MAX) == "plugin"


def test_a_folder_that_cannot_be_written_keeps_nothing(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VLLM_ROCM_OPS_TABLES", str(tmp_path / "file"))
    measures(product := Product())
    assert "results are not saved" in caplog.text
    assert product.serve(MAX) == "plugin"


FORKS = multiprocessing.get_context("fork")


def begin(target) -> multiprocessing.Process:
    """Start a process with this one's state, except for threads, which do not survive a fork."""

    def alone():
        torch.set_num_threads(1)
        target()

    process = FORKS.Process(target=alone)
    process.start()
    return process


def in_a_process(target) -> int:
    process = begin(target)
    process.join(60)
    return process.exitcode


def ends(status: int):
    """Return a kernel that ends the process at 64 tokens, like a signal that cannot be caught."""
    return lambda x, weight: os._exit(status) if len(x) == 64 else x @ weight.t()


def test_a_worker_that_was_killed_while_measuring(caplog):
    """The next one measures the same op again, after the others, and clears the blame when it comes through."""
    product, other = Product(), Product("other")

    def killed():
        product.plugin = ends(9)
        measures(product, other)

    assert in_a_process(killed) == 9
    started(product, other)
    asked = []
    product.plugin = lambda x, weight: asked.append("product") or x @ weight.t()
    other.plugin = lambda x, weight: asked.append("other") or x @ weight.t()
    warm_up(plugin_wins(range(MAX + 1)))
    assert asked == sorted(asked) and {*asked} == {"other", "product"}
    assert product.serve(MAX) == other.serve(MAX) == "plugin"
    assert "a process died while timing product 48x64 VllmKernel at 64 tokens, which is timed again" in caplog.text
    record = selection.read(file())
    assert (record.off, record.ended) == ({}, {}) and len(record.shapes) == 2
    assert [path.suffix for path in file().parent.iterdir()].count(".json") == 1
    assert not file().with_suffix(".running").exists()
    file().unlink()
    assert in_a_process(killed) == 9
    assert selection.read(file()).off == {}


def test_a_worker_that_dies_again_while_measuring():
    """Its op alone is off for the next. A worker that was stopped by a signal that raises is not blamed."""
    product, other = Product(), Product("other")

    def dies():
        product.plugin = ends(9)
        measures(product, other)

    def stopped():
        product.plugin = lambda x, weight: sys.exit(3) if len(x) == 64 else x @ weight.t()
        measures(product, other)

    assert in_a_process(stopped) == in_a_process(stopped) == 3
    started(product, other)
    assert selection.read(file()).off == {}
    assert in_a_process(dies) == in_a_process(dies) == 9
    sizes = {str(shape): [*by_tokens] for shape, by_tokens in selection.read(file()).shapes.items()}
    assert sizes["other 48x64 VllmKernel"] == [1, 8, 32, 64, 128, 256] and max(sizes["product 48x64 VllmKernel"]) == 32
    started(product, other)
    product.ran.clear()
    warm_up(clock := plugin_wins(range(MAX + 1)))
    assert "plugin" not in product.ran
    assert product.serve(1) == "baseline" and other.serve(1) == "plugin"
    why = "2 processes died while timing it, the last one at product 48x64 VllmKernel at 64 tokens"
    assert selection.read(file()).off == {"product": why}
    assert not clock.asked


def test_crashes_of_two_ops_are_both_remembered():
    """No start forgets what an earlier one has found, although each ends before it has measured anything."""
    product, other = Product(), Product("other")

    def dies():
        product.plugin = other.plugin = lambda x, weight: os._exit(9)
        measures(product, other)

    starts = 0
    while in_a_process(dies) == 9:
        starts += 1
        assert starts < 8
    assert starts == 4 and selection.read(file()).off.keys() == {"product", "other"}


@pytest.fixture
def soon(monkeypatch):
    """Shorten the watchdog's limits."""
    monkeypatch.setattr(watchdog, "WARN_SECONDS", 0.2)
    monkeypatch.setattr(watchdog, "END_SECONDS", 1.0)


def test_a_launch_that_hangs_turns_its_op_off_for_the_next_start(soon, tmp_path):
    product, other = Product(), Product("other")

    def hangs():
        watchdog.logger.addHandler(logging.FileHandler(tmp_path / "said"))
        product.plugin = lambda x, weight: time.sleep(60)
        measures(product, other)

    assert in_a_process(hangs) == watchdog.STATUS
    output = (tmp_path / "said").read_text()
    ends_after = "a launch has not ended for 0 s (the process is ended after 1 s)"
    for said in (ends_after, "a launch hangs, so this process ends"):
        assert re.search(f"{re.escape(said)}.*: product, product 48x64 VllmKernel at 1 tokens", output), output
    measures(product, other)
    assert product.serve(1) == "baseline" and other.serve(1) == "plugin"
    why = "its launch hung for 1 s, at product 48x64 VllmKernel at 1 tokens"
    record = selection.read(file())
    assert (record.off, record.ended) == ({"product": why}, {})
    lines = doctor.measured_lines(doctor.find_measured(tmp_path), selection.machine(), verbose=True)
    assert f"product is off: {why} (to measure again, remove the file)" in lines


def test_what_is_slow_and_not_the_plugins_ends_nothing(soon, caplog):
    """Neither vLLM's kernel, which may compile, nor the check of results, nor several launches in sum."""
    product = Product()

    def slowly(seconds: float, call):
        """Return the call, which takes this long for one token."""

        def slow(*arguments):
            time.sleep(seconds if any(len(x) == 1 for x in arguments if isinstance(x, torch.Tensor)) else 0)
            return call(*arguments)

        return slow

    def measured():
        product.exact = slowly(1.5, product.exact)
        product.vllm_kernel, product.plugin = slowly(1.5, product.vllm_kernel), slowly(0.6, product.plugin)
        measures(product)

    assert in_a_process(measured) == 0
    assert len(selection.read(file()).shapes[key("product 48x64 VllmKernel")]) == 6


def test_the_watchdog_covers_the_plugins_graph_only(monkeypatch, tmp_path):
    """Its capture and replays are, until they end; vLLM's are not."""
    clocks, watched = kernel_timing.clocks, {"plugin": [], "baseline": []}

    def capture(call, sets):
        call()
        return Fake(replay=call)

    class Event:
        record = staticmethod(list)
        elapsed_time = staticmethod(lambda end: 1.0)

        def synchronize(self):
            watched["plugin" if watchdog._watch.begun else "baseline"].append("end")

    monkeypatch.setattr(clocks, "capture", capture)
    monkeypatch.setattr(clocks, "COLD_BYTES", 4)
    monkeypatch.setattr(clocks.torch, "zeros", lambda *shape, device: torch.ones(*shape))
    monkeypatch.setattr(clocks.torch.cuda, "Event", lambda enable_timing: Event())
    calls = {name: lambda name=name: watched[name].append(watchdog._watch.begun is not None) for name in watched}
    with watchdog.marker(tmp_path / "mark", ""):
        kernel_timing.GraphClock().times(calls, [()], Fake(check=lambda graphs: None))
        assert watchdog._watch.begun is None
    assert watchdog._watch is None
    rounds = clocks.ROUNDS + 1
    assert watched == {"plugin": [True, *[True, "end"] * rounds], "baseline": [False, *[False, "end"] * rounds]}


def test_a_process_that_measures_without_end(caplog, monkeypatch):
    """The others start with what is known, and do not measure at the same time."""
    monkeypatch.setattr(kernel_timing, "SECONDS_COMPILING", 0.2 - kernel_timing.limit_s())
    other = Product("other")
    measures(other)
    measures_long = begin(lambda: hold(file().with_suffix(".lock")))
    while not file().with_suffix(".held").exists():
        time.sleep(0.01)
    try:
        clock = measures(product := Product(), other)
    finally:
        measures_long.kill()
        measures_long.join()
    assert not clock.asked and "only recorded results are used, because another process is timing: " in caplog.text
    assert (product.serve(LIMIT), product.serve(MAX)) == ("plugin", "baseline") and other.serve(MAX) == "plugin"
    measures(product, other)
    assert product.serve(MAX) == "plugin"


def hold(lock: "os.PathLike") -> None:
    with tables.locked(lock, 60):
        lock.with_suffix(".held").touch()
        time.sleep(60)


def test_one_worker_of_a_machine_measures():
    """The others wait for it and read."""
    results = FORKS.Queue()

    def worker():
        product = started(Product())
        clock = FakeClock(lambda name, tokens: [1.0 if name == "plugin" else 2.0])
        warm_up(clock)
        results.put((len(clock.asked), product.serve(MAX)))

    workers = [begin(worker) for _ in range(3)]
    found = sorted(results.get(timeout=60) for _ in workers)
    for process in workers:
        process.join(60)
    assert found == [(0, "plugin"), (0, "plugin"), (6, "plugin")]


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_agree(rank):
    """An op is off if it is off for any rank; the plugin serves where it does for all ranks that measured."""
    product, other = Product(), Product("other")
    started(product, other)
    shape = key("product 48x64 VllmKernel")
    other_ranks = {shape: bytes([0, 0, 1, 1, 0]), key("product 4x4 Theirs"): bytes([0, 1])}
    theirs = selection.Decided({"other": "wrong there"}, other_ranks)
    warm_up(plugin_wins({1, 8}), lambda mine: [mine, theirs] if rank == 0 else [theirs, mine])
    assert [product.serve(m) for m in (1, 2, 3, 4, 8)] == ["baseline", "plugin", "plugin", "baseline", "baseline"]
    assert other.serve(1) == "baseline"
    started(product, other)
    both = selection.Decided({}, {shape: bytes([0, 1, 0])}), selection.Decided({}, {shape: bytes([0, 1, 1, 1])})
    warm_up(None, lambda mine: [selection.Decided({}, {}), *both])
    assert [product.serve(m) for m in (1, 2, 3)] == ["plugin", "baseline", "baseline"]


def test_ranks_agree_though_one_ran_out_of_time():
    """The others decide where it measured nothing. Above all sizes the fixed limit holds, if the plugin won there."""
    shape = key("product 48x64 VllmKernel")
    for longer, plugin in ((bytes([0, 1, 1, 0]), {1, 2}), (bytes([0, 1, 1, 1]), {*range(1, LIMIT + 1)})):
        product = started(Product())
        both = [selection.Decided({}, {shape: serves}) for serves in (bytes([0, 1]), longer)]
        for order in (both, both[::-1]):
            warm_up(None, lambda mine, order=order: order)
            assert {m for m in range(1, LIMIT + 2) if product.serve(m) == "plugin"} == plugin


def test_ranks_stay_in_step_when_one_fails(caplog, monkeypatch):
    """It still takes part in the agreement."""
    product, asked = started(Product()), []
    monkeypatch.setattr(selection, "read", lambda: None)
    warm_up(FakeClock(EQUAL), lambda mine: asked.append(mine) or [mine])
    assert asked == [selection.Decided({}, {})]
    assert "kernel timing failed: TypeError" in caplog.text
    assert product.serve(LIMIT) == "plugin"


def test_two_installations_have_a_file_each(tmp_path, monkeypatch):
    """One that measures does not change what the other reads."""
    for code, at in (("1", {1}), ("2", {8})):
        monkeypatch.setattr(selection, "machine", lambda code=code: {"arch": "gfx942", "gpu": "MI300X", "code": code})
        started(Product())
        warm_up(plugin_wins(at))
    for code, wanted in (("1", ["plugin", "baseline"]), ("2", ["baseline", "plugin"])):
        monkeypatch.setattr(selection, "machine", lambda code=code: {"arch": "gfx942", "gpu": "MI300X", "code": code})
        selection.invalidate()
        product = Product()
        assert [product.serve(m) for m in (1, 8)] == wanted
    assert len(list(tmp_path.rglob("measured-*.json"))) == 2


def test_the_machines_name_has_all_that_times_depend_on(monkeypatch):
    """Its name has all that a measurement depends on: an op that is switched off now may be measured later."""
    here = REAL_MACHINE()
    monkeypatch.setenv("VLLM_ROCM_OPS_DISABLE", "scaled_mm")
    assert REAL_MACHINE() == here | {"disabled": "scaled_mm"}
    assert here.keys() >= {"gpu", "arch", "units", "driver", "torch", "vllm-rocm-ops", "code"}
    assert all(isinstance(value, str) for value in here.values())


REAL_MACHINE = selection.machine


def test_the_code_is_part_of_the_machine(tmp_path, monkeypatch):
    """A tuned table of the user's changes which kernel is measured."""
    monkeypatch.setenv("VLLM_ROCM_OPS_TABLES", str(tmp_path))
    selection.code_hash.cache_clear()
    before = selection.code_hash("gfx942")
    (tmp_path / "gfx942").mkdir()
    (tmp_path / "gfx942" / "scaled_mm.csv").write_text("m,source\n")
    selection.code_hash.cache_clear()
    assert selection.code_hash("gfx942") != before


@pytest.mark.parametrize(("plugin", "rounds"), [(14.0, [1, 5]), (9.0, [1, 5]), (9.9, [1, 5, 10]), (16.0, [1])])
def test_rounds_end_when_more_would_not_change_what_serves(monkeypatch, plugin, rounds):
    """A kernel that is slow at thousands of tokens would take all the time."""
    asked = []

    def replays(graphs, calls, rounds=None, around=None, flush=None):
        asked.append(rounds)
        return {name: [(plugin if name == "plugin" else 10.0) / calls] * rounds for name in graphs}

    monkeypatch.setattr(kernel_timing.clocks, "capture", lambda call, sets: (call, sets))
    monkeypatch.setattr(kernel_timing.clocks, "replays", replays)
    replays_checked = Fake(check=lambda graphs: asked.append(len(graphs)))
    found = kernel_timing.GraphClock().times({"plugin": min, "baseline": max}, [(1,), (2,)], replays_checked)
    count = sum(rounds[1:]) or 1
    assert found == {"plugin": [plugin / 2] * count, "baseline": [5.0] * count}
    assert asked == [2, *rounds, 2]  # both graphs are replayed before, which prepares them, and after


class Graph:
    """A graph by a call that Python repeats. Its replays alter the first result after `spared` of them."""

    def __init__(self, call, sets, spared=99):
        self.call, self.sets, self.spared = call, sets, spared
        self.outputs = kernel_timing.clocks.run_all(call, sets)

    def replay(self):
        found = replays_module.flattened(list(kernel_timing.clocks.run_all(self.call, self.sets)))
        for output, value in zip(replays_module.flattened(list(self.outputs)), found):
            output.copy_(value)
        self.spared -= 1
        if self.spared < 0:
            replays_module.flattened(list(self.outputs))[0].view(-1)[0] += 1


@pytest.mark.parametrize("spared", [0, 1])
@pytest.mark.parametrize("whose", [None, "plugin", "baseline"])
def test_replays_are_compared_before_and_after_they_are_timed(whose, spared, monkeypatch):
    """A call adds to its residual in place, so that each compared replay needs the arguments of the first."""

    def add(x, residual):
        residual += x
        return x * 2, (residual * 3, None)

    def capture(call, sets):
        graphs.append(Graph(call, sets, spared if whose == ("plugin", "baseline")[len(graphs)] else 99))
        return graphs[-1]

    graphs, sets = [], [(torch.full((4, 8), float(n)), torch.ones(4, 8)) for n in (1, 2, 3)]
    monkeypatch.setattr(kernel_timing.clocks, "capture", capture)
    monkeypatch.setattr(kernel_timing.clocks, "replays", lambda graphs, calls, **_: {key: [1.0] for key in graphs})
    calls = {"plugin": add, "baseline": add}
    replays = kernel_timing.Replays(calls, sets, fresh=lambda given: (given[0], given[1].clone()))
    time = functools.partial(kernel_timing.GraphClock().times, calls, sets, replays)
    if whose is None:
        assert time().keys() == calls.keys()
    else:
        with pytest.raises(kernel_timing.Mismatch if whose == "plugin" else kernel_timing.BrokenGraph):
            time()


class Padded(Product):
    """A product whose kernel at vLLM's side leaves another padding at each call, as two seams time it."""

    def __init__(self):
        super().__init__()
        self.calls = itertools.count(1)

    def plugin(self, x, weight):
        return x @ weight.t(), torch.zeros(1)

    def vllm_kernel(self, x, weight):
        return x @ weight.t(), torch.full((1,), float(next(self.calls)))

    def comparable(self, outputs):
        return outputs[0]

    def inputs(self, tokens, seed):
        return torch.ones(tokens, K, dtype=torch.bfloat16), WEIGHTS[seed]

    def results(self, output, tokens):
        return output


class PaddedRows(Padded):
    sample, exact_rows, replayed = RowComparison.sample, RowComparison.exact_rows, None

    def exact(self, x, weight):
        return x.float() @ weight.float().t(), None


def measured(kernels: Padded, clock) -> selection.Measured:
    return kernel_timing.check_and_time(kernels, [(w,) for w in WEIGHTS], 8, clock, contextlib.nullcontext())


@pytest.mark.parametrize("kernels", [Padded, PaddedRows])
@pytest.mark.parametrize("is_broken", [False, True])
def test_padding_that_a_kernel_leaves_unwritten_is_no_difference(kernels, is_broken, monkeypatch):
    """A wrong value is. All pairs flush the caches with the same memory."""
    flushes = set()

    def replays(graphs, calls, rounds=None, around=None, flush=None):
        flushes.add(flush)
        return {name: [1.0] * rounds for name in graphs}

    def capture(call, sets):
        plugin_serves = isinstance(call, functools.partial)
        return Graph(call, sets, 0 if is_broken and not plugin_serves else 99)

    monkeypatch.setattr(kernel_timing.clocks, "capture", capture)
    monkeypatch.setattr(kernel_timing.clocks, "replays", replays)
    clock = kernel_timing.GraphClock()
    if is_broken:
        with pytest.raises(kernel_timing.BrokenGraph):
            measured(kernels(), clock)
    else:
        assert [measured(kernels(), clock).plugin_us for _ in range(2)] == [1.0, 1.0]
        assert len(flushes) == 1


def test_the_memory_that_flushes_caches_is_allocated_once(monkeypatch):
    monkeypatch.setattr(kernel_timing.clocks, "COLD_BYTES", 64)
    flush = kernel_timing.clocks.Flush("cpu")
    flush()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", None)
        flush()


@pytest.mark.parametrize("whose", ["plugin", "baseline"])
def test_a_kernel_whose_replay_differs_is_off(whose, caplog):
    """The plugin's op is off. Of vLLM's kernel nothing is recorded, and the user reads once that graphs are broken."""

    class Broken(FakeClock):
        def times(self, calls, sets, replays):
            replays_module.raise_for([whose])

    one = started(Product())
    with caplog.at_level(logging.WARNING):
        warm_up(Broken())
    record = selection.record_here()
    assert record.shapes == {} and ("product" in record.off) == (whose == "plugin")
    assert sum("ROCm/clr#279" in message for message in caplog.messages) == 1
    assert one.serve(1) == ("baseline" if whose == "plugin" else "plugin")


@pytest.mark.parametrize(("replayed", "differing"), [(1.002, []), (9.0, ["baseline"])])
def test_a_kernel_whose_eager_calls_differ_may_differ_when_it_is_replayed(replayed, differing):
    """By no more than the error of vLLM's kernel, as with atomic additions."""
    eager, ones = iter([1.0, 1.001]), torch.ones(2, 2)
    replays = kernel_timing.Replays({"plugin": torch.neg, "baseline": lambda x: x * next(eager)}, [(ones,)], 1e-2)
    graphs = {"plugin": (-ones, -ones), "baseline": (ones * replayed, ones * replayed)}
    graphs = {name: Fake(outputs=outputs, replay=list) for name, outputs in graphs.items()}
    assert replays.differing(graphs) == differing


def test_progress_and_one_table_are_logged(caplog, monkeypatch):
    now = iter(range(0, 10000, 3))
    monkeypatch.setattr(kernel_timing.time, "monotonic", lambda: next(now))
    monkeypatch.setenv("VLLM_ROCM_OPS_MEASURE", "1000")
    started(Product())
    with caplog.at_level(logging.INFO):
        warm_up(plugin_wins({1, 8, 32}))
    lines = "\n".join(caplog.messages).splitlines()
    assert any(re.match(r"vllm-rocm-ops: timed \d of 6 comparisons in \d+ s", line) for line in lines)
    place = next(i for i, line in enumerate(lines) if line.startswith("op "))
    end = next(i for i, line in enumerate(lines) if "what serves" in line)
    table = [re.split(r"  +", line) for line in lines[place:end]]
    assert table[0][:6] == ["op", "shape and vLLM's kernel", "tokens", "plugin us", "vLLM us", "runs"]
    assert [row[2:6] for row in table[1:]] == [["1..32", "5.0", "10.0", "plugin"], ["64..256", "50.0", "10.0", "vLLM"]]


class Watch:
    """A fake time for kernel_timing.py, which measurements advance."""

    def __init__(self, monkeypatch):
        self.now, self.asked, self.patch = 100.0, [], monkeypatch
        monkeypatch.setattr(kernel_timing.time, "monotonic", lambda: self.now)

    def takes(self, seconds: float, compiling: float = 0.0) -> None:
        """Have each comparison take `seconds`, and vLLM's kernel be compiled before. The plugin is faster."""

        def measure(kernels, layers, tokens, clock, marked, first_call=lambda seconds: None):
            self.now += seconds + compiling
            first_call(compiling)
            self.asked.append((kernels.op.name, tokens))
            return selection.Measured(1.0, 2.0)

        self.patch.setattr(kernel_timing, "check_and_time", measure)


class Rows(Product):
    """Norms, for which one kernel is chosen for all numbers of tokens."""

    key = key("rows 64 compiled")

    def __init__(self):
        super().__init__("rows")
        self.kernels, self.layers = self, {0: (WEIGHTS[0],)}


def test_one_budget_for_all_that_is_measured(monkeypatch, caplog):
    """Norms have a share of it, later measurements the rest. The next start measures what was left."""
    watch, products = Watch(monkeypatch), [Product(name) for name in "abc"]
    caplog.set_level(logging.INFO)
    for sizes in ([1, 8, 32], [64, 128, 256, 24]):
        started(*products)
        begin, choices = watch.now, {one: kernel_timing.sizes((*CAPTURED, 24), MAX) for one in selection.all_choices()}
        watch.asked.clear()
        caplog.clear()
        watch.takes(1.4)
        kernel_timing.agree({Rows(): [2, 64]}, FakeClock(EQUAL), lambda mine: [mine], 0.4)
        assert watch.asked == ([("rows", 2), ("rows", 64)] if sizes[0] == 1 else [])
        watch.takes(0.8)
        decided = kernel_timing.agree(choices, FakeClock(EQUAL), lambda mine: [mine])[1]
        assert watch.asked[-9:] == [(name, tokens) for tokens in sizes for name in "abc"][-9:]
        assert 9 < watch.now - begin <= kernel_timing.limit_s() == 10
        if sizes[0] == 1:
            text = (
                "12 of 21 comparisons did not fit into 7 s, default token limits apply there until the next start "
                "(VLLM_ROCM_OPS_MEASURE=60 gives it more time): 48x64 at 64, "
            )
            assert text in caplog.text
    assert "did not fit" not in caplog.text
    assert [len(plugin) for plugin in decided.shapes.values()] == [1, *[MAX + 1] * 3]


def test_another_process_that_measures_takes_of_the_same_budget(monkeypatch):
    """Ranks of a machine measure one after the other, within the time of one."""
    watch, product = Watch(monkeypatch), started(Product())

    @contextlib.contextmanager
    def locked(path, seconds):
        path.parent.mkdir()
        watch.now += 9.5
        yield

    monkeypatch.setattr(kernel_timing.tables, "locked", locked)
    wanted = {one: kernel_timing.sizes(CAPTURED, MAX) for one in selection.all_choices()}
    watch.takes(0.3)
    kernel_timing.agree(wanted, FakeClock(EQUAL), lambda mine: [mine])
    assert [tokens for _, tokens in watch.asked] == [1, 8] and product.serve(LIMIT) == "plugin"


def test_what_is_decided_once_is_measured_whole_or_not_at_all(monkeypatch):
    """A result for few tokens does not extend to many."""
    watch = Watch(monkeypatch)
    monkeypatch.setattr(kernel_timing, "estimate", lambda *_: (1, 3.0))
    for most, asked in ((5.9, 0), (6.0, 2)):
        monkeypatch.setenv("VLLM_ROCM_OPS_MEASURE", f"{most}")
        selection.begin_recording()
        watch.takes(4.0)
        kernel_timing.agree({Rows(): [2, 64]}, FakeClock(EQUAL), lambda mine: [mine])
        assert len(watch.asked) == asked


def test_a_call_that_cannot_be_made_for_the_plugin_is_vllms(caplog, monkeypatch):
    """As attention's, for a cache in another order. It is recorded, and not timed again."""

    def refuses(*arguments):
        raise comparison.Refused

    monkeypatch.setattr(kernel_timing, "check_and_time", refuses)
    kernel_timing.agree({Rows(): [1, 8]}, FakeClock(EQUAL), lambda mine: [mine])
    assert [*selection.read(file()).shapes.values()] == [{1: selection.UNTIMED, 8: selection.UNTIMED}]
    assert "failed" not in caplog.text


@pytest.mark.parametrize("text", ["-1", "ten", "nan", "1e9"])
def test_a_wrong_time_limit_is_said_and_vllm_starts(monkeypatch, caplog, text):
    monkeypatch.setenv("VLLM_ROCM_OPS_MEASURE", text)
    clock = measures(product := Product())
    assert not clock.asked and product.serve(LIMIT) == "plugin"
    assert f"VLLM_ROCM_OPS_MEASURE must be 0 to 3600 seconds, got {text}" in caplog.text


def test_it_stops_in_time(monkeypatch):
    """Unmeasured sizes have the fixed limit, also above measured ones, if the plugin was faster there."""
    now = iter(range(0, 10000, 2))
    monkeypatch.setattr(kernel_timing.time, "monotonic", lambda: next(now))
    measures(product := Product(), other := Product("other"))
    sizes = [[*by_tokens] for by_tokens in selection.read(file()).shapes.values()]
    assert 0 < sum(map(len, sizes)) < 6
    served = ["plugin", "plugin", "baseline"]
    assert [kernels.serve(m) for kernels in (product, other) for m in (1, LIMIT, LIMIT + 1)] == served * 2


@pytest.mark.parametrize(("compiling", "timed"), [(0.0, 10), (2.0, 10), (7.0, 8)])
def test_compiling_vllms_kernels_takes_no_time_from_comparisons(monkeypatch, compiling, timed):
    """vLLM's warm-up would compile them. It takes 50 s at most, and norms' own baselines count."""
    watch, products = Watch(monkeypatch), [Product(name) for name in "ab"]
    started(*products)
    watch.takes(0.95, compiling)
    choices = {choice: [1, 8, 32, 64, 128] for choice in selection.all_choices()}
    kernel_timing.agree(choices, FakeClock(EQUAL), lambda mine: [mine])
    assert len(watch.asked) == timed
    assert selection.session.spent == pytest.approx(min(timed, 10) * 0.95 + max(0.0, timed * compiling - 50))
    watch.asked.clear()
    selection.session.spent = 0.0
    kernel_timing.agree({Rows(): [2, 64]}, FakeClock(EQUAL), lambda mine: [mine])
    assert selection.session.spent == pytest.approx(2 * (0.95 + compiling))


CAPTURED_BY_VLLM = (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16))
LIMITED = ("scaled_mm", "block_scaled_mm", "unquantized_gemm", "fused_experts")


@pytest.mark.parametrize(("model", "most"), [("llama-3.1-405b-fp8", 8192), ("deepseek-v3", 8192)])
def test_default_sizes_are_measured_within_the_time_limit(model, most):
    """By the estimate, each power of two up to 512 tokens fits, for vLLM's sizes on MI300X with eight ranks."""
    arch, wanted = archs.named("gfx942"), {}
    for layer in model_layers.calls(model_config.read(model), 8):
        if layer.op.name not in LIMITED:
            continue
        work = {}
        for tokens in kernel_timing.sizes(CAPTURED_BY_VLLM, most):
            arguments = layer.op.Arguments(*layer.case(tokens).make("meta", torch.Generator(), arch.fp8_dtype))
            sizes = layer.op.problem(arguments)
            if layer.op.name == "fused_experts":
                operations = 2.0 * arguments.topk_ids.numel() * (arguments.w1[0].numel() + arguments.w2[0].numel())
            else:
                operations = 2.0 * tokens * sizes["n"] * sizes["k"]
            work[tokens] = tensor_bytes(*arguments), operations
        kernels = Fake(op=layer.op, work=lambda layer, tokens, work=work: work[tokens])
        layers = dict.fromkeys(range(min(max(layer.count, 1), 64)), ())
        wanted[One(Key(layer.op.name, str(len(wanted)), Baseline("VllmKernel")), kernels, layers)] = list(work)
    items = kernel_timing.in_order(wanted, selection.Record({}), arch.bandwidth_gb_s)
    left, measured = kernel_timing.limit_s() * (1 - compiled_ops.SHARE), []
    for one, [tokens] in items:
        _, takes = kernel_timing.estimate(one.kernels, (), len(one.layers), tokens, arch.bandwidth_gb_s)
        if takes < left:
            left -= takes
            measured.append((one.key, tokens))
    print(f"{model}: {len(measured)} of {len(items)} pairs")
    assert {(one.key, 1 << power) for one in wanted for power in range(10)} <= {*measured}
    first = [one for one, _ in items[: len(wanted)]]
    bytes_of = [len(one.layers) * one.kernels.work((), 1)[0] for one in first]
    assert len({*first}) == len(wanted) and bytes_of[0] == max(bytes_of)
    sizes = [tokens for _, [tokens] in items]
    assert sizes[: 5 * len(wanted)] == [m for m in (1, 8, 32, 2, 4) for _ in wanted]


class One(typing.NamedTuple):
    """A choice to be put in order."""

    key: Key
    kernels: Fake
    layers: dict

    def __hash__(self):
        return hash(self.key)


# In vLLM


@pytest.fixture
def worker(monkeypatch):
    """Return a vLLM wrapper around a worker like the one for GPUs, and its events, in order."""
    register()
    happened, module = [], types.ModuleType("a_worker_for_gpus")

    def kernel_warmup(worker, *, process_local_only=False):
        happened.append("vLLM's warm-up")

    class Worker:
        local, times = False, "times"

        def init_device(self):
            happened.append("device")

        def compile_or_warm_up_model(self):
            module.kernel_warmup(self, process_local_only=self.local)
            happened.append("capture")
            return self.times

    Worker.compile_or_warm_up_model.__module__, module.kernel_warmup = module.__name__, kernel_warmup
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(worker_startup, "warm_up", lambda worker: happened.append("plugin"))
    wrapper = WorkerWrapperBase()
    wrapper.worker, wrapper.vllm_config = Worker(), None
    yield wrapper, happened
    assert module.kernel_warmup is kernel_warmup


def test_workers_measure_between_warm_up_and_capture(worker):
    """It measures after vLLM's own warm-up of kernels and before graphs are captured, unless one worker alone warms up."""
    wrapper, happened = worker
    assert wrapper.compile_or_warm_up_model() == "times"
    assert happened == ["vLLM's warm-up", "plugin", "capture"]
    wrapper.worker.local = True
    happened.clear()
    wrapper.compile_or_warm_up_model()
    assert happened == ["vLLM's warm-up", "capture"]


def as_ranks(rank) -> list:
    """Return what two real ranks put into a queue by rank(group, queue), in new processes."""
    results = FORKS.Queue()

    def run(number: int, port: int):
        torch.distributed.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=number, world_size=2, timeout=timedelta(seconds=60)
        )
        rank(Fake(world_size=2, rank_in_group=number, cpu_group=None), results)

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [begin(functools.partial(run, number, port)) for number in range(2)]
    for process in ranks:
        process.join(60)
    assert [process.is_alive() for process in ranks] == [False, False]
    return [results.get(timeout=5) for process in ranks if process.exitcode == 0]


def gather(group):
    return functools.partial(worker_startup.gather_from, group)


def test_ranks_gather_and_the_first_says(caplog):
    def rank(group, results):
        number = group.rank_in_group
        os.environ["VLLM_ROCM_OPS_TABLES"] += f"/{number}"  # as on separate machines
        product = started(Product())
        with caplog.at_level(logging.INFO):
            clock = plugin_wins({1, 8} if number else {1, 32})
            kernel_timing.warm_up(CAPTURED, MAX, clock, gather(group), is_logging_rank=number == 0)
        results.put((number, [product.serve(m) for m in (1, 8, 32)], "selected kernels on this GPU" in caplog.text))

    served = ["plugin", "baseline", "baseline"]
    assert sorted(as_ranks(rank)) == [(0, served, True), (1, served, False)]


def test_ranks_do_not_wait_for_one_that_was_killed():
    """The other, which waits for the lock, measures instead; ranks then cannot agree, and their fixed limits hold."""

    def rank(group, results):
        product, other = Product(), Product("other")
        if group.rank_in_group == 0:
            product.plugin = ends(9)
        else:
            while not file().with_suffix(".lock").exists():
                time.sleep(0.01)
        started(product, other)
        try:
            kernel_timing.warm_up(CAPTURED, MAX, plugin_wins(range(MAX + 1)), gather(group))
        except RuntimeError as error:  # as worker_startup.py catches any
            results.put((str(error), product.serve(LIMIT), product.serve(MAX)))

    [(why, few, many)] = as_ranks(rank)
    assert re.search("[Cc]onnection|peer|closed", why), why
    assert (few, many) == ("plugin", "baseline")
    record = selection.read(file())
    assert record.off == {} and len(record.shapes) == 2


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (worker_startup.warm_up, "vllm-rocm-ops: kernel timing failed, default token limits apply: "),
        (worker_startup.before_compiling, "selection of norms and activations failed: "),
    ],
)
def test_an_unknown_worker_starts_without_timing(caplog, step, said):
    step(Fake())
    assert said in caplog.text


def test_layers_that_the_profile_run_does_not_call_are_called(monkeypatch):
    """One layer of each shape is called, so that it is measured, too. Layers that cannot be called are named."""
    product, calls = started(Product()), []

    class Method:
        def apply(self, layer, x, bias):
            calls.append((layer.name, x.shape, x.dtype))
            return product.run(x, layer.weight) if layer.works else 1 / 0

    def layer(name: str, weight, state=(None, False), works=True):
        made = torch.nn.Module()
        made.weight, made.name, made.works = torch.nn.Parameter(weight, requires_grad=False), name, works
        made.quant_method, made.input_size_per_partition = Method(), weight.shape[1]
        made.register_buffer(weight_order.MARK, torch.tensor(weight_order.STATES.index(state), dtype=torch.uint8))
        return made

    other, third, alone = (torch.randn(n, K).bfloat16() for n in (64, 80, 96))
    model = torch.nn.Module()
    model.called, model.drafts = layer("called", WEIGHTS[0]), layer("drafts", other)
    model.again, model.fails = layer("again", other), layer("fails", third, works=False)
    model.plugin, model.plain = layer("plugin", alone, ("plain", True)), torch.nn.Linear(K, 112)
    assert worker_startup.call_others([model], MAX, torch.bfloat16) == ["fails"]
    assert calls == [(name, (1, K), torch.bfloat16) for name in ("drafts", "fails")]
    warm_up(clock := plugin_wins({1, 128}))
    assert sorted({len(sets[0][0]) for sets in clock.asked}) == [1, 8, 32, 64, 128, 256]
    assert [one.state for one in selection.all_choices()] == ["measured", "measured"]
    assert {one.key.shape for one in selection.all_choices()} == {"48x64", "64x64"}


def test_a_worker_that_fails_leaves_vllm_as_it_was(worker):
    wrapper, happened = worker
    del type(wrapper.worker).times
    with pytest.raises(AttributeError, match="times"):
        wrapper.compile_or_warm_up_model()
    assert happened == ["vLLM's warm-up", "plugin", "capture"]


def test_a_pair_is_compared_on_fresh_arguments_in_a_trial():
    """Both kernels add one to their input in place. Each is timed by name, and the plugin's as a trial of its op."""
    ran, trials = [], []

    @contextlib.contextmanager
    def trial():
        trials.append("begun")
        yield
        trials.pop()

    def add(name: str, x):
        ran.append((name, *trials))
        return x.add_(1)

    sides = {"plugin": functools.partial(add, "plugin"), "baseline": functools.partial(add, "theirs")}
    kernels = Fake(op=Fake(trial=trial), **sides)

    class Clock(FakeClock):
        def times(self, calls, sets, replays):
            return {name: [float(call(*sets[0])[0])] for name, call in calls.items()}

    def errors(plugin, baseline) -> tuple[float, float]:
        return float(plugin[0]), float(baseline[0])

    kernels.sample = lambda *_: comparison.Sample([(torch.zeros(1),)], errors, tuple, replays_module.copies)
    found = kernel_timing.check_and_time(kernels, [()], 1, Clock(), contextlib.nullcontext())
    assert found == (1.0, 2.0, 1.0, 1.0)
    assert ran == [("theirs",), ("plugin", "begun"), ("plugin", "begun"), ("theirs",)]


def test_layers_are_noted_from_the_start_of_a_worker(worker, monkeypatch):
    wrapper, happened = worker
    monkeypatch.setattr(selection, "begin_recording", lambda: happened.append("noting"))
    wrapper.vllm_config = VllmConfig()
    wrapper.init_device()
    assert happened == ["noting", "device"]


FRAMES_OF_A_STEP, FRAMES_OF_A_STEP_OF_VLLMS = 190, 120
"""The package's Python frames in a decode step, without references.

First come two layers with eight linears, five norms, two activations and two of attention, all the plugin's; then
with vLLM's linears and activations. Norms are the plugin's in a model that is not compiled.
"""


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1.0, pytest.param(1.02, marks=full)])
def test_inside_vllm(engines, expected, tmp_path, factor):
    """A right kernel serves decode's few tokens, a wrong one none; tokens are the plain model's in both cases."""
    flavour = ("llama", "token")
    job = engines.job(flavour, max_tokens=4, frames=True)
    before = f"import on_cpu; on_cpu.measure({factor}, rows_win={factor == 1.0})"
    answer = engines.run_one(job, before=before, VLLM_ROCM_OPS_TABLES=str(tmp_path))
    layers, steps = 8, 4
    ours = "vllm/", "op.", "dispatch.", "launch."
    host = {name: n for name, n in answer["frames"].items() if name.startswith(ours)}
    assert sum(host.values()) <= (FRAMES_OF_A_STEP if factor == 1.0 else FRAMES_OF_A_STEP_OF_VLLMS), host
    assert answer["tokens"] == [wanted.argmax(-1).tolist() for wanted in expected(flavour, answer["tokens"])]
    [path] = tmp_path.glob("*/measured-*.json")
    record = selection.read(path)
    rows = {"silu_and_mul_per_token_quant"}  # norms quantize in compiled models
    assert rows & answer["stats"].keys() == (rows if factor == 1.0 else set())
    assert {key.op for key in record.shapes if key.has_one_choice} == rows
    [reached] = coverage.read(tmp_path)
    assert reached["seams"].keys() >= {"norm", "activation", "scaled_linear"}
    assert reached["layers"]["norms"]["taken"] == 5
    if factor == 1.0:
        assert answer["stats"]["scaled_mm"] == {"plugin": layers * (steps - 1)}
        assert answer["stats"]["vllm"] == {"its kernel": layers}
        kinds = collections.Counter(key.op for key in record.shapes)
        assert kinds == {"scaled_mm": 4, "paged_attention_decode": 1, **dict.fromkeys(rows, 1)} and not record.off
        assert answer["output"].count("selected kernels on this GPU") == 2
    else:
        assert "scaled_mm" not in answer["stats"]
        assert answer["stats"]["vllm"] == {"its kernel": layers * steps}
        assert list(record.off) == ["scaled_mm"]
        assert answer["output"].count("scaled_mm is off on this GPU") == 1


def test_pairs_are_measured_for_the_tokens_of_all_data_parallel_ranks(monkeypatch):
    """Experts of a rank get the other ranks' tokens, too."""
    import vllm.config

    called = []
    config = {"compilation_config": Fake(cudagraph_mode=vllm.config.CUDAGraphMode.NONE)}
    config |= {"scheduler_config": Fake(max_num_batched_tokens=100), "parallel_config": Fake(data_parallel_size=3)}
    monkeypatch.setattr(parallel_state, "get_tp_group", lambda: Fake(rank_in_group=0))
    monkeypatch.setattr(vllm.config, "set_current_vllm_config", lambda config: contextlib.nullcontext())
    monkeypatch.setattr(worker_startup, "clock", lambda: None)
    monkeypatch.setattr(worker_startup.kernel_timing, "warm_up", lambda *arguments: called.append(arguments))
    worker_startup.warm_up(fake_worker(**config))
    assert [arguments[:2] for arguments in called] == [((), 300)]
