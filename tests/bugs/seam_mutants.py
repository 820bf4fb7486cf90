"""Plausible mistakes in the code between vLLM and the ops, for mutants.py: a change of one line each, and the file of tests that
catches it."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "vllm_rocm_ops"


@dataclass(frozen=True)
class SeamMutant:
    """`text` is replaced in vllm/`file` of the package, and a file of tests/vllm is to fail, without what starts an engine."""

    file: str
    text: str
    replacement: str
    test: str
    equivalent: str = ""

    @property
    def tests(self) -> tuple[str, ...]:
        return (self.test,)

    @property
    def change(self) -> str:
        return " ".join(f"{self.text} -> {self.replacement or '(nothing)'}".split()).replace("|", "\\|")

    @property
    def path(self) -> Path:
        return PACKAGE / "vllm" / self.file

    @property
    def module(self) -> str:
        return ".".join((PACKAGE.name, "vllm", *Path(self.file).with_suffix("").parts))

    def fits(self) -> bool:
        return self.text in self.path.read_text()

    def plant(self) -> None:
        """Have this process, which has not imported the module, import it with the mistake."""
        if self.module in sys.modules:
            raise RuntimeError(f"{self.module} is imported already")
        sys.meta_path.insert(0, _Finder(self))


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, mutant: SeamMutant):
        self.mutant = mutant

    def find_spec(self, name, path, target=None):
        if name != self.mutant.module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        spec.loader = _Loader(self.mutant, name, spec.origin)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, mutant: SeamMutant, name: str, path: str):
        super().__init__(name, path)
        self.mutant = mutant

    def get_code(self, fullname):
        source = Path(self.path).read_text()
        return compile(source.replace(self.mutant.text, self.mutant.replacement), self.path, "exec", dont_inherit=True)


ATTENTION, GUARDS, LATENT, FRONT, OF_FRONT, ABSORBED, ROWS, ALL_REDUCE, REACH, GRAPH, MX_LINEAR = (
    ("attention/decoder.py", "test_decode_attention.py"),
    ("attention/decoder.py", "test_seam_guards.py"),
    ("attention/mla.py", "test_latent_attention.py"),
    ("attention/latent_norms.py", "test_latent_norms.py"),
    ("attention/latent_front.py", "test_latent_norms.py"),
    ("attention/absorbed_products.py", "test_absorbed_products.py"),
    ("fusion/row_selection.py", "test_row_selection.py"),
    ("fusion/all_reduce.py", "test_row_selection.py"),
    ("reach.py", "test_reach.py"),
    ("fusion/graph.py", "test_graph.py"),
    ("linear/mxfp8_linear.py", "test_linear.py"),
)


def of(where: tuple[str, str], text: str, replacement: str = "", equivalent: str = "") -> SeamMutant:
    """A mutant of a file with its tests."""
    return SeamMutant(where[0], text, replacement, where[1], equivalent)


SEAM_MUTANTS = {
    # Decode attention
    "several rows of a request in graphs of mixed batches": of(ATTENTION, " and not mixed and not", " and not"),
    "several rows of a request that are cut on the device": of(
        ATTENTION, "not mixed and not self.is_cut()", "not mixed"
    ),
    "a window without the row's own key": of(ATTENTION, "else behind + 1", "else behind"),
    "the scale of keys for values": of(
        ATTENTION, "(layer._k_scale, layer._v_scale)", "(layer._k_scale, layer._k_scale)"
    ),
    "requests of any lengths taken for equal": of(
        ATTENTION, "if metadata.num_actual_tokens == requests * longest else", "if longest <= MOST_ROWS else"
    ),
    "ours where it is faster at one length": of(GUARDS, "and all(choice.is_ours", "and any(choice.is_ours"),
    "rows that see more than what is before them": of(
        ATTENTION, "return metadata.causal is True and all(", "return any("
    ),
    "what a layer has and ours lacks is served": of(ATTENTION, "if self.lacks or batch", "if batch"),
    "sinks of 16 bits": of(ATTENTION, "impl.sinks is not None and impl.sinks.dtype != torch.float32", "False"),
    "ours where bits may not depend on the batch": of(
        ATTENTION, '"rows that must not depend on the batch", self.is_batch_invariant', '"no rows", False'
    ),
    "rotation that was not asked for": of(ATTENTION, "op is not None and self.is_forced and", "op is not None and"),
    "values reordered for ours": of(
        ATTENTION,
        "if super().fused_qk_norm_rope_kvcache_supported():\n            super().set",
        "if self.fused_qk_norm_rope_kvcache_supported():\n            super().set",
    ),
    "keys by the weight of queries in the call": of(
        ATTENTION,
        "norm = q_weight, k_weight,",
        "norm = q_weight, q_weight,",
    ),
    "vLLM's pass where it cannot be made": of(ATTENTION, "ours = may_pass and self", "ours = self"),
    "norms left out where ours does not serve": of(
        ATTENTION, "out.copy_(vllm.ir.ops.rms_norm(x, weight, epsilon))", "out.copy_(x)"
    ),
    # Between the first projection and the scores
    "slots of tokens that pad a graph": of(FRONT, "slots.flatten()[: len(qkv)]", "slots.flatten()"),
    "a cache's scale left out": of(FRONT, "[: len(qkv)], decoder.scale(layer)", "[: len(qkv)], None"),
    "beside vLLM's pass that writes the cache": of(
        FRONT, " and UPDATE not in (settings.splitting_ops or ())", " and False"
    ),
    "left to a pass that cannot serve": of(FRONT, " and UPDATE not in (settings.splitting_ops or ())", ""),
    "our op inside of a piece": of(FRONT, "if found and UPDATE in found and OURS not in found:", "if False:"),
    "our op twice where vLLM splits": of(
        FRONT, "if found and UPDATE in found and OURS not in found:", "if found and UPDATE in found:"
    ),
    "split where vLLM does not": of(
        FRONT, "if found and UPDATE in found and OURS not in found:", "if found is not None:"
    ),
    "scales of rows for a linear that reads columns": of(
        OF_FRONT, 'self.is_column_major = self.kind == "block" and', "self.is_column_major = False and"
    ),
    "one epsilon for both norms": of(FRONT, "!= norms[-1].variance_epsilon", "!= norms[0].variance_epsilon"),
    "a layer with an index": of(FRONT, " or layer.is_sparse or layer.indexer is not None", ""),
    "heads of other GPUs": of(FRONT, 'getattr(layer, "dcp_q_replicate", False)', "False"),
    "queries in MX-FP8 quantized again": of(FRONT, 'getattr(layer.q_b_proj, "vllm_rocm_ops_is_mx", False)', "False"),
    "sizes that kernels do not take": of(FRONT, " and one.has_kernels(config.model_config.dtype)", ""),
    "all of a query's head rotated": of(
        FRONT,
        "q[..., nope:], _ = self.rotary_emb(positions, q[..., nope:], unrotated)",
        "q, _ = self.rotary_emb(positions, q, unrotated)",
    ),
    "keys that are not rotated": of(FRONT, "q, kv, k_pe.unsqueeze(1), output", "q, kv, unrotated, output"),
    "attention before the write": of(FRONT, "kv_cache_dummy_dep=kv", "kv_cache_dummy_dep=None"),
    "scaled queries": of(FRONT, "if front is None or llama_4_scaling is not None:", "if front is None:"),
    "ours though it loses": of(OF_FRONT, "self if is_ours or self.decoder.is_forced else None", "self"),
    "ours where it was not measured": of(
        OF_FRONT, "return self.decoder.is_forced\n\n    def take", "return True\n\n    def take"
    ),
    "the rotated part not judged": of(OF_FRONT, "kv, rotated.squeeze(1), rows]", "kv, None, rows]"),
    "the cache not judged": of(OF_FRONT, "kv, rotated.squeeze(1), rows]", "kv, rotated.squeeze(1), None]"),
    "queries of no latent from the wrong layer": of(
        FRONT,
        "made = self.kv_a_proj_with_mqa(hidden_states)[0], self.q_proj(hidden_states)[0]",
        "made = self.kv_a_proj_with_mqa(hidden_states)[0], self.kv_a_proj_with_mqa(hidden_states)[0]",
    ),
    "AMX's order of keys": of(GUARDS, 'layer.isa not in ("vec", "vec16")', 'layer.isa not in ("vec", "vec16", "amx")'),
    "AITER's shuffled cache": of(GUARDS, "return None if rocm_aiter_ops.is_shuffle_kv_cache_enabled() else", "return"),
    "interleaved values": of(GUARDS, 'if getattr(impl, "_use_interleaved_v_cache", False):', "if False:"),
    # When attention is measured
    "attention measured where heads are gathered": SeamMutant(
        "attention/timing.py",
        'or getattr(decoder.impl, "dcp_world_size", 1) > 1:',
        ":",
        "test_seam_guards.py",
    ),
    "lengths that a model does not have": SeamMutant(
        "attention/timing.py",
        "for keys in [keys for keys in LENGTHS if keys <= longest] or [longest]:",
        "for keys in LENGTHS:",
        "test_seam_guards.py",
    ),
    "attention measured though it is forced": SeamMutant(
        "attention/timing.py", "may_serve and not decoder.is_forced and", "may_serve and", "test_seam_guards.py"
    ),
    "single rows not measured where there are drafts": SeamMutant(
        "attention/timing.py", "{1, 1 + drafts}", "{1 + drafts}", "test_seam_guards.py"
    ),
    # Latent attention
    "single rows beside prefills taken for longer": of(
        LATENT, "1 if metadata.num_prefills else metadata.max_query_len", "metadata.max_query_len"
    ),
    "parts of keys by the batch": of(LATENT, "PARTITION * self.is_batch_invariant", "0"),
    "no logarithms of sums for a split cache": of(
        LATENT, "(found[0], found[1] if is_split else None)", "(found[0], None)"
    ),
    "several rows of a split cache": of(LATENT, " and (query_len == 1 or not is_split)", ""),
    "AITER's decode of a split cache": of(LATENT, '"Aiter" in self.backend.name', "False"),
    "a latent of another size": of(LATENT, "impl.kv_lora_rank != LATENT", "False"),
    # Absorbed products
    "heads taken for tokens": of(ABSORBED, "choice.is_ours(x.shape[1])", "choice.is_ours(x.shape[0])"),
    "a weight left before it was measured": of(ABSORBED, "if choice.is_never_ours", "if 1 not in choice.ours"),
    "a weight's order not told apart": of(ABSORBED, '" transposed" * (layer[0].stride(2) == 1)', '""'),
    "tokens of another type": SeamMutant(
        ABSORBED[0], "if x.dtype != weights.dtype:", "if False:", "test_seam_guards.py"
    ),
    "products served unmeasured": of(ABSORBED, "        return 0\n", "        return MOST_TOKENS\n"),
    "more tokens than kernels take": of(ABSORBED, "if len(arguments[0]) > MOST_TOKENS:", "if False:"),
    "products noted without measurements": of(ABSORBED, 'envs.VLLM_ROCM_OPS_MEASURE == "0"', "False"),
    "a result beside vLLM's buffer": of(ABSORBED, "None if out is None else out.transpose(0, 1)", "None"),
    # Reach
    "a layer without ours counted as taken": of(REACH, "next(kernels_of(module), None) is not None", "True"),
    "attention that says what it lacks counted as taken": of(
        REACH, "ours is not None and not ours.lacks", "ours is not None"
    ),
    "layers of seams that are off": of(REACH, "if on.isdisjoint(SEAMS[kind]):", "if False:"),
    "seams that were chosen for no captured number of tokens": of(REACH, "one.is_ours(tokens) for", "True for"),
    "patterns that were not chosen": of(REACH, "choices.ours.items() if runs]", "choices.ours.items()]"),
    # Norms and activations
    "a subclass that custom_ops does not know": SeamMutant(
        "seam.py", "    ours.name = theirs.name\n", "", "test_fusion_seam.py"
    ),
    "an activation inside experts taken for a compiled one": of(
        ROWS, "if not compiles or is_opaque:", "if not compiles:"
    ),
    "an op that is off": of(ROWS, "runs and one.op.name not in decided.off", "runs"),
    "a fusion of norms taken for one of activations": of(
        ROWS, "passes.fuse_norm_quant if is_norm else", "passes.fuse_norm_quant or"
    ),
    "a compile cache that does not know what stays": of(
        ROWS, "_stay.update(key for key, runs in ours.items() if not runs)", ""
    ),
    "a residual that is not checked": of(
        ROWS,
        "return [dequantized(values[:tokens], scale), residual]",
        "return [dequantized(values[:tokens], scale), None]",
    ),
    "AITER's fusion of norms lost": of(ALL_REDUCE, "if not (passes.fuse_allreduce_rms and", "if not (False and"),
    "a fusion in two stages": of(ALL_REDUCE, "if takes_one_stage(communicator, config):", "if True:"),
    "exponents for scales": of(ROWS, "torch.exp2(scale.float() - 127) if", "scale.float() if"),
    "MX-FP8 in front of an opaque linear": of(ROWS, " and not (is_mx and is_opaque)", ""),
    "a draft model without its norms": of(ROWS, '("speculator", "drafter")', '("drafter",)'),
    "an eager time for a compiled norm": of(
        ROWS, "*fused, kernel_selection.COMPILED", "*fused, kernel_selection.EAGER"
    ),
    "a negative static scale": of(ROWS, "self.linear.input_scale.float().abs()", "self.linear.input_scale.float()"),
    "somewhere slower": SeamMutant(
        "selection/kernel_selection.py", "max(ratios) <= 1 + MARGIN and", "", "test_row_selection.py"
    ),
    "ours where one rank measured so": SeamMutant(
        "selection/kernel_selection.py", "bytes(a & b for", "bytes(a | b for", "test_row_selection.py"
    ),
    "an op off where the last rank has it off": SeamMutant(
        "selection/kernel_selection.py",
        "off = {**decided.off, **off}",
        "off = dict(decided.off)",
        "test_kernel_selection.py",
    ),
    "a late failure of vLLM's kernel taken for ours": SeamMutant(
        "selection/kernel_timing.py", "    clock.finish()\n    run_ours", "    run_ours", "test_kernel_selection.py"
    ),
    "an activation told of a linear that another reader has": SeamMutant(
        "fusion/producers.py", "return got == [made]", "return True", "test_row_selection.py"
    ),
    "a linear without a partition": SeamMutant(
        "fusion/producers.py",
        'linear.input_size_per_partition if hasattr(linear, "input_size_per_partition") else linear.input_size',
        "linear.input_size_per_partition",
        "test_row_selection.py",
    ),
    "a baseline that is measured with markers": SeamMutant(
        "fusion/row_selection.py",
        'getattr(quantize.quant_fp8, "vllm_forward", quantize.quant_fp8)',
        "quantize.quant_fp8",
        "test_fusion_seam.py",
    ),
    # The graph
    "a norm that others read, too": of(
        GRAPH, "for reader in readers}) != 1 or", "for reader in readers if is_quantization(reader)}) != 1 or"
    ),
    "quantizations that differ": of(
        GRAPH,
        "len({(reader.target, str(reader.args)) for reader in readers}) != 1 or not is_quantization(readers[0])",
        "not all(map(is_quantization, readers))",
    ),
    "a norm alone in front of markers": of(GRAPH, "QUANTIZATION in {reader.target for reader in readers} or ", ""),
    "MX-FP8 scales in another order": of(
        GRAPH, "None if any(marker.args[1:]) or marker.kwargs else fused_quant.MX", "fused_quant.MX"
    ),
    "MX-FP8 left to passes that have none": of(GRAPH, "return key == fused_quant.MX or not (", "return not ("),
    "a residual that is read later": of(GRAPH, "not any(self.node < user for user in residual.users) and ", ""),
    "a residual that shares memory": of(GRAPH, " and not is_view(residual)", ""),
    "a residual that somebody holds": of(
        GRAPH, "residual not in inputs or inputs.index(residual) in get_pass_context().donated_input_ids", "True"
    ),
    "a linear that others read, too": of(GRAPH, " and len(x.users) == 1", ""),
    "one launch where vLLM's linear is faster": SeamMutant(
        "linear/scaled_linear.py",
        " and KERNELS.choice_of(a, b, scale_a, scale_b, None, *rest).is_ours(tokens)",
        "",
        "test_linear.py",
    ),
    "a linear with a bias": of(GRAPH, "x.args[4] is None and ", ""),
    "gate for the quantized result": of(
        GRAPH, "((values, scale)[user.args[1]])", "((values, scale)[1 - user.args[1]])"
    ),
    "a norm behind a norm": of(GRAPH, " or makes_with_norm(producer.node.args[0])", ""),
    "a part of a row": of(GRAPH, " or self.is_partial", ""),
    "a weight of another type": of(GRAPH, ' or weight.meta["val"].dtype != x.dtype', ""),
    "rows whose elements lie apart": of(
        GRAPH, "rows.dtype in fused_quant.DTYPES and fused_quant.in_rows(rows)", "True"
    ),
    "scales that are powers of two": of(GRAPH, "how.tma_aligned or how.ue8m0 or ", ""),
    "rows that are padded": of(GRAPH, " or how.padding != -1", ""),
    "an op that is off in a graph": of(GRAPH, "if op.name in choices.off:", "if False:"),
    "a first norm on its own": of(
        GRAPH, "for adds in (producer.residual is not None, True):", "for adds in (producer.residual is not None,):"
    ),
    "ours where a pass of vLLM's fuses": of(
        GRAPH, "fused_quant.MX or not (passes", "fused_quant.MX or True or (passes"
    ),
    "all epsilons with an all-reduce": of(GRAPH, " and norm.epsilon in EPSILONS", ""),
    "an op in front of its scale": of(
        GRAPH, "return producer.node if last is producer.node else last.next", "return producer.node"
    ),
    "a sum read before it is there": of(GRAPH, "if producer.added is not None and any(", "if False and any("),
    "choices that the compile cache does not know": of(GRAPH, "            sorted(choices.ours.items()),\n", ""),
    "a residual that is copied": of(GRAPH, "        update_in_place(graph)\n", "        pass\n"),
    "the sum read where the result is": of(
        GRAPH, "producer.added.replace_all_uses_with(added)", "producer.added.replace_all_uses_with(outputs[0])"
    ),
    "a norm that is fused with a cast": of(
        GRAPH, "or not all(map(is_whole, readers))", "or not any(map(is_whole, readers))"
    ),
    "a seam that is off": of(GRAPH, "producer.name in choices.on and ", ""),
    # MX-FP8 linears
    "rows that vLLM's kernel cannot read": of(MX_LINEAR, "(x.values, x.scale) if isinstance(x, Rows) else ", ""),
    "rows for vLLM's emulation": of(MX_LINEAR, "self.hands_rows and ", ""),
    "an input quantized for one side alone": of(MX_LINEAR, "(*quantize(x), *layer)", "(x, x, *layer)"),
    # Experts of several ranks
    "tokens in batches of an expert's": SeamMutant(
        "experts/expert_support.py", "if config.use_batched_activation_format:", "if False:", "test_experts.py"
    ),
    "tokens that another way sends": SeamMutant(
        "experts/expert_support.py", "if config.use_all2all_kernels and not (", "if False and not (", "test_experts.py"
    ),
    "routing of tokens that other ranks have": SeamMutant(
        "experts/routing_experts.py",
        "alone = config.dp_size == 1 and not",
        "alone = not",
        "test_experts.py",
    ),
    "tokens of data parallel ranks quantised twice": SeamMutant(
        "experts/base.py", "use_all2all_kernels or moe_config.dp_size > 1", "use_all2all_kernels", "test_experts.py"
    ),
    "a rank's first expert hidden from AITER": SeamMutant(
        "experts/expert_support.py", "mask[:-1] = expert_map >= 0", "mask[:-1] = expert_map > 0", "test_experts.py"
    ),
    "experts timed as if all were here": SeamMutant(
        "experts/base.py",
        "among = len(layer[0]) if expert_map is None else total",
        "among = len(layer[0])",
        "test_experts.py",
    ),
    "measured for the tokens of one rank": SeamMutant(
        "selection/measured_selection.py",
        "config.scheduler_config.max_num_batched_tokens * config.parallel_config.data_parallel_size",
        "config.scheduler_config.max_num_batched_tokens",
        "test_kernel_selection.py",
    ),
}
