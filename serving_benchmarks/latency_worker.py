"""Measure decode in the process of one engine, for latency.py: `python latency_worker.py JOB`, with a job in JSON."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import decode_profile
from latency import LISTS, merged


def host_us() -> float:
    """Time a fixed Python loop in microseconds, to gauge the host's speed."""
    start = time.perf_counter()
    for _ in range(20_000):
        pass
    return 1e6 * (time.perf_counter() - start)


def change(changes: dict, config, of_drafts: bool | None = None):
    """Apply changes to a configuration of transformers. A draft model's (MTP) keeps its own number and list of layers."""
    of_drafts = hasattr(config, "n_predict") if of_drafts is None else of_drafts
    for name, value in changes.items():
        nested = getattr(config, name, None)
        if isinstance(value, dict) and hasattr(nested, "to_dict"):
            change(value, nested, of_drafts)
        elif not (of_drafts and name in ("num_hidden_layers", *LISTS)):
            setattr(config, name, value)
    return config


def text_config(changes: dict, config):
    """Return a configuration with changes, of the text model alone if vLLM has a class for it: images need a tokenizer."""
    from vllm import ModelRegistry

    config = change(changes, config)
    text = config.get_text_config()
    mapped = [name.replace("ForConditionalGeneration", "ForCausalLM") for name in config.architectures or ()]
    if text is config or not {*mapped} <= {*ModelRegistry.get_supported_archs()}:
        return config
    quantization = json.dumps(getattr(config, "quantization_config", None)).replace("model.language_model.", "model.")
    text.architectures, text.quantization_config = mapped, json.loads(quantization)
    return text


def use_strided_layout() -> None:
    """Have vLLM leave MXFP4 weights in `StridedLayout`, as on AMD GPUs, where Hopper's would be swizzled."""
    from vllm.model_executor.layers.quantization.utils import mxfp4_utils

    mxfp4_utils.is_torch_equal_or_newer = lambda release: False


class StepCounter:
    """Counts the decode steps of an engine since a request last got its first token.

    Attributes:
        steps: Their number.
        rows: The sum of their rows, one per request and one per draft token.
    """

    def __init__(self, engine) -> None:
        self.steps = self.rows = 0
        self._record, engine.logger_manager.record = engine.logger_manager.record, self.record

    def record(self, scheduler_stats, iteration_stats, **others) -> None:
        """Count a step, and call the method of vLLM's loggers that this one replaces."""
        self._record(scheduler_stats=scheduler_stats, iteration_stats=iteration_stats, **others)
        if iteration_stats is None:
            return
        if iteration_stats.time_to_first_tokens_iter:
            self.steps = self.rows = 0
        elif requests := len(iteration_stats.inter_token_latencies_iter):
            drafts = scheduler_stats.spec_decoding_stats
            self.steps += 1
            self.rows += requests + (drafts.num_draft_tokens if drafts else 0)


def measure(job: dict, report: Callable[[dict], None]) -> None:
    """Run one model on one side, and report every iteration, every batch size and the final results."""
    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform

    with_ops = job["side"] == "with"
    speculative = job["engine_args"].get("speculative_config", job["drafts"])
    drafts = (speculative or {}).get("num_speculative_tokens", 0)
    longest = job["input_len"] + max(job["output_len"], decode_profile.TOKENS * (1 + drafts) if drafts else 0) + drafts
    settings = {
        "model": job["model"],
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "disable_log_stats": False,  # enables the time stamps
        "max_model_len": -(-longest // 64) * 64,
        "max_num_seqs": max(job["batch_sizes"]),
        "tensor_parallel_size": job["tensor_parallel_size"],
        "dtype": job["dtype"],
        "kv_cache_dtype": job["kv_cache_dtype"],
        "enforce_eager": job["enforce_eager"],
        "seed": job["seed"],
    }
    if job["tensor_parallel_size"] == 1:
        settings["distributed_executor_backend"] = "uni"
    if current_platform.is_cpu():
        settings["gpu_memory_utilization"] = 0.3
    settings["worker_extension_cls"] = f"{'random_experts' if job['random_experts'] else 'engine_start'}.Extension"
    settings |= job["engine_args"]
    changes = merged(job["overrides"], settings.get("hf_overrides", {}))
    settings["hf_overrides"] = functools.partial(
        text_config, changes
    )  # of dictionaries and functions, vLLM applies only the latter to MTP layers
    if speculative:
        if current_platform.is_cpu():  # vLLM cannot accept at random there
            speculative = {name: value for name, value in speculative.items() if "synthetic" not in (name[:9], value)}
        settings["speculative_config"] = speculative
    if job["strided"]:
        use_strided_layout()
    begin = time.perf_counter()
    llm = LLM(**settings)
    start_s = time.perf_counter() - begin
    if not with_ops and "vllm_rocm_ops" in sys.modules:
        raise RuntimeError("the plugin was loaded on the side without it")
    steps = StepCounter(llm.llm_engine)

    vocabulary = llm.llm_engine.model_config.get_vocab_size()

    def sampling(tokens: int) -> SamplingParams:
        temperature = 1.0 if job["random_experts"] else 0.0
        return SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True, detokenize=False)

    def sampling_steps(count: int) -> SamplingParams:
        return sampling(count * (1 + drafts))

    def prompts_of(batch_size: int) -> list[dict]:
        tokens = [[(7 * i + 31 * row + 3) % vocabulary for i in range(job["input_len"])] for row in range(batch_size)]
        return [{"prompt_token_ids": row} for row in tokens]

    report({"hardware": hardware(), "versions": versions()})
    for batch_size in job["batch_sizes"]:
        prompts, latencies, decode, first, host = prompts_of(batch_size), [], [], [], []
        step_ms, step_rows = [], []
        for iteration in range(job["num_iters_warmup"] + job["num_iters"]):
            loop_us = host_us()
            start = time.perf_counter()
            outputs = llm.generate(prompts, sampling(job["output_len"]), use_tqdm=False)
            latency = time.perf_counter() - start
            spans = [output.metrics.last_token_ts - output.metrics.first_token_ts for output in outputs]
            per_token = statistics.median(spans) / (job["output_len"] - 1)
            if iteration >= job["num_iters_warmup"]:
                latencies.append(latency)
                host.append(loop_us)
                decode.append(1e3 * per_token)
                metrics = [output.metrics for output in outputs]
                span = max(each.last_token_ts for each in metrics) - max(each.first_token_ts for each in metrics)
                step_ms.append(1e3 * span / steps.steps)
                step_rows.append(steps.rows / steps.steps)
                first.append(1e3 * statistics.median(output.metrics.first_token_latency for output in outputs))
            report({"batch_size": batch_size, "decode_ms": 1e3 * per_token})
        times = {"latencies": latencies, "decode_ms": decode, "ttft_ms": first, "host_us": host}
        times |= {"step_ms": step_ms, "step_rows": step_rows}
        report({"batch": {"batch_size": batch_size, **times}})
    ranks = llm.collective_rpc("engine_start")
    start = {name: max(rank[name] for rank in ranks) for name in ranks[0]}
    blocks = llm.llm_engine.vllm_config.cache_config.num_gpu_blocks
    result = {"start": {"start_s": start_s, **start, "kv_blocks": blocks}}
    try:
        recorded = ((size, decode_profile.record(llm, prompts_of(size), sampling_steps)) for size in job["profile"])
        result["profile"] = {size: ranks for size, ranks in recorded if ranks}
    except Exception as error:  # noqa: BLE001  the latencies are valid without a profile
        traceback.print_exc()
        result["profile_error"] = f"{type(error).__name__}: {error}".strip()
    if with_ops:
        result["op_stats"] = llm.collective_rpc("vllm_rocm_ops_stats")[0]
        result["seams"] = llm.collective_rpc("vllm_rocm_ops_seams")[0]
        result["reach"] = llm.collective_rpc("vllm_rocm_ops_reach")[0]
        result["timings"] = llm.collective_rpc("vllm_rocm_ops_timings")[0]
    report({"result": result})


def hardware() -> str:
    """Return the number and name of GPUs, or of CPU cores."""
    import torch

    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    cpu = next(
        (line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), ": CPU"
    )
    return f"{len(os.sched_getaffinity(0))} cores of {cpu.partition(': ')[2]}"


def versions() -> dict[str, str]:
    """Return the versions of Python, torch, vLLM, HIP and the plugin."""
    import torch
    import vllm

    names = {"python": sys.version.split()[0], "torch": torch.__version__, "vllm": vllm.__version__}
    return names | {"hip": torch.version.hip or "", "vllm_rocm_ops": importlib.metadata.version("vllm-rocm-ops")}


def start_other_ranks(job: dict, report: Callable[[dict], None]) -> None:
    """Start the other data parallel ranks, with the same job; this process is rank 0, and ends if one fails."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    os.environ |= {"VLLM_DP_SIZE": str(job["data_parallel_size"]), "VLLM_DP_RANK": "0", "VLLM_DP_RANK_LOCAL": "0"}
    os.environ |= {"VLLM_DP_MASTER_IP": "127.0.0.1", "VLLM_DP_MASTER_PORT": str(port)}
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"  # the engine's process keeps idle ranks in step
    others = json.dumps({**job, "pipe": os.devnull, "data_parallel_size": 1})

    def watch(rank: int, process: subprocess.Popen) -> None:
        if process.wait():
            report({"error": f"data parallel rank {rank} ended with {process.returncode}"})
            os._exit(1)

    for rank in range(1, job["data_parallel_size"]):
        own = {"VLLM_DP_RANK": str(rank), "VLLM_DP_RANK_LOCAL": str(rank)}
        process = subprocess.Popen([sys.executable, __file__, others], env=os.environ | own)
        threading.Thread(target=watch, args=(rank, process), daemon=True).start()


def worker(job: dict) -> None:
    """Run a job in a measuring process; events go through a pipe as lines of JSON."""
    with open(job["pipe"], "w", buffering=1) as pipe:

        def report(event: dict) -> None:
            pipe.write(json.dumps(event) + "\n")

        try:
            if job["data_parallel_size"] > 1:
                start_other_ranks(job, report)
            measure(job, report)
        except BaseException as error:  # noqa: BLE001  any failure is the result
            traceback.print_exc()
            report({"error": f"{type(error).__name__}: {error}".strip()})
            sys.exit(1)


if __name__ == "__main__":
    worker(json.loads(sys.argv[1]))
