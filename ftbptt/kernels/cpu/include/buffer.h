// Uninitialized memory, aligned for vectors and freed at the end of a scope.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <new>

namespace ftbptt {

template <typename T>
class Buffer {
 public:
  explicit Buffer(int64_t count)
      : data_(static_cast<T*>(std::aligned_alloc(64, (count * sizeof(T) / 64 + 1) * 64))) {
    if (data_ == nullptr) throw std::bad_alloc();
  }
  ~Buffer() { std::free(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  T* data() const { return data_; }

 private:
  T* data_;
};

}  // namespace ftbptt
