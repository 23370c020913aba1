#pragma once

#include <tandem/tandem.h>

#include <cstdint>
#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace tandem::cli {

/// An op as written on the command line: "linear:256:1024:nobias".
struct OpText {
  std::string kind;
  std::vector<std::string> arguments;

  /// Checked when the text was parsed.
  int64_t whole(size_t index) const;
  double real(size_t index, double otherwise) const;
  bool has(const std::string& word) const;
  /// The channel of make_extra_output and add_extra_input; "" is the caller.
  std::string channel() const;
};

/// What explain, verify and bench are asked for.
struct PipelineArguments {
  std::vector<std::string> words;
  std::string dtype = "float32";
  std::string recipe = "none";
  int64_t rows = 128;
  /// Of the input; 0: as the first op that knows says.
  int64_t width = 0;
  int64_t seed = 1;

  at::ScalarType scalar_type() const;
};

void add_pipeline_options(CLI::App& app, PipelineArguments& arguments);

/// Every op that can be written, with its arguments, for --help.
std::string op_list_help();

/// Ops and the shapes of what the caller passes in.
struct ParsedPipeline {
  std::vector<OpText> ops;
  std::vector<int64_t> input_sizes;
  std::vector<std::vector<int64_t>> extra_input_sizes;
  /// Of one forward: 2 * rows * in * out for each linear.
  double product_flops = 0;
};

/// Throws: UserError for an op or argument that is none (test test_pipeline_syntax_errors).
ParsedPipeline parse_pipeline(const PipelineArguments& arguments);

/// A pipeline with random data to run it on.
struct Workload {
  ParsedPipeline parsed;
  std::vector<Op> ops;
  Sequential pipeline;
  at::Tensor x;
  std::vector<at::Tensor> extra_inputs;
  std::optional<Recipe> recipe;

  std::vector<at::Tensor> forward();
};

Workload make_workload(const PipelineArguments& arguments);

/// Backward from a gradient of ones of every output.
void backward(const std::vector<at::Tensor>& outputs);

}  // namespace tandem::cli
