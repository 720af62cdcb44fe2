// SPDX-License-Identifier: Apache-2.0
#pragma once

// A .safetensors file, mapped read-only and validated once, so that every view handed out lies
// inside the file and no two overlap. Knows no model. Anything wrong with the file throws
// ModelFileError naming the file, what was seen and what is allowed. Reading is thread-safe.
//
// The file must not be shortened while it is mapped: the kernel answers reads beyond its end with
// SIGBUS, and no library can turn that into an exception.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace paceline {

// The bytes of a regular file; move-only.
class MappedFile final {
 public:
  // Throws ModelFileError: is_missing when nothing is there.
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&&) = delete;

  [[nodiscard]] const std::byte* data() const { return data_; }  // null when empty
  [[nodiscard]] int64_t bytes() const { return bytes_; }

 private:
  const std::byte* data_ = nullptr;
  int64_t bytes_ = 0;
};

// One tensor of a file; valid while the SafetensorsFile lives.
struct StoredTensor {
  std::string_view dtype;          // as in the file, e.g. "BF16"
  std::span<const int64_t> shape;  // rank 0..8
  const std::byte* data;           // row-major, little-endian, at any alignment: read by memcpy
  int64_t bytes;
};

class SafetensorsFile final {
 public:
  explicit SafetensorsFile(const std::string& path);

  // Sorted.
  [[nodiscard]] std::vector<std::string_view> names() const;
  [[nodiscard]] std::optional<StoredTensor> find(std::string_view name) const;

 private:
  struct Entry {
    std::string name;
    std::string_view dtype;  // a string constant
    size_t first_dim;        // in dims_
    size_t rank;
    int64_t begin;  // in the file
    int64_t end;
  };

  void read_header(const std::string& where);

  MappedFile file_;
  std::vector<Entry> entries_;  // sorted by name
  std::vector<int64_t> dims_;   // of all shapes
};

}  // namespace paceline
