#include "support/plans.h"

#include <c10/core/GradMode.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <set>

#include "autograd/call.h"
#include "planner/planner.h"
#include "planner/program.h"
#include "planner/registry.h"
#include "support/tensors.h"

namespace tandem::testing {

using nlohmann::json;

std::string to_channel(const std::string& channel) {
  return R"(make_extra_output {"extra_outputs": [{"channel": ")" + channel +
         R"(", "to_caller": false}]})";
}

std::string from_channel(const std::string& channel) {
  return R"(add_extra_input {"extra_inputs": [{"channel": ")" + channel + R"("}]})";
}

std::string ops_json(const Ops& ops) {
  json list = json::array();
  int next = 0;
  for (const std::string& text : ops) {
    const size_t space = text.find(' ');
    json op = space == std::string::npos ? json::object() : json::parse(text.substr(space));
    op["op"] = text.substr(0, space);
    if (!op.contains("params")) {
      op["params"] = json::array();
      for (size_t p = 0; p < op_def(text.substr(0, space)).params.size(); ++p)
        op["params"].push_back(next++);
    }
    list.push_back(std::move(op));
  }
  return list.dump();
}

std::string description_of(const Ops& ops, const std::string& fields) {
  json description = json::parse(fields);
  description["ops"] = json::parse(ops_json(ops));
  return description.dump();
}

Planned::Planned(const Ops& ops, Tensors inputs, Tensors params, const std::string& fields,
                 PlanKey::Call call)
    : description_(parse_description(description_of(ops, fields))) {
  PlanKey key(call, inputs.size());
  for (const Tensors* list : {&inputs, &params})
    for (const at::Tensor& tensor : *list) key.add(tensor, call.grad_mode);
  plan_ = make_plan(*description_, key, user_fusions());
}

std::string Planned::name(Value value) const {
  if (index_of(value) >= plan_->types.size()) return "?";
  return plan_->types[index_of(value)].name;
}

std::string Planned::text_of(const Steps& steps) const {
  std::string text;
  const auto list = [&](const Values& values) {
    std::string names;
    for (const Value value : values)
      if (exists(value)) names += (names.empty() ? "" : ", ") + name(value);
    return names;
  };
  for (const Step& step : steps)
    text += step.name + ": " + list(step.reads) + " -> " + list(step.writes) + "\n";
  return text;
}

std::string Planned::forward() const { return text_of(plan_->forward); }
std::string Planned::backward() const {
  return plan_->needs_backward ? text_of(full_backward(*plan_)->steps) : "";
}
std::string Planned::backward(const BackwardMask& mask) const {
  return text_of(backward_plan(*plan_, mask)->steps);
}

std::vector<std::string> Planned::kept() const {
  std::vector<std::string> names;
  for (const Value value : plan_->kept) names.push_back(name(value));
  return names;
}

std::vector<std::string> Planned::outputs() const {
  std::vector<std::string> names;
  for (const Value value : plan_->outputs) names.push_back(name(value));
  return names;
}

std::vector<std::string> Planned::decisions() const {
  std::vector<std::string> texts;
  const auto collect = [&](const std::vector<Decision>& decisions) {
    for (const Decision& decision : decisions)
      texts.push_back(decision.fusion + " at " + decision.place + ": " +
                      (decision.reason.empty() ? "made" : decision.reason));
  };
  collect(plan_->decisions);
  if (plan_->needs_backward) collect(full_backward(*plan_)->decisions);
  return texts;
}

RunResult run(const Ops& ops, const Tensors& inputs, const Tensors& params,
              const std::string& fields, Path path) {
  seed_torch(5);
  const Arguments arguments{inputs, params, {}};
  const auto program = program_of(description_of(ops, fields));
  const auto& plan =
      program->plan_for(key_for(*program, arguments, /*traced=*/path != Path::direct));
  const Outputs outputs = run_pipeline(plan, arguments, path);
  RunResult result;
  result.saved_bytes = note_kept_bytes(outputs, {});
  Tensors differentiable, grads, requested;
  uint64_t seed = 50;
  for (const at::Tensor& output : outputs) {
    result.outputs.push_back(output.detach());
    if (!output.requires_grad()) continue;
    differentiable.push_back(output);
    grads.push_back(random(output.sizes(), output.scalar_type(), ++seed));
  }
  for (const Tensors* list : {&inputs, &params})
    for (const at::Tensor& tensor : *list)
      if (tensor.requires_grad()) requested.push_back(tensor);
  if (differentiable.empty() || requested.empty()) return result;
  const auto gradients = gradients_of(differentiable, requested, grads);
  size_t next = 0;
  for (const Tensors* list : {&inputs, &params})
    for (const at::Tensor& tensor : *list)
      result.gradients.push_back(tensor.requires_grad() ? gradients[next++] : at::Tensor());
  return result;
}

namespace {

std::string unfused(const std::string& fields) {
  json parsed = json::parse(fields);
  parsed["fuse"] = false;
  return parsed.dump();
}

}  // namespace

std::string fields_without(const std::string& text, const Ops& ops, const Tensors& inputs,
                           const Tensors& params, const std::string& fields) {
  json parsed = json::parse(fields);
  std::set<std::string> skipped;
  while (true) {
    const size_t before = skipped.size();
    for (const std::string& decision : Planned(ops, inputs, params, parsed.dump()).decisions())
      if (const std::string name = decision.substr(0, decision.find(" at "));
          decision.ends_with(": made") && name.find(text) != std::string::npos)
        skipped.insert(name);
    if (skipped.size() == before) return parsed.dump();
    parsed["skipped_fusions"] = skipped;
  }
}

::testing::AssertionResult has_bits_without(const std::string& text, const Ops& ops,
                                            const Tensors& inputs, const Tensors& params,
                                            const std::string& fields) {
  const RunResult got = run(ops, inputs, params, fields),
                  expected =
                      run(ops, inputs, params, fields_without(text, ops, inputs, params, fields));
  for (size_t i = 0; i < got.outputs.size(); ++i)
    if (auto output = same(got.outputs[i], expected.outputs[i]); !output)
      return output << " in output " << i << " of " << fields;
  for (size_t i = 0; i < got.gradients.size(); ++i) {
    if (got.gradients[i].defined() != expected.gradients[i].defined())
      return ::testing::AssertionFailure() << "one has gradient " << i << ", of " << fields;
    if (!got.gradients[i].defined()) continue;
    if (auto gradient = same(got.gradients[i], expected.gradients[i]); !gradient)
      return gradient << " in gradient " << i << " of " << fields;
  }
  return ::testing::AssertionSuccess();
}

::testing::AssertionResult fused_equals_unfused(const Ops& ops, const Tensors& inputs,
                                                const Tensors& params, const std::string& fields) {
  const RunResult unfused = run(ops, inputs, params, testing::unfused(fields));
  for (const Path path : {Path::direct, Path::dispatch}) {
    const RunResult fused = run(ops, inputs, params, fields, path);
    const char* const how = path == Path::direct ? "" : " through the dispatcher";
    if (auto outputs = near(fused.outputs, unfused.outputs); !outputs)
      return ::testing::AssertionFailure() << "outputs" << how << ": " << outputs.message();
    if (auto gradients = near(fused.gradients, unfused.gradients); !gradients)
      return ::testing::AssertionFailure() << "gradients" << how << ": " << gradients.message();
    if (path == Path::direct && fused.saved_bytes != unfused.saved_bytes)
      return ::testing::AssertionFailure()
             << "saved bytes: expected " << unfused.saved_bytes << ", got " << fused.saved_bytes;
  }
  return ::testing::AssertionSuccess();
}

std::function<Tensors(const Tensors&)> function_of(const Ops& ops, size_t inputs,
                                                   const std::string& fields) {
  return [=, program = program_of(description_of(ops, fields))](const Tensors& tensors) {
    const at::TensorList all(tensors);
    const Arguments arguments{all.slice(0, inputs), all.slice(inputs), {}};
    const auto& plan = program->plan_for(key_for(*program, arguments, /*traced=*/false));
    seed_torch(5);
    const Outputs outputs = run_pipeline(plan, arguments, Path::direct);
    return Tensors(outputs.begin(), outputs.end());
  };
}

}  // namespace tandem::testing
