// Products and attention of PyTorch's CPU that compute nothing: what is left of a call is the dispatcher, autograd, checks
// and the memory of its output, which a call of a GPU's has as well.

#include <ATen/ATen.h>
#include <torch/library.h>

#include <tuple>

namespace {

using at::Scalar;
using at::Tensor;

Tensor product(const Tensor& a, const Tensor& b) { return at::empty({a.size(0), b.size(1)}, a.options()); }
Tensor& mm_out(const Tensor&, const Tensor&, Tensor& out) { return out; }
Tensor& mm_wide_out(const Tensor&, const Tensor&, at::ScalarType, Tensor& out) { return out; }
Tensor addmm(const Tensor&, const Tensor& a, const Tensor& b, const Scalar&, const Scalar&) { return product(a, b); }
Tensor& addmm_out(const Tensor&, const Tensor&, const Tensor&, const Scalar&, const Scalar&, Tensor& out) { return out; }
Tensor& addmm_wide_out(const Tensor&, const Tensor&, const Tensor&, at::ScalarType, const Scalar&, const Scalar&,
                       Tensor& out) {
  return out;
}
Tensor& addmm_in_place(Tensor& c, const Tensor&, const Tensor&, const Scalar&, const Scalar&) { return c; }
Tensor bmm(const Tensor& a, const Tensor& b) { return at::empty({a.size(0), a.size(1), b.size(2)}, a.options()); }
std::tuple<Tensor, Tensor> attention(const Tensor& q, const Tensor&, const Tensor&, double, bool,
                                     const std::optional<Tensor>&, std::optional<double>) {
  return {at::empty_like(q), at::empty({q.size(0), q.size(1), q.size(2)}, q.options().dtype(at::kFloat))};
}
std::tuple<Tensor, Tensor, Tensor> attention_backward(const Tensor&, const Tensor& q, const Tensor& k, const Tensor& v,
                                                      const Tensor&, const Tensor&, double, bool,
                                                      const std::optional<Tensor>&, std::optional<double>) {
  return {at::empty_like(q), at::empty_like(k), at::empty_like(v)};
}
void copies(at::TensorList, at::TensorList, bool) {}

}  // namespace

TORCH_LIBRARY_IMPL(aten, CPU, library) {
  library.impl("mm", product);
  library.impl("mm.out", mm_out);
  library.impl("mm.dtype_out", mm_wide_out);
  library.impl("addmm", addmm);
  library.impl("addmm.out", addmm_out);
  library.impl("addmm.dtype_out", addmm_wide_out);
  library.impl("addmm_", addmm_in_place);
  library.impl("bmm", bmm);
  library.impl("_scaled_dot_product_flash_attention_for_cpu", attention);
  library.impl("_scaled_dot_product_flash_attention_for_cpu_backward", attention_backward);
  library.impl("_foreach_copy_", copies);
}
