#include <hwy/targets.h>

#include "kernels/cpu/targets.h"
#include "kernels/targets.h"

namespace tandem::kernels {

std::vector<std::string> supported_targets() {
  std::vector<std::string> names;
  const auto usable = static_cast<uint64_t>(hwy::SupportedTargets() & HWY_TARGETS);
  for (uint64_t target = 1; target != 0 && target <= usable;
       target <<= 1) {  // better targets have lower bits
    if ((usable & target) == 0) continue;
    const std::string name = hwy::TargetName(static_cast<uint32_t>(target));
    names.push_back(name == "Unknown" ? "baseline" : name);  // Highway has no name for the baseline
  }
  return names;
}

}  // namespace tandem::kernels
