"""Check that kernels of several streams of one GPU run at the same time, for tests and benchmarks whose ranks are streams."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_rocm_ops.collectives.all_reduce import RankMissing
from vllm_rocm_ops.collectives.peers import in_process

ENVIRONMENT = {
    "GPU_MAX_HW_QUEUES": "16",  # HIP shares four queues among all streams by default; NVIDIA's name is the next
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    "CUDA_MODULE_LOADING": "EAGER",  # lazy loading of a kernel would wait for all kernels
}
"""Variables of a process, set before it initializes the GPU. Kernels of streams that share a hardware queue run in order."""
SECONDS = 1.0
HIDDEN = 1024


def check_overlap(streams: Sequence[torch.cuda.Stream], device: torch.device) -> None:
    """Run a kernel per stream that waits for all others. Raises RuntimeError after a second if they do not overlap."""
    x = torch.ones(1, HIDDEN, dtype=torch.bfloat16, device=device)
    for stream in streams:
        with torch.cuda.stream(stream):
            torch.empty_like(x)  # reserves the result's memory, as mapping it would wait for all kernels
    torch.cuda.synchronize(device)
    group = in_process(len(streams), device, seconds=SECONDS)
    for reduce, stream in zip(group, streams):
        with torch.cuda.stream(stream):
            reduce.sum(x)
    torch.cuda.synchronize(device)
    try:
        for reduce in group:
            reduce.check()
    except RankMissing as error:
        raise RuntimeError(
            f"kernels of {len(streams)} streams do not run at the same time, so they cannot be ranks: set "
            f"{', '.join(f'{name}={value}' for name, value in ENVIRONMENT.items())} before the process starts ({error})"
        ) from error
    finally:
        for reduce in group:
            reduce.close()
