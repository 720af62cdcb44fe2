// SPDX-License-Identifier: Apache-2.0
#include <pybind11/stl.h>

#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <paceline/dtype.h>

#include "bindings.h"
#include "model/description/decoder_config.h"
#include "model/weights/linear_costs.h"
#include "model/weights/model_impl.h"

namespace paceline::python {
namespace {

std::string model_repr(const PyModel& self) {
  std::ostringstream out;
  out << "<paceline._core.Model, " << dtype_name(model_weight_dtype(*self.model)) << ", "
      << device_name(model_device(*self.model)) << ", " << model_weight_bytes(*self.model)
      << " weight bytes, vocab_size=" << model_vocab_size(*self.model)
      << ", max_position=" << model_max_position(*self.model) << ">";
  return out.str();
}

// A read-only memoryview of a copy, which belongs to the view.
py::object arena_view(const PyModel& self) {
  std::vector<std::byte> arena;
  {
    const GilRelease release;
    arena = model_weight_arena(*self.model);
  }
  const py::bytes copy(reinterpret_cast<const char*>(arena.data()), arena.size());
  return py::reinterpret_steal<py::object>(PyMemoryView_FromObject(copy.ptr()));
}

// What Python sees of a ModelFolder: its models share ownership with those of the folder.
struct PyModelFolder {
  PyModel target;
  std::optional<PyModel> draft;
  int32_t num_speculative_tokens = 0;
  std::vector<int32_t> stop_token_ids;
};

PyModelFolder load_folder(const std::string& directory, const std::string& device) {
  const Device parsed = parse_device(device);
  const GilRelease release;
  ModelFolder folder = load_model_folder(directory, parsed);
  PyModelFolder result;
  result.target.model = std::move(folder.target);
  if (folder.draft != nullptr) {
    result.draft = PyModel{std::move(folder.draft)};
  }
  result.num_speculative_tokens = folder.num_speculative_tokens;
  result.stop_token_ids = std::move(folder.stop_token_ids);
  return result;
}

std::string_view shard_axis_name(ShardAxis axis) {
  switch (axis) {
    case ShardAxis::kNone:
      return "none";
    case ShardAxis::kRows:
      return "rows";
  }
  return "none";
}

py::list linear_costs_to_list(const std::string& config_json, const std::string& weight_dtype,
                              const std::string& device_name) {
  const DType dtype = parse_dtype(weight_dtype);
  const Device device = parse_device(device_name);
  std::vector<LinearCost> costs;
  {
    const GilRelease release;
    costs = linear_costs(parse_decoder_config(config_json), dtype, device);
  }
  py::list list;
  for (const LinearCost& cost : costs) {
    py::dict entry;
    entry["name"] = cost.name;
    entry["rows"] = cost.rows;
    entry["cols"] = cost.cols;
    entry["bytes"] = cost.bytes;
    entry["is_for_logits"] = cost.is_for_logits;
    entry["num_experts"] = cost.num_experts;
    entry["top_k"] = cost.top_k;
    entry["shard_axis"] = shard_axis_name(cost.shard);
    list.append(std::move(entry));
  }
  return list;
}

void register_config_functions(py::module_& module) {
  module.def(
      "check_decoder_config",
      [](const std::string& config_json) {
        const GilRelease release;
        static_cast<void>(parse_decoder_config(config_json));
      },
      py::arg("config_json"), R"doc(Checks the description of a decoder without allocating anything.

Args:
    config_json: The canonical decoder description (docs/model-format.md).

Raises:
    ValueError: A key of the description that is missing, unknown or not allowed.
)doc");
  module.def("linear_costs", &linear_costs_to_list, py::arg("config_json"), py::arg("weight_dtype"),
             py::arg("device") = "cpu",
             R"doc(Lists the matrix products of a decoder, without allocating anything.

Args:
    config_json: The canonical decoder description (docs/model-format.md).
    weight_dtype: "float32" or "bfloat16", of the plain matrices.
    device: "cpu" or "cuda", which holds the weights.

Returns:
    One dict for each matrix, those that a draft head takes from its target included: "name"; "rows"
    and "cols", whose product is the number of multiply-adds for one row; "bytes" that a product
    reads, with scales and with the padding that fp8 and mxfp4 have on a GPU; "is_for_logits", whether it is computed only for rows whose logits are needed;
    "num_experts", if above 0, of how many experts the entry describes one, and "top_k", how many of
    them a row chooses; and "shard_axis", "rows" or "none": whether ranks share the matrix, or each
    has all of it.

Raises:
    ValueError: A key of the description that is missing, unknown or not allowed.
)doc");
}

}  // namespace

void register_model(py::module_& module) {
  py::class_<PyModel, Holder<PyModel>>(module, "Model",
                                       "The weights and description of one decoder, shared "
                                       "by the executors that use it.")
      .def_property_readonly(
          "weight_bytes", [](const PyModel& self) { return model_weight_bytes(*self.model); },
          "Bytes of all weights.")
      .def_property_readonly(
          "weight_dtype",
          [](const PyModel& self) {
            return std::string(dtype_name(model_weight_dtype(*self.model)));
          },
          "\"float32\" or \"bfloat16\", of the matrices.")
      .def_property_readonly(
          "vocab_size", [](const PyModel& self) { return model_vocab_size(*self.model); },
          "Rows of the embedding table.")
      .def_property_readonly(
          "max_position", [](const PyModel& self) { return model_max_position(*self.model); },
          "Positions the model was made for, in tokens.")
      .def_property_readonly(
          "device",
          [](const PyModel& self) { return std::string(device_name(model_device(*self.model))); },
          "\"cpu\" or \"cuda\": where the weights lie.")
      .def_property_readonly(
          "gpus",
          [](const PyModel& self) {
            std::vector<int32_t> gpus;
            for (const auto& rank : self.model->ranks) gpus.push_back(rank->gpu);
            return py::tuple(py::cast(gpus));
          },
          "The GPU of each rank, if they were chosen; else empty.")
      .def_property_readonly(
          "has_parts",
          [](const PyModel& self) {
            return self.model->ranks.size() > 1 && self.model->share == GpuShare::kPart;
          },
          "Whether each of these GPUs has a part of the weights, and not all.")
      .def("arena", &arena_view, R"doc(A copy of the bytes of all weights, for equality tests.

Returns:
    A read-only memoryview, which outlives the model.
)doc")
      .def("__repr__", &model_repr);

  py::class_<PyModelFolder>(module, "ModelFolder", "What `paceline convert` wrote.")
      .def_property_readonly(
          "target", [](const PyModelFolder& self) { return self.target; }, "The target.")
      .def_property_readonly(
          "draft", [](const PyModelFolder& self) { return self.draft; }, "The drafter, or None.")
      .def_readonly("num_speculative_tokens", &PyModelFolder::num_speculative_tokens,
                    "The folder's default k; 0 without a drafter.")
      .def_readonly("stop_token_ids", &PyModelFolder::stop_token_ids,
                    "The target's end-of-sequence ids.")
      .def("__repr__", [](const PyModelFolder& self) {
        return "<paceline._core.ModelFolder, target=" + model_repr(self.target) +
               ", draft=" + (self.draft ? model_repr(*self.draft) : std::string("None")) +
               ", num_speculative_tokens=" + std::to_string(self.num_speculative_tokens) + ">";
      });

  module.def("load_model_folder", &load_folder, py::arg("directory"), py::arg("device") = "cpu",
             R"doc(Reads a folder that `paceline convert` wrote.

Args:
    directory: The folder with paceline.json.
    device: "cpu" or "cuda": where the weights will lie.

Returns:
    The models and their defaults.

Raises:
    paceline.ModelNotFoundError: A file is missing; names it.
    paceline.ModelFileError: A file does not hold what it must; names file and key.
    NotImplementedError: There is no such device; says why.
    paceline.OutOfMemoryError: The weights could not be allocated.
)doc");
  register_config_functions(module);
}

}  // namespace paceline::python
