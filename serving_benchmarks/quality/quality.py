"""Compare the quality of small trained models in vLLM with and without the plugin: perplexity and greedy tokens.

    python serving_benchmarks/quality/quality.py [--model llama deepseek] [--kind block ...] [--tokens 65536] [--output FILE.jsonl]

The models are trained once if the checkpoint folder lacks them (trained.py), in some minutes on one core or on a GPU. Each side runs in a
separate process on the same held-out text, and vLLM returns the log probability of every token. A checkpoint is correct if

- the perplexities of the two sides differ by at most 0.1 % with static scales, and 0.3 % with dynamic ones;
- no layer's scale is wrong by more than 1 %, with certainty. Near its optimum a model's perplexity hardly depends on a scale, but the log
  probabilities of single tokens do. PyTorch computes the effect of each layer's scale on them, and a least squares fit finds it in the
  differences between the sides.

Each model has separate processes; --at-once of them run in parallel, on a GPU all.

A step has at most --step-tokens tokens, by default 16, so that ops for few tokens run too. VLLM_ROCM_OPS_MEASURE defaults to 0: the plugin
then serves every supported call. On a CPU the plugin needs VLLM_ROCM_OPS_ON_CPU=1. Each checkpoint appends a line of JSON to the output.
Returns 1 if a checkpoint is wrong.
"""

import argparse
import concurrent.futures
import json
import math
import pathlib
import sys
import tempfile
import traceback
from collections.abc import Iterator

import study
import torch
import trained
from torch import Tensor
from trained import WINDOW

sys.path.append(str(study.ROOT / "serving_benchmarks"))
import latency_report
import latency_worker

sys.path.pop()
MAX_OFF = {"bf16": 0.001, "static": 0.001}
MAX_OFF_DYNAMIC = 0.003  # of the perplexity, with dynamic scales
MAX_SCALE_ERROR = 0.01
CERTAIN = 5  # standard errors
PROMPT, GENERATED, REQUESTS = 64, 64, 32


# In the measuring process


def answer(job: dict, with_ops: bool) -> dict:
    """Return the log probability of each token after the first, and the greedy continuations of prompts."""
    from vllm import SamplingParams
    from vllm.platforms import current_platform

    step_tokens = job["step_tokens"] or (WINDOW if current_platform.is_cpu() else 16)
    settings = {
        "max_model_len": WINDOW + GENERATED,
        "max_num_batched_tokens": max(step_tokens, WINDOW + GENERATED) if current_platform.is_cpu() else step_tokens,
        "max_num_seqs": min(step_tokens, 16),
        "kv_cache_memory_bytes": 64 << 20,
        "enforce_eager": job["enforce_eager"],
    }
    if with_ops:
        settings["worker_extension_cls"] = "vllm_rocm_ops.vllm.worker.Extension"
    llm = study.engine(job, **settings)
    if with_ops:
        llm.collective_rpc("vllm_rocm_ops_reset_stats")
    sequences = study.sequences(job, job["tokens"])
    once = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, detokenize=False)
    read = llm.generate([{"prompt_token_ids": tokens} for tokens in sequences], once, use_tqdm=False)
    log_probabilities = [
        [entry[token].logprob for entry, token in zip(request.prompt_logprobs[1:], tokens[1:], strict=True)]
        for request, tokens in zip(read, sequences, strict=True)
    ]
    greedy = SamplingParams(temperature=0, max_tokens=GENERATED, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": tokens[:PROMPT]} for tokens in sequences[:REQUESTS]]
    said = [list(request.outputs[0].token_ids) for request in llm.generate(prompts, greedy, use_tqdm=False)]
    stats = llm.collective_rpc("vllm_rocm_ops_stats")[0] if with_ops else {}
    if not with_ops and "vllm_rocm_ops.vllm" in sys.modules:
        raise RuntimeError("the plugin was loaded on the side without it")
    return {"log_probabilities": log_probabilities, "tokens": said, "stats": stats}


def worker(path: pathlib.Path) -> None:
    """Run jobs until one fails, after which the process is unusable."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    request = json.loads(path.read_text())
    for name, job in request["jobs"].items():
        try:
            result = answer(job, request["side"] == "with")
        except Exception as error:  # noqa: BLE001  a failure is the result
            traceback.print_exc()
            result = {"error": f"{type(error).__name__}: {error}".strip()}
        result |= {"hardware": latency_worker.hardware(), "versions": latency_worker.versions()}
        latency_report.append(pathlib.Path(request["answers"]), {name: result})
        if "error" in result:
            break
        cleanup_dist_env_and_memory()
        torch._dynamo.reset()


# In the process that the user started


def run_side(side: str, jobs: dict[str, dict], folder: pathlib.Path) -> dict[str, dict]:
    """Return the answers of one side. A failed job has an "error", and later jobs a new process."""
    answers: dict[str, dict] = {}
    written, path = (folder / f"{side}-{min(jobs)}.{suffix}" for suffix in ("answers", "json"))
    while left := {name: job for name, job in jobs.items() if name not in answers}:
        _, log = study.run_worker(__file__, side, {"side": side, "jobs": left, "answers": str(written)}, path)
        before = len(answers)
        for line in written.read_text().splitlines() if written.exists() else ():
            answers |= json.loads(line)
        if len(answers) == before:
            raise RuntimeError(f"the process {side} the plugin ended early:\n{log}")
        if "error" in next(reversed(answers.values())):
            print(log, file=sys.stderr, flush=True)
    return answers


def run_sides(jobs: dict[str, dict], folder: pathlib.Path, at_once: int) -> dict[str, dict[str, dict]]:
    """Return the answers of both sides, from `at_once` parallel processes, each with the jobs of a model."""
    models: dict[str, dict[str, dict]] = {}
    for name, job in jobs.items():
        models.setdefault(name.rpartition("-")[0], {})[name] = job
    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        parts = [
            (side, pool.submit(run_side, side, own, folder)) for side in latency_report.SIDES for own in models.values()
        ]
        answers: dict[str, dict[str, dict]] = {side: {} for side in latency_report.SIDES}
        for side, part in parts:
            answers[side] |= part.result()
    return answers


def perplexity(log_probabilities: Tensor) -> float:
    """Return the perplexity."""
    return math.exp(-log_probabilities.mean().item())


def scale_errors(difference: Tensor, effects: dict[str, Tensor]) -> dict[str, tuple[float, float]]:
    """Return by layer the scale error that best explains a difference of log probabilities on its own, and its standard error."""
    errors = {}
    for layer, effect in effects.items():
        effect = effect.double()
        error = (difference * effect).sum() / effect.square().sum()
        # A token with much of the effect draws the fit to itself, and its rest is too small by that share (HC3).
        rest = (difference - error * effect) / (1 - effect.square() / effect.square().sum()).clamp(min=1e-9)
        errors[layer] = error.item(), ((rest * effect).norm() / effect.square().sum()).item()
    return errors


def first_difference(plugin: list[int], baseline: list[int]) -> int:
    """Return the number of equal tokens before the first difference."""
    return next((place for place, pair in enumerate(zip(plugin, baseline)) if pair[0] != pair[1]), len(baseline))


def compare(plugin: dict, baseline: dict, effects: dict[str, Tensor], kind: str) -> dict:
    """Return the differences of two sides' answers, and the faults under "wrong"."""
    plugins, baselines = (torch.tensor(side["log_probabilities"]).double() for side in (plugin, baseline))
    difference, off = plugins - baselines, perplexity(plugins) / perplexity(baselines) - 1
    max_off = MAX_OFF.get(kind, MAX_OFF_DYNAMIC)
    errors, wrong = scale_errors(difference, effects), ["no op ran"] * (not plugin["stats"])
    if not abs(off) <= max_off:
        wrong.append(f"perplexity differs by {off:+.3%}, limit {max_off:.1%}")
    for layer, (error, standard) in errors.items():
        if not abs(error) <= max(MAX_SCALE_ERROR, CERTAIN * standard):
            wrong.append(f"scale of {layer} is off by {error:+.2%}, limit {MAX_SCALE_ERROR:.0%}")
    return {
        "perplexity_off": off,
        "log_probabilities_off": difference.abs().mean().item(),
        "scale_errors": {layer: round(error, 6) for layer, (error, _) in errors.items()},
        "standard_errors": {layer: round(standard, 6) for layer, (_, standard) in errors.items()},
        "tokens_equal": sum(map(first_difference, plugin["tokens"], baseline["tokens"])),
        "wrong": wrong,
    }


def effects_of_scales(model: str, tokens: int, folder: pathlib.Path) -> dict[str, Tensor]:
    """Return the effects of scales on the tokens of a measurement, cached in the folder."""

    def make() -> dict[str, Tensor]:
        sequences = trained.windows(tokens, trained.held_out(folder))
        return trained.effects_of_scales(model, trained.trained_weights(model, folder), sequences)

    return trained.cached(folder / f"{model}-scales-{tokens}.safetensors", make)


def lines(arguments: argparse.Namespace, sides: dict[str, dict[str, dict]]) -> Iterator[dict]:
    """Yield a line of results for each checkpoint."""
    for name in sides["with"]:
        model, kind = name.rsplit("-", 1)
        plugin, baseline = sides["with"][name], sides["without"][name]
        exact = sides["without"].get(f"{model}-bf16", {})
        line = {
            "op": "quality",
            "case": f"{model} {kind}",
            "shape": {"model": model, "quantization": kind, "tokens": arguments.tokens},
            "gpu": plugin["hardware"].partition(" x ")[2] or "CPU",
            "perplexity": {
                name: perplexity(torch.tensor(side["log_probabilities"]).double())
                for name, side in (("bf16", exact), ("stock", baseline), ("ours", plugin))
                if "log_probabilities" in side
            },
            "greedy_tokens": GENERATED * min(REQUESTS, arguments.tokens // WINDOW),
        }
        if "error" not in plugin | baseline:
            line |= compare(plugin, baseline, effects_of_scales(model, arguments.tokens, arguments.folder), kind)
        else:
            both = (("ours", plugin), ("stock", baseline))
            line["unavailable"] = {name: side["error"] for name, side in both if "error" in side}
            only_plugin = "error" in plugin and "error" not in baseline
            line["wrong"] = [f"with the plugin: {plugin['error']}"] if only_plugin else []
        yield line | {"calls": plugin.get("stats", {}), "versions": plugin["versions"], "commit": arguments.commit}


def text(line: dict) -> str:
    """Format a line of results."""
    named = {"stock": "baseline", "ours": "plugin"}
    values = "  ".join(f"{named.get(name, name)} {value:.4f}" for name, value in line["perplexity"].items())
    parts = [f"{line['case']:18} {values}"]
    if "perplexity_off" in line:
        layer, error = max(line["scale_errors"].items(), key=lambda item: abs(item[1]))
        parts.append(f"{line['perplexity_off']:+.3%}, worst scale {error:+.3%} of {layer}")
        parts.append(f"{line['tokens_equal']} of {line['greedy_tokens']} tokens equal")
    parts += [f"{named[side]} failed: {why}" for side, why in line.get("unavailable", {}).items()]
    return ", ".join(parts) + "".join(f"\n  FAILED: {why}" for why in line["wrong"])


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse and check the options."""
    parser = study.parser(__doc__, " (default: print them)")
    add = parser.add_argument
    add("--tokens", type=int, default=65536, help="number of held-out tokens (default: %(default)s)")
    add("--step-tokens", type=int, help="maximum tokens per engine step (default: 16; on a CPU unlimited)")
    add("--enforce-eager", action="store_true", help="disable compilation and graph capture")
    at_once = 4 if torch.cuda.is_available() else 1
    add("--at-once", type=int, default=at_once, help="parallel processes, which share a GPU (default: %(default)s)")
    add("--only-checkpoints", action="store_true", help="only train and write the checkpoints")
    arguments = parser.parse_args(argv)
    if arguments.tokens < WINDOW:
        parser.error(f"--tokens must be at least {WINDOW}, got {arguments.tokens}")
    return arguments


def main(argv: list[str] | None = None) -> int:
    """Run the comparison. Returns 1 if a checkpoint is wrong."""
    arguments = parse(argv)
    if arguments.worker:
        worker(arguments.worker)
        return 0
    jobs = study.jobs(arguments, "tokens", "step_tokens", "enforce_eager")
    if arguments.only_checkpoints:
        return 0
    with tempfile.TemporaryDirectory() as folder:
        sides = run_sides(jobs, pathlib.Path(folder), arguments.at_once)
    wrong = False
    for line in lines(arguments, sides):
        print(text(line), flush=True)
        wrong |= bool(line["wrong"])
        if arguments.output:
            latency_report.append(arguments.output, line)
        else:
            print(json.dumps(line))
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
