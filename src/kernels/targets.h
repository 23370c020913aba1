// Which instruction sets the kernels were compiled for, this processor has, and
// TANDEM_MAX_CPU_ISA allows.
#pragma once

#include <string>
#include <vector>

namespace tandem::kernels {

/// Names of Highway targets, the best first.
///
/// Throws: std::invalid_argument where TANDEM_MAX_CPU_ISA, which the first call of a process reads,
///         is not avx512, avx2 or baseline. So does the first kernel.
std::vector<std::string> supported_targets();

}  // namespace tandem::kernels
