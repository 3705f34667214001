// The layout of one group's quantized values inside a panel. pack.cpp writes it; linear.cpp and dots.cpp read it.
//
//   kCodes8, kFloats8: rows of 16 bytes, one input each
//   kCodes4: rows of 16 bytes, input 2k in the lower four bits and 2k + 1 in the upper four
//   kDots4, kFloats4: rows of 32 bytes, four consecutive inputs adjacent; outputs 0 to 7 in the lower four
//            bits, 8 to 15 in the upper four
//   kDots8:  rows of 64 bytes, four consecutive inputs adjacent, signed
//   kPairs:  no groups; bfloat16, two consecutive inputs adjacent
#pragma once
#include <algorithm>

#include "abi.h"
#include "tile.h"

namespace pagemill {

struct Place {
  int64_t byte;
  bool high;  // the upper four bits of the byte
};

constexpr bool in_nibbles(int32_t format) { return format == kCodes4 || format == kDots4 || format == kFloats4; }

template <int32_t Code>
constexpr Place place_of(int64_t input, int64_t output) {
  switch (Code) {
    case kCodes8:
    case kFloats8: return {input * kPanel + output, false};
    case kDots8: return {input / 4 * 4 * kPanel + output * 4 + input % 4, false};
    case kCodes4: return {input / 2 * kPanel + output, input % 2 == 1};
    default: return {input / 4 * 2 * kPanel + output % kLanes * 4 + input % 4, output >= kLanes};
  }
}

// Indices of the elements of a bfloat16 panel in kPairs.
constexpr int64_t pairs_in(int64_t inputs) { return (inputs + 1) / 2; }
constexpr int64_t pair_place(int64_t input, int64_t output) { return (input / 2 * kPanel + output) * 2 + input % 2; }

inline int64_t group_bytes(int32_t format, int64_t group) { return group * kPanel / (in_nibbles(format) ? 2 : 1); }

constexpr int64_t kAheadBytes = 3072;

// Prefetches a weight's bytes some time before they are multiplied. Panels are adjacent, so this also works across
// their ends.
inline void fetch_ahead(const uint8_t* weight, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(weight + kAheadBytes + at);
}

// A run is the part of a panel's inputs that is multiplied before a scale is applied. A group is one run of 16 inputs
// or several of 32, which share a scale.
constexpr int64_t kRun = 32;

inline int64_t run_of(const PackedWeight& w) { return w.group < kRun ? w.group : kRun; }
inline int64_t scale_floats(const PackedWeight& w) { return w.has_offsets ? 2 * kPanel : kPanel; }
inline const float* scales_of(const PackedWeight& w, int64_t panel, int64_t input) {
  return w.scales + (panel * (w.in_features / w.group) + input / w.group) * scale_floats(w);
}

// Follows the runs of a panel, of `run_bytes` each, and returns the scales of the run's group.
class ScaleWalk {
 public:
  ScaleWalk(const PackedWeight& w, int64_t panel, int64_t run_bytes, int64_t input = 0)
      : scales_(scales_of(w, panel, input)),
        floats_(scale_floats(w)),
        runs_(w.group / run_of(w)),
        run_bytes_(run_bytes),
        ahead_(std::max<int64_t>(kAheadBytes / (run_bytes * runs_), 1) * floats_),
        left_(runs_ - input % w.group / run_of(w)) {}
  const float* scales() const { return scales_; }
  // Prefetches the run's bytes from `codes` on and, where a group begins, its scales. offset: of another panel's
  // scales.
  void fetch(const uint8_t* codes, int64_t offset = 0) const {
    fetch_ahead(codes, run_bytes_);
    if (left_ != runs_) return;
    for (int64_t at = 0; at < floats_; at += 16) __builtin_prefetch(scales_ + offset + ahead_ + at);
  }
  void next() {
    if (--left_ == 0) left_ = runs_, scales_ += floats_;
  }

 private:
  const float* scales_;
  const int64_t floats_, runs_, run_bytes_, ahead_;
  int64_t left_;
};

}  // namespace pagemill
