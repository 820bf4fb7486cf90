// Products of accumulator tiles of all types of 8 bits: those of mma.h.
#pragma once
#include "tile_mma.h"
