// All-reduce of rows, RMSNorm and e4m3 quantization with a per-tensor or per-token scale; see collectives/all_reduce.h.
#include "collectives/instances.h"

NORMS(rms_norm_static_fp8_quant, Static)
NORMS(rms_norm_dynamic_per_token_quant, PerToken)
