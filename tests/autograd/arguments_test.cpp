// Arguments of the dispatcher op, which may come from anywhere: counted and checked against the
// description before any step runs.
#include <ATen/ops/empty.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros.h>

#include "autograd/call.h"
#include "kernel_ops/weights/weights.h"
#include "pipeline/pipeline.h"
#include "pipeline/verify.h"
#include "support/plans.h"
#include "support/throws.h"

namespace tandem::testing::autograd_arguments {
namespace {

void call(const Tensors& inputs, const Tensors& params, const std::string& description,
          const Tensors& workspaces = {}) {
  call_op({inputs, params, workspaces}, description);
}

TEST(ArgumentErrors, InputsAndParametersAreCountedApart) {
  const std::string bias = description_of({"bias"}), add = description_of({"add_extra_input"});
  const Tensors x{random({4, 8})}, two{random({4, 8}), random({8})}, none, one{random({8})};
  EXPECT_ERROR(call(two, none, bias), c10::ValueError,
               "pipeline: expected 1 inputs and 1 parameters, got 2 and 0",
               "Pass the main input and one tensor per unbound extra input");
  call_op({x, one, {}}, bias);  // the plan of the right split serves no other
  EXPECT_ERROR(call(two, none, bias), c10::ValueError, "1 inputs and 1 parameters, got 2 and 0");
  EXPECT_ERROR(call(x, one, add), c10::ValueError, "2 inputs and 0 parameters, got 1 and 1");
  EXPECT_ERROR(call(x, none, bias), c10::ValueError, "got 1 and 0");
  EXPECT_ERROR(call(two, one, bias), c10::ValueError, "got 2 and 1");
  EXPECT_ERROR(call(x, two, bias), c10::ValueError, "got 1 and 2");
}

TEST(ArgumentErrors, OnEveryPath) {
  Pipeline pipeline(ops_json({"bias"}));
  const Tensors two{leaf({4, 8}), leaf({8})}, none;
  const char* text = "pipeline: expected 1 inputs and 1 parameters, got 2 and 0";
  EXPECT_ERROR(pipeline(two, none, true), c10::ValueError, text);
  EXPECT_ERROR(verify(pipeline, two, none, true), c10::ValueError, text);
  const char* nothing = "pipeline: expected the main input, got no tensor. Pass it first.";
  EXPECT_ERROR(pipeline(none, none, true), c10::ValueError, nothing);
  EXPECT_ERROR(verify(pipeline, none, none, true), c10::ValueError, nothing);
}

/// A product under a recipe whose weight's codes live in a workspace that the caller passes.
class Workspaces : public ::testing::Test {
 protected:
  void call_with(const Tensors& workspaces) {
    call({random({4, 8})}, {weight_}, description_, workspaces);
  }
  Tensors with(size_t part, const at::Tensor& replacement) {
    Tensors parts = parts_;
    parts[part] = replacement;
    return parts;
  }
  const std::string description_ = description_of(
      {"basic_linear"}, R"({"cache_weights": true, "recipe": {"name": "Float8CurrentScaling"}})");
  at::Tensor weight_ = random({6, 8});
  Tensors parts_{at::empty({6, 8}, at::kByte), at::empty({}), at::empty({}),
                 at::zeros({kernel_ops::kStampSize}, at::kLong)};
};

TEST_F(Workspaces, ThatFitServe) { call_with(parts_); }

TEST_F(Workspaces, OfTheWrongNumberAreRefused) {
  EXPECT_ERROR(call_with({}), c10::ValueError, "pipeline: expected 4 workspace tensors, got 0");
  Tensors five = parts_;
  five.push_back(at::empty({}));
  EXPECT_ERROR(call_with(five), c10::ValueError, "4 workspace tensors, got 5");
}

TEST_F(Workspaces, OfAnotherShapeDtypeOrDeviceAreRefused) {
  const auto refuses = [&](const Tensors& workspaces, const char* part) {
    EXPECT_ERROR(call_with(workspaces), c10::ValueError,
                 std::string("refresh_weight_: expected ") + part,
                 " on cpu, as the weight's workspace, got ", "Allocate the workspace again");
  };
  refuses(with(0, at::empty({8, 6}, at::kByte)), "row_codes of shape [6, 8], Byte,");
  refuses(with(0, at::empty({48}, at::kByte)), "row_codes of shape [6, 8], Byte,");
  refuses(with(0, at::empty({6, 8}, at::kChar)), "row_codes of shape [6, 8], Byte,");
  refuses(with(0, at::empty({6, 8}, at::TensorOptions(at::kByte).device(at::kMeta))), "row_codes");
  for (const auto& [part, name] : {std::pair<size_t, const char*>(1, "row_scale"), {2, "amax"}}) {
    refuses(with(part, at::empty({0})), name);
    refuses(with(part, at::empty({1})), name);
    refuses(with(part, at::empty({}, at::kDouble)), name);
  }
  refuses(with(3, at::zeros({kernel_ops::kStampSize - 1}, at::kLong)), "stamp");
  refuses(with(3, at::zeros({kernel_ops::kStampSize}, at::kInt)), "stamp");
}

TEST_F(Workspaces, WhoseMemoryIsSharedOrExpandedAreRefused) {
  const char* gaps = "contiguous and without a gradient, got strides ";
  EXPECT_ERROR(call_with(with(0, at::empty({1, 1}, at::kByte).expand({6, 8}))), c10::ValueError,
               "refresh_weight_: expected row_codes ", gaps, "[0, 0]",
               "Allocate the workspace for this weight");
  EXPECT_ERROR(call_with(with(0, at::empty({8, 6}, at::kByte).t())), c10::ValueError, "row_codes ",
               gaps);
  EXPECT_ERROR(call_with(with(3, at::zeros({1}, at::kLong).expand({kernel_ops::kStampSize}))),
               c10::ValueError, "stamp ", gaps);
  EXPECT_ERROR(call_with(with(1, at::empty({}).requires_grad_())), c10::ValueError, "row_scale ",
               gaps, "requires_grad=1");
  const char* shared = " in memory of its own, got some that another part of the workspace or the";
  EXPECT_ERROR(call_with(with(1, parts_[2])), c10::ValueError,
               "refresh_weight_: expected row_scale", shared, "Allocate each part by itself");
  EXPECT_ERROR(call_with(with(2, weight_[0][0])), c10::ValueError, "refresh_weight_: expected amax",
               shared);
}

TEST(ArgumentErrors, RowsWithoutElementsTakeNoTime) {
  for (const char* op : {"gelu", "swiglu", "bias", "dropout", "constant_scale"}) {
    const bool has_bias = std::string(op) == "bias";
    const at::Tensor x = at::empty({int64_t{1} << 40, 0}).requires_grad_();
    Pipeline pipeline(ops_json({op, "relu"}));
    const Tensors inputs{x},
        params = has_bias ? Tensors{at::empty({0}).requires_grad_()} : Tensors();
    const at::Tensor y = pipeline(inputs, params, true)[0];
    EXPECT_EQ(y.sizes(), x.sizes()) << op;
    y.backward(at::ones_like(y));
    EXPECT_EQ(x.grad().sizes(), x.sizes()) << op;
  }
}

}  // namespace
}  // namespace tandem::testing::autograd_arguments
