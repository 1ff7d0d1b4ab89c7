#include "wordpiece/dispatch.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace bert_fast::wordpiece {

std::vector<const Kernels*> available_kernels() {
  std::vector<const Kernels*> tables;
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
                    __builtin_cpu_supports("popcnt") && __builtin_cpu_supports("lzcnt");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512vbmi2");
  if (avx512) tables.push_back(avx512_kernels());
  if (avx2) tables.push_back(avx2_kernels());
#elif defined(__aarch64__)
  tables.push_back(neon_kernels());
#endif
  tables.push_back(portable_kernels());  // runs everywhere
  return tables;
}

namespace {

const Kernels& choose() {
  const std::vector<const Kernels*> tables = available_kernels();
  const char* wanted = std::getenv("BERT_FAST_SIMD");
  if (wanted == nullptr || *wanted == 0) return *tables.front();
  std::string known;
  for (const Kernels* table : tables) {
    if (std::string(wanted) == table->name) return *table;
    known += (known.empty() ? "" : ", ") + std::string(table->name);
  }
  throw std::invalid_argument("BERT_FAST_SIMD: this machine runs " + known + ", got '" + wanted + "'");
}

}  // namespace

const Kernels& kernels() {
  static const Kernels& chosen = choose();
  return chosen;
}

}  // namespace bert_fast::wordpiece
