// Eight float lanes as a compiler vector: AVX2, AVX-512VL and NEON are all compiled from this one source. tile.h builds
// the matrix micro-kernels on it. No operation is defined here.
#pragma once
#include <cstdint>
#include <cstring>
#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace pagemill {

constexpr int kLanes = 8;
typedef float Floats __attribute__((vector_size(32)));
typedef int32_t Ints __attribute__((vector_size(32)));
typedef uint32_t Words __attribute__((vector_size(32)));
typedef uint8_t Bytes __attribute__((vector_size(16)));  // 16 quantized values: one panel row
typedef int8_t SignedBytes __attribute__((vector_size(8)));
typedef uint16_t Halves __attribute__((vector_size(16)));

// The fields of an e4m3 float in a float32: its sign and the seven bits behind it, 20 bits up from a signed byte's.
constexpr int32_t kE4m3Fields = static_cast<int32_t>(0x87f00000);
constexpr float kFromE4m3 = 0x1p120f;  // the factor for that float32
// The same for a float16, 7 bits up: Intel's processors are slow at subnormal float32, but not at subnormal float16.
constexpr int16_t kE4m3Halves = static_cast<int16_t>(0xbf80);
constexpr float kFromE4m3Halves = 0x1p8f;

template <typename Vector>
inline Vector load_as(const void* from) {
  Vector value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

inline Floats load(const float* from) { return load_as<Floats>(from); }
inline void store(float* to, Floats value) { std::memcpy(to, &value, sizeof value); }
inline Floats splat(float v) { return Floats{v, v, v, v, v, v, v, v}; }
inline Floats zero() { return Floats{}; }

// GCC 12 splits narrow-to-wide conversions of small vectors into scalars, hence the intrinsics.
inline Ints widen(Bytes codes, int half) {
#ifdef __AVX2__
  return (Ints)_mm256_cvtepu8_epi32(half == 0 ? (__m128i)codes : _mm_srli_si128((__m128i)codes, 8));
#else
  Ints wide;
  for (int i = 0; i < kLanes; ++i) wide[i] = codes[half * kLanes + i];
  return wide;
#endif
}

inline Floats to_floats(Ints values) {
#ifdef __AVX2__
  return (Floats)_mm256_cvtepi32_ps((__m256i)values);
#else
  return __builtin_convertvector(values, Floats);
#endif
}

inline Floats from_signed_bytes(SignedBytes codes) {
#ifdef __AVX2__
  return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(&codes))));
#else
  return __builtin_convertvector(__builtin_convertvector(codes, Ints), Floats);
#endif
}

inline Floats from_e4m3_bytes(SignedBytes codes) {
#ifdef __F16C__
  const __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(&codes)));
  const __m128i fields = _mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16(kE4m3Halves));
  return (Floats)_mm256_cvtph_ps(fields) * kFromE4m3Halves;
#else
  const Ints wide = __builtin_convertvector(codes, Ints);
  const Ints fields = wide << 20 & kE4m3Fields;
  return load_as<Floats>(&fields) * kFromE4m3;
#endif
}

inline Floats from_bfloat16(Halves halves) {
#ifdef __AVX2__
  return (Floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)halves), 16);
#else
  const Ints wide = __builtin_convertvector(halves, Ints) << 16;
  return load_as<Floats>(&wide);
#endif
}

inline float from_bfloat16(uint16_t half) {
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  return load_as<float>(&bits);
}

// Rounds to nearest, ties to even; NaN stays NaN.
inline uint16_t to_bfloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if (value != value) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline Halves to_bfloat16(Floats value) {
  const Words bits = load_as<Words>(&value);
  const Words rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  const Words result = value == value ? rounded : (bits >> 16 | 0x40);
#ifdef __AVX2__
  const __m256i wide = (__m256i)result;
  return (Halves)_mm_packus_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
#else
  return __builtin_convertvector(result, Halves);
#endif
}

// Loads and stores floats from and to rows of float32 or of bfloat16.
inline Floats load(const uint16_t* from) { return from_bfloat16(load_as<Halves>(from)); }
inline void store(uint16_t* to, Floats value) {
  const Halves halves = to_bfloat16(value);
  std::memcpy(to, &halves, sizeof halves);
}
inline float from_e4m3(uint8_t byte) {
  const int32_t fields = static_cast<int32_t>(static_cast<uint32_t>(static_cast<int8_t>(byte)) << 20) & kE4m3Fields;
  return load_as<float>(&fields) * kFromE4m3;
}
inline float load_one(const float* from) { return *from; }
inline float load_one(const uint16_t* from) {
  const uint32_t bits = static_cast<uint32_t>(*from) << 16;
  return load_as<float>(&bits);
}
inline void store_one(float* to, float value) { *to = value; }
inline void store_one(uint16_t* to, float value) { *to = to_bfloat16(value); }

inline Floats max(Floats a, Floats b) { return a > b ? a : b; }

inline float sum(Floats v) {
#ifdef __AVX2__
  const __m128 halves = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
  const __m128 pairs = _mm_hadd_ps(halves, halves);
  return _mm_cvtss_f32(_mm_add_ss(pairs, _mm_movehdup_ps(pairs)));
#else
  return ((v[0] + v[4]) + (v[1] + v[5])) + ((v[2] + v[6]) + (v[3] + v[7]));
#endif
}

inline float largest(Floats v) {
#ifdef __AVX2__
  const __m128 halves = _mm_max_ps(_mm256_extractf128_ps((__m256)v, 1), _mm256_castps256_ps128((__m256)v));
  const __m128 pairs = _mm_max_ps(_mm_movehl_ps(halves, halves), halves);
  return _mm_cvtss_f32(_mm_max_ss(_mm_movehdup_ps(pairs), pairs));
#else
  float result = v[0];
  for (int i = 1; i < kLanes; ++i) result = v[i] > result ? v[i] : result;
  return result;
#endif
}

// Stores the sums of four vectors adjacently.
inline void store_sums(float* to, Floats a, Floats b, Floats c, Floats d) {
#ifdef __AVX2__
  const __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps((__m256)a, (__m256)b), _mm256_hadd_ps((__m256)c, (__m256)d));
  _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1)));
#else
  to[0] = sum(a), to[1] = sum(b), to[2] = sum(c), to[3] = sum(d);
#endif
}

// Transposes eight rows of eight, from_stride floats apart, to eight rows, to_stride floats apart, stored in order.
inline void transpose8(const float* from, int64_t from_stride, float* to, int64_t to_stride) {
#ifdef __AVX2__
  __m256 pairs[8], quads[8];
  for (int i = 0; i < 8; i += 2) {
    const __m256 even = _mm256_loadu_ps(from + i * from_stride), odd = _mm256_loadu_ps(from + (i + 1) * from_stride);
    pairs[i] = _mm256_unpacklo_ps(even, odd);
    pairs[i + 1] = _mm256_unpackhi_ps(even, odd);
  }
  for (int i = 0; i < 8; i += 4) {
    quads[i] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0x44);
    quads[i + 1] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0xee);
    quads[i + 2] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0x44);
    quads[i + 3] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i)
    _mm256_storeu_ps(to + i * to_stride, _mm256_permute2f128_ps(quads[i], quads[i + 4], 0x20));
  for (int i = 0; i < 4; ++i)
    _mm256_storeu_ps(to + (i + 4) * to_stride, _mm256_permute2f128_ps(quads[i], quads[i + 4], 0x31));
#else
  for (int j = 0; j < 8; ++j)
    for (int i = 0; i < 8; ++i) to[j * to_stride + i] = from[i * from_stride + j];
#endif
}

// As many lanes as an instruction has, for element-wise operations.
#ifdef __AVX512F__
typedef float Widest __attribute__((vector_size(64)));
inline Widest max(Widest a, Widest b) { return (Widest)_mm512_max_ps((__m512)a, (__m512)b); }
inline float largest(Widest v) { return _mm512_reduce_max_ps((__m512)v); }
inline float sum(Widest v) { return _mm512_reduce_add_ps((__m512)v); }
#else
typedef Floats Widest;
#endif
constexpr int kWidest = sizeof(Widest) / sizeof(float);
inline Widest splat_widest(float value) { return Widest{} + value; }

// Computes exp(x) with a relative error below 3e-7; 0 below -87, exp(88) above 88. Cody-Waite reduction, degree-6
// polynomial (Cephes).
template <typename Vector>
inline Vector exp(Vector x) {
  typedef int32_t Integers __attribute__((vector_size(sizeof(Vector))));
  const Vector none = {};
  const Vector above = max(x, none - 87.0f), most = none + 88.0f;
  const Vector clipped = above < most ? above : most;
  const Vector scaled = clipped * 1.44269504088896341f;
  const Vector magic = none + 12582912.0f;  // 1.5 * 2^23: adding it rounds to the nearest integer
  const Vector whole = (scaled + magic) - magic;
  const Vector r = (clipped - whole * 0.693359375f) - whole * -2.12194440e-4f;
  Vector p = none + 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const Integers exponent = (__builtin_convertvector(whole, Integers) + 127) << 23;
  const Vector result = p * load_as<Vector>(&exponent);
  return x < none - 87.0f ? none : result;
}

}  // namespace pagemill
