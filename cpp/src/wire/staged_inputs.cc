// SPDX-License-Identifier: Apache-2.0
#include "wire/staged_inputs.h"

namespace paceline {

int64_t place_inputs(const InputCapacity& capacity, InputSide side, std::byte* base,
                     StagedInputs& inputs) {
  constexpr int64_t kAlignment = 64;
  int64_t bytes = 0;
  const auto place = [&]<class T>(T*& array, int64_t count) {
    if (base != nullptr) array = reinterpret_cast<T*>(base + bytes);
    const int64_t wanted = count * static_cast<int64_t>(sizeof(T));
    bytes += (wanted + kAlignment - 1) / kAlignment * kAlignment;
  };
  const auto place_member = [&](auto array, int32_t count, auto, int32_t) {
    place(inputs.*array, count);
  };
  place(inputs.counts, 1);
  visit_staged_arrays(capacity, place_member);
  if (side == InputSide::kRing) {
    visit_ring_arrays(capacity, place_member);
  } else {
    visit_ring_arrays(capacity, [&](auto array, auto...) { inputs.*array = nullptr; });
  }
  return bytes;
}

}  // namespace paceline
