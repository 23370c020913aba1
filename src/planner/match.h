// Patterns of fusions on a list of steps.
#pragma once

#include "planner/replacement.h"

namespace tandem {

/// Throws c10::ValueError where a pattern can match nothing: it names a step that no registered op
/// has in its pass, or a link by what no such step writes or reads; and where a step is
/// `behind` an optional one. Backward may run steps of forward again.
void check_pattern(const Fusion& fusion);

/// Which members of a fusion's pattern are there.
using Form = std::vector<bool>;

/// The forms that a fusion has, of the most members first, and of as many those with the first
/// ones; none with one step alone, but where the pattern is one.
std::vector<Form> forms_of(const Fusion& fusion);

/// Finds the members of a form of a fusion's pattern that starts at `start`, in pattern order, npos
/// for one that the form leaves out; empty where it does not match.
Members find_pattern(const StepList& steps, size_t start, const Fusion& fusion, const Form& form);

/// A pattern that matched.
struct Candidate {
  Candidate(const StepList& list, const Members& members, const Fusion& fusion);

  /// The fusion's, with what its members add.
  std::string name;
  std::vector<const Step*> steps;
  /// As `explain` prints it: "1.basic_linear + 1.bias".
  std::string place;
  /// By member, null for one that is absent or has none.
  std::vector<Options> options;
};

/// Why the fused step cannot have the operands that the fusion names: members have others.
Refusal check_names(const Fusion& fusion, const Match& match, const FusionScope& scope);

}  // namespace tandem
