// A mixture of experts: rows are sorted by expert, and each expert with rows multiplies them as linear.cpp does, so
// that its weights are read once for all of them. A token's results are added in the order of the experts, whatever
// else is in the batch.
#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "abi.h"
#include "operations.h"
#include "vec.h"

using namespace pagemill;

namespace {

// An expert's rows at a time: as many as linear.cpp multiplies while it reads a weight once.
constexpr int64_t kRows = 192;

// The rows of each expert: `slots` of [tokens][top_k] sorted by expert, those of expert e from starts[e] on.
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

typedef std::pair<float, int64_t> Choice;

bool precedes(const Choice& a, const Choice& b) {
  return a.first > b.first || (std::isnan(a.first) && !std::isnan(b.first));
}

// Brings the `count` largest of `order` to its front, the largest first. Among equal values the choice is that of
// torch's topk, which selects and sorts by the same two algorithms; NaN counts as the largest there, too.
void choose(std::vector<Choice>& order, int64_t count) {
  const auto last = order.begin() + count - 1;
  if (count * 64 <= static_cast<int64_t>(order.size())) {
    std::partial_sort(order.begin(), last + 1, order.end(), precedes);
  } else {
    std::nth_element(order.begin(), last, order.end(), precedes);
    std::sort(order.begin(), last, precedes);
  }
}

// Returns the scores of one token's experts.
void score(const float* logits, int64_t num_experts, bool sigmoid, float* scores) {
  if (sigmoid) {
    for (int64_t e = 0; e < num_experts; ++e) scores[e] = 1.0f / (1.0f + std::exp(-logits[e]));
    return;
  }
  const float most = *std::max_element(logits, logits + num_experts);
  float total = 0.0f;
  for (int64_t e = 0; e < num_experts; ++e) total += scores[e] = std::exp(logits[e] - most);
  for (int64_t e = 0; e < num_experts; ++e) scores[e] /= total;
}

// Takes the experts of all but the best groups out of the choice.
void keep_best_groups(const GroupChoice& gating, std::vector<Choice>& order) {
  const int64_t size = order.size() / gating.num_groups;
  std::vector<Choice> groups(gating.num_groups), own(size);
  for (int64_t g = 0; g < gating.num_groups; ++g) {
    std::copy_n(order.begin() + g * size, size, own.begin());
    choose(own, gating.best_of_group);
    float sum = 0.0f;
    for (int64_t i = 0; i < gating.best_of_group; ++i) sum += own[i].first;
    groups[g] = {sum, g};
  }
  choose(groups, gating.top_groups);
  for (int64_t i = gating.top_groups; i < gating.num_groups; ++i)
    for (int64_t e = groups[i].second * size; e < (groups[i].second + 1) * size; ++e)
      order[e].first = -std::numeric_limits<float>::infinity();
}

}  // namespace

// Returns the top_k experts with the largest logits of each token, the largest first, and their weights: the softmax
// over the chosen logits (renormalized) or their shares of the softmax over all. logits: [tokens][num_experts]; chosen,
// weights: [tokens][top_k].
extern "C" void pagemill_route(const float* logits, int64_t tokens, int64_t num_experts, int64_t top_k,
                               int32_t renormalized, int64_t* chosen, float* weights) {
  std::vector<Choice> order(num_experts);
  for (int64_t t = 0; t < tokens; ++t, logits += num_experts, chosen += top_k, weights += top_k) {
    for (int64_t e = 0; e < num_experts; ++e) order[e] = {logits[e], e};
    choose(order, top_k);
    const float most = order[0].first;
    float total = 0.0f;
    for (int64_t e = 0; e < (renormalized ? top_k : num_experts); ++e) total += std::exp(order[e].first - most);
    for (int64_t k = 0; k < top_k; ++k) {
      chosen[k] = order[k].second;
      weights[k] = std::exp(order[k].first - most) / total;
    }
  }
}

// Returns experts and weights like pagemill_route, chosen by groups (arXiv 2405.04434, 2412.19437): weights are scale *
// score, or with `renormalized` shares of the chosen scores' sum.
extern "C" void pagemill_route_by_groups(const float* logits, int64_t tokens, int64_t num_experts, int64_t top_k,
                                         int32_t renormalized, const GroupChoice* gating, int64_t* chosen, float* weights) {
  std::vector<float> scores(num_experts);
  std::vector<Choice> order(num_experts);
  for (int64_t t = 0; t < tokens; ++t, logits += num_experts, chosen += top_k, weights += top_k) {
    score(logits, num_experts, gating->sigmoid, scores.data());
    for (int64_t e = 0; e < num_experts; ++e) order[e] = {scores[e] + (gating->bias ? gating->bias[e] : 0.0f), e};
    if (gating->top_groups < gating->num_groups) keep_best_groups(*gating, order);
    choose(order, top_k);
    float total = 0.0f;
    for (int64_t k = 0; k < top_k; ++k) total += scores[order[k].second];
    for (int64_t k = 0; k < top_k; ++k) {
      chosen[k] = order[k].second;
      weights[k] = scores[chosen[k]] / (renormalized ? total + 1e-20f : 1.0f) * gating->scale;
    }
  }
}

// Adds sum over j of weights[t][j] * down(activation(up(x[t]))), perhaps gated, by expert chosen[t][j] to out[t]; a token has no expert
// twice. chosen, weights: [tokens][top_k]. out: [tokens][outputs of down]. adapters: of the tokens; null: none.
// first_linear: number of the first expert's `up`, which its `down` and those of the others follow.
extern "C" void pagemill_experts(const PackedWeight* const* ups, const float* const* up_biases,
                                 const PackedWeight* const* downs, const float* const* down_biases, int64_t num_experts,
                                 const float* x, int64_t tokens, int64_t x_stride, const int64_t* chosen,
                                 const float* weights, int64_t top_k, int32_t activation, int32_t gated,
                                 float limit,
                                 const StepAdapters* adapters, int64_t first_linear, float* out, int32_t num_threads) {
  const int64_t size = ups[0]->in_features, inner = downs[0]->in_features, width = downs[0]->out_features;
  const int64_t ups_out = ups[0]->out_features;
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
      pagemill_linear(ups[e], rows, count, size, up_biases[e], gate_up, ups_out, 0, num_threads);
      const AdaptedRows of{slots, top_k, 0};
      const int64_t number = first_linear + 2 * e;
      if (adapters)
        pagemill_add_adapters(adapters, number, rows, count, size, size, &of, gate_up, ups_out, num_threads);
      pagemill_activate(gate_up, count, inner, activation, gated, limit, activated, num_threads);
      pagemill_linear(downs[e], activated, count, inner, down_biases[e], result, width, 0, num_threads);
      if (adapters)
        pagemill_add_adapters(adapters, number + 1, activated, count, inner, inner, &of, result, width, num_threads);
      for_each(threads_for(count * width, num_threads), count, [&](int64_t r) {
        float* to = out + slots[r] / top_k * width;
        const float weight = weights[slots[r]];
        for (int64_t i = 0; i < width; ++i) to[i] += weight * result[r * width + i];
      });
    }
}
