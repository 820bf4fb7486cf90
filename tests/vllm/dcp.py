"""Check a latent cache split over ranks by vLLM's decode context parallelism.

vLLM's functions merge the op's results over the ranks' parts into its result over the whole.

    torchrun --nproc-per-node 2 tests/vllm/dcp.py

The command runs the kernels on GPUs, over NCCL; test_dcp.py runs ranks in the emulator, over gloo.
"""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable

import torch
from torch import Tensor

from vllm_rocm_ops import ops, reset_stats, stats

HEADS, PAGE, LATENT, ROPE, SCALE = 8, 16, 512, 64, 0.09  # heads of a rank


class Group:
    """The part of a GroupCoordinator that vLLM's merging uses, over a process group of PyTorch."""

    def __init__(self, processes, rank: int, world_size: int):
        self.processes, self.rank_in_group, self.world_size = processes, rank, world_size

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        found = [torch.empty_like(x) for _ in range(self.world_size)]
        self.processes.allgather([found], [x.contiguous()]).wait()
        return torch.cat(found, dim)

    def all_reduce(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        self.processes.allreduce([x]).wait()
        return x

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """Reduce by an all-reduce, as gloo has no reduce-scatter."""
        return self.all_reduce(x).chunk(self.world_size, dim)[self.rank_in_group]


def in_vllm(name: str):
    """Return a function of vLLM's, wherever this version has it."""
    places = ("v1.attention.ops.dcp", "v1.attention.ops.common", "v1.attention.backends.utils")
    for place in places:
        try:
            return getattr(importlib.import_module(f"vllm.{place}"), name)
        except (ImportError, AttributeError):
            continue
    raise ImportError(f"vLLM has no {name}")


class Problem:
    """Requests of these lengths, the same on all ranks: the queries of all heads, and each request's tokens."""

    def __init__(self, lens: list[int], ranks: int, device: str):
        generator = torch.Generator().manual_seed(0)

        def values(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).bfloat16().to(device)

        self.lens = torch.tensor(lens, dtype=torch.int32, device=device)
        heads = HEADS * ranks
        self.queries = values(len(lens), heads, LATENT), values(len(lens), heads, ROPE)
        self.tokens = [values(length, LATENT + ROPE) for length in lens]

    def part(self, rank: int, ranks: int, interleave: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return a rank's cache, block table and lengths. Tokens go to ranks in turn, `interleave` at a time."""
        lens = in_vllm("get_dcp_local_seq_lens")(self.lens, ranks, rank, interleave)
        width = max(-(-int(lens.max()) // PAGE), 1)
        table = torch.randperm(len(lens) * width, generator=torch.Generator().manual_seed(rank)).int()
        table = table.view(-1, width).to(lens.device)
        cache = torch.full((len(lens) * width, PAGE, LATENT + ROPE), torch.nan, dtype=torch.bfloat16)
        cache = cache.to(lens.device)
        for request, tokens in enumerate(self.tokens):
            mine = tokens[torch.arange(len(tokens)) // interleave % ranks == rank]
            if len(mine) != lens[request]:
                raise ValueError(f"rank {rank} must have {lens[request]} tokens of request {request}, got {len(mine)}")
            places = torch.arange(len(mine), device=lens.device)
            cache[table[request, places // PAGE].long(), places % PAGE] = mine
        return cache, table, lens


def merged(group: Group, out: Tensor, lse: Tensor, lens: Tensor) -> tuple[Tensor, Tensor]:
    """Merge, as vLLM does, [requests, heads of all ranks, LATENT] to the rows and logarithms of a rank's heads."""
    starts = torch.arange(len(lens) + 1, dtype=torch.int32, device=lens.device)
    if out.is_cuda:
        merge = in_vllm("cp_lse_ag_out_rs")
        known = inspect.signature(merge).parameters
        more = {name: x for name, x in {"seq_lens": lens, "query_start_loc": starts}.items() if name in known}
        return merge(out, lse, group, return_lse=True, **more)
    in_vllm("mask_dcp_empty_shards_")(lse, lens, starts)
    outs, lses = (group.all_gather(x[None], 0) for x in (out.float(), lse))
    of_rank = slice(group.rank_in_group * HEADS, (group.rank_in_group + 1) * HEADS)
    found, of_all = in_vllm("_lse_weighted_combine")(outs, lses, return_lse=True)
    return found[:, of_rank].to(out.dtype), of_all[:, of_rank]


def check(group: Group, lens: list[int], interleave: int, device: str, attend: Callable = ops.mla_decode) -> None:
    """Raise AssertionError on a rank whose heads differ from the result over the whole cache."""
    ranks, rank = group.world_size, group.rank_in_group
    problem = Problem(lens, ranks, device)

    def attended(cache: Tensor, table: Tensor, local: Tensor) -> tuple[Tensor, Tensor]:
        return attend(*problem.queries, cache, table, local, SCALE, return_lse=True)

    cache, table, local = problem.part(rank, ranks, interleave)
    found, lse = merged(group, *attended(cache, table, local), local)
    whole, whole_lse = attended(*problem.part(0, 1, interleave))
    of_rank = slice(rank * HEADS, (rank + 1) * HEADS)
    torch.testing.assert_close(lse.float(), whole_lse[:, of_rank], rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(found.float(), whole[:, of_rank].float(), rtol=2e-2, atol=1e-2)


def main() -> None:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = f"cuda:{torch.cuda.current_device()}"
    torch.distributed.init_process_group("nccl", device_id=torch.device(device))
    group = Group(torch.distributed.group.WORLD, rank, ranks)
    reset_stats()
    for lens in ([33, 1, 70], [8192, 1, 1000, 130]):
        for interleave in (1, 16):
            check(group, lens, interleave, device)
    fallbacks = [name for name in stats()["mla_decode"] if name.startswith("fallback")]
    torch.distributed.destroy_process_group()
    if fallbacks:
        raise SystemExit(f"no kernel ran: {fallbacks}")
    if rank == 0:
        print(f"{ranks} ranks: rows and logarithms are those of the whole")


if __name__ == "__main__":
    main()
