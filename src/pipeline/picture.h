// Plans as pictures: which step hands which value to which, what backward gets from forward, what
// steps have replaced, and how long they took.
#pragma once

#include <string>

#include "core/json_fwd.h"
#include "tandem/report.h"

namespace tandem {

/// As XML wants it.
std::string escaped(const std::string& text);

/// Of a plan as `explain` tells it in JSON: forward downwards, backward upwards beside it, between
/// them what is kept.
std::string plan_svg(const nlohmann::json& plan, const StepTimes& times);

/// The same as a graph for Graphviz, which finds a better layout.
std::string plan_dot(const nlohmann::json& plan, const StepTimes& times);

}  // namespace tandem
