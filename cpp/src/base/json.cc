// SPDX-License-Identifier: Apache-2.0
#include "base/json.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <system_error>

#include "base/check.h"

namespace paceline {
namespace {

constexpr int kMaxDepth = 64;
constexpr int64_t kFarExponent = int64_t{1} << 40;  // further than the digits of a text reach

[[nodiscard]] bool is_digit(char c) { return c >= '0' && c <= '9'; }

// The length of the well-formed UTF-8 sequence (Unicode, table 3-7) at the start of `text`, or 0
// without one.
[[nodiscard]] size_t utf8_sequence(std::string_view text) {
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

[[nodiscard]] bool is_plain_key(std::string_view key) {
  return !key.empty() && std::all_of(key.begin(), key.end(), [](char c) {
    return is_digit(c) || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
  });
}

[[nodiscard]] std::string join(std::span<const std::string_view> first,
                               std::span<const std::string_view> second) {
  std::string out;
  for (const auto& names : {first, second}) {
    for (std::string_view name : names) {
      if (!out.empty()) out += ", ";
      out += name;
    }
  }
  return out;
}

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

std::string quoted(std::string_view text, size_t max_bytes) {
  constexpr std::string_view kHex = "0123456789abcdef";
  std::string out = "'";
  while (!text.empty()) {
    const size_t length = utf8_sequence(text);
    if (out.size() + std::max<size_t>(length, 1) > max_bytes + 1) return out + "...'";
    const auto byte = static_cast<unsigned char>(text[0]);
    if (length == 0 || byte < 0x20 || byte == 0x7f) {
      out += "\\x";
      out += kHex[byte >> 4];
      out += kHex[byte & 15];
      text.remove_prefix(1);
    } else {
      out += text.substr(0, length);
      text.remove_prefix(length);
    }
  }
  return out + "'";
}

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

JsonKind Json::kind() const { return document_->nodes_[node_].kind; }

void Json::expect(JsonKind kind, std::string_view allowed) const {
  if (this->kind() != kind) refuse(allowed);
}

bool Json::as_bool() const {
  expect(JsonKind::kBool, "true or false");
  return document_->nodes_[node_].boolean;
}

int64_t Json::as_int(int64_t low, int64_t high) const {
  const JsonDocument::Node& node = document_->nodes_[node_];
  if (node.kind != JsonKind::kNumber || !node.is_integer || node.integer < low ||
      node.integer > high) {
    refuse(low == high ? concat(low) : concat("an integer from ", low, " to ", high));
  }
  return node.integer;
}

double Json::as_double() const {
  expect(JsonKind::kNumber, "a number");
  const JsonDocument::Node& node = document_->nodes_[node_];
  if (node.is_integer) return static_cast<double>(node.integer);
  if (std::isinf(node.number)) refuse("a number that a double holds");
  return node.number;
}

std::string_view Json::as_string() const {
  expect(JsonKind::kString, "a string");
  return document_->string_of(node_);
}

JsonRange<Json> Json::elements() const {
  expect(JsonKind::kList, "a list");
  return {document_, node_};
}

JsonRange<JsonMember> Json::members() const {
  expect(JsonKind::kObject, "an object");
  return {document_, node_};
}

int64_t Json::size() const {
  if (kind() != JsonKind::kList) expect(JsonKind::kObject, "a list or an object");
  return document_->nodes_[node_].container.length;
}

std::optional<Json> Json::find(std::string_view key) const {
  for (const auto& [name, value] : members()) {
    if (name == key) return value;
  }
  return std::nullopt;
}

Json Json::at(std::string_view key) const {
  if (const std::optional<Json> value = find(key)) return *value;
  const std::string where = path();
  throw InvalidArgument(
      concat(document_->name_, ": ", where, where.empty() ? "" : ".", key, " is missing"));
}

void Json::check_keys(std::span<const std::string_view> required,
                      std::span<const std::string_view> optional) const {
  for (const auto& [key, value] : members()) {
    if (std::find(required.begin(), required.end(), key) == required.end() &&
        std::find(optional.begin(), optional.end(), key) == optional.end()) {
      throw InvalidArgument(concat(document_->name_, ": ", value.path(),
                                   " is an unknown key; allowed: ", join(required, optional)));
    }
  }
  for (std::string_view key : required) (void)at(key);
}

std::string_view Json::text() const {
  const JsonDocument::Node& node = document_->nodes_[node_];
  const std::string_view rest = document_->text_.substr(node.text_begin);
  switch (node.kind) {
    case JsonKind::kList:
    case JsonKind::kObject:
      return rest.substr(0, node.container.begin - node.text_begin);
    case JsonKind::kString: {
      size_t end = 1;
      while (rest[end] != '"') end += rest[end] == '\\' ? 2 : 1;
      return rest.substr(0, end + 1);
    }
    case JsonKind::kNull:
    case JsonKind::kBool:
    case JsonKind::kNumber:
      return rest.substr(0, rest.find_first_of(" \n\r\t,]}"));
  }
  return rest;
}

std::string Json::path() const {
  // Only errors need positions in lists, so they are counted here and not stored in every node.
  std::vector<std::string> steps;
  const auto& nodes = document_->nodes_;
  for (uint32_t node = node_; node != 0; node = nodes[node].parent) {
    const uint32_t parent = nodes[node].parent;
    if (nodes[parent].kind == JsonKind::kObject) {
      const std::string_view key = document_->string_of(node - 1);
      steps.push_back(is_plain_key(key) ? concat(".", quoted(key)) : concat("[", quoted(key), "]"));
      if (is_plain_key(key)) std::erase(steps.back(), '\'');
    } else {
      size_t position = 0;
      for (uint32_t i = parent + 1; i != node; i = nodes[i].next) ++position;
      steps.push_back(concat("[", position, "]"));
    }
  }
  std::string out;
  for (auto step = steps.rbegin(); step != steps.rend(); ++step) out += *step;
  if (out.starts_with('.')) out.erase(0, 1);
  return out;
}

std::string Json::seen() const {
  switch (kind()) {
    case JsonKind::kNull:
      return "null";
    case JsonKind::kBool:
      return as_bool() ? "true" : "false";
    case JsonKind::kString:
      return quoted(as_string());
    case JsonKind::kNumber: {
      const std::string_view number = text();
      return number.size() <= 40 ? std::string(number) : concat(number.substr(0, 40), "...");
    }
    case JsonKind::kList:
      return concat("a list of ", size());
    case JsonKind::kObject:
      return concat("an object of ", size(), " keys");
  }
  return "unknown";
}

void Json::refuse(std::string_view allowed) const {
  const std::string where = path();
  throw InvalidArgument(concat(document_->name_, ": ", where.empty() ? "the top level" : where,
                               " is ", seen(), "; allowed: ", allowed));
}

}  // namespace paceline
