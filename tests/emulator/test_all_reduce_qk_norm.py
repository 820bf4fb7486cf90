"""Test norms of queries and keys over the heads of all ranks, with rotation and cache write, on emulated devices."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from emulated_group import EmulatedGroup
from marks import AMD, CHIPS, full

from vllm_rocm_ops import ops
from vllm_rocm_ops.collectives import RankMissing, qk_norm
from vllm_rocm_ops.core import archs, correctness

OP = ops.qk_norm_rope_and_cache
UPDATED = "query_out", "key_out", "key_cache", "value_cache"


def inputs(arch, ranks: int, tokens: int, heads: tuple[int, int], seed: int = 0, **given) -> list:
    """Return the arguments of each rank: heads and weights of its own, of which a higher rank's are larger."""
    given = {"rotary": 64, "over_all": True, "layout": "native", **given}
    size = given.pop("size", 128)
    made = []
    for rank in range(ranks):
        generator = torch.Generator().manual_seed(17 * seed + rank)
        make = functools.partial(qk_norm.of_op._inputs, device="cpu", generator=generator, fp8_dtype=arch.fp8_dtype)
        a = OP.Arguments(*make(tokens, heads, size, given | {"factor": 0.25 * (1 + rank)}))
        made.append(a._replace(key=a.key * 0.5))
    return made


def wanted(made: list) -> list:
    """Return the arguments after the call, of each rank, in plain PyTorch."""
    of_ranks = [[qk_norm.of_op.mean_square(x, True) for x in qk_norm.of_op.queries_and_keys(a)] for a in made]
    means = [sum(of) / len(made) for of in zip(*of_ranks)]
    copied = [OP.Arguments(*map(correctness.clone, a)) for a in made]
    for a in copied:
        qk_norm.of_op.run_with_means(a, means)
    return copied


def check(made: list, exact: list) -> None:
    """Compare results: nearly all have the bits of PyTorch's, and none is off by more than a rounding of its pair."""
    for got, of in zip(made, exact, strict=True):
        for name in UPDATED:
            x, y = (getattr(a, name) for a in (got, of))
            same = (x.float() == y.float()) | (x.isnan() & y.isnan())
            assert same.float().mean() > 0.98, f"{name}: {same.float().mean():.3f} of all have the same bits"
            off = (x.float() - y.float()).nan_to_num().abs().max() / y.float().nan_to_num().abs().max()
            assert off < (0.05 if x.element_size() == 1 else 0.01), f"{name}: off by {off:.4f} of the largest"


def run(group: EmulatedGroup, made: list) -> None:
    for reduce, a in zip(group.reduces, made, strict=True):
        reduce(OP, *a)
    group.run()


def check_call(
    arch_name: str, ranks: int, tokens: int, heads: tuple[int, int], seed: int = 0, epochs: int = 2, **given
):
    group = EmulatedGroup(arch_name, ranks, seed)
    for number in range(epochs):
        made = inputs(group.devices.arch, ranks, tokens, heads, seed + number, **given)
        exact = wanted(made)
        run(group, made)
        check(made, exact)


@pytest.mark.parametrize("arch_name", CHIPS)
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(("ranks", "heads"), [(2, (24, 4)), (4, (12, 2)), (8, (6, 1))])
def test_minimax_m2(arch_name, ranks, heads, fp8):
    check_call(arch_name, ranks, 2, heads, fp8=fp8)


@pytest.mark.parametrize(
    ("ranks", "tokens", "heads", "given"),
    [
        (3, 5, (5, 3), {"unmapped": 2}),
        (5, 1, (2, 2), {"epsilon": 1e-2, "size": 80, "rotary": 16}),
        (2, 3, (40, 40), {"is_neox": False, "rotary": 128, "layout": "interleaved"}),
        (7, 2, (9, 1), {"cos_dtype": torch.float32, "apart": True}),
    ],
    ids=str,
)
def test_other_sizes(ranks, tokens, heads, given):
    """Ranks and heads are no powers of two, and tokens have no slot."""
    check_call(AMD[1], ranks, tokens, heads, **given)


@pytest.mark.parametrize("ranks", [2, pytest.param(8, marks=full)])
def test_schedules(ranks):
    """Three launches without a barrier, an all-reduce whose words are in the same slots, and launches again. Epochs come round."""
    for seed in range(8 if ranks == 2 else 3):
        group = EmulatedGroup(AMD[0], ranks, seed, epoch=2**32 - 3)
        for tokens in ((1, 3, 2), (2, 1)):
            made = [inputs(group.devices.arch, ranks, count, (2, 1), seed + count) for count in tokens]
            exact = list(map(wanted, made))
            for of_ranks in made:
                for reduce, a in zip(group.reduces, of_ranks):
                    reduce(OP, *a)
            group.run()
            for call in zip(made, exact):
                check(*call)
            rows = [torch.full((2, 256), 1.0 + rank, dtype=torch.bfloat16) for rank in range(ranks)]
            sums = [reduce.sum(x) for reduce, x in zip(group.reduces, rows)]
            group.run()
            assert all((total == ranks * (ranks + 1) / 2).all() for total in sums)


@pytest.mark.parametrize("heads", [(2, 1), (9, 8)])
def test_all_blocks_are_counted(heads):
    """The last one ends the epoch: before that, a late block might take the next epoch for its own."""
    group = EmulatedGroup(AMD[0], 2)
    run(group, inputs(group.devices.arch, 2, 3, heads))
    [(_, launch, _)] = group.queues[0].launches
    assert launch.args["blocks"] == math.prod(launch.grid) > 2 * 3


def test_all_ranks_have_the_same_sum():
    """Whichever rank adds: heads of queries that are equal on all ranks get equal bits, of sums that depend on the order."""
    group = EmulatedGroup(AMD[0], 8)
    for seed in range(3):
        made = inputs(group.devices.arch, 8, 4, (6, 1), seed)
        last = made[-1]
        shared = {name: getattr(last, name) for name in ("q_weight", "positions", "cos_sin_cache")}
        head = last.query[:, :128].clone()  # the first of each rank's, beside others of its own
        for number, a in enumerate(made):
            a.query[:, :128] = head
            made[number] = a._replace(**shared)
        run(group, made)
        assert all(torch.equal(a.query_out[:, :128], last.query_out[:, :128]) for a in made)


def test_a_missing_rank_is_reported_with_nan_results():
    group = EmulatedGroup(AMD[0], 3, limit_us=8)
    made = inputs(group.devices.arch, 3, 2, (6, 1))
    for reduce, a in zip(group.reduces[:2], made):
        reduce(OP, *a)
    group.run()
    for reduce, a in zip(group.reduces[:2], made):
        assert a.query_out.isnan().all() and a.key_out.isnan().all()
        with pytest.raises(RankMissing, match="rank 2 of 3 did not come in epoch 1|ranks .*2 of 3 did not come"):
            reduce.check()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({}, ""),
        ({"tokens": 33}, "a launch has at most 64 blocks, so that all are resident"),
        ({"dtype": torch.float16}, "query is bfloat16"),
        ({"over_all": False}, "norms are over all heads, of which a rank has more than one"),
        ({"one_plus": True}, "norms over all heads multiply by weight"),
    ],
    ids=str,
)
def test_calls_without_a_kernel_say_why(change, why):
    group = EmulatedGroup(AMD[0], 2)
    change = {"tokens": 2} | change
    a = inputs(group.devices.arch, 2, change.pop("tokens"), (6, 1), **change)[0]
    found = group.reduces[0].unsupported(OP, *a)
    assert why in found and bool(why) == bool(found)
    if why:
        with pytest.raises(ValueError, match="`all_reduce` must be given"):
            group.reduces[0](OP, *a)


def test_without_a_kernel_the_means_are_all_reduced():
    arch = archs.named(AMD[0])
    made = inputs(arch, 2, 3, (4, 2), dtype=torch.float16)
    exact = wanted(made)
    other = [qk_norm.of_op.mean_square(x, True).float().flatten() for x in qk_norm.of_op.queries_and_keys(made[1])]
    qk_norm.run_fallback(lambda means: means + torch.stack(other, 1), 2, made[0])
    check(made[:1], exact[:1])
