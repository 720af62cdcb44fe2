// SPDX-License-Identifier: Apache-2.0
#pragma once

// The activation of a gated MLP, for the op and for the ends of products.

#include "ops/ops.h"

namespace paceline::cuda {

// With an infinite exponential the quotient is 0, the correct limit.
__device__ __forceinline__ float times_sigmoid(float x, float exponent) {
  return __fdividef(x, 1.0f + expf(-exponent));
}

template <Activation kActivation>
__device__ __forceinline__ float gate_up(float gate, float up, float alpha, float limit) {
  if constexpr (kActivation == Activation::kSilu) {
    return times_sigmoid(gate, gate) * up;
  } else if constexpr (kActivation == Activation::kGeluTanh) {
    // (1 + tanh(z)) / 2 = sigmoid(2 z), and nothing cancels for large negative z.
    const float inner = 0.7978845608f * (gate + 0.044715f * gate * gate * gate);
    return times_sigmoid(gate, 2.0f * inner) * up;
  } else if constexpr (kActivation == Activation::kSigmoid) {
    return times_sigmoid(up, gate);
  } else {
    static_assert(kActivation == Activation::kSwigluOai || kActivation == Activation::kClampedSilu);
    // Comparisons keep a NaN, which fminf would replace.
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : up;
    up = up < -limit ? -limit : up;
    if constexpr (kActivation == Activation::kClampedSilu) return times_sigmoid(gate, gate) * up;
    return times_sigmoid(gate, alpha * gate) * (up + 1.0f);
  }
}

// Whether a product may end in the activation. kSigmoid gates attention, which is no product, and
// would only enlarge the kernels of products.
[[nodiscard]] constexpr bool ends_products(Activation activation) {
  return activation != Activation::kSigmoid;
}

// Of activations that end products.
__device__ __forceinline__ float gate_up(Activation activation, float gate, float up, float alpha,
                                         float limit) {
  switch (activation) {
    case Activation::kSilu:
      return gate_up<Activation::kSilu>(gate, up, alpha, limit);
    case Activation::kGeluTanh:
      return gate_up<Activation::kGeluTanh>(gate, up, alpha, limit);
    case Activation::kClampedSilu:
      return gate_up<Activation::kClampedSilu>(gate, up, alpha, limit);
    case Activation::kSigmoid:
    case Activation::kSwigluOai:
      break;
  }
  return gate_up<Activation::kSwigluOai>(gate, up, alpha, limit);
}

}  // namespace paceline::cuda
