"""The page of what five other systems have, and what here takes its place: from tests/data/systems.csv."""

import csv
from dataclasses import dataclass

from vllm_rocm_ops.tools import cli

from .measurements import ROOT, markdown
from .op_pages import DOCS, WRITTEN
from .op_pages import link as link_of

PAGE = DOCS / "systems.md"
DATA = ROOT / "tests" / "data" / "systems.csv"
SYSTEMS = {
    "HF": ("hf-rocm-kernels", "Hugging Face, of its article on kernels for the MI300", "huggingface/hf-rocm-kernels"),
    "RF": ("RadeonFlow Kernels", "the first prize of AMD's contest of 2025", "RadeonFlow/RadeonFlow_Kernels"),
    "TS": ("Triton kernels of the Inference Sprint", "of the same contest", "scar-ai/AMD-Triton-Kernels"),
    "PK": ("AMD perf-kernels", "Triton kernels in AMD's fork", "ROCm/triton"),
    "MX": ("AITER's MX-FP8 for few tokens", "a proposal to AITER", "ROCm/aiter/pull/3783"),
}
STATES = {
    "there": "ours does it",
    "PyTorch's": "PyTorch does it as well",
    "left out": "ours does not do it, on purpose",
    "not yet": "ours will do it",
}


@dataclass(frozen=True)
class Row:
    """What a system has: the ids of reviews, its name, and what is here: ops by name, or a command's arguments, files, tests (a
    file, or file::test), and why it is as it is."""

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
        """Return the words behind `vllm-rocm-ops`, or behind `serving_benchmarks/`, if a command is ours."""
        return self.ours.split() if self.ours.partition(" ")[0] in (*cli.COMMANDS, "contests") else []

    @property
    def ops(self) -> list[str]:
        return [] if self.command else self.ours.split()


def rows() -> list[Row]:
    with DATA.open(newline="") as file:
        return [Row(**row) for row in csv.DictReader(file)]


def link(path: str) -> str:
    """To a file, from the folder of the pages."""
    file = path.partition("::")[0]
    shown = path.rpartition("::")[2] if "::" in path else file.rpartition("/")[2]
    inside = "vllm_rocm_ops/docs/"
    return f"[{shown}]({file.removeprefix(inside) if file.startswith(inside) else '../../' + file})"


def cells(row: Row) -> tuple[str, ...]:
    if row.command:
        ours = f"`{'python serving_benchmarks/' if row.command[0] == 'contests' else 'vllm-rocm-ops '}{row.ours}`"
    else:
        ours = ", ".join(f"[{name}]({link_of(name)})" for name in row.ops)
    said = [row.state if row.state != "there" else "", row.why]
    state = ": ".join(filter(None, said)) if row.state != "left out" else f"left out, because {row.why}"
    return (
        row.theirs,
        ". ".join(filter(None, (state, ours))),
        *(", ".join(map(link, paths.split())) for paths in (row.where, row.tests)),
    )


def page() -> str:
    found = rows()
    parts = [
        WRITTEN,
        "# Other systems",
        "Every kernel and tool of five public systems for AMD GPUs, and what takes its place. No code of theirs is in the package.",
        "\n".join(
            f"- **{state}**: {meaning}. {sum(row.state == state for row in found)}" for state, meaning in STATES.items()
        ),
    ]
    for system, (name, about, where) in SYSTEMS.items():
        of_system = [row for row in found if row.system == system]
        table = markdown(("theirs", "ours", "where", "tested by"), map(cells, of_system))
        parts += [f"## {name}", f"{about[0].upper()}{about[1:]}: [{where}](https://github.com/{where}).", table]
    return "\n\n".join(parts) + "\n"
