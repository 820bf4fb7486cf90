// All-reduce of many bf16 rows, RMSNorm and e4m3 quantization with one scale per column group; see collectives/flagged.h.
#include "collectives/flagged_instances.h"

FLAGGED_NORMS(rms_norm_per_block_quant, PerBlock, false)
FLAGGED_NORMS(rms_norm_and_per_block_quant, BesideNorm, false)
FLAGGED_NORMS(rms_norm_mxfp8_quant, Mx, false)
