// Fusions: a pattern of steps, a rule that may refuse, an implementation that replaces them by one
// step.
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
  uint32_t member;
  std::string_view name;
  /// In backward of a joint fusion: as which steps of the op read it, alternatives separated by
  /// '|'. Where none of them is there, and where none is named, it is what forward knows by the
  /// name: numbers, where a step may read their codes. Of a user's group kAnyStep, or nothing.
  std::string_view step = {};
};

/// As a MemberOperand's `step`: whichever reads it.
inline constexpr std::string_view kAnyStep = "*";

/// As an operand's name, which no op can give: the one read of a member that no member writes, such
/// as the other term of a sum.
inline constexpr std::string_view kOtherRead = "*";

/// As a write's name: the main result of the member, or, where that is absent, of the last one
/// before it that is there.
inline constexpr std::string_view kMainResult = "->";

/// As a pattern's `operand`: whichever operand reads what the chain goes through.
inline constexpr std::string_view kAnyRead = "*";

/// A step of a pattern: which steps it stands for, and through what the chain comes to it from the
/// step before. That is a value: a result of the one, or by name what it reads, and an operand of
/// the other. Unless named they are the main ones, y and x, in backward grad_x and grad_y.
struct PatternStep {
  // NOLINTBEGIN(google-explicit-constructor): a pattern is written as a list of names
  PatternStep(const char* op_step) : name(op_step) {}
  PatternStep(std::string_view op_step) : name(op_step) {}
  PatternStep(StepKind own) : kind(own) {}
  // NOLINTEND(google-explicit-constructor)
  /// Steps of any op of a family: "activation", "activation.backward".
  static PatternStep any_of(std::string_view family) {
    PatternStep step(family);
    step.is_family = true;
    return step;
  }
  /// The same, reached through what the step before calls `from_result`, and it `as_operand`.
  PatternStep through(std::string_view from_result, std::string_view as_operand) const {
    PatternStep step = *this;
    step.result = from_result;
    step.operand = as_operand;
    return step;
  }
  /// The same behind an earlier step of the pattern, by its place, rather than the last one: both
  /// read what that one writes.
  PatternStep behind(size_t place) const {
    PatternStep step = *this;
    step.source = place;
    return step;
  }

  /// A step that adds a suffix to the name of the fused step.
  PatternStep named(std::string_view name_suffix) const {
    PatternStep step = *this;
    step.suffix = name_suffix;
    return step;
  }
  /// A step that may be missing: it is a member where it is there and the fusion is legal with it.
  /// Its suffix is then part of the name; else its operands and options are absent. With `needed`
  /// it is a member only together with the step at that place.
  PatternStep optional(std::string_view name_suffix, size_t needed = npos) const {
    PatternStep step = named(name_suffix);
    step.is_optional = true;
    step.needs = needed;
    return step;
  }

  StepKind kind = StepKind::op;
  /// Of an op's step, alternatives separated by '|'.
  std::string_view name = {};
  bool is_family = false;
  std::string_view result = {}, operand = {};
  /// Place of the step before it in the chain; npos: the last one that is there.
  size_t source = npos;
  std::string_view suffix = {};
  bool is_optional = false;
  size_t needs = npos;
};

/// The steps that a pattern matched, in pattern order, null for one that is not there, and the
/// types of their values.
struct TANDEM_API Match {
  std::span<const Step* const> steps;
  const std::vector<Type>& types;

  /// The value that a member calls `name`: what it reads under it, else what it writes; Value::none
  /// if there is none. Of a list the first.
  Value operator[](const MemberOperand& operand) const;
  /// What a member writes under a name; Value::none if it does not.
  Value written(const MemberOperand& operand) const;
  /// The same, all elements of a list.
  Values all(const MemberOperand& operand) const;
  Values all_written(const MemberOperand& operand) const;
  /// Whether an optional member is there.
  bool has(uint32_t member) const { return steps[member] != nullptr; }
  /// Whether the member knows the name at all.
  bool has(const MemberOperand& operand) const;
  /// Throws c10::ValueError where the member has no such operand.
  const Type& type(const MemberOperand& operand) const;
};

enum class Pass : uint8_t { joint, forward, backward };
constexpr const char* pass_name(Pass pass) {
  return pass == Pass::joint ? "joint" : pass == Pass::forward ? "forward" : "backward";
}

/// One direction of a fused step. A write that nobody demands is passed as absent. Lists stand last
/// among reads and writes.
struct FusedRun {
  std::vector<MemberOperand> reads, writes;
  Run run = nullptr;
  /// Members all of whose mutations the fused step performs, in this order: its `effects`. In
  /// backward of a joint fusion they are those of all steps of the member's op.
  std::vector<uint32_t> mutates = {};
  /// What steps that it replaces quantize by themselves, in groups: its `quantizers`.
  std::vector<MemberOperand> quantizes = {};
};

/// A fusion is legal exactly when it writes every value that is demanded outside the run, performs
/// every mutation of the run and reads nothing that only the run writes: the planner checks that,
/// `refuse` adds what only the fusion can know.
struct Fusion {
  std::string name;
  Pass pass = Pass::forward;
  /// Each step reads a result of the last one before it that is there, or of the one that it is
  /// `behind`.
  std::vector<PatternStep> pattern = {};
  FusedRun run = {};
  /// Joint fusions: the steps of backward that it replaces are all those of the matched ops.
  FusedRun backward = {};
  /// Joint fusions: names of private values, kept from forward to backward; they follow the writes
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
