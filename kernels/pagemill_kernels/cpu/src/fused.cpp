// The small operations around attention, each in one pass over its rows: normalisation, and rotary embedding with the
// write of keys and values into the paged cache.
#include <cmath>

#include "abi.h"
#include "kv_store.h"
#include "operations.h"
#include "vec.h"

using namespace pagemill;

namespace {

template <typename Element>
void normalize(const float* x, const float* weight, int64_t size, float eps, Element* out) {
  Floats squares = zero();
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) squares += load(x + i) * load(x + i);
  float total = sum(squares);
  for (; i < size; ++i) total += x[i] * x[i];
  const float scale = 1.0f / std::sqrt(total / static_cast<float>(size) + eps);
  for (i = 0; i + kLanes <= size; i += kLanes) store(out + i, load(x + i) * scale * load(weight + i));
  for (; i < size; ++i) store_one(out + i, x[i] * scale * weight[i]);
}

template <typename Element>
void rms_norm(const float* x, int64_t groups, int64_t group_stride, int64_t count, int64_t size, const float* weight,
              float eps, Element* out, int64_t out_group_stride, int32_t num_threads) {
  for_each(threads_for(groups * count * size, num_threads), groups, [&](int64_t g) {
    for (int64_t i = 0; i < count; ++i)
      normalize(x + g * group_stride + i * size, weight, size, eps, out + g * out_group_stride + i * size);
  });
}

// Computes (x - mean) / sqrt(variance + eps) * weight + bias; the mean comes first, so that a large one does not
// cancel.
void center(const float* x, const float* weight, const float* bias, int64_t size, float eps, float* out) {
  Floats totals = zero(), squares = zero();
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) totals += load(x + i);
  float total = sum(totals);
  for (; i < size; ++i) total += x[i];
  const float mean = total / static_cast<float>(size);
  for (i = 0; i + kLanes <= size; i += kLanes) squares += (load(x + i) - mean) * (load(x + i) - mean);
  float square = sum(squares);
  for (; i < size; ++i) square += (x[i] - mean) * (x[i] - mean);
  const float scale = 1.0f / std::sqrt(square / static_cast<float>(size) + eps);
  for (i = 0; i + kLanes <= size; i += kLanes) {
    const Floats scaled = (load(x + i) - mean) * scale * load(weight + i);
    store(out + i, bias ? scaled + load(bias + i) : scaled);
  }
  for (; i < size; ++i) out[i] = (x[i] - mean) * scale * weight[i] + (bias ? bias[i] : 0.0f);
}

// Rotates `count` adjacent heads in place by halves (arXiv 2104.09864, as in Hugging Face's Llama).
void rotate(float* heads, int64_t count, int64_t head_dim, const float* cos, const float* sin) {
  const int64_t half = head_dim / 2;
  for (int64_t h = 0; h < count; ++h) {
    float* left = heads + h * head_dim;
    float* right = left + half;
    for (int64_t d = 0; d < half; ++d) {
      const float c = cos[d], s = sin[d], a = left[d], b = right[d];
      left[d] = a * c - b * s;
      right[d] = b * c + a * s;
    }
  }
}

}  // namespace

extern "C" {

// Computes out[r] = x[r] / sqrt(mean(x[r]^2) + eps) * weight, for rows of `size` in `groups` of `count` adjacent rows,
// the groups a stride apart. out: float32 or bfloat16.
void pagemill_rms_norm(const float* x, int64_t groups, int64_t group_stride, int64_t count, int64_t size,
                       const float* weight, float eps, void* out, int64_t out_group_stride, int32_t bfloat16,
                       int32_t num_threads) {
  if (bfloat16)
    rms_norm(x, groups, group_stride, count, size, weight, eps, static_cast<uint16_t*>(out), out_group_stride,
             num_threads);
  else
    rms_norm(x, groups, group_stride, count, size, weight, eps, static_cast<float*>(out), out_group_stride,
             num_threads);
}

// Normalises like pagemill_rms_norm, but around the mean, plus bias (null: none).
void pagemill_layer_norm(const float* x, int64_t groups, int64_t group_stride, int64_t count, int64_t size,
                         const float* weight, const float* bias, float eps, float* out, int64_t out_group_stride,
                         int32_t num_threads) {
  for_each(threads_for(groups * count * size, num_threads), groups, [&](int64_t g) {
    for (int64_t i = 0; i < count; ++i)
      center(x + g * group_stride + i * size, weight, bias, size, eps, out + g * out_group_stride + i * size);
  });
}

// Rotates the first num_heads of each token's heads in place. heads: [tokens], a stride apart. cos, sin:
// [tokens][head_dim / 2].
void pagemill_rotate(float* heads, int64_t tokens, int64_t num_heads, int64_t head_dim, int64_t stride,
                     const float* cos, const float* sin, int32_t num_threads) {
  const int64_t half = head_dim / 2;
  for_each(threads_for(tokens * num_heads * head_dim, num_threads), tokens, [&](int64_t t) {
    rotate(heads + t * stride, num_heads, head_dim, cos + t * half, sin + t * half);
  });
}

// Adds x[r] * sigmoid(gates[r]) to out[r]. x, out: [rows][size].
void pagemill_add_gated(const float* x, int64_t rows, int64_t size, const float* gates, float* out,
                        int32_t num_threads) {
  for_each(threads_for(rows * size, num_threads), rows, [&](int64_t r) {
    const float gate = 1.0f / (1.0f + std::exp(-gates[r]));
    for (int64_t i = r * size; i < (r + 1) * size; ++i) out[i] += x[i] * gate;
  });
}

// Multiplies x by the sigmoid of gates in place. x: [tokens][num_heads][head_dim]. gates: [tokens], gate_stride apart:
// one for each value, or with by_head one for each head.
void pagemill_gate_heads(float* x, int64_t tokens, int64_t num_heads, int64_t head_dim, const float* gates,
                         int64_t gate_stride, int32_t by_head, int32_t num_threads) {
  for_each(threads_for(tokens * num_heads * head_dim, num_threads), tokens, [&](int64_t t) {
    const float* own = gates + t * gate_stride;
    for (int64_t h = 0; h < num_heads; ++h) {
      float* out = x + (t * num_heads + h) * head_dim;
      const float* from = by_head ? own + h : own + h * head_dim;
      int64_t d = 0;
      for (; d + kLanes <= head_dim; d += kLanes)
        store(out + d, load(out + d) * (1.0f / (1.0f + exp(by_head ? splat(-*from) : -load(from + d)))));
      for (; d < head_dim; ++d) out[d] *= 1.0f / (1.0f + std::exp(-from[by_head ? 0 : d]));
    }
  });
}

// Rotates queries and keys in place and writes keys and values to the slot of each token; slot < 0: none. heads:
// [tokens][num_heads + 2 * num_kv_heads][head_dim], tokens a stride apart. cos, sin: [tokens][head_dim / 2]; null: no
// rotation. cache: kv_store.h, blocks block_stride bytes apart.
void pagemill_rope_and_store(float* heads, int64_t tokens, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                             int64_t stride, const float* cos, const float* sin, uint8_t* cache, int32_t cache_type,
                             const int64_t* slots, int64_t block_size, int64_t block_stride, int32_t num_threads) {
  const int64_t head_size = head_bytes(cache_type, block_size, head_dim);
  const int64_t half = head_dim / 2, width = num_heads + 2 * num_kv_heads;
  for_each(threads_for(tokens * width * head_dim, num_threads), tokens, [&](int64_t t) {
    float* row = heads + t * stride;
    if (cos) rotate(row, num_heads + num_kv_heads, head_dim, cos + t * half, sin + t * half);
    if (slots[t] < 0) return;
    const int64_t block = slots[t] / block_size, offset = slots[t] % block_size;
    for (int64_t h = 0; h < 2 * num_kv_heads; ++h)
      write_token(cache_type, row + (num_heads + h) * head_dim, block_size, head_dim, offset,
                  cache + block * block_stride + h * head_size);
  });
}

}  // extern "C"
