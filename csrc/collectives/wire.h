// The wire formats of a payload: a vector of 8 values of T, or of e4m3 with a scale per 128 values.
//
//     s = the smallest power of two for which the group's absmax / s is at most kE4m3Max
//     x on the wire = e4m3(x / s) * s      exact in bf16 again, so every rank has the same bits
//
// Another scale would be no more precise than a power of two, as e4m3 has an exponent: it keeps 4 significant bits of
// every value down to 2^-13 of the group's absmax. An infinity or NaN makes the scale, and so the whole group, NaN.
//
// A slot has 16 bytes per vector in either format. With e4m3 its first half has the values, and scales follow them.
#pragma once
#include "device/float8.h"
#include "device/scale.h"
#include "one_shot.h"

template <class Protocol, class T>
struct PlainWire {
  using Payload = u32x4;
  static constexpr u32 kGroup = 1;  // vectors with one scale, which are in one slice

  DEVICE static Payload encode(u32x4 x, bool) { return x; }
  DEVICE static u32x4 decode(Payload x) { return x; }
  DEVICE static Payload missing() { return u32x4{kMissing, kMissing, kMissing, kMissing}; }
  // Vector `index` of the slot with `vectors` vectors that begins `at` bytes into the inbox.
  DEVICE static void put(u64* inbox, u32 at, u32, u32 index, Payload x) { Protocol::put(inbox, at + index * 16, x); }
  DEVICE static Payload get(const u64* inbox, u32 at, u32, u32 index, bool inside) {
    return Protocol::template get<Payload>(inbox, at + index * 16, inside);
  }
};

template <class Protocol, class T>
struct E4m3Wire {
  static constexpr u32 kGroup = 16;
  struct Payload {
    u32x2 values;
    u32 scale;  // fp32
  };

  // Called by all lanes of a wave. Each 16 lanes have the vectors of one group; those past the row's end are not inside.
  DEVICE static Payload encode(u32x4 x, bool inside) {
    auto larger = [](u32 a, u32 b) __attribute__((always_inline)) { return a > b ? a : b; };
    static_assert(__is_same(T, Bf16));  // a word's halves are the upper bits of floats
    u32 absmax = 0;                     // as an integer, so that infinity and NaN are larger than any number
    for (int j = 0; j < 4; ++j) absmax = larger(larger(absmax, x[j] & 0x7fff0000), x[j] << 16 & 0x7fff0000);
    absmax = wave::reduce_group<int(kGroup)>(inside ? absmax : 0u, 0u, larger);
    constexpr u32 kBelowMx = numerics::kE4m3Max < numerics::kE4m3fnMax ? 1 : 0;  // powers of two
    const u32 e8m0 = absmax_to_e8m0(__builtin_bit_cast(float, absmax)) + kBelowMx;
    const float scale = E8m0Scale::value(absmax < 0x7f800000 ? e8m0 : 255);
    return {quantize(unpack<T>(x), inverse_e8m0(e8m0)), __builtin_bit_cast(u32, scale)};
  }
  DEVICE static u32x4 decode(Payload x) {
    const float scale = __builtin_bit_cast(float, x.scale);
    const f32x2 values[4] = {numerics::from_e4m3x2<false>(x.values.x), numerics::from_e4m3x2<true>(x.values.x),
                             numerics::from_e4m3x2<false>(x.values.y), numerics::from_e4m3x2<true>(x.values.y)};
    return pack<T>(Chunk{values[0] * scale, values[1] * scale, values[2] * scale, values[3] * scale});
  }
  DEVICE static Payload missing() { return {u32x2{}, 0x7fc00000}; }
  DEVICE static void put(u64* inbox, u32 at, u32 vectors, u32 index, Payload x) {
    Protocol::put(inbox, at + index * 8, x.values);
    if (index % kGroup == 0) Protocol::put(inbox, at + vectors * 8 + index / kGroup * 4, x.scale);
  }
  DEVICE static Payload get(const u64* inbox, u32 at, u32 vectors, u32 index, bool inside) {
    return {Protocol::template get<u32x2>(inbox, at + index * 8, inside),
            Protocol::template get<u32>(inbox, at + vectors * 8 + index / kGroup * 4, inside)};
  }
};
