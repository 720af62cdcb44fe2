// SPDX-License-Identifier: Apache-2.0
#pragma once

// Which drafts of a window are accepted, and the residual distribution after the last accepted one:
// the single specification of `standard` and `block` acceptance. The number type is a parameter:
// the ops use double, and the tests enumerate with exact fractions.
//
// p is the probability that the target gives a token, q the probability with which its draft was
// sampled; a draft without a distribution has q = 1. The drafts of a window are accepted up to the
// first rejection. The next token is then sampled from max(share p - q, 0), normalised.
//
// standard (Leviathan et al., "Fast inference from transformers via speculative decoding", 2023): a
// draft is accepted with probability min(p / q, 1); the share is 1.
//
// block (Sun et al., "Block verification accelerates speculative decoding", 2024): the share of the
// first i drafts is P_i = min(P_(i-1) p_i / q_i, 1), P_0 = 1. Each block of the first i drafts is
// tried independently, with probability S_i / (S_i + 1 - P_i), where S_i is the sum of max(P_i p -
// q, 0) over the tokens that may follow; the last block, after which nothing was drafted, with
// probability P_i. The longest block that succeeds is accepted. The method is exact because, by
// induction from the last draft, at least i drafts are accepted with probability P_i, whatever
// follows them. Therefore "the last" may depend on the drafts up to it: a drafter may stop early.
// As sum q = 1 = sum p, S_i is P_i minus the sum of min(P_i p, q), to which only tokens that could
// be drafted contribute.

#include <cstdint>

#include <paceline/config.h>

#include "base/host_device.h"

namespace paceline {

// a * b with its own rounding: no compiler may fuse it with a following subtraction.
template <class Number>
[[nodiscard]] PACELINE_HOST_DEVICE inline Number rounded_product(const Number& a, const Number& b) {
#ifdef __CUDA_ARCH__
  return __dmul_rn(a, b);
#else
  return a * b;
#endif
}

// The probability that `standard` accepts a draft. It is 0 if the target's probability is 0, even
// if q has been rounded to 0.
template <class Number>
[[nodiscard]] PACELINE_HOST_DEVICE inline Number acceptance_probability(const Number& p,
                                                                        const Number& q) {
  if (!(Number(0) < p)) return Number(0);
  return p < q ? p / q : Number(1);
}

// P_i, given P_(i-1).
template <class Number>
[[nodiscard]] PACELINE_HOST_DEVICE inline Number next_share(const Number& share, const Number& p,
                                                            const Number& q) {
  const Number scaled = rounded_product(share, p);
  if (!(Number(0) < scaled)) return Number(0);
  return scaled < q ? scaled / q : Number(1);
}

// The probability that `block` accepts a block with share P_i that is not the last. `overlap` is
// the sum of min(P_i p, q).
template <class Number>
[[nodiscard]] PACELINE_HOST_DEVICE inline Number block_acceptance_probability(
    const Number& share, const Number& overlap) {
  // With a share of 1 the probability is 1, even if the residual is empty; rounding must not decide
  // that.
  if (!(share < Number(1))) return Number(1);
  const Number left = share - overlap;
  if (!(Number(0) < left)) return Number(0);
  return left / (left + (Number(1) - share));
}

// The residual of a token, not yet divided by the sum over all tokens.
template <class Number>
[[nodiscard]] PACELINE_HOST_DEVICE inline Number residual(const Number& share, const Number& p,
                                                          const Number& q) {
  const Number left = rounded_product(share, p) - q;
  return Number(0) < left ? left : Number(0);
}

// The number of accepted drafts, and the share of the residual distribution after them.
template <class Number>
struct AcceptedDrafts {
  int32_t count;
  Number share;
};

// The verdict on drafts [0, num_drafts). `window` has p(i) and q(i) of draft i under the
// distributions at its position, and overlap(i, share), the sum of min(share p, q) over all tokens
// at the position of draft i. `succeeds(i, probability)` tries draft i, or the block that ends with
// it; tries are independent.
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
    if (!(Number(0) < share)) break;  // the shares of all later blocks are 0 too
    const bool is_last = i + 1 == num_drafts;
    const Number probability =
        is_last ? share : block_acceptance_probability<Number>(share, window.overlap(i + 1, share));
    if (succeeds(i, probability)) accepted = {i + 1, share};
  }
  return accepted;
}

}  // namespace paceline
