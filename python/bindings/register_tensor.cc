// SPDX-License-Identifier: Apache-2.0
#include <pybind11/stl.h>

#include <memory>
#include <string>

#include "array.h"
#include "tensor.h"

namespace paceline::python {
namespace {

py::tuple tensor_info(const PyTensor& self) {
  return py::make_tuple(self.dtype(), py::tuple(py::cast(self.shape())), self.nbytes());
}

py::bytes read_tensor(const PyTensor& self, int64_t first, int64_t count) {
  std::string bytes;
  {
    const GilRelease release;
    bytes = self.read(first, count);
  }
  return bytes;
}

}  // namespace

void register_tensor(py::module_& module) {
  py::class_<PyTensor>(module, "Tensor",
                       "A tensor of another library, taken over through DLPack without a copy.")
      .def(py::init<const py::object&, std::string>(), py::arg("object"), py::arg("name"),
           R"doc(Takes over a tensor.

Args:
    object: Any object with `__dlpack__` and `__dlpack_device__`, on the CPU or on CUDA device 0.
    name: What messages call it.

Raises:
    paceline.ModelFileError: It has no tensor that Paceline reads; names it.
    NotImplementedError: It is on a GPU that cannot be used; says why.
)doc")
      .def("info", &tensor_info,
           "(dtype, shape, nbytes): the dtype as safetensors spells it, for example \"BF16\".")
      .def("read", &read_tensor, py::arg("first"), py::arg("count"),
           "The bytes of `count` elements in row-major order from element `first` on.")
      .def(
          "rows",
          [](const PyTensor& self, int64_t groups, int64_t first, int64_t count) {
            return std::make_unique<PyTensor>(self, groups, first, count);
          },
          py::arg("groups"), py::arg("first"), py::arg("count"), py::keep_alive<0, 1>(),
          R"doc(Rows of each of several equal parts of the first axis, without a copy.

Args:
    groups: How many parts there are.
    first: The first row of each part.
    count: How many rows of each part follow it, that one included.

Returns:
    A tensor of shape (groups, count, ...), without axes of size 1 after these, but with one of them
    if there are no others.

Raises:
    ValueError: There are no such rows.
)doc")
      .def("is_same_memory", &PyTensor::is_same_memory, py::arg("other"),
           "Whether both are the same elements of the same memory.")
      .def_property_readonly(
          "device", [](const PyTensor& self) { return std::string(device_name(self.device())); },
          "\"cpu\" or \"cuda\".");
  register_array(module);
}

}  // namespace paceline::python
