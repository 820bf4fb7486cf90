"""Test the command bandwidth: the bytes that count, the blocks of a sweep, and refusals."""

import pytest
import torch

from vllm_rocm_ops import ops
from vllm_rocm_ops.core import archs, clock
from vllm_rocm_ops.tools import cli
from vllm_rocm_ops.tools.bench import run, stream


class Recorder:
    """A clock that reports one millisecond per call, and records the calls."""

    device, unit, arch = "cpu", "us", archs.ARCHS["gfx942"]

    def __init__(self):
        self.called = []

    def calls(self, bytes_of_call):
        return 2

    def prepare(self, call, sets):
        assert len(sets) == 2 and sets[0][0].data_ptr() != sets[1][0].data_ptr()
        self.called.append((len(sets[0][0]), *sets[0][1:]))

    def samples(self, prepared):
        return {name: [1000.0] for name in prepared}


@pytest.fixture
def recorder(monkeypatch):
    found = Recorder()
    monkeypatch.setattr(clock, "GpuClock", lambda: found)
    monkeypatch.setattr(run, "hbm", lambda clock, op: ["by size"])
    monkeypatch.setattr(stream, "SIZE", 1)
    return found


def test_a_copy_moves_its_bytes_twice(recorder, capsys):
    assert cli.main(["bandwidth", "--size", "2", "--workgroups", "3,608"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["blocks", "read", "write", "copy", "GB/s,", "2", "MiB"]
    assert [line.split() for line in lines] == [["3", "2", "2", "4"], ["608", "2", "2", "4"]]
    words = 2 * 2**20 // 4
    assert recorder.called == [(words, name, count) for count in (3, 608) for name in ("read", "write", "copy")]


def test_without_flags_bandwidths_by_size_come_first(recorder, capsys):
    assert cli.main(["bandwidth"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "by size" and [line.split()[0] for line in lines[2:]] == ["304", "608", "1216", "2432"]


def test_a_sweep_has_powers_of_two_and_multiples_of_the_compute_units(recorder, capsys):
    assert cli.main(["bandwidth", "--sweep", "--direction", "copy"]) == 0
    found = [int(line.split()[0]) for line in capsys.readouterr().out.splitlines()[1:]]
    assert found == sorted({*(2**i for i in range(12)), 304, 608, 1216, 2432})
    assert {direction for _, direction, _ in recorder.called} == {"copy"}


def test_numbers_of_blocks_that_are_given_are_the_ones_that_run(recorder, capsys):
    assert cli.main(["bandwidth", "--sweep", "--workgroups", "5"]) == 0
    assert {count for _, _, count in recorder.called} == {5} and "by size" not in capsys.readouterr().out


def test_a_wrong_copy_ends_the_bandwidth_command(recorder, capsys, monkeypatch):
    def wrong(input, direction, num_blocks):
        return ops.stream_memory.reference(input, direction, num_blocks) + (direction == "copy")

    wrong.reference = ops.stream_memory.reference
    monkeypatch.setattr(stream.ops, "stream_memory", wrong)
    assert cli.main(["bandwidth", "--workgroups", "2"]) == 2
    assert "bandwidth: stream_memory is wrong: copy with 2 blocks" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--size", "0"], "must be 1 to 1048576 MiB, got 0"),
        (["--workgroups", "1,x"], "argument --workgroups: must be comma-separated integers from 1 to 65536"),
        (["--workgroups", "0"], "argument --workgroups: must be comma-separated integers from 1 to 65536"),
        (["--direction", "sideways"], "invalid choice: 'sideways'"),
    ],
)
def test_flags_that_do_not_fit_are_refused(options, said, capsys):
    with pytest.raises(SystemExit) as found:
        cli.main(["bandwidth", *options])
    assert found.value.code == 2 and said in capsys.readouterr().err


def test_blocks_share_runs_of_words():
    """The first of 2 blocks has words 0 to 1023 and 2048 to 2499 of 2500."""
    x = torch.arange(2500, dtype=torch.int32)
    wanted = [int(x[:1024].sum() + x[2048:].sum()), int(x[1024:2048].sum())]
    assert ops.stream_memory(x, "read", 2).tolist() == wanted
    with pytest.raises(ValueError, match="stream_memory: direction must be read or write or copy, got up"):
        ops.stream_memory(x, "up", 2)
