// GroupedLinear in C++: names, numbers of one Linear per group, recipes, state, checkpoints,
// micro-batches, gradients that come later or go elsewhere, tensors of the caller.
#include "tandem/grouped_linear.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <gmock/gmock.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <string>
#include <tuple>

#include "support/modules.h"
#include "support/tensors.h"
#include "support/throws.h"
#include "tandem/tandem.h"
#include "tandem/weights.h"

namespace tandem::testing::front_grouped_linear {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr size_t kGroups = 3;
constexpr int64_t kIn = 64, kOut = 48, kRows = 69;
const std::vector<int64_t> kSplits = {33, 0, 32};  // the last rows belong to no group

GroupedLinear experts(const GroupedLinearOptions& options = {}, at::ScalarType dtype = at::kFloat) {
  return randomized(GroupedLinear(kGroups, kIn, kOut, options, dtype));
}

/// The values, or the gradients, of "weight" or "bias" by group, however they are packed.
std::vector<at::Tensor> by_group(const GroupedLinear& module, const std::string& name,
                                 bool gradients = false) {
  std::vector<at::Tensor> groups;
  for (const auto& param : module->named_parameters()) {
    if (!param.key().starts_with(name)) continue;
    const at::Tensor own = gradients ? param.value().grad() : param.value().detach();
    if (param.key() == name) return own.unbind(0);
    groups.push_back(own);
  }
  return groups;
}

TEST(GroupedLinear, HasTheNamesOfTransformerEngine) {
  EXPECT_THAT(names_of(*GroupedLinear(2, kIn, kOut)),
              ElementsAre("weight0", "weight1", "bias0", "bias1"));
  EXPECT_THAT(names_of(*GroupedLinear(2, kIn, kOut, {.bias = false})),
              ElementsAre("weight0", "weight1"));
  EXPECT_THAT(names_of(*GroupedLinear(2, kIn, kOut, {.return_bias = true})),
              ElementsAre("weight0", "weight1", "bias0", "bias1"));
  EXPECT_THAT(names_of(*GroupedLinear(2, kIn, kOut, {.single_grouped_bias = true})),
              ElementsAre("weight0", "weight1", "bias"));
  const auto p =
      GroupedLinear(2, kIn, kOut, {.single_grouped_weight = true, .single_grouped_bias = true})
          ->named_parameters();
  EXPECT_THAT(p.keys(), ElementsAre("weight", "bias"));
  EXPECT_EQ(p["weight"].sizes(), (std::vector<int64_t>{2, kOut, kIn}));
  EXPECT_EQ(p["bias"].sizes(), (std::vector<int64_t>{2, kOut}));
}

TEST(GroupedLinear, StartsAsTransformerEnginesDoes) {
  for (const bool is_packed : {false, true}) {
    seed_torch(7);
    const GroupedLinear made(3, 64, 96, {.single_grouped_weight = is_packed});
    seed_torch(7);
    for (const at::Tensor& weight : by_group(made, "weight")) {
      at::Tensor expected = at::zeros({96, 64});
      init::normal(0.023)(expected);
      EXPECT_TRUE(same(weight, expected)) << "each is drawn by itself, the first one first";
    }
    for (const at::Tensor& bias : by_group(made, "bias")) EXPECT_TRUE(same(bias, at::zeros({96})));
  }
  const GroupedLinear drawn(
      2, 4, 4,
      {.init_method = [](const at::Tensor& t) { t.fill_(t.dim()); }, .single_grouped_weight = true},
      at::kDouble);
  EXPECT_TRUE(same(drawn->parameters()[0].detach(), at::full({2, 4, 4}, 2, at::kDouble)));
}

struct RecipeCase {
  const char* name;
  std::optional<Recipe> recipe;
};
std::ostream& operator<<(std::ostream& out, const RecipeCase& c) { return out << c.name; }

class GroupedLinearRecipes
    : public ::testing::TestWithParam<std::tuple<RecipeCase, at::ScalarType, bool>> {
 protected:
  GroupedLinearOptions options() const {
    return {.single_grouped_weight = std::get<2>(GetParam()),
            .single_grouped_bias = std::get<2>(GetParam())};
  }
  template <typename Forward>
  at::Tensor in_region(Forward&& forward) const {
    const auto& recipe = std::get<0>(GetParam()).recipe;
    const Autocast region(recipe.has_value(), recipe.value_or(Float8CurrentScaling{}));
    return forward();
  }
};

std::string name_of(const ::testing::TestParamInfo<GroupedLinearRecipes::ParamType>& info) {
  const auto& [recipe, dtype, is_packed] = info.param;
  return recipe.name + std::string(dtype == at::kFloat ? "_float" : "_bfloat16") +
         (is_packed ? "_packed" : "");
}

INSTANTIATE_TEST_SUITE_P(
    Cases, GroupedLinearRecipes,
    ::testing::Combine(::testing::Values(RecipeCase{"plain", std::nullopt},
                                         RecipeCase{"current", Float8CurrentScaling{}},
                                         RecipeCase{"delayed",
                                                    DelayedScaling{.amax_history_len = 4}},
                                         RecipeCase{"mxfp8", MXFP8BlockScaling{}},
                                         RecipeCase{"blocks", Float8BlockScaling{}}),
                       ::testing::Values(at::kFloat, at::kBFloat16), ::testing::Bool()),
    name_of);

TEST_P(GroupedLinearRecipes, IsALinearForEachGroup) {
  const auto& [recipe, dtype, is_packed] = GetParam();
  // Libraries sum numbers in an order that depends on threads and on where the result begins;
  // products of codes have the same bits.
  const auto alike = [has_codes = recipe.recipe.has_value()](const at::Tensor& got,
                                                             const at::Tensor& expected) {
    return has_codes ? same(got, expected) : near(got, expected, /*magnitude=*/8);
  };
  GroupedLinear module = experts(options(), dtype);
  const auto weights = by_group(module, "weight"), biases = by_group(module, "bias");
  const at::Tensor x = leaf({kRows, kIn}, dtype), other = leaf({kRows, kIn}, dtype),
                   grad_y = random({kRows, kOut}, dtype, 9);
  std::vector<Linear> linears;
  for (size_t g = 0; g < kGroups; ++g) {
    const c10::AutoGradMode no_grad(false);
    linears.emplace_back(kIn, kOut, LinearOptions{}, dtype);
    linears[g]->named_parameters()["weight"].copy_(weights[g]);
    linears[g]->named_parameters()["bias"].copy_(biases[g]);
  }
  for (int step = 0; step < 2; ++step) {
    const at::Tensor y = in_region([&] { return module->forward(x, kSplits); });
    std::vector<at::Tensor> parts;
    in_region([&] {
      int64_t row = 0;
      for (size_t g = 0; g < kGroups; row += kSplits[g++])
        if (kSplits[g] != 0) parts.push_back(linears[g]->forward(other.narrow(0, row, kSplits[g])));
      return at::Tensor();
    });
    const at::Tensor expected = at::cat(parts);
    EXPECT_TRUE(alike(y.narrow(0, 0, expected.size(0)).detach(), expected.detach()));
    EXPECT_TRUE(same(y.narrow(0, 65, 4).detach(), at::zeros({4, kOut}, dtype)));
    y.backward(grad_y);
    expected.backward(grad_y.narrow(0, 0, expected.size(0)));
  }
  EXPECT_TRUE(alike(x.grad(), other.grad()));
  const auto grad_weights = by_group(module, "weight", true),
             grad_biases = by_group(module, "bias", true);
  for (size_t g = 0; g < kGroups; ++g) {
    const auto p = linears[g]->named_parameters();
    const bool is_empty = kSplits[g] == 0;
    EXPECT_TRUE(alike(grad_weights[g], is_empty ? at::zeros_like(weights[g]) : p["weight"].grad()));
    EXPECT_TRUE(same(grad_biases[g], is_empty ? at::zeros_like(biases[g]) : p["bias"].grad()));
  }
}

TEST_P(GroupedLinearRecipes, IsOnePipelineWithTheBitsOfTheOp) {
  const at::ScalarType dtype = std::get<1>(GetParam());
  const bool is_packed = std::get<2>(GetParam());
  GroupedLinear module = experts(options(), dtype);
  Sequential list = randomized(Sequential(
      {ops::grouped_linear(
          kIn, kOut,
          {.num_groups = kGroups, .packed_weight = is_packed, .packed_bias = is_packed})},
      dtype));
  const at::Tensor x = leaf({kRows, kIn}, dtype), other = leaf({kRows, kIn}, dtype);
  const at::Tensor y = in_region([&] { return module->forward(x, kSplits); }),
                   expected = in_region(
                       [&] { return list->forward(other, {at::tensor(kSplits, at::kLong)})[0]; });
  EXPECT_TRUE(same(y.detach(), expected.detach()));
  EXPECT_EQ(y.grad_fn()->name(), "TandemPipelineBackward");
  y.square().sum().backward();
  expected.square().sum().backward();
  EXPECT_TRUE(same(x.grad(), other.grad()));
  for (const auto& param : module->named_parameters())
    EXPECT_TRUE(same(param.value().grad(), list->named_parameters()["0." + param.key()].grad()));
  in_region([&] {
    EXPECT_TRUE(module->verify(x, {at::tensor(kSplits, at::kLong)}).passed);
    return at::Tensor();
  });
}

TEST_P(GroupedLinearRecipes, ItsGradientsOfWeightsMayComeLaterAndGoElsewhere) {
  const auto& [recipe, dtype, is_packed] = GetParam();
  GroupedLinearOptions later = options();
  later.delay_wgrad_compute = true;
  GroupedLinear plain = experts(options(), dtype), delayed = experts(later, dtype);
  for (size_t i = 0; i < kGroups; ++i) {
    if (is_packed && i != 0) break;
    const std::string name = is_packed ? "weight" : "weight" + std::to_string(i);
    later.main_grads[name] = at::zeros_like(plain->named_parameters()[name].detach());
  }
  GroupedLinear elsewhere = experts(later, dtype);
  GroupedLinearOptions now = later;
  for (auto& [name, main_grad] : now.main_grads) main_grad = at::zeros_like(main_grad);
  now.delay_wgrad_compute = false;
  GroupedLinear added = experts(now, dtype);
  const at::Tensor x = random({kRows, kIn}, dtype);
  for (GroupedLinear* module : {&plain, &delayed, &elsewhere, &added})
    in_region([&] { return (*module)->forward(x, kSplits); }).square().sum().backward();
  const auto got = delayed->named_parameters();
  for (const auto& param : plain->named_parameters()) {
    const std::string& name = param.key();
    if (name.starts_with("bias")) {
      EXPECT_TRUE(same(got[name].grad(), param.value().grad())) << "is not delayed";
      continue;
    }
    EXPECT_FALSE(got[name].grad().defined());
    EXPECT_TRUE(near(now.main_grads.at(name), param.value().grad()));
    EXPECT_FALSE(added->named_parameters()[name].grad().defined());
    EXPECT_TRUE(same(later.main_grads.at(name), at::zeros_like(param.value().grad())));
  }
  delayed->backward_dw();
  elsewhere->backward_dw();
  for (const auto& param : plain->named_parameters()) {
    const std::string& name = param.key();
    EXPECT_TRUE(near(got[name].grad(), param.value().grad())) << name;
    if (name.starts_with("bias")) continue;
    EXPECT_TRUE(near(later.main_grads.at(name), param.value().grad())) << name;
    EXPECT_FALSE(elsewhere->named_parameters()[name].grad().defined());
  }
  EXPECT_ERROR(delayed->backward_dw(), c10::Error, "backward_dw: expected a backward before it");
}

TEST_P(GroupedLinearRecipes, ACheckpointHasItAllWhicheverWayParametersArePacked) {
  const at::ScalarType dtype = std::get<1>(GetParam());
  const at::Tensor x = random({kRows, kIn}, dtype);
  const auto step = [&](GroupedLinear& module) {
    return in_region([&] { return module->forward(x, kSplits); });
  };
  GroupedLinear saved = experts(options(), dtype);
  for (int i = 0; i < 2; ++i) step(saved).sum().backward();
  const bool has_state = std::string(std::get<0>(GetParam()).name) == "delayed";
  EXPECT_EQ(saved->named_buffers().size(), has_state ? 4U : 0U);
  if (has_state) {
    EXPECT_EQ(saved->named_buffers()["recipe_state.forward.amax_history"].sizes(),
              (std::vector<int64_t>{4, int64_t{2 * kGroups}}));
  }
  for (const bool is_packed : {false, true}) {
    GroupedLinear loaded(
        kGroups, kIn, kOut,
        GroupedLinearOptions{.single_grouped_weight = is_packed, .single_grouped_bias = is_packed},
        dtype);
    save_and_load(saved, loaded);
    EXPECT_EQ(loaded->named_buffers().keys(), saved->named_buffers().keys());
    for (const char* name : {"weight", "bias"}) {
      const auto got = by_group(loaded, name), expected = by_group(saved, name);
      for (size_t g = 0; g < kGroups; ++g) EXPECT_TRUE(same(got[g], expected[g])) << name << g;
    }
    GroupedLinear again = experts(options(), dtype);
    save_and_load(saved, again);
    EXPECT_TRUE(same(step(loaded).detach(), step(again).detach()));
  }
}

TEST_P(GroupedLinearRecipes, WritesIntoTensorsOfTheCaller) {
  const at::ScalarType dtype = std::get<1>(GetParam());
  GroupedLinearOptions later = options();
  later.delay_wgrad_compute = true;
  for (const GroupedLinearOptions& each : {options(), later}) {
    GroupedLinear plain = experts(each, dtype), writing = experts(each, dtype);
    const at::Tensor x = leaf({kRows, kIn}, dtype), other = leaf({kRows, kIn}, dtype);
    const double nan = std::numeric_limits<double>::quiet_NaN();
    const at::Tensor out = at::full({kRows, kOut}, nan, dtype),
                     dgrad_out = at::full({kRows, kIn}, nan, dtype);
    const at::Tensor expected = in_region([&] { return plain->forward(x, kSplits); });
    const at::Tensor y = in_region(
        [&] { return writing->forward(other, kSplits, {.out = out, .dgrad_out = dgrad_out}); });
    EXPECT_EQ(y.const_data_ptr(), out.const_data_ptr());
    EXPECT_TRUE(same(out, expected.detach()));
    for (const at::Tensor& result : {expected, y}) result.square().sum().backward();
    EXPECT_TRUE(same(dgrad_out, x.grad()));
    EXPECT_EQ(plain->saved_bytes(), writing->saved_bytes());
    if (each.delay_wgrad_compute) {
      plain->backward_dw();
      writing->backward_dw();
    }
    for (const auto& param : plain->named_parameters())
      EXPECT_TRUE(same(writing->named_parameters()[param.key()].grad(), param.value().grad()));
    // The same module without, and with the output alone.
    for (const GroupedLinearCall& arguments : {GroupedLinearCall{}, GroupedLinearCall{.out = out}})
      EXPECT_TRUE(same(in_region([&] { return writing->forward(x, kSplits, arguments); }).detach(),
                       in_region([&] { return plain->forward(x, kSplits); }).detach()));
  }
}

/// Writes past the version of a tensor: its bytes tell, unless a caller says that nobody has.
void write_unseen(const at::Tensor& tensor, const at::Tensor& values) {
  std::copy_n(values.const_data_ptr<float>(), values.numel(),
              static_cast<float*>(tensor.unsafeGetTensorImpl()->mutable_data()));
}

TEST(GroupedLinear, CodesOfItsWeightsServeMicroBatches) {
  GroupedLinear module = experts(), other = experts();
  const at::Tensor x = random({kRows, kIn}), values = random({kOut, kIn}, at::kFloat, 40);
  const auto step = [&](GroupedLinear& each, std::optional<bool> is_first) {
    const Autocast region(true, MXFP8BlockScaling());
    return each->forward(x, kSplits, {.is_first_microbatch = is_first}).detach();
  };
  const at::Tensor first = step(module, true);
  write_unseen(module->parameters()[0], values);
  write_unseen(other->parameters()[0], values);
  EXPECT_TRUE(same(step(module, false), first)) << "it is believed";
  EXPECT_FALSE(same(step(module, true), first));
  EXPECT_TRUE(same(step(module, true), step(other, std::nullopt)));
  write_unseen(module->parameters()[2], values);
  EXPECT_FALSE(same(step(module, std::nullopt), step(other, std::nullopt)))
      << "nothing is said any more";
}

TEST(Microbatch, IsSaidOfAllModulesThatAreCalledWhileItLives) {
  Linear module = randomized(Linear(kIn, kOut));
  const at::Tensor x = random({kRows, kIn});
  const auto step = [&] {
    const Autocast region(true, MXFP8BlockScaling());
    return module->forward(x).detach();
  };
  const at::Tensor first = step();
  write_unseen(module->parameters()[0], random({kOut, kIn}, at::kFloat, 40));
  {
    const Microbatch later(/*is_first=*/false);
    EXPECT_TRUE(same(step(), first));
    const Microbatch next(/*is_first=*/true);
    EXPECT_FALSE(same(step(), first));
  }
  write_unseen(module->parameters()[0], random({kOut, kIn}, at::kFloat, 41));
  const at::Tensor third = step();
  module = randomized(Linear(kIn, kOut));
  write_unseen(module->parameters()[0], random({kOut, kIn}, at::kFloat, 41));
  EXPECT_TRUE(same(step(), third));
}

TEST(GroupedLinear, WeightsHaveWorkspacesOfTheirOwn) {
  GroupedLinear module = experts();
  const at::Tensor x = random({kRows, kIn});
  const auto plans = [&] {
    const Autocast region(true, MXFP8BlockScaling());
    module->forward(x, kSplits).sum().backward();
    return module->explain();
  };
  plans();
  {
    const c10::AutoGradMode no_grad(false);
    module->named_parameters()["weight1"].mul_(2);
  }
  const std::string text = plans();
  for (const char* found : {"weight[0]", "weight[2]"})
    EXPECT_THAT(text, HasSubstr(std::string(found) + " in mxfp8_e4m3: found in forward"));
  EXPECT_THAT(text, HasSubstr("weight[1] in mxfp8_e4m3: made in forward (its version changed)"));
}

TEST(GroupedLinear, ReturnsItsBiases) {
  for (const bool is_packed : {false, true}) {
    GroupedLinear module = experts({.return_bias = true, .single_grouped_bias = is_packed});
    const at::Tensor x = random({kRows, kIn});
    const GroupedLinearOutputs all = module->forward_all(x, kSplits);
    GroupedLinear without = experts({.bias = false});
    EXPECT_TRUE(same(all.y.detach(), without->forward(x, kSplits).detach()));
    ASSERT_EQ(all.biases.size(), is_packed ? size_t{1} : kGroups);
    const auto p = module->named_parameters();
    EXPECT_TRUE(same(all.biases[0].detach(), p[is_packed ? "bias" : "bias0"].detach()));
    (all.y.sum() + all.biases.back().sum()).backward();
    EXPECT_TRUE(p[is_packed ? "bias" : "bias2"].grad().defined());
    EXPECT_ERROR(module->forward(x, kSplits), c10::ValueError,
                 "GroupedLinear: expected one output, got return_bias. Call forward_all(x, "
                 "m_splits), which returns all of them.");
    module->to(at::kBFloat16);
    EXPECT_EQ(module->forward_all(x.to(at::kBFloat16), kSplits).biases[0].scalar_type(),
              at::kBFloat16);
  }
  EXPECT_TRUE(experts()->forward_all(random({kRows, kIn}), kSplits).biases.empty());
}

TEST(GroupedLinear, RowsAreCountedByListsAndTensors) {
  GroupedLinear module = experts();
  const at::Tensor x = random({3, 23, kIn});
  const at::Tensor y = module->forward(x, kSplits);
  EXPECT_EQ(y.sizes(), (std::vector<int64_t>{3, 23, kOut}));
  EXPECT_TRUE(same(module->forward(x, {33, 0, 32}).detach(), y.detach()));
  EXPECT_TRUE(same(module->forward(x, at::tensor(kSplits, at::kInt)).detach(), y.detach()));
}

TEST(GroupedLinear, OverRanksHoldsItsShare) {
  using Mode = TensorParallel::Mode;
  const auto shape = [](Mode mode) {
    return GroupedLinear(2, 8, 6, {.bias = false, .tensor_parallel = {mode, "0", 2}})
        ->parameters()[1]
        .sizes()
        .vec();
  };
  EXPECT_EQ(shape(Mode::column), (std::vector<int64_t>{3, 8}));
  EXPECT_EQ(shape(Mode::row), (std::vector<int64_t>{6, 4}));
  EXPECT_EQ(shape(Mode::none), (std::vector<int64_t>{6, 8}));
  EXPECT_ERROR(GroupedLinear(2, 8, 6, {.tensor_parallel = {TensorParallel::Mode::column, "0", 2}}),
               c10::ValueError,
               "grouped_linear: expected bias=false where 2 ranks share the weights, got true. Add "
               "biases behind what ranks exchange.");
  EXPECT_ERROR(
      GroupedLinear(2, 8, 5,
                    {.bias = false, .tensor_parallel = {TensorParallel::Mode::column, "0", 2}}),
      c10::ValueError,
      "grouped_linear: expected out_features that 2 ranks share evenly, got 5. Use a multiple of "
      "2.");
}

TEST(GroupedLinearErrors, TellWhatIsExpected) {
  EXPECT_ERROR(GroupedLinear(0, 8, 8), c10::ValueError,
               "grouped_linear: expected num_gemms > 0, got 0. Give the number of weights.");
  EXPECT_ERROR(GroupedLinear(2, 0, 8), c10::ValueError,
               "grouped_linear: expected in_features > 0, got 0");
  EXPECT_ERROR(GroupedLinear(2, 4, 4, {.main_grads = {{"weight", at::zeros({4, 4})}}}),
               c10::ValueError,
               "grouped_linear: expected one of the parameters [weight0, weight1, bias0, bias1], "
               "got \"weight\". Name one of them.");
  GroupedLinear module = experts();
  EXPECT_ERROR(module->forward(random({4, kIn}), {3, 2, 1}), c10::ValueError,
               "grouped_linear: expected splits ");
  EXPECT_ERROR(module->forward(random({kRows, kIn}), kSplits, {.out = at::zeros({kRows, kIn})}),
               c10::ValueError,
               "grouped_linear: expected a contiguous tensor without a gradient as output");
  GroupedLinear more(kGroups + 1, kIn, kOut, GroupedLinearOptions{.single_grouped_weight = true});
  EXPECT_ERROR(save_and_load(more, module), c10::ValueError,
               "GroupedLinear: expected weight of 3 groups in the archive, got one of shape [4, "
               "48, 64]. Build the module for these.");
}

}  // namespace
}  // namespace tandem::testing::front_grouped_linear
