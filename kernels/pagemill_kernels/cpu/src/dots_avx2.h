// The kernel of dots.cpp with AVX2: a row of weights, four inputs of 16 outputs, is multiplied by two broadcasts of x
// in unsigned-signed byte products. Eight sums of two products fit into 16 bits: 8 * 2 * 15 * 128 = 30,720. (For 8-bit
// weights, times 16-bit integers, this was 0.8 times as fast as floats at 64 rows and 1.3 times at one, so they are
// multiplied as floats.)
#pragma once
#include "codes.h"

namespace pagemill {

constexpr int64_t kDotsGroup = 32;  // inputs that share a scale in x; in the weight a multiple of it
constexpr int kDotsRows = 2;        // rows that are multiplied by a panel at once: 8 sums

// Stores 32 rounded inputs as two words for four of them: four high bytes, then four low ones. The words of the next
// four are `stride` further on.
inline void store_words(const __m256i whole[4], int32_t* words, int64_t stride) {
  alignas(32) int32_t highs[kDotsGroup / 4], lows[kDotsGroup / 4];
  // Packing works within halves of a register: each permutation restores the order of the quarters.
  const __m256i first = _mm256_permute4x64_epi64(_mm256_packs_epi32(whole[0], whole[1]), 0xd8);
  const __m256i second = _mm256_permute4x64_epi64(_mm256_packs_epi32(whole[2], whole[3]), 0xd8);
  const __m256i half = _mm256_set1_epi16(128);
  const __m256i high0 = _mm256_srai_epi16(_mm256_add_epi16(first, half), 8);
  const __m256i high1 = _mm256_srai_epi16(_mm256_add_epi16(second, half), 8);
  const __m256i low0 = _mm256_sub_epi16(first, _mm256_slli_epi16(high0, 8));
  const __m256i low1 = _mm256_sub_epi16(second, _mm256_slli_epi16(high1, 8));
  _mm256_store_si256(reinterpret_cast<__m256i*>(highs), _mm256_permute4x64_epi64(_mm256_packs_epi16(high0, high1), 0xd8));
  _mm256_store_si256(reinterpret_cast<__m256i*>(lows), _mm256_permute4x64_epi64(_mm256_packs_epi16(low0, low1), 0xd8));
  for (int i = 0; i < kDotsGroup / 4; ++i, words += stride) words[0] = highs[i], words[1] = lows[i];
}

// Adds the products of `Rows` rows with a panel to c, [Rows][16], aligned; it stays in the first-level cache.
template <int Rows>
inline void panel_rows(const PackedWeight& w, int64_t panel, const int32_t* words, const float* scales, float* c) {
  const uint8_t* codes = w.codes + panel * group_bytes(kDots4, w.in_features);
  ScaleWalk walk(w, panel, group_bytes(kDots4, kDotsGroup));
  const __m256i nibble = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1), high_unit = _mm256_set1_epi16(256);
  for (int64_t run = 0; run < w.in_features; run += kDotsGroup, walk.next(), scales += 2 * Rows) {
    walk.fetch(codes);
    __m256i sums[Rows][2][2];  // of each row: outputs 0 to 7 and 8 to 15, by high and low bytes
#pragma GCC unroll 2
    for (int r = 0; r < Rows; ++r) sums[r][0][0] = sums[r][0][1] = sums[r][1][0] = sums[r][1][1] = _mm256_setzero_si256();
#pragma GCC unroll 1
    for (int quad = 0; quad < kDotsGroup / 4; ++quad, codes += 2 * kPanel, words += 2 * Rows) {
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
    const float* weight_scales = walk.scales();
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
    asm volatile("" ::: "memory");  // otherwise GCC keeps c in registers and the sums, which need them more, in memory
  }
}

// Multiplies up to kDotsRows rows of x by a panel. c: [rows][16].
inline void multiply_tile(const PackedWeight& w, int64_t panel, int64_t rows, const int32_t* words, const float* scales,
                          float* c) {
  (rows == 2 ? panel_rows<2> : panel_rows<1>)(w, panel, words, scales, c);
}

}  // namespace pagemill
