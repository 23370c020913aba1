// Which instruction sets the kernels were compiled for and this processor has.
#pragma once

#include <string>
#include <vector>

namespace tandem::kernels {

/// Names of Highway targets, the best first.
std::vector<std::string> supported_targets();

}  // namespace tandem::kernels
