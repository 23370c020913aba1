// The instruction sets that the kernels are compiled for, that this processor has, and that
// TANDEM_MAX_CPU_ISA allows.
#pragma once

#include <string>
#include <vector>

namespace tandem::kernels {

/// Returns names of Highway targets, the best first.
///
/// Throws:  std::invalid_argument where TANDEM_MAX_CPU_ISA, which the first call of a process
///          reads, is not avx512, avx2 or baseline. The first kernel throws it too.
std::vector<std::string> supported_targets();

}  // namespace tandem::kernels
