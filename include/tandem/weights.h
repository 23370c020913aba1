// Codes of weights for those who call products without a pipeline: kept by the caller, made again
// where the weight has changed.
#pragma once

#include "kernel_ops/weights/weights.h"
#include "tandem/export.h"

namespace tandem {

using kernel_ops::CodesWere;
using kernel_ops::quantize_weight;
using kernel_ops::Said;
using kernel_ops::WeightCodes;

/// While one of these lives, this thread says something of the weights that its pipelines use.
class SayingOfWeights {
 public:
  explicit SayingOfWeights(Said said) { kernel_ops::say(said); }
  ~SayingOfWeights() { kernel_ops::say(before_); }
  SayingOfWeights(const SayingOfWeights&) = delete;
  SayingOfWeights& operator=(const SayingOfWeights&) = delete;

 private:
  Said before_ = kernel_ops::said_now();
};

/// That nobody has written them since their codes were made (Said::unchanged): their bytes are not
/// compared.
///
///   { tandem::WeightsUnchanged unchanged; loss = model->forward(x).sum(); }
class WeightsUnchanged : public SayingOfWeights {
 public:
  WeightsUnchanged() : SayingOfWeights(Said::unchanged) {}
};

/// That their codes are to be made, in the first micro-batch of a step; in the others, that nobody
/// has written them since: `is_first_microbatch` of Python's modules.
///
///   { tandem::Microbatch one(/*is_first=*/i == 0); loss = model->forward(x[i]).sum(); }
class Microbatch : public SayingOfWeights {
 public:
  explicit Microbatch(bool is_first)
      : SayingOfWeights(is_first ? Said::first_microbatch : Said::unchanged) {}
};

}  // namespace tandem
