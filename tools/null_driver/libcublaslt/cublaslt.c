// A libcublasLt.so.13 for machines without a GPU: it checks matrix products as cuBLASLt documents them, notes them, and
// computes them in memory of the host if it is told to. Names, structures and codes are those of the library's
// interface (cuBLAS documentation, "Using the cuBLASLt API"), as far as bert_fast calls it.

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, INVALID_VALUE = 7, NOT_SUPPORTED = 15 };
enum { COMPUTE_32F = 68, COMPUTE_32F_FAST_TF32 = 77 };
enum { R_32F = 0, R_16F = 2, R_16BF = 14 };
enum { DESC_TRANSA = 3, DESC_TRANSB = 4, DESC_EPILOGUE = 7, DESC_BIAS_POINTER = 8 };
enum { PREF_MAX_WORKSPACE = 1, PREF_REDUCTION = 3, PREF_ALIGNMENT_A = 5, PREF_ALIGNMENT_D = 8 };
enum { EPILOGUE_DEFAULT = 1, EPILOGUE_BIAS = 4 };
enum { MAGIC = 0x6c746d };

typedef struct {
  int32_t type;
  uint64_t rows, cols;
  int64_t leading;
} Layout;

typedef struct {
  int32_t compute_type, scale_type, transposes_a, transposes_b;
  uint32_t epilogue;
  uint64_t bias;
} Operation;

typedef struct {
  uint64_t workspace_bytes;
  uint32_t reduction, alignments[4];
} Preference;

typedef struct {
  uint64_t magic, m, n, k;
  uint32_t alignments[4];
  uint64_t bias_alignment, workspace_bytes;
} Algorithm;

typedef struct {
  Algorithm algorithm;
  size_t workspace_bytes;
  int status;
  float waves;
  int reserved[4];
} Result;

_Static_assert(sizeof(Algorithm) == 64 && sizeof(Result) == 96, "as the library lays them out");

// What the log keeps of a product: the library's matrices, in the library's order.
typedef struct {
  Operation operation;
  Layout a, b, c;
  uint32_t alignments[4], reduction;
  uint64_t a_address, b_address, c_address, workspace, workspace_bytes, stream;
  float alpha, beta;
} NullProduct;

static NullProduct* products;
static size_t num_products, capacity, num_searches, num_refusals;
static char last_refusal[256];
static bool computes, has_none;
static int status_of_next;
static uint32_t reduction_asked;

void null_products_reset(void) {
  num_products = num_searches = num_refusals = 0;
  last_refusal[0] = '\0';
}
void null_products_compute(bool wanted) { computes = wanted; }
void null_products_have_no_algorithm(bool wanted) { has_none = wanted; }
void null_products_fail(int status) { status_of_next = status; }
size_t null_num_products(void) { return num_products; }
size_t null_num_searches(void) { return num_searches; }
size_t null_num_product_refusals(void) { return num_refusals; }
const char* null_last_product_refusal(void) { return last_refusal; }
const NullProduct* null_products(void) { return products; }

static int refuse(const char* why) {
  num_refusals++;
  snprintf(last_refusal, sizeof last_refusal, "%s", why);
  return INVALID_VALUE;
}

size_t cublasLtGetVersion(void) { return 130000; }

int cublasLtCreate(void** handle) {
  static int one;
  *handle = &one;
  return SUCCESS;
}

int cublasLtMatmulDescCreate(Operation** made, int compute_type, int scale_type) {
  if (compute_type != COMPUTE_32F && compute_type != COMPUTE_32F_FAST_TF32) return refuse("a compute type");
  if (scale_type != R_32F) return refuse("a scale type");
  *made = calloc(1, sizeof **made);
  **made = (Operation){compute_type, scale_type, 0, 0, EPILOGUE_DEFAULT, 0};
  return SUCCESS;
}

int cublasLtMatmulDescDestroy(Operation* operation) {
  free(operation);
  return SUCCESS;
}

int cublasLtMatmulDescSetAttribute(Operation* operation, int attribute, const void* value, size_t bytes) {
  void* places[] = {[DESC_TRANSA] = &operation->transposes_a,
                    [DESC_TRANSB] = &operation->transposes_b,
                    [DESC_EPILOGUE] = &operation->epilogue,
                    [DESC_BIAS_POINTER] = &operation->bias};
  if (attribute < 0 || attribute > DESC_BIAS_POINTER || places[attribute] == NULL) return refuse("an attribute");
  if (bytes != (attribute == DESC_BIAS_POINTER ? 8 : 4)) return refuse("the size of an attribute");
  memcpy(places[attribute], value, bytes);
  return SUCCESS;
}

int cublasLtMatrixLayoutCreate(Layout** made, int type, uint64_t rows, uint64_t cols, int64_t leading) {
  if (type != R_32F && type != R_16F && type != R_16BF) return refuse("a type of elements");
  if (rows == 0 || cols == 0 || leading < (int64_t)rows) return refuse("rows, columns or the leading dimension");
  *made = malloc(sizeof **made);
  **made = (Layout){type, rows, cols, leading};
  return SUCCESS;
}

int cublasLtMatrixLayoutDestroy(Layout* layout) {
  free(layout);
  return SUCCESS;
}

int cublasLtMatmulPreferenceCreate(Preference** made) {
  *made = malloc(sizeof **made);
  **made = (Preference){0, 7, {256, 256, 256, 256}};
  return SUCCESS;
}

int cublasLtMatmulPreferenceDestroy(Preference* preference) {
  free(preference);
  return SUCCESS;
}

int cublasLtMatmulPreferenceSetAttribute(Preference* preference, int attribute, const void* value, size_t bytes) {
  if (attribute == PREF_MAX_WORKSPACE && bytes == 8) {
    memcpy(&preference->workspace_bytes, value, 8);
  } else if (attribute == PREF_REDUCTION && bytes == 4) {
    memcpy(&preference->reduction, value, 4);
  } else if (PREF_ALIGNMENT_A <= attribute && attribute <= PREF_ALIGNMENT_D && bytes == 4) {
    memcpy(&preference->alignments[attribute - PREF_ALIGNMENT_A], value, 4);
  } else {
    return refuse("a preference");
  }
  return SUCCESS;
}

// Sizes of the product, or false where the matrices do not fit each other.
static bool sizes_of(const Operation* operation, const Layout* a, const Layout* b, const Layout* c, const Layout* d,
                     uint64_t* m, uint64_t* n, uint64_t* k) {
  *m = operation->transposes_a ? a->cols : a->rows;
  *k = operation->transposes_a ? a->rows : a->cols;
  *n = operation->transposes_b ? b->rows : b->cols;
  const uint64_t inner = operation->transposes_b ? b->cols : b->rows;
  return inner == *k && c->rows == *m && c->cols == *n && d->rows == *m && d->cols == *n && a->type == b->type &&
         c->type == d->type && (c->type == a->type || c->type == R_32F);
}

int cublasLtMatmulAlgoGetHeuristic(void* handle, Operation* operation, Layout* a, Layout* b, Layout* c, Layout* d,
                                   Preference* preference, int wanted, Result* results, int* num_found) {
  Algorithm algorithm = {.magic = MAGIC};
  num_searches++;
  if (handle == NULL || wanted < 1) return refuse("the search of an algorithm");
  if (!sizes_of(operation, a, b, c, d, &algorithm.m, &algorithm.n, &algorithm.k)) return refuse("sizes or types");
  const bool has_bias = operation->epilogue == EPILOGUE_BIAS;
  if (has_bias != (operation->bias != 0)) return refuse("a bias without its epilogue, or the other way round");
  algorithm.bias_alignment = operation->bias & -operation->bias;
  memcpy(algorithm.alignments, preference->alignments, sizeof algorithm.alignments);
  reduction_asked = preference->reduction;
  algorithm.workspace_bytes = preference->workspace_bytes / 2;
  *num_found = has_none ? 0 : 1;
  if (!has_none) *results = (Result){algorithm, algorithm.workspace_bytes, SUCCESS, 1.0F, {0}};
  return has_none ? NOT_SUPPORTED : SUCCESS;
}

static float from_half(uint16_t half) {
  const int exponent = half >> 10 & 31, mantissa = half & 1023;
  const float size = exponent == 0    ? ldexpf((float)mantissa, -24)
                     : exponent == 31 ? (mantissa ? NAN : INFINITY)
                                      : ldexpf((float)(mantissa + 1024), exponent - 25);
  return half >> 15 ? -size : size;
}

static float element(const void* memory, int type, uint64_t place) {
  if (type == R_32F) return ((const float*)memory)[place];
  const uint16_t bits = ((const uint16_t*)memory)[place];
  if (type == R_16F) return from_half(bits);
  const uint32_t wide = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &wide, 4);
  return value;
}

// Only for values that the type holds, which is what tests compute with.
static void set_element(void* memory, int type, uint64_t place, float value) {
  uint32_t wide;
  memcpy(&wide, &value, 4);
  if (type == R_32F) {
    ((float*)memory)[place] = value;
  } else if (type == R_16BF) {
    ((uint16_t*)memory)[place] = (uint16_t)(wide >> 16);
  } else {
    const int exponent = (int)(wide >> 23 & 255) - 127 + 15;
    const uint16_t sign = (uint16_t)(wide >> 16 & 0x8000);
    ((uint16_t*)memory)[place] = value == 0 ? sign : (uint16_t)(sign | exponent << 10 | (wide >> 13 & 1023));
  }
}

static void compute(const NullProduct* one, uint64_t m, uint64_t n, uint64_t k) {
  const void *a = (const void*)one->a_address, *b = (const void*)one->b_address;
  const void* bias = (const void*)one->operation.bias;
  void* c = (void*)one->c_address;
  for (uint64_t i = 0; i < m; i++) {
    for (uint64_t j = 0; j < n; j++) {
      const uint64_t place = i + j * (uint64_t)one->c.leading;
      float sum = one->beta == 0 ? 0 : one->beta * element(c, one->c.type, place);
      for (uint64_t inner = 0; inner < k; inner++) {
        const uint64_t x =
            one->operation.transposes_a ? inner + i * (uint64_t)one->a.leading : i + inner * (uint64_t)one->a.leading;
        const uint64_t y =
            one->operation.transposes_b ? j + inner * (uint64_t)one->b.leading : inner + j * (uint64_t)one->b.leading;
        sum += one->alpha * element(a, one->a.type, x) * element(b, one->b.type, y);
      }
      if (one->operation.epilogue == EPILOGUE_BIAS) sum += element(bias, one->c.type, i);
      set_element(c, one->c.type, place, sum);
    }
  }
}

int cublasLtMatmul(void* handle, Operation* operation, const float* alpha, const void* a, Layout* a_layout,
                   const void* b, Layout* b_layout, const float* beta, const void* c, Layout* c_layout, void* d,
                   Layout* d_layout, const Algorithm* algorithm, void* workspace, size_t workspace_bytes,
                   void* stream) {
  uint64_t m = 0, n = 0, k = 0;
  if (status_of_next != 0) {
    const int status = status_of_next;
    status_of_next = 0;
    return status;
  }
  if (handle == NULL || algorithm == NULL || algorithm->magic != MAGIC) return refuse("an algorithm");
  if (!sizes_of(operation, a_layout, b_layout, c_layout, d_layout, &m, &n, &k)) return refuse("sizes or types");
  if (m != algorithm->m || n != algorithm->n || k != algorithm->k) return refuse("the algorithm of another product");
  if (c != d) return refuse("a result that is not in place");
  const uint64_t addresses[4] = {(uint64_t)a, (uint64_t)b, (uint64_t)c, (uint64_t)d};
  for (int i = 0; i < 4; i++) {
    if (addresses[i] == 0 || addresses[i] % algorithm->alignments[i] != 0) return refuse("an address");
  }
  if (operation->epilogue == EPILOGUE_BIAS && operation->bias % algorithm->bias_alignment != 0) {
    return refuse("the address of a bias");
  }
  if (workspace_bytes < algorithm->workspace_bytes || (uint64_t)workspace % 16 != 0 || workspace == NULL) {
    return refuse("the workspace");
  }
  if (num_products == capacity) {
    capacity = capacity ? 2 * capacity : 1024;
    products = realloc(products, capacity * sizeof *products);
  }
  NullProduct* one = &products[num_products++];
  *one = (NullProduct){.operation = *operation,
                       .a = *a_layout,
                       .b = *b_layout,
                       .c = *c_layout,
                       .reduction = reduction_asked,
                       .a_address = addresses[0],
                       .b_address = addresses[1],
                       .c_address = addresses[2],
                       .workspace = (uint64_t)workspace,
                       .workspace_bytes = workspace_bytes,
                       .stream = (uint64_t)stream,
                       .alpha = *alpha,
                       .beta = *beta};
  memcpy(one->alignments, algorithm->alignments, sizeof one->alignments);
  if (computes) {
    memset(workspace, 0xff, 4096);  // an algorithm may write to it before it reads its operands
    compute(one, m, n, k);
  }
  return SUCCESS;
}
