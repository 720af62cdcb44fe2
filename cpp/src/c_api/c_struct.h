// SPDX-License-Identifier: Apache-2.0
#pragma once

// Structures of the C interface that grow: each begins with `size`, the size that the caller knows.
// A caller with an older header has fewer fields than the library, one with a newer header more.

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <string_view>
#include <type_traits>

#include <paceline/error.h>

#include "base/check.h"

namespace paceline {

// Larger sizes are not those of a structure: the caller has not set the field.
inline constexpr size_t kMaxStructBytes = 4096;

// Refuses a size below that of the fields that the caller must have.
inline void check_struct_size(std::string_view name, size_t size, size_t smallest_size) {
  if (size < smallest_size || size > kMaxStructBytes) {
    throw InvalidArgument(concat("the size of ", name, " is ", size, "; allowed: sizeof(", name,
                                 "); set the field `size` before the call"));
  }
}

// The caller's structure with all fields of this library; `defaults` has those that the caller does
// not know. Refuses a field that this library does not know unless its bytes are 0, the default.
template <class Struct>
[[nodiscard]] Struct read_struct(std::string_view name, const Struct& given, Struct defaults) {
  static_assert(std::is_trivially_copyable_v<Struct>);
  const size_t size = given.size;
  check_struct_size(name, size, sizeof(size));
  const auto* bytes = reinterpret_cast<const unsigned char*>(&given);
  const auto is_set = [](unsigned char byte) { return byte != 0; };
  if (size > sizeof(Struct) && std::any_of(bytes + sizeof(Struct), bytes + size, is_set)) {
    throw Unsupported(concat(name, " has a field that this version of the library does not know: ",
                             "its size is ", size, ", the library's is ", sizeof(Struct),
                             "; use a library as new as the header of the program"));
  }
  std::memcpy(&defaults, bytes, std::min(size, sizeof(Struct)));
  return defaults;
}

// Writes the fields that the caller knows. Those that only the caller knows become 0.
template <class Struct>
void write_struct(std::string_view name, Struct value, size_t size, Struct& to) {
  static_assert(std::is_trivially_copyable_v<Struct>);
  check_struct_size(name, size, sizeof(size));
  auto* bytes = reinterpret_cast<unsigned char*>(&to);
  value.size = size;
  std::memcpy(bytes, &value, std::min(size, sizeof(Struct)));
  if (size > sizeof(Struct)) std::memset(bytes + sizeof(Struct), 0, size - sizeof(Struct));
}

}  // namespace paceline
