// All-reduce of many bf16 rows, RMSNorm and e4m3 quantization, one scale or one per token; see collectives/flagged.h.
#include "collectives/flagged_instances.h"

FLAGGED_NORMS(rms_norm_static_fp8_quant, Static, false)
FLAGGED_NORMS(rms_norm_dynamic_per_token_quant, PerToken, false)
