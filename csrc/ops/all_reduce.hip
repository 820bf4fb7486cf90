// All-reduce of rows, with or without RMSNorm; see collectives/all_reduce.h.
#include "collectives/instances.h"

GROUPS(SUM_INSTANCE, bf16, Bf16)
GROUPS(SUM_INSTANCE, fp16, F16)
NORMS(rms_norm, Plain)
