// SPDX-License-Identifier: Apache-2.0
//
// The ops between logits and accepted tokens in the table of op cases.

#include <string>
#include <utility>
#include <vector>

#include "support/op_case_table.h"
#include "support/op_cases.h"

namespace paceline::testing {
namespace {

void add_draws(TableBuilder& table) {
  const auto add = [&](const std::string& name, const DrawSpec& s,
                       bool is_invariance_case = false) {
    table.add("draw_" + name + "_v" + std::to_string(s.vocab_limit), make_draw, s,
              is_invariance_case);
  };
  for (const int32_t vocab : {1, 3, 257, 5003, 32000}) {
    add("greedy", {.vocab_limit = vocab, .padding = 5});
    add("t1", {.vocab_limit = vocab, .padding = 5, .temperature = 1.0f}, vocab == 5003);
    add("mixed", {.vocab_limit = vocab, .temperature = -1.0f, .has_probabilities = true},
        vocab == 5003);
    add("mapped_greedy", {.vocab_limit = vocab, .padding = 5, .is_mapped = true});
    add("mapped_mixed",
        {.vocab_limit = vocab,
         .padding = 4,
         .temperature = -1.0f,
         .has_probabilities = true,
         .is_mapped = true},
        vocab == 5003);
    // Gemma 4 MTP: rows that stay where they are, and logits of clusters of tokens.
    add("steps_mixed", {.vocab_limit = vocab, .padding = 4, .temperature = -1.0f, .steps_ahead = 3},
        vocab == 5003);
    add("row_maps_greedy",
        {.vocab_limit = vocab, .padding = 5, .is_mapped = true, .has_row_maps = true});
    add("row_maps_steps_mixed",
        {.vocab_limit = vocab,
         .temperature = -1.0f,
         .has_probabilities = true,
         .is_mapped = true,
         .has_row_maps = true,
         .steps_ahead = 15},
        vocab == 5003);
  }
  for (const int32_t vocab : {64, 5003}) {
    // Among equal logits it is the lowest id, not the lowest token, that is drawn.
    for (const auto& [name, logits] : {std::pair{"row_maps_ties_greedy", LogitKind::kTies},
                                       {"row_maps_holes_greedy", LogitKind::kHoles}}) {
      add(name,
          {.vocab_limit = vocab,
           .padding = 3,
           .logits = logits,
           .has_probabilities = true,
           .is_mapped = true,
           .has_row_maps = true},
          true);
    }
  }
  add("t1", {.vocab_limit = 151936, .temperature = 1.0f, .has_probabilities = true});
  for (const int32_t vocab : {64, 5003}) {
    for (const float temperature : {0.0f, 0.7f}) {
      const std::string suffix = temperature > 0.0f ? "_t07" : "_greedy";
      add("ties" + suffix,
          {.vocab_limit = vocab,
           .padding = 3,
           .temperature = temperature,
           .logits = LogitKind::kTies,
           .has_probabilities = true},
          true);
      add("holes" + suffix,
          {.vocab_limit = vocab,
           .padding = 61,
           .temperature = temperature,
           .logits = LogitKind::kHoles,
           .has_probabilities = true},
          true);
      add("peaked" + suffix,
          {.vocab_limit = vocab, .temperature = temperature, .logits = LogitKind::kPeaked});
      add("infinite" + suffix,
          {.vocab_limit = vocab, .temperature = temperature, .logits = LogitKind::kInfinite});
    }
  }
  add("t1em5", {.vocab_limit = 1000, .temperature = 1e-5f});
  // At this capacity a block takes twice as many ids; with 300 rows it does not.
  constexpr int32_t kRoomyRows = 1600;
  const auto add_roomy = [&](const std::string& name, const DrawSpec& s) {
    table.add("draw_roomy_" + name + "_v" + std::to_string(s.vocab_limit), make_draw, s,
              /*is_invariance_case=*/true, kRoomyRows);
  };
  for (const int32_t vocab : {8193, 9004}) {
    for (const int32_t padding : {vocab % 4 == 0 ? 0 : 3, 6}) {  // vectors, and one by one
      const std::string suffix = padding == 6 ? "_apart" : "";
      add_roomy("greedy" + suffix, {.vocab_limit = vocab, .padding = padding});
      add_roomy("mixed" + suffix, {.vocab_limit = vocab, .padding = padding, .temperature = -1.0f});
    }
    add_roomy("ties_mixed",
              {.vocab_limit = vocab, .temperature = -1.0f, .logits = LogitKind::kTies});
    add_roomy("mapped_mixed",
              {.vocab_limit = vocab, .padding = 3, .temperature = -1.0f, .is_mapped = true});
  }
  add_roomy("own_noise_holes_mixed", {.vocab_limit = 9004,
                                      .temperature = -1.0f,
                                      .logits = LogitKind::kHoles,
                                      .has_own_noise = true});
  // What `standard` and `block` acceptance draw: from proposals, and from the residual.
  for (const int32_t vocab : {64, 256, 5003}) {
    add("own_noise_mixed",
        {.vocab_limit = vocab, .padding = 3, .temperature = -1.0f, .has_own_noise = true}, true);
    add("own_noise_row_maps_mixed",
        {.vocab_limit = vocab,
         .temperature = -1.0f,
         .logits = LogitKind::kHoles,
         .has_probabilities = true,
         .is_mapped = true,
         .has_row_maps = true,
         .steps_ahead = 2,
         .has_own_noise = true},
        true);
  }
}

void add_rejection_ops(TableBuilder& table) {
  for (const auto& [kind, suffix] : kUsualLogits) {
    for (const auto& [vocab, per_draft] :
         {std::pair{1, 1}, {3, 64}, {64, 64}, {257, 5}, {1003, 64}, {5004, 256}, {40000, 1}}) {
      for (const char* const map : {"", "_mapped", "_row_maps"}) {
        const bool is_mapped = map[0] != 0;
        // More than 4,096 ids, the number that a block takes at once.
        const bool has_rounds =
            vocab == 5004 && (kind == LogitKind::kPlain || kind == LogitKind::kTies);
        if (is_mapped && vocab != 64 && vocab != 1003 && !has_rounds) continue;
        table.add("proposals" + std::string(suffix) + map + "_k" + std::to_string(per_draft) +
                      "_v" + std::to_string(vocab),
                  make_proposals,
                  ProposalsSpec{vocab, vocab % 2 == 1 ? 5 : 0, per_draft, vocab % 3, kind,
                                is_mapped, is_mapped && map[1] == 'r'},
                  vocab == 1003);
      }
    }
    for (const int32_t vocab : {1, 7, 64, 1003, 40000}) {
      table.add("softmax_sums" + std::string(suffix) + "_v" + std::to_string(vocab),
                make_softmax_sums, SoftmaxSumsSpec{vocab, vocab % 2 == 1 ? 5 : 0, kind},
                vocab == 1003);
    }
    for (const AcceptMethod method : {AcceptMethod::kStandard, AcceptMethod::kBlock}) {
      for (const auto& [vocab, drafts, per_draft] :
           {std::tuple{3, 2, 64}, {64, 3, 0}, {64, 5, 64}, {1003, 16, 20}, {1003, 1, 256}}) {
        if (kind != LogitKind::kPlain && vocab != 64) continue;
        table.add(std::string("reject_") + (method == AcceptMethod::kBlock ? "block" : "standard") +
                      suffix + "_k" + std::to_string(drafts) + "_of" + std::to_string(per_draft) +
                      "_v" + std::to_string(vocab),
                  make_reject, RejectSpec{vocab, drafts, per_draft, method, kind}, vocab == 64);
      }
    }
  }
  for (const int32_t vocab : {3, 1003, 5004}) {
    for (const bool is_mapped : {false, true}) {
      ProposalsSpec by_row{vocab, 5, 16, 0, LogitKind::kTies, is_mapped};
      by_row.is_by_row = true;
      table.add(std::string("proposals_by_row") + (is_mapped ? "_mapped" : "") + "_k16_v" +
                    std::to_string(vocab),
                make_proposals, by_row, vocab == 1003);
    }
  }
  for (const AcceptMethod method : {AcceptMethod::kStandard, AcceptMethod::kBlock}) {
    for (const auto& [drafts, per_draft] : {std::pair{3, 0}, {5, 64}}) {
      table.add(std::string("reject_") + (method == AcceptMethod::kBlock ? "block" : "standard") +
                    "_unknown_k" + std::to_string(drafts) + "_of" + std::to_string(per_draft) +
                    "_v64",
                make_reject,
                RejectSpec{64, drafts, per_draft, method, LogitKind::kPlain,
                           /*has_unknown_ids=*/true});
    }
  }
  for (const int32_t vocab : {151936, 262144}) {
    table.add("proposals_k64_v" + std::to_string(vocab), make_proposals,
              ProposalsSpec{vocab, 64, 64, 2, LogitKind::kTies});
    table.add("softmax_sums_v" + std::to_string(vocab), make_softmax_sums, SoftmaxSumsSpec{vocab});
  }
}

void add_logit_ops(TableBuilder& table) {
  for (const int32_t vocab : {1, 31, 33, 1003, 40000}) {
    const bool is_padded = vocab % 2 == 1;
    table.add("adjust_mixed_v" + std::to_string(vocab), make_adjust,
              AdjustSpec{vocab, is_padded ? 5 : 0, AdjustKind::kMixed}, vocab == 1003);
    table.add("adjust_penalties_v" + std::to_string(vocab), make_adjust,
              AdjustSpec{vocab, is_padded ? 0 : 4, AdjustKind::kPenalties});
  }
  table.add("adjust_none_v1003", make_adjust, AdjustSpec{1003, 0, AdjustKind::kNone});
  table.add("adjust_mixed_v151936", make_adjust, AdjustSpec{151936, 64, AdjustKind::kMixed});
  const struct {
    TruncateKind kind;
    const char* name;
  } kinds[] = {{TruncateKind::kMixed, "mixed"},          {TruncateKind::kTopK, "top_k"},
               {TruncateKind::kTopP, "top_p"},           {TruncateKind::kMinP, "min_p"},
               {TruncateKind::kTopKTopP, "top_k_top_p"}, {TruncateKind::kNone, "none"}};
  for (const auto& [kind, name] : kinds) {
    for (const int32_t vocab : {1, 7, 64, 1003, 5004, 40000}) {
      const bool is_mixed = kind == TruncateKind::kMixed;
      if (!is_mixed && vocab != 64 && vocab != 5004) continue;
      for (const auto& [logits, suffix] : kAllLogits) {
        if (!is_mixed && logits != LogitKind::kPlain) continue;
        // The kernel tests 512 rows at a time for limits; one case has more rows.
        const bool is_roomy = is_mixed && vocab == 64 && logits == LogitKind::kPlain;
        table.add("truncate_" + std::string(name) + suffix + "_v" + std::to_string(vocab),
                  make_truncate, TruncateSpec{vocab, vocab == 64 ? 61 : 4, kind, logits},
                  is_mixed && vocab == 1003, is_roomy ? 700 : 0, /*num_in_room=*/600);
      }
    }
  }
  for (const int32_t vocab : {64, 5004, 151936}) {
    table.add("truncate_reached_v" + std::to_string(vocab), make_truncate,
              TruncateSpec{vocab, 4, TruncateKind::kReached, LogitKind::kHalves});
  }
  for (const int32_t vocab : {151936, 262144}) {
    table.add("truncate_mixed_v" + std::to_string(vocab), make_truncate, TruncateSpec{vocab});
    table.add("truncate_mixed_ties_v" + std::to_string(vocab), make_truncate,
              TruncateSpec{vocab, 0, TruncateKind::kMixed, LogitKind::kTies});
  }
}

void add_logprobs(TableBuilder& table) {
  const auto add = [&](const LogprobSpec& s, const char* suffix, bool is_invariance_case) {
    const std::string name = std::string(suffix) + "_n" + std::to_string(s.max_logprobs) + "_v" +
                             std::to_string(s.vocab_size);
    table.add("logprobs_emitted" + name, make_emitted_logprobs, s, is_invariance_case);
    table.add("logprobs_prompt" + name, make_prompt_logprobs, s, is_invariance_case);
    table.add("logprobs_keep" + name, make_save_raw_logits, s, is_invariance_case);
  };
  // Fewer ids than tokens that are wanted, than blocks of a cluster, than threads.
  for (const int32_t vocab : {1, 7, 33, 1003, 40000}) {
    for (const auto& [kind, suffix] : kUsualLogits) {
      add({vocab, vocab % 2 == 1 ? 5 : 4, kind}, suffix, vocab == 1003);
    }
    add({vocab, 0, LogitKind::kTies, 64}, "_ties", vocab == 1003);
    add({vocab, 0, LogitKind::kPlain, 1}, "", false);
  }
  // With `standard` and `block` acceptance.
  add({.vocab_size = 33, .padding = 5, .all_change = true}, "_all_change", false);
  for (const int32_t vocab : {151936, 262144}) add({vocab}, "", false);
}

}  // namespace

void add_sampling_ops(TableBuilder& table) {
  add_draws(table);
  add_logit_ops(table);
  add_logprobs(table);
  add_rejection_ops(table);
}

}  // namespace paceline::testing
