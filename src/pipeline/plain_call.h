// A pipeline by itself, its directions apart: what functions call that know no module and no
// autograd.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "autograd/run.h"
#include "tandem/export.h"

namespace tandem {

/// All that forward, the setup of its context and backward depend on.
struct PlainArguments {
  /// The "ops" of a description.
  std::string ops;
  /// As JSON; "null": none.
  std::string recipe = "null";
  /// The main input, then extra inputs.
  std::vector<at::Tensor> inputs, params;
  /// Which gradients are asked for: of inputs, then of params.
  std::vector<bool> asked;
  /// Of the codes of weights, as an earlier call has returned them, none at first; those that do
  /// not fit are made anew. nullopt: weights are quantized in each call.
  std::optional<std::vector<at::Tensor>> workspaces = std::nullopt;
  /// As Arguments::state.
  std::vector<at::Tensor> state = {};
  /// What gradients are added to, as the ops' "buffers" number them.
  std::vector<at::Tensor> buffers = {};
  bool training = true;
};

/// An argument that backward reads, as forward has seen it: a number of its memory, which no other
/// memory gets, and its version; zeros of none.
struct ReadArgument {
  int64_t memory = 0, version = 0;
  bool operator==(const ReadArgument&) const = default;
};

/// What forward gives.
struct PlainResults {
  /// The main output, then extra outputs: fresh tensors.
  std::vector<at::Tensor> outputs;
  /// What backward reads of forward. Undefined in the place of what arguments are or share memory
  /// with: the setup finds it again.
  std::vector<at::Tensor> saved;
  /// In the place of each tensor of `saved`: what the argument there was, where it is one. Then
  /// for each of `workspaces`: what it was, where it holds codes.
  std::vector<ReadArgument> read;
  /// What it reads besides tensors: the place of a saved value, and sizes.
  std::vector<std::pair<size_t, std::vector<c10::SymInt>>> carried;
  /// Those of the arguments, or fresh ones.
  std::vector<at::Tensor> workspaces;
};

/// Runs forward of the pipeline's plan.
///
/// Throws: c10::ValueError where tensors do not fit the ops.
TANDEM_API PlainResults plain_forward(const PlainArguments& arguments);

/// What backward needs: the plan, and the tensors that it reads.
class TANDEM_API PlainContext {
 public:
  /// Of the outputs only shapes, dtypes and devices are kept: gradients have those.
  ///
  /// Throws: c10::ValueError where `results` are not those of forward of these arguments, or one
  ///         that backward reads, or a workspace, was written since.
  PlainContext(const PlainArguments& arguments, const PlainResults& results);
  ~PlainContext();
  PlainContext(PlainContext&&) noexcept;

  /// The gradients that are asked for, of inputs, then of params; undefined where there is none.
  /// `gradients`: of the outputs, undefined where nobody has one. Unless `retain`, what is kept
  /// goes with the last step that reads it.
  ///
  /// Throws: c10::ValueError where gradients are not as many as outputs, or have not their shapes
  ///         and devices, and where an argument that backward reads, or a workspace, was written
  ///         since the setup; c10::TypeError where they have not their dtypes; c10::Error the
  ///         second time, unless the first has retained.
  std::vector<at::Tensor> backward(at::TensorList gradients, bool retain);

  /// Bytes of what is kept, arguments aside.
  int64_t saved_bytes() const;
  /// What is kept, arguments aside.
  std::vector<at::Tensor> saved() const;

 private:
  struct Kept;
  std::unique_ptr<Kept> kept_;
};

}  // namespace tandem
