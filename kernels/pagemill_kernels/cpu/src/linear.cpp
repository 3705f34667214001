// out = x W^T + bias over a weight packed in panels of 16 output rows.
//
// Panel layouts (k runs over the input features, n over the panel's 16 outputs):
//   float32, bfloat16: [k][n]
//   codes of 8 bits:   per group of 32 inputs [k][n], signed;          value = code * scale
//   codes of 4 bits:   per group of 32 inputs, 16 rows of 16 bytes: low nibbles are inputs 0-15, high nibbles 16-31;
//                      value = code * scale + offset
//   scales: per panel and group float32 scale[16], offset[16]
// All arithmetic is float32. Few rows read the codes directly; for many rows a slice of x is repacked by tiles and each
// panel is unpacked beside it in the second-level cache. Packing of weights: pack.cpp.
#include <omp.h>

#include <algorithm>
#include <vector>

#include "abi.h"
#include "tile.h"

namespace pagemill {
namespace {

constexpr int64_t kDepth = 768;     // inputs unpacked at a time: 48 KiB of floats, in the second-level cache
constexpr int64_t kRowBlock = 192;  // rows of x repacked at a time, in the second-level cache beside the panel
constexpr int64_t kDirectRows = 4;  // up to here codes are read directly

inline Bytes low_nibbles(Bytes codes) { return codes & 15; }
inline Bytes high_nibbles(Bytes codes) { return codes >> 4; }

void unpack_codes4(const PackedWeight& w, int64_t panel, int64_t begin, int64_t end, float* out) {
  const int64_t num_groups = w.in_features / kGroup;
  for (int64_t g = begin / kGroup; g < end / kGroup; ++g, out += kGroup * kPanel) {
    const uint8_t* codes = w.codes + (panel * num_groups + g) * (kGroup / 2) * kPanel;
    const float* scale = w.scales + (panel * num_groups + g) * 2 * kPanel;
    const Floats s0 = load(scale), s1 = load(scale + kLanes);
    const Floats o0 = load(scale + kPanel), o1 = load(scale + kPanel + kLanes);
    for (int k = 0; k < kGroup / 2; ++k) {
      const Bytes pair = load_as<Bytes>(codes + k * kPanel);
      float* first = out + k * kPanel;
      float* second = out + (k + kGroup / 2) * kPanel;
      Floats a, b;
      from_bytes(low_nibbles(pair), a, b);
      store(first, a * s0 + o0);
      store(first + kLanes, b * s1 + o1);
      from_bytes(high_nibbles(pair), a, b);
      store(second, a * s0 + o0);
      store(second + kLanes, b * s1 + o1);
    }
  }
}

void unpack_codes8(const PackedWeight& w, int64_t panel, int64_t begin, int64_t end, float* out) {
  const int64_t num_groups = w.in_features / kGroup;
  for (int64_t g = begin / kGroup; g < end / kGroup; ++g, out += kGroup * kPanel) {
    const uint8_t* codes = w.codes + (panel * num_groups + g) * kGroup * kPanel;
    const float* scale = w.scales + (panel * num_groups + g) * 2 * kPanel;
    for (int half = 0; half < 2; ++half) {
      const Floats s = load(scale + half * kLanes);
      for (int k = 0; k < kGroup; ++k) {
        const SignedBytes code = load_as<SignedBytes>(codes + k * kPanel + half * kLanes);
        store(out + k * kPanel + half * kLanes, from_signed_bytes(code) * s);
      }
    }
  }
}

void unpack_bfloat16(const PackedWeight& w, int64_t panel, int64_t begin, int64_t end, float* out) {
  const uint8_t* halves = w.codes + (panel * w.in_features + begin) * kPanel * 2;
  for (int64_t i = 0; i < (end - begin) * kPanel; i += kLanes) store(out + i, from_bfloat16(load_as<Halves>(halves + i * 2)));
}

// The panel's inputs begin..end as floats: in place where they are floats already.
const float* unpack(const PackedWeight& w, int64_t panel, int64_t begin, int64_t end, float* buffer) {
  switch (w.format) {
    case kFloat32: return reinterpret_cast<const float*>(w.codes) + (panel * w.in_features + begin) * kPanel;
    case kBfloat16: unpack_bfloat16(w, panel, begin, end, buffer); break;
    case kCodes8: unpack_codes8(w, panel, begin, end, buffer); break;
    case kCodes4: unpack_codes4(w, panel, begin, end, buffer); break;
  }
  return buffer;
}

// Directly from 4-bit codes: sum(x * (code * scale + offset)) = scale * sum(x * code) + offset * sum(x), per group.
template <int Rows>
void direct_codes4(const PackedWeight& w, int64_t panel, const float* x, int64_t x_stride, const float* group_sums,
                   float* out) {
  const int64_t num_groups = w.in_features / kGroup;
  const uint8_t* codes = w.codes + panel * num_groups * (kGroup / 2) * kPanel;
  const float* scale = w.scales + panel * num_groups * 2 * kPanel;
  for (int64_t g = 0; g < num_groups; ++g, scale += 2 * kPanel, x += kGroup) {
    Floats low[Rows] = {}, high[Rows] = {};
    for (int k = 0; k < kGroup / 2; ++k, codes += kPanel) {
      const Bytes pair = load_as<Bytes>(codes);
      Floats a, b, c, d;
      from_bytes(low_nibbles(pair), a, b);
      from_bytes(high_nibbles(pair), c, d);
#pragma GCC unroll 4
      for (int r = 0; r < Rows; ++r) {
        const Floats first = splat(x[r * x_stride + k]), second = splat(x[r * x_stride + k + kGroup / 2]);
        low[r] += first * a;
        high[r] += first * b;
        low[r] += second * c;
        high[r] += second * d;
      }
    }
    for (int r = 0; r < Rows; ++r) {
      const Floats sums = splat(group_sums[r * num_groups + g]);
      float* c = out + r * kPanel;
      store(c, load(c) + low[r] * load(scale) + sums * load(scale + kPanel));
      store(c + kLanes, load(c + kLanes) + high[r] * load(scale + kLanes) + sums * load(scale + kPanel + kLanes));
    }
  }
}

template <int Rows>
void direct_codes8(const PackedWeight& w, int64_t panel, const float* x, int64_t x_stride, const float*, float* out) {
  const int64_t num_groups = w.in_features / kGroup;
  const uint8_t* codes = w.codes + panel * num_groups * kGroup * kPanel;
  const float* scale = w.scales + panel * num_groups * 2 * kPanel;
  for (int64_t g = 0; g < num_groups; ++g, scale += 2 * kPanel, x += kGroup) {
    Floats low[Rows] = {}, high[Rows] = {};
    for (int k = 0; k < kGroup; ++k, codes += kPanel) {
      const Floats a = from_signed_bytes(load_as<SignedBytes>(codes));
      const Floats b = from_signed_bytes(load_as<SignedBytes>(codes + kLanes));
#pragma GCC unroll 4
      for (int r = 0; r < Rows; ++r) {
        const Floats value = splat(x[r * x_stride + k]);
        low[r] += value * a;
        high[r] += value * b;
      }
    }
    for (int r = 0; r < Rows; ++r) {
      float* c = out + r * kPanel;
      store(c, load(c) + low[r] * load(scale));
      store(c + kLanes, load(c + kLanes) + high[r] * load(scale + kLanes));
    }
  }
}

void direct(const PackedWeight& w, int64_t panel, const float* x, int64_t rows, int64_t x_stride, const float* sums,
            float* out) {
  using Kernel = void (*)(const PackedWeight&, int64_t, const float*, int64_t, const float*, float*);
  static constexpr Kernel kCodes4Kernels[] = {direct_codes4<1>, direct_codes4<2>, direct_codes4<3>, direct_codes4<4>};
  static constexpr Kernel kCodes8Kernels[] = {direct_codes8<1>, direct_codes8<2>, direct_codes8<3>, direct_codes8<4>};
  (w.format == kCodes4 ? kCodes4Kernels : kCodes8Kernels)[rows - 1](w, panel, x, x_stride, sums, out);
}

void sum_groups(const float* x, int64_t rows, int64_t x_stride, int64_t num_groups, float* sums) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t g = 0; g < num_groups; ++g) {
      Floats total = zero();
      for (int k = 0; k < kGroup; k += kLanes) total += load(x + r * x_stride + g * kGroup + k);
      sums[r * num_groups + g] = sum(total);
    }
}

// Where one panel's results go: 16 columns (the last panel: fewer) of `out`.
struct Target {
  const float* bias;
  float* out;
  int64_t stride;
  int64_t columns;

  // What the products are added to: nothing or what is there, plus the bias.
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

Target target_of(const PackedWeight& w, int64_t panel, const float* bias, float* out, int64_t out_stride) {
  const int64_t first = panel * kPanel;
  return {bias ? bias + first : nullptr, out + first, out_stride, std::min<int64_t>(kPanel, w.out_features - first)};
}

// A few rows: the codes are read as they are.
void few_rows(const PackedWeight& w, const float* x, int64_t rows, int64_t x_stride, const float* bias, float* out,
              int64_t out_stride, bool accumulate, const float* group_sums, int64_t begin, int64_t end) {
  alignas(64) float c[kDirectRows * kPanel];
  for (int64_t panel = begin; panel < end; ++panel) {
    const Target target = target_of(w, panel, bias, out, out_stride);
    target.begin(c, rows, true, accumulate);
    direct(w, panel, x, rows, x_stride, group_sums, c);
    target.end(c, rows);
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
                                float* group_sums, int32_t num_threads) {
  const PackedWeight& w = *weight;
  const int64_t num_panels = (w.out_features + kPanel - 1) / kPanel;
  const bool by_codes = rows <= kDirectRows && (w.format == kCodes4 || w.format == kCodes8);
  if (by_codes && w.format == kCodes4) sum_groups(x, rows, x_stride, w.in_features / kGroup, group_sums);
#pragma omp parallel num_threads(num_threads)
  {
    const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
    const int64_t begin = num_panels * thread / threads, end = num_panels * (thread + 1) / threads;
    if (by_codes)
      few_rows(w, x, rows, x_stride, bias, out, out_stride, accumulate != 0, group_sums, begin, end);
    else
      many_rows(w, x, rows, x_stride, bias, out, out_stride, accumulate != 0, begin, end);
  }
}
