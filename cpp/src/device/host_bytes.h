// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace paceline {

// What the host and the control group of the process have. A number that cannot be read is absent.
struct HostBytes {
  std::optional<int64_t> available;  // of the host; memory that files are cached in counts
  int64_t swap = 0;                  // free
  std::optional<int64_t> group_limit;
  std::optional<int64_t> group_use;  // memory that files are cached in counts here, too

  // What the process can certainly allocate without swap.
  [[nodiscard]] std::optional<int64_t> room() const;
};
[[nodiscard]] HostBytes host_bytes();

// The system hands out memory that it does not have, and ends the process when that is written to.
// Throws OutOfMemory, which names `purpose`, where memory certainly cannot hold `bytes`.
void check_fits(int64_t bytes, std::string_view purpose, const HostBytes& host);

}  // namespace paceline
