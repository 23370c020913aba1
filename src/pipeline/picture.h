// Plans as pictures: which step passes which value to which, what backward gets from forward, which
// steps a fusion replaces, and how long steps took.
#pragma once

#include <string>

#include "core/json_fwd.h"
#include "tandem/report.h"

namespace tandem {

/// The text escaped for XML.
std::string escaped(const std::string& text);

/// The texts of an array, with a separator between them.
std::string joined(const nlohmann::json& texts, const char* separator = ", ");

/// The picture of a plan, given as JSON from `explain`: forward runs downwards, backward upwards
/// beside it, and kept values stand between them.
std::string plan_svg(const nlohmann::json& plan, const StepTimes& times);

/// The picture as a graph for Graphviz, which finds a better layout.
std::string plan_dot(const nlohmann::json& plan, const StepTimes& times);

}  // namespace tandem
