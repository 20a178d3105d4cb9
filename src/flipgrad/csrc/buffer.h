// Uninitialised memory aligned to a cache line.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <new>

namespace flipgrad {

template <class T>
class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { std::free(data_); }

  // Once per buffer; throws std::bad_alloc.
  void allocate(int64_t count) {
    const std::size_t bytes = (static_cast<std::size_t>(count) * sizeof(T) + kLine - 1) / kLine * kLine;
    data_ = static_cast<T*>(std::aligned_alloc(kLine, bytes == 0 ? kLine : bytes));
    if (data_ == nullptr) throw std::bad_alloc();
  }

  T* data() { return data_; }
  const T* data() const { return data_; }

 private:
  static constexpr std::size_t kLine = 64;
  T* data_ = nullptr;
};

}  // namespace flipgrad
