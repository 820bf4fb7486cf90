"""Map the names in recorded results to present ones. The files are read as they are and never rewritten."""

from __future__ import annotations

import re

NAMES = {
    "cpu_gaps": "cpu_shims",
    "latent_attention": "mla_attention",
    "latent_norm_rope_and_cache": "mla_norm_rope_and_cache",
    "latent_norms": "mla_norms",
}
"""Seams and ops."""

KERNELS = {r"_narrow(?=_\d+$)": "_wave_splitk", r"^latent_norm_rope_and_cache(?=_)": "mla_norm_rope_and_cache"}
"""Pieces of kernel names, as regular expressions."""

OBJECTS = {
    "4017231c0edb32b3": "a82843758cfbd624",  # batched_gemm gfx942
    "1e3d61e33706c0c3": "ac141f4c92f9d5a6",  # block_scaled_mm gfx942
    "e2150a5d4d7a399b": "c969d6901ca9edf3",  # scaled_mm gfx942
    "c57a8958cbcbc443": "b87a42d9a6c06a61",  # unquantized_gemm gfx942
    "bd1c08aed38a7169": "f89bf05f163f4200",  # batched_gemm gfx950
    "75acee10f4c15338": "e39a2f68c033d32a",  # block_scaled_mm gfx950
    "0baabbb55ca33ed0": "df35dbe817ac42a4",  # scaled_mm gfx950
    "ff719bc5f0e91700": "75572bb5df03bf88",  # unquantized_gemm gfx950
}
"""Code objects, by the first 16 digits of their SHA-256, whose machine code only got other symbols (csrc/compare_code.py)."""


def current(text: str) -> str:
    """Replace each old name in a text, such as a comma list of seams or `kernel + kernel`, by the present one."""

    def word(match: re.Match) -> str:
        name = NAMES.get(match[0], match[0])
        for old, new in KERNELS.items():
            name = re.sub(old, new, name)
        return name

    return re.sub(r"\w+", word, text)


def line(found: dict) -> dict:
    """Return a line of a result file with the present names of its op, kernel and seam."""
    return found | {key: current(found[key]) for key in ("op", "kernel", "seam") if key in found}
