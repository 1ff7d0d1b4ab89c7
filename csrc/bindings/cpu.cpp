// Binds csrc/cpu: buffers are passed by address (tensor.data_ptr()), so the extension needs no knowledge of torch.
// An address of 0 stands for "not there", and is refused where something must be. Sizes and offsets are checked against
// one another here; that an address has as much behind it as they say, nothing here can know: bert_fast/ops checks the
// tensors.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/gil.h"
#include "cpu/attention.h"
#include "cpu/dropout.h"
#include "cpu/encoder_layer.h"
#include "cpu/kernels.h"
#include "cpu/layer_norm.h"
#include "cpu/linear.h"
#include "cpu/linear_bf16.h"
#include "cpu/linear_int8.h"
#include "cpu/rotary.h"

namespace py = pybind11;
namespace cpu = bert_fast::cpu;

namespace {

// A seed as Python holds it: any int, of which the low 64 bits count, so that a signed and an unsigned reading of a
// seed tensor give the same key.
struct Seed {
  uint64_t bits = 0;
};

}  // namespace

namespace pybind11::detail {
template <>
struct type_caster<Seed> {
  PYBIND11_TYPE_CASTER(Seed, const_name("int"));
  bool load(handle source, bool) {
    if (!PyLong_Check(source.ptr())) return false;
    value.bits = PyLong_AsUnsignedLongLongMask(source.ptr());
    return true;
  }
};
}  // namespace pybind11::detail

namespace {

using Address = std::uintptr_t;

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

cpu::DropoutSpec make_spec(Seed seed, uint32_t site, uint32_t threshold, float scale) {
  return {seed.bits, site, threshold, threshold == 0 ? 1.0f : scale};
}

void dropout(Address dst, Address src, int64_t num_rows, int64_t num_cols, int64_t src_row_stride, Address coords,
             Seed seed, uint32_t site, uint32_t threshold, float scale, int num_threads) {
  cpu::dropout(at<float>(dst), at<const float>(src), num_rows, num_cols, src_row_stride, at<const int32_t>(coords),
               make_spec(seed, site, threshold, scale), num_threads);
}

void keep_mask(Address dst, int64_t num_rows, int64_t num_cols, Address coords, Seed seed, uint32_t site,
               uint32_t threshold, int num_threads) {
  cpu::keep_mask(at<uint8_t>(dst), num_rows, num_cols, at<const int32_t>(coords),
                 make_spec(seed, site, threshold, 1.0f), num_threads);
}

// strides: of token, part and head, of x and then of y.
void rotary(Address x, Address y, Address cos, Address sin, int64_t num_tokens, int64_t num_parts, int64_t num_heads,
            int64_t num_freqs, int64_t turned_parts, std::array<int64_t, 6> strides, bool is_interleaved,
            bool is_backward, int num_threads) {
  cpu::rotary({at<const float>(x),
               at<float>(y),
               at<const float>(cos),
               at<const float>(sin),
               num_tokens,
               num_parts,
               num_heads,
               num_freqs,
               turned_parts,
               {strides[0], strides[1], strides[2]},
               {strides[3], strides[4], strides[5]},
               is_interleaved,
               is_backward},
              num_threads);
}

void dropout_add_layer_norm_fwd(Address x, Address x_bias, Address residual, Address weight, Address bias, Address y,
                                Address h, Address mean, Address rstd, int64_t num_rows, int64_t num_cols, float eps,
                                Address coords, Seed seed, uint32_t site, uint32_t threshold, float scale,
                                int num_threads) {
  const cpu::LayerNormForward args{at<const float>(x),
                                   at<const float>(x_bias),
                                   at<const float>(residual),
                                   at<const float>(weight),
                                   at<const float>(bias),
                                   at<float>(y),
                                   at<float>(h),
                                   at<float>(mean),
                                   at<float>(rstd),
                                   num_rows,
                                   num_cols,
                                   eps};
  cpu::dropout_add_layer_norm_forward(args, at<const int32_t>(coords), make_spec(seed, site, threshold, scale),
                                      num_threads);
}

bool output_suffices(Address weight, Address bias, int64_t num_cols, float min_weight, float max_weight,
                     float max_shift) {
  return cpu::output_suffices(at<const float>(weight), at<const float>(bias), num_cols, min_weight, max_weight,
                              max_shift);
}

void dropout_add_layer_norm_bwd(Address dy, Address kept, Address mean, Address rstd, Address weight, Address bias,
                                Address dresidual, Address dx, Address dx_bias, Address dweight, Address dbias,
                                int64_t num_rows, int64_t num_cols, Address coords, Seed seed, uint32_t site,
                                uint32_t threshold, float scale, int num_threads) {
  const cpu::LayerNormBackward args{at<const float>(dy),
                                    at<const float>(kept),
                                    at<const float>(mean),
                                    at<const float>(rstd),
                                    at<const float>(weight),
                                    at<const float>(bias),
                                    at<float>(dresidual),
                                    at<float>(dx),
                                    at<float>(dx_bias),
                                    at<float>(dweight),
                                    at<float>(dbias),
                                    num_rows,
                                    num_cols};
  cpu::dropout_add_layer_norm_backward(args, at<const int32_t>(coords), make_spec(seed, site, threshold, scale),
                                       num_threads);
}

using FourSizes = std::array<int64_t, 4>;

cpu::ScoreBias make_bias(Address data, const FourSizes& sizes, const FourSizes& strides) {
  cpu::ScoreBias bias;
  bias.data = at<const float>(data);
  std::copy(sizes.begin(), sizes.end(), bias.sizes);
  std::copy(strides.begin(), strides.end(), bias.strides);
  return bias;
}

using TwoStrides = std::array<int64_t, 2>;

cpu::RelativeTable make_table(Address data, const TwoStrides& strides) {
  return {at<const float>(data), strides[0], strides[1]};
}

cpu::AttentionShape make_shape(Address cu_q, Address cu_k, int64_t num_sequences, int64_t num_q_tokens,
                               int64_t num_k_tokens, int64_t num_heads, int64_t head_dim, float softmax_scale,
                               int64_t lse_stride, Address coords_q, Address coords_k, bool causal,
                               const cpu::ScoreBias& bias, const cpu::RelativeTable& relative_keys,
                               const cpu::RelativeTable& relative_queries, int64_t num_distances) {
  return {at<const int32_t>(cu_q),
          at<const int32_t>(cu_k),
          num_sequences,
          num_q_tokens,
          num_k_tokens,
          num_heads,
          head_dim,
          softmax_scale,
          lse_stride,
          cpu::Coords{at<const int32_t>(coords_q)},
          cpu::Coords{at<const int32_t>(coords_k)},
          causal,
          bias,
          relative_keys,
          relative_queries,
          num_distances};
}

void attention_fwd(Address q, Address k, Address v, int64_t q_stride, int64_t k_stride, int64_t v_stride, Address out,
                   Address lse, Address cu_q, Address cu_k, int64_t num_sequences, int64_t num_q_tokens,
                   int64_t num_k_tokens, int64_t num_heads, int64_t head_dim, float softmax_scale, Address coords_q,
                   Address coords_k, Seed seed, uint32_t site, uint32_t threshold, float scale, bool causal,
                   int64_t lse_stride, int num_threads, Address bias, const FourSizes& bias_sizes,
                   const FourSizes& bias_strides, Address relative_keys, const TwoStrides& keys_strides,
                   Address relative_queries, const TwoStrides& queries_strides, int64_t num_distances) {
  cpu::attention_forward(
      {at<const float>(q), q_stride}, {at<const float>(k), k_stride}, {at<const float>(v), v_stride},
      {at<float>(out), num_heads * head_dim}, at<float>(lse),
      make_shape(cu_q, cu_k, num_sequences, num_q_tokens, num_k_tokens, num_heads, head_dim, softmax_scale, lse_stride,
                 coords_q, coords_k, causal, make_bias(bias, bias_sizes, bias_strides),
                 make_table(relative_keys, keys_strides), make_table(relative_queries, queries_strides), num_distances),
      make_spec(seed, site, threshold, scale), num_threads);
}

// out belongs to the arguments of every back-end's backward; this one has no use for it.
void attention_bwd(Address dout, Address q, Address k, Address v, Address lse, Address dq, Address dk, Address dv,
                   int64_t q_stride, int64_t k_stride, int64_t v_stride, int64_t dq_stride, int64_t dk_stride,
                   int64_t dv_stride, Address cu_q, Address cu_k, int64_t num_sequences, int64_t num_q_tokens,
                   int64_t num_k_tokens, int64_t num_heads, int64_t head_dim, float softmax_scale, Address coords_q,
                   Address coords_k, Seed seed, uint32_t site, uint32_t threshold, float scale, bool causal,
                   int64_t lse_stride, int num_threads, Address bias, const FourSizes& bias_sizes,
                   const FourSizes& bias_strides, Address relative_keys, const TwoStrides& keys_strides,
                   Address relative_queries, const TwoStrides& queries_strides, int64_t num_distances, Address dbias,
                   Address drelative_keys, Address drelative_queries) {
  const int64_t token = num_heads * head_dim;
  cpu::attention_backward(
      {at<const float>(dout), token}, {at<const float>(q), q_stride}, {at<const float>(k), k_stride},
      {at<const float>(v), v_stride}, at<const float>(lse),
      {{at<float>(dq), dq_stride},
       {at<float>(dk), dk_stride},
       {at<float>(dv), dv_stride},
       at<float>(dbias),
       at<float>(drelative_keys),
       at<float>(drelative_queries)},
      make_shape(cu_q, cu_k, num_sequences, num_q_tokens, num_k_tokens, num_heads, head_dim, softmax_scale, lse_stride,
                 coords_q, coords_k, causal, make_bias(bias, bias_sizes, bias_strides),
                 make_table(relative_keys, keys_strides), make_table(relative_queries, queries_strides), num_distances),
      make_spec(seed, site, threshold, scale), num_threads);
}

void linear(Address x, int64_t x_stride, Address weight, int64_t weight_stride, Address bias, Address y,
            int64_t num_rows, int64_t num_columns, int64_t k, int num_threads) {
  const cpu::Weights part{at<const float>(weight), weight_stride, at<const float>(bias), num_columns};
  cpu::linear({at<const float>(x), x_stride}, &part, 1, {at<float>(y), num_columns}, num_rows, k, nullptr, num_threads);
}

cpu::Int8Weights int8_of(const Address* addresses) {
  return {at<const int8_t>(addresses[0]), at<const float>(addresses[1]), at<const int32_t>(addresses[2])};
}

void linear_int8(Address x, const std::array<Address, 3>& weight, Address bias, Address y, int64_t num_rows,
                 int64_t num_columns, int64_t k, int num_threads) {
  const cpu::Weights part{nullptr, 0, at<const float>(bias), num_columns, int8_of(weight.data())};
  cpu::linear_int8({at<const float>(x), k}, &part, 1, {at<float>(y), num_columns}, num_rows, k, nullptr, num_threads);
}

// A layer as Python describes it: 16 parameters in the order of bert_fast/reference/encoder_layer.py, all contiguous;
// width of all heads, intermediate_size, num_heads, causal, hidden_act, attention_eps, eps; of int8 layers packed,
// scale and sums of the six weights, else 0; whether products are in bf16, and whether parameters are.
using Layer = std::tuple<std::array<Address, 16>, int64_t, int64_t, int64_t, bool, std::string, float, float,
                         std::array<Address, 18>, bool, bool>;

// Layers that refer to their parameters, or to copies in fp32 of those that no product reads in bf16.
class Layers {
 public:
  Layers(const std::vector<Layer>& described, int64_t hidden_size) : hidden_size_(hidden_size) {
    for (const Layer& one : described) add(one);
  }
  const std::vector<cpu::EncoderLayer>& get() const { return layers_; }

 private:
  void add(const Layer& described) {
    const auto& [addresses, width, intermediate_size, num_heads, causal, hidden_act, attention_eps, eps, quantized,
                 multiplies_bf16, is_bf16] = described;
    const std::array<Address, 16>& all = addresses;  // a lambda may not name what a structured binding does
    const std::array<Address, 18>& int8 = quantized;
    const bool holds_bf16 = is_bf16, rounds = multiplies_bf16 && !is_bf16;
    const auto vector = [&](size_t place, int64_t size) {
      return holds_bf16 ? in_fp32(at<const cpu::Bf16>(all[place]), size) : at<const float>(all[place]);
    };
    const auto weights = [&](size_t place, int64_t num_columns, int64_t k) {
      const size_t number = place / 2 - (place < 8 ? 0 : 1);  // the fifth pair is a LayerNorm's
      return cpu::Weights{holds_bf16 ? nullptr : at<const float>(all[place]),
                          k,
                          vector(place + 1, num_columns),
                          num_columns,
                          int8_of(int8.data() + 3 * number),
                          holds_bf16 ? at<const cpu::Bf16>(all[place]) : nullptr,
                          rounds};
    };
    const auto norm = [&](size_t place, float epsilon) {
      return cpu::NormWeights{vector(place, hidden_size_), vector(place + 1, hidden_size_), epsilon};
    };
    layers_.push_back({weights(0, width, hidden_size_), weights(2, width, hidden_size_),
                       weights(4, width, hidden_size_), weights(6, hidden_size_, width), norm(8, attention_eps),
                       weights(10, intermediate_size, hidden_size_), weights(12, hidden_size_, intermediate_size),
                       norm(14, eps), num_heads, causal, cpu::activation_of(hidden_act.c_str())});
  }

  const float* in_fp32(const cpu::Bf16* values, int64_t size) {
    if (values == nullptr || size <= 0) return nullptr;
    std::vector<float>& made = copies_.emplace_back(static_cast<size_t>(size));
    cpu::widen(values, size, made.data());
    return made.data();
  }

  const int64_t hidden_size_;
  std::vector<cpu::EncoderLayer> layers_;
  std::vector<std::vector<float>> copies_;
};

void encoder_layers_fwd(Address x, Address y, const std::vector<Layer>& described, Address rows, Address cu_q,
                        Address cu_k, Address coords_q, Address coords_k, int64_t num_sequences, int64_t num_queries,
                        int64_t num_tokens, int64_t hidden_size, int num_threads) {
  const Layers layers(described, hidden_size);
  cpu::encoder_layers(
      at<const float>(x), at<float>(y), layers.get().data(), layers.get().size(),
      {at<const int64_t>(rows), at<const int32_t>(cu_q), at<const int32_t>(cu_k), at<const int32_t>(coords_q),
       at<const int32_t>(coords_k), num_sequences, num_queries, num_tokens, hidden_size},
      num_threads);
}

std::map<std::string, bool> cpu_features() {
  std::map<std::string, bool> features;
  for (const cpu::CpuFeature& feature : cpu::cpu_features()) features[feature.name] = feature.present;
  return features;
}

}  // namespace

void bind_cpu(py::module_& module) {
  using py::arg;
  const auto no_gil = py::call_guard<bert_fast::bindings::WithoutGil>();

  module.def("simd_levels", &cpu::simd_levels,
             "Names of the instruction sets that these routines can use here, fastest first; the last is portable.");
  module.def("simd_level", [] { return std::string(cpu::simd_level()); }, "The instruction set in use.");
  module.def("force_simd_level", &cpu::force_simd_level, arg("name"),
             "Uses the named instruction set from now on, \"auto\" the fastest. For tests; ValueError if unknown.");
  module.def("cpu_features", &cpu_features, "What the choice of instruction set looks at; empty except on x86-64.");

  module.def("dropout", &dropout, no_gil, arg("dst"), arg("src"), arg("num_rows"), arg("num_cols"),
             arg("src_row_stride"), arg("coords"), arg("seed"), arg("site"), arg("threshold"), arg("scale"),
             arg("num_threads"),
             "dst [num_rows, num_cols] = src * keep * scale (fp32 addresses); dst may be src.\n\n"
             "src_row_stride in floats; coords int32 [num_rows, 2]; num_threads <= 0: as many as there are.");
  module.def("keep_mask", &keep_mask, no_gil, arg("dst"), arg("num_rows"), arg("num_cols"), arg("coords"), arg("seed"),
             arg("site"), arg("threshold"), arg("num_threads"),
             "dst [num_rows, num_cols] uint8 = 1 where bert_fast.reference.dropout keeps the element, else 0.");
  module.def("rotary", &rotary, no_gil, arg("x"), arg("y"), arg("cos"), arg("sin"), arg("num_tokens"), arg("num_parts"),
             arg("num_heads"), arg("num_freqs"), arg("turned_parts"), arg("strides"), arg("is_interleaved"),
             arg("is_backward"), arg("num_threads"),
             "y [T, P, A, 2F] = x (fp32 addresses) with the pairs of the heads of turned_parts parts turned by the\n"
             "angles of cos and sin [T, F], which are contiguous; y may be x.\n\n"
             "strides in floats: token, part and head of x, then of y. is_interleaved: pairs are (2i, 2i + 1),\n"
             "else (i, i + F). is_backward: by the negative angles.");
  module.def("dropout_add_layer_norm_fwd", &dropout_add_layer_norm_fwd, no_gil, arg("x"), arg("x_bias"),
             arg("residual"), arg("weight"), arg("bias"), arg("y"), arg("h"), arg("mean"), arg("rstd"), arg("num_rows"),
             arg("num_cols"), arg("eps"), arg("coords"), arg("seed"), arg("site"), arg("threshold"), arg("scale"),
             arg("num_threads"),
             "h = residual + dropout(x + x_bias); y = layer_norm(h) (fp32 addresses, contiguous).\n\n"
             "x_bias, h, mean, rstd may be 0; coords may be 0 when threshold is 0; y and h may be x or residual.");
  module.def("output_suffices", &output_suffices, arg("weight"), arg("bias"), arg("num_cols"), arg("min_weight"),
             arg("max_weight"), arg("max_shift"),
             "Whether min_weight <= |weight| <= max_weight and |bias| <= max_shift * |weight| in every column (fp32\n"
             "addresses): dropout_add_layer_norm_bwd may then be given y. False where a parameter is NaN.");
  module.def("dropout_add_layer_norm_bwd", &dropout_add_layer_norm_bwd, no_gil, arg("dy"), arg("kept"), arg("mean"),
             arg("rstd"), arg("weight"), arg("bias"), arg("dresidual"), arg("dx"), arg("dx_bias"), arg("dweight"),
             arg("dbias"), arg("num_rows"), arg("num_cols"), arg("coords"), arg("seed"), arg("site"), arg("threshold"),
             arg("scale"), arg("num_threads"),
             "Gradients of dropout_add_layer_norm_fwd, from kept = h with bias 0, or from kept = y with bias given\n"
             "(mean may then be 0). dx, dx_bias, dweight, dbias may be 0; dresidual may be dy.\n\n"
             "The bits of the results do not depend on num_threads.");
  module.def("linear", &linear, no_gil, arg("x"), arg("x_stride"), arg("weight"), arg("weight_stride"), arg("bias"),
             arg("y"), arg("num_rows"), arg("num_columns"), arg("k"), arg("num_threads"),
             "y [num_rows, num_columns] = x [num_rows, k] weight^T + bias (fp32 addresses; bias may be 0), from rows\n"
             "that lie x_stride and weight_stride floats apart. A row's bits do not depend on the others.");
  module.def(
      "linear_int8", &linear_int8, no_gil, arg("x"), arg("weight"), arg("bias"), arg("y"), arg("num_rows"),
      arg("num_columns"), arg("k"), arg("num_threads"),
      "y [num_rows, num_columns] = x [num_rows, k] weight^T + bias (fp32 addresses, contiguous; bias may be 0),\n"
      "as bert_fast/reference/linear_int8.py, to the bit. weight: addresses of packed, scale and sums.");
  module.def(
      "encoder_layers_fwd", &encoder_layers_fwd, no_gil, arg("x"), arg("y"), arg("layers"), arg("rows"), arg("cu_q"),
      arg("cu_k"), arg("coords_q"), arg("coords_k"), arg("num_sequences"), arg("num_queries"), arg("num_tokens"),
      arg("hidden_size"), arg("num_threads"),
      "y [num_queries, hidden_size]: layers of BERT in a row, without gradients or dropout, of x (fp32\n"
      "addresses, contiguous).\n\n"
      "layers: of each its 16 parameters in the order of EncoderLayer (biases may be 0), width of all heads,\n"
      "intermediate_size, num_heads, causal, hidden_act, attention_eps, eps, and packed, scale and sums of its six\n"
      "weights, which are multiplied then, or 18 times 0; whether products are in bf16, and whether parameters are.\n"
      "rows (int64, may be 0: all tokens): the tokens that are "
      "wanted of the last; cu_q and coords_q are theirs. coords may be 0 unless causal.");
  module.def(
      "attention_fwd", &attention_fwd, no_gil, arg("q"), arg("k"), arg("v"), arg("q_stride"), arg("k_stride"),
      arg("v_stride"), arg("out"), arg("lse"), arg("cu_q"), arg("cu_k"), arg("num_sequences"), arg("num_q_tokens"),
      arg("num_k_tokens"), arg("num_heads"), arg("head_dim"), arg("softmax_scale"), arg("coords_q"), arg("coords_k"),
      arg("seed"), arg("site"), arg("threshold"), arg("scale"), arg("causal"), arg("lse_stride"), arg("num_threads"),
      arg("bias") = Address{0}, arg("bias_sizes") = FourSizes{1, 1, 1, 1}, arg("bias_strides") = FourSizes{0, 0, 0, 0},
      arg("relative_keys") = Address{0}, arg("relative_keys_strides") = TwoStrides{0, 0},
      arg("relative_queries") = Address{0}, arg("relative_queries_strides") = TwoStrides{0, 0},
      arg("num_distances") = 0,
      "out [Tq, A, D] = dropout(softmax(softmax_scale * (q k^T + R) + bias)) v, sequence by sequence (fp32\n"
      "addresses); R: relative positions.\n\n"
      "q, k, v [T, A, D], tokens *_stride floats apart, D up to 256; out contiguous;\n"
      "cu_q, cu_k int32 [num_sequences + 1], rising to num_q_tokens, num_k_tokens; lse[head * lse_stride + "
      "token]. No key: out 0, lse -inf. bias fp32 [rows or 1, A or 1, Sq or 1, Sk or 1], any strides, looked up\n"
      "by coords; 0: none. relative_keys, relative_queries fp32 [num_distances, A, D], strides of rows and heads in\n"
      "floats, num_distances = 2M - 1 with every query less than M positions from every key; 0: none.");
  module.def("attention_bwd", &attention_bwd, no_gil, arg("dout"), arg("q"), arg("k"), arg("v"), arg("lse"), arg("dq"),
             arg("dk"), arg("dv"), arg("q_stride"), arg("k_stride"), arg("v_stride"), arg("dq_stride"),
             arg("dk_stride"), arg("dv_stride"), arg("cu_q"), arg("cu_k"), arg("num_sequences"), arg("num_q_tokens"),
             arg("num_k_tokens"), arg("num_heads"), arg("head_dim"), arg("softmax_scale"), arg("coords_q"),
             arg("coords_k"), arg("seed"), arg("site"), arg("threshold"), arg("scale"), arg("causal"),
             arg("lse_stride"), arg("num_threads"), arg("bias") = Address{0}, arg("bias_sizes") = FourSizes{1, 1, 1, 1},
             arg("bias_strides") = FourSizes{0, 0, 0, 0}, arg("relative_keys") = Address{0},
             arg("relative_keys_strides") = TwoStrides{0, 0}, arg("relative_queries") = Address{0},
             arg("relative_queries_strides") = TwoStrides{0, 0}, arg("num_distances") = 0, arg("dbias") = Address{0},
             arg("drelative_keys") = Address{0}, arg("drelative_queries") = Address{0},
             "Gradients of attention_fwd; dout [Tq, A, D] contiguous. Every element of dq, dk, dv that belongs\n"
             "to a sequence is written, and all of dbias (of the bias's sizes), drelative_keys and drelative_queries\n"
             "(contiguous; 0: not wanted). The bits of the results do not depend on num_threads.");
}
