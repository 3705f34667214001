// All decoder layers in one call. A small model's decode step is a few milliseconds, and each call from Python costs
// microseconds around work that takes hardly more. The same operations in the same order as one by one, hence the same
// bits; what is between them lies in `scratch`.
#include <algorithm>

#include "operations.h"

using namespace pagemill;

namespace {

constexpr int64_t kMlpRows = 128;  // tokens taken through the MLP at a time: what it widens them to stays in the caches

// Query or key heads in place; rows of `heads` are `stride` floats apart.
void normalize_heads(float* heads, int64_t tokens, int64_t stride, int64_t count, int64_t head_dim, const float* weight,
                     float eps, int32_t num_threads) {
  if (weight) pagemill_rms_norm(heads, tokens, stride, count, head_dim, weight, eps, heads, stride, 0, num_threads);
}

// hidden: [tokens][hidden], gains this layer's contribution.
void decoder_layer(const LayerWeights& w, const AttentionArgs& plan, float* hidden, int64_t tokens, const float* cos,
                   const float* sin, uint8_t* cache, int32_t cache_type, const int64_t* slots, float* scratch) {
  const int32_t threads = plan.num_threads;
  const int64_t size = w.qkv->in_features, width = w.qkv->out_features, attended_size = w.output->in_features;
  const int64_t intermediate = w.down->in_features;

  float* normed = scratch;
  float* heads = normed + tokens * size;
  float* attended = heads + tokens * width;
  pagemill_rms_norm(hidden, tokens, size, 1, size, w.attention_norm, w.eps, normed, size, 0, threads);
  pagemill_linear(w.qkv, normed, tokens, size, w.qkv_bias, heads, width, 0, threads);
  normalize_heads(heads, tokens, width, w.num_heads, w.head_dim, w.query_norm, w.eps, threads);
  normalize_heads(heads + w.num_heads * w.head_dim, tokens, width, w.num_kv_heads, w.head_dim, w.key_norm, w.eps,
                  threads);
  pagemill_rope_and_store(heads, tokens, w.num_heads, w.num_kv_heads, w.head_dim, cos, sin, cache, cache_type, slots,
                          plan.block_size, threads);
  AttentionArgs attention = plan;
  attention.query = heads;
  attention.query_stride = width;
  attention.cache = cache;
  attention.cache_type = cache_type;
  attention.out = attended;
  attention.num_heads = w.num_heads;
  attention.scale = w.scale;
  pagemill_paged_attention(&attention);
  pagemill_linear(w.output, attended, tokens, attended_size, w.output_bias, hidden, size, 1, threads);

  float* gate_up = normed + tokens * size;
  float* activated = gate_up + std::min(tokens, kMlpRows) * 2 * intermediate;
  const int64_t blocks = (tokens + kMlpRows - 1) / kMlpRows;
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t count = tokens * (block + 1) / blocks - tokens * block / blocks;
    pagemill_rms_norm(hidden, count, size, 1, size, w.mlp_norm, w.eps, normed, size, 0, threads);
    pagemill_linear(w.gate_up, normed, count, size, w.gate_up_bias, gate_up, 2 * intermediate, 0, threads);
    pagemill_silu_and_mul(gate_up, count, intermediate, activated, 0, threads);
    pagemill_linear(w.down, activated, count, intermediate, w.down_bias, hidden, size, 1, threads);
    hidden += count * size;
  }
}

}  // namespace

// plans: what layers with the same window share. caches: of each layer, with slots as in pagemill_rope_and_store.
// scratch: for each token `hidden` floats, then the most that a layer needs of (qkv outputs + output inputs) for each
// token and (gate_up outputs + down inputs) for each of up to kMlpRows.
extern "C" void pagemill_decoder_layers(int64_t num_layers, const LayerWeights* const* layers,
                                        const AttentionArgs* const* plans, uint8_t* const* caches, float* hidden,
                                        int64_t tokens, const float* cos, const float* sin, int32_t cache_type,
                                        const int64_t* slots, float* scratch) {
  for (int64_t layer = 0; layer < num_layers; ++layer) {
    decoder_layer(*layers[layer], *plans[layer], hidden, tokens, cos, sin, caches[layer], cache_type, slots, scratch);
  }
}
