"""Test the tiled kernels of fused_experts at any number of tokens, and on the contest's mixture-of-experts."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from marks import AMD, CHIPS, few_of

from vllm_rocm_ops import ops
from vllm_rocm_ops.core import launch
from vllm_rocm_ops.core.correctness import generator_of, run_and_check, unwritten_is_nan
from vllm_rocm_ops.core.op import Case
from vllm_rocm_ops.core.stats import reset_stats, stats
from vllm_rocm_ops.emulator import Emulator
from vllm_rocm_ops.ops.fused_experts import TILED_FROM
from vllm_rocm_ops.ops.shared import experts_tiled as tiled
from vllm_rocm_ops.ops.shared.experts import SCHEMES
from vllm_rocm_ops.ops.shared.experts_cases import CLAMPED

OP = ops.fused_experts


def case(name: str, m: int, topk: int, experts: int, hidden: int, intermediate: int, **given) -> Case:
    (any_case, *_) = OP.cases()
    return Case(name, functools.partial(any_case.make.func, m, topk, experts, hidden, intermediate, given))


FEW = [  # the op itself gives these to other kernels
    case
    for case in OP.cases()
    if case.make.args[0] < TILED_FROM
    and not (of := SCHEMES[case.make.args[-1].get("scheme", "block")]).native
    and not of.converted
    and "weights" not in case.make.args[-1]
]
CASES = [
    case("block-m129-one-expert", 129, 1, 3, 128, 128, one_expert=True),
    case("block-m200", 200, 2, 4, 256, 192, shared_experts=1, ids=torch.int64),
    case("block-map-m90", 90, 3, 5, 208, 208, mapped=True, ids=torch.int64, shared_experts=1),
    case("block-quantized-m66", 66, 2, 4, 208, 128, quantized=True),
    case("block-static-m66", 66, 2, 4, 208, 80, static=True),
    case("block-input-weight-m65", 65, 1, 4, 128, 128, apply_router_weight_on_input=True, shared_experts=1),
    case("block-repeated-m65", 65, 3, 2, 128, 64),
    case("block-few-of-many", 65, 1, 96, 128, 16),
    case("block-runs", 66, 2, 3, 1168, 144, shared_experts=1),  # a block of down with 8 tiles, and one with less than 2
    case("bf16-runs", 65, 1, 3, 1160, 80, scheme="none"),
    case("tensor-static-runs", 66, 2, 3, 640, 272, scheme="tensor", static=True),
    case("channel-m130", 130, 2, 3, 208, 80, scheme="channel", out_dtype=torch.float16),
    case("tensor-m70", 70, 2, 4, 208, 208, scheme="tensor"),
    case("bf16-m130", 130, 2, 3, 200, 136, scheme="none"),
    case("block-clamped-m90", 90, 3, 5, 208, 208, mapped=True, ids=torch.int64, shared_experts=1, bias=True, **CLAMPED),
    case("block-interleaved-m66", 66, 2, 4, 208, 208, interleaved=True, bias=True),
]


@pytest.fixture(params=CHIPS)
def emulator(request):
    emulator = Emulator(request.param)
    with launch.executor(emulator), unwritten_is_nan():
        OP.invalidate()
        yield emulator
        OP.invalidate()


PLAIN = {"bias", "swiglu_limit", "interleaved"}.isdisjoint


def runs(cases: list[Case]) -> list[tuple[Case, tiled.TiledConfig]]:
    """Return the cases in all tile sizes that have kernels for their activation."""
    sizes = ((case, tiled.TOKENS if PLAIN(case.make.args[-1]) else tiled.TOKENS[:1]) for case in cases)
    return [(case, tiled.TiledConfig(tokens)) for case, all_tokens in sizes for tokens in all_tokens]


def reached(run: tuple[Case, tiled.TiledConfig]) -> frozenset:
    case, config = run
    return frozenset({(case.make.args[-1].get("scheme"), PLAIN(case.make.args[-1]), config)})


def reached_at(run: tuple[Case, tiled.TiledConfig]) -> frozenset:
    """Return what `reached` does, and the case, so that by default each runs in one tile size."""
    return reached(run) | {run[0].name}


@pytest.mark.parametrize(
    "run", [*few_of(runs(FEW), reached), *few_of(runs(CASES), reached_at)], ids=lambda run: f"{run[0].name}-{run[1]}"
)
def test_tiled_kernels_run_and_are_right(run, emulator, monkeypatch):
    case, config = run
    monkeypatch.setattr(OP, "default", lambda *_: config)
    reset_stats()
    run_and_check(OP, case.make("cpu", generator_of(case.name), emulator.arch.fp8_dtype), "cpu")
    (ran,) = stats()[OP.name]
    assert ran == "nothing to do" or f"_{config.tokens} + {tiled.MODULE}_combine" in ran
    assert PLAIN(case.make.args[-1]) or "_clamped_" in ran
    assert config.tokens == 128 or not case.name.endswith("-runs") or "_down_run_" in ran


def test_few_tokens_with_many_experts_each(emulator):
    """There are more experts per token than the other kernels support."""
    arguments = case("block-many-slots", 3, 40, 44, 128, 16).make("cpu", generator_of("many"), emulator.arch.fp8_dtype)
    reset_stats()
    run_and_check(OP, arguments, "cpu")
    (ran,) = stats()[OP.name]
    assert tiled.MODULE in ran


def test_any_order_gives_the_same_bits(emulator, monkeypatch):
    """Waves run one by one, in another order in each call."""
    monkeypatch.setattr(OP, "default", lambda *_: tiled.TiledConfig(64))
    repeated = case("block-m70", 70, 3, 4, 128, 80, mapped=True, shared_experts=1)
    arguments = repeated.make("cpu", generator_of(repeated.name), emulator.arch.fp8_dtype)
    found = set()
    for seed in (None, *range(4)):
        emulator.options = dataclasses.replace(emulator.options, seed=seed)
        found.add(OP(*arguments).view(torch.int16).numpy().tobytes())
    assert len(found) == 1


@pytest.mark.parametrize("arch_name", AMD)
@pytest.mark.parametrize("skewed", [False, True], ids=["even", "skewed"])
@pytest.mark.parametrize("threads", tiled.SORT_THREADS)
def test_pairs_are_sorted(threads, skewed, arch_name, monkeypatch):
    """There are more ids than a block's waves take at a time. Experts include the first, the last and a shared one."""
    emulator = Emulator(arch_name, seed=0)  # finds a missing barrier before an atomic
    m, topk, experts, shared, routed = 2111, 5, 40, 2, 38
    ids = torch.randint(-2, 60, (m, topk), generator=generator_of("ids"))
    if skewed:
        ids[ids % 3 > 0] = 4
    expert_map = torch.randperm(60, generator=generator_of("map")).int()  # to 38 and above: to no expert
    hidden, w1, w2 = (torch.empty(s, dtype=torch.bfloat16) for s in ((m, 8), (experts, 32, 8), (experts, 8, 16)))
    weights = torch.empty(m, topk)
    a = OP.Arguments(hidden, w1, w2, weights, ids, torch.bfloat16, expert_map=expert_map, shared_experts=shared)
    monkeypatch.setattr(tiled, "FEW_IDS", 0 if threads == max(tiled.SORT_THREADS) else m * topk)
    sort = tiled.launches(tiled.TiledConfig(64), OP.allocate(a), a, emulator.arch)[0]
    assert sort.block == (threads, 1, 1)
    written = ("sort.sorted", "sort.tiles")
    memory = {name: torch.full((sort.args[name] // 4,), -7, dtype=torch.int32) for name in written}
    order, tiles = memory.values()
    blocks = [0, 4, 17, routed - 1, routed, experts - 1]
    emulator.run(launch.code_object(sort.module, arch_name), sort._replace(args=sort.args | memory), blocks=blocks)

    known = (ids >= 0) & (ids < 60)
    expert_of = torch.where(known, expert_map.long()[ids.clamp(0, 59)], -1)
    expert_of = torch.where(expert_of < routed, expert_of, -1)
    expert_of = torch.cat((expert_of, torch.arange(routed, experts).expand(m, shared)), 1).flatten()
    counts = [int((expert_of == expert).sum()) for expert in range(experts)]
    first, first_tile, expected, expected_tiles = 0, 0, torch.full_like(order, -7), torch.full_like(tiles, -7)
    expected_tiles = expected_tiles.view(-1, 4)
    for expert, count in enumerate(counts):
        if expert in blocks:
            expected[first : first + count] = (expert_of == expert).nonzero().flatten()
            for i, at in enumerate(range(first, first + count, 64)):
                expected_tiles[1 + first_tile + i] = torch.tensor([expert, at, first + count, 0])
        first, first_tile = first + count, first_tile + -(-count // 64)
    expected_tiles[0] = torch.tensor([first, first_tile, 0, 0])
    assert torch.equal(order, expected) and torch.equal(tiles.view(-1, 4), expected_tiles)
    assert 1 + first_tile <= len(expected_tiles)


def contest(x, router, gate, up, down, topk: int):
    """Return the output of the contest's layer in float64.

    The weights of the experts are the topk largest of softmax(router logits), not renormalized. An expert computes
    down(silu(gate(x)) * up(x)), the last one for every token. Linear layers are [out, in].
    """
    x, router, gate, up, down = (t.double() for t in (x, router, gate, up, down))
    scores = torch.softmax(x @ router.t(), -1)
    out = torch.zeros_like(x)
    for i, token in enumerate(x):

        def expert(e: int, token=token) -> torch.Tensor:
            return down[e] @ (torch.nn.functional.silu(gate[e] @ token) * (up[e] @ token))

        weights, chosen = torch.topk(scores[i], topk)
        out[i] = expert(len(gate) - 1) + sum(w * expert(int(e)) for w, e in zip(weights, chosen))
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("experts, m", [(4, 70), (8, 66), (32, 96)])
def test_contest_layer(experts, m, dtype, emulator, monkeypatch):
    """The layer is smaller than the contest's, with its types: topk 4 of 4, 8 and 32 experts, and one for all tokens."""
    monkeypatch.setattr(OP, "default", lambda *_: tiled.TiledConfig(64))
    generator, topk, hidden, inner = generator_of(f"{experts} {dtype}"), 4, 224, 64

    def linear(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * shape[-1] ** -0.5).to(dtype)

    x, router = torch.randn(m, hidden, generator=generator).to(dtype), linear(experts, hidden)
    gate, up = linear(experts + 1, inner, hidden), linear(experts + 1, inner, hidden)
    down = linear(experts + 1, hidden, inner)
    weights, ids = torch.topk(torch.softmax(x.double() @ router.double().t(), -1), topk)
    ours = OP(x, torch.cat((gate, up), 1), down, weights.float(), ids, dtype, shared_experts=1)
    torch.testing.assert_close(ours.double(), contest(x, router, gate, up, down, topk), rtol=1e-2, atol=1e-2)
