// SPDX-License-Identifier: Apache-2.0
#pragma once

// The parts of receipts that C++ and Python share.

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include <paceline/device.h>

namespace paceline {

// What decides the last bits of logits: the device, and which instructions it has. For example "cpu
// avx512f avx512_bf16", or "cuda sm_90".
[[nodiscard]] std::string device_class(Device device);

// The first and the last link of a hash chain, in hexadecimal. The first is the SHA-256 of the
// header; each token adds that of the link before and the token, as a little-endian integer of 8
// bytes; the last link is that of the link before and the finish reason.
struct ReceiptChain {
  std::string first;
  std::string last;
};
[[nodiscard]] ReceiptChain receipt_chain(std::string_view header, std::span<const int64_t> tokens,
                                         std::string_view finish_reason);

}  // namespace paceline
