// A mixture of experts: rows are sorted by the expert they are sent to, and each expert with rows multiplies them as
// linear.cpp does, so that its weights are read once for all of them. A token's results are added in the order of the
// experts, whatever else is in the batch.
#include <omp.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "abi.h"
#include "operations.h"
#include "vec.h"

using namespace pagemill;

namespace {

constexpr int64_t kRows = 192;                  // an expert's rows taken at a time: those for which linear.cpp reads a weight once
constexpr int64_t kParallelElements = 1 << 15;  // below this a second thread costs more than it brings

int threads_for(int64_t elements, int32_t num_threads) { return elements < kParallelElements ? 1 : num_threads; }

// gate * sigmoid(1.702 gate) * (up + 1), the gate at most `limit`, up between -limit and limit.
template <typename Vector>
Vector clamped(Vector gate, Vector up, float limit) {
  const Vector none = {};
  const Vector g = gate < none + limit ? gate : none + limit;
  const Vector least = max(up, none - limit), u = least < none + limit ? least : none + limit;
  return g / (1.0f + exp(g * -1.702f)) * (u + 1.0f);
}

void clamped_gate_and_mul(const float* gate_up, int64_t rows, int64_t size, float limit, float* out,
                          int32_t num_threads) {
#pragma omp parallel for schedule(static) num_threads(threads_for(rows* size, num_threads))
  for (int64_t r = 0; r < rows; ++r) {
    const float* gate = gate_up + r * 2 * size;
    for (int64_t i = 0; i < size; i += kLanes) {
      const int64_t count = std::min<int64_t>(kLanes, size - i);
      float values[2][kLanes] = {};
      std::copy_n(gate + i, count, values[0]);
      std::copy_n(gate + size + i, count, values[1]);
      store(values[0], clamped(load(values[0]), load(values[1]), limit));
      std::copy_n(values[0], count, out + r * size + i);
    }
  }
}

// Which rows each expert gets: `slots` of [tokens][top_k] sorted by expert, those of expert e from starts[e] on.
struct Sorted {
  std::vector<int64_t> starts, slots;

  Sorted(const int64_t* chosen, int64_t count, int64_t num_experts) : starts(num_experts + 1), slots(count) {
    for (int64_t i = 0; i < count; ++i) ++starts[chosen[i] + 1];
    for (int64_t e = 0; e < num_experts; ++e) starts[e + 1] += starts[e];
    std::vector<int64_t> next(starts.begin(), starts.end() - 1);
    for (int64_t i = 0; i < count; ++i) slots[next[chosen[i]]++] = i;
  }
  int64_t most() const {
    int64_t most = 0;
    for (size_t e = 0; e + 1 < starts.size(); ++e) most = std::max(most, starts[e + 1] - starts[e]);
    return most;
  }
};

}  // namespace

// out[t] += sum over j of weights[t][j] * down(gate(up(x[t]))) by expert chosen[t][j]; no expert twice for a token.
// chosen, weights: [tokens][top_k]. out: [tokens][outputs of down].
extern "C" void pagemill_experts(const PackedWeight* const* ups, const float* const* up_biases,
                                 const PackedWeight* const* downs, const float* const* down_biases, int64_t num_experts,
                                 const float* x, int64_t tokens, int64_t x_stride, const int64_t* chosen,
                                 const float* weights, int64_t top_k, int32_t gate, float limit, float* out,
                                 int32_t num_threads) {
  const int64_t size = ups[0]->in_features, inner = downs[0]->in_features, width = downs[0]->out_features;
  const Sorted sorted(chosen, tokens * top_k, num_experts);
  const int64_t most = std::min(kRows, sorted.most());
  const std::unique_ptr<float[]> scratch(new float[most * (size + 3 * inner + width)]);
  float* rows = scratch.get();
  float* gate_up = rows + most * size;
  float* activated = gate_up + most * 2 * inner;
  float* result = activated + most * inner;
  for (int64_t e = 0; e < num_experts; ++e)
    for (int64_t start = sorted.starts[e]; start < sorted.starts[e + 1]; start += kRows) {
      const int64_t* slots = sorted.slots.data() + start;
      const int64_t count = std::min(kRows, sorted.starts[e + 1] - start);
      for (int64_t r = 0; r < count; ++r) std::copy_n(x + slots[r] / top_k * x_stride, size, rows + r * size);
      pagemill_linear(ups[e], rows, count, size, up_biases[e], gate_up, 2 * inner, 0, num_threads);
      if (gate == kGateSilu)
        pagemill_silu_and_mul(gate_up, count, inner, activated, 0, num_threads);
      else
        clamped_gate_and_mul(gate_up, count, inner, limit, activated, num_threads);
      pagemill_linear(downs[e], activated, count, inner, down_biases[e], result, width, 0, num_threads);
#pragma omp parallel for schedule(static) num_threads(threads_for(count* width, num_threads))
      for (int64_t r = 0; r < count; ++r) {
        float* to = out + slots[r] / top_k * width;
        const float weight = weights[slots[r]];
        for (int64_t i = 0; i < width; ++i) to[i] += weight * result[r * width + i];
      }
    }
}
