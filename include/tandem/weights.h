// Codes of weights for callers that multiply without a pipeline. The caller keeps the codes, which
// are recomputed where the weight has changed.
#pragma once

#include "kernel_ops/weights/weights.h"
#include "tandem/export.h"

namespace tandem {

using kernel_ops::CodesWere;
using kernel_ops::quantize_weight;
using kernel_ops::Said;
using kernel_ops::WeightCodes;

/// While an object lives, it declares a fact (Said) about all weights that pipelines of this thread
/// use.
class SayingOfWeights {
 public:
  explicit SayingOfWeights(Said said) { kernel_ops::say(said); }
  ~SayingOfWeights() { kernel_ops::say(before_); }
  SayingOfWeights(const SayingOfWeights&) = delete;
  SayingOfWeights& operator=(const SayingOfWeights&) = delete;

 private:
  Said before_ = kernel_ops::said_now();
};

/// Declares that no weight was written since its codes were computed (Said::unchanged), so that the
/// bytes of weights are not compared.
///
///   { tandem::WeightsUnchanged unchanged; loss = model->forward(x).sum(); }
class WeightsUnchanged : public SayingOfWeights {
 public:
  WeightsUnchanged() : SayingOfWeights(Said::unchanged) {}
};

/// Declares the micro-batch of a step, as `is_first_microbatch` of Python's modules does: the first
/// one has the codes of weights computed, and the others find every weight unchanged.
///
///   { tandem::Microbatch one(/*is_first=*/i == 0); loss = model->forward(x[i]).sum(); }
class Microbatch : public SayingOfWeights {
 public:
  explicit Microbatch(bool is_first)
      : SayingOfWeights(is_first ? Said::first_microbatch : Said::unchanged) {}
};

}  // namespace tandem
