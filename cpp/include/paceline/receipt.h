// SPDX-License-Identifier: Apache-2.0
#pragma once

// Receipts of outputs, from which `paceline verify` replays them (docs/receipts.md).

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include <paceline/executor.h>
#include <paceline/export.h>
#include <paceline/model.h>
#include <paceline/request.h>

namespace paceline {

// Whether a receipt shows its inputs.
enum class ReceiptForm : uint8_t {
  kDigests,   // only their digests
  kWithText,  // the prompt and the lists of tokens, too
};

// Makes the receipts of an executor's outputs. It costs nothing until it is called. Thread-safe.
class PACELINE_API ReceiptMaker {
 public:
  // `folder` is that of the executor's target. Computes the digests of its files, about a second
  // for each GB unless the cache has them. Throws InvalidArgument where the output depends on more
  // than a replay would know (acceptance that depends on drafts is checked for each request),
  // ModelFileError for files that cannot be read or have changed since, and Unsupported after
  // update_models.
  ReceiptMaker(const ModelFolder& folder, const Executor& executor);
  ~ReceiptMaker();
  ReceiptMaker(ReceiptMaker&& other) noexcept;
  ReceiptMaker& operator=(ReceiptMaker&& other) noexcept;

  // The receipt of one sample as JSON, in its canonical form: one line of ASCII.
  // token_ids: all tokens of the sample, as its events have delivered them; those that the request
  // has resumed are in its prompt. finish_reason: of the last event, but kNone and kError.
  // Throws InvalidArgument for a value that is not allowed, and for acceptance that is not
  // "coupled" at a temperature above 0; Unsupported for constraints, which have no digest.
  [[nodiscard]] std::string make(const Request& request, int32_t sample,
                                 std::span<const int32_t> token_ids, FinishReason finish_reason,
                                 ReceiptForm form = ReceiptForm::kDigests) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace paceline
