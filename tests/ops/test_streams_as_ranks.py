"""Test that ranks which are streams of one GPU get queues of their own, or say that they do not run at the same time."""

import contextlib
import importlib.util
import os
import types
from pathlib import Path

import pytest
import torch

from vllm_rocm_ops import collectives
from vllm_rocm_ops.collectives import RankMissing, streams

ROOT = Path(__file__).resolve().parents[2]


class Stop(Exception):
    """Ends a script where it would use a GPU."""


def script(path: str):
    """Return a script as a module."""
    spec = importlib.util.spec_from_file_location(f"script_{Path(path).stem}", ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def on_gpu() -> None:
    next(script("tests/all_reduce_on_gpu.py").run_streams(8, 1))


def benchmark() -> None:
    script("serving_benchmarks/all_reduce.py").main(["--ranks", "8"])


@pytest.mark.parametrize("run", [on_gpu, benchmark])
@pytest.mark.parametrize("users", [{}, {"GPU_MAX_HW_QUEUES": "24"}], ids=str)
def test_the_scripts_ask_for_a_queue_per_stream_before_they_use_a_gpu(monkeypatch, run, users):
    monkeypatch.setattr(os, "environ", {"PATH": os.environ["PATH"], **users})
    asked = []

    def in_process(*_, **__):
        asked.append(dict(os.environ))
        raise Stop

    monkeypatch.setattr(collectives, "in_process", in_process)
    with pytest.raises(Stop):
        run()
    assert int(asked[0]["GPU_MAX_HW_QUEUES"]) == int(users.get("GPU_MAX_HW_QUEUES", 16)) > 8
    assert asked[0]["CUDA_DEVICE_MAX_CONNECTIONS"] == "32" and asked[0]["CUDA_MODULE_LOADING"] == "EAGER"


def test_the_benchmark_has_every_argument_of_its_ops():
    made = script("serving_benchmarks/all_reduce.py")
    for op in made.OPS.values():
        given = made.arguments(op, 2, 512, torch.device("cpu"), torch.float8_e4m3fnuz)
        x = torch.ones(2, 512, dtype=made.DTYPE)
        assert not op.explain(x, *given, arch="gfx942").is_fallback


class Rank:
    """A rank whose kernel waits for the others', or did so in vain."""

    def __init__(self, misses: bool, called: list[str]):
        self.misses, self.called = misses, called

    def sum(self, x):
        self.called.append("sum")

    def check(self):
        if self.misses:
            raise RankMissing("rank 1 of 3 did not come")

    def close(self):
        self.called.append("close")


@pytest.mark.parametrize("misses", [False, True])
def test_streams_that_do_not_overlap_are_named_before_the_protocol_is(monkeypatch, misses):
    called, limits = [], []

    def in_process(ranks, device, seconds):
        limits.append(seconds)
        return [Rank(misses and rank == 1, called) for rank in range(ranks)]

    monkeypatch.setattr(streams, "in_process", in_process)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: called.append("synchronize"))
    three = [types.SimpleNamespace()] * 3
    expected = pytest.raises(
        RuntimeError, match="3 streams do not run at the same time.*GPU_MAX_HW_QUEUES=16.*rank 1 of 3"
    )
    with expected if misses else contextlib.nullcontext():
        streams.check_overlap(three, torch.device("cpu"))
    assert called == ["synchronize", *["sum"] * 3, "synchronize", *["close"] * 3] and limits == [1.0]
