// Sums of all ranks' rows, RMSNorm of them, and e4m3 quantization with a scale per tensor or per token: collectives/all_reduce.h.
#include "collectives/instances.h"

NORMS(rms_norm_static_fp8_quant, kStatic)
NORMS(rms_norm_dynamic_per_token_quant, kPerToken)
