// SPDX-License-Identifier: Apache-2.0
#include "runner/dtypes.h"

#include "base/check.h"

namespace paceline {

DType activation_dtype(const Model& target, const Model* draft) {
  if (target.device == Device::kCpu) return DType::kFloat32;
  const DType dtype = target.weights.dtype;
  if (draft != nullptr && draft->weights.dtype != dtype) {
    throw Unsupported(concat("the target's weights are ", dtype_name(dtype),
                             " and the drafter's are ", dtype_name(draft->weights.dtype),
                             "; on a GPU both must have the same dtype: set dtype for both"));
  }
  return dtype;
}

DType kv_dtype(const Model& target) { return target.weights.dtype; }

}  // namespace paceline
