// Matrix products of a program, by cuBLASLt and by address.

#include <limits>

#include "bindings/program.h"
#include "bindings/program_frame.h"

namespace bert_fast::bindings {
namespace {

constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();
constexpr uint64_t kMaxAlignment = 256;

uint64_t address_of(const Frame& frame, const Operand& operand) {
  return frame.addresses[operand.slot] + static_cast<uint64_t>(frame.values[operand.offset]);
}

// The largest power of two up to kMaxAlignment that divides the address; memory that is still to come has address 0.
uint32_t alignment_of(const Frame& frame, const Operand& operand) {
  const uint64_t address = address_of(frame, operand) | kMaxAlignment;
  return static_cast<uint32_t>(address & (~address + 1));
}

host::MatrixForm form_of(const Frame& frame, const ProductMatrix& matrix) {
  return {matrix.type, matrix.is_transposed, frame.values[matrix.leading], alignment_of(frame, matrix.operand)};
}

host::ProductForm form_of(const Body& body, const ProductStep& step, const Frame& frame) {
  host::ProductForm form;
  form.device = body.device;
  form.rows = frame.values[step.rows];
  form.inner = frame.values[step.inner];
  form.cols = frame.values[step.cols];
  form.a = form_of(frame, step.a);
  form.b = form_of(frame, step.b);
  form.out = form_of(frame, step.out);
  if (step.bias.slot >= 0) form.bias_alignment = alignment_of(frame, step.bias);
  form.accumulates = step.accumulates;
  form.allows_tf32 = step.allows_tf32;
  form.workspace_bytes = static_cast<uint64_t>(frame.values[step.workspace_bytes]);
  return form;
}

// Whether rows (columns) of a matrix do not overlap.
bool lies_apart(const host::MatrixForm& form, int64_t rows, int64_t cols) {
  const int64_t count = form.is_transposed ? cols : rows, length = form.is_transposed ? rows : cols;
  return count <= 1 || (length <= form.leading && form.leading <= kMaxInt32);
}

}  // namespace

bool can_multiply(const Body& body, const ProductStep& step, const Frame& frame) {
  const host::ProductForm form = form_of(body, step, frame);
  for (const int64_t size : {form.rows, form.inner, form.cols}) {
    if (size <= 0 || size > kMaxInt32) return false;
  }
  return lies_apart(form.a, form.rows, form.inner) && lies_apart(form.b, form.inner, form.cols) &&
         lies_apart(form.out, form.rows, form.cols) && body.products_library->can_multiply(form);
}

bool run_product(const Body& body, const ProductStep& step, void* stream, Frame& frame) {
  for (const int32_t slot : {step.a.operand.slot, step.b.operand.slot, step.out.operand.slot, step.workspace}) {
    if (!find_address(body, frame, slot)) return false;
  }
  host::ProductAddresses addresses{address_of(frame, step.a.operand), address_of(frame, step.b.operand),
                                   address_of(frame, step.out.operand), 0, frame.addresses[step.workspace]};
  if (step.bias.slot >= 0) {
    if (!find_address(body, frame, step.bias.slot)) return false;
    addresses.bias = address_of(frame, step.bias);
  }
  const host::ProductForm form = form_of(body, step, frame);
  const int status = body.products_library->multiply(form, addresses, stream);
  if (status == 0) return true;
  PyErr_Format(PyExc_RuntimeError, "a product of [%lld, %lld] and [%lld, %lld]: cuBLASLt's status is %d",
               static_cast<long long>(form.rows), static_cast<long long>(form.inner),
               static_cast<long long>(form.inner), static_cast<long long>(form.cols), status);
  return false;
}

}  // namespace bert_fast::bindings
