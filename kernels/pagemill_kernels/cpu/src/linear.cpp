// out = x W^T + bias over a weight packed in panels of 16 output rows.
//
// Panel layouts (k runs over the input features, n over the panel's 16 outputs; a group is 16 or 32 inputs):
//   float32, bfloat16: [k][n]
//   codes of 8 bits:   per group [k][n], signed
//   codes of 4 bits:   per group of 32 inputs, 16 rows of 16 bytes: row k holds input 2k low, 2k + 1 high
//   scales: per panel and group float32 scale[16], then offset[16] where the weight has offsets
//   codes for dots and pairs: codes.h, dots.cpp, bfloat16.cpp
// All arithmetic here is float32. Few rows read codes and bfloat16 directly; for many rows a slice of x is repacked by tiles and each
// panel is unpacked beside it in the second-level cache. Both add the same products in the same order, input after
// input, so that a row's result does not depend on how many rows there are. Packing of weights: pack.cpp.
#include <omp.h>

#include <algorithm>
#include <vector>

#include "abi.h"
#include "bfloat16.h"
#include "codes.h"
#include "dots.h"
#include "operations.h"
#include "output.h"
#include "tile.h"

namespace pagemill {
namespace {

constexpr int64_t kDepth = 768;     // inputs unpacked at a time: 48 KiB of floats, in the second-level cache
constexpr int64_t kRowBlock = 192;  // rows of x repacked at a time, in the second-level cache beside the panel
constexpr int64_t kDirectRows = 4;  // up to here codes and bfloat16 are read directly
constexpr int64_t kPairRows = 2;    // up to here two panels at a time
constexpr int kGroup4 = 32;         // groups of 4-bit codes

int64_t scale_floats(const PackedWeight& w) { return w.has_offsets ? 2 * kPanel : kPanel; }

// The scales and offsets of one panel's group, and what its codes stand for.
template <bool Offsets>
struct Scales {
  Floats s0, s1, o0, o1;

  explicit Scales(const float* from) : s0(load(from)), s1(load(from + kLanes)) {
    if (Offsets) o0 = load(from + kPanel), o1 = load(from + kPanel + kLanes);
  }
  void apply(Floats& low, Floats& high) const {
    low = Offsets ? low * s0 + o0 : low * s0;
    high = Offsets ? high * s1 + o1 : high * s1;
  }
};

// A row of 4-bit codes: the panel's outputs for one input and for the next.
struct Pair {
  Ints low, high;

  explicit Pair(const uint8_t* codes) : low(widen(load_as<Bytes>(codes), 0)), high(widen(load_as<Bytes>(codes), 1)) {}
  void first(Floats& a, Floats& b) const { a = to_floats(low & 15), b = to_floats(high & 15); }
  void second(Floats& a, Floats& b) const { a = to_floats(low >> 4), b = to_floats(high >> 4); }
};

inline void signed_codes(const uint8_t* codes, Floats& low, Floats& high) {
  low = from_signed_bytes(load_as<SignedBytes>(codes));
  high = from_signed_bytes(load_as<SignedBytes>(codes + kLanes));
}

void unpack_codes4(const PackedWeight& w, int64_t panel, int64_t begin, int64_t end, float* out) {
  const int64_t num_groups = w.in_features / kGroup4;
  for (int64_t g = begin / kGroup4; g < end / kGroup4; ++g, out += kGroup4 * kPanel) {
    const uint8_t* codes = w.codes + (panel * num_groups + g) * (kGroup4 / 2) * kPanel;
    const float* from = w.scales + (panel * num_groups + g) * 2 * kPanel;
    fetch_ahead(codes, kGroup4 / 2 * kPanel, from, 2 * kPanel);
    const Scales<true> scales(from);
    for (int k = 0; k < kGroup4; k += 2, codes += kPanel) {
      const Pair pair(codes);
      Floats a, b;
      pair.first(a, b);
      scales.apply(a, b);
      store(out + k * kPanel, a);
      store(out + k * kPanel + kLanes, b);
      pair.second(a, b);
      scales.apply(a, b);
      store(out + (k + 1) * kPanel, a);
      store(out + (k + 1) * kPanel + kLanes, b);
    }
  }
}

template <bool Offsets>
void unpack_codes8(const PackedWeight& w, int64_t panel, int64_t begin, int64_t end, float* out) {
  const int64_t group = w.group, num_groups = w.in_features / group;
  const uint8_t* codes = w.codes + (panel * w.in_features + begin) * kPanel;
  for (int64_t g = begin / group; g < end / group; ++g) {
    const float* from = w.scales + (panel * num_groups + g) * scale_floats(w);
    fetch_ahead(codes, group * kPanel, from, scale_floats(w));
    const Scales<Offsets> scales(from);
    for (int64_t k = 0; k < group; ++k, codes += kPanel, out += kPanel) {
      Floats a, b;
      signed_codes(codes, a, b);
      scales.apply(a, b);
      store(out, a);
      store(out + kLanes, b);
    }
  }
}

void unpack_bfloat16(const PackedWeight& w, int64_t panel, int64_t begin, int64_t end, float* out) {
  const uint8_t* halves = w.codes + (panel * w.in_features + begin) * kPanel * 2;
  for (int64_t i = 0; i < (end - begin) * kPanel; i += kLanes) {
    fetch_ahead(halves + i * 2, kLanes * 2);
    store(out + i, from_bfloat16(load_as<Halves>(halves + i * 2)));
  }
}

// The panel's inputs begin..end as floats: in place where they are floats already.
const float* unpack(const PackedWeight& w, int64_t panel, int64_t begin, int64_t end, float* buffer) {
  switch (w.format) {
    case kFloat32: return reinterpret_cast<const float*>(w.codes) + (panel * w.in_features + begin) * kPanel;
    case kBfloat16: unpack_bfloat16(w, panel, begin, end, buffer); break;
    case kCodes8: (w.has_offsets ? unpack_codes8<true> : unpack_codes8<false>)(w, panel, begin, end, buffer); break;
    default: unpack_codes4(w, panel, begin, end, buffer); break;
  }
  return buffer;
}

// C += x * W^T for `Rows` rows and `Panels` neighbouring panels, C [panels][kDirectRows][16]. Several panels at a time
// keep the multipliers busy where few rows alone would wait for each sum.
template <int Rows, int Panels>
struct Sums {
  Floats low[Panels][Rows], high[Panels][Rows];

  explicit Sums(const float* c) {
    for (int p = 0; p < Panels; ++p)
      for (int r = 0; r < Rows; ++r) {
        low[p][r] = load(c + (p * kDirectRows + r) * kPanel);
        high[p][r] = load(c + (p * kDirectRows + r) * kPanel + kLanes);
      }
  }
  void add(int panel, const float* x, int64_t x_stride, Floats a, Floats b) {
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
      const Floats value = splat(x[r * x_stride]);
      low[panel][r] += value * a;
      high[panel][r] += value * b;
    }
  }
  void end(float* c) const {
    for (int p = 0; p < Panels; ++p)
      for (int r = 0; r < Rows; ++r) {
        store(c + (p * kDirectRows + r) * kPanel, low[p][r]);
        store(c + (p * kDirectRows + r) * kPanel + kLanes, high[p][r]);
      }
  }
};

template <int Rows, int Panels>
void direct_codes4(const PackedWeight& w, int64_t panel, const float* x, int64_t x_stride, float* c) {
  const int64_t num_groups = w.in_features / kGroup4;
  const int64_t panel_codes = w.in_features / 2 * kPanel, panel_scales = num_groups * 2 * kPanel;
  const uint8_t* codes = w.codes + panel * panel_codes;
  const float* scale = w.scales + panel * panel_scales;
  Sums<Rows, Panels> sums(c);
  for (int64_t g = 0; g < num_groups; ++g, scale += 2 * kPanel) {
    for (int p = 0; p < Panels; ++p)
      fetch_ahead(codes + p * panel_codes, kGroup4 / 2 * kPanel, scale + p * panel_scales, 2 * kPanel);
    for (int k = 0; k < kGroup4; k += 2, codes += kPanel, x += 2)
#pragma GCC unroll 4
      for (int p = 0; p < Panels; ++p) {
        const Scales<true> scales(scale + p * panel_scales);
        const Pair pair(codes + p * panel_codes);
        Floats a, b;
        pair.first(a, b);
        scales.apply(a, b);
        sums.add(p, x, x_stride, a, b);
        pair.second(a, b);
        scales.apply(a, b);
        sums.add(p, x + 1, x_stride, a, b);
      }
  }
  sums.end(c);
}

template <int Rows, int Panels, bool Offsets>
void direct_codes8(const PackedWeight& w, int64_t panel, const float* x, int64_t x_stride, float* c) {
  const int64_t group = w.group, num_groups = w.in_features / group;
  const int64_t panel_codes = w.in_features * kPanel, panel_scales = num_groups * scale_floats(w);
  const uint8_t* codes = w.codes + panel * panel_codes;
  const float* scale = w.scales + panel * panel_scales;
  Sums<Rows, Panels> sums(c);
  for (int64_t g = 0; g < num_groups; ++g, scale += scale_floats(w)) {
    for (int p = 0; p < Panels; ++p)
      fetch_ahead(codes + p * panel_codes, group * kPanel, scale + p * panel_scales, scale_floats(w));
    for (int64_t k = 0; k < group; ++k, codes += kPanel, ++x)
#pragma GCC unroll 4
      for (int p = 0; p < Panels; ++p) {
        Floats a, b;
        signed_codes(codes + p * panel_codes, a, b);
        Scales<Offsets>(scale + p * panel_scales).apply(a, b);
        sums.add(p, x, x_stride, a, b);
      }
  }
  sums.end(c);
}

template <int Rows, int Panels>
void direct_bfloat16(const PackedWeight& w, int64_t panel, const float* x, int64_t x_stride, float* c) {
  constexpr int64_t kRowBytes = kPanel * 2;
  const int64_t panel_bytes = w.in_features * kRowBytes;
  const uint8_t* halves = w.codes + panel * panel_bytes;
  Sums<Rows, Panels> sums(c);
  for (int64_t k = 0; k < w.in_features; ++k, halves += kRowBytes, ++x)
#pragma GCC unroll 4
    for (int p = 0; p < Panels; ++p) {
      const uint8_t* from = halves + p * panel_bytes;
      fetch_ahead(from, kRowBytes);
      sums.add(p, x, x_stride, from_bfloat16(load_as<Halves>(from)),
               from_bfloat16(load_as<Halves>(from + kRowBytes / 2)));
    }
  sums.end(c);
}

template <int Panels>
void direct(const PackedWeight& w, int64_t panel, const float* x, int64_t rows, int64_t x_stride, float* c) {
  using Kernel = void (*)(const PackedWeight&, int64_t, const float*, int64_t, float*);
  static constexpr Kernel kKernels[4][kDirectRows] = {
      {direct_codes4<1, Panels>, direct_codes4<2, Panels>, direct_codes4<3, Panels>, direct_codes4<4, Panels>},
      {direct_codes8<1, Panels, false>, direct_codes8<2, Panels, false>, direct_codes8<3, Panels, false>,
       direct_codes8<4, Panels, false>},
      {direct_codes8<1, Panels, true>, direct_codes8<2, Panels, true>, direct_codes8<3, Panels, true>,
       direct_codes8<4, Panels, true>},
      {direct_bfloat16<1, Panels>, direct_bfloat16<2, Panels>, direct_bfloat16<3, Panels>, direct_bfloat16<4, Panels>}};
  const int kind = w.format == kBfloat16 ? 3 : w.format == kCodes4 ? 0 : w.has_offsets ? 2 : 1;
  kKernels[kind][rows - 1](w, panel, x, x_stride, c);
}

// A few rows: the weight is read as it is stored.
void few_rows(const PackedWeight& w, const float* x, int64_t rows, int64_t x_stride, const float* bias, float* out,
              int64_t out_stride, bool accumulate, int64_t begin, int64_t end) {
  alignas(64) float c[2 * kDirectRows * kPanel];
  for (int64_t panel = begin; panel < end;) {
    const int64_t count = rows <= kPairRows && panel + 1 < end ? 2 : 1;
    for (int64_t p = 0; p < count; ++p)
      target_of(w, panel + p, bias, out, out_stride).begin(c + p * kDirectRows * kPanel, rows, true, accumulate);
    (count == 2 ? direct<2> : direct<1>)(w, panel, x, rows, x_stride, c);
    for (int64_t p = 0; p < count; ++p)
      target_of(w, panel + p, bias, out, out_stride).end(c + p * kDirectRows * kPanel, rows);
    panel += count;
  }
}

// Many rows: a slice of x is repacked by tiles, then every panel is unpacked over the slice's depth and multiplied.
void many_rows(const PackedWeight& w, const float* x, int64_t rows, int64_t x_stride, const float* bias, float* out,
               int64_t out_stride, bool accumulate, int64_t begin, int64_t end) {
  thread_local std::vector<float> storage(kRowBlock * kDepth + kDepth * kPanel + kRowBlock * kPanel + 48);
  float* packed_x = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(storage.data()) + 63) / 64 * 64);
  float* buffer = packed_x + kRowBlock * kDepth;
  float* c = buffer + kDepth * kPanel;
  for (int64_t row = 0; row < rows; row += kRowBlock) {
    const int64_t count = std::min(kRowBlock, rows - row);
    for (int64_t k = 0; k < w.in_features; k += kDepth) {
      const int64_t depth = std::min(kDepth, w.in_features - k);
      pack_tiles(count, x + row * x_stride + k, x_stride, depth, packed_x);
      for (int64_t panel = begin; panel < end; ++panel) {
        const Target target = target_of(w, panel, bias, out + row * out_stride, out_stride);
        const float* b = unpack(w, panel, k, k + depth, buffer);
        target.begin(c, count, k == 0, accumulate || k > 0);
        packed_tile(count, packed_x, b, depth, c);
        target.end(c, count);
      }
    }
  }
}

}  // namespace
}  // namespace pagemill

using namespace pagemill;

extern "C" void pagemill_linear(const PackedWeight* weight, const float* x, int64_t rows, int64_t x_stride,
                                const float* bias, float* out, int64_t out_stride, int32_t accumulate,
                                int32_t num_threads) {
  const PackedWeight& w = *weight;
  if (w.format == kPairs || (w.bfloat16_rows > 0 && rows >= w.bfloat16_rows))
    return linear_bfloat16(w, x, rows, x_stride, bias, out, out_stride, accumulate != 0, num_threads);
  if (w.format == kDots4 || w.format == kDots8)
    return linear_dots(w, x, rows, x_stride, bias, out, out_stride, accumulate != 0, num_threads);
  const int64_t num_panels = (w.out_features + kPanel - 1) / kPanel;
  const bool as_stored = rows <= kDirectRows && w.format != kFloat32;
#pragma omp parallel num_threads(num_threads)
  {
    const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
    const int64_t begin = num_panels * thread / threads, end = num_panels * (thread + 1) / threads;
    if (as_stored)
      few_rows(w, x, rows, x_stride, bias, out, out_stride, accumulate != 0, begin, end);
    else
      many_rows(w, x, rows, x_stride, bias, out, out_stride, accumulate != 0, begin, end);
  }
}
