"""Describe a decode step of Gated DeltaNet as one op call, for the seam gated_delta_net.py.

It has what compiled_ops.py needs to time the call against vLLM's layer: its own `forward` between the projections, with
vLLM's or AITER's fused kernels where it uses them, and out_proj's quantization, compiled as in the model. Both run in a
step's forward context, on states of their own. States that a call leaves are checked as its result is.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_rocm_ops import ops
from vllm_rocm_ops.core.quantization import LIMIT, OUTPUTS
from vllm_rocm_ops.ops.gated_delta_net_decode import SIZE, WIDTH
from vllm_rocm_ops.ops.shared import gated_delta_net as reference
from vllm_rocm_ops.vllm.attention import decoder
from vllm_rocm_ops.vllm.attention import gated_delta_net_core as delta_net
from vllm_rocm_ops.vllm.graph import compiled_ops
from vllm_rocm_ops.vllm.linear import base as linear_base
from vllm_rocm_ops.vllm.selection import kernel_selection
from vllm_rocm_ops.vllm.selection.key import Baseline

REQUESTS = 2, 8, 32, 128
"""Requests of the timed steps, as far as a step may have them."""


def shape_of(
    heads: tuple[int, int],
    dtypes: str,
    is_interleaved: bool,
    is_dim_first: bool,
    rows: int,
    kind: str,
    token_columns: int = 0,
) -> str:
    """Return the name of a layer's call for all token counts, as it is recorded.

    `heads` are K and V heads, `dtypes` name the dtypes of activations and the state, `rows` a request's, `kind` the result's quantization.
    Tokens have columns where the launch projects b and a.
    """
    traits = " interleaved" * is_interleaved + " dim first" * is_dim_first + f" {rows} rows" * (rows > 1)
    traits += f" from {token_columns}" * bool(token_columns)
    return f"{':'.join(map(str, heads))}x{SIZE} {dtypes}{traits}{OUTPUTS.get(kind, '')}"


def shapes_of(parameters: tuple, dtype: torch.dtype) -> list[str]:
    """Return the names under which a model's call may be recorded: without drafts, either order of the convolution's state."""
    *heads, is_interleaved, state, kind, token_columns = parameters
    dtypes = kernel_selection.types(dtype, getattr(torch, state))
    return [
        shape_of((*heads,), dtypes, is_interleaved, is_dim_first, 1, kind, token_columns)
        for is_dim_first in (False, True)
    ]


@dataclass
class Left:
    """Hold the states that a step leaves. It is no tuple: replays compare the states once, as arguments that a call writes."""

    conv: Tensor
    state: Tensor
    metadata: object


class GatedDeltaNetPart(compiled_ops.LayerPart):
    """Implement a layer's part between its projections by an op, and as compiled_ops.py times it.

    Inputs of a call are both projections' results, both states, and a step's metadata. Where a launch projects b and a, tokens are in place
    of the second one's, and vLLM's part has in_proj_ba.
    """

    op = ops.gated_delta_net_decode
    replayed = 1  # the states are arguments, which are compared, too

    def __init__(self, layer: torch.nn.Module, config, baseline: Baseline):
        self.layer, self.config, self.core = layer, config, delta_net.Core(layer)
        self.dtype = config.model_config.dtype
        drafts = getattr(config.speculative_config, "num_speculative_tokens", None) or 0
        self.rows = 1 + drafts  # of a request
        self.heads = layer.num_k_heads // layer.tp_size, layer.num_v_heads // layer.tp_size
        _, of_state = layer.get_state_dtype()[:2]
        dtypes = kernel_selection.types(self.dtype, of_state)
        traits = (
            layer.gqa_interleaved_layout,
            delta_net.is_dim_first(),
            self.rows,
            self.core.kind,
            self.columns()[1] * self.core.projects,
        )
        self.name(shape_of(self.heads, dtypes, *traits), baseline._replace(name=self.kernels_of_vllm()))

    def kernels_of_vllm(self) -> str:
        """Return a name for the kernels that vLLM runs in decode rows, empty for its plain ones."""
        if getattr(self.layer, "enable_fused_gdn_spec_decode", False):
            return "fused"
        module = sys.modules[delta_net.plain_of(self.layer).__module__]
        is_aiter = self.layer._forward_method.__name__ == "forward_hip" and module.GDN_AITER_TRITON_AVAILABLE
        return "AITER" if is_aiter else ""

    def runs_unmeasured(self) -> bool:
        return decoder.is_forced()

    def apply_decision(self, plugin_serves: bool) -> None:
        delta_net.adopt(self.layer, plugin_serves or decoder.is_forced())

    def columns(self) -> tuple[int, int]:
        """Return the columns of both projections' results, or of the first one's and of the tokens."""
        key_heads, heads = self.heads
        gates = self.layer.in_proj_ba.weight.shape[1] if self.core.projects else 2 * heads
        return 2 * (key_heads * self.layer.head_k_dim + heads * self.layer.head_v_dim), gates

    def states(self, slots: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
        """Return uninitialized states in vLLM's order."""
        kinds = zip(self.layer.get_state_shape()[:2], self.layer.get_state_dtype()[:2])
        return tuple(torch.empty((slots, *shape), dtype=dtype, device=device) for shape, dtype in kinds)

    def step(self, requests: int, device: torch.device | str):
        """Return the metadata of a step in which each request has all its drafts, of which half are accepted. Slots are in any order."""
        from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata

        generator = torch.Generator().manual_seed(requests)
        slots = (
            (torch.randperm(requests * self.rows, generator=generator) + 1).int().view(requests, self.rows).to(device)
        )
        starts = torch.arange(requests + 1, dtype=torch.int32, device=device) * self.rows
        tokens, has_drafts = requests * self.rows, self.rows > 1
        counts = {"num_prefills": 0, "num_prefill_tokens": 0, "num_actual_tokens": tokens}
        counts |= dict.fromkeys(("num_decodes", "num_decode_tokens"), 0 if has_drafts else requests)
        counts |= {"num_spec_decodes": requests * has_drafts, "num_spec_decode_tokens": tokens * has_drafts}
        if not has_drafts:
            return GDNAttentionMetadata(
                **counts, non_spec_query_start_loc=starts, non_spec_state_indices_tensor=slots[:, 0].contiguous()
            )
        rows = torch.arange(tokens, dtype=torch.int32, device=device)
        return GDNAttentionMetadata(
            **counts,
            spec_query_start_loc=starts,
            spec_state_indices_tensor=slots,
            spec_sequence_masks=torch.ones(requests, dtype=torch.bool, device=device),
            spec_token_indx=rows,
            non_spec_token_indx=rows[:0],
            num_accepted_tokens=torch.full((requests,), 1 + self.rows // 2, dtype=torch.int32, device=device),
        )

    @contextlib.contextmanager
    def running(self, conv: Tensor, state: Tensor, metadata) -> Iterator[None]:
        """Give the layer these states and this step."""
        from vllm.forward_context import create_forward_context, override_forward_context

        held, name = vars(self.layer), "kv_cache"
        kept = {name: held[name]} if name in held else {}  # none before vLLM allocates its own
        held[name] = conv, state
        try:
            with override_forward_context(create_forward_context({self.layer.prefix: metadata}, self.config)):
                yield
        finally:
            del held[name]
            held |= kept

    def has_kernels(self) -> bool:
        qkvz, gates = (torch.empty(self.rows, columns, dtype=self.dtype, device="meta") for columns in self.columns())
        with self.running(*self.states(1 + self.rows, "meta"), None):
            requests = delta_net.requests_of(self.step(1, "meta"))
            given = self.core.arguments(qkvz, gates, requests, self.core.outputs(qkvz))
        return WIDTH == self.layer.conv1d.weight.shape[-1] and linear_base.has_kernels(self.op, *given)

    # For timing

    def token_counts(self, counts: list[int]) -> list[int]:
        most = self.config.scheduler_config.max_num_seqs
        return [requests * self.rows for requests in REQUESTS if requests <= most] or [most * self.rows]

    def work(self, layer: tuple, tokens: int) -> tuple[float, float]:
        _, heads = self.heads
        state = 2.0 * tokens * heads * SIZE * SIZE * self.layer.get_state_dtype()[1].itemsize
        return state + tokens * (sum(self.columns()) + heads * SIZE) * self.dtype.itemsize, 0.0

    def inputs(self, tokens: int, seed: int) -> tuple:
        device, requests = self.layer.A_log.device, tokens // self.rows
        generator = torch.Generator(device).manual_seed(seed)
        made = [torch.empty(tokens, columns, dtype=self.dtype, device=device) for columns in self.columns()]
        conv, state = self.states(1 + tokens, device)
        for x in (*made, conv):
            x.normal_(generator=generator)
        return *made, conv, state.normal_(std=0.3, generator=generator), self.step(requests, device)

    @functools.cached_property
    def graph_outputs(self) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]:
        """Return a function that computes the result by vLLM's layer, and its scales, for the compiler."""
        run, between = self.layer._forward_method.__func__, self.core.between()
        quantize = self.layer.out_proj.vllm_rocm_ops_quantize if self.core.kind else lambda made: (made, None)

        def graph_outputs(qkvz: Tensor, gates: Tensor) -> tuple[Tensor, Tensor | None]:
            return quantize(run(between, delta_net.Projected(qkvz, self.core.ba(gates))))

        return graph_outputs

    def by_vllm(self, graph: Callable, qkvz: Tensor, gates: Tensor, conv: Tensor, state: Tensor, metadata) -> tuple:
        with self.running(conv, state, metadata):
            return *graph(qkvz, gates), Left(conv, state, metadata)

    def plugin(self, qkvz: Tensor, gates: Tensor, conv: Tensor, state: Tensor, metadata) -> tuple | None:
        outputs = out, scale, groups = self.core.outputs(qkvz)
        with self.running(conv, state, metadata):
            given = self.core.arguments(qkvz, gates, delta_net.requests_of(metadata), outputs)
        if self.op.run_kernels(*given) is None:
            return None
        return out, scale if groups is None else groups, Left(conv, state, metadata)

    def results(self, output: tuple, tokens: int) -> list[Tensor]:
        """Return a call's result, dequantized, and for each row the states in its slot and of its request's convolution."""
        values, scale, left = output
        slots = delta_net.requests_of(left.metadata).slots.long()
        of_request = slots[:, :1].expand_as(slots).flatten()
        values = values if scale is None else compiled_ops.dequantized(values, scale)
        return [values[:tokens], left.state[slots.flatten()].flatten(1), left.conv[of_request].flatten(1)]

    def exact(self, qkvz: Tensor, gates: Tensor, conv: Tensor, state: Tensor, metadata) -> list[Tensor]:
        conv, state = (x.to(torch.float32, copy=True) for x in (conv, state))
        plain = torch.empty(len(qkvz), self.heads[1] * SIZE, dtype=self.dtype, device=qkvz.device)
        with self.running(conv, state, metadata):
            requests = delta_net.requests_of(metadata)
            given = self.op.Arguments(*self.core.arguments(qkvz, gates, requests, (plain, None, None)))
        result = reference.advance(given)
        if self.core.kind == "static":
            limit = self.layer.out_proj.input_scale.float().abs() * LIMIT[self.core.outputs(qkvz)[0].dtype]
            result = result.clamp(-limit, limit)
        return self.results((result, None, Left(conv, state, metadata)), len(qkvz))

    def exact_rows(self, given: tuple, rows: Tensor, tokens: int) -> list[Tensor]:
        return [result[rows] for result in self.exact(*given)]
