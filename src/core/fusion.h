// Fusions: a pattern of steps, a rule that may refuse, and an implementation that replaces the
// matched steps by one.
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

/// An operand of a member, which is a matched step: `name` is the operand's name in the step's
/// definition.
struct MemberOperand {
  uint32_t member;
  std::string_view name;
  /// Joint fusions: the names of backward steps, separated by '|'. The fused step reads the operand
  /// in the representation that the first of these steps reads: numbers or codes. Where no such
  /// step exists, and where `step` is empty, the fused step reads the numbers of forward. Fusions
  /// in Python use kAnyStep or nothing.
  std::string_view step = {};
};

/// A MemberOperand's `step` that stands for any backward step that reads the operand.
inline constexpr std::string_view kAnyStep = "*";

/// The name of an operand that no op can declare: the one read of a member that no member writes,
/// such as the other term of a sum.
inline constexpr std::string_view kOtherRead = "*";

/// The name of a write: the main result of the member, or, where this optional member is absent, of
/// the last present member before it.
inline constexpr std::string_view kMainResult = "->";

/// A pattern step's `operand` that stands for any operand of the step.
inline constexpr std::string_view kAnyRead = "*";

/// A step of a pattern: the steps that it matches, and the value that links it to an earlier step
/// of the pattern. The value is a result (or a named read) of the earlier step, and an operand of
/// this step. Without names these are the main result y and the main operand x, in backward grad_x
/// and grad_y.
struct PatternStep {
  // NOLINTBEGIN(google-explicit-constructor): a pattern is written as a list of names
  PatternStep(const char* op_step) : name(op_step) {}
  PatternStep(std::string_view op_step) : name(op_step) {}
  PatternStep(StepKind own) : kind(own) {}
  // NOLINTEND(google-explicit-constructor)
  /// Matches steps of any op of a family, such as "activation" or "activation.backward".
  static PatternStep any_of(std::string_view family) {
    PatternStep step(family);
    step.is_family = true;
    return step;
  }
  /// Links the step by named operands: `from_result` of the earlier step is `as_operand` of this
  /// one.
  PatternStep through(std::string_view from_result, std::string_view as_operand) const {
    PatternStep step = *this;
    step.result = from_result;
    step.operand = as_operand;
    return step;
  }
  /// Links the step to the pattern step with index `place`, not to the one before it, so that two
  /// steps can read the results of one.
  PatternStep behind(size_t place) const {
    PatternStep step = *this;
    step.source = place;
    return step;
  }

  /// Adds a suffix to the name of the fused step.
  PatternStep named(std::string_view name_suffix) const {
    PatternStep step = *this;
    step.suffix = name_suffix;
    return step;
  }
  /// Makes the step optional: it is a member where it exists and the fusion is legal with it, and
  /// its suffix is then part of the name; else its operands and options are absent. With `needed`,
  /// it is a member only together with the step of that index.
  PatternStep optional(std::string_view name_suffix, size_t needed = npos) const {
    PatternStep step = named(name_suffix);
    step.is_optional = true;
    step.needs = needed;
    return step;
  }

  StepKind kind = StepKind::op;
  /// Names of steps, separated by '|'.
  std::string_view name = {};
  bool is_family = false;
  std::string_view result = {}, operand = {};
  /// The index of the earlier step; npos: the last present step before this one.
  size_t source = npos;
  std::string_view suffix = {};
  bool is_optional = false;
  size_t needs = npos;
};

/// The steps that a pattern matched, in pattern order and null for an absent one, and the types of
/// all values.
struct TANDEM_API Match {
  std::span<const Step* const> steps;
  const std::vector<Type>& types;

  /// Returns the value that a member reads under `name`, else the value that it writes under it;
  /// Value::none if there is neither. A list gives its first value.
  Value operator[](const MemberOperand& operand) const;
  /// Returns the value that a member writes under a name; Value::none if it writes none.
  Value written(const MemberOperand& operand) const;
  /// Return the value in a vector, or all values of a list.
  Values all(const MemberOperand& operand) const;
  Values all_written(const MemberOperand& operand) const;
  /// Whether an optional member is present.
  bool has(uint32_t member) const { return steps[member] != nullptr; }
  /// Whether the member has an operand or result of this name.
  bool has(const MemberOperand& operand) const;
  /// Throws c10::ValueError where the member has no such operand.
  const Type& type(const MemberOperand& operand) const;
};

enum class Pass : uint8_t { joint, forward, backward };
constexpr const char* pass_name(Pass pass) {
  return pass == Pass::joint ? "joint" : pass == Pass::forward ? "forward" : "backward";
}

/// One direction of a fused step. A write that is not demanded is passed as absent. Lists come last
/// among reads and writes.
struct FusedRun {
  std::vector<MemberOperand> reads, writes;
  Run run = nullptr;
  /// Members whose mutations the fused step performs, all of them, in the order of its `effects`.
  /// In backward of a joint fusion, a member stands for all steps of its op.
  std::vector<uint32_t> mutates = {};
  /// Operands that the replaced steps quantize in groups, in the order of the fused step's
  /// `quantizers`.
  std::vector<MemberOperand> quantizes = {};
};

/// A fusion is legal exactly when it writes every value that is demanded outside the matched steps,
/// performs every mutation of these steps and reads no value that only they write. The planner
/// checks this; `refuse` adds reasons that only the fusion knows.
struct Fusion {
  std::string name;
  Pass pass = Pass::forward;
  /// Each step reads a result of the last present step before it, or of the step that `behind`
  /// names.
  std::vector<PatternStep> pattern = {};
  FusedRun run = {};
  /// Joint fusions: replaces all backward steps of the matched ops.
  FusedRun backward = {};
  /// Joint fusions: names of private values that forward keeps for backward. They follow the writes
  /// of `run` and the reads of `backward`.
  Names keeps = {};
  Refusal (*refuse)(const Match& match) = nullptr;
  std::string_view picture = {};
  bool runs_user_code = false;

  /// The name, with what optional members add to it in brackets.
  std::string spelled() const {
    std::string spelled = name;
    for (const PatternStep& step : pattern)
      spelled.append(step.is_optional ? "[" : "")
          .append(step.suffix)
          .append(step.is_optional ? "]" : "");
    return spelled;
  }
};

}  // namespace tandem
