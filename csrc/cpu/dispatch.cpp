#include <atomic>
#include <stdexcept>

#include "cpu/kernels.h"

namespace bert_fast::cpu {
namespace {

#if defined(__x86_64__)
bool runs_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
}

bool runs_avx512() {
  return runs_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
#endif

// Fastest first; the last runs everywhere.
std::vector<const Kernels*> available_kernels() {
  std::vector<const Kernels*> tables;
#if defined(__x86_64__)
  if (runs_avx512() && avx512_kernels() != nullptr) tables.push_back(avx512_kernels());
  if (runs_avx2() && avx2_kernels() != nullptr) tables.push_back(avx2_kernels());
#endif
  tables.push_back(portable_kernels());
  return tables;
}

std::atomic<const Kernels*>& chosen() {
  static std::atomic<const Kernels*> table{available_kernels().front()};
  return table;
}

}  // namespace

const Kernels& kernels() { return *chosen().load(std::memory_order_relaxed); }

std::vector<std::string> simd_levels() {
  std::vector<std::string> names;
  for (const Kernels* table : available_kernels()) names.emplace_back(table->name);
  return names;
}

void force_simd_level(const std::string& name) {
  const std::vector<const Kernels*> tables = available_kernels();
  std::string known = "auto";
  for (const Kernels* table : tables) {
    if (name == table->name || name == "auto") {
      chosen().store(table, std::memory_order_relaxed);
      return;
    }
    known += std::string(", ") + table->name;
  }
  throw std::invalid_argument("simd level: expected one of " + known + "; got " + name);
}

std::vector<CpuFeature> cpu_features() {
#if defined(__x86_64__)
  return {{"avx2", __builtin_cpu_supports("avx2") != 0},         {"fma", __builtin_cpu_supports("fma") != 0},
          {"bmi2", __builtin_cpu_supports("bmi2") != 0},         {"avx512f", __builtin_cpu_supports("avx512f") != 0},
          {"avx512bw", __builtin_cpu_supports("avx512bw") != 0}, {"avx512vl", __builtin_cpu_supports("avx512vl") != 0},
          {"avx512dq", __builtin_cpu_supports("avx512dq") != 0}};
#else
  return {};
#endif
}

}  // namespace bert_fast::cpu
