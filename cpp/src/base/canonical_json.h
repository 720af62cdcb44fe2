// SPDX-License-Identifier: Apache-2.0
#pragma once

// The canonical form of JSON values, of which receipts have digests: ASCII with \u escapes, keys in
// order, no spaces, whole numbers without a point, and other numbers with the fewest digits that
// give the same double. Python's json.dumps writes the same with sort_keys and these separators.

#include <string>
#include <string_view>

#include "base/json.h"

namespace paceline {

// With its quotes. `text` is valid UTF-8.
[[nodiscard]] std::string canonical_string(std::string_view text);

// Of a finite number.
[[nodiscard]] std::string canonical_number(double value);

[[nodiscard]] std::string canonical_json(const Json& value);

}  // namespace paceline
