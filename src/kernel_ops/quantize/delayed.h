// The state of delayed scaling: kernel ops that read scales from it and record amaxes in it, and
// its update at the end of a step.
#pragma once

#include <functional>

#include "kernel_ops/framework/kernel_op.h"
#include "kernels/delayed.h"
#include "tandem/export.h"

namespace tandem {

/// How scales follow from amaxes. Identified by its address: equal updates are one object, which
/// lives as long as the process.
struct ScaleUpdate {
  kernels::DelayedScaling scaling;
  /// The name of a function from register_scale_update, which replaces `scaling.algorithm`; or
  /// empty.
  std::string function;
  /// The process group that reduces its amaxes; empty: none.
  std::string group;
  /// Canonical: "fp8_e4m3:margin=0:max:function=NAME:group=NAME".
  std::string text;
};

/// The update of a text. Throws c10::ValueError if the text is not valid.
TANDEM_API const ScaleUpdate& scale_update(std::string_view text);
/// The update with these fields; its `text` is not read.
TANDEM_API const ScaleUpdate& scale_update(ScaleUpdate update);

/// Writes scales [slots] from amax_history [length, slots], whose row 0 holds the step's amaxes,
/// reduced over all processes, and advances the history.
using ScaleUpdateFunction =
    std::function<void(const at::Tensor& amax_history, const at::Tensor& scale, double format_max)>;
/// Registers `function` under `name` for the life of the process.
TANDEM_API void register_scale_update(std::string name, ScaleUpdateFunction function);

/// The state of one direction of a module. Each tensor that its products quantize has a slot.
struct ScalingState {
  /// [slots], float32, initially ones.
  at::Tensor scale;
  /// [length, slots], float32, initially zeros (kernels/delayed.h).
  at::Tensor amax_history;
  /// [1], int64: the region whose amaxes row 0 holds if no update has used them yet; else 0.
  at::Tensor pending;
};
/// A member of a ScalingState.
struct ScalingStateTensor {
  const char* name;
  at::ScalarType dtype;
  at::Tensor ScalingState::*tensor;
};
/// All members, in the order in which plans, calls and fronts list them.
inline constexpr std::array kScalingState{
    ScalingStateTensor{"scale", at::kFloat, &ScalingState::scale},
    ScalingStateTensor{"amax_history", at::kFloat, &ScalingState::amax_history},
    ScalingStateTensor{"pending", at::kLong, &ScalingState::pending}};

/// The index of a direction's state among the tensors that a call passes: first the region's
/// number, then forward and backward of each holder.
constexpr size_t scaling_state_place(size_t holder, bool is_backward) {
  return 1 + (2 * holder + (is_backward ? 1 : 0)) * kScalingState.size();
}
/// The state with the tensors that `tensor_at` returns for indices `first` and up.
template <typename TensorAt>
ScalingState scaling_state(TensorAt&& tensor_at, size_t first) {
  ScalingState state;
  for (const ScalingStateTensor& each : kScalingState) state.*each.tensor = tensor_at(first++);
  return state;
}

/// A history with another length. Row 0 and the newest steps stay; rows without an older step are
/// zero.
///
/// Shapes: amax_history [length, slots] -> [new length, slots].
TANDEM_API at::Tensor resized_history(const at::Tensor& amax_history, int64_t length);

/// A state whose update is due.
struct PendingUpdate {
  ScalingState state;
  const ScaleUpdate* update = nullptr;
};

namespace kernel_ops {

/// Slots of a state: one, or `count` slots, each `stride` after the one before.
struct SlotRange {
  int64_t first = 0, stride = 1;
  /// 0: one slot, whose scale is a scalar tensor.
  int64_t count = 0;
};

/// The scales of slots, as a new tensor, in region `region`. If the state holds amaxes of another
/// region, it is updated first. So the amaxes of a step determine the scales of the next step,
/// whatever ends the step, on whatever thread. A region of 0 (none) or below (backward recomputes a
/// forward) updates nothing.
///
/// If the state is not on the CPU, the host waits for it, because the host decides about updates.
///
/// Shapes: scale [slots], amax_history [length, slots], pending [1], region [1], all contiguous;
///         result [], or [count], on the device of scale.
/// Throws: c10::ValueError for other shapes, dtypes or devices, and for a slot that the state does
///         not have.
struct TakeScale {
  static constexpr const char* kName = "take_scale_";
  static constexpr std::array kResults{"scales"};
  static constexpr bool kOnManyDevices = true, kIsUnseenByAutograd = true;
  struct Args {
    Tensor &scale, &amax_history, &pending;
    const Tensor& region;
    int64_t slot;
    std::string_view update;
    int64_t stride, count;
    TANDEM_ARGUMENTS(scale, amax_history, pending, region, slot, update, stride, count)
  };
  static Specs<1> shapes(const Args& args);
  /// Accepts a state on any device.
  static void cpu(const Args& args, std::span<Tensor> results);
  static Results<1> reference(const Args& args);
};
at::Tensor take_scale(const ScalingState& state, const at::Tensor& region, const SlotRange& slots,
                      const ScaleUpdate& update);

/// amax_history[0, slot] = max(amax_history[0, slot], amax) for each slot; a NaN is skipped. Does
/// nothing for a region of 0 or below. `counts`: an update becomes due once the region has ended.
///
/// Shapes, Throws: as take_scale; amax has one element per slot.
struct RecordAmax {
  static constexpr const char* kName = "record_amax_";
  static constexpr std::array<const char*, 0> kResults{};
  static constexpr bool kOnManyDevices = true, kIsUnseenByAutograd = true;
  struct Args {
    Tensor &amax_history, &pending;
    const Tensor &amax, &region;
    int64_t slot;
    bool counts;
    int64_t stride;
    TANDEM_ARGUMENTS(amax_history, pending, amax, region, slot, counts, stride)
  };
  static Specs<0> shapes(const Args& args);
  /// Accepts tensors on any device.
  static void cpu(const Args& args, std::span<Tensor> results);
  static Results<0> reference(const Args& args) { return made_by_cpu<RecordAmax>(args); }
};
void record_amax(const ScalingState& state, const at::Tensor& amax, const at::Tensor& region,
                 const SlotRange& slots, bool counts);

/// Throws c10::ValueError unless the state is as take_scale demands and has slots [first, first +
/// count).
void check_state(const ScalingState& state, int64_t first, int64_t count);

/// Ends the step of these states: reduces amaxes over the states' groups, in one collective per
/// group, then updates each state (kernels/delayed.h). The caller must not hold the GIL.
///
/// Throws: c10::Error if the processes of a group have different numbers of amaxes.
TANDEM_API void update_states(std::span<const PendingUpdate> states);

/// The number of the autocast region around the caller, [1], int64, on the device of `like`.
/// Outside of any region it is a new number: compiled code whose region was entered while tracing
/// gets one per step.
struct RegionNumber {
  static constexpr const char* kName = "region_number";
  static constexpr std::array kResults{"number"};
  static constexpr bool kIsUnseenByAutograd = true;
  struct Args {
    const Tensor& like;
    TANDEM_ARGUMENTS(like)
  };
  static Specs<1> shapes(const Args& args);
  static void cpu(const Args& args, std::span<Tensor> results);
  static Results<1> reference(const Args& args) { return made_by_cpu<RegionNumber>(args); }
};

/// Sets the function that returns the number of the outermost autocast region around the caller. It
/// may know of more than this thread's region (weights.h).
TANDEM_API void set_region_reader(int64_t (*reader)());

}  // namespace kernel_ops
}  // namespace tandem
