// Reasons and helpers that several fusions share.
#pragma once

#include <string>

#include "core/call.h"
#include "core/fusion.h"
#include "kernel_ops/framework/kernel_op.h"
#include "ops/structure.h"

namespace tandem::fusions {

/// Returns the options of an optional member; null where the member is absent.
template <typename T>
const T* member_options(const Call& call, size_t member) {
  return static_cast<const T*>(call.step().options[member].get());
}

/// Returns the request for the codes of an optional quantize step, whose three writes begin at
/// `write`.
inline kernel_ops::RequestedCodes codes_of_member(const Call& call, size_t member, size_t given,
                                                  size_t write) {
  return call.codes(member_options<Quantizer>(call, member), given, write);
}

/// Whether the member `sum` reads the result of the member before it as its extra input.
inline bool is_own_extra(const Match& match, uint32_t sum) {
  const Value chained = match.written({sum - 1, kMainResult});
  return match[{sum, "x"}] != chained || match[{sum, "extra"}] == chained;
}

/// Refuses a sum in the caller's tensor of another dtype: the sum must be rounded to that dtype,
/// and a kernel that adds would round it to another one.
inline Refusal refuse_in_place(const Match& match, uint32_t sum) {
  const Step& step = *match.steps[sum];
  if (step.mutates.empty() || match.type({sum, "x"}).dtype == match.type({sum, "extra"}).dtype)
    return std::nullopt;
  return std::string("the sum is written into a tensor of ") +
         c10::toString(match.type({sum, "extra"}).dtype);
}

/// Returns the extra input for a sum of these sizes. A sum in the caller's tensor is not broadcast.
inline at::Tensor added_by(const Call& call, size_t extra, c10::SymIntArrayRef sizes) {
  return call.step().mutates.empty() ? ops::extra_of(call, extra, sizes) : call.in(extra);
}

/// Returns the caller's tensor as memory for a kernel's result where a sum with `in_place` can be
/// written there, else an undefined tensor.
inline at::Tensor memory_for_sum(const Call& call, const at::Tensor& extra) {
  return !call.step().mutates.empty() && extra.is_contiguous() ? extra : at::Tensor();
}

/// Returns the sum, which is copied into the caller's tensor for `in_place` if it does not lie
/// there.
inline at::Tensor written_sum(const Call& call, at::Tensor sum, const at::Tensor& extra) {
  if (call.step().mutates.empty()) return sum;
  if (!sum.is_same(extra)) extra.copy_(sum);
  extra.unsafeGetTensorImpl()->bump_version();  // nothing else does so below autograd
  return extra;
}

/// Passes the sum to a write of the step, after written_sum.
inline void write_sum(Call& call, size_t write, at::Tensor sum, const at::Tensor& extra) {
  sum = written_sum(call, std::move(sum), extra);
  if (call.wants(write)) call.out(write, std::move(sum));
}

/// Refuses an extra input of a dtype that no kernel takes, where a kernel takes the main operand: a
/// fusion would lose this kernel.
inline Refusal refuse_foreign_extra(const Match& match, uint32_t sum, const MemberOperand& main) {
  const at::ScalarType extra = match.type({sum, "extra"}).dtype;
  if (kernel_ops::kArithmetic.has(extra) || !kernel_ops::kArithmetic.has(match.type(main).dtype))
    return std::nullopt;
  return std::string("the extra input is ") + c10::toString(extra) + ", which no kernel takes";
}

/// Refuses a quantize step without demanded codes, which leaves nothing to fuse.
inline Refusal refuse_without_codes(const Match& match, uint32_t member) {
  if (!match.has(member) || exists(match.written({member, "row_codes"})) ||
      exists(match.written({member, "column_codes"})))
    return std::nullopt;
  return "no codes are asked for, only the amax of what is read as it is";
}
/// Calls refuse_without_codes for the last member.
inline Refusal refuse_without_codes(const Match& match) {
  return refuse_without_codes(match, static_cast<uint32_t>(match.steps.size() - 1));
}

/// Add the reads, or the writes, of a quantize step, but for the quantized tensor.
inline void read_given(FusedRun& run, uint32_t member) { run.reads.push_back({member, "given"}); }
inline void write_codes(FusedRun& run, uint32_t member) {
  for (const char* codes : {"row_codes", "column_codes", "amax"})
    run.writes.push_back({member, codes});
}

/// Refuses operands of different dtypes: "the bias is Float and the product BFloat16".
inline Refusal refuse_mixed(const Match& match, const MemberOperand& first,
                            std::string_view first_name, const MemberOperand& second,
                            std::string_view second_name) {
  const auto a = match.type(first).dtype, b = match.type(second).dtype;
  if (a == b) return std::nullopt;
  return std::string(first_name) + " is " + c10::toString(a) + " and " + std::string(second_name) +
         " " + c10::toString(b);
}

}  // namespace tandem::fusions
