// SPDX-License-Identifier: Apache-2.0
#pragma once

// The JSON of /v1/completions: OpenAI's, with token ids in place of text.

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include <paceline/request.h>
#include <nlohmann/json.hpp>

// A request that is malformed or asks for something that is not supported.
class Refusal : public std::runtime_error {
 public:
  Refusal(const std::string& message, std::string field)
      : std::runtime_error(message), param(std::move(field)) {}
  std::string param;  // the field at fault; empty: none
};

struct CompletionCall {
  paceline::Request request;
  bool is_streamed = false;
};

// Reads the body of a request. Fields that are absent are those of `defaults`, whose seed is
// replaced by a random one. Throws Refusal.
[[nodiscard]] CompletionCall parse_call(std::string_view body,
                                        const paceline::SamplingOptions& defaults);

// Makes the response of a request from its events.
class CompletionWriter {
 public:
  CompletionWriter(std::string id, int64_t num_prompt_tokens, int32_t num_samples);

  // Adds an event and returns what it adds to a stream.
  nlohmann::json add(const paceline::RequestEvent& event);
  // The last event of a stream, which has the counts.
  [[nodiscard]] nlohmann::json end() const;
  // The whole response.
  [[nodiscard]] nlohmann::json whole() const;

 private:
  [[nodiscard]] nlohmann::json head() const;

  std::string id_;
  int64_t created_;  // seconds since 1970
  int64_t num_prompt_tokens_;
  int64_t num_completion_tokens_ = 0;
  int64_t num_draft_tokens_ = 0;
  int64_t num_accepted_tokens_ = 0;
  std::vector<nlohmann::json> choices_;
};

// The text of a value. Messages may quote bytes of a request that are not UTF-8, or half a
// character; these are replaced.
[[nodiscard]] std::string to_text(const nlohmann::json& value);

[[nodiscard]] nlohmann::json error_json(const std::string& message, const std::string& type,
                                        const std::string& param = "");
