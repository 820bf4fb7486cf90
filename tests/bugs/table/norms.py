"""Bugs in norms."""

from vllm_rocm_ops import ops

from ..bug import Bug, Call, Cases, Tests

BUGS = (
    Bug(
        "barrier removed",
        "device/reduce.h",
        "block_barrier();  // hazard: a wave",
        "// a wave",
        Cases(ops.rms_norm, "bf16", said="barrier"),
    ),
    Bug(
        "lanes not combined",
        "device/amd/wave.h",
        "value = combine(value, dpp<0xB1>(identity, value));",
        "value = combine(value, dpp<0xE4>(identity, value));",
        Cases(ops.rms_norm_dynamic_per_token_quant, "bf16", on="gfx950", said="output"),
    ),
    Bug(
        "last chunk dropped",
        "device/norm_row.h",
        "in_bounds[i] = chunks.index[i] * kChunk < row.hidden;",
        "in_bounds[i] = (chunks.index[i] + 1) * kChunk < row.hidden;",
        Cases(ops.rms_norm_static_fp8_quant, "hidden2040-tail", said="output 0"),
    ),
    Bug(
        "variance in one pass",
        "ops/standalone/layer_norm.hip",
        """      pair -= its_mean;
      square = __builtin_elementwise_fma(pair, pair, square);
    }
  }
  const float factor = row.inverse_deviation(""",
        """      square = __builtin_elementwise_fma(pair, pair, square);
      pair -= its_mean;
    }
  }
  const float factor = row.inverse_deviation(-mean * mean * row.hidden + """,
        Cases(ops.layer_norm, "bf16-far-from-zero", said="output 0"),
    ),
    Bug(
        "variance in one pass, per element",
        "ops/standalone/layer_norm.hip",
        """load_element<T>(row.input, column) - mean;
    square = __builtin_fmaf(d, d, square);
  }
  const float factor = row.inverse_deviation(""",
        """load_element<T>(row.input, column);
    square = __builtin_fmaf(d, d, square);
  }
  const float factor = row.inverse_deviation(-mean * mean * row.hidden + """,
        Cases(ops.layer_norm_per_block_quant, "fp16-far-from-zero-general", on="gfx950", said="output 0"),
    ),
    Bug(
        "epsilon forgotten",
        "ops/standalone/layer_norm.hip",
        "mean(sum_of_squares) + epsilon",
        "mean(sum_of_squares)",
        Cases(ops.layer_norm, "fp16-tiny-variance", on="gfx950", said="output 0"),
    ),
    Bug(
        "epsilon left out of a fused norm",
        "device/norm_row.h",
        "row.inverse_hidden) + row.epsilon",
        "row.inverse_hidden)",
        Cases(ops.fused_add_rms_norm_static_fp8_quant, "bf16-tiny-variance", said="output 0"),
    ),
    Bug(
        "bias left out",
        "ops/standalone/layer_norm.hip",
        "y = unpack<T>(bias[i])",
        "y = unpack<T>(u32x4{})",
        Cases(ops.layer_norm_static_fp8_quant, "bf16", said="output 0"),
    ),
    Bug(
        "bias left out, per element",
        "ops/standalone/layer_norm.hip",
        "row.bias ? load_element<T>(row.bias, column) : 0.0f",
        "0.0f",
        Cases(ops.layer_norm, "bf16-general", said="output 0"),
    ),
    Bug(
        "tail in the variance",
        "ops/standalone/layer_norm.hip",
        "chunks.in_bounds[i] ? mean : 0.0f",
        "mean",
        Cases(ops.layer_norm, "bf16-far-from-zero", said="output 0"),
    ),
    Bug(
        "last columns dropped",
        "ops/standalone/layer_norm.hip",
        "in_bounds[i] = chunks.index[i] * kChunk < row.hidden;",
        "in_bounds[i] = (chunks.index[i] + 1) * kChunk < row.hidden;",
        Cases(ops.layer_norm_dynamic_per_token_quant, "hidden2040-tail", on="gfx950", said="output 0"),
    ),
    Bug(
        "inner stride ignored",
        "ops/rms_norm.hip",
        "i64(inner) * inner_stride",
        "i64(inner) * hidden * 0",
        Cases(ops.rms_norm, "3x8-heads", said="output 0"),
    ),
    Bug(
        "rows of heads counted as one",
        "ops/rms_norm.hip",
        "inner = int(row) - outer * inner_count;",
        "inner = int(row);",
        Cases(ops.rms_norm_per_block_quant, "3x8-heads", on="gfx950", said="argument input"),
    ),
    Bug(
        "the one of 1 + weight left out",
        "device/norm_row.h",
        "n * (1.0f + weight)",
        "n * weight",
        Cases(ops.fused_add_rms_norm, "fp16-one-plus", on="gfx950", said="output 0"),
    ),
    Bug(
        "one plus the weight rounded",
        "device/norm_row.h",
        "n * (1.0f + weight)",
        "n * round_to<T>(1.0f + weight)",
        Cases(ops.rms_norm_per_block_quant, "bf16-one-plus-heads", said="output 0"),
    ),
    Bug(
        "last column dropped",
        "device/row_output.h",
        "for (int column = thread; column < columns; column += threads) store_divided(column, divisor);",
        "for (int column = thread; column < columns - 1; column += threads) store_divided(column, divisor);",
        Cases(ops.rms_norm_dynamic_per_token_quant, "bf16-general", said="leaves another residual"),
    ),
    Bug(
        "two outputs from an unrounded sum",
        "device/norm_row.h",
        "constexpr bool kRoundsSum = true;",
        "constexpr bool kRoundsSum = false;",
        Cases(ops.rms_norm_and_per_block_quant, "bf16", said="output 0"),
    ),
    Bug(
        "plain output beyond its row",
        "ops/rms_norm.hip",
        "if (in_bounds) mem::store((u32x4*)plain + index, y);",
        "mem::store((u32x4*)plain + index, y);",
        Cases(
            ops.rms_norm_and_per_block_quant,
            "hidden1920-tail",
            on="gfx950",
            said="argument out|is also written by",
        ),
    ),
    Bug(
        "plain output left out, per element",
        "ops/rms_norm.hip",
        "{ store_element<T>(plain, column, value(column)); });",
        "{});",
        Cases(ops.rms_norm_and_per_block_quant, "bf16-general", said="output 0"),
    ),
    Bug(
        "plain output of the wrong row",
        "ops/rms_norm.hip",
        "plain = (u16*)plain + u32(wave::block_id_x()) * columns;",
        "plain = (u8*)plain + u32(wave::block_id_x()) * columns;",
        Cases(ops.rms_norm_and_per_block_quant, "fp16", on="gfx950", said="output 0|is also written by"),
    ),
    Bug(
        "scales of two outputs in the wrong row",
        "ops/rms_norm.hip",
        "u32(hidden) / kGroup, 1, kGroup",
        "1, 1, kGroup",
        Cases(ops.rms_norm_and_per_block_quant, "bf16", said="is also written by|output 2"),
    ),
    Bug(
        "addend left out",
        "device/norm_row.h",
        "input[i] = rounded_sum<T>(input[i], addend[i], row.addend_factor);",
        ";",
        Cases(ops.fused_add_rms_norm, "bf16-addend", said="leaves another residual"),
    ),
    Bug(
        "an addend's factor left out",
        "device/norm_row.h",
        "+= factor * addend.pair[j]",
        "+= addend.pair[j]",
        Cases(ops.rms_norm_per_block_quant, "fp16-addend", on="gfx950", said="leaves another residual"),
    ),
    Bug(
        "a sum with an addend that is not rounded",
        "ops/rms_norm.hip",
        "round_to<T>(z + row.addend_factor * load_element<T>(row.addend, column))",
        "z + row.addend_factor * load_element<T>(row.addend, column)",
        Cases(ops.fused_add_rms_norm, "bf16-addend-general", said="leaves another residual"),
    ),
    Bug(
        "an addend of another row",
        "ops/rms_norm.hip",
        "(const u16*)addend + index * input_stride",
        "(const u16*)addend + index * residual_stride",
        Cases(ops.rms_norm_and_per_block_quant, "fp16-one-plus-addend", on="gfx950", said="argument addend"),
    ),
    Bug(
        "residual not stored",
        "device/norm_row.h",
        "mem::store((u32x4*)row.residual + chunks.index[i], rounded);",
        ";",
        Cases(ops.fused_add_rms_norm, "fp16", on="gfx950", said="leaves another residual"),
    ),
    Bug(
        "scale of the neighboring group",
        "device/row_output.h",
        "(index >> log2_lanes) * scale_stride",
        "(index >> log2_lanes)",
        Cases(ops.rms_norm_per_block_quant, "transposed", said="is also written by"),
    ),
    Bug(
        "no clamp",
        "device/amd/numerics.h",
        "return __builtin_fmaxf(__builtin_fminf(x, kE4m3Max), -kE4m3Max);",
        "return x;",
        Cases(ops.rms_norm_static_fp8_quant, "bf16-corners", said="output 0"),
    ),
    Bug(
        "weight before the rounding",
        "device/norm_row.h",
        "normalize<T, !kRounded, kFactor>(exact[i]",
        "normalize<T, kRounded, kFactor>(exact[i]",
        Cases(ops.rms_norm, "bf16", on="gfx950", said="are off"),
    ),
    Bug(
        "software conversion without FNUZ's factor of 2",
        "device/amd/numerics.h",
        "clamp_e4m3(low.x * 0.5f)",
        "clamp_e4m3(low.x)",
        Cases(ops.rms_norm_mxfp8_quant, "bf16", said="output 0"),
    ),
    Bug(
        "general kernel uses the wrong group's scale",
        "device/row_output.h",
        "mem::store((u8*)scale_out + group * scale_stride, u8(scale));",
        "mem::store((u8*)scale_out + (group ^ 1) * scale_stride, u8(scale));",
        Cases(ops.layer_norm_mxfp8_quant, "fp16-general", on="gfx950", said="output 1"),
    ),
    Bug(
        "general kernel leaves the residual out",
        "ops/rms_norm.hip",
        "if constexpr (kResidual && kRounded) {",
        "if constexpr (kResidual && kRounded && !__is_same(Outputs, RowOutput<T, Output::kMx>)) {",
        Cases(ops.rms_norm_mxfp8_quant, "fp16-general", said="residual|output"),
    ),
    Bug(
        "sum not rounded",
        "device/norm_row.h",
        "!is_dynamic(output) || output == Output::kMx;",
        "!is_dynamic(output);",
        Call("test_mx_outputs.test_bytes_of_a_norm", False, on="gfx950", as_executor=False),
    ),
    Bug(
        "residual rows in 32 bits",
        "ops/rms_norm.hip",
        "(u16*)residual + index * residual_stride",
        "(u16*)residual + int(u32(index) * u32(residual_stride))",
        Call("test_far_apart.test_every_dimension_that_may_be_long", ops.fused_add_rms_norm),
    ),
    Bug(
        "head rows in 32 bits",
        "ops/rms_norm.hip",
        "outer * outer_stride +",
        "int(outer * u32(outer_stride)) +",
        Call("test_large_tensors.test_heads", ops.rms_norm),
    ),
    Bug(
        "an upper bound below the minimum scale (norm, token)",
        "device/row_output.h",
        "return absmax_to_scale(bounded(absmax));",
        "return bounded(absmax_to_scale(absmax));",
        Cases(ops.rms_norm_dynamic_per_token_quant, "scale_ub-1e-09"),
    ),
    Bug(
        "an upper bound below the minimum scale (norm, block)",
        "device/row_output.h",
        "return absmax_to_scale(bounded(absmax));",
        "return __builtin_fminf(absmax_to_scale(absmax), loaded_scale / numerics::kE4m3Max);",
        Cases(ops.rms_norm_per_block_quant, "scale_ub-1e-09"),
    ),
    Bug(
        "an infinite quotient refined",
        "device/float8.h",
        "return refined == refined ? refined : quotient;",
        "return refined;",
        Cases(ops.fused_add_rms_norm, "fp16-corners", "fp16-special"),
    ),
    Bug(
        "no minimum scale (norm)",
        "device/float8.h",
        "numerics::kE4m3Max), kMinScale)",
        "numerics::kE4m3Max), 1e-30f)",
        Cases(ops.rms_norm_per_block_quant, "fp16-corners"),
    ),
    Bug(
        "minimum scale doubled",
        "device/float8.h",
        "kE4m3Max * 512.0f",
        "kE4m3Max * 256.0f",
        Cases(ops.rms_norm_per_block_quant, "fp16-corners"),
    ),
    Bug(
        "clamps in the other order",
        "device/amd/numerics.h",
        "__builtin_fmaxf(__builtin_fminf(x, kE4m3Max), -kE4m3Max)",
        "__builtin_fminf(__builtin_fmaxf(x, -kE4m3Max), kE4m3Max)",
        Cases(ops.fused_add_rms_norm_static_fp8_quant, "fp16-corners", "bf16-special"),
    ),
    Bug(
        "ties to bf16 rounded up",
        "device/amd/numerics.h",
        "bits += ((bits >> 16) & 1) + 0x7fff;",
        "bits += 0x8000;",
        Cases(ops.fused_add_rms_norm, "bf16"),
    ),
    Bug(
        "residual read at input's stride",
        "ops/rms_norm.hip",
        "(u16*)residual + index * residual_stride",
        "(u16*)residual + index * input_stride",
        Cases(ops.fused_add_rms_norm, "strided", "bf16-general"),
    ),
    Bug(
        "a reduction reads a slot beyond its waves",
        "device/reduce.h",
        "slot < waves ?",
        "slot <= waves ?",
        Cases(ops.rms_norm, "bf16"),
    ),
    Bug(
        "norm output rows in 32 bits",
        "device/row_output.h",
        "(u8*)out + row * columns *",
        "(u8*)out + int(row * columns) *",
        Tests("test_large_tensors.py::test_last_of_many_rows[rms_norm-gfx942]", module="rms_norm"),
    ),
    Bug(
        "every other missing weight 0",
        "ops/standalone/layer_norm.hip",
        "const u32 ones = row.weight ? 0 : T::pack({1.0f, 1.0f});",
        "const u32 ones = row.weight ? 0 : u32(T::pack({1.0f, 0.0f}));",
        Tests(),
    ),
)
