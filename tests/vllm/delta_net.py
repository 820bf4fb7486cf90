"""Stand in for vLLM's Gated DeltaNet on CPU: in plain PyTorch, on states in a GPU's order. A test installs it before a model loads.

vLLM's kernels for CPU keep a state as [K, V] and a packed weight of the convolution. Written from the paper; it shares no code with the op.
"""

import ctypes
import importlib.machinery
import itertools
import json
import os
import sys
import types

import torch
from torch import Tensor
from torch.nn.functional import normalize, silu, softplus

ROWS = 3  # of the past that the convolution reads


class Absent(types.ModuleType):
    """A module that vLLM's file of Qwen3.5 imports for images; its names are empty classes."""

    __path__ = ()

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def install_absent() -> None:
    """Stand in for torchvision, once Transformers has found that there is none, and for Triton's copies of states."""
    import transformers  # noqa: F401
    import vllm  # noqa: F401

    for name in ("", ".transforms", ".transforms.v2", ".transforms.functional", ".transforms.v2.functional", ".io"):
        module = Absent(f"torchvision{name}")
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
        sys.modules.setdefault(module.__name__, module)
    from vllm.v1.worker import mamba_utils

    mamba_utils._resolve_fused_precopy = lambda *_: None  # states are copied for prefix caching
    mamba_utils.batch_memcpy = copy_all
    mamba_utils.postprocess_mamba_align_gpu = keep_at_boundaries


def keep_small_weights() -> None:
    """Leave the weights of shared experts' gates and of b and a as they are, which vLLM packs on a CPU."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    prepare = UnquantizedLinearMethod.process_weights_after_loading

    def process_weights_after_loading(self, layer):
        if len(layer.weight) <= 8:
            layer.cpu_linear = torch.nn.functional.linear
        else:
            prepare(self, layer)

    UnquantizedLinearMethod.process_weights_after_loading = process_weights_after_loading


def copy_all(sources: Tensor, destinations: Tensor, sizes: Tensor) -> None:
    """Copy memory by addresses and bytes."""
    for source, destination, size in zip(sources.tolist(), destinations.tolist(), sizes.tolist()):
        ctypes.memmove(destination, source, size)


def keep_at_boundaries(
    *,
    bufs,
    num_reqs: int,
    num_accepted_tokens_gpu: Tensor,
    num_accepted_tokens_cpu_tensor: Tensor,
    input_batch,
    kv_cache_config,
    forward_context,
    mamba_state_copy_funcs,
) -> None:
    """Copy the states of accepted drafts at which a page ends to that page, as vLLM's `postprocess_mamba_fused_kernel`."""
    from vllm.v1.worker import mamba_utils

    staged, copies = bufs.postprocess_align, bufs.preprocess
    names = "mamba_state_idx", "num_scheduled_tokens", "num_computed_tokens", "num_draft_tokens"
    rows = zip(*(getattr(staged, f"{name}_buf").cpu[:num_reqs].tolist() for name in names))
    copies.offset = 0
    num_accepted_tokens_cpu_tensor[:num_reqs] = num_accepted_tokens_gpu[:num_reqs]
    for request, (source, scheduled, computed, drafts) in enumerate(rows):
        accepted = int(num_accepted_tokens_gpu[request])
        before = computed + scheduled - drafts
        end = (before + accepted - 1) // staged.block_size * staged.block_size
        if end < before:
            continue
        page = end // staged.block_size - 1
        if page == source:  # the running page has it, and goes on from there
            num_accepted_tokens_cpu_tensor[request] = 1
        tables = {group: input_batch.block_table[group] for group in copies.mamba_group_ids}
        blocks = {group: table.get_device_tensor(num_reqs)[request].tolist() for group, table in tables.items()}
        mamba_utils.collect_mamba_copy_meta(
            copies,
            kv_cache_config,
            mamba_state_copy_funcs,
            copies.mamba_group_ids,
            source,
            page,
            end - before,
            types.SimpleNamespace(block_ids=blocks),
            forward_context,
        )
    mamba_utils.do_mamba_copy_block(copies)


KNOWN = "KNOWN_TOKENS"
"""The variable with lists of tokens, in JSON, that `draft_known` looks for."""


def draft_known(page: int) -> None:
    """Draft what is known to follow, of which a number that varies is right, in place of n-grams of a text that is known.

    At the end of a page, in tokens, it is what the page lacks: of one that is left in the middle of a step vLLM 0.32 keeps no state.
    """
    from vllm.v1.spec_decode.ngram_proposer import NgramProposer

    own = NgramProposer.batch_propose

    def batch_propose(self, requests: int, valid: list[int], lengths, tokens, most: int) -> list[list[int]]:
        result = own(self, requests, valid, lengths, tokens, most)
        for request in valid:
            length = int(lengths[request])
            for known in json.loads(os.environ.get(KNOWN, "[]")):
                if known[:length] == tokens[request, :length].tolist():
                    right = page - length if 0 < page - length <= most else length % (most + 1)
                    drafts = enumerate(known[length : length + most])
                    result[request] = [token ^ (place >= right) for place, token in drafts]
        return result

    NgramProposer.batch_propose = batch_propose


def install() -> None:
    """Replace vLLM's op, and keep weights of convolutions as they are."""
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
    from vllm.utils.torch_utils import LayerNameType

    core.__annotations__["layer_name"] = LayerNameType
    gdn_attention.cpu_gdn_attention_core = core
    torch.cpu._is_avx512_bf16_supported = torch.cpu._is_amx_tile_supported = lambda: False


def core(mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor, layer_name: str) -> None:
    """Run the convolution and the recurrence of a step, as vLLM's op."""
    from vllm.forward_context import get_forward_context
    from vllm.utils.torch_utils import _resolve_layer_name

    context = get_forward_context()
    layer = context.no_compile_layers[_resolve_layer_name(layer_name)]
    if context.attn_metadata is None:  # a profile run
        return
    step = context.attn_metadata[layer.prefix]
    slots, starts = step.non_spec_state_indices_tensor, step.non_spec_query_start_loc
    has_drafts = step.spec_sequence_masks is not None
    is_mixed = has_drafts and step.num_prefills + step.num_decodes > 0
    rows = step.non_spec_token_indx if has_drafts else torch.arange(len(mixed_qkv))
    starts = starts.tolist() if is_mixed or not has_drafts else []
    for request, (start, end) in enumerate(itertools.pairwise(starts)):
        is_new = step.has_initial_state is not None and not step.has_initial_state[request]
        slot = int(slots[request])
        if slot > 0 and end > start:
            kept = [(end - start - 1, slot)]
            advance(layer, mixed_qkv, b, a, core_attn_out, rows[start:end], slot, slot, 0, is_new, kept)
    if not has_drafts:
        return
    rows = step.spec_token_indx if is_mixed else torch.arange(len(mixed_qkv))
    starts = step.spec_query_start_loc.tolist()
    for request in range(step.num_spec_decodes):
        slots = step.spec_state_indices_tensor[request].tolist()
        accepted = int(step.num_accepted_tokens[request])
        of_request = rows[starts[request] : starts[request + 1]]
        if len(of_request) and slots[0] > 0:
            kept = [*enumerate(slots[: len(of_request)])]
            given = of_request, slots[0], slots[accepted - 1], accepted - 1, False, kept
            advance(layer, mixed_qkv, b, a, core_attn_out, *given)


def advance(layer, mixed, b, a, out, rows, first, source, past, is_new, kept) -> None:
    """Compute a request's rows, from a slot's state and its convolution's, and keep states after some rows in their slots."""
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    conv, states = layer.kv_cache[:2]
    conv = conv[first] if is_conv_state_dim_first() else conv[first].t()
    history = conv[:, past : past + ROWS].float() * (not is_new)
    window = torch.cat([history.where(torch.tensor(not is_new), torch.zeros(())), mixed[rows].float().t()], 1)
    heads, value, key = states.shape[1:]
    key_heads = layer.num_k_heads // layer.tp_size
    kernel = layer.conv1d.weight.view(len(conv), -1).float()
    wide = [silu((window[:, t : t + ROWS + 1] * kernel).sum(1)) for t in range(len(rows))]
    q, k, v = torch.stack(wide).split([key_heads * key] * 2 + [heads * value], 1)
    repeat = heads // key_heads
    q, k = (normalize(x.unflatten(1, (key_heads, key)), dim=2).repeat_interleave(repeat, 1) for x in (q, k))
    v, beta = v.unflatten(1, (heads, value)), b[rows].float().sigmoid()
    decay = torch.exp(-layer.A_log.exp() * softplus(a[rows].float() + layer.dt_bias.float()))
    state, keep = (states.new_zeros(states.shape[1:]) if is_new else states[source]).float(), dict(kept)
    for t, row in enumerate(rows.tolist()):
        state = state * decay[t, :, None, None]
        error = (v[t] - torch.einsum("hvk,hk->hv", state, k[t])) * beta[t, :, None]
        state = state + torch.einsum("hv,hk->hvk", error, k[t])
        out[row] = (torch.einsum("hvk,hk->hv", state, q[t]) * key**-0.5).to(out.dtype)
        if t in keep:
            states[keep[t]] = state.to(states.dtype)
    left = window[:, -ROWS:] if past == 0 and len(kept) == 1 else window[:, 1:]
    conv[:, : left.shape[1]] = left.to(conv.dtype)
