#include "host/expressions.h"

#include <algorithm>
#include <cstring>
#include <limits>

namespace bert_fast::host {

void Expressions::add_argument(int32_t argument) {
  arguments_.push_back({static_cast<int32_t>(size()), argument});
  num_arguments_ = std::max(num_arguments_, argument + 1);
  constants_.push_back(0);
}

void Expressions::add_constant(int64_t value) { constants_.push_back(value); }

void Expressions::add(Operation operation, int32_t a, int32_t b) {
  expressions_.push_back({operation, static_cast<int32_t>(size()), a, b});
  constants_.push_back(0);
}

bool Expressions::evaluate(const int64_t* arguments, int64_t* values) const {
  if (!constants_.empty()) std::memcpy(values, constants_.data(), constants_.size() * sizeof(int64_t));
  for (const Argument& one : arguments_) values[one.place] = arguments[one.argument];
  for (const Expression& one : expressions_) {
    const int64_t a = values[one.a], b = values[one.b];
    int64_t& value = values[one.place];
    switch (one.operation) {
      case Operation::kAdd:
        if (__builtin_add_overflow(a, b, &value)) return false;
        break;
      case Operation::kSubtract:
        if (__builtin_sub_overflow(a, b, &value)) return false;
        break;
      case Operation::kMultiply:
        if (__builtin_mul_overflow(a, b, &value)) return false;
        break;
      case Operation::kFloorDivide:
      case Operation::kModulo: {
        if (b == 0 || (a == std::numeric_limits<int64_t>::min() && b == -1)) return false;
        const int64_t rest = a % b;
        const bool rounds_down = rest != 0 && (rest < 0) != (b < 0);
        value = one.operation == Operation::kModulo ? rest + (rounds_down ? b : 0) : a / b - rounds_down;
        break;
      }
      case Operation::kLess:
        value = a < b;
        break;
      case Operation::kLessEqual:
        value = a <= b;
        break;
      case Operation::kEqual:
        value = a == b;
        break;
      case Operation::kMinimum:
        value = std::min(a, b);
        break;
      case Operation::kMaximum:
        value = std::max(a, b);
        break;
    }
  }
  return true;
}

}  // namespace bert_fast::host
