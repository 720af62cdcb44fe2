// SPDX-License-Identifier: Apache-2.0
// The values of a parsed JsonDocument, and the messages that refuse them.

#include "base/json.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "base/utf8.h"

namespace paceline {
namespace {

[[nodiscard]] bool is_plain_key(std::string_view key) {
  return !key.empty() && std::all_of(key.begin(), key.end(), [](char c) {
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
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
