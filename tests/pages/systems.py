"""Write the page that maps five other systems to this package, from tests/data/systems.csv."""

import csv
from dataclasses import dataclass

from vllm_rocm_ops.tools import cli

from .measurements import ROOT, markdown
from .op_pages import DOCS, WRITTEN
from .op_pages import link as link_of

PAGE = DOCS / "systems.md"
DATA = ROOT / "tests" / "data" / "systems.csv"
SYSTEMS = {
    "HF": ("hf-rocm-kernels", "Hugging Face, from its article on MI300 kernels", "huggingface/hf-rocm-kernels"),
    "RF": ("RadeonFlow Kernels", "first prize of AMD's 2025 contest", "RadeonFlow/RadeonFlow_Kernels"),
    "TS": ("Triton kernels of the Inference Sprint", "from the same contest", "scar-ai/AMD-Triton-Kernels"),
    "PK": ("AMD perf-kernels", "Triton kernels in AMD's fork of Triton", "ROCm/triton"),
    "MX": ("AITER small-M MX-FP8", "a proposal to AITER", "ROCm/aiter/pull/3783"),
}
STATES = {
    "there": "implemented here",
    "PyTorch's": "covered by PyTorch",
    "left out": "left out on purpose",
    "not yet": "not yet implemented",
}


@dataclass(frozen=True)
class Row:
    """A feature of a system, and its counterpart here.

    `ours` has ops by name, or the arguments of a command; `where` files, `tests` files or file::test, `why` the reason for its state.
    """

    system: str
    ids: str
    theirs: str
    state: str
    ours: str
    where: str
    tests: str
    why: str

    @property
    def command(self) -> list[str]:
        """Return the arguments of `vllm-rocm-ops` or `serving_benchmarks/`, if the counterpart is a command."""
        return self.ours.split() if self.ours.partition(" ")[0] in (*cli.COMMANDS, "contests") else []

    @property
    def ops(self) -> list[str]:
        """Return the names of ops, if the counterpart is not a command."""
        return [] if self.command else self.ours.split()


def rows() -> list[Row]:
    with DATA.open(newline="") as file:
        return [Row(**row) for row in csv.DictReader(file)]


def link(path: str) -> str:
    """Return a link to a file from the folder of pages."""
    file = path.partition("::")[0]
    shown = path.rpartition("::")[2] if "::" in path else file.rpartition("/")[2]
    inside = "vllm_rocm_ops/docs/"
    return f"[{shown}]({file.removeprefix(inside) if file.startswith(inside) else '../../' + file})"


def cells(row: Row) -> tuple[str, ...]:
    counterpart = ", ".join(f"[{name}]({link_of(name)})" for name in row.ops)
    if row.command:
        program = "python serving_benchmarks/" if row.command[0] == "contests" else "vllm-rocm-ops "
        counterpart = f"`{program}{row.ours}`"
    said = [{"there": "", "PyTorch's": STATES["PyTorch's"]}.get(row.state, row.state), row.why]
    state = ": ".join(filter(None, said)) if row.state != "left out" else f"left out, because {row.why}"
    return (
        row.theirs,
        ". ".join(filter(None, (state, counterpart))),
        *(", ".join(map(link, paths.split())) for paths in (row.where, row.tests)),
    )


def page() -> str:
    features = rows()
    parts = [
        WRITTEN,
        "# Other systems",
        "Kernels and tools of five public systems for AMD GPUs, with their counterparts here. The package contains none of their code.",
        "\n".join(
            f"- {meaning[0].upper()}{meaning[1:]}: {count}"
            for state, meaning in STATES.items()
            if (count := sum(row.state == state for row in features))
        ),
    ]
    for system, (name, about, where) in SYSTEMS.items():
        of_system = [row for row in features if row.system == system]
        table = markdown(("feature", "counterpart here", "source", "tests"), map(cells, of_system))
        parts += [f"## {name}", f"{about[0].upper()}{about[1:]}: [{where}](https://github.com/{where}).", table]
    return "\n\n".join(parts) + "\n"
