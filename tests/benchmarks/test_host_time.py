"""Test the benchmark of host time: what it alternates, and that it finds the seams of a model."""

import json
import os
import subprocess
import sys

import pytest
from marks import full
from pages.measurements import ROOT

sys.path.insert(0, str(ROOT / "serving_benchmarks"))

import host_time


def test_calls_alternate_and_are_prepared():
    happened = []
    calls = {
        name: host_time.Timed(lambda name=name: happened.append(name), lambda name=name: happened.append(f"set {name}"))
        for name in ("a", "b")
    }
    times = host_time.host_times(calls, lambda: happened.append("wait"))
    round_ = [event for name in "ab" for event in (f"set {name}", "wait", *[name] * host_time.CALLS)]
    assert happened == round_ * (host_time.ROUNDS + 1) + ["wait"]
    assert {name: len(values) for name, values in times.items()} == dict.fromkeys("ab", host_time.ROUNDS)


def test_differences_are_of_the_same_round():
    """The host slows down between rounds: medians alone would differ by 1."""
    times = {host_time.VLLMS: [1.0, 5.0, 9.0], host_time.SERVES: [3.0, 7.0, 8.0]}
    line = host_time.summary(times)
    assert line == {"us": {host_time.VLLMS: 5.0, host_time.SERVES: 7.0}, "apart_us": {host_time.SERVES: 2.0}}
    shown = host_time.row({"seam": "norm", "layer": "RMSNorm", **line})
    assert "7.00 us (+2.00)" in shown and "above the limit" not in shown
    line["apart_us"][host_time.SERVES] = 10.5
    assert host_time.row({"seam": "norm", "layer": "RMSNorm", **line}).endswith("above the limit")


@full
@pytest.mark.slow
def test_the_seams_of_a_model_are_timed(tmp_path):
    """On CPU, vLLM keeps no kernel for linears, and references replace the ops."""
    command = [sys.executable, str(ROOT / "serving_benchmarks" / "host_time.py"), "--model", "tiny-llama-fp8"]
    command += ["--engine-args", '{"gpu_memory_utilization": 0.2}', "--output", str(tmp_path / "lines.jsonl")]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert result.returncode == 0, result.stderr[-3000:]
    lines = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    assert {line["seam"] for line in lines} == {"norm", "activation", "decode_attention"}
    assert all(min(line["us"].values()) > 0 and host_time.SERVES in line["apart_us"] for line in lines)
