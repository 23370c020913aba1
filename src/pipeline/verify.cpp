#include "pipeline/verify.h"

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/randn_like.h>

#include <random>
#include <set>
#include <sstream>

#include "planner/planner.h"
#include "planner/program.h"

namespace tandem {

namespace {

struct Results {
  std::vector<at::Tensor> outputs, gradients;
};

/// Fresh leaves with the values and flags of the originals, so that nothing of the caller is touched.
std::vector<at::Tensor> leaves_of(at::TensorList tensors) {
  std::vector<at::Tensor> leaves;
  for (const at::Tensor& tensor : tensors)
    leaves.push_back(tensor.detach().clone().set_requires_grad(tensor.requires_grad()));
  return leaves;
}

Results run(const std::string& description, at::TensorList inputs, at::TensorList params,
            const at::Tensor& generator_state, uint64_t mask) {
  at::Generator generator = at::globalContext().defaultGenerator(at::kCPU);
  generator.set_state(generator_state);
  auto input_leaves = leaves_of(inputs), param_leaves = leaves_of(params);
  std::vector<at::Tensor> asked;
  size_t bit = 0;
  for (auto* leaves : {&input_leaves, &param_leaves})
    for (at::Tensor& leaf : *leaves) {
      if (!leaf.requires_grad()) continue;
      if ((mask >> (bit++ % 64) & 1) != 0) asked.push_back(leaf);
    }
  const Arguments arguments{input_leaves, param_leaves, {}};
  const auto& plan =
      program_of(description)
          ->plan_for(key_of(arguments, c10::GradMode::is_enabled(), /*traced=*/true));
  Outputs outputs = run_pipeline(plan, arguments, Path::direct);
  Results result;
  std::vector<at::Tensor> differentiable, grads;
  for (const at::Tensor& output : outputs) {
    result.outputs.push_back(output.detach());
    if (!output.requires_grad()) continue;
    differentiable.push_back(output);
    grads.push_back(at::randn_like(output.detach()));
  }
  if (!differentiable.empty() && !asked.empty())
    result.gradients = gradients_of(differentiable, asked, grads);
  return result;
}

double tolerance_of(at::ScalarType dtype, bool quantized) {
  const double unit = dtype == at::kDouble  ? 0x1p-52
                      : dtype == at::kFloat ? 0x1p-23
                      : dtype == at::kHalf  ? 0x1p-10
                                            : 0x1p-7;
  return quantized ? std::max(32 * unit, 0x1p-3) : 32 * unit;
}

/// Names of the fusions that a program's plans have made, whether or not its pipeline has run.
std::set<std::string> fusions_of(const Program& program) {
  std::set<std::string> names;
  for (const auto& plan : program.plans()) {
    std::vector<Decision> decisions = plan->decisions;
    if (plan->needs_backward) {
      const auto& backward = full_backward(*plan).decisions;
      decisions.insert(decisions.end(), backward.begin(), backward.end());
    }
    for (const Decision& decision : decisions)
      if (decision.reason.empty()) names.insert(decision.fusion);
  }
  return names;
}

/// Empty where the lists agree.
std::string difference(const std::vector<at::Tensor>& fused, const std::vector<at::Tensor>& unfused,
                       const char* what, bool quantized, int64_t& comparisons) {
  for (size_t i = 0; i < fused.size(); ++i) {
    ++comparisons;
    if (fused[i].defined() != unfused[i].defined())
      return std::string(what) + " " + std::to_string(i) + ": one is undefined";
    if (!fused[i].defined() || fused[i].numel() == 0) continue;
    const at::Tensor a = fused[i].to(at::kDouble), b = unfused[i].to(at::kDouble);
    const double largest = at::abs(b).max().item<double>(),
                 error = at::abs(a - b).max().item<double>();
    if (fused[i].scalar_type() != unfused[i].scalar_type() ||
        !(error <= tolerance_of(fused[i].scalar_type(), quantized) * std::max(largest, 1e-30)))
      return std::string(what) + " " + std::to_string(i) + ": expected a difference within " +
             std::to_string(tolerance_of(fused[i].scalar_type(), quantized)) +
             " of the largest element, got " + std::to_string(error / largest);
  }
  return "";
}

}  // namespace

VerifyReport verify(const Pipeline& pipeline, at::TensorList inputs, at::TensorList params,
                    bool training, int masks) {
  VerifyReport report;
  at::Generator generator = at::globalContext().defaultGenerator(at::kCPU);
  const at::Tensor state = generator.get_state();
  const std::string unfused = pipeline.description(training, /*fuse=*/false);
  const bool quantized = program_of(unfused)->description().recipe.has_value();
  const auto compare = [&](const std::string& fused, uint64_t mask) {
    const Results a = run(fused, inputs, params, state, mask),
                  b = run(unfused, inputs, params, state, mask);
    const std::string outputs =
        difference(a.outputs, b.outputs, "output", quantized, report.comparisons);
    return outputs.empty()
               ? difference(a.gradients, b.gradients, "gradient", quantized, report.comparisons)
               : outputs;
  };
  std::ostringstream text;
  std::mt19937_64 random(0);
  for (int m = 0; m <= masks && report.passed; ++m) {
    const uint64_t mask = m == 0 ? ~uint64_t{0} : random();
    const std::string found = compare(pipeline.description(training), mask);
    if (found.empty()) continue;
    report.passed = false;
    std::string culprit;
    for (const std::string& name : fusions_of(*program_of(pipeline.description(training))))
      if (culprit.empty() && compare(pipeline.description(training, true, {name}), mask).empty())
        culprit = name;
    text << "verify: fused and unfused differ in " << found << " (mask " << std::hex << mask
         << std::dec << "). "
         << (culprit.empty() ? "Leaving out one fusion does not mend it."
                             : "Without fusion \"" + culprit + "\" they agree.");
  }
  generator.set_state(state);
  if (report.passed)
    text << "verify: " << report.comparisons << " tensors of " << masks + 1
         << " backward masks agree, fused against unfused.";
  report.text = text.str();
  return report;
}

}  // namespace tandem
