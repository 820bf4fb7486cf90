"""Mutants of operators.py that no test can see, with the proof."""

EQUIVALENT: dict[str, str] = {
    "attention/mla.h:run:tail:1": "the loop inside has the same condition: a split without keys only loads ahead, as the last steps of others do",
    "attention/mla_combine.h:add:bound:1": "`load` is empty past the last split: zeros, with the lowest maximum",
    "attention/output.h:add_at_once:bound:2": "a pass without members loads zeros, and adds them",
    "device/amd/mx.h:defined:barrier:1": "the compiler waits for what is used; in streaming loops its waits stay the same",
    "device/amd/sync.h:block_barrier:barrier:3": "the compiler moves no LDS access across s_barrier: of 300 kernels one gets other registers",
    "device/clamped_silu.h:operator:bound:1": "both branches are the same value where `up` is -limit",
    "gemm/batched_quant.h:quantize_head:bound:1": "partial sums have all rows of a tile; row m is loaded, and not stored",
    "gemm/skinny/epilogue.h:has_partial:bound:1": "each value has a slot; what is stored and loaded for token m is not an output",
    "gemm/skinny/schedule.h:after:bound:1": "a tile gets one more unit, which is of zeros: `bytes_left` is 0 there",
    "gemm/tiled/rasterize.h:rasterize:bound:1": "both branches are the same number where they meet",
    "attention/rope_and_cache.h:angles_by_sections:bound:1": "where they meet the pair is a multiple of three, of section 0",
    "ops/silu_and_mul_with_expert_gate.hip:load:bound:2": "both sides are multiples of kChunk, which the op requires",
    "ops/standalone/softmax.hip:softmax_online:bound:4": "loads and stores of the body have the loop's condition",
}
