// All-reduce of many bf16 rows, with or without RMSNorm; see collectives/flagged.h.
#include "collectives/flagged_instances.h"

FLAGGED_GROUPS(FLAGGED_SUM_INSTANCE, bf16, Bf16)
FLAGGED_NORMS(rms_norm, Plain, true)
