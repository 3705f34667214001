// Products in integers: the activations are rounded as well, so that many codes are multiplied at once.
#pragma once
#include "abi.h"

namespace pagemill {

// Whether there are instructions for it; else kDots4 must not be packed.
bool has_dots();

// As pagemill_linear, for kDots4.
void linear_dots(const PackedWeight& w, const float* x, int64_t rows, int64_t x_stride, const float* bias, float* out,
                 int64_t out_stride, bool accumulate, int32_t num_threads);

}  // namespace pagemill
