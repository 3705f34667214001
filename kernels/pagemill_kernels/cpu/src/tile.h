// Matrix micro-kernels over panels of 16 columns: C[rows][16] (+)= A[rows][depth] * B[depth][16]. `tile` reads A in
// place (attention.cpp: B is a transposed key block or a value block, used once); `packed_tile` reads A repacked
// (linear.cpp: B is a weight panel, and A is multiplied by many of them).
#pragma once
#include "vec.h"

namespace pagemill {

constexpr int kPanel = 16;
constexpr int kTileRows = 6;  // 12 accumulators, 2 of B and 1 broadcast: 15 of AVX2's 16 registers

template <int Rows>
inline void tile_rows(const float* a, int64_t a_stride, const float* b, int64_t b_stride, int64_t depth, float* c,
                      int64_t c_stride) {
  Floats low[Rows], high[Rows];
#pragma GCC unroll 6
  for (int r = 0; r < Rows; ++r) {
    low[r] = load(c + r * c_stride);
    high[r] = load(c + r * c_stride + kLanes);
  }
  for (int64_t k = 0; k < depth; ++k, b += b_stride) {
    const Floats b_low = load(b), b_high = load(b + kLanes);
#pragma GCC unroll 6
    for (int r = 0; r < Rows; ++r) {
      const Floats value = splat(a[r * a_stride + k]);
      low[r] += value * b_low;
      high[r] += value * b_high;
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < Rows; ++r) {
    store(c + r * c_stride, low[r]);
    store(c + r * c_stride + kLanes, high[r]);
  }
}

#ifdef __AVX512F__
// With sixteen lanes a row of C is one register, and twelve of them keep the multipliers busy. Each sum adds the same
// products in the same order, so the bits are the same.
constexpr int kWideRows = 12;

template <int Rows>
inline void wide_rows(const float* a, int64_t a_stride, const float* b, int64_t b_stride, int64_t depth, float* c,
                      int64_t c_stride) {
  __m512 sums[Rows];
#pragma GCC unroll 12
  for (int r = 0; r < Rows; ++r) sums[r] = _mm512_loadu_ps(c + r * c_stride);
  for (int64_t k = 0; k < depth; ++k, b += b_stride) {
    const __m512 row = _mm512_loadu_ps(b);
#pragma GCC unroll 12
    for (int r = 0; r < Rows; ++r) sums[r] = _mm512_fmadd_ps(_mm512_set1_ps(a[r * a_stride + k]), row, sums[r]);
  }
#pragma GCC unroll 12
  for (int r = 0; r < Rows; ++r) _mm512_storeu_ps(c + r * c_stride, sums[r]);
}
#endif

// Computes C += A * B for any number of rows.
inline void tile(int64_t rows, const float* a, int64_t a_stride, const float* b, int64_t b_stride, int64_t depth,
                 float* c, int64_t c_stride) {
#ifdef __AVX512F__
  while (rows >= kWideRows) {
    wide_rows<kWideRows>(a, a_stride, b, b_stride, depth, c, c_stride);
    rows -= kWideRows;
    a += kWideRows * a_stride;
    c += kWideRows * c_stride;
  }
#endif
  while (rows >= kTileRows) {
    tile_rows<kTileRows>(a, a_stride, b, b_stride, depth, c, c_stride);
    rows -= kTileRows;
    a += kTileRows * a_stride;
    c += kTileRows * c_stride;
  }
  switch (rows) {
    case 5: return tile_rows<5>(a, a_stride, b, b_stride, depth, c, c_stride);
    case 4: return tile_rows<4>(a, a_stride, b, b_stride, depth, c, c_stride);
    case 3: return tile_rows<3>(a, a_stride, b, b_stride, depth, c, c_stride);
    case 2: return tile_rows<2>(a, a_stride, b, b_stride, depth, c, c_stride);
    case 1: return tile_rows<1>(a, a_stride, b, b_stride, depth, c, c_stride);
    default: return;
  }
}

// Repacks A for `packed_tile`: tiles of up to six rows one after another, each [depth][rows of the tile].
inline void pack_tiles(int64_t rows, const float* a, int64_t a_stride, int64_t depth, float* out) {
  for (int64_t row = 0; row < rows; row += kTileRows, a += kTileRows * a_stride, out += kTileRows * depth) {
    const int64_t count = rows - row < kTileRows ? rows - row : kTileRows;
    int64_t k = 0;
    // This reads eight rows, and each store writes two floats too many: both belong to the next tile.
    if (rows - row >= kLanes)
      for (; k + kLanes <= depth; k += kLanes) transpose8(a + k, a_stride, out + k * kTileRows, kTileRows);
    for (; k < depth; ++k)
      for (int64_t r = 0; r < count; ++r) out[k * count + r] = a[r * a_stride + k];
  }
}

template <int Rows>
inline void packed_tile_rows(const float* a, const float* b, int64_t depth, float* c) {
  Floats low[Rows], high[Rows];
#pragma GCC unroll 6
  for (int r = 0; r < Rows; ++r) {
    low[r] = load(c + r * kPanel);
    high[r] = load(c + r * kPanel + kLanes);
  }
#pragma GCC unroll 4
  for (int64_t k = 0; k < depth; ++k, a += Rows, b += kPanel) {
    const Floats b_low = load(b), b_high = load(b + kLanes);
#pragma GCC unroll 6
    for (int r = 0; r < Rows; ++r) {
      const Floats value = splat(a[r]);
      low[r] += value * b_low;
      high[r] += value * b_high;
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < Rows; ++r) {
    store(c + r * kPanel, low[r]);
    store(c + r * kPanel + kLanes, high[r]);
  }
}

#ifdef __AVX512F__
// Computes two adjacent tiles of six rows, like `wide_rows`.
inline void packed_wide_rows(const float* a, const float* b, int64_t depth, float* c) {
  const float* second = a + kTileRows * depth;
  __m512 sums[kWideRows];
#pragma GCC unroll 12
  for (int r = 0; r < kWideRows; ++r) sums[r] = _mm512_loadu_ps(c + r * kPanel);
#pragma GCC unroll 2
  for (int64_t k = 0; k < depth; ++k, a += kTileRows, second += kTileRows, b += kPanel) {
    const __m512 row = _mm512_loadu_ps(b);
#pragma GCC unroll 6
    for (int r = 0; r < kTileRows; ++r) {
      sums[r] = _mm512_fmadd_ps(_mm512_set1_ps(a[r]), row, sums[r]);
      sums[kTileRows + r] = _mm512_fmadd_ps(_mm512_set1_ps(second[r]), row, sums[kTileRows + r]);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < kWideRows; ++r) _mm512_storeu_ps(c + r * kPanel, sums[r]);
}
#endif

// Computes C += A * B: A by `pack_tiles`, B [depth][16], C [rows][16].
inline void packed_tile(int64_t rows, const float* a, const float* b, int64_t depth, float* c) {
#ifdef __AVX512F__
  for (; rows >= kWideRows; rows -= kWideRows, a += kWideRows * depth, c += kWideRows * kPanel)
    packed_wide_rows(a, b, depth, c);
#endif
  for (; rows >= kTileRows; rows -= kTileRows, a += kTileRows * depth, c += kTileRows * kPanel)
    packed_tile_rows<kTileRows>(a, b, depth, c);
  switch (rows) {
    case 5: return packed_tile_rows<5>(a, b, depth, c);
    case 4: return packed_tile_rows<4>(a, b, depth, c);
    case 3: return packed_tile_rows<3>(a, b, depth, c);
    case 2: return packed_tile_rows<2>(a, b, depth, c);
    case 1: return packed_tile_rows<1>(a, b, depth, c);
    default: return;
  }
}

}  // namespace pagemill
