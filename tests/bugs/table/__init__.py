"""All bugs, by what they are."""

from ..bug import Bug
from . import (
    collectives,
    decode,
    decode_output,
    experts,
    flash,
    gemm,
    mla,
    norms,
    rope,
    routing,
    rows,
    rules,
    seams,
    seams_attention,
    seams_fusion,
    seams_quantized,
    seams_rope,
    seams_routing,
    skinny_gemm,
    steps,
    tiled_gemm,
)

AREAS = (
    *(norms, rows, gemm, skinny_gemm, tiled_gemm, experts, routing, rope, decode, decode_output, mla, flash),
    *(collectives, rules, seams, seams_attention, seams_fusion, seams_quantized, seams_rope, seams_routing, steps),
)


def _by_name() -> dict[str, Bug]:
    found = {}
    for bug in (bug for area in AREAS for bug in area.BUGS):
        if bug.what in found:
            raise ValueError(f"two bugs are named {bug.what!r}")
        found[bug.what] = bug
    return found


BUGS = _by_name()
