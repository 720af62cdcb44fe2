// SPDX-License-Identifier: Apache-2.0
#pragma once

// An engine has three dtypes: that of plain weights, which each model brings
// (DecoderWeights::dtype), that of the values between ops, and that of the KV cache.

#include <paceline/dtype.h>

#include "model/weights/model_impl.h"

namespace paceline {

// The dtype of the values between ops. On the CPU it is float32. On a GPU it is the dtype in which
// both models multiply; throws Unsupported where these differ. `draft` may be null.
[[nodiscard]] DType activation_dtype(const Model& target, const Model* draft);

// The dtype of the KV of both models.
[[nodiscard]] DType kv_dtype(const Model& target);

}  // namespace paceline
