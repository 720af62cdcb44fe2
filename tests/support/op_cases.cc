// SPDX-License-Identifier: Apache-2.0
#include "support/op_cases.h"

#include <algorithm>
#include <cstring>

#include "base/float_types.h"

namespace paceline::testing {
namespace {

// Half an ulp of bfloat16 is 2^-9 of the value at most, 0.17 % of it RMS. Twice that and some for
// an intermediate that is rounded, too (the weights of attention's softmax, a normalised head).
constexpr double kBf16Bound = 6e-3;
constexpr double kF32Bound = 1e-5;

}  // namespace

int64_t element_bytes(Element element) {
  switch (element) {
    case Element::kU8:
      return 1;
    case Element::kBf16:
      return 2;
    case Element::kF32:
    case Element::kI32:
      return 4;
    case Element::kI64:
    case Element::kU64:
      return 8;
  }
  return 0;
}

int64_t cuda_bytes(const OpArray& array) {
  return array.cuda_bits ? array.num_cuda_bytes : array.count * element_bytes(array.cuda);
}

double float_at(Element element, const std::byte* bytes, int64_t index) {
  if (element == Element::kF32) {
    float value;
    std::memcpy(&value, bytes + 4 * index, 4);
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, bytes + 2 * index, 2);
  return bf16_to_float(bits);
}

std::vector<std::byte> initial_bytes(const OpArray& array, bool is_cuda) {
  const Element element = is_cuda ? array.cuda : array.cpu;
  const auto size = static_cast<size_t>(array.count * element_bytes(element));
  if (array.role == Role::kOutput) {
    // All ones is a NaN, but as an integer it is -1, which ops do write.
    return std::vector<std::byte>(size, is_float(element) ? std::byte{0xff} : std::byte{0xa5});
  }
  if (is_cuda && array.cuda_bits) return array.cuda_bits();
  if (!is_float(element)) return array.bits;
  std::vector<float> values(static_cast<size_t>(array.count));
  array.values(values.data());
  const bool is_rounded = array.cpu == Element::kBf16 || array.cuda == Element::kBf16;
  std::vector<std::byte> bytes(size);
  for (size_t i = 0; i < values.size(); ++i) {
    const uint16_t bits = float_to_bf16(values[i]);
    if (element == Element::kBf16) {
      std::memcpy(bytes.data() + 2 * i, &bits, 2);
    } else {
      const float value = is_rounded ? bf16_to_float(bits) : values[i];
      std::memcpy(bytes.data() + 4 * i, &value, 4);
    }
  }
  return bytes;
}

Handle OpInstance::find(std::string_view name) const {
  for (size_t i = 0; i < arrays.size(); ++i) {
    if (arrays[i].name == name) return static_cast<Handle>(i);
  }
  return kNoArray;
}

Rows first_rows(int32_t num_rows, int32_t max_rows) {
  Rows rows{.ids = std::vector<int64_t>(static_cast<size_t>(std::min(num_rows, max_rows))),
            .claimed = num_rows,
            .max_rows = max_rows};
  for (size_t i = 0; i < rows.ids.size(); ++i) rows.ids[i] = static_cast<int64_t>(i) % kMaxRowId;
  return rows;
}

OpArray float_array(std::string name, Element cpu, Element cuda, int64_t count,
                    std::function<void(float*)> values) {
  return {.name = std::move(name),
          .role = Role::kInput,
          .cpu = cpu,
          .cuda = cuda,
          .count = count,
          .rms_bound = cuda == Element::kBf16 ? kBf16Bound : kF32Bound,
          .values = std::move(values)};
}

OpArray output_array(std::string name, Element cpu, Element cuda, int64_t count,
                     int64_t row_length) {
  OpArray array = float_array(std::move(name), cpu, cuda, count, {});
  array.role = Role::kOutput;
  array.row_length = row_length;
  if (!is_float(cpu)) array.compare = Compare::kExact;
  return array;
}

OpArray intermediate_array(std::string name, Element cuda, int64_t count) {
  const Element cpu = is_float(cuda) ? Element::kF32 : cuda;
  OpArray array = output_array(std::move(name), cpu, cuda, count, 0);
  array.compare = Compare::kByCase;
  return array;
}

}  // namespace paceline::testing
