// Reasons that several fusions have.
#pragma once

#include <string>

#include "core/fusion.h"
#include "kernel_ops/kernel_op.h"

namespace tandem::fusions {

/// Whether the sum that is member `sum` takes what the chain brings as its extra input.
inline bool is_own_extra(const Match& match, uint32_t sum) {
  const Value chained = match.written({sum - 1, "y"});
  return match[{sum, "x"}] != chained || match[{sum, "extra"}] == chained;
}

/// A kernel that takes the main operand is not given up for an extra input that it does not take.
inline Refusal refuse_foreign_extra(const Match& match, uint32_t sum, const MemberOperand& main) {
  const at::ScalarType extra = match.type({sum, "extra"}).dtype;
  if (kernel_ops::kArithmetic.has(extra) || !kernel_ops::kArithmetic.has(match.type(main).dtype))
    return std::nullopt;
  return std::string("the extra input is ") + c10::toString(extra) + ", which no kernel takes";
}

/// A quantize step that is member 1 wants no codes: there is nothing to fuse with.
inline Refusal refuse_without_codes(const Match& match) {
  if (exists(match.written({1, "row_codes"})) || exists(match.written({1, "column_codes"})))
    return std::nullopt;
  return "no codes are asked for, only the amax of what is read as it is";
}

/// "the bias is Float and the product BFloat16"
inline Refusal refuse_mixed(const Match& match, const MemberOperand& first,
                            std::string_view first_name, const MemberOperand& second,
                            std::string_view second_name) {
  const auto a = match.type(first).dtype, b = match.type(second).dtype;
  if (a == b) return std::nullopt;
  return std::string(first_name) + " is " + c10::toString(a) + " and " + std::string(second_name) +
         " " + c10::toString(b);
}

}  // namespace tandem::fusions
