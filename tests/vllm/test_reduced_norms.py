"""Test all-reduces fused with their norm: graphs, joint measurements of ranks, agreement, and failing steps.

Ranks are threads or processes on the CPU; a stand-in reduces over gloo, or in the graph, in place of the kernel, which
tests/emulator tests.
"""

import collections
import functools
import os
import sys
import time
import types

import checkpoints
import pytest
import torch
from engines import FORKED, STEPS
from fakes import Fake, fake_worker
from keys import pattern
from marks import full
from on_cpu import GroupClock, OverGloo
from test_graph import HIDDEN, KEYS, MX, ROWS, add_norm, called, choices, expected, norm, piece, quantizer, random, same  # noqa: F401
from test_kernel_selection import as_ranks
from test_moe_input import PATTERNS, inputs, layer, runner  # noqa: F401
from vllm.config import get_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm

from vllm_rocm_ops import collectives, ops
from vllm_rocm_ops.collectives import launches
from vllm_rocm_ops.core.correctness import as_tuple
from vllm_rocm_ops.vllm import seam
from vllm_rocm_ops.vllm.graph import all_reduce_norm, all_reduce_timing, compilation, compiled_ops, rewrite
from vllm_rocm_ops.vllm.selection import kernel_selection, report
from vllm_rocm_ops.vllm.selection.key import FP8_SUMS

pytestmark = pytest.mark.usefixtures("configuration", "schemas")
TP, EPSILON = "tp:0", 1e-6


class Doubled:
    """An all-reduce of two ranks with the same inputs, which counts its calls."""

    def __init__(self):
        self.calls = collections.Counter()

    def __call__(self, op, *args):
        self.calls[op.name] += 1
        x, *rest = launches.with_addend(op, args)
        return op(2 * x, *rest)

    def sum(self, x):
        self.calls["sum"] += 1
        return 2 * x


def choice(most: int) -> Fake:
    """Return a choice of the plugin up to this many tokens, at least at some."""
    by_tokens = bytes(1) + bytes([1]) * most
    made = Fake(plugin_by_tokens=by_tokens, key="key")
    made.plugin_serves = lambda tokens: tokens < len(made.plugin_by_tokens) and made.plugin_by_tokens[tokens] == 1
    return made


class Alike:
    """One choice for all calls."""

    def __init__(self, choice: Fake):
        self.choice = choice

    def get(self, call) -> Fake:
        return self.choice

    def values(self) -> list[Fake]:
        return [self.choice]


@pytest.fixture
def shared(monkeypatch):
    """Yield a group whose all-reduces double, and in which every norm of at most `rows` rows is one launch."""
    made = all_reduce_norm.GroupAllReduce(Doubled(), Alike(choice(ROWS)))
    monkeypatch.setitem(all_reduce_norm.groups, TP, made)
    monkeypatch.setitem(parallel_state._groups, TP, lambda: Fake(_all_reduce_out_place=lambda x: 2 * x))
    return made


def reduce(x):
    return torch.ops.vllm.all_reduce(x, group_name=TP)


ONE = "all_reduce_norm"


@pytest.mark.parametrize("rows", [ROWS, ROWS + 1])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("key", [*KEYS, MX, None])
def test_one_op_in_the_place_of_three(shared, key, residual, rows):
    """These are an all-reduce, a norm and its quantization. More rows than a launch supports take two or three."""
    x, weight, held = random(rows, HIDDEN), random(HIDDEN, seed=1), random(rows, HIDDEN, seed=2)
    marked, _ = quantizer(key) if key else (None, None)

    def function(x, weight, held):
        total = reduce(x)
        y, added = add_norm(total, held, weight) if residual else (norm(total, weight), None)
        found = marked(y, torch.full((1,), 0.02)) if key else (y,)
        return *found, *([added] if residual else [])

    module, names = piece(function, x, weight, held, donated={2})
    assert called(names) == [ONE] and not [n for n in names if "all_reduce.default" in n or "auto_functionalized" in n]
    given = held.clone()
    found = module(x, weight, given)
    wanted_residual = held.clone() if residual else None
    if key:
        wanted = expected(key, 2 * x, weight, wanted_residual)
    elif residual:
        wanted = (ops.fused_add_rms_norm(2 * x, wanted_residual, weight, EPSILON),)
    else:
        wanted = (ops.rms_norm(2 * x, weight, EPSILON),)
    same(as_tuple(found), (*as_tuple(wanted), *([wanted_residual] if residual else [])))
    assert sum(shared.reduce.calls.values()) == (rows == ROWS)


@pytest.mark.parametrize("rows", [ROWS, ROWS + 1])
def test_a_sum_before_the_all_reduce(shared, rows):
    """The launch adds, or with more rows PyTorch does before vLLM's all-reduce."""
    inputs = [random(rows, HIDDEN, seed=seed) for seed in range(3)]
    weight = random(HIDDEN, seed=3)
    marked, _ = quantizer(KEYS[2])

    def function(routed, more, held, weight):
        y, added = add_norm(reduce(more + 2.5 * routed), held, weight)
        return *marked(y), added

    module, names = piece(function, *inputs, weight, donated={2})
    assert called(names) == [ONE] and "aten.add.Tensor" not in names
    routed, more, held = inputs
    given, wanted = held.clone(), held.clone()
    found = module(routed, more, given, weight)
    same(found, (*expected(KEYS[2], 2 * torch.add(more, routed, alpha=2.5), weight, wanted), wanted))
    assert sum(shared.reduce.calls.values()) == (rows == ROWS)


def test_a_norm_that_also_quantizes_for_experts(shared, choices, runner):  # noqa: F811
    """Three launches are one; more rows run vLLM's all-reduce and the norm with two outputs."""
    choices.decisions, op = PATTERNS, ops.rms_norm_and_per_block_quant
    x, residual, weight, product = inputs()
    reads = layer(True)
    module, names = piece(lambda x, *others: reads(reduce(x), *others), x, residual, weight, product, donated=[1])
    assert called(names)[0] == ONE and not [n for n in names if "all_reduce.default" in n]
    for most, launched in (len(x), 1), (len(x) - 1, 0):
        shared.reduce.calls.clear()
        shared.choices.choice = choice(most)
        given, wanted = residual.clone(), residual.clone()
        *_, added = module(x, given, weight, product)
        out, *quantized = op(2 * x, weight, EPSILON, torch.float8_e4m3fn, wanted)
        hidden, _, _, handed_over = runner[-1]
        same((hidden, *handed_over, added), (out, *quantized, wanted))
        assert shared.reduce.calls[op.name] == launched


def test_some_all_reduces_are_not_replaced(shared, choices):  # noqa: F811
    """The all-reduce has another reader or another group, no launch wins, or the norm is not the plugin's."""
    x, weight, held = random(ROWS, HIDDEN), random(HIDDEN, seed=1), random(ROWS, HIDDEN, seed=2)

    def read_twice(x, weight, held):
        total = reduce(x)
        return norm(total, weight), total

    def plain(x, weight, held):
        return add_norm(reduce(x), held, weight)

    def of_another_group(x, weight, held):
        return add_norm(torch.ops.vllm.all_reduce(x, group_name="dp:0"), held, weight)

    for function in (read_twice, of_another_group):
        _, names = piece(function, x, weight, held, donated={2})
        assert ONE not in called(names) and "vllm.all_reduce.default" in names
    _, names = piece(plain, x, weight, held, donated={2})
    assert ONE in called(names)
    choices.on = frozenset()
    _, names = piece(plain, x, weight, held, donated={2})
    assert called(names) == []
    choices.on = frozenset(("norm",))
    shared.choices.choice = choice(0)
    _, names = piece(plain, x, weight, held, donated={2})
    assert called(names) == ["fused_add_rms_norm"] and "vllm.all_reduce.default" in names


def test_what_a_compiled_graph_depends_on(shared):
    fusion = rewrite.Fusion(get_current_vllm_config())
    uuids = [fusion.uuid()]
    for most in (0, 2):
        shared.choices.choice = choice(most)
        uuids.append(fusion.uuid())
    assert uuids[0] == uuids[2] != uuids[1]


def test_beside_aiters_fused_kernel(shared, choices):  # noqa: F811
    """AITER's has the graph unless the plugin wins at every size of its launch."""
    choices.all_reduced = frozenset({None})
    x, weight, held = random(ROWS, HIDDEN), random(HIDDEN, seed=1), random(ROWS, HIDDEN, seed=2)

    def function(x, weight, held):
        return add_norm(reduce(x), held, weight)

    _, names = piece(function, x, weight, held, donated={2})
    assert called(names) == [ONE]
    shared.choices.choice.plugin_by_tokens = bytes(1) + b"\1" * (ROWS - 1) + b"\0"
    _, names = piece(function, x, weight, held, donated={2})
    assert called(names) == []


# Joint measurements


HERE = "2-ranks"


def group_of(rank) -> Fake:
    """Return a group as vLLM has it, over gloo, for one of `as_ranks`."""

    def all_reduce(x):
        total = x.float()
        torch.distributed.all_reduce(total)
        return total.to(x.dtype)

    rank.unique_name, rank.device, rank.device_communicator = TP, torch.device("cpu"), Fake(all_reduce=all_reduce)
    rank._all_reduce_out_place = lambda x: rank.device_communicator.all_reduce(x)
    return rank


def worker_of_one_norm() -> Fake:
    """Return a worker with a model of one norm."""
    model, parallel = torch.nn.Module(), Fake(use_ubatching=False)
    model.norm = None
    model_config = Fake(get_hidden_size=lambda: HIDDEN, dtype=torch.bfloat16)
    worker = fake_worker(model, model_config=model_config, parallel_config=parallel)
    worker.execute_model, worker.sample_tokens = lambda: None, lambda: Fake(get_output=lambda: "tokens")
    return worker


PATTERN = pattern(f"rms_norm_per_block_quant {HIDDEN} bfloat16 residual column-major")
KEYS_MEASURED = [
    f"all_reduce {HIDDEN} bfloat16 {HERE}",
    f"all_reduce_fused_add_rms_norm {HIDDEN} bfloat16 residual {HERE}",
    f"all_reduce_rms_norm_and_per_block_quant {HIDDEN} bfloat16 residual {HERE}",
    f"all_reduce_rms_norm_per_block_quant {HIDDEN} bfloat16 residual column-major {HERE}",
]


@pytest.fixture
def compiled(monkeypatch, choices):  # noqa: F811
    """Make vLLM compile the model, with two quantizing norms of the plugin's."""
    monkeypatch.setattr(compiled_ops, "choices", choices)
    monkeypatch.setattr(compilation, "is_compiled", lambda config, model: True)
    others = f"rms_norm_and_per_block_quant {HIDDEN}", f"rms_norm_per_block_quant {2 * HIDDEN}"
    choices.decisions = dict.fromkeys([PATTERN, *(pattern(f"{other} bfloat16 residual") for other in others)], True)


def start(group, clock: GroupClock, create=OverGloo) -> tuple:
    """Return where each launch serves after a start, its replacements, and its measurements."""
    group, worker = group_of(group), worker_of_one_norm()
    methods = group.device_communicator.all_reduce, worker.execute_model
    all_reduce_timing.before_compiling(worker, group, clock, create)
    shared = all_reduce_norm.groups.get(TP)
    launches = shared.choices.values() if shared else ()
    serves = {str(each.key): [m for m in range(6) if each.plugin_serves(m)] for each in launches}
    replaced = group.device_communicator.all_reduce is not methods[0], worker.execute_model is not methods[1]
    return serves, replaced, clock.pairs


def both(rank) -> list:
    """Return the common result of rank(group) on two ranks, in new processes."""

    def run(group, results):
        results.put((group.rank_in_group, rank(group)))

    (_, first), (_, second) = sorted(as_ranks(run))
    assert first == second
    return first


OFF = {}, (False, False)
TOKENS = [tokens for tokens in (1, 2, 4) for _ in KEYS_MEASURED]


@pytest.mark.usefixtures("compiled")
def test_ranks_measure_together_and_agree():
    """The slowest rank's time counts. A second start measures nothing again."""

    def rank(group):
        runs = [start(group, GroupClock(slow)) for slow in (4 if group.rank_in_group else 8, 0)]
        os.environ["VLLM_ROCM_OPS_DISABLE"] = "all_reduce"
        return *runs, start(group, GroupClock(8))

    first, again, disabled = both(rank)
    served = {key: [1, 2] for key in KEYS_MEASURED}
    assert first == (served, (True, True), TOKENS)
    assert again == (*first[:2], [])
    assert disabled == (*OFF, [])
    record = kernel_selection.record_here()
    assert sorted(map(str, record.shapes)) == KEYS_MEASURED and record.off == {}
    for by_tokens in record.shapes.values():
        assert (by_tokens[4].plugin_us, by_tokens[4].baseline_us) == (3.0, 2.0) and 0 < by_tokens[1].error < 0.1


@pytest.mark.usefixtures("compiled")
def test_common_token_counts_come_first_in_half_of_the_limit(monkeypatch):
    left, measure_all = [], all_reduce_timing.measure_all

    def measure(*arguments):
        left.append(round(arguments[-1] - time.monotonic()))
        return measure_all(*arguments)

    monkeypatch.setenv("VLLM_ROCM_OPS_MEASURE", "120")
    monkeypatch.setattr(all_reduce_timing, "sizes", lambda call, group: [1, 2, 8])
    monkeypatch.setattr(all_reduce_timing, "measure_all", measure)
    timed, found = both(lambda group: (start(group, GroupClock(8))[2], left))
    assert (timed, found) == ([tokens for tokens in (1, 8, 2) for _ in KEYS_MEASURED], [60])


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("wrong", [False, True])
def test_fp8_on_the_wire(wrong):
    """It is timed under keys of its own and may have its known errors, which are reported, and no others."""

    def rank(group):
        class Reduce(OverGloo):
            def sum(self, x):
                return super().sum(x) * (1.01 if wrong and len(x) > 1 else 1)

        return start(group, GroupClock(8), functools.partial(Reduce, fp8_from=2))

    found, record = both(rank), kernel_selection.record_here()
    assert sorted(map(str, record.shapes)) == [f"{key}{FP8_SUMS}" for key in KEYS_MEASURED]
    if wrong:
        assert record.off["all_reduce"].startswith("rank 0: relative error 0.0") and "all_reduce" not in found[0]
        return
    assert {tuple(serves) for serves in found[0].values()} == {(1, 2, 3, 4)} and record.off == {}
    of_sums = next(times for key, times in record.shapes.items() if key.op == "all_reduce")
    assert of_sums[1].error == of_sums[1].baseline_error < 0.002 and 0.02 < of_sums[4].error < 0.03
    lines = report.fp8_sums(record)
    assert len(lines) == len(KEYS_MEASURED) and all(" may send FP8: relative error up to " in line for line in lines)


def test_token_counts_to_time():
    """These are powers of two, and the most in one shot, which resident blocks limit, and in stages."""

    def sizes(hidden: int, payload: int, blocks: int = 304) -> list[int]:
        call = all_reduce_norm.Call("", hidden, torch.bfloat16)
        return all_reduce_timing.sizes(call, Fake(blocks=blocks, payload=payload))

    assert sizes(7168, 0) == [1, 2, 4, 8, 16, 32, 36] and sizes(512, 0, blocks=80) == [1, 2, 4, 8, 16, 32, 64, 80]
    assert sizes(16384, 1) == [1, 2, 4, 8, 16, 32, 64, 128]
    assert sizes(7168, 1) == [1, 2, 4, 8, 16, 32, 36, 64, 128, 256, 292]


@pytest.mark.usefixtures("compiled")
def test_nothing_wins():
    assert both(lambda group: start(group, GroupClock(0))) == (*OFF, TOKENS)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("which", [0, 1])
def test_a_rank_with_other_bits(which):
    """Every launch is off on both ranks, though each rank is within the allowed error."""

    def rank(group):
        create = functools.partial(OverGloo, flips=group.rank_in_group == which)
        return start(group, GroupClock(8), create)

    assert both(rank) == (*OFF, [])
    assert sorted(kernel_selection.record_here().off) == [key.partition(" ")[0] for key in KEYS_MEASURED]
    assert all(why.startswith("the ranks have different bits (") for why in kernel_selection.record_here().off.values())


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("what", ["times", "memory", "a switch"])
def test_a_rank_that_fails(what):
    """Both run without: the measurement of one fails, it shares no memory, or it has another switch."""

    def rank(group):
        fails = group.rank_in_group == 1
        if what == "a switch" and fails:
            os.environ["VLLM_ROCM_OPS_DISABLE"] = "all_reduce"
        create = collectives.create if what == "memory" else OverGloo
        return start(group, GroupClock(2, fails=fails and what == "times"), create)

    assert both(rank) == (*OFF, TOKENS[: len(KEYS_MEASURED) + 1] if what == "times" else [])


def test_a_crash_while_timing_is_retried_once(compiled):
    """It is measured again once. After the second it is off."""

    def rank(group):
        def create(*arguments, **how):
            made = OverGloo(*arguments, **how)
            if sum(dies):
                made.check = lambda: os._exit(9)
            return made

        return start(group, GroupClock(8), create)

    for dies in ([1], [1], [0]):
        found = as_ranks(lambda group, results: results.put((group.rank_in_group, rank(group))))
        if not sum(dies):
            assert len(found) == 2 and found[0][1] == found[1][1]
            assert "all_reduce" in kernel_selection.record_here().off and found[0][1][1] == (False, True)
    assert kernel_selection.record_here().ended == {}


# Starts without measurement, and steps


def test_unsupported_groups_have_a_reason(monkeypatch):

    config, timer = Fake(parallel_config=Fake(use_ubatching=False)), GroupClock(1)

    def unsupported_reason(clock: GroupClock | None = timer, ranks: int = 2) -> str:
        return all_reduce_timing.unsupported_reason(config, Fake(world_size=ranks), clock)

    assert unsupported_reason() == ""
    assert unsupported_reason(None) == "kernels are not timed here"
    assert (unsupported_reason(ranks=9), unsupported_reason(ranks=8)) == ("9 ranks are not supported", "")
    config.parallel_config.use_ubatching = True
    assert "use_ubatching" in unsupported_reason()
    monkeypatch.setenv("VLLM_ROCM_OPS_DISABLE", "all")
    assert unsupported_reason() == "VLLM_ROCM_OPS_DISABLE"


@pytest.mark.parametrize("name", ["execute_model", "sample_tokens"])
def test_a_step_whose_rank_was_missing_fails(name):
    """It fails before its results are used: at its end, or where vLLM waits for them."""
    reduce, worker = OverGloo(None, None, all_reduce=None), worker_of_one_norm()
    step = all_reduce_norm.checked(getattr(worker, name), reduce.check)
    early = step()
    assert early is None or early.get_output() == "tokens"
    late = step()
    reduce.missing = "rank 1 of 2 did not come in epoch 7"
    with pytest.raises(collectives.RankMissing, match="rank 1 of 2 did not come in epoch 7"):
        late.get_output() if late is not None else step()


@pytest.mark.parametrize("name", ["fused_allreduce_rms_norm", "fused_allreduce_gemma_rms_norm"])
def test_functions_of_models_that_are_not_compiled(monkeypatch, shared, name):
    """The fused op has the values of an all-reduce and vLLM's norm; beyond the launch's limit, vLLM's runs."""
    gemma = "gemma" in name
    layer = (GemmaRMSNorm if gemma else RMSNorm)(HIDDEN, eps=EPSILON)
    layer.weight.data = random(HIDDEN, seed=1)
    call = all_reduce_norm.Call("fused_add_rms_norm", HIDDEN, torch.bfloat16, True, helper=name)
    fused = all_reduce_norm.helper(lambda *given: "vLLM's", shared, call)
    x, residual = random(ROWS, HIDDEN), random(ROWS, HIDDEN, seed=2)
    given = residual.clone()
    y, added = fused(x, given, layer)
    wanted, summed = layer.forward_native(2 * x, residual.clone())
    torch.testing.assert_close(y, wanted, atol=0, rtol=2**-6)
    assert torch.equal(added, summed) and torch.equal(given, residual) == gemma
    more = random(ROWS + 1, HIDDEN)
    assert fused(more, more.clone(), layer) == "vLLM's" == fused(x.float(), given.float(), layer)
    module = types.ModuleType("model")
    module.kept = setattr(module, name, len)
    monkeypatch.setitem(sys.modules, "model", module)
    seam.replace_function(name, len, fused)
    assert getattr(module, name) is fused and fused.vllms is not fused


def test_an_all_reduce_alone(shared):
    """The communicator's all-reduce runs it, for rows that a launch supports."""
    call = all_reduce_norm.Call("", HIDDEN, torch.bfloat16)
    all_reduce = all_reduce_norm.communicator(lambda x: "vLLM's", shared, call)
    x = random(ROWS, HIDDEN)
    assert torch.equal(all_reduce(x), 2 * x) and shared.reduce.calls == {"sum": 1}
    others = random(ROWS + 1, HIDDEN), random(ROWS, 8), x.float(), random(1, ROWS, HIDDEN)
    assert [all_reduce(other) for other in others] == ["vLLM's"] * 4


def engine_of_two(engines, how: str, cache: str, flavour=("llama", "token"), **environment: str) -> dict:
    """Return the answer of a compiled model on two ranks, where the plugin wins with fewer than five tokens."""
    job = engines.job(flavour, compiled=True, environment=environment)
    job["engine"] |= {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    before = FORKED + f"import on_cpu; on_cpu.measure(); on_cpu.reduce({how})\n"
    tables = str(engines.folder / f"tables-{cache}")
    return engines.run_one(job, before=before, cache=cache, VLLM_ROCM_OPS_TABLES=tables)


@full  # by default test_reduced_head_norms.py has two ranks of a model with these launches, too
@pytest.mark.slow
def test_two_ranks_in_the_engine(engines, expected):
    """A step of few tokens has one launch for each all-reduce and norm, and all but the last quantize.

    A prompt's step has vLLM's all-reduce and the plugin's norms. Tokens are the plain model's.
    """
    found = engine_of_two(engines, "5", "cache-reduced")
    assert found["tokens"] == [each.argmax(-1).tolist() for each in expected(("llama", "token"), found["tokens"])]
    assert found["seams"]["all_reduce"] == "on"
    layers, steps = checkpoints.LLAMA["num_hidden_layers"], STEPS - 1
    quantizes, last = "all_reduce_rms_norm_dynamic_per_token_quant", "all_reduce_fused_add_rms_norm"
    for rank in (found["stats"], *found["other_ranks"]):
        launches = {op: kernels["one launch"] for op, kernels in rank.items() if op.startswith("all_reduce")}
        assert launches == {quantizes: (2 * layers - 1) * steps, last: steps}
    norms = sum(found["stats"]["rms_norm_dynamic_per_token_quant"].values())
    assert norms == 2 * layers * STEPS - (2 * layers - 1) * steps
    plugin, others = ([one for one in rank if one["shape"].startswith("all_reduce")] for rank in found["choices"])
    assert plugin == others and [one["ours"] for one in plugin] == [[1, 2, 3, 4]] * 3
    assert f"{quantizes}  256 bfloat16 residual 2-ranks" in found["output"]
    assert "in no graph" not in found["output"]


@full  # by default test_a_step_whose_rank_was_missing_fails has the message, without an engine
@pytest.mark.slow
def test_a_rank_that_is_missing_ends_the_engine(engines):
    """A decode step fails with a message that names the rank."""
    with pytest.raises(AssertionError) as caught:
        engine_of_two(engines, "5, missing_after=30", "cache-missing")
    assert "Worker failed with error 'all_reduce: rank 1 of 2 did not come in epoch 31'" in str(caught.value)
