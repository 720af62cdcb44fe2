// SPDX-License-Identifier: Apache-2.0
#include "tensor.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include <paceline/error.h>

#include "base/json.h"
#include "device/device_memory.h"
#include "messages.h"

namespace paceline::python {
namespace {

constexpr int32_t kMaxDims = 64;

// Names of devices that DLPack knows and Paceline does not read.
std::string device_type_name(int32_t type) {
  switch (type) {
    case 4:
      return "OpenCL";
    case 7:
      return "Vulkan";
    case 8:
      return "Metal";
    case 9:
      return "VPI";
    case 10:
    case 11:
      return "ROCm";
    case 14:
      return "oneAPI";
    case 15:
      return "WebGPU";
    case 16:
      return "Hexagon";
    case 17:
      return "MAIA";
    default:
      return "unknown (DLPack device type " + std::to_string(type) + ")";
  }
}

std::string dtype_text(const dlpack::DataType& dtype) {
  const std::string bits = std::to_string(dtype.bits);
  switch (dtype.code) {
    case dlpack::kInt:
      return "I" + bits;
    case dlpack::kUInt:
      return "U" + bits;
    case dlpack::kFloat:
      return "F" + bits;
    case dlpack::kBFloat:
      return "BF" + bits;
    case dlpack::kBool:
      return "BOOL";
    case dlpack::kFloat8E4M3:
      return "F8_E4M3";
    case dlpack::kFloat8E5M2:
      return "F8_E5M2";
    case dlpack::kFloat8E8M0:
      return "F8_E8M0";
    default:
      return "DLPack type " + std::to_string(dtype.code) + " of " + bits + " bits";
  }
}

// What Python has raised, in one line.
std::string message_of(const py::error_already_set& error) {
  std::string text = py::str(error.value());
  std::replace(text.begin(), text.end(), '\n', ' ');
  if (text.size() > 200) text = text.substr(0, 197) + "...";
  return std::string(py::str(error.type().attr("__name__"))) + ": " + text;
}

py::object export_capsule(const py::object& object, const py::dict& arguments) {
  const py::object method = object.attr("__dlpack__");
  try {
    return method(py::arg("max_version") = py::make_tuple(dlpack::kMajorVersion, 0), **arguments);
  } catch (const py::error_already_set& error) {
    // Libraries from before DLPack 1 do not know the argument.
    if (!error.matches(PyExc_TypeError)) throw;
  }
  return method(**arguments);
}

}  // namespace

void check_rows(const std::string& name, std::span<const int64_t> shape, const RowGroups& rows) {
  const int64_t each = shape.empty() || rows.groups < 1 ? 0 : shape[0] / rows.groups;
  if (each > 0 && each * rows.groups == shape[0] && rows.first >= 0 && rows.count > 0 &&
      rows.count <= each - rows.first) {
    return;
  }
  throw InvalidArgument(name + " has " + std::to_string(shape.empty() ? 0 : shape[0]) +
                        " rows; rows " + std::to_string(rows.first) + " to " +
                        std::to_string(rows.first + rows.count) + " of each of " +
                        std::to_string(rows.groups) + " equal parts were asked for");
}

PyTensor::PyTensor(const py::object& object, std::string name) : name_(std::move(name)) {
  py::object source = object;
  // torch does not export a parameter that requires gradients. Reading it needs none.
  if (py::hasattr(source, "requires_grad") && py::hasattr(source, "detach") &&
      py::object(source.attr("requires_grad")).ptr() == Py_True) {
    source = source.attr("detach")();
  }
  if (!py::hasattr(source, "__dlpack__") || !py::hasattr(source, "__dlpack_device__")) {
    throw ModelFileError(refusal(" is " + shorten(source) + " (" +
                                 std::string(py::str(py::type::of(source).attr("__name__"))) +
                                 "); expected a tensor with __dlpack__, such as one of torch, "
                                 "numpy, jax or cupy"));
  }
  try {
    const auto [type, id] = source.attr("__dlpack_device__")().cast<std::pair<int32_t, int32_t>>();
    py::dict arguments;
    switch (type) {
      case dlpack::kCpu:
      case dlpack::kCudaHost:
        break;
      case dlpack::kCuda:
      case dlpack::kCudaManaged:
        if (id != 0) {
          throw ModelFileError(refusal(" is on CUDA device " + std::to_string(id) +
                                       "; expected device 0, the first GPU that "
                                       "CUDA_VISIBLE_DEVICES leaves visible, or the CPU"));
        }
        device_ = paceline::Device::kCuda;
        // The producer makes this stream, on which the weight is copied, wait for its own work.
        arguments["stream"] = cuda_memory().stream();
        break;
      default:
        throw ModelFileError(refusal(" is on a device of the kind " + device_type_name(type) +
                                     "; expected a tensor on the CPU or on CUDA device 0: copy it "
                                     "there first"));
    }
    take(export_capsule(source, arguments));
  } catch (py::error_already_set& error) {
    if (!error.matches(PyExc_Exception)) throw;  // a Ctrl-C
    throw ModelFileError(refusal(" cannot be read through DLPack: " + message_of(error)));
  } catch (const py::cast_error&) {
    throw ModelFileError(refusal(": __dlpack_device__() is no pair of integers"));
  } catch (const Unsupported& error) {
    throw Unsupported(refusal(std::string(" is on a CUDA device: ") + error.what()));
  }
}

PyTensor::PyTensor(const PyTensor& whole, int64_t groups, int64_t first, int64_t count)
    : name_(whole.name_),
      data_(whole.data_),
      dtype_(whole.dtype_),
      element_bytes_(whole.element_bytes_),
      shape_({groups, count}),
      is_row_major_(false),
      device_(whole.device_) {
  check_rows(name_, whole.shape_, {.groups = groups, .first = first, .count = count});
  const int64_t stride = whole.strides_[0];
  strides_ = {stride * (whole.shape_[0] / groups), stride};
  for (size_t axis = 1; axis < whole.shape_.size(); ++axis) {
    if (whole.shape_[axis] == 1) continue;
    shape_.push_back(whole.shape_[axis]);
    strides_.push_back(whole.strides_[axis]);
  }
  if (shape_.size() == 2 && whole.shape_.size() > 1) {  // one column is still a matrix
    shape_.push_back(1);
    strides_.push_back(1);
  }
  if (data_ != nullptr) data_ += first * stride * element_bytes_;
}

PyTensor::~PyTensor() {
  if (release_) release_();
}

void PyTensor::take(const py::object& capsule) {
  const dlpack::Tensor* tensor = nullptr;
  if (PyCapsule_IsValid(capsule.ptr(), dlpack::kVersionedName) != 0) {
    auto* const managed = static_cast<dlpack::ManagedVersioned*>(
        PyCapsule_GetPointer(capsule.ptr(), dlpack::kVersionedName));
    if (managed->major != dlpack::kMajorVersion) {
      throw ModelFileError(refusal(" comes as DLPack " + std::to_string(managed->major) + "." +
                                   std::to_string(managed->minor) + "; expected version 1 or 0"));
    }
    if (PyCapsule_SetName(capsule.ptr(), dlpack::kUsedVersionedName) != 0) {
      throw py::error_already_set();
    }
    release_ = [managed] {
      if (managed->deleter != nullptr) managed->deleter(managed);
    };
    tensor = &managed->tensor;
  } else if (PyCapsule_IsValid(capsule.ptr(), dlpack::kName) != 0) {
    auto* const managed =
        static_cast<dlpack::Managed*>(PyCapsule_GetPointer(capsule.ptr(), dlpack::kName));
    if (PyCapsule_SetName(capsule.ptr(), dlpack::kUsedName) != 0) throw py::error_already_set();
    release_ = [managed] {
      if (managed->deleter != nullptr) managed->deleter(managed);
    };
    tensor = &managed->tensor;
  } else {
    throw ModelFileError(refusal(": __dlpack__() returned " + shorten(capsule) +
                                 "; expected a capsule named 'dltensor' or 'dltensor_versioned' "
                                 "that nothing has read yet"));
  }
  // A constructor that throws has no destructor.
  try {
    if (tensor->dtype.lanes != 1) {
      throw ModelFileError(refusal(" has elements of " + std::to_string(tensor->dtype.lanes) +
                                   " lanes; expected single numbers"));
    }
    if (tensor->ndim < 0 || tensor->ndim > kMaxDims) {
      throw ModelFileError(refusal(" has " + std::to_string(tensor->ndim) + " axes"));
    }
    dtype_ = dtype_text(tensor->dtype);
    element_bytes_ = (tensor->dtype.bits + 7) / 8;
    shape_.assign(tensor->shape, tensor->shape + tensor->ndim);
    strides_.resize(shape_.size());
    int64_t step = 1;
    for (size_t axis = shape_.size(); axis-- > 0;) {
      strides_[axis] = tensor->strides != nullptr ? tensor->strides[axis] : step;
      is_row_major_ = is_row_major_ && (strides_[axis] == step || shape_[axis] == 1);
      step *= shape_[axis];
    }
    if (tensor->data != nullptr) {
      data_ = static_cast<const std::byte*>(tensor->data) + tensor->byte_offset;
    }
  } catch (...) {
    std::exchange(release_, nullptr)();
    throw;
  }
}

int64_t PyTensor::nbytes() const {
  int64_t bytes = element_bytes_;
  for (const int64_t size : shape_) bytes *= size;
  return bytes;
}

bool PyTensor::is_same_memory(const PyTensor& other) const {
  return data_ == other.data_ && device_ == other.device_ && dtype_ == other.dtype_ &&
         shape_ == other.shape_ && strides_ == other.strides_;
}

NamedTensor PyTensor::named(const std::string& weight) const {
  NamedTensor tensor = {.name = weight,
                        .dtype = DType::kFloat32,
                        .shape = shape_,
                        .strides = strides_,
                        .data = data_,
                        .device = device_};
  // U16: the bits of bfloat16, which numpy has no type for.
  static constexpr std::pair<const char*, DType> kDtypes[] = {
      {"F32", DType::kFloat32},       {"BF16", DType::kBFloat16}, {"U16", DType::kBFloat16},
      {"F16", DType::kFloat16},       {"I32", DType::kInt32},     {"I64", DType::kInt64},
      {"U8", DType::kUInt8},          {"I8", DType::kUInt8},      {"F8_E8M0", DType::kUInt8},
      {"F8_E4M3", DType::kFloat8E4M3}};
  for (const auto& [name, dtype] : kDtypes) {
    if (dtype_ == name) {
      tensor.dtype = dtype;
      return tensor;
    }
  }
  throw ModelFileError(refusal(" is stored as " + dtype_ +
                               "; expected F32, BF16, F16, I32, I64, U8, I8, F8_E8M0 or F8_E4M3"));
}

std::string PyTensor::read(int64_t first, int64_t count) const {
  const int64_t elements = nbytes() / std::max<int64_t>(element_bytes_, 1);
  if (first < 0 || count < 0 || first > elements - count) {
    throw InvalidArgument(name_ + " has " + std::to_string(elements) + " elements; elements " +
                          std::to_string(first) + " to " + std::to_string(first + count) +
                          " were asked for");
  }
  // The index of the element that is copied next, and its place in memory.
  std::vector<int64_t> index(shape_.size(), 0);
  int64_t left = first;
  for (size_t axis = shape_.size(); axis-- > 0;) {
    index[axis] = left % std::max<int64_t>(shape_[axis], 1);
    left /= std::max<int64_t>(shape_[axis], 1);
  }
  const auto offset = [&] {
    int64_t at = 0;
    for (size_t axis = 0; axis < shape_.size(); ++axis) at += index[axis] * strides_[axis];
    return at;
  };
  std::string bytes(static_cast<size_t>(count * element_bytes_), '\0');
  const auto copy = [&](int64_t done, const std::byte* from, int64_t run) {
    char* const to = bytes.data() + done * element_bytes_;
    if (device_ == paceline::Device::kCuda) {
      cuda_memory().download(to, from, run * element_bytes_);
    } else {
      std::memcpy(to, from, static_cast<size_t>(run * element_bytes_));
    }
  };
  if (is_row_major_ && count > 0) {
    copy(0, data_ + first * element_bytes_, count);
    return bytes;
  }
  // Runs of adjacent elements: the last axis, or the rest of it.
  const bool is_dense = strides_.back() == 1;
  for (int64_t done = 0; done < count;) {
    const int64_t run = is_dense ? std::min(count - done, shape_.back() - index.back()) : 1;
    copy(done, data_ + offset() * element_bytes_, run);
    done += run;
    index.back() += run;
    for (size_t axis = shape_.size(); axis-- > 1 && index[axis] == shape_[axis];) {
      index[axis] = 0;
      ++index[axis - 1];
    }
  }
  return bytes;
}

}  // namespace paceline::python
