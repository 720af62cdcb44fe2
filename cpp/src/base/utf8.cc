// SPDX-License-Identifier: Apache-2.0
#include "base/utf8.h"

namespace paceline {

size_t utf8_sequence(std::string_view text) {
  const auto byte = [&](size_t i) {
    return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u;
  };
  const auto is_tail = [&](size_t i, unsigned low = 0x80, unsigned high = 0xbf) {
    return byte(i) >= low && byte(i) <= high;
  };
  if (text.empty()) return 0;
  const unsigned lead = byte(0);
  if (lead < 0x80) return 1;
  if (lead >= 0xc2 && lead <= 0xdf) return is_tail(1) ? 2 : 0;
  if (lead >= 0xe0 && lead <= 0xef) {  // no overlong forms, no surrogates
    const unsigned low = lead == 0xe0 ? 0xa0 : 0x80;
    const unsigned high = lead == 0xed ? 0x9f : 0xbf;
    return is_tail(1, low, high) && is_tail(2) ? 3 : 0;
  }
  if (lead >= 0xf0 && lead <= 0xf4) {  // up to U+10FFFF
    const unsigned low = lead == 0xf0 ? 0x90 : 0x80;
    const unsigned high = lead == 0xf4 ? 0x8f : 0xbf;
    return is_tail(1, low, high) && is_tail(2) && is_tail(3) ? 4 : 0;
  }
  return 0;
}

void append_utf8(std::string& out, uint32_t code) {
  const auto push = [&](uint32_t byte) { out.push_back(static_cast<char>(byte)); };
  if (code < 0x80) {
    push(code);
  } else if (code < 0x800) {
    push(0xc0 | (code >> 6));
    push(0x80 | (code & 0x3f));
  } else if (code < 0x10000) {
    push(0xe0 | (code >> 12));
    push(0x80 | ((code >> 6) & 0x3f));
    push(0x80 | (code & 0x3f));
  } else {
    push(0xf0 | (code >> 18));
    push(0x80 | ((code >> 12) & 0x3f));
    push(0x80 | ((code >> 6) & 0x3f));
    push(0x80 | (code & 0x3f));
  }
}

}  // namespace paceline
