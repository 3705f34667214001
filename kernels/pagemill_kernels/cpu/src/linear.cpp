// out = x W^T + bias over a weight packed in panels of 16 output rows.
//
// Panel layouts (k runs over the input features, n over the panel's 16 outputs; a group is 16 or 32 inputs):
//   float32, bfloat16: [k][n]
//   8-bit values: [k][n], signed integers or e4m3
//   4-bit values: rows of 16 bytes; row k has input 2k in the lower four bits, 2k + 1 in the upper four
//   scales: per panel and group float32 scale[16], then offset[16] where the weight has offsets
//   the layouts of kDots4, kDots8, kPairs and kFloats4: codes.h, dots.cpp, bfloat16.cpp, floats4.h
//
// All arithmetic here is float32. With few rows, quantized and bfloat16 weights are read directly. With many rows, a
// slice of x is repacked into tiles and each panel is unpacked into a buffer; both fit the second-level cache. The two
// ways add the same products in the same order, input after input, so a row's result does not depend on the number of
// rows. pack.cpp packs the weights.
#include <algorithm>
#include <vector>

#include "abi.h"
#include "bfloat16.h"
#include "codes.h"
#include "dots.h"
#include "floats4.h"
#include "operations.h"
#include "output.h"
#include "tile.h"
#include "wide_pair.h"

namespace pagemill {
namespace {

constexpr int64_t kDepth = 768;     // inputs unpacked at a time: 48 KiB of floats, in the second-level cache
constexpr int64_t kRowBlock = 192;  // rows of x repacked at a time, in the second-level cache beside the panel
constexpr int64_t kDirectRows = 4;  // up to here quantized and bfloat16 weights are read without unpacking
constexpr int64_t kPairRows = 2;    // up to here two panels at a time
// Rows of x reordered at a time for a weight with a column order: a multiple of every kernel's row block.
constexpr int64_t kOrderedRows = 768;

// The scales and offsets of one panel's group, which dequantize its values.
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

// A row of 4-bit values: the panel's outputs for one input and for the next.
struct Pair {
  Ints low, high;

  explicit Pair(const uint8_t* codes) : low(widen(load_as<Bytes>(codes), 0)), high(widen(load_as<Bytes>(codes), 1)) {}
  void first(Floats& a, Floats& b) const { a = to_floats(low & 15), b = to_floats(high & 15); }
  void second(Floats& a, Floats& b) const { a = to_floats(low >> 4), b = to_floats(high >> 4); }
};

// Loads the panel's outputs for one input: kCodes8 or kFloats8.
template <int32_t Code>
inline void row_of_bytes(const uint8_t* codes, Floats& low, Floats& high) {
  const auto floats = Code == kFloats8 ? from_e4m3_bytes : from_signed_bytes;
  low = floats(load_as<SignedBytes>(codes));
  high = floats(load_as<SignedBytes>(codes + kLanes));
}

void unpack_codes4(const PackedWeight& w, int64_t panel, int64_t begin, int64_t end, float* out) {
  const uint8_t* codes = w.codes + (panel * w.in_features + begin) / 2 * kPanel;
  ScaleWalk walk(w, panel, kRun / 2 * kPanel, begin);
  for (int64_t run = begin; run < end; run += kRun, out += kRun * kPanel, walk.next()) {
    walk.fetch(codes);
    const Scales<true> scales(walk.scales());
    for (int64_t k = 0; k < kRun; k += 2, codes += kPanel) {
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

void unpack_floats4(const PackedWeight& w, int64_t panel, int64_t begin, int64_t end, float* out) {
  const uint8_t* codes = w.codes + group_bytes(kFloats4, panel * w.in_features + begin);
  const Table table(w.table);
  ScaleWalk walk(w, panel, group_bytes(kFloats4, kRun), begin);
  for (int64_t run = begin; run < end; run += kRun, walk.next()) {
    walk.fetch(codes);
    const Outputs scale = load_outputs(walk.scales());
    for (int64_t k = 0; k < kRun; k += 4, codes += 2 * kPanel, out += 4 * kPanel) {
      const Quad quad(codes);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) store(out + i * kPanel, quad.input(table, i) * scale);
    }
  }
}

template <int32_t Code, bool Offsets>
void unpack_bytes(const PackedWeight& w, int64_t panel, int64_t begin, int64_t end, float* out) {
  const uint8_t* codes = w.codes + (panel * w.in_features + begin) * kPanel;
  const int64_t run = run_of(w);
  ScaleWalk walk(w, panel, run * kPanel, begin);
  for (int64_t at = begin; at < end; at += run, walk.next()) {
    walk.fetch(codes);
    const Scales<Offsets> scales(walk.scales());
    for (int64_t k = 0; k < run; ++k, codes += kPanel, out += kPanel) {
      Floats a, b;
      row_of_bytes<Code>(codes, a, b);
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

// `begin` is even.
void unpack_paired(const PackedWeight& w, int64_t panel, int64_t begin, int64_t end, float* out) {
  const uint8_t* pairs = w.codes + (panel * pairs_in(w.in_features) * 2 + begin) * kPanel * 2;
  for (int64_t k = begin; k < end; k += 2, pairs += 4 * kPanel, out += 2 * kPanel) {
    fetch_ahead(pairs, 4 * kPanel);
    for (int64_t i = 0; i < kPanel; i += kLanes) {
      const Ints both = load_as<Ints>(pairs + 4 * i);
      store(out + i, (Floats)(both << 16));
      if (k + 1 < end) store(out + kPanel + i, (Floats)(both & ~0xffff));
    }
  }
}

// Returns the panel's inputs begin..end as floats, in place if they are floats.
const float* unpack(const PackedWeight& w, int64_t panel, int64_t begin, int64_t end, float* buffer) {
  switch (w.format) {
    case kFloat32: return reinterpret_cast<const float*>(w.codes) + (panel * w.in_features + begin) * kPanel;
    case kBfloat16: unpack_bfloat16(w, panel, begin, end, buffer); break;
    case kPairs: unpack_paired(w, panel, begin, end, buffer); break;
    case kFloats8: unpack_bytes<kFloats8, false>(w, panel, begin, end, buffer); break;
    case kFloats4: unpack_floats4(w, panel, begin, end, buffer); break;
    case kCodes8:
      (w.has_offsets ? unpack_bytes<kCodes8, true> : unpack_bytes<kCodes8, false>)(w, panel, begin, end, buffer);
      break;
    default: unpack_codes4(w, panel, begin, end, buffer); break;
  }
  return buffer;
}

// Computes C += x * W^T for `Rows` rows and `Panels` neighbouring panels, C [panels][kDirectRows][16]. Several panels
// at a time keep the multipliers busy where few rows alone would wait for each sum.
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
  const int64_t panel_codes = w.in_features / 2 * kPanel, panel_scales = w.in_features / w.group * 2 * kPanel;
  const uint8_t* codes = w.codes + panel * panel_codes;
  ScaleWalk walk(w, panel, kRun / 2 * kPanel);
  Sums<Rows, Panels> sums(c);
  for (int64_t run = 0; run < w.in_features; run += kRun, walk.next()) {
    const float* scale = walk.scales();
    for (int p = 0; p < Panels; ++p) walk.fetch(codes + p * panel_codes, p * panel_scales);
    for (int64_t k = 0; k < kRun; k += 2, codes += kPanel, x += 2)
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

template <int Rows, int Panels>
void direct_floats4(const PackedWeight& w, int64_t panel, const float* x, int64_t x_stride, float* c) {
  const int64_t panel_codes = w.in_features / 2 * kPanel, panel_scales = w.in_features / w.group * kPanel;
  const uint8_t* codes = w.codes + panel * panel_codes;
  const Table table(w.table);
  ScaleWalk walk(w, panel, group_bytes(kFloats4, kRun));
  Outputs sums[Panels][Rows];
  for (int p = 0; p < Panels; ++p)
    for (int r = 0; r < Rows; ++r) sums[p][r] = load_outputs(c + (p * kDirectRows + r) * kPanel);
  for (int64_t run = 0; run < w.in_features; run += kRun, walk.next()) {
    for (int p = 0; p < Panels; ++p) walk.fetch(codes + p * panel_codes, p * panel_scales);
    for (int64_t k = 0; k < kRun; k += 4, codes += 2 * kPanel, x += 4)
#pragma GCC unroll 4
      for (int p = 0; p < Panels; ++p) {
        const Outputs scale = load_outputs(walk.scales() + p * panel_scales);
        const Quad quad(codes + p * panel_codes);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
          const Outputs weight = quad.input(table, i) * scale;
#pragma GCC unroll 4
          for (int r = 0; r < Rows; ++r) multiply_add(sums[p][r], x[r * x_stride + i], weight);
        }
      }
  }
  for (int p = 0; p < Panels; ++p)
    for (int r = 0; r < Rows; ++r) store(c + (p * kDirectRows + r) * kPanel, sums[p][r]);
}

template <int Rows, int Panels, int32_t Code, bool Offsets>
void direct_bytes(const PackedWeight& w, int64_t panel, const float* x, int64_t x_stride, float* c) {
  const int64_t run_size = run_of(w);
  const int64_t panel_codes = w.in_features * kPanel, panel_scales = w.in_features / w.group * scale_floats(w);
  const uint8_t* codes = w.codes + panel * panel_codes;
  ScaleWalk walk(w, panel, run_size * kPanel);
  Sums<Rows, Panels> sums(c);
  for (int64_t run = 0; run < w.in_features; run += run_size, walk.next()) {
    const float* scale = walk.scales();
    for (int p = 0; p < Panels; ++p) walk.fetch(codes + p * panel_codes, p * panel_scales);
    for (int64_t k = 0; k < run_size; ++k, codes += kPanel, ++x)
#pragma GCC unroll 4
      for (int p = 0; p < Panels; ++p) {
        Floats a, b;
        row_of_bytes<Code>(codes + p * panel_codes, a, b);
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

using Direct = void (*)(const PackedWeight&, int64_t, const float*, int64_t, float*);
template <int Panels>
constexpr Direct kDirect4[kDirectRows] = {direct_codes4<1, Panels>, direct_codes4<2, Panels>, direct_codes4<3, Panels>,
                                          direct_codes4<4, Panels>};
template <int Panels>
constexpr Direct kDirect16[kDirectRows] = {direct_bfloat16<1, Panels>, direct_bfloat16<2, Panels>,
                                           direct_bfloat16<3, Panels>, direct_bfloat16<4, Panels>};
template <int Panels>
constexpr Direct kDirectFloats4[kDirectRows] = {direct_floats4<1, Panels>, direct_floats4<2, Panels>,
                                                direct_floats4<3, Panels>, direct_floats4<4, Panels>};
template <int Panels, int32_t Code, bool Offsets>
constexpr Direct kDirect8[kDirectRows] = {direct_bytes<1, Panels, Code, Offsets>, direct_bytes<2, Panels, Code, Offsets>,
                                          direct_bytes<3, Panels, Code, Offsets>, direct_bytes<4, Panels, Code, Offsets>};

template <int Panels>
void direct(const PackedWeight& w, int64_t panel, const float* x, int64_t rows, int64_t x_stride, float* c) {
  const Direct* kernels = w.format == kBfloat16  ? kDirect16<Panels>
                          : w.format == kCodes4  ? kDirect4<Panels>
                          : w.format == kFloats4 ? kDirectFloats4<Panels>
                          : w.format == kFloats8 ? kDirect8<Panels, kFloats8, false>
                          : w.has_offsets        ? kDirect8<Panels, kCodes8, true>
                                                 : kDirect8<Panels, kCodes8, false>;
  kernels[rows - 1](w, panel, x, x_stride, c);
}

// Multiplies few rows: the weight is read as it is stored.
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

// Multiplies many rows: a slice of x is repacked in tiles, then every panel is unpacked over the slice's depth.
void many_rows(const PackedWeight& w, const float* x, int64_t rows, int64_t x_stride, const float* bias, float* out,
               int64_t out_stride, bool accumulate, int64_t begin, int64_t end) {
  thread_local std::vector<float> storage(kRowBlock * kDepth + 2 * kDepth * kPanel + kRowBlock * kPanel + 48);
  float* packed_x = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(storage.data()) + 63) / 64 * 64);
  float* buffer = packed_x + kRowBlock * kDepth;
  float* c = buffer + 2 * kDepth * kPanel;
  for (int64_t row = 0; row < rows; row += kRowBlock) {
    const int64_t count = std::min(kRowBlock, rows - row);
    for (int64_t k = 0; k < w.in_features; k += kDepth) {
      const int64_t depth = std::min(kDepth, w.in_features - k);
      pack_tiles(count, x + row * x_stride + k, x_stride, depth, packed_x);
      for (int64_t panel = begin; panel < end; panel += 2) {
        const int64_t num_panels = std::min<int64_t>(2, end - panel);
        const float* b[2];
        Target targets[2];
        for (int64_t p = 0; p < num_panels; ++p) {
          b[p] = unpack(w, panel + p, k, k + depth, buffer + p * kDepth * kPanel);
          targets[p] = target_of(w, panel + p, bias, out + row * out_stride, out_stride);
        }
        const bool add_out = accumulate || k > 0;
        const int64_t done =
            num_panels < 2 ? 0 : wide_pairs(count, packed_x, b[0], b[1], depth, targets[0], targets[1], k == 0, add_out);
        for (int64_t p = 0; p < num_panels; ++p) {
          const Target rest = targets[p].from_row(done);
          rest.begin(c, count - done, k == 0, add_out);
          packed_tile(count - done, packed_x + done * depth, b[p], depth, c);
          rest.end(c, count - done);
        }
      }
    }
  }
}

void linear_floats(const PackedWeight& w, const float* x, int64_t rows, int64_t x_stride, const float* bias, float* out,
                   int64_t out_stride, bool accumulate, int32_t num_threads) {
  const int64_t num_panels = (w.out_features + kPanel - 1) / kPanel;
  const bool as_stored = rows <= kDirectRows && w.format != kFloat32;
  if (!as_stored) {
    // Each thread repacks all rows for itself.
    share(num_threads, num_panels, kWhole, [&](Pieces pieces) {
      for (Range range; pieces.next(range);)
        many_rows(w, x, rows, x_stride, bias, out, out_stride, accumulate, range.begin, range.end);
    });
    return;
  }
  share(num_threads, (num_panels + 1) / 2, kFine, [&](Pieces pieces) {
    for (Range pairs; pieces.next(pairs);)
      few_rows(w, x, rows, x_stride, bias, out, out_stride, accumulate, 2 * pairs.begin,
               std::min(2 * pairs.end, num_panels));
  });
}

// Chooses the kernel by all rows of a call, because a kernel that processes blocks must round each as in one piece.
auto kernel_for(const PackedWeight& w, int64_t rows) {
  if (w.format == kPairs) return w.float32_rows > 0 && rows >= w.float32_rows ? linear_floats : linear_bfloat16;
  if (w.bfloat16_rows > 0 && rows >= w.bfloat16_rows) return linear_bfloat16;
  return w.format == kDots4 || w.format == kDots8 ? linear_dots : linear_floats;
}

}  // namespace
}  // namespace pagemill

using namespace pagemill;

extern "C" void pagemill_linear(const PackedWeight* weight, const float* x, int64_t rows, int64_t x_stride,
                                const float* bias, float* out, int64_t out_stride, int32_t accumulate,
                                int32_t num_threads) {
  const PackedWeight& w = *weight;
  const auto kernel = kernel_for(w, rows);
  if (!w.input_order) return kernel(w, x, rows, x_stride, bias, out, out_stride, accumulate != 0, num_threads);
  thread_local std::vector<float> storage;
  const int64_t size = w.in_features;
  storage.resize(std::max<size_t>(storage.size(), std::min(rows, kOrderedRows) * size));
  float* ordered = storage.data();
  for (int64_t row = 0; row < rows; row += kOrderedRows) {
    const int64_t count = std::min(kOrderedRows, rows - row);
    for_each(threads_for(count * size, num_threads), count, [&](int64_t r) {
      for (int64_t k = 0; k < size; ++k) ordered[r * size + k] = x[(row + r) * x_stride + w.input_order[k]];
    });
    kernel(w, ordered, count, size, bias, out + row * out_stride, out_stride, accumulate != 0, num_threads);
  }
}
