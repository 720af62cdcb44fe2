// SPDX-License-Identifier: Apache-2.0
#pragma once

// The op cases of residual streams.

#include <cstdint>
#include <vector>

#include <paceline/dtype.h>

#include "support/op_cases.h"

namespace paceline::testing {

struct StreamsSpec {
  int32_t num_streams = 0;
  int32_t hidden = 0;
  DType dtype = DType::kBFloat16;  // of what is no stream
  bool adds = false;               // of spread_streams
  bool is_end = false;     // of mix_streams, and of the mix that read_streams and sum_streams read
  bool has_index = false;  // of norm_streams
};

[[nodiscard]] OpInstance make_spread_streams(const StreamsSpec& spec, const Rows& rows,
                                             uint64_t seed);
[[nodiscard]] OpInstance make_mix_streams(const StreamsSpec& spec, const Rows& rows, uint64_t seed);
[[nodiscard]] OpInstance make_read_streams(const StreamsSpec& spec, const Rows& rows,
                                           uint64_t seed);
[[nodiscard]] OpInstance make_sum_streams(const StreamsSpec& spec, const Rows& rows, uint64_t seed);
[[nodiscard]] OpInstance make_write_streams(const StreamsSpec& spec, const Rows& rows,
                                            uint64_t seed);
// A branch joins if the spec adds.
[[nodiscard]] OpInstance make_join_streams(const StreamsSpec& spec, const Rows& rows,
                                           uint64_t seed);
[[nodiscard]] OpInstance make_norm_streams(const StreamsSpec& spec, const Rows& rows,
                                           uint64_t seed);
[[nodiscard]] OpInstance make_mean_streams(const StreamsSpec& spec, const Rows& rows,
                                           uint64_t seed);
[[nodiscard]] std::vector<RowWiseCase> streams_row_wise_cases();

}  // namespace paceline::testing
