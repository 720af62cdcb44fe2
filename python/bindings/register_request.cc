// SPDX-License-Identifier: Apache-2.0
#include <pybind11/stl.h>

#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "guide.h"

namespace paceline::python {

void register_request(py::module_& module) {
  py::class_<Request>(module, "Request", "A request for `Executor.add_requests`.")
      .def(py::init([](std::vector<int32_t> prompt, double temperature, uint64_t seed,
                       int32_t max_tokens, std::vector<int32_t> stop_token_ids, bool score_prompt,
                       int32_t top_k, double top_p, double min_p, double repetition_penalty,
                       double presence_penalty, double frequency_penalty, int32_t min_tokens,
                       const std::vector<std::pair<int32_t, float>>& logit_bias,
                       std::vector<std::vector<int32_t>> bad_words,
                       std::vector<int32_t> allowed_token_ids, int32_t logprobs,
                       int32_t prompt_logprobs, int32_t num_samples,
                       std::vector<int32_t> hidden_layers, bool keeps_logits_on_device,
                       int32_t num_resumed_tokens, int32_t num_speculative_tokens,
                       std::string speculative_method, const std::vector<py::object>& constraints,
                       std::string cache_salt) {
             Request request;
             request.prompt = std::move(prompt);
             request.sampling.temperature = temperature;
             request.sampling.seed = seed;
             request.sampling.max_tokens = max_tokens;
             request.sampling.stop_token_ids = std::move(stop_token_ids);
             request.sampling.top_k = top_k;
             request.sampling.top_p = top_p;
             request.sampling.min_p = min_p;
             request.sampling.repetition_penalty = repetition_penalty;
             request.sampling.presence_penalty = presence_penalty;
             request.sampling.frequency_penalty = frequency_penalty;
             request.sampling.min_tokens = min_tokens;
             for (const auto& [token, bias] : logit_bias) {
               request.sampling.logit_bias.push_back({.token = token, .bias = bias});
             }
             request.sampling.bad_words = std::move(bad_words);
             request.sampling.allowed_token_ids = std::move(allowed_token_ids);
             request.sampling.logprobs = logprobs;
             request.sampling.prompt_logprobs = prompt_logprobs;
             request.score_prompt = score_prompt;
             request.num_samples = num_samples;
             request.hidden_layers = std::move(hidden_layers);
             request.keeps_logits_on_device = keeps_logits_on_device;
             request.num_resumed_tokens = num_resumed_tokens;
             request.num_speculative_tokens = num_speculative_tokens;
             request.speculative_method = std::move(speculative_method);
             for (const py::object& constraint : constraints) {
               request.constraints.push_back(make_constraint(constraint));
             }
             request.cache_salt = std::move(cache_salt);
             return request;
           }),
           py::arg("prompt"), py::kw_only(), py::arg("temperature") = 1.0, py::arg("seed") = 0,
           py::arg("max_tokens") = 16, py::arg("stop_token_ids") = std::vector<int32_t>{},
           py::arg("score_prompt") = false, py::arg("top_k") = 0, py::arg("top_p") = 1.0,
           py::arg("min_p") = 0.0, py::arg("repetition_penalty") = 1.0,
           py::arg("presence_penalty") = 0.0, py::arg("frequency_penalty") = 0.0,
           py::arg("min_tokens") = 0,
           py::arg("logit_bias") = std::vector<std::pair<int32_t, float>>{},
           py::arg("bad_words") = std::vector<std::vector<int32_t>>{},
           py::arg("allowed_token_ids") = std::vector<int32_t>{}, py::arg("logprobs") = -1,
           py::arg("prompt_logprobs") = -1, py::arg("num_samples") = 1,
           py::arg("hidden_layers") = std::vector<int32_t>{},
           py::arg("keeps_logits_on_device") = false, py::arg("num_resumed_tokens") = 0,
           py::arg("num_speculative_tokens") = -1, py::arg("speculative_method") = "",
           py::arg("constraints") = std::vector<py::object>{}, py::arg("cache_salt") = "",
           R"doc(Stores the values, which are checked when the request is added.

Args:
    prompt: Token ids, at least one, each in [0, vocab_size).
    temperature: 0 = greedy; up to 1e6.
    seed: The same seed gives the same output, whatever else runs.
    max_tokens: Maximum tokens to emit, >= 1; max_model_len limits prompt and output together.
    stop_token_ids: At most 8; a stop token is emitted, then the request ends.
    score_prompt: Instead of generating, return the target's logits of every prompt position.
    top_k: Keep the top_k most likely tokens; 0 = all.
    top_p: Of those, keep the fewest whose total probability reaches top_p; in (0, 1], 1 = all.
    min_p: Of those, keep tokens at least min_p times as likely as the best; in [0, 1], 0 = all.
    repetition_penalty: Divides positive logits of tokens in the prompt or output and multiplies
        negative ones; > 0, 1 = off.
    presence_penalty: Subtracted from the logits of tokens in the output.
    frequency_penalty: The same, times the number of occurrences.
    min_tokens: Output tokens before a stop token is allowed; at most max_tokens.
    logit_bias: (token, bias) pairs, added first; at most 1024, each token once.
    bad_words: Token sequences that the output must not contain; at most 128, 1024 tokens in all.
    allowed_token_ids: The only tokens that may be sampled; empty = all.
    logprobs: Number of most likely tokens whose logprobs are returned at each position, besides
        that of the emitted token. They are computed from the raw logits, before all of the above.
        At most the option max_logprobs; -1 = no logprobs.
    prompt_logprobs: The same for the prompt's tokens, except the first.
    hidden_layers: Instead of generating, return the target's hidden states at every prompt
        position: 0 = the input of the first layer, i = the output of the i-th layer, the number of
        layers = the output of the final norm.
    keeps_logits_on_device: With score_prompt: the logits stay on the device.
    num_samples: Independent samples, 1 to 128; sample i uses seed + i, modulo 2**64.
    num_resumed_tokens: The number of tokens at the prompt's end that are output of an earlier run
        of this request, which goes on after them; less than the prompt and less than max_tokens.
    num_speculative_tokens: Most drafts that are verified at once, 0 (plain decoding) to the
        executor's; -1 = as many as the executor's.
    speculative_method: The method that may draft, of those of the executor; "" = all.
    constraints: One object for each sample, or none. Its method `constrain(emitted, drafts,
        max_drafts, masks)` gets the output tokens since the last call, the proposed drafts, the
        largest number of drafts, and the address of max_drafts + 1 masks of
        (vocab_size + 31) // 32 uint32 each, all zero. It sets the bits of the tokens that may
        follow, row i for those after the first i drafts, and returns the drafts: those that it
        allows, and others after them. It is called on threads of the executor. What it raises ends
        the sample with an error.
    cache_salt: Requests of different salts share no KV; at most 512 bytes of UTF-8, no NUL.
)doc")
      .def_readonly("num_samples", &Request::num_samples, "Samples of the prompt.")
      .def("__repr__", [](const Request& self) {
        return "Request(num_prompt_tokens=" + std::to_string(self.prompt.size()) +
               ", num_samples=" + std::to_string(self.num_samples) + ")";
      });
}

}  // namespace paceline::python
