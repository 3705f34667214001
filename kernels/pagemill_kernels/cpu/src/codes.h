// Where the codes of one group lie inside a panel. Written by pack.cpp, read by linear.cpp (codes) and dots.cpp (dots).
//
//   kCodes8: rows of 16 bytes, one input each
//   kCodes4: rows of 16 bytes, input 2k low and 2k + 1 high
//   kDots4:  rows of 32 bytes, four neighbouring inputs side by side: outputs 0 to 7 low, 8 to 15 high
//   kDots8:  rows of 64 bytes, four neighbouring inputs side by side, signed
//   kPairs:  no groups: bfloat16, two neighbouring inputs side by side
#pragma once
#include "abi.h"
#include "tile.h"

namespace pagemill {

struct Place {
  int64_t byte;
  bool high;  // the upper four bits of it
};

constexpr bool in_nibbles(int32_t format) { return format == kCodes4 || format == kDots4; }

template <int32_t Code>
constexpr Place place_of(int64_t input, int64_t output) {
  switch (Code) {
    case kCodes8: return {input * kPanel + output, false};
    case kDots8: return {input / 4 * 4 * kPanel + output * 4 + input % 4, false};
    case kCodes4: return {input / 2 * kPanel + output, input % 2 == 1};
    default: return {input / 4 * 2 * kPanel + output % kLanes * 4 + input % 4, output >= kLanes};
  }
}

// kPairs of bfloat16: a panel's elements.
constexpr int64_t pairs_in(int64_t inputs) { return (inputs + 1) / 2; }
constexpr int64_t pair_place(int64_t input, int64_t output) { return (input / 2 * kPanel + output) * 2 + input % 2; }

inline int64_t group_bytes(int32_t format, int64_t group) { return group * kPanel / (in_nibbles(format) ? 2 : 1); }

constexpr int64_t kAheadBytes = 3072;

// A weight's bytes some time before they are multiplied: panels lie one behind another, so this holds across their ends.
inline void fetch_ahead(const uint8_t* weight, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(weight + kAheadBytes + at);
}

// The same for a group of codes and its scales.
inline void fetch_ahead(const uint8_t* codes, int64_t bytes, const float* scales, int64_t floats) {
  fetch_ahead(codes, bytes);
  const int64_t ahead = kAheadBytes / bytes * floats;
  for (int64_t at = 0; at < floats; at += 16) __builtin_prefetch(scales + ahead + at);
}

}  // namespace pagemill
