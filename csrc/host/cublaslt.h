// Matrix products by NVIDIA's cuBLASLt, in the library that the process has loaded already (cuBLAS documentation,
// "Using the cuBLASLt API"). Its functions are found by name: nothing is linked, and its header is not needed.

#ifndef BERT_FAST_HOST_CUBLASLT_H_
#define BERT_FAST_HOST_CUBLASLT_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <tuple>

namespace bert_fast::host {

enum class ElementType : int32_t { kFloat32 = 0, kFloat16 = 2, kBFloat16 = 14 };  // cudaDataType_t

// Row-major, or column-major if transposed. leading: elements from one row (column) to the next.
// alignment: the largest power of two up to 256 that divides the address.
struct MatrixForm {
  ElementType type = ElementType::kFloat32;
  bool is_transposed = false;
  int64_t leading = 0;
  uint32_t alignment = 256;

  auto key() const { return std::tie(type, is_transposed, leading, alignment); }
  bool operator<(const MatrixForm& other) const { return key() < other.key(); }
  bool operator==(const MatrixForm& other) const { return key() == other.key(); }
};

// out = a b + bias, or out += a b; a [rows, inner], b [inner, cols], out [rows, cols] and not transposed.
// bias_alignment: as of matrices, 0 if there is no bias.
struct ProductForm {
  int device = 0;
  int64_t rows = 0, inner = 0, cols = 0;
  MatrixForm a, b, out;
  uint32_t bias_alignment = 0;
  bool accumulates = false, allows_tf32 = false;
  uint64_t workspace_bytes = 0;

  auto key() const {
    return std::tie(rows, inner, cols, a, b, out, bias_alignment, accumulates, allows_tf32, workspace_bytes, device);
  }
  bool operator<(const ProductForm& other) const { return key() < other.key(); }
  bool operator==(const ProductForm& other) const { return key() == other.key(); }
};

// Addresses of one product. bias: 0 if there is none.
struct ProductAddresses {
  uint64_t a = 0, b = 0, out = 0, bias = 0, workspace = 0;
};

struct CublasLtFunctions;

class CublasLt {
 public:
  // The library of this major version, 12 or 13, as this process has loaded it; null if it has not, or if a function is
  // missing. The first version that is found stays the one.
  static CublasLt* find_loaded(int major);
  static CublasLt* loaded();  // what was found, or null

  // Whether the library has an algorithm for a product. The context of its device is current, here and below.
  bool can_multiply(const ProductForm& form) { return find(form) != nullptr; }

  // Puts a product into the stream; returns the library's status, 0 for success.
  int multiply(const ProductForm& form, const ProductAddresses& addresses, void* stream);

 private:
  // A product's descriptors and the algorithm that the library chose.
  struct Plan {
    void* operation = nullptr;
    void* left = nullptr;  // the library's matrices are column-major: its left one is b
    void* right = nullptr;
    void* out = nullptr;
    uint64_t algorithm[8] = {};  // cublasLtMatmulAlgo_t
    bool has_algorithm = false;
  };
  static constexpr size_t kMaxPlans = 4096;

  explicit CublasLt(const CublasLtFunctions& functions) : functions_(functions) {}
  void* handle_of(int device);
  const Plan* find(const ProductForm& form);       // good until the next call; null without an algorithm
  bool make(const ProductForm& form, Plan* plan);  // false if the library could not be asked
  void give_up(const Plan& plan) const;

  const CublasLtFunctions& functions_;
  std::map<int, void*> handles_;  // by device; they live as long as the process
  std::map<ProductForm, Plan> plans_;
};

}  // namespace bert_fast::host

#endif  // BERT_FAST_HOST_CUBLASLT_H_
