"""Writes what is generated: parts of README.md and of the page beside the results, each between `<!-- name -->` and
`<!-- /name -->`, the pages of the ops, of what works with what and of other systems: python tests/readme.py"""

import ast
import functools
import inspect
import itertools
import pathlib
import re
import textwrap
from collections.abc import Callable

import attention_table
import compatibility
import measurements
import op_pages
import predicted_table
import quality_table
import systems
from measurements import RESULTS, ROOT, markdown
from op_pages import DOCS

from vllm_rocm_ops import envs
from vllm_rocm_ops import op as op_module
from vllm_rocm_ops.op import Op

README = ROOT / "README.md"


def switches() -> str:
    rows = ((f"`{v.name}`", f"`{v.default}`" if v.default else "", v.meaning) for v in envs.VARIABLES.values())
    return markdown(("variable", "default", "meaning"), rows)


def families() -> str:
    """A row for each file of ops: what the ops compute, the seams that call them, and the most tokens of these calls."""
    modules: dict[str, list[Op]] = {}
    for op in op_module.registered():
        modules.setdefault(op_pages.sentence(inspect.getmodule(op.reference)), []).append(op)
    body = []
    for about, ops in modules.items():
        seams = {name: most for op in ops for name, most in op_pages.seams_of(op).items()}
        tokens = sorted({{None: "any", 0: "where measured"}.get(most, str(most)) for most in seams.values()})
        links = ", ".join(f"[{op.name}](vllm_rocm_ops/docs/{op.name}.md)" for op in ops)
        what = re.split(r"; |\.(?: |$)", about)[0]
        body.append((what, links, ", ".join(f"`{name}`" for name in seams), " or ".join(tokens)))
    return markdown(("what", "ops", "seams in vLLM", "tokens at most"), body)


SUFFIXES = (".py", ".h", ".hip", ".cpp")


def tree() -> str:
    """Return every source file of the package and of csrc with its first sentence, folder by folder."""

    def said(path: pathlib.Path) -> str:
        if path.suffix == ".py":
            text = ast.get_docstring(ast.parse(path.read_text())) or ""
        else:
            lines = itertools.takewhile(lambda line: line.startswith("//"), path.read_text().splitlines())
            text = " ".join(line.removeprefix("//") for line in lines)
        if not text:
            raise ValueError(f"{path.relative_to(ROOT)} must begin with a docstring or comment that says what it is")
        return textwrap.shorten(re.split(r"[.;](?: |$)", " ".join(text.split()))[0], 110, placeholder=" ...")

    rows: dict[str, list[tuple[str, str]]] = {}
    for top in ("vllm_rocm_ops", "csrc"):
        for path in sorted((ROOT / top).rglob("*"), key=lambda path: (path.parent, path.name)):
            if path.suffix in SUFFIXES and path.name != "__init__.py":
                place = path.relative_to(ROOT)
                folder = (
                    "/".join(place.parts[:2] if top == "csrc" else place.parts[:-1]) if len(place.parts) > 2 else top
                )
                rows.setdefault(folder, []).append((f"`{place.relative_to(folder)}`", said(path)))
    return "\n\n".join(f"### {folder}/\n\n{markdown(('file', 'what'), body)}" for folder, body in rows.items())


BLOCKS: dict[pathlib.Path, dict[str, Callable[[], str]]] = {
    README: {
        "unmeasured": measurements.unmeasured,
        "switches": switches,
        "engine": functools.partial(measurements.engine, slice(1)),
        "predicted": predicted_table.steps,
        "ops": families,
    },
    DOCS / "measuring.md": {
        "unmeasured": measurements.unmeasured,
        "engine": functools.partial(measurements.engine, slice(1, None)),
        "decode": measurements.decode_summary,
        "beside the engine": measurements.beside_the_engine,
        "attention in the engine": measurements.attention_in_engine,
        "experts": measurements.experts_summary,
        "decode attention": attention_table.decode_summary,
        "single ops": measurements.single_ops,
        "quality": quality_table.quality,
        "arithmetic": quality_table.arithmetic,
    },
    DOCS / "architecture.md": {"tree": tree},
    DOCS / "timing.md": {"published": predicted_table.published, "simpler": predicted_table.simpler},
    RESULTS / "README.md": {
        "profiles": measurements.profiles,
        "engine": measurements.engine_commands,
        "serving": measurements.serving,
        "decode": measurements.decode,
        "experts": measurements.experts,
        "decode attention": attention_table.decode,
        "attention": attention_table.prompts,
        "single ops": measurements.results,
        "predicted": predicted_table.calls,
        "static": measurements.static,
        "waits": measurements.waits,
    },
}


def fresh(path: pathlib.Path) -> str:
    """A file's text with every generated part written anew."""
    text = path.read_text()
    for name, make in BLOCKS[path].items():
        block = f"<!-- {name} -->\n{make()}\n<!-- /{name} -->"
        text, count = re.subn(
            rf"<!-- {name} -->.*?<!-- /{name} -->", lambda _, block=block: block, text, flags=re.DOTALL
        )
        if count != 1:
            raise ValueError(f"{path.relative_to(ROOT)} must have the part {name} once, got {count} times")
    return text


def documents() -> dict[pathlib.Path, str]:
    """Every file that has generated parts, with the text that it should have."""
    pages = {compatibility.PAGE: compatibility.page(), systems.PAGE: systems.page()}
    return {path: fresh(path) for path in BLOCKS} | op_pages.pages() | pages


if __name__ == "__main__":
    for path, text in documents().items():
        path.write_text(text)
