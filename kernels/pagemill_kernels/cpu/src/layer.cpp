// All decoder layers in one call. A small model's decode step takes a few milliseconds, and each call from Python costs
// microseconds, about as much as the work of some calls. The operations and their order are those of single calls, so
// the results are bitwise equal; intermediate values are in `scratch`.
#include <algorithm>
#include <cmath>
#include <vector>

#include "operations.h"
#include "recurrent_block.h"

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

// Numbers of a block's linear layers, from its first one on. With experts: the router, then two of each expert and of the
// shared one, that one's gate, and the products around the experts; those of experts beside an MLP follow its own.
enum Linear : int64_t { kQkv = 0, kHeadGates = 1, kUp = 0, kDown = 1, kRouter = 0, kExperts = 1 };

// How a block's results are added to hidden.
struct Ending {
  const NormWeights& norm;
  float scale;
  RankSum sum;
};

struct Layer {
  const LayerWeights& w;
  const AttentionArgs* plan;  // null without attention
  const StepHooks* hooks;
  const int32_t index;
  const int64_t block_stride;
  const float* query_factors;
  const StateCache* state;  // null without a block that keeps a state
  const StateRows* rows;
  const int64_t size;
  const int32_t threads;

  // Null without attention.
  const PackedWeight* first_product() const {
    if (!w.latent) return w.qkv;
    return w.latent->query_down ? w.latent->query_down : w.latent->query;
  }
  // Values of each token that attention reads: other than `size` where they are given.
  int64_t read() const { return first_product()->in_features; }
  bool reduces() const { return hooks && hooks->reduce; }
  const StepAdapters* adapters() const { return hooks ? hooks->adapters : nullptr; }
  int64_t first_linear() const { return hooks ? hooks->first_linear[index] : 0; }
  void reduce(float* partial, int64_t count, RankSum sum) const {
    hooks->reduce(hooks->context, partial, count, index, sum);
  }

  // Adds what adapters make of x, rows first_row.. of the step, to the product in `out`. linear: from the layer's first.
  void adapt(int64_t linear, const float* x, int64_t in, int64_t rows, int64_t first_row, float* out,
             int64_t out_stride) const {
    const AdaptedRows of{nullptr, 1, first_row};
    if (const StepAdapters* found = adapters())
      pagemill_add_adapters(found, first_linear() + linear, x, rows, in, in, &of, out, out_stride, threads);
  }

  // Normalises query or key heads in place, each alone or all of a token as one row.
  void normalize_heads(const NormWeights& norm, float* heads, int64_t tokens, int64_t stride, int64_t count,
                       RankSum sum) const {
    if (!norm.weight) return;
    if (norm.whole_size)
      normalize_of_ranks(norm, heads, tokens, stride, sum);
    else if (norm.heads)
      normalize_by_own(norm, heads, tokens, stride);
    else
      normalize(norm, heads, tokens, stride, count / norm.size, heads, stride, threads);
  }

  // The same with weights of each head's own.
  void normalize_by_own(const NormWeights& norm, float* heads, int64_t tokens, int64_t stride) const {
    NormWeights own = norm;
    for (int32_t head = 0; head < norm.heads; ++head, own.weight += norm.size)
      normalize(own, heads + head * norm.size, tokens, stride, 1, heads + head * norm.size, stride, threads);
  }

  // The same for RMS norms over all heads, of which other ranks have further ones.
  void normalize_of_ranks(const NormWeights& norm, float* heads, int64_t tokens, int64_t stride, RankSum sum) const {
    std::vector<float> squares(tokens);
    for (int64_t t = 0; norm.adds && t < tokens; ++t) {
      double total = 0;
      for (int64_t i = 0; i < norm.size; ++i) total += double{heads[t * stride + i]} * heads[t * stride + i];
      squares[t] = static_cast<float>(total);
    }
    reduce(squares.data(), tokens, sum);
    for (int64_t t = 0; t < tokens; ++t) {
      const float scale = 1.0f / std::sqrt(squares[t] / static_cast<float>(norm.whole_size) + norm.eps);
      for (int64_t i = 0; i < norm.size; ++i) heads[t * stride + i] *= scale * norm.weight[i];
    }
  }

  void clip(float* rows, int64_t tokens, int64_t stride, int64_t count) const {
    for (int64_t t = 0; t < tokens; ++t)
      for (int64_t i = 0; i < count; ++i)
        rows[t * stride + i] = std::clamp(rows[t * stride + i], -w.clip, w.clip);
  }

  Ending of_attention() const { return {w.attention_output_norm, w.residual_scale, kAttention}; }
  Ending of_mlp() const { return {w.mlp_output_norm, w.mlp_scale, kMlp}; }

  // Whether a result needs neither a norm nor a scale.
  bool is_plain(const Ending& ending) const { return !ending.norm.weight && ending.scale == 1.0f; }
  // Whether it is added to hidden directly.
  bool adds(const Ending& ending) const { return is_plain(ending) && !reduces(); }
  // Whether ranks add the results of both blocks at once.
  bool joins() const { return reduces() && w.parallel && is_plain(of_attention()) && is_plain(of_mlp()); }

  void add(const Ending& ending, float* result, int64_t tokens, float* hidden) const {
    if (ending.norm.weight) normalize(ending.norm, result, tokens, size, 1, result, size, threads);
    for (int64_t i = 0; i < tokens * size; ++i) hidden[i] += ending.scale * result[i];
  }

  // Adds the product of some rows, first_row.. of the step, to hidden; with `joined` to `result`, for a later sum.
  void product(int64_t linear, const PackedWeight* weight, const float* bias, const Ending& ending, const float* x,
               int64_t tokens, int64_t first_row, bool joined, float* result, float* hidden) const {
    float* out = adds(ending) ? hidden : result;
    const bool accumulates = out == hidden || (joined && ending.sum == kMlp);
    pagemill_linear(weight, x, tokens, weight->in_features, bias, out, size, accumulates, threads);
    adapt(linear, x, weight->in_features, tokens, first_row, out, size);
    if (joined) return;
    if (reduces()) reduce(result, tokens * size, ending.sum);
    if (out != hidden) add(ending, result, tokens, hidden);
  }

  void attend(const float* x, int64_t tokens, const float* cos, const float* sin, uint8_t* cache, int32_t cache_type,
              const int64_t* slots, float* heads, float* result, float* hidden) const {
    const int64_t queries = w.num_heads * w.head_dim, keys = w.num_kv_heads * w.head_dim, first = w.first_attention;
    const int64_t stored = queries + (w.key_source == kKeysOfAnother ? 0 : 2 * keys);
    const int64_t width = std::max(stored, w.qkv->out_features);  // gates are behind what is stored
    float* attended = heads + tokens * width;
    pagemill_linear(w.qkv, x, tokens, read(), w.qkv_bias, heads, width, 0, threads);
    adapt(first + kQkv, x, read(), tokens, 0, heads, width);
    for (int64_t t = 0; w.key_source == kValuesAreKeys && t < tokens; ++t)
      std::copy_n(heads + t * width + queries, keys, heads + t * width + queries + keys);
    if (w.norms_behind && cos) {
      pagemill_rotate(heads, tokens, w.num_heads + w.num_kv_heads, w.head_dim, width, cos, sin, threads);
      cos = sin = nullptr;
    }
    normalize_heads(w.query_norm, heads, tokens, width, queries, kQueryNorm);
    normalize_heads(w.key_norm, heads + queries, tokens, width, keys, kKeyNorm);
    normalize_heads(w.value_norm, heads + queries + keys, tokens, width, keys, kKeyNorm);
    if (w.clip > 0) clip(heads, tokens, width, stored);
    if (w.key_source != kKeysOfAnother)
      pagemill_rope_and_store(heads, tokens, w.num_heads, w.num_kv_heads, w.head_dim, width, cos, sin, cache, cache_type,
                              slots, plan->block_size, block_stride, threads);
    else if (cos)
      pagemill_rotate(heads, tokens, w.num_heads, w.head_dim, width, cos, sin, threads);
    grow(heads, tokens, width, queries);
    AttentionArgs attention = attention_over(cache, cache_type, heads, width, attended);
    attention.num_kv_heads = w.num_kv_heads;
    pagemill_paged_attention(&attention);
    if (w.gated_heads)
      pagemill_gate_heads(attended, tokens, w.num_heads, w.head_dim, heads + stored, width, 0, threads);
    if (w.head_gates) gate_heads(x, tokens, heads, attended);
    attention_product(first + kHeadGates + (w.head_gates != nullptr), attended, tokens, result, hidden);
  }

  // Multiplies queries by the step's factors, in layers whose queries grow.
  void grow(float* queries, int64_t tokens, int64_t stride, int64_t count) const {
    for (int64_t t = 0; w.grows && t < tokens; ++t)
      for (int64_t i = 0; i < count; ++i) queries[t * stride + i] *= query_factors[t];
  }

  AttentionArgs attention_over(const uint8_t* cache, int32_t cache_type, const float* queries, int64_t stride,
                               float* out) const {
    AttentionArgs attention = *plan;
    attention.query = queries;
    attention.query_stride = stride;
    attention.cache = cache;
    attention.cache_type = cache_type;
    attention.out = out;
    attention.sinks = w.sinks;
    attention.alibi_slopes = w.alibi_slopes;
    attention.soft_cap = w.soft_cap;
    attention.num_heads = w.num_heads;
    attention.head_dim = w.head_dim;
    attention.block_stride = block_stride;
    attention.scale = w.scale;
    attention.ahead = w.ahead;
    return attention;
  }

  // Multiplies attended values by gates of their heads. gates: room for them, where queries are no longer needed.
  void gate_heads(const float* x, int64_t tokens, float* gates, float* attended) const {
    pagemill_linear(w.head_gates, x, tokens, read(), w.head_gates_bias, gates, w.num_heads, 0, threads);
    adapt(w.first_attention + kHeadGates, x, read(), tokens, 0, gates, w.num_heads);
    pagemill_gate_heads(attended, tokens, w.num_heads, w.head_dim, gates, w.num_heads, 1, threads);
  }

  // Computes the block that keeps a state.
  void recur(const float* x, int64_t tokens, float* scratch, float* result, float* hidden) const {
    const RecurrentWeights& r = *w.recurrent;
    const RecurrentBlock<Layer> block{*this, r, *state, *rows, tokens};
    const float* inner = block.inner(x, scratch);
    const Ending ending{r.output_norm, r.residual_scale, kState};
    product(block.output_number(), r.output, r.output_bias, ending, inner, tokens, 0, false, result, hidden);
  }

  void attention_product(int64_t linear, const float* attended, int64_t tokens, float* result, float* hidden) const {
    product(linear, w.output, w.output_bias, of_attention(), attended, tokens, 0, joins(), result, hidden);
  }

  // Attends over latents, which replace keys and values. scratch: queries, latents and shared keys, compressed queries,
  // and the attended values.
  void attend_latents(const float* x, int64_t tokens, const float* cos, const float* sin, uint8_t* cache,
                      int32_t cache_type, const int64_t* slots, float* scratch, float* result, float* hidden) const {
    const LatentWeights& l = *w.latent;
    const int64_t head = l.key_dim + l.shared_size, width = w.num_heads * head, row = l.latent_size + l.shared_size;
    const int64_t compressed = l.query_down ? l.query_down->out_features : 0;
    const int64_t first = w.first_attention + (compressed ? 1 : 0);
    float* queries = scratch;
    float* down = queries + tokens * width;
    float* narrow = down + tokens * row;
    float* attended = narrow + tokens * compressed;
    if (compressed) {
      pagemill_linear(l.query_down, x, tokens, read(), l.query_down_bias, narrow, compressed, 0, threads);
      adapt(w.first_attention, x, read(), tokens, 0, narrow, compressed);
      if (l.query_norm.weight) normalize(l.query_norm, narrow, tokens, compressed, 1, narrow, compressed, threads);
    }
    const float* queried = compressed ? narrow : x;
    pagemill_linear(l.query, queried, tokens, l.query->in_features, l.query_bias, queries, width, 0, threads);
    adapt(first, queried, l.query->in_features, tokens, 0, queries, width);
    pagemill_linear(l.down, x, tokens, read(), l.down_bias, down, row, 0, threads);
    adapt(first + 1, x, read(), tokens, 0, down, row);
    normalize(l.latent_norm, down, tokens, row, 1, down, row, threads);
    if (cos) {
      pagemill_rotate(down + l.latent_size, tokens, 1, l.shared_size, row, cos, sin, threads);
      for (int64_t h = 0; h < w.num_heads; ++h)
        pagemill_rotate(queries + h * head + l.key_dim, tokens, 1, l.shared_size, width, cos, sin, threads);
    }
    pagemill_store_latents(down, tokens, row, cache, cache_type, slots, plan->block_size, block_stride, threads);
    grow(queries, tokens, width, width);
    AttentionArgs attention = attention_over(cache, cache_type, queries, width, attended);
    attention.num_kv_heads = 1;
    attention.value_size = l.latent_size;
    pagemill_latent_attention(&l, &attention, adapters(), first_linear() + first + 2);
    attention_product(first + 3, attended, tokens, result, hidden);
  }

  // Returns the activated inner values of the MLP, behind those of its first product in scratch.
  const float* inner_values(const float* x, int64_t tokens, int64_t first_row, float* scratch) const {
    const int64_t inner = w.down->in_features, width = w.up->out_features;
    float* activated = scratch + std::min(tokens, kMlpRows) * width;
    pagemill_linear(w.up, x, tokens, size, w.up_bias, scratch, width, 0, threads);
    adapt(w.first_mlp + kUp, x, size, tokens, first_row, scratch, width);
    pagemill_activate(scratch, tokens, inner, w.activation, w.gated, w.limit, activated, threads);
    return activated;
  }

  void mlp(const float* x, int64_t tokens, int64_t first_row, float* scratch, float* result, float* hidden) const {
    const float* activated = inner_values(x, tokens, first_row, scratch);
    product(w.first_mlp + kDown, w.down, w.down_bias, of_mlp(), activated, tokens, first_row, joins(), result, hidden);
  }

  void experts(const float* x, int64_t tokens, float* scratch, float* result, float* hidden) const {
    float* out = adds(of_mlp()) ? hidden : result;
    if (out != hidden && !joins()) std::fill_n(out, tokens * size, 0.0f);
    add_experts(x, tokens, w.first_mlp, scratch, out);
    if (joins()) return;
    if (reduces()) reduce(result, tokens * size, kMlp);
    if (out != hidden) add(of_mlp(), result, tokens, hidden);
  }

  // Adds the outputs of the chosen experts, and of a shared one, to `out`. number: of the router.
  void add_experts(const float* x, int64_t tokens, int64_t number, float* scratch, float* out) const {
    const ExpertsWeights& e = *w.experts;
    std::vector<float> logits(tokens * e.num_experts), weights(tokens * e.top_k), own;
    std::vector<int64_t> chosen(tokens * e.top_k);
    const auto normed = [&](const NormWeights& norm) {
      if (!norm.weight) return x;
      own.resize(tokens * size);
      normalize(norm, x, tokens, size, 1, own.data(), size, threads);
      return static_cast<const float*>(own.data());
    };
    const float* routed = normed(e.router_norm);
    pagemill_linear(e.router, routed, tokens, size, e.router_bias, logits.data(), e.num_experts, 0, threads);
    adapt(number + kRouter, routed, size, tokens, 0, logits.data(), e.num_experts);
    if (e.gating)
      pagemill_route_by_groups(logits.data(), tokens, e.num_experts, e.top_k, e.renormalized, e.gating, chosen.data(),
                               weights.data());
    else
      pagemill_route(logits.data(), tokens, e.num_experts, e.top_k, e.renormalized, chosen.data(), weights.data());
    for (size_t i = 0; e.scales && i < weights.size(); ++i) weights[i] *= e.scales[chosen[i]];
    const float* computed = normed(e.norm);
    const auto add_chosen = [&](const float* in, int64_t in_stride, float* sum) {
      pagemill_experts(e.ups, e.up_biases, e.downs, e.down_biases, e.num_experts, in, tokens, in_stride, chosen.data(),
                       weights.data(), e.top_k, e.activation, e.gated, e.limit, adapters(),
                       first_linear() + number + kExperts, sum, threads);
    };
    if (e.before) {
      const int64_t narrow = e.before->out_features, summed = e.behind->in_features;
      const int64_t around = number + kExperts + 2 * e.num_experts + of_shared();
      std::vector<float> read(tokens * narrow), sum(tokens * summed);
      pagemill_linear(e.before, computed, tokens, size, e.before_bias, read.data(), narrow, 0, threads);
      adapt(around, computed, size, tokens, 0, read.data(), narrow);
      add_chosen(read.data(), narrow, sum.data());
      pagemill_linear(e.behind, sum.data(), tokens, summed, e.behind_bias, out, size, 1, threads);
      adapt(around + 1, sum.data(), summed, tokens, 0, out, size);
    } else {
      add_chosen(computed, size, out);
    }
    if (w.shared) shared_expert(computed, tokens, number + kExperts + 2 * e.num_experts, scratch, out);
  }

  // Adds norm(MLP + experts) of the same hidden states to these. other: [tokens][size], for the experts' outputs.
  void experts_beside_mlp(int64_t tokens, float* normed, float* scratch, float* result, float* other,
                          float* hidden) const {
    const int64_t inner = w.down->in_features, blocks = (tokens + kMlpRows - 1) / kMlpRows;
    for (int64_t block = 0, start = 0; block < blocks; ++block) {
      const int64_t end = tokens * (block + 1) / blocks, rows = end - start;
      const float* x = input(w.mlp_norm, hidden + start * size, rows, normed);
      const float* activated = inner_values(x, rows, start, scratch);
      pagemill_linear(w.down, activated, rows, inner, w.down_bias, result + start * size, size, 0, threads);
      adapt(w.first_mlp + kDown, activated, inner, rows, start, result + start * size, size);
      start = end;
    }
    std::fill_n(other, tokens * size, 0.0f);
    add_experts(hidden, tokens, w.first_mlp + 2, scratch, other);
    if (reduces()) reduce(result, tokens * size, kMlp);
    if (reduces()) reduce(other, tokens * size, kExpertsBeside);
    const auto behind = [&](const NormWeights& norm, float* rows) {
      if (norm.weight) normalize(norm, rows, tokens, size, 1, rows, size, threads);
    };
    behind(w.mlp_output_norm, result);
    behind(w.experts_output_norm, other);
    for (int64_t i = 0; i < tokens * size; ++i) result[i] += other[i];
    add({w.sum_norm, w.mlp_scale, kMlp}, result, tokens, hidden);
  }

  // Adds the outputs of the expert that computes all tokens to `out`. number: of its first linear layer.
  void shared_expert(const float* x, int64_t tokens, int64_t number, float* scratch, float* out) const {
    const SharedExpert& e = *w.shared;
    const int64_t inner = e.down->in_features, width = e.up->out_features;
    const int64_t blocks = (tokens + kMlpRows - 1) / kMlpRows, most = std::min(tokens, kMlpRows);
    float* activated = scratch + most * width;
    float* result = activated + most * inner;
    float gates[kMlpRows];
    for (int64_t block = 0, start = 0; block < blocks; ++block) {
      const int64_t end = tokens * (block + 1) / blocks, rows = end - start;
      const float* in = x + start * size;
      float* own = e.gate ? result : out + start * size;
      pagemill_linear(e.up, in, rows, size, e.up_bias, scratch, width, 0, threads);
      adapt(number, in, size, rows, start, scratch, width);
      pagemill_activate(scratch, rows, inner, e.activation, e.gated, e.limit, activated, threads);
      pagemill_linear(e.down, activated, rows, inner, e.down_bias, own, size, !e.gate, threads);
      adapt(number + 1, activated, inner, rows, start, own, size);
      if (e.gate) {
        pagemill_linear(e.gate, in, rows, size, e.gate_bias, gates, 1, 0, threads);
        adapt(number + 2, in, size, rows, start, gates, 1);
        pagemill_add_gated(result, rows, size, gates, out + start * size, threads);
      }
      start = end;
    }
  }

  // Adds the outputs of the MLP whose inner values are multiplied by the layer's inputs to hidden.
  void input_mlp(int64_t tokens, float* scratch, float* result, float* hidden) const {
    const InputMLP& e = *w.input_mlp;
    const int64_t inner = e.down->in_features, number = behind_mlp();
    float* activated = scratch + tokens * inner;
    pagemill_linear(e.up, hidden, tokens, size, e.up_bias, scratch, inner, 0, threads);
    adapt(number, hidden, size, tokens, 0, scratch, inner);
    pagemill_activate(scratch, tokens, inner, e.activation, 0, 0.0f, activated, threads);
    for (int64_t t = 0; t < tokens; ++t)
      for (int64_t i = 0; i < inner; ++i)
        activated[t * inner + i] *= hooks->layer_inputs[t * hooks->input_stride + e.first_input + i];
    pagemill_linear(e.down, activated, tokens, inner, e.down_bias, result, size, 0, threads);
    adapt(number + 1, activated, inner, tokens, 0, result, size);
    if (reduces()) reduce(result, tokens * size, kInputMlp);
    add({e.output_norm, w.mlp_scale, kInputMlp}, result, tokens, hidden);
  }

  // Returns the number of the first linear layer behind MLP and experts.
  int64_t behind_mlp() const {
    const int64_t first = w.first_mlp + (w.up ? 2 : 0);
    if (!w.experts) return first;
    return first + kExperts + 2 * w.experts->num_experts + of_shared() + (w.experts->before ? 2 : 0);
  }

  // Returns the number of the shared expert's linear layers.
  int64_t of_shared() const { return w.shared ? 2 + (w.shared->gate != nullptr) : 0; }

  // Returns the input of a block: normalised into `out`, or hidden itself.
  const float* input(const NormWeights& norm, const float* hidden, int64_t tokens, float* out) const {
    if (!norm.weight) return hidden;
    normalize(norm, hidden, tokens, size, 1, out, size, threads);
    return out;
  }

  // Adds this layer's contribution to hidden, [tokens][size]. given: what attention reads, [tokens][its inputs]; null:
  // hidden.
  void run(const float* given, float* hidden, int64_t tokens, const float* cos, const float* sin, uint8_t* cache, int32_t cache_type,
           const int64_t* slots, float* scratch) const {
    float* normed = scratch;
    float* result = normed + tokens * size;
    float* own = result + tokens * size;  // input of a parallel layer's MLP, or of a block beside attention
    float* inner = own + tokens * size;
    const float* attention_input = given;
    if (first_product() && !given) attention_input = input(w.attention_norm, hidden, tokens, normed);
    if (w.recurrent) recur(input(w.recurrent->norm, hidden, tokens, own), tokens, inner, result, hidden);
    const float* shared = nullptr;
    if (w.parallel) shared = w.mlp_norm.weight ? input(w.mlp_norm, hidden, tokens, own) : attention_input;
    if (w.latent)
      attend_latents(attention_input, tokens, cos, sin, cache, cache_type, slots, inner, result, hidden);
    else if (w.qkv)
      attend(attention_input, tokens, cos, sin, cache, cache_type, slots, inner, result, hidden);
    settle(w.attention_residual_norm, tokens, hidden);
    if (w.experts && w.up)
      experts_beside_mlp(tokens, normed, inner, result, own, hidden);
    else if (w.experts)
      experts(shared ? shared : input(w.mlp_norm, hidden, tokens, normed), tokens, inner, result, hidden);
    else if (w.up)
      mlp_by_rows(shared, tokens, normed, inner, result, hidden);
    settle(w.mlp_residual_norm, tokens, hidden);
    if (w.input_mlp) input_mlp(tokens, inner, result, hidden);
    for (int64_t i = 0; w.factor != 1.0f && i < tokens * size; ++i) hidden[i] *= w.factor;
    if (!joins()) return;
    reduce(result, tokens * size, kBlocks);
    add(of_mlp(), result, tokens, hidden);
  }

  // Normalises the residual stream behind a block, if there is such a norm.
  void settle(const NormWeights& norm, int64_t tokens, float* hidden) const {
    if (norm.weight) normalize(norm, hidden, tokens, size, 1, hidden, size, threads);
  }

  // shared: the input of a parallel layer's MLP, or null.
  void mlp_by_rows(const float* shared, int64_t tokens, float* normed, float* inner, float* result,
                   float* hidden) const {
    const int64_t blocks = (tokens + kMlpRows - 1) / kMlpRows;
    for (int64_t block = 0, start = 0; block < blocks; ++block) {
      const int64_t end = tokens * (block + 1) / blocks;
      float* rows = hidden + start * size;
      const float* x = shared ? shared + start * size : input(w.mlp_norm, rows, end - start, normed);
      mlp(x, end - start, start, inner, joins() ? result + start * size : result, rows);
      start = end;
    }
  }
};

}  // namespace

// plans: shared by layers with the same window, null without attention. cosines, sines: of each layer; null: no rotation.
// caches, block_strides: of each layer, with its slots as in pagemill_rope_and_store. size: of hidden. first_input: what
// the attention of the first layer reads, normalised, as many values as its first product takes for each token; null:
// hidden. query_factors: [tokens], of layers whose queries grow. states: of each layer, null for those without one; rows:
// the step's, for them. hooks: adapters, and sums over ranks; null: neither. scratch: for each token three times `size`
// floats, then the most that a layer needs of (qkv outputs + output inputs; with latents: query outputs, down outputs,
// those of query_down, output inputs) or recurrent_scratch for each token, twice the inputs of an InputMLP for each token,
// and (up outputs + down inputs) for each of up to kMlpRows, for a shared expert with a gate `size` more.
extern "C" void pagemill_decoder_layers(int64_t num_layers, const LayerWeights* const* layers,
                                        const AttentionArgs* const* plans, uint8_t* const* caches,
                                        const int64_t* block_strides, const float* first_input, float* hidden,
                                        int64_t tokens, int64_t size, const float* query_factors,
                                        const float* const* cosines, const float* const* sines, int32_t cache_type,
                                        const int64_t* const* slots, const StateCache* const* states,
                                        const StateRows* rows, const StepHooks* hooks, float* scratch,
                                        int32_t num_threads) {
  for (int64_t i = 0; i < num_layers; ++i) {
    const Layer layer{*layers[i],    plans[i],  hooks, static_cast<int32_t>(i), block_strides[i],
                      query_factors, states[i], rows,  size,                    num_threads};
    layer.run(i ? nullptr : first_input, hidden, tokens, cosines[i], sines[i], caches[i], cache_type, slots[i], scratch);
  }
}
