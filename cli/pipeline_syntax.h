#pragma once

#include <tandem/tandem.h>

#include <cstdint>
#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace tandem::cli {

/// An op as it is written on the command line: "linear:256:1024:nobias".
struct OpText {
  std::string kind;
  std::vector<std::string> arguments;

  /// The argument at `index`, which was checked when the text was parsed.
  int64_t whole(size_t index) const;
  /// All arguments.
  std::vector<int64_t> wholes() const;
  double real(size_t index, double otherwise) const;
  bool has(const std::string& word) const;
  /// The channel of make_extra_output and add_extra_input; "": the caller.
  std::string channel() const;
};

/// The arguments of explain, verify and bench.
struct PipelineArguments {
  std::vector<std::string> words;
  std::string dtype = "float32";
  std::string recipe = "none";
  int64_t rows = 128;
  /// The width of the input; 0: the width that the first op demands.
  int64_t width = 0;
  int64_t seed = 1;

  at::ScalarType scalar_type() const;
};

void add_pipeline_options(CLI::App& app, PipelineArguments& arguments);

/// All ops that can be written, with their arguments, for --help.
std::string op_list_help();

/// The ops, and the shapes of the tensors that the caller passes.
struct ParsedPipeline {
  std::vector<OpText> ops;
  std::vector<int64_t> input_sizes;
  std::vector<std::vector<int64_t>> extra_input_sizes;
  /// Operations of the products in one forward: 2 * rows * in * out for each linear.
  double product_flops = 0;
};

/// Throws: UserError for an unknown op or a wrong argument (test test_pipeline_syntax_errors).
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

/// Runs backward with a gradient of ones for every output.
void backward(const std::vector<at::Tensor>& outputs);

}  // namespace tandem::cli
