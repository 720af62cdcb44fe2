// SPDX-License-Identifier: Apache-2.0
#include "engine/samples.h"

#include <algorithm>
#include <utility>

#include "base/aligned_buffer.h"
#include "base/clock.h"
#include "device/device_memory.h"
#include "engine/request_checks.h"

namespace paceline {
namespace {

// Makes sample `index` of a request whose sample 0 is `first` and has not run yet.
std::unique_ptr<Sequence> sample_like(const Sequence& first, int32_t index) {
  auto sample = std::make_unique<Sequence>();
  sample->sample = index;
  sample->num_samples = first.num_samples;
  sample->sampling = first.sampling;
  sample->sampling.seed += static_cast<uint64_t>(index);  // modulo 2^64
  sample->sampling.prompt_logprobs = -1;  // sample 0 has them for all, since the prompt is the same
  sample->allowed = first.allowed;
  sample->cache_salt = first.cache_salt;
  sample->tokens = first.tokens;
  sample->prompt_len = first.prompt_len;
  sample->limit = first.limit;
  sample->own_drafts = first.own_drafts;
  sample->own_method = first.own_method;
  sample->sources = first.sources;
  sample->max_drafts = first.max_drafts;
  sample->counters = first.counters;
  sample->arrival_us = first.arrival_us;
  return sample;
}

DeviceValues allocate_values(Device device, std::vector<int64_t> shape, const char* purpose) {
  int64_t bytes = sizeof(float);
  for (const int64_t size : shape) bytes = checked_mul(bytes, size);
  auto buffer = std::make_shared<DeviceBuffer>(device_memory(device), bytes, purpose);
  float* const data = reinterpret_cast<float*>(buffer->data());
  return {.data = std::shared_ptr<float>(std::move(buffer), data),
          .shape = std::move(shape),
          .device = device};
}

}  // namespace

Samples make_samples(Request request, const SampleBounds& bounds) {
  auto first = std::make_unique<Sequence>();
  if (!request.cache_salt.empty()) {
    first->cache_salt = std::make_shared<const std::string>(std::move(request.cache_salt));
  }
  first->tokens = std::move(request.prompt);
  // The rest is known output, like that of a preempted sequence.
  first->prompt_len = first->known_len() - request.num_resumed_tokens;
  first->num_samples = request.num_samples;
  first->sampling = std::move(request.sampling);
  first->is_score = is_score(request);
  first->skips_logits = first->is_score && !request.score_prompt;
  if (const std::vector<int32_t>& allowed = first->sampling.allowed_token_ids; !allowed.empty()) {
    first->allowed.assign(static_cast<size_t>((bounds.vocab_size + 31) / 32), 0);
    for (const int32_t token : allowed) {
      first->allowed[static_cast<size_t>(token / 32)] |= uint32_t{1} << (token % 32);
    }
  }
  first->limit =
      first->is_score
          ? first->prompt_len
          : static_cast<int32_t>(std::min<int64_t>(
                int64_t{first->prompt_len} + first->sampling.max_tokens, bounds.max_model_len));
  first->own_drafts = request.num_speculative_tokens;
  first->own_method = std::move(request.speculative_method);
  first->set_drafter(bounds.num_draft_tokens, bounds.methods);
  if (request.score_prompt && request.keeps_logits_on_device) {
    first->device_logits =
        allocate_values(bounds.device, {first->prompt_len, bounds.vocab_size}, "logits");
  } else if (request.score_prompt) {
    first->logits = std::make_shared<std::vector<float>>(
        static_cast<size_t>(checked_mul(first->prompt_len, bounds.vocab_size)));
  }
  if (!request.hidden_layers.empty()) {
    const auto num_layers = static_cast<int64_t>(request.hidden_layers.size());
    first->hidden_states = allocate_values(
        bounds.device, {num_layers, first->prompt_len, bounds.hidden_size}, "hidden states");
    first->hidden_layers = std::move(request.hidden_layers);
  }
  if (first->sampling.prompt_logprobs >= 0) {
    first->prompt_logprobs = std::make_shared<std::vector<std::vector<TokenLogprob>>>(
        static_cast<size_t>(first->prompt_len - 1));
  }
  const auto k = static_cast<size_t>(first->max_drafts);
  const bool is_drafted_on_host = bounds.host_drafter != nullptr && first->max_drafts > 0;
  const bool is_guided = !first->is_score && (is_drafted_on_host || !request.constraints.empty());
  first->counters.accepted_per_position.assign(k, 0);
  first->counters.drafted_per_position.assign(k, 0);
  first->arrival_us = now_us();

  Samples samples;
  samples.push_back(std::move(first));
  for (int32_t i = 1; i < request.num_samples; ++i) {
    samples.push_back(sample_like(*samples.front(), i));
  }
  for (size_t i = 0; is_guided && i < samples.size(); ++i) {
    auto guide = std::make_shared<WindowGuide>();
    if (!request.constraints.empty()) guide->constraint = std::move(request.constraints[i]);
    if (is_drafted_on_host) {
      guide->drafter = bounds.host_drafter;
      // The first question brings the output of an earlier run.
      const std::vector<int32_t>& tokens = samples[i]->tokens;
      guide->tokens.assign(tokens.begin(), tokens.begin() + samples[i]->prompt_len);
    }
    samples[i]->guide = std::move(guide);
  }
  return samples;
}

}  // namespace paceline
