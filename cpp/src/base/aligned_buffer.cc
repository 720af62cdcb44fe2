// SPDX-License-Identifier: Apache-2.0
#include "base/aligned_buffer.h"

#include <sys/mman.h>

namespace paceline {

AlignedBuffer::AlignedBuffer(int64_t bytes, std::string_view purpose) {
  PACELINE_CHECK(bytes >= 0, "bytes = ", bytes);
  if (bytes == 0) return;
  // Anonymous mappings are zeroed lazily and aligned to a page. Where the system grants huge pages,
  // reading weights causes far fewer TLB misses.
  void* data = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) {
    throw OutOfMemory(concat("out of memory: ", bytes >> 20, " MiB for ", purpose,
                             ", which the system does not grant"));
  }
  madvise(data, static_cast<size_t>(bytes), MADV_HUGEPAGE);  // a hint: failure changes nothing
  data_ = static_cast<std::byte*>(data);
  bytes_ = bytes;
}

void AlignedBuffer::reset() noexcept {
  if (data_ != nullptr) munmap(data_, static_cast<size_t>(bytes_));
  data_ = nullptr;
  bytes_ = 0;
}

int64_t checked_mul(int64_t a, int64_t b) {
  int64_t product = 0;
  if (__builtin_mul_overflow(a, b, &product)) {
    throw InvalidArgument(concat("size overflow: ", a, " * ", b, " bytes"));
  }
  return product;
}

}  // namespace paceline
