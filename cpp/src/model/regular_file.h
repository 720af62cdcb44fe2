// SPDX-License-Identifier: Apache-2.0
#pragma once

// A regular file, open for reading. Nothing is mapped: a file that is shortened while it is read is
// an error here, where a mapping would end the process with SIGBUS. Reading is thread-safe.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace paceline {

class RegularFile final {
 public:
  // Throws ModelFileError for a file that cannot be opened (is_missing when nothing is there), and
  // for anything but a regular file, without waiting for it.
  explicit RegularFile(const std::string& path);
  ~RegularFile();
  RegularFile(RegularFile&& other) noexcept;
  RegularFile& operator=(RegularFile&&) = delete;

  [[nodiscard]] const std::string& path() const { return path_; }
  [[nodiscard]] int64_t bytes() const { return bytes_; }  // when it was opened

  // Fills `to` with the bytes from `offset` on. Throws ModelFileError where there are not as many.
  void read(int64_t offset, std::span<std::byte> to) const;

  // All of the file; ModelFileError where it has more than `max_bytes`.
  [[nodiscard]] std::string read_all(int64_t max_bytes) const;

 private:
  std::string path_;
  int descriptor_ = -1;
  int64_t bytes_ = 0;
};

}  // namespace paceline
