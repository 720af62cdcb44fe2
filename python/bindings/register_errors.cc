// SPDX-License-Identifier: Apache-2.0
#include <exception>
#include <new>

#include <paceline/error.h>

#include "bindings.h"

namespace paceline::python {
namespace {

// The exception classes live as long as the process: a translator may run at any time.
struct ExceptionTypes {
  PyObject* model_file_error = nullptr;
  PyObject* model_not_found_error = nullptr;
  PyObject* internal_error = nullptr;
  PyObject* device_error = nullptr;
  PyObject* out_of_memory_error = nullptr;
};

ExceptionTypes& exception_types() {
  static ExceptionTypes types;
  return types;
}

PyObject* add_exception(py::module_& module, const char* name, const char* doc, py::object bases) {
  const std::string qualified_name = std::string("paceline.") + name;
  PyObject* type =
      PyErr_NewExceptionWithDoc(qualified_name.c_str(), doc, bases.ptr(), /*dict=*/nullptr);
  if (type == nullptr) {
    throw py::error_already_set();
  }
  module.add_object(name, py::reinterpret_borrow<py::object>(type));
  return type;
}

void translate(std::exception_ptr pointer) {
  const ExceptionTypes& types = exception_types();
  try {
    if (pointer) {
      std::rethrow_exception(pointer);
    }
  } catch (const ModelFileError& error) {
    py::set_error(error.is_missing() ? types.model_not_found_error : types.model_file_error,
                  error.what());
  } catch (const InvalidArgument& error) {
    py::set_error(PyExc_ValueError, error.what());
  } catch (const Unsupported& error) {
    py::set_error(PyExc_NotImplementedError, error.what());
  } catch (const OutOfMemory& error) {
    py::set_error(types.out_of_memory_error, error.what());
  } catch (const DeviceError& error) {
    py::set_error(types.device_error, error.what());
  } catch (const InternalError& error) {
    py::set_error(types.internal_error, error.what());
  } catch (const Error& error) {
    py::set_error(PyExc_RuntimeError, error.what());
  } catch (const std::bad_alloc&) {  // of the bindings
    py::set_error(PyExc_MemoryError, "the process is out of memory; free some");
  }
}

}  // namespace

void register_errors(py::module_& module) {
  ExceptionTypes& types = exception_types();
  const py::handle value_error(PyExc_ValueError);
  types.model_file_error =
      add_exception(module, "ModelFileError",
                    "A model file that cannot be read or does not hold what it must. The message "
                    "names the file.",
                    py::make_tuple(value_error));
  types.model_not_found_error = add_exception(
      module, "ModelNotFoundError", "A model file or folder that does not exist.",
      py::make_tuple(py::handle(types.model_file_error), py::handle(PyExc_FileNotFoundError)));
  types.internal_error = add_exception(module, "InternalError",
                                       "A broken invariant: a bug in Paceline. Please report it.",
                                       py::make_tuple(py::handle(PyExc_RuntimeError)));
  types.device_error = add_exception(
      module, "DeviceError",
      "The device or its driver failed or is missing, or the system refuses a thread. The message "
      "has the call and the reason. An engine that raised it is lost.",
      py::make_tuple(py::handle(PyExc_RuntimeError)));
  types.out_of_memory_error =
      add_exception(module, "OutOfMemoryError",
                    "Memory could not be allocated: for weights, KV pool and workspace, or for "
                    "what a call asks for. The message says which.",
                    py::make_tuple(py::handle(PyExc_MemoryError)));
  py::register_local_exception_translator(&translate);
}

}  // namespace paceline::python
