// SPDX-License-Identifier: Apache-2.0
#include <paceline/receipt.h>

#include <paceline/error.h>
#include <paceline/version.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "base/boundary.h"
#include "base/canonical_json.h"
#include "base/check.h"
#include "base/json.h"
#include "base/sha256.h"
#include "engine/request_checks.h"
#include "executor/receipt_parts.h"
#include "model/weights/file_digest.h"
#include "model/weights/model_impl.h"
#include "model/weights/regular_file.h"

namespace paceline {
namespace {

constexpr int64_t kMaxTextBytes = int64_t{256} << 20;

// Canonical forms by key.
using Members = std::map<std::string, std::string, std::less<>>;

std::string object(const Members& members) {
  std::string text = "{";
  for (const auto& [key, value] : members) {
    if (text.size() > 1) text += ',';
    text += canonical_string(key) + ':' + value;
  }
  return text + '}';
}

template <class Range, class Write>
std::string list(const Range& values, const Write& write) {
  std::string text = "[";
  for (const auto& value : values) {
    if (text.size() > 1) text += ',';
    text += write(value);
  }
  return text + ']';
}

template <class Range>
std::string integers(const Range& values) {
  return list(values, [](auto value) { return std::to_string(value); });
}

std::string in_quotes(const std::string& text) { return '"' + text + '"'; }

// The SHA-256 of a file beside the weights in quotes; "null" where there is none.
std::string digest_of(const std::filesystem::path& path) {
  try {
    return in_quotes(sha256_hex(RegularFile(path.string()).read_all(kMaxTextBytes)));
  } catch (const ModelFileError& error) {
    if (error.is_missing()) return "null";
    throw;
  }
}

// The text of the default template in a JSON file, as transformers writes it: a string, or a list
// of named ones. nullopt: there is none.
std::optional<std::string> template_in(const std::filesystem::path& path) {
  try {
    const std::string text = RegularFile(path.string()).read_all(kMaxTextBytes);
    const JsonDocument document(text, path.string());
    const std::optional<Json> found = document.root().find("chat_template");
    if (!found.has_value() || found->kind() == JsonKind::kNull) return std::nullopt;
    if (found->kind() == JsonKind::kString) return std::string(found->as_string());
    for (const Json& named : found->elements()) {
      if (named.at("name").as_string() != "default") continue;
      return std::string(named.at("template").as_string());
    }
  } catch (const InvalidArgument&) {
    // There is no such file, or it is damaged: no conversation could be rendered.
  }
  return std::nullopt;
}

std::string template_digest(const std::filesystem::path& folder) {
  std::string digest = digest_of(folder / "chat_template.jinja");
  for (const char* const name : {"tokenizer_config.json", "chat_template.json"}) {
    if (digest != "null") break;
    if (const auto text = template_in(folder / name)) digest = in_quotes(sha256_hex(*text));
  }
  return digest;
}

const char* reason_name(FinishReason reason) {
  switch (reason) {
    case FinishReason::kStop:
      return "stop";
    case FinishReason::kLength:
      return "length";
    case FinishReason::kCancelled:
      return "abort";
    case FinishReason::kNone:
    case FinishReason::kError:
      break;
  }
  throw InvalidArgument(
      "finish_reason is kNone or kError; allowed: kStop, kLength or kCancelled, since an output "
      "that runs or has failed has no receipt");
}

// The sampling parameters that are not at their default, and those that every receipt has.
Members sampling_of(const SamplingOptions& s) {
  const SamplingOptions defaults;
  const std::set<int32_t> stop(s.stop_token_ids.begin(), s.stop_token_ids.end());
  Members members = {{"temperature", canonical_number(s.temperature)},
                     {"max_tokens", std::to_string(s.max_tokens)},
                     {"stop_token_ids", integers(stop)}};
  const auto add = [&](const char* name, auto SamplingOptions::* member) {
    if (s.*member != defaults.*member) {
      members[name] = canonical_number(static_cast<double>(s.*member));
    }
  };
  add("min_tokens", &SamplingOptions::min_tokens);
  add("top_k", &SamplingOptions::top_k);
  add("top_p", &SamplingOptions::top_p);
  add("min_p", &SamplingOptions::min_p);
  add("repetition_penalty", &SamplingOptions::repetition_penalty);
  add("presence_penalty", &SamplingOptions::presence_penalty);
  add("frequency_penalty", &SamplingOptions::frequency_penalty);
  return members;
}

// What receipts have digests of.
Members inputs_of(std::span<const int32_t> prompt, const SamplingOptions& s) {
  Members inputs = {{"prompt", integers(prompt)}};
  if (!s.bad_words.empty()) {
    std::vector<std::vector<int32_t>> distinct;
    for (const std::vector<int32_t>& word : s.bad_words) {
      if (std::ranges::find(distinct, word) == distinct.end()) distinct.push_back(word);
    }
    inputs["bad_words"] = list(distinct, [](const auto& word) { return integers(word); });
  }
  if (!s.allowed_token_ids.empty()) {
    const std::set<int32_t> allowed(s.allowed_token_ids.begin(), s.allowed_token_ids.end());
    inputs["allowed_token_ids"] = integers(allowed);
  }
  if (!s.logit_bias.empty()) {
    std::map<int32_t, double> biases;
    for (const LogitBias& bias : s.logit_bias) biases[bias.token] = bias.bias;
    inputs["logit_bias"] = list(biases, [](const auto& bias) {
      return concat('[', bias.first, ',', canonical_number(bias.second), ']');
    });
  }
  return inputs;
}

}  // namespace

std::string device_class(Device device) {
  if (device == Device::kCuda) {
    const char* const portable = std::getenv("PACELINE_PORTABLE");
    return concat("cuda sm_", cuda_status().compute_capability,
                  portable != nullptr && std::string_view(portable) == "1" ? " portable" : "");
  }
  // With these, products of bfloat16 weights round their input to bfloat16.
  __builtin_cpu_init();
  return concat("cpu ", build_info().cpu_features,
                __builtin_cpu_supports("avx512bf16") != 0 ? " avx512_bf16" : "");
}

ReceiptChain receipt_chain(std::string_view header, std::span<const int64_t> tokens,
                           std::string_view finish_reason) {
  Sha256 sha256;
  sha256.add(header);
  Sha256::Digest link = sha256.finish();
  ReceiptChain chain{.first = hex(link), .last = {}};
  for (const int64_t token : tokens) {
    std::array<std::byte, 8> bytes;
    for (size_t i = 0; i < 8; ++i) bytes[i] = static_cast<std::byte>(token >> 8 * i & 255);
    sha256.add(link);
    sha256.add(bytes);
    link = sha256.finish();
  }
  sha256.add(link);
  sha256.add(finish_reason);
  chain.last = hex(sha256.finish());
  return chain;
}

struct ReceiptMaker::Impl {
  Members facts;  // what all receipts begin with
  std::shared_ptr<const Model> target;
  AcceptMethod method = AcceptMethod::kCoupled;
  int32_t vocab_size = 0;

  // The files of the folder do not have weights that have been updated.
  void check_weights() const {
    const std::scoped_lock lock(target->use.mutex);
    if (target->use.num_updates == 0) return;
    throw Unsupported(
        "the weights have been updated since the folder was loaded, so its files do not have them; "
        "allowed: receipts of weights that come from files");
  }
};

ReceiptMaker::ReceiptMaker(const ModelFolder& folder, const Executor& executor) {
  at_boundary([&] {
    if (folder.target == nullptr || folder.origin.directory.empty()) {
      throw InvalidArgument(
          "folder was not read by load_model_folder; allowed: its result, with the target of the "
          "executor");
    }
    if (executor.vocab_size() != model_vocab_size(*folder.target)) {
      throw InvalidArgument(concat("executor has a vocabulary of ", executor.vocab_size(),
                                   " tokens, and the folder's target one of ",
                                   model_vocab_size(*folder.target),
                                   "; allowed: an executor of this target"));
    }
    const ExecutorOptions options = executor.options();
    if (options.use_null_device) {
      throw InvalidArgument(
          "executor has the null device, whose output is no model's; allowed: a device that "
          "computes, so use_null_device false");
    }
    const std::filesystem::path directory = folder.origin.directory;
    const std::string weights = file_digest(folder.origin.weights);
    const bool is_float32 = model_weight_dtype(*folder.target) == DType::kFloat32;
    const Members model = {{"weights", in_quotes("files:" + sha256_hex("[\"" + weights + "\"]"))},
                           {"config", in_quotes(folder.origin.config_digest)},
                           {"dtype", in_quotes(is_float32 ? "float32" : "bfloat16")},
                           {"tokenizer", digest_of(directory / "tokenizer.json")},
                           {"template", template_digest(directory)}};
    Impl impl{.facts = {{"paceline_receipt", "1"},
                        {"runtime", canonical_string(version())},
                        {"model", object(model)},
                        {"device", canonical_string(device_class(folder.target->device))},
                        {"max_model_len", std::to_string(options.max_model_len)}},
              .target = folder.target,
              .method = options.speculative.num_speculative_tokens > 0
                            ? options.speculative.rejection_sample_method
                            : AcceptMethod::kCoupled,
              .vocab_size = executor.vocab_size()};
    impl.check_weights();
    impl_ = std::make_unique<Impl>(std::move(impl));
  });
}

ReceiptMaker::~ReceiptMaker() = default;
ReceiptMaker::ReceiptMaker(ReceiptMaker&& other) noexcept = default;
ReceiptMaker& ReceiptMaker::operator=(ReceiptMaker&& other) noexcept = default;

std::string ReceiptMaker::make(const Request& request, int32_t sample,
                               std::span<const int32_t> token_ids, FinishReason finish_reason,
                               ReceiptForm form) const {
  return at_boundary([&] {
    impl_->check_weights();
    if (is_score(request)) {
      throw InvalidArgument(
          "request has score_prompt or hidden_layers and emits nothing; allowed: one that "
          "generates");
    }
    if (!request.constraints.empty()) {
      throw Unsupported(
          "constraints is not empty, and a constraint has no digest from which a replay could make "
          "it again; allowed: a request without");
    }
    if (sample < 0 || sample >= request.num_samples) {
      throw InvalidArgument(
          concat("sample is ", sample, "; allowed: 0 to ", request.num_samples - 1));
    }
    const AcceptMethod method = impl_->method;
    const bool is_synthetic = method == AcceptMethod::kSynthetic;
    if (is_synthetic || (method != AcceptMethod::kCoupled && request.sampling.temperature > 0)) {
      throw InvalidArgument(
          concat("the output of rejection_sample_method '",
                 option_names<AcceptMethod>[static_cast<size_t>(method)], "' at temperature ",
                 request.sampling.temperature,
                 " depends on the drafts, so it cannot be replayed; allowed: 'coupled'",
                 is_synthetic ? "" : ", or temperature 0"));
    }
    const int32_t num_resumed = request.num_resumed_tokens;
    const auto num_given = static_cast<int64_t>(request.prompt.size());
    if (num_resumed < 0 || num_resumed >= num_given) {
      throw InvalidArgument(concat("num_resumed_tokens is ", num_resumed, "; allowed: 0 to ",
                                   num_given - 1, ", less than the prompt"));
    }
    const auto prompt =
        std::span(request.prompt).first(static_cast<size_t>(num_given - num_resumed));
    std::vector<int64_t> tokens(request.prompt.end() - num_resumed, request.prompt.end());
    tokens.insert(tokens.end(), token_ids.begin(), token_ids.end());
    for (size_t i = 0; i < tokens.size(); ++i) {
      if (tokens[i] >= 0 && tokens[i] < impl_->vocab_size) continue;
      throw InvalidArgument(concat("output token ", i, " is ", tokens[i], "; allowed: 0 to ",
                                   impl_->vocab_size - 1, " (vocab_size ", impl_->vocab_size, ")"));
    }
    const char* const reason = reason_name(finish_reason);
    const Members inputs = inputs_of(prompt, request.sampling);
    Members digests;
    for (const auto& [name, value] : inputs) digests[name] = in_quotes(sha256_hex(value));
    Members receipt = impl_->facts;
    receipt["num_prompt_tokens"] = std::to_string(prompt.size());
    receipt["digests"] = object(digests);
    receipt["sampling"] = object(sampling_of(request.sampling));
    const uint64_t seed = request.sampling.seed + static_cast<uint64_t>(sample);  // modulo 2^64
    receipt["seed"] = in_quotes(std::to_string(seed));
    const ReceiptChain chain = receipt_chain(object(receipt), tokens, reason);
    receipt["tokens"] = integers(tokens);
    receipt["finish_reason"] = in_quotes(reason);
    receipt["chain"] = object({{"first", in_quotes(chain.first)}, {"last", in_quotes(chain.last)}});
    if (form == ReceiptForm::kWithText) receipt["inputs"] = object(inputs);
    return object(receipt);
  });
}

}  // namespace paceline
