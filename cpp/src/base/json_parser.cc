// SPDX-License-Identifier: Apache-2.0
// From a text to the nodes of its JsonDocument.

#include <algorithm>
#include <charconv>
#include <limits>
#include <system_error>

#include "base/check.h"
#include "base/json.h"
#include "base/utf8.h"

namespace paceline {
namespace {

constexpr int kMaxDepth = 64;
constexpr int64_t kFarExponent = int64_t{1} << 40;  // further than the digits of a text reach

[[nodiscard]] bool is_digit(char c) { return c >= '0' && c <= '9'; }

// The power of ten of the first digit that is not 0: 2 for "512", -2 for "0.05".
[[nodiscard]] int64_t leading_power(std::string_view mantissa) {
  const size_t first = mantissa.find_first_of("123456789");
  const size_t point = std::min(mantissa.find('.'), mantissa.size());
  return static_cast<int64_t>(point) - static_cast<int64_t>(first) - (first < point ? 1 : 0);
}

// The double nearest to a JSON number: 0 for one that is too small, infinity for one that is too
// large.
[[nodiscard]] double to_double(std::string_view number) {
  double value = 0;
  const char* const end = number.data() + number.size();
  if (std::from_chars(number.data(), end, value).ec == std::errc()) return value;
  const bool is_negative = number.starts_with('-');
  if (is_negative) number.remove_prefix(1);
  const size_t e = std::min(number.find_first_of("eE"), number.size());
  std::string_view digits = number.substr(std::min(e + 1, number.size()));
  if (digits.starts_with('+')) digits.remove_prefix(1);
  int64_t exponent = 0;
  if (std::from_chars(digits.data(), end, exponent).ec == std::errc::result_out_of_range) {
    exponent = digits.starts_with('-') ? -kFarExponent : kFarExponent;
  }
  exponent = std::clamp(exponent, -kFarExponent, kFarExponent);
  const bool is_small = leading_power(number.substr(0, e)) + exponent < 0;
  const double magnitude = is_small ? 0 : std::numeric_limits<double>::infinity();
  return is_negative ? -magnitude : magnitude;
}

}  // namespace

// Recursive descent into the node vector of a document.
class JsonParser final {
 public:
  JsonParser(JsonDocument& document, JsonLimits limits)
      : document_(document), text_(document.text_), limits_(limits) {}

  void parse() {
    if (text_.size() > limits_.max_bytes) {
      throw InvalidArgument(concat(document_.name_, ": ", text_.size(),
                                   " bytes of JSON; allowed: at most ", limits_.max_bytes));
    }
    skip_space();
    parse_value(/*parent=*/0, /*depth=*/0);
    skip_space();
    if (at_ != text_.size()) fail(at_, "more text after the value", "the end");
  }

 private:
  using Node = JsonDocument::Node;

  [[noreturn]] void fail(size_t offset, std::string_view seen, std::string_view allowed) const {
    throw InvalidArgument(concat(document_.name_, ": invalid JSON at byte ", offset, ": ", seen,
                                 "; allowed: ", allowed));
  }
  [[noreturn]] void fail_here(std::string_view allowed) const {
    fail(at_, at_ == text_.size() ? "the end of the text" : quoted(text_.substr(at_, 1)), allowed);
  }

  [[nodiscard]] bool next_is(char c) const { return at_ < text_.size() && text_[at_] == c; }
  [[nodiscard]] bool take(char c) {
    if (!next_is(c)) return false;
    ++at_;
    return true;
  }
  [[nodiscard]] bool take_word(std::string_view word) {
    if (text_.substr(at_, word.size()) != word) return false;
    at_ += word.size();
    return true;
  }
  void skip_space() {
    while (at_ < text_.size() &&
           (text_[at_] == ' ' || text_[at_] == '\n' || text_[at_] == '\r' || text_[at_] == '\t')) {
      ++at_;
    }
  }

  [[nodiscard]] uint32_t add(JsonKind kind, uint32_t parent) {
    if (document_.nodes_.size() >= limits_.max_values) {
      fail(at_, concat("more than ", limits_.max_values, " keys and values"), "fewer");
    }
    const auto index = static_cast<uint32_t>(document_.nodes_.size());
    Node& node = document_.nodes_.emplace_back();
    node.kind = kind;
    node.parent = parent;
    node.next = index + 1;
    node.text_begin = static_cast<uint32_t>(at_);
    return index;
  }
  [[nodiscard]] Node& node(uint32_t index) { return document_.nodes_[index]; }

  void parse_value(uint32_t parent, int depth) {
    if (next_is('{') || next_is('[')) {
      if (depth == kMaxDepth) fail(at_, "a deeper level", concat("at most ", kMaxDepth, " levels"));
      if (next_is('{')) {
        parse_object(parent, depth);
      } else {
        parse_list(parent, depth);
      }
    } else if (next_is('"')) {
      parse_string(parent);
    } else if (next_is('-') || (at_ < text_.size() && is_digit(text_[at_]))) {
      parse_number(parent);
    } else if (next_is('t') || next_is('f')) {
      const uint32_t index = add(JsonKind::kBool, parent);
      node(index).boolean = next_is('t');
      if (!take_word("true") && !take_word("false")) fail_here("a JSON value");
    } else {
      (void)add(JsonKind::kNull, parent);
      if (!take_word("null")) fail_here("a JSON value");
    }
  }

  void parse_list(uint32_t parent, int depth) {
    const uint32_t index = add(JsonKind::kList, parent);
    ++at_;
    skip_space();
    uint32_t count = 0;
    if (!take(']')) {
      do {
        skip_space();
        parse_value(index, depth + 1);
        ++count;
        skip_space();
      } while (take(','));
      if (!take(']')) fail_here("',' or ']'");
    }
    close(index, count);
  }

  void parse_object(uint32_t parent, int depth) {
    const uint32_t index = add(JsonKind::kObject, parent);
    const size_t first_key = keys_.size();
    ++at_;
    skip_space();
    if (!take('}')) {
      do {
        skip_space();
        if (!next_is('"')) fail_here("a key in double quotes");
        keys_.push_back(static_cast<uint32_t>(document_.nodes_.size()));
        parse_string(index);
        skip_space();
        if (!take(':')) fail_here("':'");
        skip_space();
        parse_value(index, depth + 1);
        skip_space();
      } while (take(','));
      if (!take('}')) fail_here("',' or '}'");
    }
    const auto count = static_cast<uint32_t>(keys_.size() - first_key);
    refuse_duplicates(first_key);
    close(index, count);
  }

  // Sorts instead of hashing, so that no text can make it quadratic.
  void refuse_duplicates(size_t first_key) {
    const auto begin = keys_.begin() + static_cast<std::ptrdiff_t>(first_key);
    const auto key = [&](uint32_t index) { return document_.string_of(index); };
    std::sort(begin, keys_.end(), [&](uint32_t a, uint32_t b) {
      const int order = key(a).compare(key(b));
      return order != 0 ? order < 0 : a < b;
    });
    const auto twin = std::adjacent_find(begin, keys_.end(),
                                         [&](uint32_t a, uint32_t b) { return key(a) == key(b); });
    if (twin != keys_.end()) {
      fail(node(*(twin + 1)).text_begin, concat("the key ", quoted(key(*twin)), " again"),
           "each key once in an object");
    }
    keys_.resize(first_key);
  }

  void close(uint32_t index, uint32_t count) {
    node(index).next = static_cast<uint32_t>(document_.nodes_.size());
    node(index).container = {static_cast<uint32_t>(at_), count};
  }

  void parse_string(uint32_t parent) {
    const uint32_t index = add(JsonKind::kString, parent);
    const size_t begin = ++at_;
    const auto decoded_begin = static_cast<uint32_t>(document_.decoded_.size());
    bool is_decoded = false;
    for (;;) {
      if (at_ == text_.size()) fail_here("'\"' at the end of a string");
      const auto byte = static_cast<unsigned char>(text_[at_]);
      if (byte == '"') break;
      if (byte < 0x20) fail(at_, "a control character in a string", "\\u escapes");
      if (byte == '\\') {
        if (!is_decoded) document_.decoded_ += text_.substr(begin, at_ - begin);
        is_decoded = true;
        parse_escape();
        continue;
      }
      const size_t length = utf8_sequence(text_.substr(at_, 4));
      if (length == 0) fail(at_, quoted(text_.substr(at_, 1)), "well-formed UTF-8");
      if (is_decoded) document_.decoded_ += text_.substr(at_, length);
      at_ += length;
    }
    Node& string = node(index);
    string.is_decoded = is_decoded;
    string.string =
        is_decoded
            ? JsonDocument::Slice{decoded_begin,
                                  static_cast<uint32_t>(document_.decoded_.size()) - decoded_begin}
            : JsonDocument::Slice{static_cast<uint32_t>(begin), static_cast<uint32_t>(at_ - begin)};
    ++at_;
  }

  void parse_escape() {
    constexpr std::string_view kEscapes = "\"\\/bfnrt";
    constexpr std::string_view kMeanings = "\"\\/\b\f\n\r\t";
    const size_t backslash = at_++;
    if (take('u')) {
      uint32_t code = parse_hex();
      if (code >= 0xd800 && code <= 0xdbff) {
        if (!take_word("\\u")) fail(backslash, "half a surrogate pair", "\\uD800-\\uDBFF in pairs");
        const uint32_t low = parse_hex();
        if (low < 0xdc00 || low > 0xdfff) {
          fail(backslash, "half a surrogate pair", "\\uDC00-\\uDFFF second");
        }
        code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
      } else if (code >= 0xdc00 && code <= 0xdfff) {
        fail(backslash, "half a surrogate pair", "\\uD800-\\uDBFF first");
      }
      append_utf8(document_.decoded_, code);
      return;
    }
    const size_t which = at_ < text_.size() ? kEscapes.find(text_[at_]) : std::string_view::npos;
    if (which == std::string_view::npos) fail_here("one of \"\\/bfnrtu after a backslash");
    document_.decoded_.push_back(kMeanings[which]);
    ++at_;
  }

  [[nodiscard]] uint32_t parse_hex() {
    uint32_t code = 0;
    const std::string_view digits = text_.substr(at_, 4);
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), code,
                                              /*base=*/16);
    if (digits.size() != 4 || error != std::errc() || end != digits.data() + 4) {
      fail(at_, quoted(digits), "four hexadecimal digits after \\u");
    }
    at_ += 4;
    return code;
  }

  void parse_number(uint32_t parent) {
    const uint32_t index = add(JsonKind::kNumber, parent);
    const size_t begin = at_;
    (void)take('-');
    if (!take('0')) take_digits();
    bool is_integer = true;
    if (take('.')) {
      is_integer = false;
      take_digits();
    }
    if (take('e') || take('E')) {
      is_integer = false;
      if (!take('+')) (void)take('-');
      take_digits();
    }
    const char* first = text_.data() + begin;
    const char* last = text_.data() + at_;
    Node& number = node(index);
    if (is_integer && std::from_chars(first, last, number.integer).ec == std::errc()) {
      number.is_integer = true;
      return;
    }
    number.number = to_double(text_.substr(begin, at_ - begin));
  }

  void take_digits() {
    const size_t begin = at_;
    while (at_ < text_.size() && is_digit(text_[at_])) ++at_;
    if (at_ == begin) fail_here("a digit");
  }

  JsonDocument& document_;
  std::string_view text_;
  JsonLimits limits_;
  size_t at_ = 0;
  std::vector<uint32_t> keys_;  // of the objects that are open, innermost last
};

JsonDocument::JsonDocument(std::string_view text, std::string_view name, JsonLimits limits)
    : text_(text), name_(name) {
  PACELINE_CHECK(limits.max_bytes < std::numeric_limits<uint32_t>::max());
  JsonParser(*this, limits).parse();
}

}  // namespace paceline
