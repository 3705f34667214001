// out = x W^T + bias for 4-bit codes, in integers: each group of 32 inputs of a row of x is rounded to a scale times
// 16-bit integers, which are multiplied as two bytes, 256 * high + low. (With the high byte alone, as others do it, a
// small model gave other answers.) A group's sum of products is exact; the scales are applied to it in float32, group
// after group, so that a row's result does not depend on how many rows there are.
//
// With AVX2 a row of codes, four inputs of 16 outputs, meets two broadcasts of x by unsigned-signed byte products. Eight
// sums of two products fit into 16 bits: 8 * 2 * 15 * 128 = 30,720. (For 8-bit codes, times 16-bit integers, the same was
// 0.8 times as fast as floats at 64 rows and 1.3 times at one: they stay floats.)
#include "dots.h"

#include <omp.h>

#include <vector>

#include "codes.h"
#include "output.h"

namespace pagemill {

#ifdef __AVX2__
namespace {

constexpr int64_t kGroup = 32;      // inputs that share a scale, in x and in the weight
constexpr int64_t kRowBlock = 256;  // rows rounded at a time, in the second-level cache beside a panel
constexpr int64_t kOwnRows = 4;     // up to here every thread rounds all rows for itself: cheaper than waiting
constexpr int kRows = 2;            // rows that meet a panel at once: 8 sums
constexpr float kLargest = 32512.0f;  // 127 * 256: its high byte and those below fit into 8 bits

// Rounded rows, by tiles of up to kRows that meet a panel together.
struct Rounded {
  std::vector<int32_t> words;  // per tile [inputs / 4][row][2]: four high bytes, four low ones
  std::vector<float> scales;   // per tile [group][row][2]: scale, scale * sum of the integers
  int64_t row_words = 0, row_scales = 0;

  void reserve(int64_t rows, const PackedWeight& w) {
    row_words = w.in_features / 4 * 2;
    row_scales = w.in_features / kGroup * 2;
    if (static_cast<int64_t>(words.size()) < rows * row_words) words.resize(rows * row_words);
    if (static_cast<int64_t>(scales.size()) < rows * row_scales) scales.resize(rows * row_scales);
  }
};

inline float largest_magnitude(const float* x) {
  Floats most = zero(), strange = zero();
  for (int i = 0; i < kGroup; i += kLanes) {
    const Floats v = load(x + i);
    most = max(most, max(v, -v));
    strange += v * 0.0f;  // not a number where v is not finite
  }
  return largest(most) + sum(strange);
}

inline int32_t sum_of(__m256i words) {
  const __m128i half = _mm_add_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  const __m128i quarter = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(quarter, _mm_shuffle_epi32(quarter, 0xb1)));
}

// One row of x to its place in a tile of `tile_rows`.
void round_row(const float* x, int64_t size, int64_t tile_rows, int32_t* words, float* scales) {
  alignas(32) int32_t highs[kGroup / 4], lows[kGroup / 4];
  for (int64_t k = 0; k < size; k += kGroup, x += kGroup, scales += 2 * tile_rows) {
    const float most = largest_magnitude(x);
    const Floats inverse = splat(most > 0.0f ? kLargest / most : 0.0f);
    __m256i whole[4];
    for (int i = 0; i < 4; ++i) whole[i] = _mm256_cvtps_epi32((__m256)(load(x + i * kLanes) * inverse));
    // Packing works within halves of a register: each permutation puts the quarters back in order.
    const __m256i first = _mm256_permute4x64_epi64(_mm256_packs_epi32(whole[0], whole[1]), 0xd8);
    const __m256i second = _mm256_permute4x64_epi64(_mm256_packs_epi32(whole[2], whole[3]), 0xd8);
    const __m256i half = _mm256_set1_epi16(128);
    const __m256i high0 = _mm256_srai_epi16(_mm256_add_epi16(first, half), 8);
    const __m256i high1 = _mm256_srai_epi16(_mm256_add_epi16(second, half), 8);
    const __m256i low0 = _mm256_sub_epi16(first, _mm256_slli_epi16(high0, 8));
    const __m256i low1 = _mm256_sub_epi16(second, _mm256_slli_epi16(high1, 8));
    _mm256_store_si256(reinterpret_cast<__m256i*>(highs),
                       _mm256_permute4x64_epi64(_mm256_packs_epi16(high0, high1), 0xd8));
    _mm256_store_si256(reinterpret_cast<__m256i*>(lows), _mm256_permute4x64_epi64(_mm256_packs_epi16(low0, low1), 0xd8));
    for (int i = 0; i < kGroup / 4; ++i, words += 2 * tile_rows) words[0] = highs[i], words[1] = lows[i];
    const __m256i total =
        _mm256_add_epi32(_mm256_add_epi32(whole[0], whole[1]), _mm256_add_epi32(whole[2], whole[3]));
    scales[0] = most / kLargest;
    scales[1] = scales[0] * static_cast<float>(sum_of(total));
  }
}

// The tile of rows first..first + count.
void round_tile(const PackedWeight& w, const float* x, int64_t x_stride, int64_t first, int64_t count, Rounded& to) {
  for (int64_t r = 0; r < count; ++r)
    round_row(x + (first + r) * x_stride, w.in_features, count, to.words.data() + first * to.row_words + 2 * r,
              to.scales.data() + first * to.row_scales + 2 * r);
}

// c += the products of `Rows` rows with a panel. c: [Rows][16], aligned; it stays in the first-level cache.
template <int Rows>
void panel_rows(int64_t num_groups, const uint8_t* codes, const float* weight_scales, const int32_t* words,
                const float* scales, float* c) {
  const __m256i nibble = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1), high_unit = _mm256_set1_epi16(256);
  for (int64_t g = 0; g < num_groups; ++g, weight_scales += 2 * kPanel, scales += 2 * Rows) {
    __m256i sums[Rows][2][2];  // of each row: outputs 0 to 7 and 8 to 15, by high and low bytes
#pragma GCC unroll 2
    for (int r = 0; r < Rows; ++r) sums[r][0][0] = sums[r][0][1] = sums[r][1][0] = sums[r][1][1] = _mm256_setzero_si256();
#pragma GCC unroll 1
    for (int quad = 0; quad < kGroup / 4; ++quad, codes += 2 * kPanel, words += 2 * Rows) {
      const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
      const __m256i low = _mm256_and_si256(both, nibble);
      const __m256i high = _mm256_and_si256(_mm256_srli_epi16(both, 4), nibble);
#pragma GCC unroll 2
      for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 2
        for (int byte = 0; byte < 2; ++byte) {
          const __m256i x = _mm256_set1_epi32(words[2 * r + byte]);
          sums[r][0][byte] = _mm256_add_epi16(sums[r][0][byte], _mm256_maddubs_epi16(low, x));
          sums[r][1][byte] = _mm256_add_epi16(sums[r][1][byte], _mm256_maddubs_epi16(high, x));
        }
      }
    }
    const __m256 s0 = _mm256_loadu_ps(weight_scales), s1 = _mm256_loadu_ps(weight_scales + kLanes);
    const __m256 o0 = _mm256_loadu_ps(weight_scales + kPanel), o1 = _mm256_loadu_ps(weight_scales + kPanel + kLanes);
#pragma GCC unroll 2
    for (int r = 0; r < Rows; ++r) {
      const __m256 scale = _mm256_broadcast_ss(scales + 2 * r), total = _mm256_broadcast_ss(scales + 2 * r + 1);
      const auto whole = [&](const __m256i* bytes) {
        const __m256i high = _mm256_madd_epi16(bytes[0], high_unit), low = _mm256_madd_epi16(bytes[1], ones);
        return _mm256_cvtepi32_ps(_mm256_add_epi32(high, low));
      };
      const __m256 a = whole(sums[r][0]), b = whole(sums[r][1]);
      float* to = c + r * kPanel;
      const __m256 low = _mm256_fmadd_ps(o0, total, _mm256_load_ps(to));
      const __m256 high = _mm256_fmadd_ps(o1, total, _mm256_load_ps(to + kLanes));
      _mm256_store_ps(to, _mm256_fmadd_ps(a, _mm256_mul_ps(s0, scale), low));
      _mm256_store_ps(to + kLanes, _mm256_fmadd_ps(b, _mm256_mul_ps(s1, scale), high));
    }
    asm volatile("" ::: "memory");  // else GCC keeps c in registers and the sums, which need them more, in memory
  }
}

using PanelRows = void (*)(int64_t, const uint8_t*, const float*, const int32_t*, const float*, float*);
constexpr PanelRows kKernels[kRows] = {panel_rows<1>, panel_rows<2>};

// Panels begin..end for the rounded rows.
void multiply(const PackedWeight& w, const Rounded& x, int64_t rows, const float* bias, float* out, int64_t out_stride,
              bool accumulate, int64_t begin, int64_t end) {
  const int64_t num_groups = w.in_features / kGroup;
  const int64_t panel_bytes = num_groups * group_bytes(kDots4, kGroup), panel_scales = num_groups * 2 * kPanel;
  alignas(32) float c[kRows * kPanel];
  for (int64_t panel = begin; panel < end; ++panel) {
    const Target target = target_of(w, panel, bias, out, out_stride);
    for (int64_t row = 0; row < rows; row += kRows) {
      const int64_t count = std::min<int64_t>(kRows, rows - row);
      const Target there = target.from_row(row);
      there.begin(c, count, true, accumulate);
      kKernels[count - 1](num_groups, w.codes + panel * panel_bytes, w.scales + panel * panel_scales,
                          x.words.data() + row * x.row_words, x.scales.data() + row * x.row_scales, c);
      there.end(c, count);
    }
  }
}

}  // namespace

bool has_dots() { return true; }

void linear_dots(const PackedWeight& w, const float* x, int64_t rows, int64_t x_stride, const float* bias, float* out,
                 int64_t out_stride, bool accumulate, int32_t num_threads) {
  thread_local Rounded own;
  const int64_t num_panels = (w.out_features + kPanel - 1) / kPanel;
  Rounded& shared = own;
  shared.reserve(std::min(rows, kRowBlock), w);
#pragma omp parallel num_threads(num_threads)
  {
    const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
    const int64_t begin = num_panels * thread / threads, end = num_panels * (thread + 1) / threads;
    if (rows <= kOwnRows) {
      own.reserve(rows, w);
      for (int64_t r = 0; r < rows; r += kRows) round_tile(w, x, x_stride, r, std::min<int64_t>(kRows, rows - r), own);
      multiply(w, own, rows, bias, out, out_stride, accumulate, begin, end);
    } else {
      for (int64_t row = 0; row < rows; row += kRowBlock) {
        const int64_t count = std::min(kRowBlock, rows - row);
#pragma omp for schedule(static)
        for (int64_t r = 0; r < count; r += kRows)
          round_tile(w, x + row * x_stride, x_stride, r, std::min<int64_t>(kRows, count - r), shared);
        multiply(w, shared, count, bias, out + row * out_stride, out_stride, accumulate, begin, end);
#pragma omp barrier
      }
    }
  }
}

#else

bool has_dots() { return false; }

void linear_dots(const PackedWeight&, const float*, int64_t, int64_t, const float*, float*, int64_t, bool, int32_t) {}

#endif

}  // namespace pagemill

extern "C" int32_t pagemill_has_dots() { return pagemill::has_dots() ? 1 : 0; }
