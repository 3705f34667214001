// Matmuls of bfloat16 with float32 sums, on processors that multiply bfloat16 in hardware (AVX512_BF16).
#pragma once
#include "abi.h"

namespace pagemill {

// Whether the processor has the instructions; otherwise PackedWeight::bfloat16_rows must be 0, and kPairs must not be
// packed.
bool has_bfloat16();

// Computes pagemill_linear for kDots4, kDots8, kPairs, kFloats8 and kFloats4.
void linear_bfloat16(const PackedWeight& w, const float* x, int64_t rows, int64_t x_stride, const float* bias,
                     float* out, int64_t out_stride, bool accumulate, int32_t num_threads);

}  // namespace pagemill
