// The integers of a call of a program: its arguments, and what follows from them.

#ifndef BERT_FAST_HOST_EXPRESSIONS_H_
#define BERT_FAST_HOST_EXPRESSIONS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

namespace bert_fast::host {

enum class Operation : uint8_t {
  kAdd,
  kSubtract,
  kMultiply,
  kFloorDivide,
  kModulo,
  kLess,
  kLessEqual,
  kEqual,
  kMinimum,
  kMaximum
};  // clang-format skip

// One value from two earlier ones, by their places.
struct Expression {
  Operation operation;
  int32_t place, a, b;
};

class Expressions {
 public:
  // Each adds one value, in order of places.
  void add_argument(int32_t argument);
  void add_constant(int64_t value);
  void add(Operation operation, int32_t a, int32_t b);

  size_t size() const { return constants_.size(); }
  int32_t num_arguments() const { return num_arguments_; }

  // Writes size() values. False where one does not fit into 64 bits or is divided by zero. // and % as in Python.
  bool evaluate(const int64_t* arguments, int64_t* values) const;

 private:
  struct Argument {
    int32_t place, argument;
  };
  std::vector<int64_t> constants_;  // of all places, 0 where the value is none
  std::vector<Argument> arguments_;
  std::vector<Expression> expressions_;
  int32_t num_arguments_ = 0;
};

}  // namespace bert_fast::host

#endif  // BERT_FAST_HOST_EXPRESSIONS_H_
