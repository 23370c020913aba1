// Values: whatever flows through a plan, known by a number and typed.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <vector>

#include "quantization/formats/quantizer.h"

namespace tandem {

/// A value of a plan. Two steps that name the same Value mean the same numbers; a rename makes no
/// new one.
enum class Value : uint32_t { none = 0xFFFFFFFF };

constexpr size_t index_of(Value value) { return static_cast<size_t>(value); }
constexpr bool exists(Value value) { return value != Value::none; }
using Values = std::vector<Value>;

/// What a value consists of.
enum class Format : uint8_t {
  /// One tensor.
  plain,
  /// Codes, their scales and, where the format has one, the amax behind these, of one direction, as
  /// the type's quantizer writes them.
  codes,
  /// No tensor: the sizes of another value.
  shape,
  /// Whatever user code saves: tensors and plain fields, known only to the op that wrote them.
  opaque,
};

/// Where a value comes from.
enum class Origin : uint8_t {
  /// An argument: the main input or an extra one.
  input,
  /// a parameter, passed in at every call.
  param,
  /// a preallocated tensor that steps mutate: the cached codes of a weight.
  workspace,
  /// a tensor of the recipe's state, or the region's number: kept by a module, mutated by steps.
  state,
  /// a tensor of the caller that steps mutate, such as a parameter's main_grad.
  buffer,
  /// Written by a forward step.
  result,
  /// Written by a backward step, or given to backward.
  gradient,
  /// Written and read in backward only.
  intermediate,
};

/// Which operand of a product a tensor is: a recipe has a quantizer for each.
enum class Role : uint8_t { input, weight, grad_output };

/// The type of a value, and what a reader of `explain` wants to know of it.
struct Type {
  at::ScalarType dtype = at::kFloat;
  Format format = Format::plain;
  Origin origin = Origin::result;
  /// The value whose memory this one may share (a reshape), if any.
  Value view_of = Value::none;
  /// As `explain` prints it: "3.linear.y".
  std::string name = {};
  /// Of a value in codes; null of all others.
  const Quantizer* quantizer = nullptr;
  Direction direction = Direction::row;
  /// Whether some step of backward can write it again, or what it is computed of: where it is not
  /// kept, it may be there after many other steps.
  bool may_come_late = false;
  /// Of an argument or a result of forward, in a finished plan: whether its gradient is wanted.
  bool requires_grad = false;
};

inline size_t tensors_per_value(const Type& type) {
  return type.format == Format::plain   ? 1
         : type.format == Format::codes ? tensors_of_codes(*type.quantizer)
                                        : 0;
}

}  // namespace tandem
