// Several threads at once: what each computes is, bit for bit, what it computes alone. Under
// ThreadSanitizer also the proof that Tandem's own memory is never written by one thread while
// another uses it.
#include <ATen/TensorOperators.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/relu.h>
#include <gmock/gmock.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function.h>

#include <atomic>
#include <deque>
#include <latch>
#include <mutex>
#include <nlohmann/json.hpp>
#include <thread>

#include "autograd/call.h"
#include "core/call.h"
#include "kernel_ops/framework/memory.h"
#include "pipeline/pipeline.h"
#include "planner/program.h"
#include "planner/registry.h"
#include "support/memory.h"
#include "support/plans.h"
#include "support/tensors.h"
#include "support/throws.h"
#include "tandem/tandem.h"
#include "threads/together.h"

namespace tandem::testing::threads_threads {
namespace {

constexpr size_t kThreads = 4;
constexpr int kRounds = 8;
constexpr int64_t kHidden = 32;

/// A factor that no description has had: the first calls with it plan.
double new_factor() {
  static std::atomic<int> count{1000};
  return ++count;
}

Sequential mlp(double factor = 1) {
  return Sequential({ops::rms_norm(kHidden), ops::linear(kHidden, 96), ops::swiglu(),
                     ops::constant_scale(factor), ops::linear(48, kHidden)});
}

at::Tensor input(size_t t, int64_t rows = 16) {
  return random({rows, kHidden}, at::kFloat, 100 + t);
}

/// Outputs and gradients of one call; `requested` are the model's parameters.
Tensors step(Sequential& model, const at::Tensor& x, Tensors requested) {
  requested.push_back(x.detach().requires_grad_());
  Tensors results{model->forward(requested.back())};
  const auto gradients =
      torch::autograd::grad({results[0]}, requested, {at::ones_like(results[0])});
  results[0] = results[0].detach();
  results.insert(results.end(), gradients.begin(), gradients.end());
  return results;
}

Tensors step(Sequential& model, const at::Tensor& x) { return step(model, x, model->parameters()); }

::testing::AssertionResult all_same(const Tensors& got, const Tensors& expected) {
  if (got.size() != expected.size())
    return ::testing::AssertionFailure()
           << "expected " << expected.size() << " tensors, got " << got.size();
  for (size_t i = 0; i < got.size(); ++i)
    if (auto result = same(got[i], expected[i]); !result)
      return ::testing::AssertionFailure() << "tensor " << i << ": " << result.message();
  return ::testing::AssertionSuccess();
}

/// What `body(t)` gives in every round on several threads is what it gives alone, afterwards.
template <typename Body>
void expect_as_alone(Body&& body, int rounds = kRounds) {
  std::vector<std::vector<Tensors>> found(kThreads);
  together(kThreads, [&](size_t t) {
    for (int round = 0; round < rounds; ++round) found[t].push_back(body(t));
  });
  for (size_t t = 0; t < kThreads; ++t) {
    const Tensors alone = body(t);
    for (const Tensors& results : found[t]) EXPECT_TRUE(all_same(results, alone)) << "thread " << t;
  }
}

// ---- calls ----

TEST(Threads, CallOnePipeline) {
  Sequential model = mlp();
  expect_as_alone([&](size_t t) { return step(model, input(t)); });
}

TEST(Threads, CallPipelinesOfTheSameOps) {
  std::vector<Sequential> models;
  for (size_t t = 0; t < kThreads; ++t) models.push_back(mlp(2));
  expect_as_alone([&](size_t t) { return step(models[t], input(t)); });
}

TEST(Threads, MakeAndCallPipelines) {
  const Tensors params{random({kHidden}), random({96, kHidden}), random({kHidden, 48})};
  expect_as_alone([&](size_t t) {
    Pipeline pipeline(ops_json({"rms_norm", "basic_linear", "swiglu", "basic_linear"}));
    return Tensors{pipeline(Tensors{input(t)}, params, true)[0]};
  });
}

TEST(Threads, MakeOnePlanForTheSameFirstCall) {
  for (int round = 0; round < kRounds; ++round) {
    Sequential model = mlp(new_factor());
    const at::Tensor x = input(0);
    const int64_t before = Program::plans_made();
    std::vector<Tensors> found(kThreads);
    together(kThreads, [&](size_t t) { found[t] = step(model, x); });
    EXPECT_EQ(Program::plans_made(), before + 1);
    for (const Tensors& results : found) EXPECT_TRUE(all_same(results, found[0]));
    EXPECT_TRUE(all_same(step(model, x), found[0]));
  }
}

TEST(Threads, PlanForDifferentKeysAtOnce) {
  for (int round = 0; round < kRounds; ++round) {
    Sequential model = mlp(new_factor());
    std::vector<Tensors> found(kThreads);
    const auto call = [&](size_t t) {
      const c10::AutoGradMode mode(t % 2 == 0);
      const at::Tensor x = input(t).set_requires_grad(t >= 2);
      return Tensors{model->forward(x).detach()};
    };
    together(kThreads, [&](size_t t) { found[t] = call(t); });
    for (size_t t = 0; t < kThreads; ++t) EXPECT_TRUE(all_same(found[t], call(t))) << t;
  }
}

TEST(Threads, CallThroughTheDispatcher) {
  const Pipeline pipeline(ops_json({"rms_norm", "basic_linear", "swiglu"}));
  const Tensors params{leaf({kHidden}), leaf({96, kHidden})};
  expect_as_alone([&](size_t t) {
    const Tensors inputs{input(t).requires_grad_()};
    const Outputs outputs = call_op({inputs, params, {}}, pipeline.description(true));
    const Tensors grad{at::ones_like(outputs[0])};
    Tensors results = gradients_of(outputs, {inputs[0], params[0], params[1]}, grad);
    results.push_back(outputs[0].detach());
    return results;
  });
}

TEST(Threads, DrawSeedsOfTheirOwn) {
  Sequential model({ops::dropout({.p = 0.5})});
  const at::Tensor x = at::ones_like(input(0));
  std::vector<std::vector<at::Tensor>> drawn(kThreads);
  together(kThreads, [&](size_t t) {
    for (int round = 0; round < kRounds; ++round) drawn[t].push_back(model->forward(x));
  });
  Tensors all;
  for (const auto& of_thread : drawn) all.insert(all.end(), of_thread.begin(), of_thread.end());
  for (size_t i = 0; i < all.size(); ++i) {
    EXPECT_TRUE((all[i] == 0).bitwise_or(all[i] == 2).all().item<bool>());
    for (size_t j = 0; j < i; ++j) EXPECT_FALSE(all[i].equal(all[j])) << i << " and " << j;
  }
}

TEST(Threads, ReadWhatIsToldWhileOthersCall) {
  Sequential model = mlp(0.5);
  const at::Tensor x = input(0);
  const Tensors alone = step(model, x);
  std::atomic<size_t> calling{kThreads - 2};
  std::vector<std::string> told;
  std::vector<int64_t> bytes;
  std::vector<Tensors> found;
  std::mutex mutex;
  together(kThreads, [&](size_t t) {
    if (t == 0) {
      while (calling != 0) told.push_back(model->explain(ExplainFormat::json));
      return;
    }
    if (t == 1) {
      while (calling != 0) bytes.push_back(model->saved_bytes());
      return;
    }
    for (int round = 0; round < kRounds; ++round) {
      Tensors results = step(model, x);
      const std::lock_guard<std::mutex> lock(mutex);
      found.push_back(std::move(results));
    }
    --calling;
  });
  for (const Tensors& results : found) EXPECT_TRUE(all_same(results, alone));
  for (const std::string& text : told) EXPECT_TRUE(nlohmann::json::accept(text));
  EXPECT_THAT(bytes, ::testing::Each(model->saved_bytes()));
  EXPECT_GT(model->saved_bytes(), 0);
}

TEST(Threads, VerifyWhileOthersCall) {
  Sequential model = mlp(0.25);
  std::atomic<bool> passed{true};
  expect_as_alone(
      [&](size_t t) {
        const at::Tensor x = input(t);
        if (t == 0 && !model->verify(x).passed) passed = false;
        return step(model, x);
      },
      /*rounds=*/2);
  EXPECT_TRUE(passed);
}

// ---- backward ----

TEST(Threads, BackwardOnOtherThreadsThanForward) {
  Sequential model = mlp();
  Tensors xs, ys;
  std::vector<Tensors> alone(kThreads), found(kThreads);
  for (size_t t = 0; t < kThreads; ++t) {
    alone[t] = step(model, input(t));
    xs.push_back(input(t).requires_grad_());
    ys.push_back(model->forward(xs[t]));
  }
  together(kThreads, [&](size_t t) {
    Tensors requested = model->parameters();
    requested.push_back(xs[t]);
    found[t] = torch::autograd::grad({ys[t]}, requested, {at::ones_like(ys[t])});
  });
  for (size_t t = 0; t < kThreads; ++t) {
    alone[t].erase(alone[t].begin());
    EXPECT_TRUE(all_same(found[t], alone[t])) << t;
  }
}

TEST(Threads, SeveralBackwardsOfOneGraph) {
  Sequential model = mlp();
  const at::Tensor x = input(0).requires_grad_(), y = model->forward(x);
  // Each asks for another set of gradients: backward programs are made at once, too.
  const auto gradients = [&](size_t t) {
    Tensors requested = model->parameters();
    requested.resize(requested.size() - t);
    requested.push_back(x);
    return torch::autograd::grad({y}, requested, {at::ones_like(y)}, /*retain_graph=*/true);
  };
  expect_as_alone(gradients);
}

TEST(Threads, AccumulateIntoSharedLeaves) {
  Sequential model = mlp();
  const at::Tensor x = input(0);
  const Tensors once = step(model, x);
  together(kThreads, [&](size_t) {
    for (int round = 0; round < kRounds; ++round) model->forward(x).sum().backward();
  });
  const Tensors parameters = model->parameters();
  for (size_t p = 0; p < parameters.size(); ++p) {
    at::Tensor sum = once[p + 1].clone();
    for (size_t i = 1; i < kThreads * kRounds; ++i) sum += once[p + 1];
    EXPECT_TRUE(same(parameters[p].grad(), sum)) << p << ": equal terms, in whatever order";
  }
}

TEST(Threads, OneFreesTheGraphThatOthersDifferentiate) {
  Sequential model = mlp();
  const at::Tensor x = input(0).requires_grad_();
  const Tensors alone = step(model, input(0));
  for (int round = 0; round < kRounds; ++round) {
    const at::Tensor y = model->forward(x);
    Tensors found(kThreads);
    together(kThreads, [&](size_t t) {
      try {
        found[t] = torch::autograd::grad({y}, {x}, {at::ones_like(y)}, /*retain_graph=*/t != 0)[0];
      } catch (const c10::Error& error) {  // freed before
        EXPECT_THAT(
            error.msg(),
            ::testing::AnyOf(::testing::HasSubstr("a graph that still holds its saved tensors"),
                             ::testing::HasSubstr("backward through the graph a second time")));
      }
    });
    EXPECT_TRUE(found[0].defined());
    for (const at::Tensor& gradient : found) {
      if (gradient.defined()) {
        EXPECT_TRUE(same(gradient, alone.back()));
      }
    }
  }
}

TEST(Threads, ComeToAGraphThatAnotherHasFreed) {
  Sequential model = mlp();
  const at::Tensor x = input(0).requires_grad_(), y = model->forward(x);
  const auto node = y.grad_fn();
  // It says when, but orders nothing: what one has written is the other's by the node's lock alone.
  std::atomic<bool> is_freed{false};
  together(2, [&](size_t t) {
    if (t == 0) {
      node->release_variables();
      is_freed.store(true, std::memory_order_relaxed);
      return;
    }
    while (!is_freed.load(std::memory_order_relaxed)) std::this_thread::yield();
    EXPECT_ERROR(torch::autograd::grad({y}, {x}, {at::ones_like(y)}), c10::Error,
                 "a graph that still holds its saved tensors");
  });
}

// ---- regions and the codes of weights ----

TEST(Threads, EnterRegionsOfTheirOwn) {
  Sequential model = mlp();
  expect_as_alone([&](size_t t) {
    const Autocast region(t != 3, Float8CurrentScaling{.use_power_2_scales = t == 2});
    Tensors results = step(model, input(t));
    {
      const Autocast off(false);
      results.push_back(model->forward(input(t)).detach());
    }
    const Autocast other(true, Float8CurrentScaling{.fp8_format = RecipeFormat::e4m3});
    const Tensors inner = step(model, input(t));
    results.insert(results.end(), inner.begin(), inner.end());
    return results;
  });
}

TEST(Threads, UseMoreRecipesThanAPipelineKeeps) {
  Sequential model = mlp();
  expect_as_alone([&](size_t t) {
    Tensors all;
    for (size_t i = 0; i < 8; ++i) {
      const Autocast region(
          true, Float8CurrentScaling{.amax_epsilon_input = static_cast<double>(8 * t + i)});
      for (const at::Tensor& tensor : step(model, input(t))) all.push_back(tensor);
    }
    return all;
  });
}

TEST(Threads, AskForMoreGradientsThanAPlanKeeps) {
  Sequential model = mlp();
  const at::Tensor x = input(0).requires_grad_(), y = model->forward(x);
  Tensors all = model->parameters();
  all.push_back(x);
  const Tensors alone = torch::autograd::grad({y}, all, {at::ones_like(y)}, /*retain_graph=*/true);
  ASSERT_GE(all.size(), 4u);
  together(kThreads, [&](size_t t) {
    for (size_t which = 1; which < size_t{1} << all.size(); ++which) {
      const size_t mask = (which + 7 * t) % (size_t{1} << all.size());
      Tensors requested, expected;
      for (size_t i = 0; i < all.size(); ++i)
        if ((mask >> i & 1) != 0) {
          requested.push_back(all[i]);
          expected.push_back(alone[i]);
        }
      if (requested.empty()) continue;
      EXPECT_TRUE(
          all_same(torch::autograd::grad({y}, requested, {at::ones_like(y)}, /*retain_graph=*/true),
                   expected));
    }
  });
}

TEST(Threads, StayInOneRegionEach) {
  Sequential model = mlp();
  std::vector<std::vector<Tensors>> found(kThreads);
  together(kThreads, [&](size_t t) {
    const Autocast region;
    for (int round = 0; round < kRounds; ++round) found[t].push_back(step(model, input(t)));
  });
  const Autocast region;
  for (size_t t = 0; t < kThreads; ++t)
    for (const Tensors& results : found[t])
      EXPECT_TRUE(all_same(results, step(model, input(t)))) << t;
}

TEST(Threads, BackwardOutsideTheRegionOfForward) {
  Sequential model = mlp();
  expect_as_alone([&](size_t t) {
    Tensors requested = model->parameters();
    requested.push_back(input(t).requires_grad_());
    at::Tensor y;
    {
      const Autocast region;
      y = model->forward(requested.back());
    }
    return torch::autograd::grad({y}, requested, {at::ones_like(y)});
  });
}

TEST(Threads, MakeTheStateOfARecipeOnce) {
  for (int round = 0; round < kRounds; ++round) {
    Sequential model = mlp();
    const Tensors parameters = model->parameters();  // the first call adds modules, which they walk
    together(kThreads, [&](size_t t) {
      const Autocast region(true, DelayedScaling{.amax_history_len = 2 * kThreads});
      step(model, input(t), parameters);
    });
    const auto buffers = model->named_buffers();
    EXPECT_EQ(buffers.size(), 8u) << "scale and amax_history, both ways, of two products";
    for (const char* linear : {"1", "4"}) {
      const std::string state = std::string(linear) + ".recipe_state.forward.";
      const at::Tensor weight = model->named_parameters()[std::string(linear) + ".weight"];
      const at::Tensor amaxes = buffers[state + "amax_history"].select(/*dim=*/1, /*index=*/1);
      EXPECT_EQ(amaxes.max().item<float>(), weight.abs().max().item<float>());
      EXPECT_GT(buffers[state + "scale"].min().item<float>(), 1);
    }
  }
}

TEST(Threads, PassWeightsOfTheirOwnToOnePipeline) {
  Pipeline pipeline(ops_json({"basic_linear", "gelu", "basic_linear"}));
  std::vector<Tensors> params;
  for (size_t t = 0; t < kThreads; ++t)
    params.push_back({leaf({64, kHidden}, at::kFloat, 10 + t), leaf({8, 64}, at::kFloat, 20 + t)});
  expect_as_alone(
      [&](size_t t) {
        const Autocast region;
        const Tensors inputs{input(t)};
        const Outputs outputs = pipeline(inputs, params[t], true);
        const Tensors grad{at::ones_like(outputs[0])};
        Tensors results = gradients_of(outputs, params[t], grad);
        results.push_back(outputs[0].detach());
        return results;
      },
      4 * kRounds);
}

TEST(Threads, EndRegionsOfOtherThreads) {
  Sequential model = mlp();
  const at::Tensor x = input(0), plain = model->forward(x).detach();
  for (int round = 0; round < kRounds; ++round) {
    std::unique_ptr<Autocast> region;
    std::latch entered(1), left(1);
    at::Tensor inside, behind;
    together(2, [&](size_t t) {
      if (t == 0) {
        region = std::make_unique<Autocast>();
        inside = model->forward(x).detach();
        entered.count_down();
        left.wait();
        behind = model->forward(x).detach();
      } else {
        entered.wait();
        region.reset();
        left.count_down();
      }
    });
    EXPECT_FALSE(same(inside, plain));
    EXPECT_TRUE(same(behind, plain));
  }
}

TEST(Threads, TellOfChangedWeightsWhileOthersCall) {
  Sequential model = mlp();
  expect_as_alone([&](size_t t) {
    if (t == 0) weights_changed();
    const Autocast region;
    Tensors results = step(model, input(t));
    if (t == 0) weights_changed();
    const Tensors again = step(model, input(t));
    results.insert(results.end(), again.begin(), again.end());
    return results;
  });
}

// ---- registration ----

std::atomic<int> fused_runs{0};

/// max(x, 0) * 2 is exact: fused or not, the bits are the same.
Fusion relu_twice(int round) {
  return {.name = "test_relu_twice_" + std::to_string(round),
          .pattern = {"relu", "constant_scale"},
          .run = {.reads = {{0, "x"}}, .writes = {{1, "y"}}, .run = [](Call& call) {
                    ++fused_runs;
                    call.out(0, at::relu(call.in(0)) * 2);
                  }}};
}

TEST(Threads, RegisterFusionsWhileOthersPlan) {
  Sequential model({ops::relu(), ops::constant_scale(2), ops::gelu()});
  const at::Tensor alone = model->forward(input(0));
  std::atomic<bool> registering{true};
  std::vector<std::vector<at::Tensor>> found(kThreads);
  together(kThreads, [&](size_t t) {
    if (t != 0) {
      while (registering || found[t].empty()) {
        found[t].push_back(model->forward(input(0)));
        if (found[t].size() > 1000) found[t].resize(500);
      }
      return;
    }
    for (int round = 0; round < kRounds; ++round) {
      const FusionHandle handle = register_fusion(relu_twice(round), /*prepend=*/round % 2 == 0);
      const int before = fused_runs;
      found[t].push_back(model->forward(input(0)));
      EXPECT_GT(fused_runs, before) << "a fusion is there once register_fusion has returned";
    }
    registering = false;
  });
  for (const auto& of_thread : found)
    for (const at::Tensor& y : of_thread) EXPECT_TRUE(same(y, alone));
  const int before = fused_runs;
  EXPECT_TRUE(same(model->forward(input(0)), alone));
  EXPECT_EQ(fused_runs, before) << "the last one has been removed";
}

/// y = 2 x under a name of its own. Definitions and names outlive every plan.
const OpDef& twice() {
  static auto& mutex = *new std::mutex;
  static auto& names = *new std::deque<std::string>;
  static auto& definitions = *new std::deque<OpDef>;
  const std::lock_guard<std::mutex> lock(mutex);
  names.push_back("test_twice_" + std::to_string(names.size()));
  definitions.push_back({
      .name = names.back(),
      .formula = "y = 2 x",
      .forward = {{.name = "forward",
                   .reads = {"x"},
                   .writes = {"y"},
                   .run = [](Call& call) { call.out(0, call.in(0) * 2); }}},
      .backward = {{.name = "backward",
                    .reads = {"grad_y"},
                    .writes = {"grad_x"},
                    .run = [](Call& call) { call.out(0, call.in(0) * 2); }}},
  });
  return definitions.back();
}

TEST(Threads, RegisterOpsWhileOthersPlan) {
  std::vector<std::vector<Tensors>> found(kThreads);
  together(kThreads, [&](size_t t) {
    for (int round = 0; round < kRounds; ++round) {
      const OpDef& op = twice();
      register_op(op);
      EXPECT_ERROR(register_op(op), c10::ValueError, "op: expected a new name, got \"");
      EXPECT_ERROR(op_def("no such op"), c10::ValueError, "op: expected one of ", "test_twice_");
      EXPECT_THAT(op_names(), ::testing::Contains(op.name));
      Pipeline pipeline(ops_json({"relu", std::string(op.name), "gelu"}));
      const Tensors inputs{input(0).requires_grad_()};
      const Outputs outputs = pipeline(inputs, {}, true);
      const Tensors grad{at::ones_like(outputs[0])};
      found[t].push_back({outputs[0].detach(), gradients_of(outputs, inputs, grad)[0]});
    }
  });
  for (const auto& of_thread : found)
    for (const Tensors& results : of_thread) EXPECT_TRUE(all_same(results, found[0][0]));
}

// ---- memory ----

TEST(Threads, HaveMemoryOfTheirOwn) {
  const CachedMemory cached;
  std::atomic<size_t> wrong{0}, allocating{kThreads - 1};
  together(kThreads, [&](size_t t) {
    if (t == 0) {
      while (allocating != 0) {
        empty_cache();
        set_cache_limit(1 << 18);
        if (cached_bytes() > 1 << 18) ++wrong;
        set_cache_limit(int64_t{1} << 30);
      }
      return;
    }
    std::deque<at::Tensor> live;
    for (int64_t i = 0; i < 50 * kRounds; ++i) {
      // Three sizes: blocks go from one thread to another.
      at::Tensor tensor = kernel_ops::empty_cpu({(1 + i % 3) << 16}, at::kByte);
      uint8_t* data = tensor.mutable_data_ptr<uint8_t>();
      const auto mark = static_cast<uint8_t>(t * 64 + static_cast<size_t>(i) % 64);
      for (int64_t place = 0; place < tensor.numel(); place += 4096) data[place] = mark;
      live.push_back(std::move(tensor));
      if (live.size() <= 4) continue;
      const auto expected = static_cast<uint8_t>(t * 64 + static_cast<size_t>(i - 4) % 64);
      const uint8_t* oldest = live.front().const_data_ptr<uint8_t>();
      for (int64_t place = 0; place < live.front().numel(); place += 4096)
        if (oldest[place] != expected) ++wrong;
      live.pop_front();
    }
    --allocating;
  });
  EXPECT_EQ(wrong, 0u);
}

TEST(Threads, FreeWhatOthersAllocated) {
  const CachedMemory cached;
  Sequential model = mlp();
  constexpr int64_t kRows = 512;  // 64 KiB and more
  const at::Tensor alone = model->forward(input(0, kRows)).detach();
  std::vector<Tensors> outputs(kThreads);
  for (int round = 0; round < kRounds; ++round) {
    together(kThreads, [&](size_t t) {
      if (t % 2 == 0) empty_cache();
      outputs[t] = {model->forward(input(0, kRows))};
      if (t % 2 == 1) set_cache_limit((round % 2 + 1) << 18);
    });
    for (const Tensors& results : outputs) EXPECT_TRUE(same(results[0], alone));
    together(kThreads, [&](size_t t) { outputs[(t + 1) % kThreads].clear(); });
  }
}

}  // namespace
}  // namespace tandem::testing::threads_threads
