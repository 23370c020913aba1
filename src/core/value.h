// Values: the numbered and typed nodes of a plan.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <vector>

#include "quantization/formats/quantizer.h"

namespace tandem {

/// A value of a plan. Steps that name one Value use the same numbers; a rename creates no Value.
enum class Value : uint32_t { none = 0xFFFFFFFF };

constexpr size_t index_of(Value value) { return static_cast<size_t>(value); }
constexpr bool exists(Value value) { return value != Value::none; }
using Values = std::vector<Value>;

/// The representation of a value.
enum class Format : uint8_t {
  /// One tensor.
  plain,
  /// Codes of one direction, their scales and, where the format has one, their amax, as the type's
  /// quantizer writes them.
  codes,
  /// No tensor, but the sizes of another value.
  shape,
  /// Tensors and other fields that user code saved, and that only its op understands.
  opaque,
};

/// The origin of a value.
enum class Origin : uint8_t {
  /// An argument: the main operand or an extra input.
  input,
  /// A parameter, which every call passes.
  param,
  /// A preallocated tensor that steps mutate: cached codes of a weight.
  workspace,
  /// A tensor of the recipe's state, or the region's number. A module keeps it, and steps mutate
  /// it.
  state,
  /// A tensor of the caller that steps mutate, such as a parameter's main_grad.
  buffer,
  /// Written by a forward step.
  result,
  /// Written by a backward step, or passed to backward.
  gradient,
  /// Written and read in backward only.
  intermediate,
};

/// The role of a tensor in a product; a recipe has a quantizer for each role.
enum class Role : uint8_t { input, weight, grad_output };

/// The type of a value, and what `explain` prints of it.
struct Type {
  at::ScalarType dtype = at::kFloat;
  Format format = Format::plain;
  Origin origin = Origin::result;
  /// The value whose memory this value may share, as in a reshape.
  Value view_of = Value::none;
  /// The name that `explain` prints, such as "3.linear.y".
  std::string name = {};
  /// The quantizer of a value in codes, else null.
  const Quantizer* quantizer = nullptr;
  Direction direction = Direction::row;
  /// Whether a backward step can re-emit the value, or a value that it is computed from. Unless it
  /// is kept, it may then exist only after many other steps.
  bool may_come_late = false;
  /// For an argument or a result of forward in a finished plan: whether its gradient is required.
  bool requires_grad = false;
};

inline size_t tensors_per_value(const Type& type) {
  return type.format == Format::plain   ? 1
         : type.format == Format::codes ? tensors_of_codes(*type.quantizer)
                                        : 0;
}

}  // namespace tandem
