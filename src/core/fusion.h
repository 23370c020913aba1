// Fusions: a pattern of steps, a rule that may refuse, an implementation that replaces them by one step.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/op_def.h"
#include "core/refusal.h"
#include "core/step.h"
#include "tandem/export.h"

namespace tandem {

/// An operand of a matched step: `name` as the step's definition calls it.
struct MemberOperand {
  uint8_t member;
  std::string_view name;
};

/// As an operand's name: the one read of a member that no member writes, such as the other term of a sum.
inline constexpr std::string_view kOtherRead = "*";

/// The steps that a pattern matched, in pattern order, and the types of their values.
struct TANDEM_API Match {
  std::span<const Step* const> steps;
  const std::vector<Type>& types;

  /// The value that a member calls `name`; Value::none if it has no such operand.
  Value operator[](const MemberOperand& operand) const;
  const Type& type(const MemberOperand& operand) const { return types[index_of((*this)[operand])]; }
};

enum class Pass : uint8_t { joint, forward, backward };

/// One direction of a fused step. A write that nobody demands is passed as absent.
struct FusedRun {
  std::vector<MemberOperand> reads, writes;
  Run run = nullptr;
};

/// A fusion is legal exactly when it writes every value that is demanded outside the run and performs every mutation of the run: the
/// planner checks that, `refuse` adds what only the fusion can know.
struct Fusion {
  std::string name;
  Pass pass = Pass::forward;
  /// Kinds or families of steps, alternatives separated by '|'; each step reads a result of the one before it.
  std::vector<std::string_view> pattern = {};
  FusedRun run = {};
  /// Joint fusions: the steps of backward that it replaces are all those of the matched ops.
  FusedRun backward = {};
  /// Joint fusions: names of private values, kept from forward to backward; they follow the writes of `run` and the reads of `backward`.
  Names keeps = {};
  Refusal (*refuse)(const Match& match) = nullptr;
  std::string_view picture = {};
  bool runs_user_code = false;
};

/// The fusions of one pass, built in, longest patterns first.
std::span<const Fusion> built_in_fusions(Pass pass);

}  // namespace tandem
