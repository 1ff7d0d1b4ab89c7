// Operators of PyTorch for the CPU that check nothing, compute nothing and make their output. Where the CPU takes
// another way than a GPU (attention and dropout step by step, lists of tensors one by one), the GPU's way is taken.
#include <ATen/core/Tensor.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/native_dropout.h>
#include <ATen/ops/pad.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/where.h>
#include <torch/library.h>

#include <cmath>
#include <limits>
#include <optional>
#include <tuple>
#include <vector>

using at::Scalar;
using at::Tensor;
using at::TensorList;

namespace {

// Products of the library.

Tensor mm(const Tensor& a, const Tensor& b) { return at::empty({a.size(0), b.size(1)}, a.options()); }

Tensor& mm_out(const Tensor&, const Tensor&, Tensor& out) { return out; }

Tensor mm_dtype(const Tensor& a, const Tensor& b, at::ScalarType dtype) {
  return at::empty({a.size(0), b.size(1)}, a.options().dtype(dtype));
}

Tensor& mm_dtype_out(const Tensor&, const Tensor&, at::ScalarType, Tensor& out) { return out; }

Tensor addmm(const Tensor&, const Tensor& a, const Tensor& b, const Scalar&, const Scalar&) {
  return at::empty({a.size(0), b.size(1)}, a.options());
}

Tensor& addmm_out(const Tensor&, const Tensor&, const Tensor&, const Scalar&, const Scalar&, Tensor& out) {
  return out;
}

Tensor& addmm_(Tensor& self, const Tensor&, const Tensor&, const Scalar&, const Scalar&) { return self; }

Tensor addmm_dtype(const Tensor&, const Tensor& a, const Tensor& b, at::ScalarType dtype, const Scalar&,
                   const Scalar&) {
  return at::empty({a.size(0), b.size(1)}, a.options().dtype(dtype));
}

Tensor& addmm_dtype_out(const Tensor&, const Tensor&, const Tensor&, at::ScalarType, const Scalar&, const Scalar&,
                        Tensor& out) {
  return out;
}

Tensor bmm(const Tensor& a, const Tensor& b) { return at::empty({a.size(0), a.size(1), b.size(2)}, a.options()); }

Tensor& bmm_out(const Tensor&, const Tensor&, Tensor& out) { return out; }

// Attention, by the kernel that a GPU has for a mask: memory-efficient attention.

std::tuple<Tensor, Tensor, Tensor, Tensor> attention(const Tensor& q, const Tensor&, const Tensor& v,
                                                     const std::optional<Tensor>&, bool, double, bool,
                                                     std::optional<double>) {
  const auto batch = q.size(0), heads = q.size(1), length = q.size(2);
  const auto whole = q.options().dtype(at::kLong);
  Tensor out = at::empty({batch, length, heads, v.size(3)}, q.options()).transpose(1, 2);
  Tensor lse = at::empty({batch, heads, length}, q.options().dtype(at::kFloat));
  return {out, lse, at::empty({}, whole), at::empty({}, whole)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(const Tensor& dy, const Tensor& q, const Tensor& k,
                                                              const Tensor& v, const Tensor&, const Tensor&,
                                                              const Tensor&, const Tensor&, const Tensor&, double,
                                                              std::array<bool, 4>, bool, std::optional<double>) {
  if (!dy.defined()) return {};
  const auto like = [](const Tensor& t) {
    return at::empty({t.size(0), t.size(2), t.size(1), t.size(3)}, t.options()).transpose(1, 2);
  };
  return {like(q), like(k), like(v), Tensor()};
}

Tensor scaled_dot_product_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                                    const std::optional<Tensor>& mask, double dropout, bool is_causal,
                                    std::optional<double> scale, bool) {
  std::optional<Tensor> bias = mask;
  if (mask && mask->scalar_type() == at::kBool) {
    const auto options = q.options();
    bias = at::where(*mask, at::scalar_tensor(0.0, options),
                     at::scalar_tensor(-std::numeric_limits<double>::infinity(), options));
  }
  if (bias && bias->size(-1) % 16 != 0) {  // the kernel's alignment
    const auto length = bias->size(-1);
    bias = at::pad(*bias, {0, 16 - length % 16}).slice(-1, 0, length);
  }
  if (bias) bias = bias->expand({q.size(0), q.size(1), q.size(2), k.size(2)});
  const bool needs_lse = q.requires_grad() || k.requires_grad() || v.requires_grad();
  return std::get<0>(at::_scaled_dot_product_efficient_attention(q, k, v, bias, needs_lse, dropout, is_causal, scale));
}

// Dropout, by one kernel.

std::tuple<Tensor, Tensor> native_dropout(const Tensor& x, double, std::optional<bool>) {
  return {at::empty_like(x), at::empty_like(x, x.options().dtype(at::kBool))};
}

Tensor native_dropout_backward(const Tensor& dy, const Tensor&, double) { return at::empty_like(dy); }

Tensor dropout(const Tensor& x, double p, bool is_training) {
  if (p == 0 || !is_training || x.numel() == 0) return x;
  return std::get<0>(at::native_dropout(x, p, is_training));
}

// Lists of tensors, by a few kernels.

std::vector<Tensor> foreach_norm(TensorList tensors, const Scalar&, std::optional<at::ScalarType>) {
  std::vector<Tensor> norms;
  norms.reserve(tensors.size());
  for (const Tensor& one : tensors) norms.push_back(at::empty({}, one.options()));
  return norms;
}

void foreach_scalar_(TensorList, const Scalar&) {}

void foreach_tensor_(TensorList, const Tensor&) {}

void foreach_copy_(TensorList, TensorList, bool) {}

void fused_adamw_(TensorList, TensorList, TensorList, TensorList, TensorList, TensorList, double, double, double,
                  double, double, bool, bool, const std::optional<Tensor>&, const std::optional<Tensor>&) {}

}  // namespace

TORCH_LIBRARY_IMPL(aten, CPU, m) {
  m.impl("mm", mm);
  m.impl("mm.out", mm_out);
  m.impl("mm.dtype", mm_dtype);
  m.impl("mm.dtype_out", mm_dtype_out);
  m.impl("addmm", addmm);
  m.impl("addmm.out", addmm_out);
  m.impl("addmm_", addmm_);
  m.impl("addmm.dtype", addmm_dtype);
  m.impl("addmm.dtype_out", addmm_dtype_out);
  m.impl("bmm", bmm);
  m.impl("bmm.out", bmm_out);
  m.impl("_scaled_dot_product_efficient_attention", attention);
  m.impl("_scaled_dot_product_efficient_attention_backward", attention_backward);
  m.impl("native_dropout", native_dropout);
  m.impl("native_dropout_backward", native_dropout_backward);
  m.impl("_foreach_norm.Scalar", foreach_norm);
  m.impl("_foreach_mul_.Scalar", foreach_scalar_);
  m.impl("_foreach_mul_.Tensor", foreach_tensor_);
  m.impl("_foreach_add_.Scalar", foreach_scalar_);
  m.impl("_foreach_copy_", foreach_copy_);
  m.impl("_fused_adamw_", fused_adamw_);
}

TORCH_LIBRARY_IMPL(aten, AutogradCPU, m) {
  m.impl("scaled_dot_product_attention", scaled_dot_product_attention);
  m.impl("dropout", dropout);
}
