// The state of delayed scaling: kernel ops that take scales from it and leave amaxes in it, and its
// update at the end of a step.
#pragma once

#include <functional>

#include "kernel_ops/framework/kernel_op.h"
#include "kernels/delayed.h"
#include "tandem/export.h"

namespace tandem {

/// How scales come from amaxes. Known by its address: equal ones are one object, which lives as
/// long as the process.
struct ScaleUpdate {
  kernels::DelayedScaling scaling;
  /// Instead of `scaling.algorithm`: a function that register_scale_update knows by this name.
  std::string function;
  /// The process group whose processes share their amaxes; empty: none do.
  std::string group;
  /// Canonical: "fp8_e4m3:margin=0:max:function=NAME:group=NAME".
  std::string text;
};

/// The update of a text. Throws c10::ValueError on what is none.
TANDEM_API const ScaleUpdate& scale_update(std::string_view text);
/// The update of these fields, whose `text` is not read.
TANDEM_API const ScaleUpdate& scale_update(ScaleUpdate update);

/// Writes scales [slots] from amax_history [length, slots], whose row 0 is the step's amax over all
/// processes, and moves the history on.
using ScaleUpdateFunction =
    std::function<void(const at::Tensor& amax_history, const at::Tensor& scale, double format_max)>;
/// Makes `function` known under `name` for the life of the process.
TANDEM_API void register_scale_update(std::string name, ScaleUpdateFunction function);

/// The state of one direction of a module, whose products have a slot each for what they quantize.
struct ScalingState {
  /// [slots], float32, ones at first.
  at::Tensor scale;
  /// [length, slots], float32, zeros at first (kernels/delayed.h).
  at::Tensor amax_history;
  /// [1], int64: the region whose amaxes row 0 holds and no update has used yet; 0: none.
  at::Tensor pending;
};
/// A tensor of a ScalingState.
struct ScalingStateTensor {
  const char* name;
  at::ScalarType dtype;
  at::Tensor ScalingState::*tensor;
};
/// All of them, in the order in which plans, calls and fronts list them.
inline constexpr std::array kScalingState{
    ScalingStateTensor{"scale", at::kFloat, &ScalingState::scale},
    ScalingStateTensor{"amax_history", at::kFloat, &ScalingState::amax_history},
    ScalingStateTensor{"pending", at::kLong, &ScalingState::pending}};

/// Where the state of a direction begins among what a call is given: its region's number comes
/// first, then forward and backward of each holder.
constexpr size_t scaling_state_place(size_t holder, bool is_backward) {
  return 1 + (2 * holder + (is_backward ? 1 : 0)) * kScalingState.size();
}
/// The state whose tensors `tensor_at` gives from `first` on.
template <typename TensorAt>
ScalingState scaling_state(TensorAt&& tensor_at, size_t first) {
  ScalingState state;
  for (const ScalingStateTensor& each : kScalingState) state.*each.tensor = tensor_at(first++);
  return state;
}

/// A history of another length: row 0 and the newest of the steps before stay, zeros come where
/// there is nothing older.
///
/// Shapes: amax_history [length, slots] -> [new length, slots].
TANDEM_API at::Tensor resized_history(const at::Tensor& amax_history, int64_t length);

/// A state that an update is due for.
struct PendingUpdate {
  ScalingState state;
  const ScaleUpdate* update = nullptr;
};

namespace kernel_ops {

/// Slots of a state: one, or `count` of them, each `stride` behind the one before.
struct SlotRange {
  int64_t first = 0, stride = 1;
  /// 0: one, whose number is a scalar.
  int64_t count = 0;
};

/// The scales of slots, a tensor of its own, in the region of this number. The first time that a
/// state is asked in another region than the one whose amaxes it holds, it is updated before: so a
/// step's amaxes make the scales of the next step whatever ends the step, and on whatever thread. A
/// region of 0 (none) or below (backward recomputes a forward of it) updates nothing.
///
/// On another device than the CPU the host waits for the state, which it decides about.
///
/// Shapes: scale [slots], amax_history [length, slots], pending [1], region [1], all contiguous;
///         result [], or [count], on the device of scale.
/// Throws: c10::ValueError on other shapes, dtypes or devices, and on a slot that the state does
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
  /// The state may lie on any device.
  static void cpu(const Args& args, std::span<Tensor> results);
  static Results<1> reference(const Args& args);
};
at::Tensor take_scale(const ScalingState& state, const at::Tensor& region, const SlotRange& slots,
                      const ScaleUpdate& update);

/// amax_history[0, slot] = max(amax_history[0, slot], amax) of each slot, NaN skipped; nothing
/// for a region of 0 or below. `counts`: an update is due once the region has ended.
///
/// Shapes, Throws: as take_scale; amax with an element for each slot.
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
  /// The tensors may lie on any device.
  static void cpu(const Args& args, std::span<Tensor> results);
  static Results<0> reference(const Args& args) { return made_by_cpu<RecordAmax>(args); }
};
void record_amax(const ScalingState& state, const at::Tensor& amax, const at::Tensor& region,
                 const SlotRange& slots, bool counts);

/// Throws c10::ValueError unless a state is as take_scale wants it, with room for slots [first,
/// first + count).
void check_state(const ScalingState& state, int64_t first, int64_t count);

/// Ends the step of these states: reduces their amaxes over the groups of those that have one, all
/// of a group in one collective, then updates each (kernels/delayed.h). The GIL must not be held.
///
/// Throws: c10::Error where the processes of a group come with different numbers of amaxes.
TANDEM_API void update_states(std::span<const PendingUpdate> states);

/// The number of the autocast region around the caller, [1], int64, on the device of `like`; where
/// there is none one of its own, as for a step of compiled code that has entered one.
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

/// Tells the number of the outermost autocast region around the caller; for whoever knows of more
/// than this thread's (weights.h).
TANDEM_API void set_region_reader(int64_t (*reader)());

}  // namespace kernel_ops
}  // namespace tandem
