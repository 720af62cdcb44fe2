// SPDX-License-Identifier: Apache-2.0
#pragma once

// The structs of DLPack 1.x and 0.x, as they lie in memory: tensors pass between libraries as
// capsules of them, without a copy. (https://dmlc.github.io/dlpack, C API)

#include <cstdint>

namespace paceline::python::dlpack {

inline constexpr uint32_t kMajorVersion = 1;
inline constexpr uint64_t kReadOnly = 1;  // a bit of ManagedVersioned::flags

// Names of capsules: before and after their consumer has taken the tensor over.
inline constexpr const char* kName = "dltensor";
inline constexpr const char* kUsedName = "used_dltensor";
inline constexpr const char* kVersionedName = "dltensor_versioned";
inline constexpr const char* kUsedVersionedName = "used_dltensor_versioned";

enum DeviceType : int32_t { kCpu = 1, kCuda = 2, kCudaHost = 3, kCudaManaged = 13 };

struct Device {
  int32_t type;
  int32_t id;
};

enum TypeCode : uint8_t {
  kInt = 0,
  kUInt = 1,
  kFloat = 2,
  kBFloat = 4,
  kBool = 6,
  kFloat8E4M3 = 10,
  kFloat8E5M2 = 12,
  kFloat8E8M0 = 14
};

struct DataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};

struct Tensor {
  void* data;
  Device device;
  int32_t ndim;
  DataType dtype;
  int64_t* shape;
  int64_t* strides;  // in elements; null: row-major
  uint64_t byte_offset;
};

struct Managed {
  Tensor tensor;
  void* manager;
  void (*deleter)(Managed* self);
};

struct ManagedVersioned {
  uint32_t major;
  uint32_t minor;
  void* manager;
  void (*deleter)(ManagedVersioned* self);
  uint64_t flags;
  Tensor tensor;
};

}  // namespace paceline::python::dlpack
