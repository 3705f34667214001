// Matmuls in integers: activations are rounded as well, so that many quantized values are multiplied at once.
#pragma once
#include "abi.h"

namespace pagemill {

// Whether the processor has the instructions; otherwise kDots4 must not be packed.
bool has_dots();

// Computes pagemill_linear for kDots4 and kDots8.
void linear_dots(const PackedWeight& w, const float* x, int64_t rows, int64_t x_stride, const float* bias, float* out,
                 int64_t out_stride, bool accumulate, int32_t num_threads);

}  // namespace pagemill
