"""List all ops: `vllm_rocm_ops.ops.<name>`. A new op is one file here, one in csrc/ops, and one line below."""

from vllm_rocm_ops.ops.batched_gemm import *
from vllm_rocm_ops.ops.batched_gemm_rope import *
from vllm_rocm_ops.ops.block_scaled_mm import *
from vllm_rocm_ops.ops.fused_experts import *
from vllm_rocm_ops.ops.gated_delta_net_decode import *
from vllm_rocm_ops.ops.gemm import *
from vllm_rocm_ops.ops.mla_decode import *
from vllm_rocm_ops.ops.mla_norm_rope_and_cache import *
from vllm_rocm_ops.ops.moe_routing import *
from vllm_rocm_ops.ops.mxfp8_scaled_mm import *
from vllm_rocm_ops.ops.paged_attention_decode import *
from vllm_rocm_ops.ops.qk_norm_rope_and_cache import *
from vllm_rocm_ops.ops.rms_norm import *
from vllm_rocm_ops.ops.rope_and_cache import *
from vllm_rocm_ops.ops.router_gemm_topk import *
from vllm_rocm_ops.ops.scaled_mm import *
from vllm_rocm_ops.ops.silu_and_mul import *
from vllm_rocm_ops.ops.silu_and_mul_with_clamp import *
from vllm_rocm_ops.ops.standalone.dequantize_int4 import *
from vllm_rocm_ops.ops.standalone.flash_attention import *
from vllm_rocm_ops.ops.standalone.layer_norm import *
from vllm_rocm_ops.ops.standalone.rope_and_cache_mla import *
from vllm_rocm_ops.ops.standalone.router_loss import *
from vllm_rocm_ops.ops.standalone.softmax import *
from vllm_rocm_ops.ops.stream_memory import *
from vllm_rocm_ops.ops.unquantized_gemm import *
