// Binds TensorReader: addresses and sizes of many tensors in one call.

#include "bindings/tensors.h"

#include <pybind11/pybind11.h>

#include <cstring>

namespace py = pybind11;

namespace bert_fast::bindings {
namespace {

const char kCapsuleName[] = "dlpack_exchange_api";
constexpr uint32_t kMajorVersion = 1;
constexpr uint64_t kAlignment = 16;

// DLPack's DLPackExchangeAPI, in its layout.
struct Header {
  uint32_t major, minor;
  const Header* older;
};
struct Table {
  Header header;
  void* allocate;
  void* export_owned;
  void* import_owned;
  ReadTensor read;
  void* current_stream;
};

struct Reader {
  PyObject_HEAD ReadTensor read;
  PyTypeObject* tensor_type;  // owned
};

Reader* cast(PyObject* self) { return reinterpret_cast<Reader*>(self); }

// Reads the fields of a list's item. Returns false with an exception set.
bool read_one(const Reader& reader, PyObject* one, TensorFields* fields) {
  if (PyObject_TypeCheck(one, reader.tensor_type) == 0) {
    PyErr_Format(PyExc_TypeError, "expected lists of tensors, got %s", Py_TYPE(one)->tp_name);
    return false;
  }
  return reader.read(one, fields) == 0;
}

// Calls `visit` for the items of all lists and tuples. Returns false if `visit` did.
template <typename Visit>
bool each_of(PyObject* const* lists, Py_ssize_t num_lists, Visit visit) {
  for (Py_ssize_t i = 0; i < num_lists; i++) {
    if (!PyList_Check(lists[i]) && !PyTuple_Check(lists[i])) {
      PyErr_Format(PyExc_TypeError, "expected lists and tuples, got %s", Py_TYPE(lists[i])->tp_name);
      return false;
    }
    // Reads the length each time, because reading a tensor may run Python code that changes the list.
    for (Py_ssize_t j = 0; j < PySequence_Fast_GET_SIZE(lists[i]); j++) {
      if (!visit(PySequence_Fast_GET_ITEM(lists[i], j))) return false;
    }
  }
  return true;
}

// Returns one number for each tensor in the lists, as consecutive bytes.
template <typename Number, typename Value>
PyObject* bytes_of(PyObject* self, PyObject* const* lists, Py_ssize_t num_lists, Value value) {
  Py_ssize_t count = 0, place = 0;
  if (!each_of(lists, num_lists, [&count](PyObject*) { return ++count > 0; })) return nullptr;
  PyObject* bytes = PyBytes_FromStringAndSize(nullptr, count * static_cast<Py_ssize_t>(sizeof(Number)));
  if (bytes == nullptr) return nullptr;
  const auto visit = [&](PyObject* one) {
    TensorFields fields;
    if (place == count) {
      PyErr_SetString(PyExc_RuntimeError, "a list of tensors grew while it was read");
      return false;
    }
    if (!read_one(*cast(self), one, &fields)) return false;
    const Number number = value(fields);
    std::memcpy(PyBytes_AS_STRING(bytes) + sizeof(number) * static_cast<size_t>(place++), &number, sizeof(number));
    return true;
  };
  if (each_of(lists, num_lists, visit) && place == count) return bytes;
  if (PyErr_Occurred() == nullptr) PyErr_SetString(PyExc_RuntimeError, "a list of tensors shrank while it was read");
  Py_DECREF(bytes);
  return nullptr;
}

PyObject* addresses(PyObject* self, PyObject* const* lists, Py_ssize_t num_lists) {
  return bytes_of<uint64_t>(self, lists, num_lists, [](const TensorFields& one) { return one.address(); });
}

PyObject* sizes(PyObject* self, PyObject* const* lists, Py_ssize_t num_lists) {
  return bytes_of<int64_t>(self, lists, num_lists, [](const TensorFields& one) { return one.num_elements(); });
}

PyObject* lies(PyObject* self, PyObject* const* lists, Py_ssize_t num_lists) {
  return bytes_of<uint8_t>(self, lists, num_lists, [](const TensorFields& one) {
    return static_cast<uint8_t>(one.address() % kAlignment + (one.is_contiguous() ? kAlignment : 0));
  });
}

PyObject* are_alike(PyObject* self, PyObject* const* lists, Py_ssize_t num_lists) {
  TensorFields first{};
  bool is_first = true, are = true;
  const auto visit = [&](PyObject* one) {
    TensorFields fields;
    if (!read_one(*cast(self), one, &fields)) return false;
    if (is_first) first = fields;
    is_first = false;
    are = are && fields.is_contiguous() && fields.type_code == first.type_code && fields.type_bits == first.type_bits &&
          fields.device_type == first.device_type && fields.device_index == first.device_index;
    return true;
  };
  if (!each_of(lists, num_lists, visit)) return nullptr;
  return PyBool_FromLong(are ? 1 : 0);
}

PyObject* make(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  static const char* const names[] = {"exchange", "tensor_type", nullptr};
  PyObject *exchange, *tensor_type;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO!", const_cast<char**>(names), &exchange, &PyType_Type,
                                   &tensor_type)) {
    return nullptr;
  }
  const ReadTensor read = reader_of(exchange);
  if (read == nullptr) {
    PyErr_SetString(PyExc_ValueError, "exchange: expected a capsule with the functions of DLPack 1.3");
    return nullptr;
  }
  PyObject* object = type->tp_alloc(type, 0);
  if (object == nullptr) return nullptr;
  cast(object)->read = read;
  Py_INCREF(tensor_type);
  cast(object)->tensor_type = reinterpret_cast<PyTypeObject*>(tensor_type);
  return object;
}

void deallocate(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  Py_XDECREF(cast(self)->tensor_type);
  type->tp_free(self);
  Py_DECREF(type);
}

PyCFunction as_method(PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function));
}

PyMethodDef methods[] = {
    {"addresses", as_method(addresses), METH_FASTCALL,
     "addresses(*lists) -> the addresses of tensors as int64 one behind the other, list after list, as bytes"},
    {"sizes", as_method(sizes), METH_FASTCALL, "sizes(*lists) -> the numbers of elements in the same form"},
    {"lies", as_method(lies), METH_FASTCALL,
     "lies(*lists) -> a byte of each tensor: its address modulo 16, and 16 more where it is contiguous"},
    {"are_alike", as_method(are_alike), METH_FASTCALL,
     "are_alike(*lists) -> whether all tensors are contiguous, of one dtype and on one device"},
    {nullptr, nullptr, 0, nullptr}};

PyType_Slot slots[] = {{Py_tp_new, reinterpret_cast<void*>(make)},
                       {Py_tp_dealloc, reinterpret_cast<void*>(deallocate)},
                       {Py_tp_methods, methods},
                       {0, nullptr}};

PyType_Spec spec = {"bert_fast._native.TensorReader", sizeof(Reader), 0, Py_TPFLAGS_DEFAULT, slots};

}  // namespace

int64_t TensorFields::num_elements() const {
  int64_t count = 1;
  for (int32_t i = 0; i < num_dimensions; i++) count *= sizes[i];
  return count;
}

bool TensorFields::is_contiguous() const {
  int64_t stride = 1;
  bool is = true;
  for (int32_t i = num_dimensions; i-- > 0;) {
    if (sizes[i] == 0) return true;
    is = is && (sizes[i] == 1 || strides[i] == stride);
    stride *= sizes[i];
  }
  return is;
}

ReadTensor reader_of(PyObject* capsule) {
  if (PyCapsule_IsValid(capsule, kCapsuleName) == 0) return nullptr;
  const auto* header = static_cast<const Header*>(PyCapsule_GetPointer(capsule, kCapsuleName));
  while (header != nullptr && header->major != kMajorVersion) header = header->older;
  return header == nullptr ? nullptr : reinterpret_cast<const Table*>(header)->read;
}

}  // namespace bert_fast::bindings

void bind_tensors(py::module_& module) {
  py::object type = py::reinterpret_steal<py::object>(PyType_FromSpec(&bert_fast::bindings::spec));
  if (!type) throw py::error_already_set();
  module.attr("TensorReader") = type;
}
