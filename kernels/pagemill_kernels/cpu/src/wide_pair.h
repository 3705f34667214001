// Twelve rows of A by two neighbouring panels with sixteen lanes: a number of A that is read is multiplied twice, so that
// the multipliers are what is waited for, and not the loads. Sums begin with the bias, or what is there, and stay in
// registers until they are where the results go. Each adds the same products in the same order as those of tile.h, hence
// the same bits.
#pragma once
#include "output.h"

namespace pagemill {

#ifdef __AVX512F__
// A by `pack_tiles`, two tiles of six rows one after another; B [depth][16]. Both targets have sixteen columns.
inline void wide_pair(const float* a, const float* b, const float* next_b, int64_t depth, const Target& target,
                      const Target& next, bool add_bias, bool add_out) {
  const float* second = a + kTileRows * depth;
  const __m512 base = add_bias && target.bias ? _mm512_loadu_ps(target.bias) : _mm512_setzero_ps();
  const __m512 next_base = add_bias && next.bias ? _mm512_loadu_ps(next.bias) : _mm512_setzero_ps();
  __m512 sums[kWideRows], next_sums[kWideRows];
#pragma GCC unroll 12
  for (int r = 0; r < kWideRows; ++r) sums[r] = base, next_sums[r] = next_base;
  if (add_out) {
#pragma GCC unroll 12
    for (int r = 0; r < kWideRows; ++r) {
      sums[r] = _mm512_add_ps(sums[r], _mm512_loadu_ps(target.out + r * target.stride));
      next_sums[r] = _mm512_add_ps(next_sums[r], _mm512_loadu_ps(next.out + r * next.stride));
    }
  }
  for (int64_t k = 0; k < depth; ++k, a += kTileRows, second += kTileRows, b += kPanel, next_b += kPanel) {
    const __m512 row = _mm512_loadu_ps(b), next_row = _mm512_loadu_ps(next_b);
#pragma GCC unroll 6
    for (int r = 0; r < kTileRows; ++r) {
      const __m512 value = _mm512_set1_ps(a[r]), other = _mm512_set1_ps(second[r]);
      sums[r] = _mm512_fmadd_ps(value, row, sums[r]);
      next_sums[r] = _mm512_fmadd_ps(value, next_row, next_sums[r]);
      sums[kTileRows + r] = _mm512_fmadd_ps(other, row, sums[kTileRows + r]);
      next_sums[kTileRows + r] = _mm512_fmadd_ps(other, next_row, next_sums[kTileRows + r]);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < kWideRows; ++r) {
    _mm512_storeu_ps(target.out + r * target.stride, sums[r]);
    _mm512_storeu_ps(next.out + r * next.stride, next_sums[r]);
  }
}
#endif

// As many rows as come in twelves; returns how many these are. None without AVX512, or where a panel is partial.
inline int64_t wide_pairs(int64_t rows, const float* a, const float* b, const float* next_b, int64_t depth,
                          const Target& target, const Target& next, bool add_bias, bool add_out) {
  int64_t done = 0;
#ifdef __AVX512F__
  if (next.columns < kPanel) return 0;
  for (; done + kWideRows <= rows; done += kWideRows)
    wide_pair(a + done * depth, b, next_b, depth, target.from_row(done), next.from_row(done), add_bias, add_out);
#endif
  return done;
}

}  // namespace pagemill
