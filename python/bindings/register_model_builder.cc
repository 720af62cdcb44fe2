// SPDX-License-Identifier: Apache-2.0
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <paceline/dtype.h>
#include <paceline/error.h>

#include "safetensors.h"
#include "tensor.h"

namespace paceline::python {
namespace {

// A ModelBuilder is not thread-safe and its calls run without the GIL: one at a time.
class PyModelBuilder {
 public:
  PyModelBuilder(ModelBuilder builder, DType weight_dtype)
      : builder_(std::move(builder)), weight_dtype_(weight_dtype) {}

  // The caller holds the GIL.
  template <class Function>
  auto call(Function function) {
    GilRelease release;
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
  } else if (array.dtype().equal(py::dtype("uint8"))) {
    dtype = DType::kUInt8;
  } else if (array.dtype().equal(py::dtype("uint16"))) {
    dtype = DType::kBFloat16;
  } else if (!array.dtype().equal(py::dtype("float32"))) {
    throw py::value_error("tensor " + quoted(name) + ": the array's dtype is " +
                          py::str(array.dtype()).cast<std::string>() +
                          "; allowed: float32, float16, uint16 for the bits of bfloat16 (token ids "
                          "and orders: int32; "
                          "mxfp4, nvfp4 and int4: uint8) in native byte order");
  }
  if ((array.flags() & py::detail::npy_api::NPY_ARRAY_ALIGNED_) == 0) {
    throw py::value_error("tensor " + quoted(name) + ": the array is not aligned; copy it first");
  }
  std::vector<int64_t> shape(array.shape(), array.shape() + array.ndim());
  std::vector<int64_t> strides;
  for (py::ssize_t axis = 0; axis < array.ndim(); ++axis) {
    if (array.strides(axis) % array.itemsize() != 0) {
      throw py::value_error(
          "tensor " + quoted(name) + ": axis " + std::to_string(axis) + " has a stride of " +
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
  static constexpr std::pair<const char*, DType> kDtypes[] = {
      {"F32", DType::kFloat32}, {"BF16", DType::kBFloat16}, {"F16", DType::kFloat16},
      {"I32", DType::kInt32},   {"I64", DType::kInt64},     {"U8", DType::kUInt8},
      {"I8", DType::kUInt8},    {"F8_E8M0", DType::kUInt8}, {"F8_E4M3", DType::kFloat8E4M3}};
  for (const auto& [known, stored] : kDtypes) {
    if (dtype == known) return stored;
  }
  throw ModelFileError(file.path + ": tensor " + quoted(name) + " has dtype " + std::string(dtype) +
                       "; allowed: F32, BF16, F16, I32, I64, U8, I8, F8_E8M0, F8_E4M3");
}

void put_tensor(PyModelBuilder& self, const std::string& name, const PySafetensorsFile& file,
                const std::string& tensor) {
  const StoredTensor stored = file.tensor(tensor);
  const DType dtype = stored_dtype(file, tensor, stored.dtype);
  self.call([&](ModelBuilder& builder) {
    builder.put(name, dtype, stored.shape,
                [&](int64_t first, std::span<std::byte> to) { file.file.read(stored, first, to); });
  });
}

// The same for some rows of the tensor.
void put_rows(PyModelBuilder& self, const std::string& name, const PySafetensorsFile& file,
              const std::string& tensor, int64_t groups, int64_t first, int64_t count) {
  const StoredTensor stored = file.tensor(tensor);
  const DType dtype = stored_dtype(file, tensor, stored.dtype);
  check_rows(file.path + ": tensor " + quoted(tensor), stored.shape,
             {.groups = groups, .first = first, .count = count});
  const int64_t row_bytes = stored.bytes / stored.shape[0];
  const int64_t part_bytes = stored.bytes / groups;
  const int64_t read_bytes = count * row_bytes;  // of each part
  const std::array<int64_t, 2> shape = {groups * count, row_bytes / dtype_bytes(dtype)};
  self.call([&](ModelBuilder& builder) {
    builder.put(name, dtype, shape, [&](int64_t at, std::span<std::byte> to) {
      while (!to.empty()) {
        const int64_t within = at % read_bytes;
        const auto length = std::min(to.size(), static_cast<size_t>(read_bytes - within));
        file.file.read(stored, at / read_bytes * part_bytes + first * row_bytes + within,
                       to.first(length));
        at += static_cast<int64_t>(length);
        to = to.subspan(length);
      }
    });
  });
}

void put_dlpack(PyModelBuilder& self, const std::string& name, const PyTensor& tensor) {
  const NamedTensor named = tensor.named(name);
  self.call([&](ModelBuilder& builder) {
    builder.put(name, named.dtype, named.shape, named.strides, named.data, named.device);
  });
}

using PyUpdate = std::pair<PyModel, std::vector<std::pair<std::string, const PyTensor*>>>;

void update_all(const std::vector<PyUpdate>& updates) {
  std::vector<ModelUpdate> all;
  for (const auto& [model, tensors] : updates) {
    ModelUpdate update = {.model = model.model, .tensors = {}};
    for (const auto& [name, tensor] : tensors) update.tensors.push_back(tensor->named(name));
    all.push_back(std::move(update));
  }
  const GilRelease release;
  update_models(all);
}

}  // namespace

void register_model_builder(py::module_& module) {
  py::class_<PyModelBuilder, Holder<PyModelBuilder>>(
      module, "ModelBuilder", "Fills a model with weights, tensor by tensor.")
      .def(py::init([](const std::string& config_json, const std::string& weight_dtype,
                       const std::string& device_name, const std::vector<int32_t>& gpus,
                       bool is_drafter, int32_t draft_tensor_parallel_size) {
             const DType dtype = parse_dtype(weight_dtype);
             const Device device = parse_device(device_name);
             if (!gpus.empty() && device != Device::kCuda) {
               throw py::value_error("gpus is given and device is " + quoted(device_name) +
                                     "; allowed: device 'cuda', or no gpus");
             }
             GilRelease release;
             const auto share = [&] {
               if (!is_drafter) return GpuShare::kPart;
               return drafter_share(config_json, dtype, static_cast<int32_t>(gpus.size()),
                                    draft_tensor_parallel_size);
             };
             ModelBuilder builder = gpus.empty() ? ModelBuilder(config_json, dtype, device)
                                                 : ModelBuilder(config_json, dtype, gpus, share());
             return Holder<PyModelBuilder>(new PyModelBuilder(std::move(builder), dtype));
           }),
           py::arg("config_json"), py::arg("weight_dtype"), py::arg("device") = "cpu",
           py::kw_only(), py::arg("gpus") = std::vector<int32_t>(), py::arg("is_drafter") = false,
           py::arg("draft_tensor_parallel_size") = 0,
           R"doc(Allocates the weights of a model.

Args:
    config_json: The canonical decoder description (docs/model-format.md).
    weight_dtype: "float32" or "bfloat16", of the matrices; norms and biases are float32.
    device: "cpu" or "cuda": where the weights will lie. Executors run there.
    gpus: The GPU of each rank, of those that the process sees, from 0; only with "cuda". Empty: the
        first one has all weights.
    is_drafter: Each of these GPUs gets what `draft_tensor_parallel_size` says, and not in any case
        what its rank computes.
    draft_tensor_parallel_size: Of a drafter: as many as there are GPUs, so that each gets a part;
        1, so that each gets all; or 0, which chooses by bytes (docs/tensor-parallel.md).

Raises:
    ValueError: A key of the description that is missing, unknown or not allowed; gpus has a number
        twice; or draft_tensor_parallel_size is another number.
    NotImplementedError: There is no such device; says why. Or ranks cannot share the model, or a
        GPU is of another kind or cannot access the memory of another.
    paceline.OutOfMemoryError: The weights could not be allocated.
)doc")
      .def("put_tensor", &put_tensor, py::arg("name"), py::arg("file"), py::arg("tensor"),
           R"doc(Copies one tensor out of a file, converting its dtype.

Tensors of a format (docs/model-format.md) are copied as they are.

Args:
    name: The canonical name.
    file: The file.
    tensor: The tensor's name in the file.

Raises:
    ValueError: An unknown name, a second put, or a wrong shape or dtype (seen and expected).
)doc")
      .def("put_rows", &put_rows, py::arg("name"), py::arg("file"), py::arg("tensor"),
           py::arg("groups"), py::arg("first"), py::arg("count"),
           R"doc(Copies rows of one tensor out of a file, converting its dtype.

Args:
    name: The canonical name of a matrix; it has the rows of the first part, then of the next.
    file: The file.
    tensor: The tensor's name in the file; all axes but the first are columns.
    groups: The equal parts of the tensor's first axis.
    first: The first row of each part.
    count: How many rows of each part follow it, that one included.

Raises:
    ValueError: As for put_tensor, or the tensor has no such rows.
)doc")
      .def("put_dlpack", &put_dlpack, py::arg("name"), py::arg("tensor"),
           R"doc(Copies one tensor of another library, converting its dtype.

Args:
    name: The canonical name.
    tensor: The tensor; any strides. From a GPU to weights on that GPU, nothing passes through the
        host.

Raises:
    ValueError: An unknown name, a second put, or a wrong shape or dtype (seen and expected).
)doc")
      .def("put_array", &put_array, py::arg("name"), py::arg("array"),
           R"doc(Copies one tensor out of an array, converting its dtype.

Args:
    name: The canonical name.
    array: float32, float16, or uint16 for the bits of bfloat16, any strides; int32 for token ids
        and orders of inputs; uint8 for mxfp4, nvfp4 and int4.

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

Matrices and embeddings get normal values with standard deviation 0.02, in fp8, mxfp4, nvfp4 and
int4 the elements nearest to such values; norms get their neutral value, biases 0.

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
  module.def("update_models", &update_all, py::arg("updates"),
             R"doc(Overwrites all weights of models in place.

While it runs, no executor may use the models; see `Executor.while_idle`.

Args:
    updates: For each model the pair (model, tensors); tensors: pairs (canonical name, Tensor), each
        weight once.

Raises:
    ValueError: A tensor is missing, unknown, given twice, or has a wrong shape or dtype. No weight
        has changed.
    paceline.DeviceError: The device failed. Weights are partly written.
)doc");
}

}  // namespace paceline::python
