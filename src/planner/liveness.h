// What a list of steps covers, needs and lets go: what every pass must leave true.
#pragma once

#include <functional>
#include <vector>

#include "core/plan.h"
#include "core/step.h"

namespace tandem {

/// What steps cover, in order.
std::vector<Part> parts_of(const Steps& steps);
/// Every part that was covered must still be, exactly once. Throws c10::Error in the name of
/// `pass`.
void check_coverage(const std::vector<Part>& before, const Steps& after, const char* pass);

/// Whether a result is what the step mutates: it is written whoever reads it.
bool is_in_place(const Step& step, Value value, const std::vector<Type>& types);

/// Removes steps whose writes nobody demands, from the end; other undemanded writes become absent.
/// A step that mutates what is the caller's stays; of a gradient that goes into what it mutates
/// `is_asked` says, by place among the plan's gradients.
void drop_dead_steps(Steps& steps, const std::vector<Type>& types,
                     const std::function<bool(Value)>& is_demanded_outside,
                     const std::function<bool(size_t)>& is_asked);

/// Every value that a step reads or mutates must be there: given beforehand, or written by an
/// earlier step. Anything else is a defect of the planner, which a step would otherwise take for an
/// operand that is absent.
void check_reads(const Steps& steps, std::vector<bool> is_there, const std::vector<Type>& types);

/// Fills in `dead` of every step. `stays` holds values that outlive the run.
void find_dead(Steps& steps, const std::vector<bool>& stays);

}  // namespace tandem
