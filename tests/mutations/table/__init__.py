"""All bugs by name: one per file and way of catching, and one for each op of which cases catch any."""

from ..bug import Bug
from . import attention, experts, gemm, package, rows


def _by_name() -> dict[str, Bug]:
    found = {}
    for bug in (bug for area in (rows, gemm, experts, attention, package) for bug in area.BUGS):
        if bug.name in found:
            raise ValueError(f"two bugs are named {bug.name!r}")
        found[bug.name] = bug
    return found


BUGS = _by_name()
