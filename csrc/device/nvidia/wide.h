// Tiles of 64 rows, streamed through LDS. Each of the two teams of a block, four waves, has a ring of panels, 128 bytes of K of the
// tile's rows and of all tokens, that it fills, past the registers, and multiplies; they take panels in turns. Registers hold
// enough loads for some 86 % of HBM's bandwidth, LDS for 97 % (gemm.py on H200, 13312 x 16384). Past the end of a tile the next
// tile's panels follow, so that all stages of a ring but one are always in flight. A block that has a compute unit's LDS to itself
// gets a deeper ring: how much LDS it has says which. Block scales come with their panel.
//
// Tried on H200 (gemm.py, scaled_mm) and left. Sums that meet in the LDS of a cluster of blocks: 0.2 to 0.9 us less where tiles are
// shared, 0.3 us more where they are not. Kernels that start while the one before runs (griddepcontrol), with their first panels
// under way: 1.26 to 1.30 times as fast as the best peer up to 16 tokens in place of 1.06 to 1.10; but AMD's GPUs have nothing
// like it, and it is only right where that kernel does not write the weight. With panels on their way to the L2 cache only, which
// is always right, the largest products take 5 % longer.
#pragma once
#include "mma.h"

extern LDS __attribute__((aligned(1024))) u8 dynamic_lds[];  // [teams][kStages][weight rows, then tokens of a panel]

template <class Type, int kTokens, Scales kScales, class Scale = Fp32Scale>
struct Wide {
  static constexpr int kTeams = 2, kTeamThreads = mma::kWaves * wave::kLanes, kThreads = kTeams * kTeamThreads;
  static constexpr int kPanel = tile::kDepth / mma::kDepth, kGroup = kTeams * kPanel;  // steps
  static constexpr int kWeightBytes = kTileRows * tile::kDepth, kStageBytes = kWeightBytes + kTokens * tile::kDepth;
  static constexpr int kResident = 2;                                       // blocks
  static constexpr int kDeep = kTokens == 16 ? 11 : kTokens == 32 ? 9 : 6;  // stages of a block alone
  static constexpr int kShallow = kTokens == 64 ? 3 : 4;                    // and of kResident; gemm.py knows both
  static constexpr int kSums = kTokens / 2;
  static constexpr bool kScaled = kScales == Scales::kBlock;
  using Tile = Finish<kScales, kTokens / 8, 1, 2, kGroup, kThreads, 64>;
  using Weights = tile::Filler<kTileRows, kTeamThreads>;
  using Scaling = u32[kTeams][kDeep][kTokens + 2];  // words that the scales of the tokens and of the weight lie in

  const Product& p;
  Scaling& scaling;  // in LDS
  const Share<kGroup> share{p};
  const int lane = wave::lane(), team = wave::index() / mma::kWaves, team_wave = wave::index() % mma::kWaves;
  const int thread = wave::thread() % kTeamThreads;  // of the team

  // The waves' rows are in such an order that a lane's sums are of two rows in a row.
  DEVICE void begin_stream(Weights& weights, int tile) const {
    const int first = tile * kTileRows;
    auto row_of = [&](int at) {
      const int row = at / 16 * 16 + at % 8 * 2 + at / 8 % 2;
      return first + row < p.n ? row : tile::kNoRow;
    };
    weights.init(p.b + first / mma::kRows * p.b_tile, tile::Layout{p.b_tile, p.b_row, p.b_step / 4, p.b_step}, row_of,
                 team_wave);
  }

  // Where the scales of a token lie, or, of the one past the last, those of a tile of the weight.
  DEVICE const u8* scales_from(int token, int tile) const {
    if (token < kTokens) return (const u8*)p.scale_a + token * p.scale_a_row * Scale::kBytes;
    return (const u8*)p.scale_b + i64(tile * kTileRows / kScaleBlock) * p.scale_b_row * Scale::kBytes;
  }
  DEVICE int scale_step(int token) const { return (token < kTokens ? p.scale_a_k : 1) * Scale::kBytes; }
  DEVICE float scale(u32 word, int token, const Group& group) const {
    const int block = group.step / kPanel + team;
    return Scale::of_word(word, u32(i64(scales_from(token, group.tile))) + block * scale_step(token));
  }
  // Of the team's panel in a stage: those of a token and the next.
  DEVICE f32x2 scales_of_tokens(int stage, int token, const Group& group) const {
    const u32x2 words = *(const u32x2*)&scaling[team][stage][token];
    return {scale(words.x, token, group), scale(words.y, token + 1, group)};
  }
  DEVICE float scale_of_weight(int stage, const Group& group) const {
    return scale(scaling[team][stage][kTokens], kTokens, group);
  }

  template <int kStages>
  DEVICE void multiply() const {
    auto* lds = (lds::Local<u8>*)dynamic_lds + team * kStages * kStageBytes;
    Group now = share.begin(), ahead = now;
    tile::Filler<kTokens, kTeamThreads> tokens;
    tokens.init(
        p.a, tile::Layout{16 * i64(p.a_stride), p.a_stride, tile::kPiece, 4 * tile::kPiece},
        [&](int token) { return token < p.m ? token : tile::kNoRow; }, team_wave);
    Weights weights;
    begin_stream(weights, ahead.tile);
    const u8* scales = scales_from(thread, ahead.tile);  // of the thread's token
    const int step_of_scales = scale_step(thread);
    auto start_next = [&](int stage) __attribute__((always_inline)) {
      if (ahead.end > 0) {
        const int step = ahead.step + team * kPanel, bytes = share.bytes_left(ahead, step), tile = ahead.tile;
        auto* to = lds + stage * kStageBytes;
        weights.start_at(step * p.b_step, bytes, to);
        tokens.start_at(step * mma::kDepth, bytes, to + kWeightBytes);
        if (kScaled && thread <= kTokens)
          lds::start_word(scales + step / kPanel * step_of_scales, bytes > 0 && (thread < p.m || thread == kTokens),
                          &scaling[team][stage][thread]);
        ahead = share.after(ahead);
        if (ahead.tile != tile && ahead.end > 0) {
          begin_stream(weights, ahead.tile);
          scales = scales_from(thread, ahead.tile);
        }
      }
      lds::end_group();
    };
#pragma unroll 1
    for (int stage = 0; stage < kStages - 1; ++stage) start_next(stage);

    const mma::Panel weights_at(0, p.b_step != mma::kDepth), tokens_at(0, false);
    float sum[kSums] = {};
    Tile tile{p, share};
    begin_tile(tile, now.tile);
    for (int stage = 0;;) {
      const Group next = share.after(now);
      lds::wait_for_copies<kStages - 2>();
      team_barrier<kTeamThreads>(team);  // hazard: read before all filled it; the last stage filled while it is read
      auto* here = lds + stage * kStageBytes;
      // The matrix units sum up e4m3 with some 14 bits, so that their sums are of one panel only.
      float product[kSums];
      mma::start_product<Type>(product, weights_at, here, tokens_at, here + kWeightBytes);
      start_next(stage == 0 ? kStages - 1 : stage - 1);
      mma::wait_for_sums(product);
      const float scale_b = kScaled ? scale_of_weight(stage, now) : 1.0f;
#pragma unroll
      for (int i = 0; i < kSums / 4; ++i) {
        const f32x2 scale = kScaled ? scales_of_tokens(stage, i * 8 + lane % 4 * 2, now) * scale_b : f32x2{1.0f, 1.0f};
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[i * 4 + j] += product[i * 4 + j] * scale[j % 2];
      }
      if (next.tile != now.tile) {
        end_tile<kStages>(tile, sum, stage);
        for (float& value : sum) value = 0.0f;
        if (next.end > 0) begin_tile(tile, next.tile);
      }
      if (next.end <= 0) return;
      now = next;
      stage = stage == kStages - 1 ? 0 : stage + 1;
    }
  }

  // Of a thread's sums, [kTokens / 8][2 rows][2 tokens], each team ends with those of its half of the tokens.
  DEVICE void begin_tile(Tile& tile, int index) const {
    const int row = index * kTileRows + team_wave * mma::kRows + lane / 4 * 2;
    tile.begin(
        index,
        [&](int i) __attribute__((always_inline)) { return team * (kTokens / 2) + i / 2 * 8 + lane % 4 * 2 + i % 2; },
        [&](int) __attribute__((always_inline)) { return row; });
  }
  // The other half goes to the other team, through the stage that both have read.
  template <int kStages>
  DEVICE void end_tile(const Tile& tile, const float (&sum)[kSums], int stage) const {
    constexpr int kHalf = kSums / kTeams, kStage = kStageBytes / 4;
    auto* lds = (lds::Local<float>*)dynamic_lds;
    lds::Local<float>* mine = lds + (team * kStages + stage) * kStage + thread;
    const lds::Local<float>* theirs = lds + ((1 - team) * kStages + stage) * kStage + thread;
    team_barrier<kTeamThreads>(team);  // hazard: written while other waves' products still read there
#pragma unroll
    for (int i = 0; i < kHalf; ++i) mine[i * kTeamThreads] = team == 0 ? sum[kHalf + i] : sum[i];
    block_barrier();  // hazard: read before it is written
    float half[kHalf];
#pragma unroll
    for (int i = 0; i < kHalf; ++i)
      half[i] = team == 0 ? sum[i] + theirs[i * kTeamThreads] : theirs[i * kTeamThreads] + sum[kHalf + i];
    block_barrier();  // hazard: filled while it is still read
    f32x2 values[kTokens / 8][1];
#pragma unroll
    for (int i = 0; i < kTokens / 8; ++i) values[i][0] = f32x2{half[i / 2 * 4 + i % 2], half[i / 2 * 4 + 2 + i % 2]};
    tile.end(values);
  }

  DEVICE static void run(const Product& product) {
    LDS alignas(8) static Scaling scaling;
    const Wide kernel{product, scaling};
    u32 bytes;
    asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
    if (bytes == kTeams * kDeep * kStageBytes) kernel.template multiply<kDeep>();
    else kernel.template multiply<kShallow>();
  }
};
