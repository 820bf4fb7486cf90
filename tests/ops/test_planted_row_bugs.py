"""Bugs planted in a copy of the kernels of softmax and stream_memory are caught, as in test_planted_bugs.py."""

import pytest
from test_planted_bugs import few_of_bugs, kernels, plant, require_caught  # noqa: F401

from vllm_rocm_ops import ops

# name: (text, what replaces it, case, arch, what must be said)
SOFTMAX = {
    "maximum not combined": (
        "subtracted(reduce_block(maximum, kNothing, maxima, row.waves, Max{}));\n#pragma",
        "subtracted(maximum);\n#pragma",
        "bf16",
        "gfx942",
        "output 0",
    ),
    "sum not scaled when the maximum grows": (
        "sum *= exponential<T>(maximum - subtracted(grown));",
        "",
        "rising",
        "gfx950",
        "output 0",
    ),
    "waves' sums not scaled": ("sum *= exponential<T>(maximum - of_row);", "", "fp32-long", "gfx942", "output 0"),
    "tail counted": ("if (!in_bounds) pair =", "if (false) pair =", "hidden2040-tail", "gfx950", "output 0"),
    "minus infinity subtracted": ("m == kNothing ? 0.0f : m", "m", "bf16-masked", "gfx942", "output 0"),
    "logarithm rounded": (" + x * 1.925963033500e-8f", "", "fp32-masked", "gfx942", "output 0"),
    "subnormal numbers lost": ("x < -126.0f", "false", "bf16-special", "gfx942", "output 0"),
    "last elements left out": (
        "column < row.hidden; column += row.threads)\n    store_element",
        "column + 1 < row.hidden; column += row.threads)\n    store_element",
        "fp16-general",
        "gfx950",
        "output 0",
    ),
    "rows overlap": ("block * hidden * size", "block * hidden * 2", "fp32", "gfx950", "of argument out"),
    "second chunks dropped in the second pass": (
        "Chunk y = values<T>(loaded[i], in_bounds);",
        "Chunk y = values<T>(loaded[0], in_bounds);",
        "rising",
        "gfx942",
        "output 0",
    ),
}
STREAM = {
    "tail left out": (
        "for (; first < vectors;",
        "for (; first + step < vectors;",
        "read-tail",
        "gfx942",
        "NaNs|output 0",
    ),
    "another thread's sum too early": ("block_barrier();  // hazard", "// hazard", "read-few", "gfx950", "barrier"),
    "one vector for a group": ("use(i, first + i * step)", "use(i, first)", "copy-groups", "gfx942", "output 0"),
    "three words of four": ("sum.z + sum.w", "sum.z", "read-groups", "gfx950", "output 0"),
    "a block's sum in another's place": (
        "(u32*)out + u32(wave::block_id_x())",
        "(u32*)out + (blocks - 1 - wave::block_id_x())",
        "read-blocks",
        "gfx942",
        "output 0",
    ),
}
BUGS = {name: (ops.softmax, *bug) for name, bug in SOFTMAX.items()}
BUGS |= {name: (ops.stream_memory, *bug) for name, bug in STREAM.items()}


@pytest.mark.parametrize("bug", few_of_bugs(BUGS))
def test_planted_bug_is_caught(bug, plant, monkeypatch):  # noqa: F811
    the_op, text, replacement, case, arch, said = BUGS[bug]
    require_caught((f"ops/{the_op.name}.hip", text, replacement, the_op, case, arch, said), plant, monkeypatch)
