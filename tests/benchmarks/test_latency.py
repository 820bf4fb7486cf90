"""Test serving_benchmarks/latency.py: its report, and real runs with small models on this machine."""

import copy
import importlib
import json
import pathlib
import subprocess
import sys
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from marks import full
from process_end import ended

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "serving_benchmarks" / "latency.py"

sys.path.insert(0, str(SCRIPT.parent))

import decode_profile
import latency
import latency_report
import latency_worker

SHRUNK = {"hidden_size": 512, "intermediate_size": 512, "num_attention_heads": 8, "vocab_size": 512}
"""Overrides that make a real configuration small, with the same kinds of layers and quantization."""


def report(without: list[float] | None, with_ops: list[float], stats: dict, drafts: dict | None = None) -> dict:
    """Return a report on one model at batch size 8, from decode times in ms; steps with drafts take twice as long.

    `without` is None if that side failed.
    """
    job = {"name": "model", "input_len": 1, "output_len": 128, "num_layers": None, "rank_of": 1, "pair": 0}
    job["drafts"] = drafts
    runs, results = [], []
    for side, times in (("without", without), ("with", with_ops)):
        run = {"model_id": "model", "side": side, "log": f"{side}.log"}
        if times is None:
            runs.append(run | {"error": "ValueError: no kernel\nfor this"})
            continue
        runs.append(run | ({"op_stats": stats} if side == "with" else {}))
        batch = {
            "batch_size": 8,
            "latencies": [0.128 * t for t in times],
            "decode_ms": times,
            "step_ms": [2 * t for t in times],
            "step_rows": [30.0 for _ in times],
            "ttft_ms": [3 * t for t in times],
            "host_us": [100 * t for t in times],
        }
        results.append(latency_report.summarize({**job, "side": side}, batch))
    versions = {"vllm": "0.32.0", "torch": "2.13.0"}
    return {"results": results, "runs": runs, "hardware": "1 x GPU", "versions": versions}


KERNELS = {"rms_norm": {"rms_norm_bf16_x1": 100, "fallback: PyTorch reference on this device": 1}}


def test_summary_has_the_form_of_vllm_bench_latency():
    [_, result] = report([4.0, 5.0, 6.0], [1.0, 2.0, 9.0], KERNELS)["results"]
    assert result["decode_ms_per_token"] == 2.0
    assert result["avg_latency"] == pytest.approx(0.128 * 4)
    assert list(result["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    assert result["percentiles"]["50"] == pytest.approx(0.256)
    assert len(result["latencies"]) == 3
    assert result["iterations"] == {
        "decode_ms": [1.0, 2.0, 9.0],
        "step_ms": [2.0, 4.0, 18.0],
        "step_rows": [30.0, 30.0, 30.0],
        "ttft_ms": [3.0, 6.0, 27.0],
        "host_us": [100.0, 200.0, 900.0],
    }


def test_a_report_has_a_line_for_each_record():
    report = {"command": "x", "results": [{"n": 1, "ms": [1.5, 2], "at": {"8": "ä"}}, {}], "runs": [], "none": None}
    text = latency_report.json_text(report)
    assert json.loads(text) == report
    lines = [line.strip() for line in text.splitlines()]
    assert lines[3:7] == ["{", '"n": 1,', '"ms": [1.5, 2],', '"at": {"8": "\\u00e4"}']


def test_table_compares_medians():
    text = latency_report.table(report([4.0, 5.0, 6.0], [2.0, 2.5, 3.0], KERNELS))
    assert "5.00 (4.20-5.80)" in text and "2.50 (2.10-2.90)" in text and "2.00x" in text
    assert "plain PyTorch" not in text


def test_table_has_what_starts_take():
    """The table has the medians of each side over its starts, and what the ops add."""
    whole = report([4.0], [5.0], KERNELS)
    for run, seconds in zip(whole["runs"], (20.0, 25.0)):
        run["start"] = {"start_s": seconds, "load_peak_bytes": 3 << 30, "kv_blocks": 100}
    rows = {row[1]: row[2:] for row in latency_report.differences(whole)}
    assert rows == {
        "start, s": ["20.00", "25.00", "+5.00", "+25.0 %"],
        "peak of load, GiB": ["3.00", "3.00", "+0.00", "+0.0 %"],
        "KV cache, blocks": ["100.00", "100.00", "+0.00", "+0.0 %"],
        "TTFT, 8 x 1 tokens, ms": ["12.00", "15.00", "+3.00", "+25.0 %"],
        "Python loop at batch 8, us": ["400.00", "500.00", "+100.00", "+25.0 %"],
    }
    assert "TTFT, 8 x 1 tokens, ms" in latency_report.table(whole)
    del whole["runs"][0]["start"]
    assert latency_report.differences(whole)[0][2:] == ["", "25.00", "", ""]


def test_a_report_has_steps_with_drafts():
    drafts = latency.parse_arguments(["--drafts", "3"]).drafts
    whole = report([4.0], [2.0], KERNELS, drafts)
    rows = {row[1]: row[2:] for row in latency_report.differences(whole)}
    assert rows["step at batch 8, ms"] == ["8.00", "4.00", "-4.00", "-50.0 %"]
    assert rows["step at batch 8, rows"] == ["30.00", "30.00", "+0.00", "+0.0 %"]
    assert "step at batch 8, rows" in latency_report.table(whole)
    assert "step at batch" not in latency_report.table(report([4.0], [2.0], KERNELS))
    assert any(", 3 mtp drafts; random weights" in t.replace("\n", " ") for t in texts(latency_report.figure(whole)))


class Told(NamedTuple):
    """The statistics of a step, as an engine reports them: see `vllm.v1.metrics.stats`."""

    time_to_first_tokens_iter: list
    inter_token_latencies_iter: list
    spec_decoding_stats: SimpleNamespace | None = None


def test_steps_are_counted_from_what_the_engine_ran():
    """Steps before the last first token, and those without output, do not count. Requests have any number of drafts."""
    told = []
    engine = SimpleNamespace(logger_manager=SimpleNamespace(record=lambda **stats: told.append(stats)))
    steps = latency_worker.StepCounter(engine)

    def step(first: int, later: int, drafts: int | None = None) -> None:
        drafted = None if drafts is None else SimpleNamespace(num_draft_tokens=drafts)
        iteration = Told([0.1] * first, [0.1] * later) if first + later else None
        engine.logger_manager.record(scheduler_stats=Told([], [], drafted), iteration_stats=iteration, mm_cache_stats=1)

    step(2, 0)
    step(0, 2, 6)
    step(2, 2, 6)
    assert (steps.steps, steps.rows) == (0, 0)
    step(0, 4, 12)
    step(0, 4, 5)
    step(0, 0)
    step(0, 1)
    assert (steps.steps, steps.rows) == (3, 16 + 9 + 1)
    assert len(told) == 7 and all(set(of) == {"scheduler_stats", "iteration_stats", "mm_cache_stats"} for of in told)


def test_sides_are_first_in_turn(tmp_path, monkeypatch):
    """A host warms up and cools down."""
    started = []
    monkeypatch.setattr(
        latency,
        "run_side",
        lambda job, *_: started.append((job["pair"], job["side"], job["num_iters"])) or {"batches": []},
    )
    files = ["--output-json", str(tmp_path / "latency.json"), "--plot", str(tmp_path / "latency.png")]
    latency.benchmark(latency.parse_arguments(["--model", "tiny-llama", "--pairs", "3", "--num-iters", "4", *files]))
    sides = [(0, "without"), (0, "with"), (1, "with"), (1, "without"), (2, "without"), (2, "with")]
    assert started == [(*side, 4) for side in sides]


def test_starts_before_the_measured_ones(tmp_path, monkeypatch):
    """They are the plugin's, and time all kernels. Nothing is reported of them."""
    started = []
    monkeypatch.setattr(
        latency,
        "run_side",
        lambda job, log, _: started.append((job["name"], job["side"], job["num_iters"], log.name)) or {"batches": []},
    )
    files = ["--output-json", str(tmp_path / "latency.json"), "--plot", str(tmp_path / "latency.png")]
    models = ["--model", "tiny-llama", "tiny-llama-fp8", "--num-iters", "4", "--num-starts-warmup", "1"]
    report = latency.benchmark(latency.parse_arguments([*models, *files]))
    assert started == [
        (name, *of)
        for name in ("tiny-llama", "tiny-llama-fp8")
        for of in (
            ("with", 0, f"{name}-warmup-0.log"),
            ("without", 4, f"{name}-without.log"),
            ("with", 4, f"{name}-with.log"),
        )
    ]
    assert len(report["runs"]) == 4
    started.clear()
    latency.benchmark(latency.parse_arguments([*models, *files, "--side", "without"]))
    assert [side for _, side, *_ in started] == ["without", "without"]


def test_pairs_of_starts_have_the_median_of_their_ratios():
    """A start that is slow on both sides counts for neither."""
    whole = {"results": [], "runs": [], "hardware": "1 x GPU", "versions": {"vllm": "0", "torch": "0"}}
    for pair, (without, with_ops) in enumerate([(4.0, 2.0), (5.0, 4.0), (4.4, 2.0)]):
        one = report([without], [with_ops], KERNELS)
        whole["results"] += [result | {"pair": pair} for result in one["results"]]
        whole["runs"] += one["runs"]
    text = latency_report.table(whole)
    assert "4.40 (4.00-5.00)" in text and "2.00 (2.00-4.00)" in text and text.count("2.00x") == 1
    assert any("1 iterations in each of 3 starts" in t.replace("\n", " ") for t in texts(latency_report.figure(whole)))


EVENTS = [  # name, start and duration in ns: two steps on a rank, for a while with two streams
    ("void vllm::cross_device_reduce_1stage<bf16>", 2_000, 3_000),
    ("scaled_mm_skinny_16", 0, 2_000),
    ("triton_red_fused_rms_norm_quant_0", 6_000, 1_000),
    ("scaled_mm_skinny_16", 10_000, 4_000),
    ("cross_device_reduce_1stage", 14_000, 1_000),
    ("at::native::argmax_kernel", 13_000, 4_000),
]


def test_a_profile_sums_kernels_and_what_is_idle():
    found = decode_profile.summarize(EVENTS, 2)
    assert found["kernels"]["scaled_mm_skinny_16"] == [1.0, 3.0]
    assert found["span_us"] == 8.5 and found["busy_us"] == 6.5  # 5 + 1 + 7 of 17 us
    assert found["all_reduce_us"] == [3.0, 1.0]
    classes = decode_profile.by_class(found)
    assert classes == {
        decode_profile.ALL_REDUCE: 2.0,
        "FP8 linears": 3.0,
        decode_profile.NORMS: 0.5,
        decode_profile.REST: 2.0,
        decode_profile.IDLE: 2.0,
    }
    assert decode_profile.launches(found) == 3


def test_waiting_time_is_relative_to_the_last_rank():
    of_ranks = [9.0, 3.0, 4.0, 4.0], [3.0, 5.0, 4.0, 4.0]
    ranks = [{"steps": 2, "kernels": {}, "all_reduce_us": times} for times in of_ranks]
    assert decode_profile.compare(ranks) == [
        {"steps": 2, "kernels": {}, "waiting_us": 3.0},
        {"steps": 2, "waiting_us": 1.0},
    ]
    assert decode_profile.waiting([[9.0, 3.0], [1.0]], 2) == [None, None]


def test_steps_are_profiled_after_the_last_prefill():
    """A step prefills one prompt here, and decodes those before it."""

    class Engine:
        def __init__(self):
            self.requests, self.steps = {}, []

        def add_request(self, name, prompt, tokens):
            self.requests[name] = [tokens, 0]

        def has_unfinished_requests(self):
            return bool(self.requests)

        def step(self):
            waiting = next((name for name, (_, made) in self.requests.items() if not made), None)
            running = [name for name, (_, made) in self.requests.items() if made or name == waiting]
            for name in running:
                self.requests[name][1] += 1
            self.steps.append((waiting is not None, len(running)))
            found = [SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=[0])]) for name in running]
            self.requests = {name: of for name, of in self.requests.items() if of[1] < of[0]}
            return found

    engine, marks = Engine(), []
    llm = SimpleNamespace(llm_engine=engine, collective_rpc=lambda *_, **__: marks.append(len(engine.steps)) or [None])
    assert decode_profile.record(llm, ["prompt"] * 12, lambda tokens: tokens) == []
    begin, end = marks
    assert engine.steps[begin:end] == [(False, 12)] * decode_profile.STEPS and begin == 12 + decode_profile.STEPS_BEFORE


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclDevKernel_AllGather_RING_LL", decode_profile.ALL_REDUCE),
        ("void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<...>>>", "attention"),
        ("void vllm::reshape_and_cache_flash_kernel<...>", "attention"),
        ("triton_poi_fused_add_clone_copy_expand_index_mul_neg_slice_split_stack_unsqueeze_view_4", "attention"),
        ("_fwd_grouped_kernel_stage1", "attention"),
        ("_fwd_kernel_stage2", "attention"),
        ("fused_moe_kernel", decode_profile.EXPERTS),
        ("fused_experts_down_block", decode_profile.EXPERTS),
        ("fused_experts_quantize_block_bf16", "experts: routing, sorting, sums, quantization"),
        ("void vllm::moe::count_and_sort_expert_tokens_kernel<int>", "experts: routing, sorting, sums, quantization"),
        ("triton_red_fused_fused_add_rms_norm_moe_forward_shared_0", decode_profile.NORMS),
        ("triton_poi_fused__to_copy_clamp_cutlass_scaled_mm_mul_reciprocal_silu_slice_2", decode_profile.NORMS),
        ("triton_poi_fused_scaled_linear_view_0", decode_profile.NORMS),
        ("void vllm::rms_norm_per_block_quant_kernel<c10::BFloat16, c10::Float8_e4m3fn, true>", decode_profile.NORMS),
        ("void cutlass::device_kernel<vllm::cutlass_3x_gemm_sm90_fp8<cutlass::float_e4m3_t>>", "FP8 linears"),
        ("void cutlass::device_kernel<vllm::cutlass_3x_gemm_fp8_blockwise<cutlass::bfloat16_t>>", "FP8 linears"),
        ("block_scaled_mm_skinny_16", "FP8 linears"),
        ("nvjet_hsh_64x8_64x16_4x1_v_bz_TNT", "other GEMMs"),
        ("unquantized_gemm_bf16_skinny_16", "other GEMMs"),
        ("fused_add_rms_norm_dynamic_per_token_quant_bf16_x4", decode_profile.NORMS),
        ("Memcpy DtoD (Device -> Device)", decode_profile.REST),
    ],
)
def test_kernels_are_classified_by_name(name, kind):
    assert decode_profile.class_of(name) == kind


def test_table_has_the_profile_of_both_sides():
    whole = report([4.0], [2.0], KERNELS)
    for run in whole["runs"]:
        run["profile"] = {"8": decode_profile.compare([decode_profile.summarize(EVENTS, 2)] * 2)}
    lines = [line.split() for line in latency_report.table(whole).splitlines()]
    assert ["FP8", "linears", "3", "/", "3"] in lines and ["idle", "2", "/", "2"] in lines
    whole["runs"][0] = whole["runs"][0] | {"profile_error": "RuntimeError: no profiler"}
    assert "model: no profile with vLLM: RuntimeError: no profiler" in latency_report.table(whole)


def test_table_says_what_is_not_runnable_and_why():
    text = latency_report.table(report(None, [2.0], KERNELS))
    assert "  failed  " in text
    assert "model failed with vLLM: ValueError: no kernel for this" in text
    assert "without.log" in text


FALLBACK = {"rms_norm": {"fallback: PyTorch reference on this device": 9}, "silu_and_mul": {"nothing to do": 1}}


def test_table_admits_that_no_kernel_ran():
    """It has no ratio then: it would be PyTorch's."""
    text = latency_report.table(report([4.0], [2.0], FALLBACK))
    assert "model: no kernel of the plugin ran: the ops run PyTorch on this machine" in text
    assert "  no kernel ran" in text and "2.00x" not in text
    text = latency_report.table(report([4.0], [2.0], {}))
    assert "called no op of the plugin" in text and "2.00x" not in text


def texts(drawn) -> list[str]:
    """Return all texts of a figure, and check that each is whole within it."""
    drawn.canvas.draw()
    found = [text for text in drawn.findobj(lambda artist: hasattr(artist, "get_text")) if text.get_text().strip()]
    for text in found:
        box = text.get_window_extent()
        assert 0 <= box.x0 and box.x1 <= drawn.bbox.x1 and 0 <= box.y0 and box.y1 <= drawn.bbox.y1, text.get_text()
    return [text.get_text() for text in found]


@pytest.mark.parametrize("models", [1, 2, 4])
def test_a_figure_cuts_nothing_off(models):
    whole = report([4.0, 5.0], [2.0, 3.0], KERNELS)
    whole["hardware"] = "64 cores of INTEL(R) XEON(R) PLATINUM 8581C CPU @ 2.30GHz"
    for part in ("results", "runs"):
        whole[part] = [entry | {"model_id": f"model {i}"} for i in range(models) for entry in whole[part]]
    found = texts(latency_report.figure(whole))
    assert "Decode latency: median, p10 to p90" in found and "8\n1.80x" in found
    assert any(text.replace("\n", " ").endswith("2 iterations; random weights") for text in found)


@pytest.mark.parametrize(
    ("without", "stats", "title"),
    [([4.0], FALLBACK, "model\nno kernel of the plugin ran: no speedup"), ([4.0], {}, None), (None, KERNELS, "model")],
)
def test_a_figure_has_no_ratio_where_there_is_none(without, stats, title):
    found = texts(latency_report.figure(report(without, [2.0], stats)))
    assert not [text for text in found if text.endswith("x")]
    assert title is None or title in found


@pytest.mark.parametrize("without", [[4.0, 5.0], None], ids=["both", "one-side"])
def test_plot_is_a_png(tmp_path, without):
    assert latency_report.plot(report(without, [2.0, 3.0], KERNELS), tmp_path / "folder" / "plot.png")
    assert (tmp_path / "folder" / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_failed_runs_print_neither_hardware_nor_plot(tmp_path, monkeypatch, capsys):
    failed = {"results": [], "runs": report(None, [2.0], {})["runs"][:1], "hardware": None, "versions": {}}
    monkeypatch.setattr(latency, "benchmark", lambda arguments: failed)
    latency.main(["--output-json", "x.json", "--plot", str(tmp_path / "plot.png")])
    printed = capsys.readouterr().out
    assert printed.endswith("without.log\n\nx.json\n") and not (tmp_path / "plot.png").exists()


def test_sides_differ_in_our_plugin_alone(monkeypatch):
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    assert "VLLM_PLUGINS" not in latency.environment("with")
    assert latency.PLUGIN not in latency.environment("without")["VLLM_PLUGINS"].split(",")
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert latency.environment("with")["VLLM_PLUGINS"] == "other,rocm_ops"
    assert latency.environment("without")["VLLM_PLUGINS"] == "other"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--output-len", "1"], "--output-len must be at least 2, got 1"),
        (["--batch-size", "4", "0"], "--batch-size must be at least 1, got [4, 0]"),
        (["--drafts", "-1"], "--drafts must be at least 0, got -1"),
        (["--drafts", "3", "--accepted", "3.5"], "--accepted must be between 0 and --drafts 3, got 3.5"),
        (["--accepted", "1"], "--accepted must be between 0 and --drafts 0, got 1"),
    ],
)
def test_arguments_are_checked(arguments, message, capsys):
    with pytest.raises(SystemExit):
        latency.parse_arguments(arguments)
    assert message in capsys.readouterr().err


def test_drafts_are_accepted_at_random():
    """A step accepts half of `--drafts`, or `--accepted`; vLLM counts the token that follows them."""
    synthetic = {"num_speculative_tokens": 3, "rejection_sample_method": "synthetic"}
    found = latency.parse_arguments(["--drafts", "3"]).drafts
    assert found == {"method": "mtp", **synthetic, "synthetic_acceptance_length": 2.5}
    found = latency.parse_arguments(["--drafts", "3", "--draft-method", "ngram", "--accepted", "0.8"]).drafts
    lookup = {"prompt_lookup_min": 1, "prompt_lookup_max": 4}
    assert found == {"method": "ngram", **lookup, **synthetic, "synthetic_acceptance_length": 1.8}
    assert latency.parse_arguments([]).drafts is None


def test_unknown_model():
    with pytest.raises(SystemExit, match="--model must be a folder with a config.json or a name in .*, got nothing"):
        latency.find_model("nothing")


def test_real_configurations_hold_the_published_sizes():
    """Shapes are derived from these models."""

    def of(name: str, *keys: str) -> list:
        config = json.loads((latency.find_model(name) / "config.json").read_text())
        return [config[key] for key in keys]

    sizes = ("hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "vocab_size")
    for llama in ("llama-3.1-405b-fp8", "llama-3.1-405b-fp8-kv"):
        assert of(llama, *sizes, "num_key_value_heads") == [16384, 126, 53248, 128, 128256, 8]
    assert of("deepseek-v3", *sizes, "n_routed_experts") == [7168, 61, 18432, 128, 129280, 256]
    assert of("qwen3-8b-fp8", *sizes, "num_key_value_heads") == [4096, 36, 12288, 32, 151936, 8]
    experts = "num_experts", "num_experts_per_tok", "moe_intermediate_size"
    assert of("qwen3-30b-a3b-fp8", *sizes, *experts) == [2048, 48, 6144, 32, 151936, 128, 8, 768]
    experts = "n_routed_experts", *experts[1:]
    assert of("glm-4.5-air-fp8", *sizes, *experts) == [4096, 46, 10944, 96, 151552, 128, 8, 1408]


STUB = """
import json, os, subprocess, sys
job = json.loads(sys.argv[1])
worker = subprocess.Popen(["sleep", "600"], pass_fds=[job["pipe"]])
with os.fdopen(job["pipe"], "w") as pipe:
    pipe.write(json.dumps({"batch_size": 1, "decode_ms": 2.0}) + "\\n")
    pipe.write(json.dumps({"batch": {"batch_size": 1}}) + "\\n")
    pipe.write(json.dumps({"result": {"worker": worker.pid}}) + "\\n")
"""


def test_no_process_outlives_its_side(tmp_path, monkeypatch):
    """A worker that vLLM forgets would keep GPU memory from the other side."""
    (tmp_path / "stub.py").write_text(STUB)
    monkeypatch.setattr(latency, "WORKER", tmp_path / "stub.py")
    events = []
    job = {"side": "with", "random_experts": False, "timeout": 60}
    found = latency.run_side(job, tmp_path / "log", events.append)
    assert events == [{"batch_size": 1, "decode_ms": 2.0}] and found["batches"] == [{"batch_size": 1}]
    assert ended(found["worker"])


WHOLE = """
import json, os, sys, time
pipe = os.fdopen(json.loads(sys.argv[1])["pipe"], "w", buffering=1)
pipe.write('{"hardware": "1 x GPU"}\\n{"batch": {"batch_size": 8}}\\n')
"""


@pytest.mark.parametrize(
    ("ends", "error"),
    [
        ("print('the reason'); sys.exit(3)", "the process ended early"),
        ("print('the reason', flush=True); time.sleep(600)", "it took longer than --timeout 3"),
    ],
)
def test_what_failed_is_reported_with_the_end_of_its_log(tmp_path, monkeypatch, ends, error):
    """A side that takes too long is reported as well. Earlier measurements are kept."""
    (tmp_path / "stub.py").write_text(f"{WHOLE}\nprint('lines\\n' * 99)\n{ends}")
    monkeypatch.setattr(latency, "WORKER", tmp_path / "stub.py")
    found = latency.run_side({"side": "with", "random_experts": False, "timeout": 3}, tmp_path / "log", print)
    assert found["error"] == error
    assert found["batches"] == [{"batch_size": 8}] and found["hardware"] == "1 x GPU"
    assert found["log_tail"][-1] == "the reason" and len(found["log_tail"]) == latency.LINES_OF_A_FAILURE


RANKS = """
import os, pathlib, sys, time
import latency_worker

def measure(job, report):
    names = ("VLLM_DP_RANK", "VLLM_DP_RANK_LOCAL", "VLLM_DP_SIZE", "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_DP_MASTER_PORT")
    own = [os.environ[name] for name in names]
    print("rank", *own, flush=True)
    report({"batch": {"batch_size": int(own[0])}})
    folder = pathlib.Path(__file__).parent
    folder.joinpath(own[0] + ".rank").touch()
    while len([*folder.glob("*.rank")]) < int(own[2]):
        time.sleep(0.05)
    if own[0] != "0" and job["side"] == "fails":
        raise RuntimeError("no kernel")
    time.sleep(20 if job["side"] == "fails" else 0)
    report({"result": {}})

latency_worker.__file__, latency_worker.measure = __file__, measure
latency_worker.worker(latency_worker.json.loads(sys.argv[1]))
"""


@pytest.mark.parametrize("side", ["with", "fails"])
def test_data_parallel_ranks_run_the_same_job(tmp_path, monkeypatch, side):
    """The first one's times are reported; any rank that fails ends the side."""
    (tmp_path / "stub.py").write_text(RANKS)
    monkeypatch.setattr(latency, "WORKER", tmp_path / "stub.py")
    monkeypatch.setenv("PYTHONPATH", str(SCRIPT.parent))
    found = latency.run_side({"side": side, "data_parallel_size": 3, "timeout": 60}, tmp_path / "log", print)
    assert found["batches"] == [{"batch_size": 0}]
    assert found.get("error", "").startswith("data parallel rank") == (side == "fails")
    lines = sorted(line for line in (tmp_path / "log").read_text().splitlines() if line.startswith("rank"))
    port = lines[0].split()[-1]
    assert lines == [f"rank {i} {i} 3 1 {port}" for i in range(3)]


SIZES = (
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "moe_intermediate_size",
    "vocab_size",
)


@pytest.mark.parametrize(
    ("model", "ranks", "sizes"),
    [
        ("llama-3.1-405b-fp8", 8, (16, 1, 128, 6656, None, 16032)),
        ("deepseek-v3", 8, (16, 16, None, 2304, 256, 16160)),
        ("qwen3-30b-a3b-fp8", 2, (16, 2, 128, 3072, 384, 75968)),
        ("glm-4.5-air-fp8", 4, (24, 2, 128, 2736, 352, 37888)),
    ],
)
def test_a_rank_has_its_share_of_a_model(model, ranks, sizes):
    wanted = {name: size for name, size in zip(SIZES, sizes) if size}
    assert latency.overrides(latency.find_model(model), None, ranks) == wanted
    assert latency.overrides(latency.find_model(model), 4, ranks) == {"num_hidden_layers": 4} | wanted
    assert latency.overrides(latency.find_model(model), None, 1) == {}


def test_heads_that_ranks_cannot_share_equally():
    assert latency.overrides(latency.find_model("tiny-llama"), None, 8)["num_key_value_heads"] == 1
    with pytest.raises(SystemExit, match="--rank-of must divide num_attention_heads=8 of tiny-llama, got 3"):
        latency.overrides(latency.find_model("tiny-llama"), None, 3)


HYBRID = json.loads((ROOT / "serving_benchmarks" / "configs" / "qwen3-next-80b-a3b-fp8" / "config.json").read_text())
SHARES = {
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "intermediate_size": 2560,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
    "vocab_size": 75968,
    "head_dim": 256,
}
KINDS = [*["linear_attention"] * 3, "full_attention"] * 12


def folder_of(folder: pathlib.Path, config: dict) -> pathlib.Path:
    """Return the folder, with a config.json."""
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("kinds", [{}, {"layer_types": KINDS}], ids=["interval", "list"])
def test_a_rank_has_its_share_of_a_hybrid_model(tmp_path, kinds):
    """Its layers are the model's first, of the same kinds, also where the language model's configuration is nested."""
    layers = {"layer_types": KINDS[:5], "num_hidden_layers": 5}
    model = folder_of(tmp_path, HYBRID | kinds)
    assert latency.overrides(model, 5, 2) == layers | SHARES
    assert latency.overrides(model, 5, 1) == layers
    with pytest.raises(SystemExit, match="--rank-of must divide linear_num_key_heads=6 of .*, got 4"):
        latency.overrides(folder_of(tmp_path, HYBRID | {"linear_num_key_heads": 6}), None, 4)
    folder_of(tmp_path, {"text_config": HYBRID | kinds, "vision_config": {"num_attention_heads": 3}})
    assert latency.overrides(model, 5, 2) == {"text_config": layers | SHARES}
    assert latency.overrides(model, None, 1) == {}
    folder_of(tmp_path, {"text_config": HYBRID | {"shared_expert_intermediate_size": 513}})
    with pytest.raises(SystemExit, match="--rank-of must divide shared_expert_intermediate_size=513 of .*, got 2"):
        latency.overrides(model, None, 2)


def test_changes_are_merged():
    changes = {"text_config": {"vocab_size": 8}, "dtype": "half"}
    assert latency.merged(changes, {"text_config": {"hidden_size": 2}, "rope": {"type": "yarn"}}) == {
        "text_config": {"vocab_size": 8, "hidden_size": 2},
        "dtype": "half",
        "rope": {"type": "yarn"},
    }


def test_a_multimodal_model_runs_as_its_text_model():
    """Its processor of images would need a tokenizer. Layers that are not quantized have the text model's names."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(latency.CONFIGS / "qwen3.5-397b-a17b-fp8")
    text = latency_worker.text_config({"text_config": {"num_hidden_layers": 2}}, config)
    assert (text.model_type, text.architectures) == ("qwen3_5_moe_text", ["Qwen3_5MoeForCausalLM"])
    assert text.num_hidden_layers == 2 and text.rope_parameters["mrope_section"] == [11, 11, 10]
    assert "model.layers.0.linear_attn.in_proj_a" in text.quantization_config["modules_to_not_convert"]


def test_drafts_have_the_sizes_of_the_rank():
    """An MTP layer is after the whole model's layers, as DeepSeek's first ones have no experts."""
    from transformers import Qwen3_5MoeConfig

    nested = {"layer_types": KINDS[:5], "num_hidden_layers": 5} | SHARES
    changes = {"text_config": nested, "num_hidden_layers": 5, "layer_types": KINDS[:5], "rope": {"type": "yarn"}}
    for of_drafts in (False, True):
        config = Qwen3_5MoeConfig()
        if of_drafts:
            config.update({"n_predict": 1, "num_hidden_layers": 40})
        assert latency_worker.change(changes, config) is config
        text = config.text_config
        assert {name: getattr(text, name) for name in SHARES} == SHARES and config.rope == {"type": "yarn"}
        assert text.num_hidden_layers == config.num_hidden_layers == (40 if of_drafts else 5)
        assert len(text.layer_types) == (40 if of_drafts else 5)


def run(folder: pathlib.Path, *arguments: str) -> tuple[subprocess.CompletedProcess, dict]:
    """Run the script as a user does, with few and short iterations."""
    few = ["--output-len", "4", "--num-iters", "2", "--num-iters-warmup", "1", "--enforce-eager"]
    files = ["--output-json", str(folder / "latency.json"), "--plot", str(folder / "latency.png")]
    result = subprocess.run(
        [sys.executable, str(SCRIPT), *few, *files, *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    logs = "\n".join(log.read_text()[-2000:] for log in folder.glob("logs/*.log"))
    assert (folder / "latency.json").exists(), result.stderr + logs
    return result, json.loads((folder / "latency.json").read_text())


@full
@pytest.mark.slow
def test_a_model_runs_on_both_sides(tmp_path):
    result, found = run(tmp_path, "--model", "tiny-llama", "--batch-size", "1", "2", "--profile", "2")
    assert result.returncode == 0, result.stdout
    assert [(r["side"], r["batch_size"]) for r in found["results"]] == [
        *(("without", 1), ("without", 2), ("with", 1), ("with", 2))
    ]
    assert all(len(r["latencies"]) == 2 and r["decode_ms_per_token"] > 0 for r in found["results"])
    assert all(len(r["iterations"]["host_us"]) == 2 and r["host_us"] > 0 for r in found["results"])
    without, with_ops = found["runs"]
    added = {name: with_ops["start"][name] - value for name, value in without["start"].items()}
    assert added["kv_blocks"] == 0 and added["load_s"] < 30 and added["warm_up_s"] < 30, added
    assert added["load_peak_bytes"] < 256 << 20 and min(without["start"].values()) > 0, added
    assert "op_stats" not in without
    assert without["profile"] == with_ops["profile"] == {}  # no GPU
    assert {"fused_add_rms_norm", "silu_and_mul"} <= set(with_ops["op_stats"])
    assert {seam["name"] for seam in with_ops["seams"] if seam["on"]} >= {"norm", "activation"}
    assert with_ops["timings"] == []  # no GPU
    assert with_ops["reach"]["norms"]["taken"] and not with_ops["reach"]["norms"]["missed"]
    assert (tmp_path / "latency.png").stat().st_size > 10_000
    assert "tiny-llama: no kernel of the plugin ran" in result.stdout


@full
@pytest.mark.slow
def test_a_model_runs_with_drafts(tmp_path):
    """A step has all drafts of a request; an MTP layer has the sizes of the rank. On CPU vLLM accepts by the weights alone."""
    arguments = ["--batch-size", "2", "--drafts", "3", "--accepted", "1", "--output-len", "64", "--side", "with"]
    result, found = run(tmp_path, "--model", "tiny-deepseek-v3", "--num-layers", "2", "--rank-of", "2", *arguments)
    assert result.returncode == 0, result.stdout
    [measured] = found["results"]
    assert 7 < measured["rows_per_step"] <= 8
    assert 0.9 < measured["ms_per_step"] / measured["decode_ms_per_token"] < 4  # tokens of a request
    assert "step at batch 2, rows" in result.stdout


@full
@pytest.mark.slow
def test_a_side_that_fails_is_reported(tmp_path):
    """Three query heads cannot share two key-value heads."""
    overrides = json.dumps({"hf_overrides": {"num_attention_heads": 3}})
    result, found = run(tmp_path, "--model", "tiny-llama", "--side", "with", "--engine-args", overrides)
    assert result.returncode == 1
    assert "failed with vLLM + vllm-rocm-ops" in result.stdout and found["results"] == []


NEEDS_AVX512 = pytest.mark.skipif(
    not torch.cuda.is_available() and torch.backends.cpu.get_cpu_capability() != "AVX512",
    reason="vLLM's FP8 cache on CPU needs AVX-512",
)


HEADS = {"num_key_value_heads": 2, "head_dim": 64}


@full
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "layers", "overrides", "op"),
    [
        ("llama-3.1-405b-fp8", 2, HEADS, "silu_and_mul_quant"),
        pytest.param("llama-3.1-405b-fp8-kv", 2, HEADS, "silu_and_mul_quant", marks=NEEDS_AVX512),
        ("deepseek-v3", 4, {"num_key_value_heads": 8, "moe_intermediate_size": 128}, "silu_and_mul_per_block_quant"),
        ("qwen3-8b-fp8", 2, HEADS, "block_scaled_mm"),
        ("qwen3-30b-a3b-fp8", 2, HEADS | {"num_experts": 16}, "fused_experts"),
        ("glm-4.5-air-fp8", 2, HEADS | {"n_routed_experts": 16}, "grouped_topk"),
        ("gpt-oss-120b", 2, {"num_key_value_heads": 2, "num_local_experts": 16, "eos_token_id": 2}, "fused_experts"),
    ],
)
def test_real_configurations_run(tmp_path, model, layers, overrides, op):
    """They are shrunk, with the same kinds of layers: the quantized ops are called."""
    cache = {"kv_cache_dtype": "fp8"} if model.endswith("-kv") else {}
    engine_args = json.dumps({"hf_overrides": SHRUNK | overrides} | cache)
    arguments = ["--num-layers", str(layers), "--side", "with", "--random-experts", "--engine-args", engine_args]
    strided = ["--strided"] if model.startswith("gpt-oss") else []
    result, found = run(tmp_path, "--model", model, *arguments, *strided)
    assert result.returncode == 0, result.stdout
    assert op in found["runs"][0]["op_stats"]


def test_random_routers_spread_tokens(monkeypatch):
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    monkeypatch.setattr(DummyModelLoader, "load_weights", DummyModelLoader.load_weights)  # importing replaces it
    for method in ("load_model", "compile_or_warm_up_model"):  # the module times these, if it is imported first
        monkeypatch.setattr(WorkerWrapperBase, method, vars(WorkerWrapperBase).get(method), raising=False)
    random_experts = importlib.import_module("random_experts")
    layer = torch.nn.ModuleDict({name: torch.nn.Linear(64, 256, bias=False) for name in ("gate", "gate_proj")})
    layer["gate"].e_score_correction_bias = torch.nn.Parameter(torch.randn(256))
    kept = layer["gate_proj"].weight.clone()
    model = torch.nn.ModuleList([layer, copy.deepcopy(layer)])
    random_experts.spread(model)
    assert torch.equal(layer["gate_proj"].weight, kept)
    gates = [layer["gate"] for layer in model]
    assert not torch.equal(gates[0].weight, gates[1].weight) and not any(
        gate.e_score_correction_bias.any() for gate in gates
    )
    tokens = torch.randn(8, 64, generator=torch.Generator().manual_seed(100))
    assert all(0.9 < gate(tokens).std() < 1.1 for gate in gates)
    hit = [(gate(tokens) + gate.e_score_correction_bias).topk(8).indices.unique().numel() for gate in gates]
    assert min(hit) > 50, hit  # 57 of 256 if each token chose at random
