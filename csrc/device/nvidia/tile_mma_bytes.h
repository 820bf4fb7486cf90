// MMA of accumulator tiles for all 8-bit types: provided by mma.h.
#pragma once
#include "tile_mma.h"
