// Scratch memory of one thread during a run.
#pragma once
#include "attention.h"
#include "gemm.h"

namespace CL_NS {

template <typename T>
struct Scratch {
  GemmScratch<T> gemm;
  AttentionScratch<T> attention;
};

}  // namespace CL_NS
