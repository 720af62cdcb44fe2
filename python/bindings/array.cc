// SPDX-License-Identifier: Apache-2.0
#include "array.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <utility>

#include "device/device_memory.h"
#include "dlpack.h"

namespace paceline::python {
namespace {

dlpack::Device dlpack_device(Device device) {
  return {.type = device == Device::kCpu ? dlpack::kCpu : dlpack::kCuda, .id = 0};
}

// Keeps the memory and the shape alive as long as the consumer needs the tensor.
template <class Managed>
struct Export {
  Managed managed;
  std::shared_ptr<float> data;
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;
};

// The destructor of a capsule that no consumer has read.
template <class Managed>
void drop_capsule(PyObject* capsule, const char* name) {
  if (PyCapsule_IsValid(capsule, name) == 0) return;
  auto* const managed = static_cast<Managed*>(PyCapsule_GetPointer(capsule, name));
  managed->deleter(managed);
}

template <class Managed>
py::capsule make_capsule(const PyArray& array, const char* name, PyCapsule_Destructor drop) {
  auto owner = std::make_unique<Export<Managed>>();
  owner->data = array.data;
  owner->shape = array.shape;
  owner->strides.resize(array.shape.size());
  int64_t step = 1;
  for (size_t axis = array.shape.size(); axis-- > 0;) {
    owner->strides[axis] = step;
    step *= array.shape[axis];
  }
  Managed& managed = owner->managed;
  managed = {};
  managed.tensor = {.data = array.data.get(),
                    .device = dlpack_device(array.device),
                    .ndim = static_cast<int32_t>(array.shape.size()),
                    .dtype = {.code = dlpack::kFloat, .bits = 32, .lanes = 1},
                    .shape = owner->shape.data(),
                    .strides = owner->strides.data(),
                    .byte_offset = 0};
  managed.manager = owner.get();
  managed.deleter = [](Managed* self) { delete static_cast<Export<Managed>*>(self->manager); };
  if constexpr (std::is_same_v<Managed, dlpack::ManagedVersioned>) {
    managed.major = dlpack::kMajorVersion;
  }
  PyObject* const capsule = PyCapsule_New(&managed, name, drop);
  if (capsule == nullptr) throw py::error_already_set();
  (void)owner.release();
  return py::reinterpret_steal<py::capsule>(capsule);
}

// stream is not used: the values were complete before the array was made.
py::capsule export_array(const PyArray& self, const py::object&, const py::object& max_version,
                         const py::object& dl_device, const py::object& copy) {
  const dlpack::Device own = dlpack_device(self.device);
  if (!dl_device.is_none() && dl_device.cast<std::pair<int32_t, int32_t>>() !=
                                  std::pair<int32_t, int32_t>(own.type, own.id)) {
    PyErr_Format(PyExc_BufferError,
                 "dl_device is %R, but the array is on %s; allowed: None, and copy it afterwards",
                 dl_device.ptr(), device_name(self.device));
    throw py::error_already_set();
  }
  if (!copy.is_none() && copy.cast<bool>()) {
    PyErr_SetString(PyExc_BufferError, "copy is True; allowed: None or False: the array is shared");
    throw py::error_already_set();
  }
  if (!max_version.is_none() &&
      max_version.cast<std::pair<int64_t, int64_t>>().first >= dlpack::kMajorVersion) {
    return make_capsule<dlpack::ManagedVersioned>(
        self, dlpack::kVersionedName, [](PyObject* capsule) {
          drop_capsule<dlpack::ManagedVersioned>(capsule, dlpack::kVersionedName);
        });
  }
  return make_capsule<dlpack::Managed>(self, dlpack::kName, [](PyObject* capsule) {
    drop_capsule<dlpack::Managed>(capsule, dlpack::kName);
  });
}

}  // namespace

py::object to_numpy(const PyArray& array) {
  std::vector<py::ssize_t> shape(array.shape.begin(), array.shape.end());
  if (array.device == Device::kCpu) {
    auto owner = std::make_unique<std::shared_ptr<float>>(array.data);
    py::capsule base(owner.get(),
                     [](void* pointer) { delete static_cast<std::shared_ptr<float>*>(pointer); });
    (void)owner.release();
    return py::array_t<float>(std::move(shape), array.data.get(), base);
  }
  py::array_t<float> copy(std::move(shape));
  float* const to = copy.mutable_data();
  const int64_t bytes = copy.nbytes();
  const GilRelease release;
  device_memory(array.device)
      .download(to, reinterpret_cast<const std::byte*>(array.data.get()), bytes);
  return copy;
}

void register_array(py::module_& module) {
  py::class_<PyArray>(module, "Array",
                      "A float32 array in the memory of a device. Other libraries take it over "
                      "through DLPack without a copy, for example torch.from_dlpack. The array "
                      "owns its memory, together with all tensors that were made of it; the LLM "
                      "may go on or be closed.")
      .def("__dlpack__", &export_array, py::kw_only(), py::arg("stream") = py::none(),
           py::arg("max_version") = py::none(), py::arg("dl_device") = py::none(),
           py::arg("copy") = py::none(),
           R"doc(Exports the array as a DLPack capsule that shares its memory.

Args:
    stream: Not used: the values are complete.
    max_version: The newest version of DLPack that the caller reads; None: one before 1.0.
    dl_device: None, or the device that the array is on.
    copy: None or False.

Raises:
    BufferError: A copy or another device is asked for.
)doc")
      .def(
          "__dlpack_device__",
          [](const PyArray& self) {
            const dlpack::Device device = dlpack_device(self.device);
            return py::make_tuple(device.type, device.id);
          },
          "(device type, device id): (1, 0) on the CPU, (2, 0) on the GPU.")
      .def("numpy", &to_numpy,
           "The values as a numpy array: the same memory on the CPU, a copy from a GPU.")
      .def_property_readonly(
          "shape", [](const PyArray& self) { return py::tuple(py::cast(self.shape)); },
          "The size of each axis.")
      .def_property_readonly(
          "dtype", [](const PyArray&) { return "float32"; }, "\"float32\".")
      .def_property_readonly(
          "device", [](const PyArray& self) { return std::string(device_name(self.device)); },
          "\"cpu\" or \"cuda\".")
      .def("__repr__", [](const PyArray& self) {
        return "<paceline._core.Array float32 " +
               py::repr(py::tuple(py::cast(self.shape))).cast<std::string>() + ", " +
               device_name(self.device) + ">";
      });
}

}  // namespace paceline::python
