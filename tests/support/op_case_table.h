// SPDX-License-Identifier: Apache-2.0
#pragma once

// How the files of the table of op cases add their cases.

#include <array>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "support/op_cases.h"

namespace paceline::testing {

// Kinds of logits and what names of cases say of them; ops take the first ones.
inline constexpr std::array<std::pair<LogitKind, const char*>, 6> kAllLogits = {
    {{LogitKind::kPlain, ""},
     {LogitKind::kTies, "_ties"},
     {LogitKind::kHoles, "_holes"},
     {LogitKind::kInfinite, "_infinite"},
     {LogitKind::kPeaked, "_peaked"},
     {LogitKind::kTiny, "_tiny"}}};
inline constexpr auto kUsualLogits = std::span(kAllLogits).first<5>();

inline std::string dtype_suffix(DType dtype) { return dtype == DType::kFloat32 ? "_f32" : "_bf16"; }

class TableBuilder {
 public:
  template <class Spec>
  void add(std::string name, OpInstance (*make)(const Spec&, const Rows&, uint64_t),
           const Spec& spec, bool is_invariance_case = false, int32_t roomy_rows = 0,
           int32_t num_in_room = 21) {
    cases.push_back(
        {.name = std::move(name),
         .make = [make, spec](const Rows& rows, uint64_t seed) { return make(spec, rows, seed); },
         .is_invariance_case = is_invariance_case,
         .roomy_rows = roomy_rows,
         .num_in_room = num_in_room});
  }
  std::vector<RowWiseCase> cases;
};

// The ops between logits and accepted tokens (op_cases_sampling_table.cc).
void add_sampling_ops(TableBuilder& table);

}  // namespace paceline::testing
