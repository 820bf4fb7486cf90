"""Name what a choice between the plugin's kernel and vLLM's is for, by records of calls and baselines.

Equal keys share a choice and a place in the file of results. `str` is for people; nothing parses it.
"""

from __future__ import annotations

from typing import NamedTuple


class Baseline(NamedTuple):
    """The kernel that vLLM would run.

    Attributes:
        name: Its name, empty for what vLLM's compiler makes.
        is_fused: Whether a pass of vLLM's fuses the quantization into it.
        scope: "compiled" or "eager" where one choice holds for all token counts, as in a compiled graph. Else empty.
        named: The option of vLLM by which the user named this kernel's backend, with its value. Else empty.
        flag: The flag with which vLLM would run it, if `vllm-rocm-ops advise` timed it. Empty in a start.
    """

    name: str = ""
    is_fused: bool = False
    scope: str = ""
    named: str = ""
    flag: str = ""

    def __str__(self) -> str:
        words = "-".join(filter(None, (self.name, "fused" * self.is_fused, self.scope)))
        return words + f" ({self.named})" * bool(self.named) + f" with {self.flag}" * bool(self.flag)


AITER_OFF, AITER_ON = "VLLM_ROCM_USE_AITER=0", "VLLM_ROCM_USE_AITER=1"
COMPILED, EAGER = Baseline(scope="compiled"), Baseline(scope="eager")
SEPARATE = Baseline("separate")
"""The plugin's own kernels in two launches."""


FP8_SUMS = "-fp8-sums"
"""The end of an all-reduce's baseline where the plugin's sends FP8 in large calls."""
ONE_PLUS = " one-plus"
"""The trait of norms that multiply by 1 + weight, in the shape of a pattern."""


class Decode(NamedTuple):
    """Decode attention of one context length.

    Attributes:
        heads: Query heads, key heads and their sizes.
        quantized: The kind of output quantization, or empty.
        page_size: Slots per page of the cache.
        rows: Query rows per request.
        keys: Keys per request.
        longest: The model's longest context, for which a captured graph is made.
    """

    heads: str
    quantized: str
    page_size: int
    rows: int
    keys: int
    longest: int

    def __str__(self) -> str:
        rows = f" {self.rows} rows" * (self.rows > 1)
        return f"{self.quantized} page {self.page_size}{rows} {self.keys} of {self.longest} keys"


class Pattern(NamedTuple):
    """Calls in a compiled graph that one decision is for.

    Attributes:
        op: The name of the plugin's op.
        shape: Sizes, dtypes and traits.
        columns: Columns of a norm or an activation, 0 for other patterns.
        has_residual: Whether a norm adds a residual.
        is_column_major: Whether scales per block are column-major.
    """

    op: str
    shape: str
    columns: int = 0
    has_residual: bool = False
    is_column_major: bool = False

    def __str__(self) -> str:
        return f"{self.op} {self.shape}"


class Key(NamedTuple):
    """A layer's op and shape against one of vLLM's kernels, for attention at one context length."""

    op: str
    shape: str
    baseline: Baseline
    decode: Decode | None = None

    def __str__(self) -> str:
        return f"{self.op} {self.call} {self.baseline}"

    @property
    def call(self) -> str:
        """The call without op and baseline, for logs."""
        return f"{self.shape}{self.decode or ''}"

    @property
    def has_one_choice(self) -> bool:
        """True if one choice holds for all token counts."""
        return bool(self.baseline.scope)

    @classmethod
    def of_json(cls, parts: list) -> Key:
        """Return a key as JSON has it: lists in place of tuples. Raises TypeError for anything else."""
        op, shape, baseline, decode = parts
        return cls(op, shape, Baseline(*baseline), decode and Decode(*decode))
