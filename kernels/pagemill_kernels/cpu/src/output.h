// The output columns of one weight panel: 16, or fewer for the last panel.
#pragma once
#include <algorithm>

#include "abi.h"
#include "tile.h"

namespace pagemill {

struct Target {
  const float* bias;
  float* out;
  int64_t stride;
  int64_t columns;

  Target from_row(int64_t row) const { return {bias, out + row * stride, stride, columns}; }

  // Initializes c with the bias, plus the current output if `add_out`.
  void begin(float* c, int64_t rows, bool add_bias, bool add_out) const {
    alignas(32) float base[kPanel] = {};
    if (add_bias && bias) std::memcpy(base, bias, columns * sizeof(float));
    const Floats low = load(base), high = load(base + kLanes);
    for (int64_t r = 0; r < rows; ++r, c += kPanel) {
      if (!add_out) {
        store(c, low);
        store(c + kLanes, high);
      } else if (columns == kPanel) {
        store(c, low + load(out + r * stride));
        store(c + kLanes, high + load(out + r * stride + kLanes));
      } else {
        for (int64_t n = 0; n < columns; ++n) c[n] = base[n] + out[r * stride + n];
      }
    }
  }
  void end(const float* c, int64_t rows) const {
    if (columns < kPanel) {
      for (int64_t r = 0; r < rows; ++r) std::memcpy(out + r * stride, c + r * kPanel, columns * sizeof(float));
      return;
    }
    for (int64_t r = 0; r < rows; ++r) {
      store(out + r * stride, load(c + r * kPanel));
      store(out + r * stride + kLanes, load(c + r * kPanel + kLanes));
    }
  }
};

inline Target target_of(const PackedWeight& w, int64_t panel, const float* bias, float* out, int64_t out_stride) {
  const int64_t first = panel * kPanel;
  return {bias ? bias + first : nullptr, out + first, out_stride, std::min<int64_t>(kPanel, w.out_features - first)};
}

}  // namespace pagemill
