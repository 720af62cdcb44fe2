// SPDX-License-Identifier: Apache-2.0
#pragma once

// One call of an op for both backends: the arrays that it reads and writes, and the call itself, on
// the addresses at which the caller has placed those arrays. Random values of a row depend on the
// row's identity, not on its index, so a row can be computed again in another batch and must have
// the same bits.

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "device/cpu_context.h"
#include "device/cuda_context.h"
#include "ops/ops.h"

namespace paceline::testing {

enum class Element : uint8_t { kF32, kBf16, kU8, kI32, kI64, kU64 };
[[nodiscard]] int64_t element_bytes(Element element);
[[nodiscard]] constexpr bool is_float(Element element) {
  return element == Element::kF32 || element == Element::kBf16;
}
[[nodiscard]] constexpr Element element_of(DType dtype) {
  return dtype == DType::kFloat32 ? Element::kF32 : Element::kBf16;
}

enum class Role : uint8_t {
  kInput,   // must come out as it went in
  kOutput,  // poisoned before the op; what the CPU leaves poisoned must stay so
  kInOut,   // what the CPU leaves as it was must stay so, bit for bit
};
enum class Compare : uint8_t {
  kNear,  // by rms_bound, and element by element
  kExact,
  kByCase,  // by OpInstance::check
};

using Handle = int32_t;  // of an array of an instance
inline constexpr Handle kNoArray = -1;

struct OpArray {
  std::string name;
  Role role = Role::kInput;
  Element cpu = Element::kF32;   // what the CPU op sees and
  Element cuda = Element::kF32;  // what the CUDA op sees: activations differ, all else is the same
  int64_t count = 0;             // elements
  int64_t row_length = 0;        // elements from one row to the next; 0: not made of rows
  Compare compare = Compare::kNear;
  double rms_bound = 0;  // of kNear: ||out - ref|| / ||ref||
  // Row of this array that belongs to row i of the op; empty: i itself.
  std::vector<int64_t> row_at = {};
  int64_t num_live = -1;  // elements behind these are of rows that do not exist; -1: there are none
  int64_t num_ignored = 0;   // the first elements, which are not compared
  bool is_constant = false;  // the same for all rows that a case is made for
  // First elements and numbers of elements that the kernel before writes: the op must not read them
  // before that kernel has ended.
  std::vector<std::pair<int64_t, int64_t>> late = {};
  std::function<void(float*)> values = {};  // writes all of a float array
  std::vector<std::byte> bits = {};         // all of an integer array
  // What the CUDA op sees instead of an integer array, where that is laid out otherwise.
  std::function<std::vector<std::byte>()> cuda_bits = {};
  int64_t num_cuda_bytes = 0;  // of cuda_bits
};
// Bytes of the array as the CUDA op sees it.
[[nodiscard]] int64_t cuda_bytes(const OpArray& array);

// The array's first content as a backend sees it. Floats that a GPU holds as bfloat16 are rounded
// to it for the CPU too.
[[nodiscard]] std::vector<std::byte> initial_bytes(const OpArray& array, bool is_cuda);
// Element `index` of raw bytes.
[[nodiscard]] double float_at(Element element, const std::byte* bytes, int64_t index);

class Addresses {
 public:
  explicit Addresses(std::vector<std::byte*> at) : at_(std::move(at)) {}
  template <class T>
  [[nodiscard]] T* get(Handle handle) const {
    return handle == kNoArray ? nullptr : reinterpret_cast<T*>(at_[static_cast<size_t>(handle)]);
  }
  [[nodiscard]] std::byte* raw(Handle handle) const { return get<std::byte>(handle); }
  void set(Handle handle, std::byte* to) { at_[static_cast<size_t>(handle)] = to; }

 private:
  std::vector<std::byte*> at_;
};

using ArrayBytes = std::vector<std::vector<std::byte>>;  // of every array of an instance

struct OpInstance {
  std::vector<OpArray> arrays;
  int32_t num_rows = 0;       // that are computed
  int32_t max_model_len = 0;  // for the context
  int32_t num_compared = 0;   // draws at a temperature, for the share of equal ones
  std::function<void(CpuContext&, const Addresses&)> run_cpu;
  std::function<void(CudaContext&, const Addresses&)> run_cuda;
  // For arrays marked kByCase: the error, or an empty string. `num_different` counts draws that
  // differ within the tolerance.
  std::function<std::string(const ArrayBytes& cpu, const ArrayBytes& cuda, int64_t* num_different)>
      check;

  Handle add(OpArray array) {
    arrays.push_back(std::move(array));
    return static_cast<Handle>(arrays.size()) - 1;
  }
  [[nodiscard]] Handle find(std::string_view name) const;
  // `call` takes either context.
  template <class Call>
  void set_run(const Call& call) {
    run_cpu = call;
    run_cuda = call;
  }
};

// The dtype of activations on the backend of `Ctx`.
template <class Ctx>
[[nodiscard]] constexpr DType activation_dtype(const Ctx&, DType on_cuda) {
  return std::is_same_v<Ctx, CpuContext> ? DType::kFloat32 : on_cuda;
}

// Rows of a call: the identities of the computed rows, the value of num_rows (which may exceed
// max_rows) and the capacity.
struct Rows {
  std::vector<int64_t> ids;
  int32_t claimed = 0;
  int32_t max_rows = 0;
};
inline constexpr int64_t kMaxRowId = 1024;  // exclusive
// Identities 0, 1, ... of `num_rows` rows.
[[nodiscard]] Rows first_rows(int32_t num_rows, int32_t max_rows);

// --- randomness --------------------------------------------------------------------------------

// Random numbers from a seed and a purpose, the same on every machine.
class Stream {
 public:
  Stream(uint64_t seed, uint64_t purpose, uint64_t id = 0, uint64_t sub_id = 0)
      : state_(mix(mix(mix(mix(seed) + purpose) + id) + sub_id)) {}
  uint64_t next() {
    state_ += 0x9E3779B97F4A7C15u;
    return mix(state_);
  }
  // In [0, n).
  int32_t below(int32_t n) {
    return static_cast<int32_t>((next() >> 32) % static_cast<uint64_t>(n));
  }
  bool one_in(int32_t n) { return below(n) == 0; }
  // Approximately normal with mean 0 and variance 1: the sum of four uniform numbers.
  float normal() {
    const uint64_t bits = next();
    const int64_t sum = static_cast<int64_t>((bits & 0xffff) + (bits >> 16 & 0xffff) +
                                             (bits >> 32 & 0xffff) + (bits >> 48));
    return static_cast<float>(sum - 131070) * (1.7320508f / 65536.0f);
  }
  void fill(float* to, int64_t n, float scale = 1.0f) {
    for (int64_t i = 0; i < n; ++i) to[i] = scale * normal();
  }
  void fill_bits(std::span<uint8_t> to) {
    for (size_t i = 0; i < to.size(); i += sizeof(uint64_t)) {
      const uint64_t bits = next();
      std::memcpy(&to[i], &bits, std::min(sizeof(bits), to.size() - i));
    }
  }

 private:
  static uint64_t mix(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
  uint64_t state_;
};

template <class T>
void shuffle(std::vector<T>& values, Stream& stream) {
  for (size_t i = values.size(); i > 1; --i) {
    std::swap(values[i - 1], values[static_cast<size_t>(stream.below(static_cast<int32_t>(i)))]);
  }
}

// --- arrays, for the builders ------------------------------------------------------------------

template <class T>
[[nodiscard]] OpArray int_array(std::string name, Role role, const std::vector<T>& values) {
  OpArray array{.name = std::move(name), .role = role};
  array.cpu = array.cuda = std::is_same_v<T, int32_t>   ? Element::kI32
                           : std::is_same_v<T, int64_t> ? Element::kI64
                           : std::is_same_v<T, uint8_t> ? Element::kU8
                                                        : Element::kU64;
  array.count = static_cast<int64_t>(values.size());
  array.compare = Compare::kExact;
  const auto* const bytes = reinterpret_cast<const std::byte*>(values.data());
  array.bits.assign(bytes, bytes + values.size() * sizeof(T));
  return array;
}
// Poisoned; `cpu` and `cuda` are equal for what is no activation.
[[nodiscard]] OpArray output_array(std::string name, Element cpu, Element cuda, int64_t count,
                                   int64_t row_length);
// An intermediate result, which is compared only by what follows from it.
[[nodiscard]] OpArray intermediate_array(std::string name, Element cuda, int64_t count);
[[nodiscard]] OpArray float_array(std::string name, Element cpu, Element cuda, int64_t count,
                                  std::function<void(float*)> values);

}  // namespace paceline::testing
