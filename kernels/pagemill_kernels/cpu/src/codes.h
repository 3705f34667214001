// Where the codes of one group lie inside a panel. Written by pack.cpp, read by linear.cpp (codes) and dots.cpp (dots).
//
//   kCodes8: rows of 16 bytes, one input each
//   kCodes4: rows of 16 bytes, input 2k low and 2k + 1 high
//   kDots4:  rows of 32 bytes, four neighbouring inputs side by side: outputs 0 to 7 low, 8 to 15 high
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
    case kCodes4: return {input / 2 * kPanel + output, input % 2 == 1};
    default: return {input / 4 * 2 * kPanel + output % kLanes * 4 + input % 4, output >= kLanes};
  }
}

inline int64_t group_bytes(int32_t format, int64_t group) { return group * kPanel / (in_nibbles(format) ? 2 : 1); }

}  // namespace pagemill
