#include "host/cublaslt.h"

#include <dlfcn.h>

#include <algorithm>
#include <string>

#include "host/library.h"

namespace bert_fast::host {

namespace {

// Values of the library's interface (cublasLt.h, cublas_api.h).
constexpr int kCompute32F = 68;          // CUBLAS_COMPUTE_32F
constexpr int kCompute32FFastTf32 = 77;  // CUBLAS_COMPUTE_32F_FAST_TF32
constexpr int kInvalidValue = 7;         // CUBLAS_STATUS_INVALID_VALUE
constexpr int kNotSupported = 15;        // CUBLAS_STATUS_NOT_SUPPORTED
constexpr int kTransposed = 1;           // CUBLAS_OP_T
constexpr uint32_t kEpilogueBias = 4;    // CUBLASLT_EPILOGUE_BIAS
enum OperationAttribute { kTransposesA = 3, kTransposesB = 4, kEpilogue = 7, kBiasPointer = 8 };
enum PreferenceAttribute {
  kMaxWorkspaceBytes = 1,
  kReductionSchemes = 3,
  kMinAlignmentA = 5,
  kMinAlignmentB = 6,
  kMinAlignmentC = 7,
  kMinAlignmentD = 8
};
// Partial sums are added in fp32 and in a fixed order (CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE).
constexpr uint32_t kSumsInComputeType = 2;

struct HeuristicResult {  // cublasLtMatmulHeuristicResult_t
  uint64_t algorithm[8];
  size_t workspace_bytes;
  int status;
  float waves;
  int reserved[4];
};
static_assert(sizeof(HeuristicResult) == 96, "as the library lays it out");

// The layout of a matrix [rows, cols] as the library sees it, without its transposition.
struct Layout {
  uint64_t rows, cols;
  int64_t leading;
};

Layout layout_of(const MatrixForm& form, int64_t rows, int64_t cols) {
  if (form.is_transposed) std::swap(rows, cols);
  // A row-major matrix is a column-major one of its columns. One row has no next one: any stride will do.
  return {static_cast<uint64_t>(cols), static_cast<uint64_t>(rows), rows <= 1 ? cols : form.leading};
}

}  // namespace

struct CublasLtFunctions {
  size_t (*version)();
  int (*create)(void** handle);
  int (*create_operation)(void** operation, int compute_type, int scale_type);
  int (*destroy_operation)(void* operation);
  int (*set_operation)(void* operation, int attribute, const void* value, size_t bytes);
  int (*create_layout)(void** layout, int type, uint64_t rows, uint64_t cols, int64_t leading);
  int (*destroy_layout)(void* layout);
  int (*create_preference)(void** preference);
  int (*destroy_preference)(void* preference);
  int (*set_preference)(void* preference, int attribute, const void* value, size_t bytes);
  int (*find_algorithm)(void* handle, void* operation, void* a, void* b, void* c, void* d, void* preference, int wanted,
                        HeuristicResult* results, int* num_found);
  int (*multiply)(void* handle, void* operation, const void* alpha, const void* a, void* a_layout, const void* b,
                  void* b_layout, const void* beta, const void* c, void* c_layout, void* d, void* d_layout,
                  const void* algorithm, void* workspace, size_t workspace_bytes, void* stream);

  bool find_all(void* library) {
    return find_function(library, "cublasLtGetVersion", &version) &&
           find_function(library, "cublasLtCreate", &create) &&
           find_function(library, "cublasLtMatmulDescCreate", &create_operation) &&
           find_function(library, "cublasLtMatmulDescDestroy", &destroy_operation) &&
           find_function(library, "cublasLtMatmulDescSetAttribute", &set_operation) &&
           find_function(library, "cublasLtMatrixLayoutCreate", &create_layout) &&
           find_function(library, "cublasLtMatrixLayoutDestroy", &destroy_layout) &&
           find_function(library, "cublasLtMatmulPreferenceCreate", &create_preference) &&
           find_function(library, "cublasLtMatmulPreferenceDestroy", &destroy_preference) &&
           find_function(library, "cublasLtMatmulPreferenceSetAttribute", &set_preference) &&
           find_function(library, "cublasLtMatmulAlgoGetHeuristic", &find_algorithm) &&
           find_function(library, "cublasLtMatmul", &multiply);
  }
};

namespace {
CublasLt* the_library = nullptr;  // under the GIL, as everything here
}

CublasLt* CublasLt::loaded() { return the_library; }

CublasLt* CublasLt::find_loaded(int major) {
  static CublasLtFunctions functions;
  if (the_library != nullptr || (major != 12 && major != 13)) return the_library;
  // The handle stays open: the functions are used as long as the process lives.
  void* library = dlopen(("libcublasLt.so." + std::to_string(major)).c_str(), RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr || !functions.find_all(library)) return nullptr;
  if (functions.version() / 10000 == static_cast<size_t>(major)) the_library = new CublasLt(functions);
  return the_library;
}

void* CublasLt::handle_of(int device) {
  void*& handle = handles_[device];
  if (handle == nullptr && functions_.create(&handle) != 0) handle = nullptr;
  return handle;
}

void CublasLt::give_up(const Plan& plan) const {
  if (plan.operation != nullptr) functions_.destroy_operation(plan.operation);
  for (void* layout : {plan.left, plan.right, plan.out}) {
    if (layout != nullptr) functions_.destroy_layout(layout);
  }
}

bool CublasLt::make(const ProductForm& form, Plan* plan) {
  void* handle = handle_of(form.device);
  const bool is_tf32 = form.allows_tf32 && form.a.type == ElementType::kFloat32;
  const auto new_layout = [this](const MatrixForm& matrix, int64_t rows, int64_t cols, void** made) {
    const Layout layout = layout_of(matrix, rows, cols);
    return functions_.create_layout(made, static_cast<int>(matrix.type), layout.rows, layout.cols, layout.leading) == 0;
  };
  if (handle == nullptr ||
      functions_.create_operation(&plan->operation, is_tf32 ? kCompute32FFastTf32 : kCompute32F,
                                  static_cast<int>(ElementType::kFloat32)) != 0 ||
      !new_layout(form.b, form.inner, form.cols, &plan->left) ||
      !new_layout(form.a, form.rows, form.inner, &plan->right) ||
      !new_layout(form.out, form.rows, form.cols, &plan->out)) {
    return false;
  }
  const auto set = [this, plan](OperationAttribute attribute, const auto& value) {
    return functions_.set_operation(plan->operation, attribute, &value, sizeof value) == 0;
  };
  if ((form.b.is_transposed && !set(kTransposesA, kTransposed)) ||
      (form.a.is_transposed && !set(kTransposesB, kTransposed)) ||
      // The search for an algorithm may look at how the bias is aligned: an address that is aligned as it is.
      (form.bias_alignment != 0 &&
       (!set(kEpilogue, kEpilogueBias) || !set(kBiasPointer, static_cast<uint64_t>(form.bias_alignment))))) {
    return false;
  }
  void* preference = nullptr;
  if (functions_.create_preference(&preference) != 0) return false;
  const auto prefer = [this, preference](PreferenceAttribute attribute, const auto& value) {
    return functions_.set_preference(preference, attribute, &value, sizeof value) == 0;
  };
  HeuristicResult result{};
  int num_found = 0;
  const bool has_preferences = prefer(kMaxWorkspaceBytes, form.workspace_bytes) &&
                               prefer(kReductionSchemes, kSumsInComputeType) &&
                               prefer(kMinAlignmentA, form.b.alignment) && prefer(kMinAlignmentB, form.a.alignment) &&
                               prefer(kMinAlignmentC, form.out.alignment) && prefer(kMinAlignmentD, form.out.alignment);
  const int status = has_preferences
                         ? functions_.find_algorithm(handle, plan->operation, plan->left, plan->right, plan->out,
                                                     plan->out, preference, 1, &result, &num_found)
                         : kInvalidValue;
  functions_.destroy_preference(preference);
  if (status != 0 && status != kNotSupported) return false;
  plan->has_algorithm =
      status == 0 && num_found > 0 && result.status == 0 && result.workspace_bytes <= form.workspace_bytes;
  std::copy(std::begin(result.algorithm), std::end(result.algorithm), plan->algorithm);
  return true;
}

const CublasLt::Plan* CublasLt::find(const ProductForm& form) {
  auto found = plans_.find(form);
  if (found == plans_.end()) {
    if (plans_.size() >= kMaxPlans) {
      for (const auto& [key, plan] : plans_) give_up(plan);
      plans_.clear();
    }
    Plan plan;
    if (!make(form, &plan)) {
      give_up(plan);
      return nullptr;
    }
    found = plans_.emplace(form, plan).first;
  }
  return found->second.has_algorithm ? &found->second : nullptr;
}

int CublasLt::multiply(const ProductForm& form, const ProductAddresses& addresses, void* stream) {
  const Plan* found = find(form);
  if (found == nullptr) return kNotSupported;
  const Plan& plan = *found;
  if (form.bias_alignment != 0) {
    const int status = functions_.set_operation(plan.operation, kBiasPointer, &addresses.bias, sizeof addresses.bias);
    if (status != 0) return status;
  }
  const float alpha = 1, beta = form.accumulates ? 1 : 0;
  const auto at = [](uint64_t address) { return reinterpret_cast<void*>(address); };
  return functions_.multiply(handle_of(form.device), plan.operation, &alpha, at(addresses.b), plan.left,
                             at(addresses.a), plan.right, &beta, at(addresses.out), plan.out, at(addresses.out),
                             plan.out, plan.algorithm, at(addresses.workspace), form.workspace_bytes, stream);
}

}  // namespace bert_fast::host
