// SPDX-License-Identifier: Apache-2.0
#pragma once

// Which drafts of a window are kept, and what is left of the target's law where they end: the one
// specification of `standard` and `block` acceptance. The number type is a parameter, so that the
// ops run on double what the tests enumerate with exact fractions.
//
// p is the target's law of a token, q the law that its draft was drawn from; a certain draft has
// q = 1. The drafts of a window are kept up to the first that is not, and the next token is then
// drawn from max(share p - q, 0) over its sum.
//
// standard (Leviathan et al., "Fast inference from transformers via speculative decoding", 2023):
// a draft is kept with chance min(p / q, 1), share is 1.
//
// block (Sun et al., "Block verification accelerates speculative decoding", 2024): the share of the
// first i drafts is P_i = min(P_(i-1) p_i / q_i, 1), P_0 = 1. Each i is tried, with chance
// S_i / (S_i + 1 - P_i), where S_i is the sum of max(P_i p - q, 0) over the tokens that may follow;
// for the last, after which nothing was drafted, with chance P_i. The longest that succeeds is
// kept. What makes it exact is, from the last draft back, that at least i drafts are kept with
// chance P_i, whatever follows them. "The last" may therefore be told by what was drafted up to it:
// a drafter may stop early. As sum q = 1 = sum p, S_i is P_i less the sum of min(P_i p, q), to
// which only tokens that could be drafted contribute.

#include <cstdint>

#include <paceline/config.h>

#include "base/host_device.h"

namespace paceline {

// a * b rounded by itself: no compiler may fuse it with what is subtracted from it.
template <class Number>
[[nodiscard]] PACELINE_HOST_DEVICE inline Number rounded_product(const Number& a, const Number& b) {
#ifdef __CUDA_ARCH__
  return __dmul_rn(a, b);
#else
  return a * b;
#endif
}

// The chance of a draft to be kept by `standard`. None where the target rules it out, also where q
// has been rounded to nothing.
template <class Number>
[[nodiscard]] PACELINE_HOST_DEVICE inline Number acceptance_probability(const Number& p,
                                                                        const Number& q) {
  if (!(Number(0) < p)) return Number(0);
  return p < q ? p / q : Number(1);
}

// P_i of P_(i-1).
template <class Number>
[[nodiscard]] PACELINE_HOST_DEVICE inline Number next_share(const Number& share, const Number& p,
                                                            const Number& q) {
  const Number scaled = rounded_product(share, p);
  if (!(Number(0) < scaled)) return Number(0);
  return scaled < q ? scaled / q : Number(1);
}

// The chance of a block with share P_i that is not the last. `overlap`: the sum of min(P_i p, q).
template <class Number>
[[nodiscard]] PACELINE_HOST_DEVICE inline Number block_acceptance_probability(
    const Number& share, const Number& overlap) {
  // Of a full share it is 1, even where nothing is left; rounding must not decide that.
  if (!(share < Number(1))) return Number(1);
  const Number left = share - overlap;
  if (!(Number(0) < left)) return Number(0);
  return left / (left + (Number(1) - share));
}

// What is left for a token, to be divided by the sum of it over all tokens.
template <class Number>
[[nodiscard]] PACELINE_HOST_DEVICE inline Number residual(const Number& share, const Number& p,
                                                          const Number& q) {
  const Number left = rounded_product(share, p) - q;
  return Number(0) < left ? left : Number(0);
}

// Drafts kept, and the share with which the token after them is drawn.
template <class Number>
struct AcceptedDrafts {
  int32_t count;
  Number share;
};

// The verdict on drafts [0, num_drafts). `window` has p(i) and q(i) of draft i under the laws of
// its place, and overlap(i, share), the sum of min(share p, q) over all tokens at draft i's place.
// `succeeds(i, chance)` tries draft i, or the block that ends with it; tries are independent.
template <class Number, class Window, class Succeeds>
[[nodiscard]] PACELINE_HOST_DEVICE inline AcceptedDrafts<Number> accept_drafts(
    AcceptMethod method, int32_t num_drafts, const Window& window, const Succeeds& succeeds) {
  AcceptedDrafts<Number> accepted = {0, Number(1)};
  if (method == AcceptMethod::kStandard) {
    while (accepted.count < num_drafts &&
           succeeds(accepted.count, acceptance_probability<Number>(window.p(accepted.count),
                                                                   window.q(accepted.count)))) {
      ++accepted.count;
    }
    return accepted;
  }
  Number share = Number(1);
  for (int32_t i = 0; i < num_drafts; ++i) {
    share = next_share<Number>(share, window.p(i), window.q(i));
    if (!(Number(0) < share)) break;  // and so are the shares of all that follow
    const bool is_last = i + 1 == num_drafts;
    const Number probability =
        is_last ? share : block_acceptance_probability<Number>(share, window.overlap(i + 1, share));
    if (succeeds(i, probability)) accepted = {i + 1, share};
  }
  return accepted;
}

}  // namespace paceline
