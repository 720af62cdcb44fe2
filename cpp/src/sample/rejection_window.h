// SPDX-License-Identifier: Apache-2.0
#pragma once

// The window of drafts of one sequence as reject_drafts reads it: the single specification that the
// CPU loops over and that a CUDA warp runs. A `Team` walks a list of n entries:
//    max(n, value)       the maximum of value(j), floats
//    count(n, value)     the sum of value(j), 64-bit integers
//    sum(n, value)       the sum of value(j), doubles: lane j % 32 adds entries j, j + 32, ... in
//                        order, then lanes 16, 8, 4, 2 and 1 apart are added
//    for_each(n, visit)  calls visit(j)
//    is_leader()         whether this thread writes the values that are common to the team

#include <cmath>
#include <cstdint>

#include "base/host_device.h"
#include "sample/judge.h"
#include "sample/reject.h"
#include "sample/rejection_rules.h"
#include "sample/truncate_rules.h"
#include "wire/batch_shape.h"

namespace paceline {

// A uniform number in (0, 1) that is compared with the probability of a try. Its 33 bits are exact.
[[nodiscard]] PACELINE_HOST_DEVICE inline double accept_uniform(uint64_t seed, int32_t known_len,
                                                                int32_t index) {
  const NoiseKey key{.seed = seed,
                     .stream = NoiseStream::kAccept,
                     .position = static_cast<uint32_t>(known_len + index),
                     .salt = static_cast<uint32_t>(known_len)};
  uint32_t words[4];
  philox_words(key, 0, words);
  return (static_cast<double>(words[0]) + 0.5) * 0x1p-32;
}

// A probability distribution over tokens: given by softmax weights, or certain of one token.
struct TokenDistribution {
  SoftmaxWeights weights;
  double sum;     // sum of the weights; 0: certain of `token`
  int32_t token;  // used if the distribution is certain

  [[nodiscard]] PACELINE_HOST_DEVICE bool is_certain() const { return !(sum > 0.0); }
  // The probability of token `id`, whose logit is `logit`.
  [[nodiscard]] PACELINE_HOST_DEVICE double probability(int32_t id, float logit) const {
    if (is_certain()) return id == token ? 1.0 : 0.0;
    return static_cast<double>(weight_of(weights, comparable(logit))) / sum;
  }
};

template <class Team>
class RejectionWindow {
 public:
  // The window of batch row i, with `num_drafts` drafts.
  PACELINE_HOST_DEVICE RejectionWindow(const RejectDraftsParams& params, const Team& team,
                                       int32_t i, int32_t num_drafts)
      : p_(params), team_(team), num_drafts_(num_drafts) {
    seq_slot_ = p_.inputs.seq_slot[i];
    first_row_ = p_.inputs.logit_indptr[i];
    temperature_ = p_.sequences.temperature[seq_slot_];
  }

  [[nodiscard]] PACELINE_HOST_DEVICE int32_t draft(int32_t index) const {
    return p_.sequences.draft_tokens[int64_t{seq_slot_} * p_.sequences.num_draft_tokens + index];
  }
  [[nodiscard]] PACELINE_HOST_DEVICE int32_t draw(int32_t index) const {
    return p_.target_tokens[first_row_ + index];
  }

  // For accept_drafts.
  [[nodiscard]] PACELINE_HOST_DEVICE double p(int32_t index) const {
    return target_probability(target_distribution(index), index, draft(index));
  }
  [[nodiscard]] PACELINE_HOST_DEVICE double q(int32_t index) const {
    const TokenDistribution distribution = draft_distribution(index);
    if (distribution.is_certain()) return 1.0;
    const int32_t token = draft(index);
    const float logit = team_.max(p_.proposals.per_draft, [&](int32_t j) {
      return proposed_id(index, j) == token ? proposed_logit(index, j) : from_ordered(kNoLogitKey);
    });
    return distribution.probability(token, logit);
  }
  [[nodiscard]] PACELINE_HOST_DEVICE double overlap(int32_t index, double share) const {
    const TokenDistribution target = target_distribution(index);
    const TokenDistribution drafted = draft_distribution(index);
    const auto min_of = [&](int32_t id, double q) {
      const double scaled = rounded_product(share, target_probability(target, index, id));
      return scaled < q ? scaled : q;
    };
    if (drafted.is_certain()) return min_of(drafted.token, 1.0);
    return team_.sum(p_.proposals.per_draft, [&](int32_t j) {
      const int32_t id = proposed_id(index, j);
      return id < 0 ? 0.0 : min_of(id, drafted.probability(id, proposed_logit(index, j)));
    });
  }

  // The number of accepted drafts at temperature 0: those that equal the target's draws.
  [[nodiscard]] PACELINE_HOST_DEVICE int32_t count_equal() const {
    int32_t accepted = 0;
    while (accepted < num_drafts_ && draw(accepted) == draft(accepted)) ++accepted;
    return accepted;
  }

  // Turns the row after the accepted drafts into the residual distribution. Returns false if there
  // is none, and the target's own draw is emitted.
  [[nodiscard]] PACELINE_HOST_DEVICE bool store_residual(
      const AcceptedDrafts<double>& accepted) const {
    const int32_t index = accepted.count;
    if (index == num_drafts_) return false;
    const TokenDistribution target = target_distribution(index);
    if (target.is_certain()) return false;
    float* const logits = p_.logits + int64_t{first_row_ + index} * p_.logits_stride;
    const auto store = [&](int32_t id, double q) {
      if (id < 0 || id >= p_.vocab_limit) return;
      const double p = target.probability(id, logits[id]);
      const double rest = residual(accepted.share, p, q);
      // The logit moves by temperature * (log(p - q / share) - log p).
      const double factor = rest / rounded_product(accepted.share, p);
      logits[id] = rest > 0.0
                       ? static_cast<float>(fma(static_cast<double>(temperature_), log(factor),
                                                static_cast<double>(logits[id])))
                       : from_ordered(kNoLogitKey);
    };
    const TokenDistribution drafted = draft_distribution(index);
    if (drafted.is_certain()) {
      if (team_.is_leader()) store(drafted.token, 1.0);
      return true;
    }
    team_.for_each(p_.proposals.per_draft, [&](int32_t j) {
      const int32_t id = proposed_id(index, j);
      if (id >= 0) store(id, drafted.probability(id, proposed_logit(index, j)));
    });
    return true;
  }

  [[nodiscard]] PACELINE_HOST_DEVICE bool is_greedy() const { return !(temperature_ > 0.0f); }
  [[nodiscard]] PACELINE_HOST_DEVICE double uniform(int32_t index) const {
    return accept_uniform(p_.sequences.seed[seq_slot_], p_.sequences.known_len[seq_slot_], index);
  }

 private:
  [[nodiscard]] PACELINE_HOST_DEVICE int64_t list(int32_t index) const {
    return (int64_t{seq_slot_} * p_.sequences.num_draft_tokens + index) * p_.proposals.per_draft;
  }
  [[nodiscard]] PACELINE_HOST_DEVICE int32_t proposed_id(int32_t index, int32_t j) const {
    return p_.proposals.ids[list(index) + j];
  }
  [[nodiscard]] PACELINE_HOST_DEVICE float proposed_logit(int32_t index, int32_t j) const {
    return p_.proposals.logits[list(index) + j];
  }

  [[nodiscard]] PACELINE_HOST_DEVICE TokenDistribution target_distribution(int32_t index) const {
    const int32_t row = first_row_ + index;
    return {.weights = softmax_weights_of(p_.highest[row], temperature_),
            .sum = static_cast<double>(p_.sums[row]),
            .token = draw(index)};
  }
  [[nodiscard]] PACELINE_HOST_DEVICE double target_probability(
      const TokenDistribution& distribution, int32_t index, int32_t id) const {
    if (id < 0 || id >= p_.vocab_limit) return 0.0;
    return distribution.probability(id,
                                    p_.logits[int64_t{first_row_ + index} * p_.logits_stride + id]);
  }

  // The distribution of draft `index`. Without proposals, or if their highest logit is infinite,
  // the draft is certain.
  [[nodiscard]] PACELINE_HOST_DEVICE TokenDistribution draft_distribution(int32_t index) const {
    TokenDistribution distribution = {.weights = {}, .sum = 0.0, .token = draft(index)};
    if (p_.proposals.ids == nullptr) return distribution;
    const int32_t n = p_.proposals.per_draft;
    const float highest =
        team_.max(n, [&](int32_t j) { return comparable(proposed_logit(index, j)); });
    const float lowest = from_ordered(kNoLogitKey);
    if (highest == lowest || highest == -lowest) return distribution;
    distribution.weights = softmax_weights_of(highest, temperature_);
    distribution.sum = static_cast<double>(team_.count(n, [&](int32_t j) {
      return weight_of(distribution.weights, comparable(proposed_logit(index, j)));
    }));
    return distribution;
  }

  const RejectDraftsParams& p_;
  const Team& team_;
  int32_t num_drafts_;
  int32_t seq_slot_;
  int32_t first_row_;
  float temperature_;
};

// Verifies the drafts of batch row i. No other row reads what it writes.
template <class Team>
PACELINE_HOST_DEVICE inline void reject_sequence(const RejectDraftsParams& p, int32_t i,
                                                 const Team& team) {
  const int32_t seq_slot = p.inputs.seq_slot[i];
  const bool is_decoding = p.inputs.kind[i] == static_cast<int32_t>(RowKind::kDecode);
  const bool is_judged = is_decoding && p.sequences.is_active[seq_slot] != 0;
  const int32_t num_rows = p.inputs.logit_indptr[i + 1] - p.inputs.logit_indptr[i];
  const int32_t draft_len = is_judged ? p.sequences.draft_len[seq_slot] : 0;
  // The host may lay out fewer drafts than were made.
  const int32_t num_drafts = draft_len < num_rows ? draft_len : num_rows - 1;
  AcceptedDrafts<double> accepted = {0, 1.0};
  bool has_residual = false;
  if (num_drafts > 0) {
    const RejectionWindow<Team> window(p, team, i, num_drafts);
    if (window.is_greedy()) {
      accepted.count = window.count_equal();
    } else {
      accepted = accept_drafts<double>(
          p.method, num_drafts, window,
          [&](int32_t index, double probability) { return window.uniform(index) < probability; });
      has_residual = window.store_residual(accepted);
    }
  }
  if (!team.is_leader()) return;
  p.num_accepted[i] = accepted.count;
  p.residual_rows[i] = has_residual ? p.inputs.logit_indptr[i] + accepted.count : -1;
  p.residual_pass_rows[i] = has_residual ? p.inputs.verify_indptr[i] + accepted.count : 0;
}

}  // namespace paceline
