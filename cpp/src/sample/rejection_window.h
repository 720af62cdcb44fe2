// SPDX-License-Identifier: Apache-2.0
#pragma once

// The window of drafts of one sequence as reject_drafts sees it, apart from who walks its lists:
// the one specification that the CPU loops over and that a warp runs. A `Team` walks a list of n
// entries:
//   max(n, of)      the maximum of of(j), floats
//   count(n, of)    the sum of of(j), 64-bit integers
//   sum(n, of)      the sum of of(j), doubles: entries j, j + 32, ... in turn make the sum of lane
//                   j % 32, then lanes 16, 8, 4, 2 and 1 apart are added
//   for_each(n, do) calls do(j)
//   leads()         whether this is who writes what is the same for all

#include <cmath>
#include <cstdint>

#include "base/host_device.h"
#include "sample/judge.h"
#include "sample/reject.h"
#include "sample/rejection_rules.h"
#include "sample/truncate_rules.h"
#include "wire/batch_shape.h"

namespace paceline {

// In (0, 1): what a try is compared with. Its 33 bits are exact.
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

// A law given by weights; or certain, of one token.
struct TokenDistribution {
  SoftmaxWeights weights;
  double sum;     // of the weights; 0: certain
  int32_t token;  // where it is certain

  [[nodiscard]] PACELINE_HOST_DEVICE bool is_certain() const { return !(sum > 0.0); }
  // The chance of token `id`, whose logit is `logit`.
  [[nodiscard]] PACELINE_HOST_DEVICE double probability(int32_t id, float logit) const {
    if (is_certain()) return id == token ? 1.0 : 0.0;
    return static_cast<double>(weight_of(weights, comparable(logit))) / sum;
  }
};

template <class Team>
class RejectionWindow {
 public:
  // Of batch row i, with `num_drafts` drafts.
  PACELINE_HOST_DEVICE RejectionWindow(const RejectDraftsParams& params, const Team& team_of,
                                       int32_t i, int32_t num_drafts_of)
      : p_(params), team_(team_of), num_drafts_(num_drafts_of) {
    seq_slot_ = p_.inputs.seq_slot[i];
    first_row_ = p_.inputs.logit_indptr[i];
    temperature_ = p_.sequences.temperature[seq_slot_];
  }

  [[nodiscard]] PACELINE_HOST_DEVICE int32_t draft(int32_t at) const {
    return p_.sequences.draft_tokens[int64_t{seq_slot_} * p_.sequences.num_draft_tokens + at];
  }
  [[nodiscard]] PACELINE_HOST_DEVICE int32_t draw(int32_t at) const {
    return p_.target_tokens[first_row_ + at];
  }

  // For accept_drafts.
  [[nodiscard]] PACELINE_HOST_DEVICE double p(int32_t at) const {
    return target_probability(target_distribution(at), at, draft(at));
  }
  [[nodiscard]] PACELINE_HOST_DEVICE double q(int32_t at) const {
    const TokenDistribution distribution = draft_distribution(at);
    if (distribution.is_certain()) return 1.0;
    const int32_t token = draft(at);
    const float logit = team_.max(p_.proposals.per_draft, [&](int32_t j) {
      return proposed_id(at, j) == token ? proposed_logit(at, j) : from_ordered(kNoLogitKey);
    });
    return distribution.probability(token, logit);
  }
  [[nodiscard]] PACELINE_HOST_DEVICE double overlap(int32_t at, double share) const {
    const TokenDistribution target = target_distribution(at);
    const TokenDistribution drafted = draft_distribution(at);
    const auto of = [&](int32_t id, double q) {
      const double scaled = rounded_product(share, target_probability(target, at, id));
      return scaled < q ? scaled : q;
    };
    if (drafted.is_certain()) return of(drafted.token, 1.0);
    return team_.sum(p_.proposals.per_draft, [&](int32_t j) {
      const int32_t id = proposed_id(at, j);
      return id < 0 ? 0.0 : of(id, drafted.probability(id, proposed_logit(at, j)));
    });
  }

  // Drafts kept where there is nothing to try: while they equal the target's draws.
  [[nodiscard]] PACELINE_HOST_DEVICE int32_t count_equal() const {
    int32_t accepted = 0;
    while (accepted < num_drafts_ && draw(accepted) == draft(accepted)) ++accepted;
    return accepted;
  }

  // Whether the token after `kept` drafts is drawn from what is left; its row then has it.
  [[nodiscard]] PACELINE_HOST_DEVICE bool store_residual(
      const AcceptedDrafts<double>& accepted) const {
    const int32_t at = accepted.count;
    if (at == num_drafts_) return false;
    const TokenDistribution target = target_distribution(at);
    if (target.is_certain()) return false;
    float* const logits = p_.logits + int64_t{first_row_ + at} * p_.logits_stride;
    const auto leave = [&](int32_t id, double q) {
      if (id < 0 || id >= p_.vocab_limit) return;
      const double p = target.probability(id, logits[id]);
      const double left = residual(accepted.share, p, q);
      // log(p - q / share) less log p, as far as it moves a logit.
      const double factor = left / rounded_product(accepted.share, p);
      logits[id] = left > 0.0
                       ? static_cast<float>(fma(static_cast<double>(temperature_), log(factor),
                                                static_cast<double>(logits[id])))
                       : from_ordered(kNoLogitKey);
    };
    const TokenDistribution drafted = draft_distribution(at);
    if (drafted.is_certain()) {
      if (team_.leads()) leave(drafted.token, 1.0);
      return true;
    }
    team_.for_each(p_.proposals.per_draft, [&](int32_t j) {
      const int32_t id = proposed_id(at, j);
      if (id >= 0) leave(id, drafted.probability(id, proposed_logit(at, j)));
    });
    return true;
  }

  [[nodiscard]] PACELINE_HOST_DEVICE bool is_greedy() const { return !(temperature_ > 0.0f); }
  [[nodiscard]] PACELINE_HOST_DEVICE double uniform(int32_t at) const {
    return accept_uniform(p_.sequences.seed[seq_slot_], p_.sequences.known_len[seq_slot_], at);
  }

 private:
  [[nodiscard]] PACELINE_HOST_DEVICE int64_t list(int32_t at) const {
    return (int64_t{seq_slot_} * p_.sequences.num_draft_tokens + at) * p_.proposals.per_draft;
  }
  [[nodiscard]] PACELINE_HOST_DEVICE int32_t proposed_id(int32_t at, int32_t j) const {
    return p_.proposals.ids[list(at) + j];
  }
  [[nodiscard]] PACELINE_HOST_DEVICE float proposed_logit(int32_t at, int32_t j) const {
    return p_.proposals.logits[list(at) + j];
  }

  [[nodiscard]] PACELINE_HOST_DEVICE TokenDistribution target_distribution(int32_t at) const {
    const int32_t row = first_row_ + at;
    return {.weights = softmax_weights_of(p_.highest[row], temperature_),
            .sum = static_cast<double>(p_.sums[row]),
            .token = draw(at)};
  }
  [[nodiscard]] PACELINE_HOST_DEVICE double target_probability(
      const TokenDistribution& distribution, int32_t at, int32_t id) const {
    if (id < 0 || id >= p_.vocab_limit) return 0.0;
    return distribution.probability(id,
                                    p_.logits[int64_t{first_row_ + at} * p_.logits_stride + id]);
  }

  // Of draft `at`. Without proposals, or where their highest logit is infinite, it was certain.
  [[nodiscard]] PACELINE_HOST_DEVICE TokenDistribution draft_distribution(int32_t at) const {
    TokenDistribution distribution = {.weights = {}, .sum = 0.0, .token = draft(at)};
    if (p_.proposals.ids == nullptr) return distribution;
    const int32_t n = p_.proposals.per_draft;
    const float highest =
        team_.max(n, [&](int32_t j) { return comparable(proposed_logit(at, j)); });
    const float lowest = from_ordered(kNoLogitKey);
    if (highest == lowest || highest == -lowest) return distribution;
    distribution.weights = softmax_weights_of(highest, temperature_);
    distribution.sum = static_cast<double>(team_.count(n, [&](int32_t j) {
      return weight_of(distribution.weights, comparable(proposed_logit(at, j)));
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

// Batch row i. Nothing that it writes is read by another row.
template <class Team>
PACELINE_HOST_DEVICE inline void reject_sequence(const RejectDraftsParams& p, int32_t i,
                                                 const Team& team) {
  const int32_t seq_slot = p.inputs.seq_slot[i];
  const bool is_decoding = p.inputs.kind[i] == static_cast<int32_t>(RowKind::kDecode);
  const bool is_judged = is_decoding && p.sequences.is_active[seq_slot] != 0;
  const int32_t num_drafts = is_judged ? p.sequences.draft_len[seq_slot] : 0;
  AcceptedDrafts<double> accepted = {0, 1.0};
  bool has_residual = false;
  if (num_drafts > 0) {
    const RejectionWindow<Team> window(p, team, i, num_drafts);
    if (window.is_greedy()) {
      accepted.count = window.count_equal();
    } else {
      accepted = accept_drafts<double>(
          p.method, num_drafts, window,
          [&](int32_t at, double probability) { return window.uniform(at) < probability; });
      has_residual = window.store_residual(accepted);
    }
  }
  if (!team.leads()) return;
  p.num_accepted[i] = accepted.count;
  p.residual_rows[i] = has_residual ? p.inputs.logit_indptr[i] + accepted.count : -1;
  p.residual_pass_rows[i] = has_residual ? p.inputs.verify_indptr[i] + accepted.count : 0;
}

}  // namespace paceline
