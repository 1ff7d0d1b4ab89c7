// The Python module bert_fast._native. Each part of the core has one bind function in a file of its own beside this
// one; this folder alone includes pybind11.

#include <pybind11/pybind11.h>

namespace py = pybind11;

void bind_wordpiece(py::module_& module);
void bind_cpu(py::module_& module);

PYBIND11_MODULE(_native, module) {
  module.doc() = "C++ core of bert_fast: WordPiece tokenizer, and the CPU routines of back-end \"torch\".";
  module.attr("__version__") = BERT_FAST_VERSION;
  bind_wordpiece(module);
  bind_cpu(module);
}
