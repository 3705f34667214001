// Activations between an MLP's two matmuls, in one pass over each row: alone, or of a gate that is multiplied by the up
// projection.
#include <algorithm>
#include <type_traits>

#include "abi.h"
#include "operations.h"
#include "vec.h"

using namespace pagemill;

namespace {

template <typename Vector>
Vector positive(Vector x) {
  const Vector none = {};
  return x < none ? none : x;  // keeps NaN
}

// x * (1 + erf(x / sqrt(2))) / 2, which is relu(x) - |x| erfc(|x| / sqrt(2)) / 2: nothing cancels. erfc(z) exp(z^2) for
// 0 <= z <= 12 is t times this polynomial of t = 1 / (1 + 0.3 z), with a relative error below 3e-8 before rounding.
template <typename Vector>
Vector gelu(Vector x) {
  constexpr float kFactors[] = {-0.12925259f, 0.48429887f, -0.50976692f, 0.5449612f, -0.092822401f,
                                0.21418f, 0.14852159f, 0.17069089f, 0.16918936f};
  const Vector size = x < Vector{} ? -x : x;
  const Vector t = 1.0f / (1.0f + size * (0.3f * 0.70710678118654752f));
  Vector p = {};
  for (const float factor : kFactors) p = p * t + factor;
  return positive(x) - size * 0.5f * p * t * exp(x * x * -0.5f);
}

template <int32_t kind, typename Vector>
Vector activated(Vector x) {
  if constexpr (kind == kSilu) return x / (1.0f + exp(-x));
  if constexpr (kind == kGelu) return gelu(x);
  // (1 + tanh(y)) / 2 equals 1 / (1 + exp(-2 y)).
  if constexpr (kind == kGeluTanh) return x / (1.0f + exp((x + x * x * x * 0.044715f) * -1.5957691216057308f));
  if constexpr (kind == kGeluQuick) return x / (1.0f + exp(x * -1.702f));
  if constexpr (kind == kRelu) return positive(x);
  if constexpr (kind == kRelu2) return positive(x) * positive(x);
}

enum Shape { kAlone, kGated, kLimited };

// With kLimited the gate is at most `limit`, and up is clamped to -limit .. limit and increased by 1.
template <int32_t kind, Shape shape, typename Vector>
Vector combined(Vector gate, Vector up, float limit) {
  if constexpr (shape == kAlone) return activated<kind>(gate);
  if constexpr (shape == kGated) return activated<kind>(gate) * up;
  const Vector most = Vector{} + limit;
  const Vector least = max(up, -most);
  return activated<kind>(gate < most ? gate : most) * ((least < most ? least : most) + 1.0f);
}

template <int32_t kind, Shape shape, typename Element>
void activate_row(const Element* gate, int64_t size, float limit, Element* out) {
  const Element* up = shape == kAlone ? gate : gate + size;
  int64_t i = 0;
  if constexpr (std::is_same_v<Element, float>)
    for (; i + kWidest <= size; i += kWidest) {
      const Widest values = combined<kind, shape>(load_as<Widest>(gate + i), load_as<Widest>(up + i), limit);
      std::memcpy(out + i, &values, sizeof values);
    }
  for (; i + kLanes <= size; i += kLanes) store(out + i, combined<kind, shape>(load(gate + i), load(up + i), limit));
  if (i == size) return;
  Element last[2][kLanes] = {};
  std::copy_n(gate + i, size - i, last[0]);
  std::copy_n(up + i, size - i, last[1]);
  store(last[0], combined<kind, shape>(load(last[0]), load(last[1]), limit));
  std::copy_n(last[0], size - i, out + i);
}

template <int32_t kind, Shape shape, typename Element>
void activate(const Element* x, int64_t rows, int64_t size, float limit, Element* out, int32_t num_threads) {
  const int64_t width = shape == kAlone ? size : 2 * size;
  for_each(threads_for(rows * size, num_threads), rows,
           [&](int64_t r) { activate_row<kind, shape>(x + r * width, size, limit, out + r * size); });
}

template <int32_t kind>
void activate_as(const float* x, int64_t rows, int64_t size, bool gated, float limit, float* out, int32_t num_threads) {
  if (!gated)
    activate<kind, kAlone>(x, rows, size, limit, out, num_threads);
  else if (limit == 0.0f)
    activate<kind, kGated>(x, rows, size, limit, out, num_threads);
  else
    activate<kind, kLimited>(x, rows, size, limit, out, num_threads);
}

}  // namespace

extern "C" {

// Computes out[r][i] = activation(x[r][i]), or with a gate activation(x[r][i]) * x[r][size + i]. limit: of the gate; 0:
// none.
void pagemill_activate(const float* x, int64_t rows, int64_t size, int32_t activation, int32_t gated, float limit,
                       float* out, int32_t num_threads) {
  switch (activation) {
    case kSilu: return activate_as<kSilu>(x, rows, size, gated, limit, out, num_threads);
    case kGelu: return activate_as<kGelu>(x, rows, size, gated, limit, out, num_threads);
    case kGeluTanh: return activate_as<kGeluTanh>(x, rows, size, gated, limit, out, num_threads);
    case kGeluQuick: return activate_as<kGeluQuick>(x, rows, size, gated, limit, out, num_threads);
    case kRelu: return activate_as<kRelu>(x, rows, size, gated, limit, out, num_threads);
    case kRelu2: return activate_as<kRelu2>(x, rows, size, gated, limit, out, num_threads);
  }
}

// Computes out[r][i] = silu(x[r][i]) * x[r][size + i], both float32 or both bfloat16.
void pagemill_silu_and_mul(const void* x, int64_t rows, int64_t size, void* out, int32_t bfloat16,
                           int32_t num_threads) {
  if (bfloat16)
    activate<kSilu, kGated>(static_cast<const uint16_t*>(x), rows, size, 0.0f, static_cast<uint16_t*>(out),
                            num_threads);
  else
    activate<kSilu, kGated>(static_cast<const float*>(x), rows, size, 0.0f, static_cast<float*>(out), num_threads);
}

}  // extern "C"
