// Maps a block to a head and its rows.
#pragma once
#include "ops/standalone/flash_problem.h"

// The tile for an index. Consecutive tiles use different KV heads, so an XCD, which gets every eighth block, has few KV
// heads in its cache. Rows that see the most keys come first.
template <int kTileRows>
struct FlashTile {
  int sequence, head, kv_head;
  int rows, keys, first_row;  // of the sequence; of the tile
  i64 first_query;            // batch row of the sequence's row 0
  int first_key;              // likewise for keys

  DEVICE FlashTile(const FlashProblem& p, int index) {
    const int of_rows = u32(index) / p.heads_divisor, of_heads = index - of_rows * p.heads;
    const int in_group = u32(of_heads) / p.kv_heads_divisor;
    kv_head = of_heads - in_group * p.kv_heads;
    head = kv_head * p.group + in_group;
    first_query = first_key = 0;
    rows = p.rows;
    keys = p.keys;
    if (!p.row_begins) {
      const int tile = u32(of_rows) / p.sequences_divisor;
      sequence = of_rows - tile * p.sequences;
      first_row = (p.row_tiles - 1 - tile) * kTileRows;
      return;
    }
    // Sequence s has tiles from row_begins[s] / kTileRows + s on; one of them may be empty.
    int begun = 0;
    for (int s = 0; s < p.sequences; s += wave::kLanes) {
      const int of_lane = s + wave::lane(), last = p.sequences - 1;
      const int begin = mem::load<int>(p.row_begins + (of_lane < last ? of_lane : last));
      begun += wave::count((of_lane <= last ? begin / kTileRows + of_lane : 0x7fffffff) <= of_rows);
    }
    sequence = wave::uniform(begun - 1);
    const int begin = wave::uniform(mem::load<int>(p.row_begins + sequence));
    rows = wave::uniform(mem::load<int>(p.row_begins + sequence + 1)) - begin;
    first_query = begin;
    const int tile = of_rows - (begin / kTileRows + sequence), tiles = (rows + kTileRows - 1) / kTileRows;
    first_row = tile < tiles ? (tiles - 1 - tile) * kTileRows : rows;
    if (p.seq_lens) {
      keys = wave::uniform(mem::load<int>(p.seq_lens + sequence));
      return;
    }
    first_key = wave::uniform(mem::load<int>(p.key_begins + sequence));
    keys = wave::uniform(mem::load<int>(p.key_begins + sequence + 1)) - first_key;
  }
  DEVICE bool has_rows() const { return first_row < rows; }

  // The keys that a row sees: [begin, end).
  DEVICE int end(const FlashProblem& p, int row) const {
    const int causal = row + keys - rows + 1;
    return p.causal && causal < keys ? causal : keys;
  }
  DEVICE int begin(const FlashProblem& p, int row) const {
    const int first = row + keys - rows + 1 - p.window;
    return p.window > 0 && first > 0 ? first : 0;
  }
};
