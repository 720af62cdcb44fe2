// SPDX-License-Identifier: Apache-2.0
#include "completions.h"

#include <chrono>
#include <cmath>
#include <cstddef>
#include <limits>
#include <random>
#include <set>
#include <utility>

using nlohmann::json;

namespace {

constexpr int kMaxDepth = 3;  // of bad_words, the deepest field

[[noreturn]] void refuse(const std::string& field, const json& seen, const std::string& allowed) {
  std::string shown = to_text(seen);
  if (shown.size() > 80) shown = shown.substr(0, 80) + "...";
  throw Refusal(field + " is " + shown + "; allowed: " + allowed, field);
}

// Parses an object whose keys differ, with at most kMaxDepth levels.
json parse_object(std::string_view body) {
  std::set<std::string> keys;
  const auto check = [&](int depth, json::parse_event_t event, json& parsed) {
    if (depth > kMaxDepth) throw Refusal("the body is nested too deeply", "");
    if (event == json::parse_event_t::key && depth == 1) {
      const auto& key = parsed.get_ref<const std::string&>();
      if (!keys.insert(key).second) throw Refusal("the body has a field twice", key);
    }
    return true;
  };
  try {
    json parsed = json::parse(body, check);
    if (!parsed.is_object()) throw Refusal("the body is no JSON object", "");
    return parsed;
  } catch (const json::exception& error) {
    throw Refusal(std::string("the body is not valid JSON: ") + error.what(), "");
  }
}

template <class Integer>
Integer as_integer(const std::string& field, const json& value) {
  if (value.is_number_unsigned()) {
    const auto number = value.get<uint64_t>();
    if (std::in_range<Integer>(number)) return static_cast<Integer>(number);
  } else if (value.is_number_integer()) {
    const auto number = value.get<int64_t>();
    if (std::in_range<Integer>(number)) return static_cast<Integer>(number);
  }
  refuse(field, value,
         "an integer from " + std::to_string(std::numeric_limits<Integer>::min()) + " to " +
             std::to_string(std::numeric_limits<Integer>::max()));
}

double as_number(const std::string& field, const json& value) {
  if (!value.is_number()) refuse(field, value, "a number");
  return value.get<double>();
}

bool as_bool(const std::string& field, const json& value) {
  if (!value.is_boolean()) refuse(field, value, "true or false");
  return value.get<bool>();
}

std::vector<int32_t> as_token_ids(const std::string& field, const json& value) {
  if (!value.is_array()) refuse(field, value, "a list of token ids");
  std::vector<int32_t> tokens;
  tokens.reserve(value.size());
  for (const json& token : value) tokens.push_back(as_integer<int32_t>(field, token));
  return tokens;
}

std::vector<paceline::LogitBias> as_biases(const std::string& field, const json& value) {
  if (!value.is_object()) refuse(field, value, "an object of numbers by token id");
  std::vector<paceline::LogitBias> biases;
  for (const auto& [key, bias] : value.items()) {
    const json token = json::parse(key, nullptr, /*allow_exceptions=*/false);
    if (!token.is_number_integer()) refuse(field, key, "token ids as keys");
    const double number = as_number(field, bias);
    if (std::abs(number) > std::numeric_limits<float>::max()) refuse(field, bias, "a float32");
    biases.push_back({as_integer<int32_t>(field, token), static_cast<float>(number)});
  }
  return biases;
}

// Which method drafts for this request, and the largest number of drafts in an iteration.
void read_speculative(const std::string& field, const json& value, paceline::Request& request) {
  if (!value.is_object()) refuse(field, value, "an object");
  for (const auto& [key, part] : value.items()) {
    const std::string name = field + "." + key;
    if (key == "num_speculative_tokens") {
      request.num_speculative_tokens = as_integer<int32_t>(name, part);
      if (request.num_speculative_tokens < 0) refuse(name, part, "0 to the engine's");
    } else if (key == "method") {
      if (!part.is_string() || part == "") refuse(name, part, "a method of the engine");
      request.speculative_method = part.get<std::string>();
    } else if (key != "enabled") {
      refuse(field, value, "the keys enabled, num_speculative_tokens and method");
    }
  }
  const bool is_enabled =
      !value.contains("enabled") || as_bool(field + ".enabled", value["enabled"]);
  if (!is_enabled) request.num_speculative_tokens = 0;
}

const char* name_of(paceline::FinishReason reason) {
  switch (reason) {
    case paceline::FinishReason::kNone:
      break;
    case paceline::FinishReason::kStop:
      return "stop";
    case paceline::FinishReason::kLength:
      return "length";
    case paceline::FinishReason::kCancelled:
      return "cancelled";
    case paceline::FinishReason::kError:
      return "error";
  }
  return nullptr;
}

}  // namespace

// The engine checks the values themselves; its errors name the field too.
CompletionCall parse_call(std::string_view body, const paceline::SamplingOptions& defaults) {
  const json given = parse_object(body);
  CompletionCall call;
  call.request.sampling = defaults;
  call.request.sampling.seed = std::random_device()();
  paceline::SamplingOptions& sampling = call.request.sampling;
  bool ignores_eos = false;
  for (const auto& [name, value] : given.items()) {
    if (value.is_null() || name == "model" || name == "user") continue;
    if (name == "prompt") {
      call.request.prompt = as_token_ids(name, value);
    } else if (name == "stream") {
      call.is_streamed = as_bool(name, value);
    } else if (name == "n") {
      call.request.num_samples = as_integer<int32_t>(name, value);
    } else if (name == "speculative") {
      read_speculative(name, value, call.request);
    } else if (name == "cache_salt") {
      // One that is empty would share the cache with all others.
      if (!value.is_string() || value == "") refuse(name, value, "a string that is not empty");
      call.request.cache_salt = value.get<std::string>();
    } else if (name == "max_tokens") {
      sampling.max_tokens = as_integer<int32_t>(name, value);
    } else if (name == "min_tokens") {
      sampling.min_tokens = as_integer<int32_t>(name, value);
    } else if (name == "temperature") {
      sampling.temperature = as_number(name, value);
    } else if (name == "seed") {
      sampling.seed = as_integer<uint64_t>(name, value);
    } else if (name == "top_k") {
      sampling.top_k = as_integer<int32_t>(name, value);
    } else if (name == "top_p") {
      sampling.top_p = as_number(name, value);
    } else if (name == "min_p") {
      sampling.min_p = as_number(name, value);
    } else if (name == "repetition_penalty") {
      sampling.repetition_penalty = as_number(name, value);
    } else if (name == "presence_penalty") {
      sampling.presence_penalty = as_number(name, value);
    } else if (name == "frequency_penalty") {
      sampling.frequency_penalty = as_number(name, value);
    } else if (name == "logit_bias") {
      sampling.logit_bias = as_biases(name, value);
    } else if (name == "stop_token_ids") {
      for (const int32_t token : as_token_ids(name, value)) {
        sampling.stop_token_ids.push_back(token);
      }
    } else if (name == "ignore_eos") {
      ignores_eos = as_bool(name, value);
    } else if (name == "allowed_token_ids") {
      sampling.allowed_token_ids = as_token_ids(name, value);
    } else if (name == "bad_words") {
      if (!value.is_array()) refuse(name, value, "a list of lists of token ids");
      for (const json& word : value) sampling.bad_words.push_back(as_token_ids(name, word));
    } else {
      throw Refusal("the field " + name.substr(0, 80) + " is not supported", name.substr(0, 80));
    }
  }
  if (ignores_eos) {
    const auto num_default = static_cast<std::ptrdiff_t>(defaults.stop_token_ids.size());
    sampling.stop_token_ids.erase(sampling.stop_token_ids.begin(),
                                  sampling.stop_token_ids.begin() + num_default);
  }
  return call;
}

CompletionWriter::CompletionWriter(std::string id, int64_t num_prompt_tokens, int32_t num_samples)
    : id_(std::move(id)),
      created_(std::chrono::duration_cast<std::chrono::seconds>(
                   std::chrono::system_clock::now().time_since_epoch())
                   .count()),
      num_prompt_tokens_(num_prompt_tokens) {
  for (int32_t sample = 0; sample < num_samples; ++sample) {
    choices_.push_back(
        {{"index", sample}, {"token_ids", json::array()}, {"finish_reason", nullptr}});
  }
}

json CompletionWriter::add(const paceline::RequestEvent& event) {
  json piece = {{"index", event.sample}, {"token_ids", event.token_ids}};
  const char* const reason = name_of(event.finish_reason);
  piece["finish_reason"] = reason == nullptr ? json(nullptr) : json(reason);
  if (!event.error.empty()) piece["error"] = event.error;
  num_completion_tokens_ += static_cast<int64_t>(event.token_ids.size());
  num_draft_tokens_ += event.counters.num_draft_tokens;  // 0 except in a sample's last event
  num_accepted_tokens_ += event.counters.num_accepted_tokens;

  json& choice = choices_[static_cast<size_t>(event.sample)];
  for (const int32_t token : event.token_ids) choice["token_ids"].push_back(token);
  choice["finish_reason"] = piece["finish_reason"];
  if (!event.error.empty()) choice["error"] = event.error;
  json response = head();
  response["choices"].push_back(std::move(piece));
  return response;
}

json CompletionWriter::end() const {
  json response = head();
  response["usage"] = {{"prompt_tokens", num_prompt_tokens_},
                       {"completion_tokens", num_completion_tokens_},
                       {"total_tokens", num_prompt_tokens_ + num_completion_tokens_}};
  response["metrics"]["speculative_decoding"] = {
      {"num_draft_tokens", num_draft_tokens_}, {"num_accepted_draft_tokens", num_accepted_tokens_}};
  return response;
}

json CompletionWriter::whole() const {
  json response = end();
  response["choices"] = choices_;
  return response;
}

json CompletionWriter::head() const {
  return {{"id", id_},
          {"object", "text_completion"},
          {"created", created_},
          {"choices", json::array()}};
}

std::string to_text(const json& value) {
  return value.dump(-1, ' ', /*ensure_ascii=*/false, json::error_handler_t::replace);
}

json error_json(const std::string& message, const std::string& type, const std::string& param) {
  return {{"error",
           {{"message", message},
            {"type", type},
            {"param", param.empty() ? json(nullptr) : json(param)},
            {"code", nullptr}}}};
}
