// A program (bert_fast/triton/_program.py) in the form in which it is run: program.cpp makes it, program_run.cpp runs
// it.

#pragma once

#include <Python.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "bindings/tensors.h"
#include "host/cublaslt.h"
#include "host/driver.h"
#include "host/expressions.h"
#include "host/kernel.h"

namespace bert_fast::bindings {

// Python's objects below are borrowed from Program::owned but where it says otherwise.

struct EmptyStep {
  int32_t slot = 0;
  int64_t element_bytes = 0;
  std::vector<int32_t> shape;  // numbers
  PyObject* dtype = nullptr;
  PyObject* arguments = nullptr;  // owned: sizes, strides and dtype of the last run, or null
  std::vector<int64_t> values;    // the sizes in `arguments`
};

enum class CallArgumentKind : uint8_t { kSlot, kSlots, kNumber, kNumbers, kConstant };

struct CallArgument {
  CallArgumentKind kind = CallArgumentKind::kConstant;
  std::vector<int32_t> places;  // slots or numbers
  PyObject* constant = nullptr;
};

struct CallStep {
  PyObject* function = nullptr;
  std::vector<CallArgument> arguments;
  PyObject* names = nullptr;  // a tuple, or null
  size_t num_names = 0;
  std::vector<int32_t> slots;  // -1: the result is dropped
  bool is_scratch = false;     // a view of scratch
};

struct Operand {
  int32_t slot = 0;
  int32_t offset = 0;  // a number, bytes
};

// A matrix of a product; see bert_fast/triton/_program.py.
struct ProductMatrix {
  Operand operand;
  int32_t leading = 0;  // a number
  bool is_transposed = false;
  host::ElementType type = host::ElementType::kFloat32;
};

struct ProductStep {
  ProductMatrix a, b, out;
  Operand bias{-1, 0};                         // slot -1: none
  int32_t rows = 0, inner = 0, cols = 0;       // numbers
  int32_t workspace = 0, workspace_bytes = 0;  // a slot, a number
  bool accumulates = false, allows_tf32 = false;
};

enum class ParameterKind : uint8_t { kAddress, kNumber, kFixed, kMap };

struct Parameter {
  ParameterKind kind = ParameterKind::kFixed;
  int32_t place = 0;   // an operand, a number or a window
  uint64_t fixed = 0;  // bytes of a constant, the first ones of it
};

struct Window {
  host::WindowForm form;
  int32_t operand = 0, rows = 0, cols = 0, row_stride = 0;
  host::MapTable maps;
};

struct LaunchStep {
  std::shared_ptr<const host::Kernel> kernel;
  int32_t grid[3] = {-1, -1, -1};    // numbers; -1: one program
  std::vector<Operand> operands;     // those that are there
  std::vector<uint64_t> alignments;  // of each operand: 15 where its address has to be a multiple of 16, else 0
  std::vector<Parameter> parameters;
  std::vector<Window> windows;
  // How the plan is asked in place of the kernel where an address turns out to be no multiple of 16.
  PyObject* plan = nullptr;         // null: no operand may lie elsewhere than where its slot begins
  std::vector<int32_t> plan_slots;  // -1: None
  std::vector<std::pair<int32_t, PyObject*>> plan_numbers;  // numbers, or -1 and a float
};

enum class StepKind : uint8_t { kEmpty, kCall, kProduct, kLaunch };

struct Step {
  StepKind kind = StepKind::kEmpty;
  size_t index = 0;  // among those of its kind
  std::vector<int32_t> last_used;
};

// What an integer has to be for the kernels that take it.
// All but kMultiple fit into 32 bits.
enum class IntegerClass : uint8_t {
  kAny,
  kOne,
  kDivisible,  // by 16
  kNeither,
  kPositive,
  kMultiple,  // of 16, of any size
};

struct IntegerCheck {
  int32_t number = 0;
  IntegerClass of = IntegerClass::kAny;
};

// An operand that the call gives.
struct InputCheck {
  Operand operand;
  uint64_t alignment = 0;
};

// Tensors of the last run that the next run of the same sizes takes again; none while a run has them.
struct Kept {
  std::vector<int64_t> sizes;
  std::vector<PyObject*> tensors;   // owned
  std::vector<uint64_t> addresses;  // of tensors, 0 where nothing asked for one
};

struct Program {
  PyObject_HEAD
      // The rest is made in place by `program.cpp`.
      struct Body* body;
};

struct Body {
  std::vector<PyObject*> owned;
  const host::Driver* driver = nullptr;
  host::CublasLt* products_library = nullptr;  // null: there are no products
  int device = 0;                              // of the kernels
  int tensor_device = 0;                       // what tensors of it answer
  int32_t num_inputs = 0, num_slots = 0;
  host::Expressions expressions;
  std::vector<std::pair<int32_t, int64_t>> guards;
  std::vector<IntegerCheck> integers;
  std::vector<InputCheck> inputs;
  std::vector<EmptyStep> empties;
  std::vector<CallStep> calls;
  std::vector<ProductStep> products;
  std::vector<LaunchStep> launches;
  std::vector<Step> steps;
  std::vector<int32_t> outputs;  // -1: None
  // Slots whose tensors stay within the program, and the numbers that tell how large these are and where they begin.
  std::vector<int32_t> scratch, scratch_numbers;
  std::vector<bool> is_scratch;  // by slot
  Kept kept;
  // Functions of PyTorch and of Triton's driver.
  PyTypeObject* tensor_type = nullptr;
  PyObject* empty_strided = nullptr;
  ReadTensor read = nullptr;  // null: the next two are called
  PyObject* data_ptr = nullptr;
  PyObject* get_device = nullptr;
  PyObject* current_device = nullptr;
  PyObject* current_stream = nullptr;

  static constexpr int32_t kMaxNumbers = 256;
  static constexpr size_t kMaxDimensions = 8;
  static constexpr size_t kMaxCallArguments = 64;
};

// Gives up what a program has kept.
void give_up_kept(Body& body);

// Program.run(inputs, numbers); program is alive for as long as it runs.
PyObject* run(Body& body, PyObject* inputs, PyObject* numbers);

}  // namespace bert_fast::bindings
