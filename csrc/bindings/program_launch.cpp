// Launches of a program's kernels, by their handles.

#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "bindings/program.h"
#include "bindings/program_frame.h"

namespace bert_fast::bindings {
namespace {

constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();

int64_t grid_size(const LaunchStep& step, int axis, const int64_t* values) {
  return step.grid[axis] < 0 ? 1 : values[step.grid[axis]];
}

// By the plan, which finds the kernel for tensors that lie elsewhere.
bool launch_by_plan(const LaunchStep& step, const Frame& frame) {
  if (step.plan == nullptr) {
    PyErr_Format(PyExc_RuntimeError, "%s: an operand lies at no multiple of 16 bytes, for which it was compiled",
                 step.kernel->name.c_str());
    return false;
  }
  std::vector<int32_t> axes;
  for (const int32_t number : step.grid) {
    if (number >= 0) axes.push_back(number);
  }
  const Ref grid(tuple_of(axes, frame.values));
  const Ref operands(PyTuple_New(static_cast<Py_ssize_t>(step.plan_slots.size())));
  const Ref numbers(PyTuple_New(static_cast<Py_ssize_t>(step.plan_numbers.size())));
  if (grid.get() == nullptr || operands.get() == nullptr || numbers.get() == nullptr) return false;
  for (size_t i = 0; i < step.plan_slots.size(); i++) {
    PyObject* one = step.plan_slots[i] < 0 ? Py_None : frame.slots[step.plan_slots[i]];
    Py_INCREF(one);
    PyTuple_SET_ITEM(operands.get(), static_cast<Py_ssize_t>(i), one);
  }
  for (size_t i = 0; i < step.plan_numbers.size(); i++) {
    const auto& [number, constant] = step.plan_numbers[i];
    PyObject* one = constant;
    if (number >= 0) {
      one = PyLong_FromLongLong(frame.values[number]);
      if (one == nullptr) return false;
    } else {
      Py_INCREF(one);
    }
    PyTuple_SET_ITEM(numbers.get(), static_cast<Py_ssize_t>(i), one);
  }
  PyObject* arguments[3] = {grid.get(), operands.get(), numbers.get()};
  const Ref done(PyObject_Vectorcall(step.plan, arguments, 3, nullptr));
  return done.get() != nullptr;
}

}  // namespace

bool find_address(const Body& body, Frame& frame, int32_t slot) {
  if (frame.addresses[slot] != 0) return true;
  if (!is_tensor(body, frame.slots[slot])) {
    PyErr_Format(PyExc_TypeError, "expected a tensor in slot %d, got %s", slot, Py_TYPE(frame.slots[slot])->tp_name);
    return false;
  }
  if (body.read != nullptr) {
    TensorFields fields;
    if (body.read(frame.slots[slot], &fields) != 0) return false;
    frame.addresses[slot] = fields.address();
    return true;
  }
  PyObject* arguments[1] = {frame.slots[slot]};
  const Ref found(PyObject_Vectorcall(body.data_ptr, arguments, 1, nullptr));
  if (found.get() == nullptr) return false;
  const uint64_t address = PyLong_AsUnsignedLongLong(found.get());
  if (address == static_cast<uint64_t>(-1) && PyErr_Occurred() != nullptr) return false;
  frame.addresses[slot] = address;  // 0 of a tensor without elements: asked again
  return true;
}

PyObject* tuple_of(const std::vector<int32_t>& numbers, const int64_t* values) {
  Ref tuple(PyTuple_New(static_cast<Py_ssize_t>(numbers.size())));
  if (tuple.get() == nullptr) return nullptr;
  for (size_t i = 0; i < numbers.size(); i++) {
    PyObject* number = PyLong_FromLongLong(values[numbers[i]]);
    if (number == nullptr) return nullptr;
    PyTuple_SET_ITEM(tuple.get(), static_cast<Py_ssize_t>(i), number);
  }
  return tuple.release();
}

bool run_launch(const Body& body, LaunchStep& step, void* stream, Frame& frame) {
  const host::Kernel& kernel = *step.kernel;
  uint64_t addresses[host::Kernel::kMaxParameters];
  void* parameters[host::Kernel::kMaxParameters];
  uint64_t unaligned = 0;
  for (size_t i = 0; i < step.operands.size(); i++) {
    const Operand& one = step.operands[i];
    if (!find_address(body, frame, one.slot)) return false;
    addresses[i] = frame.addresses[one.slot] + static_cast<uint64_t>(frame.values[one.offset]);
    unaligned |= addresses[i] & step.alignments[i];
  }
  const int64_t x = grid_size(step, 0, frame.values), y = grid_size(step, 1, frame.values),
                z = grid_size(step, 2, frame.values);
  if (x <= 0 || y <= 0 || z <= 0) return true;  // as Triton
  if (unaligned != 0) return launch_by_plan(step, frame);
  if (x > kMaxInt32 || y > kMaxInt32 || z > kMaxInt32) {
    PyErr_Format(PyExc_RuntimeError, "%s: grid of %lld x %lld x %lld programs", kernel.name.c_str(),
                 static_cast<long long>(x), static_cast<long long>(y), static_cast<long long>(z));
    return false;
  }
  // From here on nothing of Python runs until the kernel is in the stream: tables stay as they are.
  for (size_t i = 0; i < step.parameters.size(); i++) {
    Parameter& one = step.parameters[i];
    switch (one.kind) {
      case ParameterKind::kAddress:
        parameters[i] = &addresses[one.place];
        break;
      case ParameterKind::kNumber:  // the lower half first, where the parameter has 32 bits
        parameters[i] = &frame.values[one.place];
        break;
      case ParameterKind::kFixed:
        parameters[i] = &one.fixed;
        break;
      case ParameterKind::kMap: {
        Window& window = step.windows[static_cast<size_t>(one.place)];
        int code = 0;
        parameters[i] =
            window.maps.find(*body.driver, window.form, addresses[window.operand], frame.values[window.rows],
                             frame.values[window.cols], frame.values[window.row_stride], &code);
        if (parameters[i] == nullptr) {
          PyErr_Format(
              PyExc_RuntimeError, "%s: a tensor map of %lld x %lld with row stride %lld: %s", kernel.name.c_str(),
              static_cast<long long>(frame.values[window.rows]), static_cast<long long>(frame.values[window.cols]),
              static_cast<long long>(frame.values[window.row_stride]), host::error_text(*body.driver, code).c_str());
          return false;
        }
        break;
      }
    }
  }
  const host::LaunchConfig config{{static_cast<unsigned>(x), static_cast<unsigned>(y), static_cast<unsigned>(z)},
                                  {kernel.threads, 1, 1},
                                  kernel.shared_bytes,
                                  stream,
                                  nullptr,
                                  0};
  const int code = body.driver->launch(&config, kernel.function, parameters, nullptr);
  if (code == 0) return true;
  PyErr_Format(PyExc_RuntimeError, "%s: the launch failed: %s", kernel.name.c_str(),
               host::error_text(*body.driver, code).c_str());
  return false;
}

}  // namespace bert_fast::bindings
