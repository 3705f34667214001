// 4-bit indices into a weight's table of 16 floats: reads rows of kFloats4 as floats. linear.cpp multiplies them in
// float32; unpack_pairs.h unpacks panels for bfloat16.cpp.
#pragma once
#include "abi.h"
#include "tile.h"
#ifdef __ARM_NEON
#include <arm_neon.h>
#endif

namespace pagemill {

// One value for each of a panel's outputs.
#ifdef __AVX512F__
struct Outputs {
  __m512 all;
};
inline Outputs load_outputs(const float* from) { return {_mm512_loadu_ps(from)}; }
inline void store(float* to, Outputs value) { _mm512_storeu_ps(to, value.all); }
inline Outputs operator*(Outputs a, Outputs b) { return {_mm512_mul_ps(a.all, b.all)}; }
inline void multiply_add(Outputs& sums, float x, Outputs weight) {
  sums.all = _mm512_fmadd_ps(_mm512_set1_ps(x), weight.all, sums.all);
}
#else
struct Outputs {
  Floats low, high;
};
inline Outputs load_outputs(const float* from) { return {load(from), load(from + kLanes)}; }
inline void store(float* to, Outputs value) { store(to, value.low), store(to + kLanes, value.high); }
inline Outputs operator*(Outputs a, Outputs b) { return {a.low * b.low, a.high * b.high}; }
inline void multiply_add(Outputs& sums, float x, Outputs weight) {
  const Floats value = splat(x);
  sums.low += value * weight.low;
  sums.high += value * weight.high;
}
#endif

// The table of 16 floats. `at`: looks up the lowest four bits of the lanes; higher bits are ignored.
#ifdef __AVX512F__
class Table {
 public:
  explicit Table(const float* table) : values_(_mm512_loadu_ps(table)) {}
  Outputs at(__m512i codes) const { return {_mm512_permutexvar_ps(codes, values_)}; }

 private:
  __m512 values_;
};
#elif defined(__AVX2__)
class Table {
 public:
  explicit Table(const float* table) : first_(_mm256_loadu_ps(table)), second_(_mm256_loadu_ps(table + kLanes)) {}
  Floats at(Words codes) const {
    const __m256i index = (__m256i)codes;
    const __m256 chosen = (__m256)_mm256_slli_epi32(index, 28);  // the fourth bit becomes the sign
    return (Floats)_mm256_blendv_ps(_mm256_permutevar8x32_ps(first_, index), _mm256_permutevar8x32_ps(second_, index),
                                    chosen);
  }

 private:
  __m256 first_, second_;
};
#elif defined(__ARM_NEON)
class Table {
 public:
  explicit Table(const float* table) {
    for (int i = 0; i < 4; ++i) bytes_.val[i] = vreinterpretq_u8_f32(vld1q_f32(table + 4 * i));
  }
  Floats at(Words codes) const {
    const Words places = (codes & 15) * 0x04040404u + 0x03020100u;  // indices of a float's four bytes
    uint32_t wide[kLanes];
    std::memcpy(wide, &places, sizeof wide);
    Floats found;
    for (int half = 0; half < 2; ++half) {
      const uint8x16_t four = vqtbl4q_u8(bytes_, vreinterpretq_u8_u32(vld1q_u32(wide + 4 * half)));
      std::memcpy(reinterpret_cast<char*>(&found) + 16 * half, &four, sizeof four);
    }
    return found;
  }

 private:
  uint8x16x4_t bytes_;
};
#else
class Table {
 public:
  explicit Table(const float* table) : table_(table) {}
  Floats at(Words codes) const {
    Floats found;
    for (int i = 0; i < kLanes; ++i) found[i] = table_[codes[i] & 15];
    return found;
  }

 private:
  const float* table_;
};
#endif

// A row of indices: four neighbouring inputs of a panel. Outputs 8 to 15 are in the upper halves of the bytes.
#ifdef __AVX512F__
class Quad {
 public:
  explicit Quad(const uint8_t* codes)
      : words_(_mm512_srlv_epi32(
            _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes))),
            _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi32(4), 1))) {}
  Outputs input(const Table& table, int i) const { return table.at(_mm512_srli_epi32(words_, 8 * i)); }

 private:
  __m512i words_;
};
#else
class Quad {
 public:
  explicit Quad(const uint8_t* codes) : words_(load_as<Words>(codes)) {}
  Outputs input(const Table& table, int i) const {
    return {table.at(words_ >> (8 * i)), table.at(words_ >> (8 * i + 4))};
  }

 private:
  Words words_;
};
#endif

}  // namespace pagemill
