#include "tandem/grouped_linear.h"

#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/serialize/input-archive.h>

#include "front/describe.h"
#include "front/parts.h"
#include "tandem/weights.h"

namespace tandem {

namespace {

/// Draws the weight of each group separately, so that a packed weight starts with the same values
/// as single ones.
Init each_group(const Init& init) {
  return [init](const at::Tensor& weights) {
    for (const at::Tensor& weight : weights.unbind(0)) init(weight);
  };
}

Op make_grouped_linear(int64_t num_gemms, int64_t in_features, int64_t out_features,
                       const GroupedLinearOptions& options) {
  using Mode = TensorParallel::Mode;
  const std::string name = "grouped_linear";
  const TensorParallel& parallel = options.tensor_parallel;
  const int64_t ranks = ops::collectives(name, parallel).size;
  TORCH_CHECK_VALUE(num_gemms > 0, name, ": expected num_gemms > 0, got ", num_gemms,
                    ". Give the number of weights.");
  TORCH_CHECK_VALUE(!options.bias || ranks == 1, name, ": expected bias=false where ", ranks,
                    " ranks share the weights, got true. Add biases behind what ranks exchange.");
  const int64_t in = ops::share(name, "in_features", in_features,
                                parallel.mode == Mode::row ? ranks : 1),
                out = ops::share(name, "out_features", out_features,
                                 parallel.mode == Mode::column ? ranks : 1);
  const auto groups = static_cast<size_t>(num_gemms);
  const auto op = [&](bool bias) {
    return ops::grouped_linear(in, out,
                               {.num_groups = groups,
                                .bias = bias,
                                .packed_weight = options.single_grouped_weight,
                                .packed_bias = options.single_grouped_bias});
  };
  Op made = op(options.bias && !options.return_bias);
  const size_t weights = options.single_grouped_weight ? 1 : groups;
  for (size_t place = 0; place < weights; ++place)
    made.parameters[place].init =
        options.single_grouped_weight ? each_group(options.init_method) : options.init_method;
  if (options.bias && options.return_bias) {
    const Op with_bias = op(true);
    made.parameters.insert(made.parameters.end(),
                           with_bias.parameters.begin() + static_cast<std::ptrdiff_t>(weights),
                           with_bias.parameters.end());
  }
  return ops::with_gradients(std::move(made), options);
}

}  // namespace

GroupSplits::GroupSplits(const std::vector<int64_t>& counted)
    : rows(at::tensor(counted, at::kLong)) {}

GroupedLinearImpl::GroupedLinearImpl(int64_t num_gemms, int64_t in_features, int64_t out_features,
                                     const GroupedLinearOptions& grouped_linear,
                                     const at::TensorOptions& options)
    : PipelineModule("GroupedLinear",
                     {make_grouped_linear(num_gemms, in_features, out_features, grouped_linear)},
                     Names::plain, options),
      num_gemms_(num_gemms),
      returns_bias_(grouped_linear.return_bias),
      biases_(ops::unread_parameters(op_of(*this))) {}

GroupedLinearOutputs GroupedLinearImpl::forward_all(const at::Tensor& x,
                                                    const GroupSplits& m_splits,
                                                    const GroupedLinearCall& call) {
  std::optional<Microbatch> said;
  if (call.is_first_microbatch) said.emplace(*call.is_first_microbatch);
  std::vector<Written> written;
  if (call.out.defined()) written.push_back({kWritesOutput, call.out});
  if (call.dgrad_out.defined()) written.push_back({kWritesGradInput, call.dgrad_out});
  GroupedLinearOutputs all{run(x, m_splits.rows, written)[0], {}};
  for (const at::Tensor& bias : biases_) all.biases.push_back(bias.to(all.y.scalar_type()));
  return all;
}

at::Tensor GroupedLinearImpl::forward(const at::Tensor& x, const GroupSplits& m_splits,
                                      const GroupedLinearCall& call) {
  TORCH_CHECK_VALUE(!returns_bias_, name(), ": expected one output, got return_bias. Call ",
                    "forward_all(x, m_splits), which returns all of them.");
  return forward_all(x, m_splits, call).y;
}

void GroupedLinearImpl::read_parameter(torch::serialize::InputArchive& archive,
                                       const std::string& parameter, at::Tensor& value) {
  const c10::AutoGradMode no_grad(false);
  const size_t digits = parameter.find_first_of("0123456789");
  if (at::Tensor own; archive.try_read(parameter, own)) {
    PipelineModule::read_parameter(archive, parameter, value);
  } else if (digits == std::string::npos) {
    std::vector<at::Tensor> groups(static_cast<size_t>(num_gemms_));
    for (size_t g = 0; g < groups.size(); ++g)
      archive.read(parameter + std::to_string(g), groups[g]);
    value.set_data(at::stack(groups));
  } else {
    at::Tensor all;
    archive.read(parameter.substr(0, digits), all);
    TORCH_CHECK_VALUE(all.dim() > 0 && all.size(0) == num_gemms_, name(), ": expected ",
                      parameter.substr(0, digits), " of ", num_gemms_, " groups in the archive, ",
                      "got one of shape ", all.sizes(), ". Build the module for these.");
    value.set_data(all.select(0, std::stoll(parameter.substr(digits))).clone());
  }
}

}  // namespace tandem
