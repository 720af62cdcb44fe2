// SPDX-License-Identifier: Apache-2.0
#include "bindings.h"
#include "graph/rejection.h"
#include "wire/limits.h"

namespace paceline::python {
namespace {

py::dict limits() {
  py::dict dict;
  dict["default_draft_proposals"] = kDefaultDraftProposals;
  dict["n"] = kMaxSamples;
  dict["temperature"] = kMaxTemperature;
  dict["logprobs"] = kMaxLogprobs;
  dict["stop_token_ids"] = kMaxStopIds;
  dict["logit_bias"] = kMaxLogitBias;
  dict["bad_words"] = kMaxBadWords;
  dict["bad_word_tokens"] = kMaxBadWordTokens;
  dict["cache_salt_bytes"] = kMaxCacheSaltBytes;
  return dict;
}

}  // namespace

void register_limits(py::module_& module) {
  module.def("limits", &limits, R"doc(The largest values that parameters of requests may have.

Returns:
    A dict from the name of a parameter of Python to its largest value, or to its largest number of
    entries. "bad_word_tokens" counts the tokens of all bad words, "cache_salt_bytes" those of
    UTF-8, and "default_draft_proposals" is
    no limit but the default of "draft_proposals".
)doc");
}

}  // namespace paceline::python
