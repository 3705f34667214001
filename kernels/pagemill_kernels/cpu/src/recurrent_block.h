// The blocks of a layer that keep a state, up to their last product: products, a short convolution, and a recurrence with
// a gated norm, or a convolution between two gates. recurrent.cpp has the operations; layer.cpp calls this.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "operations.h"
#include "vec.h"

namespace pagemill {

// Floats that a block needs for each token.
inline int64_t recurrent_scratch(const RecurrentWeights& w) {
  const auto outputs = [](const PackedWeight* each) { return each ? each->out_features : 0; };
  const int64_t behind = outputs(w.steps_down) + outputs(w.steps_up) + outputs(w.gates_down) + outputs(w.gates_up);
  return outputs(w.inputs) + outputs(w.rates) + w.channels + w.num_values * w.value_dim + behind;
}

// `Layer` has adapt, reduce, threads and size of layer.cpp's.
template <typename Layer>
struct RecurrentBlock {
  const Layer& layer;
  const RecurrentWeights& w;
  const StateCache& cache;
  const StateRows& step;
  const int64_t tokens;

  // Returns what the block's last product reads, in scratch. x: [tokens][layer.size].
  float* inner(const float* x, float* scratch) const {
    const int64_t width = w.inputs->out_features;
    float* rates = scratch + tokens * width;
    float* mixed = rates + (w.rates ? tokens * w.rates->out_features : 0);
    float* out = mixed + tokens * w.channels;
    product(0, w.inputs, w.inputs_bias, x, scratch);
    for (int64_t t = 0; w.scales && t < tokens; ++t)
      for (int64_t i = 0; i < width; ++i) scratch[t * width + i] *= w.scales[i];
    if (!w.num_values) multiply(scratch + w.mixed_at, width, scratch + w.steps_at, width, w.channels);
    convolve(scratch + w.mixed_at, width, mixed);
    if (!w.num_values) {
      multiply(mixed, w.channels, scratch + w.gates_at, width, w.channels);
      return mixed;
    }
    if (w.rates) product(1, w.rates, w.rates_bias, x, rates);
    const float *steps = w.rates ? rates + w.num_values : scratch + w.steps_at, *gates = scratch + w.gates_at;
    if (w.steps_up) {
      float* behind = out + tokens * w.num_values * w.value_dim;
      steps = twice(2, w.steps_down, w.steps_down_bias, w.steps_up, w.steps_up_bias, x, behind);
      behind += tokens * (w.steps_down->out_features + w.steps_up->out_features);
      gates = twice(4, w.gates_down, w.gates_down_bias, w.gates_up, w.gates_up_bias, x, behind);
    }
    recur(steps, gates, width, rates, mixed, out);
    if (w.norm_parts) normalize_of_ranks(scratch + w.gates_at, width, out);
    return out;
  }

  // Number of the last product among the block's.
  int64_t output_number() const { return w.steps_up ? 6 : w.rates ? 2 : 1; }

 private:
  // Computes the product of all tokens with one of the block's matrices. number: as adapters count these.
  void product(int64_t number, const PackedWeight* weight, const float* bias, const float* x, float* out) const {
    const int64_t in = weight->in_features, width = weight->out_features;
    pagemill_linear(weight, x, tokens, in, bias, out, width, 0, layer.threads);
    layer.adapt(number, x, in, tokens, 0, out, width);
  }

  // Returns the product with two matrices, the first of which has the number.
  const float* twice(int64_t number, const PackedWeight* down, const float* down_bias, const PackedWeight* up,
                     const float* up_bias, const float* x, float* scratch) const {
    float* out = scratch + tokens * down->out_features;
    product(number, down, down_bias, x, scratch);
    product(number + 1, up, up_bias, scratch, out);
    return out;
  }

  void multiply(float* x, int64_t stride, const float* by, int64_t by_stride, int64_t size) const {
    for (int64_t t = 0; t < tokens; ++t)
      for (int64_t i = 0; i < size; ++i) x[t * stride + i] *= by[t * by_stride + i];
  }

  void convolve(const float* x, int64_t stride, float* out) const {
    ConvolutionArgs a{};
    static_cast<StateRows&>(a) = step;
    a.slot_stride = cache.window_stride;
    a.x_stride = stride;
    a.x = x;
    a.taps = w.taps;
    a.bias = w.tap_bias;
    a.windows = cache.windows;
    a.inputs = cache.inputs;
    a.out = out;
    a.channels = w.channels;
    a.width = w.width;
    a.input_stride = cache.input_stride;
    a.activated = w.num_values > 0;
    pagemill_causal_convolution(&a);
  }

  void recur(const float* steps, const float* gates, int64_t width, const float* rates, const float* mixed,
             float* out) const {
    RecurrenceArgs a{};
    static_cast<StateRows&>(a) = step;
    a.slot_stride = cache.state_stride;
    a.x_stride = w.channels;
    a.queries = mixed + w.queries_at;
    a.keys = mixed + w.keys_at;
    a.values = mixed + w.values_at;
    a.steps = steps;
    a.rates = w.rates ? rates : nullptr;
    a.gates = w.norm_parts ? nullptr : gates;
    a.decays = w.decays;
    a.biases = w.biases;
    a.skips = w.skips;
    a.norm = w.norm_parts ? nullptr : w.gate_norm;
    a.states = cache.states;
    a.log = cache.log;
    a.out = out;
    a.rate_stride = w.rates ? w.rates->out_features : 0;
    a.step_stride = w.steps_up ? w.steps_up->out_features : w.rates ? a.rate_stride : width;
    a.gate_stride = w.gates_up ? w.gates_up->out_features : width;
    a.log_stride = cache.log_stride;
    a.log_values = w.log_values;
    a.num_keys = w.num_keys;
    a.num_values = w.num_values;
    a.key_dim = w.key_dim;
    a.value_dim = w.value_dim;
    a.decay_values = w.steps_up ? w.key_dim : 1;
    a.norm_size = w.norm_size;
    a.norm_stride = w.norm_stride;
    a.eps = w.eps;
    a.least_step = w.least_step;
    a.most_step = w.most_step;
    a.rate_scale = w.rate_scale;
    a.gates_first = w.gates_first;
    a.sigmoid_gates = w.gates_up != nullptr;
    pagemill_recurrence(&a);
  }

  // Gates and normalises outputs of parts that have heads on other ranks.
  void normalize_of_ranks(const float* gates, int64_t stride, float* out) const {
    const int64_t size = w.num_values * w.value_dim;
    const auto part_of = [&](int64_t head) { return (w.first_head + head) * w.norm_parts / w.whole_heads; };
    const auto multiply_by_gates = [&](int64_t t) {
      for (int64_t i = 0; i < size; ++i) {
        const float gate = gates[t * stride + i];
        out[t * size + i] *= gate / (1.0f + std::exp(-gate));
      }
    };
    std::vector<float> squares(tokens * w.norm_parts);
    for (int64_t t = 0; t < tokens; ++t) {
      if (w.gates_first) multiply_by_gates(t);
      for (int64_t i = 0; i < size; ++i)
        squares[t * w.norm_parts + part_of(i / w.value_dim)] += out[t * size + i] * out[t * size + i];
    }
    layer.reduce(squares.data(), tokens * w.norm_parts, kStateNorm);
    const float share = static_cast<float>(w.norm_parts) / static_cast<float>(w.whole_heads * w.value_dim);
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t i = 0; i < size; ++i) {
        const float scale = 1.0f / std::sqrt(squares[t * w.norm_parts + part_of(i / w.value_dim)] * share + w.eps);
        out[t * size + i] *= scale * w.gate_norm[i];
      }
      if (!w.gates_first) multiply_by_gates(t);
    }
  }
};

}  // namespace pagemill
