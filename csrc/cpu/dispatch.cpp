#include <atomic>
#include <stdexcept>

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "cpu/bf16.h"
#include "cpu/int8.h"
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

// Whether the processor has tiles of bytes and of bf16, and Linux gives this process their registers, which it must be
// asked for.
bool runs_amx() {
#if defined(__linux__)
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24, kInt8 = 1u << 25, kAll = kBf16 | kTile | kInt8;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return (d & kAll) == kAll && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
#endif

// One instruction set: its name, and the tables that are used with it.
struct Level {
  const char* name;
  const Kernels* kernels;
  const Int8Kernels* int8;
  const Bf16Kernels* bf16;
};

// Fastest first; the last runs everywhere.
std::vector<Level> find_levels() {
  std::vector<Level> levels;
#if defined(__x86_64__)
  const auto add = [&levels](bool runs, Level level) {
    const bool is_compiled = level.kernels != nullptr && level.int8 != nullptr && level.bf16 != nullptr;
    if (runs && is_compiled) levels.push_back(level);
  };
  const bool has_avx512 = runs_avx512(), has_vnni = has_avx512 && __builtin_cpu_supports("avx512vnni");
  const bool has_bf16 = has_vnni && __builtin_cpu_supports("avx512bf16") && avx512bf16_bf16_kernels() != nullptr;
  add(has_bf16 && amx_int8_kernels() != nullptr && runs_amx(),
      {"amx", avx512_kernels(), amx_int8_kernels(), amx_bf16_kernels()});
  add(has_bf16, {"avx512_bf16", avx512_kernels(), avx512vnni_int8_kernels(), avx512bf16_bf16_kernels()});
  add(has_vnni, {"avx512_vnni", avx512_kernels(), avx512vnni_int8_kernels(), avx512_bf16_kernels()});
  add(has_avx512, {"avx512", avx512_kernels(), avx512_int8_kernels(), avx512_bf16_kernels()});
  add(runs_avx2(), {"avx2", avx2_kernels(), avx2_int8_kernels(), avx2_bf16_kernels()});
#endif
  levels.push_back({"portable", portable_kernels(), portable_int8_kernels(), portable_bf16_kernels()});
  return levels;
}

const std::vector<Level>& levels() {
  static const std::vector<Level> found = find_levels();
  return found;
}

std::atomic<const Level*>& chosen() {
  static std::atomic<const Level*> level{&levels().front()};
  return level;
}

const Level& in_use() { return *chosen().load(std::memory_order_relaxed); }

}  // namespace

const Kernels& kernels() { return *in_use().kernels; }

const Int8Kernels& int8_kernels() { return *in_use().int8; }

const Bf16Kernels& bf16_kernels() { return *in_use().bf16; }

const char* simd_level() { return in_use().name; }

std::vector<std::string> simd_levels() {
  std::vector<std::string> names;
  for (const Level& level : levels()) names.emplace_back(level.name);
  return names;
}

void force_simd_level(const std::string& name) {
  std::string known = "auto";
  for (const Level& level : levels()) {
    if (name == level.name || name == "auto") {
      chosen().store(&level, std::memory_order_relaxed);
      return;
    }
    known += std::string(", ") + level.name;
  }
  throw std::invalid_argument("simd level: expected one of " + known + "; got " + name);
}

std::vector<CpuFeature> cpu_features() {
#if defined(__x86_64__)
  return {{"avx2", __builtin_cpu_supports("avx2") != 0},
          {"fma", __builtin_cpu_supports("fma") != 0},
          {"bmi2", __builtin_cpu_supports("bmi2") != 0},
          {"avx512f", __builtin_cpu_supports("avx512f") != 0},
          {"avx512bw", __builtin_cpu_supports("avx512bw") != 0},
          {"avx512vl", __builtin_cpu_supports("avx512vl") != 0},
          {"avx512dq", __builtin_cpu_supports("avx512dq") != 0},
          {"avx512vnni", __builtin_cpu_supports("avx512vnni") != 0},
          {"avx512bf16", __builtin_cpu_supports("avx512bf16") != 0}};
#else
  return {};
#endif
}

}  // namespace bert_fast::cpu
