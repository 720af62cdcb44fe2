// SPDX-License-Identifier: Apache-2.0
#include "base/canonical_json.h"

#include <array>
#include <charconv>
#include <cmath>
#include <map>

#include "base/check.h"
#include "base/utf8.h"

namespace paceline {
namespace {

void append_escape(std::string& out, uint32_t unit) {
  constexpr std::string_view kHex = "0123456789abcdef";
  out += "\\u";
  for (int shift = 12; shift >= 0; shift -= 4) out += kHex[unit >> shift & 15];
}

// The code point of a well-formed sequence.
uint32_t code_point(std::string_view sequence) {
  const auto byte = [&](size_t i) {
    return static_cast<uint32_t>(static_cast<uint8_t>(sequence[i]));
  };
  constexpr std::array<uint32_t, 5> kMask = {0, 0x7f, 0x1f, 0x0f, 0x07};
  uint32_t code = byte(0) & kMask[sequence.size()];
  for (size_t i = 1; i < sequence.size(); ++i) code = code << 6 | (byte(i) & 0x3f);
  return code;
}

}  // namespace

std::string canonical_string(std::string_view text) {
  constexpr std::string_view kShort = "\"\\\b\f\n\r\t";
  constexpr std::string_view kLetters = "\"\\bfnrt";
  std::string out = "\"";
  while (!text.empty()) {
    const size_t length = utf8_sequence(text);
    PACELINE_CHECK(length > 0, "text that is not UTF-8");
    const uint32_t code = code_point(text.substr(0, length));
    if (const size_t at = kShort.find(text[0]); length == 1 && at != std::string_view::npos) {
      out += '\\';
      out += kLetters[at];
    } else if (code >= 0x20 && code < 0x7f) {
      out += text[0];
    } else if (code >= 0x10000) {
      append_escape(out, 0xd800 + ((code - 0x10000) >> 10));
      append_escape(out, 0xdc00 + ((code - 0x10000) & 0x3ff));
    } else {
      append_escape(out, code);
    }
    text.remove_prefix(length);
  }
  return out + '"';
}

std::string canonical_number(double value) {
  std::array<char, 400> digits;
  const auto written = [&](auto... format) {
    char* const end =
        std::to_chars(digits.data(), digits.data() + digits.size(), value, format...).ptr;
    return std::string(digits.data(), end);
  };
  if (value == 0) return "0";  // also for -0
  if (value == std::trunc(value)) return written(std::chars_format::fixed, 0);
  // Larger numbers that are not whole need no exponent.
  return written(std::abs(value) < 1e-4 ? std::chars_format::scientific : std::chars_format::fixed);
}

std::string canonical_json(const Json& value) {
  std::string out;
  switch (value.kind()) {
    case JsonKind::kNull:
      return "null";
    case JsonKind::kBool:
      return value.as_bool() ? "true" : "false";
    case JsonKind::kNumber: {
      const std::string_view text = value.text();
      const bool is_integer = text.find_first_of(".eE") == std::string_view::npos;
      if (is_integer) return text == "-0" ? "0" : std::string(text);
      return canonical_number(value.as_double());
    }
    case JsonKind::kString:
      return canonical_string(value.as_string());
    case JsonKind::kList:
      for (const Json& element : value.elements()) {
        out += out.empty() ? "[" : ",";
        out += canonical_json(element);
      }
      return out.empty() ? "[]" : out + "]";
    case JsonKind::kObject: {
      // Bytes of UTF-8 have the order of code points.
      std::map<std::string_view, Json> members;
      for (const JsonMember& member : value.members()) members.emplace(member.key, member.value);
      for (const auto& [key, member] : members) {
        out += out.empty() ? "{" : ",";
        out += canonical_string(key) + ':' + canonical_json(member);
      }
      return out.empty() ? "{}" : out + "}";
    }
  }
  return out;
}

}  // namespace paceline
