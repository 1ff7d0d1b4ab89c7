// Makes programs of the form that Python has (bert_fast/triton/_program.py). A program is checked when it is made:
// places exist, slots are filled before they are read and not after they were given up, operands and numbers are those
// that the compiled kernels take. Running it then asks no more.

#include "bindings/program_make.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace bert_fast::bindings {
namespace {

// What a kernel was not compiled for: the program is none for it.
[[noreturn]] void refuse(const std::string& why) { throw py::value_error(why); }

class Maker {
 public:
  Maker(Body& body, const py::handle& program, const py::tuple& kernels, const std::vector<int32_t>& scratch)
      : body_(body), program_(program), kernels_(kernels) {
    body_.scratch = scratch;
  }

  void make() {
    body_.num_inputs = program_.attr("num_inputs").cast<int32_t>();
    body_.num_slots = program_.attr("num_slots").cast<int32_t>();
    if (body_.num_inputs < 0 || body_.num_slots < body_.num_inputs) refuse("slots: fewer than inputs");
    is_filled_.resize(static_cast<size_t>(body_.num_slots));
    std::fill_n(is_filled_.begin(), body_.num_inputs, true);
    is_given_ = is_filled_;
    body_.is_scratch.resize(is_filled_.size());
    for (const int32_t one : body_.scratch) {
      if (one < 0 || one >= body_.num_slots || is_scratch(one)) refuse("scratch: no slot, or one that is named twice");
      body_.is_scratch[static_cast<size_t>(one)] = true;
    }
    for (const py::handle& one : program_.attr("expressions")) add_expression(one);
    for (const py::handle& one : program_.attr("guards")) {
      const auto guard = one.cast<py::tuple>();
      body_.guards.emplace_back(number(guard[0]), guard[1].cast<int64_t>());
    }
    for (const py::handle& step : program_.attr("steps")) add_step(step);
    if (body_.launches.size() != kernels_.size()) refuse("kernels: not one for each launch");
    for (const py::handle& one : program_.attr("outputs")) {
      body_.outputs.push_back(one.cast<int32_t>() == -1 ? -1 : read_slot(one));
      if (body_.outputs.back() >= 0 && is_scratch(body_.outputs.back())) refuse("scratch: an output");
    }
    if (num_scratch_ != body_.scratch.size()) refuse("scratch: slots of other things than memory and views of it");
    body_.scratch_numbers.assign(scratch_numbers_.begin(), scratch_numbers_.end());
    for (const auto& [place, of] : integers_) body_.integers.push_back({place, of});
    for (const auto& [where, alignment] : inputs_) body_.inputs.push_back({{where.first, where.second}, alignment});
  }

 private:
  bool is_scratch(int32_t slot) const { return body_.is_scratch[static_cast<size_t>(slot)]; }

  PyObject* own(const py::handle& object) {
    body_.owned.push_back(object.inc_ref().ptr());
    return object.ptr();
  }

  int32_t number(const py::handle& given) const {
    const auto place = given.cast<int64_t>();
    if (place < 0 || place >= static_cast<int64_t>(body_.expressions.size())) {
      refuse("a number: expected 0 to " + std::to_string(body_.expressions.size()) + ", got " + std::to_string(place));
    }
    return static_cast<int32_t>(place);
  }

  int32_t slot(const py::handle& given) const {
    const auto place = given.cast<int64_t>();
    if (place < 0 || place >= body_.num_slots) {
      refuse("a slot: expected 0 to " + std::to_string(body_.num_slots) + ", got " + std::to_string(place));
    }
    return static_cast<int32_t>(place);
  }

  int32_t read_slot(const py::handle& given) const {
    const int32_t place = slot(given);
    if (!is_filled_[static_cast<size_t>(place)]) refuse("slot " + std::to_string(place) + " is read while it is empty");
    return place;
  }

  int32_t write_slot(const py::handle& given) {
    const int32_t place = slot(given);
    is_filled_[static_cast<size_t>(place)] = true;
    is_given_[static_cast<size_t>(place)] = false;
    return place;
  }

  std::vector<int32_t> numbers(const py::handle& given) const {
    std::vector<int32_t> places;
    for (const py::handle& one : given) places.push_back(number(one));
    return places;
  }

  void add_expression(const py::handle& given) {
    using Operation = host::Operation;
    static const std::map<std::string, Operation> operations = {
        {"+", Operation::kAdd},          {"-", Operation::kSubtract}, {"*", Operation::kMultiply},
        {"//", Operation::kFloorDivide}, {"%", Operation::kModulo},   {"<", Operation::kLess},
        {"<=", Operation::kLessEqual},   {"==", Operation::kEqual},   {"min", Operation::kMinimum},
        {"max", Operation::kMaximum}};
    const auto name = given.attr("op").cast<std::string>();
    is_zero_.push_back(false);
    if (name == "argument") {
      const auto argument = given.attr("a").cast<int32_t>();
      if (argument < 0 || argument >= Body::kMaxNumbers) refuse("an argument: got number " + std::to_string(argument));
      body_.expressions.add_argument(argument);
    } else if (name == "constant") {
      const auto value = given.attr("a").cast<int64_t>();
      is_zero_.back() = value == 0;
      body_.expressions.add_constant(value);
    } else {
      const auto found = operations.find(name);
      if (found == operations.end()) refuse("an expression of operation " + name + " is not known");
      const int32_t a = number(given.attr("a")), b = number(given.attr("b"));
      body_.expressions.add(found->second, a, b);
    }
  }

  void add_step(const py::handle& given) {
    const py::object what = given.attr("what");
    const std::string kind = kind_of(what);
    Step step;
    if (kind == "Empty") {
      step = {StepKind::kEmpty, body_.empties.size(), {}};
      add_empty(what);
    } else if (kind == "Call") {
      step = {StepKind::kCall, body_.calls.size(), {}};
      add_call(what);
    } else if (kind == "Product") {
      step = {StepKind::kProduct, body_.products.size(), {}};
      add_product(what);
    } else if (kind == "Launch") {
      step = {StepKind::kLaunch, body_.launches.size(), {}};
      add_launch(what);
    } else {
      refuse("a step of type " + kind + " is not known");
    }
    for (const py::handle& one : given.attr("last_used")) {
      step.last_used.push_back(read_slot(one));
      is_filled_[static_cast<size_t>(step.last_used.back())] = false;
    }
    body_.steps.push_back(std::move(step));
  }

  void add_empty(const py::handle& what) {
    EmptyStep step;
    step.shape = numbers(what.attr("shape"));
    if (step.shape.size() > Body::kMaxDimensions)
      refuse("a shape of " + std::to_string(step.shape.size()) + " numbers");
    step.values.resize(step.shape.size());
    step.dtype = own(what.attr("dtype"));
    step.element_bytes = what.attr("dtype").attr("itemsize").cast<int64_t>();
    step.slot = write_slot(what.attr("slot"));
    if (is_scratch(step.slot)) {
      num_scratch_++;
      scratch_numbers_.insert(step.shape.begin(), step.shape.end());
    }
    body_.empties.push_back(std::move(step));
  }

  CallArgument make_call_argument(const py::handle& given) {
    CallArgument argument;
    const auto kind = given.attr("kind").cast<std::string>();
    const py::object value = given.attr("value");
    if (kind == "slot") {
      argument.kind = CallArgumentKind::kSlot;
      argument.places = {read_slot(value)};
    } else if (kind == "slots") {
      argument.kind = CallArgumentKind::kSlots;
      for (const py::handle& one : value) argument.places.push_back(read_slot(one));
    } else if (kind == "number") {
      argument.kind = CallArgumentKind::kNumber;
      argument.places = {number(value)};
    } else if (kind == "numbers") {
      argument.kind = CallArgumentKind::kNumbers;
      argument.places = numbers(value);
    } else if (kind == "constant") {
      argument.constant = own(value);
    } else {
      refuse("an argument of kind " + kind + " is not known");
    }
    return argument;
  }

  void add_call(const py::handle& what) {
    CallStep step;
    step.function = own(what.attr("function"));
    for (const py::handle& one : what.attr("arguments")) step.arguments.push_back(make_call_argument(one));
    py::tuple names(what.attr("names"));
    step.num_names = names.size();
    if (step.num_names > step.arguments.size() || step.arguments.size() > Body::kMaxCallArguments) {
      refuse("a call: " + std::to_string(step.arguments.size()) + " arguments, " + std::to_string(step.num_names) +
             " by name");
    }
    if (step.num_names > 0) {
      py::tuple interned(names.size());
      for (size_t i = 0; i < names.size(); i++) {
        interned[i] =
            py::reinterpret_steal<py::object>(PyUnicode_InternFromString(names[i].cast<std::string>().c_str()));
      }
      step.names = own(interned);
    }
    for (const py::handle& one : what.attr("slots")) {
      step.slots.push_back(one.cast<int32_t>() == -1 ? -1 : write_slot(one));
    }
    const bool is_view = step.slots.size() == 1 && !step.arguments.empty() &&
                         step.arguments[0].kind == CallArgumentKind::kSlot && is_scratch(step.arguments[0].places[0]);
    step.is_scratch = is_view && step.slots[0] >= 0 && is_scratch(step.slots[0]);
    if (step.is_scratch) {
      num_scratch_++;
      for (const CallArgument& one : step.arguments) {
        if (one.kind != CallArgumentKind::kNumber && one.kind != CallArgumentKind::kNumbers) continue;
        scratch_numbers_.insert(one.places.begin(), one.places.end());
      }
    }
    body_.calls.push_back(std::move(step));
  }

  // An operand of a product, whose address is asked for before the program runs if the call gives it.
  Operand product_operand(const py::handle& slot, const py::handle& offset) {
    const Operand operand{read_slot(slot), number(offset)};
    if (is_given_[static_cast<size_t>(operand.slot)]) inputs_[{operand.slot, operand.offset}] |= 0;
    return operand;
  }

  ProductMatrix product_matrix(const py::handle& given) {
    static const std::map<std::string, host::ElementType> types = {{"torch.float32", host::ElementType::kFloat32},
                                                                   {"torch.float16", host::ElementType::kFloat16},
                                                                   {"torch.bfloat16", host::ElementType::kBFloat16}};
    const auto name = py::str(given.attr("dtype")).cast<std::string>();
    const auto type = types.find(name);
    if (type == types.end()) refuse("a product of " + name + " is not known");
    return {product_operand(given.attr("slot"), given.attr("offset")), number(given.attr("leading")),
            given.attr("is_transposed").cast<bool>(), type->second};
  }

  void add_product(const py::handle& what) {
    body_.products_library = host::CublasLt::loaded();
    if (body_.products_library == nullptr) refuse("a product: cuBLASLt is not loaded");
    ProductStep step;
    step.a = product_matrix(what.attr("a"));
    step.b = product_matrix(what.attr("b"));
    step.out = product_matrix(what.attr("out"));
    if (step.a.type != step.b.type || step.out.is_transposed) refuse("a product: not of such matrices");
    if (is_given_[static_cast<size_t>(step.out.operand.slot)]) refuse("a product: an input is written to");
    if (const py::object bias = what.attr("bias"); !bias.is_none()) {
      const auto pair = bias.cast<py::tuple>();
      step.bias = product_operand(pair[0], pair[1]);
    }
    step.rows = number(what.attr("rows"));
    step.inner = number(what.attr("inner"));
    step.cols = number(what.attr("cols"));
    step.accumulates = what.attr("accumulates").cast<bool>();
    step.allows_tf32 = what.attr("allows_tf32").cast<bool>();
    const auto workspace = what.attr("workspace").cast<py::tuple>();
    step.workspace = read_slot(workspace[0]);
    step.workspace_bytes = number(workspace[1]);
    body_.products.push_back(step);
  }

  void add_launch(const py::handle& what) {
    if (body_.launches.size() >= kernels_.size()) refuse("kernels: fewer than launches");
    const py::object owned = kernels_[body_.launches.size()];
    own(owned);
    LaunchStep step;
    step.kernel = owned.cast<const OwnedKernel&>().kernel;
    name_ = step.kernel->name;
    if (step.kernel->device != body_.device) refuse(name_ + ": of another device");
    const auto grid = numbers(what.attr("grid"));
    if (grid.empty() || grid.size() > 3) refuse(name_ + ": a grid of " + std::to_string(grid.size()) + " numbers");
    std::copy(grid.begin(), grid.end(), step.grid);
    for (const int32_t one : grid) integers_.insert({one, IntegerClass::kAny});

    const std::vector<host::Argument>& arguments = step.kernel->arguments;
    const py::object operands = what.attr("operands"), given_numbers = what.attr("numbers");
    const size_t num_operands = py::len(operands), num_numbers = py::len(given_numbers);
    if (num_operands + num_numbers > arguments.size()) refuse(name_ + ": fewer arguments than are given");
    std::map<size_t, py::object> windows;  // by place
    for (const py::handle& one : what.attr("windows")) {
      windows[one.attr("place").cast<size_t>()] = py::reinterpret_borrow<py::object>(one);
    }
    bool all_begin = windows.empty();
    size_t place = 0;
    for (const py::handle& one : operands) {
      const auto window = windows.find(place);
      add_operand(step, arguments[place++], one, window == windows.end() ? py::none() : window->second, &all_begin);
      if (window != windows.end()) windows.erase(window);
    }
    if (!windows.empty()) refuse(name_ + ": a window of no operand");
    for (const py::handle& one : given_numbers) add_number(step, arguments[place++], one.cast<py::tuple>());
    for (; place < arguments.size(); place++) {
      if (arguments[place].kind != host::ArgumentKind::kConstant && arguments[place].kind != host::ArgumentKind::kOne &&
          arguments[place].kind != host::ArgumentKind::kNone) {
        refuse(name_ + ": more parameters than are given");
      }
    }
    for (int i = 0; i < host::Kernel::kNumScratch; i++) step.parameters.push_back(fixed(0));
    if (all_begin) step.plan = own(what.attr("plan"));
    body_.launches.push_back(std::move(step));
  }

  static Parameter fixed(uint64_t value) { return {ParameterKind::kFixed, 0, value}; }

  void add_operand(LaunchStep& step, const host::Argument& argument, const py::handle& given, const py::handle& window,
                   bool* all_begin) {
    using Kind = host::ArgumentKind;
    if (given.is_none()) {
      if (argument.kind != Kind::kNone) refuse(name_ + ": was compiled for an operand that is not there");
      step.plan_slots.push_back(-1);
      return;
    }
    if (argument.kind != Kind::kPointer && argument.kind != Kind::kWindow) {
      refuse(name_ + ": was compiled without an operand that is there");
    }
    if ((argument.kind == Kind::kWindow) == window.is_none()) refuse(name_ + ": windows are others than compiled for");
    const auto pair = given.cast<py::tuple>();
    const Operand operand{read_slot(pair[0]), number(pair[1])};
    const uint64_t alignment = argument.kind == Kind::kWindow || argument.is_divisible ? 15 : 0;
    const auto index = static_cast<int32_t>(step.operands.size());
    step.operands.push_back(operand);
    step.alignments.push_back(alignment);
    step.plan_slots.push_back(operand.slot);
    if (!is_zero_[static_cast<size_t>(operand.offset)]) *all_begin = false;
    if (is_given_[static_cast<size_t>(operand.slot)]) {
      inputs_[{operand.slot, operand.offset}] |= alignment;
    } else if (alignment != 0 && !is_zero_[static_cast<size_t>(operand.offset)]) {
      integers_.insert({operand.offset, IntegerClass::kMultiple});
    }
    if (argument.kind == Kind::kPointer) {
      step.parameters.push_back({ParameterKind::kAddress, index, 0});
      return;
    }
    Window one;
    one.form = argument.window;
    one.operand = index;
    one.rows = number(window.attr("rows"));
    one.cols = number(window.attr("cols"));
    one.row_stride = number(window.attr("row_stride"));
    step.parameters.push_back({ParameterKind::kMap, static_cast<int32_t>(step.windows.size()), 0});
    for (const int32_t size : {one.rows, one.cols}) {
      integers_.insert({size, IntegerClass::kPositive});
      step.parameters.push_back({ParameterKind::kNumber, size, 0});
    }
    step.parameters.push_back({ParameterKind::kNumber, one.row_stride, 0});
    step.parameters.push_back(fixed(1));
    step.windows.push_back(std::move(one));
  }

  void add_number(LaunchStep& step, const host::Argument& argument, const py::tuple& given) {
    using Kind = host::ArgumentKind;
    if (!given[0].cast<bool>()) {
      if (argument.kind != Kind::kFloat32 || !PyFloat_CheckExact(given[1].ptr())) {
        refuse(name_ + ": was not compiled for a float that is given");
      }
      const auto value = static_cast<float>(given[1].cast<double>());
      uint32_t bits = 0;
      std::memcpy(&bits, &value, sizeof bits);
      step.parameters.push_back(fixed(bits));
      step.plan_numbers.emplace_back(-1, own(given[1]));
      return;
    }
    const int32_t place = number(given[1]);
    step.plan_numbers.emplace_back(place, nullptr);
    if (argument.kind == Kind::kOne) {
      integers_.insert({place, IntegerClass::kOne});
      return;
    }
    if (argument.kind != Kind::kInt32) refuse(name_ + ": was not compiled for an integer that is given");
    step.parameters.push_back({ParameterKind::kNumber, place, 0});
    integers_.insert({place, !argument.is_specialised ? IntegerClass::kAny
                             : argument.is_divisible  ? IntegerClass::kDivisible
                                                      : IntegerClass::kNeither});
  }

  Body& body_;
  py::handle program_;
  py::tuple kernels_;
  std::string name_;  // of the kernel at hand
  std::vector<bool> is_filled_, is_given_, is_zero_;
  std::set<int32_t> scratch_numbers_;
  size_t num_scratch_ = 0;  // slots of scratch that steps fill
  std::set<std::pair<int32_t, IntegerClass>> integers_;
  std::map<std::pair<int32_t, int32_t>, uint64_t> inputs_;
};

}  // namespace

void make_body(Body& body, const py::handle& program, const py::tuple& kernels, const std::vector<int32_t>& scratch) {
  Maker(body, program, kernels, scratch).make();
}

}  // namespace bert_fast::bindings
