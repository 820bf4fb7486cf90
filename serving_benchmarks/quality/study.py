"""Run checkpoints of trained models in vLLM, for quality.py and arithmetic.py: options, jobs, processes and the engine."""

import argparse
import json
import pathlib
import subprocess
import sys

import trained

from vllm_rocm_ops.tools.bench import report

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "serving_benchmarks"))
import latency

sys.path.pop()


def parser(doc: str, output: str) -> argparse.ArgumentParser:
    """Return a parser with the options that select checkpoints, how vLLM runs them, and where results go."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, models = parser.add_argument, list(trained.KINDS)
    kinds = list(dict.fromkeys(kind for model in models for kind in trained.KINDS[model]))
    add("--model", nargs="+", choices=models, default=models, help="models (default: all)")
    add("--kind", nargs="+", choices=kinds, default=kinds, help="quantizations (default: all of a model)")
    add("--engine-args", type=json.loads, default={}, metavar="JSON", help="further arguments for vllm.LLM")
    add("--folder", type=pathlib.Path, default=trained.cache(), help="checkpoint folder (default: %(default)s)")
    add("--output", type=pathlib.Path, help=f".jsonl file to append lines to{output}")
    add("--commit", default=report.commit(), help="commit of the code (default: the checkout's)")
    add("--worker", type=pathlib.Path, help=argparse.SUPPRESS)
    return parser


def jobs(arguments: argparse.Namespace, *options: str) -> dict[str, dict]:
    """Return the jobs of the selected checkpoints, which are written if missing, by model-kind, with these options."""
    common = {name: getattr(arguments, name) for name in (*options, "engine_args")} | {"folder": str(arguments.folder)}
    names = [(model, kind) for model in arguments.model for kind in trained.KINDS[model] if kind in arguments.kind]
    return {
        f"{model}-{kind}": common | {"model": str(trained.checkpoint(model, kind, arguments.folder))}
        for model, kind in names
    }


def run_worker(script: str, side: str, request: object, path: pathlib.Path, **variables: str) -> tuple[int, str]:
    """Run a command's worker on a request, which goes to a file. Return the exit status and the end of its log."""
    path.write_text(json.dumps(request))
    command, log = [sys.executable, script, "--worker", str(path)], path.with_suffix(".log")
    defaults = {"VLLM_ROCM_OPS_MEASURE": "0", "VLLM_ROCM_OPS_ON_NVIDIA": "1"} | variables
    defaults["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # the process has opened its GPU before vLLM starts ranks
    with log.open("a") as output:
        streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
        ended = subprocess.run(command, check=False, env=defaults | latency.environment(side), **streams)
    return ended.returncode, log.read_text(errors="replace")[-4000:]


# In vLLM's process


def engine(job: dict, **settings):
    """Return vLLM's engine of a job."""
    from vllm import LLM
    from vllm.platforms import current_platform

    common = {"model": job["model"], "skip_tokenizer_init": True, "enable_prefix_caching": False, "dtype": "bfloat16"}
    common |= {"seed": 0, "distributed_executor_backend": "uni", "gpu_memory_utilization": 0.3}
    common["allow_deprecated_quantization"] = True  # fbgemm
    if current_platform.is_cpu():  # vLLM's eager rotation for CPU is wrong for MLA
        settings |= {"enforce_eager": True, "compilation_config": {"custom_ops": ["all", "-rotary_embedding"]}}
    return LLM(**common | settings | job["engine_args"])


def sequences(job: dict, tokens: int) -> list[list[int]]:
    """Return held-out sequences with this number of tokens in total."""
    return trained.windows(tokens, trained.held_out(pathlib.Path(job["folder"]))).tolist()
