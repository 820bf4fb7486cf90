"""All-reduces with the norm behind them as one launch: what graphs hold, what ranks measure together and agree on, and steps that fail.

Ranks are threads or processes on the CPU; a stand-in sums up over gloo, or in the graph, in place of the kernel, which tests/emulator has.
"""

import collections
import types

import pytest
import torch
from test_graph import HIDDEN, KEYS, MX, ROWS, add_norm, called, expected, norm, piece, quantizer, random, same

from vllm_rocm_ops import ops
from vllm_rocm_ops.core.correctness import as_tuple
from vllm_rocm_ops.vllm.fusion import row_selection

pytestmark = pytest.mark.usefixtures("configuration", "schemas")
TP, EPSILON = "tp:0", 1e-6


@pytest.fixture(scope="module")
def schemas():
    """Define the ops that vLLM's passes name and its CPU build lacks."""
    import passes

    library = passes.define_schemas()
    yield
    passes.forget_schemas(library)


@pytest.fixture(autouse=True)
def choices(monkeypatch) -> row_selection.Choices:
    from vllm_rocm_ops.vllm.fusion import graph

    made = row_selection.Choices(on=frozenset(("norm", "activation")))
    monkeypatch.setattr(graph, "choices", made)
    return made


class Doubled:
    """An all-reduce of two ranks with the same inputs, and how often it was called."""

    def __init__(self):
        self.calls = collections.Counter()

    def __call__(self, op, x, *args):
        self.calls[op.name] += 1
        return op(2 * x, *args)

    def sum(self, x):
        self.calls["sum"] += 1
        return 2 * x


class Choice:
    """Ours up to so many tokens, at least at some."""

    def __init__(self, most: int):
        self.ours, self.key = bytes(1) + bytes([1]) * most, "key"

    def is_ours(self, tokens: int) -> bool:
        return tokens < len(self.ours) and self.ours[tokens] == 1


class Alike:
    """One choice for all calls."""

    def __init__(self, choice: Choice):
        self.choice = choice

    def get(self, call) -> Choice:
        return self.choice

    def values(self) -> list[Choice]:
        return [self.choice]


@pytest.fixture
def shared(monkeypatch):
    """A group whose all-reduces double; every norm of so many rows at most is one launch."""
    from vllm.distributed import parallel_state

    from vllm_rocm_ops.vllm.fusion import reduced

    made = reduced.Shared(Doubled(), Alike(Choice(ROWS)))
    theirs = types.SimpleNamespace(_all_reduce_out_place=lambda x: 2 * x)
    monkeypatch.setitem(reduced.groups, TP, made)
    monkeypatch.setitem(parallel_state._groups, TP, lambda: theirs)
    return made


def reduce(x):
    return torch.ops.vllm.all_reduce(x, group_name=TP)


ONE = "all_reduce_norm"


@pytest.mark.parametrize("rows", [ROWS, ROWS + 1])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("key", [*KEYS, MX, None])
def test_one_op_in_the_place_of_three(shared, key, residual, rows):
    """An all-reduce, a norm and what quantizes it. With more rows than a launch takes vLLM's all-reduce and our norm run."""
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


def test_what_stays_vllms(shared, choices):
    """An all-reduce that something else reads, too, one with another group, one where nothing wins, and norms that are not ours."""
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
    shared.choices.choice = Choice(0)
    _, names = piece(plain, x, weight, held, donated={2})
    assert called(names) == ["fused_add_rms_norm"] and "vllm.all_reduce.default" in names


def test_beside_aiters_fused_kernel(shared, choices):
    """It has the graph unless ours wins at every size that a launch takes."""
    choices.all_reduced = frozenset({None})
    x, weight, held = random(ROWS, HIDDEN), random(HIDDEN, seed=1), random(ROWS, HIDDEN, seed=2)

    def function(x, weight, held):
        return add_norm(reduce(x), held, weight)

    _, names = piece(function, x, weight, held, donated={2})
    assert called(names) == [ONE]
    shared.choices.choice.ours = bytes(1) + b"\1" * (ROWS - 1) + b"\0"
    _, names = piece(function, x, weight, held, donated={2})
    assert called(names) == []
