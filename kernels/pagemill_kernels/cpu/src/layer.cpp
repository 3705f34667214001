// All decoder layers in one call. A small model's decode step takes a few milliseconds, and each call from Python costs
// microseconds, about as much as the work of some calls. The operations and their order are those of single calls, so
// the results are bitwise equal; intermediate values are in `scratch`.
#include <algorithm>
#include <vector>

#include "operations.h"

using namespace pagemill;

namespace {

// Tokens taken through the MLP at a time, so that its wide intermediate values stay in the caches.
constexpr int64_t kMlpRows = 128;

// Normalises each row by itself: `groups` of `count` adjacent rows, the groups a stride apart.
void normalize(const NormWeights& norm, const float* x, int64_t groups, int64_t stride, int64_t count, float* out,
               int64_t out_stride, int32_t threads) {
  if (norm.centered)
    pagemill_layer_norm(x, groups, stride, count, norm.size, norm.weight, norm.bias, norm.eps, out, out_stride, threads);
  else
    pagemill_rms_norm(x, groups, stride, count, norm.size, norm.weight, norm.eps, out, out_stride, 0, threads);
}

// Normalises query or key heads in place, each alone or all of a token as one row.
void normalize_heads(const NormWeights& norm, float* heads, int64_t tokens, int64_t stride, int64_t size,
                     int32_t threads) {
  if (norm.weight) normalize(norm, heads, tokens, stride, size / norm.size, heads, stride, threads);
}

struct Layer {
  const LayerWeights& w;
  const AttentionArgs& plan;
  const int64_t size = w.qkv->in_features;
  const int32_t threads = plan.num_threads;

  // Whether a result is added to hidden directly: it has neither a norm nor a scale.
  bool adds(const NormWeights& norm) const { return !norm.weight && w.residual_scale == 1.0f; }

  void add(const NormWeights& norm, float* result, int64_t tokens, float* hidden) const {
    if (norm.weight) normalize(norm, result, tokens, size, 1, result, size, threads);
    for (int64_t i = 0; i < tokens * size; ++i) hidden[i] += w.residual_scale * result[i];
  }

  void product(const PackedWeight* weight, const float* bias, const NormWeights& norm, const float* x, int64_t tokens,
               float* result, float* hidden) const {
    float* out = adds(norm) ? hidden : result;
    pagemill_linear(weight, x, tokens, weight->in_features, bias, out, size, out == hidden, threads);
    if (out != hidden) add(norm, result, tokens, hidden);
  }

  void attend(const float* x, int64_t tokens, const float* cos, const float* sin, uint8_t* cache, int32_t cache_type,
              const int64_t* slots, float* heads, float* result, float* hidden) const {
    const int64_t width = w.qkv->out_features, queries = w.num_heads * w.head_dim, keys = w.num_kv_heads * w.head_dim;
    float* attended = heads + tokens * width;
    pagemill_linear(w.qkv, x, tokens, size, w.qkv_bias, heads, width, 0, threads);
    normalize_heads(w.query_norm, heads, tokens, width, queries, threads);
    normalize_heads(w.key_norm, heads + queries, tokens, width, keys, threads);
    pagemill_rope_and_store(heads, tokens, w.num_heads, w.num_kv_heads, w.head_dim, cos, sin, cache, cache_type, slots,
                            plan.block_size, threads);
    AttentionArgs attention = plan;
    attention.query = heads;
    attention.query_stride = width;
    attention.cache = cache;
    attention.cache_type = cache_type;
    attention.out = attended;
    attention.sinks = w.sinks;
    attention.num_heads = w.num_heads;
    attention.scale = w.scale;
    pagemill_paged_attention(&attention);
    product(w.output, w.output_bias, w.attention_output_norm, attended, tokens, result, hidden);
  }

  void mlp(const float* x, int64_t tokens, float* scratch, float* result, float* hidden) const {
    const int64_t inner = w.down->in_features, width = w.up->out_features;
    float* activated = scratch + std::min(tokens, kMlpRows) * width;
    pagemill_linear(w.up, x, tokens, size, w.up_bias, scratch, width, 0, threads);
    pagemill_activate(scratch, tokens, inner, w.activation, w.gated, w.limit, activated, threads);
    product(w.down, w.down_bias, w.mlp_output_norm, activated, tokens, result, hidden);
  }

  void experts(const float* x, int64_t tokens, float* result, float* hidden) const {
    const ExpertsWeights& e = *w.experts;
    std::vector<float> logits(tokens * e.num_experts), weights(tokens * e.top_k);
    std::vector<int64_t> chosen(tokens * e.top_k);
    pagemill_linear(e.router, x, tokens, size, e.router_bias, logits.data(), e.num_experts, 0, threads);
    pagemill_route(logits.data(), tokens, e.num_experts, e.top_k, e.renormalized, chosen.data(), weights.data());
    float* out = adds(w.mlp_output_norm) ? hidden : result;
    if (out != hidden) std::fill_n(out, tokens * size, 0.0f);
    pagemill_experts(e.ups, e.up_biases, e.downs, e.down_biases, e.num_experts, x, tokens, size, chosen.data(),
                     weights.data(), e.top_k, e.activation, e.limit, out, threads);
    if (out != hidden) add(w.mlp_output_norm, result, tokens, hidden);
  }

  // Returns the input of a block: normalised into `out`, or hidden itself.
  const float* input(const NormWeights& norm, const float* hidden, int64_t tokens, float* out) const {
    if (!norm.weight) return hidden;
    normalize(norm, hidden, tokens, size, 1, out, size, threads);
    return out;
  }

  // Adds this layer's contribution to hidden, [tokens][size].
  void run(float* hidden, int64_t tokens, const float* cos, const float* sin, uint8_t* cache, int32_t cache_type,
           const int64_t* slots, float* scratch) const {
    float* normed = scratch;
    float* result = normed + tokens * size;
    float* own = result + tokens * size;  // input of a parallel layer's MLP
    float* inner = own + tokens * size;
    const float* attention_input = input(w.attention_norm, hidden, tokens, normed);
    const float* shared = nullptr;
    if (w.parallel) shared = w.mlp_norm.weight ? input(w.mlp_norm, hidden, tokens, own) : attention_input;
    attend(attention_input, tokens, cos, sin, cache, cache_type, slots, inner, result, hidden);
    if (w.experts) {
      experts(shared ? shared : input(w.mlp_norm, hidden, tokens, normed), tokens, result, hidden);
      return;
    }
    const int64_t blocks = (tokens + kMlpRows - 1) / kMlpRows;
    for (int64_t block = 0, start = 0; block < blocks; ++block) {
      const int64_t end = tokens * (block + 1) / blocks;
      float* rows = hidden + start * size;
      const float* x = shared ? shared + start * size : input(w.mlp_norm, rows, end - start, normed);
      mlp(x, end - start, inner, result, rows);
      start = end;
    }
  }
};

}  // namespace

// plans: shared by layers with the same window. cosines, sines: of each layer; null: no rotation. caches: of each
// layer, with slots as in pagemill_rope_and_store. scratch: for each token three times `hidden` floats, then the most
// that a layer needs of (qkv outputs + output inputs) for each token and (up outputs + down inputs) for each of up to
// kMlpRows.
extern "C" void pagemill_decoder_layers(int64_t num_layers, const LayerWeights* const* layers,
                                        const AttentionArgs* const* plans, uint8_t* const* caches, float* hidden,
                                        int64_t tokens, const float* const* cosines, const float* const* sines,
                                        int32_t cache_type, const int64_t* slots, float* scratch) {
  for (int64_t i = 0; i < num_layers; ++i) {
    const Layer layer{*layers[i], *plans[i]};
    layer.run(hidden, tokens, cosines[i], sines[i], caches[i], cache_type, slots, scratch);
  }
}
