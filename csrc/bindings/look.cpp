// Whether modules are as they were: what was concluded from them then still holds.
//
// A look at a module compares its attributes, one identity each, and the contents of the dictionaries among them
// (parameters, modules inside, hooks), with those of the time when the object was made. All of these are kept alive, so
// an identity is never that of a newer object. A class counts as changed with any of its attributes or its bases':
// Python gives it another version then.

#include <Python.h>
#include <pybind11/pybind11.h>

#include <utility>
#include <vector>

namespace py = pybind11;

namespace {

struct Item {
  PyObject* key;
  PyObject* value;
};

struct Dict {
  PyObject* dict;  // an attribute, kept as such
  uint64_t version;
  std::vector<Item> items;
};

struct Module {
  PyObject* object;  // borrowed of the first one, which keeps the look; the others owned
  PyTypeObject* type;
  unsigned version;
  uint64_t attributes_version;
  std::vector<Item> attributes;
  std::vector<Dict> contents;  // of attributes that are dictionaries
};

struct Look {
  PyObject_HEAD
      // Made in place.
      std::vector<Module>* modules;
  PyObject* skipped;   // the attribute under which a look is kept
  PyObject* are_empty;  // a tuple of dictionaries in which nothing may be
  PyObject* found;     // what was concluded
};

Look* cast(PyObject* self) { return reinterpret_cast<Look*>(self); }

// 0 where it has none.
unsigned version_of(PyTypeObject* type) {
#if PY_VERSION_HEX < 0x030C0000
  if (!PyType_HasFeature(type, Py_TPFLAGS_VALID_VERSION_TAG)) return 0;
#endif
  return type->tp_version_tag;
}

// Another number after every change of a dictionary; 0 where Python keeps none.
uint64_t version_of_dict(PyObject* dict) {
#if PY_VERSION_HEX < 0x030C0000
  return reinterpret_cast<PyDictObject*>(dict)->ma_version_tag;
#else
  (void)dict;
  return 0;
#endif
}

bool holds_same(PyObject* dict, const std::vector<Item>& items, PyObject* skipped) {
  Py_ssize_t position = 0;
  size_t count = 0;
  PyObject *key = nullptr, *value = nullptr;
  while (PyDict_Next(dict, &position, &key, &value)) {
    if (key == skipped) continue;
    if (count == items.size() || items[count].value != value || items[count].key != key) return false;
    count++;
  }
  return count == items.size();
}

std::vector<Item> take(PyObject* dict, PyObject* skipped) {
  std::vector<Item> items;
  Py_ssize_t position = 0;
  PyObject *key = nullptr, *value = nullptr;
  while (PyDict_Next(dict, &position, &key, &value)) {
    if (key == skipped) continue;
    items.push_back({Py_NewRef(key), Py_NewRef(value)});
  }
  return items;
}

// New reference; a module without attributes of its own has an empty dictionary.
PyObject* attributes_of(PyObject* module) { return PyObject_GenericGetDict(module, nullptr); }

bool is_same_module(Module& module, PyObject* skipped) {
  if (Py_TYPE(module.object) != module.type || module.version == 0 || version_of(module.type) != module.version) {
    return false;
  }
  PyObject* attributes = attributes_of(module.object);
  if (attributes == nullptr) {
    PyErr_Clear();
    return false;
  }
  const uint64_t version = version_of_dict(attributes);
  bool is_same = version != 0 && version == module.attributes_version;
  if (!is_same) {
    is_same = holds_same(attributes, module.attributes, skipped);
    if (is_same) module.attributes_version = version;
  }
  Py_DECREF(attributes);
  if (!is_same) return false;
  for (Dict& one : module.contents) {
    const uint64_t of_contents = version_of_dict(one.dict);
    if (of_contents != 0 && of_contents == one.version) continue;
    if (!holds_same(one.dict, one.items, nullptr)) return false;
    one.version = of_contents;
  }
  return true;
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  Look* look = cast(self);
  Py_VISIT(look->skipped);
  Py_VISIT(look->are_empty);
  Py_VISIT(look->found);
  if (look->modules == nullptr) return 0;
  bool is_first = true;
  for (const Module& module : *look->modules) {
    if (!is_first) Py_VISIT(module.object);
    is_first = false;
    Py_VISIT(reinterpret_cast<PyObject*>(module.type));
    for (const Item& item : module.attributes) {
      Py_VISIT(item.key);
      Py_VISIT(item.value);
    }
    for (const Dict& one : module.contents) {
      for (const Item& item : one.items) {
        Py_VISIT(item.key);
        Py_VISIT(item.value);
      }
    }
  }
  return 0;
}

void give_up(const std::vector<Item>& items) {
  for (const Item& item : items) {
    Py_DECREF(item.key);
    Py_DECREF(item.value);
  }
}

int clear(PyObject* self) {
  Look* look = cast(self);
  std::vector<Module>* modules = std::exchange(look->modules, nullptr);
  if (modules != nullptr) {
    bool is_first = true;
    for (const Module& module : *modules) {
      give_up(module.attributes);
      for (const Dict& one : module.contents) give_up(one.items);
      Py_DECREF(reinterpret_cast<PyObject*>(module.type));
      if (!is_first) Py_DECREF(module.object);
      is_first = false;
    }
    delete modules;
  }
  Py_CLEAR(look->skipped);
  Py_CLEAR(look->are_empty);
  Py_CLEAR(look->found);
  return 0;
}

void deallocate(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  clear(self);
  type->tp_free(self);
  Py_DECREF(type);
}

bool is_same(Look* look, PyObject* module) {
  if (look->modules == nullptr || look->modules->front().object != module) return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(look->are_empty); i++) {
    if (PyDict_GET_SIZE(PyTuple_GET_ITEM(look->are_empty, i)) != 0) return false;
  }
  for (Module& one : *look->modules) {
    if (!is_same_module(one, look->skipped)) return false;
  }
  return true;
}

PyObject* holds_method(PyObject* self, PyObject* module) { return PyBool_FromLong(is_same(cast(self), module)); }

PyObject* found_getter(PyObject* self, void*) {
  PyObject* found = cast(self)->found;
  return Py_NewRef(found == nullptr ? Py_None : found);
}

PyObject* keep_method(PyObject* self, PyObject* found) {
  Py_XSETREF(cast(self)->found, Py_NewRef(found));
  Py_RETURN_NONE;
}

// A copy of a module, or one that was stored, is another module: it keeps no look.
PyObject* reduce_method(PyObject*, PyObject*) { return Py_BuildValue("O()", Py_TYPE(Py_None)); }

PyMethodDef methods[] = {
    {"holds", holds_method, METH_O, "holds(module) -> whether it and those inside are as they were"},
    {"keep", keep_method, METH_O, "keep(found): what was concluded"},
    {"__reduce__", reduce_method, METH_NOARGS, "Copies are None."},
    {nullptr, nullptr, 0, nullptr}};

PyGetSetDef getters[] = {{"found", found_getter, nullptr, "What was concluded.", nullptr},
                         {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyType_Slot slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(traverse)},
                       {Py_tp_clear, reinterpret_cast<void*>(clear)},
                       {Py_tp_dealloc, reinterpret_cast<void*>(deallocate)},
                       {Py_tp_methods, methods},
                       {Py_tp_getset, getters},
                       {0, nullptr}};

PyType_Spec spec = {"bert_fast._native.Look", sizeof(Look), 0,
                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};

PyTypeObject* look_type = nullptr;

py::object look_at(const py::list& modules, const py::tuple& are_empty, const py::str& skipped) {
  if (modules.empty()) throw py::value_error("modules: expected at least one");
  for (const py::handle one : are_empty) {
    if (!PyDict_Check(one.ptr())) throw py::type_error("are_empty: expected dictionaries");
  }
  auto object = py::reinterpret_steal<py::object>(look_type->tp_alloc(look_type, 0));
  if (!object) throw py::error_already_set();
  Look* look = cast(object.ptr());
  PyObject* name = skipped.inc_ref().ptr();
  PyUnicode_InternInPlace(&name);
  look->skipped = name;
  look->are_empty = are_empty.inc_ref().ptr();
  look->modules = new std::vector<Module>;
  look->modules->reserve(modules.size());
  for (const py::handle one : modules) {
    PyTypeObject* type = Py_TYPE(one.ptr());
    // Looking something up gives a class a version, if there is one left.
    const auto known = py::reinterpret_steal<py::object>(
        PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "forward"));
    if (!known) PyErr_Clear();
    const auto attributes = py::reinterpret_steal<py::object>(attributes_of(one.ptr()));
    if (!attributes) throw py::error_already_set();
    const bool is_first = look->modules->empty();
    look->modules->push_back({one.ptr(), type, version_of(type), version_of_dict(attributes.ptr()),
                              take(attributes.ptr(), look->skipped), {}});
    Py_INCREF(reinterpret_cast<PyObject*>(type));
    if (!is_first) Py_INCREF(one.ptr());
    Module& module = look->modules->back();
    for (const Item& item : module.attributes) {
      if (PyDict_Check(item.value)) {
        module.contents.push_back({item.value, version_of_dict(item.value), take(item.value, nullptr)});
      }
    }
  }
  return object;
}

}  // namespace

void bind_look(py::module_& module) {
  look_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  if (look_type == nullptr) throw py::error_already_set();
  module.attr("Look") = py::handle(reinterpret_cast<PyObject*>(look_type));
  module.def("look_at", &look_at, py::arg("modules"), py::kw_only(), py::arg("are_empty"), py::arg("skipped"),
             "Remembers modules, the first of which will keep the look under the name `skipped`.");
}
