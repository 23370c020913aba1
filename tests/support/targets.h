// Running a test once for each instruction set that the processor has.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

// The choice of targets has to come before Highway.
// clang-format off
#include "kernels/cpu/targets.h"
#include "hwy/highway.h"
// clang-format on

namespace tandem::testing {

/// Every compiled target that this processor runs, as bits of Highway.
inline std::vector<int64_t> all_targets() {
  std::vector<int64_t> targets;
  for (int64_t left = hwy::SupportedTargets() & HWY_TARGETS; left != 0; left &= left - 1)
    targets.push_back(left & -left);
  return targets;
}

inline std::string target_name(int64_t target) { return hwy::TargetName(target); }

/// Kernels use this target while it lives.
class ScopedTarget {
 public:
  explicit ScopedTarget(int64_t target) { choose(target); }
  ~ScopedTarget() { choose(0); }
  ScopedTarget(const ScopedTarget&) = delete;
  ScopedTarget& operator=(const ScopedTarget&) = delete;

 private:
  static void choose(int64_t target) {
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  }
};

/// Tests that run once for each of all_targets().
class OnEachTarget : public ::testing::TestWithParam<int64_t> {
 public:
  static std::string name(const ::testing::TestParamInfo<int64_t>& info) {
    return target_name(info.param);
  }

 private:
  ScopedTarget target_{GetParam()};
};

}  // namespace tandem::testing
