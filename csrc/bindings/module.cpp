// The Python module bert_fast._native. Each part of the core has one bind function in a file of its own beside this
// one; this folder alone includes pybind11.

#include <pybind11/pybind11.h>

namespace py = pybind11;

void bind_wordpiece(py::module_& module);
void bind_unigram(py::module_& module);
void bind_cpu(py::module_& module);
void bind_program(py::module_& module);
void bind_look(py::module_& module);
void bind_tensors(py::module_& module);

PYBIND11_MODULE(_native_main, module) {
  module.doc() =
      "C++ core of bert_fast: WordPiece and Unigram tokenizers, the CPU routines of back-end \"torch\", programs of "
      "kernels of back-end \"triton\".";
  module.attr("__version__") = BERT_FAST_VERSION;
  bind_wordpiece(module);
  bind_unigram(module);
  bind_cpu(module);
  bind_program(module);
  bind_look(module);
  bind_tensors(module);
}

// What an import calls. A sub-interpreter is refused before pybind11 is asked for anything: it would wait forever
// there.
extern "C" PYBIND11_EXPORT PyObject* PyInit__native() {
  if (PyInterpreterState_Get() == PyInterpreterState_Main()) return PyInit__native_main();
  PyErr_SetString(PyExc_ImportError, "bert_fast._native works in the main interpreter only, not in a sub-interpreter");
  return nullptr;
}
