"""Compute Gated DeltaNet's decode step in plain PyTorch, the reference of ops/gated_delta_net_decode.py, and describe its gates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from vllm_rocm_ops.core.tensors import aligned, describe

NORM_EPSILON = 1e-6  # of q and k
MAX_TOKEN_COLUMNS = 4096
MOST_PROJECTED = 64
"""Requests up to which vLLM's launches project b and a: each of a request's heads reads its token and two rows of the weight again."""


class Sizes(NamedTuple):
    """Sizes of a call."""

    key_heads: int
    heads: int  # of V
    key: int
    value: int

    @property
    def channels(self) -> int:
        """Return the channels of the convolution: of q, k and v."""
        return 2 * self.key_heads * self.key + self.heads * self.value


def sizes_of(a) -> Sizes:
    """Return the sizes of a call."""
    _, heads, value, key = a.state.shape
    return Sizes((a.qkvz.shape[1] - 2 * heads * value) // (2 * key), heads, key, value)


def is_tensor(x: Tensor, dtype: torch.dtype, *shape: int) -> bool:
    """True if a tensor has a dtype and a shape."""
    return x.dtype == dtype and x.shape == shape


def gates_contract(a, dtype: torch.dtype, rows: int, gates: int) -> Iterator[tuple[str, str, str, bool]]:
    """Yield the contract of b and a, of which a row has `gates`: given, or by their projection."""
    if a.ba is not None:
        yield "ba", f"{dtype} [T={rows}, {gates}]", describe(a.ba), is_tensor(a.ba, dtype, rows, gates)
        yield "tokens", "None with ba", "a tensor", a.tokens is None
        return
    holds = a.tokens is not None and a.tokens.dim() == 2 and is_tensor(a.tokens, dtype, rows, a.tokens.shape[1])
    got = "None" if a.tokens is None else describe(a.tokens)
    yield "tokens", f"{dtype} [T={rows}, columns] without ba", got, holds
    wanted, w = (gates, a.tokens.shape[1]), a.ba_weight
    got = "None" if w is None else describe(w)
    yield "ba_weight", f"{dtype} {list(wanted)}", got, w is not None and is_tensor(w, dtype, *wanted)


def may_project(columns: int) -> bool:
    """True if a launch projects b and a from tokens of this many columns."""
    return 0 < columns <= MAX_TOKEN_COLUMNS and columns % 8 == 0


def gates_rules(a) -> Iterator[tuple[str, bool]]:
    """Yield what kernels demand of b and a, or of their projection."""
    if a.ba is not None:
        yield "ba's rows are contiguous", a.ba.stride(1) == 1
    else:
        yield "tokens have no row_starts", a.row_starts is None
        both = a.tokens, a.ba_weight
        yield "tokens' and ba_weight's rows are contiguous", all(x.stride(1) == 1 for x in both)
        holds = a.tokens.shape[1] % 8 == 0 and all(map(aligned, both))
        yield "tokens' and ba_weight's rows have whole vectors of 16 bytes, aligned", holds
        yield f"tokens have at most {MAX_TOKEN_COLUMNS} columns", a.tokens.shape[1] <= MAX_TOKEN_COLUMNS


def gates_arguments(a) -> dict[str, object]:
    """Return the arguments of b and a, or of their projection."""
    if a.ba is not None:
        return {"ba": a.ba, "ba_stride": a.ba.stride(0)}
    given = {"ba": a.tokens, "ba_stride": a.tokens.stride(0), "token_columns": a.tokens.shape[1]}
    return {**given, "ba_weight": a.ba_weight, "ba_weight_stride": a.ba_weight.stride(0)}


def parts(a, wide: torch.dtype) -> tuple[Tensor, ...]:
    """Return q, k, v in the convolution's order [T, channels], z [T, V heads, V], b and a [T, V heads]."""
    key_heads, heads, key, value = sizes_of(a)
    ba = a.tokens.to(wide) @ a.ba_weight.to(wide).t() if a.ba is None else a.ba.to(wide)
    qkvz, of_value = a.qkvz.to(wide), heads // key_heads * value
    if a.is_interleaved:
        parts = qkvz.unflatten(1, (key_heads, -1)).split([key, key, of_value, of_value], 2)
        *mixed, z = (part.flatten(1) for part in parts)
        b, alpha = (part.flatten(1) for part in ba.unflatten(1, (key_heads, -1)).chunk(2, 2))
    else:
        *mixed, z = qkvz.split([key_heads * key, key_heads * key, heads * value, heads * value], 1)
        b, alpha = ba.chunk(2, 1)
    return torch.cat(mixed, 1), z.unflatten(1, (heads, value)), b, alpha


def requests(a) -> Iterator[tuple[int, list[int], int, int]]:
    """Yield the first row, the slots of all rows, the slot to read and the accepted rows of each request that is not padding."""
    columns, starts = a.indices.shape[1], range(len(a.indices) + 1)
    starts = starts if a.row_starts is None else a.row_starts.tolist()
    accepted = [1] * len(a.indices) if a.accepted is None else a.accepted.tolist()
    for request, slots in enumerate(a.indices.tolist()):
        first, rows = starts[request], min(starts[request + 1] - starts[request], columns)
        if rows > 0 and 1 <= accepted[request] <= columns and slots[0] > 0 and slots[accepted[request] - 1] > 0:
            yield first, slots[:rows], slots[accepted[request] - 1], accepted[request]


def advance(a) -> Tensor:
    """Update the states of a call, and return its results [T, V heads * V], not rounded."""
    sizes, wide = sizes_of(a), torch.promote_types(a.qkvz.dtype, torch.float32)
    mixed, z, b, alpha = parts(a, wide)
    beta, decay = b.sigmoid(), torch.exp(-a.a_log.to(wide).exp() * softplus(alpha + a.dt_bias))
    kernel, past = a.conv_weight.to(wide), a.conv_weight.shape[1] - 1
    result = torch.zeros(z.shape, dtype=wide, device=z.device)
    for first, slots, source, taken in requests(a):
        rows = slice(first, first + len(slots))
        history = a.conv_state[slots[0], :, taken - 1 : taken - 1 + past].clone()
        window = torch.cat([history.to(wide), mixed[rows].t()], 1)
        a.conv_state[slots[0], :, : window.shape[1] - 1] = window[:, 1:].to(a.conv_state.dtype)
        s = a.state[source].to(wide)
        for t, slot in enumerate(slots):
            of_row = silu((window[:, t : t + past + 1] * kernel).sum(1))
            q, k, v = of_row.split([sizes.key_heads * sizes.key] * 2 + [sizes.heads * sizes.value])
            q, k = (x.view(sizes.key_heads, sizes.key) for x in (q, k))
            q, k = (x * torch.rsqrt(x.square().sum(1, keepdim=True) + NORM_EPSILON) for x in (q, k))
            q, k = (x.repeat_interleave(sizes.heads // sizes.key_heads, 0) for x in (q * sizes.key**-0.5, k))
            s = s * decay[first + t, :, None, None]
            delta = (v.view(sizes.heads, sizes.value) - (s * k[:, None]).sum(2)) * beta[first + t, :, None]
            s = s + delta[:, :, None] * k[:, None]
            o = (s * q[:, None]).sum(2)
            norm = o * torch.rsqrt(o.square().mean(1, keepdim=True) + a.epsilon) * a.norm_weight.to(wide)
            result[first + t] = norm * silu(z[first + t])
            if slot > 0:
                a.state[slot] = s.to(a.state.dtype)
    return result.flatten(1)
