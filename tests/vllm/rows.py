"""Count the calls of the package's ops by their rows."""

import collections
import contextlib
from collections.abc import Iterator

import torch

from vllm_rocm_ops.core.op import Op


@contextlib.contextmanager
def counted() -> Iterator[dict[str, collections.Counter[str]]]:
    """Yield the calls of each op by the rows of its first tensor, for attention as requests x rows of a request."""
    found = collections.defaultdict(collections.Counter)
    execution = Op._execution

    def noted(op, args):
        given = op.Arguments(*args)
        rows = len(next(value for value in given if isinstance(value, torch.Tensor)))
        of_request = getattr(given, "query_len", None)
        found[op.name][f"{rows // of_request}x{of_request}" if of_request else str(rows)] += 1
        return execution(op, args)

    Op._execution = noted
    try:
        yield found
    finally:
        Op._execution = execution
