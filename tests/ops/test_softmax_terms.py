"""Test that each term of a softmax (a sink, a key, a split, an expert) may be the largest by far, and may vanish.

Each op whose formula has a softmax is called with rows in which one term is far above the others, each term in turn or,
of many, the first, the last and those between. An op without a call fails.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator

import formulas
import fuzz
import pytest
import torch
from marks import CHIPS
from torch import Tensor

from vllm_rocm_ops import ops
from vllm_rocm_ops.core import launch
from vllm_rocm_ops.core.correctness import generator_of
from vllm_rocm_ops.emulator import Emulator

FAR = 40.0
"""The distance of a score above the others: exp(-FAR) is below any tolerance."""
SINKS = (FAR, -2 * FAR, 4 * FAR, 6.0)
"""Sinks of heads: above all scores, below all, far above all, near the log-sum-exp of some 150 keys."""


def spread(index: int, count: int, of: int) -> int:
    """Return one of `of` places, the first for the first index and the last for the last."""
    return round(index * (of - 1) / max(count - 1, 1))


def toward(key: Tensor, scale: float) -> Tensor:
    """Return the query whose score with a key is FAR, and with random keys within a few times FAR / sqrt(size) of 0."""
    key = key.double()
    return FAR * key / (key.square().sum(-1, keepdim=True) * scale)


def decode(the_op, a, keys: Tensor, scale: Tensor | None, factor: float) -> Tensor:
    """Return queries [rows, heads, size] that look for keys all over their request, in a cache [pages, page, heads, size]."""
    heads = a[0].shape[1] if a[0].dim() == 3 else a[0].shape[1] // keys.shape[3]
    unit, rows = 1.0 if scale is None else float(scale), len(a.seq_lens) * a.query_len
    wanted = torch.zeros(rows, heads, keys.shape[3], dtype=torch.float64)
    for row in range(rows):
        request, of_request = divmod(row, a.query_len)
        seen = int(a.seq_lens[request]) - a.query_len + of_request + 1
        for head in range(heads if seen > 0 else 0):
            least = max(seen - a.window, 0) if getattr(a, "window", 0) else 0
            place = least + spread(head, heads, seen - least)
            slot = int(a.block_table[request, place // keys.shape[1]]), place % keys.shape[1]
            key = keys[(*slot, head * keys.shape[2] // heads)].double() * unit
            wanted[row, head] = toward(key, factor)
    return wanted


def paged_attention_decode(case_inputs) -> Iterator[tuple[str, tuple]]:
    names = ("lengths-parts", "window", "rows-3", "groups-native", "fixed-split", "sinks", "nine-parts", "groups-fp16")
    for name, a in case_inputs(*names):
        keys, _ = formulas.by_slot(a.key_cache, a.value_cache)
        query = decode(ops.paged_attention_decode, a, keys, a.k_scale, a.scale)
        yield f"{name}, keys", a._replace(query=query.to(a.query.dtype).view(a.query.shape))
        if a.sinks is not None:
            yield f"{name}, sinks", a._replace(sinks=torch.tensor(SINKS[: len(a.sinks)]))
            if len(a.sinks) < len(SINKS):
                yield f"{name}, other sinks", a._replace(sinks=torch.tensor(SINKS[-len(a.sinks) :]))


def mla_decode(case_inputs) -> Iterator[tuple[str, tuple]]:
    for name, a in case_inputs("lengths-parts", "rows-2", "fixed-split-many", "bf16-even-3", "fp16-17"):
        query = decode(ops.mla_decode, a, a.kv_cache.unsqueeze(2), a.kv_scale, a.scale).to(a.q_nope.dtype)
        latent = a.q_nope.shape[2]
        yield name, a._replace(q_nope=query[..., :latent], q_pe=query[..., latent:])


def flash_attention(case_inputs) -> Iterator[tuple[str, tuple]]:
    for name, a in case_inputs("full", "tiles", "batch", "bf16-128", "window-over-tiles", "sizes-33-5", "bias"):
        rows, heads = a.q.shape[1:3]
        keys, group = a.k.shape[1], heads // a.k.shape[2]
        query = torch.zeros(a.q.shape, dtype=torch.float64)
        for row in range(rows):
            last = keys - rows + row if a.causal else keys - 1
            first = max(keys - rows + row - a.window + 1, 0) if a.window else 0
            for head in range(heads):
                at = first + spread((row * heads + head) * 7 % 20, 20, last - first + 1)
                query[:, row, head] = toward(a.k[:, at, head // group], a.scale)
        yield name, a._replace(q=query.to(a.q.dtype))


def peaks(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Return normal rows with one element FAR above the others, or below them in the last row."""
    x = torch.randn(rows, columns, generator=generator)
    for row in range(rows - 1):
        x[row, spread(row, rows - 1, columns)] += FAR
    x[-1, columns // 2] -= 2 * FAR
    return x


def softmax(case_inputs) -> Iterator[tuple[str, tuple]]:
    generator = generator_of("softmax")
    for rows, columns in ((9, 8), (20, 1040), (5, 333), (5, 4096), (4, 16392), (3, 40008)):
        yield f"{columns}", ops.softmax.Arguments(peaks(rows, columns, generator).bfloat16())


def logits(experts: int) -> Tensor:
    """Return a row for each expert, in which it is far above the others, and a row in which one is far below them."""
    return peaks(experts + 1, experts, generator_of(f"{experts} experts"))


def topk_softmax(case_inputs) -> Iterator[tuple[str, tuple]]:
    for experts in (8, 60, 256):
        for renormalize in (False, True):
            yield f"{experts}", ops.topk_softmax.Arguments(logits(experts), 4, renormalize)


def grouped_topk(case_inputs) -> Iterator[tuple[str, tuple]]:
    for bias in (None, torch.linspace(0, 1, 64)):
        yield "64", ops.grouped_topk.Arguments(logits(64), 6, bias is None, 8, 3, "softmax", 2.5, bias)


def router_gemm_topk(case_inputs) -> Iterator[tuple[str, tuple]]:
    weight = torch.eye(128, 512).bfloat16()
    for first in range(0, 128, 48):
        x = torch.nn.functional.pad(logits(128)[first : first + 16], (0, 512 - 128)).bfloat16()
        yield f"{first}", ops.router_gemm_topk.Arguments(x, weight, 6, True)


def router_z_loss(case_inputs) -> Iterator[tuple[str, tuple]]:
    for experts in (8, 60, 256):
        yield f"{experts}", ops.router_z_loss.Arguments(logits(experts))


def load_balancing_loss(case_inputs) -> Iterator[tuple[str, tuple]]:
    for experts in (8, 60, 256):
        x = logits(experts)
        yield f"{experts}", ops.load_balancing_loss.Arguments(x, x.topk(2, -1).indices.int())


CALLS: dict[str, Callable] = {
    of.__name__: of
    for of in (
        *(paged_attention_decode, mla_decode, flash_attention, softmax, topk_softmax, grouped_topk),
        *(router_gemm_topk, router_z_loss, load_balancing_loss),
    )
}


def has_softmax(function: Callable) -> bool:
    """True if a formula, or one that it calls, has a softmax or the sum of one."""
    code = inspect.getsource(function)
    called = {name for name in re.findall(r"\b(\w+)\(", code) if inspect.isfunction(vars(formulas).get(name))}
    own = re.search(r"torch\.(softmax|logsumexp|exp)\(", code)
    return bool(own) or any(has_softmax(getattr(formulas, name)) for name in called - {function.__name__})


def test_every_softmax_has_a_call():
    """topk_sigmoid shares its formula with topk_softmax, which has one. gated_delta_net_decode has the exp of a gate."""
    found = {name for name, formula in formulas.FORMULAS.items() if has_softmax(formula)}
    assert found - {"topk_sigmoid", "gated_delta_net_decode"} == CALLS.keys()


def require_any_largest(name: str, arch) -> None:
    """Check an op's calls in all configurations, which decide what splits hold the largest term, and which are absent."""
    the_op = getattr(ops, name)

    def case_inputs(*names: str):
        for case in the_op.cases():
            if case.name in names:
                yield case.name, the_op.Arguments(*case.make("cpu", generator_of(case.name), arch.fp8_dtype))

    for what, a in CALLS[name](case_inputs):
        configs = the_op.configs(a, arch)
        assert configs, what
        for config in configs:
            assert not fuzz.run(the_op, a, config, "cpu").startswith("fallback"), what


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("arch", CHIPS)
def test_each_term_may_be_the_largest_by_far(arch, name):
    emulator = Emulator(arch)
    with launch.executor(emulator):
        require_any_largest(name, emulator.arch)
