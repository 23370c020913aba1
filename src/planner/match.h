// Patterns of fusions on a list of steps.
#pragma once

#include "planner/replacement.h"

namespace tandem {

/// Throws c10::ValueError where a pattern can match nothing: it names a step that no registered op
/// has in its pass, or a link by what no such step writes or reads; and where others depend on an
/// optional step. Backward may run steps of forward again.
void check_pattern(const Fusion& fusion);

/// Finds the members of a fusion's pattern that starts at `start`, in pattern order, npos for one
/// that is not there; empty where it does not match, or with one step alone.
Members find_pattern(const StepList& steps, size_t start, const Fusion& fusion);

/// The same without some of those that are optional, the least of them first.
std::vector<Members> find_patterns(const StepList& steps, size_t start, const Fusion& fusion);

/// A pattern that matched.
struct Candidate {
  Candidate(const StepList& list, const Members& members, const Fusion& fusion);

  /// The fusion's, with those of its optional members.
  std::string name;
  std::vector<const Step*> steps;
  /// As `explain` prints it: "1.basic_linear + 1.bias".
  std::string place;
  /// Of the ops that it covers, in member order.
  std::vector<Options> options;
};

/// Why the fused step cannot have the operands that the fusion names: members have others.
Refusal check_names(const Fusion& fusion, const Match& match, const FusionScope& scope);

}  // namespace tandem
