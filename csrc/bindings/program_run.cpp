// Runs programs: memory, calls of PyTorch, products, launches. The GIL is held throughout; torch's functions may run
// anything in between, another run of the same program included, so what belongs to a run lies on its stack.

#include <limits>
#include <new>
#include <vector>

#include "bindings/program.h"
#include "bindings/program_frame.h"

namespace bert_fast::bindings {
namespace {

constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();
constexpr int64_t kMaxInt64 = std::numeric_limits<int64_t>::max();

// What came of a run up to here: it goes on, it is refused, an exception is set.
enum class Outcome { kGoOn, kRefused, kFailed };

Outcome take_numbers(const Body& body, PyObject* numbers, Frame& frame) {
  const int32_t count = body.expressions.num_arguments();
  if (!PyTuple_Check(numbers) || PyTuple_GET_SIZE(numbers) < count) {
    PyErr_Format(PyExc_TypeError, "numbers: expected a tuple of %d integers, got %R", count, numbers);
    return Outcome::kFailed;
  }
  int64_t arguments[Body::kMaxNumbers];
  for (int32_t i = 0; i < count; i++) {
    int overflow = 0;
    arguments[i] = PyLong_AsLongLongAndOverflow(PyTuple_GET_ITEM(numbers, i), &overflow);
    if (overflow != 0) return Outcome::kRefused;
    if (arguments[i] == -1 && PyErr_Occurred() != nullptr) return Outcome::kFailed;
  }
  if (!body.expressions.evaluate(arguments, frame.values)) return Outcome::kRefused;
  for (const auto& [number, value] : body.guards) {
    if (frame.values[number] != value) return Outcome::kRefused;
  }
  for (const IntegerCheck& check : body.integers) {
    const int64_t value = frame.values[check.number];
    const bool is_divisible = value % 16 == 0;
    bool fits = -kMaxInt32 <= value && value <= kMaxInt32;
    switch (check.of) {
      case IntegerClass::kAny:
        break;
      case IntegerClass::kOne:
        fits = value == 1;
        break;
      case IntegerClass::kDivisible:
        fits = fits && is_divisible;
        break;
      case IntegerClass::kNeither:
        fits = fits && !is_divisible && value != 1;
        break;
      case IntegerClass::kPositive:
        fits = fits && value > 0;
        break;
      case IntegerClass::kMultiple:
        fits = is_divisible;
        break;
    }
    if (!fits) return Outcome::kRefused;
  }
  return Outcome::kGoOn;
}

// Whether an input is on the kernels' device; notes its address.
Outcome find_input(const Body& body, Frame& frame, int32_t slot) {
  if (body.read != nullptr) {
    TensorFields fields;
    if (body.read(frame.slots[slot], &fields) != 0) return Outcome::kFailed;
    frame.addresses[slot] = fields.address();
    return fields.device() == body.tensor_device ? Outcome::kGoOn : Outcome::kRefused;
  }
  PyObject* arguments[1] = {frame.slots[slot]};
  const Ref device(PyObject_Vectorcall(body.get_device, arguments, 1, nullptr));
  if (device.get() == nullptr) return Outcome::kFailed;
  if (PyLong_AsLong(device.get()) != body.tensor_device) return Outcome::kRefused;
  return find_address(body, frame, slot) ? Outcome::kGoOn : Outcome::kFailed;
}

Outcome take_inputs(const Body& body, PyObject* inputs, Frame& frame) {
  if ((!PyTuple_Check(inputs) && !PyList_Check(inputs)) || PySequence_Fast_GET_SIZE(inputs) != body.num_inputs) {
    PyErr_Format(PyExc_TypeError, "inputs: expected a tuple or list of %d tensors and None, got a %s of %zd",
                 body.num_inputs, Py_TYPE(inputs)->tp_name, PyObject_Size(inputs));
    return Outcome::kFailed;
  }
  PyObject* const* items = PySequence_Fast_ITEMS(inputs);
  for (int32_t i = 0; i < body.num_inputs; i++) {
    if (items[i] != Py_None && !is_tensor(body, items[i])) {
      PyErr_Format(PyExc_TypeError, "inputs[%d]: expected a tensor or None, got %s", i, Py_TYPE(items[i])->tp_name);
      return Outcome::kFailed;
    }
    Py_INCREF(items[i]);
    frame.slots[i] = items[i];
  }
  // The first tensor and those that kernels read; PyTorch's functions look at the others themselves.
  int32_t first = 0;
  while (first < body.num_inputs && frame.slots[first] == Py_None) first++;
  if (first == body.num_inputs) return Outcome::kRefused;
  Outcome outcome = find_input(body, frame, first);
  if (outcome != Outcome::kGoOn) return outcome;
  for (const InputCheck& check : body.inputs) {
    const int32_t slot = check.operand.slot;
    if (frame.slots[slot] == Py_None) return Outcome::kRefused;
    if (frame.addresses[slot] == 0) {
      outcome = find_input(body, frame, slot);
      if (outcome != Outcome::kGoOn) return outcome;
    }
    const uint64_t address = frame.addresses[slot] + static_cast<uint64_t>(frame.values[check.operand.offset]);
    if ((address & check.alignment) != 0) return Outcome::kRefused;
  }
  return Outcome::kGoOn;
}

Outcome find_stream(const Body& body, void** stream) {
  const Ref device(PyObject_CallNoArgs(body.current_device));
  if (device.get() == nullptr) return Outcome::kFailed;
  const long current = PyLong_AsLong(device.get());
  if (current == -1 && PyErr_Occurred() != nullptr) return Outcome::kFailed;
  if (current != body.device) return Outcome::kRefused;
  const Ref found(PyObject_CallOneArg(body.current_stream, device.get()));
  if (found.get() == nullptr) return Outcome::kFailed;
  *stream = reinterpret_cast<void*>(PyLong_AsUnsignedLongLong(found.get()));
  if (PyErr_Occurred() != nullptr) return Outcome::kFailed;
  const int code = host::ensure_context(*body.driver, body.device);
  if (code == 0) return Outcome::kGoOn;
  PyErr_Format(PyExc_RuntimeError, "no context of device %d: %s", body.device,
               host::error_text(*body.driver, code).c_str());
  return Outcome::kFailed;
}

Outcome check_products(const Body& body, const Frame& frame) {
  for (const ProductStep& step : body.products) {
    if (!can_multiply(body, step, frame)) return Outcome::kRefused;
  }
  return Outcome::kGoOn;
}

// Sizes, strides and dtype of a tensor, the last run's where they are the same; a new reference.
PyObject* find_arguments(EmptyStep& step, const int64_t* values) {
  const size_t num_dimensions = step.shape.size();
  bool is_same = step.arguments != nullptr;
  for (size_t i = 0; is_same && i < num_dimensions; i++) is_same = step.values[i] == values[step.shape[i]];
  if (!is_same) {
    int64_t strides[Body::kMaxDimensions];
    int64_t stride = 1;
    for (size_t i = num_dimensions; i-- > 0;) {
      strides[i] = stride;
      const int64_t size = values[step.shape[i]];
      if (size > 1) stride = stride <= kMaxInt64 / size ? stride * size : kMaxInt64;  // torch refuses so much
    }
    const Ref sizes(tuple_of(step.shape, values));
    if (sizes.get() == nullptr) return nullptr;
    const Ref steps(PyTuple_New(static_cast<Py_ssize_t>(num_dimensions)));
    if (steps.get() == nullptr) return nullptr;
    for (size_t i = 0; i < num_dimensions; i++) {
      PyObject* one = PyLong_FromLongLong(strides[i]);
      if (one == nullptr) return nullptr;
      PyTuple_SET_ITEM(steps.get(), static_cast<Py_ssize_t>(i), one);
    }
    PyObject* made = PyTuple_Pack(3, sizes.get(), steps.get(), step.dtype);
    if (made == nullptr) return nullptr;
    for (size_t i = 0; i < num_dimensions; i++) step.values[i] = values[step.shape[i]];
    Py_XSETREF(step.arguments, made);
  }
  Py_INCREF(step.arguments);
  return step.arguments;
}

bool run_empty(const Body& body, EmptyStep& step, Frame& frame) {
  if (frame.slots[step.slot] != nullptr) return true;  // kept
  const Ref arguments(find_arguments(step, frame.values));
  if (arguments.get() == nullptr) return false;
  PyObject* made = PyObject_Call(body.empty_strided, arguments.get(), nullptr);
  if (made == nullptr) return false;
  frame.put(step.slot, made);
  return true;
}

// Arguments of a call; those that were made for it are given up with it.
class CallArguments {
 public:
  CallArguments() = default;
  CallArguments(const CallArguments&) = delete;
  CallArguments& operator=(const CallArguments&) = delete;
  ~CallArguments() {
    for (size_t i = 0; i < num_made_; i++) Py_DECREF(made_[i]);
  }
  void borrow(PyObject* object) { each[1 + size++] = object; }
  bool own(PyObject* object) {
    if (object == nullptr) return false;
    made_[num_made_++] = object;
    borrow(object);
    return true;
  }
  // What PyObject_Vectorcall is given; the place before it is the function's to use.
  PyObject** begin() { return each + 1; }

  size_t size = 0;
  PyObject* each[1 + Body::kMaxCallArguments];

 private:
  PyObject* made_[Body::kMaxCallArguments];
  size_t num_made_ = 0;
};

PyObject* make_list(const std::vector<int32_t>& slots, const Frame& frame) {
  PyObject* list = PyList_New(static_cast<Py_ssize_t>(slots.size()));
  if (list == nullptr) return nullptr;
  for (size_t i = 0; i < slots.size(); i++) {
    PyObject* tensor = frame.slots[slots[i]];
    Py_INCREF(tensor);
    PyList_SET_ITEM(list, static_cast<Py_ssize_t>(i), tensor);
  }
  return list;
}

bool keep_results(const CallStep& step, PyObject* made, Frame& frame) {
  Ref result(made);
  if (step.slots.empty()) return true;
  if (step.slots.size() == 1) {
    if (step.slots[0] >= 0) frame.put(step.slots[0], result.release());
    return true;
  }
  const Ref each(PySequence_Tuple(made));
  if (each.get() == nullptr) return false;
  if (PyTuple_GET_SIZE(each.get()) != static_cast<Py_ssize_t>(step.slots.size())) {
    PyErr_Format(PyExc_ValueError, "%R: expected %zu results, got %zd", step.function, step.slots.size(),
                 PyTuple_GET_SIZE(each.get()));
    return false;
  }
  for (size_t i = 0; i < step.slots.size(); i++) {
    if (step.slots[i] < 0) continue;
    PyObject* one = PyTuple_GET_ITEM(each.get(), static_cast<Py_ssize_t>(i));
    Py_INCREF(one);
    frame.put(step.slots[i], one);
  }
  return true;
}

bool run_call(const CallStep& step, Frame& frame) {
  if (step.is_scratch && frame.slots[step.slots[0]] != nullptr) return true;  // a view that was kept
  CallArguments arguments;
  for (const CallArgument& one : step.arguments) {
    switch (one.kind) {
      case CallArgumentKind::kSlot:
        // It may be written to and, in principle, be given other memory.
        frame.addresses[one.places[0]] = 0;
        arguments.borrow(frame.slots[one.places[0]]);
        break;
      case CallArgumentKind::kSlots:
        for (const int32_t slot : one.places) frame.addresses[slot] = 0;
        if (!arguments.own(make_list(one.places, frame))) return false;
        break;
      case CallArgumentKind::kNumber:
        if (!arguments.own(PyLong_FromLongLong(frame.values[one.places[0]]))) return false;
        break;
      case CallArgumentKind::kNumbers:
        if (!arguments.own(tuple_of(one.places, frame.values))) return false;
        break;
      case CallArgumentKind::kConstant:
        arguments.borrow(one.constant);
        break;
    }
  }
  const size_t num_positional = arguments.size - step.num_names;
  PyObject* made = PyObject_Vectorcall(step.function, arguments.begin(),
                                       num_positional | PY_VECTORCALL_ARGUMENTS_OFFSET, step.names);
  return made != nullptr && keep_results(step, made, frame);
}

bool run_steps(Body& body, void* stream, bool keeps_scratch, Frame& frame) {
  for (const Step& step : body.steps) {
    bool is_done = false;
    switch (step.kind) {
      case StepKind::kEmpty:
        is_done = run_empty(body, body.empties[step.index], frame);
        break;
      case StepKind::kCall:
        is_done = run_call(body.calls[step.index], frame);
        break;
      case StepKind::kProduct:
        is_done = run_product(body, body.products[step.index], stream, frame);
        break;
      case StepKind::kLaunch:
        is_done = run_launch(body, body.launches[step.index], stream, frame);
        break;
    }
    if (!is_done) return false;
    for (const int32_t slot : step.last_used) {
      if (!keeps_scratch || !body.is_scratch[static_cast<size_t>(slot)]) frame.put(slot, nullptr);
    }
  }
  return true;
}

PyObject* take_outputs(const Body& body, const Frame& frame) {
  PyObject* outputs = PyTuple_New(static_cast<Py_ssize_t>(body.outputs.size()));
  if (outputs == nullptr) return nullptr;
  for (size_t i = 0; i < body.outputs.size(); i++) {
    PyObject* one = body.outputs[i] < 0 ? Py_None : frame.slots[body.outputs[i]];
    Py_INCREF(one);
    PyTuple_SET_ITEM(outputs, static_cast<Py_ssize_t>(i), one);
  }
  return outputs;
}

}  // namespace

PyObject* run(Body& body, PyObject* inputs, PyObject* numbers) try {
  Frame frame(body);
  void* stream = nullptr;
  Outcome outcome = take_numbers(body, numbers, frame);
  if (outcome == Outcome::kGoOn) outcome = take_inputs(body, inputs, frame);
  if (outcome == Outcome::kGoOn) outcome = find_stream(body, &stream);
  if (outcome == Outcome::kGoOn) outcome = check_products(body, frame);
  if (outcome == Outcome::kRefused) Py_RETURN_NONE;
  if (outcome == Outcome::kFailed) return nullptr;
  const bool keeps = take_kept(body, stream, frame);
  if (!run_steps(body, stream, keeps, frame)) return nullptr;
  Ref outputs(take_outputs(body, frame));
  if (keeps && outputs.get() != nullptr) keep_scratch(body, frame);
  return outputs.release();
} catch (const std::bad_alloc&) {
  return PyErr_NoMemory();
}

}  // namespace bert_fast::bindings
