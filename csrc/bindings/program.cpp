// Binds programs: `Program`, a type of Python, and what makes one.

#include "bindings/program.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings/program_make.h"

namespace py = pybind11;

namespace bert_fast::bindings {
namespace {

Program* cast(PyObject* self) { return reinterpret_cast<Program*>(self); }

int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (cast(self)->body == nullptr) return 0;
  for (PyObject* one : cast(self)->body->owned) Py_VISIT(one);
  return 0;
}

int clear(PyObject* self) {
  Body* body = cast(self)->body;
  cast(self)->body = nullptr;  // it does not run any more
  if (body == nullptr) return 0;
  give_up_kept(*body);
  for (PyObject* one : body->owned) Py_DECREF(one);
  for (EmptyStep& step : body->empties) Py_XDECREF(step.arguments);
  delete body;
  return 0;
}

void deallocate(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  clear(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* run_method(PyObject* self, PyObject* const* arguments, Py_ssize_t num_arguments) {
  if (num_arguments != 2) {
    PyErr_Format(PyExc_TypeError, "run: expected inputs and numbers, got %zd arguments", num_arguments);
    return nullptr;
  }
  if (cast(self)->body == nullptr) {
    PyErr_SetString(PyExc_RuntimeError, "run: the program was given up");
    return nullptr;
  }
  return run(*cast(self)->body, arguments[0], arguments[1]);
}

PyMethodDef methods[] = {
    {"run", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(run_method)), METH_FASTCALL,
     "run(inputs, numbers) -> the outputs as a tuple; None where it is not made for these, before anything was done"},
    {nullptr, nullptr, 0, nullptr}};

PyType_Slot slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(traverse)},
                       {Py_tp_clear, reinterpret_cast<void*>(clear)},
                       {Py_tp_dealloc, reinterpret_cast<void*>(deallocate)},
                       {Py_tp_methods, methods},
                       {0, nullptr}};

PyType_Spec spec = {"bert_fast._native.Program", sizeof(Program), 0,
                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};

PyTypeObject* program_type = nullptr;

py::object make_program(const py::object& program, const py::tuple& kernels, int device, int tensor_device,
                        const std::vector<int32_t>& scratch, const py::dict& functions) {
  const host::Driver& driver = driver_or_raise();
  auto object = py::reinterpret_steal<py::object>(program_type->tp_alloc(program_type, 0));
  if (!object) throw py::error_already_set();
  cast(object.ptr())->body = new Body;  // given up with the object, whatever is raised from here on
  Body& body = *cast(object.ptr())->body;
  body.driver = &driver;
  body.device = device;
  body.tensor_device = tensor_device;
  const auto own = [&body](const py::handle& one) {
    body.owned.push_back(one.inc_ref().ptr());
    return one.ptr();
  };
  body.tensor_type = reinterpret_cast<PyTypeObject*>(own(functions["tensor"].cast<py::type>()));
  body.empty_strided = own(functions["empty_strided"]);
  body.read = reader_of(functions["exchange"].ptr());
  body.data_ptr = own(functions["data_ptr"]);
  body.get_device = own(functions["get_device"]);
  body.current_device = own(functions["current_device"]);
  body.current_stream = own(functions["current_stream"]);
  try {
    make_body(body, program, kernels, scratch);
  } catch (const py::cast_error& error) {  // an integer of more bits than there are, or none
    throw py::value_error(error.what());
  }
  return object;
}

}  // namespace
}  // namespace bert_fast::bindings

void bind_program(py::module_& module) {
  using namespace bert_fast::bindings;
  bind_kernel(module);
  program_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  if (program_type == nullptr) throw py::error_already_set();
  module.attr("Program") = py::handle(reinterpret_cast<PyObject*>(program_type));
  module.def("make_program", &make_program, py::arg("program"), py::arg("kernels"), py::kw_only(), py::arg("device"),
             py::arg("tensor_device"), py::arg("scratch"), py::arg("functions"),
             "The program, to be run; ValueError where the kernels are not for it.");
  module.def(
      "has_cublaslt", [](int major) { return bert_fast::host::CublasLt::find_loaded(major) != nullptr; },
      py::arg("major"), "Whether this process has loaded a cuBLASLt of this major version that programs can call.");
}
