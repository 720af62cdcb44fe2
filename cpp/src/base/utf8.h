// SPDX-License-Identifier: Apache-2.0
#pragma once

// UTF-8, one code point at a time.

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace paceline {

// The length of the well-formed UTF-8 sequence (Unicode, table 3-7) at the start of `text`, or 0
// without one.
[[nodiscard]] size_t utf8_sequence(std::string_view text);

// Appends a code point, which is at most U+10FFFF and no surrogate.
void append_utf8(std::string& out, uint32_t code);

}  // namespace paceline
