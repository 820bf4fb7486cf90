"""The command bench: what it says of right and wrong results, with the emulator's cycles as a clock."""

import pytest
import torch
from test_tune import EmulatorClock

from vllm_rocm_ops import cli, launch, ops
from vllm_rocm_ops.bench import run as bench


@pytest.fixture
def emulated():
    found = EmulatorClock("gfx950")
    with launch.executor(found):
        yield found


def cases(op, *names: str) -> list[tuple]:
    return [(op, case) for case in op.cases() if case.name in names]


def test_right_results_and_what_a_call_moves(emulated):
    [norm] = bench.run(cases(ops.fused_add_rms_norm, "bf16"), emulated)
    assert norm.wrong is None and norm.kernel.startswith("fused_add_rms_norm_bf16_x") and norm.median > 0
    assert norm.bytes_moved == 2 * (4 * 3 * 4096 + 4096)  # input, residual twice, output; weight
    [product] = bench.run(cases(ops.scaled_mm, "m4"), emulated)
    assert product.flops == 2 * 4 * 48 * 1024
    assert f"{product.flops / product.median / 1e6:.1f}" in str(product) and "right" in str(product)
    text = bench.summary([norm, product])
    assert "2 cases, all right" in text and f"scaled_mm: {product.median:.2f} us as a geometric mean of 1 cases" in text


class Nothing:
    """An executor that runs nothing."""

    def __init__(self, arch):
        self.arch = arch

    def launch(self, launch, uninitialised) -> None:
        pass


def test_wrong_results_are_said_and_counted(emulated, capsys, monkeypatch):
    with launch.executor(Nothing(emulated.arch)):
        [line] = bench.run(cases(ops.rms_norm, "bf16"), emulated, once=True)
        assert line.wrong == "rms_norm output 0: NaNs differ" and "WRONG" in str(line)
        assert "1 cases, 1 wrong" in bench.summary([line])
        monkeypatch.setattr(cli, "GpuClock", lambda: emulated)
        assert cli.main(["bench", "--op", "rms_norm", "--case", "bf16", "--once"]) == 1
    assert "NaNs differ" in capsys.readouterr().out


def test_once_calls_and_checks_without_timing(emulated):
    [line] = bench.run(cases(ops.silu_and_mul, "bf16"), emulated, once=True)
    assert line.wrong is None and not line.samples


def test_profile_only_calls(emulated, monkeypatch):
    launched = []
    monkeypatch.setattr(emulated, "launch", lambda launch, uninitialised: launched.append(launch.symbol))
    [line] = bench.run(cases(ops.silu_and_mul, "bf16"), emulated, profile=True)
    assert line.wrong == "" and not line.samples and launched == [line.kernel] * bench.PROFILED_CALLS


def test_nothing_to_do_is_not_timed(emulated):
    [line] = bench.run(cases(ops.silu_and_mul, "no-rows"), emulated)
    assert line.wrong is None and not line.samples


def test_a_models_calls_are_cases_too(emulated, capsys, monkeypatch):
    monkeypatch.setattr(cli, "GpuClock", lambda: emulated)
    command = ["bench", "--model", "tiny-llama-fp8", "--batch", "1,3", "--op", "rms_norm*", "--once"]
    assert cli.main(command) == 0
    out = capsys.readouterr().out
    assert "input norm 1 " in out and "input norm 3 " in out and "2 cases, all right" in out


@pytest.mark.skipif(torch.cuda.is_available(), reason="without one")
def test_without_a_gpu_it_says_that_the_reference_runs(capsys):
    assert cli.main(["bench", "--op", "rms_norm", "--case", "bf16*"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(
        "The ops run their PyTorch reference here (there is no GPU): no kernel is checked, nothing is "
    )
    assert "fallback: PyTorch reference on this device" in out and "right" not in out and "5 cases" in out


def test_no_such_case(capsys):
    assert cli.main(["bench", "--op", "rms_norm", "--case", "nonsense"]) == 2
    assert "no case matches --op rms_norm --case nonsense" in capsys.readouterr().err


def test_bandwidths_count_all_bytes_once():
    class Recorder:
        """Says that a call takes a microsecond."""

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
