// Binds host::Kernel: what Triton has compiled, checked against its cubin and against Triton's own tensor maps.

#include <pybind11/pybind11.h>

#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "bindings/program_make.h"
#include "host/cubin.h"

namespace py = pybind11;

namespace bert_fast::bindings {
namespace {

// The bytes of the tensor map that Triton made: behind the head of its object, at a multiple of 128 bytes.
const void* bytes_of_map(const py::handle& object) {
  constexpr Py_ssize_t kOffset = 128;
  const PyTypeObject* type = Py_TYPE(object.ptr());
  if (kind_of(object) != "PyCUtensorMap" || type->tp_basicsize != kOffset + Py_ssize_t{sizeof(host::TensorMap)}) {
    throw py::value_error("Triton's tensor maps are not known: " + std::string(type->tp_name));
  }
  return reinterpret_cast<const char*>(object.ptr()) + kOffset;
}

// samples: of (address, rows, cols, row_stride, Triton's map of them).
bool encodes_as_triton(const host::Driver& driver, const host::WindowForm& form, const py::tuple& samples) {
  for (const py::handle& sample : samples) {
    const auto one = sample.cast<py::tuple>();
    host::TensorMap map;
    if (host::encode_window(driver, form, one[0].cast<uint64_t>(), one[1].cast<int64_t>(), one[2].cast<int64_t>(),
                            one[3].cast<int64_t>(), &map) != 0 ||
        std::memcmp(&map, bytes_of_map(one[4]), sizeof map) != 0) {
      return false;
    }
  }
  return true;
}

host::WindowForm make_window(const host::Driver& driver, const py::tuple& given) {
  host::WindowForm form;
  form.element_type = given[1].cast<int>();
  form.element_bytes = given[2].cast<int>();
  form.swizzle = given[3].cast<int>();
  form.box_rows = given[4].cast<uint32_t>();
  form.box_cols = given[5].cast<uint32_t>();
  const auto samples = given[6].cast<py::tuple>();
  if (samples.empty()) throw py::value_error("no sample of Triton's tensor maps");
  for (const bool clears : {false, true}) {
    form.clears_bit_of_small = clears;
    if (encodes_as_triton(driver, form, samples)) return form;
  }
  throw py::value_error("tensor maps differ from those that Triton makes");
}

// given: (kind, ...), see bert_fast/triton/_native_program.py.
host::Argument make_argument(const host::Driver& driver, const py::tuple& given) {
  using Kind = host::ArgumentKind;
  host::Argument argument;
  const auto kind = given[0].cast<std::string>();
  if (kind == "pointer") {
    argument.kind = Kind::kPointer;
    argument.is_divisible = given[1].cast<bool>();
  } else if (kind == "i32") {
    argument.kind = Kind::kInt32;
    argument.is_specialised = given[1].cast<bool>();
    argument.is_divisible = given[2].cast<bool>();
  } else if (kind == "fp32") {
    argument.kind = Kind::kFloat32;
  } else if (kind == "window") {
    argument.kind = Kind::kWindow;
    argument.window = make_window(driver, given);
  } else if (kind == "one") {
    argument.kind = Kind::kOne;
  } else if (kind == "none") {
    argument.kind = Kind::kNone;
  } else if (kind != "constant") {
    throw py::value_error("a parameter of type " + kind + " is not known");
  }
  return argument;
}

OwnedKernel make_kernel(const std::string& name, uint64_t function, const py::bytes& cubin, unsigned threads,
                        unsigned shared_bytes, int device, const py::tuple& arguments, py::object owner) {
  const host::Driver& driver = driver_or_raise();
  auto kernel = std::make_shared<host::Kernel>();
  kernel->name = name;
  kernel->function = reinterpret_cast<void*>(function);
  kernel->threads = threads;
  kernel->shared_bytes = shared_bytes;
  kernel->device = device;
  for (const py::handle& one : arguments) kernel->arguments.push_back(make_argument(driver, one.cast<py::tuple>()));
  host::Parameters found;
  std::string fault = host::read_parameters(std::string_view(cubin), name, &found);
  if (fault.empty()) fault = host::disagreement(*kernel, found);
  if (!fault.empty()) throw py::value_error(name + ": " + fault);
  return {std::move(kernel), std::move(owner)};
}

}  // namespace

const host::Driver& driver_or_raise() {
  const host::Driver* driver = host::loaded_driver();
  if (driver == nullptr) throw py::value_error("NVIDIA's driver is not loaded, or too old");
  return *driver;
}

void bind_kernel(py::module_& module) {
  py::class_<OwnedKernel>(module, "Kernel", "A compiled kernel of Triton's whose parameters are those of its cubin.")
      .def(py::init(&make_kernel), py::kw_only(), py::arg("name"), py::arg("function"), py::arg("cubin"),
           py::arg("threads"), py::arg("shared_bytes"), py::arg("device"), py::arg("arguments"), py::arg("owner"))
      .def_property_readonly("name", [](const OwnedKernel& one) { return one.kernel->name; });
}

}  // namespace bert_fast::bindings
