// What a list of steps covers, demands and releases, with checks that every pass must satisfy.
#pragma once

#include <functional>
#include <vector>

#include "core/plan.h"
#include "core/step.h"

namespace tandem {

/// The parts that the steps cover, sorted.
std::vector<Part> parts_of(const Steps& steps);
/// Checks that exactly the parts in `before` are still covered, each once. Throws c10::Error that
/// names `pass`.
void check_coverage(const std::vector<Part>& before, const Steps& after, const char* pass);

/// Whether a result shares the memory that the step mutates: it is written even if no step reads
/// it.
bool is_in_place(const Step& step, Value value, const std::vector<Type>& types);

/// Removes steps whose writes nobody demands, from the end; the other undemanded writes become
/// absent. A step that mutates a tensor of the caller stays. If the step accumulates gradients into
/// what it mutates, it stays only if `is_requested` holds for one of them (an index among the
/// plan's gradients).
void drop_dead_steps(Steps& steps, const std::vector<Type>& types,
                     const std::function<bool(Value)>& is_demanded_outside,
                     const std::function<bool(size_t)>& is_requested);

/// Checks that every value that a step reads or mutates is given beforehand or written by an
/// earlier step. A violation is a defect of the planner; a step would take the value for an absent
/// operand.
void check_reads(const Steps& steps, std::vector<bool> is_there, const std::vector<Type>& types);

/// Fills in `dead` of every step. `stays`: values that outlive the run.
void find_dead(Steps& steps, const std::vector<bool>& stays);

}  // namespace tandem
