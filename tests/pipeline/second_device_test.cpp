// Implementations for a second device, registered from outside: torch's PrivateUse1, whose memory
// here is the host's and whose other operations are the CPU's.
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/TensorOperators.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <gmock/gmock.h>
#include <torch/library.h>

#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "kernel_ops/norm/norm.h"
#include "kernel_ops/product/codes_product.h"
#include "kernel_ops/product/product.h"
#include "kernel_ops/product/scaled_product.h"
#include "kernel_ops/quantize/delayed.h"
#include "kernel_ops/quantize/quantize.h"
#include "kernel_ops/unit/activation.h"
#include "kernel_ops/weights/weights.h"
#include "pipeline/pipeline.h"
#include "pipeline/replay.h"
#include "planner/planner.h"
#include "support/plans.h"
#include "tandem/autocast.h"

namespace tandem::testing::pipeline_second_device {
namespace {

using at::Tensor;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr auto kType = c10::DeviceType::PrivateUse1;
const at::Device kDevice(kType, 0);

/// The same memory as a tensor of the CPU.
Tensor on_host(const Tensor& tensor) {
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(),
                       at::TensorOptions().dtype(tensor.dtype()));
}

class HostMemory : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = ::operator new(std::max<size_t>(bytes, 1));
    return {memory, memory, &::operator delete, kDevice};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &::operator delete; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);
c10::Allocator* allocator() {
  static auto& memory = *new HostMemory;
  return &memory;
}

Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device>, std::optional<bool>,
             std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(sizes, allocator(), kKeys, dtype.value_or(at::kFloat), format);
}
Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides,
                     std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(sizes, strides, allocator(), kKeys,
                                           dtype.value_or(at::kFloat));
}
Tensor copy_from(const Tensor& source, const Tensor& target, bool) {
  (target.is_cpu() ? target : on_host(target)).copy_(source.is_cpu() ? source : on_host(source));
  return target;
}
/// What an operation of the CPU returned becomes what it should have been written to.
Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  const Tensor moved = source.to(kDevice);
  target.unsafeGetTensorImpl()->set_storage_keep_dtype(moved.storage());
  target.unsafeGetTensorImpl()->set_sizes_and_strides(moved.sizes(), moved.strides());
  return target;
}

void on_the_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::native::cpu_fallback(op, stack);
}

bool is_recording = false;
struct Guard : c10::impl::NoOpDeviceGuardImpl<kType> {
  bool isStreamCapturing(const c10::Stream&) const /* override since torch 2.12 */ {
    return is_recording;
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)
TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&on_the_cpu>());
}
TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", &at::native::view);
}

using kernel_ops::ProductType, kernel_ops::Product, kernel_ops::NormForward;
int norms = 0, products = 0, products_of_codes = 0, products_with_epilogue = 0;
bool takes_codes = true, takes_epilogue = false;

bool is_rms_norm(const NormForward::Args& args) {
  return args.x.scalar_type() == at::kFloat && args.weight.scalar_type() == at::kFloat &&
         !args.extra && !args.bias;
}
void norm(const NormForward::Args& args, std::span<Tensor> results) {
  ++norms;
  kernel_ops::ResultsOf<NormForward> written;
  for (const auto result : {NormForward::y, NormForward::inv_norm})
    written[result] = on_host(results[result]);
  NormForward::cpu({.x = on_host(args.x),
                    .weight = on_host(args.weight),
                    .eps = args.eps,
                    .zero_centered_gamma = args.zero_centered_gamma},
                   written);
}
/// RMSNorm, there.
kernel_ops::ResultsOf<NormForward> dispatched_norm(const Tensor& x, const Tensor& weight,
                                                   at::Device device) {
  return kernel_ops::dispatch<NormForward>(
      {.x = x.to(device), .weight = weight.to(device), .eps = 1e-5, .zero_centered_gamma = false});
}

bool is_of_numbers(const ProductType& type) {
  return type.a.quantizer == nullptr && type.b.quantizer == nullptr && type.dtype == at::kFloat &&
         type.sums == kernel_ops::Sums::any && type.beta == 0 && type.alpha == 1 &&
         !type.has_epilogue();
}
void multiply(const Product& product, const Tensor& result) {
  ++products;
  on_host(result).copy_(at::mm(on_host(product.a.matrix), on_host(product.b.matrix)));
}

/// A product with bias and GELU behind it, which may write the GELU's argument too.
bool is_with_epilogue(const ProductType& type) {
  return takes_epilogue && type.a.quantizer == nullptr && type.dtype == at::kFloat &&
         type.has_epilogue() && (type.unit.empty() || type.unit == "gelu") && !type.writes_amax;
}
void multiply_with_epilogue(const Product& product, const Tensor& result) {
  ++products_with_epilogue;
  Tensor sums = at::mm(on_host(product.a.matrix), on_host(product.b.matrix));
  if (product.bias != nullptr) sums = sums + on_host(*product.bias);
  if (product.unit_argument != nullptr) on_host(*product.unit_argument).copy_(sums);
  on_host(result).copy_(
      product.type.unit.empty() ? sums : kernel_ops::activation(product.type.unit, sums));
}

bool is_of_codes(const ProductType& type) {
  return takes_codes && type.a.quantizer != nullptr && type.b.quantizer != nullptr;
}
Tensor numbers(const CodedMatrix& there) {
  std::optional<Tensor> amax;
  if (there.amax != nullptr) amax = on_host(*there.amax);
  return kernel_ops::Dequantize::reference({.codes = on_host(there.matrix),
                                            .dequant_scale = on_host(*there.dequant_scale),
                                            .quantizer = *there.quantizer,
                                            .column = there.is_column(),
                                            .dtype = at::kDouble,
                                            .amax = amax})[0];
}
void multiply_codes(const Product& product, const Tensor& result) {
  ++products_of_codes;
  on_host(result).copy_(at::mm(numbers(product.a), numbers(product.b)));
}

/// What scaled_mm would say of the device if it were this one of CUDA.
kernel_ops::ScaledMmDevice pretended;
std::string_view refusal(const ProductType& type) {
  return kernel_ops::refusal_of_scaled_mm(type, pretended);
}
void multiply_scaled(const Product& product, const Tensor& result) {
  const auto hosts = [](const CodedMatrix& there) {
    return std::array{on_host(there.matrix), on_host(*there.dequant_scale)};
  };
  const auto a = hosts(product.a), b = hosts(product.b);
  const auto operand = [](const CodedMatrix& there, const std::array<Tensor, 2>& here) {
    return CodedMatrix(here[0], there.quantizer, there.direction, &here[1]);
  };
  kernel_ops::multiply_by_scaled_mm(
      Product(operand(product.a, a), operand(product.b, b), product.type.dtype), on_host(result));
}

class SecondDevice : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    kernel_ops::register_implementation<NormForward>({"second", kType, is_rms_norm, norm});
    kernel_ops::register_product({"second_product", kType, is_of_numbers, multiply});
    kernel_ops::register_product({.name = "second_epilogue",
                                  .device = kType,
                                  .accepts = is_with_epilogue,
                                  .run = multiply_with_epilogue,
                                  .takes_epilogues = true});
    kernel_ops::register_product({"second_codes", kType, is_of_codes, multiply_codes});
    kernel_ops::register_product(
        {"second_scaled_mm", kType,
         [](const ProductType& type) { return !takes_codes && refusal(type).empty(); },
         multiply_scaled, refusal});
  }
  void SetUp() override {
    norms = products = products_of_codes = 0;
    takes_codes = true;
    pretended = {};
  }

  static Tensors there(const Tensors& tensors) {
    Tensors moved;
    for (const Tensor& tensor : tensors)
      moved.push_back(tensor.detach().to(kDevice).requires_grad_(tensor.requires_grad()));
    return moved;
  }

  const Tensors inputs_{leaf({16, 32})};
  const Tensors params_{leaf({32}), leaf({32, 32}, at::kFloat, 2)};
};

TEST_F(SecondDevice, AKernelOpTakesWhatWasRegistered) {
  const Tensor x = random({4, 8}), weight = random({8}, at::kFloat, 2);
  const auto expected = dispatched_norm(x, weight, at::kCPU),
             got = dispatched_norm(x, weight, kDevice);
  EXPECT_EQ(norms, 1);
  for (const auto result : {NormForward::y, NormForward::inv_norm}) {
    EXPECT_EQ(got[result].device(), kDevice);
    EXPECT_TRUE(same(got[result].to(at::kCPU), expected[result]));
  }
}

TEST_F(SecondDevice, WhatAnImplementationDoesNotTakeGoesToTheReference) {
  const Tensor x = random({4, 8}, at::kDouble), weight = random({8}, at::kDouble, 2);
  const auto expected = dispatched_norm(x, weight, at::kCPU),
             got = dispatched_norm(x, weight, kDevice);
  EXPECT_EQ(norms, 0);
  EXPECT_TRUE(near(got[NormForward::y].to(at::kCPU), expected[NormForward::y]));
}

TEST_F(SecondDevice, APipelineTakesItAndExplainSaysSo) {
  Pipeline pipeline(ops_json({"rms_norm", "basic_linear", "gelu"}));
  const Tensors inputs = there(inputs_), params = there(params_);
  const Tensor y = pipeline(inputs, params, true)[0],
               expected = pipeline(inputs_, params_, true)[0];
  EXPECT_EQ(norms, 1);
  EXPECT_EQ(products, 1);
  EXPECT_EQ(y.device(), kDevice);
  EXPECT_TRUE(near(y.to(at::kCPU), expected, /*magnitude=*/8));
  const std::string text = pipeline.explain(ExplainFormat::text);
  const std::string on_second = text.substr(0, text.find("plan:", 1));
  EXPECT_THAT(on_second, AllOf(HasSubstr("0.rms_norm.inv_rms   by second\n"),
                               HasSubstr("1.basic_linear.y, 2.gelu.y   [fused: 1.basic_linear + "
                                         "2.gelu]   by reference, second_product\n")));
  EXPECT_THAT(text.substr(on_second.size()), Not(HasSubstr("second")));
}

/// Gradients by the steps of the direct path alone: torch's engine would ask for streams of the
/// device.
Tensors gradients(const Ops& ops, const Tensors& inputs, const Tensors& params) {
  const Planned planned(ops, inputs, params);
  const Plan& plan = planned.plan();
  at::Generator generator = at::globalContext().defaultGenerator(at::kCPU);
  Replay replay(plan, Arguments{inputs, params, {}});
  replay.run(plan.forward, generator);
  const Tensor& y = replay.frame().tensor(plan.outputs[0]);
  replay.frame().tensor(plan.output_gradients[0]) = at::ones(y.sizes()).to(y.device());
  const auto backward = full_backward(plan);
  replay.run(backward->steps, generator);
  Tensors gradients;
  for (const Value value : backward->gradients)
    gradients.push_back(replay.frame().tensor(value).to(at::kCPU));
  return gradients;
}

TEST_F(SecondDevice, BackwardTakesItToo) {
  const Ops ops{"rms_norm", "basic_linear", "gelu"};
  const Tensors got = gradients(ops, there(inputs_), there(params_));
  EXPECT_EQ(products, 3) << "the product and both of its gradients";
  EXPECT_TRUE(near(got, gradients(ops, inputs_, params_), /*magnitude=*/64));
}

TEST_F(SecondDevice, AProductMayDoWhatStandsBehindIt) {
  takes_epilogue = true;
  const Tensors inputs{inputs_[0]}, params{params_[1], leaf({32}, at::kFloat, 4)};
  for (const Ops& ops : {Ops{"basic_linear", "bias"}, Ops{"basic_linear", "gelu"},
                         Ops{"basic_linear", "bias", "gelu"}}) {
    const size_t count = ops[1] == "bias" ? 2 : 1;
    const Tensors own(params.begin(), params.begin() + static_cast<std::ptrdiff_t>(count));
    products_with_epilogue = 0;
    const Tensors got = gradients(ops, there(inputs), there(own));
    EXPECT_EQ(products_with_epilogue, 1);
    EXPECT_TRUE(near(got, gradients(ops, inputs, own), /*magnitude=*/64));
    Pipeline pipeline(ops_json(ops));
    EXPECT_TRUE(near(pipeline(there(inputs), there(own), true)[0].to(at::kCPU),
                     pipeline(inputs, own, true)[0], /*magnitude=*/8));
    EXPECT_THAT(pipeline.explain(ExplainFormat::text), HasSubstr("by second_epilogue\n"));
  }
}

TEST_F(SecondDevice, AProductOfCodesTakesThemAsTheyAre) {
  Pipeline pipeline(ops_json({"rms_norm", "basic_linear"}));
  const Autocast region;
  const Tensor y = pipeline(there(inputs_), there(params_), true)[0],
               expected = pipeline(inputs_, params_, true)[0];
  EXPECT_EQ(products_of_codes, 1);
  EXPECT_TRUE(near(y.to(at::kCPU), expected, /*magnitude=*/32));
  const std::string text = pipeline.explain(ExplainFormat::text);
  EXPECT_THAT(text, AllOf(HasSubstr("1.basic_linear.y   by second_codes\n"),
                          HasSubstr("1.basic_linear.y   by cpu, tiles (emulated: no library "
                                    "multiplies codes on this device)\n")));
}

TEST_F(SecondDevice, AKernelOpOfCodesTakesThemAsTheyAre) {
  const Quantizer& how = quantizer("fp8_e4m3");
  const auto codes = [&](const Tensor& x) {
    return kernel_ops::dispatch<kernel_ops::Quantize>(
        {.x = x, .quantizer = how, .output_mask = {true, false, false}});
  };
  const auto x = codes(random({16, 32})), w = codes(random({48, 32}, at::kFloat, 2));
  const auto product = [&](at::Device device) {
    return kernel_ops::dispatch<kernel_ops::MultiplyCodes>({.a = x[row_codes].to(device),
                                                            .a_scale = x[row_scale].to(device),
                                                            .a_quantizer = how,
                                                            .a_column = false,
                                                            .a_transposed = false,
                                                            .b = w[row_codes].to(device),
                                                            .b_scale = w[row_scale].to(device),
                                                            .b_quantizer = how,
                                                            .b_column = false,
                                                            .b_transposed = true,
                                                            .dtype = at::kFloat})[0];
  };
  const Tensor y = product(kDevice);
  EXPECT_EQ(products_of_codes, 1);
  EXPECT_TRUE(near(y.to(at::kCPU), product(at::kCPU), /*magnitude=*/32));
}

TEST_F(SecondDevice, ExplainSaysWhyCodesWereDecoded) {
  takes_codes = false;
  const auto explained = [&](int capability) {
    pretended.capability = capability;
    Pipeline pipeline(ops_json({"basic_linear"}));
    const Autocast region;
    const Tensor y = pipeline(there({inputs_[0]}), there({params_[1]}), true)[0],
                 expected = pipeline({inputs_[0]}, {params_[1]}, true)[0];
    EXPECT_TRUE(near(y.to(at::kCPU), expected, /*magnitude=*/32));
    return pipeline.explain(ExplainFormat::text);
  };
  EXPECT_THAT(explained(89), HasSubstr("basic_linear.y   by second_scaled_mm\n"));
  EXPECT_THAT(explained(80),
              HasSubstr("basic_linear.y   by reference, second_scaled_mm (emulated: FP8 is "
                        "multiplied from compute capability 8.9 on)\n"));
}

TEST_F(SecondDevice, ExplainGivesTheReasonsOfAllCalls) {
  takes_codes = false;
  pretended.capability = 90;
  Pipeline pipeline(ops_json({"basic_linear"}));
  const Autocast region;
  const auto run = [&](int64_t in, int64_t out) {
    pipeline(there({random({4, in})}), there({random({out, in})}), true);
  };
  run(32, 32);
  run(24, 32);
  run(32, 24);
  EXPECT_THAT(pipeline.explain(ExplainFormat::text),
              HasSubstr("basic_linear.y   by reference, second_scaled_mm (emulated: k is no "
                        "multiple of 16, n is no multiple of 16)\n"));
  const auto document = nlohmann::json::parse(pipeline.explain(ExplainFormat::json));
  EXPECT_EQ(document.at("plans").at(0).at("forward").back().at("emulated"),
            nlohmann::json({"k is no multiple of 16", "n is no multiple of 16"}));
}

TEST_F(SecondDevice, ScalesOfThePastAreKeptThere) {
  const ScaleUpdate& update = scale_update("fp8_e4m3:margin=0:max");
  const auto region = [](int64_t number) { return at::tensor({number}, at::kLong); };
  const auto history_of = [&](const at::Device& device) {
    const ScalingState state{at::ones({2}).to(device), at::zeros({3, 2}).to(device),
                             at::zeros({1}, at::kLong).to(device)};
    Tensors seen;
    for (int64_t step = 1; step < 4; ++step) {
      for (int64_t slot = 0; slot < 2; ++slot) {
        const Tensor scale = kernel_ops::take_scale(state, region(step), {slot}, update);
        EXPECT_EQ(scale.device(), device);
        seen.push_back(scale.to(at::kCPU));
        const Tensor amax = at::full({}, static_cast<double>(step + slot)).to(device);
        kernel_ops::record_amax(state, amax, region(step), {slot}, /*counts=*/true);
      }
    }
    kernel_ops::update_states(std::vector{PendingUpdate{state, &update}});
    seen.insert(seen.end(), {state.scale.to(at::kCPU), state.amax_history.to(at::kCPU)});
    return seen;
  };
  const Tensors got = history_of(kDevice), expected = history_of(at::kCPU);
  EXPECT_NE(expected[4].item<float>(), 1) << "a scale of the step before";
  for (size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(same(got[i], expected[i])) << i;
}

TEST_F(SecondDevice, APipelineQuantizesByScalesOfThePast) {
  const auto run = [](const Tensors& inputs, const Tensors& params, const at::Device& device) {
    Pipeline pipeline(R"([{"op": "rms_norm", "params": [0]}, {"op": "basic_linear", "params": [1],
                           "state": {"module": 0, "forward": 0, "backward": 0}}])");
    Tensors state;
    for (const int64_t slots : {2, 1})
      state.insert(state.end(), {at::ones({slots}).to(device), at::zeros({4, slots}).to(device),
                                 at::zeros({1}, at::kLong).to(device)});
    Tensors outputs;
    for (int step = 0; step < 2; ++step) {
      const Autocast region(true, DelayedScaling{.amax_history_len = 4});
      outputs.push_back(
          pipeline(inputs, params, false, {}, [&](int64_t) { return state; })[0].to(at::kCPU));
    }
    outputs.push_back(state[0].to(at::kCPU));
    return outputs;
  };
  const Tensors got = run(there(inputs_), there(params_), kDevice),
                expected = run(inputs_, params_, at::kCPU);
  for (size_t i = 0; i < got.size(); ++i)
    EXPECT_TRUE(near(got[i], expected[i], /*magnitude=*/32)) << i;
}

/// Whether codes of a weight were made.
bool refreshes(at::TensorList weight, const kernel_ops::Workspace& workspace,
               bool backward = false) {
  const int64_t before = kernel_ops::refresh_counts().made;
  kernel_ops::refresh_weight(weight, workspace, quantizer("fp8_e4m3"), backward);
  return kernel_ops::refresh_counts().made != before;
}

TEST_F(SecondDevice, PiecesOfAWeightAreKnownByTheirSigns) {
  Tensors pieces = there({random({4, 8}), random({2, 8}, at::kFloat, 2)});
  const auto workspace =
      kernel_ops::make_workspace(pieces, quantizer("fp8_e4m3"), {true, true, true});
  EXPECT_TRUE(refreshes(pieces, workspace));
  EXPECT_TRUE(refreshes(pieces, workspace)) << "outside of any region";
  const Autocast region;
  EXPECT_TRUE(refreshes(pieces, workspace));
  EXPECT_FALSE(refreshes(pieces, workspace));
  EXPECT_FALSE(refreshes(pieces, workspace, /*backward=*/true));
  for (Tensor& piece : pieces) {
    piece.mul_(2);
    EXPECT_TRUE(refreshes(pieces, workspace)) << "its version has moved";
    EXPECT_FALSE(refreshes(pieces, workspace));
    piece = piece.clone();
    EXPECT_TRUE(refreshes(pieces, workspace)) << "another tensor";
    EXPECT_FALSE(refreshes(pieces, workspace));
  }
  kernel_ops::weights_changed();
  EXPECT_TRUE(refreshes(pieces, workspace));
  const Tensor whole = at::cat({pieces[0].to(at::kCPU), pieces[1].to(at::kCPU)});
  const auto codes = kernel_ops::quantize_weight(whole, quantizer("fp8_e4m3")).workspace;
  for (const size_t part : {size_t{row_codes}, size_t{row_scale}, size_t{group_amax}})
    EXPECT_TRUE(same(workspace[part].to(at::kCPU), codes[part])) << part;
}

TEST_F(SecondDevice, WhatIsRecordedQuantizesWheneverItRuns) {
  const Tensors weight = there({random({4, 8})});
  const auto workspace =
      kernel_ops::make_workspace(weight, quantizer("fp8_e4m3"), {true, true, true});
  const Autocast region;
  const auto makes_codes = [&] {
    const int64_t before = kernel_ops::refresh_counts().made;
    kernel_ops::weight_codes(weight, workspace, at::zeros({1}), quantizer("fp8_e4m3"),
                             {true, false});
    return kernel_ops::refresh_counts().made != before;
  };
  EXPECT_TRUE(refreshes(weight, workspace));
  EXPECT_FALSE(refreshes(weight, workspace));
  EXPECT_FALSE(makes_codes());
  is_recording = true;
  EXPECT_TRUE(refreshes(weight, workspace));
  EXPECT_EQ(kernel_ops::last_uses(workspace[kernel_ops::stamp_part])[0],
            kernel_ops::CodesWere::recorded);
  EXPECT_TRUE(refreshes(weight, workspace, /*backward=*/true));
  EXPECT_TRUE(makes_codes());
  is_recording = false;
  EXPECT_TRUE(refreshes(weight, workspace)) << "nothing was written while it was recorded";
  EXPECT_FALSE(refreshes(weight, workspace));
}

TEST(ImplementationNames, AreSets) {
  EXPECT_EQ(kernel_ops::bit_of("reference"), kernel_ops::kReference);
  EXPECT_EQ(kernel_ops::bit_of("dispatcher"), kernel_ops::kDispatcher);
  EXPECT_EQ(kernel_ops::bit_of("cpu"), kernel_ops::bit_of("cpu"));
  EXPECT_THAT(kernel_ops::names_in(kernel_ops::kReference | kernel_ops::bit_of("cpu")),
              ::testing::ElementsAre("reference", "cpu"));
}

TEST(ImplementationNames, HaveReasonsBesideThem) {
  const auto reason = kernel_ops::bit_of_reason("cpu"), name = kernel_ops::bit_of("cpu");
  EXPECT_NE(reason, name);
  EXPECT_EQ(reason, kernel_ops::bit_of_reason("cpu"));
  EXPECT_THAT(kernel_ops::names_in(reason | name), ::testing::ElementsAre("cpu"));
  EXPECT_THAT(kernel_ops::reasons_in(reason | name), ::testing::ElementsAre("cpu"));
  EXPECT_THAT(kernel_ops::reasons_in(name), ::testing::IsEmpty());
}

TEST(ImplementationNames, AreAtMost64) {
  const auto too_many = [] {
    try {
      for (int i = 0; i < 64; ++i) kernel_ops::bit_of("name " + std::to_string(i));
    } catch (const c10::ValueError& error) {
      if (kernel_ops::bit_of_reason("one more") != 0) std::_Exit(1);
      std::fputs(error.what_without_backtrace(), stderr);
      std::_Exit(0);
    }
    std::_Exit(1);
  };
  EXPECT_EXIT(too_many(), ::testing::ExitedWithCode(0),  // in a process of its own: names stay
              "register_implementation: expected at most 64 names of implementations, got \"name "
              "[0-9]+\" as one more. Give those of one device one name.");
}

}  // namespace
}  // namespace tandem::testing::pipeline_second_device
