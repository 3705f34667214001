// Computes out = x W^T + bias for quantized weights in integers: each group of 32 inputs of a row of x is rounded to a
// scale times 16-bit integers. (With 8 bits, which is common, a small model gave other answers.) A group's sum of
// products is exact; the scales are applied to it in float32, group after group, so that a row's result does not depend
// on the number of rows. dots_vnni.h and dots_avx2.h multiply; the second supports only 4-bit weights.
#include "dots.h"

#include <vector>

#include "output.h"
#include "threads.h"
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#include "dots_vnni.h"
#elif defined(__AVX2__)
#include "dots_avx2.h"
#endif

namespace pagemill {

#ifdef __AVX2__
namespace {

constexpr int64_t kRowBlock = 256;    // rows rounded at a time, in the second-level cache beside a panel
constexpr int64_t kOwnRows = 4;       // up to here every thread rounds all rows itself: cheaper than waiting
constexpr float kLargest = 32512.0f;  // 127 * 256: its high byte and those below fit into 8 bits

// Rounded rows, in tiles of up to kDotsRows that are multiplied by a panel together.
struct Rounded {
  std::vector<int32_t> words;  // per tile [inputs / 4][row][2]
  std::vector<float> scales;   // per tile [run of the weight][row][2]: scale, scale * sum of the integers
  int64_t row_words = 0, row_scales = 0;

  void reserve(int64_t rows, const PackedWeight& w) {
    row_words = w.in_features / 4 * 2;
    row_scales = w.in_features / run_of(w) * 2;
    if (static_cast<int64_t>(words.size()) < rows * row_words) words.resize(rows * row_words);
    if (static_cast<int64_t>(scales.size()) < rows * row_scales) scales.resize(rows * row_scales);
  }
};

inline float largest_magnitude(const float* x) {
  Floats most = zero(), strange = zero();
  for (int i = 0; i < kDotsGroup; i += kLanes) {
    const Floats v = load(x + i);
    most = max(most, max(v, -v));
    strange += v * 0.0f;  // NaN if v is not finite
  }
  return largest(most) + sum(strange);
}

inline int32_t sum_of(__m256i words) {
  const __m128i half = _mm_add_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  const __m128i quarter = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(quarter, _mm_shuffle_epi32(quarter, 0xb1)));
}

// Rounds one row of x to its position in a tile of `tile_rows`.
void round_row(const float* x, int64_t size, int64_t run, int64_t tile_rows, int32_t* words, float* scales) {
  const int64_t stride = 2 * tile_rows;
  for (int64_t k = 0; k < size; k += kDotsGroup, x += kDotsGroup, words += kDotsGroup / 4 * stride) {
    const float most = largest_magnitude(x), scale = most / kLargest;
    const Floats inverse = splat(most > 0.0f ? kLargest / most : 0.0f);
    __m256i whole[4];
    for (int i = 0; i < 4; ++i) whole[i] = _mm256_cvtps_epi32((__m256)(load(x + i * kLanes) * inverse));
    store_words(whole, words, stride);
    const int32_t first = sum_of(_mm256_add_epi32(whole[0], whole[1]));
    const int32_t second = sum_of(_mm256_add_epi32(whole[2], whole[3]));
    scales[0] = scale;
    scales[1] = scale * static_cast<float>(run == kDotsGroup ? first + second : first);
    scales += stride;
    if (run == kDotsGroup) continue;
    scales[0] = scale;
    scales[1] = scale * static_cast<float>(second);
    scales += stride;
  }
}

// Rounds the tile of rows first..first + count.
void round_tile(const PackedWeight& w, const float* x, int64_t x_stride, int64_t first, int64_t count, Rounded& to) {
  for (int64_t r = 0; r < count; ++r)
    round_row(x + (first + r) * x_stride, w.in_features, run_of(w), count, to.words.data() + first * to.row_words + 2 * r,
              to.scales.data() + first * to.row_scales + 2 * r);
}

// Multiplies panels begin..end by the rounded rows. Not inlined: where two copies are, Clang keeps the sums of one in
// memory.
[[gnu::noinline]] void multiply(const PackedWeight& w, const Rounded& x, int64_t rows, const float* bias, float* out, int64_t out_stride,
              bool accumulate, int64_t begin, int64_t end) {
  alignas(64) float c[kDotsRows * kPanel];
  for (int64_t panel = begin; panel < end; ++panel) {
    const Target target = target_of(w, panel, bias, out, out_stride);
    for (int64_t row = 0; row < rows; row += kDotsRows) {
      const int64_t count = std::min<int64_t>(kDotsRows, rows - row);
      const Target there = target.from_row(row);
      there.begin(c, count, true, accumulate);
      multiply_tile(w, panel, count, x.words.data() + row * x.row_words, x.scales.data() + row * x.row_scales, c);
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
  if (rows <= kOwnRows) {
    share(num_threads, num_panels, kFine, [&](Pieces pieces) {
      Range range;
      if (!pieces.next(range)) return;
      own.reserve(rows, w);
      for (int64_t r = 0; r < rows; r += kDotsRows)
        round_tile(w, x, x_stride, r, std::min<int64_t>(kDotsRows, rows - r), own);
      do multiply(w, own, rows, bias, out, out_stride, accumulate, range.begin, range.end);
      while (pieces.next(range));
    });
    return;
  }
  Rounded& shared = own;
  shared.reserve(std::min(rows, kRowBlock), w);
  for (int64_t row = 0; row < rows; row += kRowBlock) {
    const int64_t count = std::min(kRowBlock, rows - row);
    for_each(num_threads, (count + kDotsRows - 1) / kDotsRows, [&](int64_t tile) {
      const int64_t r = tile * kDotsRows;
      round_tile(w, x + row * x_stride, x_stride, r, std::min<int64_t>(kDotsRows, count - r), shared);
    });
    share(num_threads, num_panels, kFine, [&](Pieces pieces) {
      for (Range range; pieces.next(range);)
        multiply(w, shared, count, bias, out + row * out_stride, out_stride, accumulate, range.begin, range.end);
    });
  }
}

#else

bool has_dots() { return false; }

void linear_dots(const PackedWeight&, const float*, int64_t, int64_t, const float*, float*, int64_t, bool, int32_t) {}

#endif

}  // namespace pagemill

extern "C" int32_t pagemill_has_dots() { return pagemill::has_dots() ? 1 : 0; }
