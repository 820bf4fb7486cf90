"""Test two ranks of vLLM's engine on two GPUs, compiled: tensor, expert and data parallel, with and without the plugin.

All engines run at the same time. Without a GPU, with --full, they run on CPU, eagerly, one after the other. There the
ops are their references, gloo's collectives replace NCCL's, a fake clock measures a Llama's linear layers, and vLLM
without the plugin cannot run blocks of FP8.
"""

import concurrent.futures
import contextlib
import os
import re
import socket
from typing import NamedTuple

import checkpoints
import plain
import pytest
import torch
from engines import FLAVOURS, FORKED, STEPS, prompts_of
from server_load import errors_of

from vllm_rocm_ops.core.stats import FALLBACK
from vllm_rocm_ops.vllm.graph import all_reduce_norm
from vllm_rocm_ops.vllm.selection import kernel_selection

GPUS = torch.cuda.device_count()
ON_GPU = GPUS >= 2
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not ON_GPU and bool(GPUS or not os.environ.get("FULL_TESTS")), reason="needs two GPUs"),
]

TIE, FAR = 1.0, 0.05
"""The allowed gap of a token to the plain model's best one, and the allowed average, in log probability."""


class Tiny(NamedTuple):
    """A checkpoint whose parts have whole blocks on two ranks, and seeds of prompts with clear best tokens."""

    model: str
    kind: str
    sizes: dict[str, int]
    seeds: tuple[int, ...]


LLAMA = Tiny("llama", "token", {}, FLAVOURS["llama", "token"])
DEEPSEEK = Tiny("deepseek", "block", {"moe_intermediate_size": 256}, (14, 16, 26))
TENSOR = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
EXPERT = {"enable_expert_parallel": True}
WITHOUT = {"VLLM_PLUGINS": "none"}
FIRST, SECOND = ({"VLLM_DP_RANK": rank, "VLLM_DP_RANK_LOCAL": rank} for rank in "01")
RUNS = {
    # the model, the engine's options, the environment
    "tensor": (LLAMA, TENSOR, {}),
    "tensor-unmeasured": (LLAMA, TENSOR, {"VLLM_ROCM_OPS_MEASURE": "0"}),
    "tensor-without": (LLAMA, TENSOR, WITHOUT),
    "expert": (DEEPSEEK, TENSOR | EXPERT, {}),
    "expert-without": (DEEPSEEK, TENSOR | EXPERT, WITHOUT),
    "data-0": (DEEPSEEK, EXPERT, FIRST),
    "data-1": (DEEPSEEK, EXPERT, SECOND),
    "data-without-0": (DEEPSEEK, EXPERT, FIRST | WITHOUT),
    "data-without-1": (DEEPSEEK, EXPERT, SECOND | WITHOUT),
}
WITH_PLUGIN = ["tensor", "tensor-unmeasured", "expert", "data-0", "data-1"]
MEASURED = (
    {"tensor": ["tensor"], "expert": ["expert"], "data": ["data-0", "data-1"]} if ON_GPU else {"tensor": ["tensor"]}
)
"""By tables, the runs that share them."""
BASELINE = {"tensor": "tensor-without", "tensor-unmeasured": "tensor-without"} | (
    {"expert": "expert-without", "data-0": "data-without-0", "data-1": "data-without-1"} if ON_GPU else {}
)

COLLECTIVES = """
import torch
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.v1.engine import utils

def all_gatherv(self, tensors, dim=0, sizes=None):
    if not isinstance(tensors, list):
        return all_gatherv(self, [tensors], dim, sizes)[0]
    gathered = []
    for tensor in tensors:
        rows = torch.nn.functional.pad(tensor, (0, 0) * (tensor.dim() - 1) + (0, max(sizes) - len(tensor)))
        parts = [torch.empty_like(rows) for _ in sizes]
        torch.distributed.all_gather(parts, rows, group=self.device_group)
        gathered.append(torch.cat([part[:size] for part, size in zip(parts, sizes)]))
    return gathered

def reduce_scatterv(self, tensor, dim=0, sizes=None):
    total = tensor.clone()
    torch.distributed.all_reduce(total, group=self.device_group)
    return total.split(sizes)[self.rank_in_group]

CpuCommunicator.all_gatherv, CpuCommunicator.reduce_scatterv = all_gatherv, reduce_scatterv
utils.get_mp_context = multiproc_executor.get_mp_context
"""
"""The two that vLLM lacks on CPU."""


def folder_of(engines, tiny: Tiny):
    path = engines.folder / f"two-ranks-{tiny.model}"
    return path if path.exists() else checkpoints.build(path, tiny.model, tiny.kind, **tiny.sizes)


def run(engines, name: str, port: int) -> dict:
    """Return the answer of an engine; of two data-parallel ranks one has one request, the other two."""
    tiny, options, more = RUNS[name]
    environment = {
        # data-parallel ranks share their measurements
        "VLLM_ROCM_OPS_TABLES": str(engines.folder / f"tables-{'data' if name.startswith('data') else name}"),
        "VLLM_ROCM_OPS_ON_NVIDIA": "1",
        **more,
    }
    job = engines.job(("llama", "token"), compiled=ON_GPU, logprobs=1, model=str(folder_of(engines, tiny)))
    job["prompts"] = prompts_of(tiny.seeds)
    if ON_GPU:
        del job["engine"]["compilation_config"]
        job["engine"]["attention_backend"] = "TRITON_ATTN" if tiny is LLAMA else "TRITON_MLA"
    job["engine"] |= options
    before = "" if ON_GPU else FORKED
    if name == "tensor" and not ON_GPU:
        before += "import on_cpu; on_cpu.measure()\n"
    if name.startswith("data"):
        rank = int(more["VLLM_DP_RANK"])
        job["prompts"] = job["prompts"][rank : 2 * rank + 1]
        job["engine"]["all2all_backend"] = "allgather_reducescatter"
        environment |= {"VLLM_DP_SIZE": "2", "VLLM_DP_MASTER_IP": "127.0.0.1", "VLLM_DP_MASTER_PORT": str(port)}
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
        before += "" if ON_GPU else COLLECTIVES
    return engines.run_one(job, before=before, cache=f"cache-{name}", **environment) | {"prompts": job["prompts"]}


def first_free(begin: int) -> int:
    """Return a free port that no system gives away by itself: vLLM's ranks take it later, and those behind it."""
    for port in range(begin + os.getpid() % 100 * 50, 32768, 50):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise RuntimeError("no port is free")


@pytest.fixture(scope="module")
def answers(engines):
    """Return a function for a run's answer by name, which raises if the run failed."""
    for tiny in (LLAMA, DEEPSEEK):
        folder_of(engines, tiny)
    ports = {name: first_free(begin) for name, begin in (("data", 20000), ("data-without", 25000))}
    names = [name for name, (tiny, *_) in RUNS.items() if ON_GPU or tiny is LLAMA or "without" not in name]
    alone = [] if ON_GPU else [name for name in names if not name.startswith("data")]
    with concurrent.futures.ThreadPoolExecutor(1) as one, concurrent.futures.ThreadPoolExecutor(len(names)) as many:
        futures = {name: one.submit(run, engines, name, 0) for name in alone}
        concurrent.futures.wait(futures.values())
        futures |= {
            name: many.submit(run, engines, name, ports.get(name.rpartition("-")[0], 0))
            for name in names
            if name not in futures
        }
    return lambda name: futures[name].result()


@pytest.fixture(scope="module")
def models(engines) -> dict[str, plain.Model]:
    return {tiny.model: plain.Model(folder_of(engines, tiny)) for tiny in (LLAMA, DEEPSEEK)}


@pytest.mark.parametrize("name", WITH_PLUGIN)
def test_ranks_answer_like_the_plain_model(answers, models, name):
    """They are equal without the plugin, except for experts on a GPU, and likely for the plain model."""
    answer, far = answers(name), []
    if name in BASELINE:
        assert answers(BASELINE[name])["stats"] == {}
        rounds_alike = not ON_GPU or RUNS[name][0] is LLAMA  # the baseline's experts on a GPU are other kernels
        assert answer["tokens"] == answers(BASELINE[name])["tokens"] or not rounds_alike
    assert len(answer["tokens"]) == len(answer["prompts"])
    for prompt, tokens, logprobs in zip(answer["prompts"], answer["tokens"], answer["logprobs"]):
        assert len(tokens) == STEPS
        logits = models[RUNS[name][0].model].logits(prompt + tokens[:-1], len(prompt))
        wanted = logits[len(prompt) - 1 :].log_softmax(-1)
        found = wanted[torch.arange(STEPS), tokens]
        assert (wanted.amax(-1) - found).max() <= TIE
        far += (torch.tensor(logprobs) - found).abs().tolist()
    assert sum(far) / len(far) <= FAR, far


@pytest.mark.parametrize("name", WITH_PLUGIN)
def test_each_rank_launches_our_kernels(answers, name, capsys):
    """Both ranks launch as often, once nothing is measured any more. No op runs its reference or vLLM's code."""
    answer = answers(name)
    ranks = [answer["stats"], *answer["other_ranks"]]
    assert len(ranks) == len(answer["captured"]) == (1 if name.startswith("data") else 2)
    assert ranks[0] and all(rank == ranks[0] for rank in ranks)
    with capsys.disabled():
        print(f"\n{name}: captured {answer['captured']}, then {ranks[0]}, fell back {answer['fallbacks']}")
    if ON_GPU:
        assert all(answer["captured"])
        counted = [kernel for rank in (*answer["captured"], *ranks) for of_op in rank.values() for kernel in of_op]
        assert not [kernel for kernel in counted if kernel.startswith(FALLBACK)]
        assert answer["fallbacks"] == [{}] * len(ranks)


@pytest.mark.parametrize("name", MEASURED)
def test_ranks_agree_on_one_table(answers, engines, name):
    """Each pair of kernels was measured by one of them, all-reduces by both; both have the same choices, none of which is off."""
    runs = [answers(run) for run in MEASURED[name]]
    records = [kernel_selection.read(path) for path in (engines.folder / f"tables-{name}").rglob("measured-*.json")]
    assert len(records) == 1, [record.machine for record in records]
    [record] = records
    shapes = {key: timed for key, timed in record.shapes.items() if not key.op.startswith(all_reduce_norm.NAME)}
    planned, left = (
        sum(int(count) for run in runs for count in re.findall(pattern, run["output"]))
        for pattern in (r"against vLLM's: \d+ shapes, (\d+) comparisons", r"(\d+) of \d+ comparisons did not fit")
    )
    assert shapes and sum(map(len, shapes.values())) == planned - left
    assert not record.off and not record.ended
    first, *others = (choices for run in runs for choices in run["choices"])
    assert others and all(choices == first for choices in others)
    assert {choice["state"] for choice in first if choice["shape"] in map(str, record.shapes)} == {"measured"}


def errors(answer: dict) -> list[str]:
    """Return the errors in a log. A first start on NVIDIA translates PTX, and may have no time for all of its trial."""
    left = "lack of time"
    lines = errors_of(answer["output"])
    return [line for line in lines if "WARNING" not in line or ("vllm-rocm-ops:" in line and left not in line)]


@pytest.mark.parametrize("name", WITH_PLUGIN)
def test_no_log_has_an_error(answers, name):
    assert errors(answers(name)) == []
