"""All bugs by name: one per file and way of catching, more where these were over five, and one for each op and test that catch any."""

import importlib
import pkgutil

from ..bug import Bug


def _by_name() -> dict[str, Bug]:
    areas = [importlib.import_module(f"{__name__}.{area.name}") for area in pkgutil.iter_modules(__path__)]
    found = {}
    for bug in (bug for area in areas for bug in getattr(area, "BUGS", ())):
        if bug.name in found:
            raise ValueError(f"two bugs are named {bug.name!r}")
        found[bug.name] = bug
    return found


BUGS = _by_name()
