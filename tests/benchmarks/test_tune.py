"""Test the tuner: what it measures, the rows it writes, and that these win.

Its clocks are the emulator's cycles, and a script.
"""

import csv
import dataclasses
import io
import json

import pytest
import torch
from marks import AMD

from vllm_rocm_ops import ops
from vllm_rocm_ops.core import archs, clock, launch, tables
from vllm_rocm_ops.core import op as op_module
from vllm_rocm_ops.core.stats import reset_stats, stats
from vllm_rocm_ops.emulator import Emulator
from vllm_rocm_ops.models import config as model_config
from vllm_rocm_ops.models import layers as model_layers
from vllm_rocm_ops.tools import cli
from vllm_rocm_ops.tools.bench import run as bench
from vllm_rocm_ops.tools.bench import tune
from vllm_rocm_ops.tools.bench.baselines import Baseline, baselines

SMALL = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1} | {
    "head_dim": 64,
    "vocab_size": 64,
    "num_hidden_layers": 2,
}
LINEAR = ops.scaled_mm


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    """Replace the user's tables by an empty folder."""
    monkeypatch.setenv("VLLM_ROCM_OPS_TABLES", str(tmp_path / "users"))
    op_module.invalidate_tables()
    yield tmp_path
    op_module.invalidate_tables()


class EmulatorClock:
    """A clock of issue cycles in the emulator, which are not a time but differ between configurations."""

    device, unit = "cpu", "cycles"

    def __init__(self, arch: str):
        self.emulator = Emulator(arch, races=False)
        self.arch = self.emulator.arch
        self.cycles = 0

    def launch(self, launch, uninitialized) -> None:
        self.emulator.launch(launch, uninitialized)
        self.cycles += self.emulator.last.issue_cycles

    def calls(self, bytes_of_call: int) -> int:
        return 1

    def prepare(self, call, sets):
        self.cycles = 0
        with launch.executor(self):
            call(*sets[0])
        return self.cycles

    def samples(self, prepared):
        return {name: [float(cycles)] * 3 for name, cycles in prepared.items()}


class ScriptedClock:
    """A clock that returns `script(what, round)`, where `what` is a configuration or a baseline's name."""

    device, unit = "cpu", "us"
    arch = archs.ARCHS["gfx942"]

    def __init__(self, script):
        self.script, self.rounds = script, 0

    def calls(self, bytes_of_call: int) -> int:
        return 1

    def prepare(self, call, sets):
        with launch.executor(self):
            call(*sets[0])
        return len(sets)

    def launch(self, launch, uninitialized) -> None:
        pass

    def samples(self, prepared):
        self.rounds += 1
        return {name: [self.script(name, self.rounds)] * 3 for name in prepared}


def config_of_model(name: str = "tiny-llama-fp8") -> dict:
    return model_config.read(name) | SMALL


def problems_of(op, arch=ScriptedClock.arch, batches=(1, 8)) -> list[tune.Problem]:
    found, _ = tune.problems(model_layers.calls(config_of_model()), batches, arch)
    return [problem for problem in found if problem.op is op]


def rows(folder, op, arch: str = "gfx942") -> list[dict]:
    return list(csv.DictReader((folder / arch / f"{op.name}.csv").read_text().splitlines()))


def other_config(problem: tune.Problem):
    """Return a configuration other than the default."""
    a = problem.op.Arguments(*problem.case.make("meta", torch.Generator(), ScriptedClock.arch.fp8_dtype))
    default = problem.op.default(a, ScriptedClock.arch)
    return default, next(c for c in problem.op.configs(a, ScriptedClock.arch) if c != default)


@pytest.mark.parametrize("arch", AMD)
def test_every_op_of_a_model_is_tuned_and_its_rows_win(folders, arch):
    """The shipped kernels run in the emulator; the fastest by its count runs afterwards."""
    emulated = EmulatorClock(arch)
    users = folders / "users"
    wanted, refused = tune.problems(model_layers.calls(config_of_model()), (1, 3), emulated.arch)
    assert not refused and {p.op.name for p in wanted} == {
        call.op.name for call in model_layers.calls(config_of_model())
    }
    done = tune.tune(wanted, emulated, users)
    assert len(done.results) == len(wanted) and done.known == 0
    assert sum(len(rows(users, op, arch)) for op in {p.op for p in wanted}) == len(wanted)
    won = [result for result in done.results if result.config is not None]
    assert won and all(result.best * 1.03 < result.now for result in won)
    for result in done.results:
        explained = result.problem.op.explain(*example(result.problem, emulated.arch), arch=emulated.arch)
        assert explained.source.startswith("default" if result.config is None else "tuned")
        if result.config is not None:
            assert explained.config == result.config
    assert "new rows, each more than 3% faster" in tune.summary(done, refused, emulated)


def example(problem: tune.Problem, arch) -> tuple:
    return problem.case.make("meta", torch.Generator(), arch.fp8_dtype)


def test_the_row_runs_in_calls_already_seen(folders):
    emulated = EmulatorClock("gfx942")
    [problem, *_] = problems_of(ops.rms_norm_static_fp8_quant, emulated.arch, (3,))
    arguments = problem.case.make("cpu", torch.Generator().manual_seed(0), emulated.arch.fp8_dtype)
    with launch.executor(emulated):
        before = problem.op(*arguments)
        default, other = other_config(problem)
        source = "here"
        tune.Table(folders / "users" / "gfx942" / f"{problem.op.name}.csv").put(problem.key, other, source)
        op_module.invalidate_tables()
        reset_stats()
        after = problem.op(*arguments)
    a = problem.op.Arguments(*arguments)
    [planned] = problem.op.plan(other, problem.op.allocate(a), a, emulated.arch)
    assert list(stats()[problem.op.name]) == [planned.symbol] and default != other
    assert torch.equal(before.view(torch.uint8), after.view(torch.uint8))


@pytest.mark.parametrize(("ratio", "wins"), [(0.96, True), (0.98, False), (1.0, False), (1.1, False)])
def test_a_row_must_win_by_more_than_3_percent(folders, ratio, wins):
    [problem, *_] = problems_of(LINEAR)
    default, other = other_config(problem)
    times = {default: 100.0, other: 100.0 * ratio}
    done = tune.tune([problem], ScriptedClock(lambda what, _: times.get(what, 200.0)), folders / "users")
    assert done.results[0].config == (other if wins else None)
    [row] = rows(folders / "users", LINEAR)
    assert {n: row[f"config.{n}"] for n in dataclasses.asdict(other)} == tables.config_fields(other) if wins else True
    assert wins or not any(value for name, value in row.items() if name.startswith("config."))
    explained = problem.op.explain(*example(problem, ScriptedClock.arch), arch=ScriptedClock.arch)
    assert explained.config == (other if wins else default)


def test_a_lucky_first_round_earns_no_row(folders):
    [problem, *_] = problems_of(LINEAR)
    default, other = other_config(problem)
    lucky = ScriptedClock(lambda what, turn: 90.0 if what == other and turn == 1 else 100.0)
    assert tune.tune([problem], lucky, folders / "users").results[0].config is None
    assert lucky.rounds == 2 and default != other


def test_a_row_must_beat_the_default(folders):
    """It is not compared with the row that it replaces, which would be lost if it were no better."""
    [problem, *_] = problems_of(LINEAR)
    default, other = other_config(problem)
    measured = ScriptedClock(lambda what, _: {default: 100.0, other: 50.0}.get(what, 200.0))
    for _ in range(2):
        tune.tune([problem], measured, folders / "users", force=True)
        assert problem.op.explain(*example(problem, measured.arch), arch=measured.arch).config == other


def test_a_second_run_goes_on_where_the_first_stopped(folders):
    wanted = problems_of(LINEAR)
    stop = ScriptedClock(lambda what, turn: 100.0)

    def stopping(what, turn):
        if turn > 1:
            raise KeyboardInterrupt
        return 100.0

    with pytest.raises(KeyboardInterrupt):
        tune.tune(wanted, ScriptedClock(stopping), folders / "users")
    assert len(rows(folders / "users", LINEAR)) == 1
    done = tune.tune(wanted, stop, folders / "users")
    assert (len(done.results), done.known) == (len(wanted) - 1, 1)
    assert tune.tune(wanted, stop, folders / "users").known == len(wanted)
    done = tune.tune(wanted, stop, folders / "users", force=True)
    assert (len(done.results), done.known) == (len(wanted), 0)
    assert len(rows(folders / "users", LINEAR)) == len(wanted)  # replaced, not doubled


def test_configurations_of_two_kinds_share_a_table(folders):
    """scaled_mm has other kernels, with other fields, for many tokens."""
    wanted = [problems_of(LINEAR, batches=(m,))[0] for m in (8, 512)]
    others = {problem.key["m"]: other_config(problem)[1] for problem in wanted}
    measured = ScriptedClock(lambda what, _: 50.0 if what in others.values() else 100.0)
    tune.tune(wanted, measured, folders / "users")
    for problem in wanted:
        explained = problem.op.explain(*example(problem, measured.arch), arch=measured.arch)
        assert explained.source.startswith("tuned") and type(explained.config) is type(others[problem.key["m"]])


def test_baselines_are_timed_and_those_that_fail_say_why(folders):
    def broken(*arguments):
        raise RuntimeError("no such kernel\nand a stack")

    baselines = {"good": Baseline(LINEAR.reference), "broken": Baseline(broken)}
    measured = ScriptedClock(lambda what, _: 80.0 if what == "good" else 100.0)
    log = io.StringIO()
    done = tune.tune(problems_of(LINEAR), measured, folders / "users", baselines=lambda op: baselines, log=log)
    assert all(
        r.baselines == {"good": 80.0} and r.config is None for r in done.results
    )  # a baseline is not a configuration
    assert done.results[0].unavailable == {"broken": "RuntimeError: no such kernel"}
    text = tune.summary(done, {}, measured)
    assert (
        "0.80x speedup over the best baseline" in text
        and "broken unavailable for some shapes: RuntimeError: no such kernel" in text
    )
    lines = log.getvalue().splitlines()
    assert len(lines) == len(done.results) and f"[1/{len(lines)}" in lines[0] and "best baseline good 80.00" in lines[0]


def test_what_no_kernel_takes_is_counted():
    config = config_of_model("tiny-llama") | {"quantization_config": {"quant_method": "mxfp8"}}
    found, refused = tune.problems(model_layers.calls(config), (8, 4096), archs.ARCHS["gfx942"])
    assert found and all(problem.op is not ops.mxfp8_scaled_mm for problem in found)
    assert refused and all("gfx942 has block-scaled matrix instructions" in why for why in refused.values())


def test_nothing_is_tuned_without_code(monkeypatch, tmp_path):
    """Otherwise all configurations were the reference, and equally fast."""
    monkeypatch.setattr(launch, "CODE", tmp_path)
    found, refused = tune.problems(model_layers.calls(config_of_model()), (8,), ScriptedClock.arch)
    assert found == [] and all("no code object of" in why for why in refused.values())


def test_a_problem_of_many_layers_is_one():
    """The first layer's norm and the others' have one key: the call with the larger count is measured."""
    norms = problems_of(ops.rms_norm_per_block_quant)
    assert norms == []
    calls = model_layers.calls(model_config.read("deepseek-v3"), 8)
    found, _ = tune.problems(calls, (4,), ScriptedClock.arch)
    keys = [(problem.op.name, *problem.key.items()) for problem in found]
    assert len(keys) == len(set(keys))
    [norm] = [p for p in found if p.op is ops.rms_norm_per_block_quant and p.key["hidden"] == "7168"]
    assert example(norm, ScriptedClock.arch)[-1] is not None, "with a residual"


def test_inputs_exceed_the_cache_within_reason():
    assert clock.calls_of_graph(200_000_000) == 4
    assert clock.calls_of_graph(40_000_000) == 16
    assert clock.calls_of_graph(0) == clock.calls_of_graph(1000) == clock.MAX_CALLS


@pytest.mark.skipif(not torch.cuda.is_available(), reason="on a GPU")
def test_on_a_gpu_all_is_timed_and_rows_win(folders):
    gpu = clock.GpuClock()
    wanted, _ = tune.problems(model_layers.calls(config_of_model()), (1, 8), gpu.arch)
    done = tune.tune(wanted, gpu, folders / "users", baselines)
    assert wanted and all(result.now > 0 and result.best > 0 for result in done.results)
    assert all(result.baselines for result in done.results if result.problem.op is ops.unquantized_gemm)
    for result in done.results:
        explained = result.problem.op.explain(*example(result.problem, gpu.arch), arch=gpu.arch)
        assert explained.source.startswith("default" if result.config is None else "tuned")
    found = bench.bandwidths(gpu, ops.unquantized_gemm, 1 << 26)
    assert all(100 < gb_s < 2 * gpu.arch.bandwidth_gb_s for gb_s in found.values()), found
    lines = list(bench.run([(ops.rms_norm, case) for case in ops.rms_norm.cases()], gpu))
    assert all(line.wrong is None for line in lines) and any(line.samples for line in lines)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "nothing"], "model must be a config.json, a folder with one, or one of deepseek-v3"),
        (["--model", "tiny-llama", "--tp", "3"], "must be divisible by tensor parallel size (3)"),
    ],
)
def test_bad_models_are_refused_plainly(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(clock, "GpuClock", lambda: ScriptedClock(lambda what, turn: 100.0))
    assert cli.main(["tune", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_the_command_writes_the_users_tables(folders, capsys, monkeypatch, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config_of_model()))
    monkeypatch.setattr(clock, "GpuClock", lambda: ScriptedClock(lambda what, turn: 100.0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(archs, "product_of", lambda index: "a GPU")
    command = ["tune", "--model", str(tmp_path), "--batch", "1", "--op", "scaled_mm", "--no-baselines"]
    assert cli.main(command) == 0
    out, err = capsys.readouterr()
    assert "4 shapes measured, 0 already in the tables" in out and "[4/4, 0 s left] scaled_mm" in err
    assert len(rows(folders / "users", LINEAR)) == 4 and "tune on a GPU" in rows(folders / "users", LINEAR)[0]["source"]
    assert cli.main(command) == 0
    assert "0 shapes measured, 4 already in the tables" in capsys.readouterr().out
