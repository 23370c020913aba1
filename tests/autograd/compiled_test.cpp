// What compiled autograd is told of the node, and what the node says it cannot do there.
#include <torch/csrc/dynamo/compiled_autograd.h>

#include "pipeline/pipeline.h"
#include "support/plans.h"
#include "support/throws.h"

namespace tandem::testing::autograd_compiled {
namespace {

void collect(const Ops& ops, const Tensors& inputs, const Tensors& params) {
  namespace ca = torch::dynamo::autograd;
  const Outputs outputs = Pipeline(ops_json(ops))(inputs, params, true);
  ca::AutogradCompilerCall compiler(ca::SizeInput::STATIC);
  ca::NodeCall node(0, outputs[0].grad_fn());
  ca::CompiledNodeArgs args(compiler, node);
  outputs[0].grad_fn()->compiled_args(args);
}

const std::string kReshape = R"(reshape {"options": {"shape": [-1, 4]}})";

TEST(CompiledAutograd, TakesPlainTensors) {
  EXPECT_NO_THROW(collect({"rms_norm", "basic_linear"}, {leaf({2, 4})}, {leaf({4}), leaf({3, 4})}));
}

TEST(CompiledAutogradErrors, WhatIsNoTensor) {
  EXPECT_ERROR(collect({kReshape}, {leaf({2, 4})}, {}), c10::NotImplementedError,
               "pipeline: expected a backward of plain tensors under compiled autograd",
               "Compile the forward as well");
}

TEST(CompiledAutogradErrors, AViewOfAnArgument) {
  EXPECT_ERROR(collect({kReshape, "basic_linear"}, {random({2, 8})}, {leaf({3, 4})}),
               c10::NotImplementedError,
               "pipeline: expected kept tensors that are no views of arguments under compiled "
               "autograd, got ",
               "got a reshaped input", "Compile the forward as well");
}

}  // namespace
}  // namespace tandem::testing::autograd_compiled
