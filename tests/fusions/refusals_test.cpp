// A quantize step that wants no codes (calibrating) is in no fusion: there is nothing to fuse with.
#include <gmock/gmock.h>

#include <ostream>
#include <string>
#include <vector>

#include "support/plans.h"

namespace tandem::testing::fusions_refusals {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

constexpr int64_t kHidden = 32;

struct Case {
  const char* name;
  /// Between two products; the sizes of their parameters, and the width of what they give.
  Ops ops;
  std::vector<std::vector<int64_t>> params;
  int64_t width;
  /// The fusions that would take a quantize step, each with the first of their members.
  std::vector<std::string> fusions;
};
std::ostream& operator<<(std::ostream& out, const Case& each) { return out << each.name; }

class WithoutCodes : public ::testing::TestWithParam<Case> {
 protected:
  /// Each product with amaxes of its own.
  static std::string linear(int holder) {
    return R"(basic_linear {"state": {"module": )" + std::to_string(holder) +
           R"(, "forward": 0, "backward": 0}})";
  }
  static Planned planned() {
    Ops ops{linear(0)};
    ops.insert(ops.end(), GetParam().ops.begin(), GetParam().ops.end());
    ops.push_back(linear(1));
    Tensors params{leaf({kHidden, kHidden})};
    for (const auto& sizes : GetParam().params) params.push_back(leaf(sizes));
    params.push_back(leaf({kHidden, GetParam().width}));
    return {ops,
            {leaf({8, kHidden})},
            params,
            R"({"training": true, "recipe": {"name": "DelayedScaling", "calibrating": true}})"};
  }
};
INSTANTIATE_TEST_SUITE_P(
    Fusions, WithoutCodes,
    ::testing::Values(
        Case{"rms_norm",
             {"rms_norm"},
             {{kHidden}},
             kHidden,
             {"rms_norm_quantize at 1.rms_norm", "rms_norm_backward_quantize at 1.rms_norm"}},
        Case{"layer_norm",
             {"layer_norm"},
             {{kHidden}, {kHidden}},
             kHidden,
             {"layer_norm_quantize at 1.layer_norm",
              "layer_norm_backward_quantize at 1.layer_norm"}},
        Case{"add_rms_norm",
             {to_channel(), from_channel(), "rms_norm"},
             {{kHidden}},
             kHidden,
             {"add_rms_norm_quantize at 2.add_extra_input"}},
        Case{"gelu",
             {"gelu"},
             {},
             kHidden,
             {"activation_quantize at 1.gelu", "activation_backward_quantize at 1.gelu"}},
        Case{"swiglu",
             {"swiglu"},
             {},
             kHidden / 2,
             {"glu_quantize at 1.swiglu", "glu_backward_quantize at 1.swiglu"}},
        Case{"bias_gelu",
             {"bias", "gelu"},
             {{kHidden}},
             kHidden,
             {"linear_bias_activation_quantize at 0.basic_linear",
              "activation_backward_bias_quantize at 2.gelu"}},
        Case{"dropout",
             {R"(dropout {"options": {"p": 0.5}})"},
             {},
             kHidden,
             {"dropout_backward_quantize at 1.dropout"}}),
    [](const auto& info) { return std::string(info.param.name); });

TEST_P(WithoutCodes, NoFusionTakesTheStep) {
  const auto decisions = planned().decisions();
  for (const std::string& fusion : GetParam().fusions)
    EXPECT_THAT(decisions, Contains(AllOf(StartsWith(fusion),
                                          EndsWith(" + quantize: no codes are asked for, only the "
                                                   "amax of what is read as it is"))));
  EXPECT_THAT(decisions, Not(Contains(HasSubstr("quantize: made"))));
}

}  // namespace
}  // namespace tandem::testing::fusions_refusals
