// SPDX-License-Identifier: Apache-2.0
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <mutex>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <paceline/dtype.h>
#include <paceline/error.h>

#include "bindings.h"
#include "model/safetensors_file.h"

namespace paceline::python {
namespace {

// ---- SafetensorsFile -------------------------------------------------------------------------

// A mapped file that knows its path.
struct PySafetensorsFile {
  explicit PySafetensorsFile(const std::string& file_path) : path(file_path), file(file_path) {}

  // Throws ModelFileError when the file has no such tensor.
  [[nodiscard]] StoredTensor tensor(const std::string& name) const {
    const std::optional<StoredTensor> found = file.find(name);
    if (!found) {
      throw ModelFileError(path + " has no tensor '" + name + "'; it has " +
                           std::to_string(file.names().size()) + " others");
    }
    return *found;
  }

  std::string path;
  SafetensorsFile file;
};

std::string safetensors_repr(const PySafetensorsFile& self) {
  return "<paceline._core.SafetensorsFile " + py::repr(py::str(self.path)).cast<std::string>() +
         ", " + std::to_string(self.file.names().size()) + " tensors>";
}

py::tuple tensor_info(const PySafetensorsFile& self, const std::string& name) {
  const StoredTensor tensor = self.tensor(name);
  py::tuple shape(tensor.shape.size());
  for (size_t axis = 0; axis < tensor.shape.size(); ++axis) {
    shape[axis] = tensor.shape[axis];
  }
  return py::make_tuple(tensor.dtype, shape, tensor.bytes);
}

void register_safetensors_file(py::module_& module) {
  py::class_<PySafetensorsFile, Holder<PySafetensorsFile>>(
      module, "SafetensorsFile",
      "A safetensors file, mapped read-only; its header has been checked.")
      .def(py::init([](const std::string& path) {
             const GilRelease release;
             return Holder<PySafetensorsFile>(new PySafetensorsFile(path));
           }),
           py::arg("path"), R"doc(Maps a file and checks its header.

Args:
    path: The file.

Raises:
    paceline.ModelNotFoundError: There is no such file.
    paceline.ModelFileError: The file is truncated or its header does not hold; names the file.
)doc")
      .def(
          "names", [](const PySafetensorsFile& self) { return self.file.names(); },
          "The tensors' names, sorted.")
      .def("info", &tensor_info, py::arg("name"), R"doc(What the header says of a tensor.

Args:
    name: The tensor's name in the file.

Returns:
    (dtype, shape, nbytes): the dtype as the file spells it, for example "BF16".

Raises:
    paceline.ModelFileError: The file has no such tensor.
)doc")
      .def(
          "__contains__",
          [](const PySafetensorsFile& self, const std::string& name) {
            return self.file.find(name).has_value();
          },
          py::arg("name"), "Whether the file has a tensor of this name.")
      .def(
          "__len__", [](const PySafetensorsFile& self) { return self.file.names().size(); },
          "Number of tensors.")
      .def_property_readonly(
          "path", [](const PySafetensorsFile& self) { return self.path; }, "The file's path.")
      .def("__repr__", &safetensors_repr);
}

// ---- ModelBuilder ----------------------------------------------------------------------------

// A ModelBuilder is not thread-safe and its calls run without the GIL: one at a time.
class PyModelBuilder {
 public:
  PyModelBuilder(const std::string& config_json, DType weight_dtype, Device device)
      : builder_(config_json, weight_dtype, device), weight_dtype_(weight_dtype) {}

  // The caller holds the GIL.
  template <class Function>
  auto call(Function function) {
    const GilRelease release;
    const std::lock_guard lock(mutex_);
    if (is_finished_) {
      throw std::runtime_error("the model is finished; start another ModelBuilder");
    }
    return function(builder_);
  }

  PyModel finish() {
    return call([this](ModelBuilder& builder) {
      PyModel model{builder.finish()};
      is_finished_ = true;
      return model;
    });
  }

  [[nodiscard]] DType weight_dtype() const { return weight_dtype_; }

 private:
  std::mutex mutex_;
  ModelBuilder builder_;
  DType weight_dtype_;
  bool is_finished_ = false;
};

void put_array(PyModelBuilder& self, const std::string& name, const py::array& array) {
  DType dtype = DType::kFloat32;
  if (array.dtype().equal(py::dtype("float16"))) {
    dtype = DType::kFloat16;
  } else if (array.dtype().equal(py::dtype("int32"))) {
    dtype = DType::kInt32;
  } else if (!array.dtype().equal(py::dtype("float32"))) {
    throw py::value_error("tensor '" + name + "': the array's dtype is " +
                          py::str(array.dtype()).cast<std::string>() +
                          "; allowed: float32, float16 (token ids: int32) in native byte order");
  }
  if ((array.flags() & py::detail::npy_api::NPY_ARRAY_ALIGNED_) == 0) {
    throw py::value_error("tensor '" + name + "': the array is not aligned; copy it first");
  }
  std::vector<int64_t> shape(array.shape(), array.shape() + array.ndim());
  std::vector<int64_t> strides;
  for (py::ssize_t axis = 0; axis < array.ndim(); ++axis) {
    if (array.strides(axis) % array.itemsize() != 0) {
      throw py::value_error(
          "tensor '" + name + "': axis " + std::to_string(axis) + " has a stride of " +
          std::to_string(array.strides(axis)) +
          " bytes, which is no multiple of the element size; copy the array first");
    }
    strides.push_back(array.strides(axis) / array.itemsize());
  }
  const void* data = array.data();
  self.call([&](ModelBuilder& builder) { builder.put(name, dtype, shape, strides, data); });
}

// The runtime's name of a file's dtype.
DType stored_dtype(const PySafetensorsFile& file, const std::string& name, std::string_view dtype) {
  if (dtype == "F32") {
    return DType::kFloat32;
  }
  if (dtype == "BF16") {
    return DType::kBFloat16;
  }
  if (dtype == "F16") {
    return DType::kFloat16;
  }
  throw ModelFileError(file.path + ": tensor '" + name + "' has dtype " + std::string(dtype) +
                       "; allowed: F32, BF16, F16");
}

void put_tensor(PyModelBuilder& self, const std::string& name, const PySafetensorsFile& file,
                const std::string& tensor) {
  const StoredTensor stored = file.tensor(tensor);
  const DType dtype = stored_dtype(file, tensor, stored.dtype);
  self.call([&](ModelBuilder& builder) {
    builder.put(name, dtype, stored.shape, /*strides=*/{}, stored.data);
  });
}

void register_model_builder(py::module_& module) {
  py::class_<PyModelBuilder, Holder<PyModelBuilder>>(
      module, "ModelBuilder", "Fills a model with weights, tensor by tensor.")
      .def(py::init([](const std::string& config_json, const std::string& weight_dtype,
                       const std::string& device_name) {
             const DType dtype = parse_dtype(weight_dtype);
             const Device device = parse_device(device_name);
             const GilRelease release;
             return Holder<PyModelBuilder>(new PyModelBuilder(config_json, dtype, device));
           }),
           py::arg("config_json"), py::arg("weight_dtype"), py::arg("device") = "cpu",
           R"doc(Allocates the weights of a model.

Args:
    config_json: The canonical decoder description (docs/model-format.md).
    weight_dtype: "float32" or "bfloat16", of the matrices; norms and biases are float32.
    device: "cpu" or "cuda": where the weights will lie. Executors run there.

Raises:
    ValueError: A key of the description that is missing, unknown or not allowed.
    NotImplementedError: There is no such device; says why.
    paceline.OutOfMemoryError: The weights could not be allocated.
)doc")
      .def("put_tensor", &put_tensor, py::arg("name"), py::arg("file"), py::arg("tensor"),
           R"doc(Copies one tensor out of a mapped file, converting its dtype.

Args:
    name: The canonical name.
    file: The mapped file.
    tensor: The tensor's name in the file.

Raises:
    ValueError: An unknown name, a second put, or a wrong shape or dtype (seen and expected).
)doc")
      .def("put_array", &put_array, py::arg("name"), py::arg("array"),
           R"doc(Copies one tensor out of an array, converting its dtype.

Args:
    name: The canonical name.
    array: float32 or float16, any strides; int32 for token ids.

Raises:
    ValueError: An unknown name, a second put, or a wrong shape or dtype (seen and expected).
)doc")
      .def(
          "missing",
          [](PyModelBuilder& self) {
            return self.call([](ModelBuilder& builder) { return builder.missing(); });
          },
          "Canonical names that still have to be put, sorted.")
      .def(
          "fill_dummy",
          [](PyModelBuilder& self, uint64_t seed) {
            self.call([seed](ModelBuilder& builder) { builder.fill_dummy(seed); });
          },
          py::arg("seed"), R"doc(Fills every weight that was not put, for benches.

Matrices and embeddings become normal with standard deviation 0.02, norms neutral, biases 0.

Args:
    seed: Same seed, same weights.
)doc")
      .def("finish", &PyModelBuilder::finish, R"doc(Hands over the model; the builder is used up.

Returns:
    The model.

Raises:
    ValueError: Weights are missing; the message lists them.
)doc")
      .def("__repr__", [](const PyModelBuilder& self) {
        return "<paceline._core.ModelBuilder, " + std::string(dtype_name(self.weight_dtype())) +
               ">";
      });
}

// ---- Model, ModelFolder ----------------------------------------------------------------------

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

void register_models(py::module_& module) {
  py::class_<PyModel, Holder<PyModel>>(
      module, "Model",
      "The weights and description of one decoder. Immutable; shared "
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
}

}  // namespace

void register_model(py::module_& module) {
  register_safetensors_file(module);
  register_models(module);
  register_model_builder(module);
}

}  // namespace paceline::python
