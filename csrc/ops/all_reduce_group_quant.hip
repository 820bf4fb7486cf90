// All-reduce of rows, RMSNorm and e4m3 quantization with one scale per column group; see collectives/all_reduce.h.
#include "collectives/instances.h"

NORMS(rms_norm_per_block_quant, PerBlock)
NORMS(rms_norm_and_per_block_quant, BesideNorm)
NORMS(rms_norm_mxfp8_quant, Mx)
