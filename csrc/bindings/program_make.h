// How `Kernel` and `Program` are made of what Python has.

#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <string>

#include "bindings/program.h"

namespace bert_fast::bindings {

// A kernel with what keeps its code loaded.
struct OwnedKernel {
  std::shared_ptr<const host::Kernel> kernel;
  pybind11::object owner;
};

// The name of an object's type.
inline std::string kind_of(const pybind11::handle& object) {
  return pybind11::str(pybind11::type::of(object).attr("__name__"));
}

// The driver's functions; ValueError where there are none.
const host::Driver& driver_or_raise();

void bind_kernel(pybind11::module_& module);

// Fills in everything but functions and devices; ValueError where the kernels are not for the program.
void make_body(Body& body, const pybind11::handle& program, const pybind11::tuple& kernels,
               const std::vector<int32_t>& scratch);

}  // namespace bert_fast::bindings
