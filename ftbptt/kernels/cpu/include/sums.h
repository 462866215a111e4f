#pragma once
#include <omp.h>

#include <algorithm>
#include <cstdint>

#include "buffer.h"

namespace ftbptt {

// Sums over all steps and rows. Each thread adds up its rows of one step first, then the steps of a
// block, and then the blocks, which loses fewer digits than one long running sum.
template <typename T>
class Sums {
 public:
  Sums(int64_t threads, int64_t count)
      : threads_(threads), count_(count), stride_((count + kLine - 1) / kLine * kLine), all_(3 * threads * stride_) {
    std::fill_n(all_.data(), 3 * threads * stride_, T(0));
  }

  T* of_step() const { return all_.data() + 3 * omp_get_thread_num() * stride_; }

  void add_step(int64_t step) const {
    T* const of_step = this->of_step();
    T* const of_block = of_step + stride_;
    move(of_step, of_block);
    if ((step + 1) % kBlock == 0) move(of_block, of_block + stride_);
  }

  template <typename S>
  void store(S* out) const {
    for (int64_t i = 0; i < count_; ++i) {
      T sum(0);
      for (int64_t thread = 0; thread < threads_; ++thread) {
        const T* const of_block = all_.data() + (3 * thread + 1) * stride_;
        sum += of_block[i] + of_block[stride_ + i];
      }
      out[i] = static_cast<S>(sum);
    }
  }

 private:
  static constexpr int64_t kLine = 64 / sizeof(T);
  static constexpr int64_t kBlock = 64;

  void move(T* from, T* to) const {
    for (int64_t i = 0; i < count_; ++i) {
      to[i] += from[i];
      from[i] = T(0);
    }
  }

  int64_t threads_, count_, stride_;
  Buffer<T> all_;
};

}  // namespace ftbptt
