// Whether modules of PyTorch are as they were: one call instead of a walk in Python. Plain CPython, no torch.
//
// Look(root, empty) remembers of a module and of all in it the class, what lies in `__dict__`, and what lies in the
// dictionaries of modules, parameters and hooks. look.keep(tensors) says what look.tensors(root) returns: these, as a
// tuple, if all is as it was at `root` and the dictionaries `empty` are empty; else None.
//
// - Objects are compared by identity. A Look holds references to strings, numbers and the dictionaries `empty` only;
//   everything else it knows by weak references. So it keeps no module alive, and a new object at an old address is
//   not taken for the old one. Parameters, whose memory nobody could exchange any more (`torch.utils.swap_tensors`), it
//   knows by their names and classes: look.tensors returns those that are there now.
// - A class is unchanged while the interpreter's version tag of it is, which a change of any of its bases changes too.
// - Lists, tuples, sets and dictionaries other than those named above are compared by class, not by what they hold.
// - A module with an attribute that is none of these and takes no weak references makes the constructor raise
//   TypeError.

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <new>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace {

// A strong reference.
class Held {
 public:
  explicit Held(PyObject* object = nullptr) : object_(object) {}  // takes the reference over
  Held(Held&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Held& operator=(Held&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Held() { Py_XDECREF(object_); }
  static Held of(PyObject* object) {
    Py_XINCREF(object);
    return Held(object);
  }
  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  PyObject* object_;
};

// What a weak reference refers to, borrowed; None once it is gone.
PyObject* referent(const Held& reference) { return reinterpret_cast<PyWeakReference*>(reference.get())->wr_object; }

// The number that the interpreter gives a class and takes back when the class or one of its bases changes; 0: none.
unsigned int version_of(PyTypeObject* type) {
#if PY_VERSION_HEX < 0x030C0000
  if (!PyType_HasFeature(type, Py_TPFLAGS_VALID_VERSION_TAG)) return 0;
#endif
  return type->tp_version_tag;
}

struct Class {
  Held reference;
  unsigned int version;  // 0: not compared
};

enum class Kind { same, weak, contents, container, tensor };

struct Entry {
  Held key;
  Held value;  // kind `same`: the object; `weak`: a weak reference; else nothing
  Kind kind;
  std::size_t index;         // of the class; kind `contents`: of the dictionary
  PyObject* dict = nullptr;  // kind `contents`: the dictionary, borrowed from the one that holds it
};

struct Dictionary {
  std::vector<Entry> entries;
  std::vector<std::size_t> deeper;  // entries of which more may change than what the dictionary holds
  std::uint64_t version = 0;        // with which it was last found to hold the same; 0: none
};

// The number that the interpreter gives a dictionary at every change, unlike any other's; 0: it gives none.
std::uint64_t version_of_dict(PyObject* dict) {
#if PY_VERSION_HEX < 0x030C0000
  return reinterpret_cast<PyDictObject*>(dict)->ma_version_tag;
#else
  (void)dict;
  return 0;
#endif
}

struct Module {
  Held reference;
  std::size_t type;
  std::size_t dictionary;
};

const char kModules[] = "_modules";
const char kParameters[] = "_parameters";
const char* const kContents[] = {kModules,          kParameters,          "_forward_hooks", "_forward_pre_hooks",
                                 "_backward_hooks", "_backward_pre_hooks"};

class Look {
 public:
  // False with an exception set.
  bool record(PyObject* root, PyObject* empty);
  bool keep(PyObject* tensors);
  // A new reference: a tuple, or None; nullptr with an exception set.
  PyObject* tensors(PyObject* root);

 private:
  bool add_module(PyObject* object);
  bool add_dictionary(PyObject* dict, bool is_module, const char* name, std::size_t* index);
  bool add_entry(PyObject* key, PyObject* value, bool is_module, const char* name, Dictionary* dictionary);
  bool wait_for(PyObject* modules);
  bool add_class(PyTypeObject* type, bool is_module, std::size_t* index);
  bool is_of(PyObject* object, std::size_t index) const {
    return referent(classes_[index].reference) == reinterpret_cast<PyObject*>(Py_TYPE(object));
  }
  bool is_same(PyObject* root);
  bool is_same(Dictionary& dictionary, PyObject* dict);
  bool is_same_entry(Entry& entry, PyObject* value);

  std::vector<Class> classes_;
  std::vector<Dictionary> dictionaries_;
  std::vector<Module> modules_;  // the root first
  std::vector<Held> waiting_;    // modules that are yet to be added
  std::vector<Held> empty_;
  struct Parameter {
    std::size_t module;
    Held name;  // nothing in the place of None
  };
  std::vector<Parameter> tensors_;
};

PyObject* parameters_name = nullptr;  // kParameters, interned: asked for 16 times a call

// What a module has under this name, a new reference; nothing where it has no such parameter.
Held parameter_of(PyObject* module, PyObject* name) {
  const Held own(PyObject_GenericGetDict(module, nullptr));
  PyObject* parameters = own ? PyDict_GetItemWithError(own.get(), parameters_name) : nullptr;
  PyObject* found = parameters && PyDict_Check(parameters) ? PyDict_GetItemWithError(parameters, name) : nullptr;
  PyErr_Clear();
  return Held::of(found);
}

// The name under which a module has this parameter, if it has it.
Held name_of(PyObject* module, PyObject* tensor) {
  const Held own(PyObject_GenericGetDict(module, nullptr));
  PyObject* parameters = own ? PyDict_GetItemWithError(own.get(), parameters_name) : nullptr;
  PyErr_Clear();
  if (!parameters || !PyDict_Check(parameters)) return Held();
  PyObject *key, *value;
  for (Py_ssize_t place = 0; PyDict_Next(parameters, &place, &key, &value);) {
    if (value == tensor) return Held::of(key);
  }
  return Held();
}

bool Look::record(PyObject* root, PyObject* empty) {
  const Held dicts(PySequence_Tuple(empty));
  if (!dicts) return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(dicts.get()); ++i) {
    PyObject* dict = PyTuple_GET_ITEM(dicts.get(), i);
    if (!PyDict_Check(dict)) {
      PyErr_Format(PyExc_TypeError, "empty: expected dictionaries, got %s", Py_TYPE(dict)->tp_name);
      return false;
    }
    empty_.push_back(Held::of(dict));
  }
  waiting_.push_back(Held::of(root));
  while (!waiting_.empty()) {
    const Held module = std::move(waiting_.back());
    waiting_.pop_back();
    if (!add_module(module.get())) return false;
  }
  return true;
}

bool Look::keep(PyObject* tensors) {
  const Held given(PySequence_Tuple(tensors));
  if (!given) return false;
  tensors_.clear();
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(given.get()); ++i) {
    PyObject* tensor = PyTuple_GET_ITEM(given.get(), i);
    Parameter parameter{0, Held()};
    for (std::size_t place = 0; tensor != Py_None && !parameter.name && place < modules_.size(); ++place) {
      parameter.name = name_of(referent(modules_[place].reference), tensor);
      parameter.module = place;
    }
    if (tensor != Py_None && !parameter.name) {
      PyErr_SetString(PyExc_TypeError, "tensors: expected parameters of the modules");
      return false;
    }
    tensors_.push_back(std::move(parameter));
  }
  return true;
}

bool Look::add_module(PyObject* object) {
  for (const Module& module : modules_) {
    if (referent(module.reference) == object) return true;  // it stands in several places
  }
  Module module{Held(PyWeakref_NewRef(object, nullptr)), 0, 0};
  if (!module.reference || !add_class(Py_TYPE(object), true, &module.type)) return false;
  const Held dict(PyObject_GenericGetDict(object, nullptr));
  if (!dict || !add_dictionary(dict.get(), true, nullptr, &module.dictionary)) return false;
  modules_.push_back(std::move(module));
  return true;
}

bool Look::wait_for(PyObject* modules) {
  const Held values(PyDict_Values(modules));
  if (!values) return false;
  for (Py_ssize_t i = PyList_GET_SIZE(values.get()); i-- > 0;) {
    PyObject* module = PyList_GET_ITEM(values.get(), i);
    if (module != Py_None) waiting_.push_back(Held::of(module));
  }
  return true;
}

bool Look::add_class(PyTypeObject* type, bool is_module, std::size_t* index) {
  for (*index = 0; *index < classes_.size(); ++*index) {
    if (referent(classes_[*index].reference) == reinterpret_cast<PyObject*>(type)) break;
  }
  if (*index == classes_.size()) {
    Held reference(PyWeakref_NewRef(reinterpret_cast<PyObject*>(type), nullptr));
    if (!reference) return false;
    classes_.push_back({std::move(reference), 0});
  }
  if (is_module && !classes_[*index].version) {
    const Held found(PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__call__"));  // gives it a number
    if (!found) PyErr_Clear();
    if (!(classes_[*index].version = version_of(type))) {
      PyErr_Format(PyExc_TypeError, "root: the interpreter gives class %s no version", type->tp_name);
      return false;
    }
  }
  return true;
}

bool Look::add_dictionary(PyObject* dict, bool is_module, const char* name, std::size_t* index) {
  const Held copy(PyDict_Copy(dict));  // what follows may collect garbage, and run code that changes the dictionary
  if (!copy) return false;
  *index = dictionaries_.size();
  dictionaries_.emplace_back();
  Dictionary dictionary;
  PyObject *key, *value;
  for (Py_ssize_t place = 0; PyDict_Next(copy.get(), &place, &key, &value);) {
    if (!add_entry(key, value, is_module, name, &dictionary)) return false;
  }
  dictionaries_[*index] = std::move(dictionary);
  return true;
}

// name: of the dictionary in the module; null for the module itself.
bool Look::add_entry(PyObject* key, PyObject* value, bool is_module, const char* name, Dictionary* dictionary) {
  Entry entry{Held::of(key), Held(), Kind::same, 0, nullptr};
  if (is_module && PyDict_Check(value) && PyUnicode_Check(key)) {
    for (const char* contents : kContents) {
      if (PyUnicode_CompareWithASCIIString(key, contents) != 0) continue;
      entry.kind = Kind::contents;
      if (!add_dictionary(value, false, contents, &entry.index)) return false;
      if (contents == kModules && !wait_for(value)) return false;
    }
  }
  if (entry.kind == Kind::same) {
    if (!PyObject_IS_GC(value)) {
      entry.value = Held::of(value);
    } else {
      if (PyDict_Check(value) || PyList_Check(value) || PyTuple_Check(value) || PyAnySet_Check(value)) {
        entry.kind = Kind::container;
      } else if (name == kParameters) {
        entry.kind = Kind::tensor;
      } else {
        entry.kind = Kind::weak;
        entry.value = Held(PyWeakref_NewRef(value, nullptr));
        if (!entry.value) return false;
      }
      if (!add_class(Py_TYPE(value), false, &entry.index)) return false;
    }
  }
  if (entry.kind == Kind::contents || entry.kind == Kind::tensor || (entry.kind == Kind::weak && name != kModules)) {
    dictionary->deeper.push_back(dictionary->entries.size());
  }
  dictionary->entries.push_back(std::move(entry));
  return true;
}

bool Look::is_same(Dictionary& dictionary, PyObject* dict) {
  const std::uint64_t version = version_of_dict(dict);
  if (version && version == dictionary.version) {
    for (const std::size_t place : dictionary.deeper) {
      Entry& entry = dictionary.entries[place];
      PyObject* value = entry.kind == Kind::contents ? entry.dict
                        : entry.kind == Kind::tensor ? PyDict_GetItemWithError(dict, entry.key.get())
                                                     : referent(entry.value);
      if (!value || !is_same_entry(entry, value)) return false;
    }
    return true;
  }
  if (static_cast<std::size_t>(PyDict_GET_SIZE(dict)) != dictionary.entries.size()) return false;
  Entry* entry = dictionary.entries.data();
  PyObject *key, *value;
  for (Py_ssize_t place = 0; PyDict_Next(dict, &place, &key, &value); ++entry) {
    if (key != entry->key.get() || !is_same_entry(*entry, value)) return false;
  }
  dictionary.version = version;
  return true;
}

bool Look::is_same_entry(Entry& entry, PyObject* value) {
  switch (entry.kind) {
    case Kind::same:
      return value == entry.value.get();
    case Kind::weak:
      return value == referent(entry.value) && is_of(value, entry.index);
    case Kind::container:
    case Kind::tensor:
      return is_of(value, entry.index);
    case Kind::contents:
      entry.dict = value;
      return PyDict_Check(value) && is_same(dictionaries_[entry.index], value);
  }
  return false;
}

// Runs no Python code, so nothing changes meanwhile.
bool Look::is_same(PyObject* root) {
  if (modules_.empty() || root != referent(modules_[0].reference)) return false;
  for (const Held& dict : empty_) {
    if (PyDict_GET_SIZE(dict.get())) return false;
  }
  for (const Class& each : classes_) {
    if (!each.version) continue;
    PyObject* type = referent(each.reference);
    if (type == Py_None || version_of(reinterpret_cast<PyTypeObject*>(type)) != each.version) return false;
  }
  for (const Module& module : modules_) {
    PyObject* object = referent(module.reference);
    if (object == Py_None || !is_of(object, module.type)) return false;
    const Held dict(PyObject_GenericGetDict(object, nullptr));
    if (!dict) {
      PyErr_Clear();
      return false;
    }
    if (!is_same(dictionaries_[module.dictionary], dict.get())) return false;
  }
  return true;
}

PyObject* Look::tensors(PyObject* root) {
  if (!is_same(root)) Py_RETURN_NONE;
  Held found(PyTuple_New(static_cast<Py_ssize_t>(tensors_.size())));
  if (!found) return nullptr;
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    const Parameter& one = tensors_[i];
    Held tensor = one.name ? parameter_of(referent(modules_[one.module].reference), one.name.get()) : Held::of(Py_None);
    if (!tensor) Py_RETURN_NONE;
    PyTuple_SET_ITEM(found.get(), static_cast<Py_ssize_t>(i), tensor.release());
  }
  return found.release();
}

struct Object {
  PyObject_HEAD Look* look;
};

// The result of a function; MemoryError in place of C++'s own.
template <typename Function>
auto guarded(Function function) -> decltype(function()) {
  try {
    return function();
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
    return {};
  }
}

PyObject* make(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  static const char* const names[] = {"root", "empty", nullptr};
  PyObject *root, *empty;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO", const_cast<char**>(names), &root, &empty)) return nullptr;
  Held object(type->tp_alloc(type, 0));
  if (!object) return nullptr;
  const bool is_made =
      guarded([&] { return (reinterpret_cast<Object*>(object.get())->look = new Look)->record(root, empty); });
  return is_made ? object.release() : nullptr;
}

void drop(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  delete reinterpret_cast<Object*>(self)->look;
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* tensors_of(PyObject* self, PyObject* root) { return reinterpret_cast<Object*>(self)->look->tensors(root); }

PyObject* keep(PyObject* self, PyObject* tensors) {
  Look* look = reinterpret_cast<Object*>(self)->look;
  if (!guarded([&] { return look->keep(tensors); })) return nullptr;
  Py_RETURN_NONE;
}

PyMethodDef kMethods[] = {
    {"keep", keep, METH_O, "keep($self, tensors, /)\n--\n\nSays what `tensors` is to return: tensors and None."},
    {"tensors", tensors_of, METH_O,
     "tensors($self, root, /)\n--\n\nWhat `keep` was given, as a tuple, if all is as it was at root; else None."},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot kSlots[] = {
    {Py_tp_doc, const_cast<char*>("Look(root, empty)\n--\n\nWhether a module and those in it are as they were.")},
    {Py_tp_new, reinterpret_cast<void*>(make)},
    {Py_tp_dealloc, reinterpret_cast<void*>(drop)},
    {Py_tp_methods, kMethods},
    {0, nullptr},
};

PyType_Spec kSpec = {"bert_fast._native.Look", sizeof(Object), 0, Py_TPFLAGS_DEFAULT, kSlots};

}  // namespace

void bind_look(py::module_& module) {
  parameters_name = PyUnicode_InternFromString(kParameters);
  if (!parameters_name) throw py::error_already_set();
  py::object type = py::reinterpret_steal<py::object>(PyType_FromSpec(&kSpec));
  if (!type) throw py::error_already_set();
  module.attr("Look") = type;
}
