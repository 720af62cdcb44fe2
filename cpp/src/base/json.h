// SPDX-License-Identifier: Apache-2.0
#pragma once

// A small strict JSON reader (RFC 8259) for configurations and safetensors headers. It is our own
// because `pip install .` must work on a machine without system packages. It accepts UTF-8 only,
// refuses duplicate keys, and allows at most 64 levels. It takes time n log n at worst and memory
// in proportion to the text, both under a bound that the caller sets. It neither writes JSON nor
// parses streams.
//
// A Json is a light handle into its JsonDocument, which borrows the text. Text and document must
// outlive every handle and every string_view taken from them. Reading is thread-safe.

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace paceline {

enum class JsonKind : uint8_t { kNull, kBool, kNumber, kString, kList, kObject };

class JsonDocument;
template <class Item>
class JsonRange;
struct JsonMember;

// One value. Accessors throw InvalidArgument, which names the document, the path of the key, the
// value seen and the values allowed. Long values are shortened.
class Json final {
 public:
  [[nodiscard]] JsonKind kind() const;

  [[nodiscard]] bool as_bool() const;
  // A number written without fraction or exponent, in [low, high].
  [[nodiscard]] int64_t as_int(int64_t low, int64_t high) const;
  // The nearest double, which is 0 for a number that is too small. Refuses one that is too large.
  [[nodiscard]] double as_double() const;
  [[nodiscard]] std::string_view as_string() const;
  [[nodiscard]] JsonRange<Json> elements() const;       // a list's
  [[nodiscard]] JsonRange<JsonMember> members() const;  // an object's

  // The number of elements of a list or of members of an object.
  [[nodiscard]] int64_t size() const;
  // A member of an object. Looks at all members, so do not use it on large objects.
  [[nodiscard]] std::optional<Json> find(std::string_view key) const;
  [[nodiscard]] Json at(std::string_view key) const;
  // Refuses anything but an object that has every required key and only keys that are listed.
  void check_keys(std::span<const std::string_view> required,
                  std::span<const std::string_view> optional = {}) const;

  // The text of the value.
  [[nodiscard]] std::string_view text() const;
  // Like `layers[3].attention.window`; empty for the root.
  [[nodiscard]] std::string path() const;
  // Throws "DOCUMENT: PATH is SEEN; allowed: ALLOWED".
  [[noreturn]] void refuse(std::string_view allowed) const;

 private:
  friend class JsonDocument;
  template <class Item>
  friend class JsonRange;

  Json(const JsonDocument* document, uint32_t node) : document_(document), node_(node) {}
  void expect(JsonKind kind, std::string_view allowed) const;
  [[nodiscard]] std::string seen() const;

  const JsonDocument* document_;
  uint32_t node_;
};

struct JsonMember {
  std::string_view key;
  Json value;
};

struct JsonLimits {
  size_t max_bytes = size_t{64} << 20;      // of text; below 4 GiB
  uint32_t max_values = uint32_t{4} << 20;  // keys and values together; 24 B each
};

class JsonDocument final {
 public:
  // Every message begins with `name`. Throws InvalidArgument with the byte offset of the error.
  JsonDocument(std::string_view text, std::string_view name, JsonLimits limits = {});
  JsonDocument(const JsonDocument&) = delete;  // handles point here
  JsonDocument& operator=(const JsonDocument&) = delete;

  [[nodiscard]] Json root() const { return Json(this, 0); }

 private:
  friend class Json;
  template <class Item>
  friend class JsonRange;
  friend class JsonParser;

  struct Slice {
    uint32_t begin;
    uint32_t length;
  };
  // Values in the order of the text; a member is its key and then its value.
  struct Node {
    JsonKind kind = JsonKind::kNull;
    bool is_integer = false;  // kNumber: `integer` holds it exactly
    bool is_decoded = false;  // kString: lies in decoded_ because it had escapes, else in text_
    uint32_t parent = 0;
    uint32_t next = 0;  // one past the last node inside this value
    uint32_t text_begin = 0;
    union {
      bool boolean;
      int64_t integer;
      double number;
      Slice string;
      Slice container;  // begin: one past the last byte of its text; length: how many it holds
    };
    Node() : integer(0) {}
  };

  [[nodiscard]] std::string_view string_of(uint32_t node) const {
    const Node& value = nodes_[node];
    const std::string_view from = value.is_decoded ? std::string_view(decoded_) : text_;
    return from.substr(value.string.begin, value.string.length);
  }

  std::string_view text_;
  std::string name_;
  std::string decoded_;
  std::vector<Node> nodes_;
};

// The elements or members that a range-for visits.
template <class Item>
class JsonRange final {
 public:
  class Iterator final {
   public:
    Iterator(const JsonDocument* document, uint32_t node) : document_(document), node_(node) {}
    Item operator*() const {
      if constexpr (kIsMember) {
        return JsonMember{document_->string_of(node_), Json(document_, node_ + 1)};
      } else {
        return Json(document_, node_);
      }
    }
    Iterator& operator++() {
      node_ = document_->nodes_[node_ + kIsMember].next;
      return *this;
    }
    bool operator==(const Iterator& other) const { return node_ == other.node_; }

   private:
    const JsonDocument* document_;
    uint32_t node_;
  };

  JsonRange(const JsonDocument* document, uint32_t container)
      : document_(document), container_(container) {}
  [[nodiscard]] Iterator begin() const { return {document_, container_ + 1}; }
  [[nodiscard]] Iterator end() const { return {document_, document_->nodes_[container_].next}; }

 private:
  static constexpr bool kIsMember = std::is_same_v<Item, JsonMember>;

  const JsonDocument* document_;
  uint32_t container_;
};

// Text of any origin for a message: in single quotes, at most `max_bytes` of it, as valid UTF-8
// with control characters and invalid bytes escaped.
[[nodiscard]] std::string quoted(std::string_view text, size_t max_bytes = 80);

}  // namespace paceline
