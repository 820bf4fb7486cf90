// All-reduce of many rows, with or without RMSNorm; see collectives/flagged.h.
#include "collectives/flagged_instances.h"

FLAGGED_GROUPS(FLAGGED_SUM_INSTANCE, bf16, Bf16)
FLAGGED_GROUPS(FLAGGED_SUM_INSTANCE, fp16, F16)
FLAGGED_NORMS(rms_norm, Plain, true)
