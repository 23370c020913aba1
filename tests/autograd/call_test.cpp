// Which path a call takes: direct, through the dispatcher op, or in composite form.
#include "autograd/call.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/_fw_primal.h>
#include <ATen/ops/_make_dual.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/forward_grad.h>

#include "pipeline/pipeline.h"
#include "support/plans.h"
#include "support/throws.h"

namespace tandem::testing::autograd_call {
namespace {

/// Forward-mode differentiation while one lives.
struct DualLevel {
  uint64_t level = torch::autograd::ForwardADLevel::get_next_idx();
  ~DualLevel() { torch::autograd::ForwardADLevel::release_idx(level); }
};

bool direct(const Tensors& inputs) { return is_direct({inputs, {}, {}}); }

TEST(Path, PlainTensorsAreDirect) {
  EXPECT_TRUE(direct({random({2})}));
  EXPECT_TRUE(direct({leaf({2}), at::Tensor()}));
  EXPECT_FALSE(direct({random({2}, at::kComplexFloat).conj()}));
  EXPECT_FALSE(direct({random({2}).to_sparse()}));
  EXPECT_FALSE(direct({random({2}).to(at::kMeta)}));
}

TEST(Path, TensorsWithATangentAreNot) {
  const DualLevel dual;
  EXPECT_FALSE(direct({at::_make_dual(random({2}), random({2}), 0)}));
}

TEST(Path, TheDispatcherOpGivesWhatTheDirectCallGives) {
  const Ops ops = {"rms_norm", "basic_linear", "bias", "swiglu", "basic_linear"};
  const Tensors inputs{leaf({3, 8})}, params{leaf({8}), leaf({12, 8}), leaf({12}), leaf({4, 6})};
  const Outputs by_op = call_op({inputs, params, {}}, description_of(ops));
  const Outputs direct = Pipeline(ops_json(ops))(inputs, params, true);
  EXPECT_TRUE(near(by_op[0], direct[0]));
  const Tensors grad{random({3, 4})};
  Tensors requested = inputs;
  requested.insert(requested.end(), params.begin(), params.end());
  EXPECT_TRUE(near(gradients_of(by_op, requested, grad), gradients_of(direct, requested, grad)));
}

TEST(Path, TheDispatcherOpReturnsFreshTensors) {
  const Tensors inputs{leaf({2, 4})}, plain{random({2, 4})};
  for (const Tensors* list : {&inputs, &plain}) {
    const Outputs outputs =
        call_op({*list, {}, {}}, description_of({"identity", "make_extra_output"}));
    EXPECT_FALSE(outputs[0].is_alias_of((*list)[0]));
    EXPECT_FALSE(outputs[0].is_alias_of(outputs[1]));
    EXPECT_TRUE(same(outputs[0], (*list)[0]));
  }
}

TEST(Path, MetaTensorsGetShapesOnly) {
  const Tensors inputs{random({3, 8}).to(at::kMeta)}, params{random({8}).to(at::kMeta)};
  const at::Tensor y = Pipeline(ops_json({"rms_norm", "swiglu"}))(inputs, params, true)[0];
  EXPECT_TRUE(y.is_meta());
  EXPECT_EQ(y.sizes(), (std::vector<int64_t>{3, 4}));
}

TEST(Path, ForwardModeRunsTheCompositeForm) {
  const DualLevel dual;
  const at::Tensor x = random({3, 4}, at::kDouble), tangent = random({3, 4}, at::kDouble, 2);
  const Tensors inputs{at::_make_dual(x, tangent, 0)};
  const at::Tensor y = Pipeline(ops_json({"gelu"}))(inputs, {}, true)[0];
  const double step = 1e-6;
  const at::Tensor expected =
      (at::gelu(x + step * tangent, "tanh") - at::gelu(x - step * tangent, "tanh")) / (2 * step);
  ASSERT_TRUE(y._fw_grad(0).defined());
  EXPECT_LT((y._fw_grad(0) - expected).abs().max().item<double>(), 1e-8);
}

const OpDef kOpaque{
    .name = "test_no_composite",
    .formula = "y = x",
    .forward = {{.name = "forward",
                 .reads = {"x"},
                 .writes = {"y"},
                 .run = [](Call& call) { call.out(0, call.in(0).clone()); }}},
    .has_composite = false,
};
TANDEM_REGISTER_OP(kOpaque);

TEST(Path, AnOpWithoutCompositeFormIsNamedUnderForwardMode) {
  const DualLevel dual;
  const Tensors inputs{at::_make_dual(random({2}), random({2}), 0)};
  EXPECT_ERROR(Pipeline(ops_json({"gelu", "test_no_composite"}))(inputs, {}, true),
               c10::NotImplementedError,
               "pipeline: expected ops with a composite form under torch.func, torch.jit.trace and "
               "forward-mode differentiation",
               "got op 1.test_no_composite", "differentiable torch operations");
}

TEST(Path, KeysHoldWhetherGradientsAreRecordedAndWhoCalls) {
  const Tensors inputs{leaf({2, 4})};
  const Arguments arguments{inputs, {}, {}};
  EXPECT_TRUE(key_of(arguments, true, false).call().grad_mode);
  EXPECT_TRUE(key_of(arguments, false, true).call().traced);
  EXPECT_FALSE(key_of(arguments, false, false).tensor(0).requires_grad)
      << "what requires grad does not matter where nothing is recorded";
}

}  // namespace
}  // namespace tandem::testing::autograd_call
