#include "front/describe.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <optional>

#include "planner/description.h"

namespace tandem {

namespace {

std::vector<Binding> bindings(const std::vector<Channel>& channels) {
  std::vector<Binding> bound;
  for (const Channel& channel : channels) bound.push_back({channel.name, channel.output_to_caller});
  return bound;
}

}  // namespace

bool is_set(const OptionValues& options, std::string_view name) {
  return std::ranges::any_of(options, [&](const auto& option) {
    return option.first == name && option.second == OptionValue(true);
  });
}

size_t weights_of(const BasicOp& basic) {
  if (!basic.joins.empty()) return basic.joins[0];
  const OpDef& def = op_def(basic.name);
  if (def.params.empty() || !is_list(def.params[0].name)) return 1;
  return def.list_length(def.signature.parse(def.name, basic.options).get(), def.params[0].name);
}

DescribedOps describe(const std::vector<Op>& ops) {
  DescribedOps described;
  std::vector<OpEntry> entries;
  std::vector<size_t> absorbing;  // parameters with a main_grad
  uint32_t state_holders = 0;
  for (size_t i = 0; i < ops.size(); ++i) {
    SlotCount& slots = described.slots.emplace_back();
    std::vector<std::optional<size_t>> places(ops[i].parameters.size());
    for (const BasicOp& basic : ops[i].basic_ops) {
      const bool delays = is_set(basic.options, kDelayWgrad);
      OptionValues options = basic.options;
      if (delays)  // nothing is added to a main_grad before backward_dw()
        std::erase_if(options,
                      [](const auto& option) { return option.first == kAccumulateIntoMainGrad; });
      OpEntry& entry = entries.emplace_back(OpEntry{
          .op = basic.name,
          .options = options,
          .joins = basic.joins,
          .given = size_t{is_set(options, kWritesOutput)} + is_set(options, kWritesGradInput),
          .extra_inputs = bindings(basic.extra_inputs),
          .extra_outputs = bindings(basic.extra_outputs),
          .in_place = basic.in_place,
          .recompute = basic.recompute});
      const size_t delayed_weights = delays ? weights_of(basic) : 0;
      if (delays) {
        described.delayed.push_back({.of_groups = is_list(op_def(basic.name).params[0].name)});
        entry.deferred = described.delayed.back().left();
      }
      for (const size_t parameter : basic.parameters) {
        TORCH_CHECK_VALUE(parameter < places.size(), basic.name, ": expected the place of one of ",
                          places.size(), " parameters of ", ops[i].name, ", got ", parameter,
                          ". Number them from 0.");
        const ParameterSpec& spec = ops[i].parameters[parameter];
        if (!places[parameter]) {
          places[parameter] = described.parameters.size();
          described.parameters.push_back({i, parameter});
        }
        entry.params.push_back(*places[parameter]);
        if (entry.params.size() <= delayed_weights) {
          described.delayed.back().parameters.push_back(*places[parameter]);
          described.delayed.back().main_grads.push_back(spec.main_grad);
          continue;
        }
        if (!spec.main_grad.defined()) continue;
        entry.main_grads.push_back(*places[parameter]);
        if (std::ranges::find(absorbing, *places[parameter]) != absorbing.end()) continue;
        absorbing.push_back(*places[parameter]);
        described.main_grads.push_back(spec.main_grad);
      }
      if (const SlotCount own = quantize_slots(op_def(basic.name), entry.options);
          own.forward + own.backward != 0) {
        entry.state = StateSlots{state_holders, static_cast<uint32_t>(slots.forward),
                                 static_cast<uint32_t>(slots.backward)};
        slots = {slots.forward + own.forward, slots.backward + own.backward};
      }
    }
    state_holders += slots.forward + slots.backward != 0;
  }
  described.text = write_ops(entries);
  return described;
}

}  // namespace tandem
