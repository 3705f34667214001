// Unpacks quantized panels to bfloat16 in pairs of inputs for bfloat16.cpp: [k / 2][n][2].
#pragma once
#include <algorithm>

#include "codes.h"
#include "floats4.h"

#ifdef __AVX512BF16__
namespace pagemill {

// Rounds sixteen floats of one input and sixteen of the next, and interleaves them.
inline __m512i rounded_pairs(__m512 first, __m512 second) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                         21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(second, first));
}

// Stores four neighbouring inputs of a panel.
inline uint16_t* store_pairs(uint16_t* out, const __m512 values[4]) {
  _mm512_storeu_si512(out, rounded_pairs(values[0], values[1]));
  _mm512_storeu_si512(out + 2 * kPanel, rounded_pairs(values[2], values[3]));
  return out + 4 * kPanel;
}

constexpr float kIntegers[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// Unpacks 4-bit values: integers with offsets, or indices of a table without.
template <int32_t Code>
void unpack_nibbles(const PackedWeight& w, int64_t panel, int64_t begin, int64_t end, uint16_t* out) {
  const uint8_t* codes = w.codes + group_bytes(Code, panel * w.in_features + begin);
  const Table values(Code == kFloats4 ? w.table : kIntegers);
  ScaleWalk walk(w, panel, group_bytes(Code, kRun), begin);
  for (int64_t k = begin; k < end; k += kRun, walk.next()) {
    walk.fetch(codes);
    const float* scales = walk.scales();
    const __m512 scale = _mm512_loadu_ps(scales);
    const __m512 offset = Code == kFloats4 ? _mm512_setzero_ps() : _mm512_loadu_ps(scales + kPanel);
    for (int64_t at = 0; at < kRun / 4; ++at, codes += 2 * kPanel) {
      const Quad quad(codes);
      __m512 of_input[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) of_input[i] = _mm512_fmadd_ps(quad.input(values, i).all, scale, offset);
      out = store_pairs(out, of_input);
    }
  }
}

inline void unpack_dots8(const PackedWeight& w, int64_t panel, int64_t begin, int64_t end, uint16_t* out) {
  const int64_t run = run_of(w);
  const uint8_t* codes = w.codes + (panel * w.in_features + begin) * kPanel;
  ScaleWalk walk(w, panel, run * kPanel, begin);
  for (int64_t k = begin; k < end; k += run, walk.next()) {
    walk.fetch(codes);
    const float* scales = walk.scales();
    const __m512 scale = _mm512_loadu_ps(scales);
    const __m512 added = w.has_offsets ? _mm512_loadu_ps(scales + kPanel) : _mm512_setzero_ps();
    for (int64_t quad = 0; quad < run / 4; ++quad, codes += 4 * kPanel) {
      const __m512i bytes = _mm512_loadu_si512(codes);
      __m512 of_input[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const __m512i code = _mm512_srai_epi32(_mm512_slli_epi32(bytes, 24 - 8 * i), 24);
        of_input[i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(code), scale, added);
      }
      out = store_pairs(out, of_input);
    }
  }
}

inline __m512 from_e4m3(__m128i bytes) {
  const __m256i fields = _mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7), _mm256_set1_epi16(kE4m3Halves));
  return _mm512_mul_ps(_mm512_cvtph_ps(fields), _mm512_set1_ps(kFromE4m3Halves));
}

inline void unpack_floats8(const PackedWeight& w, int64_t panel, int64_t begin, int64_t end, uint16_t* out) {
  const int64_t run = run_of(w);
  const uint8_t* codes = w.codes + (panel * w.in_features + begin) * kPanel;
  ScaleWalk walk(w, panel, run * kPanel, begin);
  for (int64_t k = begin; k < end; k += run, walk.next()) {
    walk.fetch(codes);
    const __m512 scale = _mm512_loadu_ps(walk.scales());
    for (int64_t i = 0; i < run; i += 4, codes += 4 * kPanel) {
      __m512 of_input[4];
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) of_input[j] = _mm512_mul_ps(from_e4m3(load_as<__m128i>(codes + j * kPanel)), scale);
      out = store_pairs(out, of_input);
    }
  }
}

struct Pairs {
  const uint16_t* first;
  int64_t panel_stride;
};

// Returns inputs begin..end of `panels` panels: in `buffer`, or in place if they are pairs.
inline Pairs unpack_pairs(const PackedWeight& w, int64_t panel, int64_t panels, int64_t begin, int64_t end,
                          uint16_t* buffer) {
  if (w.format == kPairs) {
    const int64_t stride = pairs_in(w.in_features) * 2 * kPanel;
    return {reinterpret_cast<const uint16_t*>(w.codes) + panel * stride + begin * kPanel, stride};
  }
  const int64_t stride = (end - begin) * kPanel;
  const auto unpack = w.format == kDots4     ? unpack_nibbles<kDots4>
                      : w.format == kFloats4 ? unpack_nibbles<kFloats4>
                      : w.format == kDots8   ? unpack_dots8
                                             : unpack_floats8;
  for (int64_t p = 0; p < panels; ++p) unpack(w, panel + p, begin, end, buffer + p * stride);
  return {buffer, stride};
}

}  // namespace pagemill
#endif
