// Patterns of fusions on a list of steps.
#pragma once

#include "planner/replacement.h"

namespace tandem {

/// Throws c10::ValueError if a pattern can match nothing: it names a step that no registered op has
/// in its pass, links two steps by an operand that they do not have, or has a step `behind` an
/// optional one. Patterns of backward may name forward steps, which backward may recompute.
void check_pattern(const Fusion& fusion);

/// By step of a fusion's pattern: whether it is a member.
using Form = std::vector<bool>;

/// The forms of a fusion: those with the most members first, and of equally many those with the
/// earlier members first. A form with one step exists only if the pattern has one step.
std::vector<Form> forms_of(const Fusion& fusion);

/// The members of a form of the fusion's pattern that starts at `start`, in pattern order, npos for
/// a step that the form leaves out. Empty if the form does not match.
Members find_pattern(const StepList& steps, size_t start, const Fusion& fusion, const Form& form);

/// A pattern that matched.
struct Candidate {
  Candidate(const StepList& list, const Members& members, const Fusion& fusion);

  /// The fusion's name with the suffixes of optional members.
  std::string name;
  std::vector<const Step*> steps;
  /// The members as `explain` prints them: "1.basic_linear + 1.bias".
  std::string place;
  /// By member; null if it is absent or has no options.
  std::vector<Options> options;
};

/// Refuses if the fusion names an operand that a member does not have.
Refusal check_names(const Fusion& fusion, const Match& match, const FusionScope& scope);

}  // namespace tandem
