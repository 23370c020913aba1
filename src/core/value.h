// Values: whatever flows through a plan, known by a number and typed.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <vector>

namespace tandem {

/// A value of a plan. Two steps that name the same Value mean the same numbers; a rename makes no new one.
enum class Value : uint32_t { none = 0xFFFFFFFF };

constexpr size_t index_of(Value value) { return static_cast<size_t>(value); }
constexpr bool exists(Value value) { return value != Value::none; }
using Values = std::vector<Value>;

/// How a value is represented.
enum class Format : uint8_t {
  plain,     ///< one tensor
  fp8_e4m3,  ///< three: codes, dequant_scale, amax
  fp8_e5m2,  ///< three, likewise
  shape,     ///< no tensor: the sizes of another value
  opaque,  ///< whatever user code saves: tensors and plain fields, known only to the op that wrote them
};

constexpr size_t tensors_per_value(Format format) {
  return format == Format::plain                                    ? 1
         : format == Format::fp8_e4m3 || format == Format::fp8_e5m2 ? 3
                                                                    : 0;
}
constexpr bool is_fp8(Format format) {
  return format == Format::fp8_e4m3 || format == Format::fp8_e5m2;
}
constexpr const char* name_of(Format format) {
  constexpr const char* kNames[] = {"plain", "e4m3", "e5m2", "shape", "opaque"};
  return kNames[static_cast<size_t>(format)];
}

/// Where a value comes from.
enum class Origin : uint8_t {
  input,         ///< an argument: the main input or an extra one
  param,         ///< a parameter, passed in at every call
  workspace,     ///< a preallocated tensor that steps mutate: the cached codes of a weight
  buffer,        ///< a tensor of the caller that steps mutate, such as a parameter's main_grad
  result,        ///< written by a forward step
  gradient,      ///< written by a backward step, or given to backward
  intermediate,  ///< written and read in backward only
};

/// Which operand of a product a tensor is: it decides the quantized format.
enum class Role : uint8_t { input, weight, grad_output };

/// The type of a value, and what a reader of `explain` wants to know of it.
struct Type {
  at::ScalarType dtype = at::kFloat;
  Format format = Format::plain;
  Origin origin = Origin::result;
  Value view_of = Value::none;  ///< the value whose memory this one may share (a reshape), if any
  std::string name;             ///< as `explain` prints it: "3.linear.y"
};

}  // namespace tandem
