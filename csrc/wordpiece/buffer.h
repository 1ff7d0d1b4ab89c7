// A growing array of plain values whose new room is not initialised: what tokens are written to.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <new>
#include <type_traits>
#include <utility>

namespace bert_fast::wordpiece {

template <typename T>
class Buffer {
  static_assert(std::is_trivially_copyable_v<T>, "values are moved by memcpy");

 public:
  Buffer() = default;
  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    Buffer moved(std::move(other));
    swap(moved);
    return *this;
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { std::free(data_); }

  T* data() { return data_; }
  const T* data() const { return data_; }
  std::size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  std::size_t capacity() const { return capacity_; }
  T* begin() { return data_; }
  T* end() { return data_ + size_; }
  const T* begin() const { return data_; }
  const T* end() const { return data_ + size_; }
  T& operator[](std::size_t i) { return data_[i]; }
  const T& operator[](std::size_t i) const { return data_[i]; }
  T& back() { return data_[size_ - 1]; }
  const T& back() const { return data_[size_ - 1]; }

  void clear() { size_ = 0; }
  // Room for `capacity` values in all; nothing is written. Throws std::bad_alloc.
  void reserve(std::size_t capacity) {
    if (capacity > capacity_) reallocate(capacity);
  }
  // The place behind the last value, with room for `count` more; commit() counts what was written there.
  T* room(std::size_t count) {
    if (capacity_ - size_ < count) reallocate(std::max(size_ + count, capacity_ + capacity_ / 2));
    return data_ + size_;
  }
  void commit(std::size_t count) { size_ += count; }
  void truncate(std::size_t size) { size_ = std::min(size_, size); }
  // Room that is not used goes back to the system, where there is enough of it to matter.
  void shrink() {
    if (capacity_ - size_ > size_ / 8 + 64) reallocate(std::max<std::size_t>(size_, 1));
  }

  void push_back(T value) {
    *room(1) = value;
    ++size_;
  }
  void append(const T* values, std::size_t count) {
    if (count != 0) std::memcpy(room(count), values, count * sizeof(T));
    size_ += count;
  }
  void append(std::size_t count, T value) {
    std::fill_n(room(count), count, value);
    size_ += count;
  }

  // Equal contents, of any array-like type.
  template <typename Values>
  bool operator==(const Values& other) const {
    return std::equal(begin(), end(), std::begin(other), std::end(other));
  }

  // Hands the memory over; the receiver frees it with std::free.
  T* release() {
    size_ = capacity_ = 0;
    return std::exchange(data_, nullptr);
  }
  void swap(Buffer& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    std::swap(capacity_, other.capacity_);
  }

 private:
  void reallocate(std::size_t capacity) {
    if (capacity > static_cast<std::size_t>(-1) / 2 / sizeof(T)) throw std::bad_alloc();
    void* moved = std::realloc(data_, capacity * sizeof(T));
    if (moved == nullptr) throw std::bad_alloc();
    data_ = static_cast<T*>(moved);
    capacity_ = capacity;
  }

  T* data_ = nullptr;
  std::size_t size_ = 0;
  std::size_t capacity_ = 0;
};

}  // namespace bert_fast::wordpiece
