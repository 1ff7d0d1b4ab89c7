// Which instruction set the inner loops use.
#pragma once

#include <vector>

#include "wordpiece/kernels.h"

namespace bert_fast::wordpiece {

// The fastest that this machine runs, or what the environment variable BERT_FAST_SIMD names (portable, avx2, avx512,
// neon): decided once. Throws std::invalid_argument if that one is unknown or does not run here.
const Kernels& kernels();

// All that this machine runs, the fastest first.
std::vector<const Kernels*> available_kernels();

}  // namespace bert_fast::wordpiece
