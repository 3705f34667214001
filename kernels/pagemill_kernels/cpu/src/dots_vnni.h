// The kernel of dots.cpp with AVX512_VNNI: weights are widened to 16 bits, and pairs of them are multiplied by pairs of
// x, whose products are added in 32 bits. 8-bit weights fit as well as 4-bit ones: 32 * 128 * 32,512 < 2^31.
//
// One panel is processed at a time, and the next data is prefetched: few rows wait for memory, which delivers a single
// stream at twice the speed of two.
#pragma once
#include "codes.h"

namespace pagemill {

constexpr int64_t kDotsGroup = 32;  // inputs that share a scale in x; in the weight 16 or a multiple of it
constexpr int kDotsRows = 4;        // rows that are multiplied by a panel at once

// Stores 32 rounded inputs as two words for four of them: the first and third, the second and fourth, in the order of
// widened weights. The words of the next four are `stride` further on.
inline void store_words(const __m256i whole[4], int32_t* words, int64_t stride) {
  for (int i = 0; i < 4; ++i) {
    alignas(32) int32_t pairs[kLanes];
    const __m256i low = _mm256_and_si256(whole[i], _mm256_set1_epi32(0xffff));
    const __m256i third = _mm256_slli_epi32(_mm256_shuffle_epi32(whole[i], 0xee), 16);  // of each four, moved first
    _mm256_store_si256(reinterpret_cast<__m256i*>(pairs), _mm256_or_si256(low, third));
    words[0] = pairs[0], words[1] = pairs[1];
    words[stride] = pairs[4], words[stride + 1] = pairs[5];
    words += 2 * stride;
  }
}

// Four inputs of 16 outputs as 16-bit integers: the first and third, the second and fourth.
struct Widened {
  __m512i even, odd;
};

template <int32_t Code>
inline Widened widened(const uint8_t* codes) {
  if (Code == kDots8) {
    const __m512i bytes = _mm512_loadu_si512(codes);
    return {_mm512_srai_epi16(_mm512_slli_epi16(bytes, 8), 8), _mm512_srai_epi16(bytes, 8)};
  }
  const __m512i both = _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)));
  const __m512i halves = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(4), 1);
  const __m512i low = _mm512_srlv_epi16(both, halves), nibble = _mm512_set1_epi16(15);
  return {_mm512_and_si512(low, nibble), _mm512_and_si512(_mm512_srli_epi16(low, 8), nibble)};
}

// Adds the products of `Rows` rows with a panel to c, [Rows][16].
template <int32_t Code, bool Offsets, int Rows>
void panel_rows(const PackedWeight& w, int64_t panel, const int32_t* words, const float* scales, float* c) {
  constexpr int kRowBytes = (in_nibbles(Code) ? 2 : 4) * kPanel;
  const int64_t run_size = run_of(w);
  const uint8_t* codes = w.codes + panel * group_bytes(Code, w.in_features);
  ScaleWalk walk(w, panel, run_size / 4 * kRowBytes);
  __m512 totals[Rows];
  for (int r = 0; r < Rows; ++r) totals[r] = _mm512_loadu_ps(c + r * kPanel);
  for (int64_t run = 0; run < w.in_features; run += run_size, walk.next(), scales += 2 * Rows) {
    walk.fetch(codes);
    __m512i sums[Rows];
    for (int r = 0; r < Rows; ++r) sums[r] = _mm512_setzero_si512();
#pragma GCC unroll 1
    for (int64_t quad = 0; quad < run_size / 4; ++quad, codes += kRowBytes, words += 2 * Rows) {
      const Widened code = widened<Code>(codes);
#pragma GCC unroll 4
      for (int r = 0; r < Rows; ++r) {
        sums[r] = _mm512_dpwssd_epi32(sums[r], code.even, _mm512_set1_epi32(words[2 * r]));
        sums[r] = _mm512_dpwssd_epi32(sums[r], code.odd, _mm512_set1_epi32(words[2 * r + 1]));
      }
    }
    const float* weight_scales = walk.scales();
    const __m512 weight_scale = _mm512_loadu_ps(weight_scales);
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
      const __m512 total = _mm512_set1_ps(scales[2 * r + 1]);
      if (Offsets) totals[r] = _mm512_fmadd_ps(_mm512_loadu_ps(weight_scales + kPanel), total, totals[r]);
      const __m512 scale = _mm512_mul_ps(weight_scale, _mm512_set1_ps(scales[2 * r]));
      totals[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[r]), scale, totals[r]);
    }
  }
  for (int r = 0; r < Rows; ++r) _mm512_storeu_ps(c + r * kPanel, totals[r]);
}

using TileKernel = void (*)(const PackedWeight&, int64_t, const int32_t*, const float*, float*);
template <int32_t Code, bool Offsets>
constexpr TileKernel kTileKernels[kDotsRows] = {panel_rows<Code, Offsets, 1>, panel_rows<Code, Offsets, 2>,
                                                panel_rows<Code, Offsets, 3>, panel_rows<Code, Offsets, 4>};

// Multiplies up to kDotsRows rows of x by a panel. c: [rows][16].
inline void multiply_tile(const PackedWeight& w, int64_t panel, int64_t rows, const int32_t* words, const float* scales,
                          float* c) {
  const auto kernels = w.format == kDots4 ? kTileKernels<kDots4, true>
                       : w.has_offsets    ? kTileKernels<kDots8, true>
                                          : kTileKernels<kDots8, false>;
  kernels[rows - 1](w, panel, words, scales, c);
}

}  // namespace pagemill
