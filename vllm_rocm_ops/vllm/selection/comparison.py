"""Compare the plugin's kernel with vLLM's for the same calls: what both get, and whether the plugin's result is right.

A `Comparison` describes a kind of calls. `LayerComparison` samples calls of a model's layers by rows and columns, which
`exact` computes from dequantized weights. `RowComparison` samples whole rows, as norms and activations have several results.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_rocm_ops.core.op import Op
from vllm_rocm_ops.vllm.selection.replays import Mismatch, copies, distance, same

LARGEST_ERROR = 2.0  # times the error of vLLM's kernel
NO_SAMPLE = 0.25  # relative error of vLLM's kernel above which the sample is not what it computes
NOT_FINITE = 1e30  # in place of NaN and infinity, which JSON lacks
FLOOR = 1e-5  # relative error that is always allowed: float32 sums in another order
SAMPLED_GROUPS = 4  # of columns
GROUP = 16  # neighboring columns of a sample


class Sample(NamedTuple):
    """Calls to check and to time.

    Attributes:
        sets: The arguments of each call.
        judge: Returns the relative errors of the plugin's and of vLLM's result of the first call. Raises `Mismatch`.
        shown: Returns what of a result is compared.
        fresh: Copies the arguments of a call that may write them.
    """

    sets: list[tuple]
    judge: Callable[[object, object], tuple[float, float]]
    comparable: Callable = same
    fresh: Callable = tuple


class Comparison:
    """The plugin's op and vLLM's kernel for the same calls.

    A `layer` is a tuple of what a call has besides its tokens, for one layer of the model. Subclasses define

        describe(layer)          the name of a layer's shape, which distinguishes it from all others
        work(layer, tokens)      the bytes and the operations of a call
        plugin(*arguments)       a call by the plugin's kernels, None where they do not support it
        baseline(*arguments)     the call by vLLM's kernel
        sample(layers, tokens)   a `Sample` with a call of each layer
    """

    op: Op
    sampled_rows = 8

    def max_tokens(self) -> int:
        """Return the default token limit of the plugin, before timing."""
        return 0


class Refused(Exception):
    """Signal that the plugin's kernels do not support the call to be timed."""


def run_plugin(kernels: Comparison, *arguments):
    """Return the plugin's result of a call to be timed.

    Raises:
        Refused: The kernels do not support the call.
    """
    with kernels.op.trial():
        output = kernels.plugin(*arguments)
    if output is None:
        raise Refused
    return output


class LayerComparison(Comparison):
    """Sampled calls of a model's layers.

    Subclasses define besides:

        columns(layer)                       the columns of the input and of the result
        arguments(layer, x, seed)            the arguments of a call with tokens x; the seed is for further random ones
        exact_of(a, rows, columns)           these rows and columns of the result, in float32, given the op's arguments;
                                             columns come in groups of `GROUP`
    """

    by_attention = False
    """True if the plugin serves only where timed faster, or with VLLM_ROCM_OPS_ATTENTION=1."""
    comparable = staticmethod(same)
    """Returns the rows of a result that are compared."""

    def op_arguments(self, *arguments) -> tuple:
        """Return the op's arguments, given a call's."""
        return arguments

    def exact(self, arguments: tuple, x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        return self.exact_of(self.op.Arguments(*self.op_arguments(*arguments)), rows, columns)

    def sample(self, layers: list[tuple], tokens: int) -> Sample:
        columns_in, columns_out = self.columns(layers[0])
        device = next(value for value in layers[0] if isinstance(value, Tensor)).device
        generator = torch.Generator(device).manual_seed(tokens)
        dtype = next((value for value in layers[0] if isinstance(value, torch.dtype)), torch.bfloat16)  # tokens' dtype
        x = torch.randn(tokens, columns_in, generator=generator, device=device).to(dtype)
        sets = [self.arguments(layer, x, seed) for seed, layer in enumerate(layers)]
        starts = spread(-(-columns_out // GROUP), SAMPLED_GROUPS) * GROUP
        columns = (starts[:, None] + torch.arange(GROUP)).flatten()
        columns = columns[columns < columns_out].to(device)

        def judge(*results) -> tuple[float, float]:
            plugin, baseline = map(self.comparable, results)
            bits = baseline.view(torch.uint8) if baseline.itemsize == 1 else baseline
            reached = bits.any(1).nonzero().flatten()  # without tokens that have no expert on this rank
            rows = reached[spread(len(reached), self.sampled_rows).to(device)]
            return check(plugin, baseline, self.exact(sets[0], x, rows, columns), rows, columns)

        return Sample(sets, judge, self.comparable)


class RowComparison(Comparison):
    """Sampled rows of calls with several results, for one choice at all token counts.

    Subclasses define besides:

        inputs(tokens, seed)      random arguments of a call
        baseline(*arguments)      the call by vLLM's layers, not compiled
        results(output, tokens)   the results of `plugin` or `baseline`, dequantized, in the order of `exact`
        exact(*arguments)         the results in float32; None where there is none
    """

    replayed: int | None = None
    """The number of results that replays of graphs are compared by, None for all."""

    def token_counts(self, counts: list[int]) -> list[int]:
        """Return the token counts to time, given the counts of other calls."""
        return counts

    def sample(self, layers: list[tuple], tokens: int) -> Sample:
        """Return a call for each layer. The errors are the first result's."""
        sets = [self.inputs(tokens, seed) for seed in range(len(layers))]
        rows = spread(tokens, self.sampled_rows).to(sets[0][0].device)
        exact = self.exact_rows(sets[0], rows, tokens)

        def comparable(output: tuple) -> list[Tensor]:
            return [result for result, wanted in zip(self.results(output, tokens), exact) if wanted is not None]

        def judge(plugin: tuple, baseline: tuple) -> tuple[float, float]:
            wanted = [result for result in exact if result is not None]
            errors = [
                check(*each, rows, torch.arange(each[-1].shape[1], device=rows.device))
                for each in zip(comparable(plugin), comparable(baseline), wanted)
            ]
            return errors[0]

        return Sample(sets, judge, lambda output: comparable(output)[: self.replayed], copies)

    def exact_rows(self, given: tuple, rows: Tensor, tokens: int) -> list[Tensor | None]:
        """Return some rows of `exact`, by the rows of the arguments that have one for each token; a cache may have pages."""
        has_rows = (value is not None and len(value) == tokens for value in given)
        return self.exact(*(value[rows] if has else value for value, has in zip(given, has_rows)))


class WrongBaseline(ArithmeticError):
    """Signal that vLLM's result is far from float32 and the plugin's near. `errors` are the plugin's and vLLM's."""

    def __init__(self, error: float, baseline_error: float):
        super().__init__(f"vLLM's kernel has relative error {baseline_error:.2g}, the plugin's {error:.2g}")
        self.errors = error, baseline_error if math.isfinite(baseline_error) else NOT_FINITE


def spread(count: int, limit: int) -> Tensor:
    """Return at most `most` of `count` indices, evenly spaced, with the first and the last."""
    if count <= limit:
        return torch.arange(count)
    return torch.linspace(0, count - 1, limit).long()


def relative(error: Tensor, size: Tensor) -> float:
    """Return the norm of an error relative to the norm of the exact value."""
    return float(error.square().sum().sqrt() / size.square().sum().sqrt().clamp_min(1e-30))


def allowed(baseline_error: float) -> float:
    """Return the largest relative distance of two results of which one has vLLM's error and the other the largest."""
    return (LARGEST_ERROR + 1) * baseline_error + FLOOR


def check(plugin: Tensor, baseline: Tensor, exact: Tensor, rows: Tensor, columns: Tensor) -> tuple[float, float]:
    """Return the relative errors of both kernels against the float32 result at some rows and columns.

    Raises:
        Mismatch: The plugin's error is too large.
        WrongBaseline: vLLM's own result is wrong.
        ArithmeticError: Both are far from the sample.
    """
    if plugin.shape != baseline.shape or plugin.dtype != baseline.dtype:
        raise Mismatch(
            f"result must be {baseline.dtype} {list(baseline.shape)}, got {plugin.dtype} {list(plugin.shape)}"
        )

    def sampled(output: Tensor) -> Tensor:
        return output[rows][:, columns].float()

    error, baseline_error = (relative(sampled(output) - exact, exact) for output in (plugin, baseline))
    if not baseline_error <= NO_SAMPLE and error <= NO_SAMPLE:
        raise WrongBaseline(error, baseline_error)
    if not baseline_error <= NO_SAMPLE:
        raise ArithmeticError(f"vLLM's kernel has relative error {baseline_error:.2g}, too large for a comparison")
    if not error <= LARGEST_ERROR * baseline_error + FLOOR:
        raise Mismatch(f"relative error {error:.2g}, vLLM's kernel has {baseline_error:.2g}")
    apart = distance(plugin, baseline)
    if not apart <= allowed(baseline_error):
        raise Mismatch(f"differs by {apart:.2g} from vLLM's kernel, which has relative error {baseline_error:.2g}")
    return error, baseline_error
