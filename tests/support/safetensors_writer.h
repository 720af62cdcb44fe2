// SPDX-License-Identifier: Apache-2.0
#pragma once

// Writes safetensors files for tests: correct ones from tensors, and arbitrary bytes for hostile
// ones. Tensor names and dtypes must not need JSON escapes.

#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace paceline::test {

// A fresh folder, removed with its content.
class TemporaryFolder final {
 public:
  TemporaryFolder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "paceline-XXXXXX").string();
    if (mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("mkdtemp: " + pattern);
    path_ = pattern;
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  [[nodiscard]] std::string path() const { return path_.string(); }
  [[nodiscard]] std::string file(std::string_view name) const { return (path_ / name).string(); }

 private:
  std::filesystem::path path_;
};

inline void write_file(const std::string& path, std::string_view content) {
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  out.write(content.data(), static_cast<std::streamsize>(content.size()));
  if (!out.flush()) throw std::runtime_error("cannot write " + path);
}

// Length prefix, header and data section, unchecked.
[[nodiscard]] inline std::string safetensors_bytes(std::string_view header, std::string_view data) {
  const uint64_t length = header.size();
  std::string out(sizeof(length), '\0');
  std::memcpy(out.data(), &length, sizeof(length));
  return out.append(header).append(data);
}

template <class Value>
[[nodiscard]] std::string bytes_of(const std::vector<Value>& values) {
  std::string out(values.size() * sizeof(Value), '\0');
  std::memcpy(out.data(), values.data(), out.size());
  return out;
}

struct WrittenTensor {
  std::string name;
  std::string dtype;  // "F32"
  std::vector<int64_t> shape;
  std::string data;
};

// A correct file. The reference implementation pads the header with spaces so that the data is
// aligned to 8 bytes; `misalign` pads it to one byte more.
[[nodiscard]] inline std::string safetensors_bytes(const std::vector<WrittenTensor>& tensors,
                                                   bool misalign = false) {
  std::string header = R"({"__metadata__":{"format":"pt"})";
  std::string data;
  for (const WrittenTensor& tensor : tensors) {
    std::string shape;
    for (int64_t dim : tensor.shape) shape += (shape.empty() ? "" : ",") + std::to_string(dim);
    header += ",\"" + tensor.name + "\":{\"dtype\":\"" + tensor.dtype + "\",\"shape\":[" + shape +
              "],\"data_offsets\":[" + std::to_string(data.size()) + "," +
              std::to_string(data.size() + tensor.data.size()) + "]}";
    data += tensor.data;
  }
  header += '}';
  while (header.size() % 8 != (misalign ? 1 : 0)) header += ' ';
  return safetensors_bytes(header, data);
}

}  // namespace paceline::test
