// A pipeline as functions with separate directions, for callers without modules and autograd.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "autograd/run.h"
#include "tandem/export.h"

namespace tandem {

/// Everything that forward, the setup of its context and backward depend on.
struct FunctionalArguments {
  /// The "ops" array of a description.
  std::string ops;
  /// The recipe as JSON; "null": none.
  std::string recipe = "null";
  /// The main input, then extra inputs.
  std::vector<at::Tensor> inputs, params;
  /// Which gradients are requested: of inputs, then of params.
  std::vector<bool> requested;
  /// Workspaces for the codes of weights, as an earlier call returned them; empty at first. Those
  /// that do not fit are replaced. nullopt: weights are quantized in each call.
  std::optional<std::vector<at::Tensor>> workspaces = std::nullopt;
  /// As Arguments::state.
  std::vector<at::Tensor> state = {};
  /// The tensors to which gradients are added, in the order of the ops' "buffers".
  std::vector<at::Tensor> buffers = {};
  bool training = true;
};

/// An argument that backward reads, as forward saw it: the number of its memory, which is never
/// reused, and its version; zeros if there is none.
using ReadArgument = std::pair<int64_t, int64_t>;

/// The results of forward.
struct FunctionalResults {
  /// The main output, then extra outputs: fresh tensors.
  std::vector<at::Tensor> outputs;
  /// What backward reads from forward. A tensor that is an argument or shares memory with one is
  /// undefined here: FunctionalContext finds it among the arguments.
  std::vector<at::Tensor> saved;
  /// read[i]: the argument that saved[i] is or shares memory with, or zeros. For each of
  /// `workspaces` one more element follows: zeros unless the tensor holds codes.
  std::vector<ReadArgument> read;
  /// Sizes that backward reads: the index of a saved value, and its sizes.
  std::vector<std::pair<size_t, std::vector<c10::SymInt>>> carried;
  /// The workspaces of the arguments, or new ones.
  std::vector<at::Tensor> workspaces;
};

/// Runs forward of the pipeline's plan.
///
/// Throws: c10::ValueError if tensors do not fit the ops.
TANDEM_API FunctionalResults functional_forward(const FunctionalArguments& arguments);

/// The context of backward: the plan, and the tensors that it reads.
class TANDEM_API FunctionalContext {
 public:
  /// Keeps only shapes, dtypes and devices of the outputs, which gradients must have.
  ///
  /// Throws: c10::ValueError if `results` are not those of forward with these arguments, or if an
  ///         argument that backward reads, or a workspace, was written since.
  FunctionalContext(const FunctionalArguments& arguments, const FunctionalResults& results);
  ~FunctionalContext();
  FunctionalContext(FunctionalContext&&) noexcept;

  /// The requested gradients of inputs, then of params; undefined if there is none. `gradients`: of
  /// the outputs, undefined if not known. Unless `retain`, each kept tensor is released with the
  /// last step that reads it.
  ///
  /// Throws: c10::ValueError if the number of gradients is not that of outputs, if shapes or
  ///         devices differ from the outputs', or if an argument that backward reads, or a
  ///         workspace, was written since the setup; c10::TypeError if dtypes differ; c10::Error in
  ///         a second call, unless the first one retained.
  std::vector<at::Tensor> backward(at::TensorList gradients, bool retain);

  /// Bytes of what is kept, without arguments.
  int64_t saved_bytes() const;
  /// What is kept, without arguments.
  std::vector<at::Tensor> saved() const;

 private:
  struct Kept;
  std::unique_ptr<Kept> kept_;
};

}  // namespace tandem
