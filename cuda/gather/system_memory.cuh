// SPDX-License-Identifier: Apache-2.0
#pragma once

// Loads and stores that other GPUs see, as PTX instructions.

#include <cstdint>

namespace paceline::cuda {

struct Packet {
  uint64_t value;
  uint64_t exchange;
};

// A packet is stored and loaded at once.
__device__ __forceinline__ void store_packet(Packet* to, const Packet& packet) {
  asm volatile(
      "{\n"
      ".reg .b128 both;\n"
      "mov.b128 both, {%1, %2};\n"
      "st.relaxed.sys.global.b128 [%0], both;\n"
      "}\n" ::"l"(to),
      "l"(packet.value), "l"(packet.exchange)
      : "memory");
}

__device__ __forceinline__ Packet load_packet(const Packet* from) {
  Packet packet;
  asm volatile(
      "{\n"
      ".reg .b128 both;\n"
      "ld.relaxed.sys.global.b128 both, [%2];\n"
      "mov.b128 {%0, %1}, both;\n"
      "}\n"
      : "=l"(packet.value), "=l"(packet.exchange)
      : "l"(from)
      : "memory");
  return packet;
}

__device__ __forceinline__ void store_release(uint64_t* to, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}
__device__ __forceinline__ uint64_t load_acquire(const uint64_t* from) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
}

// A load of this GPU's memory that stays where it is in the source.
__device__ __forceinline__ uint64_t load_here(const uint64_t* from) {
  uint64_t value;
  asm volatile("ld.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
}

}  // namespace paceline::cuda
