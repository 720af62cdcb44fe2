// SPDX-License-Identifier: Apache-2.0
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "array.h"
#include "bindings.h"

namespace paceline::python {
namespace {

py::object finish_reason_name(FinishReason reason) {
  switch (reason) {
    case FinishReason::kNone:
      return py::none();
    case FinishReason::kStop:
      return py::str("stop");
    case FinishReason::kLength:
      return py::str("length");
    case FinishReason::kCancelled:
      return py::str("cancelled");
    case FinishReason::kError:
      return py::str("error");
  }
  return py::none();
}

py::dict counters_to_dict(const SpeculationCounters& counters) {
  py::dict dict;
  dict["num_iterations"] = counters.num_iterations;
  dict["num_draft_tokens"] = counters.num_draft_tokens;
  dict["num_accepted_tokens"] = counters.num_accepted_tokens;
  dict["num_discarded_tokens"] = counters.num_discarded_tokens;
  dict["accepted_per_position"] = counters.accepted_per_position;
  dict["drafted_per_position"] = counters.drafted_per_position;
  return dict;
}

// A read-only view [rows, vocab] that shares ownership of the values: no copy.
py::object logits_array(const RequestEvent& event, int32_t vocab_size) {
  if (event.logits == nullptr || vocab_size <= 0) {
    return py::none();
  }
  using Values = std::shared_ptr<const std::vector<float>>;
  auto owner = std::make_unique<Values>(event.logits);
  const std::vector<float>& values = **owner;
  py::capsule base(owner.get(), [](void* pointer) { delete static_cast<Values*>(pointer); });
  (void)owner.release();
  const auto num_rows = static_cast<py::ssize_t>(values.size()) / vocab_size;
  py::array_t<float> array({num_rows, static_cast<py::ssize_t>(vocab_size)}, values.data(), base);
  array.attr("setflags")(py::arg("write") = false);
  return array;
}

// Shares ownership of the values: no copy.
py::object device_array(const DeviceValues& values) {
  if (values.data == nullptr) return py::none();
  return py::cast(PyArray{.data = values.data, .shape = values.shape, .device = values.device});
}

// One list per token, of tuples (token id, logprob, rank).
py::list logprobs_list(const std::vector<std::vector<TokenLogprob>>& tokens) {
  py::list result;
  for (const std::vector<TokenLogprob>& entries : tokens) {
    py::list list;
    for (const TokenLogprob& entry : entries) {
      list.append(py::make_tuple(entry.token, entry.logprob, entry.rank));
    }
    result.append(std::move(list));
  }
  return result;
}

std::string event_repr(const PyRequestEvent& self) {
  const RequestEvent& event = self.event;
  std::ostringstream out;
  out << "RequestEvent(id=" << event.request_id << ", sample=" << event.sample
      << ", num_token_ids=" << event.token_ids.size()
      << ", finish_reason=" << py::repr(finish_reason_name(event.finish_reason)).cast<std::string>()
      << ", num_drafted=" << event.num_drafted << ", num_accepted=" << event.num_accepted;
  if (!event.error.empty()) {
    out << ", error=" << py::repr(py::str(event.error)).cast<std::string>();
  }
  out << ")";
  return out.str();
}

}  // namespace

void register_event(py::module_& module) {
  py::class_<PyRequestEvent>(module, "RequestEvent",
                             "Tokens that one iteration emitted for one sample of a request, or "
                             "the end of the sample. The "
                             "event with a `finish_reason` is the last one of its sample.")
      .def_property_readonly(
          "id", [](const PyRequestEvent& self) { return self.event.request_id; },
          "The id that `Executor.add_request` returned.")
      .def_property_readonly(
          "sample", [](const PyRequestEvent& self) { return self.event.sample; },
          "Index of the sample within the request, from 0.")
      .def_property_readonly(
          "token_ids", [](const PyRequestEvent& self) { return self.event.token_ids; },
          "Newly emitted token ids, a new list at each access.")
      .def_property_readonly(
          "logprobs", [](const PyRequestEvent& self) { return logprobs_list(self.event.logprobs); },
          "With `logprobs`, a list of tuples (token id, logprob, rank) for each of `token_ids`: "
          "the "
          "token itself first, then the most likely tokens in order. Otherwise empty.")
      .def_property_readonly(
          "prompt_logprobs",
          [](const PyRequestEvent& self) -> py::object {
            if (self.event.prompt_logprobs == nullptr) {
              return py::none();
            }
            return logprobs_list(*self.event.prompt_logprobs);
          },
          "With `prompt_logprobs`, the same for the prompt's tokens from the second on, in the "
          "event of the first token; otherwise None.")
      .def_property_readonly(
          "finish_reason",
          [](const PyRequestEvent& self) { return finish_reason_name(self.event.finish_reason); },
          "None while the sample runs, otherwise \"stop\", \"length\", \"cancelled\" or \"error\".")
      .def_property_readonly(
          "error", [](const PyRequestEvent& self) { return self.event.error; },
          "The error, if `finish_reason` is \"error\"; otherwise empty.")
      .def_property_readonly(
          "num_drafted", [](const PyRequestEvent& self) { return self.event.num_drafted; },
          "Drafts verified in this iteration.")
      .def_property_readonly(
          "num_accepted", [](const PyRequestEvent& self) { return self.event.num_accepted; },
          "Drafts accepted in this iteration.")
      .def_property_readonly(
          "drafter", [](const PyRequestEvent& self) { return self.event.drafter; },
          "The method that made the drafts of this iteration, such as \"ngram\"; \"\" without "
          "drafts.")
      .def_property_readonly(
          "counters",
          [](const PyRequestEvent& self) { return counters_to_dict(self.event.counters); },
          "Totals of the sample, in its last event: a dict with num_iterations, "
          "num_draft_tokens, num_accepted_tokens, num_discarded_tokens, accepted_per_position [k] "
          "and drafted_per_position [k].")
      .def_property_readonly(
          "num_cached_tokens",
          [](const PyRequestEvent& self) { return self.event.num_cached_tokens; },
          "Prompt tokens whose KV was taken over from another sample of the request instead of "
          "being computed; last event only.")
      .def_property_readonly(
          "logits",
          [](const PyRequestEvent& self) { return logits_array(self.event, self.vocab_size); },
          "Read-only float32 array [prompt_len, vocab_size] in the last event of a request with "
          "`score_prompt`, otherwise None. Shares the event's memory and outlives it.")
      .def_property_readonly(
          "device_logits",
          [](const PyRequestEvent& self) { return device_array(self.event.device_logits); },
          "The logits as an `Array`, with `keeps_logits_on_device`; otherwise None.")
      .def_property_readonly(
          "hidden_states",
          [](const PyRequestEvent& self) { return device_array(self.event.hidden_states); },
          "An `Array` [hidden_layers, prompt_len, hidden_size] in the last event of a request with "
          "`hidden_layers`, otherwise None.")
      .def_property_readonly(
          "arrival_us", [](const PyRequestEvent& self) { return self.event.arrival_us; },
          "Steady clock in microseconds; last event only.")
      .def_property_readonly(
          "first_token_us", [](const PyRequestEvent& self) { return self.event.first_token_us; },
          "Steady clock in microseconds; last event only, 0 if there were no tokens.")
      .def_property_readonly(
          "finish_us", [](const PyRequestEvent& self) { return self.event.finish_us; },
          "Steady clock in microseconds; last event only.")
      .def("__repr__", &event_repr);
}

}  // namespace paceline::python
