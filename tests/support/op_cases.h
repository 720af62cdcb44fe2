// SPDX-License-Identifier: Apache-2.0
#pragma once

// One table of op cases for the tests that compare backends and for the microbenchmarks.

#include <cstdint>
#include <functional>
#include <ostream>
#include <string>
#include <vector>

#include "support/op_instance.h"
#include "support/op_specs.h"

namespace paceline::testing {

// An op whose rows are independent.
struct RowWiseCase {
  std::string name;  // op, then shape, e.g. "gemm_n33_k72_bf16"
  std::function<OpInstance(const Rows& rows, uint64_t seed)> make;
  bool is_invariance_case = false;  // also run for every batch size
  int32_t roomy_rows = 0;           // not 0: also run with a capacity of this many rows
  int32_t num_in_room = 21;         // rows in use at that capacity
};
[[nodiscard]] const std::vector<RowWiseCase>& row_wise_cases();

struct OpCase {
  std::string name;
  std::function<OpInstance(uint64_t seed)> make;
};
// All cases: the row-wise cases in several batches, attention, and the ops on state.
[[nodiscard]] const std::vector<OpCase>& op_cases();

// How gtest shows them.
inline void PrintTo(const RowWiseCase& c, std::ostream* out) { *out << c.name; }
inline void PrintTo(const OpCase& c, std::ostream* out) { *out << c.name; }

// The cases of op_cases_attention.cc and so on, for op_cases().
[[nodiscard]] std::vector<OpCase> attention_op_cases();
[[nodiscard]] std::vector<OpCase> state_op_cases();
[[nodiscard]] std::vector<OpCase> fork_op_cases();

}  // namespace paceline::testing
