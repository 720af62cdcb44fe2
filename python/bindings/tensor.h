// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include <paceline/model.h>

#include "bindings.h"
#include "dlpack.h"

namespace paceline::python {

// Rows [first, first + count) of each of `groups` equal parts of a tensor's first axis.
struct RowGroups {
  int64_t groups = 1;
  int64_t first = 0;
  int64_t count = 0;
};
// Throws InvalidArgument for rows that the tensor does not have.
void check_rows(const std::string& name, std::span<const int64_t> shape, const RowGroups& rows);

// A tensor of another library, taken over through DLPack without a copy. It keeps the memory alive.
// Whoever destroys it holds the GIL.
class PyTensor {
 public:
  // Asks `object` for its tensor. `name` is for messages, e.g. "state_dict: tensor 'fc.weight'".
  // Throws ModelFileError for what is not exported, and for devices that Paceline does not read.
  PyTensor(const py::object& object, std::string name);
  // Rows [first, first + count) of each of `groups` equal parts of a tensor's first axis, without
  // axes of size 1 after it: [groups, count, ...]. It must not outlive the tensor. Throws
  // InvalidArgument for rows that the tensor does not have.
  PyTensor(const PyTensor& whole, int64_t groups, int64_t first, int64_t count);
  ~PyTensor();
  PyTensor(const PyTensor&) = delete;
  PyTensor& operator=(const PyTensor&) = delete;

  // As safetensors spells it: "F32", "BF16", ...; "F64" and others are no weights.
  [[nodiscard]] const std::string& dtype() const { return dtype_; }
  [[nodiscard]] const std::vector<int64_t>& shape() const { return shape_; }
  [[nodiscard]] int64_t nbytes() const;
  [[nodiscard]] Device device() const { return device_; }
  [[nodiscard]] bool is_same_memory(const PyTensor& other) const;

  // What ModelBuilder::put and update_models take. Throws ModelFileError for a dtype without DType.
  [[nodiscard]] NamedTensor named(const std::string& weight) const;
  // Elements [first, first + count) in row-major order. The caller may have released the GIL.
  [[nodiscard]] std::string read(int64_t first, int64_t count) const;

 private:
  [[nodiscard]] std::string refusal(const std::string& reason) const { return name_ + reason; }
  void take(const py::object& capsule);

  std::string name_;
  std::function<void()> release_;
  const std::byte* data_ = nullptr;
  std::string dtype_;
  int64_t element_bytes_ = 0;
  std::vector<int64_t> shape_;
  std::vector<int64_t> strides_;
  bool is_row_major_ = true;
  Device device_ = Device::kCpu;
};

}  // namespace paceline::python
