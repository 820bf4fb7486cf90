// Sums of all ranks' rows, RMSNorm of them, and e4m3 quantization with a scale per group of columns: collectives/all_reduce.h.
#include "collectives/instances.h"

NORMS(rms_norm_per_block_quant, kPerBlock)
NORMS(rms_norm_mxfp8_quant, kMx)
