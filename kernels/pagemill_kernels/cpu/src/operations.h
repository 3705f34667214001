// The operations that Python calls one by one and layer.cpp calls in sequence. Each is defined in the file of its
// subject.
#pragma once
#include "abi.h"
#include "threads.h"

namespace pagemill {

constexpr int64_t kParallelElements = 1 << 15;  // below this a second thread costs more than it saves

// Returns the number of threads for one pass over `elements`.
inline int threads_for(int64_t elements, int32_t num_threads) {
  return elements < kParallelElements ? 1 : num_threads;
}

}  // namespace pagemill

extern "C" {

void pagemill_linear(const pagemill::PackedWeight* weight, const float* x, int64_t rows, int64_t x_stride,
                     const float* bias, float* out, int64_t out_stride, int32_t accumulate, int32_t num_threads);
void pagemill_rms_norm(const float* x, int64_t groups, int64_t group_stride, int64_t count, int64_t size,
                       const float* weight, float eps, void* out, int64_t out_group_stride, int32_t bfloat16,
                       int32_t num_threads);
void pagemill_layer_norm(const float* x, int64_t groups, int64_t group_stride, int64_t count, int64_t size,
                         const float* weight, const float* bias, float eps, float* out, int64_t out_group_stride,
                         int32_t num_threads);
void pagemill_rope_and_store(float* heads, int64_t tokens, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                             int64_t stride, const float* cos, const float* sin, uint8_t* cache, int32_t cache_type,
                             const int64_t* slots, int64_t block_size, int64_t block_stride, int32_t num_threads);
void pagemill_rotate(float* heads, int64_t tokens, int64_t num_heads, int64_t head_dim, int64_t stride,
                     const float* cos, const float* sin, int32_t num_threads);
void pagemill_add_gated(const float* x, int64_t rows, int64_t size, const float* gates, float* out,
                        int32_t num_threads);
void pagemill_gate_heads(float* x, int64_t tokens, int64_t num_heads, int64_t head_dim, const float* gates,
                         int64_t gate_stride, int32_t by_head, int32_t num_threads);
void pagemill_causal_convolution(const pagemill::ConvolutionArgs* arguments);
void pagemill_recurrence(const pagemill::RecurrenceArgs* arguments);
void pagemill_activate(const float* x, int64_t rows, int64_t size, int32_t activation, int32_t gated, float limit,
                       float* out, int32_t num_threads);
void pagemill_route(const float* logits, int64_t tokens, int64_t num_experts, int64_t top_k, int32_t renormalized,
                    int64_t* chosen, float* weights);
void pagemill_route_by_groups(const float* logits, int64_t tokens, int64_t num_experts, int64_t top_k,
                              int32_t renormalized, const pagemill::GroupChoice* gating, int64_t* chosen, float* weights);
void pagemill_experts(const pagemill::PackedWeight* const* ups, const float* const* up_biases,
                      const pagemill::PackedWeight* const* downs, const float* const* down_biases, int64_t num_experts,
                      const float* x, int64_t tokens, int64_t x_stride, const int64_t* chosen, const float* weights,
                      int64_t top_k, int32_t activation, int32_t gated, float limit,
                      const pagemill::StepAdapters* adapters, int64_t first_linear, float* out, int32_t num_threads);
void pagemill_add_adapters(const pagemill::StepAdapters* adapters, int64_t number, const float* x, int64_t count,
                           int64_t in, int64_t x_stride, const pagemill::AdaptedRows* of, float* out,
                           int64_t out_stride, int32_t num_threads);
void pagemill_sample(const pagemill::SamplingArgs* arguments);
void pagemill_report(const pagemill::SamplingArgs* arguments);
void pagemill_sample_part(const pagemill::PartArgs* arguments);
void pagemill_paged_attention(const pagemill::AttentionArgs* arguments);
void pagemill_latent_attention(const pagemill::LatentWeights* weights, const pagemill::AttentionArgs* arguments,
                               const pagemill::StepAdapters* adapters, int64_t number);
void pagemill_store_latents(const float* rows, int64_t tokens, int64_t size, uint8_t* cache, int32_t cache_type,
                            const int64_t* slots, int64_t block_size, int64_t block_stride, int32_t num_threads);

}  // extern "C"
