"""Test the contests' problems and their judge: the plugin in the emulator, wrong submissions, and the timing rules."""

import dataclasses
import os
import pathlib
import re
import subprocess
import sys
import textwrap

import pytest
import torch
from contests import __main__ as command
from contests import contest, gemm, judge, mla, moe
from marks import FULL, full

from vllm_rocm_ops.core import archs
from vllm_rocm_ops.core.stats import FALLBACK

ROOT = pathlib.Path(__file__).resolve().parents[2]
CONTESTS = [gemm.CONTEST, moe.CONTEST, mla.CONTEST]
FP8 = torch.float8_e4m3fnuz


def of_reduced(of: contest.Contest):
    """Return the data of the smallest problem."""
    return of.data(of.reduced[0], "cpu", FP8)


def judge_of(of: contest.Contest, kernel) -> judge.Judge:
    return judge.Judge(of, lambda data, stage: kernel(data), judge.Machine("cpu", FP8))


# The plugin's submissions


@pytest.mark.parametrize("arch", ["gfx942", pytest.param("gfx950", marks=full)])
@pytest.mark.parametrize("kind", command.CONTESTS)
def test_ours_are_right_in_the_emulator_and_run_kernels(kind, arch, capsys, monkeypatch):
    if not FULL and kind != "gemm":  # its problems take no time
        few = dataclasses.replace(command.CONTESTS[kind], reduced=command.CONTESTS[kind].reduced[:1])
        monkeypatch.setitem(command.CONTESTS, kind, few)
    assert command.main([kind, "--emulate", arch]) == 0
    out = capsys.readouterr().out
    cases = len(command.CONTESTS[kind].reduced)
    assert out.count("ok\n") == cases and out.count("    ran ") == cases and FALLBACK not in out


@pytest.mark.parametrize("of", CONTESTS, ids=lambda of: of.name)
def test_a_references_result_is_right_and_a_changed_one_is_wrong(of):
    assert judge_of(of, of.reference).check(of_reduced(of)) == ""

    def changed(data):
        first, *rest = of.reference(data)
        first.view(-1)[7] += 3 * (of.atol + of.rtol * first.view(-1)[7].abs())
        return first, *rest

    wrong = judge_of(of, changed).check(of_reduced(of))
    assert wrong.startswith(f"1 of {of.reference(of_reduced(of))[0].numel()} elements of {of.outputs[0]} are wrong: [")


def test_rounding_of_nvidia_is_allowed_there_alone():
    machine, of = judge.Machine("cpu", FP8), gemm.CONTEST
    data, seen = of_reduced(of), []

    def off(data):
        (result,), terms = of.reference(data), of.terms(data)
        seen.append(terms)
        return result + (terms * archs.ARCHS["sm_90"].sum_rounding).to(result.dtype)

    assert "are wrong" in judge_of(of, off).check(contest.copy(data))
    machine.rounding = archs.ARCHS["sm_90"].sum_rounding
    assert judge.Judge(of, lambda data, stage: off(data), machine).check(contest.copy(data)) == ""
    a, b = (x.float().abs() for x in data[:2])
    scales = data[2].abs(), data[3].abs()  # one block of K
    torch.testing.assert_close(seen[0], (a * scales[0]) @ (b * scales[1].repeat_interleave(128, 0)[: len(b)]).t())


def test_problems_are_those_of_the_tasks():
    assert [len(of.tests) for of in CONTESTS] == [11, 3, 4] and [len(of.benchmarks) for of in CONTESTS] == [18, 2, 2]
    for of in CONTESTS:
        assert {frozenset(sizes) for sizes in (*of.tests, *of.benchmarks)} == {frozenset(of.tests[0])}
    assert {sizes["m"] for sizes in gemm.CONTEST.benchmarks} == {1024, 6144}
    assert all(s["m"] % 32 == 0 and s["n"] % 64 == 0 and s["k"] % 128 == 0 for s in gemm.CONTEST.tests)
    best = gemm.CONTEST.flops(gemm.CONTEST.benchmarks[0]) / 76.33e-6 / 1e12
    assert best == pytest.approx(295.40, rel=1e-4)  # RadeonFlow's page has both numbers of case 0
    short, long = map(mla.CONTEST.flops, mla.CONTEST.benchmarks)
    assert long - short == 2 * 128 * 128 * (6144 - 4096) * (576 + 512)


def test_data_of_gemm_are_column_major_and_half_of_the_scales_negative():
    a, b, scale_a, scale_b, c = gemm.CONTEST.data(gemm.CONTEST.reduced[3], "cpu", FP8)
    assert (a.shape, a.stride()) == ((128, 384), (1, 128)) and (b.shape, b.stride()) == ((576, 384), (1, 576))
    assert (scale_a.shape, scale_a.stride()) == ((128, 3), (1, 128)) and (scale_b.shape, scale_b.stride()) == (
        (5, 3),
        (1, 5),
    )
    assert a.dtype == b.dtype == FP8 and c.dtype == torch.bfloat16 and c.is_contiguous()
    assert 0.4 < (scale_a < 0).float().mean() < 0.6 and 0.9 < a.float().std() < 1.1
    again = gemm.CONTEST.data(gemm.CONTEST.reduced[3], "cpu", FP8)
    later = gemm.CONTEST.data(gemm.CONTEST.reduced[3], "cpu", FP8, later=13)
    assert torch.equal(a.float(), again[0].float()) and not torch.equal(a.float(), later[0].float())


def test_data_of_moe_have_the_contests_names_and_transposed_weights():
    x, weights, config = of_reduced(moe.CONTEST)
    assert list(config) == moe.CONFIG.split() and x.shape == (2, 40, 128) and x.dtype == torch.float16
    assert weights["router.weight"].shape == (8, 128) and weights["experts.3.2.weight"].shape == (64, 128)
    assert weights["experts.0.0.weight"].shape == (128, 64) and weights["shared_experts.1.weight"].shape == (128, 128)
    assert weights["experts.0.0.weight"].std() == pytest.approx(64**-0.5, rel=0.05)
    assert weights["experts.0.2.weight"].std() == pytest.approx(128**-0.5, rel=0.05)


def test_data_of_mla_have_a_cache_that_a_call_appends_to():
    config, x, cache = data = of_reduced(mla.CONTEST)
    assert x.shape == (3, 1, 256) and cache.get_data().shape == config.kv_cache_shape == (3, 96, 576)
    assert cache.seq_len == 65 and not cache.data[:, 65:].any() and cache.data[:, :65].all(-1).any()
    mla.CONTEST.reference(data)
    assert cache.seq_len == 66 and cache.data[:, 65].any()
    mla.CONTEST.again(data)
    assert cache.seq_len == 65
    with pytest.raises(ValueError, match="the cache holds 96 rows, got 97"):
        cache(torch.zeros(3, 32, 576))


# Wrong ones, which a judge must find


def shared_expert(data):
    return moe._expert(data[0], data[1], "shared_experts")


def renormalized(data):
    x, weights, config = data
    scores, _ = moe._route(x, weights, config)
    shared = shared_expert(data)
    return (moe.CONTEST.reference(data)[0] - shared) / scores.sum(-1).view(*x.shape[:2], 1) + shared


def rotates_its_cache(data):
    output, cache = mla.CONTEST.reference(data)
    cache[:, 1:65, 512:] = mla._rotated(cache[:, 1:65, 512:], mla._cos_sin(65, cache.device)[1:])
    return output, cache


def does_not_rotate(data):
    config, x, cache = data
    zeros = config.copy()
    zeros.Q_proj_up_weight.view(4, 192, -1)[:, 128:] = 0
    return mla.CONTEST.reference((zeros, x, cache))


def does_not_append(data):
    output, cache = mla.CONTEST.reference(data)
    cache[:, 65] = 0
    return output, cache


def reference_of_a(change):
    """Return a function for the contest's reference of changed data."""
    return lambda data: gemm.CONTEST.reference(change(*data))


WRONG = [
    (gemm, reference_of_a(lambda a, b, scale_a, *rest: (a, b, scale_a.abs(), *rest)), "elements of c are wrong"),
    (gemm, reference_of_a(lambda a, *rest: (a.t().contiguous().view(a.shape), *rest)), "elements of c are wrong"),
    (gemm, lambda data: data[4][:1], r"c must be \[64, 64\] on cpu, got \[1, 64\]"),
    (gemm, lambda data: data[4].fill_(float("nan")), "4096 of 4096 elements of c are wrong"),
    (gemm, lambda data: "c", "c must be a tensor, got str"),
    (gemm, lambda data: 1 / 0, "the kernel raises ZeroDivisionError: division by zero"),
    (moe, renormalized, "elements of output are wrong"),
    (moe, lambda data: moe.CONTEST.reference(data)[0] - shared_expert(data), "elements of output are wrong"),
    (mla, rotates_its_cache, "elements of the cache are wrong"),
    (mla, does_not_rotate, "elements of the layer's output are wrong"),
    (mla, does_not_append, "17.. of 165888 elements of the cache are wrong"),
    (mla, lambda data: data[1], "the kernel must return the layer's output and the cache, got 1 values"),
]


@pytest.mark.parametrize(("module", "kernel", "said"), WRONG)
def test_wrong_results_are_found(module, kernel, said):
    found = judge_of(module.CONTEST, kernel).check(of_reduced(module.CONTEST))
    assert re.search(said, found), found


def test_infinities_and_nans_must_be_where_the_references_are():
    inf, nan = float("inf"), float("nan")
    wanted = torch.tensor([inf, -inf, nan, 1.0, 1.0, -1.0, 0.0, 0.0])
    got = torch.tensor([inf, inf, nan, nan, 1.0205, -1.0215, 0.0009, 0.0011])
    off = contest.wrong_elements(got, wanted, rtol=2e-2, atol=1e-3)
    assert off.tolist() == [False, True, False, True, False, True, False, True]


# Times


class Scripted:
    """A machine whose successive calls take these seconds."""

    device, fp8_dtype, rounding = "cpu", FP8, 0.0

    def __init__(self, *times: float):
        self.times, self.now, self.reads = times, 0.0, 0

    def seconds(self) -> float:
        self.reads += 1
        if self.reads % 2 == 0:
            self.now += self.times[min(self.reads // 2, len(self.times)) - 1]
        return self.now


@pytest.fixture
def small():
    return dataclasses.replace(gemm.CONTEST, tests=gemm.CONTEST.reduced[:1], benchmarks=gemm.CONTEST.reduced[:2])


def test_calls_end_when_the_mean_is_certain(small):
    kernel = lambda data, stage: small.reference(data)
    wrong, times = judge.Judge(small, kernel, Scripted(1e-3)).time(small.benchmarks[0], once=False, ranked=False)
    assert wrong == "" and times == pytest.approx([1e-3] * 3)
    _, times = judge.Judge(small, kernel, Scripted(1e-3, 2e-3, 3e-3)).time(small.benchmarks[0], False, False)
    assert len(times) == judge.MAX_CALLS  # 1, 2, 3, 3, 3, ... ms: not within 0.1 % after 100
    _, times = judge.Judge(small, kernel, Scripted(*(1e-3, 1.004e-3) * 10)).time(small.benchmarks[0], False, False)
    assert len(times) == 5  # they deviate by 0.22 %, so that their mean is known to 0.1 %
    _, times = judge.Judge(small, kernel, Scripted(3.0, 2.0, 4.0, 3.5)).time(small.benchmarks[0], False, False)
    assert times == pytest.approx((3.0, 2.0, 4.0, 3.5))  # 10 s are over
    assert len(judge.Judge(small, kernel, Scripted(1e-3)).time(small.benchmarks[0], True, False)[1]) == 1


def test_a_call_undoes_what_the_last_one_appended():
    filled = []

    def kernel(data, stage):
        filled.append(data[2].seq_len)
        return mla.CONTEST.reference(data)

    judge.Judge(mla.CONTEST, kernel, Scripted(1e-3)).time(mla.CONTEST.reduced[0], once=False, ranked=False)
    assert filled == [65] * 4


def test_a_ranked_run_checks_each_call_on_new_data(small):
    seen = []

    def kernel(data, stage):
        seen.append(data[0].float().sum().item())
        return small.reference(data)[0] * (0 if len(seen) == 3 else 1)

    wrong, times = judge.Judge(small, kernel, Scripted(1e-3)).time(small.benchmarks[0], once=False, ranked=True)
    assert "elements of c are wrong" in wrong and times == () and len(set(seen)) == 3


@pytest.fixture
def by_reference(small, monkeypatch):
    """Compute the plugin's product by the contest's reference."""
    product = lambda a, b, sa, sb, dtype: small.reference((a, b, sa, sb, a.bfloat16()))[0]
    monkeypatch.setattr(gemm.ops, "block_scaled_mm", product)


@pytest.mark.usefixtures("by_reference")
def test_stages_are_timed_and_named(small):
    found = judge.Judge(small, small.ours, Scripted(1e-3, 2e-3, 3e-3, 5e-3, 1e-3, 4e-3)).stages(small.benchmarks[0])
    assert list(found) == ["transpose a", "transpose b", "product"]
    # the best of five calls, of which the last four end in 4 ms
    assert list(found.values()) == pytest.approx([1e-3, 1e-3, 3e-3])


@pytest.fixture
def scripted(monkeypatch, small):
    """Return the command on a machine whose calls take a millisecond, with the small contest."""
    monkeypatch.setattr(command, "CONTESTS", {"gemm": small})
    monkeypatch.setattr(command, "gpu", lambda: Scripted(1e-3))
    monkeypatch.setattr(judge, "MIN_CALLS", 4)


def test_the_command_checks_then_times_then_scores(scripted, tmp_path, capsys):
    path = tmp_path / "submission.py"
    path.write_text(
        textwrap.dedent("""
            from task import input_t, output_t
            from contests import gemm

            def custom_kernel(data: input_t) -> output_t:
                return gemm.CONTEST.reference(data)[0]
        """)
    )
    options = ["gemm", "--submission", str(path)]
    assert command.main(options) == 0
    test, first, second, total = capsys.readouterr().out.splitlines()
    assert test.startswith("test  0: m 64 n 64 k 128") and test.endswith("ok")
    assert first.startswith("case  0: m 64") and "best 1000.00 us 0.00 TFLOPS  slowest 1000.00 us" in first
    assert "mean of 4 1000.00 us" in second and second.startswith("case  1: m 64 n 192")
    assert total == "geometric means over 2: best 1000.00 us 0.00 TFLOPS, mean 1000.00 us, which is the score"
    assert command.main([*options, "-c", "0", "-b"]) == 0
    assert "mean of 1 1000.00 us" in capsys.readouterr().out
    assert command.main([*options, "-p", "-c", "1"]) == 0
    assert capsys.readouterr().out.startswith("case  1: m 64 n 192 k 512 seed 6635")
    path.write_text("custom_kernel = lambda data: data[4]\n")
    assert command.main(options) == 1
    out = capsys.readouterr().out
    assert "FAILED" in out and "wrong results: no timing" in out and "case" not in out


@pytest.mark.usefixtures("scripted", "by_reference")
def test_one_stage_is_printed_alone(capsys):
    for stage in range(4):
        assert command.main(["gemm", "-c", "0", "-t", str(stage)]) == 0
        assert capsys.readouterr().out == "1000.000000\n"
    assert command.main(["gemm", "-c", "0", "-t", "4"]) == 2
    assert "-t must be 0 to 3, got 4" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "no file "),
        ("def custom_kernel(data:", "does not load: SyntaxError: "),
        ("import no_such_module", "does not load: ModuleNotFoundError: No module named 'no_such_module'"),
        ("def kernel(data): ...", "must have a function custom_kernel(data)"),
    ],
)
def test_files_that_are_no_submissions_are_refused(text, said, tmp_path, capsys):
    path = tmp_path / "mine.py"
    if text is not None:
        path.write_text(text)
    assert command.main(["moe", "--emulate", "gfx942", "--submission", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("--submission: ") and said in error and str(path) in error


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["gemm", "--op", "rms_norm"], "unrecognized arguments: --op rms_norm"),
        (["moe", "-c", "2"], "-c must be 0 to 1 for moe, got 2"),
        (["moe", "-c", "-1"], "-c must be 0 to 1 for moe, got -1"),
        (["moe", "-t", "0"], "-t needs -c and no --submission"),
        (["moe", "-c", "0", "-t", "0", "--submission", "x.py"], "-t needs -c and no --submission"),
        (["moe", "--emulate", "gfx942", "-c", "0"], "--emulate is untimed"),
        (["moe", "--emulate", "gfx942", "--ranked"], "--emulate is untimed"),
        (["moe", "-p", "-b"], "-p is unchecked"),
        (["moe", "-p", "--emulate", "gfx942"], "-p is unchecked"),
        (["conv"], "invalid choice: 'conv'"),
        ([], "the following arguments are required: contest"),
    ],
)
def test_options_that_do_not_fit_a_contest_are_refused(options, said, capsys):
    with pytest.raises(SystemExit) as found:
        command.main(options)
    assert found.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="without one")
def test_without_a_gpu_it_says_what_it_needs(capsys):
    assert command.main(["gemm"]) == 2
    assert "a contest needs a GPU or --emulate: no GPU found" in capsys.readouterr().err


def test_the_folder_runs_as_a_command():
    """It runs from another folder, with modules that share names with ops."""
    run = [sys.executable, ROOT / "serving_benchmarks" / "contests", "mla", "--emulate", "gfx90a"]
    result = subprocess.run(
        run, cwd=ROOT / "tests", env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    assert result.returncode == 2 and "gfx90a" in result.stderr
