// Computes out = x W^T + bias in bfloat16: a slice of x is rounded and three panels of the weight are unpacked, both
// within the second-level cache; then tiles of eight rows and 48 outputs are multiplied, two inputs in one instruction.
// Sums are float32 in a fixed order, so that a row's result does not depend on the number of rows.
//
// Layout of unpacked panels and kPairs: [k / 2][n][2]; a last odd input is paired with zeros.
#include "bfloat16.h"

#include <algorithm>
#include <vector>

#include "threads.h"
#include "unpack_pairs.h"

namespace pagemill {

#ifdef __AVX512BF16__
namespace {

constexpr int64_t kDepth = 2048;       // inputs unpacked at a time: 64 KiB for a panel
constexpr int64_t kSlice = 256 * 1024; // elements of x rounded at a time: half of a second-level cache of 1 MiB
constexpr int64_t kMostRows = 128;     // most rows of such a slice
constexpr int kRows = 8, kPanels = 3;  // 24 sums, 3 of the weight and 1 of x: 28 of 32 registers

struct Tile {
  const uint16_t* x;  // rows x_stride apart
  int64_t x_stride;
  const uint16_t* weight;  // panels panel_stride apart
  int64_t panel_stride;
  int64_t pairs;  // number of input pairs
  const float* bias;
  float* out;
  int64_t out_stride;
  int64_t columns;  // of `out` from its first on; the last panel may be partial
  bool accumulate;
};

inline __m512 multiply_add(__m512 sums, __m512i a, __m512i b) {
  return _mm512_dpbf16_ps(sums, (__m512bh)a, (__m512bh)b);
}

template <int Rows, int Panels, bool Fetch>
void tile(const Tile& t) {
  __m512 sums[Rows][Panels];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
    for (int p = 0; p < Panels; ++p) sums[r][p] = _mm512_setzero_ps();
  const uint16_t* weight = t.weight;
  const uint16_t* x = t.x;
  for (int64_t k = 0; k < t.pairs; ++k, weight += 2 * kPanel, x += 2) {
    __m512i w[Panels];
#pragma GCC unroll 4
    for (int p = 0; p < Panels; ++p) {
      if (Fetch) fetch_ahead(reinterpret_cast<const uint8_t*>(weight + p * t.panel_stride), 64);
      w[p] = _mm512_loadu_si512(weight + p * t.panel_stride);
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
      const __m512i pair = _mm512_set1_epi32(load_as<int32_t>(x + r * t.x_stride));
#pragma GCC unroll 4
      for (int p = 0; p < Panels; ++p) sums[r][p] = multiply_add(sums[r][p], w[p], pair);
    }
  }
#pragma GCC unroll 4
  for (int p = 0; p < Panels; ++p) {
    const int64_t columns = t.columns - p * kPanel;
    const __mmask16 mask = columns >= kPanel ? 0xffff : static_cast<__mmask16>((1 << columns) - 1);
    const __m512 bias = t.bias ? _mm512_maskz_loadu_ps(mask, t.bias + p * kPanel) : _mm512_setzero_ps();
    float* out = t.out + p * kPanel;
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r, out += t.out_stride) {
      __m512 sum = _mm512_add_ps(sums[r][p], bias);
      if (t.accumulate) sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(mask, out));
      _mm512_mask_storeu_ps(out, mask, sum);
    }
  }
}

using Kernel = void (*)(const Tile&);
template <int Panels, bool Fetch>
constexpr Kernel kernel_for(int64_t rows) {
  constexpr Kernel kKernels[kRows] = {tile<1, Panels, Fetch>, tile<2, Panels, Fetch>, tile<3, Panels, Fetch>,
                                      tile<4, Panels, Fetch>, tile<5, Panels, Fetch>, tile<6, Panels, Fetch>,
                                      tile<7, Panels, Fetch>, tile<8, Panels, Fetch>};
  return kKernels[rows - 1];
}

template <bool Fetch>
constexpr Kernel kernel_for(int64_t rows, int64_t panels) {
  return (panels == 3 ? kernel_for<3, Fetch> : panels == 2 ? kernel_for<2, Fetch> : kernel_for<1, Fetch>)(rows);
}

// Rounds a slice of every row; an odd last input is paired with a zero.
void round_rows(const float* x, int64_t rows, int64_t x_stride, int64_t depth, uint16_t* to, int64_t to_stride) {
  for (int64_t r = 0; r < rows; ++r, x += x_stride, to += to_stride) {
    int64_t k = 0;
    for (; k + 32 <= depth; k += 32) {
      const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(x + k + 16), _mm512_loadu_ps(x + k));
      _mm512_storeu_si512(to + k, both);
    }
    for (; k < depth; ++k) to[k] = to_bfloat16(x[k]);
    if (depth % 2) to[depth] = 0;
  }
}

// Multiplies the rows in tiles of as equal size as possible, because a tile of one row waits for its sums. The first
// tile reads a weight that was not unpacked from memory, and the others read it from the caches.
void multiply(Tile t, int64_t rows, int64_t panels, bool stored) {
  const int64_t tiles = (rows + kRows - 1) / kRows;
  for (int64_t i = 0; i < tiles; ++i) {
    const int64_t count = rows * (i + 1) / tiles - rows * i / tiles;
    (stored && i == 0 ? kernel_for<true>(count, panels) : kernel_for<false>(count, panels))(t);
    t.x += count * t.x_stride;
    t.out += count * t.out_stride;
  }
}

// Returns the rows of blocks that are as equal as whole tiles allow.
int64_t rows_of_block(int64_t rows, int64_t room) {
  const int64_t blocks = (rows + room - 1) / room;
  return ((rows + blocks - 1) / blocks + kRows - 1) / kRows * kRows;
}

template <typename Element>
Element* aligned(std::vector<Element>& storage, int64_t size) {
  if (static_cast<int64_t>(storage.size()) < size + 64) storage.resize(size + 64);
  return reinterpret_cast<Element*>((reinterpret_cast<uintptr_t>(storage.data()) + 63) / 64 * 64);
}

// Computes panels begin..end for all rows.
void multiply_panels(const PackedWeight& w, const float* x, int64_t rows, int64_t x_stride, const float* bias,
                     float* out, int64_t out_stride, bool accumulate, int64_t begin, int64_t end) {
  thread_local std::vector<uint16_t> rounded_storage, unpacked_storage;
  const int64_t most_depth = std::min((w.in_features + 1) / 2 * 2, kDepth);
  const int64_t room = std::min(kMostRows, kSlice / most_depth / kRows * kRows);
  const int64_t most_rows = rows_of_block(rows, room);
  uint16_t* rounded = aligned(rounded_storage, most_rows * most_depth);
  uint16_t* unpacked = aligned(unpacked_storage, kPanels * most_depth * kPanel);
  // One tile of rows waits for memory, and a single stream is read faster than three in parallel.
  const bool stored = w.format == kPairs;
  const int64_t step = stored && rows <= kRows ? 1 : kPanels;
  for (int64_t row = 0; row < rows; row += most_rows) {
    const int64_t count = std::min(most_rows, rows - row);
    for (int64_t k = 0; k < w.in_features; k += kDepth) {
      const int64_t depth = std::min(kDepth, w.in_features - k), even = (depth + 1) / 2 * 2;
      round_rows(x + row * x_stride + k, count, x_stride, depth, rounded, even);
      for (int64_t panel = begin; panel < end; panel += step) {
        const int64_t panels = std::min(step, end - panel);
        const Pairs pairs = unpack_pairs(w, panel, panels, k, k + depth, unpacked);
        multiply({rounded, even, pairs.first, pairs.panel_stride, even / 2, k == 0 && bias ? bias + panel * kPanel : nullptr,
                  out + row * out_stride + panel * kPanel, out_stride, w.out_features - panel * kPanel,
                  accumulate || k > 0},
                 count, panels, stored);
      }
    }
  }
}

}  // namespace

bool has_bfloat16() { return true; }

void linear_bfloat16(const PackedWeight& w, const float* x, int64_t rows, int64_t x_stride, const float* bias,
                     float* out, int64_t out_stride, bool accumulate, int32_t num_threads) {
  const int64_t num_panels = (w.out_features + kPanel - 1) / kPanel;
  // Each thread rounds all rows for itself.
  share(num_threads, num_panels, kWhole, [&](Pieces pieces) {
    for (Range range; pieces.next(range);)
      multiply_panels(w, x, rows, x_stride, bias, out, out_stride, accumulate, range.begin, range.end);
  });
}

#else

bool has_bfloat16() { return false; }

void linear_bfloat16(const PackedWeight&, const float*, int64_t, int64_t, const float*, float*, int64_t, bool, int32_t) {
}

#endif

}  // namespace pagemill

extern "C" int32_t pagemill_has_bfloat16() { return pagemill::has_bfloat16() ? 1 : 0; }
