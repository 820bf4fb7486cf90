"""Tiny checkpoints, and engines that run them in new processes."""

import itertools
import json
import pathlib

import checkpoints
import processes
import torch

HERE = pathlib.Path(__file__).parent
STEPS = 8
LOADED = "Directly load AOT compilation"
"""In the output of a start with code that vLLM compiled in an earlier one."""
FLAVOURS = {
    # Seeds of the prompts, found with plain.py: in every step the best token leads by at least 3 in log probability.
    # Rounding noise, which is below 1, then changes no token.
    ("llama", "bf16"): (12, 22, 43),
    ("llama", "static"): (79, 153, 199),
    ("llama", "token"): (22, 43, 79),
    ("llama", "bounded"): (100, 413, 640),
    ("llama", "block"): (7, 83, 193),
    ("llama", "mxfp8"): (43, 79, 87),
    ("llama", "int4"): (11, 94, 111),
    ("deepseek", "bf16"): (22, 104, 175),
    ("llama", "online"): (22, 43, 79),
    ("deepseek", "online"): (34, 54, 104),
    ("deepseek", "block"): (4, 5, 8),
}
FAMILIES = {
    # The same for models that plain.py lacks: found in vLLM without the plugin.
    ("mistral", "token"): (79, 153, 157),
    ("qwen2", "token"): (43, 75, 156),
    ("qwen3", "token"): (79, 139, 157),
    ("qwen2_moe", "mixed"): (58, 73, 123),
    ("qwen3_moe", "mixed"): (43, 49, 66),
    ("glm4_moe", "mixed"): (170, 265, 299),
    ("mixtral", "mixed"): (13, 62, 140),
    ("minimax_m2", "mixed"): (249, 750, 1255),  # at the choice of experts, its router's logits also differ by 0.02
    ("gemma3_text", "token"): (59, 83, 114),
    ("deepseek_v2", "mixed"): (28, 33, 61),
    ("kimi_k2", "mixed"): (72, 75, 169),
    ("deepseek_v3", "mixed"): (16, 34, 54),
}
DELTA_NETS = {
    # The same for models that need delta_net.py in vLLM's CPU build
    ("qwen3_next", "mixed"): (80, 173, 212),
    ("qwen3_5_text", "block"): (26, 82, 119),
    ("qwen3_5_text", "static"): (38, 72, 119),
    ("qwen3_5_moe_text", "mixed"): (100, 244, 366),
}
FOUR_BIT_EXPERTS = {
    # Experts in INT4 or MXFP4, with the seeds of "mixed": no lead was looked for.
    ("qwen3_moe", "int4_experts"): (43, 49, 66),
    ("kimi_k2", "int4_experts"): (72, 75, 169),
    ("kimi_k2", "mxfp4_experts"): (72, 75, 169),
    ("gpt_oss", "mxfp4_experts"): (43, 49, 66),
}
NOT_COMPILED = ("bounded", "online")
"""Kinds that run eagerly only: compiled, they are like "token"."""
STORED = {"online": "bf16"}
"""The kinds of the checkpoints that vLLM quantizes when it loads them, by `--quantization fp8_per_channel`."""
BASELINE = [("llama", "bf16"), ("llama", "token"), ("deepseek", "bf16")]
"""Models that vLLM's CPU build runs without the plugin."""


def identity(value: str | tuple[str, ...]) -> str:
    """Return a name for a flavor, or the value if it is one already."""
    return value if isinstance(value, str) else "-".join(value)


FORKED = """
import multiprocessing
from vllm.v1.executor import multiproc_executor
multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")
"""
"""Start workers by a fork, as on a GPU by default.

On CPU vLLM spawns them, which takes long.
"""


def prompts(flavour: tuple[str, str]) -> list[list[int]]:
    """Return the prompts for a model in a flavor."""
    plain = flavour[0], flavour[1].removesuffix("_plain")
    return prompts_of((FLAVOURS | FAMILIES | DELTA_NETS | FOUR_BIT_EXPERTS)[plain])


def prompts_of(seeds: tuple[int, ...]) -> list[list[int]]:
    """Return a prompt for each seed."""
    result = []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        length = int(torch.randint(4, 40, (), generator=generator))
        result.append(torch.randint(3, checkpoints.LLAMA["vocab_size"], (length,), generator=generator).tolist())
    return result


def counted(stats: dict[str, dict[str, int]]) -> dict[str, int]:
    """Return how often each op ran, by any kernel."""
    return {op: sum(kernels.values()) for op, kernels in stats.items()}


class Engines:
    """Build checkpoints on demand, and run vLLM on them."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self.number = itertools.count()

    def checkpoint(self, flavour: tuple[str, str]) -> pathlib.Path:
        """Return the folder of a model's checkpoint."""
        flavour = flavour[0], STORED.get(flavour[1], flavour[1])
        path = self.folder / identity(flavour)
        return path if path.exists() else checkpoints.build(path, *flavour)

    def job(self, flavour: tuple[str, str], compiled: bool = False, **options) -> dict:
        """Return a job of engine.py, without vLLM's in-place rotary op for CPU, which is wrong for MLA."""
        engine = {} if compiled else {"enforce_eager": True}
        engine["compilation_config"] = {"custom_ops": ["none" if compiled else "all", "-rotary_embedding"]}
        if flavour[1] == "bounded":
            engine["allow_deprecated_quantization"] = True
        if flavour[1] in STORED:
            engine["quantization"] = "fp8_per_channel"
        made = {"max_tokens": STEPS, "logprobs": None if compiled else 1, "engine": engine, **options}
        if "prompts" not in made:
            made["prompts"] = prompts(flavour)
        if "model" not in made:
            made["model"] = str(self.checkpoint(flavour))
        return made

    def run(
        self,
        jobs: dict[str, dict],
        before: str = "",
        cache: str = "cache",
        vllm: pathlib.Path | None = None,
        generates: bool = False,
        **environment: str,
    ) -> dict[str, dict]:
        """Run the jobs in order in one new process, with the installed vLLM or another package of it.

        Its output is in the answers under "output". Without a GPU, compiled models go through vLLM's passes (passes.py),
        and then run node by node unless Inductor `generates` code.
        """
        number = next(self.number)
        request, answers = self.folder / f"jobs-{number}.json", self.folder / f"answers-{number}.json"
        compiled = any(not job["engine"].get("enforce_eager") for job in jobs.values())
        if compiled and not torch.cuda.is_available():
            before = f"import passes; passes.install(generates={generates})\n{before}"
        if compiled and not generates:
            environment = {"VLLM_USE_AOT_COMPILE": "0", "VLLM_DISABLE_COMPILE_CACHE": "1"} | environment
        request.write_text(json.dumps({"before": before, "jobs": jobs}))
        base = {
            "HF_HUB_OFFLINE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CACHE_ROOT": str(self.folder / cache),
            "TORCHINDUCTOR_CACHE_DIR": str(self.folder / cache / "inductor"),
            "TORCHDYNAMO_DISABLE": "0" if compiled else "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "INFO",
        }
        code = f"import engine; engine.main({str(request)!r}, {str(answers)!r})"
        folders = [*([vllm.parent] if vllm else []), HERE.parents[1], HERE.parent, HERE]
        output = processes.run(code, *folders, imported=vllm is None, **base | environment)
        result = json.loads(answers.read_text())
        failed = [answer["error"] for answer in result.values() if "error" in answer]
        assert not failed, failed[0] + output[-4000:]
        return {**result, "output": output}

    def run_one(self, job: dict, **how) -> dict:
        """Run one job, and return its answer with the output."""
        answers = self.run({"it": job}, **how)
        return answers["it"] | {"output": answers["output"]}
