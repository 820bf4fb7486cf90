"""Run vLLM in a new process, which calls `main`, with one model per job.

The engine lives in this process, so a model takes about half a second, the batches are always the same, and the ops'
statistics are accessible.
"""

import contextlib
import gc
import json
import os
import traceback
from unittest import mock

TURN = "turn"


def generate(job: dict) -> dict:
    """Load a model, generate greedily, and report tokens, log probabilities and the ops' statistics.

    `job["max_tokens"]` is one number, or one for each prompt. Then generate once more for each step of `job["then"]`:
    after what `prepare` does, whose error takes the tokens' place, or with the LoRA adapter of a folder.
    `job["environment"]` is set for this job and those after it. With `job["frames"]` the answer has the package's
    functions that one decode step enters, with counts.
    """
    import rows
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    import vllm_rocm_ops
    from vllm_rocm_ops.vllm import seam

    options = {
        "skip_tokenizer_init": True,
        "max_model_len": 256,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 256,
        "dtype": job.get("dtype", "bfloat16"),
        "seed": 0,
        "distributed_executor_backend": "uni",
        "gpu_memory_utilization": 0.3,
        "kv_cache_memory_bytes": 32 << 20,
        "worker_extension_cls": "vllm_rocm_ops.vllm.worker.Extension",
    }
    os.environ |= job.get("environment", {})
    if job.get("engine", {}).get("speculative_config"):
        options["disable_log_stats"] = False  # the drafts are counted there
    with rows.counted() as captured_rows:
        llm = LLM(model=job["model"], **options | job.get("engine", {}))
    limits = job["max_tokens"]
    greedy = {"temperature": 0, "ignore_eos": True, "detokenize": False, "logprobs": job.get("logprobs")}
    sampling = [
        SamplingParams(max_tokens=limit, **greedy)
        for limit in (limits if isinstance(limits, list) else [limits] * len(job["prompts"]))
    ]
    prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    captured = llm.collective_rpc("vllm_rocm_ops_stats")
    llm.collective_rpc("vllm_rocm_ops_reset_stats")
    with emulated(job.get("emulate")), faulty(job.get("fault")), rows.counted() as called:
        finished = llm.generate(prompts, sampling, use_tqdm=False)
    outputs = [request.outputs[0] for request in finished]
    stats, *other_ranks = llm.collective_rpc("vllm_rocm_ops_stats")
    fallbacks = llm.collective_rpc("vllm_rocm_ops_fallbacks")
    then, then_logprobs, cached = [], [], 0
    for step in job.get("then", ()):
        adapter = LoRARequest("adapter", 1, step) if is_folder(step) else None
        if adapter is None and (refused := prepare(llm, step)):
            then.append(refused)
            continue
        asked = [continued(*turn) for turn in zip(finished, job["turns"])] if step == TURN else prompts
        requests = llm.generate(asked, sampling, use_tqdm=False, lora_request=adapter)
        then.append([list(request.outputs[0].token_ids) for request in requests])
        then_logprobs.append([chosen(request.outputs[0]) for request in requests])
        cached = sum(request.num_cached_tokens or 0 for request in requests)
    entered = frames_of_a_step(llm, prompts) if job.get("frames") else {}
    worker = getattr(getattr(llm.llm_engine, "model_executor", None), "driver_worker", None)
    model = worker and worker.worker.model_runner.model
    answer = {
        "tokens": [list(output.token_ids) for output in outputs],
        "logprobs": [chosen(output) for output in outputs],
        "then": then,
        "then_logprobs": then_logprobs,
        "cached": cached,
        "captured": captured,
        "stats": stats,
        "frames": entered,
        "other_ranks": other_ranks,
        "fallbacks": fallbacks,
        "reach": llm.collective_rpc("vllm_rocm_ops_reach")[0] if model else {},
        "choices": llm.collective_rpc("vllm_rocm_ops_choices"),
        "seams": {entry.name: entry.reason if not entry.on else "on" for entry in seam.status()},
        "captured_rows": captured_rows,
        "rows": called,
        **drafts(llm, bool(job.get("engine", {}).get("speculative_config"))),
        "classes": sorted({type(module).__name__ for module in model.modules()}) if model else [],
        "version": vllm_rocm_ops.__version__,
    }
    if model is None:  # it is in other processes, whose workers end with the engine
        llm.llm_engine.engine_core.shutdown()
    else:  # the next job's captures are counted alone
        llm.collective_rpc("vllm_rocm_ops_reset_stats")
    del worker, model, llm
    release()
    return answer


def chosen(output) -> list[float]:
    """Return the log probabilities of an output's tokens, if they were asked for."""
    return [step[token].logprob for step, token in zip(output.logprobs or (), output.token_ids)]


def continued(request, turn: list[int]) -> dict:
    """Return a prompt that has a request's prompt, its answer, and what follows in another turn."""
    return {"prompt_token_ids": [*request.prompt_token_ids, *request.outputs[0].token_ids, *turn]}


def is_folder(step: str | list) -> bool:
    return isinstance(step, str) and os.path.isabs(step)


def prepare(llm, step: str | list) -> str | None:
    """Do what a step asks for before it generates, and return vLLM's error.

    "again" does nothing, nor `TURN`, after which prompts go on by `job["turns"]`; "reload" loads the weights that were loaded last, and a
    list is an `update`. "sleep 1" and "sleep 2" put the engine to sleep and wake it; level 2 drops the weights, which are loaded again.
    """
    if isinstance(step, list):
        return update(llm, *step)
    if step.startswith("sleep"):
        with mock.patch("torch.accelerator.get_memory_info", lambda *_: (0, 0)):  # vLLM knows of no other engine
            llm.sleep(level=int(step[-1]))
        llm.wake_up(tags=["weights"])
    if step in ("reload", "sleep 2"):
        llm.collective_rpc("reload_weights")
    if step.startswith("sleep"):
        llm.wake_up(tags=["kv_cache"])
    return None


def update(llm, how: str, path: str) -> str | None:
    """Give a model in use the weights of a file, as trainers do, and return vLLM's error.

    They come as a path or as tensors, of a checkpoint or "in kernel format", or the model loads them "in place".
    """
    from safetensors.torch import load_file

    weights = list(load_file(path).items())
    try:
        if how == "in place":
            llm.llm_engine.model_executor.driver_worker.worker.model_runner.model.load_weights(weights)
        elif how == "as a path":
            llm.collective_rpc("reload_weights", kwargs={"weights_path": os.path.dirname(path)})
        else:
            of_checkpoint = how == "as tensors"
            given = {"weights_iterator": weights, "is_checkpoint_format": of_checkpoint}
            llm.collective_rpc("reload_weights", kwargs=given)
    except Exception as error:  # noqa: BLE001  the test compares it
        return f"{type(error).__name__}: {error}"
    return None


def frames_of_a_step(llm, prompts: list[dict]) -> dict[str, int]:
    """Return the functions that a generation of one more token enters, with counts."""
    import frames
    from vllm import SamplingParams

    def generate(tokens: int) -> None:
        llm.generate(prompts, SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False), use_tqdm=False)

    fewer, more = (frames.entered(lambda tokens=tokens: generate(tokens)) for tokens in (3, 4))
    return dict(more - fewer)


def drafts(llm, made: bool) -> dict[str, int]:
    """Return the number of tokens that were drafted and accepted, if drafts were made."""
    metrics = {one.name: one for one in llm.get_metrics()} if made else {}
    names = {"drafted": "draft", "accepted": "accepted"}
    return {what: made and metrics[f"vllm:spec_decode_num_{name}_tokens"].value for what, name in names.items()}


@contextlib.contextmanager
def emulated(arch: str | None):
    """Make the ops run `arch`'s code objects in the emulator."""
    if arch is None:
        yield
        return
    from vllm_rocm_ops.core import launch
    from vllm_rocm_ops.emulator import Emulator

    with launch.executor(Emulator(arch)):
        yield


@contextlib.contextmanager
def faulty(fault: dict | None):
    """Make the reference of one op wrong: `fault["make"]` is the source of a function from the exact one to another."""
    if fault is None:
        yield
        return
    import torch

    from vllm_rocm_ops import ops

    op = getattr(ops, fault["op"])
    exact = op.reference
    op.reference = eval(fault["make"], {"torch": torch})(exact)
    try:
        yield
    finally:
        op.reference = exact


freeze = gc.freeze


def multiply_float8_by_float32() -> object:
    """Make PyTorch's slow FP8 product on CPU one of float32, which is exact for e4m3, and return what keeps it so."""
    import torch

    def scaled_mm(a, b, scale_a, scale_b, bias=None, scale_result=None, out_dtype=None, use_fast_accum=False):
        product = a.float() @ b.float() * scale_a * scale_b
        return (product if bias is None else product + bias).to(out_dtype or a.dtype)

    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_mm", scaled_mm, "CPU", allow_override=True)
    return library


def release() -> None:
    """Release a model, so that the next one starts as in a new process."""
    import torch
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    from vllm_rocm_ops.vllm.selection import kernel_selection

    kernel_selection.invalidate()
    gc.collect()
    cleanup_dist_env_and_memory()
    torch._dynamo.reset()
    freeze()


def main(jobs_path: str, answers_path: str) -> None:
    # Keep modules out of collections, also when vLLM, which collects often, thaws its own: that took most of the time.
    gc.freeze = gc.unfreeze = lambda: None
    with open(jobs_path) as file:
        request = json.load(file)
    product = multiply_float8_by_float32()  # noqa: F841  until the process ends
    if request.get("before"):
        exec(request["before"], {})  # noqa: S102  a test's own preparation
    from vllm import LLM  # noqa: F401
    from vllm.model_executor.models import registry

    freeze()
    # vLLM inspects a model's class in a new process, which takes seconds; test_serve.py has it do so.
    registry._run_in_subprocess = lambda look: look()
    answers = {}
    for name, job in request["jobs"].items():
        try:
            answers[name] = generate(job)
        except Exception:  # noqa: BLE001  the caller shows it; an engine that failed spoils the process
            answers[name] = {"error": traceback.format_exc()}
            break
    with open(answers_path, "w") as file:
        json.dump(answers, file)
