// SPDX-License-Identifier: Apache-2.0
#include <pybind11/stl.h>

#include "safetensors.h"

namespace paceline::python {
namespace {

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

}  // namespace

void register_safetensors_file(py::module_& module) {
  py::class_<PySafetensorsFile, Holder<PySafetensorsFile>>(
      module, "SafetensorsFile",
      "A safetensors file, open for reading; its header has been checked.")
      .def(py::init([](const std::string& path) {
             GilRelease release;
             return Holder<PySafetensorsFile>(new PySafetensorsFile(path));
           }),
           py::arg("path"), R"doc(Opens a file and checks its header.

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

}  // namespace paceline::python
